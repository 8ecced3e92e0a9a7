package feed

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/dynctl/dynctl/internal/rig/property"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
)

var t0 = time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)

// snap is an answer of a healthy fleet of n decode ranks, s seconds in; change
// makes it another one.
func snap(n, s int, change func(*admin.Snapshot)) Sample {
	a := &admin.Snapshot{Schema: admin.Schema, Status: admin.Status{
		Schema: admin.Schema, Name: "r", Now: t0.Add(time.Duration(s) * time.Second), Started: t0.Add(-time.Hour), State: "ready", BlockSizeTokens: 16,
		Workers: admin.WorkerCounts{Total: n, Decode: n, Usable: n, Ranks: n},
		Traffic: admin.Traffic{Requests: uint64(10 * s), Completed: uint64(10 * s), Local: uint64(5 * s), Remote: uint64(5 * s), PromptTokens: uint64(1000 * s), CachedTokens: uint64(500 * s), PredictedTokens: uint64(500 * s), CompletionTokens: uint64(100 * s)},
		Index:   admin.IndexTotals{MaxBlocks: 1000, Lookups: uint64(10 * s)},
	}}
	for i := range n {
		name := fmt.Sprintf("d%d", i)
		kv, zero, run, count := .5, 0, 2, float64(100*s)
		a.Workers = append(a.Workers, admin.Worker{Name: name, URL: "http://" + name, Role: "decode", DP: 1, Health: "healthy", Usable: true, Ranks: []admin.Rank{{
			Label: name + "/dp0", Worker: name, Role: "decode", Health: "healthy", Usable: true, ActiveRequests: 2, CapacityBlock: 100, Requests: uint64(s),
			Feed:   admin.Feed{State: "live", Trusted: true, Events: uint64(7 * s)},
			Engine: &admin.EngineLoad{Running: &run, Waiting: &zero, KVUsage: &kv, PrefixQueries: &count, PrefixHits: &count, At: t0.Add(time.Duration(s) * time.Second)},
		}}})
	}
	if change != nil {
		change(a)
	}
	return Sample{Snapshot: a, At: a.Status.Now}
}

// codes are the attention codes after two answers, each changed alike.
func codes(change func(*admin.Snapshot)) (list []string, text string) {
	b := NewBuilder("http://r")
	b.Add(snap(8, 0, nil), time.Second)
	r := b.Add(snap(8, 2, change), time.Second)
	for _, a := range r.Attention {
		list = append(list, a.Severity.String()+" "+a.Code+" "+a.Subject)
		text += a.Text + "\n"
	}
	return list, text
}

