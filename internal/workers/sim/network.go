package sim

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/dynctl/dynctl/internal/blockhash"
	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/workers/sim/cache"
	"github.com/dynctl/dynctl/internal/workers/sim/engine"
	"github.com/dynctl/dynctl/internal/workers/sim/front"
	"github.com/dynctl/dynctl/internal/workers/sim/sockets"
)

// network moves KV for one rank of a process, over real sockets.
type network struct {
	p    *process
	rank int
}

// Pull fetches remote blocks in the background.
func (n *network) Pull(_ engine.Time, q engine.PullRequest) {
	n.p.wg.Go(func() {
		if q.Pull.Push {
			if err := n.register(q); err != nil && n.p.ctx.Err() == nil {
				n.p.ranks[n.rank].PullDone(q.Request, nil, err)
			}
			return
		}
		contents, err := n.p.pull(n.p.ctx, q)
		if n.p.ctx.Err() == nil {
			n.p.ranks[n.rank].PullDone(q.Request, contents, err)
		}
	})
}

// Note sends a message to a prefill that is known already; one that is not needs none.
func (n *network) Note(_ engine.Time, p engine.Pull, note engine.Note) {
	if n.p.ctx.Err() != nil {
		return
	}
	op := sockets.OpBeat
	if note == engine.NoteDone {
		op = sockets.OpDone
	}
	n.p.wg.Go(func() {
		// Best effort: a prefill that cannot be reached has nothing to keep.
		_, _ = n.p.links.Call(n.p.ctx, target(p), sockets.Request{Op: op, RequestID: p.RequestID})
	})
}

// register asks a prefill rank to write a prompt's KV here when it has it.
func (n *network) register(q engine.PullRequest) error {
	at, err := net.ResolveTCPAddr("tcp", n.p.e.ports.side[n.rank])
	if err != nil {
		return err
	}
	to, transfer := target(q.Pull), ""
	if q.Pull.Server != "" {
		transfer = q.Pull.RequestID
		if to.Host, to.Port, err = n.p.mooncake(n.p.ctx, q.Pull.Server, q.Pull.EngineID); err != nil {
			return err
		}
	}
	_, err = n.p.links.Call(n.p.ctx, to, sockets.Request{
		Op: sockets.OpRegister, RequestID: q.Request, Want: q.Want, Transfer: transfer,
		From: &sockets.Target{EngineID: n.p.ids[n.rank], Host: at.IP.String(), Port: at.Port},
	})
	return err
}

// mooncake asks a bootstrap server where an engine is.
func (p *process) mooncake(ctx context.Context, server, engineID string) (host string, port int, err error) {
	ctx, cancel := context.WithTimeout(ctx, cmp.Or(max(p.e.group.Patience, 0), 5*time.Second))
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, server+"/query", nil)
	if err != nil {
		return "", 0, err
	}
	resp, err := p.e.fleet.client.Do(r)
	if err != nil {
		return "", 0, fmt.Errorf("bootstrap: %w", err)
	}
	defer resp.Body.Close()
	var ranks map[string]mooncakeRank
	if err := json.NewDecoder(io.LimitReader(resp.Body, 1<<20)).Decode(&ranks); err != nil {
		return "", 0, fmt.Errorf("bootstrap: %w", err)
	}
	for _, k := range ranks {
		if k.EngineID != engineID {
			continue
		}
		host, text, err := net.SplitHostPort(strings.TrimPrefix(k.Workers["0"]["0"], "tcp://"))
		if err != nil {
			return "", 0, fmt.Errorf("bootstrap: %w", err)
		}
		port, err := strconv.Atoi(text)
		return host, port, err
	}
	return "", 0, fmt.Errorf("remote engine_id %s not found from bootstrap server %s", engineID, server)
}

// write sends the KV of a prompt to the decode rank that has made room for it, or why none
// comes.
func (p *process) write(to sockets.Target, request string, contents []cache.Content, err error) {
	q := sockets.Request{Op: sockets.OpWrite, RequestID: request, Contents: contents}
	if err != nil {
		q.Problem = err.Error()
	}
	p.wg.Go(func() {
		// A decode that is gone has nothing to wait for.
		_, _ = p.links.Call(p.ctx, to, q)
	})
}

func target(p engine.Pull) sockets.Target {
	return sockets.Target{EngineID: p.EngineID, Host: p.Host, Port: p.Port, TPSize: p.TPSize}
}

