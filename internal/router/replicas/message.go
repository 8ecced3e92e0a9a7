package replicas

import (
	"errors"
	"fmt"
	"time"
	"unicode/utf8"

	"github.com/tinylib/msgp/msgp"
)

// wireVersion is the version of the messages that this package writes, and the latest that
// it reads.
const wireVersion = 1

// Message is what routers send each other: a state, or a request for one.
type Message struct {
	// Identity is the sender's. Only full states have its Version and Settings.
	Identity
	// Seq counts the states of an epoch from 1. It is 0 in a request.
	Seq uint64
	// Ask requests the full state of the router with this origin; empty in a state.
	Ask string
	// Full marks a state in which all ranks from From to To are idle except those in Rows.
	// Other states leave ranks that are not in Rows as they were.
	Full     bool
	From, To Rank
	// Rows grow by rank.
	Rows []Row
	// Facts are in states only.
	Facts
}

// The keys of a message's map. Only "v" has a place: it comes first.
const (
	keyVersion  = "v"
	keyFleet    = "f"
	keyOrigin   = "o"
	keyEpoch    = "e" // Unix nanoseconds
	keySeq      = "q"
	keyAsk      = "a"
	keyBuild    = "b"
	keySettings = "s"
	keyFull     = "c" // [from, to]
	keyRows     = "r" // [[rank, requests, answering, prefill, blocks, fresh, cached blocks], …]
	keyOrders   = "d" // [[worker, at, drain], …]
	keyStored   = "n" // [[id, tenant, worker], …]
	keySpent    = "k" // [[key, requests, settled, tokens, settled tokens], …]
	keyEjected  = "j" // [worker, …]
	keyGone     = "g" // true
)

// rowFields is a row's members that this version knows; readers skip further ones.
const rowFields = 7

// The same of an order, of a stored response and of an API key.
const orderFields, storedFields, spentFields = 3, 3, 5

// Append appends the encoded message to b. The caller keeps the limits of this package.
func (m *Message) Append(b []byte) []byte {
	n := uint32(0)
	for _, has := range []bool{m.Seq > 0, m.Ask != "", m.Version != "", m.Settings != "", m.Full, len(m.Rows) > 0, len(m.Orders) > 0, len(m.Stored) > 0, len(m.Spent) > 0, len(m.Ejected) > 0, m.Gone} {
		if has {
			n++
		}
	}
	b = m.appendHead(b, n)
	if m.Seq > 0 {
		b = msgp.AppendUint64(msgp.AppendString(b, keySeq), m.Seq)
	}
	for _, t := range []struct{ key, text string }{{keyAsk, m.Ask}, {keyBuild, m.Version}, {keySettings, m.Settings}} {
		if t.text != "" {
			b = msgp.AppendString(msgp.AppendString(b, t.key), t.text)
		}
	}
	if m.Full {
		b = msgp.AppendArrayHeader(msgp.AppendString(b, keyFull), 2)
		b = msgp.AppendUint64(msgp.AppendUint64(b, uint64(m.From)), uint64(m.To))
	}
	if len(m.Rows) > 0 {
		b = msgp.AppendArrayHeader(msgp.AppendString(b, keyRows), uint32(len(m.Rows)))
		for i := range m.Rows {
			r := &m.Rows[i]
			b = msgp.AppendUint64(msgp.AppendArrayHeader(b, rowFields), uint64(r.Rank))
			for _, f := range r.figures() {
				b = msgp.AppendInt(b, *f)
			}
		}
	}
	if len(m.Orders) > 0 {
		b = msgp.AppendArrayHeader(msgp.AppendString(b, keyOrders), uint32(len(m.Orders)))
		for _, o := range m.Orders {
			b = msgp.AppendUint64(msgp.AppendArrayHeader(b, orderFields), uint64(o.Worker))
			b = msgp.AppendInt(msgp.AppendInt64(b, o.At), o.Drain)
		}
	}
	if len(m.Stored) > 0 {
		b = msgp.AppendArrayHeader(msgp.AppendString(b, keyStored), uint32(len(m.Stored)))
		for _, s := range m.Stored {
			b = msgp.AppendString(msgp.AppendString(msgp.AppendArrayHeader(b, storedFields), s.ID), s.Tenant)
			b = msgp.AppendUint64(b, uint64(s.Worker))
		}
	}
	if len(m.Spent) > 0 {
		b = msgp.AppendArrayHeader(msgp.AppendString(b, keySpent), uint32(len(m.Spent)))
		for _, s := range m.Spent {
			b = msgp.AppendUint64(msgp.AppendUint64(msgp.AppendArrayHeader(b, spentFields), s.Key), s.Requests)
			b = msgp.AppendInt64(msgp.AppendInt64(msgp.AppendUint64(b, s.Settled), s.Tokens), s.SettledTokens)
		}
	}
	if len(m.Ejected) > 0 {
		b = msgp.AppendArrayHeader(msgp.AppendString(b, keyEjected), uint32(len(m.Ejected)))
		for _, w := range m.Ejected {
			b = msgp.AppendUint64(b, uint64(w))
		}
	}
	if m.Gone {
		b = msgp.AppendBool(msgp.AppendString(b, keyGone), true)
	}
	return b
}

