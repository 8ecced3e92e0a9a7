package decide

import (
	"errors"
	"fmt"
	"net/url"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/dynctl/dynctl/internal/rig/property"
	"github.com/dynctl/dynctl/internal/router/placement/decision"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/workers"
)

// worker makes a worker with one rank; dp more than 1 makes several.
func worker(name string, role workers.Role, c workers.Connector, dp int) *workers.Worker {
	u, err := url.Parse("http://127.0.0.1:8" + fmt.Sprint(100+len(name)))
	if err != nil {
		panic(err)
	}
	w := &workers.Worker{Facts: workers.Facts{Engine: workers.VLLM, Role: role, Connector: c, BlockSize: 32}, Name: name, URL: u, State: &workers.State{}}
	for i := range dp {
		w.Ranks = append(w.Ranks, &workers.Rank{WorkerName: name, DP: i, Label: fmt.Sprintf("%s/dp%d", name, i)})
	}
	return w
}

// add makes the ranks of w candidates of a phase.
func add(in *selector.Input, peers *[]workers.Peer, w *workers.Worker, c decision.Candidate) {
	for _, r := range w.Ranks {
		c.Rank = r.Label
		in.Candidates = append(in.Candidates, c)
		*peers = append(*peers, workers.Peer{Worker: w, Rank: r})
	}
}

// pair is a chat of 4096 tokens for one prefill and one decode worker.
func pair(threshold int) *Input {
	in := &Input{
		Rule:  Rule{Threshold: threshold, LoadCredit: LoadCredit},
		Facts: api.Facts{Kind: api.Chat, Splittable: true, ISL: 4096, Source: route.FromLocal, N: 1, Prompts: 1, MaxTokens: -1, MinTokens: -1},
	}
	for _, s := range []*selector.Input{&in.Decode, &in.Prefill} {
		s.Policy, s.Weights, s.ISL, s.BlockSize = selector.KV, selector.DefaultWeights(), 4096, 32
	}
	in.Decode.Phase, in.Prefill.Phase = route.Decode, route.Prefill
	add(&in.Decode, &in.DecodePeers, worker("decode-0", workers.Decode, workers.ConnectorNIXL, 1), decision.Candidate{})
	add(&in.Prefill, &in.PrefillPeers, worker("prefill-0", workers.Prefill, workers.ConnectorNIXL, 1), decision.Candidate{})
	return in
}

func isl(n int) func(*Input) {
	return func(in *Input) { in.Facts.ISL, in.Decode.ISL, in.Prefill.ISL = n, n, n }
}

func chars(n int) func(*Input) {
	return func(in *Input) { isl(n / 4)(in); in.Facts.Source = route.FromEstimate }
}

// version sets the versions of the prefill and the decode workers.
func version(prefill, decode string) func(*Input) {
	return func(in *Input) {
		for _, p := range in.PrefillPeers {
			p.Worker.Version = prefill
		}
		for _, p := range in.DecodePeers {
			p.Worker.Version = decode
		}
	}
}

// chats sets what the workers make of a chat.
func chats(prefill, decode string) func(*Input) {
	return func(in *Input) {
		for _, p := range in.PrefillPeers {
			p.Worker.ChatTokens = prefill
		}
		for _, p := range in.DecodePeers {
			p.Worker.ChatTokens = decode
		}
	}
}

// connector sets that of all workers.
func connector(c workers.Connector) func(*Input) {
	return func(in *Input) {
		for _, p := range append(in.PrefillPeers[:1:1], in.DecodePeers...) {
			p.Worker.Connector = c
		}
	}
}

func do(f ...func(*Input)) []func(*Input) { return f }

func TestCachedTokensKeepsTheLastToken(t *testing.T) {
	for _, tt := range []struct{ isl, overlap, bs, want int }{
		{0, 5, 32, 0},
		{100, 0, 32, 0},
		{100, 3, 32, 96},
		{100, 9, 32, 96},
		{128, 4, 32, 96},
		{129, 4, 32, 128},
		{128, 3, 32, 96},
		{1, 1, 1, 0},
		{2, 2, 1, 1},
		{100, 3, 0, 0},
		{100, -1, 32, 0},
	} {
		if got := selector.CachedTokens(tt.isl, tt.overlap, tt.bs); got != tt.want {
			t.Errorf("CachedTokens(%d, %d, %d) = %d, want %d", tt.isl, tt.overlap, tt.bs, got, tt.want)
		}
	}
}

