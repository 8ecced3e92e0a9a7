// Package load reads settings: defaults, then a file, then the environment, then flags. It
// knows where each value came from, and reports all problems together.
package load

import (
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/spf13/pflag"
	"github.com/spf13/viper"

	"github.com/dynctl/dynctl/internal/router/forward/disagg"
	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/workers/sim"
)

// Loaded is a validated configuration and where each value came from.
type Loaded struct {
	Config settings.Config
	// Origin of each key: "default", "file dynctl.yaml:12", "env DYNCTL_…" or
	// "flag --…".
	Origin map[string]string
	// Path is that of the file, "" for none.
	Path string
	// Warnings are what looks wrong and does no harm.
	Warnings []string
}

// Problems are all that is wrong with the settings.
type Problems []error

// Error implements error, with a line for each.
func (p Problems) Error() string {
	text := "1 problem"
	if len(p) != 1 {
		text = fmt.Sprintf("%d problems", len(p))
	}
	text += " in the configuration:"
	for _, err := range p {
		text += "\n  " + err.Error()
	}
	return text
}

// Load merges defaults, file, environment and flags of AddFlags, in rising order
// of precedence, and validates the result. Other are the variables beside those
// of the settings that are not misspelt. The error is Problems.
func Load(path string, flags *pflag.FlagSet, other []string) (*Loaded, error) {
	l := &Loaded{Config: settings.Default(), Origin: map[string]string{}, Path: path}
	v := viper.New()
	for _, r := range settings.Rows() {
		v.SetDefault(r.Key, r.Get(&l.Config))
		l.Origin[r.Key] = "default"
	}
	f := &file{path: path, lines: map[string]int{}}
	if path != "" {
		if err := v.MergeConfigMap(f.read()); err != nil {
			f.problems = append(f.problems, fmt.Errorf("%s: %w", path, err))
		}
		for k, line := range f.lines {
			if !strings.Contains(k, "[") {
				l.Origin[k] = fmt.Sprintf("file %s:%d", path, line)
			}
		}
	}
	problems := f.problems
	l.Warnings = strangeVariables(os.Environ(), other)
	for _, r := range settings.Rows() {
		if r.Flag == "" {
			continue
		}
		if raw, ok := os.LookupEnv(r.Env()); ok {
			value, err := r.Parse(raw)
			if err != nil {
				problems = append(problems, fmt.Errorf("environment %s: %w", r.Env(), err))
				continue
			}
			v.Set(r.Key, value)
			l.Origin[r.Key] = "env " + r.Env()
		}
		if typed := flags.Lookup(r.Flag); typed != nil && typed.Changed {
			flag := typed.Value.(*flagValue)
			if flag.err != nil {
				problems = append(problems, fmt.Errorf("flag --%s: %w", r.Flag, flag.err))
				continue
			}
			v.Set(r.Key, flag.value)
			l.Origin[r.Key] = "flag --" + r.Flag
		}
	}
	for _, r := range settings.Rows() {
		r.Set(&l.Config, v.Get(r.Key))
	}
	bad := func(key string, err error) {
		base, _, _ := strings.Cut(key, "[")
		at := l.Origin[base]
		if place, ok := strings.CutPrefix(at, "file "); ok { // as in errors of the file's syntax
			at = place
			if line := f.lines[key]; line > 0 {
				at = fmt.Sprintf("%s:%d", path, line)
			}
		}
		if at != "default" {
			err = fmt.Errorf("%s: %w", at, err)
		}
		problems = append(problems, err)
	}
	for _, p := range l.Config.Problems() {
		bad(p.Key, p)
	}
	checkTexts(&l.Config, bad)
	// The flag may be negative, as in the command lines of other routers.
	switch t := l.Config.Routing.Threshold.Tokens; {
	case t >= 0:
	case !strings.HasPrefix(l.Origin["routing.threshold"], "flag "):
		bad("routing.threshold", fmt.Errorf("routing.threshold: %d must not be negative: write 0 for always remote, or a number above every prompt for never remote", t))
	default:
		l.Warnings = append(l.Warnings, fmt.Sprintf("routing.threshold %d (%s) is always remote, as 0 is; for never remote give one above every prompt", t, l.Origin["routing.threshold"]))
	}
	if len(problems) > 0 {
		return nil, Problems(problems)
	}
	return l, nil
}

// checkTexts reads the settings that have a grammar of their own.
func checkTexts(c *settings.Config, bad func(key string, err error)) {
	_, problems := c.ReadSpecs()
	for _, p := range problems {
		bad(p.Key, p.Err)
	}
	if c.Sim != "" {
		if _, err := sim.ParseFleet(c.Sim); err != nil {
			bad("sim", fmt.Errorf("sim: %w", err))
		}
	}
	if c.Routing.DecoderRegistry != "" {
		if _, err := disagg.ParseDecoderRegistry([]byte(c.Routing.DecoderRegistry)); err != nil {
			bad("routing.decoder_registry", fmt.Errorf("routing.decoder_registry: %w", err))
		}
	}
}

// strangeVariables finds environment variables that are nearly one of ours.
// Others that begin with DYNCTL_ are none of our business: Kubernetes makes
// them for a service of that name.
func strangeVariables(environ, other []string) (warnings []string) {
	known := slices.Clone(other)
	for _, r := range settings.Rows() {
		if r.Flag != "" {
			known = append(known, r.Env())
		}
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
