package table

import (
	"math"
	"strings"
	"testing"
)

func TestWrite(t *testing.T) {
	head, rows := []string{"NAME", "NOTE", ""}, [][]string{{"a", "x|y, z", ""}, {"  longer", "", "b"}}
	for format, want := range map[string]string{
		"table":    "NAME      NOTE\na         x|y, z\n  longer    b\n",
		"csv":      "NAME,NOTE,\na,\"x|y, z\",\n\"  longer\",,b\n",
		"markdown": "| NAME | NOTE |  |\n|---|---|---|\n| a | x\\|y, z |  |\n| longer |  | b |\n",
	} {
		var b strings.Builder
		if err := Write(&b, format, head, rows); err != nil || b.String() != want {
			t.Errorf("%s: %v\n%s\nwant\n%s", format, err, b.String(), want)
		}
	}
	for format, want := range map[string]string{"table": "A\n", "csv": "A\n", "markdown": "| A |\n|---|\n"} {
		var b strings.Builder
		if err := Write(&b, format, []string{"A"}, nil); err != nil || b.String() != want {
			t.Errorf("no rows as %s: %v %q", format, err, b.String())
		}
	}
}

func TestFigures(t *testing.T) {
	for _, c := range []struct{ got, want string }{
		{Count(0), "0"}, {Count(999), "999"}, {Count(1000), "1,000"}, {Count(int64(-1234567)), "-1,234,567"}, {Count(uint64(math.MaxUint64)), "18,446,744,073,709,551,615"},
		{Percent(0), "0.00%"}, {Percent(0.98765), "98.77%"}, {Percent(1), "100.00%"},
		{Bytes(0), "0 B"}, {Bytes(1023), "1023 B"}, {Bytes(1536), "1.5 KiB"}, {Bytes(5 << 30), "5.0 GiB"}, {Bytes(1 << 50), "1024.0 TiB"},
	} {
		if c.got != c.want {
			t.Errorf("%q, want %q", c.got, c.want)
		}
	}
}
