package workers

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/rig/property"
)

func spec(t testing.TB, role Role, text string) Spec {
	t.Helper()
	s, err := ParseSpec(role, text)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func apply(t testing.TB, r *Registry, source string, specs ...Spec) []Change {
	t.Helper()
	c, err := r.Apply(source, specs)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func worker(t testing.TB, r *Registry, name string) *Worker {
	t.Helper()
	w, ok := r.Snapshot().Worker(name)
	if !ok {
		t.Fatalf("no worker %s", name)
	}
	return w
}

func kinds(changes []Change) []string {
	var out []string
	for _, c := range changes {
		out = append(out, fmt.Sprintf("%s %s %v", c.Kind, c.Worker().Name, c.Fields))
	}
	return out
}

func TestApplyKeepsStateAndRanks(t *testing.T) {
	var events []eventlog.Event
	r := NewRegistry(func(e eventlog.Event) { events = append(events, e) })
	if s := r.Snapshot(); len(s.bySlot)-1 != -1 || s.Revision != 0 {
		t.Fatalf("empty snapshot: %+v", s)
	}
	changes := apply(t, r, "flag",
		spec(t, Prefill, "http://a:1,name=p0,dp=2,labels=k:v"), spec(t, Decode, "http://b:1,name=d0"))
	if diff := cmp.Diff([]string{"added d0 []", "added p0 []"}, kinds(changes)); diff != "" {
		t.Fatal(diff)
	}
	first := r.Snapshot()
	p0 := worker(t, r, "p0")
	if len(first.Ranks) != 3 || len(first.bySlot)-1 != 2 || p0.Ranks[1].Label != "p0/dp1" {
		t.Fatalf("ranks %v, max slot %d", first.Ranks, len(first.bySlot)-1)
	}
	p0.State.SetDraining(true)
	changes = apply(t, r, "flag",
		spec(t, Prefill, "http://a:1,name=p0,dp=2,labels=k:w"), spec(t, Decode, "http://b:1,name=d0"))
	if diff := cmp.Diff([]string{"changed p0 [labels]"}, kinds(changes)); diff != "" {
		t.Fatal(diff)
	}
	again := worker(t, r, "p0")
	if again == p0 || again.State != p0.State || !slices.Equal(again.Ranks, p0.Ranks) || !again.State.Draining() {
		t.Error("state or ranks were not kept")
	}
	if d0, _ := first.Worker("d0"); d0 != worker(t, r, "d0") {
		t.Error("an unchanged worker got a new description")
	}
	if p0.Labels["k"] != "v" {
		t.Error("an old snapshot changed")
	}
	if c := apply(t, r, "flag", spec(t, Prefill, "http://a:1,name=p0,dp=2,labels=k:w"), spec(t, Decode, "http://b:1,name=d0")); c != nil {
		t.Errorf("no change gives %v", kinds(c))
	}
	var texts []string
	for _, e := range events {
		texts = append(texts, e.Kind+": "+e.Text)
	}
	want := []string{
		"worker_added: worker d0 added: decode vllm at http://b:1 (flag)",
		"worker_added: worker p0 added: prefill vllm at http://a:1 (flag)",
		"worker_changed: worker p0 changed: labels",
	}
	if diff := cmp.Diff(want, texts); diff != "" {
		t.Error(diff)
	}
}

func TestNewURLIsANewProcess(t *testing.T) {
	r := NewRegistry(nil)
	apply(t, r, "file", spec(t, Decode, "http://a:1,name=w"))
	old := worker(t, r, "w")
	changes := apply(t, r, "file", spec(t, Decode, "http://a:2,name=w"))
	if diff := cmp.Diff([]string{"removed w []", "added w []"}, kinds(changes)); diff != "" {
		t.Fatal(diff)
	}
	now := worker(t, r, "w")
	if now.State == old.State || now.Ranks[0] == old.Ranks[0] || now.Ranks[0].Slot == old.Ranks[0].Slot {
		t.Error("the new process shares state, rank or unreleased slot with the old one")
	}
	if _, err := r.Update(old, Learned{DP: 4}); !errors.Is(err, ErrGone) {
		t.Errorf("update of the old process: %v", err)
	}
}

func TestApplyIsAllOrNothing(t *testing.T) {
	r := NewRegistry(nil)
	apply(t, r, "flag", spec(t, Decode, "http://a:1,name=w"))
	before := r.Snapshot()
	s1, s2, s3, s4 := spec(t, Decode, "http://b:1,name=w"), spec(t, Decode, "http://a:1,name=x"),
		spec(t, Decode, "http://c:1,name=y"), spec(t, Decode, "http://d:1,name=z")
	s1.Origin, s2.Origin = "f.yaml:3", "f.yaml:9"
	tests := []struct {
		name  string
		specs []Spec
		want  []string
	}{
		{"name and URL of another source", []Spec{s1, s2, s3}, []string{
			"f.yaml:3: worker w is already there, stated on the command line", "f.yaml:9: worker x has the URL of worker w (http://a:1)",
		}},
		{"twice in one source", []Spec{s3, s3}, []string{"worker y is given twice"}},
		{"one URL under two names", []Spec{s3, {Name: "q", URL: s3.URL}}, []string{"worker q has the URL of worker y"}},
		{"missing key file", []Spec{s4, {Name: "k", URL: s3.URL, APIKeyFile: "/nonexistent/key"}}, []string{"worker k: api_key_file"}},
		{"no URL and a bad engine", []Spec{s4, {Name: "k", Facts: Facts{Engine: "gpt"}}}, []string{"worker k: no url", `engine: "gpt" is not one of vllm`}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := r.Apply("file", tt.specs)
			for _, want := range tt.want {
				if err == nil || !strings.Contains(err.Error(), want) {
					t.Errorf("error %v lacks %q", err, want)
				}
			}
			if r.Snapshot() != before {
				t.Error("the fleet changed")
			}
		})
	}
	if _, err := r.Apply("", nil); err == nil {
		t.Error("a set without a source is accepted")
	}
}

func TestSlotsAreReusedOnlyAfterRelease(t *testing.T) {
	r := NewRegistry(nil)
	apply(t, r, "flag", spec(t, Decode, "http://a:1,name=a,dp=2"), spec(t, Decode, "http://b:1,name=b"))
	a := worker(t, r, "a")
	r.ReleaseRanks(a.Ranks...) // still in the fleet: nothing happens
	changes := apply(t, r, "flag", spec(t, Decode, "http://b:1,name=b"))
	if len(changes) != 1 || !slices.Equal(changes[0].Retired, a.Ranks) || len(r.Retired()) != 2 {
		t.Fatalf("changes %v, retired %d", kinds(changes), len(r.Retired()))
	}
	apply(t, r, "admin", spec(t, Decode, "http://c:1,name=c"))
	if got := worker(t, r, "c").Ranks[0].Slot; got != 3 {
		t.Errorf("slot %d before the release", got)
	}
	r.ReleaseRanks(a.Ranks...)
	r.ReleaseRanks(a.Ranks...)
	apply(t, r, "sim", spec(t, Decode, "http://d:1,name=d,dp=3"))
	var got []uint32
	for _, k := range worker(t, r, "d").Ranks {
		got = append(got, k.Slot)
	}
	if diff := cmp.Diff([]uint32{0, 1, 4}, got); diff != "" {
		t.Error(diff)
	}
	s := r.Snapshot()
	if len(s.bySlot)-1 != 4 {
		t.Errorf("max slot %d", len(s.bySlot)-1)
	}
	if w, k, ok := s.Slot(4); !ok || w.Name != "d" || k.DP != 2 {
		t.Error("slot 4 is not found")
	}
	if _, _, ok := s.Slot(9); ok {
		t.Error("a slot that nobody holds is found")
	}
}

func TestUpdateMergesWhatTheEngineReports(t *testing.T) {
	r := NewRegistry(nil)
	apply(t, r, "flag", spec(t, "", "http://10.0.0.1:8000,name=w"))
	w := worker(t, r, "w")
	if w.Engine != VLLM || w.Role != Aggregated {
		t.Errorf("before it reported: %s %s", w.Engine, w.Role)
	}
	reported := Learned{
		Facts: Facts{
			Engine: SGLang, Version: "0.5.23", Role: Prefill, Connector: ConnectorSGLang,
			Models: []string{"m", "lora"}, MaxModelLen: 8192, BlockSize: 64, KVBlocks: 100, Bootstrap: &Bootstrap{Port: 8998},
		},
		LoRAs: []string{"lora"}, DP: 2,
		Events: []EventSource{{Endpoint: "tcp://10.0.0.1:5557"}, {DP: 1, Endpoint: "tcp://10.0.0.1:5558"}},
	}
	changes, err := r.Update(w, reported)
	if err != nil {
		t.Fatal(err)
	}
	if len(changes) != 1 || len(changes[0].Started) != 1 || changes[0].Started[0].DP != 1 {
		t.Errorf("changes %v", kinds(changes))
	}
	now := worker(t, r, "w")
	if now.Ranks[0] != w.Ranks[0] {
		t.Error("rank 0 was not kept")
	}
	want := &Worker{
		Facts: Facts{
			Engine: SGLang, Version: "0.5.23", Role: Prefill, Connector: ConnectorSGLang,
			Models: reported.Models, MaxModelLen: 8192, BlockSize: 64, KVBlocks: 100,
			Bootstrap: &Bootstrap{"10.0.0.1", 8998},
		},
		Name: "w", URL: w.URL, LoRAs: reported.LoRAs, Events: reported.Events, Source: "flag", State: w.State, Ranks: now.Ranks,
	}
	if fields := changedFields(want, now); len(fields) != 0 {
		t.Errorf("wrong fields %v: %+v", fields, now)
	}
	// What is not reported again stays; what is reported again wins.
	if _, err := r.Update(now, Learned{Events: []EventSource{}, DP: 1}); err != nil {
		t.Fatal(err)
	}
	last := worker(t, r, "w")
	if len(last.Events) != 0 || len(last.Ranks) != 1 || last.BlockSize != 64 || len(r.Retired()) != 1 {
		t.Errorf("after the second answer: %+v", last)
	}
	if got := r.Snapshot().Model("lora"); len(got) != 1 || got[0] != last {
		t.Errorf("models: %v", got)
	}
	reported.Models[0] = "scribbled"
	if last.Models[0] != "m" {
		t.Error("the registry shares memory with its caller")
	}
}

func TestContradictionNamesBothSides(t *testing.T) {
	from := map[Field]string{FieldBlockSize: "vllm:cache_config_info", FieldRole: "/server_info"}
	tests := []struct {
		name, source, spec string
		reported           Learned
		want               string
	}{
		{"block size", "flag", "http://a:1,name=w,block_size=16", Learned{Facts: Facts{BlockSize: 32, From: from}},
			"worker w: block size 16 stated on the command line, engine says 32 (vllm:cache_config_info)"},
		{"role", "file", "http://a:1,name=w,role=prefill", Learned{Facts: Facts{Role: Decode, From: from}},
			"worker w: role prefill stated in x.yaml:7, engine says decode (/server_info)"},
		{"model", "admin", "http://a:1,name=w,model=llama", Learned{Facts: Facts{Models: []string{"qwen"}}},
			`worker w: model "llama" stated through the admin API, engine says "qwen"`},
		{"dp", "flag", "http://a:1,name=w,dp=4", Learned{DP: 2}, "worker w: data-parallel size 4 stated on the command line, engine says 2"},
		{"engine", "flag", "http://a:1,name=w,engine=vllm", Learned{Facts: Facts{Engine: SGLang}}, "worker w: engine vllm stated on the command line, engine says sglang"},
		{"dialect", "sim", "http://a:1,name=w,engine=sim", Learned{Facts: Facts{Engine: SGLang}}, "worker w: engine sim with the wire of vllm stated by the simulator, engine says sglang"},
		{"length", "flag", "http://a:1,name=w,max_model_len=9000", Learned{Facts: Facts{MaxModelLen: 8192}}, "worker w: max model len 9000 stated on the command line, engine says 8192"},
		{"bootstrap", "flag", "http://a:1,name=w,bootstrap=8000", Learned{Facts: Facts{Bootstrap: &Bootstrap{Port: 8998}}}, "worker w: bootstrap port 8000 stated on the command line, engine says port 8998"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var events []eventlog.Event
			r := NewRegistry(func(e eventlog.Event) { events = append(events, e) })
			s := spec(t, "", tt.spec)
			if tt.source == "file" {
				s.Origin = "x.yaml:7"
			}
			apply(t, r, tt.source, s)
			w := worker(t, r, "w")
			w.State.SetCondition(Condition{Health: Healthy})
			_, err := r.Update(w, tt.reported)
			if err == nil || err.Error() != tt.want {
				t.Fatalf("error %v\nwant  %s", err, tt.want)
			}
			if _, ok := errors.AsType[*Contradiction](err); !ok {
				t.Errorf("error is %T", err)
			}
			w = worker(t, r, "w")
			c := w.State.Condition()
			if w.Conflict != tt.want || c.Health != Unhealthy || "worker w: "+c.Reason != tt.want {
				t.Errorf("conflict %q, condition %+v", w.Conflict, c)
			}
			if ok, _ := w.State.Usable(); ok {
				t.Error("a worker in conflict is usable")
			}
			last := events[len(events)-1]
			if last.Kind != "worker_conflict" || last.Severity != eventlog.Error || last.Text != tt.want {
				t.Errorf("event %+v", last)
			}
			// The operator corrects the statement.
			apply(t, r, tt.source, spec(t, "", "http://a:1,name=w"))
			if c := w.State.Condition(); c.Health != Healthy {
				t.Errorf("after the correction: %+v", c)
			}
		})
	}
}

