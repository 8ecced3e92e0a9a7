package doctor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/dynctl/dynctl/internal/bench/loadgen"
	"github.com/dynctl/dynctl/internal/bench/workload"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/router/observe/receipt"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/wait"
	"github.com/dynctl/dynctl/internal/workers"
)

// cacheProbe sends each decode rank a fresh prompt twice: the first must find
// nothing, the second nearly all of it, and the router must have known.
func (e *exam) cacheProbe(ctx context.Context) {
	probed := map[string]bool{}
	var missed []string
	for i := range e.facts.Workers {
		w := &e.facts.Workers[i]
		if !w.Usable || w.Role == "prefill" || !slices.Contains(w.Models, e.facts.Model) {
			continue
		}
		if w.Role == "decode" && w.Connector == string(workers.ConnectorSGLang) {
			e.add("cache probe", w.Name, Skip, "its engine decodes only what a prefill engine has prefilled; the transfer below is its probe", "")
			continue
		}
		for dp := range max(w.DP, 1) {
			label := route.RankLabel(w.Name, dp)
			e.o.Step("the cache of " + label)
			header := fmt.Sprintf("X-Dynctl-Path: local\r\nX-Dynctl-Worker: %s\r\n", w.Name)
			if w.DP > 1 {
				header += fmt.Sprintf("X-data-parallel-rank: %d\r\n", dp)
			}
			if !e.probeRank(ctx, label, header, probed) {
				missed = append(missed, label)
			}
		}
	}
	missed = slices.DeleteFunc(missed, func(label string) bool { return probed[label] })
	if len(missed) > 0 {
		e.add("cache probe", strings.Join(missed, ", "), Skip, "no probe went there: the router does not let clients steer", "start it with --allow-routing-headers")
	}
}

// probeRank probes a rank, or the one that a router which does not let clients
// steer chooses in its place, unless that is probed already. It reports whether
// it was the rank that was meant.
func (e *exam) probeRank(ctx context.Context, label, header string, probed map[string]bool) bool {
	prompt := e.prompt(e.tokens())
	block := max(e.facts.Block, 1)
	full := (len(prompt) - 1) / block * block
	first, rec, err := e.one(ctx, header, prompt)
	if err != nil {
		e.add("cache probe", label, Fail, "a request failed: "+err.Error(), "")
		return true
	}
	meant := label
	if rec != nil && rec.Decode.Chosen != label {
		if rec.Inputs.Force != "" {
			e.add("cache probe", label, Warn, fmt.Sprintf("a request for it went to %s: %s", orNone(rec.Decode.Chosen), rec.ReasonText), "dynctl explain "+rec.ID+" shows why it was left out")
			return true
		}
		label = rec.Decode.Chosen
	}
	if probed[label] {
		return label == meant
	}
	probed[label] = true
	if first.CachedTokens > 0 {
		e.add("cache probe", label, Fail, fmt.Sprintf("a prompt that no engine has seen found %d of %d tokens cached", first.CachedTokens, len(prompt)), "")
		return label == meant
	}
	// Events of the first answer take a moment to reach the index.
	second, rec2, err := e.again(ctx, header, prompt, full)
	if err != nil {
		e.add("cache probe", label, Fail, "the second request failed: "+err.Error(), "")
		return label == meant
	}
	predicted := -1
	if rec2 != nil {
		predicted = rec2.Predicted.CachedTokens
	}
	switch {
	case second.CachedTokens < 0:
		e.add("cache probe", label, Warn, fmt.Sprintf("the engine does not report its cached tokens; the router expected %d of %d", predicted, len(prompt)), "start vLLM with --enable-prompt-tokens-details")
	case second.CachedTokens == 0:
		e.add("cache probe", label, Warn, "a repeated prompt found nothing cached", "is prefix caching switched off on the engine?")
	case predicted != second.CachedTokens:
		e.add("cache probe", label, Warn, fmt.Sprintf("a repeated prompt found %d of %d tokens cached, the router expected %d", second.CachedTokens, len(prompt), predicted), e.misfit(label, predicted, second.CachedTokens))
	default:
		e.add("cache probe", label, OK, fmt.Sprintf("a repeated prompt found %d of %d tokens cached, as the router expected", second.CachedTokens, len(prompt)), "")
	}
	return label == meant
}

