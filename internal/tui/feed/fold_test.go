package feed

import (
	"fmt"
	"math"
	"reflect"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestFold: what can be counted is added up, the worst is kept of the rest, and what one
// rank does not report is not known of the worker.
func TestFold(t *testing.T) {
	rank := func(dp int) *Rank {
		return &Rank{
			Label: "d/dp", Worker: "d", DP: dp, Status: "ok", Usable: true, Running: 3, Waiting: 1, KVUsage: .5, HitShare: .25, PromptRate: 100, TTFT: 20, ITL: 5,
			OutputRate: 7, LoadAge: 1, Active: 4, IndexBlocks: 10, Capacity: 100, IndexRoom: 150, Feed: Feed{State: "live", Trusted: true, EventRate: 2, Gaps: 1, SinceSeconds: 9},
		}
	}
	a, b := rank(0), rank(1)
	b.Severity, b.Status, b.Reason = Warn, "SLOW", "ITL"
	a.Moves, b.Moves = Moves{Away: 7, Onto: 1}, Moves{Away: 2, Onto: 3}
	b.SlowAt, b.SlowTimes, b.KVUsage, b.HitShare, b.PromptRate, b.ITL, b.Feed.SinceSeconds = "ITL", 4, .9, .75, 300, 50, 2
	equal := cmp.Comparer(func(a, b Num) bool { return !a.Known() && !b.Known() || math.Abs((a-b).F()) < 1e-9 })
	// same compares a folded rank with itself as it should be in some fields.
	same := func(what string, got Rank, set func(want *Rank)) {
		t.Helper()
		want := got
		set(&want)
		if d := cmp.Diff(want, got, cmp.AllowUnexported(Rank{}), equal); d != "" {
			t.Errorf("%s (-want +got):\n%s", what, d)
		}
	}
	v := Fold([]*Rank{a, b})
	same("the worst, sums and the rest", v, func(want *Rank) {
		want.Label, want.Folded, want.Status, want.Severity, want.Reason, want.SlowAt, want.SlowTimes = "d", 2, "SLOW", Warn, "ITL", "ITL", 4
		want.Running, want.Waiting, want.PromptRate, want.OutputRate, want.Active = 6, 2, 400, 14, 8
		want.IndexBlocks, want.Capacity, want.IndexRoom, want.Moves = 20, 200, 300, Moves{Away: 9, Onto: 4}
		want.KVUsage, want.ITL, want.TTFT, want.HitShare = .9, 50, 20, .625
		want.Feed.State, want.Feed.Trusted, want.Feed.EventRate, want.Feed.Gaps, want.Feed.SinceSeconds = "live", true, 4, 2, 2
	})
	b.PromptRate, b.HitShare = 0, Unknown // it is idle
	if v = Fold([]*Rank{a, b}); v.HitShare != .25 || Fold([]*Rank{b, a}).HitShare != .25 {
		t.Errorf("hits beside an idle rank: %v", v.HitShare)
	}
	b.HitShare, b.Moves.Away = .75, Unknown
	if a.SpeedJudged = true; Fold([]*Rank{a, b}).SpeedJudged || Fold([]*Rank{b, a}).SpeedJudged || !Fold([]*Rank{a, a}).SpeedJudged {
		t.Error("the worker's speed is judged where that of each rank is")
	}
	b.Running, b.KVUsage, b.TTFT, b.PromptRate, b.Capacity, b.Feed.State, b.Feed.Trusted, b.Usable = Unknown, Unknown, Unknown, Unknown, 0, "gap", false, false
	v = Fold([]*Rank{a, b})
	same("what is not known of one is not known of all", v, func(want *Rank) {
		want.Running, want.KVUsage, want.TTFT, want.PromptRate, want.HitShare, want.Moves.Away = Unknown, Unknown, Unknown, Unknown, Unknown, Unknown
		want.Capacity, want.Feed.State, want.Feed.Trusted, want.Usable = 0, "mixed", false, false
	})
	if v.Moves.None() {
		t.Errorf("streams moved: %+v", v.Moves)
	}
	if a.Running != 3 || a.Label != "d/dp" {
		t.Error("the rank itself was changed")
	}
}

// TestFoldKnowsEveryField: what the row of a worker says in a field depends on all of its
// ranks, whatever their order, unless there is a reason why the first one's will do.
func TestFoldKnowsEveryField(t *testing.T) {
	ofTheFirst := map[string]string{
		"Worker":           "the ranks are of one worker",
		"Role":             "a worker has one",
		"Health":           "that of the worker",
		"Model":            "that of the worker",
		"DP":               "a folded row shows the number of its ranks instead",
		"Pressure":         "ranks are put in order before they are folded",
		"Of":               "set by whoever folds, who knows the ranks that were filtered out",
		"Feed.CacheGroups": "ranks of one engine have the same model, and its groups",
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
		name, f := under+v.Type().Field(i).Name, v.Field(i)
		f = reflect.NewAt(f.Type(), f.Addr().UnsafePointer()).Elem() // the unexported ones, too
		switch f.Kind() {
		case reflect.Struct:
			for inner, index := range leaves(t, name+".", f, n) {
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
		case reflect.Pointer:
			f.Set(reflect.New(f.Type().Elem()))
		case reflect.Slice:
			f.Set(reflect.MakeSlice(f.Type(), n, n))
		default:
			t.Fatalf("%s is a %s, which this test cannot fill", name, f.Kind())
		}
		all[name] = []int{i}
	}
	return all
}
