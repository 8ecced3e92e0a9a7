package router_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/loopback"
	"github.com/dynctl/dynctl/internal/rawjson"
	"github.com/dynctl/dynctl/internal/rig/soak"
	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/workers/sim/fault"
)

// nowhere is a ResponseWriter that keeps nothing.
type nowhere struct{ h http.Header }

func (n *nowhere) Header() http.Header {
	if n.h == nil {
		n.h = http.Header{}
	}
	return n.h
}

func (n *nowhere) Write(b []byte) (int, error) { return len(b), nil }

func (n *nowhere) WriteHeader(int) {}

// panicky is a ResponseWriter that panics at a chosen place.
type panicky struct {
	nowhere
	at    string
	after int
	did   *atomic.Int32 // counts its panics
}

func (p *panicky) Write(b []byte) (int, error) {
	if p.after--; p.at == "write" && p.after < 0 {
		p.did.Add(1)
		panic("the writer broke")
	}
	return len(b), nil
}

func (p *panicky) WriteHeader(int) {
	if p.at == "head" {
		p.at = ""
		p.did.Add(1)
		panic("the head broke")
	}
}

func (p *panicky) Flush() {}

// TestInvariant05ReservationsBalance: whatever ends requests, the ledger is
// zero afterwards and nothing was released twice.
func TestInvariant05ReservationsBalance(t *testing.T) {
	t.Parallel()
	r := start(t, "2p2d:speed=3,osl=60,model=vllm+2p2d:speed=3,osl=60,engine=sglang,bootstrap_wait=2s,model=sglang", func(c *settings.Config) { c.Routing.Threshold.Tokens = 100; c.Timeouts.Drain = time.Second })
	for n, model := range []string{"vllm", "sglang"} {
		t.Run(model, func(t *testing.T) {
			r := r.in(t)
			before := r.status().Traffic
			var panics atomic.Int32
			var wg sync.WaitGroup
			body := func(i int) []byte {
				return encode(t, object{"model": model, "prompt": ids(40+i%5*60, i), "max_tokens": 40, "ignore_eos": true, "stream": i%2 == 0})
			}
			stop := make(chan struct{})
			for c := range 12 {
				wg.Add(1)
				go func() {
					defer wg.Done()
					for i := c; ; i += 12 {
						select {
						case <-stop:
							return
						default:
						}
						ctx, cancel := context.WithCancel(t.Context())
						switch i % 4 {
						case 0: // hangs up at once or a little later
							time.AfterFunc(time.Duration(i%7)*3*time.Millisecond, cancel)
							_, _ = r.try(ctx, http.MethodPost, "/v1/completions", body(i))
						case 1: // reads a part of the answer
							if resp, err := r.open(ctx, http.MethodPost, "/v1/completions", body(i+1)); err == nil {
								_, _ = io.CopyN(io.Discard, resp.Body, 300)
								resp.Body.Close()
							}
						case 2: // panics in the middle
							q, _ := http.NewRequestWithContext(ctx, http.MethodPost, "/v1/completions", bytes.NewReader(body(i)))
							func() {
								defer func() { _ = recover() }()
								r.Router.ServeHTTP(&panicky{at: []string{"head", "write"}[i/4%2], after: i % 3, did: &panics}, q)
							}()
						case 3:
							_, _ = r.try(ctx, http.MethodPost, "/v1/completions", body(i))
						}
						cancel()
					}
				}()
			}
			reload := r.Config
			for i := range 6 {
				reload.Routing.Threshold.Tokens = 50 + 40*i
				if err := r.Router.Settings().Reload(reload, nil); err != nil {
					t.Error(err)
				}
				e := r.Sim.Engine(4*n + i%4)
				e.Kill()
				if err := loopback.Wait(r.wait(), "traffic", trafficOf(r, 20)); err != nil {
					t.Error(err)
				}
				if err := e.Restart(); err != nil {
					t.Error(err)
				}
			}
			close(stop)
			wg.Wait()
			r.eventually("an empty ledger", r.Router.Balanced)
			r.eventually("no open requests in the gauges", func() error {
				for _, m := range []string{"dynctl_ledger_open_requests", "dynctl_inflight_requests", "dynctl_ledger_double_releases_total"} {
					if v := r.metric(m); v != 0 {
						return fmt.Errorf("%s = %v", m, v)
					}
				}
				return nil
			})
			r.eventually("figures that add up", func() error {
				if tr := r.status().Traffic; tr.Completed == before.Completed || tr.Cancelled == before.Cancelled || tr.Requests != tr.Completed+tr.Failed+tr.Cancelled+tr.Rejected {
					return fmt.Errorf("%+v", tr)
				}
				return nil
			})
			if panics.Load() == 0 || len(r.events("panic")) == 0 { // of one in a while
				t.Errorf("%d panics, %d events", panics.Load(), len(r.events("panic")))
			}
			// Nothing is poisoned: the fleet comes back and serves.
			if err := r.Ready(r.wait()); err != nil {
				t.Fatal(err)
			}
			r.post("/v1/completions", object{"model": model, "prompt": ids(300, 1), "max_tokens": 12, "ignore_eos": true})
		})
	}
}

