package kvevent

import (
	"bytes"
	"math"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/tinylib/msgp/msgp"
	"pgregory.net/rapid"

	"github.com/dynctl/dynctl/internal/rig/property"
)

func genEvent(t *rapid.T, enc Encoding) Event {
	sglang := enc.Form == SGLangArray || enc.Form == SGLangMap
	arrays := enc.Form == VLLMArray || enc.Form == SGLangArray
	hash := rapid.OneOf(rapid.Uint64(), rapid.Uint64Max(300))
	e := Event{Kind: Kind(rapid.IntRange(1, len(kinds)-1).Draw(t, "kind")), Group: -1}
	if e.Kind == Cleared {
		return e
	}
	e.Hashes = rapid.SliceOfN(hash, 0, 20).Draw(t, "hashes")
	e.MediumName = rapid.SampledFrom([]string{"GPU", "CPU", "DISK", "EXTERNAL", "TAPE"}).Draw(t, "medium")
	e.Medium = mediumOf(e.MediumName)
	if !sglang && rapid.Bool().Draw(t, "grouped") {
		e.Group = rapid.Int32Min(0).Draw(t, "group")
	}
	if !arrays && !sglang {
		e.Locality = rapid.SampledFrom([]Locality{LocalityAbsent, Local, Remote}).Draw(t, "locality")
		e.Ownership = rapid.StringN(0, 40, 100).Draw(t, "ownership")
	}
	if e.Kind != Stored {
		return e
	}
	if e.HasParent = rapid.Bool().Draw(t, "child"); e.HasParent {
		e.Parent = rapid.Uint64Min(1).Draw(t, "parent")
	}
	e.Tokens = rapid.SliceOfN(rapid.OneOf(rapid.Uint32(), rapid.Uint32Max(70000)), 0, 70).Draw(t, "tokens")
	e.Bigram = len(e.Tokens) > 0 && rapid.Bool().Draw(t, "bigram")
	e.BlockSize = rapid.Int32Min(0).Draw(t, "block size")
	if e.HasLoRAID = rapid.Bool().Draw(t, "lora"); e.HasLoRAID {
		e.LoRAID = rapid.Int64().Draw(t, "lora id")
	}
	if enc.Form != SGLangArray {
		e.LoRAName = rapid.SampledFrom([]string{"", "ad", "an adapter with a name of more than 31 bytes"}).Draw(t, "lora name")
	}
	if sglang || !e.HasParent && len(e.Hashes) > 0 {
		e.Salt = rapid.SampledFrom([]string{"", "tenant"}).Draw(t, "salt")
	}
	if !sglang && rapid.Bool().Draw(t, "spec") {
		e.CacheKind = rapid.SampledFrom([]CacheKind{FullAttention, SlidingWindow, Mamba, ChunkedLocal, OtherCache}).Draw(t, "cache kind")
		if e.CacheKind == OtherCache {
			e.CacheName = rapid.SampledFrom([]string{"other", "unknown", "quantum_attention"}).Draw(t, "cache name")
		}
		e.SlidingWindow = rapid.Int32Range(0, 4096).Draw(t, "window")
	}
	if !arrays {
		e.SessionID = []byte(rapid.StringN(0, 40, 100).Draw(t, "session"))
	}
	return e
}

// TestRoundTrip encodes random batches in every form and decodes them again.
func TestRoundTrip(t *testing.T) {
	var d Decoder
	var b Batch
	property.Check(t, func(t *rapid.T) {
		enc := Encoding{
			Form:    Form(rapid.IntRange(int(VLLMMap), int(SGLangMap)).Draw(t, "form")),
			BinHash: rapid.Bool().Draw(t, "bin"),
		}
		want := Batch{TS: rapid.Float64Range(0, 1e12).Draw(t, "ts"), Rank: rapid.Int32Range(-1, 300).Draw(t, "rank")}
		for range rapid.IntRange(0, 20).Draw(t, "events") {
			want.Events = append(want.Events, genEvent(t, enc))
		}
		if err := d.Decode(AppendBatch(nil, &want, enc), &b); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, b, cmpBatch); diff != "" {
			t.Fatalf("%v: want - got +:\n%s", enc, diff)
		}
	})
}

