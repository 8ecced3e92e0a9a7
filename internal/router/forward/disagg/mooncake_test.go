package disagg

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dynctl/dynctl/internal/rawjson"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/workers"
)

// registered2 is what the bootstrap server of a prefill worker with two ranks answers (vLLM
// 0.33).
const registered2 = `{"0":{"engine_id":"0a1c","worker_addr":{"0":{"0":"tcp://10.0.0.1:41001"}}},"1":{"engine_id":"7f3e","worker_addr":{"0":{"0":"tcp://10.0.0.1:41002"}}}}`

// mooncakeAnswer is the answer of a prefill engine: the connector gives no parameters.
const mooncakeAnswer = `{"id":"cmpl-810f561d65b277a9","object":"text_completion","created":1795408800,"model":"small",
"choices":[{"index":0,"text":".com","logprobs":null,"finish_reason":"length","stop_reason":null}],
"usage":{"prompt_tokens":200,"total_tokens":201,"completion_tokens":1},"kv_transfer_params":null}`

// bootstrapServer answers by a text, and has what was asked.
type bootstrapServer struct {
	answer string
	err    error
	asked  []string
}

func (b *bootstrapServer) options() Options {
	o := legs()
	o.Query = func(_ context.Context, server string) ([]byte, error) {
		b.asked = append(b.asked, server)
		return []byte(b.answer), b.err
	}
	return o
}

// mooncakeDispatch is to rank 1 of two.
func mooncakeDispatch() Dispatch {
	d := dispatch(workers.ConnectorMooncake)
	w := worker("prefill-0", workers.Prefill, workers.ConnectorMooncake, 2)
	d.Prefill = workers.Peer{Worker: w, Rank: w.Ranks[1]}
	return d
}

// mooncakeDecode is the body of decode leg n. The members of both legs are those of
// mooncake_connector_proxy.py of vLLM 0.33, the router's own id in the place of the proxy's.
func mooncakeDecode(n, server, engine string) string {
	return `{"prompt":"a","max_tokens":8,"kv_transfer_params":{"do_remote_decode":false,"do_remote_prefill":true,
"remote_bootstrap_addr":"` + server + `","remote_engine_id":"` + engine + `","transfer_id":"810f561d65b277a9-000000000000000` + n + `"}}`
}

