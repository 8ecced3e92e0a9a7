package api

import (
	"crypto/rand"
	"net/http"
	"strings"
)

// HeaderHop carries the hops that a request has passed, oldest first, separated by commas.
const HeaderHop = "X-Dynctl-Hop"

const (
	// maxHops is how many hops a request carries. Those before them are forgotten, so that
	// no request becomes longer and longer; a loop of more routers is not recognised.
	maxHops   = 16
	hopLength = 26
)

// Hop names a router process to itself: every request that it sends to a worker carries
// it, and one that arrives with it has come back. It is random and goes to workers only, so
// that no client can write a request that is taken for one which came back.
type Hop string

// NewHop makes the hop of a process.
func NewHop() Hop { return Hop(rand.Text()) }

// Header is what requests carry that follow from no client's.
func (me Hop) Header() http.Header { return http.Header{HeaderHop: {string(me)}} }

// Passed reports whether a request with the headers h has passed this router before.
func (me Hop) Passed(h http.Header) (passed bool) {
	eachHop(h, func(hop string) { passed = passed || hop == string(me) })
	return passed
}

// After returns the header of a request to a worker that follows from one with the headers
// h. A well-formed value of a client is forwarded; only the router that it names reads it.
func (me Hop) After(h http.Header) string {
	if len(h[HeaderHop]) == 0 {
		return string(me)
	}
	var hops []string
	eachHop(h, func(hop string) { hops = append(hops, hop) })
	hops = append(hops, string(me))
	return strings.Join(hops[max(0, len(hops)-maxHops):], ", ")
}

// eachHop calls on for each well-formed hop.
func eachHop(h http.Header, on func(hop string)) {
	for _, line := range h[HeaderHop] {
		for hop := range strings.SplitSeq(line, ",") {
			if hop = strings.Trim(hop, " \t"); len(hop) == hopLength && strings.Trim(hop, "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567") == "" {
				on(hop)
			}
		}
	}
}

// Looped is the answer to a request that has passed this router before.
func Looped() *Error {
	return &Error{
		Status: http.StatusLoopDetected, Code: CodeLoop,
		Message: "this request came back to a router that it had passed: one of the router's workers is the router itself, or another router that has it among its workers; take that worker out (dynctl workers list shows their addresses)",
	}
}
