package sim_test

import (
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/dynctl/dynctl/internal/kvevent"
	"github.com/dynctl/dynctl/internal/workers/sim"
	"github.com/dynctl/dynctl/internal/workers/sim/fault"
	"github.com/dynctl/dynctl/internal/zmtp"
)

func TestRestartBeginsAnew(t *testing.T) {
	r := start(t, "1a:profile=instant")
	e := r.Engine(0)
	complete(t, e, ids(100, 1), nil)
	before := e.Worker()
	if n, err := e.Cached(0); err != nil || len(n) == 0 {
		t.Fatal(n, err)
	}
	names := map[uint64]bool{}
	collect := func(m map[uint64]bool) func(uint64, []byte) {
		return func(_ uint64, payload []byte) {
			var d kvevent.Decoder
			var b kvevent.Batch
			if err := d.Decode(payload, &b); err != nil {
				t.Fatal(err)
			}
			for _, e := range b.Events {
				for _, h := range e.Hashes {
					m[h] = true
				}
			}
		}
	}
	replay(t, before.Events[0].Replay, 0, collect(names))
	if status, b := post(t, e.URL()+"/sim/v1/restart", nil); status != 202 {
		t.Fatalf("%d %s", status, b)
	}
	eventually(t, "the restart", func() bool { up, _ := e.Running(); return up && e.Incarnation() == 1 })
	if d := cmp.Diff(before.Events, e.Worker().Events); d != "" {
		t.Errorf("sockets moved:\n%s", d)
	}
	if n, err := e.Cached(0); err != nil || len(n) != 0 {
		t.Error("the cache survived")
	}
	complete(t, e, ids(100, 1), nil)
	again := map[uint64]bool{}
	replay(t, before.Events[0].Replay, 0, collect(again))
	for h := range again {
		if names[h] {
			t.Fatal("block names survived the restart")
		}
	}
	if len(again) == 0 {
		t.Error("no events after the restart")
	}
}

// Faults