// TestMooncake: the first transfer of a rank asks the bootstrap server and waits for the
// prefill; the next ones are held, and ask again only where the connection is a new one. Each
// has an id of its own.
func TestMooncake(t *testing.T) {
	d, b := mooncakeDispatch(), &bootstrapServer{answer: registered2}
	c, err := NewConnector(workers.ConnectorMooncake, b.options())
	if err != nil {
		t.Fatal(err)
	}
	begin := func(want Mode) *Transfer {
		t.Helper()
		tr, err := c.Begin(d)
		if err != nil || tr.Mode() != want || tr.RequestID() != d.RequestID {
			t.Fatalf("the transfer is %s as %s, want %s: %v", tr.Mode(), tr.RequestID(), want, err)
		}
		return tr
	}
	meet := func(tr *Transfer, fresh bool, asked int) {
		t.Helper()
		b.asked = nil
		if err := tr.Meet(t.Context(), fresh); err != nil || len(b.asked) != asked {
			t.Fatalf("asked %q: %v", b.asked, err)
		}
	}
	first := begin(Sequential)
	sameJSON(t, `{"prompt":"a","max_tokens":1,"stream":false,"ignore_eos":true,"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":"810f561d65b277a9-0000000000000007"}}`,
		spliced(t, api.Completion, pushBody, first.PrefillEdits()))
	meet(first, true, 1)
	if b.asked[0] != "http://127.0.0.1:8998" {
		t.Errorf("asked %q", b.asked)
	}
	if _, err := first.DecodeEdits(); !errors.Is(err, ErrUnchecked) {
		t.Errorf("edits before the answer: %v", err)
	}
	if err := first.CheckPrefill([]byte(mooncakeAnswer)); err != nil {
		t.Fatal(err)
	}
	sameJSON(t, mooncakeDecode("7", "http://127.0.0.1:8998", "7f3e"), decodeBody(t, first, api.Completion, pushBody))
	if first.HandOver(d.Decode) {
		t.Error("the id of a transfer goes to a second decode engine")
	}

	second := begin(Held)
	meet(second, false, 0)
	sameJSON(t, mooncakeDecode("8", "http://127.0.0.1:8998", "7f3e"), decodeBody(t, second, api.Completion, pushBody))
	if err := second.CheckPrefill([]byte(mooncakeAnswer)); err != nil {
		t.Error(err)
	}
	if _, err := second.DecodeEdits(); !errors.Is(err, ErrUsed) {
		t.Errorf("a second time: %v", err)
	}

	third := begin(Held) // over a new connection to a new process
	third.Lost()
	b.answer = strings.Replace(registered2, "7f3e", "91b2", 1)
	meet(third, true, 1)
	sameJSON(t, mooncakeDecode("9", "http://127.0.0.1:8998", "91b2"), decodeBody(t, third, api.Completion, pushBody))
	fourth := begin(Sequential)
	meet(fourth, true, 1)
	if err := fourth.CheckPrefill([]byte(mooncakeAnswer)); err != nil {
		t.Error(err)
	}
	if at := d.Prefill.Rank.KVAddress(); at == nil || at.EngineID != "91b2" {
		t.Errorf("the address is %+v", at)
	}
	fourth.Failed()
	meet(begin(Sequential), true, 1)

	d.Prefill.Worker.Bootstrap = &workers.Bootstrap{Host: "fd00::7"}
	tr := begin(Sequential)
	meet(tr, true, 1)
	if b.asked[0] != "http://[fd00::7]:8998" {
		t.Errorf("asked %q", b.asked)
	}
	d.Prefill.Worker.Bootstrap = &workers.Bootstrap{Host: "boot", Port: 9000}
	meet(begin(Sequential), true, 1)
	if b.asked[0] != "http://boot:9000" {
		t.Errorf("asked %q", b.asked)
	}
}

// TestMooncakeAsksAhead: what a bootstrap server answered while a connection was made counts, unless
// an engine may have started since.
func TestMooncakeAsksAhead(t *testing.T) {
	for _, c := range []struct {
		wait  time.Duration
		fresh bool
		asked int
		want  string
	}{
		{0, true, 1, "7f3e"},
		{time.Second, true, 1, "7f3e"},
		{time.Second + 1, true, 2, "91b2"},
		{0, false, 1, "old"}, // a connection that was there: the engine is the same
	} {
		synctest.Test(t, func(t *testing.T) {
			d, b := mooncakeDispatch(), &bootstrapServer{answer: registered2}
			d.Prefill.Rank.SetKVAddress(&workers.KVAddress{EngineID: "old", Host: "127.0.0.1", Port: 8998})
			tr := begin(t, workers.ConnectorMooncake, b.options(), d)
			tr.Prepare(t.Context())
			b.answer = strings.Replace(registered2, "7f3e", "91b2", 1)
			<-time.After(c.wait)
			if err := tr.Meet(t.Context(), c.fresh); err != nil || len(b.asked) != c.asked {
				t.Errorf("%+v: asked %d times: %v", c, len(b.asked), err)
			}
			if got := rawjson.Value(decodeBody(t, tr, api.Completion, pushBody)).Get("kv_transfer_params.remote_engine_id").String(); got != c.want {
				t.Errorf("%+v: the engine is %q", c, got)
			}
		})
	}
	d, b := mooncakeDispatch(), &bootstrapServer{err: errors.New("connection refused")}
	d.Prefill.Rank.SetKVAddress(&workers.KVAddress{EngineID: "old", Host: "127.0.0.1", Port: 8998})
	tr := begin(t, workers.ConnectorMooncake, b.options(), d)
	tr.Prepare(t.Context())
	if err := tr.Meet(t.Context(), true); !errors.Is(err, ErrNoBootstrap) || len(b.asked) != 1 {
		t.Errorf("no answer: asked %d times: %v", len(b.asked), err)
	}
}