// Decode reads a message from b, which it does not keep. It reuses the memory of m's lists. The
// error describes what is wrong with the message; m must not be used then.
func (m *Message) Decode(b []byte) error {
	*m = Message{Rows: m.Rows[:0], Facts: Facts{Orders: m.Orders[:0], Stored: m.Stored[:0], Spent: m.Spent[:0], Ejected: m.Ejected[:0]}}
	if err := m.decode(b); err != nil {
		return fmt.Errorf("message from another router refused: %w", err)
	}
	return nil
}

func (m *Message) decode(b []byte) error {
	if err := m.read(b, m.member); err != nil {
		return err
	}
	switch {
	case (m.Ask == "") != (m.Seq > 0):
		return errors.New("it is neither a state with a sequence number nor a request")
	case m.Full && len(m.Rows) > 0 && (m.Rows[0].Rank < m.From || m.Rows[len(m.Rows)-1].Rank > m.To):
		return errors.New("it has ranks outside the range that it covers")
	}
	return nil
}

// appendHead appends the head of a map with so many members beside the version and the identity.
func (i *Identity) appendHead(b []byte, members uint32) []byte {
	b = msgp.AppendMapHeader(b, 4+members)
	b = msgp.AppendInt(msgp.AppendString(b, keyVersion), wireVersion)
	b = msgp.AppendString(msgp.AppendString(b, keyFleet), i.Fleet)
	b = msgp.AppendString(msgp.AppendString(b, keyOrigin), i.Origin)
	return msgp.AppendInt64(msgp.AppendString(b, keyEpoch), i.Epoch.UnixNano())
}

// read reads the map of a message. It calls member with each further key and what follows it,
// and takes back what follows the value.
func (i *Identity) read(b []byte, member func(key string, b []byte) (rest []byte, err error)) error {
	if len(b) > MaxMessage {
		return fmt.Errorf("it has %d bytes, at most %d are read", len(b), MaxMessage)
	}
	n, b, err := msgp.ReadMapHeaderBytes(b)
	if err != nil {
		return err
	}
	for k := range n {
		key, rest, err := msgp.ReadStringZC(b)
		if err != nil {
			return err
		}
		if (string(key) == keyVersion) != (k == 0) {
			return fmt.Errorf("its member %d is %.20q; the version %q comes first, and once", k+1, key, keyVersion)
		}
		switch string(key) {
		case keyVersion:
			b, err = readVersion(rest)
		case keyFleet:
			i.Fleet, b, err = readText(rest)
		case keyOrigin:
			i.Origin, b, err = readText(rest)
		case keyEpoch:
			i.Epoch, b, err = readTime(rest)
		default:
			b, err = member(string(key), rest)
		}
		if err != nil {
			return fmt.Errorf("member %.20q: %w", key, err)
		}
	}
	switch {
	case len(b) > 0:
		return fmt.Errorf("%d bytes follow its end", len(b))
	case i.Origin == "":
		return errors.New("it names no origin")
	case i.Epoch.IsZero():
		return errors.New("it has no epoch")
	}
	return nil
}

