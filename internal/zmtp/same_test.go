package zmtp

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// The tests of this file say the same bytes to a PUB of libzmq and to one of
// this package and compare what each does, so that a simulated engine is as
// strict as a real one.

// publisherUnderTest is a bound PUB that publishes on demand.
type publisherUnderTest struct {
	name, endpoint string
	publish        func(topic string)
}

func publishersUnderTest(t *testing.T) []publisherUnderTest {
	t.Helper()
	theirs := startPeer(t, "pub-bind", "tcp://127.0.0.1:*")
	ours := listenPub(t, "tcp://127.0.0.1:0", Options{})
	return []publisherUnderTest{
		{"libzmq", theirs.endpoint, func(topic string) { theirs.command("send 1 3 %s", topic) }},
		{"dynctl", ours.Endpoint(), func(topic string) { ours.Send([]byte(topic), make([]byte, 8), make([]byte, 3)) }},
	}
}

// rawSub is a subscriber made of bytes.
type rawSub struct {
	t     *testing.T
	name  string // of its topics
	nc    net.Conn
	br    *bufio.Reader
	seen  []string // what the publisher did, in order, but for marks
	mark  string   // the latest
	marks int
}

func dialRaw(t *testing.T, endpoint, name string) *rawSub {
	t.Helper()
	nc, err := net.Dial("tcp", strings.TrimPrefix(endpoint, "tcp://"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { nc.Close() })
	return &rawSub{t: t, name: name, nc: nc, br: bufio.NewReader(nc)}
}

// say sends bytes. A publisher that has hung up is noticed when it is read from.
func (s *rawSub) say(b []byte) { _, _ = s.nc.Write(b) }

// see reads one message or command for up to limit and notes it. It returns
// false when none came: the publisher is silent, or has hung up, which is noted.
func (s *rawSub) see(limit time.Duration) bool {
	s.t.Helper()
	if err := s.nc.SetReadDeadline(time.Now().Add(limit)); err != nil {
		s.t.Fatal(err)
	}
	if _, err := s.br.Peek(1); errors.Is(err, os.ErrDeadlineExceeded) {
		return false
	}
	if err := s.nc.SetReadDeadline(time.Now().Add(20 * time.Second)); err != nil {
		s.t.Fatal(err)
	}
	var frames []string
	for {
		flags, body, err := readFrame(s.br)
		if err != nil {
			s.note("closed")
			return false
		}
		if flags&flagCommand != 0 {
			s.note("command %q", body)
			return true
		}
		if frames = append(frames, string(body)); flags&flagMore == 0 {
			break
		}
	}
	if strings.HasPrefix(frames[0], "!") {
		s.mark = frames[0]
		return true
	}
	if len(frames) > 1 {
		frames[1] = "sequence" // each publisher counts its own
	}
	s.note("message %q", frames)
	return true
}

func readFrame(br *bufio.Reader) (flags byte, body []byte, err error) {
	if flags, err = br.ReadByte(); err != nil {
		return flags, nil, err
	}
	var size uint64
	if flags&flagLong != 0 {
		err = binary.Read(br, binary.BigEndian, &size)
	} else {
		var short byte
		short, err = br.ReadByte()
		size = uint64(short)
	}
	if err != nil {
		return flags, nil, err
	}
	body = make([]byte, min(size, 1<<20))
	_, err = io.ReadFull(br, body)
	return flags, body, err
}

func (s *rawSub) note(format string, a ...any) { s.seen = append(s.seen, fmt.Sprintf(format, a...)) }

func (s *rawSub) closed() bool { return len(s.seen) > 0 && s.seen[len(s.seen)-1] == "closed" }

// fence waits for the answer to a last PING, or for the end.
func (s *rawSub) fence() {
	s.t.Helper()
	want := fmt.Sprintf("command %q", "\x04PONGfence")
	for s.say(ping(0, "fence")); !s.closed() && s.seen[len(s.seen)-1] != want; {
		if !s.see(20*time.Second) && !s.closed() {
			s.t.Fatalf("neither a PONG nor the end: %q", s.seen)
		}
	}
}

// publish lets p publish once it has obeyed all that was said: libzmq's PUB
// looks at subscriptions now and then only. It has when a mark arrives, whose
// subscription was the last.
func (s *rawSub) publish(p publisherUnderTest, topic string) {
	s.t.Helper()
	s.marks++
	mark := fmt.Sprintf("!%s%d:", s.name, s.marks)
	s.say(appendFrame(nil, append([]byte{1}, mark...), false))
	for s.mark != mark+"look" && !s.closed() {
		p.publish(mark + "look")
		s.see(20 * time.Millisecond)
	}
	p.publish(topic)
	p.publish(mark + "end")
	for s.mark != mark+"end" && !s.closed() {
		if !s.see(20*time.Second) && !s.closed() {
			s.t.Fatalf("the publisher says nothing: %q", s.seen)
		}
	}
}

func ping(ttl uint16, context string) []byte {
	return appendCommand(nil, "PING", binary.BigEndian.AppendUint16(nil, ttl), []byte(context))
}

// step does one thing to a publisher. Topics begin with the subscriber's name,
// so that many can share a publisher.
//
//	hello [AT VALUE]     greeting and READY, one byte of them another one
//	sub|cancel TOPIC     as commands; subscribe|unsubscribe as messages
//	ping TTL CONTEXT, pong, command NAME, message TEXT, half
//	publish TOPIC        once all that was said has been obeyed
//	wait TIME            in which the publisher may hang up
func (s *rawSub) step(p publisherUnderTest, line string) {
	s.t.Helper()
	if s.closed() {
		return
	}
	word, rest, _ := strings.Cut(line, " ")
	topic := s.name + rest
	switch word {
	case "hello":
		h := hello(roleSub)
		if rest != "" {
			var at int
			var b byte
			if _, err := fmt.Sscan(rest, &at, &b); err != nil {
				s.t.Fatal(err)
			}
			h[at] = b
		}
		s.say(h)
		s.greeted()
	case "sub", "cancel":
		s.say(appendCommand(nil, map[string]string{"sub": "SUBSCRIBE", "cancel": "CANCEL"}[word], []byte(topic)))
	case "subscribe":
		s.say(appendFrame(nil, append([]byte{1}, topic...), false))
	case "unsubscribe":
		s.say(appendFrame(nil, append([]byte{0}, topic...), false))
	case "ping":
		ttl, context, _ := strings.Cut(rest, " ")
		n, err := strconv.ParseUint(ttl, 10, 16)
		if err != nil {
			s.t.Fatal(err)
		}
		s.say(ping(uint16(n), context))
	case "pong":
		s.say(appendCommand(nil, "PONG"))
	case "command":
		s.say(appendCommand(nil, rest, []byte("data")))
	case "message":
		s.say(appendFrame(nil, []byte(rest), false))
	case "half":
		s.say(appendCommand(nil, "PONG")[:4])
	case "publish":
		s.publish(p, topic)
	case "wait":
		d, err := time.ParseDuration(rest)
		if err != nil {
			s.t.Fatal(err)
		}
		for end := time.Now().Add(d); time.Now().Before(end) && !s.closed(); {
			s.see(time.Until(end))
		}
		if !s.closed() {
			s.note("open after %v", d)
		}
	default:
		s.t.Fatalf("no step %q", line)
	}
}

// greeted takes the publisher's greeting, in which older peers' lengths differ.
func (s *rawSub) greeted() {
	s.t.Helper()
	if err := s.nc.SetReadDeadline(time.Now().Add(20 * time.Second)); err != nil {
		s.t.Fatal(err)
	}
	if _, err := io.ReadFull(s.br, make([]byte, greetingSize)); errors.Is(err, os.ErrDeadlineExceeded) {
		s.t.Fatal("no greeting")
	} else if err != nil {
		s.note("closed")
	}
}

// same runs a script against both publishers and compares.
func same(t *testing.T, pubs []publisherUnderTest, name string, script []string) {
	t.Helper()
	var did [][][]string
	for _, p := range pubs {
		s := dialRaw(t, p.endpoint, name)
		for _, line := range script {
			s.step(p, line)
		}
		s.fence()
		// A PONG and a message may overtake each other: two threads make them.
		pongs := func(line string) bool { return strings.Contains(line, "PONG") }
		messages := slices.DeleteFunc(slices.Clone(s.seen), pongs)
		did = append(did, [][]string{messages, slices.DeleteFunc(s.seen, func(line string) bool { return !pongs(line) })})
	}
	if diff := cmp.Diff(did[0], did[1]); diff != "" {
		t.Errorf("after\n\t%s\n- %s + %s:\n%s", strings.Join(script, "\n\t"), pubs[0].name, pubs[1].name, diff)
	}
}

// TestLibzmqSame: whatever a subscriber says, a Pub does what libzmq's does.
func TestLibzmqSame(t *testing.T) {
	t.Parallel()
	pubs := publishersUnderTest(t)
	i := 0
	for name, script := range map[string]string{
		"nothing said":                 "hello, wait 300ms",
		"everything":                   "hello, sub, publish kv",
		"topic as a message of 3.0":    "hello 11 0, subscribe, publish kv",
		"topic as a message of 3.1":    "hello, subscribe, publish kv, unsubscribe, publish kv",
		"topic as a command of 3.0":    "hello 11 0, sub, publish kv",
		"a later minor version":        "hello 11 7, sub, publish kv",
		"another mechanism":            "hello 12 80, wait 300ms",
		"said twice, taken back once":  "hello, sub k, sub k, cancel k, publish kv",
		"taken back without":           "hello, cancel k, publish kv",
		"two topics for one message":   "hello, sub, sub k, publish kv, cancel k, publish kv",
		"a longer topic":               "hello, sub kv@, publish kv",
		"an unknown command":           "hello, command FUTURE, sub, publish kv",
		"a command of the handshake":   "hello, command READY, sub, publish kv",
		"a message upstream":           "hello, message hi, sub, publish kv",
		"PINGs":                        "hello, ping 0, ping 0 sixteen bytes ok, ping 0 seventeen bytes x, wait 300ms",
		"time to live ends":            "hello, ping 3, wait 10s",
		"no time to live":              "hello, ping 0, wait 700ms, publish kv",
		"anything ends the count":      "hello, ping 3, sub, wait 700ms, publish kv",
		"a PONG ends the count":        "hello, ping 3, pong, wait 700ms, publish kv",
		"half a frame does not":        "hello, ping 3, half, wait 10s",
		"a PING begins the count anew": "hello, ping 3, ping 100, wait 700ms, publish kv",
		"a PING without ends it":       "hello, ping 3, ping 0, wait 700ms, publish kv",
		"time to live of 65.6 s":       "hello, ping 656, wait 2s",
		"time to live of 65.5 s":       "hello, ping 655, wait 700ms, publish kv",
	} {
		i++
		topics := fmt.Sprintf("%d.", i)
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			same(t, pubs, topics, strings.Split(script, ", "))
		})
	}
}

// TestLibzmqSameRandom does the same with scripts that nobody thought of.
func TestLibzmqSameRandom(t *testing.T) {
	t.Parallel()
	pubs := publishersUnderTest(t)
	words := []string{
		"sub", "sub k", "sub kv", "sub kv@", "sub x", "cancel", "cancel k", "cancel kv", "subscribe", "subscribe kv", "unsubscribe", "unsubscribe kv",
		"ping 0", "ping 0 abc", "ping 300", "pong", "publish kv", "publish kv@1", "publish k", "publish", "message hi", "command FUTURE",
	}
	for seed := range uint64(40) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			rng := rand.New(rand.NewPCG(seed, 1))
			script := []string{"hello"}
			if seed%4 == 0 {
				script[0] = "hello 11 0"
			}
			for range 3 + rng.IntN(20) {
				script = append(script, words[rng.IntN(len(words))])
			}
			same(t, pubs, fmt.Sprintf("%d.", seed), append(script, "publish kv@2"))
		})
	}
}