// TestDecodePhase: a decode rank's cached blocks count in full where they save
// computing, and little where they save a transfer; without a prefill rank that
// could be chosen it is an aggregated fleet.
func TestDecodePhase(t *testing.T) {
	credit := selector.DefaultWeights().OverlapCredit
	for _, tt := range []struct {
		name      string
		threshold int
		change    func(*Input)
		phase     route.Phase
		credit    float64
	}{
		{"always remote", 0, nil, route.Decode, credit * LoadCredit},
		{"always remote, as Dynamo", 0, func(in *Input) { in.Decode.Policy = selector.KVDynamo }, route.Decode, 0},
		{"by threshold", 1, nil, route.Decode, credit},
		{"forced local", 0, func(in *Input) { in.Force = route.ForceLocal }, route.Decode, credit},
		{"forced remote", 0, func(in *Input) { in.Force = route.ForceRemote }, route.Decode, credit * LoadCredit},
		{"not in two legs", 0, func(in *Input) { in.Facts.N = 2 }, route.Decode, credit},
		{"no prefill rank is usable", 0, func(in *Input) { in.Prefill.Candidates[0].KeptOut = "draining" }, route.Aggregated, credit},
		{"every prefill rank is busy", 0, func(in *Input) { in.Prefill.Busy.PrefillTokens, in.Prefill.Candidates[0].PrefillTokens = 10, 11 }, route.Aggregated, credit},
		{"no prefill ranks", 0, func(in *Input) { in.Prefill.Candidates, in.PrefillPeers = nil, nil }, route.Aggregated, credit},
	} {
		in := pair(tt.threshold)
		if tt.change != nil {
			tt.change(in)
		}
		phase := in.DecodePhase()
		if phase.Phase != tt.phase || phase.Weights.OverlapCredit != tt.credit {
			t.Errorf("%s: phase %s with credit %v, want %s with %v", tt.name, phase.Phase, phase.Weights.OverlapCredit, tt.phase, tt.credit)
		}
		if in.Decode.Weights != selector.DefaultWeights() || in.Decode.Phase != route.Decode {
			t.Errorf("%s: the input was changed: %+v", tt.name, in.Decode.Weights)
		}
	}
}

// TestDecodeWorkerThatNeedsPrefill: SGLang's decode workers refuse a request
// without a rendezvous, so that "local" needs another worker.
func TestDecodeWorkerThatNeedsPrefill(t *testing.T) {
	sglang := func(in *Input) {
		for _, p := range append(in.DecodePeers, in.PrefillPeers...) {
			p.Worker.Engine, p.Worker.Connector = workers.SGLang, workers.ConnectorSGLang
		}
		in.DecodePeers[0].Worker.Role = workers.Decode
	}
	noPrefillRanks := func(in *Input) { in.Prefill.Candidates, in.PrefillPeers = nil, nil }
	aggregated := func(in *Input) {
		c := in.Decode.Candidates[0]
		c.Rank, c.Slot, c.ActiveRequests = "both/dp0", 77, 50
		w := *in.DecodePeers[0].Worker
		w.Role = workers.Aggregated
		in.Decode.Candidates = append(in.Decode.Candidates, c)
		in.DecodePeers = append(in.DecodePeers, workers.Peer{Worker: &w, Rank: in.DecodePeers[0].Rank})
	}
	for _, tt := range []struct {
		name   string
		change []func(*Input)
		path   route.Path
		reason route.Reason
		decode int
		err    error
	}{
		{"below the threshold goes remote", do(isl(500)), route.Remote, route.ReasonDecodeOnly, 0, nil},
		{"so does less than a block", do(isl(5)), route.Remote, route.ReasonDecodeOnly, 0, nil},
		{"without prefill nobody can", do(isl(500), noPrefillRanks), "", route.ReasonNoPrefill, 0, ErrNoPrefill},
		{"forced local nobody can", do(isl(500), func(in *Input) { in.Force = route.ForceLocal }), "", route.ReasonForcedLocal, 0, ErrNoDecode},
		{"forced local an aggregated one can", do(isl(500), aggregated, func(in *Input) { in.Force = route.ForceLocal }), route.Local, route.ReasonForcedLocal, 1, nil},
		{"without prefill an aggregated one can", do(isl(50_000), aggregated, noPrefillRanks), route.Local, route.ReasonNoPrefill, 1, nil},
		{"an aggregated one takes what is not split", do(isl(500), aggregated, func(in *Input) { in.Facts.Splittable = false }), route.Local, route.ReasonEndpoint, 1, nil},
		{"what is not split goes on without one", do(isl(500), func(in *Input) { in.Facts.Splittable = false }), route.Local, route.ReasonEndpoint, 0, nil},
		{"several prompts have a room each", do(isl(500), func(in *Input) { in.Facts.Prompts = 3 }), route.Remote, route.ReasonDecodeOnly, 0, nil},
		{"both read images", do(isl(500), func(in *Input) { in.Facts.Multimodal = true }), route.Remote, route.ReasonDecodeOnly, 0, nil},
		{"several answers nobody can", do(isl(500), func(in *Input) { in.Facts.N = 2 }), "", route.ReasonAnswers, 0, ErrWhole},
		{"nor several answers to several prompts", do(isl(500), func(in *Input) { in.Facts.N, in.Facts.Prompts = 2, 2 }), "", route.ReasonAnswers, 0, ErrWhole},
		{"several answers an aggregated one can", do(isl(500), aggregated, func(in *Input) { in.Facts.N = 2 }), route.Local, route.ReasonAnswers, 1, nil},
		{"several answers wait for an aggregated one", do(isl(500), aggregated, func(in *Input) { in.Facts.N, in.Decode.Candidates[1].KeptOut = 2, "draining" }), "", route.ReasonAnswers, 0, ErrNoDecode},
		{"messages nobody can", do(isl(500), func(in *Input) { in.Facts.Kind = api.Messages }), "", route.ReasonEndpoint, 0, ErrWhole},
		{"responses nobody can", do(isl(500), func(in *Input) { in.Facts.Kind = api.Responses }), "", route.ReasonEndpoint, 0, ErrWhole},
	} {
		t.Run(tt.name, func(t *testing.T) {
			in := pair(1000)
			sglang(in)
			for _, f := range tt.change {
				f(in)
			}
			var p Plan
			MakePlan(in, &p)
			if !errors.Is(p.Err, tt.err) || p.Path != tt.path {
				t.Fatalf("%q, error %v; want %q, %v", p.Path, p.Err, tt.path, tt.err)
			}
			if tt.err == nil && (p.Reason != tt.reason || p.DecodeIndex != tt.decode) {
				t.Fatalf("because %s on %d, want because %s on %d", p.Reason, p.DecodeIndex, tt.reason, tt.decode)
			}
		})
	}
}