func (p *process) pull(ctx context.Context, q engine.PullRequest) ([]cache.Content, error) {
	switch {
	case q.Pull.Bootstrap:
		return p.claim(ctx, q)
	case q.Pull.Offer:
		return p.take(ctx, q)
	}
	for _, id := range q.Blocks {
		if id < 0 {
			return nil, fmt.Errorf("remote block %d does not exist", id)
		}
	}
	a, err := p.links.Call(ctx, target(q.Pull), sockets.Request{Op: sockets.OpRead, RequestID: q.Pull.RequestID, Blocks: q.Blocks})
	return a.Contents, err
}

// tierID is the engine id that every peer-to-peer tier answers to: peers know each
// other by their addresses only, so that links to them are made again for each prompt.
const tierID = "p2p-tier"

// take fetches what a prefill rank offers under a name. As vLLM's tier does, it waits
// for half a minute (six times Patience) for a peer or blocks that are not there.
func (p *process) take(ctx context.Context, q engine.PullRequest) ([]cache.Content, error) {
	wait := 6 * cmp.Or(max(p.e.group.Patience, 0), 5*time.Second)
	ctx, cancel := context.WithTimeoutCause(ctx, wait, errors.New("the peer gave no blocks in time"))
	defer cancel()
	links := sockets.Links{Patience: wait}
	defer links.Close()
	again := time.NewTicker(10 * time.Millisecond)
	defer again.Stop()
	for {
		a, err := links.Call(ctx, sockets.Target{EngineID: tierID, Host: q.Pull.Host, Port: q.Pull.Port},
			sockets.Request{Op: sockets.OpTake, RequestID: q.Pull.RequestID, Seqs: q.Seqs})
		if err == nil || !strings.Contains(err.Error(), engine.ErrNoOffer.Error()) {
			return a.Contents, err
		}
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-again.C:
		}
	}
}

// claim meets the prefill of an SGLang room at its bootstrap server.
func (p *process) claim(ctx context.Context, q engine.PullRequest) ([]cache.Content, error) {
	ctx, cancel := context.WithTimeout(ctx, p.e.group.BootstrapWait)
	defer cancel()
	body, err := json.Marshal(front.KVRequest{Room: q.Pull.Room})
	if err != nil {
		return nil, err
	}
	url := "http://" + net.JoinHostPort(strings.Trim(q.Pull.Host, "[]"), strconv.Itoa(q.Pull.Port)) + "/sim/kv"
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	r.Header["Idempotency-Key"] = nil // not sent; net/http asks again when the server closed the idle connection
	resp, err := p.e.fleet.client.Do(r)
	if err != nil {
		return nil, fmt.Errorf("bootstrap: %w", err)
	}
	defer resp.Body.Close()
	var a front.KVAnswer
	if err := json.NewDecoder(io.LimitReader(resp.Body, sockets.MaxFrame)).Decode(&a); err != nil {
		return nil, fmt.Errorf("bootstrap: %w", err)
	}
	if a.Error != "" {
		return nil, errors.New(a.Error)
	}
	if len(a.Contents) < q.Want {
		return nil, fmt.Errorf("room %d holds %d blocks, not %d", q.Pull.Room, len(a.Contents), q.Want)
	}
	return a.Contents[len(a.Contents)-q.Want:], nil
}

// receiver opens the port on which an LMCache decode takes KV.
func (p *process) receiver() error {
	g := &p.e.group
	if g.Connector != workers.ConnectorLMCache || g.Role == workers.Prefill {
		return nil
	}
	return p.receive(receiverID, sockets.OpPut, func(q sockets.Request, a *sockets.Response) {
		if len(q.Seqs) != len(q.Contents) {
			a.Error = "as many names as blocks are needed"
			return
		}
		p.store.Save(q.Seqs, q.Contents)
	})
}

// receiverID is the engine id that every LMCache receiver answers to; links to
// them are made again for each push.
const receiverID = "lmcache-receiver"

// push sends the KV of a prompt's full blocks to an LMCache receiver.
func (p *process) push(ctx context.Context, host string, port, rank int, key blockhash.Key, prompt []uint32, blocks []int) error {
	bs := p.e.group.BlockSize
	full := min(len(prompt)/bs, len(blocks))
	var contents []cache.Content
	var err error
	p.ranks[rank].Do(func(core *engine.Rank, now engine.Time) { contents, err = core.Read(now, blocks[:full]) })
	if err != nil {
		return err
	}
	locals := blockhash.Locals(nil, prompt, bs, key)
	links := sockets.Links{Patience: p.e.group.Patience}
	defer links.Close()
	_, err = links.Call(ctx, sockets.Target{EngineID: receiverID, Host: host, Port: port}, sockets.Request{
		Op: sockets.OpPut, Seqs: blockhash.Chain(nil, locals)[:full], Contents: contents,
	})
	return err
}