func TestAgreementIsNoContradiction(t *testing.T) {
	r := NewRegistry(nil)
	apply(t, r, "sim", spec(t, Decode, "http://a:1,name=w,engine=sim,dp=2,block_size=16,model=m,max_model_len=100"))
	_, err := r.Update(worker(t, r, "w"), Learned{Facts: Facts{Engine: VLLM, BlockSize: 16, Models: []string{"m", "n"}, MaxModelLen: 200}, DP: 2})
	if err != nil {
		t.Fatal(err)
	}
	w := worker(t, r, "w")
	if w.WireEngine() != VLLM || w.MaxModelLen != 100 || w.Conflict != "" {
		t.Errorf("%+v", w)
	}
}

func TestSubscribeCoalesces(t *testing.T) {
	r := NewRegistry(nil)
	changed, cancel := r.Subscribe()
	defer cancel()
	<-changed
	seen := r.Snapshot()
	apply(t, r, "flag", spec(t, Decode, "http://a:1,name=a"))
	apply(t, r, "file", spec(t, Decode, "http://b:1,name=b"), spec(t, Decode, "http://c:1,name=c"))
	apply(t, r, "flag")
	<-changed
	select {
	case <-changed:
		t.Error("three changes made more than one token")
	default:
	}
	if diff := cmp.Diff([]string{"added b []", "added c []"}, kinds(Diff(seen, r.Snapshot()))); diff != "" {
		t.Error(diff)
	}
	cancel()
	apply(t, r, "file")
	select {
	case <-changed:
		t.Error("a token after cancel")
	default:
	}
	if diff := cmp.Diff([]string{"removed b []", "removed c []"}, kinds(Diff(&Snapshot{Workers: []*Worker{{Name: "b"}, {Name: "c"}}}, r.Snapshot()))); diff != "" {
		t.Error(diff)
	}
}

