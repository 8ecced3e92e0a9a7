// Package effective is a configuration in force: what an operator has set, with all
// that the router derives from it.
package effective

import (
	"fmt"
	"net/http"
	"net/netip"

	"github.com/dynctl/dynctl/internal/router/forward/disagg"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/workers"
)

// DefaultBlock is the block size in tokens while no engine has reported its own.
const DefaultBlock = 16

// Settings are one revision of the configuration. They are never written to; another
// revision takes their place as a whole.
type Settings struct {
	settings.Config
	// Revision counts from 1, which the router starts with.
	Revision uint64
	// Origin says where settings come from, by key; those that are not in it have
	// their default value.
	Origin map[string]string
	// Decisions is what decisions read, in the types of the stages.
	Decisions decide.Options
	// Connectors has every connector.
	Connectors map[workers.Connector]*disagg.Connector
	// Bounded says that a limit keeps ranks from taking more.
	Bounded bool
	// SessionHeader is routing.session_header in the form that http.Header has it: Get
	// allocates nothing for it.
	SessionHeader string

	proxies []netip.Prefix
}

// New derives the settings of a revision. The error names the setting that cannot be read.
func New(c settings.Config, origin map[string]string, revision uint64) (*Settings, error) {
	s := &Settings{Config: c, Origin: origin, Revision: revision, Decisions: c.Decisions(), SessionHeader: http.CanonicalHeaderKey(c.Routing.SessionHeader)}
	s.Bounded = s.Decisions.Busy != (selector.Busy{})
	r := &c.Routing
	var err error
	if s.proxies, err = c.Proxies(); err != nil {
		return nil, fmt.Errorf("trusted_proxies: %w", err)
	}
	var o disagg.Options
	if r.DecoderRegistry != "" {
		if o.Decoders, err = disagg.ParseDecoderRegistry([]byte(r.DecoderRegistry)); err != nil {
			return nil, fmt.Errorf("routing.decoder_registry: %w", err)
		}
	}
	s.Connectors = map[workers.Connector]*disagg.Connector{}
	for _, k := range workers.Connectors() {
		if s.Connectors[k], err = disagg.NewConnector(k, o); err != nil {
			return nil, err
		}
	}
	return s, nil
}

// BlockOf is the block size in tokens in which the router names a worker's blocks.
func (s *Settings) BlockOf(w *workers.Worker) int {
	switch own := s.Tokens.BlockSize; {
	case own > 0 && (w.BlockSize == 0 || w.BlockSize%own == 0):
		return own
	case w.BlockSize > 0:
		return w.BlockSize
	default:
		return DefaultBlock
	}
}

// Trusts reports whether what a peer says of the hops before it is believed. peer is an
// address without a port.
func (s *Settings) Trusts(peer string) bool {
	if len(s.proxies) == 0 {
		return false
	}
	a, err := netip.ParseAddr(peer)
	if err != nil {
		return false
	}
	return s.TrustsAddr(a.WithZone("").Unmap())
}

// TrustsAddr is Trusts of an address without zone, IPv4 as itself.
func (s *Settings) TrustsAddr(a netip.Addr) bool {
	for _, p := range s.proxies {
		if p.Contains(a) {
			return true
		}
	}
	return false
}

// ConnectionsOf is how many connections an address may have at a time; 0 is as many as it
// wants, for this machine and for proxies that are trusted.
func (s *Settings) ConnectionsOf(a netip.Addr) int {
	if a.IsLoopback() || s.TrustsAddr(a) {
		return 0
	}
	return s.Limits.ClientConnections
}
