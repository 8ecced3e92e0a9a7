package replicas

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

var self = Identity{Fleet: "a", Origin: "router-1", Epoch: start, Version: "v1", Settings: "5e7"}

func read(t testing.TB, messages [][]byte) (out []Message) {
	t.Helper()
	for _, b := range messages {
		var m Message
		if err := m.Decode(b); err != nil {
			t.Fatal(err)
		}
		out = append(out, m)
	}
	return out
}

// TestRhythm calls a publisher whenever it wants to be called, with a load that changes at
// some times.
func TestRhythm(t *testing.T) {
	p := NewPublisher(self)
	busy := func(n int) []Row { return []Row{{7, Load{Requests: n}}} }
	load := func(at time.Duration) []Row {
		switch {
		case at < 110*time.Millisecond:
			return nil
		case at < 2*time.Second:
			return busy(1)
		case at < 2200*time.Millisecond:
			return busy(int(at / time.Millisecond)) // each time another
		}
		return nil
	}
	type sent struct {
		at   time.Duration
		full bool
		rows int
	}
	var got []sent
	seq := uint64(0)
	for now := start; now.Before(start.Add(2700 * time.Millisecond)); now = p.Next() {
		at := now.Sub(start)
		for _, m := range read(t, p.Publish(now, load(at))) {
			if seq++; m.Seq != seq || m.Full != (m.Version == "v1") {
				t.Errorf("message %d at %v: %+v", seq, at, m)
			}
			got = append(got, sent{at / time.Millisecond, m.Full, len(m.Rows)})
		}
	}
	want := []sent{
		{0, true, 0},                                      // at the start
		{150, false, 1},                                   // the change of 110
		{400, false, 0}, {650, false, 0}, {900, false, 0}, // heartbeats
		{1000, true, 1},                                      // each second
		{1250, false, 0}, {1500, false, 0}, {1750, false, 0}, // heartbeats
		{2000, true, 1},
		{2050, false, 1}, {2100, false, 1}, {2150, false, 1}, {2200, false, 1}, // changes
		{2450, false, 0},
	}
	if !slices.Equal(got, want) {
		t.Errorf("got  %v\nwant %v", got, want)
	}
}

// TestPublishEarlier: a call for a change publishes it without waiting, but not within Pace.
func TestPublishEarlier(t *testing.T) {
	p := NewPublisher(self)
	p.Publish(start, nil)
	p.Publish(start.Add(50*time.Millisecond), nil)
	for _, c := range []struct {
		at, requests, messages int
	}{{61, 1, 1}, {62, 2, 0}, {110, 3, 0}, {111, 3, 1}, {112, 3, 0}} {
		got := p.Publish(start.Add(time.Duration(c.at)*time.Millisecond), []Row{{7, Load{Requests: c.requests}}})
		if len(got) != c.messages {
			t.Errorf("at %d: %d messages, want %d", c.at, len(got), c.messages)
		}
	}
}

// TestFullOnRequest: the answer comes without waiting, and floods of requests get one each Pace.
func TestFullOnRequest(t *testing.T) {
	p := NewPublisher(self)
	p.Publish(start, nil)
	p.Publish(start.Add(90*time.Millisecond), []Row{{7, Load{Requests: 1}}})
	fulls := 0
	for at := 100 * time.Millisecond; at < 300*time.Millisecond; at += time.Millisecond {
		p.RequestFull()
		now := start.Add(at)
		if at == 100*time.Millisecond && p.Next().After(now) {
			t.Errorf("Next is %v", p.Next().Sub(start))
		}
		for _, m := range read(t, p.Publish(now, []Row{{7, Load{Requests: 1}}})) {
			if fulls++; !m.Full || len(m.Rows) != 1 {
				t.Errorf("at %v: %+v", at, m)
			}
		}
	}
	if fulls != 4 {
		t.Errorf("%d full states in 200 ms", fulls)
	}
}