func TestFaults(t *testing.T) {
	r := start(t, "1a:profile=instant")
	e := r.Engine(0)
	set := func(f object) {
		t.Helper()
		if status, b := post(t, e.URL()+"/sim/v1/faults", f); status != 200 {
			t.Fatalf("%d %s", status, b)
		}
	}
	ask := func() (int, []byte, error) {
		return tryPost(t.Context(), e.URL()+"/v1/completions", object{"prompt": "hello", "max_tokens": 20, "ignore_eos": true, "stream": true})
	}
	t.Run("bad sets are refused", func(t *testing.T) {
		for _, f := range []object{{"error_rate": 2}, {"colour": "red"}, {"delay": "soon"}, {"error_status": 200}} {
			if status, b := post(t, e.URL()+"/sim/v1/faults", f); status != 400 {
				t.Errorf("%v: %d %s", f, status, b)
			}
		}
	})
	t.Run("errors", func(t *testing.T) {
		set(object{"error_rate": 1, "error_status": 503})
		if status, _, err := ask(); status != 503 || err != nil {
			t.Errorf("%d %v", status, err)
		}
		if resp, err := http.Get(e.URL() + "/health"); err != nil || resp.StatusCode != 200 {
			t.Errorf("health: %v %v", resp, err)
		} else {
			resp.Body.Close()
		}
		set(object{"error_rate": 1, "all_paths": true})
		if resp, err := http.Get(e.URL() + "/health"); err != nil || resp.StatusCode != 500 {
			t.Errorf("health: %v %v", resp, err)
		} else {
			resp.Body.Close()
		}
	})
	t.Run("die mid-stream", func(t *testing.T) {
		set(object{"die_rate": 1, "die_after_tokens": 0})
		if _, b, err := ask(); err == nil {
			t.Errorf("a whole answer: %s", b)
		}
	})
	t.Run("delay", func(t *testing.T) {
		set(object{"delay": "30ms"})
		began := time.Now()
		if status, _, err := ask(); status != 200 || err != nil || time.Since(began) < 30*time.Millisecond {
			t.Errorf("%d %v after %v", status, err, time.Since(began))
		}
	})
	t.Run("hang, then go on", func(t *testing.T) {
		set(object{"hang": true})
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Millisecond)
		defer cancel()
		if _, _, err := tryPost(ctx, e.URL()+"/tokenize", object{"prompt": "x"}); err == nil {
			t.Error("answered")
		}
		done := make(chan int, 1)
		go func() { status, _, _ := ask(); done <- status }()
		set(object{})
		if status := <-done; status != 200 {
			t.Errorf("%d", status)
		}
	})
	t.Run("refuse for a time", func(t *testing.T) {
		set(object{"refuse": true, "for": "2s"}) // time enough to meet it
		eventually(t, "connections are refused", func() bool {
			_, _, err := tryPost(t.Context(), e.URL()+"/tokenize", object{"prompt": "x"})
			return err != nil && strings.Contains(err.Error(), "refused")
		})
		// A connection from before may still be served while new ones are refused.
		eventually(t, "the fault ends", func() bool { return e.Faults() == (fault.Set{}) })
		eventually(t, "connections are taken again", func() bool {
			_, _, err := tryPost(t.Context(), e.URL()+"/tokenize", object{"prompt": "x"})
			return err == nil
		})
	})
	t.Run("events", func(t *testing.T) {
		w := e.Worker()
		sub, err := zmtp.DialSub(t.Context(), w.Events[0].Endpoint, zmtp.Options{})
		if err != nil {
			t.Fatal(err)
		}
		defer sub.Close()
		pub, err := e.Publisher(0)
		if err != nil {
			t.Fatal(err)
		}
		if err := pub.WaitSubscribers(t.Context(), 1); err != nil {
			t.Fatal(err)
		}
		from := pub.Next()
		set(object{"drop_events": 1})
		complete(t, e, ids(40, 21), nil)
		set(object{"reorder_events": 1})
		complete(t, e, ids(40, 22), nil)
		complete(t, e, ids(40, 23), nil)
		set(object{})
		complete(t, e, ids(40, 24), nil)
		end := pub.Next()
		var got []uint64
		var m zmtp.Message
		for len(got) == 0 || slices.Max(got) < end-1 {
			if err := sub.Recv(&m); err != nil {
				t.Fatal(err)
			}
			_, seq, _, err := kvevent.ParseLive(m.Frames())
			if err != nil {
				t.Fatal(err)
			}
			got = append(got, seq)
		}
		if got[0] == from || slices.IsSorted(got) {
			t.Errorf("sequences from %d on: %v, want a gap and a swap", from, got)
		}
		seqs := func() (out []uint64) {
			replay(t, w.Events[0].Replay, from, func(seq uint64, _ []byte) { out = append(out, seq) })
			return out
		}
		whole := slices.DeleteFunc(seqs(), func(seq uint64) bool { return seq >= end })
		if len(whole) != int(end-from) || !slices.IsSorted(whole) {
			t.Errorf("replay from %d to %d gives %v", from, end, whole)
		}
		// What fails to be published is nowhere.
		set(object{"lose_events": 1})
		first := pub.Next()
		complete(t, e, ids(40, 25), nil)
		eventually(t, "its number is used up", func() bool { return pub.Next() > first })
		lost := pub.Next()
		set(object{})
		well := pub.Next()
		complete(t, e, ids(40, 26), nil)
		eventually(t, "the next batch", func() bool { return pub.Next() > well })
		if got := seqs(); slices.ContainsFunc(got, func(seq uint64) bool { return seq >= first && seq < lost }) || got[len(got)-1] < well {
			t.Errorf("replay gives %v, want all but %d to %d, and those from %d on", got, first, lost-1, well)
		}
		// A ROUTER that drops says nothing, not even that it is done.
		c, err := zmtp.DialDealer(t.Context(), w.Events[0].Replay, zmtp.Options{})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		set(object{"drop_replay": 1})
		before, last := pub.Replays(), pub.Next()-1
		if err := c.Send(kvevent.ReplayRequest(from)...); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the question was answered", func() bool { return pub.Replays() == before+1 })
		set(object{})
		if err := c.Send(kvevent.ReplayRequest(last)...); err != nil {
			t.Fatal(err)
		}
		if err := c.Recv(&m); err != nil {
			t.Fatal(err)
		}
		if seq, _, end, err := kvevent.ParseReplay(m.Frames()); err != nil || end || seq != last {
			t.Errorf("the first answer is %d (end %v, %v), want %d, of the second question", seq, end, err, last)
		}
	})
}

