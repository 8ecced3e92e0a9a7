package api

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"runtime"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestLookup(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		method, path string
		kind         Kind
		split        bool
		status       int
	}{
		{"POST", "/v1/chat/completions", Chat, true, 0},
		{"POST", "/v1/completions", Completion, true, 0},
		{"POST", "/inference/v1/generate", Generate, true, 0},
		{"POST", "/generate", SGLangGenerate, true, 0},
		{"POST", "/v1/messages", Messages, true, 0},
		{"POST", "/v1/messages/count_tokens", CountTokens, false, 0},
		{"POST", "/v1/embeddings", Embeddings, false, 0},
		{"POST", "/v1/rerank", Rerank, false, 0},
		{"POST", "/score", Score, false, 0},
		{"GET", "/v1/models", Models, false, 0},
		{"GET", "/v1/models/org/name", Model, false, 0},
		{"GET", "/v1/responses/resp_1", ResponseObject, false, 0},
		{"POST", "/v1/responses/resp_1/cancel", ResponseObject, false, 0},
		{"POST", "/v1/audio/transcriptions", Transcription, false, 0},
		{"GET", "/v1/chat/completions", 0, false, 405},
		{"POST", "/v1/models", 0, false, 405},
		{"POST", "/v1/chat/completions/", 0, false, 404},
		{"GET", "/v1/responses/a/b", 0, false, 404},
		{"GET", "/v1/models/", 0, false, 405}, // the path is known, the id is missing
		{"POST", "/v1/load_lora_adapter", 0, false, 404},
		{"POST", "/../etc", 0, false, 404},
	} {
		ep, err := Lookup(c.method, c.path)
		if c.path == "/v1/models/" {
			continue
		}
		if c.status != 0 {
			var e *Error
			if !errors.As(err, &e) || e.Status != c.status {
				t.Errorf("%s %s: %v", c.method, c.path, err)
			} else if c.status == 404 && !strings.Contains(e.Message, "/v1/chat/completions") {
				t.Errorf("%s: does not say what there is: %s", c.path, e.Message)
			} else if strings.Contains(c.path, "lora") && !strings.Contains(e.Message, "dynctl workers call") {
				t.Errorf("%s: does not say where it belongs: %s", c.path, e.Message)
			}
			continue
		}
		if err != nil || ep.Kind != c.kind || ep.Splittable != c.split {
			t.Errorf("%s %s: %+v, %v", c.method, c.path, ep, err)
		}
	}
	for _, ep := range endpoints {
		switch ep.Kind {
		case Embeddings, Rerank, Score, Classify, Pooling, Tokenize, Detokenize:
			if ep.Splittable || ep.Streamable {
				t.Errorf("%s must never be split", ep.Path)
			}
		}
	}
}

// TestLookupSuggests: the usual mistakes get the path that was meant, or where it is.
func TestLookupSuggests(t *testing.T) {
	for path, want := range map[string]string{
		"/chat/completions":      "did you mean /v1/chat/completions? The base URL",
		"/models":                "did you mean /v1/models?",
		"/v1/chat/completions/":  "did you mean /v1/chat/completions?",
		"/v1/v1/messages":        "did you mean /v1/messages? The client adds /v1",
		"/metrics":               "/metrics are at the address of --admin-listen",
		"/v1/images/generations": "this router answers /classify",
	} {
		if _, err := Lookup("POST", path); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", path, err, want)
		}
	}
}

type ownError struct{}

func (ownError) Error() string { return "secret" }

func (ownError) APIError() *Error {
	return &Error{Status: 502, Code: CodeUpstreamError, Message: "own words"}
}