// TestPublishedRows: rows are sorted, one rank has one row, figures stay in their limits,
// and a rank that left the fleet is published as idle.
func TestPublishedRows(t *testing.T) {
	p := NewPublisher(self)
	m := read(t, p.Publish(start, []Row{{9, Load{1, 2, 3, 4, 0, 5}}, {7, Load{Requests: -1, DecodeBlocks: 1 << 40}}, {8, Load{}}, {9, Load{1, 1, 1, 1, 0, MaxAmount}}}))
	if want := []Row{{7, Load{DecodeBlocks: MaxAmount}}, {9, Load{2, 3, 4, 5, 0, MaxAmount}}}; len(m) != 1 || !slices.Equal(m[0].Rows, want) {
		t.Errorf("got %+v, want %v", m, want)
	}
	m = read(t, p.Publish(start.Add(Pace), []Row{{10, Load{Requests: 1}}, {9, Load{2, 3, 4, 5, 0, MaxAmount}}}))
	if want := []Row{{7, Load{}}, {10, Load{Requests: 1}}}; len(m) != 1 || m[0].Full || !slices.Equal(m[0].Rows, want) {
		t.Errorf("got %+v, want %v", m, want)
	}
}

// TestManyRanks: states larger than a message are split, and a view puts them together.
func TestManyRanks(t *testing.T) {
	const n = 2*MaxRows + 100
	p, v := NewPublisher(self), NewView(Identity{Fleet: "a", Origin: "router-2", Epoch: start})
	var ranks []Rank
	var own []Row
	for i := range n {
		r := RankOf("http://engine", i)
		ranks = append(ranks, r)
		own = append(own, Row{r, Load{MaxAmount, MaxAmount, MaxAmount, MaxAmount, 0, MaxAmount}})
	}
	v.SetRanks(ranks)
	now := start
	for round, want := range []int{MaxAmount, 1, 0} {
		for i := range own {
			own[i].Requests = want
			if want == 0 {
				own[i].Load = Load{}
			}
		}
		out := p.Publish(now, own)
		if len(out) != 3 {
			t.Fatalf("round %d: %d messages", round, len(out))
		}
		for i, b := range out {
			m := read(t, [][]byte{b})[0]
			if len(b) > MaxMessage || m.Full != (round == 0) {
				t.Errorf("message %d has %d bytes, full: %v", i, len(b), m.Full)
			}
			v.Apply(now, &m)
		}
		for _, r := range ranks {
			if l, _, ok := v.Load(now, r); !ok || l.Requests != want {
				t.Fatalf("round %d: got %+v, %v", round, l, ok)
			}
		}
		if s := v.Snapshot(now); !s.Origins[0].Complete || s.Origins[0].Gaps != 0 {
			t.Errorf("round %d: %+v", round, s)
		}
		now = now.Add(Pace)
	}
}

// TestTraffic: four routers with 128 ranks, all of which change all the time, send each other
// less than a megabyte a second.
func TestTraffic(t *testing.T) {
	p := NewPublisher(Identity{Fleet: "default", Origin: "dynctl-7d4b9c6f5d-x2x7q", Epoch: start, Version: "v0.1.0", Settings: strings.Repeat("x", 150)})
	bytes, now := 0, start
	for step := 0; now.Sub(start) < 10*time.Second; step++ {
		var own []Row
		for i := range 128 {
			own = append(own, Row{RankOf(fmt.Sprint("http://10.0.0.", i, ":8000"), 0), Load{40 + step%9, 30, 100_000 + step*7919%50_000, 20_000 + step, 0, 250_000 + step}})
		}
		for _, m := range p.Publish(now, own) {
			bytes += len(m)
		}
		now = p.Next()
	}
	const routers = 4
	all := bytes * routers * (routers - 1) / 10
	t.Logf("%d KB a second in all", all/1000)
	if all > 1_000_000 {
		t.Errorf("%d bytes a second", all)
	}
}
