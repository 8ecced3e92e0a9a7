package router_test

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/loopback"
	"github.com/dynctl/dynctl/internal/rawjson"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/workers/sim/fault"
)

// TestConnectorsEndToEnd: every connector moves KV. Those that other tests have a fleet
// for are checked there: NIXL (TestEnginesProveReuseTransferAndRestraint, and with ranks
// TestSteeringHeaders), SGLang (TestSGLangPairs), LMCache (TestAcceptanceDecoderSpecs).
func TestConnectorsEndToEnd(t *testing.T) {
	t.Parallel()
	r, p := tappedRig(t, "2p2d:profile=instant,dp=2,connector=nixl-push,model=push+1p1d:profile=instant,connector=shared-storage,model=storage+"+
		"2p2d:profile=instant,dp=2,connector=mooncake,model=mooncake+2p2d:profile=instant,connector=offload-p2p,model=offload+2p2d:profile=instant,connector=nixl-offload-p2p,model=both")
	for _, model := range []string{"push", "mooncake", "storage", "offload", "both"} {
		t.Run(model, func(t *testing.T) { carries(t, r.in(t).of(model)) })
	}
	for _, model := range []string{"offload", "both"} {
		t.Run("legs of "+model, func(t *testing.T) { offloadingLegs(t, r.in(t).of(model), p) })
	}
}

// carries has a fleet answer prompts of its own, streamed and not, by two legs: each text
// is that of an engine alone, and the engines' counters show that KV moved.
func carries(t *testing.T, r *rig) {
	t.Helper()
	counters := func() (moved, bad uint64, pinned int) {
		for _, e := range r.Sim.Engines() {
			s, err := e.Counters()
			if err != nil {
				t.Fatal(err)
			}
			for i := range s {
				if e.Group().Role == workers.Decode {
					moved += s[i].ExternalHits
				}
				bad, pinned = bad+s[i].FailedTransfers+s[i].Expired, pinned+s[i].Pinned
			}
		}
		return moved, bad, pinned
	}
	before, badBefore, _ := counters()
	alone := engineAlone(t, r.model)
	for i := range 10 {
		prompt := ids(150+i, 9000+i)
		a, got := r.complete(prompt)
		if want := r.right(prompt); got != want || a.header.Get("X-Dynctl-Path") != "remote" {
			t.Errorf("prompt %d: %q by %s, want %q", i, got, a.header.Get("X-Dynctl-Path"), want)
		}
		prompt = ids(150+i, 9100+i)
		s := r.post("/v1/completions", object{"model": r.model, "prompt": prompt, "max_tokens": 12, "ignore_eos": true, "stream": true})
		if got, want := streamed(t, s.body), r.right(prompt); got != want {
			t.Errorf("prompt %d, streamed: %q, want %q", i, got, want)
		}
		chat := object{"model": r.model, "messages": []object{{"role": "user", "content": fmt.Sprintf("tell me about number %d %s", i, strings.Repeat("and some more words ", 20))}}, "max_tokens": 8, "ignore_eos": true}
		got = r.post("/v1/chat/completions", chat).completion(t).Choices[0].Message.Content
		if want := askEngine(t, alone.URL(), "/v1/chat/completions", chat).completion(t).Choices[0].Message.Content; got != want {
			t.Errorf("chat %d: %q, want %q", i, got, want)
		}
	}
	moved, bad, pinned := counters()
	if moved-before < 30*100 || bad != badBefore || pinned != 0 {
		t.Errorf("%d tokens came from outside; %d transfers failed or expired, %d requests are still pinned", moved-before, bad-badBefore, pinned)
	}
	r.synced()
}