// misfit is what may be wrong with what the router knows of a rank's engine, when a
// repeated prompt found other tokens cached than were predicted.
func (e *exam) misfit(label string, predicted, found int) string {
	for i := range e.facts.Workers {
		w := &e.facts.Workers[i]
		at := slices.IndexFunc(w.Ranks, func(r admin.Rank) bool { return r.Label == label })
		if at < 0 {
			continue
		}
		groups, block, chunked := w.Ranks[at].Feed.CacheGroups, w.BlockSizeTokens, false
		for _, g := range groups {
			block = max(block, g.Block)
			chunked = chunked || strings.HasPrefix(g.Kind, "chunked")
		}
		dropped := w.KVLastBlock == string(workers.LastBlockDropped)
		switch {
		case predicted < 0:
		case predicted-found == block && !dropped:
			return fmt.Sprintf("that is one block more than the engine reuses: if it drafts with EAGLE, MTP or the like, state kv_last_block=dropped for %s", w.Name)
		case found-predicted == block && dropped:
			return fmt.Sprintf("that is the last block, which %s is taken to recompute: if it drafts with n-grams or a model of its own, state kv_last_block=kept", w.Name)
		case found > predicted && chunked && w.AttentionChunk == 0:
			return fmt.Sprintf("state attention_chunk=N for %s: without the size of a chunk the router requires all blocks of its chunked attention", w.Name)
		case predicted > found && len(groups) > 1 && w.KVCopies != string(workers.CopiesSingle):
			return fmt.Sprintf("one of its %d caches holds less than its events say: if requests ask for kv_cache_report_mode \"full\", state kv_copies=single for %s", len(groups), w.Name)
		}
	}
	return "the index and the engine disagree: see the events and the tokenizer above"
}

// again repeats a prompt once the router expects what it should, which its dry run
// says; after a second it is repeated in any case.
func (e *exam) again(ctx context.Context, header string, prompt []uint32, full int) (*loadgen.Result, *receipt.Receipt, error) {
	for range 20 {
		a, err := e.o.Target.Admin.Route(ctx, admin.RouteRequest{Model: e.facts.Model, Tokens: prompt, Path: "local"})
		var r receipt.Receipt
		if err == nil && json.Unmarshal(a.Receipt, &r) == nil {
			for _, c := range r.Decode.Candidates {
				if c.OverlapBlocks*max(r.Inputs.BlockSize, 1) >= full {
					return e.one(ctx, header, prompt)
				}
			}
		}
		if !wait.For(ctx, 50*time.Millisecond) {
			return nil, nil, ctx.Err()
		}
	}
	return e.one(ctx, header, prompt)
}

// one sends one prompt for two tokens and gives what became of it with its receipt.
func (e *exam) one(ctx context.Context, header string, prompt []uint32) (*loadgen.Result, *receipt.Receipt, error) {
	e.number++
	src := &workload.Cell{
		Series: workload.Series{Pool: e.pool, Model: e.facts.Model, Header: header, Name: "doctor/" + strconv.Itoa(e.number), Salt: e.salt, N: 1},
		Prefix: prompt, OSL: 2,
	}
	sum, err := loadgen.Run(ctx, loadgen.Options{Base: e.o.Target.URL, TLS: e.o.Target.TLS, APIKey: e.o.Target.APIKey, Concurrency: 1, Keep: 1, Timeout: 2 * time.Minute}, src)
	if err != nil {
		return nil, nil, err
	}
	if len(sum.Kept) == 0 {
		return nil, nil, fmt.Errorf("nothing was sent")
	}
	r := &sum.Kept[0]
	if r.Err != "" {
		err = errors.New(r.Err)
	}
	rec, lost := e.receipt(ctx, r.ID)
	return r, rec, errors.Join(err, lost)
}

// receipt is that of a request that has been answered; nil when the router has
// none. It is final a little after the answer.
func (e *exam) receipt(ctx context.Context, id string) (*receipt.Receipt, error) {
	soon, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	var rec receipt.Receipt
	if wait.Until(soon, 10*time.Millisecond, func() bool {
		raw, err := e.o.Target.Admin.Decision(ctx, id)
		rec = receipt.Receipt{}
		return err == nil && json.Unmarshal(raw, &rec) == nil && !rec.Live
	}) {
		return &rec, nil
	}
	return nil, ctx.Err()
}

// tokens is how many tokens the prompts of the probes have.
func (e *exam) tokens() int {
	n := e.o.Tokens
	if n <= 0 {
		n = 40 * max(e.facts.Block, 1)
		if e.facts.MaxModelLen > 0 {
			n = min(n, e.facts.MaxModelLen/2)
		}
		n = n/max(e.facts.Block, 1)*max(e.facts.Block, 1) + 1
	}
	return n
}

// prompt is n tokens that no engine has seen.
func (e *exam) prompt(n int) []uint32 {
	e.number++
	return e.pool.Tokens(nil, rand.New(rand.NewPCG(workload.Seed(e.salt, "prompt"), uint64(e.number))), n)
}
