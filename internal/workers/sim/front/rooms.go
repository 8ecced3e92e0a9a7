package front

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/dynctl/dynctl/internal/blockhash"
	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/workers/sim/cache"
	"github.com/dynctl/dynctl/internal/workers/sim/engine"
)

// FakeHost is the bootstrap host of SGLang's health probes: no transfer.
const FakeHost = "2.2.2.2"

// bootstrap reads SGLang's fields into the job and picks its rank.
func (s *Server) bootstrap(j *job) *Error {
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
			j.Pulls = append(j.Pulls, &engine.Pull{Bootstrap: true, Host: host, Port: port, Room: *rooms[i], Fake: host == FakeHost})
			continue
		}
		if host == FakeHost {
			continue
		}
		k, err := s.cfg.Rooms.Enter(*rooms[i], true)
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
		return slices.Repeat([]*T{&one}, n), true
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
	give := time.NewTimer(s.cfg.Rooms.ClaimTime())
	defer give.Stop()
	for _, k := range j.rooms {
		select {
		case <-k.Claimed():
		case <-k.Done():
			return k.Err()
		case <-give.C:
			return fmt.Errorf("no decode came to room %d", k.ID)
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}

// leaveRooms fails the rooms that have no result yet.
func (s *Server) leaveRooms(j *job) {
	for _, k := range j.rooms {
		s.cfg.Rooms.Finish(k, nil, errors.New("the prefill failed or was aborted"))
	}
}

// handOver gives the KV of finished prefills to who waits for it: SGLang's
// rooms, or an LMCache receiver.
func (s *Server) handOver(ctx context.Context, j *job, all []*choice) error {
	defer func() {
		if j.rooms != nil || j.LMCache != nil || j.Offer != "" && !j.Pin {
			s.release(all)
		}
	}()
	if j.LMCache != nil && j.LMCache.Host != "" {
		if s.cfg.Push == nil || len(j.LMCache.InitPorts) == 0 {
			return errors.New("disagg_spec names no receiver")
		}
		c := all[0]
		return s.cfg.Push(ctx, j.LMCache.Host, j.LMCache.InitPorts[0], c.rank, blockhash.Key{LoRA: j.lora, Salt: j.CacheSalt}, c.prompt, c.pinned)
	}
	if j.Offer != "" {
		c := all[0]
		locals := blockhash.Locals(nil, c.prompt, s.cfg.BlockSize, blockhash.Key{LoRA: j.lora, Salt: j.CacheSalt})
		seqs := blockhash.Chain(nil, locals)
		s.cfg.Ranks[c.rank].Do(func(core *engine.Rank, now engine.Time) { core.Offer(now, j.Offer, c.id, seqs) })
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
		s.cfg.Rooms.Finish(k, contents, err)
		<-k.Done()
		if k.Err() != nil { // finished before, by a decode that left
			return k.Err()
		}
	}
	return nil
}