// trafficOf holds once so many more requests have ended.
func trafficOf(r *rig, n uint64) func() error {
	from := r.status().Traffic
	return func() error {
		now := r.status().Traffic
		if done := now.Completed + now.Failed + now.Cancelled - from.Completed - from.Failed - from.Cancelled; done < n {
			return fmt.Errorf("%d of %d requests", done, n)
		}
		return nil
	}
}

// TestInvariant06IndexMayUndercountNeverOvercount: with events dropped,
// reordered and corrupted and an engine restarted, what the index counts of a
// rank whose feed is trusted is in the engine's cache, and afterwards all of it
// is equal.
func TestInvariant06IndexMayUndercountNeverOvercount(t *testing.T) {
	t.Parallel()
	r := start(t, "2a:profile=instant,kv_blocks=128")
	for round := range 5 {
		set := fault.Set{}
		switch round {
		case 0:
			set.DropEvents = .3
		case 1:
			set.ReorderEvents = .3
		case 2:
			set.CorruptEvents = .3
		case 3:
			set.DropEvents, set.ReorderEvents = .2, .2
		}
		for _, e := range r.Sim.Engines() {
			if err := e.SetFaults(set); err != nil {
				t.Fatal(err)
			}
		}
		for i := range 25 {
			a, _ := r.complete(ids(160+i*8, round*100+i/2))
			c := r.receipt(a.header.Get("X-Dynctl-Decision"))
			if c.Predicted.CachedTokens > c.Outcome.CachedTokens {
				t.Errorf("round %d: %d cached tokens predicted on %s, the engine had %d", round, c.Predicted.CachedTokens, c.Decode.Chosen, c.Outcome.CachedTokens)
			}
			// The next decision is made on what has arrived of this one.
			if i%5 == 4 {
				r.waitForFeeds()
			}
		}
		if round == 3 {
			if err := r.Sim.Engine(0).Restart(); err != nil {
				t.Fatal(err)
			}
			r.eventually("the engine to be back", func() error {
				if !r.worker("aggregated-0").Usable {
					return errors.New("not usable")
				}
				return nil
			})
		}
		for _, e := range r.Sim.Engines() {
			if err := e.SetFaults(fault.Set{}); err != nil {
				t.Fatal(err)
			}
		}
		// New blocks show what is missing; then the index is rebuilt.
		for i := range 8 {
			r.complete(ids(64, 7000+round*10+i))
		}
		if err := soak.IndexSynced(r.wait(), r.Rig); err != nil {
			for _, e := range r.allEvents() {
				t.Log(e.Kind, e.Text)
			}
			for _, w := range []string{"aggregated-0", "aggregated-1"} {
				t.Logf("%+v", r.worker(w).Ranks[0].Feed)
			}
			t.Fatalf("round %d: %v", round, err)
		}
	}
	counts := map[string]int{}
	for _, e := range r.allEvents() {
		counts[e.Kind]++
	}
	if counts["feed_gap"] == 0 || counts["feed_malformed"]+counts["feed_unreadable"]+counts["feed_reset"] == 0 && len(counts) < 5 {
		t.Errorf("no event of what went wrong: %v", counts)
	}
}

// waitForFeeds waits until the feeds have taken in what the engines have published.
func (r *rig) waitForFeeds() {
	r.t.Helper()
	r.eventually("the feeds to catch up", func() error {
		for _, w := range []string{"aggregated-0", "aggregated-1"} {
			for _, k := range r.worker(w).Ranks {
				pub, err := r.Sim.Named(w).Publisher(k.DP)
				if err != nil {
					return err
				}
				next, last := pub.Next(), k.Feed.LastSeq
				behind := next > 0 && (last == nil || *last+1 < next)
				if behind && k.Feed.Trusted && r.Sim.Named(w).Faults() == (fault.Set{}) {
					return fmt.Errorf("%s is not at %d: %+v", k.Label, next, k.Feed)
				}
			}
		}
		return nil
	})
}