func TestAttention(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(*admin.Snapshot)
		want   []string
		words  string
	}{
		{"healthy", nil, nil, ""},
		{"engine down", func(a *admin.Snapshot) {
			w := &a.Workers[3]
			w.Health, w.Reason, w.Usable = "unhealthy", "connection refused", false
			w.Ranks[0].Health, w.Ranks[0].Usable = "unhealthy", false
			w.Ranks[0].Feed.State, w.Ranks[0].Engine = "stale", nil // not listed a second time
		}, []string{"error worker_down d3"}, "engine down: connection refused; its rank gets no requests"},
		{"ejected", func(a *admin.Snapshot) {
			a.Workers[0].Health, a.Workers[0].Ranks[0].Health, a.Workers[0].Usable = "ejected", "ejected", false
		}, []string{"error worker_down d0"}, "too many of its requests failed"},
		{"asleep", func(a *admin.Snapshot) { a.Workers[0].Health, a.Workers[0].Ranks[0].Health = "asleep", "asleep" }, []string{"warn worker_not_ready d0"}, "asleep"},
		{"draining worker", func(a *admin.Snapshot) { a.Workers[0].Draining, a.Workers[0].Usable = true, false }, []string{"info draining d0"}, "no new requests"},
		{"conflict", func(a *admin.Snapshot) {
			a.Workers[0].Conflict, a.Workers[0].Usable, a.Workers[0].Ranks[0].Usable = "block size differs", false, false
		}, []string{"warn worker_not_ready d0"}, "block size differs"},
		{"new worker", func(a *admin.Snapshot) {
			a.Workers[0].Health, a.Workers[0].Ranks[0].Health, a.Workers[0].Usable = "unknown", "unknown", false
		}, []string{"info worker_not_ready d0"}, "not ready yet"},
		{"stale", func(a *admin.Snapshot) {
			a.Workers[1].Ranks[0].Feed = admin.Feed{State: "stale", Reason: "no connection"}
		}, []string{"warn events_untrusted d1/dp0"}, "cut off (no connection)"},
		{"unknown", func(a *admin.Snapshot) { a.Workers[1].Ranks[0].Feed = admin.Feed{State: "unknown"} }, []string{"warn events_untrusted d1/dp0"}, "count as unknown"},
		{"connecting", func(a *admin.Snapshot) { a.Workers[1].Ranks[0].Feed = admin.Feed{State: "connecting"} }, []string{"warn events_untrusted d1/dp0"}, "not connected yet"},
		{"in a gap", func(a *admin.Snapshot) { a.Workers[1].Ranks[0].Feed = admin.Feed{State: "gap"} }, []string{"warn event_gap d1/dp0"}, "batches are missing"},
		{"verifying", func(a *admin.Snapshot) {
			a.Workers[1].Ranks[0].Feed = admin.Feed{State: "verifying", Reason: "its next batch is to follow the last"}
		}, []string{"info events_untrusted d1/dp0"}, "nothing is known to be missing"},
		{"gap healed", func(a *admin.Snapshot) { a.Workers[1].Ranks[0].Feed.Gaps = 1 }, []string{"info event_gap d1/dp0"}, "its view is whole again"},
		{"gap lost", func(a *admin.Snapshot) { a.Workers[1].Ranks[0].Feed.Gaps, a.Workers[1].Ranks[0].Feed.Lost = 1, 3 }, []string{"warn event_gap d1/dp0"}, "3 batches that no replay brought back"},
		{"feed lost and back", func(a *admin.Snapshot) {
			a.Workers[1].Ranks[0].Feed.Dropped, a.Workers[1].Ranks[0].Feed.Reason, a.Workers[1].Ranks[0].Feed.Replay = 1, "rebuilding: the connection was lost", new("")
		}, []string{"warn events_untrusted d1/dp0"}, "dropped in the last minute (rebuilding: the connection was lost) and are rebuilt from new events, until then hits are missed; its engine has no replay endpoint"},
		{"feed with replay lost and back", func(a *admin.Snapshot) {
			a.Workers[1].Ranks[0].Feed.Dropped, a.Workers[1].Ranks[0].Feed.Replay = 1, new("tcp://d1:5657")
		}, []string{"warn events_untrusted d1/dp0"}, "until then hits are missed\n"},
		{"feed of a recording lost and back", func(a *admin.Snapshot) {
			a.Workers[1].Ranks[0].Feed.Dropped = 1
		}, []string{"warn events_untrusted d1/dp0"}, "until then hits are missed\n"},
		{"full", func(a *admin.Snapshot) { a.Workers[2].Ranks[0].Engine.KVUsage = new(.95) }, []string{"warn rank_saturated d2/dp0"}, "95% of its KV cache is in use (median of decode ranks 50%)"},
		{"slow", func(a *admin.Snapshot) {
			a.Workers[2].Ranks[0].ITL, a.Workers[2].Ranks[0].Slow = new(90.), &admin.Slow{Figure: "ITL", Times: 9}
		}, []string{"warn rank_slow d2/dp0"}, "ITL 9.0 times the median of its peers, and it was faster before (ITL 90 ms, TTFT - ms now)"},
		{"fails", func(a *admin.Snapshot) {
			a.Workers[2].Ranks[0].Failures = 4 // not listed a second time
			a.Workers[2].Troubles = []admin.Trouble{{Cause: "failing", Text: "fails 10% of its requests"}}
		}, []string{"warn failing d2"}, "fails 10% of its requests"},
		{"mute", func(a *admin.Snapshot) {
			a.Workers[2].Ranks[0].Feed = admin.Feed{State: "mute", Reason: "publishes no KV events"} // not listed a second time
			a.Workers[2].Troubles = []admin.Trouble{{Cause: "mute", Rank: "d2/dp0", Text: "publishes no KV events"}}
		}, []string{"warn mute d2/dp0"}, "publishes no KV events"},
		{"small", func(a *admin.Snapshot) {
			a.Workers[2].Troubles = []admin.Trouble{{Cause: "small_cache", Text: "has a small KV cache"}}
		}, []string{"warn small_cache d2"}, "has a small KV cache"},
		{"queue", func(a *admin.Snapshot) {
			*a.Workers[2].Ranks[0].Engine.Waiting, a.Workers[2].Ranks[0].ActiveRequests = 9, 11
		}, []string{"warn rank_saturated d2/dp0"}, "9 requests wait in the engine: it gets more than it can run"},
		{"blind", func(a *admin.Snapshot) { a.Workers[2].Ranks[0].Engine = nil }, []string{"info no_load_figures d2/dp0"}, "no load figures"},
		{"old load", func(a *admin.Snapshot) { a.Workers[2].Ranks[0].Engine.At = t0.Add(-20 * time.Second) }, []string{"warn no_load_figures d2/dp0"}, "22 s old"},
		{"others use it", func(a *admin.Snapshot) { *a.Workers[2].Ranks[0].Engine.Running = 30 }, []string{"info foreign_load d2/dp0"}, "28 requests more"},
		{"failed legs", func(a *admin.Snapshot) { a.Workers[2].Ranks[0].Failures = 4 }, []string{"warn failures d2/dp0"}, "4 legs failed"},
		{"nothing learned", func(a *admin.Snapshot) {
			a.Status.Costs = []admin.ModelCosts{{Model: "m", Unlearned: []admin.Unlearned{
				{Of: admin.OfTimes, Reason: admin.UnlearnedSteps, Overdue: true, Text: "no answer showed it", Advice: "stream"}, {Of: admin.OfPaths, Reason: admin.UnlearnedFixed, Text: "a threshold"},
			}}}
		}, []string{"warn costs_unlearned m"}, "policy kv compares blocks until it knows how long prompts and answers take: no answer showed it. To do: stream\n"},
		{"a path of long ago", func(a *admin.Snapshot) {
			a.Status.Costs = []admin.ModelCosts{{Model: "m", Unlearned: []admin.Unlearned{{Of: admin.OfPaths, Reason: admin.UnlearnedStale, Overdue: true, Text: "no prompt for 300 s"}}}}
		}, []string{"info costs_unlearned m"}, "no prompt for 300 s"},
		{"recompute", func(a *admin.Snapshot) { a.Status.Traffic.Recomputes = 3 }, []string{"error silent_recompute traffic"}, "3 request(s)"},
		{"recompute alarm", func(a *admin.Snapshot) {
			a.Status.Reasons = []string{"d1/dp0 computes remotely prefilled prompts again"}
		}, []string{"error silent_recompute d1/dp0"}, "KV connector"},
		{"fallbacks", func(a *admin.Snapshot) { a.Status.Traffic.Fallbacks = 5 }, []string{"warn fallbacks traffic"}, "33% of the requests meant for remote"},
		{"retries", func(a *admin.Snapshot) { a.Status.Traffic.Retries = 10 }, []string{"warn retry_storm traffic"}, "one for every 2.0 requests"},
		{"failures", func(a *admin.Snapshot) { a.Status.Traffic.Failed = 1 }, []string{"warn failures traffic"}, "1 request(s) failed"},
		{"all fail", func(a *admin.Snapshot) { a.Status.Traffic.Failed = 600 }, []string{"error failures traffic"}, "600 request(s) failed"},
		{"rejections", func(a *admin.Snapshot) { a.Status.Traffic.Rejected = 10 }, []string{"warn rejections traffic"}, "5.00 requests/s are refused"},
		{"queue for ranks", func(a *admin.Snapshot) {
			ms := 2500.0
			a.Status.Traffic.Queued, a.Status.Queues = 3, []admin.Queue{{Model: "m", Normal: 2, Low: 1, Tenants: 2, OldestMS: 1500, WaitMS: &ms}}
		}, []string{"warn admission_queue m"}, "3 request(s) of 2 tenant(s) wait for a rank of m: all are at a routing.busy_… limit; the first for 1.5 s, a wait now would be: 2.5 s"},
		{"queue at the door", func(a *admin.Snapshot) { a.Status.Queues = []admin.Queue{{Normal: 3}} }, []string{"warn admission_queue traffic"}, "3 request(s) of 0 tenant(s) wait for a request to end: limits.inflight is reached"},
		{"mispredicted", func(a *admin.Snapshot) { a.Status.Traffic.PredictedTokens = 1900 }, []string{"warn overlap_mispredicted index"}, "promised 95% cached prompt tokens, the engines found 50%"},
		{"refused blocks", func(a *admin.Snapshot) { a.Status.Index.Refused = 3 }, []string{"warn index_full index"}, "3 blocks did not fit"},
		{"index full", func(a *admin.Snapshot) { a.Status.Index.Memberships = 990 }, []string{"warn index_full index"}, "99% full"},
		{"draining", func(a *admin.Snapshot) {
			a.Status.State, a.Status.Reasons = "draining", []string{"the router drains"}
		}, []string{"warn draining router"}, "load balancers leave it out"},
		{"tokenizer", func(a *admin.Snapshot) { a.Status.Reasons = []string{"tokens of m are estimated"} }, []string{"warn tokenizer_degraded tokenizer"}, "estimated"},
		{"no worker", func(a *admin.Snapshot) { a.Status.Reasons = []string{"no worker that can decode is usable"} }, []string{"error no_worker fleet"}, "no worker"},
		{"something new", func(a *admin.Snapshot) { a.Status.Reasons = []string{"the moon is full"} }, []string{"warn router_reason router"}, "the moon is full"},
		{"other schema", func(a *admin.Snapshot) { a.Status.Schema = "dynctl.admin/v2" }, []string{"warn schema_mismatch router"}, "dynctl.admin/v2"},
		{"many stale", func(a *admin.Snapshot) {
			for i := range 6 {
				a.Workers[i].Ranks[0].Feed = admin.Feed{State: "stale"}
			}
		}, []string{"warn events_untrusted d0/dp0"}, "and 5 more: stale"},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, text := codes(c.change)
			if d := cmp.Diff(c.want, got); d != "" {
				t.Errorf("(-want +got)\n%s\n%s", d, text)
			}
			if !strings.Contains(text, c.words) {
				t.Errorf("%q is not in %q", c.words, text)
			}
		})
	}
}

