package trace

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/placement/decision"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/router/request/api"
)

var update = flag.Bool("update", false, "rewrite the golden bytes of the format")

// TestGolden: the bytes of the format are those that were written before, and are
// read as what was written.
func TestGolden(t *testing.T) {
	path := filepath.Join("testdata", "v2.jsonl")
	got := write(t, every())
	if *update {
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(strings.Split(string(want), "\n"), strings.Split(string(got), "\n")); d != "" {
		t.Errorf("the format is written otherwise (-was +is); only members may be added:\n%s", d)
	}
}

// TestEveryInputIsRecorded: whatever a plan reads comes back from its line. What
// stands in the lists does not, for the reason beside it; a member that is new in
// one of these types must go into the line or be listed.
func TestEveryInputIsRecorded(t *testing.T) {
	roundTrip := func(d *Decision) *Decision {
		t.Helper()
		all, _, err := readAll(write(t, []Record{{Kind: KindDecision, Decision: d}}), Options{})
		if err != nil || len(all) != 1 {
			t.Fatalf("%d records, %v", len(all), err)
		}
		return all[0].Decision
	}
	for _, c := range []struct {
		at     func(d *Decision) any // a pointer to the struct
		except map[string]string
	}{
		{func(d *Decision) any { return &d.Input.Facts }, map[string]string{
			"MediaTokens": "windows keep workers out before a plan", "Truncated": "only checks of a prefill's answer read it", "ThinkingBudget": "only connectors read it",
			"MaxTokensKey": "only connectors read it", "MinTokens": "only connectors read it", "StreamUsage": "only connectors read it",
			"Logprobs": "only connectors read it", "Echo": "only connectors read it", "TokenIDs": "only connectors read them; the decision has its own where it may",
		}},
		{func(d *Decision) any { return d.Input.DecodePeers[0].Worker }, map[string]string{
			"Dialect": "the line has the engine whose wire it is", "URL": "where it is", "TransferCheck": "only checks of a prefill's answer read it", "KVCopies": "the line of the rank has it, as once", "LastBlock": "the line of the rank has it", "PoolBlocks": "not read by a plan", "AttentionChunk": "the line of the rank has it", "KVHash": "the line of the rank has it", "KVHashSeed": "the line of the rank has it", "LB": "not read by a plan", "DPStart": "where its events are",
			"LoRAs": "in the names of blocks", "Several": "who serves the model is a candidate", "Labels": "the operator's words",
			"MaxModelLen": "not read by a plan", "MaxBatchedTokens": "not read by a plan", "Events": "where its events are", "Bootstrap": "only connectors read it",
			"LMCache": "only connectors read it", "APIKey": "a secret", "Source": "who put it there", "Origin": "who put it there", "From": "who said so",
			"Conflict": "its candidates are kept out", "State": "its candidates are kept out", "Ranks": "candidates", "kind": "follows from the facts",
		}},
		{func(d *Decision) any { return &d.Settings.Rule }, nil},
		{func(d *Decision) any { return &d.Settings.Weights }, nil},
		{func(d *Decision) any { return &d.Settings.Busy }, nil},
		{func(d *Decision) any { return d.Settings }, map[string]string{"Attempts": "what follows a failure is no input of a plan", "LocalWithoutParams": "what follows a failure is no input of a plan", "Continuations": "what follows a failure is no input of a plan"}},
		{func(d *Decision) any { return &d.Input.Decode.Candidates[0] }, map[string]string{
			"Terms": "they follow from the figures, and the cost is there", "Excluded": "it follows from limits and KeptOut", "ExcludedCode": "it follows from limits and KeptOut", "CacheUnknown": "only receipts have it",
		}},
		{func(d *Decision) any { return &d.Input.Prefill.Candidates[0] }, map[string]string{"Terms": "as above", "Excluded": "as above", "ExcludedCode": "as above", "CacheUnknown": "as above"}},
		{func(d *Decision) any { return &d.Input.Decode }, map[string]string{"Phase": "the plan's own", "Veto": "the plan's own", "Pricing": "the plan's own", "Limit": "how many ranks are put in order, not which is first"}},
		{func(d *Decision) any { return d.Input }, nil},
		{func(d *Decision) any { return d }, map[string]string{"Rules": "in the header"}},
	} {
		typ := reflect.TypeOf(c.at(fullDecision())).Elem()
		for name := range c.except {
			if _, ok := typ.FieldByName(name); !ok {
				t.Errorf("%s has no %s", typ, name)
			}
		}
		for i := range typ.NumField() {
			name := typ.Field(i).Name
			if c.except[name] != "" {
				continue
			}
			// fullDecision has something else than nothing in every member.
			d := fullDecision()
			f := reflect.ValueOf(c.at(d)).Elem().Field(i)
			if f.IsZero() {
				t.Errorf("%s.%s is zero in fullDecision", typ, name)
			}
			got := roundTrip(d)
			if diff := cmp.Diff(f.Interface(), reflect.ValueOf(c.at(got)).Elem().Field(i).Interface(), sameRecord); diff != "" {
				t.Errorf("%s.%s is not in the recording (-want +got):\n%s", typ, name, diff)
			}
		}
	}
}

// TestTerms: the header names the terms of a cost, new ones last.
func TestTerms(t *testing.T) {
	if want := []string{"prefill", "overlap_credit", "queue", "decode", "spread", "request", "stall"}; len(terms) < len(want) || !slices.Equal(terms[:len(want)], want) {
		t.Errorf("terms %v; there were %v", terms, want)
	}
	h := string(write(t, nil))
	if want := fmt.Sprintf(`"rules":%d,"terms":["%s"]`, decide.Rules, strings.Join(terms, `","`)); !strings.Contains(h, want) {
		t.Errorf("no %s in %s", want, h)
	}
}

// TestAdditive: what a reader does not know is stepped over, and a decision that
// may depend on it says that it cannot be made again.
func TestAdditive(t *testing.T) {
	d := fullDecision()
	d.Unverifiable = ""
	good := string(write(t, []Record{{Kind: KindDecision, Decision: d}, {Kind: KindOutcome, Outcome: fullOutcome()}}))
	without := func(kind string) string {
		var keep []string
		for _, l := range strings.SplitAfter(good, "\n") {
			if !strings.HasPrefix(l, `{"kind":"`+kind+`"`) {
				keep = append(keep, l)
			}
		}
		return strings.Join(keep, "")
	}
	in := func(old, add string) string {
		if !strings.Contains(good, old) {
			t.Fatalf("no %s in %s", old, good)
		}
		return strings.Replace(good, old, old+add, 1)
	}
	for _, c := range []struct{ name, in, want string }{
		{"nothing", good, ""},
		{"a kind", in(`"block_size_tokens":16}`+"\n", `{"kind":"moon","t_us":1}`+"\n"), ""},
		{"a member of the header", in(`"source":"test"`, `,"moon":1`), ""},
		{"a member of the outcome", in(`"kind":"outcome","t_us":0`, `,"moon":1`), ""},
		{"a member of a leg", in(`"kind":"prefill"`, `,"moon":1`), ""},
		{"a term", in(`"terms":["prefill"`, `,"moon"`), `term "moon"`},
		{"a member of the facts", in(`"facts":{`, `"moon":1,`), `the decision has "moon"`},
		{"a member of the decision", in(`"kind":"decision","t_us":0`, `,"moon":{"a":1}`), `the decision has "moon"`},
		{"a member of a phase", in(`"prefill":{`, `"moon":1,`), `the decision has "moon"`},
		{"a member of a candidate", in(`"rank":"d/dp1"`, `,"moon":1`), `the decision has "moon"`},
		{"a member of the settings", in(`"revision":3`, `,"moon":1`), `the settings have "moon"`},
		{"a weight", in(`"weights":{`, `"moon":1,`), `the settings have "moon"`},
		{"a limit", in(`"busy":{`, `"moon":1,`), `the settings have "moon"`},
		{"a member of a worker", in(`"worker":"p"`, `,"moon":1`), `worker p has "moon"`},
		{"a member of the costs", in(`"kind":"costs","t_us":0`, `,"moon":1`), `the costs have "moon"`},
		{"no costs", without("costs"), "costs revision 9 is not in the recording"},
		{"no settings", without("settings"), "settings revision 3 is not in the recording"},
		{"no workers", without("worker"), "description 1 of worker d is not in the recording"},
		{"another policy", strings.Replace(good, `"decode_policy":"kv"`, `"decode_policy":"moon"`, 1), `policy "moon"`},
		{"another fallback", strings.Replace(good, `"prefill_fallback":"error"`, `"prefill_fallback":"moon"`, 1), `fallback "moon"`},
		{"another measure", strings.Replace(good, `"threshold_on":"isl"`, `"threshold_on":"moon"`, 1), `threshold on "moon"`},
		{"another connector", strings.Replace(good, `"connector":"nixl","load`, `"connector":"moon","load`, 1), `connector "moon"`},
		{"a worker's connector", strings.Replace(good, `"connector":"nixl","block`, `"connector":"moon","block`, 1), `worker d: connector "moon"`},
		{"another engine", strings.Replace(good, `"engine":"vllm"`, `"engine":"moon"`, 1), `engine "moon"`},
		{"another role", strings.Replace(good, `"role":"decode"`, `"role":"moon"`, 1), `role "moon"`},
		{"another endpoint", strings.Replace(good, `"endpoint":"responses"`, `"endpoint":"moon"`, 1), `endpoint "moon"`},
		{"another source", strings.Replace(good, `"isl_source":"ids"`, `"isl_source":"moon"`, 1), `length from "moon"`},
		{"another force", strings.Replace(good, `"force":"local"`, `"force":"moon"`, 1), `path "moon"`},
		{"converted before", in(`"kind":"decision","t_us":0`, `,"unverifiable":"so it was"`), "so it was"},
	} {
		if c.want != "" && c.in == good {
			t.Errorf("%s: nothing was changed", c.name)
		}
		got, _, err := readAll([]byte(c.in), Options{})
		if err != nil || len(got) != 2 {
			t.Errorf("%s: %d records, %v", c.name, len(got), err)
			continue
		}
		if why := got[0].Decision.Unverifiable; (c.want == "") != (why == "") || !strings.Contains(why, c.want) {
			t.Errorf("%s: %q, want %q", c.name, why, c.want)
		}
		// What cannot be made again must not make anything break.
		var p decide.Plan
		decide.MakePlan(got[0].Decision.Input, &p)
		if d := cmp.Diff(fullOutcome(), got[1].Outcome, sameRecord); d != "" {
			t.Errorf("%s: another outcome:\n%s", c.name, d)
		}
	}
	// A settings line counts from where it stands, a header forgets all.
	second := `{"kind":"settings","t_us":1,"revision":3,"decode_policy":"kv","prefill_policy":"kv","threshold_tokens":7}` + "\n"
	line := good[strings.Index(good, `{"kind":"decision"`):]
	header, _, _ := strings.Cut(good, "\n")
	got, _, err := readAll([]byte(good+second+line+header+"\n"+line), Options{})
	if err != nil || len(got) != 6 {
		t.Fatalf("%d records, %v", len(got), err)
	}
	if a, b, c := got[0].Decision, got[2].Decision, got[4].Decision; a.Settings.Rule.Threshold != 100 || b.Settings.Rule.Threshold != 7 || b.Unverifiable != "" || c.Unverifiable == "" {
		t.Errorf("thresholds %d and %d; %q, %q", a.Settings.Rule.Threshold, b.Settings.Rule.Threshold, b.Unverifiable, c.Unverifiable)
	}
}

// TestReferencesAreBounded: more descriptions than are kept make them begin again, and
// the reader forget the oldest; the decisions all have what they refer to.
func TestReferencesAreBounded(t *testing.T) {
	const limit, n = 64, 400
	references, d := NewReferences(), fullDecision()
	references.limit = limit
	d.Unverifiable, d.Locals, d.Tokens = "", nil, nil
	var p []byte
	for i := range n {
		w := *d.Input.DecodePeers[0].Worker
		if i%3 > 0 { // else another pointer to the same description
			w.Version = fmt.Sprint("0.", i)
		}
		d.Input.DecodePeers[0].Worker = &w
		d.Revision = uint64(i / 2)
		var err error
		if p, err = references.AppendRecord(p, &Record{Kind: KindDecision, Decision: d}); err != nil {
			t.Fatal(err)
		}
		if references.Len() > limit+4 || len(references.byWorker) > limit+4 {
			t.Fatalf("the references have %d lines of %d workers", references.Len(), len(references.byWorker))
		}
	}
	if references.Full() < 5 {
		t.Errorf("the references were full %d times", references.Full())
	}
	r, err := NewReader(bytes.NewReader(append(write(t, nil), p...)), "t", Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	r.known.limit = 2 * limit
	version := "0.32.0"
	for i := range n {
		var rec Record
		if err := r.Next(&rec); err != nil {
			t.Fatal(err)
		}
		if i%3 > 0 {
			version = fmt.Sprint("0.", i)
		}
		if d := rec.Decision; d.Unverifiable != "" || d.Input.DecodePeers[0].Worker.Version != version {
			t.Fatalf("decision %d: worker %+v, %q", i, d.Input.DecodePeers[0].Worker, d.Unverifiable)
		}
	}
	if r.Stats().Forgotten == 0 {
		t.Error("the reader kept all")
	}
	// Long ones are fewer.
	var lines bytes.Buffer
	lines.Write(write(t, nil))
	for i := range 9 {
		fmt.Fprintf(&lines, `{"kind":"worker","t_us":1,"n":%d,"worker":%q}`+"\n", i, strings.Repeat("w", 1000))
	}
	if r, err = NewReader(&lines, "t", Options{}); err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	r.known.bytes = 2100
	if err := r.Next(new(Record)); !errors.Is(err, io.EOF) {
		t.Error(err)
	}
	if k := r.known; r.Stats().Forgotten != 3 || len(k.newest.workers) != 1 || len(k.before.workers) != 2 {
		t.Errorf("%+v, %d and %d descriptions", r.Stats(), len(k.newest.workers), len(k.before.workers))
	}
}

// fill sets every member of v below to something: empty, the given ones, or
// what is hard to write.
func fill(v reflect.Value, r *rand.Rand, text string, figure float64) {
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			if v.Field(i).CanSet() {
				fill(v.Field(i), r, text, figure)
			}
		}
	case reflect.Slice:
		if n := r.IntN(5); n > 0 {
			v.Set(reflect.MakeSlice(v.Type(), n-1, n-1))
		}
		for i := range v.Len() {
			fill(v.Index(i), r, text, figure)
		}
	case reflect.String:
		v.SetString(strings.ToValidUTF8([]string{"", "w/dp0", text, "<a&b>\"\\\n\x7f", "é\u2028\xff"}[r.IntN(5)], "?"))
	case reflect.Bool:
		v.SetBool(r.IntN(2) == 0)
	case reflect.Float64:
		v.SetFloat([]float64{0, -1, figure, -figure, float64(r.IntN(1e6)) / 1000, math.Copysign(0, -1), r.NormFloat64(), math.Float64frombits(r.Uint64()), 1 << 53, 1e21, 1e-7, 999999, 1e6}[r.IntN(13)])
	case reflect.Int, reflect.Int64:
		v.SetInt(int64(r.IntN(2)) * int64(r.Uint64()))
	case reflect.Pointer:
		if r.IntN(2) == 0 {
			v.Set(reflect.New(v.Type().Elem()))
			fill(v.Elem(), r, text, figure)
		}
	case reflect.Int32:
		v.SetInt(int64(r.IntN(2)) * int64(int32(r.Uint32())))
	case reflect.Uint8:
		v.SetUint(uint64(r.IntN(len(kinds))))
	case reflect.Uint32, reflect.Uint64:
		v.SetUint(uint64(r.IntN(2)) * (r.Uint64() & (1<<v.Type().Bits() - 1)))
	default:
		panic("there is a " + v.Kind().String())
	}
}

