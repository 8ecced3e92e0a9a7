package selector

import (
	"cmp"
	"math"
	"math/bits"
	"slices"

	"github.com/dynctl/dynctl/internal/router/placement/decision"
	"github.com/dynctl/dynctl/internal/router/route"
)

// Pick orders the candidates of in by its policy, writes what it thought of them
// into them, and fills out, whose order it reuses. An unknown policy ranks as KV;
// ParsePolicy keeps them out.
func Pick(in *Input, out *Ranking) {
	*out = Ranking{Policy: in.Policy, Order: out.Order[:0], costs: out.costs[:0]}
	if len(in.Candidates) == 0 {
		out.Verdict = NoCandidates
		return
	}
	busy, limited, timed := 0, in.Busy != (Busy{}), in.Pricing != nil && in.Policy.row().name == KV
	if timed {
		out.costs = slices.Grow(out.costs, len(in.Candidates))[:len(in.Candidates)]
	}
	for i := range in.Candidates {
		c := &in.Candidates[i]
		c.Cost = 0
		c.Terms = decision.Terms{} // a statement of its own needs no copy
		out.Overlap = max(out.Overlap, c.OverlapBlocks)
		c.ExcludedCode, c.Excluded = "", ""
		if limited || c.KeptOut != "" || len(in.Veto) > 0 {
			c.ExcludedCode, c.Excluded = exclusion(in, i)
		}
		switch c.ExcludedCode {
		case "":
			out.Order = append(out.Order, i)
			if timed { // while the candidate is at hand
				c.Cost = in.price(i)
				out.costs[i] = c.Cost
			}
		case ExcludedGiven:
		default:
			busy++
		}
	}
	out.Eligible = len(out.Order)
	switch {
	case out.Eligible > 0:
		out.Verdict = Chosen
	case busy > 0:
		out.Verdict = AllBusy
		return
	default:
		out.Verdict = AllExcluded
		return
	}
	rankBy(in, out)
	spread(in, out)
	if in.Limit > 0 && len(out.Order) > in.Limit {
		out.Order = out.Order[:in.Limit]
	}
	if len(out.Order) > 1 {
		out.Margin = in.Candidates[out.Order[1]].Cost - in.Candidates[out.Order[0]].Cost
	}
}

// exclusion says why candidate i cannot be chosen; the words are the caller's own,
// those of a limit are Why's.
func exclusion(in *Input, i int) (code, words string) {
	c, b := &in.Candidates[i], &in.Busy
	switch {
	case c.KeptOut != "":
		return ExcludedGiven, c.KeptOut
	case i < len(in.Veto) && in.Veto[i] != "":
		return ExcludedGiven, in.Veto[i]
	case b.DecodeBlocksShare > 0 && decodeShare(c) > b.DecodeBlocksShare:
		return ExcludedDecodeBlocks, ""
	case b.PrefillTokens > 0 && c.PrefillTokens > b.PrefillTokens:
		return ExcludedPrefillTokens, ""
	case c.HasLoad && b.Waiting > 0 && c.Waiting > b.Waiting:
		return ExcludedWaiting, ""
	case c.HasLoad && b.KVUsage > 0 && c.KVUsage > b.KVUsage: // false for NaN
		return ExcludedKVUsage, ""
	case b.Requests > 0 && c.ActiveRequests+int(c.SiblingHeld) >= b.Requests && in.Phase != route.Prefill:
		return ExcludedRequests, ""
	}
	return "", ""
}

// decodeShare is the part of a rank's KV blocks that are decoding; 0 where its
// capacity is not known.
func decodeShare(c *decision.Candidate) float64 {
	if c.KVBlocks <= 0 {
		return 0
	}
	return float64(c.DecodeBlocks) / float64(c.KVBlocks)
}

