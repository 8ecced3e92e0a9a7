package decide

import (
	"math/rand/v2"
	"slices"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/dynctl/dynctl/internal/rig/property"
	"github.com/dynctl/dynctl/internal/router/placement/decision"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/workers"
)

// before is the choice as it was before pairs were chosen: the best decode rank,
// whatever there is to prefill for it. ok is false where that went local only
// because remote could not be had, or to another rank, or nowhere.
func before(in *Input) (path route.Path, reason route.Reason, decode, prefill int, ok bool) {
	phase := in.Decode
	usable := false
	for i := range in.Prefill.Candidates {
		usable = usable || in.Prefill.Candidates[i].KeptOut == ""
	}
	switch {
	case len(in.PrefillPeers) == 0:
		phase.Phase = route.Aggregated
	case in.Rule.Threshold > 0 || in.Force == route.ForceLocal || whole(&in.Facts) != "" || !usable:
	case phase.Policy == selector.KVDynamo:
		phase.Weights.OverlapCredit = 0
	default:
		phase.Weights.OverlapCredit *= in.Rule.LoadCredit
	}
	if now := in.DecodePhase(); phase.Phase != now.Phase || phase.Weights != now.Weights {
		return // no prefill rank can be chosen: the decode rank does it all, and its blocks count in full
	}
	var rk selector.Ranking
	selector.Pick(&phase, &rk)
	d, any := rk.Best()
	if !any {
		return
	}
	c, f := &in.Rule, &in.Facts
	to := in.DecodePeers[d].Worker
	eff := f.ISL - selector.CachedTokens(f.ISL, in.Decode.Candidates[d].OverlapBlocks, in.Decode.BlockSize)
	connector := c.Connector
	if connector == workers.ConnectorNone {
		connector = to.Connector
	}
	alone := !(to.Role == workers.Decode && to.WireEngine() == workers.SGLang)
	intact := mustStayWhole(in, to, connector)
	p, remote, queued := -1, false, 0
	if intact == "" {
		phase := in.Prefill
		phase.Veto = make([]string, len(in.PrefillPeers))
		for i, k := range in.PrefillPeers {
			from := k.Worker
			alike := from.WireEngine() == to.WireEngine() && (c.Connector != workers.ConnectorNone || from.Connector == to.Connector)
			blocks := from.BlockSize == 0 || to.BlockSize == 0 || from.BlockSize == to.BlockSize
			reads := carries(connector, f.Kind, from) && !(f.Kind.IsChat() && from.ChatDiffers(to))
			shakes := connector.Reported() != workers.ConnectorNIXL || workers.HandshakeDiffers(from, to) == ""
			if from == to || !alike || !blocks || !reads || !shakes {
				phase.Veto[i] = "does not fit"
			}
		}
		selector.Pick(&phase, &rk)
		if p, remote = rk.Best(); remote {
			queued = in.Prefill.Candidates[p].PrefillTokens
		} else {
			p = -1
		}
	}
	path, reason = route.Local, route.ReasonBelow
	switch {
	case in.Force == route.ForceRemote:
		path, reason = route.Remote, route.ReasonForcedRemote
	case c.Threshold <= 0:
		path, reason = route.Remote, route.ReasonAlways
	case f.Source == route.FromNothing:
		reason = route.ReasonLengthUnknown
	case c.On == OnISL && f.ISL >= c.Threshold:
		path, reason = route.Remote, route.ReasonISLAbove
	case c.On == OnISL:
		reason = route.ReasonISLBelow
	case eff >= c.Threshold:
		path, reason = route.Remote, route.ReasonAbove
	}
	if in.Force != route.ForceRemote {
		k := &in.Decode.Candidates[d]
		if path == route.Local && c.DecodeGate > 0 && k.HasLoad && k.KVUsage > c.DecodeGate {
			path, reason = route.Remote, route.ReasonDecodeBusy
		}
		if path == route.Remote && c.PrefillGate > 0 && remote && queued > c.PrefillGate {
			path, reason = route.Local, route.ReasonPrefillBusy
		}
	}
	switch {
	case in.Force == route.ForceLocal:
		path, reason = route.Local, route.ReasonForcedLocal
	case intact != "":
		path, reason = route.Local, intact
	case path == route.Local && !alone && remote:
		path, reason = route.Remote, route.ReasonDecodeOnly
	}
	return path, reason, d, p, path == route.Remote && remote || path == route.Local && alone
}

// Where the best decode rank could do what the rule wanted, the pair is the one
// that was chosen before. Where it could not, no pair is chosen that cannot, and
// nothing falls back as long as one can.
func TestPairs(t *testing.T) {
	var same, other, better int
	var p, again Plan
	property.Check(t, func(t *rapid.T) {
		in := someInput(rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "fleet and request"), 11)))
		path, reason, decode, prefill, ok := before(in)
		MakePlan(in, &p)
		if ok {
			same++
			if p.Path != path || p.Reason != reason || p.DecodeIndex != decode || p.PrefillIndex != prefill {
				t.Fatalf("%s because %s on %d from %d, before %s because %s on %d from %d", p.Path, p.Reason, p.DecodeIndex, p.PrefillIndex, path, reason, decode, prefill)
			}
		} else {
			other++
			if p.Err == nil && !p.Reason.Degraded() {
				better++
			}
		}
		was, is := line(in, &p), [2]decision.Decision{}
		p.Fill(&is[0], in, decision.Kept)
		for _, k := range slices.Concat(in.DecodePeers, in.PrefillPeers) {
			k.Worker.Classify() // what is found once for workers that are like is what each would have
		}
		MakePlan(in, &again)
		again.Fill(&is[1], in, decision.Kept)
		if d := gocmp.Diff(is[0], is[1]); d != "" || was != line(in, &again) {
			t.Fatalf("the same input gives another plan (-first +again)\n%s", d)
		}
		if p.Err == nil && p.Path == route.Remote && in.pairs(p.PrefillIndex, p.DecodeIndex, p.Connector) != (unpaired{}) {
			t.Fatalf("%s and %s are no pair: %+v", in.Prefill.Candidates[p.PrefillIndex].Rank, in.Decode.Candidates[p.DecodeIndex].Rank, in.pairs(p.PrefillIndex, p.DecodeIndex, p.Connector))
		}
		if !p.Reason.Degraded() {
			return
		}
		for d := range in.DecodePeers {
			if !in.Decode.Eligible(d) {
				continue
			}
			w := in.wish(d)
			for i := range in.PrefillPeers {
				if in.Prefill.Eligible(i) && w.path == route.Remote && in.pairs(i, d, w.connector) == (unpaired{}) {
					t.Fatalf("%s, and yet %s could prefill for %s", p.Reason, in.Prefill.Candidates[i].Rank, in.Decode.Candidates[d].Rank)
				}
			}
		}
	})
	if same == 0 || other == 0 || better == 0 {
		t.Errorf("%d as before, %d otherwise, of which %d are served as the rule wants", same, other, better)
	}
}
