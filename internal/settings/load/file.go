package load

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/dynctl/dynctl/internal/settings"
)

// maxFileBytes bounds a configuration file.
const maxFileBytes = 4 << 20

// file is a configuration file in YAML (JSON is YAML). Its values are what their
// texts say to a flag or a variable: YAML's own reading would make 8 of 010 and 16
// of a name such as 0x10.
type file struct {
	path string
	// lines are those of the known keys, and of the members of lists
	// ("worker[1]").
	lines    map[string]int
	problems []error
}

func (f *file) bad(n *yaml.Node, format string, a ...any) {
	f.problems = append(f.problems, fmt.Errorf("%s:%d: %s", f.path, n.Line, fmt.Sprintf(format, a...)))
}

// read gives the values of the file, by section and name. What is wrong is reported and
// left out, so that the rest can be checked, too.
func (f *file) read() map[string]any {
	fail := func(format string, a ...any) map[string]any {
		f.problems = append(f.problems, fmt.Errorf(format, a...))
		return nil
	}
	info, err := os.Stat(f.path)
	if err != nil {
		return fail("config file %s: %w", f.path, errors.Unwrap(err))
	}
	if info.Size() > maxFileBytes {
		return fail("config file %s: %d bytes, more than %d", f.path, info.Size(), maxFileBytes)
	}
	raw, err := os.ReadFile(f.path)
	if err != nil {
		return fail("config file: %w", err)
	}
	var top *yaml.Node
	for dec := yaml.NewDecoder(bytes.NewReader(raw)); ; {
		var doc yaml.Node
		if err := dec.Decode(&doc); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return fail("%s: %w", f.path, err)
		}
		switch n := doc.Content[0]; {
		case isNull(n): // all of it is commented out
		case top == nil:
			top = n
		default:
			f.bad(n, "a second document begins here; a configuration file holds one")
		}
	}
	if top == nil {
		return nil
	}
	if top.Kind != yaml.MappingNode {
		f.bad(top, "the file must hold keys and values, such as \"listen: 127.0.0.1:8000\"")
		return nil
	}
	return f.section("", top)
}

// section reads the keys that begin with a prefix: "", or "routing.".
func (f *file) section(prefix string, n *yaml.Node) map[string]any {
	var known []string
	for _, key := range settings.Keys() {
		if rest, ok := strings.CutPrefix(key, prefix); ok {
			name, _, _ := strings.Cut(rest, ".")
			known = append(known, name)
		}
	}
	known = slices.Compact(known)
	values := map[string]any{}
	f.members(prefix, n, known, func(name string, k, v *yaml.Node) {
		key := prefix + name
		r := settings.Lookup(key)
		if r == nil {
			if isNull(v) {
				return // a section whose keys are all commented out
			}
			if v.Kind != yaml.MappingNode {
				f.bad(v, "%s must hold keys and values", key)
				return
			}
			values[name] = f.section(key+".", v)
			return
		}
		if value := f.value(r, k, v); value != nil {
			values[name] = value
		}
	})
	return values
}

// members goes through a mapping; keys that are not known or stand twice are reported.
func (f *file) members(prefix string, n *yaml.Node, known []string, use func(name string, k, v *yaml.Node)) {
	seen := map[string]bool{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		k := n.Content[i]
		switch name := k.Value; {
		case !slices.Contains(known, name):
			f.bad(k, "unknown key %q%s", prefix+name, settings.Suggest(name, known))
		case seen[name]:
			f.bad(k, "key %q appears twice", prefix+name)
		default:
			seen[name] = true
			use(name, k, n.Content[i+1])
		}
	}
}

// value reads the value of a setting; nil when there is none, or it is wrong.
func (f *file) value(r *settings.Row, k, n *yaml.Node) any {
	f.lines[r.Key] = k.Line
	switch r.At(&settings.Config{}).(type) {
	case *[]string:
		return list(f, r.Key, n, func(at string, item *yaml.Node) (string, bool) { return f.text(at, "a text", item) })
	case *[]settings.Alias:
		return list(f, r.Key, n, f.alias)
	}
	text, ok := f.text(r.Key, r.Wanted(), n)
	if !ok {
		return nil
	}
	value, err := r.Parse(text)
	if err != nil {
		f.bad(n, "%s: %v", r.Key, err)
		return nil
	}
	return value
}

// list reads the members of a list and notes their lines; nil when it is none.
func list[T any](f *file, key string, n *yaml.Node, read func(at string, n *yaml.Node) (T, bool)) any {
	if isNull(n) {
		delete(f.lines, key)
		return nil // all members are commented out
	}
	if n.Kind != yaml.SequenceNode {
		f.bad(n, "%s must be a list", key)
		return nil
	}
	items := []T{}
	for _, item := range n.Content {
		at := fmt.Sprintf("%s[%d]", key, len(items))
		if v, ok := read(at, item); ok {
			f.lines[at] = item.Line
			items = append(items, v)
		}
	}
	return items
}

func (f *file) alias(at string, n *yaml.Node) (a settings.Alias, ok bool) {
	if n.Kind != yaml.MappingNode {
		f.bad(n, "%s must hold keys and values", at)
		return a, false
	}
	fields := map[string]*string{"name": &a.Name, "model": &a.Model}
	f.members(at+".", n, []string{"name", "model"}, func(name string, _, v *yaml.Node) {
		if text, ok := f.text(at+"."+name, "a text", v); ok {
			*fields[name] = text
		}
	})
	return a, true
}

// text is that of a scalar.
func (f *file) text(at, wanted string, n *yaml.Node) (string, bool) {
	if n.Kind != yaml.ScalarNode || isNull(n) {
		f.bad(n, "%s: want %s", at, wanted)
		return "", false
	}
	return n.Value, true
}

func isNull(n *yaml.Node) bool { return n.ShortTag() == "!!null" }