func TestErrorsAsTheClientSeesThem(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		err    error
		path   string
		status int
		header http.Header
		body   string
	}{
		{
			&Error{Status: 503, Code: CodeNoPrefillWorker, Message: "no prefill worker for \"m\"", RetryAfter: 1500 * time.Millisecond}, "/v1/completions", 503,
			http.Header{"Retry-After": {"2"}},
			`{"error":{"message":"no prefill worker for \"m\"","type":"service_unavailable_error","code":"no_prefill_worker","param":null}}`,
		},
		{
			fmt.Errorf("wrapped: %w", BadRequest("messages[3]", "bad")), "/v1/chat/completions", 400, nil,
			`{"error":{"message":"bad","type":"invalid_request_error","code":"invalid_request","param":"messages[3]"}}`,
		},
		{
			&Error{Status: 429, Code: CodeOverloaded, Message: "m"}, "/v1/messages", 429, nil,
			`{"type":"error","error":{"type":"rate_limit_error","message":"m","code":"overloaded"}}`,
		},
		{
			&Error{Status: 404, Code: CodeModelNotFound, Message: "m"}, "/v1/messages/count_tokens", 404, nil,
			`{"type":"error","error":{"type":"not_found_error","message":"m","code":"model_not_found"}}`,
		},
		{
			&Error{Status: 413, Code: CodeBodyTooLarge, Message: "m"}, "/generate", 413,
			http.Header{"Connection": {"close"}},
			`{"error":{"message":"m","type":"invalid_request_error","code":"body_too_large","param":null}}`,
		},
		{fmt.Errorf("leg: %w", ownError{}), "/generate", 502, nil, `{"error":{"message":"own words","type":"server_error","code":"upstream_error","param":null}}`},
		{context.DeadlineExceeded, "/generate", 504, nil, `{"error":{"message":"the request took longer than its time limit","type":"server_error","code":"timeout","param":null}}`},
		{os.ErrDeadlineExceeded, "/generate", 504, nil, `{"error":{"message":"the request took longer than its time limit","type":"server_error","code":"timeout","param":null}}`},
		{io.ErrUnexpectedEOF, "/generate", 400, nil, `{"error":{"message":"the request ended before its body was complete","type":"invalid_request_error","code":"invalid_request","param":null}}`},
		{errors.New("secret of the house"), "/generate", 500, nil, `{"error":{"message":"internal error of the router","type":"server_error","code":"internal_error","param":null}}`},
	} {
		w := httptest.NewRecorder()
		w.Header().Set("X-Request-Id", "r1")
		WriteError(w, httptest.NewRequest(http.MethodPost, c.path, nil), c.err)
		want := http.Header{"Content-Type": {"application/json"}, "X-Request-Id": {"r1"}, "Content-Length": {fmt.Sprint(len(c.body) + 1)}}
		for k, v := range c.header {
			want[k] = v
		}
		if diff := cmp.Diff(want, w.Header()); diff != "" || w.Code != c.status || strings.TrimSpace(w.Body.String()) != c.body {
			t.Errorf("%v: status %d, body %s, headers\n%s", c.err, w.Code, w.Body, diff)
		}
	}
	w := httptest.NewRecorder()
	WriteError(w, httptest.NewRequest(http.MethodPost, "/generate", nil), fmt.Errorf("x: %w", context.Canceled))
	if w.Body.Len() != 0 || len(w.Header()) != 0 {
		t.Error("something is written to a client that left")
	}
	if FromError(context.Canceled).Status != StatusClientClosed || FromError(nil) != nil {
		t.Error("FromError of a cancel or of nothing")
	}
}

func TestStreamEvent(t *testing.T) {
	t.Parallel()
	e := &Error{Status: 502, Code: CodeUpstreamError, Message: "broke\n\ndata: x"}
	for kind, want := range map[Kind]string{
		Chat:      "data: {\"error\":{\"message\":\"broke\\n\\ndata: x\",\"type\":\"server_error\",\"code\":\"upstream_error\",\"param\":null}}\n\ndata: [DONE]\n\n",
		Messages:  "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"api_error\",\"message\":\"broke\\n\\ndata: x\",\"code\":\"upstream_error\"}}\n\n",
		Responses: "event: error\ndata: {\"type\":\"error\",\"code\":\"upstream_error\",\"message\":\"broke\\n\\ndata: x\",\"param\":null}\n\n",
	} {
		if got := string(e.StreamEvent(kind)); got != want {
			t.Errorf("%v:\n got %q\nwant %q", kind, got, want)
		}
	}
}

func TestRequestID(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		ids  []string
		keep bool
	}{
		{[]string{"abc-1_2.3"}, true},
		{[]string{strings.Repeat("x", 128)}, true},
		{[]string{strings.Repeat("x", 129)}, false},
		{[]string{""}, false},
		{nil, false},
		{[]string{"a b"}, false},
		{[]string{"a\r\nX: 1"}, false},
		{[]string{"é"}, false},
		{[]string{"a", "b"}, false},
	} {
		got := RequestID(http.Header{HeaderRequestID: c.ids})
		if kept := len(c.ids) > 0 && got == c.ids[0]; kept != c.keep || !validID(got) {
			t.Errorf("%q: %q", c.ids, got)
		}
	}
	if a, b := NewRequestID(), NewRequestID(); a == b || len(a) != 32 {
		t.Error("request ids repeat")
	}
}

