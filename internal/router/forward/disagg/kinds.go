package disagg

import (
	"fmt"
	"math/rand/v2"
	"strings"

	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/workers"
)

// kinds has a row for each connector, in the order of workers.Connectors.
var kinds = []kind{
	{
		// vLLM's NixlConnector in its pull form: the prefill answer names the blocks, the
		// decode engine reads them.
		name: workers.ConnectorNIXL, order: Sequential,
		prefill: nixlAsks, decode: []member{answered}, answer: checkNIXL,
		leased: true, anyRank: true, fetches: true,
		carries: vllmAndGenerate, media: vllmMedia,
	},
	{
		// vLLM's NixlPushConnector (0.32): the decode engine sends the prefill engine over its
		// side channel which blocks it has made room in, and the prefill engine writes the KV
		// there. Only an answer of the prefill rank has its address.
		//
		// The engines match the two legs by X-Request-Id, and a prefill engine keeps a
		// finished prompt for a while (kv_lease_duration): a client that uses an id twice
		// would get the KV of its other prompt. Both legs therefore carry an id that is new
		// for each dispatch.
		name: workers.ConnectorNIXLPush, order: Held, ids: byRouterInHeader,
		prefill: append(nixlAsks[:len(nixlAsks):len(nixlAsks)], member{"transfer_id", freshID, nil}),
		decode: []member{
			{"do_remote_prefill", yes, nil}, {"do_remote_decode", no, nil}, {"remote_engine_id", engineID, nil}, {"remote_host", host, nil}, {"remote_port", port, nil},
			{"remote_request_id", joinedID, nil}, {"tp_size", tpSize, nil}, {"pp_size", ppSize, nil}, {"dcp_size", dcpSize, nil}, {"transfer_id", freshID, nil},
		},
		answer: checkPush, counted: true,
		// Responses of vLLM 0.32 do not take X-Request-Id, by which the legs find each
		// other; Messages and /inference/v1/generate were not tried.
		carries: func(api.Kind, *workers.Worker) bool { return false },
	},
	{
		// vLLM's OffloadingConnector with a peer-to-peer tier (0.32): the prefill engine keeps
		// the prompt's blocks in the host's memory under a name, and the decode engine fetches
		// them by that name from the tier's port. The decode leg starts behind the prefill
		// leg: an engine that waits for blocks gives up after half a minute.
		//
		// The name is new for each dispatch, since two prompts of one name would be mixed up.
		// Blocks are requested by the hashes of their tokens, so that a wrong name costs time
		// and never gives another prompt's text.
		name: workers.ConnectorOffloadP2P, order: Sequential, ids: byRouter, where: tierOf,
		prefill: tierKeeps, decode: tierFetches, answer: checkOffload, counted: true,
		carries: vllmAndGenerate,
	},
	{
		// vLLM's MultiConnector with both: the engine takes the KV from the first child that
		// has it. Children without parameters of their own (shared storage, LMCache's and
		// Mooncake's stores) add nothing: their engines have the connector of the other child.
		name: workers.ConnectorNIXLOffload, order: Sequential, ids: byRouter, where: tierOf,
		prefill: append(nixlAsks[:len(nixlAsks):len(nixlAsks)], tierKeeps...), decode: append([]member{answered}, tierFetches...),
		answer: func(t *Transfer, a *answer) error {
			if err := checkNIXL(t, a); err != nil {
				return err
			}
			return checkCount(t, a)
		},
		leased: true, anyRank: true, fetches: true,
		carries: vllmAndGenerate,
	},
	{
		// vLLM's MooncakeConnector (0.33): the decode engine asks the prefill engine for the
		// blocks of a transfer by its id, and finds it by the bootstrap server of the prefill
		// worker, which also tells the router the engine's id. A prefill engine that is asked
		// for an id that it does not know, or whose prefill does not end by its length, has one
		// of its twenty senders wait for 480 s, which nothing ends sooner.
		name: workers.ConnectorMooncake, order: Held, ids: byRouter, bootstrap: true, where: bootstrapOf, senders: 4,
		prefill: []member{{"do_remote_decode", yes, nil}, {"do_remote_prefill", no, nil}, {"transfer_id", joinedID, nil}},
		decode: []member{
			{"do_remote_decode", no, nil}, {"do_remote_prefill", yes, nil},
			{"remote_bootstrap_addr", server, nil}, {"remote_engine_id", engineID, nil}, {"transfer_id", joinedID, nil},
		},
		answer: checkMooncake, fetches: true,
		// Parameters are read by the same code of the front end as NIXL's.
		carries: vllmAndGenerate,
	},
	{
		name: workers.ConnectorSGLang, order: Concurrent, body: sglangBody,
		// Its Messages and Responses have no bootstrap fields.
		carries: func(k api.Kind, _ *workers.Worker) bool { return k == api.SGLangGenerate },
		// Both engines get the whole body and prepare the media themselves.
		media: func(*workers.Worker) bool { return true },
	},
	{
		name: workers.ConnectorLMCache, order: Sequential, body: lmcacheBody, answer: checkLMCache,
		carries: vllmCarries,
	},
	{
		// vLLM's ExampleConnector (once SharedStorageConnector): the prefill engine writes KV
		// files, the decode engine finds them by the prompt's hash. Nothing is handed over.
		name: workers.ConnectorSharedStorage, order: Sequential, answer: func(*Transfer, *answer) error { return nil }, counted: true,
		carries: func(k api.Kind, _ *workers.Worker) bool {
			return k == api.Generate || k == api.Messages || k == api.Responses
		},
		media: vllmMedia, // names of media are in the names of its files
	},
}