func TestPath(t *testing.T) {
	cached := func(blocks int) func(*Input) {
		return func(in *Input) { in.Decode.Candidates[0].OverlapBlocks = blocks }
	}
	noPrefillRanks := func(in *Input) { in.Prefill.Candidates, in.PrefillPeers = nil, nil }
	for _, tt := range []struct {
		name      string
		threshold int
		change    []func(*Input)
		path      route.Path
		reason    route.Reason
	}{
		{"6: threshold 0, short prompt", 0, do(chars(5)), route.Remote, route.ReasonAlways},
		{"6: threshold 0, one token by count", 0, do(isl(1)), route.Remote, route.ReasonAlways},
		{"6: threshold 0, 100,000 characters", 0, do(chars(100_000)), route.Remote, route.ReasonAlways},
		{"7: 20,000 characters at 4096", 4096, do(chars(20_000)), route.Remote, route.ReasonAbove},
		{"8: 400 characters at 4096", 4096, do(chars(400)), route.Local, route.ReasonBelow},
		{"9: 4000 characters at 1000", 1000, do(chars(4000)), route.Remote, route.ReasonAbove},
		{"9: 3999 characters at 1000", 1000, do(chars(3999)), route.Local, route.ReasonBelow},
		{"9: 4003 characters at 1001", 1001, do(chars(4003)), route.Local, route.ReasonBelow},
		{"10: negative threshold", -1, do(isl(40)), route.Remote, route.ReasonAlways},
		{"cached prefix counts", 4096, do(cached(1)), route.Local, route.ReasonBelow},
		{"eff_isl at the threshold", 4096 - 32, do(cached(1)), route.Remote, route.ReasonAbove},
		{"eff_isl one below the threshold", 4096 - 31, do(cached(1)), route.Local, route.ReasonBelow},
		{"on isl the cache does not count", 4096, do(cached(100), func(in *Input) { in.Rule.On = OnISL }), route.Remote, route.ReasonISLAbove},
		{"on isl below", 4097, do(func(in *Input) { in.Rule.On = OnISL }), route.Local, route.ReasonISLBelow},
		{"length unknown", 1, do(isl(0), func(in *Input) { in.Facts.Source = route.FromNothing }), route.Local, route.ReasonLengthUnknown},
		{"length unknown, always remote", 0, do(isl(0), func(in *Input) { in.Facts.Source = route.FromNothing }), route.Remote, route.ReasonAlways},
		{"forced local", 0, do(func(in *Input) { in.Force = route.ForceLocal }), route.Local, route.ReasonForcedLocal},
		{"forced remote", 9999, do(func(in *Input) { in.Force = route.ForceRemote }), route.Remote, route.ReasonForcedRemote},
		{"auto", 9999, do(func(in *Input) { in.Force = route.ForceAuto }), route.Local, route.ReasonBelow},
		{"forced remote cannot split", 0, do(func(in *Input) { in.Force, in.Facts.N = route.ForceRemote, 2 }), route.Local, route.ReasonAnswers},
		{"A12: embeddings", 0, do(func(in *Input) { in.Facts.Kind, in.Facts.Splittable = api.Embeddings, false }), route.Local, route.ReasonEndpoint},
		{"A12: rerank", 0, do(func(in *Input) { in.Facts.Kind, in.Facts.Splittable = api.Rerank, false }), route.Local, route.ReasonEndpoint},
		{"an engine of unknown age gets no transfer fields on responses", 0, do(func(in *Input) { in.Facts.Kind = api.Responses }), route.Local, route.ReasonEndpoint},
		{"nor does an old one on messages", 0, do(version("0.31.2", "0.31.2"), func(in *Input) { in.Facts.Kind = api.Messages }), route.Local, route.ReasonEndpoint},
		{"an old prefill engine is not asked", 0, do(version("0.31.2", "0.32.0"), func(in *Input) { in.Facts.Kind = api.Messages }), route.Local, route.ReasonPrefillExcluded},
		{"messages", 0, do(version("0.33.1rc1.dev9+gabc", "0.33.1rc1.dev9+gabc"), func(in *Input) { in.Facts.Kind = api.Messages }), route.Remote, route.ReasonAlways},
		{"responses", 0, do(version("v1.0", "v1.0"), func(in *Input) { in.Facts.Kind = api.Responses }), route.Remote, route.ReasonAlways},
		{"two versions", 0, do(version("0.32.0", "0.33.0")), route.Local, route.ReasonPrefillExcluded},
		{"two versions over Mooncake", 0, do(version("0.32.0", "0.33.0"), connector(workers.ConnectorMooncake)), route.Remote, route.ReasonAlways},
		{"two versions that push", 0, do(version("0.32.0", "0.33.0"), connector(workers.ConnectorNIXLPush)), route.Local, route.ReasonPrefillExcluded},
		{"one version that is not known", 0, do(version("0.32.0", "")), route.Remote, route.ReasonAlways},
		{"two types of cache", 0, do(func(in *Input) {
			in.PrefillPeers[0].Worker.CacheType, in.DecodePeers[0].Worker.CacheType = "fp8", "auto"
		}), route.Local, route.ReasonPrefillExcluded},
		{"messages over LMCache", 0, do(version("0.32.0", "0.32.0"), connector(workers.ConnectorLMCache), func(in *Input) { in.Facts.Kind = api.Messages }), route.Remote, route.ReasonAlways},
		{"responses over LMCache", 0, do(version("0.32.0", "0.32.0"), connector(workers.ConnectorLMCache), func(in *Input) { in.Facts.Kind = api.Responses }), route.Remote, route.ReasonAlways},
		{"messages of any age over shared storage", 0, do(connector(workers.ConnectorSharedStorage), func(in *Input) { in.Facts.Kind = api.Messages }), route.Remote, route.ReasonAlways},
		{"engines that make other tokens of a chat", 0, do(chats("37:aa", "39:bb"), func(in *Input) { in.Facts.Kind = api.Chat }), route.Local, route.ReasonPrefillExcluded},
		{"the same of messages", 0, do(version("0.32.0", "0.32.0"), chats("37:aa", "39:bb"), func(in *Input) { in.Facts.Kind = api.Messages }), route.Local, route.ReasonPrefillExcluded},
		{"the same of responses", 0, do(version("0.32.0", "0.32.0"), chats("37:aa", "39:bb"), func(in *Input) { in.Facts.Kind = api.Responses }), route.Local, route.ReasonPrefillExcluded},
		{"the same of ids", 0, do(chats("37:aa", "39:bb"), func(in *Input) { in.Facts.Kind = api.Completion }), route.Remote, route.ReasonAlways},
		{"engines that make the same tokens of a chat", 0, do(chats("37:aa", "37:aa"), func(in *Input) { in.Facts.Kind = api.Chat }), route.Remote, route.ReasonAlways},
		{"one that does not report its usage", 0, do(chats("", "37:aa"), func(in *Input) { in.Facts.Kind = api.Chat }), route.Remote, route.ReasonAlways},
		{"a response that goes on from another", 0, do(version("0.32.0", "0.32.0"), func(in *Input) { in.Facts.Kind, in.Facts.Continues = api.Responses, true }), route.Local, route.ReasonContinues},
		{"tools that the engine runs", 0, do(version("0.32.0", "0.32.0"), func(in *Input) { in.Facts.Kind, in.Facts.ServerTools = api.Responses, true }), route.Local, route.ReasonServerTools},
		{"several prompts", 0, do(func(in *Input) { in.Facts.Prompts = 3 }), route.Local, route.ReasonPrompts},
		{"n > 1", 0, do(func(in *Input) { in.Facts.N = 3 }), route.Local, route.ReasonAnswers},
		{"multimodal", 0, do(func(in *Input) { in.Facts.Multimodal = true }), route.Local, route.ReasonMultimodal},
		{"multimodal that NIXL of this version moves", 0, do(version("0.32.0", "0.32.0"), func(in *Input) { in.Facts.Multimodal = true }), route.Remote, route.ReasonAlways},
		{"multimodal that the decode engine's version may not", 0, do(version("0.32.0", "0.31.0"), func(in *Input) { in.Facts.Multimodal = true }), route.Local, route.ReasonMultimodal},
		{"multimodal that the prefill engine's version may not", 0, do(version("0.31.0", "0.32.0"), func(in *Input) { in.Facts.Multimodal = true }), route.Local, route.ReasonPrefillExcluded},
		{"multimodal that LMCache may not move", 0, do(version("0.32.0", "0.32.0"), func(in *Input) { in.Facts.Multimodal, in.Rule.Connector = true, workers.ConnectorLMCache }), route.Local, route.ReasonMultimodal},
		{"more than media", 0, do(version("0.32.0", "0.32.0"), func(in *Input) { in.Facts.Multimodal, in.Facts.Opaque = true, true }), route.Local, route.ReasonMultimodal},
		{"prompt logprobs", 0, do(func(in *Input) { in.Facts.PromptLogprobs = true }), route.Local, route.ReasonPromptLogprobs},
		{"routed experts", 0, do(func(in *Input) { in.Facts.RoutedExperts = true }), route.Local, route.ReasonRoutedExperts},
		{"no output", 0, do(func(in *Input) { in.Facts.MaxTokens = 0 }), route.Local, route.ReasonNoOutput},
		{"less than a block", 16, do(isl(31)), route.Local, route.ReasonShort},
		{"less than a block in shared storage", 0, do(isl(31), func(in *Input) { in.Rule.Connector = workers.ConnectorSharedStorage }), route.Local, route.ReasonShort},
		{"decode without connector", 0, do(func(in *Input) { in.DecodePeers[0].Worker.Connector = workers.ConnectorNone }), route.Local, route.ReasonNoConnector},
		{"no prefill worker", 0, do(noPrefillRanks), route.Local, route.ReasonNoPrefill},
		{"no prefill worker, below", 9999, do(noPrefillRanks), route.Local, route.ReasonBelow},
		{"every prefill rank busy", 0, do(func(in *Input) { in.Prefill.Busy.PrefillTokens, in.Prefill.Candidates[0].PrefillTokens = 10, 11 }), route.Local, route.ReasonPrefillAllBusy},
		{"every prefill rank draining", 0, do(func(in *Input) { in.Prefill.Candidates[0].KeptOut = "draining" }), route.Local, route.ReasonPrefillExcluded},
		{"another connector", 0, do(func(in *Input) { in.PrefillPeers[0].Worker.Connector = workers.ConnectorLMCache }), route.Local, route.ReasonPrefillExcluded},
		{"another engine", 0, do(func(in *Input) { in.PrefillPeers[0].Worker.Engine = workers.SGLang }), route.Local, route.ReasonPrefillExcluded},
		{"another block size", 0, do(func(in *Input) { in.PrefillPeers[0].Worker.BlockSize = 64 }), route.Local, route.ReasonPrefillExcluded},
		{"prefill gate", 0, do(func(in *Input) { in.Rule.PrefillGate, in.Prefill.Candidates[0].PrefillTokens = 100, 101 }), route.Local, route.ReasonPrefillBusy},
		{"prefill gate at its limit", 0, do(func(in *Input) { in.Rule.PrefillGate, in.Prefill.Candidates[0].PrefillTokens = 100, 100 }), route.Remote, route.ReasonAlways},
		{"prefill gate does not stop the forced", 0, do(func(in *Input) {
			in.Force, in.Rule.PrefillGate, in.Prefill.Candidates[0].PrefillTokens = route.ForceRemote, 1, 50
		}), route.Remote, route.ReasonForcedRemote},
		{"decode gate", 9999, do(func(in *Input) {
			in.Rule.DecodeGate, in.Decode.Candidates[0].HasLoad, in.Decode.Candidates[0].KVUsage = 0.8, true, 0.81
		}), route.Remote, route.ReasonDecodeBusy},
		{"decode gate without a figure", 9999, do(func(in *Input) { in.Rule.DecodeGate, in.Decode.Candidates[0].KVUsage = 0.8, 0.99 }), route.Local, route.ReasonBelow},
		{"both gates", 9999, do(func(in *Input) {
			in.Rule.DecodeGate, in.Decode.Candidates[0].HasLoad, in.Decode.Candidates[0].KVUsage = 0.8, true, 0.81
			in.Rule.PrefillGate, in.Prefill.Candidates[0].PrefillTokens = 100, 101
		}), route.Local, route.ReasonPrefillBusy},
	} {
		t.Run(tt.name, func(t *testing.T) {
			in := pair(tt.threshold)
			for _, f := range tt.change {
				f(in)
			}
			var p Plan
			MakePlan(in, &p)
			if p.Err != nil || p.Path != tt.path || p.Reason != tt.reason {
				t.Fatalf("%s because %s, error %v; want %s because %s", p.Path, p.Reason, p.Err, tt.path, tt.reason)
			}
			if p.Path == route.Remote && p.PrefillIndex < 0 {
				t.Error("a remote plan without a prefill rank")
			}
			if words := p.Words(in); words == "" || words == string(p.Reason) {
				t.Errorf("no words for %s", p.Reason)
			}
			in.Rule.Fallback = FallbackError
			MakePlan(in, &p)
			if wantErr := tt.reason.Degraded(); wantErr != (p.Err != nil) {
				t.Errorf("with fallback error: %v", p.Err)
			} else if wantErr && (!errors.Is(p.Err, ErrNoPrefill) || p.Path != "") {
				t.Errorf("with fallback error: path %q, error %v", p.Path, p.Err)
			}
		})
	}
}

