package feed

import (
	"fmt"
	"reflect"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/dynctl/dynctl/internal/router/observe/admin"
)

// TestFold: what can be counted is added up, the worst is kept of the rest, and what one
// rank does not report is not known of the worker.
func TestFold(t *testing.T) {
	rank := func(dp int) *Rank {
		return &Rank{
			Rank: admin.Rank{
				Label: "d/dp", Worker: "d", DP: dp, Usable: true, TTFT: new(20.0), ITL: new(5.0), OutputRate: new(7.0), ActiveRequests: 4, Requests: 100,
				IndexBlocks: 10, CapacityBlock: 100, IndexRoom: 150, Feed: admin.Feed{State: "live", Trusted: true, Gaps: 1},
				Engine: &admin.EngineLoad{Running: new(3), Waiting: new(1), KVUsage: new(.5)}, Moves: &admin.Moves{Waiting: new(0)},
			},
			RankDerived: RankDerived{Status: "ok", HitShare: .25, PromptRate: 100, LoadAge: 1, EventRate: 2, FeedFor: 9},
		}
	}
	a, b := rank(0), rank(1)
	b.Severity, b.Status, b.Reason = Warn, "SLOW", "ITL"
	*a.Moves, *b.Moves = admin.Moves{Away: 7, Onto: 1, Waiting: new(0)}, admin.Moves{Away: 2, Onto: 3, Waiting: new(0)}
	b.Slow, b.Engine.KVUsage, b.HitShare, b.PromptRate, b.ITL, b.FeedFor = &admin.Slow{Figure: "ITL", Times: 4}, new(.9), .75, 300, new(50.0), 2
	v := Fold([]*Rank{a, b})
	type state struct {
		Label, Status, Reason, SlowAt string
		Severity                      Severity
		Folded                        int
		Times                         float64
	}
	if d := cmp.Diff(state{"d", "SLOW", "ITL", "ITL", Warn, 2, 4}, state{v.Label, v.Status, v.Reason, v.SlowAt(), v.Severity, v.Folded, v.Slow.Times}); d != "" {
		t.Errorf("state (-want +got):\n%s", d)
	}
	type sums struct {
		Running, Waiting, PromptRate, OutputRate, EventRate Num
		ActiveRequests                                      int
		IndexBlocks, CapacityBlock, Room                    int64
		Requests, Gaps                                      uint64
	}
	got := sums{
		v.Running(), v.Waiting(), v.PromptRate, Figure(v.OutputRate), v.EventRate, v.ActiveRequests,
		v.IndexBlocks, v.CapacityBlock, v.Room(), v.Requests, v.Feed.Gaps,
	}
	if d := cmp.Diff(sums{6, 2, 400, 14, 4, 8, 20, 200, 300, 200, 2}, got); d != "" {
		t.Errorf("sums (-want +got):\n%s", d)
	}
	if m := v.Streams(); (m != Moves{Away: 9, Onto: 4}) {
		t.Errorf("streams that moved: %+v", m)
	}
	type rest struct {
		KVUsage, ITL, TTFT, FeedFor, HitShare Num
		Feed                                  string
		Trusted                               bool
	}
	if d := cmp.Diff(rest{.9, 50, 20, 2, .625, "live", true}, rest{v.KVUsage(), Figure(v.ITL), Figure(v.TTFT), v.FeedFor, v.HitShare, v.Feed.State, v.Feed.Trusted}, cmpopts.EquateApprox(0, 1e-9)); d != "" {
		t.Errorf("the rest (-want +got):\n%s", d)
	}
	b.PromptRate, b.HitShare = 0, Unknown // it is idle
	if v = Fold([]*Rank{a, b}); v.HitShare != .25 || Fold([]*Rank{b, a}).HitShare != .25 {
		t.Errorf("hits beside an idle rank: %v", v.HitShare)
	}
	b.HitShare, b.Moves = .75, nil
	if a.SpeedKnown = true; Fold([]*Rank{a, b}).SpeedKnown || Fold([]*Rank{b, a}).SpeedKnown || !Fold([]*Rank{a, a}).SpeedKnown {
		t.Error("the worker's speed is judged where that of each rank is")
	}
	b.Engine, b.TTFT, b.PromptRate, b.CapacityBlock, b.IndexRoom, b.Feed.State, b.Feed.Trusted, b.Usable = nil, nil, Unknown, 0, 0, "gap", false, false
	v = Fold([]*Rank{a, b})
	m := v.Streams()
	for name, n := range map[string]Num{
		"running": v.Running(), "KV usage": v.KVUsage(), "TTFT": Figure(v.TTFT), "prompt rate": v.PromptRate, "hit share": v.HitShare, "streams that moved away": m.Away,
	} {
		if n.Known() {
			t.Errorf("%s of all is %v, and one has none", name, n)
		}
	}
	if v.CapacityBlock != 0 || v.Room() != 0 || m.None() {
		t.Errorf("capacity %d, room %d, streams %+v where one reports none", v.CapacityBlock, v.Room(), m)
	}
	if v.Feed.State != "mixed" || v.Feed.Trusted || v.Usable {
		t.Errorf("feed %s, trusted %v, usable %v where one is not", v.Feed.State, v.Feed.Trusted, v.Usable)
	}
	if a.Running() != 3 || a.Label != "d/dp" || a.Moves.Away != 7 || a.Feed.Gaps != 1 {
		t.Error("the rank itself was changed")
	}
}

