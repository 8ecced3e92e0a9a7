package main

import (
	"errors"
	"fmt"
	"os"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"github.com/spf13/viper"
	"go.yaml.in/yaml/v3"

	"github.com/dynctl/dynctl/internal/router"
	"github.com/dynctl/dynctl/internal/router/disagg"
	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/workers/sim"
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
	// warnings are what looks wrong and does no harm.
	warnings []string
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
			if !strings.Contains(k, "[") {
				l.origin[k] = fmt.Sprintf("file %s:%d", path, line)
			}
		}
	}
	l.warnings = strangeVariables(os.Environ())
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
			value := f.Value.(*settingValue)
			if value.err != nil {
				problems = append(problems, fmt.Errorf("flag --%s: %w", f.Name, value.err))
				continue
			}
			v.Set(s.key, value.value)
			l.origin[s.key] = "flag --" + f.Name
		}
	}
	if err := v.UnmarshalExact(&l.config); err != nil {
		problems = append(problems, err)
	}
	located := func(key string, err error) {
		base, _, _ := strings.Cut(key, "[")
		at := l.origin[base]
		if line := lines[key]; line > 0 && strings.HasPrefix(at, "file ") {
			at = fmt.Sprintf("file %s:%d", path, line)
		}
		if at != "" && at != "default" {
			err = fmt.Errorf("%s: %w", at, err)
		}
		problems = append(problems, err)
	}
	if err := l.config.Validate(); err != nil {
		for _, e := range unjoin(err) {
			key, _, _ := strings.Cut(e.Error(), ":")
			located(key, e)
		}
	}
	checkTexts(&l.config, located)
	if len(problems) > 0 {
		return nil, withCode(exitUsage, fmt.Errorf("%s in the configuration:\n  %w", plural(len(problems), "problem"), indent(problems)))
	}
	return l, nil
}

// checkTexts reads the settings that have a grammar of their own.
func checkTexts(c *router.Config, bad func(key string, err error)) {
	for _, list := range []struct {
		key   string
		role  workers.Role
		specs []string
	}{{"worker", "", c.Worker}, {"prefill", workers.Prefill, c.Prefill}, {"decode", workers.Decode, c.Decode}} {
		for i, text := range list.specs {
			if _, err := workers.ParseSpec(list.role, text); err != nil {
				bad(fmt.Sprintf("%s[%d]", list.key, i), err)
			}
		}
	}
	if c.Sim != "" {
		if _, err := sim.ParseFleet(c.Sim); err != nil {
			bad("sim", fmt.Errorf("sim: %w", err))
		}
	}
	if c.Routing.DecoderRegistry != "" {
		if _, err := disagg.ParseDecoderRegistry([]byte(c.Routing.DecoderRegistry), nil); err != nil {
			bad("routing.decoder_registry", fmt.Errorf("routing.decoder_registry: %w", err))
		}
	}
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
	var tree map[string]any
	if err := top.Decode(&tree); err != nil {
		return nil, append(problems, fmt.Errorf("%s: %w", path, err))
	}
	return tree, problems
}

// strangeVariables finds environment variables that are nearly one of ours.
// Others that begin with DYNCTL_ are none of our business: Kubernetes makes
// them for a service of that name.
func strangeVariables(environ []string) (warnings []string) {
	var known []string
	for _, s := range settings {
		known = append(known, envName(s.key))
	}
	for _, v := range otherVariables {
		known = append(known, strings.Split(v.name, ", ")...)
	}
	for _, e := range environ {
		name, _, _ := strings.Cut(e, "=")
		if !strings.HasPrefix(name, "DYNCTL_") || slices.Contains(known, name) {
			continue
		}
		if near := workers.Nearest(name, known); near != "" {
			warnings = append(warnings, fmt.Sprintf("environment %s is no setting; did you mean %s?", name, near))
		}
	}
	return warnings
}

// checkNode compares a mapping with a struct type. What is wrong is told and
// taken out, so that the rest can be checked, too.
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
	var good []*yaml.Node
	for i := 0; i+1 < len(n.Content); i += 2 {
		k, val := n.Content[i], n.Content[i+1]
		f, ok := fields[k.Value]
		if !ok {
			bad(k.Line, "unknown key %q%s", prefix+k.Value, suggest(k.Value, names))
			continue
		}
		if seen[k.Value] {
			bad(k.Line, "key %q stands twice", prefix+k.Value)
			continue
		}
		seen[k.Value] = true
		key := prefix + k.Value
		if kind := f.Type.Kind(); val.ShortTag() == "!!null" && (kind == reflect.Struct || kind == reflect.Slice) {
			continue // a section whose keys are all commented out
		}
		if f.Type.Kind() == reflect.Struct {
			if val.Kind != yaml.MappingNode {
				bad(val.Line, "%s must hold keys and values", key)
				continue
			}
			checkNode(path, key+".", val, f.Type, lines, problems)
			good = append(good, k, val)
			continue
		}
		lines[key] = k.Line
		if f.Type.Kind() == reflect.Slice && val.Kind != yaml.SequenceNode {
			bad(val.Line, "%s must be a list", key)
			continue
		}
		if f.Type.Kind() == reflect.Slice {
			items := val.Content[:0:0]
			for _, item := range val.Content {
				at := fmt.Sprintf("%s[%d]", key, len(items))
				if f.Type.Elem().Kind() == reflect.Struct {
					if item.Kind != yaml.MappingNode {
						bad(item.Line, "%s must hold keys and values", at)
						continue
					}
					checkNode(path, at+".", item, f.Type.Elem(), lines, problems)
				} else if why := scalarProblem(item, f.Type.Elem()); why != "" {
					bad(item.Line, "%s: %s", at, why)
					continue
				}
				lines[at] = item.Line
				items = append(items, item)
			}
			val.Content = items
		} else if why := scalarProblem(val, f.Type); why != "" {
			bad(val.Line, "%s: %s", key, why)
			continue
		}
		good = append(good, k, val)
	}
	n.Content = good
}

// scalarProblem says why a node is not a value of a type; "" when it is one.
func scalarProblem(n *yaml.Node, t reflect.Type) string {
	if n.Kind != yaml.ScalarNode || n.ShortTag() == "!!null" {
		return "want " + typeName(t)
	}
	if _, err := parseValue(reflect.Zero(t).Interface(), n.Value); err != nil {
		return err.Error()
	}
	return ""
}

func typeName(t reflect.Type) string {
	if t == reflect.TypeFor[time.Duration]() {
		return "a duration such as 500ms, 10s or 2m"
	}
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

// parseValue reads the text of a flag, an environment variable or a scalar of
// the file as the type of like. Lists are separated by blanks, since worker
// specs hold commas.
func parseValue(like any, raw string) (any, error) {
	var value any
	var err error
	switch like.(type) {
	case []string:
		return strings.Fields(raw), nil
	case string:
		return raw, nil
	case time.Duration:
		value, err = time.ParseDuration(raw)
	case bool:
		value, err = strconv.ParseBool(raw)
	case int:
		value, err = strconv.Atoi(raw)
	case int64:
		value, err = strconv.ParseInt(raw, 10, 64)
	case uint64:
		value, err = strconv.ParseUint(raw, 10, 64)
	case float64:
		value, err = strconv.ParseFloat(raw, 64)
	default:
		return nil, fmt.Errorf("a setting has the type %T", like)
	}
	if err != nil {
		return nil, fmt.Errorf("%q is not %s", raw, typeName(reflect.TypeOf(like)))
	}
	return value, nil
}
