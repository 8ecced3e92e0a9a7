package workers

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/dynctl/dynctl/internal/eventlog"
)

// Snapshot is the fleet at one moment. It never changes; what its workers'
// State and Ranks hold does.
type Snapshot struct {
	// Revision grows with every change of the fleet.
	Revision uint64
	// Workers are sorted by name, Ranks by worker and data-parallel rank.
	Workers []*Worker
	Ranks   []*Rank

	byName  map[string]*Worker
	byModel map[string][]*Worker
	models  []string
	only    string
	names   *Names
	// patterns are those of the aliases, in the order in which they are tried.
	patterns []string
	bySlot   []slotOwner
	// left are models of workers that have left the fleet, the newest last; no worker serves
	// them now.
	left []string
}

type slotOwner struct {
	worker *Worker
	rank   *Rank
}

// Worker finds a worker by name.
func (s *Snapshot) Worker(name string) (*Worker, bool) {
	w, ok := s.byName[name]
	return w, ok
}

// Model lists the workers that serve a model by the engines' name for it, by the
// workers' names; for "" all workers. An alias is no such name, also when the model
// has left: what was decided for one model must not reach another. The list is shared:
// do not change it.
func (s *Snapshot) Model(name string) []*Worker {
	if name == "" {
		return s.Workers
	}
	return s.byModel[name]
}

// Candidates lists the workers that a request for a model may go to: those of [Snapshot.Model],
// or where no worker serves the name and the engines resolve names themselves ([Names.Any]) all
// workers. The list is shared: do not change it.
func (s *Snapshot) Candidates(name string) (list []*Worker, unlisted bool) {
	if list := s.Model(name); len(list) > 0 || !s.names.Any {
		return list, false
	}
	return s.Workers, true
}

// Knows reports whether a model, by the engines' name, is served, is named by the configuration
// as the default or the model of an alias, or was served by workers that have left the fleet. A
// model that a worker of the fleet has dropped is unknown.
func (s *Snapshot) Knows(model string) bool {
	if _, served := s.byModel[model]; served || model == "" {
		return served
	}
	for _, target := range s.names.Aliases {
		if target == model {
			return true
		}
	}
	return s.Canonical(s.names.Default) == model || slices.Contains(s.left, model)
}

// maxLeft bounds the models without a worker that a fleet remembers.
const maxLeft = 1024

// remember makes s know the models of workers that have left the fleet since old, and what old
// remembers.
func (s *Snapshot) remember(old *Snapshot) {
	s.left = slices.Clone(old.left)
	for _, model := range slices.Sorted(maps.Keys(old.byModel)) {
		if !slices.ContainsFunc(old.byModel[model], func(w *Worker) bool { return s.byName[w.Name] != nil }) {
			s.left = append(s.left, model)
		}
	}
	s.left = slices.DeleteFunc(s.left, func(model string) bool { return s.byModel[model] != nil })
	s.left = s.left[max(0, len(s.left)-maxLeft):]
}

// Only is the only model that the workers serve, adapters aside; empty when they serve none or
// several.
func (s *Snapshot) Only() string { return s.only }

// Canonical is the name under which the engines know a model that [Snapshot.Models]
// lists: the target of an alias, else the name itself. A served model is never hidden by
// an alias. For the name in a client's request see [Snapshot.Resolve].
func (s *Snapshot) Canonical(name string) string {
	if _, served := s.byModel[name]; served {
		return name
	}
	model, _ := s.names.alias(name)
	return model
}

// Models are the names of all served models and of the aliases of served models,
// patterns left out, sorted. The list is shared: do not change it.
func (s *Snapshot) Models() []string { return s.models }

// Slot finds the worker and rank that hold a slot; ok is false when no worker of this snapshot
// does.
func (s *Snapshot) Slot(slot uint32) (w *Worker, r *Rank, ok bool) {
	if int64(slot) >= int64(len(s.bySlot)) || s.bySlot[slot].rank == nil {
		return nil, nil, false
	}
	o := s.bySlot[slot]
	return o.worker, o.rank, true
}

// newSnapshot indexes workers, which must be sorted by name.
func newSnapshot(rev uint64, list []*Worker, names *Names, maxSlot int) *Snapshot {
	s := &Snapshot{
		Revision: rev, Workers: list, names: names, patterns: names.patterns(), only: onlyModel(list),
		byName:  make(map[string]*Worker, len(list)),
		byModel: map[string][]*Worker{},
		bySlot:  make([]slotOwner, maxSlot+1),
	}
	for _, w := range list {
		s.byName[w.Name] = w
		for _, m := range w.Models {
			if l := s.byModel[m]; len(l) == 0 || l[len(l)-1] != w {
				s.byModel[m] = append(l, w)
			}
		}
		for _, r := range w.Ranks {
			s.Ranks = append(s.Ranks, r)
			s.bySlot[r.Slot] = slotOwner{w, r}
		}
	}
	s.models = slices.Collect(maps.Keys(s.byModel))
	for a, target := range names.Aliases {
		if _, served := s.byModel[a]; !served && s.byModel[target] != nil && !IsPattern(a) {
			s.models = append(s.models, a)
		}
	}
	slices.Sort(s.models)
	return s
}