// TestEmptyPools: which pool is empty is distinguished.
func TestEmptyPools(t *testing.T) {
	in := pair(0)
	in.Rule.Fallback = FallbackError
	in.Prefill.Candidates, in.PrefillPeers = nil, nil
	var p Plan
	MakePlan(in, &p)
	if !errors.Is(p.Err, ErrNoPrefill) || errors.Is(p.Err, ErrNoDecode) || p.Reason != route.ReasonNoPrefill {
		t.Errorf("no prefill: %v, %s", p.Err, p.Reason)
	}
	in.Decode.Candidates, in.DecodePeers = nil, nil
	MakePlan(in, &p)
	if !errors.Is(p.Err, ErrNoDecode) || !errors.Is(p.Err, selector.ErrNoCandidates) || p.DecodeIndex != -1 || p.PrefillIndex != -1 {
		t.Errorf("no decode: %v, indices %d %d", p.Err, p.DecodeIndex, p.PrefillIndex)
	}
	in = pair(0)
	in.Decode.Busy.PrefillTokens, in.Decode.Candidates[0].PrefillTokens = 1, 2
	MakePlan(in, &p)
	if !errors.Is(p.Err, selector.ErrAllBusy) {
		t.Errorf("busy decode: %v", p.Err)
	}
}

// TestThresholdZero: threshold 0 with one of each goes through both.
func TestThresholdZero(t *testing.T) {
	var p Plan
	in := pair(0)
	MakePlan(in, &p)
	got := []any{p.Path, in.Decode.Candidates[p.DecodeIndex].Rank, in.Prefill.Candidates[p.PrefillIndex].Rank, p.Connector}
	if d := cmp.Diff([]any{route.Remote, "decode-0/dp0", "prefill-0/dp0", workers.ConnectorNIXL}, got); d != "" {
		t.Error(d)
	}
}

