package zmtp

import (
	"cmp"
	"errors"
	"fmt"
	"time"
)

var (
	// ErrClosed is returned by operations on a socket or connection that its
	// own side has closed.
	ErrClosed = errors.New("zmtp: closed")
	// ErrProtocol marks bytes that break ZMTP, or a peer of the wrong kind.
	// Dialling the same peer again will most likely meet it again.
	ErrProtocol = errors.New("zmtp: protocol violation")
	// ErrLimit marks a peer that went over one of the Limits. An error that is
	// ErrLimit is not also ErrProtocol.
	ErrLimit = errors.New("zmtp: limit exceeded")
	// ErrHeartbeat is returned when the peer sent nothing in answer to a PING.
	ErrHeartbeat = errors.New("zmtp: peer does not answer heartbeats")
)

// Limits bound what one peer can make this process hold. A zero field means
// its default.
type Limits struct {
	// MaxFrameBytes is the largest body of one message frame.
	MaxFrameBytes int
	// MaxMessageBytes is the largest sum of the frame bodies of one message.
	MaxMessageBytes int
	// MaxFrames is the largest number of frames of one message.
	MaxFrames int
	// MaxCommandBytes is the largest body of one command frame, READY included.
	MaxCommandBytes int
	// MaxSubscriptions is the largest number of distinct topics that one
	// subscriber may hold on a Pub.
	MaxSubscriptions int
}

// Options configure a socket of any role; each field says where it matters.
// The zero value is usable.
type Options struct {
	// Topics are the prefixes that a SUB subscribes to. None means everything.
	Topics []string
	// Identity is announced by DEALER and ROUTER; at most 255 bytes.
	Identity string
	// Limits bound what a peer may send.
	Limits Limits

	// DialTimeout bounds the transport connect, HandshakeTimeout the greeting
	// and READY exchange after it.
	DialTimeout, HandshakeTimeout time.Duration
	// WriteTimeout bounds one write (a command, a Send, one batch of a Pub).
	// A peer that takes nothing for so long is disconnected.
	WriteTimeout time.Duration

	// Heartbeat is the silence after which Recv sends a PING; zero sends none.
	// PINGs of the peer are answered either way.
	Heartbeat time.Duration
	// HeartbeatTimeout is how long after a PING any byte must have arrived;
	// zero means Heartbeat.
	HeartbeatTimeout time.Duration

	// MaxPeers is the number of peers, those in their handshake included, that a bound socket
	// holds at a time. Further ones are disconnected immediately and counted.
	MaxPeers int

	// SendQueue and SendQueueBytes bound the messages waiting for one subscriber
	// of a Pub, in messages and in encoded bytes. A message that finds the queue
	// full is dropped for that subscriber and counted.
	SendQueue, SendQueueBytes int
	// RedialMin and RedialMax are the first and the longest pause between the
	// attempts of a dialling Pub; pauses double and are jittered downwards.
	RedialMin, RedialMax time.Duration
}

func (o Options) withDefaults() (Options, error) {
	o.HeartbeatTimeout = cmp.Or(o.HeartbeatTimeout, o.Heartbeat)
	errs := []error{
		option("MaxFrameBytes", &o.Limits.MaxFrameBytes, 16<<20),
		option("MaxMessageBytes", &o.Limits.MaxMessageBytes, 32<<20),
		option("MaxFrames", &o.Limits.MaxFrames, 16),
		option("MaxCommandBytes", &o.Limits.MaxCommandBytes, 4<<10),
		option("MaxSubscriptions", &o.Limits.MaxSubscriptions, 256),
		option("MaxPeers", &o.MaxPeers, 256),
		option("SendQueue", &o.SendQueue, 4096),
		option("SendQueueBytes", &o.SendQueueBytes, 64<<20),
		option("DialTimeout", &o.DialTimeout, 5*time.Second),
		option("HandshakeTimeout", &o.HandshakeTimeout, 5*time.Second),
		option("WriteTimeout", &o.WriteTimeout, 10*time.Second),
		option("Heartbeat", &o.Heartbeat, 0),
		option("HeartbeatTimeout", &o.HeartbeatTimeout, 0),
		option("RedialMin", &o.RedialMin, 50*time.Millisecond),
		option("RedialMax", &o.RedialMax, 2*time.Second),
	}
	o.RedialMax = max(o.RedialMax, o.RedialMin)
	if len(o.Identity) > 255 {
		errs = append(errs, fmt.Errorf("zmtp: identity of %d bytes is longer than 255", len(o.Identity)))
	}
	if len(o.Topics) == 0 {
		o.Topics = []string{""}
	}
	return o, errors.Join(errs...)
}

// option gives one that was left out its default; below zero it is an error.
func option[T int | time.Duration](name string, p *T, def T) error {
	if *p < 0 {
		return fmt.Errorf("zmtp: option %s is negative: %v", name, *p)
	}
	*p = cmp.Or(*p, def)
	return nil
}

// roleKind is a socket type of the ZMTP specification, spelled as on the wire.
type roleKind string

const (
	roleSub    roleKind = "SUB"
	rolePub    roleKind = "PUB"
	roleDealer roleKind = "DEALER"
	roleRouter roleKind = "ROUTER"
)

// peersOf are the socket types that may talk to a role, by the compatibility
// table of ZMTP 3.1.
var peersOf = map[roleKind][]string{
	roleSub:    {"PUB", "XPUB"},
	rolePub:    {"SUB", "XSUB"},
	roleDealer: {"ROUTER", "DEALER", "REP"},
	roleRouter: {"DEALER", "ROUTER", "REQ"},
}
