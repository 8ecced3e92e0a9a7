package kube

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/util/json"

	"github.com/dynctl/dynctl/internal/workers"
)

// TestPool: an InferencePool says which pods are engines and at which port. Another port
// and another selector take over; a pool that is gone leaves the fleet as it was.
func TestPool(t *testing.T) {
	a := newAPIServer(t)
	a.pool = make(chan string, 8)
	s := start(t, a, workers.Kubernetes{Pool: "engines"})
	s.event(t, "discovery_kubernetes_pool_unread")
	if troubles := s.Troubles(); len(troubles) != 1 || !strings.Contains(troubles[0], "there is no InferencePool engines in namespace life") {
		t.Errorf("troubles %q", troubles)
	}
	asked := func(want string) {
		t.Helper()
		for got := range a.asked {
			if got == want {
				return
			}
		}
	}
	lines := strings.Split(strings.TrimSpace(string(recorded(t, "pool.jsonl"))), "\n")
	a.pool <- lines[0]
	asked("watch /api/v1/namespaces/life/pods app=engine")
	life := strings.Split(string(recorded(t, "life.jsonl")), "\n")
	for _, l := range life[:3] {
		a.lines <- l
	}
	s.wait(t, "engine-0 decode vllm 127.0.2.1:8000")
	if from := s.reg.Snapshot().Workers[0].From["url"]; !strings.Contains(from, "InferencePool engines") || len(s.Troubles()) != 0 {
		t.Errorf("the port is from %q; troubles %q", from, s.Troubles())
	}
	a.pool <- lines[1] // another target port
	s.wait(t, "engine-0 decode vllm 127.0.2.1:8100")
	// Another selector: until it is answered, the pods of the last one are followed.
	a.set(func() { a.refuse = recorded(t, "forbidden.json") })
	a.pool <- lines[2]
	s.event(t, "discovery_kubernetes_lost")
	a.lines <- life[3]
	s.wait(t, `engine-0 decode vllm 127.0.2.1:8100: its pod is not Ready (ReadinessGatesNotReady: the status of pod readiness gate "example.com/gate" is not "True", but False)`)
	a.set(func() { a.refuse = nil }) // it finds nothing
	asked("watch /api/v1/namespaces/life/pods app=other")
	s.wait(t)
	// The watch of the old one ends: a pool that changes leaves none behind.
	deadline := time.After(patience)
	for ended := false; !ended; {
		a.set(func() { ended = a.open["pods app=engine"] == 0 && a.open["pods app=other"] == 1 })
		select {
		case <-time.After(time.Millisecond):
		case <-deadline:
			t.Fatalf("watches %v", a.open)
		}
	}
	a.pool <- lines[3] // gone
	s.event(t, "discovery_kubernetes_pool_unread")
	if st := s.Status(); len(st.Watches) != 2 {
		t.Errorf("watches %+v", st.Watches)
	}
}

// TestPoolRefused: what is missing is named, the object's kind and all.
func TestPoolRefused(t *testing.T) {
	a := newAPIServer(t)
	a.refuse = []byte(strings.ReplaceAll(string(recorded(t, "forbidden.json")), "pods", "inferencepools"))
	s := start(t, a, workers.Kubernetes{Pool: "engines"})
	if e := s.event(t, "discovery_kubernetes_lost"); !strings.Contains(e.Text, "with the verbs list and watch on inferencepools.inference.networking.k8s.io") {
		t.Errorf("%s", e.Text)
	}
}

// poolAnswer serves the recorded pools: none in the list, then the lines of the watch.
func (a *apiServer) poolAnswer(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	q := r.URL.Query()
	switch {
	case q.Get("sendInitialEvents") != "":
		_, _ = w.Write(recorded(a.t, "no-streaming-list.jsonl"))
		return
	case q.Get("fieldSelector") != "metadata.name=engines":
		a.t.Errorf("the pools are asked for with %s", r.URL.RawQuery)
	case q.Get("watch") == "":
		_, _ = w.Write(recorded(a.t, "no-pool.json"))
		return
	}
	w.(http.Flusher).Flush()
	for {
		select {
		case <-r.Context().Done():
			return
		case line := <-a.pool:
			_, _ = w.Write([]byte(line + "\n"))
			w.(http.Flusher).Flush()
		}
	}
}

func FuzzPool(f *testing.F) {
	for l := range strings.SplitSeq(strings.TrimSpace(string(recorded(f, "pool.jsonl"))), "\n") {
		f.Add([]byte(l))
	}
	f.Add([]byte(`{"object":{"spec":{"selector":{"matchLabels":{"a":"b c"}},"targetPorts":[{"number":70000}]}}}`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		var line struct{ Object map[string]any }
		if json.Unmarshal(raw, &line) != nil { // as objects are read: whole numbers are int64
			return
		}
		m, err := readPool(line.Object)
		if err == nil && (m.selector == "" || len(m.ports) == 0) {
			t.Errorf("members %+v of %s", m, raw)
		}
	})
}