// ChangeKind says what happened to a worker.
type ChangeKind string

// The kinds of a Change.
const (
	Added   ChangeKind = "added"
	Removed ChangeKind = "removed"
	Changed ChangeKind = "changed"
)

// Change is the difference of one worker between two snapshots. A worker whose
// URL changed is another process: it is removed and added.
type Change struct {
	Kind ChangeKind
	// Old is nil for an added worker, New for a removed one.
	Old, New *Worker
	// Fields are the facts that changed; for Changed only.
	Fields []Field
	// Started and Retired are the ranks that came and went. A retired rank's
	// slot stays reserved until Registry.ReleaseRanks.
	Started, Retired []*Rank
}

// Worker is the newest description of the worker.
func (c Change) Worker() *Worker {
	if c.New != nil {
		return c.New
	}
	return c.Old
}

// Diff lists what changed from one snapshot to another, by name; removals of a
// name come before its addition. A nil old stands for an empty fleet.
func Diff(old, now *Snapshot) []Change {
	var before []*Worker
	if old != nil {
		before = old.Workers
	}
	var out []Change
	i, j := 0, 0
	for i < len(before) || j < len(now.Workers) {
		order := 0
		switch {
		case i == len(before):
			order = 1
		case j == len(now.Workers):
			order = -1
		default:
			order = cmp.Compare(before[i].Name, now.Workers[j].Name)
		}
		switch {
		case order < 0:
			out = append(out, removed(before[i]))
			i++
		case order > 0:
			out = append(out, added(now.Workers[j]))
			j++
		default:
			out = append(out, compare(before[i], now.Workers[j])...)
			i, j = i+1, j+1
		}
	}
	return out
}

func added(w *Worker) Change { return Change{Kind: Added, New: w, Started: w.Ranks} }

func removed(w *Worker) Change { return Change{Kind: Removed, Old: w, Retired: w.Ranks} }

// compare lists what became of one name.
func compare(old, now *Worker) []Change {
	if old == now {
		return nil
	}
	if old.State != now.State {
		return []Change{removed(old), added(now)}
	}
	c := Change{Kind: Changed, Old: old, New: now, Fields: changedFields(old, now)}
	for _, r := range now.Ranks {
		if !slices.Contains(old.Ranks, r) {
			c.Started = append(c.Started, r)
		}
	}
	for _, r := range old.Ranks {
		if !slices.Contains(now.Ranks, r) {
			c.Retired = append(c.Retired, r)
		}
	}
	return []Change{c}
}

// Event puts the change into words.
func (c Change) Event(at time.Time) eventlog.Event {
	w := c.Worker()
	e := eventlog.Event{At: at, Severity: eventlog.Info, Kind: "worker_" + string(c.Kind), Worker: w.Name, Fields: map[string]any{
		"url": w.URL.String(), "role": string(w.Role), "engine": string(w.Engine), "source": w.Source, "ranks": len(w.Ranks),
	}}
	switch c.Kind {
	case Added:
		e.Text = fmt.Sprintf("worker %s added: %s %s at %s (%s)", w.Name, w.Role, w.Engine, w.URL, w.Source)
	case Removed:
		e.Text = fmt.Sprintf("worker %s removed: %s %s at %s (%s)", w.Name, w.Role, w.Engine, w.URL, w.Source)
	case Changed:
		names := make([]string, 0, len(c.Fields))
		words := make([]string, 0, len(c.Fields))
		for _, f := range c.Fields {
			names = append(names, string(f))
			if f != fieldConflict {
				words = append(words, c.words(f))
			}
		}
		e.Fields["changed"] = names
		e.Text = fmt.Sprintf("worker %s changed: %s", w.Name, strings.Join(words, ", "))
		if slices.Contains(c.Fields, fieldConflict) {
			if w.Conflict != "" {
				e.Severity, e.Kind, e.Text = eventlog.Error, "worker_conflict", w.Conflict
			} else {
				e.Kind, e.Text = "worker_conflict_resolved", fmt.Sprintf("worker %s agrees with what was stated again", w.Name)
			}
		}
	}
	return e
}

// words describes one changed fact.
func (c Change) words(f Field) string {
	x := factNamed(f)
	a, b := x.text(c.Old), x.text(c.New)
	if a == b {
		return string(f)
	}
	keep(&a, "unknown")
	keep(&b, "unknown")
	return fmt.Sprintf("%s %s to %s", f, a, b)
}
