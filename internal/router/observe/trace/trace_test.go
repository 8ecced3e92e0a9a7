package trace

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/dynctl/dynctl/internal/kvevent"
	"github.com/dynctl/dynctl/internal/router/cache/kvgroup"
	"github.com/dynctl/dynctl/internal/router/observe/receipt"
	"github.com/dynctl/dynctl/internal/router/placement/cost"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/placement/decision"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/workers"
)

// every has a record of each kind, with every member set.
func every() []Record {
	us := func(n int64) time.Duration { return time.Duration(n) * time.Microsecond }
	return []Record{
		{Kind: KindRank, Rank: "decode-0/dp1", RankInfo: RankInfo{Slot: 3, BlockSize: 16, KVBlocks: 4096, New: true, Traits: kvgroup.Traits{IgnoreCopies: true, Drops: true, Chunk: 8192, HashAlgorithm: "sha256_cbor", HashSeed: "42"}}},
		{Kind: KindRank, Rank: "decode-0/dp1", RankInfo: RankInfo{Slot: 3, BlockSize: 16, Kept: true}},
		{Kind: KindFeed, Time: us(5), Rank: "decode-0/dp1", Trusted: true},
		{Kind: KindBatch, Time: us(9), Rank: "decode-0/dp1", Batch: Batch{Seq: 7, Received: us(8), Replayed: true, Payload: []byte{0x93, 1, 2, 0xff}}},
		{Kind: KindBatch, Time: us(9), Rank: `odd "name"\n/dp0`, Batch: Batch{Seq: 1<<64 - 1, Received: us(-8), Payload: []byte{}}},
		{Kind: KindClear, Time: us(10), Rank: "decode-0/dp1", Clear: Clear{ForgotPublisher: true, Reason: "batches 8 to 9 are lost: <no replay> \u2028"}},
		{Kind: KindEvent, Time: us(11), Rank: "worker-7/dp0", Event: Event{ID: 12, Op: Stored, Names: []uint64{1, 1<<64 - 1}, Locals: []uint64{3, 4}, Parent: 1 << 63, HasParent: true, Start: 2}},
		{Kind: KindEvent, Time: us(11), Rank: "worker-7/dp0", Event: Event{ID: 12, Op: Stored, Names: []uint64{1}, Locals: []uint64{3}, Start: -1, Tier: "disk", Domain: "worker", Session: "s", Extra: json.RawMessage(`[{"mm_objects":[]}]`)}},
		{Kind: KindEvent, Time: us(11), Rank: "worker-7/dp0", Event: Event{ID: 13, Op: Removed, Names: manyHashes(100), Start: -1}},
		{Kind: KindEvent, Time: us(11), Rank: "worker-7/dp0", Event: Event{ID: 14, Op: Cleared, Start: -1}},
		{Kind: KindRequest, Time: us(12), Request: &Request{ID: "r", Model: "m", ISL: 33, OSL: 4, BlockSize: 16, IDs: LocalIDs, Blocks: Hashes{5, 6, 7}, Session: "s", ThinkUS: new(int64)}},
		{Kind: KindRequest, Time: us(12), Request: &Request{ISL: 3, OSL: 4, Tokens: Tokens{1, 1<<32 - 1, 0}}},
		{Kind: KindDecision, Time: us(13), Decision: fullDecision()},
		{Kind: KindOutcome, Time: us(14), Outcome: fullOutcome()},
		{Kind: KindDropped, Time: us(15), Dropped: 17},
		{Kind: KindEnd, Time: us(16), End: &End{Records: 11, Dropped: 17}},
	}
}

func manyHashes(n int) []uint64 {
	h := make([]uint64, n)
	for i := range h {
		h[i] = uint64(i) * 0x9e3779b97f4a7c15
	}
	return h
}

func fullOutcome() *Outcome {
	leg := receipt.NewLeg("prefill", "p<0>", "p<0>/dp1", 2)
	leg.Status, leg.DispatchMS, leg.FirstByteMS, leg.EndMS, leg.RetryReason, leg.Error, leg.Blocks = 503, 0.118, 1e-7, 1./3, "status", "it said \"no\"", 4
	leg.QueueMS, leg.PromptTokens, leg.CachedTokens = 0, 99, 64
	return &Outcome{
		ID: "d1", ReceivedUS: -5, Stream: true, LegsOmitted: 3, Notes: []string{"a", "b & c"},
		Legs: []receipt.LegEntry{leg, receipt.NewLeg("decode", "named otherwise", "w/dp0", 1)},
		Result: receipt.Outcome{
			Status: 200, Finish: "stop", PromptTokens: 100, CachedTokens: -1, CompletionTokens: 7, TTFTMS: 12.04, E2EMS: 40.911,
			ITL: receipt.Gaps{Count: 6, MeanMS: 2, P50MS: 1.5, P99MS: 3.125, MaxMS: 4}, ErrorCode: "engine_died", Error: "gone", SilentRecompute: true, Cancelled: true,
		},
	}
}

