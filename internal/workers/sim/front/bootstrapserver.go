package front

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"sync"
	"time"

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

// Finish gives the room its result, once, and forgets it.
func (t *Rooms) Finish(k *Room, contents []cache.Content, err error) {
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

// roomPatience is how long either side waits unless something else is set.
const roomPatience = 300 * time.Second

// ClaimTime is how long a prefill waits for its decode.
func (t *Rooms) ClaimTime() time.Duration { return cmp.Or(max(t.Claim, 0), roomPatience) }

// KVRequest and KVAnswer are the bodies of POST /sim/kv.
type KVRequest struct {
	Room uint64 `json:"room"`
}

// KVAnswer is the room's KV, or why it is missing.
type KVAnswer struct {
	Error    string          `json:"error,omitempty"`
	Contents []cache.Content `json:"contents,omitempty"`
}

// Handler is the bootstrap server.
func (t *Rooms) Handler(dp, pageSize int) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /route", func(w http.ResponseWriter, r *http.Request) { route(w, r, dp, pageSize) })
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
		give := time.NewTimer(cmp.Or(max(t.Wait, 0), roomPatience))
		defer give.Stop()
		select {
		case <-k.done:
		case <-give.C:
			t.Finish(k, nil, fmt.Errorf("no prefill in room %d", q.Room))
		case <-r.Context().Done():
			t.Finish(k, nil, errors.New("the decode left"))
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

// route gives a decode the prefill's layout, where it asks for rank -1 of everything, or
// where a rank is: here, for a simulated one has no port of its own. Its ranks need not
// register, and each has its KV whole.
func route(w http.ResponseWriter, r *http.Request, dp, pageSize int) {
	var at [4]int
	for i, name := range []string{"prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank"} {
		n, err := strconv.Atoi(r.URL.Query().Get(name))
		if err != nil {
			http.Error(w, "Missing inputs for bootstrap server.", http.StatusBadRequest)
			return
		}
		at[i] = n
	}
	if at == [4]int{-1, -1, -1, -1} {
		answer(w, http.StatusOK, map[string]any{
			"attn_tp_size": 1, "attn_cp_size": 1, "dp_size": dp, "pp_size": 1, "page_size": pageSize, "kv_cache_dtype": nil, "follow_bootstrap_room": true,
		})
		return
	}
	host, text, err := net.SplitHostPort(r.Host)
	port, bad := strconv.Atoi(text)
	if at[0] < 0 || at[0] >= dp || [3]int(at[1:]) != [3]int{} || err != nil || bad != nil {
		http.Error(w, fmt.Sprintf("Bootstrap info not found for dp_rank=%d cp_rank=%d tp_rank=%d pp_rank=%d", at[0], at[1], at[2], at[3]), http.StatusNotFound)
		return
	}
	answer(w, http.StatusOK, map[string]any{"rank_ip": host, "rank_port": port})
}

func answer(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(v) // the peer may be gone
}
