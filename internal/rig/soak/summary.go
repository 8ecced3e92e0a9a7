package soak

import (
	"bufio"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dynctl/dynctl/internal/table"
)

// SummarySchema names the form of a Summary.
const SummarySchema = "dynctl.soak/v1"

// Seconds is a time that JSON shows in seconds.
type Seconds time.Duration

// MarshalJSON writes seconds with three decimals.
func (s Seconds) MarshalJSON() ([]byte, error) {
	return fmt.Appendf(nil, "%.3f", time.Duration(s).Seconds()), nil
}

// Summary is what an endurance run has seen.
type Summary struct {
	Schema   string    `json:"schema"`
	Started  time.Time `json:"started"`
	Duration Seconds   `json:"duration_seconds"`
	Seed     uint64    `json:"seed"`
	Clients  int       `json:"clients"`
	Fleet    string    `json:"fleet"`
	Go       string    `json:"go"`
	CPUs     int       `json:"cpus"`

	Requests   map[string]uint64 `json:"requests"`
	Faults     map[string]Count  `json:"faults"`
	Unseen     []Fault           `json:"unseen_faults"`
	Checks     []Check           `json:"checks"`
	HeapGrowth float64           `json:"heap_growth"` // from the second check to the last, as a share
	Before     Usage             `json:"before"`
	After      Usage             `json:"after"`
	Events     map[string]int    `json:"events"`
	// Unexplained counts the events that no fault explains.
	Unexplained int         `json:"unexplained_events"`
	Violations  []Violation `json:"violations"`
	More        int         `json:"violations_not_listed"`
}

// Count is how often something was done, and how often it was found in the
// events, with the median and the longest time to the first event.
type Count struct {
	Done  int     `json:"done"`
	Found int     `json:"found"`
	P50   Seconds `json:"seen_after_p50_seconds"`
	Max   Seconds `json:"seen_after_max_seconds"`
}

// Check is what was found in an idle moment.
type Check struct {
	When  string    `json:"when"`
	At    time.Time `json:"at"`
	Usage Usage     `json:"usage"`
	// Index is the number of (block, rank) memberships, equal to the caches.
	Index int64 `json:"index_memberships"`
	// Over is how many blocks the index held that their engines did not, before anything could
	// heal that: events lost at the very end, or still on their way. Sync is how long after that
	// look the index was first found without such a block, the requests that show every feed its
	// losses included; without such a time, how long after those requests. Refilled is how often
	// the caches had to be filled again until the index knew all of their blocks.
	Over     int     `json:"blocks_too_many_at_first"`
	Sync     Seconds `json:"sync_seconds"`
	Refilled int     `json:"caches_refilled"`
	// Exits counts engines that died without a fault that was set, Held the requests that
	// engines still worked on.
	Exits int `json:"engine_exits"`
	Held  int `json:"requests_left_in_engines"`
}

// Err is nil when everything held.
func (s *Summary) Err() error {
	if len(s.Violations) == 0 {
		return nil
	}
	kinds := map[string]int{}
	for _, v := range s.Violations {
		kinds[v.What]++
	}
	var parts []string
	for k, n := range kinds {
		parts = append(parts, fmt.Sprintf("%s ×%d", k, n))
	}
	slices.Sort(parts)
	return fmt.Errorf("soak: %d violation(s): %s; the first: %s", len(s.Violations)+s.More, strings.Join(parts, ", "), s.Violations[0].Detail)
}

