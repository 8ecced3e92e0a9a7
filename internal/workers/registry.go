package workers

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/wait"
)

// ErrGone says that a worker left the fleet, or became another process.
var ErrGone = errors.New("worker is no longer in the fleet")

// Registry holds the fleet. Readers take a Snapshot, which costs one atomic
// load; writers make a new one, one at a time.
//
// A removal has two phases: the worker leaves the snapshot immediately, but the slots of its
// ranks stay reserved until ReleaseRanks, so that no index or ledger keyed by slot takes a new
// rank for the old one.
type Registry struct {
	sink eventlog.Sink
	snap atomic.Pointer[Snapshot]

	mu      sync.Mutex
	entries map[string]*entry
	names   Names
	roles   RoleLabels
	slots   slotPool
	joined  uint64 // ranks so far
	retired map[*Rank]struct{}
	subs    map[chan struct{}]struct{}
}

type entry struct {
	spec    Spec
	source  string
	learned Learned
	worker  *Worker
}

// NewRegistry makes an empty registry that reports every change to sink.
func NewRegistry(sink eventlog.Sink) *Registry {
	r := &Registry{
		sink:    sink,
		entries: map[string]*entry{},
		retired: map[*Rank]struct{}{},
		subs:    map[chan struct{}]struct{}{},
	}
	r.snap.Store(newSnapshot(0, nil, &Names{}, -1))
	return r
}

// Snapshot is the fleet as it is now.
func (r *Registry) Snapshot() *Snapshot { return r.snap.Load() }

// Subscribe makes a channel that holds one token whenever the fleet has changed
// since the last receive; any number of changes make one token. The reader
// takes the newest Snapshot and, if it wants the steps, the Diff with the one it
// saw last. The channel starts with a token. cancel ends the subscription; it
// does not close the channel.
func (r *Registry) Subscribe() (changed <-chan struct{}, cancel func()) {
	c := make(chan struct{}, 1)
	c <- struct{}{}
	r.mu.Lock()
	r.subs[c] = struct{}{}
	r.mu.Unlock()
	return c, func() {
		r.mu.Lock()
		delete(r.subs, c)
		r.mu.Unlock()
	}
}

// Apply replaces the workers of one source by specs, all or nothing. Workers
// that stay keep their State, Ranks and learned facts. The error names every
// problem.
func (r *Registry) Apply(source string, specs []Spec) ([]Change, error) {
	prepared, err := prepare(specs)
	if err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.apply(source, prepared)
}

// ApplyWithRoles is Apply, and replaces the label values that stand for a role, for the
// workers of all sources that are there and that come. No snapshot has the new workers with
// roles of the old labels, or the other way round. An error leaves both as they are.
func (r *Registry) ApplyWithRoles(source string, specs []Spec, l RoleLabels) ([]Change, error) {
	prepared, err := prepare(specs)
	if err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	old := r.roles
	r.roles = l.clone()
	if err := r.edit(source, prepared); err != nil {
		r.roles = old
		return nil, err
	}
	r.rebuildAll()
	return r.publish(), nil
}

// Modify changes the workers of one source by a function of the present ones,
// as the admin API does to add or remove a single one. An error of edit leaves
// the fleet as it is. edit must not call the registry.
func (r *Registry) Modify(source string, edit func([]Spec) ([]Spec, error)) ([]Change, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var specs []Spec
	for _, name := range slices.Sorted(maps.Keys(r.entries)) {
		if e := r.entries[name]; e.source == source {
			specs = append(specs, e.spec.clone())
		}
	}
	specs, err := edit(specs)
	if err != nil {
		return nil, err
	}
	prepared, err := prepare(specs)
	if err != nil {
		return nil, err
	}
	return r.apply(source, prepared)
}

// prepare checks specs by themselves, with each other, and reads key files.
func prepare(specs []Spec) ([]Spec, error) {
	var errs []error
	out := make([]Spec, len(specs))
	names := make(map[string]string, len(specs))
	urls := make(map[string]string, len(specs))
	for i, s := range specs {
		s = s.clone()
		if err := s.Validate(); err != nil {
			errs = append(errs, at(s.Origin, err))
			continue
		}
		if err := s.ReadAPIKey(); err != nil {
			errs = append(errs, at(s.Origin, err))
		}
		if first, dup := names[s.Name]; dup {
			errs = append(errs, at(s.Origin, fmt.Errorf("worker %s is given twice%s", s.Name, first)))
		} else if other, dup := urls[s.URL.String()]; dup {
			errs = append(errs, at(s.Origin, fmt.Errorf("worker %s has the URL of worker %s (%s)", s.Name, other, s.URL)))
		}
		names[s.Name] = ""
		if s.Origin != "" {
			names[s.Name] = " (first in " + s.Origin + ")"
		}
		urls[s.URL.String()] = s.Name
		out[i] = s
	}
	return out, errors.Join(errs...)
}