func TestHotPrefix(t *testing.T) {
	node := func(id string, hits uint64, ranks ...string) admin.IndexNode {
		return admin.IndexNode{ID: id, Local: "7f3a19c2e5d04b66", LengthBlocks: 64, Hits: hits, Ranks: len(ranks), RankLabels: ranks}
	}
	for _, c := range []struct {
		name   string
		was    []admin.IndexNode
		now    []admin.IndexNode
		loaded bool
		want   string
	}{
		{"hot and loaded", []admin.IndexNode{node("1", 100, "d0/dp0")}, []admin.IndexNode{node("1", 118, "d0/dp0")}, true, "warn"},
		{"hot", []admin.IndexNode{node("1", 100, "d0/dp0")}, []admin.IndexNode{node("1", 118, "d0/dp0")}, false, "info"},
		{"hot from the start", nil, []admin.IndexNode{node("1", 18, "d0/dp0")}, false, "info"},
		{"a small part", []admin.IndexNode{node("1", 100), node("2", 90)}, []admin.IndexNode{node("1", 104), node("2", 98)}, true, ""},
		{"quiet", []admin.IndexNode{node("1", 100)}, []admin.IndexNode{node("1", 101)}, true, ""},
		{"replaced run", []admin.IndexNode{node("1", 100)}, []admin.IndexNode{node("1", 3)}, true, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := NewBuilder("r")
			s := snap(8, 0, nil)
			s.Prefixes, s.PrefixesAsked = c.was, true
			b.Add(s, time.Second)
			s = snap(8, 2, func(a *admin.Snapshot) {
				if c.loaded {
					*a.Workers[0].Ranks[0].Engine.Waiting = 2
				}
			})
			s.Prefixes, s.PrefixesAsked = c.now, true
			got := ""
			for _, a := range b.Add(s, time.Second).Attention {
				if a.Code == CodeHotPrefix {
					got = a.Severity.String()
					if !strings.Contains(a.Text, "of lookups (9.0/s) share a prefix of up to 1024 tokens; held by ") || a.Subject != "7f3a19c2" {
						t.Errorf("%s: %s", a.Subject, a.Text)
					}
				}
			}
			if got != c.want {
				t.Errorf("severity %q, want %q", got, c.want)
			}
		})
	}
}

