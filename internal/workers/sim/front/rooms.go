package front

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"

	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/workers/sim/cache"
	"github.com/dynctl/dynctl/internal/workers/sim/engine"
)

// FakeHost is the bootstrap host of SGLang's health probes: no transfer.
const FakeHost = "2.2.2.2"

// Rooms is the bootstrap server of an SGLang prefill: where its prefills and
// their decodes meet. It serves GET /route like SGLang's, and POST /sim/kv, by
// which a simulated decode claims a room and waits for the room's KV.
type Rooms struct {
	// Claim bounds how long a prefill waits for its decode, Wait how long a
	// decode waits for KV; 0 means 300 s for both.
	Claim, Wait time.Duration

	mu    sync.Mutex
	rooms map[uint64]*room
}

// maxRooms bounds the rooms that exist at a time.
const maxRooms = 65536

// room is one request's rendezvous. The side that comes first makes it.
type room struct {
	id      uint64
	claimed chan struct{} // closed when the decode is here
	done    chan struct{} // closed when contents or err is set
	prefill bool          // the prefill was here
	taken   bool          // claimed is closed
	over    bool          // done is closed

	contents []cache.Content
	err      error
}

var errRoomUsed = errors.New("bootstrap room is already in use")

// enter returns the room, made if need be, as seen by one of its two sides.
func (t *Rooms) enter(id uint64, prefill bool) (*room, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	k := t.rooms[id]
	if k == nil {
		if len(t.rooms) >= maxRooms {
			return nil, fmt.Errorf("%d bootstrap rooms are open", maxRooms)
		}
		if t.rooms == nil {
			t.rooms = make(map[uint64]*room)
		}
		k = &room{id: id, claimed: make(chan struct{}), done: make(chan struct{})}
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

// settle gives the room its result, once, and forgets it.
func (t *Rooms) settle(k *room, contents []cache.Content, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if k.over {
		return
	}
	k.over, k.contents, k.err = true, contents, err
	close(k.done)
	if t.rooms[k.id] == k {
		delete(t.rooms, k.id)
	}
}

func (t *Rooms) claimTime() time.Duration { return orDefault(t.Claim) }
func (t *Rooms) waitTime() time.Duration  { return orDefault(t.Wait) }

func orDefault(d time.Duration) time.Duration {
	if d <= 0 {
		return 300 * time.Second
	}
	return d
}

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
		writeJSON(w, http.StatusOK, map[string]any{"attn_tp_size": 1, "attn_cp_size": 1, "dp_size": dp, "pp_size": 1, "page_size": pageSize, "follow_bootstrap_room": true})
	})
	mux.HandleFunc("GET /health", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusOK) })
	mux.HandleFunc("POST /sim/kv", func(w http.ResponseWriter, r *http.Request) {
		var q KVRequest
		if json.NewDecoder(http.MaxBytesReader(w, r.Body, 1<<16)).Decode(&q) != nil {
			writeJSON(w, http.StatusBadRequest, KVAnswer{Error: "not a KV request"})
			return
		}
		k, err := t.enter(q.Room, false)
		if err != nil {
			writeJSON(w, http.StatusConflict, KVAnswer{Error: err.Error()})
			return
		}
		give := time.NewTimer(t.waitTime())
		defer give.Stop()
		select {
		case <-k.done:
		case <-give.C:
			t.settle(k, nil, fmt.Errorf("no prefill in room %d", q.Room))
		case <-r.Context().Done():
			t.settle(k, nil, errors.New("the decode left"))
			return
		}
		<-k.done
		if k.err != nil {
			writeJSON(w, http.StatusBadGateway, KVAnswer{Error: k.err.Error()})
			return
		}
		writeJSON(w, http.StatusOK, KVAnswer{Contents: k.contents})
	})
	return mux
}