// readable makes of a value what JSON can hold: figures that it cannot are -1.
func readable(v reflect.Value) {
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			if v.Field(i).CanSet() {
				readable(v.Field(i))
			}
		}
	case reflect.Slice:
		for i := range v.Len() {
			readable(v.Index(i))
		}
	case reflect.Float64:
		if f := v.Float(); math.IsNaN(f) || math.IsInf(f, 0) {
			v.SetFloat(-1)
		}
	default:
	}
}

// members are those of a line as encoding/json reads it.
func members(t *testing.T, line []byte) map[string]any {
	t.Helper()
	var m map[string]any
	if err := json.Unmarshal(line, &m); err != nil {
		t.Fatalf("%s: %v", line, err)
	}
	return m
}

// noZero fails on a member that could be left out.
func noZero(t *testing.T, at string, v any, may ...string) {
	t.Helper()
	switch v := v.(type) {
	case map[string]any:
		for _, k := range slices.Sorted(maps.Keys(v)) {
			if !slices.Contains(may, k) {
				noZero(t, at+"."+k, v[k], may...)
			}
		}
	case []any:
		for i := range v {
			if s, ok := v[i].(string); !ok || s != "" {
				noZero(t, fmt.Sprint(at, ".", i), v[i], may...)
			}
		}
	case float64:
		if v == 0 && !math.Signbit(v) {
			t.Errorf("%s is 0", at)
		}
	default:
		if v == nil || reflect.ValueOf(v).IsZero() {
			t.Errorf("%s is %v", at, v)
		}
	}
}