// TestPairIsChosen: of decode workers of two connectors only one has a prefill
// worker. What goes remote goes to that pair, whatever the policy says of the other,
// and explain says why not there; without the prefill worker both answer.
func TestPairIsChosen(t *testing.T) {
	t.Parallel()
	r := start(t, "1p:profile=instant+1d:profile=instant,connector=lmcache+1d:profile=instant")
	for n, policy := range selector.Policies() {
		t.Run(string(policy), func(t *testing.T) {
			r := r.in(t)
			r.set(func(c *settings.Config) { c.Routing.Policy = string(policy) })
			if _, err := r.Admin.ResumeWorker(t.Context(), "prefill-0"); err != nil {
				t.Fatal(err)
			}
			vetoed := 0
			for i := range 6 {
				i += 1000 * n // no prompt comes twice
				a, got := r.complete(ids(150+i%1000, i))
				if want := right(ids(150+i%1000, i)); got != want {
					t.Errorf("prompt %d: %q, want %q", i, got, want)
				}
				if a.header.Get("X-Dynctl-Path") != "remote" || a.header.Get("X-Dynctl-Worker") != "decode-1/dp0" {
					t.Errorf("prompt %d went %s to %s", i, a.header.Get("X-Dynctl-Path"), a.header.Get("X-Dynctl-Worker"))
				}
				d := r.receipt(a.header.Get("X-Dynctl-Decision"))
				for _, c := range d.Decode.Candidates {
					if c.Rank == "decode-0/dp0" && c.Excluded == "no prefill worker with its connector" {
						vetoed++
					}
				}
			}
			if vetoed == 0 && policy != selector.Random && policy != selector.PowerOfTwo && policy != selector.Session {
				t.Error("no receipt says why the other decode worker is not used")
			}
			r.drainWorker("prefill-0")
			used := map[string]bool{}
			for i := range 12 {
				a, _ := r.complete(ids(150, 100+1000*n+i))
				used[a.header.Get("X-Dynctl-Worker")] = true
				if d := r.receipt(a.header.Get("X-Dynctl-Decision")); d.Path != "local" || d.Reason != "prefill_all_excluded" {
					t.Errorf("without the prefill worker: %s because %s", d.Path, d.Reason)
				}
			}
			if policy == selector.RoundRobin && len(used) != 2 {
				t.Errorf("only %v answered", used)
			}
		})
	}
}

// streamed joins the texts of a stream of completions.
func streamed(t *testing.T, body []byte) string {
	t.Helper()
	var text strings.Builder
	for _, line := range bytes.Split(body, []byte("\n")) {
		data, ok := bytes.CutPrefix(line, []byte("data: "))
		if !ok || string(data) == "[DONE]" {
			continue
		}
		if e := rawjson.Value(data).Get("error"); e.Exists() {
			t.Errorf("the stream has an error: %s", data)
		}
		text.WriteString(rawjson.Value(data).Get("choices.0.text").String())
	}
	if !bytes.HasSuffix(body, []byte("data: [DONE]\n\n")) {
		t.Errorf("the stream has no end: %.200q", body)
	}
	return text.String()
}

// TestPrefillsOfOnePair is what is made of a prefill's answer, and of a decode engine that
// does not use it.
func TestPrefillsOfOnePair(t *testing.T) {
	t.Parallel()
	r, p := tappedRig(t, "1p1d:profile=instant+1p1d:profile=instant,model=small,max_model_len=200", func(c *settings.Config) { c.Tokens.Tokenizer = "engine" })
	for _, c := range []struct {
		name string
		test func(*testing.T, *rig, *tap)
	}{
		{"a prefill ends the answer", prefillThatEndsTheAnswer}, // the first: there are no events of trouble
		{"messages and responses", messagesAndResponsesGoRemote},
		{"truncated prompts", truncatedPromptsGoRemote},
		{"silent recompute", silentRecomputeIsDetected},
	} {
		t.Run(c.name, func(t *testing.T) {
			p.set(nil)
			r.set(func(*settings.Config) {})
			r.healAll()
			c.test(t, r.in(t), p)
		})
	}
}

