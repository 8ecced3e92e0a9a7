package telemetry

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	coltracepb "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	grpcstatus "google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/dynctl/dynctl/internal/settings"
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

// TestLongErrors: a line about an error is bounded, whatever the collector says.
func TestLongErrors(t *testing.T) {
	var b bytes.Buffer
	(&exportErrors{log: slog.New(slog.NewJSONHandler(&b, nil))}).Handle(errors.New(strings.Repeat("ü", 1<<20)))
	if n := b.Len(); n > errorLimit+200 || !strings.Contains(b.String(), "üü…") {
		t.Errorf("a line of %d bytes: %.700s", n, b.String())
	}
}

// exported is what a collector got: a batch of spans, and who sent it.
type exported struct {
	*coltracepb.ExportTraceServiceRequest
	authorization string
}

// grpcCollector is the OTLP service of a server of grpc-go.
type grpcCollector struct {
	coltracepb.UnimplementedTraceServiceServer
	got chan<- exported
	err error
}

func (c *grpcCollector) Export(ctx context.Context, q *coltracepb.ExportTraceServiceRequest) (*coltracepb.ExportTraceServiceResponse, error) {
	md, _ := metadata.FromIncomingContext(ctx)
	c.got <- exported{q, strings.Join(md.Get("authorization"), ",")}
	return &coltracepb.ExportTraceServiceResponse{}, c.err
}

// collect starts a collector that answers with a status, and returns the settings for it, with
// a name and a password.
func collect(t *testing.T, protocol string, status codes.Code, got chan<- exported) *settings.Trace {
	t.Helper()
	const user = "http://me:s3cret@"
	to := &settings.Trace{Protocol: protocol, ServiceName: "front", Sample: 1}
	if protocol != settings.OTLPGRPC {
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
			body, err := io.ReadAll(q.Body)
			e := exported{new(coltracepb.ExportTraceServiceRequest), q.Header.Get("Authorization")}
			if err = errors.Join(err, proto.Unmarshal(body, e)); err != nil || q.URL.Path != "/v1/traces" {
				t.Errorf("%s: %v", q.URL, err)
			}
			got <- e
			if status != codes.OK {
				w.WriteHeader(http.StatusBadRequest)
			}
		}))
		t.Cleanup(s.Close)
		to.Endpoint = user + s.Listener.Addr().String() + "/v1/traces"
		return to
	}
	ln := listen(t)
	s, c := grpc.NewServer(), &grpcCollector{got: got}
	if status != codes.OK {
		c.err = grpcstatus.Error(status, "by the test")
	}
	coltracepb.RegisterTraceServiceServer(s, c)
	done := make(chan error, 1)
	go func() { done <- s.Serve(ln) }()
	t.Cleanup(func() {
		s.Stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	to.Endpoint = user + ln.Addr().String()
	return to
}

func listen(t *testing.T) net.Listener {
	t.Helper()
	ln, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return ln
}

// TestProtocols: over HTTP and over gRPC a collector gets the spans under the service's name,
// with the name and password of its URL. An error of the collector has no password.
func TestProtocols(t *testing.T) {
	for _, protocol := range []string{"http/protobuf", settings.OTLPGRPC} {
		for _, status := range []codes.Code{codes.OK, codes.InvalidArgument} { // which is not tried again
			t.Run(protocol+" "+status.String(), func(t *testing.T) {
				got := make(chan exported, 8)
				tr, err := NewTracer(t.Context(), collect(t, protocol, status, got), "v7")
				if err != nil {
					t.Fatal(err)
				}
				s := tr.Server(t.Context(), http.Header{}, "the request")
				s.Leg("decode leg", http.Header{}).End(nil)
				s.End(nil)
				if err := tr.Close(t.Context()); (err != nil) != (status != codes.OK) || err != nil && strings.Contains(err.Error(), "s3cret") {
					t.Errorf("closed with %v", err)
				}
				e := <-got
				if want := "Basic " + base64.StdEncoding.EncodeToString([]byte("me:s3cret")); e.authorization != want {
					t.Errorf("authorization %q, want %q", e.authorization, want)
				}
				if len(e.ResourceSpans) != 1 {
					t.Fatalf("%d resources", len(e.ResourceSpans))
				}
				about, names := map[string]string{}, map[string]bool{}
				for _, a := range e.ResourceSpans[0].Resource.Attributes {
					about[a.Key] = a.Value.GetStringValue()
				}
				for _, scope := range e.ResourceSpans[0].ScopeSpans {
					for _, s := range scope.Spans {
						names[s.Name] = true
					}
				}
				if about["service.name"] != "front" || about["service.version"] != "v7" || !names["the request"] || !names["decode leg"] {
					t.Errorf("resource %v, spans %v", about, names)
				}
			})
		}
	}
}

// TestCollectorIsAway: requests do not wait for a collector, and a router that stops waits for
// it no longer than it may.
func TestCollectorIsAway(t *testing.T) {
	for _, protocol := range []string{"http/protobuf", settings.OTLPGRPC} {
		ln := listen(t)
		to := &settings.Trace{Protocol: protocol, Endpoint: "http://me:s3cret@" + ln.Addr().String(), ServiceName: "front", Sample: 1}
		ln.Close()
		tr, err := NewTracer(t.Context(), to, "v0")
		if err != nil {
			t.Fatalf("%s: %v", protocol, err)
		}
		tr.Server(t.Context(), http.Header{}, "request").End(nil)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := tr.Close(ctx); err == nil || strings.Contains(err.Error(), "s3cret") {
			t.Errorf("%s: closed with %v", protocol, err)
		}
	}
}

// TestBadCollector: the error for what is no URL does not have it.
func TestBadCollector(t *testing.T) {
	if _, err := NewTracer(t.Context(), &settings.Trace{Endpoint: "http://me:s3cret%zz@c"}, "v0"); err == nil || strings.Contains(err.Error(), "s3cret") {
		t.Error(err)
	}
}
