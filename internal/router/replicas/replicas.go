// Package replicas exchanges load between the routers of one fleet. Each router publishes
// the load of its own requests on each rank, and adds up what the others publish.
//
// Routers publish states, never events. A row is the whole load of one router on one rank,
// so it replaces what the receiver had. A lost, doubled, late or reordered message heals
// with a later one, and the transport may do all of that.
//
//   - [Publisher] decides when a router publishes what.
//   - [View] keeps what other routers published, and adds it up.
//   - [Message] is what they exchange, as msgpack.
//   - [Exchange] runs a publisher and a view on a [Transport].
//
// Publisher and View are given the time; they have no timers and no goroutines. The
// receiver takes ages from arrival times, so the clocks of routers need not agree.
package replicas

import (
	"errors"
	"fmt"
	"strconv"
	"time"
	"unicode/utf8"

	"github.com/zeebo/xxh3"
)

// The rhythm of a router that publishes, and how long its load counts.
const (
	// Pace is the least time between two messages about changes, and between two full
	// states that other routers request.
	Pace = 50 * time.Millisecond
	// Heartbeat is the longest time between two messages, and the least time between two
	// requests for the full state of one router.
	Heartbeat = 250 * time.Millisecond
	// FullEvery is the longest time between two full states.
	FullEvery = time.Second
	// Lifetime is how long a router counts without a message from it.
	Lifetime = time.Second
)

// Limits of what one router takes from others.
const (
	// MaxOrigins is the number of other routers. When it is reached, a new one takes the
	// place of the one that has been silent longest; if all of them are live, its
	// messages are refused and counted.
	MaxOrigins = 32
	// MaxMessage is the size of a message in bytes.
	MaxMessage = 256 << 10
	// MaxRows is the number of ranks in a message. A publisher splits larger states. With the longest
	// amounts and all facts they fit in MaxMessage.
	MaxRows = 3584
	// MaxText is the length in bytes of each text in a message.
	MaxText = 256
	// MaxOrders is the number of orders or ejected workers in a message.
	MaxOrders = 512
	// MaxStored is the number of stored responses in a message.
	MaxStored = 128
	// MaxSpent is the number of API keys in a message.
	MaxSpent = 512
	// MaxAmount is the largest figure of a [Load] in a message.
	MaxAmount = 1<<31 - 1
)

// Rank identifies a rank in messages. All routers of a fleet compute the same one, whatever
// they call its worker.
type Rank uint64

// RankOf is the rank with a data-parallel number behind a worker's base URL. Two routers
// must reach the worker by the same URL.
func RankOf(url string, dp int) Rank {
	return Rank(xxh3.HashString(url + "/dp" + strconv.Itoa(dp)))
}

// Load is work in flight on a rank.
type Load struct {
	// Requests is the number of requests, Answering how many of them have their first
	// token.
	Requests, Answering int
	// PrefillTokens is the uncached prompt tokens without a first token yet.
	PrefillTokens int
	// DecodeBlocks is the KV blocks that the requests hold, CachedBlocks how many of them the
	// rank had before, so that several requests may hold the same.
	DecodeBlocks, CachedBlocks int
	// FreshTokens is the uncached prompt tokens that the rank was given recently, as they
	// fade at the router that publishes them.
	FreshTokens int
}

func (l *Load) figures() [6]*int {
	return [...]*int{&l.Requests, &l.Answering, &l.PrefillTokens, &l.DecodeBlocks, &l.FreshTokens, &l.CachedBlocks}
}

func (l *Load) add(other *Load) {
	l.Requests += other.Requests
	l.Answering += other.Answering
	l.PrefillTokens += other.PrefillTokens
	l.DecodeBlocks += other.DecodeBlocks
	l.CachedBlocks += other.CachedBlocks
	l.FreshTokens += other.FreshTokens
}

// limit moves each figure into the range from 0 to MaxAmount.
func (l *Load) limit() {
	for _, f := range l.figures() {
		*f = min(max(*f, 0), MaxAmount)
	}
	l.CachedBlocks = min(l.CachedBlocks, l.DecodeBlocks)
}

// Row is the load of one router on one rank.
type Row struct {
	Rank Rank
	Load
}

// WorkerOf is the name of a worker in messages, by its base URL.
func WorkerOf(url string) Rank { return Rank(xxh3.HashString(url)) }

// Facts are what routers share beside load. They are absolute, too: a receiver may take them
// in any order, and more than once.
type Facts struct {
	// Orders are operators' drains. Of two about one worker the later one counts.
	Orders []Order
	// Stored are responses that workers keep.
	Stored []Stored
	// Spent is what API keys let through at the sender.
	Spent []Spent
	// Ejected are the workers that the sender has ejected. Only full states have them, in
	// their first message.
	Ejected []Rank
	// Gone is the last message of a router that ends.
	Gone bool
}

// Order is an operator's word on a worker.
type Order struct {
	// Worker is its [WorkerOf].
	Worker Rank
	// At orders the words on one worker: Unix nanoseconds, and more than those of every
	// earlier word that the router knew.
	At int64
	// Drain is one of the values below.
	Drain int
}

// The values of [Order.Drain].
const (
	Resumed = iota // it takes requests again
	Drained        // it takes no new requests
	Moved          // and its streams continue elsewhere, where they can
)

// Replaces reports whether the order counts instead of another one on the same worker.
func (o *Order) Replaces(other *Order) bool {
	return o.At > other.At || o.At == other.At && o.Drain > other.Drain
}

// Stored is a response that a worker keeps.
type Stored struct {
	// ID is the response's, Tenant whose it is; empty without API keys. Both have at most
	// [MaxText] bytes.
	ID, Tenant string
	// Worker is the [WorkerOf] the one that has it.
	Worker Rank
}

// Spent is what one API key let through at one router since its process began.
type Spent struct {
	// Key is a hash of the key's name.
	Key uint64
	// Requests that began, and how many of them began before the key was idle last: a receiver
	// that hears of the key for the first time knows of the difference that it is recent.
	Requests, Settled uint64
	// Tokens that they used, and how many of them before the key was idle last.
	Tokens, SettledTokens int64
}

// Identity is a router as it shows itself to others.
type Identity struct {
	// Fleet names the fleet. Routers take no load from another one.
	Fleet string
	// Origin is unique among the routers of the fleet. It may stay over restarts.
	Origin string
	// Epoch is when the process started. Its messages replace those of an earlier one.
	Epoch time.Time
	// Version is the router's build, Settings a digest of its settings. Both are for
	// display and may differ.
	Version, Settings string
}

// check returns what would make other routers refuse the identity.
func (i *Identity) check() error {
	if i.Origin == "" || i.Epoch.IsZero() {
		return errors.New("replicas: a router needs an origin and the time of its start")
	}
	for _, t := range []string{i.Fleet, i.Origin, i.Version, i.Settings} {
		if len(t) > MaxText || !utf8.ValidString(t) {
			return fmt.Errorf("replicas: %.40q… is not UTF-8 of at most %d bytes", t, MaxText)
		}
	}
	return nil
}