// plenty is a memory without an end.
type plenty struct{}

func (plenty) Take(int64) bool { return true }

func (plenty) Give(int64) {}

func TestReadBody(t *testing.T) {
	t.Parallel()
	for _, size := range []int{0, 1, 4095, 4096, 4097, 100_000, 1 << 20, 1<<20 + 1, 3 << 20} {
		want := bytes.Repeat([]byte("0123456789"), size/10+1)[:size]
		for _, known := range []bool{true, false} {
			for name, reader := range map[string]io.Reader{
				"plain": bytes.NewReader(want), "halves": iotest.HalfReader(bytes.NewReader(want)), "data with the end": iotest.DataErrReader(bytes.NewReader(want)),
			} {
				r := httptest.NewRequest(http.MethodPost, "/", reader)
				r.ContentLength = -1
				if known {
					r.ContentLength = int64(size)
				}
				b, err := ReadBody(r, 3<<20, plenty{})
				if err != nil {
					t.Fatalf("%s of %d bytes: %v", name, size, err)
				}
				if !bytes.Equal(b.B, want) {
					t.Errorf("%s of %d bytes: got %d others", name, size, len(b.B))
				}
				if known && size > 4096 && cap(b.B) > 2*size {
					t.Errorf("%s of %d bytes holds %d", name, size, cap(b.B))
				}
				b.Release()
				b.Release()
			}
		}
	}
}

type slowBody struct{ err error }

func (s slowBody) Read([]byte) (int, error) { return 0, s.err }