func fullDecision() *Decision {
	worker := func(name string, role workers.Role) *workers.Worker {
		return &workers.Worker{Facts: workers.Facts{Role: role, Engine: workers.VLLM, Version: "0.32.0", Connector: workers.ConnectorNIXL, BlockSize: 32, KVBlocks: 100, ChatTokens: "37:9c", Revision: "pair/5d1c", Slice: "0", Models: []string{"m", "also\n"}}, Name: name}
	}
	busy := decision.Candidate{
		Rank: "d/dp0", Slot: 1, OverlapBlocks: 2, Tiers: route.Tiers{CPU: 3, Disk: 2, Remote: 1}, ActiveRequests: 3, PrefillTokens: 4, DecodeBlocks: 5, Answering: 2, CachedBlocks: 3, Times: 1e1 / 3, FreshTokens: 6,
		Siblings: decision.Siblings{SiblingRequests: 2, SiblingPrefillTokens: 3, SiblingDecodeBlocks: 4, SiblingFreshTokens: 5, SiblingAgeMS: 41, SiblingHeld: 6},
		LastTurn: 7, ResidentBlocks: 8, KVBlocks: 9, HasLoad: true, Running: 10, Waiting: 11, KVUsage: 0.125, KeptOut: "failed in this request", Tried: true, Cost: 1.0 / 3,
	}
	from := busy
	from.Rank, from.KVBlocks, from.Cost = "p/dp0", 200, 1e-9
	idle := decision.Candidate{Rank: "d/dp1", KVBlocks: 200, KVUsage: -1}
	s := &decide.Options{
		Decode: selector.KV, Prefill: selector.LeastLoaded, Weights: selector.Weights{OverlapCredit: 1, CreditCPU: .5, CreditDisk: .125, CreditRemote: 1e-3, CreditDecay: 2, StepTokens: 9, PrefillLoadScale: 3, Queue: .25, DecodeLoad: 1. / 64, Stall: .0625, Spread: 1e-9, ActiveRequest: 7, Others: 1. / 3, Temperature: 8},
		Busy: selector.Busy{DecodeBlocksShare: .9, PrefillTokens: 1, Waiting: 2, KVUsage: .5, Requests: 9},
		Rule: decide.Rule{Threshold: 100, Auto: true, On: decide.OnISL, Fallback: decide.FallbackError, PrefillGate: 5, StartGate: 7, DecodeGate: .5, Connector: workers.ConnectorNIXL, LoadCredit: 1. / 32},
	}
	d, p := worker("d", workers.Decode), worker("p", workers.Prefill)
	in := &decide.Input{
		Rule: s.Rule, Model: "m", Force: route.ForceLocal, GaveUp: "connect",
		Costs: &cost.Model{
			Revision: 9, Local: cost.LegModel{1, 2, 3, 4, 1. / 3}, Prefill: cost.LegModel{5, 6, 7, 8, 9}, Transfer: cost.LegModel{.1, .2, .3, .4, .5},
			Stall: 1. / 7, Limit: 2000, Beyond: .05, Lost: 1e3 / 7,
			Prices: cost.Prices{
				Step: cost.StepModel{1. / 3, .1, .2, .3, 1e-9, 7}, Others: 2, Answer: 1, Loss: 1e4 / 7, GapLimit: 25, LateOnce: true, Rooms: true, Length: 1e3 / 3, Stalled: .7, Fresh: 1. / 9, Error: .01,
				NoRemote: true, Lacks: 5, Constants: cost.Constants{Loss: 1, Scatter: .3, Behind: 1. / 7, Keep: 2, TeachEvery: 20, TeachWithin: 3, Stretches: 12, Stale: 60},
			},
		},
		Facts: api.Facts{
			Kind: api.Responses, Splittable: true, ISL: 100, Source: route.FromIDs, N: 2, Prompts: 3, Multimodal: true, Opaque: true,
			Continues: true, ServerTools: true, PromptLogprobs: true, RoutedExperts: true, MaxTokens: -1, Output: 250,
		},
		Decode:       selector.Input{Phase: route.Decode, Policy: s.Decode, Draw: 1<<64 - 1, Turn: 12, Home: "d/dp1", Candidates: []decision.Candidate{busy, idle}},
		DecodePeers:  []workers.Peer{{Worker: d}, {Worker: d}},
		Prefill:      selector.Input{Phase: route.Prefill, Policy: s.Prefill, Draw: 5, Home: selector.HomeNew, Candidates: []decision.Candidate{from}},
		PrefillPeers: []workers.Peer{{Worker: p}},
	}
	for _, k := range []*selector.Input{&in.Decode, &in.Prefill} {
		k.Siblings = &selector.Siblings{Router: 1<<64 - 2, Unseen: 1. / 3, Tokens: 1e3 / 7}
		k.Weights, k.Busy, k.ISL, k.BlockSize, k.SessionKey = s.Weights, s.Busy, 100, 16, 1<<63
	}
	return &Decision{
		ID: "d1", RequestID: "q\"1", Attempt: 2, Model: "m", BeganUS: 12, BlockSize: 32, Locals: manyHashes(41), Approximate: true, Tokens: Tokens{1, 2, 3},
		Revision: 3, Settings: s, Input: in, Explore: true, Rules: decide.Rules,
		Path: "local", Reason: "prefill_failed", Error: "x", EffISL: 68, Cached: 32, DecodeRank: "d/dp1", PrefillRank: "p/dp0", Costs: cost.Costs{Local: 1. / 3, Remote: 2}, Unverifiable: "why",
	}
}