// TestSince checks that a line keeps the moment at which it was first seen.
func TestSince(t *testing.T) {
	b := NewBuilder("r")
	stale := func(a *admin.Snapshot) { a.Workers[1].Ranks[0].Feed = admin.Feed{State: "stale"} }
	b.Add(snap(8, 0, nil), time.Second)
	for s := 1; s < 5; s++ {
		if got := b.Add(snap(8, s, stale), time.Second).Attention[0].Since; !got.Equal(t0.Add(time.Second)) {
			t.Errorf("second %d: since %s", s, got)
		}
	}
	b.Add(snap(8, 5, nil), time.Second)
	if got := b.Add(snap(8, 6, stale), time.Second).Attention[0].Since; !got.Equal(t0.Add(6 * time.Second)) {
		t.Errorf("again: since %s", got)
	}
}

// TestOrderIsCalm checks that ranks whose load swings a little keep their
// places, and that the worst still comes first.
func TestOrderIsCalm(t *testing.T) {
	b := NewBuilder("r")
	order := func(s int, kv ...float64) string {
		r := b.Add(snap(len(kv), s, func(a *admin.Snapshot) {
			for i := range kv {
				*a.Workers[i].Ranks[0].Engine.KVUsage = kv[i]
			}
		}), time.Second)
		var list []string
		for _, k := range r.Ranks {
			list = append(list, k.Worker)
		}
		return strings.Join(list, " ")
	}
	if got := order(0, .5, .52, .3); got != "d1 d0 d2" {
		t.Errorf("at first %s", got)
	}
	if got := order(1, .55, .5, .35); got != "d1 d0 d2" {
		t.Errorf("after a swing %s", got)
	}
	if got := order(3, .85, .5, .95); got != "d2 d1 d0" {
		t.Errorf("with a full one, which is worse at once: %s", got)
	}
	for s := 4; s < 9; s++ {
		order(s, .85, .5, .3)
	}
	if got := order(9, .85, .5, .3); got != "d0 d1 d2" {
		t.Errorf("five seconds after a rise %s", got)
	}
}

