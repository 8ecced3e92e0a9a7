// Package loadgen is the load client: it sends streaming completions over
// HTTP/1.1 at planned times or with a fixed number in flight, and takes the
// time of every byte that matters.
//
// # Clock
//
// All times are monotonic, counted from the start of a run. A request has
// these: Intended (when the schedule wanted it, or when its slot became free),
// Sent (before its first byte is written), FirstByte (the first byte of the
// answer left the socket), First (the piece with the first token), Last (the
// piece with the last token) and End. A time is taken when a read returns,
// before anything is parsed.
//
// # Definitions
//
//	TTFT      First - Sent; and First - Intended, which is the one that counts
//	          what the client itself waited
//	ITL       pooled gaps between tokens; a piece of k tokens that came dt
//	          after the one before gives k gaps of dt/k
//	TPOT      (Last - First) / (tokens - tokens of the first piece); none when
//	          that is 0
//	E2E       Last - Sent
//	dispatch  Sent - Intended
//
// A role-only or empty piece is no token; reasoning text is. How many tokens a
// piece has is what continuous usage says, and when an engine has none, the
// answer's tokens are spread evenly over its pieces.
//
// The connection is the package's own: one request is one write, an answer is
// read into one buffer and walked in place. net/http would cost several times
// as much and hides when bytes arrive.
//
// # Shared with the router
//
// Two parts are the router's own code: package quicksock reads and writes the sockets, and
// sse.Scanner reads the events of a stream and decides what is a token. A mistake of these
// two is in the measurement and in the router alike, and no comparison of the two shows it.
// Times, framing (heads, chunks, the end of an answer) and counts of tokens are this
// package's own.
package loadgen