// prefillThatEndsTheAnswer: a prefill whose first token ends the answer has
// no KV to move. The decode rank then answers by itself; no engine is blamed,
// banned or ejected. Only an answer cut by length must have parameters.
func prefillThatEndsTheAnswer(t *testing.T, r *rig, _ *tap) {
	r.set(func(c *settings.Config) {
		c.Retry.Attempts = 1
		c.Routing.PrefillFallback = "error"
	})
	set := func(f fault.Set) {
		t.Helper()
		if err := r.Sim.Named("prefill-0").SetFaults(f); err != nil {
			t.Fatal(err)
		}
	}
	for i, reason := range []string{"stop", "repetition"} {
		set(fault.Set{EndRate: 1, EndReason: reason})
		for _, stream := range []bool{false, true} {
			prompt := ids(200, 10+2*i)
			body := object{"model": "sim", "prompt": prompt, "max_tokens": 12, "ignore_eos": true, "stream": stream}
			a := r.post("/v1/completions", body)
			got := ""
			if stream {
				got = streamed(t, a.body)
			} else {
				got = a.completion(t).Choices[0].Text
			}
			if want := right(prompt); got != want {
				t.Errorf("%s: %q, want %q", reason, got, want)
			}
			c := r.receipt(a.header.Get("X-Dynctl-Decision"))
			if path := a.header.Get("X-Dynctl-Path"); path != "local" || c.Reason != "prefill_ended" {
				t.Errorf("%s: %s because %s", reason, path, c.Reason)
			}
			if len(c.Legs) != 2 || c.Legs[0].Error != "" || len(c.Notes) == 0 {
				t.Errorf("%s: legs %+v, notes %q", reason, c.Legs, c.Notes)
			}
		}
	}
	t.Cleanup(http.DefaultClient.CloseIdleConnections)
	for _, e := range r.allEvents() {
		if e.Severity == "warn" || e.Severity == "error" {
			t.Errorf("event %+v", e)
		}
	}
	if s := r.status().Traffic; s.Fallbacks != 0 {
		t.Errorf("%d fallbacks are counted", s.Fallbacks)
	}
	if n := r.metric(`dynctl_decisions_total{path="local",reason="prefill_ended"}`); n != 4 {
		t.Errorf("%v decisions are counted", n)
	}

	set(fault.Set{EndRate: 1, EndReason: "length"})
	r.send(http.MethodPost, "/v1/completions", encode(t, object{"model": "sim", "prompt": ids(200, 99)})).refused(t, http.StatusBadGateway, "prefill_failed")
	if len(r.events("prefill_without_params")) != 1 {
		t.Errorf("events %+v", r.allEvents())
	}
	set(fault.Set{})
}

// editDecodes changes a member of the completions that decode-0 gets.
func editDecodes(t *testing.T, r *rig, p *tap, member string, value any) {
	p.set(func(engine string, w http.ResponseWriter, q *http.Request, body []byte) bool {
		if engine != "decode-0" || q.URL.Path != "/v1/completions" {
			return false
		}
		resp, err := http.Post(r.Sim.Named(engine).URL()+q.URL.Path, "application/json", bytes.NewReader(edit(body, member, value)))
		if err != nil {
			panic(http.ErrAbortHandler)
		}
		defer resp.Body.Close()
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.Copy(w, resp.Body)
		return true
	})
	t.Cleanup(http.DefaultClient.CloseIdleConnections)
}

// silentRecomputeIsDetected: a decode engine that answers well but does not
// use the KV that was computed for it is found out by its own counters.
func silentRecomputeIsDetected(t *testing.T, r *rig, p *tap) {
	// As an engine without --kv-transfer-config does: the parameters are not looked at.
	editDecodes(t, r, p, "kv_transfer_params", nil)
	r.eventually("the alarm", func() error {
		// What is sent before the counter has been read once proves nothing.
		r.complete(ids(200, int(time.Now().UnixNano()%1e6)))
		if n := len(r.events("silent_recompute")); n != 1 {
			return fmt.Errorf("%d events", n)
		}
		return nil
	})
	s := r.status()
	if s.Traffic.Recomputes == 0 || s.State != "degraded" || !strings.Contains(strings.Join(s.Reasons, " "), "decode-0/dp0") {
		t.Errorf("status does not show it: %+v", s)
	}
	if r.metric(`dynctl_silent_recompute_total{worker="decode-0"}`) < 3 {
		t.Error("not counted")
	}
	p.set(nil)
	if text := r.events("silent_recompute")[0].Text; strings.Contains(text, "computed about") {
		// Requests before these were in the same sum, which is compared again after five minutes.
		t.Logf("no look at the all-clear: %s", text)
		return
	}
	fresh := 1000
	r.eventually("the all-clear", func() error {
		fresh++
		r.complete(ids(200, fresh))
		if len(r.events("silent_recompute_ended")) == 0 {
			return fmt.Errorf("still alarmed")
		}
		return nil
	})
}

// TestFailedLoadsAreSilentRecompute: an engine that computes a prompt again whose KV could not be
// loaded has counted the load as a hit. It is found out all the same.
func TestFailedLoadsAreSilentRecompute(t *testing.T) {
	t.Parallel()
	r, p := tappedRig(t, "1p1d:profile=instant,policy=recompute,patience=10ms")
	editDecodes(t, r, p, "kv_transfer_params.remote_engine_id", "another engine")
	n := 0
	r.eventually("the alarm", func() error {
		n++
		prompt := ids(200, n)
		if _, got := r.complete(prompt); got != right(prompt) {
			t.Fatalf("%q", got)
		}
		if len(r.events("silent_recompute")) == 0 {
			return fmt.Errorf("no event after %d requests", n)
		}
		return nil
	})
	if s := r.counters("decode-0"); s.ExternalHits == 0 || s.FailedTransfers == 0 {
		t.Errorf("the engine counts %d tokens as hits, and %d failed loads", s.ExternalHits, s.FailedTransfers)
	}
}