// TestRolesComeWithTheWorkers: workers and the labels that give their roles
// change in one step, in which no worker has another role than in the end; when
// the workers are refused, the labels stay, too.
func TestRolesComeWithTheWorkers(t *testing.T) {
	var roles []string
	r := NewRegistry(func(e eventlog.Event) { roles = append(roles, e.Worker+" "+e.Kind+" "+e.Fields["role"].(string)) })
	first := RoleLabels{Prefill: []string{"first"}}
	a, b := spec(t, "", "http://a:1,name=a,labels=model:first"), spec(t, "", "http://b:1,name=b,labels=model:second")
	if _, err := r.ApplyWithRoles("flag", []Spec{a}, first); err != nil {
		t.Fatal(err)
	}
	was := r.Snapshot().Revision
	if _, err := r.ApplyWithRoles("flag", []Spec{a, b}, RoleLabels{Prefill: []string{"second"}, Decode: []string{"first"}}); err != nil {
		t.Fatal(err)
	}
	if n := r.Snapshot().Revision - was; n != 1 {
		t.Errorf("%d fleets were published, want 1", n)
	}
	slices.Sort(roles)
	if d := cmp.Diff([]string{"a worker_added prefill", "a worker_changed decode", "b worker_added prefill"}, roles); d != "" {
		t.Error(d)
	}
	now := r.Snapshot()
	if _, err := r.ApplyWithRoles("file", []Spec{a}, first); err == nil {
		t.Error("a worker of another source is taken")
	}
	apply(t, r, "flag", a, b) // rebuilds them by the labels that are held
	if r.Snapshot() != now {
		t.Error("what was refused has changed the labels")
	}
}

