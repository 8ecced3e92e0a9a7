package disagg

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/tidwall/gjson"
	"pgregory.net/rapid"
)

// TestPlainIDsAreReadTheSame: the fast way gives what the slow one gives, or
// leaves the list to it.
func TestPlainIDsAreReadTheSame(t *testing.T) {
	for _, c := range []struct {
		raw   string
		want  []int
		plain bool
	}{
		{"[]", []int{}, true},
		{"[0]", []int{0}, true},
		{"[1,2, 33]", []int{1, 2, 33}, true},
		{"[2147483647]", []int{maxBlockID}, true},
		{"[2147483648]", nil, false},
		{"[99999999999999999999999]", nil, false},
		{"[-1]", nil, false},
		{"[1.0]", nil, false},
		{"[1e3]", nil, false},
		{`["1"]`, nil, false},
		{"[[1]]", nil, false},
		{"[1 , 2]", nil, false},
		{"[null]", nil, false},
	} {
		got, plain := readBlockIDs([]int{}, c.raw)
		if plain != c.plain || plain && !cmp.Equal(got, c.want) {
			t.Errorf("%s: %v, %v", c.raw, got, plain)
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		ids := rapid.SliceOf(rapid.IntRange(0, maxBlockID)).Draw(t, "ids")
		sep := rapid.SampledFrom([]string{",", ", "}).Draw(t, "separator")
		raw := "[" + strings.Trim(strings.Join(strings.Fields(fmt.Sprint(ids)), sep), "[]") + "]"
		got, plain := readBlockIDs([]int{}, raw)
		var want []int
		gjson.Parse(raw).ForEach(func(_, v gjson.Result) bool { want = append(want, int(v.Int())); return true })
		if !plain || len(got) != len(want) || len(want) > 0 && !cmp.Equal(got, want) {
			t.Fatalf("%s: %v, %v", raw, got, plain)
		}
	})
}

func BenchmarkCountBlocks(b *testing.B) {
	var sb strings.Builder
	for i := range 3438 { // a prompt of 220 KB
		fmt.Fprintf(&sb, ",%d", i+7)
	}
	list := gjson.Parse("[" + sb.String()[1:] + "]")
	b.ReportAllocs()
	for b.Loop() {
		if n, err := countBlocks(list); n != 3438 || err != nil {
			b.Fatal(n, err)
		}
	}
}
