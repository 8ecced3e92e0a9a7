//go:build unix

package router_test

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/loopback"
	"github.com/dynctl/dynctl/internal/router"
	"github.com/dynctl/dynctl/internal/router/observe/trace"
	tracerecorder "github.com/dynctl/dynctl/internal/router/observe/trace/recorder"
	"github.com/dynctl/dynctl/internal/settings"
)

// bareEngine answers as fast as it can on plain sockets, so that its own share
// of a benchmark is small. Of a stream, it sends an event for each next.
type bareEngine struct {
	ln   net.Listener
	wg   sync.WaitGroup
	next chan struct{} // one event of a stream each
	mu   sync.Mutex    // guards conns
	all  []net.Conn
}

func startBare(b *testing.B) *bareEngine {
	b.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	e := &bareEngine{ln: ln, next: make(chan struct{})}
	e.wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			e.mu.Lock()
			e.all = append(e.all, c)
			e.mu.Unlock()
			e.wg.Go(func() { e.serve(c) })
		}
	})
	b.Cleanup(func() {
		_ = ln.Close()
		e.mu.Lock()
		for _, c := range e.all {
			_ = c.Close()
		}
		e.mu.Unlock()
		e.wg.Wait()
	})
	return e
}

func (e *bareEngine) url() string { return "http://" + e.ln.Addr().String() }

const benchEvents = 100 // of one stream

func (e *bareEngine) serve(c net.Conn) {
	r := bufio.NewReaderSize(c, 64<<10)
	var out, body []byte
	for {
		var path, id string
		length := 0
		for n := 0; ; n++ {
			line, err := r.ReadSlice('\n')
			if err != nil {
				return
			}
			key, value, _ := strings.Cut(strings.TrimRight(string(line), "\r\n"), ":")
			switch {
			case n == 0:
				path = strings.Fields(key + ":" + value)[1]
			case key == "Content-Length":
				length, _ = strconv.Atoi(strings.TrimSpace(value))
			case key == "X-Request-Id":
				id = strings.TrimSpace(value)
			}
			if key == "" {
				break
			}
		}
		body = append(body[:0], make([]byte, length)...)
		if _, err := io.ReadFull(r, body); err != nil {
			return
		}
		head, tail := body[:min(len(body), 256)], body[max(0, len(body)-256):]
		answer := ""
		switch {
		case path == "/metrics":
			answer = "vllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"65536\"} 1\n"
		case length == 0:
			answer = `{"object":"list","data":[{"id":"bench","object":"model","max_model_len":131072}]}`
		case bytes.Contains(tail, []byte(`"do_remote_decode":true`)) || bytes.Contains(head, []byte(`"do_remote_decode":true`)):
			answer = `{"id":"chatcmpl-` + id + `","choices":[{"index":0,"finish_reason":"length","message":{"content":"x"}}],"usage":{"prompt_tokens":` + strconv.Itoa(max(1, length/64)*16) +
				`},"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[` + blockIDs(max(1, length/64)) +
				`],"remote_engine_id":"engine","remote_request_id":"chatcmpl-` + id + `","remote_host":"127.0.0.1","remote_port":5600,"tp_size":1}}`
		case bytes.Contains(tail, []byte(`"stream":true`)):
			if !e.stream(c, bytes.Contains(body, []byte(`"return_token_ids":true`))) {
				return
			}
			continue
		default:
			answer = `{"id":"x","object":"chat.completion","model":"bench","choices":[{"index":0,"message":{"role":"assistant","content":"` +
				strings.Repeat("lorem ", 70) + `"},"finish_reason":"stop"}],"usage":{"prompt_tokens":16,"completion_tokens":16,"total_tokens":32}}`
		}
		out = append(out[:0], "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: "...)
		out = strconv.AppendInt(out, int64(len(answer)), 10)
		out = append(append(out, "\r\n\r\n"...), answer...)
		if _, err := c.Write(out); err != nil {
			return
		}
	}
}

// allIDs are more block ids than a benchmark's prompt has.
var allIDs = func() string {
	var ids []byte
	for i := range 8192 {
		ids = strconv.AppendInt(append(ids, ','), int64(i)+1e6, 10)
	}
	return string(ids[1:])
}()

func blockIDs(n int) string { return allIDs[:n*8-1] }