// TestMooncakeSeen: over a fresh connection the bootstrap server is asked unless the engine that is
// known was seen within a second, and has closed no connection since.
func TestMooncakeSeen(t *testing.T) {
	answers := func(t *testing.T, tr *Transfer) {
		t.Helper()
		if err := tr.CheckPrefill([]byte(mooncakeAnswer)); err != nil {
			t.Error(err)
		}
	}
	for _, c := range []struct {
		name string
		then func(t *testing.T, d *Dispatch, begin func() *Transfer) // after it was seen
		want int                                                     // queries of the next transfer
	}{
		{"a second", func(*testing.T, *Dispatch, func() *Transfer) { <-time.After(time.Second) }, 0},
		{"more than a second", func(*testing.T, *Dispatch, func() *Transfer) { <-time.After(1050 * time.Millisecond) }, 1},
		{"an answer since", func(t *testing.T, _ *Dispatch, begin func() *Transfer) {
			tr := begin()
			if err := tr.Meet(t.Context(), false); err != nil {
				t.Error(err)
			}
			<-time.After(time.Minute)
			answers(t, tr)
			<-time.After(time.Second)
		}, 0},
		{"a query since", func(t *testing.T, _ *Dispatch, begin func() *Transfer) {
			<-time.After(time.Minute)
			if err := begin().Meet(t.Context(), true); err != nil {
				t.Error(err)
			}
			<-time.After(time.Second)
		}, 0},
		{"an answer of an engine that is not known yet", func(t *testing.T, _ *Dispatch, begin func() *Transfer) {
			tr := begin()
			<-time.After(time.Minute)
			answers(t, tr)
		}, 1},
		{"an answer after a loss", func(t *testing.T, _ *Dispatch, begin func() *Transfer) {
			tr, other := begin(), begin()
			if err := tr.Meet(t.Context(), false); err != nil {
				t.Error(err)
			}
			other.Lost()
			answers(t, tr)
		}, 1},
		{"a leg failed", func(_ *testing.T, _ *Dispatch, begin func() *Transfer) { begin().Failed() }, 1},
		{"another server", func(_ *testing.T, d *Dispatch, _ func() *Transfer) {
			d.Prefill.Worker.Bootstrap = &workers.Bootstrap{Host: "boot", Port: 9000}
		}, 1},
	} {
		for _, ahead := range []bool{false, true} {
			synctest.Test(t, func(t *testing.T) {
				d, b := mooncakeDispatch(), &bootstrapServer{answer: registered2}
				connector, err := NewConnector(workers.ConnectorMooncake, b.options())
				if err != nil {
					t.Fatal(err)
				}
				begin := func() *Transfer {
					tr, err := connector.Begin(d)
					if err != nil {
						t.Fatal(err)
					}
					return tr
				}
				first := begin()
				if err := first.Meet(t.Context(), true); err != nil {
					t.Error(err)
				}
				answers(t, first)
				c.then(t, &d, begin)
				b.asked = nil
				tr := begin()
				if ahead {
					tr.Prepare(t.Context())
				}
				if err := tr.Meet(t.Context(), true); err != nil || len(b.asked) != c.want {
					t.Errorf("%s, ahead %v: asked %d times, want %d: %v", c.name, ahead, len(b.asked), c.want, err)
				}
			})
		}
	}
}

