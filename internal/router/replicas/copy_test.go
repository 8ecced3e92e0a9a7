package replicas

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tinylib/msgp/msgp"
)

// wireTo is a Direct in this process. It loses messages, and answers may be changed on the way.
type wireTo struct {
	answers map[string]func([]byte) []byte
	lose    func() bool
	change  func(answer []byte) []byte
}

func (d *wireTo) Answer(address string, answer func([]byte) []byte) error {
	if d.answers == nil {
		d.answers = map[string]func([]byte) []byte{}
	}
	d.answers[address] = answer
	return nil
}

func (d *wireTo) Request(ctx context.Context, address string, request []byte) ([]byte, error) {
	if answer := d.answers[address]; answer != nil && (d.lose == nil || !d.lose()) {
		if a := answer(request); a != nil && (d.lose == nil || !d.lose()) {
			if d.change != nil {
				a = d.change(a)
			}
			return bytes.Clone(a), nil
		}
	}
	<-ctx.Done()
	return nil, ctx.Err()
}

// giverOf makes a giver of a copy of n bytes for each rank below 10.
func giverOf(t *testing.T, d Direct, fleet, origin string, n int) *Giver {
	t.Helper()
	self := Identity{Fleet: fleet, Origin: origin, Epoch: time.Unix(1, 0)}
	g := NewGiver(self, time.Now, func(r Rank) ([]byte, error) {
		if r >= 10 {
			return nil, fmt.Errorf("rank %d is not known", r)
		}
		return copyOf(r, n), nil
	})
	if err := d.Answer(self.Address(), g.Answer); err != nil {
		t.Fatal(err)
	}
	return g
}

// copyOf is the made-up copy of a rank.
func copyOf(r Rank, n int) []byte {
	b := make([]byte, n)
	random := rand.New(rand.NewPCG(uint64(r), 1))
	for i := range b {
		b[i] = byte(random.Uint32())
	}
	return b
}

var asker = Identity{Fleet: "a", Origin: "new", Epoch: time.Unix(2, 0)}

// TestFetch: a copy arrives whole, in pieces that fit a message, also where one message in five
// is lost.
func TestFetch(t *testing.T) {
	t.Parallel()
	for _, loss := range []float64{0, 0.2} {
		for _, n := range []int{1, MaxPiece - 1, MaxPiece, MaxPiece + 1, 5*MaxPiece + 17} {
			t.Run(fmt.Sprint(loss, " ", n), func(t *testing.T) {
				t.Parallel()
				synctest.Test(t, func(t *testing.T) {
					random := rand.New(rand.NewPCG(44, uint64(n)))
					d := &wireTo{lose: func() bool { return random.Float64() < loss }, change: func(a []byte) []byte {
						if len(a) > MaxMessage {
							t.Errorf("an answer of %d bytes", len(a))
						}
						return a
					}}
					giverOf(t, d, "a", "old", n)
					whole := 0
					for r := range Rank(10) {
						got, err := Fetch(t.Context(), d, &asker, "old", r)
						switch {
						case err == nil && !bytes.Equal(got, copyOf(r, n)):
							t.Errorf("rank %d: %d bytes came of %d, or others", r, len(got), n)
						case err == nil:
							whole++
						case loss == 0 || !strings.Contains(err.Error(), "no answer in 3 tries"):
							t.Error(err)
						}
					}
					if whole < 3 {
						t.Errorf("%d of 10 copies came", whole)
					}
				})
			})
		}
	}
}

// TestFetchRefused: what is not the copy that was requested of the router of this fleet is
// refused, in words, and in bounded time.
func TestFetchRefused(t *testing.T) {
	t.Parallel()
	piece := func(change func(p *Piece)) func([]byte) []byte {
		return func(a []byte) []byte {
			var p Piece
			if err := p.Decode(a); err != nil {
				t.Error(err)
			}
			change(&p)
			return p.Append(nil)
		}
	}
	answers := 0
	for name, c := range map[string]struct {
		change func([]byte) []byte
		origin string
		rank   Rank
		want   string
	}{
		"no router":       {origin: "nobody", want: "no answer in 3 tries"},
		"garbage":         {change: func([]byte) []byte { return []byte("garbage") }, want: "its answer is refused: msgp"},
		"a later version": {change: func(a []byte) []byte { a[3] = 9; return a }, want: "update the older router"},
		"another fleet":   {change: piece(func(p *Piece) { p.Fleet = "b" }), want: `it is of fleet "b"`},
		"another router":  {change: piece(func(p *Piece) { p.Origin = "c" }), want: `router "c" answers in its name`},
		"another rank":    {change: piece(func(p *Piece) { p.Rank++ }), want: "not the piece"},
		"another piece":   {change: piece(func(p *Piece) { p.Offset++; p.Data = p.Data[1:] }), want: "not the piece"},
		"an empty piece":  {change: piece(func(p *Piece) { p.Data = nil }), want: "not the piece"},
		"a short piece":   {change: piece(func(p *Piece) { p.Data = p.Data[:1] }), want: "not the piece"},
		"no length":       {change: piece(func(p *Piece) { p.Total = 0 }), want: "not the piece"},
		"an unknown rank": {rank: 11, want: "no copy: rank 11 is not known"},
		"no end":          {change: piece(func(p *Piece) { p.Total = MaxCopy; answers++; p.Copy = uint64(answers) }), want: "no longer kept"},
		"dies in the middle": {change: func() func([]byte) []byte {
			n := 0
			return func(a []byte) []byte {
				if n++; n > 2 {
					return nil
				}
				return a
			}
		}(), want: "refused"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				d := &wireTo{change: c.change}
				giverOf(t, d, "a", "old", 4*MaxPiece)
				origin := c.origin
				if origin == "" {
					origin = "old"
				}
				began := time.Now()
				got, err := Fetch(t.Context(), d, &asker, origin, c.rank)
				if err == nil || !strings.Contains(err.Error(), c.want) || len(err.Error()) > 300 {
					t.Errorf("%d bytes and %v, want %q", len(got), err, c.want)
				}
				if took := time.Since(began); took > 4*time.Second {
					t.Errorf("it took %v", took)
				}
			})
		})
	}
}

