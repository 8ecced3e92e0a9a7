package samples

import (
	"math"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

func TestScan(t *testing.T) {
	text := "# HELP a text with a{b=\"c\"} 1\n" +
		"a 1\n" +
		"b{} 2.5e3\r\n" +
		`c{x="brace } and quote \" here",y="2"} NaN 1712` + "\n" +
		`d{x="1"} +Inf # {trace_id="x"} 0.5` + "\n" +
		"\n{utf=\"8\"} 1\nnovalue\nbad x\ncut{x=\"1\n e 4\n" +
		"f{a=\"1\",} 5\n" +
		"last\t7"
	type sample struct {
		Name, Labels string
		Value        float64
	}
	var got []sample
	Scan([]byte(text), nil, func(name []byte, l Labels, v float64) {
		got = append(got, sample{string(name), string(l), v})
	})
	want := []sample{
		{"a", "", 1}, {"b", "", 2500}, {"c", `x="brace } and quote \" here",y="2"`, math.NaN()},
		{"d", `x="1"`, math.Inf(1)}, {"f", `a="1",`, 5}, {"last", "", 7},
	}
	if diff := cmp.Diff(want, got, cmpopts.EquateNaNs()); diff != "" {
		t.Errorf("samples (-want +got):\n%s", diff)
	}
}

func TestLabels(t *testing.T) {
	l := Labels(`a="1", b="x\"y=\",c",engine="07",none="None",big="99999999999"`)
	for key, want := range map[string]string{"a": "1", "b": `x\"y=\",c`, "engine": "07", "none": "None"} {
		if got, ok := l.Get(key); !ok || string(got) != want {
			t.Errorf("%s = %q, %v", key, got, ok)
		}
	}
	for _, key := range []string{"c", "", "zz"} {
		if got, ok := l.Get(key); ok {
			t.Errorf("%s = %q", key, got)
		}
	}
	if n, ok := l.Number("engine"); !ok || n != 7 {
		t.Errorf("engine = %d, %v", n, ok)
	}
	for _, key := range []string{"none", "big", "zz"} {
		if n, ok := l.Number(key); ok {
			t.Errorf("%s = %d", key, n)
		}
	}
	for _, broken := range []string{"a", "a=", "a=1", `a="1`, `a="1\`, "=", `="1"`} {
		if _, ok := Labels(broken).Get("a"); ok {
			t.Errorf("%s is taken", broken)
		}
	}
}