// appendRandom appends a random msgpack value written by the oracle.
func appendRandom(t *rapid.T, p []byte, depth int) []byte {
	kinds := 12
	if depth == 0 {
		kinds = 10
	}
	switch rapid.IntRange(0, kinds-1).Draw(t, "kind") {
	case 0:
		return msgp.AppendNil(p)
	case 1:
		return msgp.AppendBool(p, rapid.Bool().Draw(t, "bool"))
	case 2:
		return msgp.AppendInt64(p, rapid.OneOf(rapid.Int64(), rapid.Int64Range(-200, 200), rapid.Int64Range(-70000, 70000)).Draw(t, "int"))
	case 3:
		return msgp.AppendUint64(p, rapid.OneOf(rapid.Uint64(), rapid.Uint64Max(70000), rapid.Uint64Max(1<<33)).Draw(t, "uint"))
	case 4:
		return msgp.AppendFloat64(p, rapid.Float64().Draw(t, "float"))
	case 5:
		return msgp.AppendFloat32(p, rapid.Float32().Draw(t, "float"))
	case 6:
		return msgp.AppendString(p, rapid.StringN(0, 300, 400).Draw(t, "str"))
	case 7:
		return msgp.AppendBytes(p, rapid.SliceOfN(rapid.Byte(), 0, 300).Draw(t, "bin"))
	case 8:
		n := rapid.SampledFrom([]int{0, 1, 2, 3, 4, 8, 9, 16, 17, 300}).Draw(t, "ext")
		out, err := msgp.AppendExtension(p, &msgp.RawExtension{Type: 42, Data: make([]byte, n)})
		if err != nil {
			t.Fatal(err)
		}
		return out
	case 9:
		return msgp.AppendString(p, "type")
	case 10:
		n := rapid.IntRange(0, 20).Draw(t, "array")
		p = msgp.AppendArrayHeader(p, uint32(n))
		for range n {
			p = appendRandom(t, p, depth-1)
		}
		return p
	}
	n := rapid.IntRange(0, 18).Draw(t, "map")
	p = msgp.AppendMapHeader(p, uint32(n))
	for range 2 * n {
		p = appendRandom(t, p, depth-1)
	}
	return p
}

// TestAgainstMsgp compares the cursor with tinylib/msgp on random values, whole
// and cut short.
func TestAgainstMsgp(t *testing.T) {
	property.Check(t, func(t *rapid.T) {
		p := appendRandom(t, nil, 3)
		cut := p[:rapid.IntRange(0, len(p)).Draw(t, "cut")]
		for _, in := range [][]byte{p, cut} {
			compare(t, in)
		}
	})
}

// compare fails when the oracle and the cursor disagree on the first value of p.
func compare(t interface{ Fatalf(string, ...any) }, p []byte) {
	rest, err := msgp.Skip(p)
	c := cursor{p: p}
	ok := c.skip()
	if ok != (err == nil) || ok && c.pos != len(p)-len(rest) {
		t.Fatalf("skip(%x): %v at %d, oracle %v with %d left", p, ok, c.pos, err, len(rest))
	}
	if !ok {
		return
	}
	c.pos = 0
	switch msgp.NextType(p) {
	case msgp.IntType, msgp.UintType:
		v, neg, ok := c.integer()
		want, _, err := msgp.ReadInt64Bytes(p)
		wantU := uint64(want)
		if err != nil {
			wantU, _, err = msgp.ReadUint64Bytes(p)
			want = 0
		}
		if !ok || err != nil || v != wantU || neg != (want < 0) {
			t.Fatalf("integer(%x): %d neg %v ok %v, oracle %d, %v", p, v, neg, ok, wantU, err)
		}
	case msgp.Float64Type, msgp.Float32Type:
		v, ok := c.number()
		var want float64
		var err error
		if msgp.NextType(p) == msgp.Float32Type {
			var f float32
			f, _, err = msgp.ReadFloat32Bytes(p)
			want = float64(f)
		} else {
			want, _, err = msgp.ReadFloat64Bytes(p)
		}
		if !ok || err != nil || math.Float64bits(v) != math.Float64bits(want) && v == v {
			t.Fatalf("number(%x): %v %v, oracle %v %v", p, v, ok, want, err)
		}
	case msgp.StrType:
		s, ok := c.str()
		want, _, err := msgp.ReadStringZC(p)
		if !ok || err != nil || !bytes.Equal(s, want) {
			t.Fatalf("str(%x): %q %v, oracle %q %v", p, s, ok, want, err)
		}
	case msgp.BinType:
		s, ok := c.bin()
		want, _, err := msgp.ReadBytesZC(p)
		if !ok || err != nil || !bytes.Equal(s, want) {
			t.Fatalf("bin(%x): %x %v, oracle %x %v", p, s, ok, want, err)
		}
	case msgp.ArrayType:
		n, ok := c.arrayLen()
		want, _, err := msgp.ReadArrayHeaderBytes(p)
		if !ok || err != nil || n != int(want) {
			t.Fatalf("arrayLen(%x): %d %v, oracle %d %v", p, n, ok, want, err)
		}
	case msgp.MapType:
		n, ok := c.mapLen()
		want, _, err := msgp.ReadMapHeaderBytes(p)
		if !ok || err != nil || n != int(want) {
			t.Fatalf("mapLen(%x): %d %v, oracle %d %v", p, n, ok, want, err)
		}
	}
}

