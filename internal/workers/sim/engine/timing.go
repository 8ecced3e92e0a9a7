package engine

import (
	"errors"
	"fmt"
	"math"
	"os"
	"time"

	"go.yaml.in/yaml/v3"
)

// Batch is what one engine step computes.
type Batch struct {
	// PrefillTokens is the number of new prompt tokens over all requests that
	// compute more than one token in the step.
	PrefillTokens int
	// PrefillSquares is the sum over these requests of (c+n)²-c², where n is
	// the new tokens and c the tokens in the cache before. Chunks of one prompt
	// add up to the square of its length, so the total does not depend on how
	// it was cut.
	PrefillSquares float64
	// DecodeRequests is the number of requests that compute one token.
	DecodeRequests int
	// DecodeTokens is the sum of the lengths of these requests.
	DecodeTokens int
	// KVUsage is the share of the KV blocks in use, 0 to 1.
	KVUsage float64
}

// Timing says how long a simulated engine takes. There are two: the polynomials that
// Dynamo's mocker publishes (Mocker, the default), and a Profile with coefficients from a
// file. Both are pure; the rank adds noise from its own seeded source.
type Timing interface {
	// Step is the length of an engine step.
	Step(Batch) time.Duration
	// Transfer is the time that moving the KV of that many tokens takes.
	Transfer(tokens int) time.Duration
}

// Mocker is the default model of Dynamo's mock engine:
//
//	prefill = 4.209989e-7·t² + 1.518344e-2·t + 16.50142 ms    t = PrefillTokens; 0 when t is 0
//	decode  = max(1, -25.74·u² + 54.01·u + 5.74) ms           u = KVUsage; 0 without decodes
//	step    = prefill + decode
//	transfer = t · kvBytesPerToken / bandwidth
type Mocker struct{}

const (
	// kvBytesPerToken is the size of one token's keys and values.
	kvBytesPerToken = 131072
	// bandwidth is that of transfers, in bytes per second.
	bandwidth = 64e9
)

// Step is the length of an engine step.
func (Mocker) Step(b Batch) time.Duration {
	var ms float64
	if t := float64(b.PrefillTokens); t > 0 {
		ms += 4.209989e-7*t*t + 1.518344e-2*t + 16.50142
	}
	if b.DecodeRequests > 0 {
		u := b.KVUsage
		ms += max(1, -25.74*u*u+54.01*u+5.74)
	}
	return millis(ms)
}

// Transfer is the time that moving the KV of that many tokens takes.
func (Mocker) Transfer(tokens int) time.Duration {
	return millis(1000 * float64(tokens) * kvBytesPerToken / bandwidth)
}

// Profile is a timing model with coefficients of one's own, all in
// milliseconds:
//
//	prefill  = Prefill[0] + Prefill[1]·n + Prefill[2]·PrefillSquares   0 when n = PrefillTokens is 0
//	decode   = Decode[0] + Decode[1]·DecodeRequests + Decode[2]·DecodeTokens   0 without decodes
//	step     = prefill + decode
//	transfer = Transfer[0] + Transfer[1]·t
type Profile struct {
	Name      string     `json:"name,omitempty" yaml:"name,omitempty"`
	Prefill   [3]float64 `json:"prefill_ms" yaml:"prefill_ms"`
	Decode    [3]float64 `json:"decode_ms" yaml:"decode_ms"`
	Transfers [2]float64 `json:"transfer_ms" yaml:"transfer_ms"`
	// PrefillPad and DecodePad make steps of the first two lines: PrefillTokens and
	// DecodeRequests count as the next multiple of them, as where an engine pads its
	// batches. 0 does not.
	PrefillPad int `json:"prefill_pad,omitempty" yaml:"prefill_pad,omitempty"`
	DecodePad  int `json:"decode_pad,omitempty" yaml:"decode_pad,omitempty"`
	// Noise is the relative standard deviation of a step's length, in percent.
	Noise float64 `json:"noise_pct,omitempty" yaml:"noise_pct,omitempty"`
	// Speed divides every time; 0 means 1.
	Speed float64 `json:"speed,omitempty" yaml:"speed,omitempty"`
}

