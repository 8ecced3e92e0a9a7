package disagg

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/dynctl/dynctl/internal/rawjson"
	"github.com/dynctl/dynctl/internal/rig/property"
	"github.com/dynctl/dynctl/internal/workers"
)

// TestRisingIDsAreCountedTheSame: the fast way counts what the slow one would,
// or leaves the list to it.
func TestRisingIDsAreCountedTheSame(t *testing.T) {
	for _, c := range []struct {
		raw  string
		want int // -1: left to the slow way
	}{
		{"[]", 0}, {"[0]", 1}, {"[1,2, 33]", 3}, {"[2147483647]", 1},
		{"[2,1]", -1}, {"[1,1]", -1}, {"[0,0]", -1}, {"[2147483648]", -1}, {"[99999999999999999999999]", -1},
		{"[-1]", -1}, {"[1.0]", -1}, {"[1e3]", -1}, {`["1"]`, -1}, {"[[1]]", -1}, {"[1 , 2]", -1}, {"[null]", -1}, {"[ ]", -1},
	} {
		n, ok := countRising([]byte(c.raw))
		if ok != (c.want >= 0) || ok && n != c.want {
			t.Errorf("%s: %d, %v", c.raw, n, ok)
		}
	}
	property.Check(t, func(t *rapid.T) {
		ids := rapid.SliceOfN(rapid.IntRange(0, 20), 0, 6).Draw(t, "ids")
		raw, err := json.Marshal(ids)
		if err != nil {
			t.Fatal(err)
		}
		rising := true
		for i := 1; i < len(ids); i++ {
			rising = rising && ids[i] > ids[i-1]
		}
		n, ok := countRising(raw)
		if ok != rising || ok && n != len(ids) {
			t.Fatalf("%s: %d, %v", raw, n, ok)
		}
	})
}

func BenchmarkCountBlocks(b *testing.B) {
	var sb strings.Builder
	for i := range 3438 { // a prompt of 220 KB
		fmt.Fprintf(&sb, ",%d", i+7)
	}
	list := rawjson.Value("[" + sb.String()[1:] + "]")
	b.ReportAllocs()
	for b.Loop() {
		if n, err := countBlocks(list); n != 3438 || err != nil {
			b.Fatal(n, err)
		}
	}
}

// A prefill's answer to 220 KB: what it costs to check and read it.
func BenchmarkParseAnswer(b *testing.B) {
	var sb strings.Builder
	for i := range 3438 {
		fmt.Fprintf(&sb, ", %d", i+7)
	}
	body := []byte(strings.Replace(captured, `"remote_block_ids": [[`, `"remote_block_ids": [[`+sb.String()[2:]+`, `, 1))
	if len(body) < 20_000 {
		b.Fatal("the captured answer has no block ids")
	}
	b.SetBytes(int64(len(body)))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := parseAnswer(body); err != nil {
			b.Fatal(err)
		}
	}
}

// TestHybridIsStrict: parameters with several cache groups are judged strictly,
// whatever was asked for, and how many groups there are is reported.
func TestHybridIsStrict(t *testing.T) {
	const two = `[[700, 699, 698, 697, 696, 695, 694],[12, 13]]`
	for _, tt := range []struct {
		name   string
		blocks string
		groups int
		want   error
	}{
		{"one group", `[[700, 699, 698, 697, 696, 695, 694]]`, 1, nil},
		{"two groups", two, 2, ErrBadParams},
	} {
		for _, odd := range []bool{false, true} {
			d := dispatch(workers.ConnectorNIXL)
			d.Check = workers.TransferReport
			tr := begin(t, workers.ConnectorNIXL, Options{}, d)
			answer := strings.Replace(captured, `[[700, 699, 698, 697, 696, 695, 694]]`, tt.blocks, 1)
			if odd {
				answer = strings.Replace(answer, `"remote_num_tokens": 200`, `"remote_num_tokens": 7`, 1)
			}
			want := tt.want
			if !odd {
				want = nil
			}
			if err := tr.CheckPrefill([]byte(answer)); !errors.Is(err, want) {
				t.Errorf("%s, odd: %v: %v", tt.name, odd, err)
			}
			if f := tr.Facts(); f.Groups != tt.groups || len(f.Odd) > 0 != (odd && want == nil) {
				t.Errorf("%s, odd: %v: %+v", tt.name, odd, f)
			}
		}
	}
}