func FuzzDecode(f *testing.F) {
	for _, v := range readVectors(f) {
		f.Add(mustHex(f, v.Payload))
	}
	var d Decoder
	var b Batch
	f.Fuzz(func(t *testing.T, p []byte) {
		if len(p) < 1<<16 {
			compare(t, p)
		}
		if d.Decode(p, &b) != nil {
			return
		}
		blocks, tokens := 0, 0
		for i := range b.Events {
			e := &b.Events[i]
			if e.Kind == Unknown || e.Group < -1 || e.BlockSize < 0 {
				t.Errorf("event %d is not one: %+v", i, e)
			}
			if e.Bigram && len(e.Tokens) == 0 {
				t.Errorf("event %d has bigrams of no tokens: %+v", i, e)
			}
			blocks += len(e.Hashes) + len(e.ExtraKeys)
			tokens += len(e.Tokens)
		}
		if blocks > len(p) || tokens > len(p) || len(b.Events) > len(p) {
			t.Errorf("%d events, %d blocks, %d tokens from %d bytes", len(b.Events), blocks, tokens, len(p))
		}
		// What was decoded can be written and read again.
		var again Batch
		if err := new(Decoder).Decode(AppendBatch(nil, &b, Encoding{}), &again); err != nil || len(again.Events) != len(b.Events) {
			t.Errorf("round trip: %v, %d events of %d", err, len(again.Events), len(b.Events))
		}
	})
}

func benchEvent(blocks int) Event {
	e := Event{Kind: Stored, BlockSize: 16, HasParent: true, Parent: 1 << 60, Group: -1}
	x := uint64(88172645463325252)
	next := func() uint64 { x ^= x << 13; x ^= x >> 7; x ^= x << 17; return x }
	for range blocks {
		e.Hashes = append(e.Hashes, next()|1<<63)
		for range 16 {
			e.Tokens = append(e.Tokens, uint32(next()%150000))
		}
	}
	return e
}

func BenchmarkDecode(b *testing.B) {
	e := benchEvent(64)
	small := benchEvent(1)
	for _, bm := range []struct {
		name  string
		batch Batch
		enc   Encoding
	}{
		{"vllm-array/4x64", Batch{Events: []Event{e, e, e, e}}, Encoding{Form: VLLMArray}},
		{"vllm-map/4x64", Batch{Events: []Event{e, e, e, e}}, Encoding{Form: VLLMMap}},
		{"vllm-array/1", Batch{Events: []Event{small}}, Encoding{Form: VLLMArray}},
		{"vllm-map/1", Batch{Events: []Event{small}}, Encoding{Form: VLLMMap}},
		{"vllm-map/removed16", Batch{Events: func() (es []Event) {
			for _, h := range e.Hashes[:16] {
				es = append(es, Event{Kind: Removed, Hashes: []uint64{h}, Group: 0})
			}
			return
		}()}, Encoding{Form: VLLMMap}},
	} {
		b.Run(bm.name, func(b *testing.B) {
			p := AppendBatch(nil, &bm.batch, bm.enc)
			var d Decoder
			var out Batch
			b.SetBytes(int64(len(p)))
			b.ReportAllocs()
			for b.Loop() {
				if err := d.Decode(p, &out); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkEncode(b *testing.B) {
	e := benchEvent(64)
	batch := Batch{Events: []Event{e, e, e, e}}
	var p []byte
	b.ReportAllocs()
	for b.Loop() {
		p = AppendBatch(p[:0], &batch, Encoding{})
	}
	b.SetBytes(int64(len(p)))
}
