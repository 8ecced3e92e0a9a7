package admin

import (
	"time"
)

// IndexTotals are the figures of the KV index.
type IndexTotals struct {
	Blocks        int64  `json:"blocks"`
	Memberships   int64  `json:"memberships"`
	Nodes         int64  `json:"nodes"`
	Bytes         int64  `json:"memory_bytes"`
	MaxBlocks     int64  `json:"max_memberships"`
	Lookups       uint64 `json:"lookups_total"`
	Stored        uint64 `json:"stored_total"`
	Removed       uint64 `json:"removed_total"`
	Orphaned      uint64 `json:"orphaned_total"`
	Refused       uint64 `json:"refused_total"`
	UntrustedRank int    `json:"untrusted_ranks"`
	// HitShare is predicted cached tokens / prompt tokens since the start, null
	// before the first prompt.
	HitShare *float64 `json:"hit_share"`
}

// IndexStats answers GET /admin/v1/index/stats.
type IndexStats struct {
	Schema string      `json:"schema"`
	Now    time.Time   `json:"now"`
	Totals IndexTotals `json:"totals"`
	Ranks  []IndexRank `json:"ranks"`
}

// IndexRank is what the index holds of one rank.
type IndexRank struct {
	Label    string `json:"label"`
	Slot     uint32 `json:"slot"`
	Blocks   int64  `json:"blocks"`
	Stored   uint64 `json:"stored_total"`
	Removed  uint64 `json:"removed_total"`
	Orphaned uint64 `json:"orphaned_total"`
	Refused  uint64 `json:"refused_total"`
	Lost     bool   `json:"lost"`
}

// IndexChildren answers GET /admin/v1/index/children?node=&sort=&limit=&rank=.
type IndexChildren struct {
	Schema   string      `json:"schema"`
	Now      time.Time   `json:"now"`
	Node     *IndexNode  `json:"node"` // null for the root
	Children []IndexNode `json:"children"`
	Total    int         `json:"total"`
	Partial  bool        `json:"partial"`
}

// IndexNode is one run of blocks in the radix tree, from where it leaves others to
// where others leave it.
type IndexNode struct {
	ID           string `json:"id"`
	DepthBlocks  int    `json:"depth_blocks"`
	LengthBlocks int    `json:"length_blocks"`
	Local        string `json:"local_hash"` // of the first block, 16 hex digits
	Children     int    `json:"children"`
	Blocks       int    `json:"subtree_blocks"`
	Exact        bool   `json:"subtree_exact"` // otherwise there are more children and blocks
	Ranks        int    `json:"ranks"`
	Longest      int    `json:"longest_blocks"`
	Hits         uint64 `json:"hits_total"`
	HitsExact    bool   `json:"hits_exact"` // otherwise there may be more
	// RankLabels are those of the ranks that hold it: of the requested node all, of its
	// children at most 64.
	RankLabels []string `json:"rank_labels"`
}