// The prefill rank is chosen among those that can send to the decode rank, and
// what was predicted is in the plan.
func TestPlanFigures(t *testing.T) {
	in := pair(1024)
	add(&in.Prefill, &in.PrefillPeers, worker("prefill-lm", workers.Prefill, workers.ConnectorLMCache, 1), decision.Candidate{OverlapBlocks: 128})
	add(&in.Prefill, &in.PrefillPeers, worker("prefill-dp", workers.Prefill, workers.ConnectorNIXL, 2), decision.Candidate{OverlapBlocks: 64, PrefillTokens: 96})
	in.Decode.Candidates[0].OverlapBlocks, in.Decode.Candidates[0].PrefillTokens = 32, 50
	var p Plan
	MakePlan(in, &p)
	if got := in.Prefill.Candidates[p.PrefillIndex].Rank; got != "prefill-dp/dp0" {
		t.Errorf("prefill on %s", got)
	}
	if got := in.Prefill.Why(1); got != "connector differs from the decode worker's" {
		t.Errorf("prefill-lm: %q", got)
	}
	type figures struct {
		Eff, Cached, PrefillCached int
		Local, Remote              Work
	}
	want := figures{3072, 1024, 2048, Work{Compute: 3072, Queued: 50}, Work{Compute: 2048, Queued: 96, Transfer: 3072}}
	if d := cmp.Diff(want, figures{p.EffISL, p.CachedTokens, p.PrefillCached, p.Local, p.Remote}); d != "" {
		t.Error(d)
	}
	if in.Prefill.Veto != nil {
		t.Error("MakePlan changed its input")
	}
}

