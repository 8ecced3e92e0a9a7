package main

import (
	"errors"
	"fmt"
	"os"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"github.com/spf13/viper"
	"go.yaml.in/yaml/v3"

	"github.com/dynctl/dynctl/internal/router"
	"github.com/dynctl/dynctl/internal/workers"
)

// maxConfigBytes bounds a configuration file.
const maxConfigBytes = 4 << 20

// loadedConfig is a validated configuration and where each value came from.
type loadedConfig struct {
	config router.Config
	// origin of each key: "default", "file dynctl.yaml:12", "env DYNCTL_…" or
	// "flag --…".
	origin map[string]string
	path   string
}

// envName is the environment variable of a key.
func envName(key string) string {
	return "DYNCTL_" + strings.ToUpper(strings.ReplaceAll(key, ".", "_"))
}

// configKeys lists every key of the file, dotted, in the order of the struct.
func configKeys() []string {
	var keys []string
	var walk func(t reflect.Type, prefix string)
	walk = func(t reflect.Type, prefix string) {
		for _, f := range reflect.VisibleFields(t) {
			key := prefix + f.Tag.Get("mapstructure")
			if f.Type.Kind() == reflect.Struct {
				walk(f.Type, key+".")
			} else {
				keys = append(keys, key)
			}
		}
	}
	walk(reflect.TypeFor[router.Config](), "")
	return keys
}

// loadConfig merges defaults, file, environment and flags, in rising order of
// precedence, and validates the result. All problems are reported at once.
func loadConfig(path string, flags *pflag.FlagSet) (*loadedConfig, error) {
	l := &loadedConfig{config: router.DefaultConfig(), origin: map[string]string{}, path: path}
	keys := configKeys()
	for _, k := range keys {
		l.origin[k] = "default"
	}
	var problems []error
	v := viper.New()
	for _, k := range keys {
		v.SetDefault(k, field(&l.config, k).Interface())
	}
	lines := map[string]int{}
	if path != "" {
		tree, errs := readConfigFile(path, lines)
		problems = append(problems, errs...)
		if tree != nil {
			if err := v.MergeConfigMap(tree); err != nil {
				problems = append(problems, fmt.Errorf("%s: %w", path, err))
			}
		}
		for k, line := range lines {
			l.origin[k] = fmt.Sprintf("file %s:%d", path, line)
		}
	}
	for _, s := range settings {
		env := envName(s.key)
		if raw, ok := os.LookupEnv(env); ok {
			value, err := parseValue(field(&l.config, s.key).Interface(), raw)
			if err != nil {
				problems = append(problems, fmt.Errorf("environment %s: %w", env, err))
				continue
			}
			v.Set(s.key, value)
			l.origin[s.key] = "env " + env
		}
		if f := flags.Lookup(s.flag); f != nil && f.Changed {
			v.Set(s.key, flagValue(flags, f))
			l.origin[s.key] = "flag --" + f.Name
		}
	}
	if err := v.UnmarshalExact(&l.config); err != nil {
		problems = append(problems, err)
	}
	if err := l.config.Validate(); err != nil {
		for _, e := range unjoin(err) {
			key, _, _ := strings.Cut(e.Error(), ":")
			if at := l.origin[key]; at != "" && at != "default" {
				e = fmt.Errorf("%s: %w", at, e)
			}
			problems = append(problems, e)
		}
	}
	if len(problems) > 0 {
		return nil, withCode(exitUsage, fmt.Errorf("%d problem(s) in the configuration:\n  %w", len(problems), indent(problems)))
	}
	return l, nil
}

func indent(problems []error) error {
	texts := make([]string, len(problems))
	for i, p := range problems {
		texts[i] = p.Error()
	}
	return errors.New(strings.Join(texts, "\n  "))
}

func unjoin(err error) []error {
	if j, ok := err.(interface{ Unwrap() []error }); ok {
		return j.Unwrap()
	}
	return []error{err}
}

// readConfigFile parses a YAML file (JSON is YAML), checks every key and type,
// and notes the line of each known key.
func readConfigFile(path string, lines map[string]int) (map[string]any, []error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, []error{fmt.Errorf("config file: %w", err)}
	}
	if info.Size() > maxConfigBytes {
		return nil, []error{fmt.Errorf("config file %s: %d bytes, more than %d", path, info.Size(), maxConfigBytes)}
	}
	raw, err := os.ReadFile(path)
	if err != nil {
		return nil, []error{fmt.Errorf("config file: %w", err)}
	}
	var doc yaml.Node
	if err := yaml.Unmarshal(raw, &doc); err != nil {
		return nil, []error{fmt.Errorf("%s: %w", path, err)}
	}
	if len(doc.Content) == 0 {
		return nil, nil
	}
	top := doc.Content[0]
	if top.Kind != yaml.MappingNode {
		return nil, []error{fmt.Errorf("%s:%d: the file must hold keys and values, such as \"listen: 127.0.0.1:8000\"", path, top.Line)}
	}
	var problems []error
	checkNode(path, "", top, reflect.TypeFor[router.Config](), lines, &problems)
	if len(problems) > 0 {
		return nil, problems
	}
	var tree map[string]any
	if err := top.Decode(&tree); err != nil {
		return nil, []error{fmt.Errorf("%s: %w", path, err)}
	}
	return tree, nil
}

