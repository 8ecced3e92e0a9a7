package kvevent

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

var cmpBatch = cmp.Options{cmpopts.IgnoreUnexported(Batch{}), cmpopts.EquateEmpty(), cmpopts.EquateErrors()}

func decode(t testing.TB, payload []byte) *Batch {
	t.Helper()
	var d Decoder
	var b Batch
	if err := d.Decode(payload, &b); err != nil {
		t.Fatalf("Decode(%x): %v", payload[:min(len(payload), 64)], err)
	}
	return &b
}

type vector struct {
	Name, Payload string
	Want          struct {
		TS               float64
		Rank             int32
		Unknown, Skipped int
		Events           []vectorEvent
	}
}

type vectorEvent struct {
	Kind       string
	Medium     Medium
	MediumName string `json:"medium_name"`
	Group      int32
	CacheKind  CacheKind `json:"cache_kind"`
	Window     int32
	Hashes     []string
	Parent     string
	Tokens     []uint32
	Bigram     bool
	BlockSize  int32  `json:"block_size"`
	LoRAName   string `json:"lora_name"`
	LoRAID     *int64 `json:"lora_id"`
	Salt       string
	Extra      []bool
	Locality   Locality
	Ownership  string
	Session    string
}

func readVectors(t testing.TB) []vector {
	t.Helper()
	raw, err := os.ReadFile("testdata/vectors.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	var vs []vector
	for line := range bytes.Lines(raw) {
		var v vector
		if err := json.Unmarshal(line, &v); err != nil {
			t.Fatal(err)
		}
		vs = append(vs, v)
	}
	if len(vs) < 25 {
		t.Fatalf("only %d vectors", len(vs))
	}
	return vs
}

func mustHex(t testing.TB, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(s)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func number(t testing.TB, s string) uint64 {
	t.Helper()
	v, err := strconv.ParseUint(s, 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func (v vectorEvent) event(t testing.TB) Event {
	t.Helper()
	e := Event{
		Kind: map[string]Kind{"stored": Stored, "removed": Removed, "cleared": Cleared}[v.Kind], Medium: v.Medium, MediumName: v.MediumName,
		Group: v.Group, CacheKind: v.CacheKind, SlidingWindow: v.Window, Tokens: v.Tokens, Bigram: v.Bigram, BlockSize: v.BlockSize,
		LoRAName: v.LoRAName, Salt: v.Salt, Locality: v.Locality, Ownership: v.Ownership, SessionID: []byte(v.Session),
	}
	for _, h := range v.Hashes {
		e.Hashes = append(e.Hashes, number(t, h))
	}
	if v.Parent != "" {
		e.Parent, e.HasParent = number(t, v.Parent), true
	}
	if v.LoRAID != nil {
		e.LoRAID, e.HasLoRAID = *v.LoRAID, true
	}
	return e
}

// TestVectors decodes payloads that msgspec, the engines' own encoder, wrote.
func TestVectors(t *testing.T) {
	var d Decoder
	var b Batch // shared, so that leftovers of one vector would show in the next
	for _, v := range readVectors(t) {
		t.Run(v.Name, func(t *testing.T) {
			if err := d.Decode(mustHex(t, v.Payload), &b); err != nil {
				t.Fatal(err)
			}
			want := Batch{TS: v.Want.TS, Rank: v.Want.Rank, Unknown: v.Want.Unknown, Skipped: v.Want.Skipped}
			for _, e := range v.Want.Events {
				want.Events = append(want.Events, e.event(t))
			}
			ignore := cmp.Options{cmpBatch, cmpopts.IgnoreFields(Batch{}, "Reason"), cmpopts.IgnoreFields(Event{}, "ExtraKeys", "Placeholder", "Items")}
			if diff := cmp.Diff(want, b, ignore); diff != "" {
				t.Fatalf("want - got +:\n%s", diff)
			}
			if (b.Reason != nil) != (b.Skipped > 0) {
				t.Errorf("Reason is %v with %d skipped", b.Reason, b.Skipped)
			}
			for i, e := range v.Want.Events {
				var got []bool
				for _, x := range b.Events[i].ExtraKeys {
					got = append(got, x != 0)
				}
				if !slices.Equal(got, e.Extra) {
					t.Errorf("event %d: blocks with extra keys: got %v, want %v", i, got, e.Extra)
				}
			}
		})
	}
}

// TestExtraKeysDistinguish checks that the digest follows identifier and offset
// and not LoRA name or salt.
func TestExtraKeysDistinguish(t *testing.T) {
	digest := func(keys string) uint64 {
		// [0, [["BlockStored", [1], nil, [], 4, nil, "GPU", "ad", [KEYS]]], 0]
		p := "9300" + "91" + "99ab" + hex.EncodeToString([]byte("BlockStored")) + "9101c09004c0a3475055a26164" + "91" + keys + "00"
		b := decode(t, mustHex(t, p))
		if len(b.Events) != 1 {
			t.Fatalf("%s: %d events, reason %v", keys, len(b.Events), b.Reason)
		}
		if len(b.Events[0].ExtraKeys) == 0 {
			return 0
		}
		return b.Events[0].ExtraKeys[0]
	}
	const lora, salt, item, other, moved = "a26164", "a173", "92a16d05", "92a16e05", "92a16d06"
	if got := digest("92" + lora + salt); got != 0 {
		t.Errorf("LoRA and salt alone give digest %x", got)
	}
	base := digest("92" + lora + item)
	if base == 0 || base != digest("91"+item) || base != digest("93"+lora+item+salt) {
		t.Errorf("digest of an item depends on LoRA name or salt")
	}
	if base == digest("91"+other) || base == digest("91"+moved) {
		t.Errorf("digest does not distinguish items or offsets")
	}
	if digest("92"+item+other) == digest("92"+other+item) {
		t.Errorf("digest does not depend on the order of items")
	}
}

func TestUnreadable(t *testing.T) {
	for name, p := range map[string]string{
		"empty":                   "",
		"null":                    "c0",
		"load figures of SGLang":  "96" + "a8" + hex.EncodeToString([]byte("LoadStat")) + "0102030400",
		"one element":             "9101",
		"events not a list":       "920105",
		"events cut":              "920192",
		"length beyond input":     "9201ddffffffff",
		"map length beyond input": "dfffffffff",
		"map without events":      "81a2747301",
		"never used type byte":    "920191c1",
		"cut within a string":     "92019191d9",
		"cut within a map tag":    "92019181a474797065d9ff",
		"bytes after the end":     "92019000",
		"events twice":            "82a66576656e747390a66576656e747390",
	} {
		t.Run(name, func(t *testing.T) {
			var d Decoder
			var b Batch
			if err := d.Decode(mustHex(t, p), &b); !errors.Is(err, ErrPayload) {
				t.Errorf("error %v is not ErrPayload", err)
			}
			if len(b.Events) != 0 {
				t.Errorf("an unreadable batch left %d events", len(b.Events))
			}
		})
	}
}

func TestLimits(t *testing.T) {
	big := AppendBatch(nil, &Batch{Rank: 0, Events: []Event{
		{Kind: Stored, Hashes: make([]uint64, 9), Tokens: make([]uint32, 8), Group: -1},
		{Kind: Stored, Hashes: make([]uint64, 8), Tokens: make([]uint32, 33), Group: -1},
		{Kind: Stored, Hashes: make([]uint64, 8), Tokens: make([]uint32, 32), Group: -1, Salt: strings.Repeat("s", 17)},
		{Kind: Stored, Hashes: make([]uint64, 8), Tokens: make([]uint32, 32), Group: -1, Salt: strings.Repeat("s", 16)},
	}}, Encoding{})
	d := Decoder{Limits: Limits{Blocks: 8, Tokens: 32, Text: 16}}
	var b Batch
	if err := d.Decode(big, &b); err != nil || len(b.Events) != 1 || b.Skipped != 3 {
		t.Errorf("got %d events, %d skipped, error %v; want 1, 3", len(b.Events), b.Skipped, err)
	}
	d.Limits.Events = 3
	if err := d.Decode(big, &b); !errors.Is(err, ErrPayload) {
		t.Errorf("4 events with a limit of 3: %v", err)
	}
	d.Limits = Limits{Payload: len(big) - 1}
	if err := d.Decode(big, &b); !errors.Is(err, ErrPayload) {
		t.Errorf("payload over the limit: %v", err)
	}
}

// TestHostileMemory sends what would grow a careless decoder: deep nesting, and
// many arrays that announce much and deliver nothing.
func TestHostileMemory(t *testing.T) {
	var d Decoder
	var b Batch
	deep := append([]byte{0x93, 0x01, 0x91}, bytes.Repeat([]byte{0x91}, 4<<20)...)
	if err := d.Decode(append(deep, 0xc0, 0x00), &b); err != nil || b.Skipped != 1 {
		t.Errorf("deep nesting: error %v, %d skipped", err, b.Skipped)
	}
	one := append([]byte{0x92, 0xac}, "BlockRemoved"...)
	one = append(one, 0xdd, 0, 0, 1, 0) // 256 hashes announced
	one = append(one, bytes.Repeat([]byte{0xc0}, 256)...)
	events := []byte{0x93, 0x01, 0xdc, 0x10, 0x00}
	p := append(append(events, bytes.Repeat(one, 4096)...), 0x00)
	if err := d.Decode(p, &b); err != nil || b.Skipped != 4096 {
		t.Fatalf("error %v, %d skipped", err, b.Skipped)
	}
	if got := cap(b.hashes.buf); got > 4096 {
		t.Errorf("arrays without hashes grew the buffer to %d hashes", got)
	}
}

// TestBatchGivesMemoryBack checks that one large batch does not cost memory for
// ever.
func TestBatchGivesMemoryBack(t *testing.T) {
	large := AppendBatch(nil, &Batch{Events: []Event{{Kind: Stored, Hashes: []uint64{1}, Tokens: make([]uint32, 4*arenaKeep)}}}, Encoding{})
	small := AppendBatch(nil, &Batch{Events: []Event{{Kind: Removed, Hashes: []uint64{1}}}}, Encoding{})
	var d Decoder
	var b Batch
	for i, p := range append([][]byte{large}, slices.Repeat([][]byte{small}, 2*arenaShrink)...) {
		if err := d.Decode(p, &b); err != nil {
			t.Fatal(err)
		}
		if i == 0 && cap(b.tokens.buf) < 4*arenaKeep {
			t.Fatalf("buffer of %d tokens", cap(b.tokens.buf))
		}
	}
	if got := cap(b.tokens.buf); got > arenaKeep {
		t.Errorf("buffer of %d tokens is kept after many small batches", got)
	}
}

func TestNoAllocations(t *testing.T) {
	e := benchEvent(64)
	e.LoRAName, e.Salt, e.SessionID = "adapter", "tenant", []byte("session")
	for form := VLLMMap; form <= SGLangMap; form++ {
		p := AppendBatch(nil, &Batch{Events: []Event{e, {Kind: Removed, Hashes: e.Hashes, Medium: CPU}, {Kind: Cleared}}}, Encoding{Form: form})
		var d Decoder
		var b Batch
		if got := testing.AllocsPerRun(100, func() {
			if err := d.Decode(p, &b); err != nil || len(b.Events) != 3 {
				t.Fatal(err)
			}
		}); got != 0 {
			t.Errorf("%v: %v allocations per batch", form, got)
		}
	}
}

func readCapture(t testing.TB, name string) []captured {
	t.Helper()
	f, err := os.Open(filepath.Join("..", "..", "testdata", "captures", name))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	var out []captured
	sc := bufio.NewScanner(z)
	sc.Buffer(nil, 16<<20)
	for sc.Scan() {
		var c captured
		if err := json.Unmarshal(sc.Bytes(), &c); err != nil {
			t.Fatal(err)
		}
		out = append(out, c)
	}
	if err := sc.Err(); err != nil {
		t.Fatal(err)
	}
	return out
}

func (c captured) frames(t testing.TB) [][]byte {
	t.Helper()
	var out [][]byte
	for _, s := range c.Frames {
		b, err := base64.StdEncoding.DecodeString(s)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, b)
	}
	return out
}

// TestCaptures decodes whole captures of two engines: frames, replays, events.
func TestCaptures(t *testing.T) {
	type count struct{ Messages, Ends, Stored, Removed, Cleared int }
	for _, tt := range []struct {
		file string
		want count
		// shape checks what the notes to the captures say of every Stored.
		shape func(e *Event) bool
	}{
		{"kvevents-vllm-format.jsonl.gz", count{Messages: 243, Stored: 396, Removed: 879, Cleared: 1, Ends: 2}, func(e *Event) bool {
			return len(e.Tokens) == len(e.Hashes)*int(e.BlockSize) && (e.BlockSize == 16 || e.BlockSize == 64)
		}},
		{"kvevents-vllm-0.32.0-real.jsonl.gz", count{Messages: 191, Stored: 146, Removed: 146, Cleared: 1, Ends: 3}, func(e *Event) bool {
			return len(e.Tokens) == len(e.Hashes)*int(e.BlockSize) && (e.BlockSize == 32 || e.BlockSize == 64) &&
				e.Group == 0 && e.CacheKind == FullAttention && e.MediumName == "GPU"
		}},
	} {
		t.Run(tt.file, func(t *testing.T) {
			var got, replayed count
			var d Decoder
			var b Batch
			next := map[string]uint64{}
			for i, c := range readCapture(t, tt.file) {
				got.Messages++
				n := &got
				var payload []byte
				var seq uint64
				var err error
				if strings.HasPrefix(c.Src, "replay:") {
					n = &replayed
					var end bool
					seq, payload, end, err = ParseReplay(c.frames(t))
					if end {
						got.Ends++
						if seq != EndSeq {
							t.Errorf("message %d: replay ends with sequence %d", i, seq)
						}
						continue
					}
				} else {
					_, seq, payload, err = ParseLive(c.frames(t))
					if want, ok := next[c.Src]; ok && seq != want {
						t.Errorf("message %d of %s: sequence %d, want %d", i, c.Src, seq, want)
					}
					next[c.Src] = seq + 1
				}
				if err != nil || float64(seq) != c.Seq {
					t.Fatalf("message %d: sequence %d, want %v, error %v", i, seq, c.Seq, err)
				}
				if err := d.Decode(payload, &b); err != nil {
					t.Fatalf("message %d: %v", i, err)
				}
				if b.Skipped+b.Unknown != 0 || b.Rank < 0 || b.TS < 1e9 {
					t.Fatalf("message %d: %d skipped (%v), %d unknown, rank %d, time %v", i, b.Skipped, b.Reason, b.Unknown, b.Rank, b.TS)
				}
				checkDecoded(t, &b, c.Decoded)
				for k := range b.Events {
					e := &b.Events[k]
					switch e.Kind {
					case Stored:
						n.Stored++
						if !tt.shape(e) {
							t.Errorf("message %d event %d: unexpected %+v", i, k, e)
						}
					case Removed:
						n.Removed++
						if len(e.Hashes) == 0 {
							t.Errorf("message %d event %d removes nothing", i, k)
						}
					case Cleared:
						n.Cleared++
					}
				}
			}
			t.Logf("live and in all %+v, in replays %+v", got, replayed)
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("messages in all and events in live streams: want - got +:\n%s", diff)
			}
			if replayed.Stored == 0 || replayed.Removed == 0 {
				t.Error("the replays hold nothing")
			}
		})
	}
}

func TestFrames(t *testing.T) {
	seq := AppendSeq(nil, 7)
	if topic, n, p, err := ParseLive([][]byte{[]byte("kv"), seq, []byte("x")}); err != nil || string(topic) != "kv" || n != 7 || string(p) != "x" {
		t.Errorf("live: %q %d %q %v", topic, n, p, err)
	}
	for _, bad := range [][][]byte{nil, {seq, seq}, {nil, seq[:7], nil}, {nil, seq, nil, nil}} {
		if _, _, _, err := ParseLive(bad); !errors.Is(err, ErrFrames) {
			t.Errorf("live %q: %v", bad, err)
		}
	}
	endSeq := AppendSeq(nil, EndSeq)
	for _, tt := range []struct {
		name   string
		frames [][]byte
		end    bool
	}{
		{"old", [][]byte{{}, seq, {1}}, false},
		{"topic", [][]byte{{}, []byte("kv"), seq, {1}}, false},
		{"empty topic", [][]byte{{}, {}, seq, {1}}, false},
		{"delimiter taken", [][]byte{seq, {1}}, false},
		{"old end", [][]byte{{}, endSeq, {}}, true},
		{"topic end", [][]byte{{}, {}, endSeq, {}}, true},
		{"end by empty payload", [][]byte{{}, seq, {}}, true},
	} {
		n, p, end, err := ParseReplay(tt.frames)
		if err != nil || end != tt.end {
			t.Errorf("replay %s: end=%v %v", tt.name, end, err)
		}
		if !end && (n != 7 || len(p) != 1) {
			t.Errorf("replay %s: %d %q", tt.name, n, p)
		}
	}
	for _, bad := range [][][]byte{nil, {seq}, {{}, {}, {1}}, {{}, {}, {}, seq, {1}}} {
		if _, _, _, err := ParseReplay(bad); !errors.Is(err, ErrFrames) {
			t.Errorf("replay %q: %v", bad, err)
		}
	}
	if n, err := ParseReplayRequest(ReplayRequest(9)); err != nil || n != 9 {
		t.Errorf("request: %d %v", n, err)
	}
	for _, bad := range [][][]byte{nil, {seq}, {seq, seq}, {{}, seq, {}}} {
		if _, err := ParseReplayRequest(bad); !errors.Is(err, ErrFrames) {
			t.Errorf("request %q: %v", bad, err)
		}
	}
}
