package main

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/blockhash"
)

// tiny returns a KVOPS1 file of two ranks that store and evict chains of a 600-block prompt, with exact
// answers.
func tiny(t testing.TB, wrong uint64) string {
	t.Helper()
	const blocks = 600
	locals := make([]uint64, blocks)
	for i := range locals {
		locals[i] = uint64(i)*0x9e3779b97f4a7c15 + 1
	}
	seqs := blockhash.Chain(nil, locals)
	var ops []byte
	var h [10]uint64 // ops, bytes, and those by kind: ops and hashes
	op := func(kind byte, rank uint64, head []uint64, first uint64, n int64) {
		h[0]++
		ops = binary.AppendUvarint(append(ops, kind), rank)
		for _, v := range head {
			ops = binary.AppendUvarint(ops, v)
		}
		ops = binary.AppendVarint(binary.AppendUvarint(binary.AppendUvarint(ops, 1), first), n)
		if kind <= kindRemove {
			h[1+kind]++
			h[4+kind] += uint64(max(n, -n))
		}
	}
	expect := func(pairs ...uint64) {
		h[0]++
		ops = binary.AppendUvarint(append(ops, kindExpect, 0), uint64(len(pairs)/2))
		for _, v := range pairs {
			ops = binary.AppendUvarint(ops, v)
		}
	}
	op(kindQuery, 0, nil, 0, blocks)
	expect()
	op(kindStore, 0, []uint64{0}, 0, blocks)
	op(kindStore, 1, []uint64{0}, 0, 20)
	mid := h[0]
	op(kindRemove, 0, nil, blocks-1, -100)
	op(kindQuery, 1, nil, 0, blocks)
	expect(0, blocks-100, 1, 20)
	op(kindStore, 1, []uint64{20}, 20, 80)
	op(kindCheck, 1, nil, 0, blocks)
	expect(0, blocks-100, 1, 100+wrong)
	head := append([]byte("KVOPS1\n\x00"), make([]byte, 120)...)
	put := func(at int, v ...uint64) {
		for i, v := range v {
			binary.LittleEndian.PutUint64(head[at+8*i:], v)
		}
	}
	put(8, 1|16<<32, 2|1000<<32, blocks, h[0], uint64(len(ops)), h[2], h[3], h[4], h[5], h[6], h[7], blocks-100+100, blocks-100, 3, mid)
	for i := range locals {
		head = binary.LittleEndian.AppendUint64(head, locals[i])
		head = binary.LittleEndian.AppendUint64(head, seqs[i])
	}
	path := filepath.Join(t.TempDir(), "tiny.kvops")
	if err := os.WriteFile(path, append(head, ops...), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestModes(t *testing.T) {
	path := tiny(t, 0)
	for _, form := range []string{"grouped", "vllm", "vllm-opaque"} {
		t.Setenv("FORM", strings.TrimSuffix(form, "-opaque"))
		if strings.HasSuffix(form, "-opaque") {
			t.Setenv("NAMES", "opaque")
		}
		for mode, key := range map[string]string{
			"check": "checked", "throughput": "mops", "throughput-noshare": "mops", "memory": "distinct",
		} {
			var out bytes.Buffer
			if err := run([]string{"dynctl", mode, path, "2"}, &out); err != nil {
				t.Fatalf("%s %s: %v", form, mode, err)
			}
			var line map[string]any
			if err := json.Unmarshal(out.Bytes(), &line); err != nil {
				t.Fatalf("%s %s: %v in %s", form, mode, err, out.String())
			}
			for k, want := range map[string]any{"index": "dynctl", "mode": mode, "form": form, "workload": "tiny"} {
				if line[k] != want {
					t.Errorf("%s %s: %s is %v", form, mode, k, line[k])
				}
			}
			if line[key] == nil {
				t.Errorf("%s %s: no %s: %v", form, mode, key, line)
			}
			if mode == "check" && (line["checked"] != 3.0 || line["queries_wrong"] != 0.0) {
				t.Errorf("%s: %v, want 3 right answers", form, line)
			}
		}
	}
}

func TestWrongAnswerShows(t *testing.T) {
	var out bytes.Buffer
	if err := run([]string{"dynctl", "check", tiny(t, 1)}, &out); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(out.String(), `"queries_wrong":1,"ranks_over":0,"ranks_under":1,`) {
		t.Errorf("got %s", out.String())
	}
}

func TestErrors(t *testing.T) {
	path := tiny(t, 0)
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	cut := filepath.Join(t.TempDir(), "cut.kvops")
	for name, args := range map[string][]string{
		"no arguments": {},
		"no such file": {"x", "check", path + "x"},
		"mode":         {"x", "chek", path},
		"threads":      {"x", "throughput", path, "0"},
		"rate":         {"x", "latency", path, "1", "-1"},
		"cut":          {"x", "check", cut},
	} {
		for _, n := range []int{10, 200, len(data) - 3} {
			if err := os.WriteFile(cut, data[:n], 0o600); err != nil {
				t.Fatal(err)
			}
			if err := run(args, &bytes.Buffer{}); err == nil {
				t.Errorf("%s: no error", name)
			}
		}
	}
}

// BenchmarkWorkload replays the file named by KVOPS in both forms on two threads.
func BenchmarkWorkload(b *testing.B) {
	path := os.Getenv("KVOPS")
	if path == "" {
		b.Skip("KVOPS names no workload file of the shared index harness")
	}
	for _, form := range []string{"grouped", "vllm"} {
		b.Run(form, func(b *testing.B) {
			w, err := load(path, form == "vllm")
			if err != nil {
				b.Fatal(err)
			}
			for b.Loop() {
				if _, err := throughput(w, 2, true); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(w.blockOps)*float64(b.N)/b.Elapsed().Seconds()/1e6, "Mops/s")
		})
	}
}
