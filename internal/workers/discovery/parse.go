package discovery

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/dynctl/dynctl/internal/workers"
)

const (
	maxFileBytes = 16 << 20
	maxWorkers   = 100_000
	maxDepth     = 32
	maxProblems  = 100
)

var (
	topKeys     = []string{"version", "workers"}
	lmcacheKeys = []string{"alloc_ports", "host", "init_ports"}
)

// Problem is one mistake in a file of workers.
type Problem struct {
	File string
	Line int // 1-based; 0 when the whole file is meant
	Text string
}

// Error is "file:line: text".
func (p *Problem) Error() string {
	if p.Line == 0 {
		return fmt.Sprintf("%s: %s", p.File, p.Text)
	}
	return fmt.Sprintf("%s:%d: %s", p.File, p.Line, p.Text)
}

// Parse reads a file of workers, in YAML or JSON. The error joins one *Problem
// for each mistake; file is its name in messages and in Spec.Origin.
func Parse(file string, content []byte) ([]workers.Spec, error) {
	p := &parser{file: file}
	specs := p.parse(content)
	if len(p.problems) > 0 {
		slices.SortStableFunc(p.problems, func(a, b *Problem) int { return a.Line - b.Line })
		errs := make([]error, 0, len(p.problems)+1)
		for i, problem := range p.problems {
			if i == maxProblems {
				errs = append(errs, &Problem{File: file, Text: fmt.Sprintf("and %d more problems", len(p.problems)-i)})
				break
			}
			errs = append(errs, problem)
		}
		return nil, errors.Join(errs...)
	}
	return specs, nil
}

type parser struct {
	file     string
	problems []*Problem
}

func (p *parser) complain(line int, format string, args ...any) {
	p.problems = append(p.problems, &Problem{p.file, line, fmt.Sprintf(format, args...)})
}

func (p *parser) parse(content []byte) []workers.Spec {
	if len(content) > maxFileBytes {
		p.complain(0, "%d bytes (at most %d)", len(content), maxFileBytes)
		return nil
	}
	trimmed := bytes.TrimSpace(bytes.TrimPrefix(content, []byte("\xef\xbb\xbf")))
	if len(trimmed) == 0 {
		p.complain(0, `the file is empty (write "workers: []" for no workers)`)
		return nil
	}
	var root *yaml.Node
	var err error
	if trimmed[0] == '{' {
		root, err = jsonNode(content)
	} else {
		root, err = yamlNode(content)
	}
	if err != nil {
		line, text := locate(err, content)
		p.complain(line, "%s", text)
		return nil
	}
	if root.Kind != yaml.MappingNode {
		p.complain(root.Line, `%s where a mapping with the key "workers" must be`, kindName(root))
		return nil
	}
	var list *yaml.Node
	p.eachKey(root, func(key string, line int, v *yaml.Node) {
		switch key {
		case "workers":
			list = v
		case "version":
			if v.Value != "1" {
				p.complain(v.Line, "version %q is not known (1 is)", v.Value)
			}
		default:
			p.complain(line, "%s", workers.UnknownKeyError(key, topKeys))
		}
	})
	switch {
	case list == nil:
		if len(p.problems) == 0 {
			p.complain(root.Line, `no key "workers" (write "workers: []" for no workers)`)
		}
		return nil
	case list.Kind != yaml.SequenceNode:
		p.complain(list.Line, "workers: %s where a list must be", kindName(list))
		return nil
	case len(list.Content) > maxWorkers:
		p.complain(list.Line, "%d workers (at most %d)", len(list.Content), maxWorkers)
		return nil
	}
	specs := make([]workers.Spec, 0, len(list.Content))
	names, urls := map[string]int{}, map[string]int{}
	for _, item := range list.Content {
		before := len(p.problems)
		s, line := p.worker(resolve(item))
		if len(p.problems) > before {
			continue
		}
		if first, dup := names[s.Name]; dup {
			p.complain(line, "worker %s is already in line %d", s.Name, first)
		} else if first, dup := urls[s.URL.String()]; dup {
			p.complain(line, "worker %s has the URL of the worker in line %d (%s)", s.Name, first, s.URL)
		} else {
			names[s.Name], urls[s.URL.String()] = line, line
		}
		specs = append(specs, s)
	}
	return specs
}