// Text is the summary for people.
func (s *Summary) Text() string {
	var b strings.Builder
	verdict := "clean"
	if err := s.Err(); err != nil {
		verdict = err.Error()
	}
	fmt.Fprintf(&b, "endurance: %s, %s, seed %d, %d clients, %s on %d CPUs\n", time.Duration(s.Duration).Round(time.Second), verdict, s.Seed, s.Clients, s.Go, s.CPUs)
	b.WriteString("\nrequests\n")
	figures := func(head []string, rows [][]string) { _ = table.Figures(&b, head, rows, 0) } // a strings.Builder takes everything
	var rows [][]string
	for _, k := range slices.Sorted(maps.Keys(s.Requests)) {
		rows = append(rows, []string{k, strconv.FormatUint(s.Requests[k], 10)})
	}
	figures(nil, rows)
	b.WriteString("\nfaults\n")
	rows = nil
	for _, k := range slices.Sorted(maps.Keys(s.Faults)) {
		c := s.Faults[k]
		rows = append(rows, []string{k, strconv.Itoa(c.Done), strconv.Itoa(c.Found), seconds(c.P50, 2), seconds(c.Max, 2)})
	}
	figures([]string{"FAULT", "DONE", "FOUND IN EVENTS", "AFTER p50", "AT MOST"}, rows)
	b.WriteString("\nidle moments: what the process used\n")
	used := func(when string, u Usage) []string {
		return []string{when, strconv.FormatFloat(float64(u.Heap)/(1<<20), 'f', 1, 64), strconv.Itoa(u.Goroutines), strconv.Itoa(u.Files), strconv.Itoa(u.Sockets)}
	}
	rows = [][]string{used("before", s.Before)}
	for _, c := range s.Checks {
		rows = append(rows, used(c.When, c.Usage))
	}
	figures([]string{"MOMENT", "HEAP MiB", "GOROUTINES", "FILES", "SOCKETS"}, append(rows, used("after", s.After)))
	fmt.Fprintf(&b, "  heap from the second to the last check: %+.1f %%\n", 100*s.HeapGrowth)
	b.WriteString("\nidle moments: the index against the caches\n")
	rows = nil
	for _, c := range s.Checks {
		rows = append(rows, []string{c.When, strconv.FormatInt(c.Index, 10), strconv.Itoa(c.Over), seconds(c.Sync, 3), strconv.Itoa(c.Refilled), strconv.Itoa(c.Held), strconv.Itoa(c.Exits)})
	}
	figures([]string{"MOMENT", "BLOCKS", "TOO MANY", "HEALED AFTER", "REFILLS", "REQUESTS LEFT", "DIED"}, rows)
	fmt.Fprintf(&b, "\nevents (%d that no fault explains)\n", s.Unexplained)
	rows = nil
	for _, k := range slices.Sorted(maps.Keys(s.Events)) {
		rows = append(rows, []string{k, strconv.Itoa(s.Events[k])})
	}
	figures(nil, rows)
	for i, v := range s.Violations {
		if i == 0 {
			b.WriteString("\nviolations\n")
		}
		fmt.Fprintf(&b, "  %s %s: %s %s %s\n", v.At.Format(time.TimeOnly), v.What, v.Detail, v.Request, v.Decision)
	}
	for i, f := range s.Unseen {
		if i == 0 {
			b.WriteString("\nfaults without an event\n")
		}
		fmt.Fprintf(&b, "  %s %s %s %s (until %s)\n", f.From.Format(time.TimeOnly), f.Kind, f.Worker, f.Detail, f.To.Format(time.TimeOnly))
	}
	return b.String()
}

// seconds is a time with as many places.
func seconds(s Seconds, places int) string {
	return strconv.FormatFloat(time.Duration(s).Seconds(), 'f', places, 64) + " s"
}

// counts are the figures of the load.
type counts struct {
	completed, compared, left, cutByRestart, cutByFault, duringRestart, tooManyBroke, tooLong atomic.Uint64

	mu   sync.Mutex
	more map[string]uint64
}

func (c *counts) bump(keys ...string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.more == nil {
		c.more = map[string]uint64{}
	}
	for _, k := range keys {
		c.more[k]++
	}
}

func (c *counts) add(kind, way string, stream bool, bytes int) {
	size := "up to 4 KB"
	switch {
	case bytes > 64<<10:
		size = "64 to 220 KB"
	case bytes > 16<<10:
		size = "16 to 64 KB"
	case bytes > 4<<10:
		size = "4 to 16 KB"
	}
	form := "not streamed"
	if stream {
		form = "streamed"
	}
	c.bump("all", "kind: "+kind, "client: "+way, "form: "+form, "size: "+size)
}

func (c *counts) ways(way string) { c.bump("all", "client: "+way) }

func (c *counts) onPath(path string) {
	if path != "" {
		c.bump("path: " + path)
	}
}

// fill adds the figures of the load.
func (s *soak) fill(sum *Summary) {
	c := &s.counts
	sum.Requests = map[string]uint64{}
	c.mu.Lock()
	maps.Copy(sum.Requests, c.more)
	c.mu.Unlock()
	maps.Copy(sum.Requests, map[string]uint64{
		"end: completed": c.completed.Load(), "end: client left": c.left.Load(), "end: cut by a fault midway": c.cutByFault.Load(),
		"end: cut by router restart": c.cutByRestart.Load(), "end: refused by restart": c.duringRestart.Load(), "end: too many engines broke on it": c.tooManyBroke.Load(), "end: took longer than timeouts.response": c.tooLong.Load(), "outputs compared": c.compared.Load(),
	})
	s.mu.Lock()
	sum.Violations, sum.More = append([]Violation{}, s.violations...), s.more
	s.mu.Unlock()
}

