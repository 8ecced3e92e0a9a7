package router_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/dynctl/dynctl/internal/rawjson"
	"github.com/dynctl/dynctl/internal/rig/fakeengine"
	"github.com/dynctl/dynctl/internal/router"
	"github.com/dynctl/dynctl/internal/settings"
)

// remoteParams are the transfer parameters that a decode leg carries.
func remoteParams(body []byte) rawjson.Value {
	p := rawjson.Value(body).Get("kv_transfer_params")
	if !p.Get("do_remote_prefill").Bool() {
		return nil
	}
	return p
}

// TestInvariant01OnePrefillOneDecode: what a prefill gave feeds one decode leg
// at most; a retry of either leg begins with a new prefill.
func TestInvariant01OnePrefillOneDecode(t *testing.T) {
	t.Parallel()
	r, p := tappedRig(t, "2p3d:profile=instant+2p3d:profile=instant,engine=sglang,bootstrap_wait=1s,model=sglang", func(c *settings.Config) { c.Retry.Budget = 1 })
	t.Run("nixl", func(t *testing.T) {
		r := r.in(t)
		var fails atomic.Int32
		p.set(func(engine string, w http.ResponseWriter, q *http.Request, body []byte) bool {
			if strings.HasPrefix(engine, "decode") && strings.HasPrefix(q.URL.Path, "/v1/completions") && fails.Add(-1) >= 0 {
				w.WriteHeader(http.StatusInternalServerError)
				return true
			}
			return false
		})
		used := map[string]bool{}
		for i := range 10 {
			p.reset()
			fails.Store(int32(i % 3)) // of three attempts
			prompt := ids(200, i)
			_, text := r.complete(prompt)
			if want := right(prompt); text != want {
				t.Errorf("text %q, want %q", text, want)
			}
			prefills, decodes := p.legsOf("prefill"), p.legsOf("decode")
			if len(decodes) != i%3+1 || len(prefills) != len(decodes) {
				t.Fatalf("%d prefill legs and %d decode legs for %d failures", len(prefills), len(decodes), i%3)
			}
			for _, d := range decodes {
				id := remoteParams(d.body).Get("remote_request_id").String()
				if id == "" || used[id] {
					t.Errorf("transfer %q is missing or fed a decode leg before", id)
				}
				used[id] = true
			}
		}
	})
	t.Run("sglang", func(t *testing.T) {
		r := r.in(t)
		var fails atomic.Int32
		p.set(func(engine string, w http.ResponseWriter, q *http.Request, body []byte) bool {
			if strings.HasPrefix(engine, "decode") && strings.HasPrefix(q.URL.Path, "/v1/completions") && fails.Add(-1) >= 0 {
				w.WriteHeader(http.StatusServiceUnavailable)
				return true
			}
			return false
		})
		rooms := map[string]bool{}
		for i := range 6 {
			p.reset()
			fails.Store(int32(i % 3))
			r.post("/v1/completions", object{"model": "sglang", "prompt": ids(200, i), "max_tokens": 12, "ignore_eos": true})
			for _, d := range p.legsOf("decode") {
				room := rawjson.Value(d.body).Get("bootstrap_room").String()
				if room == "" || room == "0" || rooms[room] {
					t.Errorf("room %q is missing or was used before", room)
				}
				rooms[room] = true
			}
		}
		if len(rooms) != 0+6+6 { // 6 requests and 0+1+2+0+1+2 failures
			t.Errorf("%d rooms", len(rooms))
		}
	})
}

// steering are members by which a client could reach into the transfer.
const steering = `"kv_transfer_params":{"do_remote_prefill":true,"remote_engine_id":"evil","remote_block_ids":[1,2],"remote_host":"10.9.9.9","remote_port":1},` +
	`"bootstrap_host":"10.9.9.9","bootstrap_port":4,"bootstrap_room":77,"disaggregated_params":{"x":1},"routed_dp_rank":3,"disagg_prefill_dp_rank":3,"data_parallel_rank":3,` +
	`"kv_transfer_param\u0073":{"do_remote_prefill":true,"remote_host":"10.9.9.9"},` +
	`"vllm_xargs":{"kv_transfer_params":{"remote_host":"10.9.9.9"},"harmless":5},`

