package arrivals

import (
	"bytes"
	"iter"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/blockhash"
	"github.com/dynctl/dynctl/internal/router/observe/trace"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
)

// generate makes the requests that options ask for.
func generate(t *testing.T, o Options) []Request {
	t.Helper()
	all, err := Generate(o)
	if err != nil || len(all) != o.Requests {
		t.Fatalf("%+v: %d requests, %v", o, len(all), err)
	}
	return all
}

// TestGenerate: each shape is what it says, in the order of arrival, and the same each
// time.
func TestGenerate(t *testing.T) {
	reuse := map[string][2]float64{"agents": {.9, .99}, "chats": {.5, .9}, "documents": {0, 0}, "bursts": {.4, .8}}
	for _, shape := range Shapes() {
		o := Options{Shape: shape, Requests: 1000, Seed: 1, Head: 2048, Sessions: 24}
		all, again := generate(t, o), generate(t, o)
		o.Seed = 2
		if other := generate(t, o); !reflect.DeepEqual(all, again) || reflect.DeepEqual(all, other) {
			t.Errorf("%s: the same seed gives another, or another the same", shape)
		}
		for i := range all {
			q := &all[i]
			if q.Number != i || i > 0 && q.At < all[i-1].At {
				t.Fatalf("%s: request %d has the number %d and comes at %v, before the last", shape, i, q.Number, q.At)
			}
			if blocks := (q.ISL + generated - 1) / generated; q.OSL < 1 || q.ISL < 1 || len(q.Blocks) != blocks {
				t.Fatalf("%s: request %d of %d tokens asks for %d and has %d blocks, want %d", shape, i, q.ISL, q.OSL, len(q.Blocks), blocks)
			}
		}
		bound, err := Bound(FromSlice(all), generated, 0)
		if want := reuse[shape]; err != nil || bound < want[0] || bound > want[1] {
			t.Errorf("%s: %.2f can be reused, want %v (%v)", shape, bound, want, err)
		}
	}
	for _, o := range []Options{
		{Shape: "moon", Requests: 10},
		{Shape: "chats"},
		{Shape: "chats", Requests: maxGenerated + 1},
		{Shape: "agents", Requests: 10},
		{Shape: "agents", Requests: 10, Sessions: maxSessions + 1},
		{Shape: "agents", Requests: 10, Sessions: 1, Head: -1},
		{Shape: "agents", Requests: 10, Sessions: 1, Head: maxHead + 1},
	} {
		if all, err := Generate(o); err == nil {
			t.Errorf("%+v: %d requests", o, len(all))
		}
	}
}

// TestGeneratedAgents: all prompts have the hashes of one head, as long as it is said to be,
// and share nothing behind it but with earlier turns of their own session.
func TestGeneratedAgents(t *testing.T) {
	for _, head := range []int{0, 100, 2048} {
		const sessions = 24
		type session struct {
			last Request
			seqs []uint64
		}
		at, began := map[string]*session{}, 0
		var first []uint64
		for _, q := range generate(t, Options{Shape: "agents", Requests: 1500, Seed: 1, Head: head, Sessions: sessions}) {
			seqs := blockhash.Chain(nil, blockhash.Locals(nil, q.Expand(nil), generated, blockhash.Key{}))
			if first == nil {
				first = seqs
			}
			common := 0
			for common < len(seqs) && common < len(first) && seqs[common] == first[common] {
				common++
			}
			s := at[q.Session]
			switch {
			case q.Session == "" || q.SessionKey != selector.HashSession(q.Session):
				t.Fatalf("a request in session %q with key %x", q.Session, q.SessionKey)
			case s == nil:
				if q.ThinkUS != nil {
					t.Errorf("%d µs of thinking come before a first turn", *q.ThinkUS)
				}
				s = &session{}
				at[q.Session] = s
				if began++; began > 1 && common != head/generated {
					t.Errorf("head of %d tokens: %d blocks are common", head, common)
				}
			default:
				if grown := q.ISL - s.last.ISL; grown < 400 || grown > 1000 {
					t.Errorf("a turn is %d tokens longer", grown)
				}
				pause := q.At - s.last.At
				if pause < 4*time.Second || pause > 12*time.Second {
					t.Errorf("a turn comes after %s", pause)
				}
				if want := (pause - answerTime(s.last.OSL)).Microseconds(); q.ThinkUS == nil || *q.ThinkUS != want {
					t.Errorf("a turn comes after %v µs of thinking, want %d", q.ThinkUS, want)
				}
				if whole := len(s.seqs); !slices.Equal(seqs[:whole], s.seqs) {
					t.Errorf("a turn does not begin as the one before")
				}
			}
			s.last, s.seqs = q, seqs
		}
		// 1,500 requests are 24 sessions that ended, and those that run.
		if began < sessions+sessions/2 || began > 4*sessions {
			t.Errorf("%d sessions began", began)
		}
	}
}