func TestModify(t *testing.T) {
	r := NewRegistry(nil)
	for i := range 3 {
		_, err := r.Modify("admin", func(s []Spec) ([]Spec, error) {
			return append(s, spec(t, Decode, fmt.Sprintf("http://a:%d,name=w%d", i+1, i))), nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	stop := errors.New("no")
	if _, err := r.Modify("admin", func([]Spec) ([]Spec, error) { return nil, stop }); !errors.Is(err, stop) {
		t.Errorf("error %v", err)
	}
	if n := len(r.Snapshot().Workers); n != 3 {
		t.Errorf("%d workers", n)
	}
}

// TestSlotsStayDenseAndUnique drives the registry at random and compares the
// slots with the rules: unique among live and retired ranks, never larger than
// the most that were ever reserved at once.
func TestSlotsStayDenseAndUnique(t *testing.T) {
	property.Check(t, func(t *rapid.T) {
		r := NewRegistry(nil)
		retired := map[*Rank]bool{}
		most := 0
		note := func(changes []Change) {
			for _, c := range changes {
				for _, k := range c.Retired {
					retired[k] = true
				}
			}
		}
		check := func() {
			s := r.Snapshot()
			slots := map[uint32]string{}
			for _, k := range s.Ranks {
				if other, dup := slots[k.Slot]; dup {
					t.Fatalf("slot %d is held by %s and %s", k.Slot, other, k.Label)
				}
				slots[k.Slot] = k.Label
			}
			for k := range retired {
				if other, dup := slots[k.Slot]; dup {
					t.Fatalf("slot %d of retired %s is held by %s", k.Slot, k.Label, other)
				}
				slots[k.Slot] = k.Label
			}
			most = max(most, len(slots))
			if len(s.bySlot)-1 >= most {
				t.Fatalf("max slot %d with at most %d reserved at once", len(s.bySlot)-1, most)
			}
			if len(r.Retired()) != len(retired) {
				t.Fatalf("%d retired slots, want %d", len(r.Retired()), len(retired))
			}
		}
		for range rapid.IntRange(1, 30).Draw(t, "steps") {
			switch rapid.IntRange(0, 2).Draw(t, "step") {
			case 0:
				source := rapid.SampledFrom([]string{"flag", "file"}).Draw(t, "source")
				var specs []Spec
				for i := range 4 {
					if rapid.Bool().Draw(t, "there") {
						port := rapid.IntRange(1, 2).Draw(t, "port")
						u, err := ParseURL(fmt.Sprintf("http://%s-%d:%d", source, i, port))
						if err != nil {
							t.Fatal(err)
						}
						specs = append(specs, Spec{Name: fmt.Sprintf("%s-%d", source, i), URL: u})
					}
				}
				changes, err := r.Apply(source, specs)
				if err != nil {
					t.Fatal(err)
				}
				note(changes)
			case 1:
				if ws := r.Snapshot().Workers; len(ws) > 0 {
					changes, err := r.Update(rapid.SampledFrom(ws).Draw(t, "worker"), Learned{DP: rapid.IntRange(1, 70).Draw(t, "dp")})
					if err != nil {
						t.Fatal(err)
					}
					note(changes)
				}
			case 2:
				for k := range retired {
					if k.Slot%2 == 0 {
						r.ReleaseRanks(k)
						delete(retired, k)
					}
				}
			}
			check()
		}
	})
}

func TestRegistryUnderRace(t *testing.T) {
	r := NewRegistry(nil)
	changed, cancel := r.Subscribe()
	defer cancel()
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			source := fmt.Sprintf("s%d", g)
			for i := range 50 {
				u, err := ParseURL(fmt.Sprintf("http://h%d:%d", g, i%3+1))
				if err != nil {
					t.Error(err)
				}
				changes, err := r.Apply(source, []Spec{{Name: source, URL: u}})
				if err != nil {
					t.Error(err)
				}
				if w, ok := r.Snapshot().Worker(source); ok {
					if _, err := r.Update(w, Learned{DP: i%4 + 1}); err != nil {
						t.Error(err)
					}
				}
				for _, c := range changes {
					if c.Old != nil {
						r.ReleaseRanks(c.Old.Ranks...)
					}
				}
			}
		})
	}
	wg.Wait()
	<-changed
	s := r.Snapshot()
	for i, w := range s.Workers {
		if i > 0 && s.Workers[i-1].Name >= w.Name {
			t.Error("workers are not sorted")
		}
	}
}