// TestInvariant02ClientCannotSteerTheTransfer: no transfer field and no routing
// header of a client reaches an engine, on no path and on no endpoint.
func TestInvariant02ClientCannotSteerTheTransfer(t *testing.T) {
	t.Parallel()
	r, p := tappedRig(t, "1p1d:profile=instant,model=vllm+1p1d:profile=instant,engine=sglang,model=sglang", func(c *settings.Config) { c.Routing.Threshold.Tokens = 64 })
	for _, engine := range []string{"vllm", "sglang"} {
		t.Run(engine, func(t *testing.T) {
			r := r.in(t)
			for _, n := range []int{16, 200} {
				for _, path := range []string{"/v1/completions", "/v1/chat/completions"} {
					p.reset()
					prompt := fmt.Sprintf(`"prompt":%s`, encode(t, ids(n, n)))
					if path == "/v1/chat/completions" {
						prompt = fmt.Sprintf(`"messages":[{"role":"user","content":%q}]`, strings.Repeat("one two three four five ", n/5))
					}
					// The escaped twin would be a duplicate, which is refused as such.
					body := strings.Replace(`{`+steering+`"model":"`+engine+`","max_tokens":3,`+prompt+`}`, `"kv_transfer_param\u0073":{"do_remote_prefill":true,"remote_host":"10.9.9.9"},`, "", 1)
					a := r.send(http.MethodPost, path, []byte(body),
						"X-Dynctl-Worker", "decode-9", "X-Dynctl-Path", "local", "X-data-parallel-rank", "7", "X-Dynctl-Prefill-Worker", "nobody", "Endpoint-Load-Metrics-Format", "TEXT", "X-Dynctl-Hop", "evil")
					if a.status != 200 {
						t.Fatalf("%s", a)
					}
					for _, c := range p.legs() {
						for _, evil := range []string{"10.9.9.9", "evil", "disaggregated_params", "data_parallel_rank", "disagg_prefill_dp_rank", `"bootstrap_room":77,`} {
							if bytes.Contains(c.body, []byte(evil)) {
								t.Errorf("%s got %q from the client in %s", c.engine, evil, c.body)
							}
						}
						if !bytes.Contains(c.body, []byte(`"harmless":5`)) {
							t.Errorf("%s lost what is nobody's business: %s", c.engine, c.body)
						}
						if hop := c.header["X-Dynctl-Hop"]; len(hop) != 1 || strings.Contains(hop[0], "evil") {
							t.Errorf("%s got the hops %q", c.engine, hop)
						}
						for k := range c.header {
							if strings.HasPrefix(k, "X-Dynctl-") && k != "X-Dynctl-Hop" || k == "X-Data-Parallel-Rank" || k == "Endpoint-Load-Metrics-Format" {
								t.Errorf("%s got header %s: %q", c.engine, k, c.header[k])
							}
						}
					}
					// SGLang's decode workers cannot prefill by themselves.
					if want := 1 + n/200; path == "/v1/completions" && len(p.legs()) != want && engine == "vllm" {
						t.Errorf("%d legs for %d tokens, want %d", len(p.legs()), n, want)
					}
				}
			}
			// Twice the same member, in whatever spelling, is no way around.
			a := r.send(http.MethodPost, "/v1/completions", []byte(`{`+steering+`"model":"`+engine+`","prompt":"x"}`))
			a.refused(t, http.StatusBadRequest, "duplicate_key")
		})
	}
}

