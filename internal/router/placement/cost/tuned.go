package cost

import "time"

// Constants are what results of simulations chose: docs/lab/cost-in-time.md has what was tried,
// and what half and one and a half times each of them change. A model carries those it was made
// with, so that a recording is decided again by the constants of its time.
type Constants struct {
	// Others is what a millisecond costs that the request makes others wait, in milliseconds of
	// its own: the default of routing.others. 1 counts all alike.
	Others float64 `json:"-"`
	// Loss is what a request costs that is late, in times that a good one may take with an answer of
	// mean length: the limit to the first token, and for each token the limit between tokens. In
	// recordings of before it counts limits to the first token; what it came to is recorded, too.
	Loss float64 `json:"loss"`
	// Scatter is how far outcomes lie around what is expected, as a share of a limit: a request
	// that is expected to take Scatter less than the limit is late with a chance of 1/4.
	Scatter float64 `json:"scatter"`
	// Behind is how many requests will wait behind this one for each that it finds waiting.
	Behind float64 `json:"behind"`
	// Stays is how far a rank's load stays from that of its peers while an answer runs, as a
	// share of the difference: requests that come go where there is less to do.
	Stays float64 `json:"stays"`
	// Keep is what it costs that a token which was not cached takes the place of one that is needed
	// again, in times to compute it. How likely that is, is learned: Prices.Fresh.
	Keep float64 `json:"keep"`
	// One in TeachEvery requests takes a path with too few samples, if that costs at most
	// TeachWithin times as much as the other path.
	TeachEvery  float64 `json:"teach_every"`
	TeachWithin float64 `json:"teach_within"`
	// Stretches is from how many stretches of answers on the time of a step is known.
	Stretches float64 `json:"stretches"`
	// Stale is after how many seconds without an outcome little is known of a path.
	Stale float64 `json:"stale_s"`
}

// Tuned are the constants of the router.
var Tuned = Constants{
	Others: 1, Loss: 0.9, Scatter: 0.45, Behind: 1, Stays: 0.4, Keep: 5, TeachEvery: 20, TeachWithin: 2, Stretches: 12, Stale: 60,
}

// A Constant is one of Constants, as a simulation can set it.
type Constant struct {
	// Key is its name, Unit that of its values.
	Key, Unit string
	// Least and Most are the values that it may have.
	Least, Most float64
	// At is where it is kept.
	At func(*Constants) *float64
}

// List are all of Constants, in their order.
func List() []Constant {
	return []Constant{
		{"others", "ms of its own for each ms of others", 0, 1e6, func(c *Constants) *float64 { return &c.Others }},
		{"loss", "times that a good request may take", 0, 1e6, func(c *Constants) *float64 { return &c.Loss }},
		{"scatter", "share of a limit", 1e-3, 1e3, func(c *Constants) *float64 { return &c.Scatter }},
		{"behind", "requests for each that waits", 0, 1e6, func(c *Constants) *float64 { return &c.Behind }},
		{"stays", "share of the difference", 0, 1, func(c *Constants) *float64 { return &c.Stays }},
		{"keep", "times to compute a token", 0, 1e6, func(c *Constants) *float64 { return &c.Keep }},
		{"teach_every", "requests", 1, 1e6, func(c *Constants) *float64 { return &c.TeachEvery }},
		{"teach_within", "times the other path's cost", 0, 1e6, func(c *Constants) *float64 { return &c.TeachWithin }},
		{"stretches", "stretches of answers", 1, 1e6, func(c *Constants) *float64 { return &c.Stretches }},
		{"stale_s", "s", 0, 1e6, func(c *Constants) *float64 { return &c.Stale }},
	}
}

// Tuning are the constants that a model was made with; with nil those of the router.
func (m *Model) Tuning() *Constants {
	if m == nil {
		return &Tuned
	}
	return &m.Constants
}

// Unknown is a model that knows nothing but its constants: it compares no paths and has no times.
func Unknown(c Constants) *Model {
	return &Model{Prices: Prices{NoRemote: true, Lacks: 1<<legKinds - 1, Constants: c}}
}

// calm is how many times as much a delay of others counts with ForITL.
const calm = 20

// Teaches reports whether a request takes what little is known of, by its number: one in
// TeachEvery, in no other rhythm than theirs.
func (c *Constants) Teaches(number uint64) bool {
	every := uint64(c.TeachEvery)
	return every > 0 && (number+1)*0x9e3779b97f4a7c15>>32%every == 0
}

// stale is Stale as a time.
func (c *Constants) stale() time.Duration { return time.Duration(c.Stale * float64(time.Second)) }
