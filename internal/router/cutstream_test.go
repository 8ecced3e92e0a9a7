package router_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/settings"
)

// serverSent reads a stream by the rules of the HTML standard (9.2.6): the data
// of each event that an empty line has ended.
func serverSent(text string) (events []string) {
	data := []string(nil)
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, "\r\n")
		if value, ok := strings.CutPrefix(line, "data:"); ok {
			data = append(data, strings.TrimPrefix(value, " "))
		}
		if line == "" && data != nil {
			events, data = append(events, strings.Join(data, "\n")), nil
		}
	}
	return events
}

// streamIsCutAnywhere: an engine that dies at any byte of
// its stream leaves the client with the events that had come whole and the
// router's error, each of which parses.
func streamIsCutAnywhere(t *testing.T, r *rig, p *tap) {
	cut := make(chan string, 1)
	p.set(func(_ string, w http.ResponseWriter, q *http.Request, _ []byte) bool {
		if !strings.HasPrefix(q.URL.Path, "/v1/") || q.Method != http.MethodPost {
			return false
		}
		w.Header().Set("Content-Type", "text/event-stream")
		text := <-cut
		first := strings.Index(text, "t1") + 1 // so that the head ends within an event
		for _, part := range []string{text[:first], text[first:]} {
			_, _ = io.WriteString(w, part)
			_ = http.NewResponseController(w).Flush()
		}
		panic(http.ErrAbortHandler)
	})
	for path, body := range map[string]string{
		"/v1/completions": `{"model":"sim","prompt":"x","stream":true}`,
		"/v1/messages":    `{"model":"sim","max_tokens":5,"stream":true,"messages":[{"role":"user","content":"x"}]}`,
	} {
		for _, end := range []string{"\n", "\r\n"} {
			event := func(text string) string {
				if path == "/v1/messages" {
					return fmt.Sprintf("event: content_block_delta%sdata: {\"type\":\"content_block_delta\",\"index\":0,\"delta\":{\"type\":\"text_delta\",\"text\":%q}}%s%s", end, text, end, end)
				}
				return fmt.Sprintf("data: {\"choices\":[{\"index\":0,\"text\":%q}]}%s%s", text, end, end)
			}
			begin := event("t0")
			stream := begin + event("t1") + ": ping" + end + end + event("t2")
			for n := len(begin); n <= len(stream); n++ {
				r.Router.Heal("aggregated-0")
				cut <- stream[:n]
				a := r.send(http.MethodPost, path, []byte(body))
				if a.status != 200 || a.err != nil {
					t.Fatalf("cut after %d bytes: %s, %v", n, a, a.err)
				}
				whole := serverSent(strings.TrimSuffix(stream[:n], "\r"))
				got := serverSent(string(a.body))
				if path == "/v1/completions" && got[len(got)-1] == "[DONE]" {
					got = got[:len(got)-1]
				}
				if fmt.Sprint(got[:len(got)-1]) != fmt.Sprint(whole) {
					t.Fatalf("%s cut after %q\ngot  %q\nwant %q and an error", path, stream[:n], got, whole)
				}
				var e struct {
					Error struct{ Code, Message string }
				}
				if err := json.Unmarshal([]byte(got[len(got)-1]), &e); err != nil || !strings.Contains(e.Error.Message, "broke off") {
					t.Fatalf("%s cut after %q: the last event is %q (%v)", path, stream[:n], got[len(got)-1], err)
				}
			}
		}
	}
	r.Router.Heal("aggregated-0")
	// An event too large to be held back has been begun: an empty line ends it.
	cut <- "data: {\"choices\":[{\"index\":0,\"text\":\"t0\"}]}\n\ndata: t1" + strings.Repeat("x", 1<<20)
	a := r.send(http.MethodPost, "/v1/completions", []byte(`{"model":"sim","prompt":"x","stream":true}`))
	got := serverSent(string(a.body))
	if len(got) != 4 || !strings.Contains(got[2], "broke off") {
		t.Errorf("%d events, the last %.200q", len(got), got[len(got)-1])
	}
}

// clientLeavesAfterItsAnswer: a client that closes the connection on reading
// the end of a stream has got all of it, whatever the engine still does with the body.
func clientLeavesAfterItsAnswer(t *testing.T, r *rig, p *tap) {
	for path, c := range map[string]struct{ body, more, end string }{
		"/v1/completions": {
			`{"model":"sim","prompt":"x","stream":true}`,
			"data: {\"choices\":[{\"index\":0,\"text\":\"t\",\"finish_reason\":\"stop\"}]}\n\n", "data: [DONE]\n\n",
		},
		"/v1/messages": {
			`{"model":"sim","max_tokens":5,"stream":true,"messages":[{"role":"user","content":"x"}]}`,
			"event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"index\":0,\"delta\":{\"type\":\"text_delta\",\"text\":\"t\"}}\n\n",
			"event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n",
		},
	} {
		for _, whole := range []bool{true, false} {
			for _, mode := range []string{settings.ContinueOff, settings.ContinueExact} {
				t.Run(fmt.Sprintf("%s/%v/%s", path, whole, mode), func(t *testing.T) {
					r := r.in(t)
					r.set(func(c *settings.Config) { c.Continue.Mode = mode })
					before := r.status().Traffic
					p.set(func(_ string, w http.ResponseWriter, q *http.Request, _ []byte) bool {
						if q.URL.Path != path || q.Method != http.MethodPost {
							return false
						}
						w.Header().Set("Content-Type", "text/event-stream")
						text := c.more
						if whole {
							text += c.end
						}
						for _, event := range strings.SplitAfter(text, "\n\n") {
							_, _ = io.WriteString(w, event)
							_ = http.NewResponseController(w).Flush()
						}
						<-q.Context().Done() // the body does not end by itself
						return true
					})
					ctx, leave := context.WithCancel(r.wait())
					defer leave()
					resp, err := r.open(ctx, http.MethodPost, path, []byte(c.body))
					if err != nil {
						t.Fatal(err)
					}
					defer resp.Body.Close()
					last := c.more
					if whole {
						last = c.end
					}
					got := ""
					for piece := make([]byte, 4096); !strings.HasSuffix(got, last); {
						n, err := resp.Body.Read(piece)
						if got += string(piece[:n]); err != nil {
							t.Fatalf("%q, %v", got, err)
						}
					}
					leave()
					r.eventually("the request to be counted", func() error {
						s, err := r.Admin.Status(r.wait())
						if err != nil {
							return err
						}
						completed, cancelled := uint64(1), uint64(0)
						if !whole {
							completed, cancelled = 0, 1
						}
						if n := s.Traffic; n.Completed-before.Completed != completed || n.Cancelled-before.Cancelled != cancelled || n.Failed != before.Failed {
							return fmt.Errorf("%+v", n)
						}
						return nil
					})
				})
			}
		}
	}
}

// headHasTheLength: the answer to HEAD says how long that to GET is.
func headHasTheLength(t *testing.T, r *rig, p *tap) {
	p.set(func(_ string, w http.ResponseWriter, q *http.Request, _ []byte) bool {
		if q.Method != http.MethodHead {
			return false
		}
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Content-Length", "1234")
		return true
	})
	a := r.send(http.MethodHead, "/v1/responses/resp_1", nil)
	if a.status != http.StatusOK || a.header.Get("Content-Length") != "1234" || len(a.body) != 0 {
		t.Errorf("%s %v", a, a.header)
	}
}