// stream answers with events of one token each, as vLLM's chats have them, on request
// with the ids.
func (e *bareEngine) stream(c net.Conn, ids bool) bool {
	const start = `data: {"id":"x","object":"chat.completion.chunk","created":1700000000,"model":"bench","choices":[{"index":0,"delta":{"content":"lorem "},"logprobs":null,"finish_reason":null,"token_ids":`
	event, prompt := start+"null}]}\n\n", ""
	if ids {
		event, prompt = start+"[48213]}]}\n\n", `,"prompt_token_ids":[`+strings.Repeat("1000,", 255)+"1000]"
	}
	// Made before, so that writing one costs the engine the same whatever is in it.
	chunk := func(s string) []byte { return fmt.Appendf(nil, "%x\r\n%s\r\n", len(s), s) }
	head := "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
	first := append([]byte(head), chunk(strings.Replace(event, "]}\n\n", "]"+prompt+"}\n\n", 1))...)
	rest, done := chunk(event), chunk("data: [DONE]\n\n")
	for i := range benchEvents {
		<-e.next
		out := rest
		switch i {
		case 0:
			out = first
		case benchEvents - 1:
			out = done
		}
		if _, err := c.Write(out); err != nil {
			return false
		}
	}
	_, err := io.WriteString(c, "0\r\n\r\n")
	return err == nil
}

// benchClient sends one request after the other over one connection.
type benchClient struct {
	c net.Conn
	r *bufio.Reader
}

func dialBench(b *testing.B, url string) *benchClient {
	b.Helper()
	c, err := net.Dial("tcp", strings.TrimPrefix(url, "http://"))
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = c.Close() })
	return &benchClient{c, bufio.NewReaderSize(c, 64<<10)}
}

// head reads the head of an answer and returns the length of its body, -1 for
// a chunked one.
func (k *benchClient) head() (int, error) {
	length := -1
	for n := 0; ; n++ {
		line, err := k.r.ReadSlice('\n')
		if err != nil {
			return 0, err
		}
		if n == 0 && !bytes.Contains(line, []byte(" 200 ")) {
			rest, _ := k.r.Peek(k.r.Buffered())
			return 0, fmt.Errorf("%s%s", line, rest)
		}
		if v, ok := bytes.CutPrefix(line, []byte("Content-Length: ")); ok {
			length, _ = strconv.Atoi(string(bytes.TrimSpace(v)))
		}
		if len(line) <= 2 {
			return length, nil
		}
	}
}

func (k *benchClient) roundTrip(raw []byte) error {
	if _, err := k.c.Write(raw); err != nil {
		return err
	}
	n, err := k.head()
	if err == nil {
		_, err = k.r.Discard(n)
	}
	return err
}

// chunk reads one chunk and returns its size.
func (k *benchClient) chunk() (int, error) {
	line, err := k.r.ReadSlice('\n')
	if err != nil {
		return 0, err
	}
	n, err := strconv.ParseInt(string(bytes.TrimSpace(line)), 16, 32)
	if err == nil {
		_, err = k.r.Discard(int(n) + 2)
	}
	return int(n), err
}

// chatRequest is a whole request with a body of about so many bytes.
func chatRequest(size int, stream bool) []byte {
	text := strings.Repeat("the quick brown fox jumps over the lazy dog. ", size/45+1)
	body := fmt.Sprintf(`{"model":"bench","messages":[{"role":"user","content":%q}],"max_tokens":16,"stream":%v}`, text[:max(size-110, 1)], stream)
	return rawRequest("/v1/chat/completions", body)
}

func idsRequest(tokens int) []byte {
	var ids strings.Builder
	for i := range tokens {
		fmt.Fprintf(&ids, ",%d", 1000+i%50000)
	}
	return rawRequest("/v1/completions", `{"model":"bench","prompt":[`+ids.String()[1:]+`],"max_tokens":16,"stream":false}`)
}

func rawRequest(path, body string) []byte {
	return fmt.Appendf(nil, "POST %s HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nAuthorization: Bearer x\r\nContent-Length: %d\r\n\r\n%s", path, len(body), body)
}

// cpu is the CPU time of this process so far: router, client and engine.
func cpu(b *testing.B) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// benchRouter starts a router in front of bare engines and waits for them.
func benchRouter(b *testing.B, configure func(*settings.Config)) *loopback.Rig {
	b.Helper()
	return observedRouter(b, router.Observer{}, configure)
}

// observedRouter is benchRouter with an observer.
func observedRouter(b *testing.B, o router.Observer, configure func(*settings.Config)) *loopback.Rig {
	b.Helper()
	g, err := loopback.Start(context.Background(), loopback.Options{Observer: o, Configure: func(c *settings.Config) {
		c.Health.Interval, c.Health.Scrape = time.Second, time.Second
		configure(c)
	}})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := g.Close(ctx); err != nil {
			b.Error(err)
		}
	})
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := loopback.Wait(ctx, "a routed request", func() error {
		k := &benchClient{}
		if k.c, err = net.Dial("tcp", strings.TrimPrefix(g.URL, "http://")); err != nil {
			return err
		}
		defer k.c.Close()
		k.r = bufio.NewReader(k.c)
		return k.roundTrip(chatRequest(200, false))
	}); err != nil {
		b.Fatal(err)
	}
	return g
}