// member reads the value of one member, and returns what follows it.
func (m *Message) member(key string, b []byte) (rest []byte, err error) {
	switch key {
	case keySeq:
		m.Seq, rest, err = msgp.ReadUint64Bytes(b)
	case keyAsk:
		m.Ask, rest, err = readText(b)
	case keyBuild:
		m.Version, rest, err = readText(b)
	case keySettings:
		m.Settings, rest, err = readText(b)
	case keyFull:
		return m.readFull(b)
	case keyRows:
		return m.readRows(b)
	case keyOrders:
		return m.readOrders(b)
	case keyStored:
		return m.readStored(b)
	case keySpent:
		return m.readSpent(b)
	case keyEjected:
		return m.readEjected(b)
	case keyGone:
		m.Gone, rest, err = msgp.ReadBoolBytes(b)
	default:
		return msgp.Skip(b)
	}
	return rest, err
}

func readVersion(b []byte) ([]byte, error) {
	v, b, err := msgp.ReadInt64Bytes(b)
	if err == nil && (v < 1 || v > wireVersion) {
		err = fmt.Errorf("it is version %d, this router reads up to %d: update the older router", v, wireVersion)
	}
	return b, err
}

func readTime(b []byte) (time.Time, []byte, error) {
	ns, b, err := msgp.ReadInt64Bytes(b)
	return time.Unix(0, ns), b, err
}

func readText(b []byte) (text string, rest []byte, err error) {
	s, rest, err := msgp.ReadStringZC(b)
	switch {
	case err != nil:
		return "", nil, err
	case len(s) > MaxText:
		return "", nil, fmt.Errorf("%d bytes of text, at most %d are read", len(s), MaxText)
	case !utf8.Valid(s):
		return "", nil, errors.New("text that is not UTF-8")
	}
	return string(s), rest, nil
}

func (m *Message) readFull(b []byte) ([]byte, error) {
	n, b, err := msgp.ReadArrayHeaderBytes(b)
	if err != nil {
		return nil, err
	}
	if n != 2 {
		return nil, fmt.Errorf("a range of %d ranks, want its first and last", n)
	}
	from, b, err := msgp.ReadUint64Bytes(b)
	if err != nil {
		return nil, err
	}
	to, b, err := msgp.ReadUint64Bytes(b)
	if err == nil && from > to {
		err = errors.New("a range whose first rank comes after its last")
	}
	m.Full, m.From, m.To = true, Rank(from), Rank(to)
	return b, err
}

func (m *Message) readRows(b []byte) ([]byte, error) {
	m.Rows = m.Rows[:0]
	return readList(b, MaxRows, rowFields, "ranks", func(b []byte) ([]byte, error) {
		rank, b, err := msgp.ReadUint64Bytes(b)
		if err != nil {
			return nil, err
		}
		r := Row{Rank: Rank(rank)}
		if len(m.Rows) > 0 && r.Rank <= m.Rows[len(m.Rows)-1].Rank {
			return nil, errors.New("ranks that do not grow")
		}
		for _, f := range r.figures() {
			var v int64
			if v, b, err = msgp.ReadInt64Bytes(b); err != nil {
				return nil, err
			}
			if v < 0 || v > MaxAmount {
				return nil, fmt.Errorf("rank %x: amount %d is not from 0 to %d", rank, v, MaxAmount)
			}
			*f = int(v)
		}
		if r.CachedBlocks > r.DecodeBlocks {
			return nil, fmt.Errorf("rank %x: %d cached blocks of %d", rank, r.CachedBlocks, r.DecodeBlocks)
		}
		m.Rows = append(m.Rows, r)
		return b, nil
	})
}

