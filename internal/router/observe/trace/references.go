package trace

import (
	"encoding/json"
	"fmt"
	"time"

	"github.com/dynctl/dynctl/internal/router/placement/cost"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/workers"
)

// Bounds of a Book; the candidates of one decision come on top. A reader keeps at
// least twice as many of the newest, so that it has all that these lines refer to.
const (
	maxDescriptions = 1 << 14
	maxDescribed    = 32 << 20 // bytes
)

// References numbers the descriptions of workers and holds the settings that decisions refer to,
// and the costs in force, so that each is written once. When it is full it forgets all and
// writes again what is referred to from then on. Make it with NewReferences.
type References struct {
	byWorker map[*workers.Worker]uint64
	byText   map[string]uint64
	settings map[uint64]string // by revision
	costs    map[uint64]bool   // by revision
	// The settings that were referred to last.
	newest   *decide.Options
	revision uint64

	next  uint64 // of a description
	lines []description
	bytes int
	full  int
	limit int
	text  []byte
}

type description struct {
	kind    Kind
	members string
}

// NewReferences makes an empty Book.
func NewReferences() *References {
	return &References{byWorker: map[*workers.Worker]uint64{}, byText: map[string]uint64{}, settings: map[uint64]string{}, costs: map[uint64]bool{}, next: 1, limit: maxDescriptions}
}

// Len is how many lines AppendLine has.
func (r *References) Len() int { return len(r.lines) }

// Full is how often it was full and began again.
func (r *References) Full() int { return r.full }

// AppendLine appends line i.
func (r *References) AppendLine(dst []byte, i int, at time.Duration) []byte {
	l := &r.lines[i]
	o := begin(dst, l.kind, at.Microseconds())
	o.p = append(append(o.p, ','), l.members...)
	return append(o.p, '}', '\n')
}

func (r *References) add(kind Kind, members string) {
	r.lines = append(r.lines, description{kind, members})
	r.bytes += len(members)
}

func (r *References) forget() {
	clear(r.byWorker)
	clear(r.byText)
	clear(r.settings)
	clear(r.costs)
	r.newest, r.lines, r.bytes = nil, nil, 0
	r.full++
}

// Refer enters what a decision refers to and appends the numbers of its candidates'
// workers, those of the decode phase first, to refs.
func (r *References) Refer(d *Decision, refs []uint64) []uint64 {
	if len(r.lines) >= r.limit || r.bytes >= maxDescribed {
		r.forget()
	}
	if r.newest != d.Settings || r.revision != d.Revision {
		r.set(d)
	}
	if m := d.Input.Costs; m != nil && !r.costs[m.Revision] {
		r.price(m)
	}
	for _, peers := range [...][]workers.Peer{d.Input.DecodePeers, d.Input.PrefillPeers} {
		for i := range peers {
			w := peers[i].Worker
			n, ok := r.byWorker[w]
			if !ok {
				n = r.describe(w)
			}
			refs = append(refs, n)
		}
	}
	return refs
}

// set enters the settings of a decision.
func (r *References) set(d *Decision) {
	s := d.Settings
	rule := &s.Rule
	text, err := json.Marshal(settingsLine{
		Revision: d.Revision, Decode: s.Decode, Prefill: s.Prefill, Threshold: rule.Threshold, Auto: rule.Auto, On: rule.On, Fallback: rule.Fallback,
		PrefillGate: rule.PrefillGate, StartGate: rule.StartGate, DecodeGate: rule.DecodeGate, Connector: rule.Connector, LoadCredit: rule.LoadCredit, Weights: s.Weights, Busy: s.Busy,
	})
	if err != nil {
		return // figures that JSON has no number for: the reader says that they are not there
	}
	r.newest, r.revision = s, d.Revision
	members := string(text[1 : len(text)-1])
	if r.settings[d.Revision] != members {
		r.settings[d.Revision] = members
		r.add(KindSettings, members)
	}
}

// price enters a revision of the costs, unless JSON has no number for one of its figures:
// the reader then says that they are not there.
func (r *References) price(m *cost.Model) {
	r.costs[m.Revision] = true
	text, err := json.Marshal(costsLine{Revision: m.Revision, Local: m.Local, Prefill: m.Prefill, Transfer: m.Transfer, Stall: m.Stall, Limit: m.Limit, Beyond: m.Beyond, Lost: m.Lost, Slow: slowLines(m.Slow)})
	if err == nil {
		r.add(KindCosts, string(text[1:len(text)-1]))
	}
}

// describe finds or makes the number of a worker as it is described now.
func (r *References) describe(w *workers.Worker) uint64 {
	o := object{p: r.text[:0], begun: true}
	o.text("worker", w.Name)
	o.str("role", string(w.Role))
	o.str("engine", string(w.WireEngine()))
	o.str("version", w.Version)
	o.str("connector", string(w.Connector))
	o.str("cache_dtype", w.CacheType)
	o.some("block_size_tokens", w.BlockSize)
	o.some("kv_blocks", w.KVBlocks)
	o.str("chat_tokens", w.ChatTokens)
	o.str("revision", w.Revision)
	o.str("slice", w.Slice)
	o.strs("models", w.Bases())
	r.text = o.p
	n, ok := r.byText[string(o.p)]
	if !ok {
		n = r.next
		r.next++
		r.byText[string(o.p)] = n
		r.add(KindWorker, fmt.Sprintf(`"n":%d%s`, n, o.p))
	}
	if len(r.byWorker) >= r.limit {
		clear(r.byWorker) // they are many by one text
	}
	r.byWorker[w] = n
	return n
}

// AppendRecord appends the line of a record in the project's own format, before a
// decision the lines of what it refers to that are new.
func (r *References) AppendRecord(dst []byte, rec *Record) ([]byte, error) {
	if rec.Kind != KindDecision {
		return AppendRecord(dst, rec)
	}
	written, full := r.Len(), r.full
	refs := r.Refer(rec.Decision, nil)
	if r.full != full {
		written = 0
	}
	for ; written < r.Len(); written++ {
		dst = r.AppendLine(dst, written, rec.Time)
	}
	return AppendDecision(dst, rec.Time.Microseconds(), rec.Decision, refs), nil
}