func TestConditionFoldsThreeParties(t *testing.T) {
	now := time.Now()
	s := &State{}
	step := func(health Health, usable bool, reason string) {
		t.Helper()
		ok, why := s.Usable()
		if got := s.Condition().Health; got != health || ok != usable || why != reason {
			t.Errorf("got %s, usable %v %q; want %s, %v %q", got, ok, why, health, usable, reason)
		}
	}
	step(Unknown, false, "unknown")
	s.SetCondition(Condition{Health: Healthy, Since: now})
	step(Healthy, true, "")
	e := &Ejection{Since: now, Until: now.Add(time.Second), Reason: "5 failures"}
	s.SetEjection(e)
	step(Ejected, false, "ejected")
	if e.TakeTrial() {
		t.Error("a trial inside the penalty")
	}
	e.OfferTrial()
	step(Ejected, true, "")
	if !e.TakeTrial() || e.TakeTrial() {
		t.Error("the trial was not given exactly once")
	}
	step(Ejected, false, "ejected")
	e.ReturnTrial()
	step(Ejected, true, "")
	s.SetCondition(Condition{Health: Unhealthy, Reason: "probe failed"})
	step(Unhealthy, false, "unhealthy")
	s.SetCondition(Condition{Health: Healthy})
	s.setConflict("block size", now)
	step(Unhealthy, false, "unhealthy")
	s.setConflict("", now)
	s.SetEjection(nil)
	s.SetDraining(true)
	step(Healthy, false, "draining")
}