// rankKV is kv_blocks and kv_dynamo; ours selects kv_blocks.
//
// Every product is rounded by a conversion before it is added to anything: else
// Go may round product and sum at once where the processor can, and the same
// recording would come out otherwise on another machine.
func rankKV(in *Input, out *Ranking, ours bool) {
	w := &in.Weights
	bs := float64(max(in.BlockSize, 1))
	blocks := math.Ceil(float64(in.ISL) / bs)
	decays, least := w.CreditDecay > 0 && blocks > 0, math.MaxInt
	if decays {
		for _, i := range out.Order {
			least = min(least, in.Candidates[i].PrefillTokens)
		}
	}
	for _, i := range out.Order {
		c := &in.Candidates[i]
		decay := 1.0
		if decays {
			decay = 1 / (1 + w.CreditDecay*float64(c.PrefillTokens-least)/bs/blocks)
		}
		t := &c.Terms
		t.OverlapCredit = float64(w.OverlapCredit * decay * w.Held(c))
		t.Request = float64(w.ActiveRequest * float64(c.ActiveRequests))
		prompt, queued := float64(in.ISL)/bs, float64(c.PrefillTokens)/bs
		if ours {
			// The prompt's own uncached work is clamped by itself: a cached
			// prefix does not pay for the work of others.
			t.Prefill = prompt
			t.Queue = float64(w.Queue * queued)
			t.OverlapCredit = min(t.OverlapCredit, max(prompt-w.StepTokens/bs, 0))
			t.Spread = w.Spread * float64(c.FreshTokens) / bs
			compute := max(prompt-t.OverlapCredit, 0)
			if in.Phase != route.Prefill {
				t.Decode = float64(w.DecodeLoad * float64(c.DecodeBlocks))
			}
			if in.Phase == route.Aggregated {
				t.Stall = float64(w.Stall * float64(compute*float64(c.ActiveRequests)))
			}
			c.Cost = float64(w.PrefillLoadScale*compute) + t.Queue + t.Decode + t.Stall + t.Spread + t.Request
			if c.Times > 1 {
				// What it has to do takes longer there, and so does its own answer. A rank of the
				// decode phase need not compute the prompt.
				own := t.Queue + t.Decode + t.Stall + t.Spread + t.Request
				if in.Phase != route.Decode {
					own += float64(w.PrefillLoadScale * compute)
				}
				if in.Phase != route.Prefill {
					own += float64(w.DecodeLoad * blocks)
				}
				t.Slow = float64((c.Times - 1) * own)
				c.Cost += t.Slow
			}
			continue
		}
		// Dynamo's routers: prefill does not track blocks; decode, with
		// conditional disaggregation, does not track prefill and takes the
		// credit off its decode blocks. Blocks that the prompt shares with
		// running requests are counted again, as the ledger does.
		if in.Phase != route.Prefill {
			t.Decode = float64(c.DecodeBlocks) + blocks
		}
		if in.Phase == route.Decode {
			c.Cost = max(t.Decode-t.OverlapCredit, 0) + t.Request
			continue
		}
		t.Prefill, t.Queue = prompt, queued
		c.Cost = float64(w.PrefillLoadScale*max(prompt+queued-t.OverlapCredit, 0)) + t.Decode + t.Request
	}
	limit := in.sorted()
	if !ours {
		limit = 0 // the draw needs all that share the lead
	}
	order(out.Order, limit, func(a, b int) int { c, _ := compareKV(in, a, b); return c })
	out.Tied = tied(in, out)
	switch {
	case w.Temperature > 0:
		sample(in, out)
	case out.Tied > 1 && !ours:
		moveToFront(out.Order, below(in.Draw, out.Tied))
		out.TieBreak = TieDraw
	case out.Tied > 1:
		_, out.TieBreak = compareKV(in, out.Order[0], out.Order[1])
	}
}

// compareCost is cmp.Compare of the costs; the numbers among them, which nearly all
// are, take the short way.
func compareCost(x, y *decision.Candidate) int {
	switch {
	case x.Cost < y.Cost:
		return -1
	case x.Cost > y.Cost:
		return 1
	}
	return cmp.Compare(x.Cost, y.Cost)
}

