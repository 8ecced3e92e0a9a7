package replicas

import (
	"bytes"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tinylib/msgp/msgp"
)

// wire returns a message that a router of fleet "a" would send, with some of its members
// replaced or added. A value is the encoded one.
func wire(members map[string][]byte) []byte {
	all := map[string][]byte{
		keyFleet:  msgp.AppendString(nil, "a"),
		keyOrigin: msgp.AppendString(nil, "router-1"),
		keyEpoch:  msgp.AppendInt64(nil, start.UnixNano()),
		keySeq:    msgp.AppendUint64(nil, 1),
	}
	for k, v := range members {
		all[k] = v
	}
	version, ok := members[keyVersion]
	if !ok {
		version = msgp.AppendInt(nil, wireVersion)
	}
	delete(all, keyVersion)
	b := msgp.AppendMapHeader(nil, uint32(1+len(all)))
	b = append(msgp.AppendString(b, keyVersion), version...)
	for k, v := range all {
		b = append(msgp.AppendString(b, k), v...)
	}
	return b
}

// row is an encoded row.
func row(members ...int64) []byte {
	b := msgp.AppendArrayHeader(nil, uint32(len(members)))
	for _, v := range members {
		b = msgp.AppendInt64(b, v)
	}
	return b
}

func rows(list ...[]byte) []byte {
	return append(msgp.AppendArrayHeader(nil, uint32(len(list))), bytes.Join(list, nil)...)
}

func TestMessageRoundTrip(t *testing.T) {
	self := Identity{Fleet: "a", Origin: "router-1", Epoch: start, Version: "v1.2", Settings: "5e7"}
	for _, m := range []Message{
		{Identity: Identity{Fleet: "a", Origin: "router-1", Epoch: start}, Seq: 1},
		{Identity: Identity{Origin: "router-1", Epoch: start}, Ask: "router-2"},
		{Identity: self, Seq: math.MaxUint64, Full: true, To: math.MaxUint64},
		{Identity: self, Seq: 7, Full: true, From: 3, To: 9, Rows: []Row{{3, Load{1, 0, 5, 70000, 69999, MaxAmount}}, {9, Load{}}}},
		{Identity: self, Seq: 9, Facts: Facts{Orders: []Order{{1, 2, Moved}, {math.MaxUint64, -1, Resumed}}, Stored: []Stored{{"resp_1", "team-a", 7}, {Worker: 8}}, Spent: []Spent{{math.MaxUint64, 9, 8, -7, -8}}, Ejected: []Rank{1, math.MaxUint64}, Gone: true}},
		{Identity: self, Seq: 8, Rows: []Row{{0, Load{Requests: 1}}, {math.MaxUint64, Load{FreshTokens: 1}}}},
	} {
		var got Message
		if err := got.Decode(m.Append(nil)); err != nil {
			t.Fatalf("%+v: %v", m, err)
		}
		if len(m.Rows) == 0 {
			got.Rows = nil
		}
		if len(m.Orders) == 0 {
			got.Orders, got.Stored, got.Spent, got.Ejected = nil, nil, nil, nil
		}
		if !reflect.DeepEqual(got, m) {
			t.Errorf("got %+v, want %+v", got, m)
		}
	}
}

// TestMessageOfLaterRouter: members and figures that this version does not know are no
// fault; a later version of the message is.
func TestMessageOfLaterRouter(t *testing.T) {
	var m Message
	err := m.Decode(wire(map[string][]byte{
		"new":   rows(row(1, 2), row(3)),
		keyRows: rows(row(5, 1, 2, 3, 4, 5, 4, 7), row(6, 9, 9, 9, 9, 9, 0)),
	}))
	if want := []Row{{5, Load{1, 2, 3, 4, 4, 5}}, {6, Load{9, 9, 9, 9, 0, 9}}}; err != nil || !slices.Equal(m.Rows, want) {
		t.Errorf("got %+v, %v, want %+v", m.Rows, err, want)
	}
	if err := m.Decode(wire(map[string][]byte{keyVersion: msgp.AppendInt(nil, 2)})); err == nil || !strings.Contains(err.Error(), "version 2") {
		t.Errorf("got %v", err)
	}
}