// TestMooncakeLost: a Sequential transfer, whose engine is found before its prefill leg is sent,
// finds it again if that leg shows that the engine may be another one.
func TestMooncakeLost(t *testing.T) {
	d, b := mooncakeDispatch(), &bootstrapServer{answer: registered2}
	tr := begin(t, workers.ConnectorMooncake, b.options(), d)
	if err := tr.Meet(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	tr.Lost()
	b.answer = strings.Replace(registered2, "7f3e", "91b2", 1)
	if err := tr.CheckPrefill([]byte(mooncakeAnswer)); err != nil || d.Prefill.Rank.KVAddress() != nil {
		t.Errorf("kept %+v: %v", d.Prefill.Rank.KVAddress(), err)
	}
	for range 2 {
		if err := tr.Meet(t.Context(), true); err != nil || len(b.asked) != 2 {
			t.Errorf("asked %d times: %v", len(b.asked), err)
		}
	}
	sameJSON(t, mooncakeDecode("7", "http://127.0.0.1:8998", "91b2"), decodeBody(t, tr, api.Completion, pushBody))
}

// TestMooncakeForgottenMeanwhile: so does one whose engine another request has found to be gone.
func TestMooncakeForgottenMeanwhile(t *testing.T) {
	d, b := mooncakeDispatch(), &bootstrapServer{answer: registered2}
	c, err := NewConnector(workers.ConnectorMooncake, b.options())
	if err != nil {
		t.Fatal(err)
	}
	var all []*Transfer
	for range 6 { // the first, four that are held, and one that waits, for want of a sender
		tr, err := c.Begin(d)
		if err != nil {
			t.Fatal(err)
		}
		if err := tr.Meet(t.Context(), true); err != nil || len(b.asked) != 1 {
			t.Errorf("asked %d times: %v", len(b.asked), err)
		}
		if all = append(all, tr); len(all) == 1 {
			if err := tr.CheckPrefill([]byte(mooncakeAnswer)); err != nil {
				t.Error(err)
			}
		}
	}
	last := all[5]
	if last.Mode() != Sequential {
		t.Fatalf("the last transfer is %s", last.Mode())
	}
	all[1].Lost()
	b.answer = strings.Replace(registered2, "7f3e", "91b2", 1)
	if err := last.CheckPrefill([]byte(mooncakeAnswer)); err != nil || d.Prefill.Rank.KVAddress() != nil {
		t.Errorf("kept %+v: %v", d.Prefill.Rank.KVAddress(), err)
	}
	if err := last.Meet(t.Context(), true); err != nil || len(b.asked) != 2 {
		t.Errorf("asked %d times: %v", len(b.asked), err)
	}
	if body := decodeBody(t, last, api.Completion, pushBody); !strings.Contains(body, "91b2") {
		t.Errorf("the decode leg has %s", body)
	}
}

// TestMooncakePrefillHasNoEnd: nothing that the client requests ends a prefill before its length.
func TestMooncakePrefillHasNoEnd(t *testing.T) {
	for _, c := range []struct {
		kind       api.Kind
		body, want string
	}{
		{
			api.Chat, `{"messages":[],"max_tokens":8,"stop":["a"],"stop_token_ids":[1]}`,
			`{"messages":[],"max_tokens":1,"stream":false,"ignore_eos":true}`,
		},
		{api.Completion, `{"prompt":"a","ignore_eos":false,"stop":"a"}`, `{"prompt":"a","max_tokens":1,"stream":false,"ignore_eos":true}`},
		{api.Messages, `{"messages":[],"max_tokens":8,"stop_sequences":["a"]}`, `{"messages":[],"max_tokens":1,"stream":false}`},
		{
			api.Generate, `{"token_ids":[1],"sampling_params":{"max_tokens":8,"stop":["a"],"stop_token_ids":[1]}}`,
			`{"token_ids":[1],"sampling_params":{"max_tokens":1,"ignore_eos":true},"stream":false}`,
		},
	} {
		d := mooncakeDispatch()
		d.Facts.Kind = c.kind
		tr := begin(t, workers.ConnectorMooncake, (&bootstrapServer{answer: registered2}).options(), d)
		want := strings.TrimSuffix(c.want, "}") + `,"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":"` + tr.joined() + `"}}`
		sameJSON(t, want, spliced(t, c.kind, c.body, tr.PrefillEdits()))
	}
}

// TestMooncakeSenders: of a rank with senders to spare four transfers are held at a time, and
// none while one is lost.
func TestMooncakeSenders(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d, b := mooncakeDispatch(), &bootstrapServer{answer: registered2}
		d.Prefill.Rank.SetKVAddress(&workers.KVAddress{EngineID: "7f3e", Host: "127.0.0.1", Port: 8998})
		c, err := NewConnector(workers.ConnectorMooncake, b.options())
		if err != nil {
			t.Fatal(err)
		}
		begin := func(want Mode) *Transfer {
			t.Helper()
			tr, err := c.Begin(d)
			if err != nil || tr.Mode() != want {
				t.Fatalf("the transfer is %s, want %s: %v", tr.Mode(), want, err)
			}
			return tr
		}
		var held []*Transfer
		for range 4 {
			held = append(held, begin(Held))
		}
		begin(Sequential).PrefillEnded(true) // no engine waits for it
		held[0].PrefillEnded(false)
		begin(Held).PrefillEnded(true)
		<-time.After(time.Minute)
		begin(Sequential)
		held[1].PrefillEnded(true)
		<-time.After(7*time.Minute + time.Second) // since the first one was lost
		begin(Sequential)
		<-time.After(time.Minute)
		begin(Held)
	})
}

