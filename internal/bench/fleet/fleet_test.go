package fleet

import (
	"compress/gzip"
	"io"
	"math"
	"os"
	"testing"

	"github.com/dynctl/dynctl/internal/router/observe/admin"
)

// The pages are those of real engines after one remote prefill.
func TestCountersOfRealPages(t *testing.T) {
	read := func(name string) []byte {
		f, err := os.Open("../../../testdata/captures/" + name)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		z, err := gzip.NewReader(f)
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(z)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	s := newSums()
	addPage(&s, read("metrics-vllm-0.32.0-decode.prom.gz"))
	for what, v := range map[string]float64{"queries": s.Queries, "external hits": s.ExternalHits, "prompt": s.Prompt, "external": s.External, "transfers": s.TransferCount, "bytes": s.TransferBytes} {
		if math.IsNaN(v) || v <= 0 {
			t.Errorf("%s = %v", what, v)
		}
	}
	two := newSums()
	addPage(&two, read("metrics-vllm-0.32.0-decode.prom.gz"))
	addPage(&two, read("metrics-vllm-0.32.0-decode.prom.gz"))
	if two.Prompt != 2*s.Prompt || two.Minus(s).Prompt != s.Prompt {
		t.Error("two workers do not add up")
	}
}

func TestUnknownIsNotZero(t *testing.T) {
	s := newSums()
	addPage(&s, []byte("# HELP x\nfoo 1\nvllm:prompt_tokens_total{a=\"b c\"} 7.0\nvllm:prompt_tokens_total nonsense\n"))
	if s.Prompt != 7 || !math.IsNaN(s.Hits) {
		t.Errorf("%+v", s)
	}
}

func TestDataURL(t *testing.T) {
	for _, c := range []struct {
		admin, listen string
		tls           bool
		want          string
	}{
		{"http://10.0.0.5:8001", "0.0.0.0:8000", false, "http://10.0.0.5:8000"},
		{"http://127.0.0.1:8001", "127.0.0.1:8000", false, "http://127.0.0.1:8000"},
		{"http://[::1]:8001", ":8000", false, "http://[::1]:8000"},
		{"http://10.0.0.5:8001", "0.0.0.0:8000", true, "https://10.0.0.5:8000"},
	} {
		s := &admin.Status{Listen: c.listen}
		s.Access.Data.TLS = c.tls
		if got, err := dataOf(c.admin, s); err != nil || got != c.want {
			t.Errorf("%v: %s %v", c, got, err)
		}
	}
}