// Invariant 11 for plans: the same input gives the same plan, also in a Plan
// that was used before; a remote plan has both ranks; a path that the request
// cannot take is never taken.
func TestPlanProperties(t *testing.T) {
	var reused Plan
	property.Check(t, func(t *rapid.T) {
		in := pair(rapid.IntRange(-1, 5000).Draw(t, "threshold"))
		isl(rapid.IntRange(0, 6000).Draw(t, "isl"))(in)
		in.Decode.Candidates[0].OverlapBlocks = rapid.IntRange(0, 200).Draw(t, "overlap")
		in.Force = rapid.SampledFrom([]route.Force{route.ForceAuto, route.ForceLocal, route.ForceRemote}).Draw(t, "force")
		in.Facts.N = rapid.IntRange(1, 2).Draw(t, "n")
		in.Facts.Kind = rapid.SampledFrom([]api.Kind{api.Chat, api.Completion, api.Responses, api.Generate}).Draw(t, "kind")
		in.Rule.On = rapid.SampledFrom([]Measure{OnEffISL, OnISL, ""}).Draw(t, "on")
		if rapid.Bool().Draw(t, "no prefill") {
			in.Prefill.Candidates[0].KeptOut = "draining"
		}
		var p Plan
		MakePlan(in, &p)
		MakePlan(in, &reused)
		if p.Path != reused.Path || p.Reason != reused.Reason || p.EffISL != reused.EffISL || p.PrefillIndex != reused.PrefillIndex {
			t.Fatalf("a reused plan differs: %s %s, %s %s", p.Path, p.Reason, reused.Path, reused.Reason)
		}
		if p.EffISL < 0 || p.EffISL > in.Facts.ISL || in.Facts.ISL > 0 && p.EffISL == 0 {
			t.Fatalf("eff_isl %d of %d", p.EffISL, in.Facts.ISL)
		}
		whole := in.Facts.N > 1 || in.Facts.Kind == api.Responses
		if p.Path == route.Remote && (p.PrefillIndex < 0 || whole || in.Force == route.ForceLocal) {
			t.Fatalf("remote because %s", p.Reason)
		}
	})
}