// TestOrderBecomesStable: whatever the ranks' load was, five seconds after it changed
// they are in its order, however near one is to the next.
func TestOrderBecomesStable(t *testing.T) {
	property.Check(t, func(t *rapid.T) {
		b := NewBuilder("r")
		n := rapid.IntRange(2, 30).Draw(t, "ranks")
		loads := func(name string) []int {
			all := make([]int, n)
			for i := range all {
				all[i] = i
			}
			return rapid.Permutation(all).Draw(t, name)
		}
		view := func(s int, load []int) *Router {
			return b.Add(snap(n, s, func(a *admin.Snapshot) {
				for i := range load {
					*a.Workers[i].Ranks[0].Engine.KVUsage = .1 + .02*float64(load[i])
				}
			}), time.Second)
		}
		before, after := loads("before"), loads("after")
		s := 0
		for range rapid.IntRange(1, 10).Draw(t, "seconds") {
			view(s, before)
			s++
		}
		var r *Router
		// Smoothed, the loads of before have gone when they are ordered next.
		for range 12 {
			r = view(s, after)
			s++
		}
		for i := 1; i < n; i++ {
			if x, y := r.Ranks[i-1], r.Ranks[i]; x.Severity == y.Severity && x.KVUsage() < y.KVUsage()-.021 {
				t.Fatalf("%s (%.2f) stands before %s (%.2f)", x.Label, x.KVUsage().F(), y.Label, y.KVUsage().F())
			}
		}
	})
}

