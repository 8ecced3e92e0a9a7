package telemetry

import (
	"bytes"
	"encoding/json"
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// TestExportErrors: a collector that is away is reported in the log's format, at most once a
// minute, with how often in between.
func TestExportErrors(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var b bytes.Buffer
		e := &exportErrors{log: slog.New(slog.NewJSONHandler(&b, nil))}
		for range 25 { // two minutes
			e.Handle(errors.New("connection refused"))
			<-time.After(5 * time.Second)
		}
		var skipped []int
		for line := range strings.Lines(b.String()) {
			var v struct {
				Level, Msg string
				Skipped    int `json:"more_errors_before"`
			}
			if err := json.Unmarshal([]byte(line), &v); err != nil || v.Level != "WARN" || v.Msg != "spans cannot be sent (trace.endpoint): connection refused" {
				t.Errorf("%v: %s", err, line)
			}
			skipped = append(skipped, v.Skipped)
		}
		if len(skipped) != 3 || skipped[0] != 0 || skipped[1] != 11 || skipped[2] != 11 {
			t.Errorf("lines with %v errors between", skipped)
		}
	})
}

// TestCollectorGetsThePassword: name and password of the URL reach the collector, and no
// error has them.
func TestCollectorGetsThePassword(t *testing.T) {
	got := make(chan string, 1)
	collector := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		name, password, _ := q.BasicAuth()
		select {
		case got <- q.URL.Path + " " + name + " " + password:
		default:
		}
		w.WriteHeader(http.StatusBadRequest) // which is not tried again
	}))
	t.Cleanup(collector.Close)
	tr, err := NewTracer(t.Context(), strings.Replace(collector.URL, "http://", "http://me:s3cret@", 1)+"/v1/traces", 1, "v0")
	if err != nil {
		t.Fatal(err)
	}
	tr.Server(t.Context(), http.Header{}, "request").End(nil)
	if err := tr.Close(t.Context()); err != nil && strings.Contains(err.Error(), "s3cret") {
		t.Errorf("the error has the password: %v", err)
	}
	if at := <-got; at != "/v1/traces me s3cret" {
		t.Errorf("the collector got %q", at)
	}
	if _, err := NewTracer(t.Context(), "http://me:s3cret%zz@c", 1, "v0"); err == nil || strings.Contains(err.Error(), "s3cret") {
		t.Errorf("a bad URL: %v", err)
	}
}
