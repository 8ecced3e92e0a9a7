package replicas

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"
)

// Direct carries requests to one router. It may lose and double them, and their answers.
type Direct interface {
	// Request sends a request to the router that answers at an address, and returns its
	// answer. It does not keep the request.
	Request(ctx context.Context, address string, request []byte) (answer []byte, err error)
	// Answer starts to call answer with each request to an address, one at a time. A nil
	// answer is not sent.
	Answer(address string, answer func(request []byte) []byte) error
}

// Address is where a router answers requests, among those of all fleets.
func (i *Identity) Address() string { return i.Fleet + "\x00" + i.Origin }

const (
	// pieceWithin is how long one request for a piece may take, pieceTries how often it is
	// made, piecePause the time between two tries.
	pieceWithin = time.Second
	pieceTries  = 3
	piecePause  = 100 * time.Millisecond
	// busyUntil is how long a router that does not ask for the rest of its copy keeps others
	// from getting one.
	busyUntil = time.Second
)

// Errors of [Fetch] after which the router can still be asked for other ranks.
var (
	// ErrBusy: the router gives a copy to another one.
	ErrBusy = errors.New("it gives a copy to another router")
	// ErrNoCopy: the router has no copy of the rank.
	ErrNoCopy = errors.New("no copy")
)

// Fetch gets the copy of a rank from another router of the fleet, piece by piece: it requests one
// when the one before has come. It returns ErrBusy or ErrNoCopy, wrapped, for a router
// that answers and gives none.
func Fetch(ctx context.Context, d Direct, self *Identity, origin string, rank Rank) ([]byte, error) {
	to := Identity{Fleet: self.Fleet, Origin: origin}
	ask := Piece{Identity: Identity{Fleet: self.Fleet, Origin: self.Origin, Epoch: self.Epoch}, Rank: rank}
	var all bytes.Buffer
	for total := -1; all.Len() != total; {
		ask.Offset = all.Len()
		got, err := request(ctx, d, to.Address(), &ask)
		switch {
		case err != nil:
			return nil, fmt.Errorf("router %s: %w", origin, err)
		case got.Fleet != self.Fleet:
			return nil, fmt.Errorf("router %s: it is of fleet %.40q", origin, got.Fleet)
		case got.Origin != origin:
			return nil, fmt.Errorf("router %s: router %.40q answers in its name", origin, got.Origin)
		case got.Busy:
			return nil, fmt.Errorf("router %s: %w", origin, ErrBusy)
		case got.Why != "":
			return nil, fmt.Errorf("router %s: %w: %s", origin, ErrNoCopy, got.Why)
		case got.Rank != rank || got.Offset != ask.Offset || got.Total == 0 || len(got.Data) != min(MaxPiece, got.Total-got.Offset) || total >= 0 && (got.Total != total || got.Copy != ask.Copy):
			return nil, fmt.Errorf("router %s: its answer is not the piece that was requested", origin)
		}
		total, ask.Copy = got.Total, got.Copy
		all.Write(got.Data)
	}
	return all.Bytes(), nil
}

// request makes one request, again if no answer comes.
func request(ctx context.Context, d Direct, address string, ask *Piece) (got *Piece, err error) {
	for try := range pieceTries {
		if try > 0 {
			pause := time.NewTimer(piecePause)
			select {
			case <-ctx.Done():
				pause.Stop()
				return nil, ctx.Err()
			case <-pause.C:
			}
		}
		within, cancel := context.WithTimeout(ctx, pieceWithin)
		var answer []byte
		answer, err = d.Request(within, address, ask.Append(nil))
		cancel()
		if err != nil {
			continue
		}
		got = new(Piece)
		if err := got.Decode(answer); err != nil {
			return nil, fmt.Errorf("its answer is refused: %w", err)
		}
		return got, nil
	}
	return nil, fmt.Errorf("no answer in %d tries: %w", pieceTries, err)
}

// Giver answers requests for copies, to one router at a time. It is safe for concurrent use.
type Giver struct {
	self   Identity
	clock  func() time.Time
	copyOf func(Rank) ([]byte, error)

	mu   sync.Mutex // guards the fields below
	to   string     // the router that gets the copy
	rank Rank
	id   uint64
	copy []byte
	last time.Time // its last request
	sent int       // bytes from the beginning that it got
}

// NewGiver makes the giver of a router. copyOf makes the copy of a rank, of at most [MaxCopy]
// bytes.
func NewGiver(self Identity, clock func() time.Time, copyOf func(Rank) ([]byte, error)) *Giver {
	self.Version, self.Settings = "", ""
	return &Giver{self: self, clock: clock, copyOf: copyOf}
}

// Answer answers a request, nil for one that cannot be read.
func (g *Giver) Answer(request []byte) []byte {
	var p Piece
	if p.Decode(request) != nil {
		return nil
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.give(&p)
	p.Identity = g.self
	return p.Append(nil)
}

// give turns a request into its answer. The caller holds mu.
func (g *Giver) give(p *Piece) {
	p.Data, p.Total, p.Why, p.Busy = nil, 0, "", false
	now := g.clock()
	switch {
	case p.Fleet != g.self.Fleet:
		p.because("this router is of another fleet")
		return
	case g.to != "" && g.to != p.Origin && g.sent < len(g.copy) && now.Sub(g.last) < busyUntil:
		p.Busy = true
		return
	case p.Copy == 0 && g.copy != nil && g.to == p.Origin && g.rank == p.Rank && g.sent <= MaxPiece && now.Sub(g.last) < busyUntil:
		p.Offset = 0 // the answer with the first piece was lost, or came too late
	case p.Copy == 0:
		made, err := g.copyOf(p.Rank)
		now = g.clock() // that may take seconds
		if err == nil && (len(made) == 0 || len(made) > MaxCopy) {
			err = fmt.Errorf("a copy of %d bytes cannot be sent", len(made))
		}
		if err != nil {
			p.because(err.Error())
			return
		}
		g.to, g.rank, g.id, g.copy, g.sent, p.Offset = p.Origin, p.Rank, rand.Uint64()|1, made, 0, 0
	case p.Origin != g.to || p.Copy != g.id || p.Rank != g.rank || p.Offset >= len(g.copy):
		p.because("the copy is no longer kept")
		return
	}
	p.Copy, p.Total = g.id, len(g.copy)
	p.Data = g.copy[p.Offset:min(p.Offset+MaxPiece, len(g.copy))]
	g.last, g.sent = now, max(g.sent, p.Offset+len(p.Data))
}

// Expire frees the copy that no router asks for any longer.
func (g *Giver) Expire() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.copy != nil && g.clock().Sub(g.last) >= busyUntil {
		g.to, g.copy, g.sent = "", nil, 0
	}
}
