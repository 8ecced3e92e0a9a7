package upstream

import (
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/workers"
)

// TestAlive: an engine is waited for as long as it shows signs of life, and not
// without them; an answer that comes first is taken.
func TestAlive(t *testing.T) {
	for _, c := range []struct {
		name          string
		alive, answer bool // the engine answers at once
		lost          bool
	}{
		{name: "an answer at once", answer: true},
		{name: "signs of life", alive: true},
		{name: "none", lost: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			by := 50 * time.Millisecond
			if c.answer {
				by = 2 * time.Second // the head must come within it
			}
			begun := time.Now()
			until := begun.Add(by) // when the time is up
			asked := make(chan time.Time, 1)
			srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
				_, _ = io.Copy(io.Discard, q.Body) // before, nobody sees the client leave
				if !c.answer {
					select {
					case <-asked: // the watch has asked, so the time is up
					case <-q.Context().Done():
					}
				}
				w.WriteHeader(http.StatusOK)
				w.(http.Flusher).Flush()
				if c.answer { // the time is up in the middle of the answer
					<-time.After(time.Until(until) + 50*time.Millisecond)
				}
				_, _ = io.WriteString(w, "hello")
			}))
			defer srv.Close()
			l := legTo(t, srv.URL)
			l.Life = new(workers.Life)
			l.AliveBy = until
			l.Alive = func(since time.Time) bool {
				if since.Before(begun) {
					t.Errorf("asked for signs since %s, before the request was sent", since)
				}
				if c.alive {
					select {
					case asked <- since:
					default: // once is enough
					}
				}
				return c.alive
			}
			if c.lost {
				_, err := newClient(t, Options{}).Do(patience(t), l)
				var f *Failure
				if !errors.As(err, &f) || f.Kind != Timeout || !errors.Is(err, errNoLife) {
					t.Fatalf("%v", err)
				}
			} else if _, body := get(t, newClient(t, Options{}), l); body != "hello" {
				t.Fatalf("%q", body)
			}
			if seen := !l.Life.Last().IsZero(); seen == c.lost {
				t.Errorf("the answer is a sign of life: %v", seen)
			}
		})
	}
}
