package kvindex_test

import (
	"fmt"

	"github.com/dynctl/dynctl/internal/router/cache/kvindex"
)

// Two ranks hold the same first two blocks of a prompt under names of their own engines.
// Then the first one evicts its second block.
func Example() {
	index := kvindex.New(kvindex.Options{MaxRanks: 2})
	defer index.Close()
	for rank, name := range []string{"decode-0/dp0", "decode-1/dp0"} {
		if err := index.AddRank(kvindex.Rank(rank), name); err != nil {
			fmt.Println(err)
		}
	}

	locals := []uint64{0xa, 0xb, 0xc} // what the tokens of each block hash to
	var batch kvindex.Batch
	batch.Store(0, false, []uint64{101, 102, 103}, locals)
	index.Apply(0, &batch)
	batch.Reset()
	batch.Store(0, false, []uint64{201, 202}, locals[:2])
	index.Apply(1, &batch)

	var q kvindex.Query
	index.Overlap(locals, &q)
	fmt.Println(q.Depth(0), "and", q.Depth(1), "leading blocks")

	batch.Reset()
	batch.Remove(102)
	index.Apply(0, &batch)
	index.Overlap(locals, &q)
	fmt.Println(q.Depth(0), "and", q.Depth(1), "leading blocks")
	// Output:
	// 3 and 2 leading blocks
	// 1 and 2 leading blocks
}