// compareKV is the order of the kv policies by blocks.
func compareKV(in *Input, a, b int) (int, TieBreak) {
	if c := compareCost(&in.Candidates[a], &in.Candidates[b]); c != 0 {
		return c, TieNone
	}
	return compareTies(in, a, b)
}

// compareTies is the documented order of ranks that cost the same.
func compareTies(in *Input, a, b int) (int, TieBreak) {
	x, y := &in.Candidates[a], &in.Candidates[b]
	if c := cmp.Compare(y.OverlapBlocks, x.OverlapBlocks); c != 0 {
		return c, TieOverlap
	}
	if c := cmp.Compare(x.ResidentBlocks, y.ResidentBlocks); c != 0 {
		return c, TieResident
	}
	if c := cmp.Compare(x.LastTurn, y.LastTurn); c != 0 {
		return c, TieTurn
	}
	return cmp.Compare(x.Rank, y.Rank), TieLabel
}

// sample draws the first rank from a softmax over costs, scaled by their
// range as Dynamo does, and leaves the others in order behind it.
func sample(in *Input, out *Ranking) {
	lo := in.Candidates[out.Order[0]].Cost // by times not always the least
	hi := lo
	for _, i := range out.Order {
		lo, hi = min(lo, in.Candidates[i].Cost), max(hi, in.Candidates[i].Cost)
	}
	weight := func(i int) float64 {
		if in.Candidates[i].Cost == lo {
			return 1
		}
		return exp(-(in.Candidates[i].Cost - lo) / ((hi - lo) * in.Weights.Temperature))
	}
	sum := 0.0
	for _, i := range out.Order {
		sum += weight(i)
	}
	u := float64(float64(in.Draw>>11) / (1 << 53) * sum)
	pick := len(out.Order) - 1
	for k, i := range out.Order {
		if u -= weight(i); u < 0 {
			pick = k
			break
		}
	}
	moveToFront(out.Order, pick)
	out.Sampled = true
}

// byLoad orders by load: what an engine reports, or what this router has there if that is more.
// The request counts as often as a slow rank takes longer. The report is a scrape old, and a burst within one scrape must not land on one rank.
// Where a rank reports no load, the router's ledger alone is compared: it counts the same of
// all ranks. The ledger also breaks ties.
func byLoad(in *Input, out *Ranking, limit int) {
	known := !slices.ContainsFunc(out.Order, func(i int) bool { return !in.Candidates[i].HasLoad })
	for _, i := range out.Order {
		c := &in.Candidates[i]
		c.Cost = float64(c.ActiveRequests)
		if known {
			c.Cost = float64(max(c.Running+c.Waiting, c.ActiveRequests))
		}
		if c.Times > 1 {
			c.Cost = float64((c.Cost+1)*c.Times) - 1
		}
	}
	order(out.Order, limit, func(a, b int) int { c, _ := compareLoad(in, a, b); return c })
	out.Tied = tied(in, out)
	if out.Tied > 1 {
		_, out.TieBreak = compareLoad(in, out.Order[0], out.Order[1])
	}
}

func compareLoad(in *Input, a, b int) (int, TieBreak) {
	x, y := &in.Candidates[a], &in.Candidates[b]
	if c := compareCost(x, y); c != 0 {
		return c, TieNone
	}
	if c := cmp.Compare(x.ActiveRequests, y.ActiveRequests); c != 0 {
		return c, TieRequests
	}
	if c := cmp.Compare(x.DecodeBlocks, y.DecodeBlocks); c != 0 {
		return c, TieDecode
	}
	if in.Policy == Session && in.SessionKey != 0 { // the newest turns are this router's alone
		if c := cmp.Compare(in.sessionHash(x.Rank), in.sessionHash(y.Rank)); c != 0 {
			return c, TieSession
		}
	}
	if c := cmp.Compare(x.LastTurn, y.LastTurn); c != 0 {
		return c, TieTurn
	}
	return cmp.Compare(x.Rank, y.Rank), TieLabel
}