func write(t testing.TB, recs []Record) []byte {
	t.Helper()
	p, err := AppendHeader(nil, Header{Source: "test", Start: time.Unix(1_800_000_000, 0).UTC(), BlockSize: 16})
	if err != nil {
		t.Fatal(err)
	}
	references := NewReferences()
	for i := range recs {
		if p, err = references.AppendRecord(p, &recs[i]); err != nil {
			t.Fatal(err)
		}
	}
	return p
}

// readAll reads all records, copying what the reader reuses.
func readAll(in []byte, o Options) ([]Record, *Reader, error) {
	r, err := NewReader(bytes.NewReader(in), "t", o)
	if err != nil {
		return nil, nil, err
	}
	defer r.Close()
	var all []Record
	for {
		var rec Record
		err := r.Next(&rec)
		if errors.Is(err, io.EOF) {
			return all, r, nil
		}
		if err != nil {
			return all, r, err
		}
		rec.Batch.Payload = bytes.Clone(rec.Batch.Payload)
		rec.Event.Names, rec.Event.Locals = append([]uint64(nil), rec.Event.Names...), append([]uint64(nil), rec.Event.Locals...)
		all = append(all, rec)
	}
}

var sameRecord = cmp.Options{
	cmpopts.IgnoreFields(Record{}, "Line", "Offset"), cmpopts.EquateEmpty(), cmpopts.IgnoreUnexported(workers.Rank{}, workers.Worker{}),
	cmp.Comparer(func(a, b *workers.State) bool { return a == b }),
}

func TestRoundTrip(t *testing.T) {
	want := every()
	raw := write(t, want)
	got, r, err := readAll(raw, Options{})
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(want, got, sameRecord); d != "" {
		t.Errorf("records differ (-want +got):\n%s", d)
	}
	lines := int64(len(want)) + 5 // header, settings, costs, two workers
	if d := cmp.Diff(Stats{Lines: lines, Bytes: int64(len(raw))}, r.Stats(), cmpopts.IgnoreFields(Stats{}, "FirstBad", "Skipped", "Reordered", "Parts", "Forgotten")); d != "" {
		t.Errorf("stats (-want +got):\n%s", d)
	}
	// Every line stays the same when its members are reordered: the fast way
	// and the general one read the same.
	var slow bytes.Buffer
	for i, line := range bytes.Split(bytes.TrimSpace(raw), []byte("\n")) {
		var v map[string]json.RawMessage
		if err := json.Unmarshal(line, &v); err != nil {
			t.Fatalf("line %d: %v", i+1, err)
		}
		p, _ := json.Marshal(v)
		slow.Write(append(p, '\r', '\n'))
	}
	if got, _, err = readAll(slow.Bytes(), Options{}); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(want, got, sameRecord); d != "" {
		t.Errorf("records differ when read the general way:\n%s", d)
	}
}

