package kvevent

import (
	"bytes"
	"encoding/json"
	"os"
	"strings"
	"testing"
)

// captured is one line of a capture of a KV event socket.
type captured struct {
	Src     string
	Frames  []string `json:"frames_b64"`
	Seq     any      // a number, or the text of an end marker
	Decoded []any    // the payload as another decoder read it
}

// checkDecoded compares b with what another decoder read.
func checkDecoded(t *testing.T, b *Batch, want []any) {
	t.Helper()
	if want[0] != b.TS || want[2] != float64(b.Rank) || len(want[1].([]any)) != len(b.Events) {
		t.Fatalf("time %v, rank %v, %d events; want %v", b.TS, b.Rank, len(b.Events), want)
	}
	for i, w := range want[1].([]any) {
		e := &b.Events[i]
		fields := namedFields(w)
		tag := map[Kind]string{Stored: "BlockStored", Removed: "BlockRemoved", Cleared: "AllBlocksCleared"}[e.Kind]
		if fields["type"] != tag || e.MediumName != orEmpty(fields["medium"]) || e.LoRAName != orEmpty(fields["lora_name"]) {
			t.Fatalf("event %d is %+v, want %v", i, e, fields)
		}
		hashes, _ := fields["block_hashes"].([]any)
		if len(hashes) != len(e.Hashes) {
			t.Fatalf("event %d: %d hashes, want %d", i, len(e.Hashes), len(hashes))
		}
		for k, h := range hashes {
			if e.Hashes[k] != canonical(t, h) {
				t.Fatalf("event %d: hash %d is %d, want %v", i, k, e.Hashes[k], h)
			}
		}
		parent := uint64(0)
		if p := fields["parent_block_hash"]; p != nil {
			parent = canonical(t, p)
		}
		if e.Parent != parent || e.HasParent != (parent != 0) {
			t.Fatalf("event %d: parent %d %v, want %d", i, e.Parent, e.HasParent, parent)
		}
		tokens, _ := fields["token_ids"].([]any)
		same := len(tokens) == len(e.Tokens)
		for k := 0; same && k < len(tokens); k++ {
			same = tokens[k] == float64(e.Tokens[k])
		}
		size, _ := fields["block_size"].(float64)
		if !same || float64(e.BlockSize) != size {
			t.Fatalf("event %d: block size %d, tokens %v, want %v", i, e.BlockSize, e.Tokens, tokens)
		}
		salt := ""
		if keys, _ := fields["extra_keys"].([]any); len(keys) > 0 && parent == 0 {
			if first, _ := keys[0].([]any); len(first) == 1 {
				salt = first[0].(string)
			}
		}
		if e.Salt != salt || len(e.ExtraKeys) != 0 {
			t.Fatalf("event %d: salt %q, digests %v, want %q", i, e.Salt, e.ExtraKeys, salt)
		}
	}
}

// namedFields turns an event of either form into a map.
func namedFields(event any) map[string]any {
	if m, ok := event.(map[string]any); ok {
		return m
	}
	list := event.([]any)
	names := []string{"type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys"}
	if list[0] == "BlockRemoved" {
		names = []string{"type", "block_hashes", "medium"}
	}
	m := map[string]any{}
	for i, v := range list {
		m[names[i]] = v
	}
	return m
}

func orEmpty(v any) string { s, _ := v.(string); return s }

// canonical reads a hash as the captures write it.
func canonical(t *testing.T, v any) uint64 {
	t.Helper()
	s, ok := v.(string)
	if !ok {
		return uint64(v.(float64))
	}
	if digits, ok := strings.CutPrefix(s, "bin:"); ok {
		return lastBytes(mustHex(t, digits))
	}
	return number(t, strings.TrimPrefix(s, "u64:"))
}

// TestRealBytes decodes messages of a real vLLM 0.32.0: salts, parents, integer
// and binary hashes, two ranks, a clear and the end of a replay.
func TestRealBytes(t *testing.T) {
	raw, err := os.ReadFile("testdata/vllm-0.32.0.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	kinds := map[Kind]int{}
	for line := range bytes.Lines(raw) {
		var c captured
		if err := json.Unmarshal(line, &c); err != nil {
			t.Fatal(err)
		}
		f := c.frames(t)
		var payload []byte
		if strings.HasPrefix(c.Src, "replay:") {
			var end bool
			_, payload, end, err = ParseReplay(f)
			if err != nil || end != (c.Decoded == nil) {
				t.Fatalf("replay: end=%v %v", end, err)
			}
			if end {
				continue
			}
		} else if _, _, payload, err = ParseLive(f); err != nil {
			t.Fatal(err)
		}
		b := decode(t, payload)
		checkDecoded(t, b, c.Decoded)
		for _, e := range b.Events {
			kinds[e.Kind]++
		}
	}
	if kinds[Stored] == 0 || kinds[Removed] == 0 || kinds[Cleared] == 0 {
		t.Errorf("kinds %v", kinds)
	}
}
