package engine

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestMockerPolynomials(t *testing.T) {
	var m Mocker
	for _, c := range []struct {
		b    Batch
		want float64 // ms
	}{
		{Batch{}, 0},
		{Batch{PrefillTokens: 8192}, 169.14}, // the published example
		{Batch{DecodeRequests: 1}, 5.74},
		{Batch{DecodeRequests: 9, KVUsage: 0.5}, 26.31},
		{Batch{DecodeRequests: 9, KVUsage: 1}, 34.01},
		{Batch{PrefillTokens: 1000, DecodeRequests: 1}, 16.50142 + 15.18344 + 0.4209989 + 5.74},
	} {
		if got := m.Step(c.b).Seconds() * 1000; got < c.want-0.01 || got > c.want+0.01 {
			t.Errorf("%+v: %.3f ms, want %.3f", c.b, got, c.want)
		}
	}
	if got := m.Transfer(1000); got != time.Duration(1000*131072/64e9*1e9) {
		t.Errorf("transfer: %v", got)
	}
}

func TestReadProfile(t *testing.T) {
	dir := t.TempDir()
	read := func(text string) (Profile, error) {
		t.Helper()
		path := filepath.Join(dir, "p")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return ReadProfile(path)
	}
	want := Profile{Name: "x", Prefill: [3]float64{1, 2, 3}, Decode: [3]float64{4, 5, 6}, Transfers: [2]float64{7, 8}, Noise: 2, Speed: 3}
	for _, text := range []string{
		"name: x\nprefill_ms: [1, 2, 3]\ndecode_ms: [4, 5, 6]\ntransfer_ms: [7, 8]\nnoise_pct: 2\nspeed: 3\n",
		`{"name":"x","prefill_ms":[1,2,3],"decode_ms":[4,5,6],"transfer_ms":[7,8],"noise_pct":2,"speed":3}`,
	} {
		if got, err := read(text); err != nil || got != want {
			t.Errorf("%+v %v", got, err)
		}
	}
	for text, part := range map[string]string{
		"prefill: [1]":           "prefill",
		"prefill_ms: [-1, 0, 0]": "prefill_ms[0]",
		"noise_pct: 200":         "noise_pct",
		"decode_ms: [a, b, c]":   "float64",
		"transfer_ms: [.inf, 0]": "transfer_ms[0]",
		"":                       "EOF",
	} {
		if _, err := read(text); err == nil || !strings.Contains(err.Error(), part) {
			t.Errorf("%q: %v, want %q", text, err, part)
		}
	}
}