// FuzzOutcome: what encoding/json reads of an outcome's line is the outcome, and
// nothing is written that is zero.
func FuzzOutcome(f *testing.F) {
	for i := range uint64(300) {
		f.Add(i, "text", float64(i)/7)
	}
	f.Add(uint64(1), "\x00</script>\ufffd", math.NaN())
	f.Fuzz(func(t *testing.T, seed uint64, text string, figure float64) {
		r := rand.New(rand.NewPCG(seed, 1))
		x := new(Outcome)
		fill(reflect.ValueOf(x).Elem(), r, text, figure)
		line := AppendOutcome([]byte("before"), 5*time.Microsecond, x)
		line = bytes.TrimPrefix(line, []byte("before"))
		var got outcomeLine
		var head struct {
			Kind Kind  `json:"kind"`
			Time int64 `json:"t_us"`
			*outcomeLine
		}
		head.outcomeLine = &got
		if unknown, err := strict(line, &head); err != nil || unknown != "" || head.Kind != KindOutcome || head.Time != 5 {
			t.Fatalf("%s: %v, unknown %s", line, err, unknown)
		}
		readable(reflect.ValueOf(x).Elem())
		want := outcomeLine{x.ID, x.ReceivedUS, x.Stream, x.Result, slices.Clone(x.Legs), x.LegsOmitted, x.Notes, x.Continued}
		for i := range want.Legs {
			if k := &want.Legs[i]; k.Worker == firstOf(SplitRank(k.Rank)) {
				k.Worker = ""
			}
		}
		if d := cmp.Diff(want, got, sameRecord); d != "" {
			t.Fatalf("%s\nis read otherwise (-want +got):\n%s", line, d)
		}
		m := members(t, line)
		delete(m, "t_us")
		noZero(t, "outcome", m, "itl")
	})
}