// TestMooncakeFailedWhileHeld: where a leg failed before the bootstrap server answered, its
// address is not kept.
func TestMooncakeFailedWhileHeld(t *testing.T) {
	d, b := mooncakeDispatch(), &bootstrapServer{answer: registered2}
	d.Prefill.Rank.SetKVAddress(&workers.KVAddress{EngineID: "old", Host: "127.0.0.1", Port: 8998})
	tr := begin(t, workers.ConnectorMooncake, b.options(), d)
	tr.Failed()
	if err := tr.Meet(t.Context(), true); err != nil || d.Prefill.Rank.KVAddress() != nil {
		t.Errorf("kept %+v, %v", d.Prefill.Rank.KVAddress(), err)
	}
}

// TestMooncakeBootstrap: what a server does not answer is named, with where and why.
func TestMooncakeBootstrap(t *testing.T) {
	for _, tt := range []struct{ name, answer, want string }{
		{"another server", `<html>`, "no bootstrap server of Mooncake's"},
		{"a list", `[]`, "no bootstrap server of Mooncake's"},
		{"no rank yet", `{}`, "rank 1 has not registered; 0 ranks have"},
		{"not this one", `{"0":{"engine_id":"0a1c"}}`, "rank 1 has not registered; 1 ranks have"},
		{"no id", `{"1":{"worker_addr":{}}}`, "has no engine_id"},
		{"an id that is none", `{"1":{"engine_id":7}}`, "has no engine_id"},
		{"a long id", `{"1":{"engine_id":"` + strings.Repeat("x", 600) + `"}}`, "has no engine_id"},
		{"control characters", `{"1":{"engine_id":"a\nb"}}`, "has no engine_id"},
	} {
		b := &bootstrapServer{answer: tt.answer}
		tr := begin(t, workers.ConnectorMooncake, b.options(), mooncakeDispatch())
		err := tr.Meet(t.Context(), true)
		if !errors.Is(err, ErrNoBootstrap) || !strings.Contains(err.Error(), tt.want) || !strings.Contains(err.Error(), "http://127.0.0.1:8998/query") {
			t.Errorf("%s: %v", tt.name, err)
		}
	}
	b := &bootstrapServer{err: errors.New("connection refused")}
	err := begin(t, workers.ConnectorMooncake, b.options(), mooncakeDispatch()).Meet(t.Context(), true)
	if !errors.Is(err, ErrNoBootstrap) || !strings.Contains(err.Error(), "connection refused") || !strings.Contains(err.Error(), "connector=nixl") {
		t.Error(err)
	}
}