func TestHostileMessages(t *testing.T) {
	million := msgp.AppendArrayHeader(nil, 1_000_000)
	var sorted [][]byte
	for i := range int64(MaxRows + 1) {
		sorted = append(sorted, row(i, 1, 1, 1, 1, 1, 1))
	}
	for _, c := range []struct {
		name    string
		message []byte
		want    string
	}{
		{"empty", nil, "msgp"},
		{"1 GB", make([]byte, 1<<30), "1073741824 bytes, at most 262144"},
		{"a million ranks", wire(map[string][]byte{keyRows: million}), "1000000 ranks, at most 3584"},
		{"a million orders", wire(map[string][]byte{keyOrders: million}), "1000000 orders, at most 512"},
		{"an unknown order", wire(map[string][]byte{keyOrders: rows(row(1, 1, 3))}), "order 3 is not in"},
		{"a million responses", wire(map[string][]byte{keyStored: million}), "1000000 stored responses, at most 128"},
		{"a million keys", wire(map[string][]byte{keySpent: million}), "1000000 keys, at most 512"},
		{"a key that counts back", wire(map[string][]byte{keySpent: rows(row(1, 2, 3, 4, 5))}), "fewer requests than before"},
		{"a million ejections", wire(map[string][]byte{keyEjected: million}), "1000000 ejected workers, at most 512"},
		{"a long response id", wire(map[string][]byte{keyStored: rows(append(msgp.AppendString(msgp.AppendArrayHeader(nil, 3), strings.Repeat("x", MaxText+1)), 0xa0, 1))}), "257 bytes of text"},
		{"a rank too many", wire(map[string][]byte{keyRows: rows(sorted...)}), "3585 ranks"},
		{"a negative amount", wire(map[string][]byte{keyRows: rows(row(1, 1, 1, -3, 1, 1, 1))}), "amount -3 is not from 0"},
		{"a huge amount", wire(map[string][]byte{keyRows: rows(row(1, 1<<31, 1, 1, 1, 1, 1))}), "amount 2147483648"},
		{"a negative rank", wire(map[string][]byte{keyRows: rows(row(-1, 1, 1, 1, 1, 1, 1))}), "msgp"},
		{"a short row", wire(map[string][]byte{keyRows: rows(row(1, 1, 1, 1, 1, 1))}), "has 6 members, want at least 7"},
		{"more cached blocks than blocks", wire(map[string][]byte{keyRows: rows(row(1, 1, 1, 1, 4, 1, 5))}), "5 cached blocks of 4"},
		{"the same rank twice", wire(map[string][]byte{keyRows: rows(row(1, 1, 1, 1, 1, 1, 1), row(1, 1, 1, 1, 1, 1, 1))}), "do not grow"},
		{"ranks out of range", wire(map[string][]byte{keyFull: row(2, 3), keyRows: rows(row(1, 1, 1, 1, 1, 1, 1))}), "outside the range"},
		{"a reversed range", wire(map[string][]byte{keyFull: row(3, 2)}), "first rank comes after"},
		{"a range of three", wire(map[string][]byte{keyFull: row(1, 2, 3)}), "a range of 3"},
		{"no origin", wire(map[string][]byte{keyOrigin: msgp.AppendString(nil, "")}), "no origin"},
		{"a long origin", wire(map[string][]byte{keyOrigin: msgp.AppendString(nil, strings.Repeat("x", MaxText+1))}), "257 bytes of text"},
		{"an origin that is no text", wire(map[string][]byte{keyOrigin: msgp.AppendString(nil, "\xff")}), "not UTF-8"},
		{"neither state nor request", wire(map[string][]byte{keySeq: msgp.AppendUint64(nil, 0)}), "neither"},
		{"both", wire(map[string][]byte{keyAsk: msgp.AppendString(nil, "x")}), "neither"},
		{"version 0", wire(map[string][]byte{keyVersion: msgp.AppendInt(nil, 0)}), "version 0"},
		{"more after its end", append(wire(nil), 0), "1 bytes follow"},
		{"deep nesting", wire(map[string][]byte{"x": bytes.Repeat([]byte{0x91}, MaxMessage-200)}), "msgp"},
		{"no version", msgp.AppendString(msgp.AppendString(msgp.AppendMapHeader(nil, 1), keyFleet), "a"), "comes first"},
		{"a map of 4 billion", msgp.AppendMapHeader(nil, math.MaxUint32), "msgp"},
	} {
		t.Run(c.name, func(t *testing.T) {
			var m Message
			if err := m.Decode(c.message); err == nil || !strings.Contains(err.Error(), c.want) || len(err.Error()) > 200 {
				t.Errorf("got %v, want %q", err, c.want)
			}
		})
	}
	for n := range len(wire(nil)) {
		var m Message
		if err := m.Decode(wire(nil)[:n]); err == nil {
			t.Errorf("the first %d bytes of a message are read as one", n)
		}
	}
}

// FuzzMessage: what is read is within the limits, and is the same when written and read again.
func FuzzMessage(f *testing.F) {
	f.Add(wire(nil))
	f.Add(wire(map[string][]byte{keyFull: row(0, 9), keyRows: rows(row(5, 1, 2, 3, 4, 5))}))
	f.Add(wire(map[string][]byte{keySeq: msgp.AppendUint64(nil, 0), keyAsk: msgp.AppendString(nil, "router-2")}))
	f.Add(wire(map[string][]byte{keyOrders: rows(row(1, 2, 0)), keyStored: rows([]byte{0x93, 0xa1, 'r', 0xa0, 1}), keySpent: rows(row(1, 2, 2, 4, 3)), keyEjected: row(4, 5), keyGone: {0xc3}}))
	f.Fuzz(func(t *testing.T, b []byte) {
		var m, again Message
		if m.Decode(b) != nil {
			return
		}
		for i, r := range m.Rows {
			for _, v := range r.figures() {
				if *v < 0 || *v > MaxAmount {
					t.Fatalf("%+v", r)
				}
			}
			if i > 0 && r.Rank <= m.Rows[i-1].Rank {
				t.Fatalf("%+v", m.Rows)
			}
		}
		if len(m.Orders) > MaxOrders || len(m.Stored) > MaxStored || len(m.Spent) > MaxSpent || len(m.Ejected) > MaxOrders {
			t.Fatalf("%+v", m)
		}
		if len(m.Rows) > MaxRows || max(len(m.Fleet), len(m.Origin), len(m.Ask), len(m.Version), len(m.Settings)) > MaxText {
			t.Fatalf("%+v", m)
		}
		if err := again.Decode(m.Append(nil)); err != nil || fmt.Sprint(again) != fmt.Sprint(m) {
			t.Fatalf("%+v became %+v: %v", m, again, err)
		}
		// No view takes harm from it.
		v := NewView(Identity{Fleet: m.Fleet, Origin: "me"})
		v.SetRanks([]Rank{5, 6})
		v.Apply(start, &m)
		v.Apply(start.Add(time.Millisecond), &again)
		for _, r := range []Rank{5, 6, 7} {
			if l, age, _ := v.Load(start.Add(time.Second/2), r); l.Requests < 0 || age < 0 {
				t.Fatalf("%+v, %v", l, age)
			}
		}
	})
}
