package main

import (
	"cmp"
	"fmt"
	"hash/crc32"
	"slices"
	"strings"
	"time"

	"github.com/dynctl/dynctl/internal/replay"
	"github.com/dynctl/dynctl/internal/replay/arrivals"
	"github.com/dynctl/dynctl/internal/replay/simulate"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/workers/sim"
)

// A workload is one kind of requests.
type workload struct {
	name string
	// blocks is the cache of a rank, in blocks of 64 tokens.
	blocks int
	// closed says that a turn of a session waits for the answer to the turn before it.
	closed bool
	// seeds are counted from this one on: weights were chosen by the first ones.
	seeds uint64
	// padded is the fleet whose engines pad their steps under this workload.
	padded string
}

// conversation is the workload that is a public trace; the others are generated.
const conversation = "conversation"

// agentsAtATime is how many sessions of agents run at a time. With 1,500 requests each has
// some ten turns, so that all caches of a fleet together hold most sessions, and one cache
// few of them.
const agentsAtATime = 128

var workloads = []workload{
	{name: conversation, blocks: 4096, padded: "16a"},
	{name: "agents", blocks: 1024, closed: true, padded: "4p12d"},
	{name: "chats", blocks: 4096, padded: "16a"},
	{name: "documents", blocks: 4096, padded: "4p12d"},
	{name: "bursts", blocks: 4096, seeds: unseen, padded: "2p14d"},
	{name: coders, blocks: 2048, closed: true, seeds: unseen, padded: "16a"},
	{name: mixture, blocks: 4096, seeds: unseen, padded: "2p14d"},
}

// Workloads that no weight was chosen by, and from where on their seeds are counted.
const (
	// coders are more agents with a longer head, mixture is chats and documents at
	// once.
	coders, mixture = "coders", "mixture"
	unseen          = 100
)

var fleets = []string{"16a", "4p12d", "2p14d"}

// loads are shares of what a fleet serves.
var loads = []float64{0.5, 0.8, 1}

// The limits of a good request.
const (
	ttft = 2 * time.Second
	itl  = 25 * time.Millisecond
)

// A column is one way to route that is compared.
type column struct {
	// name is as in "kv" or "kv:2048".
	name      string
	policy    selector.Policy
	threshold decide.Threshold
	// changes are settings and constants that are not the defaults.
	changes []replay.Change
}

// never is a threshold above every prompt.
const never = 1 << 30

// parseColumn reads POLICY or POLICY:THRESHOLD, where a threshold is a number of tokens,
// never, or auto, which is the default.
func parseColumn(text string) (c column, err error) {
	name, threshold, given := strings.Cut(text, ":")
	if c.policy, err = selector.ParsePolicy(name); err != nil {
		return c, err
	}
	switch {
	case !given:
		threshold = "auto"
	case threshold == "never":
		threshold = fmt.Sprint(never)
	}
	c.name = text
	c.threshold, err = decide.ParseThreshold(threshold)
	return c, err
}

// setup is a run of a column.
func setup(w *workload, fleet sim.Fleet, c *column, speed float64, seed uint64) simulate.Setup {
	s := simulate.Setup{
		Fleet: fleet, Options: simulate.Decisions(c.policy, c.threshold),
		Speedup: speed, ClosedLoop: w.closed, Seed: seed, TTFT: ttft, ITL: itl, SlowFactor: settings.Default().Health.SlowFactor,
	}
	s.Set(c.changes)
	return s
}

// engines names the times of a fleet's engines.
func (w *workload) engines(fleet string) string {
	if w.padded == fleet {
		return fmt.Sprintf("padded-%x", crc32.ChecksumIEEE(padded))
	}
	return "mocker"
}

// fleet makes the engines of a workload. Where they pad their steps, profile is the file
// that says how.
func (w *workload) fleet(text, profile string) (sim.Fleet, error) {
	f, err := simulate.ParseFleet(fmt.Sprintf("%s:kv_blocks=%d", text, w.blocks))
	if w.padded == text {
		for i := range f.Groups {
			f.Groups[i].Profile = profile
		}
	}
	return f, err
}

// requests makes the n requests of a workload for a seed out of several, counted from 0.
// recorded is the conversation trace.
func (w *workload) requests(n, seed, seeds int, recorded []arrivals.Request) ([]arrivals.Request, error) {
	o := arrivals.Options{Shape: w.name, Requests: n, Seed: w.seeds + uint64(seed) + 1, Head: 2048, Sessions: agentsAtATime}
	switch w.name {
	case conversation:
	case coders:
		o.Shape, o.Head, o.Sessions = "agents", 8192, 192
		return arrivals.Generate(o)
	case mixture:
		return mixed(o)
	default:
		return arrivals.Generate(o)
	}
	if n > len(recorded) {
		return nil, fmt.Errorf("workload %s: the trace has %d requests, want %d", w.name, len(recorded), n)
	}
	// Windows that begin at even distances.
	from := 0
	if seeds > 1 {
		from = (len(recorded) - n) * seed / (seeds - 1)
	}
	out := make([]arrivals.Request, n)
	copy(out, recorded[from:])
	for i := range out {
		out[i].Number = i
	}
	return out, nil
}

// mixed makes chats and documents, each at its own pace, in the order of their arrival.
func mixed(o arrivals.Options) ([]arrivals.Request, error) {
	var out []arrivals.Request
	for i, shape := range []string{"chats", "documents"} {
		o.Shape = shape
		all, err := arrivals.Generate(o)
		if err != nil {
			return nil, err
		}
		for k := range all {
			for j := range all[k].Blocks { // the names of blocks are each shape's own
				all[k].Blocks[j] |= uint64(i) << 62
			}
		}
		out = append(out, all...)
	}
	slices.SortStableFunc(out, func(a, b arrivals.Request) int { return cmp.Compare(a.At, b.At) })
	out = out[:o.Requests]
	for i := range out {
		out[i].Number = i
	}
	return out, nil
}