// TestGiver: one router gets a copy at a time, another one when the first has all of it, is
// silent, or no longer there; what was given is freed, and a foreign fleet gets nothing.
func TestGiver(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		d := &wireTo{}
		g := giverOf(t, d, "a", "old", 2*MaxPiece)
		ask := func(who string, fleet string, p Piece) (got Piece) {
			p.Identity = Identity{Fleet: fleet, Origin: who, Epoch: time.Unix(3, 0)}
			if err := got.Decode(g.Answer(p.Append(nil))); err != nil {
				t.Error(err)
			}
			return got
		}
		first := ask("x", "a", Piece{Rank: 1})
		if len(first.Data) != MaxPiece || first.Total != 2*MaxPiece || first.Why != "" {
			t.Fatalf("%d bytes of %d: %s", len(first.Data), first.Total, first.Why)
		}
		if again := ask("x", "a", Piece{Rank: 1}); again.Copy != first.Copy || !bytes.Equal(again.Data, first.Data) {
			t.Error("a copy whose first piece was lost is made again")
		}
		if got := ask("y", "a", Piece{Rank: 2}); !got.Busy {
			t.Error("two routers get copies at a time")
		}
		if got := ask("y", "b", Piece{Rank: 2}); len(got.Data) > 0 || !strings.Contains(got.Why, "another fleet") {
			t.Errorf("a router of another fleet gets %d bytes: %s", len(got.Data), got.Why)
		}
		rest := ask("x", "a", Piece{Rank: 1, Copy: first.Copy, Offset: MaxPiece})
		if !bytes.Equal(append(bytes.Clone(first.Data), rest.Data...), copyOf(1, 2*MaxPiece)) {
			t.Error("the pieces are not the copy")
		}
		second := ask("y", "a", Piece{Rank: 2})
		if second.Busy || len(second.Data) == 0 {
			t.Error("a router that has all of its copy keeps another one from its")
		}
		ask("y", "a", Piece{Rank: 2, Copy: second.Copy, Offset: MaxPiece})
		if got := ask("x", "a", Piece{Rank: 1, Copy: first.Copy, Offset: MaxPiece}); len(got.Data) > 0 || got.Why == "" {
			t.Error("a copy that was replaced is given")
		}
		g.Expire()
		if g.copy == nil {
			t.Error("a copy in use was freed")
		}
		time.Sleep(busyUntil) //nolint:forbidigo // under a virtual clock
		if got := ask("z", "a", Piece{Rank: 3}); got.Busy {
			t.Error("a silent router keeps another one from its copy")
		}
		time.Sleep(busyUntil) //nolint:forbidigo // under a virtual clock
		if g.Expire(); g.copy != nil {
			t.Error("a copy that no router asks for is kept")
		}
		if g.Answer([]byte("garbage")) != nil {
			t.Error("garbage is answered")
		}
		if _, err := Fetch(t.Context(), d, &asker, "old", 99); !errors.Is(err, ErrNoCopy) {
			t.Errorf("an unknown rank: %v", err)
		}
	})
}

// FuzzPiece: what is read is within the limits, and is the same when written and read again.
func FuzzPiece(f *testing.F) {
	p := Piece{Identity: asker, Rank: 7, Copy: 9, Offset: 3, Total: 99, Data: []byte("data")}
	f.Add(p.Append(nil))
	p.because("the reason")
	f.Add(p.Append(nil))
	f.Add(msgp.AppendMapHeader(nil, 1<<31))
	f.Fuzz(func(t *testing.T, b []byte) {
		var p, again Piece
		if p.Decode(b) != nil {
			return
		}
		if len(p.Data) > MaxPiece || p.Total > MaxCopy || p.Offset > MaxCopy || min(p.Total, p.Offset) < 0 || max(len(p.Fleet), len(p.Origin), len(p.Why)) > MaxText {
			t.Fatalf("%+v", p)
		}
		if err := again.Decode(p.Append(nil)); err != nil || fmt.Sprint(again) != fmt.Sprint(p) {
			t.Fatalf("%+v became %+v: %v", p, again, err)
		}
		g := NewGiver(asker, time.Now, func(r Rank) ([]byte, error) { return copyOf(r, 10), nil })
		g.Answer(b)
	})
}
