package natsbus

import (
	"context"
	"log/slog"
	"maps"
	"net"
	"net/url"
	"slices"
	"time"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/dynctl/dynctl/internal/router/replicas"
)

const (
	// lookupEvery is how often the name of the routers is looked up, and lookupWithin how long
	// that may take.
	lookupEvery  = 5 * time.Second
	lookupWithin = 4 * time.Second
	// forgetAfter is how long an address is kept that the name no longer has.
	forgetAfter = time.Minute
	// maxAddresses are kept, those of routers that have ended included.
	maxAddresses = 2 * replicas.MaxOrigins
)

// found are routers at the addresses of one name, as a headless Service has it. A server has a
// route to each address, which it tries for as long as the address is kept. NATS alone would try
// one address of the name, by chance, and never again once that led to a server it has a route
// to: after a partition its two sides could stay apart.
type found struct {
	host, port string
	login      *url.Userinfo
	log        *slog.Logger
	lookup     func(ctx context.Context, host string) ([]string, error)
	seen       map[string]time.Time // when the name had an address last
}

// found returns the routers that are found by a name, nil for others.
func (c *Cluster) found(login *url.Userinfo) *found {
	if len(c.Routes) != 1 {
		return nil
	}
	host, port, err := net.SplitHostPort(c.Routes[0])
	if err != nil || net.ParseIP(host) != nil {
		return nil
	}
	f := &found{host: host, port: port, login: login, log: c.Log, lookup: c.lookup, seen: map[string]time.Time{}}
	if f.lookup == nil {
		f.lookup = net.DefaultResolver.LookupHost
	}
	return f
}

// follow keeps the routes of a server that has started with options until ctx ends.
func (f *found) follow(ctx context.Context, s *server.Server, options *server.Options) {
	tick := time.NewTicker(lookupEvery)
	defer tick.Stop()
	trouble := ""
	for {
		within, cancel := context.WithTimeout(ctx, lookupWithin)
		list, err := f.lookup(within, f.host)
		cancel()
		if err == nil && f.note(time.Now(), list) {
			next := *options
			next.Routes = nil
			for _, a := range slices.Sorted(maps.Keys(f.seen)) {
				next.Routes = append(next.Routes, route(net.JoinHostPort(a, f.port), f.login))
			}
			if err = s.ReloadOptions(&next); err == nil {
				options = &next
			}
		}
		now := ""
		if err != nil && ctx.Err() == nil {
			now = err.Error()
		}
		if now != trouble && now != "" {
			f.log.Warn("the addresses of other routers cannot be found", "name", f.host, "err", now)
		}
		trouble = now
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// note takes the addresses that the name has now, and reports whether those to keep changed.
func (f *found) note(now time.Time, list []string) (changed bool) {
	for _, a := range list {
		_, known := f.seen[a]
		if !known && len(f.seen) >= maxAddresses {
			continue
		}
		f.seen[a] = now
		changed = changed || !known
	}
	for a, at := range f.seen {
		if now.Sub(at) > forgetAfter {
			delete(f.seen, a)
			changed = true
		}
	}
	return changed
}