func TestChooseAllocatesNothing(t *testing.T) {
	in, p := pair(1000), &Plan{}
	MakePlan(in, p)
	if n := testing.AllocsPerRun(100, func() { MakePlan(in, p) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func BenchmarkChoose64x64(b *testing.B) {
	in := pair(1000)
	for i := range 63 {
		add(&in.Decode, &in.DecodePeers, worker(fmt.Sprintf("decode-%d", i+1), workers.Decode, workers.ConnectorNIXL, 1), decision.Candidate{OverlapBlocks: i, DecodeBlocks: 1000 - i})
		add(&in.Prefill, &in.PrefillPeers, worker(fmt.Sprintf("prefill-%d", i+1), workers.Prefill, workers.ConnectorNIXL, 1), decision.Candidate{OverlapBlocks: i, PrefillTokens: 100 * i})
	}
	in.Decode.Limit, in.Prefill.Limit = 4, 4
	var p Plan
	b.ReportAllocs()
	for b.Loop() {
		MakePlan(in, &p)
	}
}

// TestRevisions: a pair is of one revision, and of one slice while that has a
// prefill rank to choose; a decode rank without a partner is not chosen while
// another has one.
func TestRevisions(t *testing.T) {
	type who struct{ revision, slice, out string }
	for _, tt := range []struct {
		name            string
		prefill, decode []who
		want            string // prefill and decode rank, or the reason
		why             map[string]string
	}{
		{"neither side states one", []who{{}}, []who{{}}, "p/0 d/0", nil},
		{"one side states one", []who{{revision: "a"}}, []who{{}}, "p/0 d/0", nil},
		{"the other revision", []who{{revision: "a"}}, []who{{revision: "b"}}, "prefill_all_excluded", map[string]string{"p/0": "revision differs from the decode worker's"}},
		{"the decode rank with a partner", []who{{revision: "b"}}, []who{{revision: "a"}, {revision: "b"}}, "p/0 d/1", map[string]string{"d/0": "no prefill worker with its revision"}},
		{"its own slice", []who{{revision: "a", slice: "0"}, {revision: "a", slice: "1"}}, []who{{revision: "a", slice: "1"}}, "p/1 d/0", map[string]string{"p/0": "slice differs from the decode worker's"}},
		{"another slice in need", []who{{revision: "a", slice: "0"}, {revision: "a", slice: "1", out: "draining"}}, []who{{revision: "a", slice: "1"}}, "p/0 d/0", nil},
		{"not the slice of another revision", []who{{revision: "a", slice: "0"}, {revision: "b", slice: "1"}}, []who{{revision: "a", slice: "1"}}, "p/0 d/0", nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			in := pair(0)
			in.Decode.Candidates, in.DecodePeers, in.Prefill.Candidates, in.PrefillPeers = nil, nil, nil, nil
			fill := func(s *selector.Input, peers *[]workers.Peer, role workers.Role, letter string, list []who) {
				for i, k := range list {
					w := worker(fmt.Sprintf("%s%d", letter, i), role, workers.ConnectorNIXL, 1)
					w.Revision, w.Slice, w.Ranks[0].Label = k.revision, k.slice, fmt.Sprintf("%s/%d", letter, i)
					// The first would be chosen: it has less to do.
					add(s, peers, w, decision.Candidate{KeptOut: k.out, PrefillTokens: 100 * i, DecodeBlocks: 10 * i})
				}
			}
			fill(&in.Decode, &in.DecodePeers, workers.Decode, "d", tt.decode)
			fill(&in.Prefill, &in.PrefillPeers, workers.Prefill, "p", tt.prefill)
			var p Plan
			MakePlan(in, &p)
			got := string(p.Reason)
			if p.Path == route.Remote {
				got = in.Prefill.Candidates[p.PrefillIndex].Rank + " " + in.Decode.Candidates[p.DecodeIndex].Rank
			}
			if got != tt.want {
				t.Errorf("%s, want %s", got, tt.want)
			}
			for rank, why := range tt.why {
				found := ""
				for _, s := range []*selector.Input{&in.Decode, &in.Prefill} {
					for i := range s.Candidates {
						if s.Candidates[i].Rank == rank {
							found = s.Candidates[i].Excluded
						}
					}
				}
				if found != why {
					t.Errorf("%s is excluded because %q, want %q", rank, found, why)
				}
			}
		})
	}
}

// TestEither: workers that can do both sides pair with each other, never one with
// itself.
func TestEither(t *testing.T) {
	in := pair(0)
	in.Decode.Candidates, in.DecodePeers, in.Prefill.Candidates, in.PrefillPeers = nil, nil, nil, nil
	for i := range 2 {
		w := worker(fmt.Sprintf("e%d", i), workers.Either, workers.ConnectorNIXL, 1)
		add(&in.Decode, &in.DecodePeers, w, decision.Candidate{})
		add(&in.Prefill, &in.PrefillPeers, w, decision.Candidate{})
	}
	var p Plan
	MakePlan(in, &p)
	if p.Path != route.Remote || in.DecodePeers[p.DecodeIndex].Worker == in.PrefillPeers[p.PrefillIndex].Worker {
		t.Errorf("path %s, %d and %d", p.Path, p.PrefillIndex, p.DecodeIndex)
	}
	for _, list := range []*[]workers.Peer{&in.DecodePeers, &in.PrefillPeers} {
		*list = (*list)[:1]
	}
	in.Decode.Candidates, in.Prefill.Candidates = in.Decode.Candidates[:1], in.Prefill.Candidates[:1]
	MakePlan(in, &p)
	if p.Path != route.Local || p.Err != nil {
		t.Errorf("one by itself: path %s, %v", p.Path, p.Err)
	}
}