// invariant02FormsAndQueriesCannotSteer: nor by a form, a query, or a body that an engine
// would read in another way than the router does, unless the operator lets clients steer.
func invariant02FormsAndQueriesCannotSteer(t *testing.T, r *rig, p *tap) {
	const multi = "multipart/form-data; boundary=b"
	part := func(name, value string) string {
		return "--b\r\nContent-Disposition: form-data; name=\"" + name + "\"\r\n\r\n" + value + "\r\n"
	}
	file := part("model", "sim") + part(`file"; filename="a.wav`, "RIFF\x00\xff\r\n--\r\nkv_transfer_params")
	const evil, end = `{"kv_transfer_param\u0073":"x","mine":1}`, "--b--\r\n"
	json := fmt.Sprintf(`{"model":"sim","prompt":%s,"max_tokens":1,"vllm_xargs":%s}`, encode(t, ids(8, 8)), evil)
	for _, may := range []bool{false, true} {
		r.set(func(c *settings.Config) { c.Routing.AllowTransferFields = may })
		p.set(func(_ string, w http.ResponseWriter, q *http.Request, _ []byte) bool {
			if strings.HasPrefix(q.URL.Path, "/v1/audio/") {
				_, _ = io.WriteString(w, `{"text":"hello"}`)
				return true
			}
			return false
		})
		for _, stream := range []string{"", part("stream", "true")} {
			for _, path := range []string{"/v1/audio/transcriptions", "/v1/audio/translations"} {
				for _, c := range []struct{ name, path, media, body, want string }{
					{"ordinary", path, multi, file + stream + part("vllm_xargs", `{"mine": 1}`) + end, file + stream + part("vllm_xargs", `{"mine": 1}`) + end},
					{"arguments", path, multi, file + stream + part("vllm_xargs", evil) + end, file + stream + part("vllm_xargs", `{"mine":1}`) + end},
					{"a field", path, multi, file + stream + part("bootstrap_room[]", "1") + end, file + stream + end},
					{"arguments twice", path, multi, file + part("vllm_xargs", "{}") + stream + part("vllm_xargs", evil) + end, ""},
					{"a query", path + "?vllm_xargs[kv_transfer_param%73]=x", multi, file + stream + end, ""},
					{"JSON that is called a form", "/v1/completions?a=b", multi, json, strings.Replace(json, evil, `{"mine":1}`, 1)},
				} {
					p.reset()
					a := r.send(http.MethodPost, c.path, []byte(c.body), "Content-Type", c.media)
					want, status, sent := c.want, 200, 1
					switch {
					case may:
						want = c.body
					case want == "":
						status, sent = 400, 0
					}
					legs := p.callsOf(c.path)
					if a.status != status || len(legs) != sent || sent == 1 && string(legs[0].body) != want {
						t.Errorf("%s, allowed %v: %s, %d legs", c.name, may, a, len(legs))
						continue
					}
					if sent == 1 && (legs[0].header.Get("Content-Type") == multi) != (c.path[4] == 'a') {
						t.Errorf("%s goes on as %q", c.name, legs[0].header.Get("Content-Type"))
					}
				}
			}
		}
	}
}