// logged is a line of the log of events.
type logged struct {
	Time   time.Time `json:"time"`
	Kind   string    `json:"kind"`
	Worker string    `json:"worker"`
	Text   string    `json:"msg"`
}

// seenWithin is how long after the end of a fault its event may come.
const seenWithin = 15 * time.Second

// findFaults looks for every fault in the events.
func (s *soak) findFaults(sum *Summary) {
	sum.Faults, sum.Events, sum.Unseen = map[string]Count{}, map[string]int{}, []Fault{}
	file, err := os.Open(filepath.Join(s.o.Dir, "events.jsonl"))
	if err != nil {
		s.violation("events", nil, err.Error())
		return
	}
	defer file.Close()
	var events []logged
	scan := bufio.NewScanner(file)
	scan.Buffer(nil, 1<<20)
	for scan.Scan() {
		var e logged
		if json.Unmarshal(scan.Bytes(), &e) == nil && e.Kind != "" {
			events = append(events, e)
			sum.Events[e.Kind]++
		}
	}
	s.chaos.mu.Lock()
	faults, errs := s.chaos.faults, s.chaos.errs
	s.chaos.mu.Unlock()
	for _, err := range errs {
		s.violation("fault", nil, err.Error())
	}
	for _, e := range unexplained(events, faults) {
		if e.Kind == "load_unknown" && s.o.Duration < time.Minute {
			continue // such runs wait half a second for a scrape, which a busy machine may need
		}
		sum.Unexplained++
		s.violation(e.Kind, nil, fmt.Sprintf("at %s, and nothing that was done explains it: %s", e.Time.Format(time.TimeOnly), e.Text))
	}
	after := map[string][]time.Duration{}
	for _, f := range faults {
		find(f, events)
		c := sum.Faults[f.Kind]
		c.Done++
		if f.Seen != "" {
			c.Found++
			after[f.Kind] = append(after[f.Kind], f.SeenAt.Sub(f.From))
		} else {
			sum.Unseen = append(sum.Unseen, *f)
			s.violation("unseen fault", nil, fmt.Sprintf("%s %s from %s to %s %s has no event", f.Kind, f.Worker, f.From.Format(time.TimeOnly), f.To.Format(time.TimeOnly), f.Detail))
		}
		sum.Faults[f.Kind] = c
	}
	for k, list := range after {
		slices.Sort(list)
		c := sum.Faults[k]
		c.P50, c.Max = Seconds(list[int(math.Ceil(float64(len(list))/2))-1]), Seconds(list[len(list)-1])
		sum.Faults[k] = c
	}
	raw, err := json.MarshalIndent(faults, "", " ")
	if err == nil {
		err = os.WriteFile(filepath.Join(s.o.Dir, "faults.json"), raw, 0o600)
	}
	if err != nil {
		s.violation("files", nil, err.Error())
	}
}

// unexplained are the events that accuse somebody to whom nothing was done.
// No fault makes an engine compute a prompt again in silence or answer with
// other parameters, and nothing excuses a panic; load figures are missing from
// an engine to which something is done.
func unexplained(events []logged, faults []*Fault) (out []logged) {
	for _, e := range events {
		switch e.Kind {
		case "silent_recompute", "prefill_without_params", "prefill_bad_params", "prefill_unexpected_params", "panic":
			out = append(out, e)
		case "load_unknown":
			if !slices.ContainsFunc(faults, func(f *Fault) bool {
				return f.Worker == e.Worker && !e.Time.Before(f.From) && !e.Time.After(f.To.Add(seenWithin))
			}) {
				out = append(out, e)
			}
		}
	}
	return out
}

// find looks for the first event that shows a fault: of its worker, in its
// time, of a kind that fits, with the worker's name in its words.
func find(f *Fault, events []logged) {
	i, _ := slices.BinarySearchFunc(events, f.From.Add(-time.Millisecond), func(e logged, t time.Time) int { return e.Time.Compare(t) })
	for ; i < len(events); i++ {
		e := &events[i]
		if e.Time.After(f.To.Add(seenWithin)) {
			return
		}
		if e.Worker == f.Worker && slices.Contains(shows(f.Kind), e.Kind) && strings.Contains(e.Text, f.Worker) {
			f.Seen, f.SeenAt, f.Text = e.Kind, e.Time, e.Text
			return
		}
	}
}
