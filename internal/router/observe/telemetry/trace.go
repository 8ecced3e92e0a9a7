package telemetry

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
)

// Tracer makes spans for requests and legs. A nil Tracer makes none and leaves
// the client's traceparent as it is.
type Tracer struct {
	provider *sdktrace.TracerProvider
	tracer   trace.Tracer
	prop     propagation.TraceContext
}

// NewTracer sends spans to an OTLP/HTTP collector at endpoint (a URL), keeping
// the given share of the traces that begin here; traces that a client began
// follow the client's sampling flag. An empty endpoint gives a nil Tracer.
func NewTracer(ctx context.Context, endpoint string, sample float64, version string) (*Tracer, error) {
	if endpoint == "" {
		return nil, nil
	}
	exp, err := otlptracehttp.New(ctx, otlptracehttp.WithEndpointURL(endpoint))
	if err != nil {
		return nil, fmt.Errorf("trace exporter for %s: %w", endpoint, err)
	}
	return newTracer(sdktrace.NewBatchSpanProcessor(exp), sample, version), nil
}

func newTracer(p sdktrace.SpanProcessor, sample float64, version string) *Tracer {
	tp := sdktrace.NewTracerProvider(
		sdktrace.WithSpanProcessor(p),
		sdktrace.WithSampler(sdktrace.ParentBased(sdktrace.TraceIDRatioBased(sample))),
		sdktrace.WithResource(resource.NewSchemaless(attribute.String("service.name", "dynctl"), attribute.String("service.version", version))),
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