// bootstrap reads SGLang's fields into the job and picks its rank.
func (s *Server) bootstrap(j *job) *apiError {
	rank := j.RoutedRank
	if rank == nil {
		rank = j.DPRank
	}
	if rank != nil {
		n, err := s.rankInRange(*rank)
		if err != nil {
			return err
		}
		j.rank = n
	}
	if s.cfg.Role == workers.Aggregated {
		return nil
	}
	hosts, ok1 := manyOf[string](j.BootstrapHost, len(j.prompts))
	ports, ok2 := manyOf[int](j.BootstrapPort, len(j.prompts))
	rooms, ok3 := manyOf[uint64](j.BootstrapRoom, len(j.prompts))
	if !ok1 || !ok2 || !ok3 {
		return badRequest("bootstrap_room", "bootstrap_host, bootstrap_port and bootstrap_room must be one value, or one for each prompt.")
	}
	if rooms == nil || rooms[0] == nil {
		return badRequest(nil, "Disaggregated request received without boostrap room id.")
	}
	if j.n > 1 {
		return badRequest("n", "n must be 1 in disaggregation mode.")
	}
	if s.cfg.Role == workers.Prefill {
		// The prefill server's own answer is one token, whatever was asked.
		j.max, j.MinTokens, j.IgnoreEOS, j.stops = 1, 0, true, nil
		if rank == nil {
			j.rank = int(*rooms[0] % uint64(len(s.cfg.Ranks)))
		}
	}
	for i := range j.prompts {
		if rooms[i] == nil {
			return badRequest(nil, "Disaggregated request received without boostrap room id.")
		}
		host, port := "", 8998
		if hosts != nil && hosts[i] != nil {
			host = *hosts[i]
		}
		if ports != nil && ports[i] != nil {
			port = *ports[i]
		}
		if s.cfg.Role == workers.Decode {
			j.pulls = append(j.pulls, &engine.Pull{Bootstrap: true, Host: host, Port: port, Room: *rooms[i], Fake: host == FakeHost})
			continue
		}
		if host == FakeHost {
			continue
		}
		k, err := s.cfg.Rooms.enter(*rooms[i], true)
		if err != nil {
			s.leaveRooms(j)
			return badRequest("bootstrap_room", "room %d: %v", *rooms[i], err)
		}
		j.rooms = append(j.rooms, k)
	}
	return nil
}

// manyOf reads a value or a list of n values; nil for nothing.
func manyOf[T any](raw json.RawMessage, n int) ([]*T, bool) {
	if absent(raw) {
		return nil, true
	}
	var one T
	if json.Unmarshal(raw, &one) == nil {
		out := make([]*T, n)
		for i := range out {
			out[i] = &one
		}
		return out, n == 1 || len(out) == n
	}
	var many []*T
	if json.Unmarshal(raw, &many) != nil || len(many) != n {
		return nil, false
	}
	return many, true
}

// awaitRooms waits until the decodes of a prefill are there.
func (s *Server) awaitRooms(ctx context.Context, j *job) error {
	if len(j.rooms) == 0 {
		return nil
	}
	give := time.NewTimer(s.cfg.Rooms.claimTime())
	defer give.Stop()
	for _, k := range j.rooms {
		select {
		case <-k.claimed:
		case <-k.done:
			return k.err
		case <-give.C:
			return fmt.Errorf("no decode came to room %d", k.id)
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}

// leaveRooms fails the rooms that have no result yet.
func (s *Server) leaveRooms(j *job) {
	for _, k := range j.rooms {
		s.cfg.Rooms.settle(k, nil, errors.New("the prefill failed or was aborted"))
	}
}

// handOver gives the KV of finished prefills to who waits for it: SGLang's
// rooms, or an LMCache receiver.
func (s *Server) handOver(ctx context.Context, j *job, all []*choice) error {
	defer func() {
		if j.rooms != nil || j.spec != nil {
			s.release(all)
		}
	}()
	if j.spec != nil && j.spec.host != "" {
		if s.cfg.Push == nil || len(j.spec.initPorts) == 0 {
			return errors.New("disagg_spec names no receiver")
		}
		c := all[0]
		return s.cfg.Push(ctx, j.spec.host, j.spec.initPorts[0], c.rank, c.prompt, c.pinned)
	}
	for i, k := range j.rooms {
		c := all[i]
		blocks := (len(c.prompt) + s.cfg.BlockSize - 1) / s.cfg.BlockSize
		if len(c.pinned) < blocks {
			return fmt.Errorf("prefill ended with %q", c.finish)
		}
		var contents []cache.Content
		var err error
		s.cfg.Ranks[c.rank].Do(func(core *engine.Rank, now engine.Time) { contents, err = core.Read(now, c.pinned[:blocks]) })
		s.cfg.Rooms.settle(k, contents, err)
		<-k.done
		if k.err != nil { // settled before, by a decode that left
			return k.err
		}
	}
	return nil
}