func rankRandom(in *Input, out *Ranking) {
	sortByLabel(in, out.Order)
	rotate(out.Order, below(in.Draw, len(out.Order)))
}

func rankRoundRobin(in *Input, out *Ranking) {
	out.Policy = RoundRobin
	eligible := len(out.Order)
	for i := range in.Candidates {
		if in.Candidates[i].Tried && in.Candidates[i].ExcludedCode != "" {
			out.Order = append(out.Order, i)
		}
	}
	sortByLabel(in, out.Order)
	rotate(out.Order, int(in.Turn%uint64(len(out.Order))))
	if len(out.Order) > eligible {
		out.Order = slices.DeleteFunc(out.Order, func(i int) bool { return in.Candidates[i].ExcludedCode != "" })
	}
}

// rankPowerOfTwo draws two different ranks, puts the less loaded first and the
// other second; the rest follow by load.
func rankPowerOfTwo(in *Input, out *Ranking) {
	n := len(out.Order)
	sortByLabel(in, out.Order)
	first, second := out.Order[0], out.Order[0]
	if n > 1 {
		a := below(in.Draw, n)
		b := below(mix(in.Draw), n-1)
		if b >= a {
			b++
		}
		first, second = out.Order[a], out.Order[b]
	}
	byLoad(in, out, 0)
	out.Tied, out.TieBreak = 0, TieNone
	if n == 1 {
		return
	}
	less, tie := compareLoad(in, first, second)
	if less > 0 {
		first, second = second, first
	}
	if tie != TieNone {
		out.Tied, out.TieBreak = 2, tie
	}
	moveToFront(out.Order, slices.Index(out.Order, second))
	moveToFront(out.Order, slices.Index(out.Order, first))
}

// rankSession puts the session's home first, if it can be chosen, and the others behind it by
// load. Where no home was looked for it orders by rendezvous hash.
func rankSession(in *Input, out *Ranking) {
	if in.SessionKey == 0 {
		out.Policy = LeastLoaded
		byLoad(in, out, in.sorted())
		return
	}
	if in.Home != "" {
		byLoad(in, out, in.sorted())
		if k := slices.IndexFunc(out.Order, func(i int) bool { return in.Candidates[i].Rank == in.Home }); k >= 0 {
			moveToFront(out.Order, k)
			out.Tied, out.TieBreak = 0, TieNone
		}
		return
	}
	for _, i := range out.Order {
		// 53 bits of the hash, as a share of 1: exact in a float64.
		in.Candidates[i].Cost = float64(in.sessionHash(in.Candidates[i].Rank)>>11) / (1 << 53)
	}
	order(out.Order, in.Limit, func(a, b int) int {
		x, y := &in.Candidates[a], &in.Candidates[b]
		if c := compareCost(x, y); c != 0 {
			return c
		}
		return cmp.Compare(x.Rank, y.Rank)
	})
}

// sessionHash is the rendezvous hash of the session and a rank: the least one is first.
func (in *Input) sessionHash(rank string) uint64 { return mix(in.SessionKey ^ fnv(rank)) }

// tied counts the ranks that share the cost of the first in order.
func tied(in *Input, out *Ranking) int {
	n, lead := 0, in.Candidates[out.Order[0]].Cost
	for _, i := range out.Order {
		if in.Candidates[i].Cost == lead {
			n++
		}
	}
	return n
}

func sortByLabel(in *Input, order []int) {
	slices.SortFunc(order, func(a, b int) int {
		return cmp.Compare(in.Candidates[a].Rank, in.Candidates[b].Rank)
	})
}

// below maps a draw to 0..n-1 without a division.
func below(draw uint64, n int) int {
	hi, _ := bits.Mul64(draw, uint64(n))
	return int(hi)
}