// TestInvariant03BytesInBytesOut: the engine gets the client's very bytes but
// for what was spliced, and the client the engine's.
func TestInvariant03BytesInBytesOut(t *testing.T) {
	t.Parallel()
	r, p := tappedRig(t, "1p1d:profile=instant", func(c *settings.Config) { c.Routing.Threshold.Tokens = 64 })
	odd := func(prompt string, stream bool) string {
		return fmt.Sprintf("  {\t\"zeta\" : 12345678901234567890123456789.000e-3,\r\n \"model\":\"sim\", \"seed\": 9007199254740993, "+
			"\"\\u0061bc\": \"\\ud83d\\ude00 \u00e9\", \"max_tokens\":4 , \"stream\":%v, \"nothing\":null,\"alpha\":[ 1 , {\"b\":-0.0} ], %s, \"ignore_eos\":true, \"last\":1e400}\n", stream, prompt)
	}
	short := `"prompt": "a few words"`
	for i, stream := range []bool{false, true} {
		long := `"prompt": ` + string(encode(t, ids(100, 5+i)))
		for _, c := range []struct{ name, prompt string }{{"local", short}, {"remote", long}} {
			name := c.name
			p.reset()
			body := odd(c.prompt, stream)
			a := r.send(http.MethodPost, "/v1/completions", []byte(body), "X-Custom", "kept as it is", "Authorization", "Bearer tenant", "traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
			if a.status != 200 || a.header.Get("X-Dynctl-Path") != name {
				t.Fatalf("%s: %s %v", name, a, a.header)
			}
			legs := p.legsOf("decode")
			if len(legs) != 1 {
				t.Fatalf("%d decode legs", len(legs))
			}
			got := string(legs[0].body)
			if name == "remote" {
				params := string(rawjson.Value(got).Get("kv_transfer_params"))
				if params == "" {
					t.Fatal("no transfer parameters")
				}
				cut := strings.Replace(got, `,"kv_transfer_params":`+params, "", 1)
				if cut == got {
					cut = strings.Replace(got, `"kv_transfer_params":`+params+`,`, "", 1)
				}
				got = cut
			}
			said := string(legs[0].answer)
			if stream { // the router adds usage, and takes it out again
				got = strings.Replace(got, `,"stream_options":{"include_usage":true}`, "", 1)
				said = regexp.MustCompile(`data: [^\n]*"choices":\[\][^\n]*\n\n`).ReplaceAllString(said, "")
				if got == string(legs[0].body) || said == string(legs[0].answer) {
					t.Errorf("%s: the engine was not asked for usage: %s", name, got)
				}
			}
			if d := cmp.Diff(body, got); d != "" {
				t.Errorf("%s, stream %v: the decode leg's body differs (-client +engine):\n%s", name, stream, d)
			}
			if string(a.body) != said {
				t.Errorf("%s, stream %v: answer %q, the engine said %q", name, stream, a.body, legs[0].answer)
			}
			for _, l := range p.legs() {
				if l.header.Get("X-Custom") != "kept as it is" || l.header.Get("Authorization") != "Bearer tenant" || !strings.HasPrefix(l.header.Get("Traceparent"), "00-0af7651916cd43dd8448eb211c80319c-") {
					t.Errorf("%s lost a header: %v", l.engine, l.header)
				}
				if l.header.Get("X-Request-Id") != a.header.Get("X-Request-Id") {
					t.Errorf("%s got request id %q, the client %q", l.engine, l.header.Get("X-Request-Id"), a.header.Get("X-Request-Id"))
				}
			}
		}
	}
	// An answer of unusual form passes unchanged too.
	strange := []byte("{\"choices\" : [ ] ,\t\"n\":1e999, \"u\":\"\\u0000\"}\n\n")
	p.set(func(engine string, w http.ResponseWriter, q *http.Request, _ []byte) bool {
		if q.URL.Path != "/v1/completions" || engine != "decode-0" {
			return false
		}
		w.Header().Set("Content-Type", "application/json; charset=utf-8")
		w.Header().Add("X-Engine", "one")
		w.Header().Add("X-Engine", "two")
		w.WriteHeader(http.StatusAccepted)
		_, _ = w.Write(strange)
		return true
	})
	a := r.send(http.MethodPost, "/v1/completions", []byte(`{"model":"sim","prompt":"x"}`))
	if a.status != http.StatusAccepted || !bytes.Equal(a.body, strange) || len(a.header.Values("X-Engine")) != 2 {
		t.Errorf("%s %v", a, a.header)
	}
	p.set(nil)
	t.Run("forwarded headers", func(t *testing.T) { forwardedHeaders(t, r.in(t), p) })
	t.Run("legs are bounded", func(t *testing.T) { legsAreBounded(t, r.in(t), p) })
}

func writeJSON(w http.ResponseWriter, b []byte) {
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(b)
}

// edit sets a member of an object, nil deletes it.
func edit(b []byte, path string, v any) []byte {
	var o map[string]any
	if err := json.Unmarshal(b, &o); err != nil {
		panic(err)
	}
	at := o
	parts := strings.Split(path, ".")
	for _, k := range parts[:len(parts)-1] {
		at = at[k].(map[string]any)
	}
	if v == nil {
		delete(at, parts[len(parts)-1])
	} else {
		at[parts[len(parts)-1]] = v
	}
	out, err := json.Marshal(o)
	if err != nil {
		panic(err)
	}
	return out
}

// TestInvariant08CancelReachesEveryone: a client that leaves ends every leg of
// its request on the engines within a bound, at every stage; so does shutdown.
func TestInvariant08CancelReachesEveryone(t *testing.T) {
	t.Parallel()
	r, p := tappedRig(t, "1p1d:profile=instant,model=first+1p1d:profile=instant,model=second+1p1d:profile=instant,engine=sglang,model=both+1a:profile=instant,model=whole+1p1d:speed=1,model=stream")
	cases := []struct {
		name, model string
		hang        []string // engines that do
		stream      bool
	}{
		{"prefill leg, sequential", "first", []string{"prefill-0"}, true},
		{"decode leg before its head", "second", []string{"decode-1"}, true},
		{"both legs, concurrent", "both", []string{"prefill-2", "decode-2"}, true},
		{"whole answer", "whole", []string{"aggregated-0"}, false},
	}
	reached, left := map[string]chan bool{}, map[string]chan bool{}
	for _, c := range cases {
		for _, e := range c.hang {
			reached[e], left[e] = make(chan bool, 8), make(chan bool, 8)
		}
	}
	p.set(func(engine string, _ http.ResponseWriter, q *http.Request, _ []byte) bool {
		if q.URL.Path != "/v1/completions" || reached[engine] == nil {
			return false
		}
		reached[engine] <- true
		<-q.Context().Done()
		left[engine] <- true
		panic(http.ErrAbortHandler)
	})
	body := func(model string, stream bool) []byte {
		return encode(t, object{"model": model, "prompt": ids(200, 1), "stream": stream, "max_tokens": 5000, "ignore_eos": true})
	}
	// begun sends a request and waits until its legs have reached their engines.
	begun := func(ctx context.Context, i int) (done chan struct{}) {
		done = make(chan struct{})
		go func() {
			defer close(done)
			_, _ = r.try(ctx, http.MethodPost, "/v1/completions", body(cases[i].model, cases[i].stream))
		}()
		for _, e := range cases[i].hang {
			<-reached[e]
		}
		return done
	}
	ended := func(t *testing.T, i int, done chan struct{}) {
		for _, e := range cases[i].hang { // which no time limit ends
			select {
			case <-left[e]:
			case <-time.After(patience):
				t.Fatalf("the leg on %s still runs %s after the end", e, patience)
			}
		}
		<-done
	}
	for i, c := range cases {
		t.Run(c.name+"/disconnect", func(t *testing.T) {
			r := r.in(t)
			before := r.status().Traffic.Cancelled
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			done := begun(ctx, i)
			cancel()
			ended(t, i, done)
			r.eventually("an empty ledger", r.Router.Balanced)
			r.eventually("the count", func() error {
				if n := r.status().Traffic.Cancelled; n != before+1 {
					return fmt.Errorf("%d cancelled requests counted, %d before", n, before)
				}
				return nil
			})
		})
	}
	t.Run("in the middle of a stream the engine stops", func(t *testing.T) {
		r := r.in(t)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		resp, err := r.open(ctx, http.MethodPost, "/v1/completions", body("stream", true))
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		if _, err := io.ReadFull(resp.Body, make([]byte, 500)); err != nil {
			t.Fatal(err)
		}
		cancel()
		r.eventually("the engine to abort", func() error { // the whole answer would take it longer, and so would the lease
			if s := r.counters("decode-3"); s.Running+s.Waiting != 0 || s.Pinned != 0 {
				return fmt.Errorf("%d running, %d waiting", s.Running, s.Waiting)
			}
			if s := r.counters("prefill-3"); s.Pinned != 0 {
				return fmt.Errorf("%d request(s) still pinned on the prefill side", s.Pinned)
			}
			return nil
		})
	})
	t.Run("shutdown", func(t *testing.T) {
		r.healAll()
		var all []chan struct{}
		for i := range cases {
			all = append(all, begun(t.Context(), i))
		}
		r.Router.CancelRequests()
		for i := range cases {
			ended(t, i, all[i])
		}
		r.in(t).eventually("an empty ledger", r.Router.Balanced)
	})
	p.set(nil)
}

// TestInvariant09FirstByteEarly: each event of an answer reaches the client while the engine
// still works.
func TestInvariant09FirstByteEarly(t *testing.T) {
	t.Parallel()
	r, p := tappedRig(t, "1a:profile=instant")
	event := func(i int) string { return fmt.Sprintf("data: {\"choices\":[{\"index\":0,\"text\":\"t%d\"}]}\n\n", i) }
	next := make(chan bool)
	p.set(func(_ string, w http.ResponseWriter, q *http.Request, _ []byte) bool {
		if q.URL.Path != "/v1/completions" {
			return false
		}
		w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
		rc := http.NewResponseController(w)
		for i := 0; ; i++ {
			_, _ = io.WriteString(w, event(i))
			_ = rc.Flush()
			if !<-next {
				_, _ = io.WriteString(w, "data: [DONE]\n\n")
				return true
			}
		}
	})
	resp, err := r.open(t.Context(), http.MethodPost, "/v1/completions", []byte(`{"model":"sim","prompt":"x","stream":true}`))
	if err != nil {
		t.Fatal(err)
	}
	in := bufio.NewReader(resp.Body)
	for i := range 5 {
		// The engine has written event i and nothing else, and waits for us.
		got, err := in.ReadString('\n')
		if err != nil || got+"\n" != event(i) {
			t.Fatalf("event %d: %q %v", i, got, err)
		}
		if _, err := in.ReadString('\n'); err != nil {
			t.Fatal(err)
		}
		next <- i < 4
	}
	rest, err := io.ReadAll(in)
	resp.Body.Close()
	if err != nil || string(rest) != "data: [DONE]\n\n" {
		t.Errorf("the end is %q (%v)", rest, err)
	}
}

// TestInvariant09LiveStreamsAreNotCut: a stream lasts many times longer than every timeout
// while each of its pauses is shorter, and the client gets each event when its engine sends
// it. A stream that pauses for longer than the idle timeout is cut, and the client and the
// receipt show that. All in virtual time, in which nothing is late by itself.
func TestInvariant09LiveStreamsAreNotCut(t *testing.T) {
	t.Parallel()
	const limit, pause = time.Second, 900 * time.Millisecond
	// Pauses differ, because a deadline that still allows a short one may stand for it.
	pauses := []time.Duration{pause, 700 * time.Millisecond, 950 * time.Millisecond}
	model := fakeengine.Model{Text: "thirty tokens of a byte each.."}
	for _, fleet := range []struct {
		name string
		set  func(c *settings.Config)
		legs int
	}{
		{"1a", func(c *settings.Config) { c.Worker = []string{"http://aggregated-0,engine=vllm,model=m,block_size=16"} }, 1},
		{"1p1d", func(c *settings.Config) {
			c.Prefill = []string{"http://prefill-0,engine=vllm,model=m,block_size=16,connector=nixl"}
			c.Decode = []string{"http://decode-0,engine=vllm,model=m,block_size=16,connector=nixl"}
		}, 2},
	} {
		// piped makes a router whose engine stops after so many pieces of a stream.
		piped := func(t *testing.T, pieces int) *router.Piped {
			c := settings.Default()
			fleet.set(&c)
			c.Timeouts.Prefill, c.Timeouts.Response, c.Timeouts.Idle, c.Timeouts.Write, c.Timeouts.Body = limit, limit, limit, limit, limit
			p := router.NewPiped(t, c, http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
				body, err := io.ReadAll(q.Body)
				if err != nil {
					panic(http.ErrAbortHandler)
				}
				a := model.Answer(&fakeengine.Request{Worker: q.Host, Method: q.Method, Path: q.URL.Path, ID: q.Header.Get("X-Request-Id"), Body: body}).After(pause)
				for i := range a.Pieces[1:] {
					a.Pieces[i+1].Wait = pauses[i%len(pauses)]
				}
				if len(a.Pieces) > pieces {
					a = a.Then(pieces, fakeengine.Piece{Wait: fakeengine.Never})
				}
				play(w, q, &a)
			}))
			if *plain {
				p.WithoutResumed()
			}
			return p
		}
		body := `{"model":"m","prompt":[` + strings.Repeat("1000,", 63) + `1000],"max_tokens":30,"stream":true,"stream_options":{"other":1}}` // without the router's usage event
		t.Run(fleet.name+" lives", func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p, begin := piped(t, 1000), time.Now()
				resp, err := p.Client.Post("http://router/v1/completions", "application/json", strings.NewReader(body))
				if err != nil {
					t.Fatal(err)
				}
				defer resp.Body.Close()
				var got, want []time.Duration
				var text strings.Builder
				in := bufio.NewScanner(resp.Body)
				for in.Scan() {
					if event, ok := strings.CutPrefix(in.Text(), "data: "); ok {
						got = append(got, time.Since(begin))
						text.WriteString(rawjson.Value(event).Get("choices.0.text").String())
					}
				}
				sent := time.Duration(fleet.legs) * pause
				for i := range len(model.Text) + 1 { // and [DONE]
					want = append(want, sent)
					sent += pauses[i%len(pauses)]
				}
				if d := cmp.Diff(want, got); d != "" || in.Err() != nil {
					t.Errorf("events came at other times than they were sent (%v) (-sent +came):\n%s", in.Err(), d)
				}
				if text.String() != model.Text {
					t.Errorf("the answer is %q, want %q", &text, model.Text)
				}
			})
		})
		t.Run(fleet.name+" stalls", func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p, begin := piped(t, 3), time.Now()
				resp, err := p.Client.Post("http://router/v1/completions", "application/json", strings.NewReader(body))
				if err != nil {
					t.Fatal(err)
				}
				defer resp.Body.Close()
				b, err := io.ReadAll(resp.Body)
				// A deadline is moved when less than the timeout is left of it, and then by a quarter more.
				if took := time.Since(begin) - time.Duration(fleet.legs)*pause - pauses[0] - pauses[1]; took < limit || took > limit*5/4 {
					t.Errorf("the stream was cut after a pause of %s, want %s or up to a quarter more", took, limit)
				}
				events := strings.Split(strings.TrimSuffix(string(b), "\n\n"), "\n\n")
				if len(events) != 5 || !rawjson.Value(strings.TrimPrefix(events[3], "data: ")).Get("error").Exists() || events[4] != "data: [DONE]" {
					t.Errorf("three events, an error and the end must come, not %q", events)
				}
				code, rerr := p.ErrorCode(resp.Header.Get("X-Dynctl-Decision"))
				if code == "" || rerr != nil || err != nil {
					t.Errorf("the receipt does not show the stall (%v), or the body did not end (%v)", rerr, err)
				}
			})
		})
	}
}