func TestAutoRestart(t *testing.T) {
	r := start(t, "1p1d:profile=instant,auto_restart=10ms")
	d := r.Engine(1)
	if status, b, _ := complete(t, d, ids(100, 1), edit(prefill(t, r.Engine(0), ids(100, 1)), object{"remote_block_ids": []any{}})); status != 500 {
		t.Fatalf("%d %s", status, b)
	}
	eventually(t, "the engine comes back", func() bool { up, _ := d.Running(); return up && d.Incarnation() == 1 })
	if status, _, _ := complete(t, d, ids(100, 1), nil); status != 200 {
		t.Errorf("%d", status)
	}
}

func TestCloseDuringTraffic(t *testing.T) {
	f, err := sim.ParseFleet("2a:speed=20")
	if err != nil {
		t.Fatal(err)
	}
	r, err := sim.Start(t.Context(), f)
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	var begun sync.WaitGroup
	for i := range 16 {
		wg.Add(1)
		begun.Add(1)
		go func() {
			defer wg.Done()
			begun.Done()
			for range 50 {
				if _, _, err := tryPost(t.Context(), r.Engine(i%2).URL()+"/v1/completions", object{"prompt": ids(200, i), "max_tokens": 20, "stream": true}); err != nil {
					return
				}
			}
		}()
	}
	begun.Wait()
	eventually(t, "traffic runs", func() bool { s, err := r.Engine(0).Counters(); return err == nil && s[0].Generated > 20 })
	if err := r.Close(); err != nil {
		t.Error(err)
	}
	wg.Wait()
	http.DefaultClient.CloseIdleConnections()
}

func TestSameSeedSameEngine(t *testing.T) {
	run := func() object {
		r := start(t, "1p:profile=instant,seed=9")
		p := prefill(t, r.Engine(0), ids(50, 1))
		delete(p, "remote_port")
		return p
	}
	if d := cmp.Diff(run(), run()); d != "" {
		t.Errorf("two runs differ:\n%s", d)
	}
}

func TestControl(t *testing.T) {
	r := start(t, "1p1d:profile=instant")
	srv := httptest.NewServer(r.Control())
	defer srv.Close()
	p, d := r.Engine(0), r.Engine(1)
	call := func(path string, body any, want int) []byte {
		t.Helper()
		status, b := post(t, srv.URL+"/sim/v1/engines/"+path, body)
		if status != want {
			t.Errorf("%s: %d %s, want %d", path, status, b, want)
		}
		return b
	}
	call("decode-0/kill", nil, 200)
	if up, why := d.Running(); up || why != "killed" {
		t.Error(up, why)
	}
	if s := decode[sim.Status](t, call("decode-0/restart", nil, 200)); !s.Running || s.Incarnation != 1 {
		t.Errorf("%+v", s)
	}
	call("prefill-0/faults", object{"refuse": true}, 200)
	eventually(t, "connections are refused", func() bool {
		_, _, err := tryPost(t.Context(), p.URL()+"/tokenize", object{"prompt": "x"})
		return err != nil
	})
	call("prefill-0/faults", object{"refuse": "yes"}, 400)
	call("prefill-9/faults", object{}, 404)
	call("prefill-0/faults", object{}, 200)
	eventually(t, "connections are taken", func() bool {
		_, _, err := tryPost(t.Context(), p.URL()+"/tokenize", object{"prompt": "x"})
		return err == nil
	})
	// Faults may be set while an engine is down; they hold from its start.
	call("decode-0/kill", nil, 200)
	call("decode-0/faults", object{"error_rate": 1}, 200)
	call("decode-0/restart", nil, 200)
	if status, _, _ := complete(t, d, ids(5, 1), nil); status != 500 {
		t.Errorf("%d", status)
	}
	resp, err := http.Get(srv.URL + "/sim/v1/engines")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var list struct{ Engines []sim.Status }
	if err := json.NewDecoder(resp.Body).Decode(&list); err != nil || len(list.Engines) != 2 || list.Engines[1].Faults.ErrorRate != 1 {
		t.Errorf("%+v %v", list, err)
	}
}
