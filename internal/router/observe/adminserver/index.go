package adminserver

import (
	"errors"
	"fmt"
	"net/http"
	"strconv"

	"github.com/dynctl/dynctl/internal/router/cache/kvgroup"
	"github.com/dynctl/dynctl/internal/router/cache/kvindex"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
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
	out, err := s.r.IndexChildren(q)
	out.Now = s.r.Now()
	return out, err
}

// IndexTotals are the figures of one index.
func IndexTotals(x *kvindex.Index) admin.IndexTotals {
	t := x.Stats()
	return admin.IndexTotals{
		Blocks: t.Blocks, Memberships: t.Memberships, Nodes: t.Nodes, Bytes: t.Bytes, MaxBlocks: t.MaxBlocks,
		Lookups: t.Lookups, Stored: t.Stored, Removed: t.Removed, Orphaned: t.Orphaned, Refused: t.Refused,
	}
}

// IndexRank is a rank's part in an index.
func IndexRank(x *kvindex.RankStats) admin.IndexRank {
	return admin.IndexRank{
		Label: x.Name, Slot: uint32(x.Rank), Blocks: x.Blocks, Stored: x.Stored, Removed: x.Removed, Orphaned: x.Orphaned, Refused: x.Refused, Lost: x.Lost,
	}
}

// CacheGroups are a rank's cache groups as the admin API shows them.
func CacheGroups(groups []kvgroup.Group) (list []admin.CacheGroup) {
	for _, g := range groups {
		list = append(list, admin.CacheGroup{Group: g.Number, Kind: g.Kind.String(), Window: g.Window, Block: g.Block})
	}
	return list
}