func TestKnownLoad(t *testing.T) {
	l := UnknownLoad(time.Now())
	if l.Known() || !math.IsNaN(l.PrefixHits) {
		t.Errorf("an unknown load has figures: %+v", l)
	}
	if l.KVUsage = 0.5; !l.Known() {
		t.Error("a load with a figure is unknown")
	}
}

func BenchmarkUpdate1000Workers(b *testing.B) {
	r := NewRegistry(nil)
	var specs []Spec
	for i := range 1000 {
		specs = append(specs, spec(b, Decode, fmt.Sprintf("http://10.0.%d.%d:8000", i/250, i%250)))
	}
	apply(b, r, "file", specs...)
	ws := r.Snapshot().Workers
	b.ReportAllocs()
	n := 0
	for b.Loop() {
		n++
		if _, err := r.Update(ws[n%len(ws)], Learned{Facts: Facts{BlockSize: 16 + n}}); err != nil {
			b.Fatal(err)
		}
	}
}

func TestAnotherEngineAtTheSameURL(t *testing.T) {
	r := NewRegistry(nil)
	apply(t, r, "flag", spec(t, "", "http://a:1,name=w"))
	if _, err := r.Update(worker(t, r, "w"), Learned{Facts: Facts{Engine: SGLang, Role: Prefill, Bootstrap: &Bootstrap{Port: 8998}}, DP: 2}); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Update(worker(t, r, "w"), Learned{Facts: Facts{Engine: VLLM}}); err != nil {
		t.Fatal(err)
	}
	if w := worker(t, r, "w"); w.Engine != VLLM || w.Role != Aggregated || w.Bootstrap != nil || len(w.Ranks) != 1 {
		t.Errorf("facts of the old engine are kept: %+v", w)
	}
}