// checkNode compares a mapping with a struct type.
func checkNode(path, prefix string, n *yaml.Node, t reflect.Type, lines map[string]int, problems *[]error) {
	bad := func(line int, format string, a ...any) {
		*problems = append(*problems, fmt.Errorf("%s:%d: %s", path, line, fmt.Sprintf(format, a...)))
	}
	fields := map[string]reflect.StructField{}
	var names []string
	for _, f := range reflect.VisibleFields(t) {
		name := f.Tag.Get("mapstructure")
		fields[name] = f
		names = append(names, name)
	}
	seen := map[string]bool{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		k, val := n.Content[i], n.Content[i+1]
		f, ok := fields[k.Value]
		if !ok {
			bad(k.Line, "unknown key %q%s", prefix+k.Value, suggest(k.Value, names))
			continue
		}
		if seen[k.Value] {
			bad(k.Line, "key %q stands twice", prefix+k.Value)
		}
		seen[k.Value] = true
		key := prefix + k.Value
		switch {
		case f.Type.Kind() == reflect.Struct:
			if val.Kind != yaml.MappingNode {
				bad(val.Line, "%s must hold keys and values", key)
				continue
			}
			checkNode(path, key+".", val, f.Type, lines, problems)
		case f.Type.Kind() == reflect.Slice && f.Type.Elem().Kind() == reflect.Struct:
			lines[key] = k.Line
			if val.Kind != yaml.SequenceNode {
				bad(val.Line, "%s must be a list", key)
				continue
			}
			for j, item := range val.Content {
				if item.Kind != yaml.MappingNode {
					bad(item.Line, "%s[%d] must hold keys and values", key, j)
					continue
				}
				checkNode(path, fmt.Sprintf("%s[%d].", key, j), item, f.Type.Elem(), map[string]int{}, problems)
			}
		case f.Type == reflect.TypeFor[time.Duration]():
			lines[key] = k.Line
			if d, err := time.ParseDuration(val.Value); err != nil || d < 0 {
				bad(val.Line, "%s: %q is not a duration such as 500ms, 10s or 2m", key, val.Value)
			}
		default:
			lines[key] = k.Line
			p := reflect.New(f.Type)
			if err := val.Decode(p.Interface()); err != nil {
				bad(val.Line, "%s: %q is not %s", key, val.Value, typeName(f.Type))
			}
		}
	}
}

func typeName(t reflect.Type) string {
	switch t.Kind() {
	case reflect.Bool:
		return "true or false"
	case reflect.Int, reflect.Int64, reflect.Uint64:
		return "a whole number"
	case reflect.Float64:
		return "a number"
	case reflect.Slice:
		return "a list of texts"
	default:
		return "a text"
	}
}

// suggest names the known key that is nearest to a wrong one.
func suggest(wrong string, known []string) string {
	if near := workers.Nearest(wrong, known); near != "" {
		return fmt.Sprintf("; did you mean %q?", near)
	}
	return "; known here: " + strings.Join(slices.Sorted(slices.Values(known)), ", ")
}

// parseValue reads the text of an environment variable as the type of like.
// Lists are separated by blanks, since worker specs hold commas.
func parseValue(like any, raw string) (any, error) {
	if _, ok := like.([]string); ok {
		return strings.Fields(raw), nil
	}
	if _, ok := like.(string); ok {
		return raw, nil
	}
	if _, ok := like.(time.Duration); ok {
		return time.ParseDuration(raw)
	}
	p := reflect.New(reflect.TypeOf(like))
	if err := yaml.Unmarshal([]byte(raw), p.Interface()); err != nil {
		return nil, fmt.Errorf("%q is not %s", raw, typeName(reflect.TypeOf(like)))
	}
	return p.Elem().Interface(), nil
}

func flagValue(flags *pflag.FlagSet, f *pflag.Flag) any {
	if s, ok := f.Value.(pflag.SliceValue); ok {
		return s.GetSlice()
	}
	if f.Value.Type() == "duration" {
		d, _ := flags.GetDuration(f.Name)
		return d
	}
	return f.Value.String()
}
