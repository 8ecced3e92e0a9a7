package workers

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// Learned is what an engine reported of itself. A zero field was not reported and
// leaves what was known before.
type Learned struct {
	// Facts.Models are all names that the engine answers to.
	Facts
	// LoRAs are those of Models that are adapters, and Several is as in Worker. The three
	// are taken together.
	LoRAs   []string
	Several bool
	DP      int
	// DPStart is as in Worker; nil when not reported.
	DPStart *int
	// Events is nil when not reported, and empty when the engine reported that it
	// publishes none.
	Events []EventSource
}

// merge returns l with what n reports in its place.
func (l Learned) merge(n Learned) Learned {
	from := make(map[Field]string, len(l.From)+len(n.From))
	maps.Copy(from, l.From)
	maps.Copy(from, n.From)
	if n.Models == nil {
		n.LoRAs, n.Several = l.LoRAs, l.Several
	}
	n.complete(&l.Facts)
	keep(&n.DP, l.DP)
	keep(&n.DPStart, l.DPStart)
	if n.Events == nil {
		n.Events = l.Events
	}
	n.From = from
	return n
}

func keep[T comparable](dst *T, old T) {
	var zero T
	if *dst == zero {
		*dst = old
	}
}

// clone copies what a caller could change later.
func (l Learned) clone() Learned {
	c := Learned{}.merge(l)
	c.Models, c.LoRAs, c.Events = slices.Clone(l.Models), slices.Clone(l.LoRAs), slices.Clone(l.Events)
	if l.Bootstrap != nil {
		b := *l.Bootstrap
		c.Bootstrap = &b
	}
	if l.DPStart != nil {
		c.DPStart = new(*l.DPStart)
	}
	return c
}

// Contradiction is a fact that was stated one way and that the engine
// reports another way.
type Contradiction struct {
	Worker     string
	Field      Field
	Stated     string
	StatedBy   string
	Reported   string
	ReportedBy string
}

// Error names both sides.
func (c *Contradiction) Error() string {
	reported := c.Reported
	if c.ReportedBy != "" {
		reported += " (" + c.ReportedBy + ")"
	}
	words := strings.ReplaceAll(string(c.Field), "_", " ")
	switch c.Field {
	case FieldDP:
		words = "data-parallel size"
	case FieldDPStart:
		words = "first data-parallel rank"
	case FieldLB:
		words = "load balancing of ranks"
	case FieldModels:
		words = "model"
	}
	return fmt.Sprintf("worker %s: %s %s stated %s, engine says %s", c.Worker, words, c.Stated, c.StatedBy, reported)
}

// contradictions compares what was stated with what the engine reported.
func contradictions(s *Spec, source string, l *Learned) error {
	by := statedBy(source, s.Origin)
	var errs []error
	check := func(f Field, differs bool, stated, reported string) {
		if differs {
			errs = append(errs, &Contradiction{Worker: s.Name, Field: f, Stated: stated, StatedBy: by, Reported: reported, ReportedBy: l.From[f]})
		}
	}
	ints := func(f Field, stated, reported int) {
		check(f, stated != 0 && reported != 0 && stated != reported, strconv.Itoa(stated), strconv.Itoa(reported))
	}
	if s.Engine == Sim {
		dialect := s.Dialect
		keep(&dialect, VLLM)
		check(FieldEngine, l.Engine != "" && l.Engine != Sim && l.Engine != dialect, "sim with the wire of "+string(dialect), string(l.Engine))
	} else {
		check(FieldEngine, s.Engine != "" && l.Engine != "" && s.Engine != l.Engine, string(s.Engine), string(l.Engine))
	}
	check(FieldRole, s.Role != "" && l.Role != "" && s.Role != l.Role, string(s.Role), string(l.Role))
	ints(FieldDP, s.DP, l.DP)
	if l.DPStart != nil {
		by := " (" + l.From[FieldDPStart] + ")"
		first := "its first rank is " + strconv.Itoa(*l.DPStart) + by
		check(FieldDPStart, s.DPStart != 0 && s.DPStart != *l.DPStart, strconv.Itoa(s.DPStart), strconv.Itoa(*l.DPStart))
		check(FieldLB, s.LB == LBInternal && *l.DPStart > 0, string(s.LB), first)
		check(FieldLB, s.LB == LBExternal && l.DP > 1, string(s.LB), fmt.Sprintf("%d ranks are behind this port%s", l.DP, by))
	}
	if stated, reported := s.Connector.Reported(), l.Connector.Reported(); stated != reported && stated != ConnectorNone {
		check(FieldConnector, reported != ConnectorNone, string(s.Connector), string(l.Connector))
	}
	ints(FieldBlockSize, s.BlockSize, l.BlockSize)
	check(FieldModelLen, l.MaxModelLen > 0 && s.MaxModelLen > l.MaxModelLen, strconv.Itoa(s.MaxModelLen), strconv.Itoa(l.MaxModelLen))
	if l.Models != nil {
		for _, m := range s.Models {
			check(FieldModels, !slices.Contains(l.Models, m), strconv.Quote(m), strings.Join(quoted(l.Models), ", "))
		}
	}
	if s.Bootstrap != nil && l.Bootstrap != nil {
		check(FieldBootstrap, s.Bootstrap.Port != l.Bootstrap.Port, "port "+strconv.Itoa(s.Bootstrap.Port), "port "+strconv.Itoa(l.Bootstrap.Port))
	}
	return errors.Join(errs...)
}