func firstOf[T, U, V any](a T, _ U, _ V) T { return a }

// FuzzDecision: the same of a decision with its settings and workers.
func FuzzDecision(f *testing.F) {
	for i := range uint64(300) {
		f.Add(i, "text", float64(i)/7)
	}
	f.Add(uint64(1), "\x00</script>\ufffd", math.Inf(1))
	f.Fuzz(func(t *testing.T, seed uint64, text string, figure float64) {
		r := rand.New(rand.NewPCG(seed, 1))
		d := fullDecision()
		in := d.Input
		facts, block := in.Facts, in.Decode.BlockSize*r.IntN(2)
		fill(reflect.ValueOf(&in.Facts).Elem(), r, text, figure)
		// What only connectors read is not recorded, and words are of their sets.
		in.Facts = api.Facts{
			Kind: in.Facts.Kind, Splittable: in.Facts.Splittable, ISL: in.Facts.ISL, Source: facts.Source, N: in.Facts.N, Prompts: in.Facts.Prompts,
			Multimodal: in.Facts.Multimodal, Opaque: in.Facts.Opaque, Continues: in.Facts.Continues, ServerTools: in.Facts.ServerTools, PromptLogprobs: in.Facts.PromptLogprobs, RoutedExperts: in.Facts.RoutedExperts, MaxTokens: in.Facts.MaxTokens, Output: in.Facts.Output,
		}
		fill(reflect.ValueOf(&in.GaveUp).Elem(), r, text, figure)
		for _, v := range []any{&d.ID, &d.RequestID, &d.Model, &d.Attempt, &d.BeganUS, &d.Locals, &d.Tokens, &d.Approximate, &d.Path, &d.Reason, &d.Error, &d.EffISL, &d.Cached, &d.DecodeRank, &d.PrefillRank} {
			fill(reflect.ValueOf(v).Elem(), r, text, figure)
		}
		in.Model, d.BlockSize = d.Model, 1+r.IntN(64)
		session := r.Uint64() * uint64(r.IntN(2))
		for _, p := range []*selector.Input{&in.Decode, &in.Prefill} {
			p.ISL, p.BlockSize, p.SessionKey = in.Facts.ISL, block, session
			fill(reflect.ValueOf(&p.Draw).Elem(), r, text, figure)
			fill(reflect.ValueOf(&p.Turn).Elem(), r, text, figure)
			fill(reflect.ValueOf(&p.Home).Elem(), r, text, figure)
			for i := range p.Candidates {
				fill(reflect.ValueOf(&p.Candidates[i]).Elem(), r, text, figure)
				k := &p.Candidates[i]
				k.Terms, k.Excluded, k.ExcludedCode, k.CacheUnknown = decision.Terms{}, "", "", false
				if k.Rank == "" {
					k.Rank = "x"
				}
				if !k.HasLoad {
					k.Running, k.Waiting, k.KVUsage = 0, 0, -1
				}
			}
		}
		w := in.DecodePeers[0].Worker
		for _, v := range []any{&w.Name, &w.Version, &w.ChatTokens, &w.Revision, &w.Slice, &w.Models, &w.BlockSize, &w.KVBlocks} {
			fill(reflect.ValueOf(v).Elem(), r, text, figure)
		}
		references := NewReferences()
		line, err := references.AppendRecord(nil, &Record{Kind: KindDecision, Decision: d})
		if err != nil {
			t.Fatal(err)
		}
		all, reader, err := readAll(append(write(t, nil), line...), Options{})
		if err != nil || len(all) != 1 || reader.Stats().Unknown != 0 {
			t.Fatalf("%s: %d records, %v", line, len(all), err)
		}
		readable(reflect.ValueOf(in.Decode.Candidates))
		readable(reflect.ValueOf(in.Prefill.Candidates))
		if diff := cmp.Diff(d, all[0].Decision, sameRecord); diff != "" {
			t.Fatalf("%s\nis read otherwise (-want +got):\n%s", line, diff)
		}
		m := members(t, line[bytes.LastIndexByte(line[:len(line)-1], '\n')+1:])
		delete(m, "t_us")
		noZero(t, "decision", m, "kv_blocks", "hashed_block_tokens", "facts", "decode", "prefill")
	})
}
