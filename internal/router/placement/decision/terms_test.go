package decision

import (
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"
)

// TestEveryTermIsShown: each term has one row, in its place and with a title of its
// own, so that tables, reasons and JSON have all of them.
func TestEveryTermIsShown(t *testing.T) {
	var v Terms
	var fields []reflect.StructField
	for _, f := range reflect.VisibleFields(reflect.TypeFor[Terms]()) {
		if !f.Anonymous {
			fields = append(fields, f)
		}
	}
	if len(terms) != len(fields) {
		t.Fatalf("%d rows for %d terms", len(terms), len(fields))
	}
	titles := map[string]bool{}
	for i := range terms {
		if at := terms[i].At(&v); at != reflect.ValueOf(&v).Elem().FieldByIndex(fields[i].Index).Addr().Interface().(*float64) {
			t.Errorf("row %d, %s, is not that of %s", i, terms[i].Title, fields[i].Name)
		}
		if ms := strings.Contains(fields[i].Tag.Get("json"), "_ms"); ms != (terms[i].Unit == Milliseconds) {
			t.Errorf("row %d, %s, has the unit %q", i, terms[i].Title, terms[i].Unit)
		}
		if terms[i].Title == "" || titles[terms[i].Title] {
			t.Errorf("row %d: title %q", i, terms[i].Title)
		}
		titles[terms[i].Title] = true
	}
}

// TestCheaper: a credit speaks for the rank that has more of it, any other term for
// the one that has less.
func TestCheaper(t *testing.T) {
	a := &Candidate{Terms: Terms{OverlapCredit: 5, Queue: 1}}
	b := &Candidate{Terms: Terms{OverlapCredit: 2, Queue: 8}}
	for i := range terms {
		want := map[string]float64{"CREDIT": 3, "QUEUE": 7}[terms[i].Title]
		if got, back := terms[i].Cheaper(a, b), terms[i].Cheaper(b, a); got != want || back != -want {
			t.Errorf("%s: %v and %v, want %v", terms[i].Title, got, back, want)
		}
	}
}

// TestStallSaysWhoWaits: the reason is the requests where they are fewer, and else the prompt.
func TestStallSaysWhoWaits(t *testing.T) {
	stall := terms[slices.IndexFunc(terms, func(t Term) bool { return t.Title == "STALL" })]
	for _, c := range []struct {
		own, others int
		want        string
	}{
		{1, 4, "3 fewer requests wait there for the prompt"},
		{4, 4, "requests wait there for less of the prompt"},
		{5, 4, "requests wait there for less of the prompt"},
	} {
		if got := stall.Why(&Candidate{ActiveRequests: c.own}, &Candidate{ActiveRequests: c.others}); got != c.want {
			t.Errorf("%d and %d requests: %q, want %q", c.own, c.others, got, c.want)
		}
	}
}

// TestColumns: a table has a column for a rare term where a candidate has it.
func TestColumns(t *testing.T) {
	p := &Phase{Candidates: []Candidate{{}, {}}}
	rare := func() bool { return slices.ContainsFunc(p.ShownTerms(), func(t Term) bool { return t.Rare }) }
	if rare() || len(p.ShownTerms()) == 0 {
		t.Errorf("without a stall there are the terms %v", p.ShownTerms())
	}
	usual := len(p.ShownTerms())
	p.Candidates[1].Terms.Stall = 1
	if !rare() || len(p.ShownTerms()) != usual+1 {
		t.Errorf("with a stall there are the terms %v", p.ShownTerms())
	}
	// Where costs are times, they have columns of their own.
	p.Unit, p.Candidates[0].Transfer = Milliseconds, 3
	for _, term := range p.ShownTerms() {
		if term.Unit != Milliseconds || term.Rare && term.Title != "MOVE" {
			t.Errorf("of times there is the column %s", term.Title)
		}
	}
}

// TestCloneIsFitForJSON: no figure is left that JSON has no number for.
func TestCloneIsFitForJSON(t *testing.T) {
	var c Candidate
	figures := []*float64{&c.Cost, &c.KVUsage}
	for i := range terms {
		figures = append(figures, terms[i].At(&c.Terms))
	}
	for i, v := range figures {
		*v = []float64{math.NaN(), math.Inf(1), math.Inf(-1)}[i%3]
	}
	d := Decision{Prefill: Phase{Candidates: []Candidate{c}}}
	got := d.Clone().Prefill.Candidates[0]
	want := Candidate{Cost: -1, KVUsage: -1}
	for i := range terms {
		*terms[i].At(&want.Terms) = -1
	}
	if got != want {
		t.Errorf("%+v", got)
	}
	if !math.IsNaN(d.Prefill.Candidates[0].Cost) {
		t.Error("the original was changed")
	}
}
