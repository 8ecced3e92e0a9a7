package router_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/workers/sim/fault"
)

// TestDrainMoves: with a drain that moves, streams that can be continued go on elsewhere;
// the others finish where they are, and no worker's health suffers.
func TestDrainMoves(t *testing.T) {
	t.Parallel()
	r := start(t, "2a:speed=4,answers=letters", exact)
	r.set(func(c *settings.Config) { c.Continue.Mode = settings.ContinueOff })
	if _, err := r.Admin.MoveStreams(t.Context(), r.Sim.Engine(0).Name()); err == nil || !strings.Contains(err.Error(), "continue.mode") {
		t.Errorf("without continue.mode: %v", err)
	}
	r.set(func(*settings.Config) {})
	body := func(seed any) object {
		return object{"model": "sim", "prompt": "Tell me about the river.", "max_tokens": 150, "ignore_eos": true, "stream": true, "seed": seed}
	}
	want := read(t, r.post("/v1/completions", body(nil)).body)
	slow := func(factor float64) {
		for i := range 2 {
			if err := r.Sim.Engine(i).SetFaults(fault.Set{Slow: factor}); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, seed := range []any{nil, 7} {
		slow(20) // the stream is not at its end before the drain
		resp, err := r.open(t.Context(), http.MethodPost, "/v1/completions", encode(t, body(seed)))
		if err != nil {
			t.Fatal(err)
		}
		first := make([]byte, 64)
		if _, err := io.ReadFull(resp.Body, first); err != nil {
			t.Fatal(err)
		}
		label := resp.Header.Get("X-Dynctl-Worker")
		name, _, _ := strings.Cut(label, "/")
		w, err := r.Admin.MoveStreams(t.Context(), name)
		if err != nil || !w.Draining {
			t.Fatalf("%v %+v", err, w)
		}
		if seed == nil {
			r.eventually("the stream to move", func() error {
				list, err := r.Admin.Workers(t.Context())
				if err != nil {
					return err
				}
				for _, w := range list.Workers {
					if w.Name == name && w.Ranks[0].Moves.Away == 0 {
						return errors.New("it is still there")
					}
				}
				return nil
			})
		}
		slow(0)
		rest, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil {
			t.Fatal(err)
		}
		got := read(t, append(first, rest...))
		c := r.receipt(resp.Header.Get("X-Dynctl-Decision"))
		if got.text != want.text || len(got.ids) != 1 || c.Outcome.Error != "" {
			t.Errorf("seed %v: %q, want %q (%v)", seed, got.text, want.text, c.Outcome)
		}
		moves := 0
		if seed == nil {
			moves = 1
		}
		if len(c.Continued) != moves {
			t.Errorf("seed %v: moved %d times, want %d", seed, len(c.Continued), moves)
		}
		for _, m := range c.Continued {
			if m.Reason != "moved" || m.Dropped != 0 {
				t.Errorf("seed %v: because %q, %d dropped", seed, m.Reason, m.Dropped)
			}
		}
		if _, err := r.Admin.ResumeWorker(t.Context(), name); err != nil {
			t.Fatal(err)
		}
	}
	if n := len(r.events("worker_failing")); n != 0 {
		t.Errorf("%d workers are said to fail", n)
	}
	t.Run("what has a place", func(t *testing.T) { drainMovesWhatHasAPlace(t, r.in(t)) })
}

// events reads so many events of a stream.
func readEvents(t *testing.T, from io.Reader, n int) []byte {
	t.Helper()
	var all []byte
	one := make([]byte, 1)
	for bytes.Count(all, []byte("\n\n")) < n {
		if _, err := io.ReadFull(from, one); err != nil {
			t.Fatalf("%v after %q", err, all)
		}
		all = append(all, one[0])
	}
	return all
}

// drainMovesWhatHasAPlace: a stream is taken from its worker only when another one
// takes it at once, and stays well where it is until then.
func drainMovesWhatHasAPlace(t *testing.T, r *rig) {
	// A request has one rank to itself, and none waits for one.
	r.set(func(c *settings.Config) {
		c.Routing.Busy.Requests, c.Limits.Queue, c.Routing.AllowHeaders = 1, 0, true
	})
	body := func(n int) []byte {
		return encode(t, object{"model": "sim", "prompt": "Tell me about the river.", "max_tokens": n, "ignore_eos": true, "stream": true})
	}
	const tokens = 400
	want := read(t, r.send(http.MethodPost, "/v1/completions", body(tokens)).body)
	from, to := r.Sim.Engine(0), r.Sim.Engine(1)
	if err := from.SetFaults(fault.Set{Slow: 4}); err != nil { // it is not at its end before the other one has left
		t.Fatal(err)
	}
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	other, err := r.open(ctx, http.MethodPost, "/v1/completions", body(4000), "X-Dynctl-Worker", to.Name())
	if err != nil || other.StatusCode != http.StatusOK {
		t.Fatalf("%v %v", err, other)
	}
	defer other.Body.Close()
	// A stream that was asked for on a worker by its name would not be moved.
	resp, err := r.open(t.Context(), http.MethodPost, "/v1/completions", body(tokens))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if label := resp.Header.Get("X-Dynctl-Worker"); !strings.HasPrefix(label, from.Name()) {
		t.Fatalf("on %s", label)
	}
	got := readEvents(t, resp.Body, 3)
	if _, err := r.Admin.MoveStreams(t.Context(), from.Name()); err != nil {
		t.Fatal(err)
	}
	decision := resp.Header.Get("X-Dynctl-Decision")
	got = append(got, readEvents(t, resp.Body, 20)...)
	if err := from.SetFaults(fault.Set{Slow: 20}); err != nil {
		t.Fatal(err)
	}
	leave()
	rest, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	s := read(t, append(got, rest...))
	c := r.receipt(decision)
	if s.text != want.text || s.finish != want.finish || len(s.ids) != 1 {
		t.Errorf("%q %s with the ids %v\nwant %q %s", s.text, s.finish, s.ids, want.text, want.finish)
	}
	if len(c.Continued) != 1 || c.Outcome.Error != "" {
		t.Fatalf("moved %d times, error %q", len(c.Continued), c.Outcome.Error)
	}
	if m := c.Continued[0]; m.Reason != "moved" || m.Tokens < 23 || m.Dropped != 0 {
		t.Errorf("because %q after %d tokens, %d dropped", m.Reason, m.Tokens, m.Dropped)
	}
	if c.Outcome.Status != http.StatusOK || len(c.Legs) != 2 || !strings.HasPrefix(c.Legs[1].Rank, to.Name()) {
		t.Errorf("%+v %+v", c.Outcome, c.Legs)
	}
}

// TestDrainMovesToAnEngineThatFails: a drain moves a healthy stream, and the engine that takes it refuses.
// The client is there and must get an error event; the request must not count as canceled by
// its client.
func TestDrainMovesToAnEngineThatFails(t *testing.T) {
	r, p := tappedRig(t, "2a:speed=4,answers=letters", exact)
	for i := range 2 {
		if err := r.Sim.Engine(i).SetFaults(fault.Set{Slow: 20}); err != nil {
			t.Fatal(err)
		}
	}
	resp, err := r.open(t.Context(), http.MethodPost, "/v1/completions", encode(t, object{"model": "sim", "prompt": "Tell me about the river.", "max_tokens": 150, "ignore_eos": true, "stream": true}))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	got := readEvents(t, resp.Body, 3)
	name, _, _ := strings.Cut(resp.Header.Get("X-Dynctl-Worker"), "/")
	p.set(func(engine string, w http.ResponseWriter, q *http.Request, body []byte) bool {
		if engine == name || q.URL.Path != "/v1/completions" {
			return false
		}
		w.WriteHeader(http.StatusInternalServerError)
		_, _ = io.WriteString(w, `{"error":{"message":"the engine's own words"}}`)
		return true
	})
	if _, err := r.Admin.MoveStreams(t.Context(), name); err != nil {
		t.Fatal(err)
	}
	rest, err := io.ReadAll(resp.Body)
	got = append(got, rest...)
	c := r.receipt(resp.Header.Get("X-Dynctl-Decision"))
	s, serr := r.Admin.Status(t.Context())
	if serr != nil {
		t.Fatal(serr)
	}
	tail := string(got[max(0, len(got)-300):])
	if err != nil || !strings.Contains(tail, `"error"`) || !strings.Contains(tail, "[DONE]") {
		t.Errorf("the client, which is there, gets no error event: reading ends with %v; the last bytes are %q", err, tail)
	}
	if c.Outcome.Cancelled || s.Traffic.Cancelled != 0 || s.Traffic.Failed != 1 {
		t.Errorf("the router's own failure counts as the client's leaving: receipt cancelled=%v, status %v, error %q; traffic cancelled=%d failed=%d", c.Outcome.Cancelled, c.Outcome.Status, c.Outcome.Error, s.Traffic.Cancelled, s.Traffic.Failed)
	}
}
