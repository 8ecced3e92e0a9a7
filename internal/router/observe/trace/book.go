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
// least twice as many of the newest, so that it has all that a book's lines refer to.
const (
	maxDescriptions = 1 << 14
	maxDescribed    = 32 << 20 // bytes
)

// Book numbers the descriptions of workers and holds the settings that decisions refer to,
// and the costs in force, so that each is written once. A full book forgets all and writes
// again what is referred to from then on. The zero value is not ready: make it with NewBook.
type Book struct {
	byWorker map[*workers.Worker]uint64
	byText   map[string]uint64
	settings map[uint64]string // by revision
	costs    map[uint64]bool   // by revision
	// The settings that were referred to last.
	newest   *decide.Settings
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

// NewBook makes an empty Book.
func NewBook() *Book {
	return &Book{byWorker: map[*workers.Worker]uint64{}, byText: map[string]uint64{}, settings: map[uint64]string{}, costs: map[uint64]bool{}, next: 1, limit: maxDescriptions}
}

// Len is how many lines AppendLine has.
func (b *Book) Len() int { return len(b.lines) }

// Full is how often the book was full and began again.
func (b *Book) Full() int { return b.full }

// AppendLine appends line i.
func (b *Book) AppendLine(dst []byte, i int, at time.Duration) []byte {
	l := &b.lines[i]
	o := begin(dst, l.kind, at.Microseconds())
	o.p = append(append(o.p, ','), l.members...)
	return append(o.p, '}', '\n')
}

func (b *Book) add(kind Kind, members string) {
	b.lines = append(b.lines, description{kind, members})
	b.bytes += len(members)
}

func (b *Book) forget() {
	clear(b.byWorker)
	clear(b.byText)
	clear(b.settings)
	clear(b.costs)
	b.newest, b.lines, b.bytes = nil, nil, 0
	b.full++
}

// Refer enters what a decision refers to and appends the numbers of its candidates'
// workers, those of the decode phase first, to refs.
func (b *Book) Refer(d *Decision, refs []uint64) []uint64 {
	if len(b.lines) >= b.limit || b.bytes >= maxDescribed {
		b.forget()
	}
	if b.newest != d.Settings || b.revision != d.Revision {
		b.set(d)
	}
	if m := d.Input.Costs; m != nil && !b.costs[m.Revision] {
		b.price(m)
	}
	for _, peers := range [...][]workers.Peer{d.Input.DecodePeers, d.Input.PrefillPeers} {
		for i := range peers {
			w := peers[i].Worker
			n, ok := b.byWorker[w]
			if !ok {
				n = b.describe(w)
			}
			refs = append(refs, n)
		}
	}
	return refs
}

// set enters the settings of a decision.
func (b *Book) set(d *Decision) {
	s := d.Settings
	r := &s.Rule
	text, err := json.Marshal(settingsLine{
		Revision: d.Revision, Decode: s.Decode, Prefill: s.Prefill, Threshold: r.Threshold, Auto: r.Auto, On: r.On, Fallback: r.Fallback,
		PrefillGate: r.PrefillGate, StartGate: r.StartGate, DecodeGate: r.DecodeGate, Connector: r.Connector, LoadCredit: r.LoadCredit, Weights: s.Weights, Busy: s.Busy,
	})
	if err != nil {
		return // figures that JSON has no number for: the reader says that they are not there
	}
	b.newest, b.revision = s, d.Revision
	members := string(text[1 : len(text)-1])
	if b.settings[d.Revision] != members {
		b.settings[d.Revision] = members
		b.add(KindSettings, members)
	}
}

// price enters a revision of the costs, unless JSON has no number for one of its figures:
// the reader then says that they are not there.
func (b *Book) price(m *cost.Model) {
	b.costs[m.Revision] = true
	text, err := json.Marshal(costsLine{Revision: m.Revision, Local: m.Local, Prefill: m.Prefill, Transfer: m.Transfer, Stall: m.Stall, Limit: m.Limit, Beyond: m.Beyond, Lost: m.Lost, Slow: slowLines(m.Slow)})
	if err == nil {
		b.add(KindCosts, string(text[1:len(text)-1]))
	}
}

// describe finds or makes the number of a worker as it is described now.
func (b *Book) describe(w *workers.Worker) uint64 {
	o := object{p: b.text[:0], begun: true}
	o.text("worker", w.Name)
	o.str("role", string(w.Role))
	o.str("engine", string(w.WireEngine()))
	o.str("version", w.Version)
	o.str("connector", string(w.Connector))
	o.some("block_size_tokens", w.BlockSize)
	o.some("kv_blocks", w.KVBlocks)
	o.str("chat_tokens", w.ChatTokens)
	o.str("revision", w.Revision)
	o.str("slice", w.Slice)
	o.strs("models", w.Bases())
	b.text = o.p
	n, ok := b.byText[string(o.p)]
	if !ok {
		n = b.next
		b.next++
		b.byText[string(o.p)] = n
		b.add(KindWorker, fmt.Sprintf(`"n":%d%s`, n, o.p))
	}
	if len(b.byWorker) >= b.limit {
		clear(b.byWorker) // they are many by one text
	}
	b.byWorker[w] = n
	return n
}

// AppendRecord appends the line of a record in the project's own format, before a
// decision the lines of what it refers to that are new.
func (b *Book) AppendRecord(dst []byte, r *Record) ([]byte, error) {
	if r.Kind != KindDecision {
		return AppendRecord(dst, r)
	}
	written, full := b.Len(), b.full
	refs := b.Refer(r.Decision, nil)
	if b.full != full {
		written = 0
	}
	for ; written < b.Len(); written++ {
		dst = b.AppendLine(dst, written, r.Time)
	}
	return AppendDecision(dst, r.Time.Microseconds(), r.Decision, refs), nil
}