// worker reads one entry: a mapping, or a string in the form of the flags.
func (p *parser) worker(n *yaml.Node) (workers.Spec, int) {
	line := n.Line
	origin := fmt.Sprintf("%s:%d", p.file, line)
	if n.Kind == yaml.ScalarNode && n.Tag == "!!str" {
		s, err := workers.ParseSpec("", n.Value)
		if err != nil {
			p.complain(line, "%s", err)
		}
		s.Origin = origin
		return s, line
	}
	var s workers.Spec
	if n.Kind != yaml.MappingNode {
		p.complain(line, "%s where a worker must be", kindName(n))
		return s, line
	}
	s.Origin = origin
	before := len(p.problems)
	p.eachKey(n, func(key string, keyLine int, v *yaml.Node) {
		if err := p.field(&s, key, v); err != nil {
			at := cmp.Or(v.Line, keyLine)
			p.complain(at, "%s", err)
		}
	})
	if len(p.problems) > before {
		return s, line
	}
	if err := s.Validate(); err != nil {
		p.complain(line, "%s", err)
	}
	return s, line
}

func (p *parser) field(s *workers.Spec, key string, v *yaml.Node) error {
	switch {
	case key == "url":
		text, err := scalar(key, v)
		if err != nil {
			return err
		}
		s.URL, err = workers.ParseURL(text)
		return err
	case key == "labels" && v.Kind == yaml.MappingNode:
		var errs []error
		p.eachKey(v, func(k string, _ int, item *yaml.Node) {
			text, err := scalar("labels."+k, item)
			if err == nil {
				err = s.SetLabel(k, text)
			}
			errs = append(errs, err)
		})
		return errors.Join(errs...)
	case key == "lmcache" && v.Kind == yaml.MappingNode:
		return p.lmcache(s, v)
	case v.Kind == yaml.SequenceNode && (key == "events" || key == "replay" || key == "model" || key == "models"):
		if key == "models" {
			key = "model"
		}
		for _, item := range v.Content {
			text, err := scalar(key, resolve(item))
			if err != nil {
				return err
			}
			if err := s.Set(key, text); err != nil {
				return err
			}
		}
		return nil
	}
	if key == "models" {
		key = "model"
	}
	keys := append(workers.SpecKeys(), "models", "url")
	if !slices.Contains(keys, key) {
		return workers.UnknownKeyError(key, keys)
	}
	text, err := scalar(key, v)
	if err != nil {
		return err
	}
	return s.Set(key, text)
}

// lmcache reads {host, init_ports, alloc_ports} and hands it on in the form of
// the flags, so that one place checks it.
func (p *parser) lmcache(s *workers.Spec, v *yaml.Node) error {
	parts := map[string]string{}
	var errs []error
	p.eachKey(v, func(k string, _ int, item *yaml.Node) {
		if !slices.Contains(lmcacheKeys, k) {
			errs = append(errs, fmt.Errorf("lmcache: %w", workers.UnknownKeyError(k, lmcacheKeys)))
			return
		}
		items := []*yaml.Node{item}
		if item.Kind == yaml.SequenceNode {
			items = item.Content
		}
		var words []string
		for _, it := range items {
			text, err := scalar("lmcache."+k, resolve(it))
			errs = append(errs, err)
			words = append(words, text)
		}
		parts[k] = strings.Join(words, ";")
	})
	if err := errors.Join(errs...); err != nil {
		return err
	}
	return s.Set("lmcache", parts["host"]+"/"+parts["init_ports"]+"/"+parts["alloc_ports"])
}

// eachKey calls f for the pairs of a mapping and complains of keys that come
// twice or are no words.
func (p *parser) eachKey(n *yaml.Node, f func(key string, line int, v *yaml.Node)) {
	seen := map[string]int{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		k := resolve(n.Content[i])
		switch first, dup := seen[k.Value]; {
		case k.Kind != yaml.ScalarNode:
			p.complain(k.Line, "%s where a key must be", kindName(k))
		case k.Tag == "!!merge":
			p.complain(k.Line, "merge keys (<<) are not supported")
		case dup:
			p.complain(k.Line, "key %q is already in line %d", k.Value, first)
		default:
			seen[k.Value] = k.Line
			f(k.Value, k.Line, resolve(n.Content[i+1]))
		}
	}
}

// resolve follows an alias to what it stands for. An alias cannot stand for
// another one.
func resolve(n *yaml.Node) *yaml.Node {
	if n.Kind == yaml.AliasNode && n.Alias != nil {
		return n.Alias
	}
	return n
}