// TestInvariant07NothingIsUnbounded: what comes from outside meets its limit,
// with a stated answer and a figure.
func TestInvariant07NothingIsUnbounded(t *testing.T) {
	t.Parallel()
	r, p := tappedRig(t, "1a:profile=instant", func(c *settings.Config) {
		c.Limits = settings.Limits{BodyBytes: 64 << 10, BodyMemory: 1 << 20, Inflight: 2, Queue: 3, QueueTimeout: 50 * time.Millisecond}
		c.Receipts, c.Events = 16, 32
	})
	t.Run("body", func(t *testing.T) {
		big := encode(t, object{"model": "sim", "prompt": strings.Repeat("a", 70<<10)})
		r.send(http.MethodPost, "/v1/completions", big).refused(t, http.StatusRequestEntityTooLarge, "body_too_large")
	})
	t.Run("receipts and events", func(t *testing.T) {
		for i := range 40 {
			r.complete(ids(20, i))
		}
		l, err := r.Admin.Decisions(t.Context(), 1000, "", "")
		if err != nil || len(l.Decisions) > 16 || l.Total < 40 {
			t.Errorf("%d decisions of %d kept (%v)", len(l.Decisions), l.Total, err)
		}
		for i := range 60 {
			_ = r.Router.Settings().Reload(settings.Config{}, nil)
			_ = i
		}
		e, err := r.Admin.Events(t.Context(), 1, 10000, 0)
		if err != nil || len(e.Events) > 32 || e.Lost == 0 {
			t.Errorf("%d events kept, %d lost (%v)", len(e.Events), e.Lost, err)
		}
	})
	t.Run("labels", func(t *testing.T) {
		for i := range 400 {
			r.send(http.MethodPost, "/v1/completions", fmt.Appendf(nil, `{"model":"nobody-%d","prompt":"x"}`, i)).refused(t, http.StatusNotFound, "model_not_found")
			r.send(http.MethodGet, fmt.Sprintf("/nowhere/%d", i), nil).refused(t, http.StatusNotFound, "unknown_path")
		}
		page, err := r.adminPage(t.Context(), "/metrics")
		if err != nil || strings.Contains(page, "nobody-") || strings.Contains(page, "nowhere") {
			t.Errorf("a client's words became labels (%v)", err)
		}
	})
	t.Run("requests in progress and the queue", func(t *testing.T) {
		_, release := p.blockEngines()
		var wg sync.WaitGroup
		var full, good atomic.Int32
		for i := range 12 {
			wg.Add(1)
			go func() {
				defer wg.Done()
				a, err := r.try(t.Context(), http.MethodPost, "/v1/completions", encode(t, object{"model": "sim", "prompt": ids(20, 900+i), "max_tokens": 2}))
				switch {
				case err != nil:
					t.Error(err)
				case a.status == http.StatusTooManyRequests && a.header.Get("Retry-After") != "":
					full.Add(1)
				case a.status == 200:
					good.Add(1)
				default:
					t.Errorf("%s", a)
				}
			}()
		}
		r.eventually("ten refusals", func() error {
			if n := full.Load(); n != 10 {
				return fmt.Errorf("%d refused", n)
			}
			return nil
		})
		if st := r.status(); st.Traffic.Inflight != 2 {
			t.Errorf("%d in progress", st.Traffic.Inflight)
		}
		release()
		wg.Wait()
		if good.Load() != 2 {
			t.Errorf("%d served", good.Load())
		}
	})
}