// TestGeneratedSessions: a trace names the sessions of chats as of agents, and those alone,
// and a reader finds them.
func TestGeneratedSessions(t *testing.T) {
	for _, shape := range Shapes() {
		all := generate(t, Options{Shape: shape, Requests: 500, Seed: 1, Head: 2048, Sessions: 24})
		line, err := trace.AppendHeader(nil, trace.Header{Source: "test", Start: time.Unix(0, 0)})
		if err != nil {
			t.Fatal(err)
		}
		for i := range all {
			if line, err = trace.AppendRecord(line, &trace.Record{Kind: trace.KindRequest, Time: all[i].At, Request: &all[i].Request}); err != nil {
				t.Fatal(err)
			}
		}
		src, err := FromTrace(func() (*trace.Reader, error) {
			return trace.NewReader(bytes.NewReader(line), shape, trace.Options{})
		})
		if err != nil {
			t.Fatal(err)
		}
		next, stop := iter.Pull2(src)
		defer stop()
		turns, named := map[string]int{}, 0
		for i := range all {
			q, err, ok := next()
			if err != nil || !ok {
				t.Fatal("the trace ends early: ", err)
			}
			if q.Session != all[i].Session || q.SessionKey != all[i].SessionKey || !reflect.DeepEqual(q.ThinkUS, all[i].ThinkUS) {
				t.Fatalf("%s: request %d is read as of session %q, and was made for %q", shape, i, q.Session, all[i].Session)
			}
			if q.Session != "" {
				named++
				turns[q.Session]++
			}
			if later := turns[q.Session] > 1; later != (q.ThinkUS != nil) {
				t.Errorf("%s: request %d of session %q has thinking time %v", shape, i, q.Session, q.ThinkUS)
			}
		}
		if s, err := Describe(FromSlice(all)); err != nil || s.Sessions != len(turns) {
			t.Errorf("%s: %d sessions are described, %d are there (%v)", shape, s.Sessions, len(turns), err)
		}
		kind, part := map[string]string{"agents": "agent-", "chats": "chat-", "bursts": "chat-"}[shape], map[string][2]int{"agents": {500, 500}, "chats": {500, 500}, "documents": {0, 0}, "bursts": {50, 450}}[shape]
		if named < part[0] || named > part[1] || part[0] > 0 && len(turns) > named/2 {
			t.Errorf("%s: %d requests are in %d sessions", shape, named, len(turns))
		}
		for name := range turns {
			if !strings.HasPrefix(name, kind) {
				t.Errorf("%s: a session is named %q", shape, name)
			}
		}
	}
}

// TestMoved: the same requests in the same order, each gap within a tenth of its own, and the
// trace unchanged.
func TestMoved(t *testing.T) {
	all, err := Generate(Options{Shape: "documents", Requests: 200, Seed: 1})
	if err != nil {
		t.Fatal(err)
	}
	before := slices.Clone(all)
	moved, other := Moved(all, 1), Moved(all, 2)
	differs := false
	for i := range all {
		if all[i].At != before[i].At || moved[i].Number != i || moved[i].ISL != all[i].ISL {
			t.Fatalf("request %d: %+v, was %+v", i, moved[i], before[i])
		}
		differs = differs || moved[i].At != other[i].At
		if i == 0 {
			continue
		}
		was, now := all[i].At-all[i-1].At, moved[i].At-moved[i-1].At
		if now < was*89/100 || now > was*111/100 {
			t.Errorf("gap %d is %v, was %v", i, now, was)
		}
	}
	if !differs {
		t.Error("two seeds have the same times")
	}
}