func quoted(words []string) []string {
	if len(words) == 0 {
		return []string{"none"}
	}
	const most = 8
	var out []string
	for i, w := range words {
		if i == most {
			return append(out, fmt.Sprintf("and %d more", len(words)-most))
		}
		out = append(out, strconv.Quote(w))
	}
	return out
}

func statedBy(source, origin string) string {
	switch {
	case source == SourceFlag:
		return "on the command line"
	case source == SourceAdmin:
		return "through the admin API"
	case source == SourceSim:
		return "by the simulator"
	case origin != "":
		return "in " + origin
	default:
		return "by source " + source
	}
}

// describe makes a worker out of what was stated and what was learned. State
// and Ranks are left to the caller.
func describe(s *Spec, source string, l *Learned) (*Worker, error) {
	conflict := contradictions(s, source, l)
	w := &Worker{
		Facts: s.Facts, Name: s.Name, URL: s.URL, DPStart: s.DPStart, Labels: s.Labels, APIKey: s.APIKey, Source: source, Origin: s.Origin,
	}
	w.Several = len(w.Models) > 1 // as far as is known
	reported := l.Facts
	if reported.LastBlock == LastBlockKept {
		reported.LastBlock = "" // as without
	}
	w.complete(&reported)
	w.From = origins(s, source, l)
	keep(&w.Engine, VLLM)
	if w.Engine == Sim {
		if l.Engine != Sim {
			keep(&w.Dialect, l.Engine)
		}
		keep(&w.Dialect, VLLM)
	}
	if l.DPStart != nil {
		keep(&w.DPStart, *l.DPStart)
	}
	if w.DPStart > 0 {
		if ranksOf(s, l) > 1 {
			keep(&w.LB, LBHybrid)
		} else {
			keep(&w.LB, LBExternal)
		}
	}
	keep(&w.Role, Aggregated)
	keep(&w.Connector, defaultConnector(w))
	if l.Models != nil {
		adapter := func(m string) bool { return slices.Contains(l.LoRAs, m) }
		w.Models, w.LoRAs, w.Several = append(slices.DeleteFunc(slices.Clone(l.Models), adapter), l.LoRAs...), l.LoRAs, l.Several
	}
	if b := w.Bootstrap; b != nil {
		w.Bootstrap = &Bootstrap{Host: cmp.Or(b.Host, s.Host()), Port: b.Port}
	}
	var eventErr error
	switch {
	case s.EventsOff:
	case len(s.Events) > 0:
		w.Events, eventErr = s.eventSources(ranksOf(s, l))
		if eventErr != nil {
			eventErr = fmt.Errorf("worker %s: %w", s.Name, eventErr)
		}
	default:
		w.Events = l.Events
	}
	conflict = errors.Join(conflict, eventErr)
	if conflict != nil {
		w.Conflict = oneLine(conflict).Error()
	}
	w.Classify()
	return w, conflict
}

// origins says where the facts of a worker come from: what was stated has precedence over
// what the engine reported.
func origins(s *Spec, source string, l *Learned) map[Field]string {
	from := make(map[Field]string, len(l.From)+len(s.From)+4)
	maps.Copy(from, l.From)
	for _, f := range s.stated() {
		if f != FieldModels || l.Models == nil {
			from[f] = statedBy(source, s.Origin)
		}
	}
	maps.Copy(from, s.From)
	if _, reported := from[FieldRole]; !reported {
		from[FieldRole] = "default: not stated"
	}
	return from
}

// stated are the facts that s states.
func (s *Spec) stated() []Field {
	var out []Field
	for i := range facts {
		if x := &facts[i]; x.at != nil && !x.in(&s.Facts).IsZero() {
			out = append(out, x.field)
		}
	}
	for _, f := range []struct {
		field  Field
		stated bool
	}{{FieldDP, s.DP != 0}, {FieldDPStart, s.DPStart != 0}, {FieldEvents, s.EventsOff || len(s.Events) > 0}} {
		if f.stated {
			out = append(out, f.field)
		}
	}
	return out
}

// defaultConnector is how KV moves where neither the operator nor the engine
// said so: the way in which an engine of a pool does it by default. A wrong
// guess shows in the first prefill, which then has no transfer parameters.
func defaultConnector(w *Worker) Connector {
	if w.Role == Aggregated {
		return ConnectorNone
	}
	switch w.WireEngine() {
	case VLLM:
		return ConnectorNIXL
	case SGLang:
		return ConnectorSGLang
	}
	return ConnectorNone
}

// ranksOf is the number of ranks: stated, else reported, else one.
func ranksOf(s *Spec, l *Learned) int {
	n := s.DP
	keep(&n, l.DP)
	if n == 0 && s.LB == LBExternal {
		n = 1
	}
	if n == 0 {
		n = len(s.Events) // several endpoints are one for each rank
	}
	return min(max(n, 1), maxDP)
}
