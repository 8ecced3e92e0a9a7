package plan

import (
	"fmt"
	"slices"
	"strings"
)

// Target is what a run measures: how it was reached, and what was found there. A
// run that is resumed reaches the same, and measures nothing else.
type Target struct {
	// Router is the admin URL of a running router, Data the URL of its data plane where it
	// says another one.
	Router string `yaml:"router,omitempty"`
	Data   string `yaml:"data,omitempty"`
	// Sim is a simulated fleet; Prefill, Decode and Worker are engines, URL[,key=value,...].
	// Connector is how KV moves between them, "" for what they say.
	Sim       string   `yaml:"sim,omitempty"`
	Prefill   []string `yaml:"prefill,omitempty"`
	Decode    []string `yaml:"decode,omitempty"`
	Worker    []string `yaml:"worker,omitempty"`
	Connector string   `yaml:"connector,omitempty"`
	// Model may be "" where there is only one.
	Model string `yaml:"model"`
	// Fingerprint has a line for each fact that two targets differ by.
	Fingerprint []string `yaml:"fingerprint"`
}

// Run is the content of a plan file: the request and its target.
type Run struct {
	Spec   `yaml:",inline"`
	Target Target `yaml:"target"`
}

// Same returns an error that names what a target has that the run was not begun
// with, and the reverse.
func (t *Target) Same(now []string) error {
	was, is := without(t.Fingerprint, now), without(now, t.Fingerprint)
	if len(was)+len(is) == 0 {
		return nil
	}
	return fmt.Errorf("this is not the target that the run was begun with. It was: %s. It is: %s. Bring the target back as it was, or begin a new run", orNone(was), orNone(is))
}

// without is what of a is not in b; a line that is there twice counts twice.
func without(a, b []string) []string {
	b = slices.Clone(b)
	var out []string
	for _, line := range a {
		if i := slices.Index(b, line); i >= 0 {
			b = slices.Delete(b, i, i+1)
		} else {
			out = append(out, line)
		}
	}
	return out
}

func orNone(lines []string) string {
	if len(lines) == 0 {
		return "nothing more"
	}
	return strings.Join(lines, "; ")
}