func TestLink(t *testing.T) {
	b := NewBuilder("r")
	if r := b.Tick(t0, time.Second); r.Link != Waiting {
		t.Errorf("before: %s", r.Link)
	}
	b.Add(snap(1, 0, nil), time.Second)
	for after, want := range map[time.Duration]Link{0: Live, 1900 * time.Millisecond: Live, 2 * time.Second: Lag, 9 * time.Second: Lag, 10 * time.Second: Stale} {
		if r := b.Tick(t0.Add(after), time.Second); r.Link != want {
			t.Errorf("after %s: %s, want %s", after, r.Link, want)
		}
	}
	// A slow rate is no lag.
	if r := b.Tick(t0.Add(15*time.Second), 10*time.Second); r.Link != Live {
		t.Errorf("every 10 s: %s", r.Link)
	}
	r := b.Add(Sample{Err: errors.New("no\nroute"), At: t0.Add(20 * time.Second)}, time.Second)
	if r.Link != Down || r.Error != "no route" || r.Name != "r" || len(r.Ranks) != 1 {
		t.Errorf("%s %q %d ranks", r.Link, r.Error, len(r.Ranks))
	}
	if r := b.Add(snap(1, 30, nil), time.Second); r.Link != Live || r.Error != "" {
		t.Errorf("back: %s %q", r.Link, r.Error)
	}
}

// TestRatesAreDifferences compares rates with a plain computation over random
// counters, intervals and resets.
func TestRatesAreDifferences(t *testing.T) {
	property.Check(t, func(t *rapid.T) {
		b := NewBuilder("r")
		var at []int
		var requests []uint64
		now, n := 0, uint64(0)
		for range rapid.IntRange(2, 120).Draw(t, "answers") {
			now += rapid.IntRange(1, 20).Draw(t, "seconds")
			n += rapid.Uint64Range(0, 1000).Draw(t, "more")
			at, requests = append(at, now), append(requests, n)
			r := b.Add(snap(1, now, func(a *admin.Snapshot) { a.Status.Traffic.Requests = n }), time.Second)
			if len(at) == 1 {
				if r.RequestRate.Known() {
					t.Fatal("a rate from one answer")
				}
				continue
			}
			// The window is the shortest one of at least 10 s, or all there is;
			// at this pace no point was skipped.
			i := len(at) - 2
			for i > 0 && at[len(at)-1]-at[i] < 10 {
				i--
			}
			want := float64(n-requests[i]) / float64(now-at[i])
			if got := r.RequestRate.F(); math.Abs(got-want) > 1e-9*math.Max(1, want) {
				t.Fatalf("answer %d: %v requests/s, want %v", len(at), got, want)
			}
			if len(b.points) > maxSamples {
				t.Fatalf("%d points are kept", len(b.points))
			}
		}
	})
}

// TestFastPolling checks that windows hold at ten questions a second.
func TestFastPolling(t *testing.T) {
	b := NewBuilder("r")
	for i := range 2000 {
		s := snap(1, 0, func(a *admin.Snapshot) {
			a.Status.Now = t0.Add(time.Duration(i) * 100 * time.Millisecond)
			a.Status.Traffic.Requests = uint64(i)
		})
		s.At = s.Snapshot.Status.Now
		r := b.Add(s, 100*time.Millisecond)
		if len(b.points) > maxSamples {
			t.Fatalf("%d points", len(b.points))
		}
		if i > 700 {
			if w := r.RateWindow.F(); w < 10 || w > 13 {
				t.Fatalf("rate window %v s", w)
			}
			if w := r.TroubleWindow.F(); w < 55 || w > 62 {
				t.Fatalf("trouble window %v s", w)
			}
			if got := r.RequestRate.F(); math.Abs(got-10) > .2 {
				t.Fatalf("%v requests/s", got)
			}
		}
	}
}

