package main

import (
	"bytes"
	"os"
	"strings"
	"testing"
	"time"
)

// TestDriftRequests: a load has its rate up to the end of a span, and its lengths; another seed makes
// others.
func TestDriftRequests(t *testing.T) {
	for i := range driftLoads {
		l := &driftLoads[i]
		all, other := l.requests(driftLater, 1), l.requests(driftLater, 2)
		if want := int(driftLater.Seconds()) * l.rate; len(all) < want*99/100 || len(all) > want*101/100 {
			t.Errorf("%s: %d requests, want %d", l, len(all), want)
		}
		least, most, differs := 1<<30, 0, false
		for k := range all {
			q := &all[k]
			if q.At >= driftLater || k > 0 && q.At < all[k-1].At || len(q.Blocks) != q.ISL/64+1 {
				t.Fatalf("%s: request %d: %+v", l, k, q)
			}
			least, most = min(least, q.ISL), max(most, q.ISL)
			differs = differs || k < len(other) && (other[k].At != q.At || other[k].ISL != q.ISL)
		}
		if l.sessions && (least != 266 || most < 842) || !l.sessions && (least < 200 || least > 202 || most > 4000 || most < 3900) || !differs {
			t.Errorf("%s: prompts of %d to %d tokens, another seed differs: %t", l, least, most, differs)
		}
	}
}

// TestDriftReport: each row has its median and its least share, and what was wanted is counted.
func TestDriftReport(t *testing.T) {
	rows := []*driftRow{
		{Load: "a", Fault: "network_slow=10", From: 180, To: 480, Best: "never", BestGood: 0.5, AutoGood: 0.47, Shares: []float64{0.94, 0.95, 0.93}},
		{Load: "b", Fault: "prefill_slow=3", From: 480, To: 660, Best: "512", BestGood: 0.5, AutoGood: 0.3, Shares: []float64{0.5, 0.85, 0.6}},
	}
	var out bytes.Buffer
	if err := writeDrift(&out, rows); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"| a    | network_slow=10 | 3 to 8  | never          | 50.0 | 47.0 | 94.0         | 93.0        |", "| 8 to 11 |", "| 60.0         | 50.0 ",
		"- Minutes 3 to 8: the median row has 94.0 %, the least 94.0 %; 1 of 1 have 90 % or more.", "- Minutes 8 to 11: the median row has 60.0 %", "- 2 of 6 runs are below 80 %.",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in\n%s", want, out.String())
		}
	}
}

// TestDriftRow: a row has runs of every threshold and seed.
func TestDriftRow(t *testing.T) {
	l := driftLoad{rate: 2, ttft: 120 * time.Millisecond, itl: 12 * time.Millisecond}
	dir := t.TempDir()
	s, err := openStore(dir, os.Args[0])
	if err != nil {
		t.Fatal(err)
	}
	defer s.close()
	b := &bench{store: s}
	row, err := b.driftRow(t.Context(), &l, driftFaults[0], driftSpans[0], 2)
	if err != nil || len(row.Shares) != 2 || row.BestGood <= 0 || row.AutoGood <= 0 || row.Fault != "prefill_slow=3" || row.Best == "" {
		t.Errorf("%+v, %v", row, err)
	}
}