// TestSilentBootstrap: a server that gives no answer holds up one request in two seconds, and
// not each.
func TestSilentBootstrap(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		asked := 0
		o := legs()
		o.Query = func(ctx context.Context, _ string) ([]byte, error) {
			asked++
			<-ctx.Done()
			return nil, ctx.Err()
		}
		c, err := NewConnector(workers.ConnectorMooncake, o)
		if err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		for range 5 {
			tr, err := c.Begin(mooncakeDispatch())
			if err != nil {
				t.Fatal(err)
			}
			if err := tr.Meet(t.Context(), true); !errors.Is(err, ErrNoBootstrap) || !strings.Contains(err.Error(), "no answer in 2s") {
				t.Error(err)
			}
		}
		if took := time.Since(began); asked != 1 || took != 2*time.Second {
			t.Errorf("asked %d times in %v", asked, took)
		}
		<-time.After(2 * time.Second)
		left, leave := context.WithCancel(t.Context())
		leave()
		tr, err := c.Begin(mooncakeDispatch())
		if err != nil {
			t.Fatal(err)
		}
		if err := tr.Meet(left, true); !errors.Is(err, context.Canceled) || errors.Is(err, ErrNoBootstrap) || asked != 2 {
			t.Errorf("a client that has left: %v, asked %d times", err, asked)
		}
	})
}

// TestMooncakeOverHTTP is the bootstrap server on a socket.
func TestMooncakeOverHTTP(t *testing.T) {
	status, answer := http.StatusOK, registered2
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/query" || r.Method != http.MethodGet {
			t.Errorf("%s %s", r.Method, r.URL)
		}
		w.WriteHeader(status)
		_, _ = w.Write([]byte(answer)) // the client may have enough
	}))
	defer srv.Close()
	d := mooncakeDispatch()
	host, port, _ := strings.Cut(strings.TrimPrefix(srv.URL, "http://"), ":")
	n, err := strconv.Atoi(port)
	if err != nil {
		t.Fatal(err)
	}
	d.Prefill.Worker.Bootstrap = &workers.Bootstrap{Host: host, Port: n}
	meet := func() error { return begin(t, workers.ConnectorMooncake, Options{}, d).Meet(t.Context(), true) }
	if err := meet(); err != nil {
		t.Error(err)
	}
	answer = strings.Repeat(" ", MaxBootstrap+1)
	if err := meet(); !errors.Is(err, ErrNoBootstrap) || !strings.Contains(err.Error(), "larger than allowed") {
		t.Errorf("an endless answer: %v", err)
	}
	status, answer = http.StatusNotFound, "{}"
	if err := meet(); !errors.Is(err, ErrNoBootstrap) || !strings.Contains(err.Error(), "404") {
		t.Errorf("another server: %v", err)
	}
	srv.Close()
	if err := meet(); !errors.Is(err, ErrNoBootstrap) || !strings.Contains(err.Error(), "refused") {
		t.Errorf("no server: %v", err)
	}
}

func TestCheckMooncake(t *testing.T) {
	for _, tt := range []struct {
		name, from, to string
		want           error
		field          string
	}{
		{"as it is", "", "", nil, ""},
		{"ended by itself", `"length"`, `"stop"`, ErrEnded, ""},
		{"NIXL's parameters", `"kv_transfer_params":null`, `"kv_transfer_params":{"remote_block_ids":[[1]]}`, ErrBadParams, transferParams},
		{"those of a store", `"kv_transfer_params":null`, `"kv_transfer_params":{"stored":true}`, nil, ""},
		{"another prompt", `"prompt_tokens":200`, `"prompt_tokens":199`, ErrBadParams, "prompt_tokens"},
		{"aborted", `"length"`, `"abort"`, ErrPrefillFailed, ""},
		{"an error", `"id":`, `"error":{"message":"no"},"id":`, ErrPrefillFailed, ""},
	} {
		for _, known := range []bool{false, true} {
			d, b := mooncakeDispatch(), &bootstrapServer{answer: registered2}
			if known {
				d.Prefill.Rank.SetKVAddress(&workers.KVAddress{EngineID: "7f3e", Host: "127.0.0.1", Port: 8998})
			}
			tr := begin(t, workers.ConnectorMooncake, b.options(), d)
			if err := tr.Meet(t.Context(), true); err != nil {
				t.Fatal(err)
			}
			err := tr.CheckPrefill([]byte(strings.Replace(mooncakeAnswer, tt.from, tt.to, 1)))
			var p *ParamsError
			if errors.As(err, &p); !errors.Is(err, tt.want) || p != nil && p.Field != tt.field {
				t.Errorf("%s, address known: %v: %v", tt.name, known, err)
			}
		}
	}
}

