package selector

import (
	"fmt"
	"strings"
)

// Policy names a way of ranking.
type Policy string

// The policies.
const (
	// KV ranks by the time that a request is expected to take on a rank, and by the delay that
	// it causes to others there. It ranks as KVBlocks until these times are learned.
	KV Policy = "kv"
	// KVBlocks ranks by uncached prefill work, queued prefill work and decode load, in blocks,
	// with a tie-break that keeps cold prefixes evenly spread.
	KVBlocks Policy = "kv_blocks"
	// KVDynamo is the cost function of NVIDIA Dynamo's router with its
	// defaults and its random tie-break: the baseline that the others are measured by.
	KVDynamo Policy = "kv_dynamo"
	// LeastLoaded takes the rank with the fewest requests running or waiting, or with the
	// fewest of this router where a rank reports no load.
	LeastLoaded Policy = "least_loaded"
	// RoundRobin takes the ranks in turn, in the order of their labels.
	RoundRobin Policy = "round_robin"
	// PowerOfTwo draws two ranks and takes the less loaded of them.
	PowerOfTwo Policy = "power_of_two"
	// Random draws one rank.
	Random Policy = "random"
	// Session keeps a session on the rank where it is. A new one goes where LeastLoaded
	// would send it; ranks of equal load are in the order of the session's hash.
	Session Policy = "session"
)

// policies has a row for each policy, in the order of the documentation; rankBy
// names its function.
var policies = []policy{
	{name: KV, caches: true},
	{name: KVBlocks, caches: true},
	{name: KVDynamo, caches: true},
	{name: LeastLoaded, requests: true},
	{name: RoundRobin, chose: "its turn"},
	{name: PowerOfTwo, requests: true},
	{name: Random, chose: "drawn"},
	{name: Session, requests: true, chose: "the session lives there"},
}

// policy is what others know of a policy.
type policy struct {
	name Policy
	// chose says why a rank was chosen where costs do not.
	chose string
	// requests says that costs count requests, not blocks.
	requests bool
	// caches says that a rank's overlap is looked at.
	caches bool
}

// rankBy orders the eligible candidates by the policy. It is a switch because what
// is called through a table is taken to keep its arguments, which costs an
// allocation.
func rankBy(in *Input, out *Ranking) {
	switch in.Policy {
	case LeastLoaded:
		byLoad(in, out, in.sorted())
	case RoundRobin:
		rankRoundRobin(in, out)
	case PowerOfTwo:
		rankPowerOfTwo(in, out)
	case Random:
		rankRandom(in, out)
	case Session:
		rankSession(in, out)
	case KVDynamo:
		rankKV(in, out, false)
	case KVBlocks:
		rankKV(in, out, true)
	default:
		out.Policy = KV
		if in.Pricing != nil {
			rankTimes(in, out)
		} else {
			rankKV(in, out, true)
		}
	}
}

// row is the policy's row; an unknown one ranks as KV.
func (p Policy) row() *policy {
	for i := range policies {
		if policies[i].name == p {
			return &policies[i]
		}
	}
	return &policies[0]
}

// Chose says in words why a rank was chosen; empty where its costs say that.
func (p Policy) Chose() string { return p.row().chose }

// CountsRequests reports whether costs count requests rather than blocks.
func (p Policy) CountsRequests() bool { return p.row().requests }

// LooksAtCaches reports whether a choice depends on what ranks hold of the prompt.
func (p Policy) LooksAtCaches() bool { return p.row().caches }

// Policies lists every policy, in the order of the documentation.
func Policies() []Policy {
	list := make([]Policy, len(policies))
	for i := range policies {
		list[i] = policies[i].name
	}
	return list
}

// ParsePolicy reads a policy's name.
func ParsePolicy(s string) (Policy, error) {
	names := make([]string, len(policies))
	for i := range policies {
		if string(policies[i].name) == s {
			return policies[i].name, nil
		}
		names[i] = string(policies[i].name)
	}
	return "", fmt.Errorf("unknown policy %q (one of %s)", s, strings.Join(names, ", "))
}
