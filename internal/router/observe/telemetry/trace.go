package telemetry

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc/grpclog"

	"github.com/dynctl/dynctl/internal/settings"
)

// Tracer makes spans for requests and legs. A nil Tracer makes none and leaves
// the client's traceparent as it is.
type Tracer struct {
	provider *sdktrace.TracerProvider
	tracer   trace.Tracer
	prop     propagation.TraceContext
}

// NewTracer sends spans to the OTLP collector of t.Endpoint (a URL) by t.Protocol, keeping the
// share t.Sample of the traces that begin here; traces that a client began follow the
// client's sampling flag. A name and password in the URL are sent as basic authentication.
// An empty endpoint gives a nil Tracer.
func NewTracer(ctx context.Context, t *settings.Trace, version string) (*Tracer, error) {
	if t.Endpoint == "" {
		return nil, nil
	}
	u, err := url.Parse(t.Endpoint)
	if err != nil {
		return nil, errors.New("trace.endpoint is not a URL") // without it, since it may hold a password
	}
	var header map[string]string
	if u.User != nil {
		password, _ := u.User.Password()
		header = map[string]string{"Authorization": "Basic " + base64.StdEncoding.EncodeToString([]byte(u.User.Username()+":"+password))}
	}
	exp, err := newExporter(ctx, t, header)
	if err != nil {
		return nil, fmt.Errorf("trace exporter for %s: %w", u.Host, err)
	}
	return newTracer(sdktrace.NewBatchSpanProcessor(exp), t, version), nil
}

// newExporter connects when there are spans to send.
func newExporter(ctx context.Context, t *settings.Trace, header map[string]string) (*otlptrace.Exporter, error) {
	if t.Protocol == settings.OTLPGRPC {
		return otlptracegrpc.New(ctx, otlptracegrpc.WithEndpointURL(t.Endpoint), otlptracegrpc.WithHeaders(header))
	}
	return otlptracehttp.New(ctx, otlptracehttp.WithEndpointURL(t.Endpoint), otlptracehttp.WithEncoding(otlptracehttp.EncodingProtobuf), otlptracehttp.WithHeaders(header))
}

// errorLimit is the greatest length in bytes of what is logged of an error: a collector
// chooses its words.
const errorLimit = 512

// errorInterval is the least time between two lines about spans that could not be sent.
const errorInterval = time.Minute

// LogErrors makes OpenTelemetry, which has one handler of errors for the whole process, log
// by a router's logger. Each batch of spans that a collector does not take is an error: the
// first is logged, and then one a minute at most, with the number of those between.
func LogErrors(log *slog.Logger) {
	otel.SetErrorHandler(&exportErrors{log: log})
	otel.SetLogger(logr.FromSlogHandler(log.Handler()))
	// gRPC would print its own lines on stderr. What it fails at is also an error of the batch.
	grpclog.SetLoggerV2(grpclog.NewLoggerV2(io.Discard, io.Discard, io.Discard))
}

// exportErrors is an otel.ErrorHandler.
type exportErrors struct {
	log *slog.Logger

	mu      sync.Mutex // guards the following
	last    time.Time  // of the newest line
	skipped int        // since then
}

// Handle implements otel.ErrorHandler.
func (e *exportErrors) Handle(err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	now := time.Now()
	if !e.last.IsZero() && now.Sub(e.last) < errorInterval {
		e.skipped++
		return
	}
	why := err.Error()
	if len(why) > errorLimit {
		why = strings.ToValidUTF8(why[:errorLimit], "") + "…"
	}
	e.log.Warn("spans cannot be sent (trace.endpoint): "+why, "more_errors_before", e.skipped)
	e.last, e.skipped = now, 0
}

func newTracer(p sdktrace.SpanProcessor, t *settings.Trace, version string) *Tracer {
	tp := sdktrace.NewTracerProvider(
		sdktrace.WithSpanProcessor(p),
		sdktrace.WithSampler(sdktrace.ParentBased(sdktrace.TraceIDRatioBased(t.Sample))),
		sdktrace.WithResource(resource.NewSchemaless(attribute.String("service.name", t.ServiceName), attribute.String("service.version", version))),
	)
	return &Tracer{provider: tp, tracer: tp.Tracer("dynctl")}
}

// Close sends what is left and stops, within the context's time.
func (t *Tracer) Close(ctx context.Context) error {
	if t == nil {
		return nil
	}
	return errors.Join(t.provider.ForceFlush(ctx), t.provider.Shutdown(ctx))
}

// Span is one timed operation. A nil Span does nothing.
type Span struct {
	span trace.Span
	t    *Tracer
	ctx  context.Context
}

// Server begins the span of a client's request, as a child of its traceparent
// when it has one.
func (t *Tracer) Server(ctx context.Context, h http.Header, name string) *Span {
	if t == nil {
		return nil
	}
	ctx = t.prop.Extract(ctx, propagation.HeaderCarrier(h))
	ctx, s := t.tracer.Start(ctx, name, trace.WithSpanKind(trace.SpanKindServer))
	return &Span{span: s, t: t, ctx: ctx}
}

// Leg begins the span of an HTTP call to a worker and puts its traceparent
// into the call's header.
func (s *Span) Leg(name string, h http.Header) *Span {
	if s == nil {
		return nil
	}
	ctx, c := s.t.tracer.Start(s.ctx, name, trace.WithSpanKind(trace.SpanKindClient))
	s.t.prop.Inject(ctx, propagation.HeaderCarrier(h))
	return &Span{span: c, t: s.t, ctx: ctx}
}

// String sets an attribute.
func (s *Span) String(key, value string) {
	if s != nil {
		s.span.SetAttributes(attribute.String(key, value))
	}
}

// Int sets an attribute.
func (s *Span) Int(key string, value int) {
	if s != nil {
		s.span.SetAttributes(attribute.Int(key, value))
	}
}

// Mark notes a moment within the span.
func (s *Span) Mark(name string, at time.Time) {
	if s != nil {
		s.span.AddEvent(name, trace.WithTimestamp(at))
	}
}

// End closes the span; a non-nil err marks it as failed.
func (s *Span) End(err error) {
	if s == nil {
		return
	}
	if err != nil {
		s.span.SetStatus(codes.Error, err.Error())
	}
	s.span.End()
}