// TestMooncakeReadsTheBodies: vLLM's own connector reads from both legs what the router means,
// and its bootstrap server answers the router. DYNCTL_VLLM names a Python that has the
// package; vLLM 0.32 and 0.33 have done.
func TestMooncakeReadsTheBodies(t *testing.T) {
	interpreter := os.Getenv("DYNCTL_VLLM")
	if interpreter == "" {
		t.Skip("skipped: DYNCTL_VLLM names no Python with vLLM's package (e2e/engines.py install makes one)")
	}
	cmd := exec.Command(interpreter, filepath.Join("testdata", "mooncake_bodies.py"), "0a1c", "7f3e")
	var stderr strings.Builder
	cmd.Stderr = &stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(out)
	read := func(into any) {
		t.Helper()
		for lines.Scan() { // vLLM's own log is there, too
			if json.Unmarshal(lines.Bytes(), into) == nil {
				return
			}
		}
		_ = in.Close()
		_ = cmd.Wait() // its last words
		t.Fatalf("vLLM's package gave no answer: %s", stderr.String())
	}
	var port int
	read(&port)
	d := mooncakeDispatch()
	d.Prefill.Worker.Bootstrap = &workers.Bootstrap{Host: "127.0.0.1", Port: port}
	tr := begin(t, workers.ConnectorMooncake, Options{}, d)
	if err := tr.Meet(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	legs := [][]any{{"prefill", rawjson.Value(spliced(t, api.Completion, pushBody, tr.PrefillEdits())).Get(transferParams)}}
	if err := tr.CheckPrefill([]byte(mooncakeAnswer)); err != nil {
		t.Fatal(err)
	}
	legs = append(legs, []any{"decode", rawjson.Value(decodeBody(t, tr, api.Completion, pushBody)).Get(transferParams)})
	type seen struct {
		Fetches                  int
		Async                    bool
		Engine, Server, Transfer string
		Keeps                    bool
		KeepsStopped             bool `json:"keeps_stopped"`
		Gives                    any
	}
	id := tr.joined()
	for i, want := range []seen{
		{Transfer: id, Keeps: true},
		{Fetches: 32, Async: true, Engine: "7f3e", Server: fmt.Sprintf("http://127.0.0.1:%d", port), Transfer: id},
	} {
		fmt.Fprintf(in, "[%q,%s]\n", legs[i]...)
		var got seen
		if read(&got); got != want {
			t.Errorf("%s leg: vLLM reads %+v, want %+v", legs[i][0], got, want)
		}
	}
	if err := errors.Join(in.Close(), cmd.Wait()); err != nil {
		t.Errorf("%v: %s", err, stderr.String())
	}
}

// Whatever a bootstrap server answers, an id that is taken is one that it has for the rank,
// and the body that names it is valid.
func FuzzBootstrap(f *testing.F) {
	f.Add([]byte(registered2), 1)
	f.Add([]byte(`{"0":{"engine_id":"a\u0000"}}`), 0)
	f.Add([]byte(`{"1":[],"1":{"engine_id":"a"}}`), 1)
	f.Fuzz(func(t *testing.T, body []byte, rank int) {
		id, err := engineOf(body, rank)
		if err != nil {
			return
		}
		var all map[string]json.RawMessage
		if json.Unmarshal(body, &all) != nil || all[strconv.Itoa(rank)] == nil || id == "" {
			t.Errorf("%q of rank %d", id, rank)
		}
		tr := &Transfer{of: &Connector{kind: kindOf(workers.ConnectorMooncake), o: legs()}, at: workers.KVAddress{EngineID: id, Host: "h", Port: 1}}
		raw, err := tr.object(tr.of.decode)
		var got struct {
			ID string `json:"remote_engine_id"`
		}
		if err != nil || json.Unmarshal(raw, &got) != nil || got.ID != id {
			t.Errorf("%s of %q: %v", raw, id, err)
		}
	})
}
