package adminserver

import (
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"sync"
	"time"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/router/cache/kvindex"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/router/request/access"
	"github.com/dynctl/dynctl/internal/router/request/api"
)

// IndexQuery picks children of a node of the index.
type IndexQuery struct {
	kvindex.BrowseOptions
	Node kvindex.NodeID
	// Label, when not empty, is that of the rank that holds some of them.
	Label string
	// Flat asks for the runs of the whole tree with most hits; of the others Limit
	// alone is heeded then.
	Flat bool
}

// IndexChildren lists children of a node of an index whose ranks have labels.
func IndexChildren(x *kvindex.Index, labels map[kvindex.Rank]string, q IndexQuery) (admin.IndexChildren, error) {
	if q.Label != "" {
		for rank, label := range labels {
			if label == q.Label {
				q.Rank = &rank
			}
		}
		if q.Rank == nil {
			return admin.IndexChildren{}, bad("rank", "there is no rank %q", api.Clip(q.Label))
		}
	}
	var b kvindex.Browse
	var err error
	if q.Flat {
		b = x.Hottest(q.Limit)
	} else {
		b, err = x.Children(q.Node, q.BrowseOptions)
	}
	if errors.Is(err, kvindex.ErrUnknownNode) {
		return admin.IndexChildren{}, &api.Error{Status: http.StatusNotFound, Code: "node_not_found", Param: "node", Message: "the node is gone: its blocks were evicted or moved"}
	}
	if err != nil {
		return admin.IndexChildren{}, err
	}
	convert := func(c kvindex.Child) admin.IndexNode {
		n := admin.IndexNode{
			ID: strconv.FormatUint(uint64(c.ID), 16), DepthBlocks: c.Depth, LengthBlocks: c.Length, Local: fmt.Sprintf("%016x", c.Local),
			Children: c.Children, Blocks: c.Blocks, Exact: c.Exact, Ranks: c.Ranks, Longest: c.Longest, Hits: c.Hits, HitsExact: c.HitsExact, RankLabels: make([]string, 0, len(c.Mask)),
		}
		for _, k := range c.Mask {
			n.RankLabels = append(n.RankLabels, labels[k])
		}
		return n
	}
	out := admin.IndexChildren{Schema: admin.Schema, Children: make([]admin.IndexNode, 0, len(b.Children)), Total: b.Total, Partial: b.Partial}
	if q.Node != kvindex.Root {
		n := convert(b.Node)
		out.Node = &n
	}
	for _, c := range b.Children {
		out.Children = append(out.Children, convert(c))
	}
	return out, nil
}

func (s *server) indexChildren(r *http.Request) (any, error) {
	query := r.URL.Query()
	q := IndexQuery{Label: query.Get("rank"), Node: kvindex.Root}
	switch flat := query.Get("flat"); flat {
	case "", "false":
	case "true":
		q.Flat = true
		for _, other := range []string{"node", "sort", "rank", "min_depth"} {
			if query.Has(other) {
				return nil, bad(other, "%s= does not go with flat=true, which lists the most used runs of the whole tree", other)
			}
		}
	default:
		return nil, bad("flat", "flat=%q is neither true nor false", api.Clip(flat))
	}
	var err error
	if q.Limit, err = Number(r, "limit", 100, 1, 1000); err != nil {
		return nil, err
	}
	if q.MinDepth, err = Number(r, "min_depth", 0, 0, 1<<30); err != nil {
		return nil, err
	}
	switch by := kvindex.SortBy(query.Get("sort")); by {
	case "", kvindex.ByBlocks, kvindex.ByRanks, kvindex.ByHits:
		q.Sort = by
	default:
		return nil, bad("sort", "sort=%q is not one of blocks, ranks, hits", by)
	}
	if raw := query.Get("node"); raw != "" {
		n, err := strconv.ParseUint(raw, 16, 64)
		if err != nil {
			return nil, bad("node", "node=%q is not an id that this API gave", api.Clip(raw))
		}
		q.Node = kvindex.NodeID(n)
	}
	preview, err := s.preview(r, query)
	if err != nil {
		return nil, err
	}
	out, err := s.r.IndexChildren(q)
	out.Now = s.r.Now()
	if err == nil && preview {
		if err = s.c.Previews(r.Context(), &out); err == nil {
			s.logPreview(r)
		}
	}
	return out, err
}

// preview reports whether a request asks for the words of prompts. They are for the role
// admin, and whose they were shown to is an event.
func (s *server) preview(r *http.Request, query url.Values) (bool, error) {
	switch raw := query.Get("preview"); raw {
	case "", "false":
		return false, nil
	case "true":
	default:
		return false, bad("preview", "preview=%q is neither true nor false", api.Clip(raw))
	}
	if s.c == nil {
		_, err := notRunning(r)
		return false, err
	}
	u, _ := r.Context().Value(userKey{}).(*user)
	if u == nil || !u.may(access.Admin) {
		return false, &api.Error{Status: http.StatusForbidden, Code: api.CodeForbidden, Message: "preview=true shows words of prompts and needs the role admin"}
	}
	return true, nil
}

// looks remembers when each user was last logged as looking at words of prompts.
type looks struct {
	mu   sync.Mutex
	last map[string]time.Time
}

// Bounds of looks: how often one user is logged, and how many users are remembered.
const (
	looksEvery = time.Minute
	looksUsers = 1024
)

// due reports whether a user is to be logged now.
func (l *looks) due(name string, now time.Time) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if at, ok := l.last[name]; ok && now.Sub(at) < looksEvery {
		return false
	}
	if l.last == nil || len(l.last) >= looksUsers {
		l.last = map[string]time.Time{} // some are logged once more
	}
	l.last[name] = now
	return true
}

// logPreview logs who was shown words of prompts, at most once a minute for each user.
func (s *server) logPreview(r *http.Request) {
	u, _ := r.Context().Value(userKey{}).(*user)
	if !s.looks.due(u.name, s.r.Now()) {
		return
	}
	s.audit(r, u, http.StatusOK, eventlog.Event{
		Kind: "prompts_shown", Severity: eventlog.Warn,
		Text: fmt.Sprintf("%s was shown from %s what prompts begin with (index.preview); logged at most once a minute", u.name, r.RemoteAddr),
	})
}