// TestFoldKnowsEveryField: what the row of a worker says in a field depends on all of its
// ranks, whatever their order, unless there is a reason why the first one's will do.
func TestFoldKnowsEveryField(t *testing.T) {
	ofTheFirst := map[string]string{
		"Worker":            "the ranks are of one worker",
		"Role":              "a worker has one",
		"Health":            "that of the worker",
		"Model":             "that of the worker",
		"DP":                "a folded row shows the number of its ranks instead",
		"Slot":              "a worker has none",
		"Pressure":          "ranks are put in order before they are folded",
		"Of":                "set by whoever folds, who knows the ranks that were filtered out",
		"Feed.CacheGroups":  "ranks of one engine have the same model, and its groups",
		"Feed.UnknownKinds": "ranks of one engine have the same model, and its groups",
	}
	var a, b Rank
	fields := leaves(t, "", reflect.ValueOf(&a).Elem(), 1)
	leaves(t, "", reflect.ValueOf(&b).Elem(), 2)
	if len(fields) < 50 {
		t.Fatalf("found only %d fields", len(fields))
	}
	ab, ba := Fold([]*Rank{&a, &b}), Fold([]*Rank{&b, &a})
	at := func(r *Rank, index []int) string {
		return fmt.Sprintf("%#v", reflect.ValueOf(r).Elem().FieldByIndex(index))
	}
	for name, index := range fields {
		first := at(&ab, index) == at(&a, index) && at(&ba, index) == at(&b, index)
		if why := ofTheFirst[name]; first && why == "" {
			t.Errorf("Fold leaves %s as the first rank has it: say in Fold what it is for a worker, or here why that will do", name)
		} else if !first && why != "" {
			t.Errorf("Fold looks at %s of every rank, and is said here not to", name)
		}
	}
	for name := range ofTheFirst {
		if fields[name] == nil {
			t.Errorf("a rank has no field %s", name)
		}
	}
}

// leaves fills the fields of a rank, and of what is in it, with values that differ by n, 1
// or 2, and returns where they are.
func leaves(t *testing.T, under string, v reflect.Value, n int) map[string][]int {
	t.Helper()
	all := map[string][]int{}
	for i := range v.NumField() {
		field, f := v.Type().Field(i), v.Field(i)
		name := under + field.Name
		if f.Kind() == reflect.Pointer {
			f.Set(reflect.New(f.Type().Elem()))
			f = f.Elem()
		}
		switch f.Kind() {
		case reflect.Struct:
			if f.Type() == reflect.TypeFor[time.Time]() {
				f.Set(reflect.ValueOf(time.Unix(int64(n), 0)))
				break
			}
			if name += "."; field.Anonymous {
				name = under
			}
			for inner, index := range leaves(t, name, f, n) {
				all[inner] = append([]int{i}, index...)
			}
			continue
		case reflect.String:
			f.SetString(fmt.Sprint(name, n))
		case reflect.Bool:
			f.SetBool(n == 2)
		case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
			f.SetInt(int64(n))
		case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
			f.SetUint(uint64(n))
		case reflect.Float32, reflect.Float64:
			f.SetFloat(float64(n))
		case reflect.Slice:
			f.Set(reflect.MakeSlice(f.Type(), n, n))
		default:
			t.Fatalf("%s is a %s, which this test cannot fill", name, f.Kind())
		}
		all[name] = []int{i}
	}
	return all
}