func at(origin string, err error) error {
	if origin == "" {
		return err
	}
	return fmt.Errorf("%s: %w", origin, err)
}

// ApplyEach is Apply for a source whose specs come from many hands, such as the
// pods of a cluster: those that cannot be taken are left out, each with its error
// in refused by the index in specs, and do not keep the others out.
func (r *Registry) ApplyEach(source string, specs []Spec) (changes []Change, refused map[int]error, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	refused = map[int]error{}
	taken := make([]Spec, 0, len(specs))
	names, urls, others := map[string]string{}, map[string]string{}, r.urlsOfOthers(source)
	for i := range specs {
		one, err := prepare(specs[i : i+1])
		if err == nil {
			err = r.foreign(source, &one[0], others)
		}
		if err == nil {
			s := &one[0]
			url := s.URL.String()
			if first, dup := names[s.Name]; dup {
				err = fmt.Errorf("worker %s is there twice (first from %s)", s.Name, first)
			} else if other, dup := urls[url]; dup {
				err = fmt.Errorf("worker %s has the URL of worker %s (%s)", s.Name, other, url)
			} else {
				names[s.Name], urls[url] = s.Origin, s.Name
			}
		}
		if err != nil {
			refused[i] = err
			continue
		}
		taken = append(taken, one[0])
	}
	changes, err = r.apply(source, taken)
	return changes, refused, err
}

func (r *Registry) apply(source string, specs []Spec) ([]Change, error) {
	if err := r.edit(source, specs); err != nil {
		return nil, err
	}
	return r.publish(), nil
}