func TestNum(t *testing.T) {
	raw, err := json.Marshal([]Num{1.5, Unknown, Num(math.Inf(1)), 0})
	if err != nil || string(raw) != "[1.5,null,null,0]" {
		t.Errorf("%s %v", raw, err)
	}
	var back []Num
	if err := json.Unmarshal(raw, &back); err != nil || back[0] != 1.5 || back[1].Known() {
		t.Errorf("%v %v", back, err)
	}
	var bad Num
	if json.Unmarshal([]byte(`"x"`), &bad) == nil {
		t.Error("text was taken for a number")
	}
}

func TestFilter(t *testing.T) {
	row := map[string]string{"text": "decode-0/dp1 STALE", "role": "decode", "kv": "91.4", "wait": ""}
	kind := Kind[map[string]string]{text: func(r map[string]string) string { return r["text"] }}
	for _, key := range []string{"role", "kv", "wait", "text"} {
		kind.fields = append(kind.fields, field[map[string]string]{key, func(r map[string]string) string { return r[key] }})
	}
	for text, want := range map[string]bool{
		"": true, "stale": true, "STALE": true, "nope": false, "!nope": true, "!stale": false, "role:dec": true, "role=dec": false, "role=decode": true, "!role:decode": false,
		"kv>90": true, "kv>91.4": false, "kv>=91.4": true, "kv<92": true, "kv<=91.3": false, "kv>90%": true, "wait>0": false, "!wait>0": true, "stale kv>95": false, "stale kv>90": true,
		`re:dp[12]\s`: true, "re:^dp": false, "!": false,
	} {
		f, err := kind.Parse(text)
		if err != nil {
			t.Errorf("%q: %v", text, err)
			continue
		}
		if got := f.Match(row); got != want {
			t.Errorf("%q: %v, want %v", text, got, want)
		}
	}
	for _, text := range []string{"nosuch:1", "kv>x", "kv>", "re:(", "re:[z-a]"} {
		if _, err := kind.Parse(text); err == nil {
			t.Errorf("%q was taken", text)
		}
	}
}

func FuzzParseFilter(f *testing.F) {
	for _, s := range []string{"a !b", "kv>=90%", "re:x.*", "role:decode", "!!", "><", "key:"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		p, err := RankFilter.Parse(s)
		if err == nil {
			p.Match(&Rank{Rank: admin.Rank{Label: "a/dp0"}})
		}
	})
}

func FuzzParseDecision(f *testing.F) {
	f.Add([]byte(`{"schema":"dynctl.receipt/v1","id":"1","path":"local"}`))
	f.Add([]byte(`{"id":"1","outcome":{"ttft_ms":-1},"decode":{"runner_up":"x"}}`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		if d, ok := ParseDecision(raw); ok && d.ID == "" {
			t.Error("a decision without an id")
		}
	})
}

// TestDecisionsParse: a list is read as its receipts are one by one, and of lists only
// the last one is remembered.
func TestDecisionsParse(t *testing.T) {
	raw := func(id int, status int) json.RawMessage {
		return fmt.Appendf(nil, `{"id":"%020x","request_id":"r%d","time":"2026-01-02T03:04:05Z","path":"local","outcome":{"status":%d}}`, id, id, status)
	}
	var known Decisions
	for turn, list := range [][]json.RawMessage{{raw(1, 200), []byte("{"), raw(2, 0)}, {raw(3, 200), raw(2, 502), raw(1, 200)}, {raw(4, 200)}, nil} {
		var want []Decision
		for _, r := range list {
			if d, ok := ParseDecision(r); ok {
				want = append(want, d)
			}
		}
		got := known.Parse(list)
		if len(got) != len(want) || turn == 0 && len(got) != 2 {
			t.Fatalf("turn %d: %d decisions, want %d", turn, len(got), len(want))
		}
		for i := range want {
			if got[i].ID != want[i].ID || got[i].Outcome.Status != want[i].Outcome.Status || !got[i].Time.Equal(want[i].Time) {
				t.Errorf("turn %d, row %d: %+v, want %+v", turn, i, got[i], want[i])
			}
		}
		if len(known.known) != len(want) {
			t.Errorf("turn %d: %d receipts are remembered, want %d", turn, len(known.known), len(want))
		}
	}
}
