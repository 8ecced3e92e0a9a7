// Package upstream is the router's HTTP client for the legs of a plan: one
// request to one engine, whose answer is read and forwarded by the goroutine
// that asked for it.
//
// It speaks HTTP/1.1 (RFC 9112) over keep-alive connections, plain or TLS, with
// bodies of known length, chunked, or ended by the end of the connection.
// Engines answer nothing else. It is not net/http's Transport because that
// hands every request and every read to two more goroutines, which costs more
// than all the rest of a request (docs/adr/0003-http-path.md has the figures).
//
// An unused connection belongs to no request: what an engine sends over it, or that it closes
// it, is seen before the connection is used again, and is no request's business. Of a TLS
// connection only data counts, not session tickets or key updates.
//
// What breaks is reported as a [*Failure], which says how far the exchange had come: whether the
// engine may have seen the request, and whether a byte of its answer had arrived. The client
// sends a request a second time only where no byte of it can have reached the engine (or where
// the caller said that sending it twice does no harm), because a prefill's transfer parameters
// must never be used twice.
package upstream