// TestFastWay: what the writer writes of the two hot kinds is read without the
// general decoder, or the speed is not what is promised.
func TestFastWay(t *testing.T) {
	r := &Reader{ranks: map[string]string{}}
	for _, rec := range every() {
		plainEvent := rec.Kind == KindEvent && rec.Event.Tier == "" && rec.Event.Op != Cleared
		if rec.Kind != KindBatch && !plainEvent || strings.Contains(rec.Rank, `\`) {
			continue
		}
		p, err := AppendRecord(nil, &rec)
		if err != nil {
			t.Fatal(err)
		}
		var got Record
		if p = bytes.TrimSpace(p); !r.fastBatch(p, &got) && !r.fastEvent(p, &got) {
			t.Errorf("not read the fast way: %s", p)
		}
	}
}

func TestBadInput(t *testing.T) {
	good := string(write(t, every()[:3]))
	header, rest, _ := strings.Cut(good, "\n")
	for _, tt := range []struct {
		name, in string
		o        Options
		records  int
		want     string // in the error; "" for none
		is       error
	}{
		{name: "empty", in: "", want: "the trace is empty", is: ErrEmpty},
		{name: "blank lines", in: "\n\n", want: "the trace is empty", is: ErrEmpty},
		{name: "not JSON", in: "hello\n", want: "line 1 (byte 0)", is: ErrSchema},
		{name: "other JSON", in: "{\"a\":1}\n", want: "none of the known formats", is: ErrSchema},
		{name: "header missing", in: rest, want: "header line is missing", is: ErrSchema},
		{name: "newer schema", in: strings.Replace(good, "trace/v2", "trace/v3", 1), want: "use the version of dynctl that wrote it", is: ErrSchema},
		{name: "older schema", in: strings.Replace(good, "trace/v2", "trace/v1", 1), want: "it has schema dynctl.trace/v1", is: ErrSchema},
		{name: "other schema", in: strings.Replace(good, "dynctl.trace/v2", "other/v1", 1), want: `schema "other/v1"`, is: ErrSchema},
		{name: "newer schema within", in: good + strings.Replace(header, "trace/v2", "trace/v3", 1) + "\n", records: 3, want: "within the file", is: ErrSchema},
		{name: "a candidate without rank", in: good + `{"kind":"decision","t_us":1,"decode":{"candidates":[{"n":1}]}}` + "\n", records: 3, want: `a candidate without "rank"`},
		{name: "parts together", in: good + good, records: 6},
		{name: "unknown kind", in: good + "{\"kind\":\"moon\",\"t_us\":1}\n" + rest, records: 6},
		{name: "bad line", in: good + "{\"kind\":\"kv\",\"t_us\":1,\n" + rest, records: 3, want: fmt.Sprintf("line 5 (byte %d)", len(good)+21)},
		{name: "bad base64", in: good + `{"kind":"kv","t_us":1,"rank":"a/dp0","seq":1,"at_us":1,"payload":"!!!"}` + "\n", records: 3, want: "payload: illegal base64"},
		{name: "bad line allowed", in: good + "{nonsense\n" + rest, o: Options{MaxBad: 1}, records: 6},
		{name: "too many bad", in: good + "{a\n{b\n" + rest, o: Options{MaxBad: 1}, records: 3, want: "too many bad lines (1 allowed)", is: ErrTooManyBad},
		{name: "all bad allowed", in: good + strings.Repeat("{\n", 500) + rest, o: Options{MaxBad: -1}, records: 6},
		{name: "mixed formats", in: good + `{"timestamp":1,"input_length":5,"output_length":1,"hash_ids":[1]}` + "\n", records: 3, want: "without \"kind\""},
		{name: "huge line", in: good + strings.Repeat("x", 1<<20) + "\n" + rest, o: Options{MaxLine: 1 << 19}, records: 3, want: "too long"},
		{name: "huge line allowed", in: good + strings.Repeat("x", 1<<20) + "\n" + rest, o: Options{MaxLine: 1 << 19, MaxBad: 1}, records: 6},
		{name: "other format than stated", in: good, o: Options{Format: Mooncake}, want: "this is dynctl, not mooncake", is: ErrSchema},
		{name: "time out of range", in: good + `{"kind":"dropped","t_us":9223372036854775807,"records":1}` + "\n", records: 3, want: "out of range"},
		{name: "names and locals", in: good + `{"kind":"event","t_us":1,"rank":"a","id":1,"op":"stored","locals":"","names":"AAAAAAAAAAA="}` + "\n", records: 3, want: "1 names and 0 local"},
		{name: "blocks beyond the prompt", in: good + `{"kind":"request","t_us":1,"isl_tokens":1,"block_size_tokens":16,"blocks":"AAAAAAAAAAAAAAAAAAAAAA=="}` + "\n", records: 3, want: "2 blocks of 16 tokens in a prompt of 1"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, _, err := readAll([]byte(tt.in), tt.o)
			if len(got) != tt.records {
				t.Errorf("%d records, want %d", len(got), tt.records)
			}
			switch {
			case tt.want == "" && err != nil:
				t.Errorf("error %v", err)
			case tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)):
				t.Errorf("error %v, want %q in it", err, tt.want)
			case tt.is != nil && !errors.Is(err, tt.is):
				t.Errorf("error %v is not %v", err, tt.is)
			}
		})
	}
}

// TestCut: a file that ends anywhere is read up to there, compressed or not.
func TestCut(t *testing.T) {
	raw := write(t, every())
	step := 7
	if testing.Short() {
		step = 97
	}
	for _, name := range []string{"t.jsonl", "t.jsonl.gz", "t.jsonl.zst"} {
		var file bytes.Buffer
		z, err := Compress(&file, name)
		if err != nil {
			t.Fatal(err)
		}
		half := bytes.IndexByte(raw[len(raw)/2:], '\n') + len(raw)/2 + 1
		first := 0
		for _, p := range [][]byte{raw[:half], raw[half:]} {
			first = file.Len()
			if _, err := z.Write(p); err != nil {
				t.Fatal(err)
			}
			if err := z.Flush(); err != nil {
				t.Fatal(err)
			}
		}
		flushed := file.Len()
		if err := z.Close(); err != nil {
			t.Fatal(err)
		}
		want, _, err := readAll(file.Bytes(), Options{})
		if err != nil || len(want) != len(every()) {
			t.Fatalf("%s: %d records, %v", name, len(want), err)
		}
		if got, _, err := readAll(file.Bytes()[:flushed], Options{}); err != nil || len(got) != len(want) {
			t.Errorf("%s not closed: %d records of %d, %v", name, len(got), len(want), err)
		}
		for n := file.Len(); n > 0; n -= step {
			got, r, err := readAll(file.Bytes()[:n], Options{})
			if err != nil {
				if r == nil && n < max(first, 200) && strings.Contains(err.Error(), "line") {
					continue // not even the header is there
				}
				t.Fatalf("%s cut at %d of %d: %v", name, n, file.Len(), err)
			}
			if d := cmp.Diff(want[:len(got)], got, sameRecord); d != "" {
				t.Fatalf("%s cut at %d: %s", name, n, d)
			}
		}
	}
}

// dynamoLines are lines as Dynamo's recorder writes them.
const dynamoLines = `{"timestamp":0,"event":{"worker_id":7,"storage_tier":"device","residency_domain":"worker","event":{"event_id":12,"dp_rank":0,"data":{"stored":{"parent_hash":null,"start_position":0,"blocks":[{"block_hash":18446744073709551615,"tokens_hash":222,"mm_extra_info":null}]}}}}}
{"timestamp":3,"event":{"worker_id":7,"event":{"event_id":13,"data":{"removed":{"block_hashes":[111]}}}}}
{"timestamp":9,"event":{"worker_id":7,"event":{"event_id":14,"data":"cleared"}}}
`

// TestDynamoLines reads lines as Dynamo's recorder writes them.
func TestDynamoLines(t *testing.T) {
	got, r, err := readAll([]byte(dynamoLines), Options{})
	if err != nil || r.Format() != DynamoEvents {
		t.Fatal(r, err)
	}
	want := []Record{
		{Kind: KindEvent, Rank: "worker-7/dp0", Event: Event{ID: 12, Op: Stored, Tier: "device", Domain: "worker", Names: []uint64{1<<64 - 1}, Locals: []uint64{222}}},
		{Kind: KindEvent, Rank: "worker-7/dp0", Time: 3 * time.Millisecond, Event: Event{ID: 13, Op: Removed, Names: []uint64{111}, Start: -1}},
		{Kind: KindEvent, Rank: "worker-7/dp0", Time: 9 * time.Millisecond, Event: Event{ID: 14, Op: Cleared, Start: -1}},
	}
	if d := cmp.Diff(want, got, sameRecord); d != "" {
		t.Error(d)
	}
	for _, bad := range []string{
		`{"timestamp":1,"event":{"worker_id":-1,"event":{"event_id":1,"data":"cleared"}}}`,
		`{"timestamp":1,"event":{"worker_id":1,"event":{"event_id":1,"data":{"moved":{}}}}}`,
		`{"timestamp":1,"event":null}`,
	} {
		if _, _, err := readAll([]byte(dynamoLines+bad+"\n"), Options{}); err == nil || !strings.Contains(err.Error(), "line 4") {
			t.Errorf("%s: error %v", bad, err)
		}
	}
}

// dynamoRequests is a request trace of Dynamo's.
const dynamoRequests = `{"schema":"dynamo.request.trace.v1","event_type":"tool_call"}
{"schema":"dynamo.request.trace.v1","event_type":"request_end","event_time_unix_ms":1800000001000,"request":{"request_id":"a","request_received_ms":1800000000500,"output_tokens":7,"replay":{"trace_block_size":64,"input_length":130,"input_sequence_hashes":[1,18446744073709551615]}}}
`

func TestRequestFormats(t *testing.T) {
	got, r, err := readAll([]byte(dynamoRequests), Options{})
	if err != nil || r.Stats().Skipped != 1 {
		t.Fatalf("%v, %+v", err, r)
	}
	want := []Record{{Kind: KindRequest, Request: &Request{ID: "a", ISL: 130, OSL: 7, BlockSize: 64, IDs: PrefixIDs, Blocks: Hashes{1, 1<<64 - 1}}}}
	if d := cmp.Diff(want, got, sameRecord); d != "" {
		t.Error(d)
	}

	moon := `{"timestamp": 27482.5, "input_length": 600, "output_length": 52, "hash_ids": [46, 47], "session_id": 4}` + "\n"
	got, _, err = readAll([]byte(moon), Options{})
	want = []Record{{Kind: KindRequest, Time: 27482500 * time.Microsecond, Request: &Request{ISL: 600, OSL: 52, BlockSize: 512, IDs: PrefixIDs, Blocks: Hashes{46, 47}, Session: "4"}}}
	if d := cmp.Diff(want, got, sameRecord); err != nil || d != "" {
		t.Errorf("%v %s", err, d)
	}
	line, err := AppendMooncake(nil, &want[0])
	if err != nil {
		t.Fatal(err)
	}
	if got, _, err = readAll(line, Options{}); err != nil || cmp.Diff(want, got, sameRecord) != "" {
		t.Errorf("Mooncake round trip: %v %s", err, cmp.Diff(want, got, sameRecord))
	}
}

// TestBailian: the requests of a conversation are one session, and their ids name blocks
// of 16 tokens.
func TestBailian(t *testing.T) {
	in := `{"chat_id": 55, "parent_chat_id": -1, "timestamp": 0.5, "input_length": 20, "output_length": 3, "type": "text", "turn": 1, "hash_ids": [7, 8]}
{"chat_id": 60, "parent_chat_id": 12, "timestamp": 1, "input_length": 5, "output_length": 1, "type": "file", "turn": 3, "hash_ids": []}
{"chat_id": 159, "parent_chat_id": 55, "timestamp": 61.114, "input_length": 40, "output_length": 132, "type": "text", "turn": 2, "hash_ids": [7, 9, 10]}
{"chat_id": 160, "parent_chat_id": 159, "timestamp": 62, "input_length": 64, "output_length": 1, "type": "text", "turn": 3, "hash_ids": [7, 9, 11, 12]}
`
	want := []Record{
		{Kind: KindRequest, Time: 500 * time.Millisecond, Request: &Request{ID: "55", ISL: 20, OSL: 3, BlockSize: 16, IDs: LocalIDs, Blocks: Hashes{7, 8}, Session: "55"}},
		{Kind: KindRequest, Time: time.Second, Request: &Request{ID: "60", ISL: 5, OSL: 1, IDs: LocalIDs, Session: "60"}},
		{Kind: KindRequest, Time: 61114 * time.Millisecond, Request: &Request{ID: "159", ISL: 40, OSL: 132, BlockSize: 16, IDs: LocalIDs, Blocks: Hashes{7, 9, 10}, Session: "55"}},
		{Kind: KindRequest, Time: 62 * time.Second, Request: &Request{ID: "160", ISL: 64, OSL: 1, BlockSize: 16, IDs: LocalIDs, Blocks: Hashes{7, 9, 11, 12}, Session: "55"}},
	}
	got, r, err := readAll([]byte(in), Options{})
	if err != nil || r.Format() != Bailian {
		t.Fatal(err)
	}
	if d := cmp.Diff(want, got, sameRecord); d != "" {
		t.Error(d)
	}
	if _, _, err := readAll([]byte(in), Options{Format: Mooncake}); err == nil || !strings.Contains(err.Error(), "this is bailian, not mooncake") {
		t.Error(err)
	}
}

// TestForeignLines: what only resembles a known format is refused, with what was found
// and what to do.
func TestForeignLines(t *testing.T) {
	const line = `{"timestamp":1,"input_length":5,"output_length":1,"hash_ids":[1],"model":"m"}`
	for _, c := range []struct {
		in     string
		format Format
		want   string // empty where the line is a request
	}{
		{in: `{"timestamp":1,"input_length":5,"output_length":1,"hash_ids":[]}`},
		{in: `{"session_id":"s","timestamp":0,"input_length":5,"output_length":1,"hash_ids":[1]}`},
		{in: line, want: `and also "model"; state --format mooncake if its timestamps are milliseconds and its hash_ids name blocks of 512 tokens`},
		{in: line, format: Mooncake},
		{in: `{"timestamp":1,"input_length":5,"output_length":1}`, want: `a Mooncake line without "hash_ids"`},
		{in: `{"timestamp":1,"input_length":5,"output_length":1}`, format: Mooncake, want: `a Mooncake line without "hash_ids"`},
		{in: `{"timestamp":1,"input_length":5,"hash_ids":[1]}`, want: `a Mooncake line without "output_length"`},
		{in: `{"input_length":5,"output_length":1,"hash_ids":[1]}`, want: `a Mooncake line without "timestamp"`},
		{in: `{"timestamp":"2026-01-01T00:00:00Z","input_length":5,"output_length":1,"hash_ids":[1]}`, want: "cannot be read as one: json: cannot unmarshal string"},
		{in: `{"timestamp":1,"input_length":5,"output_length":1,"hash_ids":["a"]}`, want: "cannot be read as one: json: cannot unmarshal string"},
		{in: `{"timestamp":1,"input_length":5.5,"output_length":1,"hash_ids":[1]}`, want: "cannot be read as one: json: cannot unmarshal number"},
		{in: `{"id":"a","call_type":"acompletion","startTime":1,"prompt_tokens":5}`, want: `none of the known formats (dynctl, dynamo-events, dynamo-requests, mooncake, bailian, capture): the first line has the members "call_type", "id", "prompt_tokens", "startTime"; write`},
		{in: `{"a":1,"b":1,"c":1,"d":1,"e":1,"f":1,"g":1,"h":1,"i":1,"j":1,"k":1,"l":1,"m":1,"n":1}`, want: `"k", "l" and 2 more; write`},
		{in: `{"timestamp":-0.5,"input_length":5,"output_length":1,"hash_ids":[]}`, want: "line 1 (byte 0): timestamp -0.5 (in units of 1ms since the trace's start) is out of range: before the start"},
		{in: `{"timestamp":1e14,"input_length":5,"output_length":1,"hash_ids":[]}`, want: "more than 100 years after it"},
		{in: `{"chat_id":1,"timestamp":-1,"input_length":5,"output_length":1}`, want: "timestamp -1 (in units of 1s since the trace's start) is out of range"},
		{in: `{"chat_id":1,"timestamp":1e300,"input_length":5,"output_length":1}`, want: "more than 100 years after it"},
		{in: `{"chat_id":1,"timestamp":null,"input_length":5,"output_length":1}`, want: "a Bailian line without"},
		{in: `{"chat_id":1,"timestamp":1,"input_length":17,"output_length":1,"hash_ids":[1,2,3]}`, want: "3 blocks of 16 tokens in a prompt of 17"},
	} {
		got, _, err := readAll([]byte(c.in+"\n"), Options{Format: c.format})
		switch {
		case c.want == "" && (err != nil || len(got) != 1):
			t.Errorf("%s: %v", c.in, err)
		case c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)):
			t.Errorf("%s: error %v, want %q in it", c.in, err, c.want)
		}
	}
}

// TestCapture reads the capture of real engines.
func TestCapture(t *testing.T) {
	path := filepath.Join("..", "..", "..", "..", "testdata", "captures", "kvevents-vllm-0.32.0-real.jsonl.gz")
	r, err := Open(path, nil, Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	ranks := map[string]int{}
	var dec kvevent.Decoder
	var batch kvevent.Batch
	for {
		var rec Record
		err := r.Next(&rec)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		ranks[rec.Rank]++
		if err := dec.Decode(rec.Batch.Payload, &batch); err != nil {
			t.Fatalf("line %d: %v", rec.Line, err)
		}
	}
	total := int64(0)
	for _, n := range ranks {
		total += int64(n)
	}
	if s := r.Stats(); r.Format() != Capture || total+s.Skipped != 191 || len(ranks) != 5 {
		t.Errorf("format %s, %d live and %d replayed messages of %v, want 191 in all", r.Format(), total, s.Skipped, ranks)
	}
}

func TestParts(t *testing.T) {
	dir := t.TempDir()
	start := time.Unix(1_800_000_000, 0).UTC()
	var paths []string
	for i, name := range []string{"a.jsonl.gz", "b.jsonl.zst", "c.jsonl"} {
		p, _ := AppendHeader(nil, Header{Start: start.Add(time.Duration(i) * time.Second), Part: i})
		p, _ = AppendRecord(p, &Record{Kind: KindDropped, Time: 5 * time.Millisecond, Dropped: uint64(i)})
		w, err := Create(filepath.Join(dir, name), nil)
		if err != nil {
			t.Fatal(err)
		}
		if i == 1 {
			p = append(p, `{"kind":"drop`...) // cut
		}
		if _, err := w.Write(p); err != nil {
			t.Fatal(err)
		}
		if _, err := os.Stat(filepath.Join(dir, name)); err == nil {
			t.Error("the file is there before it is whole")
		}
		if err := w.Commit(); err != nil {
			t.Fatal(err)
		}
		w.Discard()
		if info, err := os.Stat(filepath.Join(dir, name)); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v, %v; a trace is for its owner only", name, info.Mode(), err)
		}
		paths = append(paths, filepath.Join(dir, name))
	}
	r, err := OpenAll(paths, Options{MaxBad: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	for i := range 3 {
		var rec Record
		if err := r.Next(&rec); err != nil {
			t.Fatal(err)
		}
		if want := time.Duration(i)*time.Second + 5*time.Millisecond; rec.Time != want || rec.Dropped != uint64(i) {
			t.Errorf("record %d at %v with %d, want %v", i, rec.Time, rec.Dropped, want)
		}
	}
	var rec Record
	if err := r.Next(&rec); !errors.Is(err, io.EOF) {
		t.Errorf("after the last: %v", err)
	}
	if r.Consumed() == 0 {
		t.Error("nothing consumed")
	}
}

// fuzzFormat holds a reader to its promises on any input: no panic, an end, and
// for own traces that what was read can be written and read again.
func fuzzFormat(f *testing.F, format Format, seeds ...[]byte) {
	for _, s := range seeds {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		got, r, err := readAll(in, Options{Format: format, MaxBad: -1, MaxLine: 1 << 16})
		if err != nil {
			return
		}
		if s := r.Stats(); s.Lines > int64(len(in))+1 {
			t.Fatalf("%d lines in %d bytes", s.Lines, len(in))
		}
		for i := range got {
			line, err := NewReferences().AppendRecord(nil, &got[i])
			if err != nil {
				continue
			}
			again, _, err := readAll(append(write(t, nil), line...), Options{})
			if err != nil || len(again) != 1 {
				t.Fatalf("%q is not read again: %v", line, err)
			}
			want := got[i]
			if d := want.Decision; d != nil {
				var p decide.Plan
				decide.MakePlan(again[0].Decision.Input, &p) // whatever comes of it
				if again, _, err = readAll(append(write(t, nil), line...), Options{}); err != nil {
					t.Fatal(err)
				}
				d.Rules = decide.Rules
			}
			want.Time, want.Batch.Received = want.Time.Truncate(time.Microsecond), want.Batch.Received.Truncate(time.Microsecond)
			// Spaces within it do not matter.
			if (len(want.Event.Extra) > 0) != (len(again[0].Event.Extra) > 0) {
				t.Fatalf("extra %q became %q", want.Event.Extra, again[0].Event.Extra)
			}
			want.Event.Extra, again[0].Event.Extra = nil, nil
			if d := cmp.Diff(want, again[0], sameRecord); d != "" {
				t.Fatalf("read again differently:\n%s", d)
			}
		}
	})
}

func FuzzOwn(f *testing.F) {
	raw := write(f, every())
	odd := append(write(f, nil), "{\"kind\":\"kv\",\"t_us\":9,\"rank\":\"d\xc5\xee/dp1\",\"seq\":7,\"at_us\":8,\"payload\":\"\"}\n"...)
	lost := regexp.MustCompile(`(?m)^.*"kind":"(settings|worker)".*\n`).ReplaceAll(raw, nil)
	unknown := bytes.ReplaceAll(raw, []byte(`"rank":"d/dp1"`), []byte(`"rank":"d/dp1","moon_blocks":5`))
	fuzzFormat(f, Auto, raw, raw[:len(raw)/2], write(f, nil), odd, lost, unknown)
}

func FuzzDynamoEvents(f *testing.F) { fuzzFormat(f, DynamoEvents, []byte(dynamoLines)) }

func FuzzDynamoRequests(f *testing.F) { fuzzFormat(f, DynamoRequests, []byte(dynamoRequests)) }

func FuzzMooncake(f *testing.F) {
	fuzzFormat(f, Mooncake, []byte(`{"timestamp": 27482, "input_length": 600, "output_length": 52, "hash_ids": [46, 47]}`))
}

func FuzzBailian(f *testing.F) {
	fuzzFormat(f, Bailian, []byte(`{"chat_id":159,"parent_chat_id":55,"timestamp":61.114,"input_length":21,"output_length":132,"type":"text","turn":2,"hash_ids":[1089,1090]}`))
}

func FuzzCapture(f *testing.F) {
	fuzzFormat(f, Capture, []byte(`{"src":"prefill","recv_unix_ns":1795261515058407187,"frames_b64":["","AAAAAAAAADs=","k8tB2g=="]}`))
}