// messagesAndResponsesGoRemote: the other chat endpoints are tokenized as the
// engine does it, split like a chat, and answer as one engine alone does.
func messagesAndResponsesGoRemote(t *testing.T, r *rig, p *tap) {
	without := len(r.events("prefill_without_params"))
	alone := engineAlone(t, "sim")
	words := strings.Repeat("a good many words of context ", 30)
	schema := object{"properties": object{"city": object{"type": "string"}}}
	for name, c := range map[string]struct {
		path string
		body object
	}{
		"messages, text":   {"/v1/messages", object{"max_tokens": 8, "messages": []object{{"role": "user", "content": words + "1"}}}},
		"messages, stream": {"/v1/messages", object{"max_tokens": 8, "stream": true, "system": "be brief", "messages": []object{{"role": "user", "content": words + "2"}}}},
		"messages, tools": {"/v1/messages", object{"max_tokens": 8, "system": []object{{"type": "text", "text": "x-anthropic-billing-header: " + words}, {"type": "text", "text": words}, {"type": "text", "text": "<more>"}},
			"tools": []object{{"name": "weather", "description": "the weather", "input_schema": schema}},
			"messages": []object{
				{"role": "user", "content": []object{{"type": "text", "text": "how is it"}, {"type": "text", "text": "there"}}},
				{"role": "assistant", "content": []object{{"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "text", "text": "I look"}, {"type": "tool_use", "id": "t1", "name": "weather", "input": object{"city": "A & B", "n": 1.5}}}},
				{"role": "user", "content": []object{{"type": "tool_result", "tool_use_id": "t1", "content": []object{{"type": "text", "text": "rain"}, {"type": "text", "text": "cold"}}}, {"type": "text", "text": "so?"}}},
			}}},
		"messages, thinking": {"/v1/messages", object{"max_tokens": 2000, "stop_sequences": []string{"e"}, "thinking": object{"type": "enabled", "budget_tokens": 1024}, "messages": []object{{"role": "user", "content": words + "3"}}}},
		"responses, text":    {"/v1/responses", object{"max_output_tokens": 8, "input": words + "4", "instructions": "be brief", "store": true}},
		"responses, stream":  {"/v1/responses", object{"max_output_tokens": 8, "stream": true, "input": []object{{"role": "user", "content": []object{{"type": "input_text", "text": words}, {"type": "input_text", "text": "5"}}}}}},
		"responses, tools": {"/v1/responses", object{"max_output_tokens": 8, "tools": []object{{"type": "function", "name": "weather", "parameters": schema, "strict": nil}},
			"input": []object{
				{"role": "developer", "content": words + "6"}, {"role": "user", "content": "how is it"},
				{"type": "reasoning", "id": "r1", "summary": []object{}, "content": []object{{"type": "reasoning_text", "text": "hm"}}},
				{"type": "message", "id": "m1", "role": "assistant", "status": "completed", "content": []object{{"type": "output_text", "text": "I look", "annotations": []object{}}}},
				{"type": "function_call", "call_id": "c1", "name": "weather", "arguments": `{"city": "<X>"}`}, {"type": "function_call_output", "call_id": "c1", "output": "rain"},
			}}},
	} {
		t.Run(name, func(t *testing.T) {
			p.reset()
			c.body["model"] = "sim"
			a := r.post(c.path, c.body)
			rec := r.receipt(a.header.Get("X-Dynctl-Decision"))
			if rec.Path != "remote" || rec.Inputs.ISLSource != "engine" || len(rec.Legs) != 2 {
				t.Fatalf("%s (%s), length by %s, %d legs, notes %q", rec.Path, rec.ReasonText, rec.Inputs.ISLSource, len(rec.Legs), rec.Notes)
			}
			if l := rec.Legs[0]; l.PromptTokens != rec.Inputs.ISL || l.Blocks == 0 {
				t.Fatalf("the prefill has %d tokens of %d, and %d blocks", l.PromptTokens, rec.Inputs.ISL, l.Blocks)
			}
			if rec.Outcome.PromptTokens != rec.Inputs.ISL {
				t.Errorf("the answer counts %d tokens of %d", rec.Outcome.PromptTokens, rec.Inputs.ISL)
			}
			text := func(b []byte) string {
				if c.body["stream"] == true {
					var out strings.Builder
					for _, line := range bytes.Split(b, []byte("\n")) {
						if data, ok := bytes.CutPrefix(line, []byte("data: ")); ok {
							out.WriteString(rawjson.Value(data).Get("delta.text").String())
							if d := rawjson.Value(data).Get("delta"); rawjson.IsString(d) {
								out.WriteString(d.String())
							}
						}
					}
					return out.String()
				}
				return rawjson.Value(b).Get("content.0.text").String() + rawjson.Value(b).Get("output.0.content.0.text").String()
			}
			if got, want := text(a.body), text(askEngine(t, alone.URL(), c.path, c.body).body); got != want || got == "" && c.body["stop_sequences"] == nil {
				t.Errorf("%q, one engine alone %q", got, want)
			}
			leg := rawjson.Value(p.legsOf("prefill")[0].body)
			limit := map[string]string{"/v1/responses": "max_output_tokens", "/v1/messages": "max_tokens"}[c.path]
			if leg.Get("stream").Bool() || leg.Get(limit).String() != "1" || c.path == "/v1/responses" && leg.Get("store").String() != "false" {
				t.Errorf("prefill leg %s", leg)
			}
			// The prompt is named as the engine names it: the next one like it hits.
			r.synced()
			again := r.receipt(r.post(c.path, c.body).header.Get("X-Dynctl-Decision"))
			if b := again.Inputs.BlockSize; again.Predicted.CachedTokens != (again.Inputs.ISL-1)/b*b {
				t.Errorf("the decode rank is thought to hold %d of %d tokens", again.Predicted.CachedTokens, again.Inputs.ISL)
			}
		})
	}
	first := r.post("/v1/responses", object{"model": "sim", "input": words, "max_output_tokens": 3})
	for reason, body := range map[string]object{
		"previous_response": {"model": "sim", "input": words, "max_output_tokens": 3, "previous_response_id": rawjson.Value(first.body).Get("id").String()},
		"server_tools":      {"model": "sim", "input": words, "max_output_tokens": 3, "tools": []object{{"type": "code_interpreter", "container": object{"type": "auto"}}}},
	} {
		a := r.post("/v1/responses", body)
		if c := r.receipt(a.header.Get("X-Dynctl-Decision")); c.Path != "local" || c.Reason != reason || c.Inputs.ISLSource != "estimate" {
			t.Errorf("%s: %s (%s), isl by %s", reason, c.Path, c.Reason, c.Inputs.ISLSource)
		}
	}
	// An engine that is too old to take transfer parameters there is not asked to.
	if n := len(r.events("prefill_without_params")) - without; n != 0 {
		t.Errorf("%d prefills without parameters", n)
	}
}

// truncatedPromptsGoRemote: an engine that cuts the prompt counts fewer tokens
// than the client sent; that is no fault of the prefill.
func truncatedPromptsGoRemote(t *testing.T, r *rig, _ *tap) {
	alone := engineAlone(t, "sim")
	for _, limit := range []int{100, -1} {
		body := object{"model": "sim", "prompt": ids(400, 1), "truncate_prompt_tokens": limit, "max_tokens": 12, "ignore_eos": true}
		a := r.post("/v1/completions", body)
		c := r.receipt(a.header.Get("X-Dynctl-Decision"))
		if c.Path != "remote" || len(c.Legs) != 2 || c.Legs[0].PromptTokens != c.Outcome.PromptTokens || c.Inputs.ISL != c.Outcome.PromptTokens {
			t.Errorf("%d: %s (%s), isl %d, legs %+v", limit, c.Path, c.ReasonText, c.Inputs.ISL, c.Legs)
		}
		if got, want := a.completion(t).Choices[0].Text, askEngine(t, alone.URL(), "/v1/completions", body).completion(t).Choices[0].Text; got != want {
			t.Errorf("%d: %q, one engine alone %q", limit, got, want)
		}
	}
	if e := r.events("prefill_bad_params"); len(e) != 0 {
		t.Errorf("events %+v", e)
	}
	// To its own limit an engine cuts a prompt of which the router has every id.
	a := r.post("/v1/completions", object{"model": "small", "prompt": ids(400, 2), "truncate_prompt_tokens": -1, "max_tokens": 12, "ignore_eos": true})
	if c := r.receipt(a.header.Get("X-Dynctl-Decision")); c.Path != "remote" || c.Inputs.ISL != 400 || c.Outcome.PromptTokens >= 200 || c.Legs[0].PromptTokens >= 200 {
		t.Errorf("%s (%s), isl %d, prompt %d, legs %+v", c.Path, c.ReasonText, c.Inputs.ISL, c.Outcome.PromptTokens, c.Legs)
	}
}

// TestTransferCheck: parameters of a shape that is not expected and does no known
// harm are refused, or used and reported, as the worker or else the router says.
func TestTransferCheck(t *testing.T) {
	t.Parallel()
	lax := settings.Default()
	lax.Routing.TransferCheck = "lax"
	if err := lax.Validate(); err == nil || !strings.Contains(err.Error(), `routing.transfer_check`) {
		t.Errorf("a word that says nothing: %v", err)
	}
	p := &tap{}
	tapped := p.specs(t)
	r := startWith(t, loopback.Options{Fleet: "3p1d:profile=instant", Specs: func(list []workers.Spec) []workers.Spec {
		list = tapped(list)
		for i := range list {
			list[i].TransferCheck = map[string]workers.TransferCheck{"prefill-1": workers.TransferReport, "prefill-2": workers.TransferStrict}[list[i].Name]
		}
		return list
	}}, func(c *settings.Config) { c.Routing.AllowHeaders = true })
	p.set(func(engine string, w http.ResponseWriter, q *http.Request, body []byte) bool {
		if !strings.HasPrefix(engine, "prefill") || q.URL.Path != "/v1/completions" {
			return false
		}
		good := &recorder{ResponseWriter: &nowhere{}}
		leg, err := http.NewRequest(http.MethodPost, r.Sim.Named(engine).URL()+q.URL.Path, bytes.NewReader(body))
		if err != nil {
			return false
		}
		leg.Header, leg.Close = q.Header.Clone(), true
		resp, err := http.DefaultClient.Do(leg)
		if err != nil {
			return false
		}
		_, _ = io.Copy(good, resp.Body)
		resp.Body.Close()
		writeJSON(w, edit(good.body.Bytes(), "kv_transfer_params.remote_num_tokens", object{"prompt": 200}))
		return true
	})
	for n, c := range []struct {
		name   string
		config string // "" leaves what the router does by itself
		worker string
		used   bool
	}{
		{"nothing said", "", "prefill-0", false},
		{"strict", "strict", "prefill-0", false},
		{"strict for this worker", "report", "prefill-2", false},
		{"report", "report", "prefill-0", true},
		{"report for this worker", "strict", "prefill-1", true},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := r.in(t)
			r.set(func(to *settings.Config) {
				if c.config != "" {
					to.Routing.TransferCheck = c.config
				}
			})
			series := fmt.Sprintf(`dynctl_transfer_params_unexpected_total{worker=%q}`, c.worker)
			before, counted := len(r.events("prefill_unexpected_params")), max(0, r.metric(series))
			for i := range 3 {
				for _, w := range []string{"prefill-0", "prefill-1", "prefill-2", "decode-0"} {
					r.Router.Heal(w)
				}
				a, _ := r.complete(ids(200, 40+10*n+i), "X-Dynctl-Prefill-Worker", c.worker)
				rec := r.receipt(a.header.Get("X-Dynctl-Decision"))
				noted := strings.Contains(strings.Join(rec.Notes, " "), "remote_num_tokens")
				path := map[bool]string{true: "remote", false: "local"}[c.used]
				if rec.Path != path || c.used && !noted {
					t.Errorf("%s (%s), want %s; notes %q", rec.Path, rec.ReasonText, path, rec.Notes)
				}
			}
			events, n := r.events("prefill_unexpected_params")[before:], max(0, r.metric(series))-counted
			wantEvents, wantCounted := 0, 0.
			if c.used {
				wantEvents, wantCounted = 1, 3
			}
			if len(events) != wantEvents || n != wantCounted {
				t.Errorf("%d events, want %d; %v counted, want %v", len(events), wantEvents, n, wantCounted)
			}
			for _, e := range events {
				if e.Worker != c.worker || !strings.Contains(e.Text, "remote_num_tokens") {
					t.Errorf("of %s: %s", e.Worker, e.Text)
				}
			}
		})
	}
}