// Step is the length of an engine step.
func (p Profile) Step(b Batch) time.Duration {
	var ms float64
	if b.PrefillTokens > 0 {
		ms += p.Prefill[0] + p.Prefill[1]*padded(b.PrefillTokens, p.PrefillPad) + p.Prefill[2]*b.PrefillSquares
	}
	if b.DecodeRequests > 0 {
		ms += p.Decode[0] + p.Decode[1]*padded(b.DecodeRequests, p.DecodePad) + p.Decode[2]*float64(b.DecodeTokens)
	}
	return millis(ms)
}

// padded is n as a multiple of pad.
func padded(n, pad int) float64 {
	if pad > 1 {
		n = (n + pad - 1) / pad * pad
	}
	return float64(n)
}

// Transfer is the time that moving the KV of that many tokens takes.
func (p Profile) Transfer(tokens int) time.Duration {
	return millis(p.Transfers[0] + p.Transfers[1]*float64(tokens))
}

// WithTransfer is a timing with another transfer: t[0] + t[1]·tokens milliseconds.
func WithTransfer(m Timing, t [2]float64) Timing {
	return transferring{m, Profile{Transfers: t}}
}

// transferring takes steps from one timing and transfers from another.
type transferring struct {
	Timing
	transfers Profile
}

// Transfer is that of the second timing.
func (t transferring) Transfer(tokens int) time.Duration { return t.transfers.Transfer(tokens) }

// Validate reports everything that makes the profile unusable.
func (p Profile) Validate() error {
	var errs []error
	check := func(key string, v float64) {
		if math.IsNaN(v) || math.IsInf(v, 0) || v < 0 || v > 1e7 {
			errs = append(errs, fmt.Errorf("%s: %v is not between 0 and 1e7", key, v))
		}
	}
	for i, v := range p.Prefill {
		check(fmt.Sprintf("prefill_ms[%d]", i), v)
	}
	for i, v := range p.Decode {
		check(fmt.Sprintf("decode_ms[%d]", i), v)
	}
	for i, v := range p.Transfers {
		check(fmt.Sprintf("transfer_ms[%d]", i), v)
	}
	if p.PrefillPad < 0 || p.PrefillPad > 1<<20 || p.DecodePad < 0 || p.DecodePad > 1<<20 {
		errs = append(errs, fmt.Errorf("prefill_pad %d, decode_pad %d: not between 0 and 1048576", p.PrefillPad, p.DecodePad))
	}
	if p.Noise < 0 || p.Noise > 100 || math.IsNaN(p.Noise) {
		errs = append(errs, fmt.Errorf("noise_pct: %v is not between 0 and 100", p.Noise))
	}
	if p.Speed < 0 || math.IsNaN(p.Speed) || math.IsInf(p.Speed, 0) {
		errs = append(errs, fmt.Errorf("speed: %v is not a positive number", p.Speed))
	}
	return errors.Join(errs...)
}

// maxProfileBytes bounds a profile file.
const maxProfileBytes = 1 << 20

// ReadProfile reads a profile from a YAML or JSON file. Unknown keys are errors.
func ReadProfile(path string) (Profile, error) {
	f, err := os.Open(path)
	if err != nil {
		return Profile{}, fmt.Errorf("timing profile: %w", err)
	}
	defer f.Close()
	if st, err := f.Stat(); err == nil && st.Size() > maxProfileBytes {
		return Profile{}, fmt.Errorf("timing profile %s: %d bytes is more than %d", path, st.Size(), maxProfileBytes)
	}
	var p Profile
	d := yaml.NewDecoder(f) // JSON is YAML
	d.KnownFields(true)
	if err := d.Decode(&p); err != nil {
		return Profile{}, fmt.Errorf("timing profile %s: %w", path, err)
	}
	if err := p.Validate(); err != nil {
		return Profile{}, fmt.Errorf("timing profile %s: %w", path, err)
	}
	return p, nil
}

// BuiltinProfile returns a profile that needs no file. "instant" takes no time at
// all; "cpu" is the small model of a real vLLM 0.32 on two CPU cores.
func BuiltinProfile(name string) (Profile, bool) {
	switch name {
	case "instant":
		return Profile{Name: name}, true
	case "cpu":
		return Profile{Name: name, Prefill: [3]float64{2, 0.15, 1.8e-5}, Decode: [3]float64{6, 0.4, 0}, Transfers: [2]float64{2, 0.003}}, true
	}
	return Profile{}, false
}

func millis(ms float64) time.Duration { return time.Duration(max(ms, 0) * float64(time.Millisecond)) }
