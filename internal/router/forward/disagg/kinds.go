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
		name: workers.ConnectorNIXL, make: func(Options) Connector { return nixl{} }, leased: true, pulled: true,
		carries: func(k api.Kind, w *workers.Worker) bool { return k == api.Generate || vllmCarries(k, w) }, media: vllmMedia,
	},
	{
		name: workers.ConnectorNIXLPush, make: func(o Options) Connector { return nixlPush{rand: o.Rand} }, counted: true,
		// Responses of vLLM 0.32 do not take X-Request-Id, by which the legs find each
		// other; Messages and /inference/v1/generate were not tried.
		carries: func(api.Kind, *workers.Worker) bool { return false },
	},
	{
		name: workers.ConnectorOffloadP2P, make: func(o Options) Connector { return offloadP2P{rand: o.Rand} }, counted: true,
		carries: func(k api.Kind, w *workers.Worker) bool { return k == api.Generate || vllmCarries(k, w) },
	},
	{
		name: workers.ConnectorNIXLOffload, leased: true, pulled: true,
		make: func(o Options) Connector {
			return multi{workers.ConnectorNIXLOffload, []Connector{nixl{}, offloadP2P{rand: o.Rand, among: true}}}
		},
		carries: func(k api.Kind, w *workers.Worker) bool { return k == api.Generate || vllmCarries(k, w) },
	},
	{
		name: workers.ConnectorSGLang, make: func(o Options) Connector { return sglang{rand: o.Rand} },
		// Its Messages and Responses have no bootstrap fields.
		carries: func(k api.Kind, _ *workers.Worker) bool { return k == api.SGLangGenerate },
		// Both engines get the whole body and prepare the media themselves.
		media: func(*workers.Worker) bool { return true },
	},
	{
		name: workers.ConnectorLMCache, make: func(o Options) Connector { return lmcache{o.Decoders} },
		carries: vllmCarries,
	},
	{
		name: workers.ConnectorSharedStorage, make: func(Options) Connector { return sharedStorage{} }, counted: true,
		carries: func(k api.Kind, _ *workers.Worker) bool {
			return k == api.Generate || k == api.Messages || k == api.Responses
		},
		media: vllmMedia, // names of media are in the names of its files
	},
}

// kind is what others know of a connector.
type kind struct {
	name workers.Connector
	make func(Options) Connector
	// carries reports whether its fields exist on an endpoint of w besides chats and
	// completions, on which every connector's do.
	carries func(k api.Kind, w *workers.Worker) bool
	// media reports whether it is known to move prompts with images, sounds or videos from or to
	// w; nil where that is not known.
	media func(w *workers.Worker) bool
	// leased says that the prefill engine keeps the KV for a limited time only; see
	// Transfer.Leased.
	leased bool
	// pulled says that the decode engine fetches the KV from the prefill engine, so that
	// any rank that can pair with that may.
	pulled bool
	// counted says that engines count tokens that came over it among the cached
	// tokens of usage.
	counted bool
}

// vllmCarries: Messages and Responses of vLLM were seen to take and give transfer
// parameters in 0.32, and older ones drop what they do not know.
func vllmCarries(k api.Kind, w *workers.Worker) bool {
	return (k == api.Messages || k == api.Responses) && w.VersionAtLeast(0, 32)
}

// vllmMedia: NIXL moves blocks whatever they hold, and both engines prepare the media of the body:
// vLLM's own example of an encoder, a prefill and a decode engine does so. What engines before
// 0.32 do was not read.
func vllmMedia(w *workers.Worker) bool { return w.VersionAtLeast(0, 32) }

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
func NewConnector(c workers.Connector, o Options) (Connector, error) {
	if o.Rand == nil {
		o.Rand = rand.Uint64
	}
	if k := kindOf(c); k.make != nil {
		return k.make(o), nil
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
func FetchesAll(c workers.Connector) bool { return kindOf(c).pulled }
