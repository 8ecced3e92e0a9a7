package engine

import "container/heap"

// Agenda is what happens when, ties in the order of making.
type Agenda struct {
	timers timers
	made   uint64
}

// Add has do called at a time.
func (a *Agenda) Add(at Time, do func()) {
	a.made++
	heap.Push(&a.timers, timer{at: at, no: a.made, do: do})
}

// Next is when the first is due, and false without one.
func (a *Agenda) Next() (Time, bool) {
	if len(a.timers) == 0 {
		return 0, false
	}
	return a.timers[0].at, true
}

// Do takes the first away and does it.
func (a *Agenda) Do() { heap.Pop(&a.timers).(timer).do() }

type timer struct {
	at Time
	no uint64
	do func()
}

type timers []timer

func (t timers) Len() int { return len(t) }
func (t timers) Less(i, j int) bool {
	return t[i].at < t[j].at || t[i].at == t[j].at && t[i].no < t[j].no
}
func (t timers) Swap(i, j int) { t[i], t[j] = t[j], t[i] }

// Push and Pop are for package heap.
func (t *timers) Push(x any) { *t = append(*t, x.(timer)) }

// Pop is for package heap.
func (t *timers) Pop() any {
	last := len(*t) - 1
	x := (*t)[last]
	(*t)[last] = timer{}
	*t = (*t)[:last]
	return x
}
