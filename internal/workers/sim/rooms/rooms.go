// Package rooms is the rendezvous of SGLang's disaggregation: a prefill and its
// decode meet in a numbered room at the prefill's bootstrap server.
package rooms

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"

	"github.com/dynctl/dynctl/internal/positive"
	"github.com/dynctl/dynctl/internal/workers/sim/cache"
)

// Rooms is the bootstrap server of an SGLang prefill: where its prefills and
// their decodes meet. It serves GET /route like SGLang's, and POST /sim/kv, by
// which a simulated decode claims a room and waits for the room's KV.
type Rooms struct {
	// Claim bounds how long a prefill waits for its decode, Wait how long a
	// decode waits for KV; 0 means 300 s for both.
	Claim, Wait time.Duration

	mu    sync.Mutex
	rooms map[uint64]*Room
}

// maxRooms bounds the rooms that exist at a time.
const maxRooms = 65536

// Room is one request's rendezvous. The side that comes first makes it.
type Room struct {
	ID      uint64
	claimed chan struct{} // closed when the decode is here
	done    chan struct{} // closed when contents or err is set
	prefill bool          // the prefill was here
	taken   bool          // claimed is closed
	over    bool          // done is closed

	contents []cache.Content
	err      error
}

var errRoomUsed = errors.New("bootstrap room is already in use")

// Enter returns the room, made if need be, as seen by one of its two sides.
func (t *Rooms) Enter(id uint64, prefill bool) (*Room, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	k := t.rooms[id]
	if k == nil {
		if len(t.rooms) >= maxRooms {
			return nil, fmt.Errorf("%d bootstrap rooms are open", maxRooms)
		}
		if t.rooms == nil {
			t.rooms = make(map[uint64]*Room)
		}
		k = &Room{ID: id, claimed: make(chan struct{}), done: make(chan struct{})}
		t.rooms[id] = k
	}
	if prefill && k.prefill || !prefill && k.taken {
		return nil, errRoomUsed
	}
	if prefill {
		k.prefill = true
	} else {
		k.taken = true
		close(k.claimed)
	}
	return k, nil
}

// Claimed is closed when the decode has come.
func (k *Room) Claimed() <-chan struct{} { return k.claimed }

// Done is closed when the room has its result.
func (k *Room) Done() <-chan struct{} { return k.done }

// Err is why the room has no contents. It may be read when Done is closed.
func (k *Room) Err() error { return k.err }

// Settle gives the room its result, once, and forgets it.
func (t *Rooms) Settle(k *Room, contents []cache.Content, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if k.over {
		return
	}
	k.over, k.contents, k.err = true, contents, err
	close(k.done)
	if t.rooms[k.ID] == k {
		delete(t.rooms, k.ID)
	}
}

// patience is how long either side waits unless it is told.
const patience = 300 * time.Second

// ClaimTime is how long a prefill waits for its decode.
func (t *Rooms) ClaimTime() time.Duration { return positive.Or(t.Claim, patience) }

// KVRequest and KVAnswer are the bodies of POST /sim/kv.
type KVRequest struct {
	Room uint64 `json:"room"`
}

// KVAnswer is the room's KV, or why there is none.
type KVAnswer struct {
	Error    string          `json:"error,omitempty"`
	Contents []cache.Content `json:"contents,omitempty"`
}

// Handler is the bootstrap server.
func (t *Rooms) Handler(dp, pageSize int) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /route", func(w http.ResponseWriter, _ *http.Request) {
		answer(w, http.StatusOK, map[string]any{"attn_tp_size": 1, "attn_cp_size": 1, "dp_size": dp, "pp_size": 1, "page_size": pageSize, "follow_bootstrap_room": true})
	})
	mux.HandleFunc("GET /health", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusOK) })
	mux.HandleFunc("POST /sim/kv", func(w http.ResponseWriter, r *http.Request) {
		var q KVRequest
		if json.NewDecoder(http.MaxBytesReader(w, r.Body, 1<<16)).Decode(&q) != nil {
			answer(w, http.StatusBadRequest, KVAnswer{Error: "not a KV request"})
			return
		}
		k, err := t.Enter(q.Room, false)
		if err != nil {
			answer(w, http.StatusConflict, KVAnswer{Error: err.Error()})
			return
		}
		give := time.NewTimer(positive.Or(t.Wait, patience))
		defer give.Stop()
		select {
		case <-k.done:
		case <-give.C:
			t.Settle(k, nil, fmt.Errorf("no prefill in room %d", q.Room))
		case <-r.Context().Done():
			t.Settle(k, nil, errors.New("the decode left"))
			return
		}
		<-k.done
		if k.err != nil {
			answer(w, http.StatusBadGateway, KVAnswer{Error: k.err.Error()})
			return
		}
		answer(w, http.StatusOK, KVAnswer{Contents: k.contents})
	})
	return mux
}

func answer(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(v) // the peer may be gone
}