// play is what an engine does with a request, over HTTP.
func play(w http.ResponseWriter, q *http.Request, a *fakeengine.Answer) {
	wait := func(d time.Duration) {
		select {
		case <-time.After(d):
		case <-q.Context().Done():
			panic(http.ErrAbortHandler)
		}
	}
	wait(a.Wait)
	for _, h := range a.Header {
		key, value, _ := strings.Cut(h, ": ")
		w.Header().Set(key, value)
	}
	w.WriteHeader(a.Status)
	for _, p := range a.Pieces {
		wait(p.Wait)
		_, _ = io.WriteString(w, p.Text)
		_ = http.NewResponseController(w).Flush()
	}
}

// TestInvariant11SameDecisionTwice: two routers that see the same requests with
// the same seed decide alike, in every policy, with the same costs; and a dry
// run says what the request then does.
func TestInvariant11SameDecisionTwice(t *testing.T) {
	t.Parallel()
	type step struct {
		path, reason, decode, prefill string
		cost                          float64
		draw                          uint64
		overlap                       int
	}
	routers := [2]*rig{}
	for i := range routers {
		routers[i] = start(t, "2p2d:profile=instant,kv_blocks=256", func(c *settings.Config) {
			c.Routing.Seed, c.Routing.Threshold.Tokens = 4711, 100
			// What engines report is from another moment in each run.
			c.Health.Scrape = time.Hour
		})
	}
	for n, policy := range []string{"kv", "round_robin", "random", "session"} {
		t.Run(policy, func(t *testing.T) {
			run := func(r *rig) (steps []step) {
				r.set(func(c *settings.Config) { c.Routing.Policy = policy })
				for i := range 24 {
					prompt := append(ids(96, 50*n+i%4), ids(32+i%3*64, 50*n+i)...)
					before, err := r.Admin.Route(t.Context(), adminRoute(prompt, "s"+fmt.Sprint(i%3)))
					if err != nil {
						t.Fatal(err)
					}
					a, _ := r.complete(prompt, "X-Session-ID", "s"+fmt.Sprint(i%3))
					c := r.receipt(a.header.Get("X-Dynctl-Decision"))
					s := step{c.Path, c.Reason, c.Decode.Chosen, c.Prefill.Chosen, c.Decode.Candidates[0].Cost, c.Inputs.Draw, c.Decode.Candidates[0].OverlapBlocks}
					steps = append(steps, s)
					dry := rawjson.Value(before.Receipt)
					if dry.Get("path").String() != c.Path || dry.Get("decode.chosen").String() != c.Decode.Chosen || dry.Get("prefill.chosen").String() != c.Prefill.Chosen {
						t.Errorf("request %d: the dry run said %s on %s, the request went %s on %s", i, dry.Get("path"), dry.Get("decode.chosen"), c.Path, c.Decode.Chosen)
					}
					r.synced()
				}
				return steps
			}
			one, two := run(routers[0].in(t)), run(routers[1].in(t))
			if d := cmp.Diff(one, two, cmp.AllowUnexported(step{})); d != "" {
				t.Errorf("the second run decided otherwise (-first +second):\n%s", d)
			}
		})
	}
}