func scalar(key string, n *yaml.Node) (string, error) {
	if n.Kind != yaml.ScalarNode {
		return "", fmt.Errorf("%s: %s where a single value must be", key, kindName(n))
	}
	if n.Tag == "!!null" {
		return "", fmt.Errorf("%s has no value", key)
	}
	return n.Value, nil
}

func kindName(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		return "a mapping"
	case yaml.SequenceNode:
		return "a list"
	case yaml.ScalarNode:
		if n.Tag == "!!null" {
			return "nothing"
		}
		return fmt.Sprintf("%q", n.Value)
	default:
		return "something else"
	}
}

func yamlNode(content []byte) (*yaml.Node, error) {
	dec := yaml.NewDecoder(bytes.NewReader(content))
	var doc, more yaml.Node
	if err := dec.Decode(&doc); err != nil {
		return nil, err
	}
	if err := dec.Decode(&more); !errors.Is(err, io.EOF) {
		if err != nil {
			return nil, err
		}
		return nil, &lineError{more.Line, "a second document (one file holds one list)"}
	}
	if doc.Kind != yaml.DocumentNode || len(doc.Content) != 1 {
		return nil, errors.New("no document")
	}
	return resolve(doc.Content[0]), nil
}

type lineError struct {
	line int
	text string
}

func (e *lineError) Error() string { return fmt.Sprintf("line %d: %s", e.line, e.text) }

// locate finds the line that an error of a YAML or JSON reader speaks of.
func locate(err error, content []byte) (int, string) {
	if e, ok := errors.AsType[*lineError](err); ok {
		return e.line, e.text
	}
	text := strings.TrimPrefix(err.Error(), "yaml: ")
	if rest, ok := strings.CutPrefix(text, "line "); ok {
		if num, msg, ok := strings.Cut(rest, ": "); ok {
			if line, convErr := strconv.Atoi(num); convErr == nil {
				return line, msg
			}
		}
	}
	return min(1, len(content)), strings.ReplaceAll(text, "\n", "; ")
}

// jsonNode reads JSON into the same tree as YAML. YAML's reader takes most of
// JSON, but neither tabs nor every escape.
func jsonNode(content []byte) (*yaml.Node, error) {
	content = bytes.TrimPrefix(content, []byte("\xef\xbb\xbf"))
	dec := json.NewDecoder(bytes.NewReader(content))
	dec.UseNumber()
	j := &jsonReader{dec: dec, content: content, line: 1}
	n, err := j.value(0)
	if err == nil {
		if _, extra := dec.Token(); !errors.Is(extra, io.EOF) {
			err = errors.New("something follows the end of the object")
		}
	}
	if err != nil {
		offset := dec.InputOffset()
		if e, ok := errors.AsType[*json.SyntaxError](err); ok {
			offset = e.Offset
		}
		return nil, &lineError{j.lineAt(offset), err.Error()}
	}
	return n, nil
}

type jsonReader struct {
	dec     *json.Decoder
	content []byte
	line    int
	upTo    int
}

// lineAt counts lines on from the last call; offsets only grow.
func (j *jsonReader) lineAt(offset int64) int {
	end := min(int(offset), len(j.content))
	if end > j.upTo {
		j.line += bytes.Count(j.content[j.upTo:end], []byte("\n"))
		j.upTo = end
	}
	return j.line
}

func (j *jsonReader) value(depth int) (*yaml.Node, error) {
	if depth > maxDepth {
		return nil, fmt.Errorf("more than %d levels deep", maxDepth)
	}
	tok, err := j.dec.Token()
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		return nil, err
	}
	n := &yaml.Node{Kind: yaml.ScalarNode, Line: j.lineAt(j.dec.InputOffset())}
	switch v := tok.(type) {
	case json.Delim:
		n.Kind = yaml.SequenceNode
		if v == '{' {
			n.Kind = yaml.MappingNode
		}
		for j.dec.More() {
			item, err := j.value(depth + 1)
			if err != nil {
				return nil, err
			}
			n.Content = append(n.Content, item)
		}
		if _, err := j.dec.Token(); err != nil {
			if errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF
			}
			return nil, err
		}
	case string:
		n.Tag, n.Value = "!!str", v
	case json.Number:
		n.Tag, n.Value = "!!int", v.String()
	case bool:
		n.Tag, n.Value = "!!bool", strconv.FormatBool(v)
	case nil:
		n.Tag = "!!null"
	}
	return n, nil
}