// TestInvariant10ConfigChangesAreAtomic: a reload is wholly in force or not at
// all, and there is an event of it; requests see one revision each. SIGHUP takes the same way
// (TestServeFromSignalToSignal in internal/cli/commands).
func TestInvariant10ConfigChangesAreAtomic(t *testing.T) {
	t.Parallel()
	r := start(t, "1p1d:profile=instant", func(c *settings.Config) { c.Routing.Threshold.Tokens = 1000; c.Routing.ThresholdOn = "isl" })
	old := r.Config
	for name, breakIt := range map[string]func(c *settings.Config){
		"policy":   func(c *settings.Config) { c.Routing.Policy = "magic" },
		"worker":   func(c *settings.Config) { c.Worker = []string{"http://127.0.0.1:1,engin=vllm"} },
		"fixed":    func(c *settings.Config) { c.Listen = "127.0.0.1:1" },
		"registry": func(c *settings.Config) { c.Routing.DecoderRegistry = "{" },
		"alias": func(c *settings.Config) {
			c.Aliases = []settings.Alias{{Name: "a", Model: "a"}, {Name: "a", Model: "b"}}
		},
		"two fault": func(c *settings.Config) {
			c.Retry.Attempts = 0
			c.Routing.Threshold.Tokens = 5
			c.Aliases = []settings.Alias{{Name: "q", Model: "sim"}}
		},
	} {
		c := old
		c.Routing.Threshold.Tokens = 7
		breakIt(&c)
		if err := r.Router.Settings().Reload(c, nil); err == nil {
			t.Errorf("%s: a bad configuration was taken", name)
		}
		if s := r.status(); s.ThresholdTokens != 1000 || s.ConfigRevision != 1 {
			t.Errorf("%s: a part of a bad configuration is in force: %d, revision %d", name, s.ThresholdTokens, s.ConfigRevision)
		}
		if a := r.send(http.MethodPost, "/v1/completions", []byte(`{"model":"q","prompt":"x"}`)); a.status != 404 {
			t.Errorf("%s: an alias of a bad configuration is in force: %s", name, a)
		}
	}
	if n := len(r.events("config_refused")); n != 6 {
		t.Errorf("%d events of refusals, want 6", n)
	}

	// Odd revisions have threshold 1000 and the rule isl, even ones 0 and
	// eff_isl; no request may see a mixture.
	var wg sync.WaitGroup
	stop := make(chan struct{})
	for w := range 4 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				default:
				}
				a, err := r.try(t.Context(), http.MethodPost, "/v1/completions", encode(t, object{"model": "sim", "prompt": ids(40, w*1000+i), "max_tokens": 2}))
				if err != nil || a.status != 200 {
					t.Errorf("%v %v", a, err)
					return
				}
			}
		}()
	}
	for i := range 40 {
		c := old
		if i%2 == 0 {
			c.Routing.Threshold.Tokens, c.Routing.ThresholdOn = 0, "eff_isl"
		}
		if err := r.Router.Settings().Reload(c, nil); err != nil {
			t.Error(err)
		}
		if i%5 == 4 {
			if err := loopback.Wait(r.wait(), "traffic", trafficOf(r, 4)); err != nil {
				t.Error(err)
			}
		}
	}
	close(stop)
	wg.Wait()
	l, err := r.Admin.Decisions(t.Context(), 1000, "", "")
	if err != nil {
		t.Fatal(err)
	}
	seen := [2]int{}
	for _, raw := range l.Decisions {
		rev, _ := rawjson.Value(raw).Get("config_revision").Int()
		in, path := rawjson.Value(raw).Get("inputs"), rawjson.Value(raw).Get("path").String()
		seen[rev%2]++
		want := [2]string{"0 eff_isl remote", "1000 isl local"}[rev%2]
		if got := fmt.Sprintf("%s %s %s", in.Get("threshold_tokens"), in.Get("threshold_on"), path); got != want {
			t.Fatalf("revision %d decided with %q, want %q", rev, got, want)
		}
	}
	if seen[0] == 0 || seen[1] == 0 {
		t.Errorf("decisions by revision: %v", seen)
	}
	if n := len(r.events("config_reloaded")); n != 40 {
		t.Errorf("%d events of reloads, want 40", n)
	}
	t.Run("no patch is lost", func(t *testing.T) { noPatchIsLost(t, r.in(t)) })
}

// noPatchIsLost: changes of the configuration that come at the
// same time all take effect, each upon the one before, be they patches of the admin
// API or the process's own.
func noPatchIsLost(t *testing.T, r *rig) {
	patches := map[string]any{}
	for _, row := range settings.Rows() {
		if row.Fixed {
			continue
		}
		switch row.At(&settings.Config{}).(type) {
		case *int:
			patches[row.Key] = 7.0
		case *float64:
			patches[row.Key] = 0.75
			if row.Check != nil && row.Check(0.75) != nil {
				patches[row.Key] = 1.75
			}
		case *bool:
			patches[row.Key] = true
		case *time.Duration:
			patches[row.Key] = "7s"
		}
	}
	if len(patches) < 20 {
		t.Fatalf("only %d settings to change", len(patches))
	}
	before := r.status().ConfigRevision
	var wg sync.WaitGroup
	for key, value := range patches {
		wg.Go(func() {
			if _, err := r.Admin.SetConfig(t.Context(), map[string]any{key: value}); err != nil {
				t.Error(err)
			}
		})
		wg.Go(func() {
			err := r.Router.Settings().Change(func(c settings.Config, origin map[string]string) (settings.Config, map[string]string, error) {
				for range 20 {
					runtime.Gosched() // where another change could come between
				}
				c.Aliases = append(slices.Clone(c.Aliases), settings.Alias{Name: "alias of " + key, Model: "sim"})
				return c, origin, nil
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	v, err := r.Admin.Config(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if v.Revision != before+uint64(2*len(patches)) {
		t.Errorf("revision %d, %d before %d changes", v.Revision, before, 2*len(patches))
	}
	for _, s := range v.Settings {
		want, patched := patches[s.Key]
		if patched && (s.Value != want || s.Origin != "admin API") {
			t.Errorf("%s is %v by %q, want %v", s.Key, s.Value, s.Origin, want)
		}
		if list, _ := s.Value.([]any); s.Key == "aliases" && len(list) != len(patches) {
			t.Errorf("%d aliases, want %d", len(list), len(patches))
		}
	}
}
