package telemetry

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/dynctl/dynctl/internal/settings"
)

func page(t *testing.T, m *Metrics) string {
	t.Helper()
	rec := httptest.NewRecorder()
	m.Handler().ServeHTTP(rec, httptest.NewRequest("GET", "/metrics", nil))
	if rec.Code != 200 {
		t.Fatalf("metrics page: %d", rec.Code)
	}
	return rec.Body.String()
}

func TestMetricsPage(t *testing.T) {
	m := New("v0", "abc", nil)
	m.Request("chat", "m", "remote", "200", time.Second)
	m.Leg("decode", "d0", "ok", time.Second, time.Millisecond)
	m.Decision("remote", "over_threshold")
	p := page(t, m)
	for _, want := range []string{
		`dynctl_requests_total{code="200",endpoint="chat",model="m",path="remote"} 1`,
		`dynctl_leg_first_byte_seconds_count{leg="decode",worker="d0"} 1`,
		`dynctl_decisions_total{path="remote",reason="over_threshold"} 1`,
		`dynctl_build_info{`, "go_goroutines",
	} {
		if !strings.Contains(p, want) {
			t.Errorf("page lacks %s", want)
		}
	}
	m.ForgetWorker("d0")
	if p := page(t, m); strings.Contains(p, `worker="d0"`) {
		t.Error("series of a worker that left are still there")
	}
	m.Leg("decode", "d0", "ok", time.Second, 0)
	if p := page(t, m); !strings.Contains(p, `dynctl_legs_total{leg="decode",outcome="ok",worker="d0"} 1`) {
		t.Error("a worker that came back is not counted afresh")
	}
}

// TestNoSeriesOfWorkersThatLeft: whatever is counted by worker ends with the
// worker; every vector that has the label is tried.
func TestNoSeriesOfWorkersThatLeft(t *testing.T) {
	m := New("v0", "abc", nil)
	fields, tried := reflect.ValueOf(m).Elem(), 0
	for i := range fields.NumField() {
		var v *prometheus.MetricVec
		switch f := reflect.NewAt(fields.Field(i).Type(), fields.Field(i).Addr().UnsafePointer()).Elem().Interface().(type) {
		case *counters:
			v = f.vec
		case *histograms:
			v = f.vec
		default:
			continue
		}
		desc := make(chan *prometheus.Desc, 1)
		v.Describe(desc)
		text := (<-desc).String()
		_, after, ok := strings.Cut(text, "variableLabels: {")
		if !ok {
			t.Fatalf("no labels in %s", text)
		}
		names, _, _ := strings.Cut(after, "}")
		labels := strings.Split(names, ",")
		if !slices.Contains(labels, "worker") {
			continue
		}
		for _, worker := range []string{"d0", "d1"} {
			with := prometheus.Labels{}
			for _, l := range labels {
				with[l] = "x"
			}
			with["worker"] = worker
			if _, err := v.GetMetricWith(with); err != nil {
				t.Fatal(err)
			}
		}
		tried++
	}
	if p := page(t, m); tried < 5 || !strings.Contains(p, `worker="d0"`) {
		t.Fatalf("%d vectors with the label worker", tried)
	}
	m.ForgetWorker("d0")
	p := page(t, m)
	for line := range strings.Lines(p) {
		if strings.Contains(line, `worker="d0"`) {
			t.Errorf("still there: %s", line)
		}
	}
	if !strings.Contains(p, `worker="d1"`) {
		t.Error("the series of another worker are gone, too")
	}
}

// counts calls everything that counts something, with name wherever a name is
// asked for.
func counts(m *Metrics, name string) {
	v := reflect.ValueOf(m)
	for i := range v.NumMethod() {
		f := v.Type().Method(i)
		if f.Type.NumOut() > 0 || f.Type.NumIn() < 2 || f.Type.In(1).Kind() != reflect.String || f.Name == "ForgetWorker" {
			continue
		}
		args := []reflect.Value{}
		for j := 1; j < f.Type.NumIn(); j++ {
			a := reflect.New(f.Type.In(j)).Elem()
			switch a.Kind() {
			case reflect.String:
				a.SetString(name)
			default:
				a.SetInt(1)
			}
			args = append(args, a)
		}
		v.Method(i).Call(args)
	}
}

