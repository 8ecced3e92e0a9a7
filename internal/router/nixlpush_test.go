package router_test

import (
	"errors"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/dynctl/dynctl/internal/rawjson"
	"github.com/dynctl/dynctl/internal/settings"
)

// moved wants the text of a single engine for a prompt, over a remote path.
func moved(t *testing.T, r *rig, prompt []int, header ...string) {
	t.Helper()
	a, got := r.complete(prompt, header...)
	if want := right(prompt); got != want || a.header.Get("X-Dynctl-Path") != "remote" {
		t.Errorf("%q by %s, want %q by remote; %+v", got, a.header.Get("X-Dynctl-Path"), want, r.receipt(a.header.Get("X-Dynctl-Decision")))
	}
}

// TestPushedPrompts: NIXL's push, whose prefill engine finds the decode engine that waits.
func TestPushedPrompts(t *testing.T) {
	t.Parallel()
	r, p := tappedRig(t, "1p1d:profile=instant,connector=nixl-push")
	for _, c := range []struct {
		name string
		test func(*testing.T, *rig, *tap)
	}{
		{"of one id", pushedPromptsOfOneID}, // the first, while nobody knows where the prefill rank is
		{"legs start together", pushedLegsStartTogether},
		{"the engine restarts", pushingEngineRestarts},
		{"the engine fails", pushingEngineFails},
	} {
		t.Run(c.name, func(t *testing.T) {
			p.set(nil)
			for _, w := range []string{"prefill-0", "decode-0"} {
				r.Router.Heal(w)
			}
			c.test(t, r.in(t), p)
		})
	}
}

// pushedLegsStartTogether: once it is known where a prefill rank is, the decode leg
// does not wait for it: here neither leg goes on before the other has come.
func pushedLegsStartTogether(t *testing.T, r *rig, p *tap) {
	before, kept := r.counters("decode-0"), r.counters("prefill-0").Pinned
	moved(t, r, ids(200, 11))
	both := map[string]chan struct{}{"prefill-0": make(chan struct{}), "decode-0": make(chan struct{})}
	p.set(func(engine string, _ http.ResponseWriter, q *http.Request, _ []byte) bool {
		if q.URL.Path != "/v1/completions" {
			return false
		}
		close(both[engine])
		for _, there := range both {
			select {
			case <-there:
			case <-q.Context().Done():
			}
		}
		return false
	})
	moved(t, r, ids(200, 12))
	p.set(nil)
	if d, pre := r.counters("decode-0"), r.counters("prefill-0"); d.External-before.External != 400 || d.Local != before.Local || pre.Pinned != kept {
		t.Errorf("decode-0 got %d tokens and computed %d; prefill-0 keeps %d prompts, %d before", d.External-before.External, d.Local-before.Local, pre.Pinned, kept)
	}
}

// pushedPromptsOfOneID: a prefill engine finds the decode engine that waits for a
// prompt by X-Request-Id. A client that uses one twice gets the KV of the right prompt,
// even where that of the other one was never fetched.
func pushedPromptsOfOneID(t *testing.T, r *rig, p *tap) {
	const same = "the-clients-own"
	var failed atomic.Bool
	p.set(func(engine string, w http.ResponseWriter, q *http.Request, _ []byte) bool {
		if engine != "decode-0" || q.URL.Path != "/v1/completions" || failed.Swap(true) {
			return false
		}
		// The first prompt stays on the prefill engine.
		w.WriteHeader(http.StatusInternalServerError)
		return true
	})
	for i := range 4 {
		moved(t, r, ids(200, i), "X-Request-Id", same)
	}
	seen := map[string]int{}
	for _, leg := range p.legs() {
		id := leg.header.Get("X-Request-Id")
		seen[id]++
		if !strings.HasPrefix(id, same+"-") {
			t.Errorf("leg %q", id)
		}
		if remote := rawjson.Value(leg.body).Get("kv_transfer_params.remote_request_id").String(); leg.engine == "decode-0" && remote != id {
			t.Errorf("%s waits for %q", id, remote)
		}
	}
	if len(seen) != 5 { // one was tried twice
		t.Errorf("ids of the legs: %v", seen)
	}
}

// pushingEngineRestarts: a decode leg names the prefill engine of before a restart
// once at most, and no request is lost by that.
func pushingEngineRestarts(t *testing.T, r *rig, p *tap) {
	p.reset()
	engines := func() map[string]int { // that decode legs name
		seen := map[string]int{}
		for _, leg := range p.legsOf("decode-0") {
			if id := rawjson.Value(leg.body).Get("kv_transfer_params.remote_engine_id"); id.Exists() {
				seen[id.String()]++
			}
		}
		p.reset()
		return seen
	}
	moved(t, r, ids(200, 21))
	before := engines()
	if err := r.Sim.Named("prefill-0").Restart(); err != nil {
		t.Fatal(err)
	}
	p.hangUp()
	r.eventually("the prefill engine to be usable", func() error {
		if w := r.worker("prefill-0"); !w.Usable {
			return errors.New(w.Reason)
		}
		return nil
	})
	// The decode engine finds out when the prefill has begun, and before it has answered.
	var held atomic.Bool
	begun := make(chan struct{})
	p.set(func(engine string, _ http.ResponseWriter, q *http.Request, _ []byte) bool {
		if q.URL.Path != "/v1/completions" {
			return false
		}
		if engine != "prefill-0" {
			<-begun
			return false
		}
		if held.Swap(true) {
			return false
		}
		close(begun)
		<-q.Context().Done()
		panic(http.ErrAbortHandler)
	})
	if _, got := r.complete(ids(200, 22)); got != right(ids(200, 22)) {
		t.Errorf("after the restart: %q", got)
	}
	moved(t, r, ids(200, 23))
	moved(t, r, ids(200, 24))
	for id, n := range engines() {
		if before[id] > 0 && n > 1 {
			t.Errorf("%d legs waited for the engine of before the restart", n)
		}
	}
}

// pushingEngineFails: a decode engine waits in vain for a prefill that fails. Its
// leg is given up, and the request is served all the same.
func pushingEngineFails(t *testing.T, r *rig, p *tap) {
	r.set(func(c *settings.Config) { c.Retry.Attempts = 1 })
	moved(t, r, ids(200, 31))
	arrived, left := make(chan struct{}), make(chan struct{})
	p.set(func(engine string, w http.ResponseWriter, q *http.Request, body []byte) bool {
		switch {
		case q.URL.Path != "/v1/completions":
			return false
		case engine == "prefill-0":
			<-arrived
			w.WriteHeader(http.StatusInternalServerError)
			return true
		case rawjson.Value(body).Get("kv_transfer_params").Exists():
			close(arrived)
			<-q.Context().Done()
			close(left)
			panic(http.ErrAbortHandler)
		}
		return false
	})
	a, got := r.complete(ids(200, 32))
	if want := right(ids(200, 32)); got != want || a.header.Get("X-Dynctl-Path") != "local" {
		t.Errorf("%q by %s, want %q by local", got, a.header.Get("X-Dynctl-Path"), want)
	}
	<-left
}