// readList reads a list of at most limit rows, of which each has fields members that read
// knows, and perhaps others.
func readList(b []byte, limit, fields uint32, what string, read func(b []byte) ([]byte, error)) ([]byte, error) {
	n, b, err := msgp.ReadArrayHeaderBytes(b)
	if err != nil {
		return nil, err
	}
	if n > limit {
		return nil, fmt.Errorf("%d %s, at most %d are read", n, what, limit)
	}
	for range n {
		var has uint32
		if has, b, err = msgp.ReadArrayHeaderBytes(b); err != nil {
			return nil, err
		}
		if has < fields {
			return nil, fmt.Errorf("one of the %s has %d members, want at least %d", what, has, fields)
		}
		if b, err = read(b); err != nil {
			return nil, err
		}
		for range has - fields {
			if b, err = msgp.Skip(b); err != nil {
				return nil, err
			}
		}
	}
	return b, nil
}

func (m *Message) readOrders(b []byte) ([]byte, error) {
	m.Orders = m.Orders[:0]
	return readList(b, MaxOrders, orderFields, "orders", func(b []byte) ([]byte, error) {
		worker, b, err := msgp.ReadUint64Bytes(b)
		if err != nil {
			return nil, err
		}
		at, b, err := msgp.ReadInt64Bytes(b)
		if err != nil {
			return nil, err
		}
		drain, b, err := msgp.ReadInt64Bytes(b)
		if err == nil && (drain < Resumed || drain > Moved) {
			err = fmt.Errorf("order %d is not in %d to %d", drain, Resumed, Moved)
		}
		m.Orders = append(m.Orders, Order{Rank(worker), at, int(drain)})
		return b, err
	})
}

func (m *Message) readStored(b []byte) ([]byte, error) {
	m.Stored = m.Stored[:0]
	return readList(b, MaxStored, storedFields, "stored responses", func(b []byte) (_ []byte, err error) {
		var s Stored
		if s.ID, b, err = readText(b); err != nil {
			return nil, err
		}
		if s.Tenant, b, err = readText(b); err != nil {
			return nil, err
		}
		worker, b, err := msgp.ReadUint64Bytes(b)
		s.Worker = Rank(worker)
		m.Stored = append(m.Stored, s)
		return b, err
	})
}

func (m *Message) readSpent(b []byte) ([]byte, error) {
	m.Spent = m.Spent[:0]
	return readList(b, MaxSpent, spentFields, "keys", func(b []byte) (_ []byte, err error) {
		var s Spent
		for _, v := range []*uint64{&s.Key, &s.Requests, &s.Settled} {
			if *v, b, err = msgp.ReadUint64Bytes(b); err != nil {
				return nil, err
			}
		}
		if s.Tokens, b, err = msgp.ReadInt64Bytes(b); err != nil {
			return nil, err
		}
		s.SettledTokens, b, err = msgp.ReadInt64Bytes(b)
		if err == nil && s.Settled > s.Requests {
			err = errors.New("a key with fewer requests than before")
		}
		m.Spent = append(m.Spent, s)
		return b, err
	})
}

func (m *Message) readEjected(b []byte) ([]byte, error) {
	m.Ejected = m.Ejected[:0]
	n, b, err := msgp.ReadArrayHeaderBytes(b)
	if err == nil && n > MaxOrders {
		err = fmt.Errorf("%d ejected workers, at most %d are read", n, MaxOrders)
	}
	if err != nil {
		return nil, err
	}
	for range n {
		var w uint64
		if w, b, err = msgp.ReadUint64Bytes(b); err != nil {
			return nil, err
		}
		m.Ejected = append(m.Ejected, Rank(w))
	}
	return b, nil
}