// TestNoSeriesOfLateCounts: what is counted of a worker after it has left brings
// none of its series back, by whatever method; that of one that comes back does.
func TestNoSeriesOfLateCounts(t *testing.T) {
	gone := map[string]bool{}
	m := New("v0", "abc", func(w string) bool { return !gone[w] })
	of := func(worker string) int {
		names := map[string]bool{}
		for line := range strings.Lines(page(t, m)) {
			if name, labels, _ := strings.Cut(line, "{"); strings.Contains(labels, `worker="`+worker+`"`) {
				for _, end := range []string{"_bucket", "_sum", "_count"} {
					name = strings.TrimSuffix(name, end)
				}
				names[name] = true
			}
		}
		return len(names)
	}
	counts(m, "d0")
	counts(m, "d1")
	if n := of("d0"); n != len(m.ofWorkers) {
		t.Fatalf("%d of %d metrics with the label worker are counted", n, len(m.ofWorkers))
	}
	gone["d0"] = true
	m.ForgetWorker("d0")
	counts(m, "d0")
	if n := of("d0"); n != 0 {
		t.Errorf("%d metrics have series of a worker that had left before it was counted", n)
	}
	gone["d0"] = false
	counts(m, "d0")
	for _, w := range []string{"d0", "d1"} {
		if n := of(w); n != len(m.ofWorkers) {
			t.Errorf("%d of %d metrics count %s", n, len(m.ofWorkers), w)
		}
	}
	if p := page(t, m); !strings.Contains(p, `dynctl_legs_total{leg="d0",outcome="d0",worker="d0"} 1`) {
		t.Error("a worker that came back is not counted afresh")
	}
}

// TestNoSeriesOfWorkersThatLeaveMeanwhile: whatever is counted while workers
// leave, none of their series is there when all is quiet.
func TestNoSeriesOfWorkersThatLeaveMeanwhile(t *testing.T) {
	var gone [64]atomic.Bool
	m := New("v0", "abc", func(w string) bool {
		n, err := strconv.Atoi(w)
		return err == nil && !gone[n].Load()
	})
	var g sync.WaitGroup
	for range 4 {
		g.Go(func() {
			for i := range gone {
				for range 4 {
					m.Leg("decode", strconv.Itoa(i), "ok", time.Second, time.Second)
					m.OddParams(strconv.Itoa(i))
				}
			}
		})
	}
	g.Go(func() {
		for i := range gone {
			gone[i].Store(true)
			m.ForgetWorker(strconv.Itoa(i))
		}
	})
	g.Wait()
	if p := page(t, m); strings.Contains(p, `worker="`) {
		t.Error("there are series of workers that have left")
	}
}

// TestModelLabelIsBounded: clients choose the model, so they must not choose
// how many series there are (invariant 7).
func TestModelLabelIsBounded(t *testing.T) {
	m := New("v0", "abc", nil)
	for i := range 3 * maxLabelValues {
		m.Request("chat", fmt.Sprint("m", i), "local", "404", time.Millisecond)
	}
	if n := strings.Count(page(t, m), "dynctl_requests_total{"); n != maxLabelValues+1 {
		t.Fatalf("%d series", n)
	}
}

func TestSpansFollowTheClientsTrace(t *testing.T) {
	rec := tracetest.NewSpanRecorder()
	tr := newTracer(rec, &settings.Trace{Sample: 1}, "v0")
	defer func() { _ = tr.Close(t.Context()) }()
	h := http.Header{"Traceparent": {"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}}
	s := tr.Server(t.Context(), h, "POST /v1/chat/completions")
	legHeader := http.Header{}
	leg := s.Leg("prefill", legHeader)
	leg.String("dynctl.worker", "p0")
	leg.End(fmt.Errorf("refused"))
	s.End(nil)
	ended := rec.Ended()
	if len(ended) != 2 {
		t.Fatalf("%d spans", len(ended))
	}
	for _, e := range ended {
		if got := e.SpanContext().TraceID().String(); got != "0af7651916cd43dd8448eb211c80319c" {
			t.Errorf("%s is in trace %s", e.Name(), got)
		}
	}
	if ended[0].Parent().SpanID() != ended[1].SpanContext().SpanID() {
		t.Error("the leg is not a child of the request")
	}
	if want := ended[0].SpanContext().SpanID().String(); !strings.Contains(legHeader.Get("Traceparent"), want) {
		t.Errorf("leg header %v lacks span %s", legHeader, want)
	}
	if ended[0].Status().Description != "refused" {
		t.Errorf("leg status %+v", ended[0].Status())
	}
	var none *Tracer
	none.Server(t.Context(), h, "x").Leg("y", h).End(nil)
	if got := h.Get("Traceparent"); !strings.HasSuffix(got, "b7ad6b7169203331-01") {
		t.Errorf("a nil tracer changed the client's traceparent to %s", got)
	}
	var _ sdktrace.SpanProcessor = rec
}

func BenchmarkRequest(b *testing.B) {
	m := New("v0", "abc", nil)
	b.ReportAllocs()
	for b.Loop() {
		m.Request("chat", "m", "remote", "200", time.Second)
		m.Leg("decode", "d0", "ok", time.Second, time.Millisecond)
	}
}