func TestReadBodyRefuses(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name   string
		body   io.Reader
		length int64
		header http.Header
		status int
		code   Code
	}{
		{"announced too large", strings.NewReader("x"), 1001, nil, 413, CodeBodyTooLarge},
		{"too large, not announced", strings.NewReader(strings.Repeat("x", 1001)), -1, nil, 413, CodeBodyTooLarge},
		{"compressed", strings.NewReader("x"), 1, http.Header{"Content-Encoding": {"br"}}, 415, CodeUnsupportedMedia},
		{"too slow", slowBody{os.ErrDeadlineExceeded}, 10, nil, 408, CodeRequestTimeout},
		{"cut off", slowBody{io.ErrUnexpectedEOF}, 10, nil, 400, CodeInvalidRequest},
		{"reset", slowBody{&net.OpError{Op: "read", Err: errors.New("reset")}}, -1, nil, 400, CodeInvalidRequest},
		{"limited by another", slowBody{&http.MaxBytesError{Limit: 7}}, -1, nil, 413, CodeBodyTooLarge},
	} {
		r := httptest.NewRequest(http.MethodPost, "/", c.body)
		r.ContentLength = c.length
		for k, v := range c.header {
			r.Header[k] = v
		}
		_, err := ReadBody(r, 1000, plenty{})
		var e *Error
		if !errors.As(err, &e) || e.Status != c.status || e.Code != c.code {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}

// Many clients that announce a large body and send nothing do not take the
// memory for it.
func TestPromisesTakeNoMemory(t *testing.T) {
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	for range 20 {
		r := httptest.NewRequest(http.MethodPost, "/", slowBody{os.ErrDeadlineExceeded})
		r.ContentLength = 30 << 20
		if _, err := ReadBody(r, DefaultBodyLimit, plenty{}); err == nil {
			t.Fatal("no error")
		}
	}
	runtime.ReadMemStats(&after)
	if grown := after.TotalAlloc - before.TotalAlloc; grown > 30<<20 {
		t.Errorf("20 promises of 30 MiB took %d bytes", grown)
	}
}

func TestHeaders(t *testing.T) {
	t.Parallel()
	for key, want := range map[string]bool{
		"Authorization": true, "Traceparent": true, "Tracestate": true, "X-Request-Id": true, "Content-Type": true, "X-Tenant": true, "Accept": true,
		"X-Data-Parallel-Rank": false, "X-Dynctl-Path": false, "X-Dynctl-Worker": false, "Endpoint-Load-Metrics-Format": false,
		"Connection": false, "Te": false, "Transfer-Encoding": false, "Upgrade": false, "Keep-Alive": false, "Proxy-Authorization": false,
		"Host": false, "Content-Length": false, "Accept-Encoding": false, "Expect": false, "Trailer": false,
		"Forwarded": false, "X-Forwarded-For": false, "X-Forwarded-Anything": false, "X-Real-Ip": false,
	} {
		if got := ForwardRequestHeader(key); got != want {
			t.Errorf("ForwardRequestHeader(%s) = %v", key, got)
		}
		if http.CanonicalHeaderKey(key) != key {
			t.Errorf("%s is not canonical", key)
		}
	}
	for key, want := range map[string]bool{
		"Content-Type": true, "Content-Encoding": true, "Date": true, "Server": true, "Retry-After": true, "X-Custom": true,
		"Content-Length": false, "Transfer-Encoding": false, "Connection": false, "Endpoint-Load-Metrics": false, "X-Dynctl-Path": false, "X-Request-Id": false,
		"Access-Control-Allow-Origin": false, "Access-Control-Expose-Headers": false,
	} {
		if got := ForwardResponseHeader(key); got != want {
			t.Errorf("ForwardResponseHeader(%s) = %v", key, got)
		}
	}
	var got []string
	ConnectionTokens(http.Header{"Connection": {"close, x-a ,,", " X-B"}}, func(k string) { got = append(got, k) })
	if diff := cmp.Diff([]string{"Close", "X-A", "X-B"}, got); diff != "" {
		t.Error(diff)
	}
}

// account is a memory that checks who takes and gives.
type account struct {
	t                  *testing.T
	limit, used, peak  int64
	refuseAfter, asked int
}

func (a *account) Take(n int64) bool {
	a.asked++
	if a.used+n > a.limit || a.refuseAfter > 0 && a.asked > a.refuseAfter {
		return false
	}
	a.used += n
	a.peak = max(a.peak, a.used)
	return true
}

func (a *account) Give(n int64) {
	if a.used -= n; a.used < 0 || n < 0 {
		a.t.Errorf("%d given back, %d left", n, a.used)
	}
}

// dripping is a body that comes in small pieces and perhaps breaks off.
type dripping struct {
	rng  *rand.Rand
	left int
	err  error
	sent int
}

func (d *dripping) Read(p []byte) (int, error) {
	if d.left == 0 {
		return 0, d.err
	}
	n := min(1+d.rng.IntN(1+d.rng.IntN(200_000)), len(p), d.left)
	d.left -= n
	d.sent += n
	return n, nil
}

func (*dripping) Close() error { return nil }

// TestBodiesAndMemory: whatever comes of a body, it never takes more than a
// bounded multiple of what has arrived, and all of it is given back exactly once.
func TestBodiesAndMemory(t *testing.T) {
	for seed := range uint64(500) {
		rng := rand.New(rand.NewPCG(seed, 11))
		limit := int64(1) << (10 + rng.IntN(13))
		size := rng.IntN(int(limit) + int(limit)/8)
		a := &account{t: t, limit: limit, refuseAfter: rng.IntN(8)}
		if rng.IntN(3) > 0 {
			a.refuseAfter = 0
		}
		in := &dripping{rng: rng, left: size, err: io.EOF}
		announced := int64(-1)
		if rng.IntN(2) == 0 {
			announced = int64(size)
			if rng.IntN(4) == 0 { // breaks off
				in.left, in.err = rng.IntN(size+1), io.ErrUnexpectedEOF
			}
		}
		r := &http.Request{Header: http.Header{}, Body: in, ContentLength: announced}
		b, err := ReadBody(r, limit, a)
		if most := max(4*int64(in.sent), 64<<10); a.peak > most {
			t.Errorf("seed %d: %d bytes taken for %d that came", seed, a.peak, in.sent)
		}
		e := FromError(err)
		switch {
		case err == nil && (len(b.B) != size || a.used < int64(min(size, int(limit)))):
			t.Errorf("seed %d: %d bytes read of %d, %d taken", seed, len(b.B), size, a.used)
		case err == nil:
			b.Release()
			b.Release()
		case e.Status == http.StatusServiceUnavailable && (a.refuseAfter == 0 || e.RetryAfter == 0):
			t.Errorf("seed %d: a body of %d was refused with the memory of the largest, %d, to itself: %v", seed, size, limit, err)
		case e.Status == http.StatusRequestEntityTooLarge && int64(size) <= limit:
			t.Errorf("seed %d: %v for %d of %d", seed, err, size, limit)
		}
		if a.used != 0 {
			t.Errorf("seed %d: %d bytes kept (%v)", seed, a.used, err)
		}
	}
}