// recordedRouter is benchRouter with a recording to a file, as serve --record has it.
func recordedRouter(b *testing.B, configure func(*settings.Config)) *loopback.Rig {
	b.Helper()
	tap := tracerecorder.NewTap(trace.Header{Source: "bench"})
	sub, err := tap.Subscribe(0)
	if err != nil {
		b.Fatal(err)
	}
	f, err := tracerecorder.NewFile(sub, tracerecorder.FileOptions{Path: filepath.Join(b.TempDir(), "t.jsonl")})
	if err != nil {
		b.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- f.Run(ctx) }()
	b.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			b.Error(err)
		}
		if _, dropped := sub.Counts(); dropped > 0 {
			b.Errorf("%d records were dropped", dropped)
		}
	})
	return observedRouter(b, router.Observer{Decision: tap.Decision, Outcome: tap.Outcome}, configure)
}

// BenchmarkRequest is a request over loopback sockets through the whole
// router, with receipts, metrics and the ledger as shipped, in the rows kv-recorded
// with a recording to a file beside it. cpu-µs/op is that
// of the process: the row "direct" has the client and one engine alone and is
// to be taken off (twice its engine's half for two legs).
func BenchmarkRequest(b *testing.B) {
	plain := func(c *settings.Config) { c.Routing.Policy, c.Tokens.Tokenizer = "round_robin", "estimate" }
	for _, kind := range []string{"direct", "pass-through", "kv", "kv-recorded", "two-legs"} {
		for _, size := range []int{1 << 10, 32 << 10, 220_000} {
			b.Run(fmt.Sprintf("%s/%dKB", kind, size/1000), func(b *testing.B) {
				first, second := startBare(b), startBare(b)
				url := first.url()
				switch kind {
				case "pass-through":
					url = benchRouter(b, func(c *settings.Config) { plain(c); c.Worker = []string{first.url(), second.url()} }).URL
				case "kv":
					url = benchRouter(b, func(c *settings.Config) { c.Worker = []string{first.url(), second.url()} }).URL
				case "kv-recorded":
					url = recordedRouter(b, func(c *settings.Config) { c.Worker = []string{first.url(), second.url()} }).URL
				case "two-legs":
					url = benchRouter(b, func(c *settings.Config) {
						c.Prefill, c.Decode, c.Routing.PrefillFallback = []string{first.url()}, []string{second.url()}, "error"
					}).URL
				}
				loopRequests(b, url, chatRequest(size, false))
			})
		}
	}
	b.Run("kv-ids/8k-tokens", func(b *testing.B) {
		first, second := startBare(b), startBare(b)
		loopRequests(b, benchRouter(b, func(c *settings.Config) { c.Worker = []string{first.url(), second.url()} }).URL, idsRequest(8192))
	})
}

func loopRequests(b *testing.B, url string, raw []byte) {
	k := dialBench(b, url)
	for range 20 { // connections, pools, predicted blocks
		if err := k.roundTrip(raw); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportAllocs()
	start := cpu(b)
	for b.Loop() {
		if err := k.roundTrip(raw); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(cpu(b)-start)/1e3/float64(b.N), "cpu-µs/op")
}

// BenchmarkChunk is one event of a stream: the engine sends the next one when
// the client has the last, so that none is joined with another. In the row "continued"
// another engine could go on with the stream (continue.mode), so that the events have
// ids, which the client does not get.
func BenchmarkChunk(b *testing.B) {
	for _, kind := range []string{"direct", "router", "continued"} {
		b.Run(kind, func(b *testing.B) {
			e := startBare(b)
			url := e.url()
			if kind != "direct" {
				url = benchRouter(b, func(c *settings.Config) {
					c.Worker = []string{e.url()}
					if kind == "continued" {
						exact(c)
					}
				}).URL
			}
			k, raw := dialBench(b, url), chatRequest(1<<10, true)
			b.ReportAllocs()
			start, left := cpu(b), 0
			for b.Loop() {
				if left == 0 {
					if _, err := k.c.Write(raw); err != nil {
						b.Fatal(err)
					}
					e.next <- struct{}{}
					if _, err := k.head(); err != nil {
						b.Fatal(err)
					}
					left = benchEvents
				} else {
					e.next <- struct{}{}
				}
				if _, err := k.chunk(); err != nil {
					b.Fatal(err)
				}
				if left--; left == 0 {
					if n, err := k.chunk(); n != 0 || err != nil {
						b.Fatal(n, err)
					}
				}
			}
			b.ReportMetric(float64(cpu(b)-start)/1e3/float64(b.N), "cpu-µs/op")
			_ = k.c.Close()
			if left > 0 {
				close(e.next) // the stream that is left ends by itself
			}
		})
	}
}