// edit replaces the entries of one source; nobody sees it before publish. An
// error leaves them as they are.
func (r *Registry) edit(source string, specs []Spec) error {
	if source == "" {
		return errors.New("a set of workers without a source")
	}
	urls := r.urlsOfOthers(source)
	var errs []error
	for i := range specs {
		if err := r.foreign(source, &specs[i], urls); err != nil {
			errs = append(errs, at(specs[i].Origin, err))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	stays := make(map[string]bool, len(specs))
	for _, s := range specs {
		old := r.entries[s.Name]
		if old != nil && old.spec.URL.String() == s.URL.String() && old.spec.Process == s.Process {
			stays[s.Name] = true
		}
	}
	for name, e := range r.entries {
		if e.source == source && !stays[name] {
			r.retire(e.worker.Ranks)
			delete(r.entries, name)
		}
	}
	for i := range specs {
		s := specs[i]
		e := r.entries[s.Name]
		if e == nil {
			e = &entry{source: source}
			r.entries[s.Name] = e
		}
		e.spec = s
		_ = r.rebuild(e) // a conflict is the worker's, who is in the fleet with it
	}
	return nil
}

// urlsOfOthers are the URLs of the workers of other sources, with their names.
func (r *Registry) urlsOfOthers(source string) map[string]string {
	urls := map[string]string{}
	for name, e := range r.entries {
		if e.source != source {
			urls[e.spec.URL.String()] = name
		}
	}
	return urls
}

// foreign says what of a spec belongs to a worker of another source already.
func (r *Registry) foreign(source string, s *Spec, urls map[string]string) error {
	if e := r.entries[s.Name]; e != nil && e.source != source {
		return fmt.Errorf("worker %s is already there, stated %s", s.Name, statedBy(e.source, e.spec.Origin))
	}
	if other, dup := urls[s.URL.String()]; dup {
		return fmt.Errorf("worker %s has the URL of worker %s (%s)", s.Name, other, s.URL)
	}
	return nil
}

// Update merges what an engine reported into the worker w. The error is a
// *Contradiction, or several joined, when the engine contradicts what was
// stated: the worker is then unhealthy for that reason until either side
// changes. ErrGone says that w is no longer in the fleet.
func (r *Registry) Update(w *Worker, l Learned) ([]Change, error) {
	l = l.clone()
	r.mu.Lock()
	defer r.mu.Unlock()
	e := r.entries[w.Name]
	if e == nil || e.worker.State != w.State {
		return nil, fmt.Errorf("worker %s: %w", w.Name, ErrGone)
	}
	if l.Engine != "" && e.learned.Engine != "" && l.Engine != e.learned.Engine {
		e.learned = Learned{} // another program answers now: nothing of the old one holds
	}
	e.learned = e.learned.merge(l)
	err := r.rebuild(e)
	return r.publish(), err
}

// SetNames replaces the aliases of models and the default model. The error names
// everything that is wrong with them, and nothing has changed then.
func (r *Registry) SetNames(n Names) error {
	if err := n.Check(); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if !n.equal(&r.names) {
		r.names = Names{Aliases: maps.Clone(n.Aliases), Default: n.Default, Any: n.Any}
		r.store()
	}
	return nil
}

func (r *Registry) rebuildAll() {
	for _, e := range r.entries {
		_ = r.rebuild(e) // a conflict is the worker's, who is in the fleet with it
	}
}

// ReleaseRanks frees the slots of retired ranks, such as Change.Retired, once nothing is
// keyed by them any more. Ranks that are still in the fleet are left alone, so it may be
// called with all ranks of a worker, and twice.
func (r *Registry) ReleaseRanks(ranks ...*Rank) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, k := range ranks {
		if _, ok := r.retired[k]; ok {
			delete(r.retired, k)
			r.slots.free(k.Slot)
		}
	}
}

// Retired are the ranks whose slots wait for their release. A rank that came and
// went between two looks at the fleet is among them and in no Change.
func (r *Registry) Retired() []*Rank {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Collect(maps.Keys(r.retired))
}

func (r *Registry) retire(ranks []*Rank) {
	for _, k := range ranks {
		r.retired[k] = struct{}{}
	}
}

// rebuild makes the entry's worker again. The old one stays if nothing differs,
// so that equal descriptions are one pointer.
func (r *Registry) rebuild(e *entry) error {
	spec := e.spec
	r.roles.apply(&spec)
	w, err := describe(&spec, e.source, &e.learned)
	want := ranksOf(&spec, &e.learned)
	old := e.worker
	if old == nil {
		w.State = &State{}
	} else {
		w.State = old.State
		w.Ranks = slices.Clone(old.Ranks[:min(want, len(old.Ranks))])
		if want < len(old.Ranks) {
			r.retire(old.Ranks[want:])
		}
	}
	for dp := len(w.Ranks); dp < want; dp++ {
		r.joined++
		w.Ranks = append(w.Ranks, &Rank{
			Slot: r.slots.take(), Number: r.joined, WorkerName: w.Name, DP: dp, Label: route.RankLabel(w.Name, dp),
		})
	}
	w.State.setDrain(leaving, spec.Leaving != "")
	w.State.setConflict(cmp.Or(strings.ReplaceAll(w.Conflict, "worker "+w.Name+": ", ""), spec.NotReady), time.Now())
	if old != nil && len(changedFields(old, w)) == 0 {
		return err
	}
	e.worker = w
	return err
}

// publish stores a new snapshot if anything changed and reports the changes.
func (r *Registry) publish() []Change {
	old := r.snap.Load()
	same := len(old.Workers) == len(r.entries)
	for _, w := range old.Workers {
		if e := r.entries[w.Name]; e == nil || e.worker != w {
			same = false
			break
		}
	}
	if same {
		return nil
	}
	changes := Diff(old, r.store())
	now := time.Now()
	for _, c := range changes {
		r.sink.Emit(c.Event(now))
	}
	return changes
}

func (r *Registry) store() *Snapshot {
	list := make([]*Worker, 0, len(r.entries))
	for _, e := range r.entries {
		list = append(list, e.worker)
	}
	slices.SortFunc(list, func(a, b *Worker) int { return strings.Compare(a.Name, b.Name) })
	names := r.names // a snapshot's own
	old := r.snap.Load()
	s := newSnapshot(old.Revision+1, list, &names, r.slots.max())
	s.remember(old)
	r.snap.Store(s)
	for c := range r.subs {
		wait.Poke(c)
	}
	return s
}

// slotPool hands out the smallest free number.
type slotPool struct {
	used []uint64 // one bit a slot
}

func (p *slotPool) take() uint32 {
	for i, word := range p.used {
		if word != ^uint64(0) {
			for b := range 64 {
				if word&(1<<b) == 0 {
					p.used[i] |= 1 << b
					return uint32(i*64 + b)
				}
			}
		}
	}
	p.used = append(p.used, 1)
	return uint32((len(p.used) - 1) * 64)
}

func (p *slotPool) free(slot uint32) { p.used[slot/64] &^= 1 << (slot % 64) }

func (p *slotPool) max() int {
	for i := len(p.used) - 1; i >= 0; i-- {
		for b := 63; b >= 0; b-- {
			if p.used[i]&(1<<b) != 0 {
				return i*64 + b
			}
		}
	}
	return -1
}