// Members that several rows have.
var (
	// nixlAsks is by what a prefill engine keeps its blocks for a decode engine.
	nixlAsks = []member{
		{"do_remote_decode", yes, nil}, {"do_remote_prefill", no, nil},
		{"remote_engine_id", null, nil}, {"remote_block_ids", null, nil}, {"remote_host", null, nil}, {"remote_port", null, nil},
	}
	tierKeeps   = []member{{"remote_decoder", nested, []member{{"kv_request_id", joinedID, nil}}}}
	tierFetches = []member{{"remote_prefiller", nested, []member{{"kv_request_id", joinedID, nil}, {"remote_host", host, nil}, {"remote_port", port, nil}}}}
	answered    = member{value: theAnswers}
)

// kind is the row of a connector.
type kind struct {
	name workers.Connector
	// order is how the legs follow each other; see [Held] for what differs by transfer.
	order Mode
	// ids says who makes the id that joins the legs.
	ids ids
	// prefill and decode are the members of kv_transfer_params of each leg, nil for none.
	prefill, decode []member
	// answer judges the answer of a prefill; nil where it is discarded.
	answer func(*Transfer, *answer) error
	// where finds Transfer.at beforehand; nil where only an answer names it, or nothing does. With
	// bootstrap a server completes it, see [Transfer.Meet].
	where     func(*Transfer) error
	bootstrap bool
	// senders is how many decode engines may wait at a prefill rank for KV that is not there
	// yet; 0 where a prefill that fails takes none of the rank's senders. Several routers may
	// share the engine.
	senders int
	// body makes the edits of legs that carry more than kv_transfer_params.
	body func(*Transfer) error
	// carries reports whether its fields exist on an endpoint of w besides chats and
	// completions, on which every connector's do.
	carries func(k api.Kind, w *workers.Worker) bool
	// media reports whether it is known to move prompts with images, sounds or videos from or to
	// w; nil where that is not known.
	media func(w *workers.Worker) bool
	// leased says that the prefill engine keeps the KV for a limited time only; see
	// Transfer.Leased.
	leased bool
	// anyRank says that any decode rank that can pair with the prefill rank may fetch the KV,
	// not only the one that was chosen first.
	anyRank bool
	// fetches says that the decode engine fetches all of the prompt that it has not cached.
	fetches bool
	// counted says that engines count tokens that came over it among the cached
	// tokens of usage.
	counted bool
}

// ids says who makes the id that joins two legs.
type ids uint8

const (
	// byEngine: the engines do, or the legs need none.
	byEngine ids = iota
	// byRouter: the router makes one for each transfer.
	byRouter
	// byRouterInHeader: it does, and both legs carry it as X-Request-Id, too.
	byRouterInHeader
)

// vllmCarries: Messages and Responses of vLLM were seen to take and give transfer
// parameters in 0.32, and older ones drop what they do not know.
func vllmCarries(k api.Kind, w *workers.Worker) bool {
	return (k == api.Messages || k == api.Responses) && w.VersionAtLeast(0, 32)
}

// vllmMedia: NIXL moves blocks whatever they hold, and both engines prepare the media of the body,
// as was seen on vLLM 0.32. What engines before that do was not read.
func vllmMedia(w *workers.Worker) bool { return w.VersionAtLeast(0, 32) }

func vllmAndGenerate(k api.Kind, w *workers.Worker) bool {
	return k == api.Generate || vllmCarries(k, w)
}

// noKind is the row of what is no connector.
var noKind kind

// kindOf is the row of a connector.
func kindOf(c workers.Connector) *kind {
	for i := range kinds {
		if kinds[i].name == c {
			return &kinds[i]
		}
	}
	return &noKind
}

// NewConnector makes the connector of a kind.
func NewConnector(c workers.Connector, o Options) (*Connector, error) {
	if o.Rand == nil {
		o.Rand = rand.Uint64
	}
	if o.Query == nil {
		o.Query = overHTTP
	}
	if k := kindOf(c); k != &noKind {
		c := &Connector{kind: k, o: o}
		if k.prefill != nil && k.ids == byEngine {
			var err error
			if c.asks, err = new(Transfer).object(k.prefill); err != nil {
				return nil, err
			}
		}
		return c, nil
	}
	var names []string
	for _, k := range kinds {
		names = append(names, string(k.name))
	}
	return nil, fmt.Errorf("unknown connector %q (one of %s)", c, strings.Join(names, ", "))
}

// Carries reports whether a connector's fields exist on an endpoint of w.
func Carries(c workers.Connector, k api.Kind, w *workers.Worker) bool {
	if k == api.Chat || k == api.Completion {
		return true
	}
	carries := kindOf(c).carries
	return carries != nil && carries(k, w)
}

// MovesMedia reports whether a connector is known to move prompts with images, sounds or videos
// from or to w.
func MovesMedia(c workers.Connector, w *workers.Worker) bool {
	moves := kindOf(c).media
	return moves != nil && moves(w)
}

// CountsTransfers reports whether engines count tokens that came over a connector
// among the cached tokens of usage.
func CountsTransfers(c workers.Connector) bool { return kindOf(c).counted }

// FetchesAll reports whether a decode engine fetches over a connector all of a prompt that it has
// not cached, but for the last tokens.
func FetchesAll(c workers.Connector) bool { return kindOf(c).fetches }
