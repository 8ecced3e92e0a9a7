// Package profiles has timing models of real GPUs. Their constants are fitted to measured
// times by benchmarks/profiles, each with its error on measurements that were held out of the
// fit. docs/profiles.md shows them, and what they cannot say.
package profiles

import (
	"bytes"
	_ "embed"
	"fmt"
	"slices"
	"sync"

	"go.yaml.in/yaml/v3"

	"github.com/dynctl/dynctl/internal/workers/sim/engine"
)

// Source is where the measured times of a profile come from.
type Source string

// The sources.
const (
	// Published is silicon_sample.csv of ai-dynamo/aiconfigurator.
	Published Source = "published"
	// Own is a measurement of this project.
	Own Source = "own"
)

// Errors are relative errors in percent over several measurements.
type Errors struct {
	Median float64 `yaml:"median_pct"`
	P90    float64 `yaml:"p90_pct"`
}

// String is as in "3.2 % (p90 8.1 %)".
func (e Errors) String() string { return fmt.Sprintf("%.1f %% (p90 %.1f %%)", e.Median, e.P90) }

// Profile is a timing model of one model on one kind of GPU.
type Profile struct {
	// Timing has the name and the constants, without a transfer.
	Timing engine.Profile `yaml:",inline"`
	// What names model, precision, GPUs and engine.
	What   string `yaml:"what"`
	Source Source `yaml:"source"`
	// Transfer names the transfer that is used where a fleet names none.
	Transfer string `yaml:"transfer"`
	// Fitted and Held count the measurements of the fit and those held out of it.
	Fitted int `yaml:"fitted"`
	Held   int `yaml:"held_out"`
	// TTFT and TPOT are the errors of the simulator on those held out.
	TTFT Errors `yaml:"ttft_error"`
	TPOT Errors `yaml:"tpot_error"`
}

// Rough reports whether an error is larger than a profile's should be: 15 % in the median,
// or 35 % at the 90th percentile.
func (p *Profile) Rough() bool {
	return max(p.TTFT.Median, p.TPOT.Median) > 15 || max(p.TTFT.P90, p.TPOT.P90) > 35
}

// Note describes the profile in one line, for screens and results.
func (p *Profile) Note() string {
	of := "published measurements"
	if p.Source == Own {
		of = "a measurement of the dynctl project"
	}
	rough := ""
	if p.Rough() {
		rough = "rough "
	}
	return fmt.Sprintf("profile %s (%s) is a %smodel fitted to %s, not a measurement of your engines", p.Timing.Name, p.What, rough, of)
}

// Transfer is the time that moving the KV of a prompt takes with one connector.
type Transfer struct {
	Name   string `yaml:"name"`
	What   string `yaml:"what"`
	Source string `yaml:"source"`
	// Millis are the constants of engine.Profile.Transfers.
	Millis [2]float64 `yaml:"transfer_ms,flow"`
}

//go:embed profiles.yaml
var raw []byte

var shipped = sync.OnceValue(func() (all struct {
	Transfers []Transfer `yaml:"transfers"`
	Profiles  []Profile  `yaml:"profiles"`
}) {
	d := yaml.NewDecoder(bytes.NewReader(raw))
	d.KnownFields(true)
	if err := d.Decode(&all); err != nil {
		panic("profiles.yaml: " + err.Error()) // part of the program
	}
	return all
})

// All are the profiles in the order in which they are shown.
func All() []Profile { return shipped().Profiles }

// Transfers are the transfers in the order in which they are shown.
func Transfers() []Transfer { return shipped().Transfers }

// Find returns a profile by its name.
func Find(name string) (Profile, bool) {
	i := slices.IndexFunc(All(), func(p Profile) bool { return p.Timing.Name == name })
	if i < 0 {
		return Profile{}, false
	}
	p := All()[i]
	t, _ := FindTransfer(p.Transfer)
	p.Timing.Transfers = t.Millis
	return p, true
}

// FindTransfer returns a transfer by its name.
func FindTransfer(name string) (Transfer, bool) {
	i := slices.IndexFunc(Transfers(), func(t Transfer) bool { return t.Name == name })
	if i < 0 {
		return Transfer{}, false
	}
	return Transfers()[i], true
}
