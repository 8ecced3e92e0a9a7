package virtualsoak

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/dynctl/dynctl/internal/rig/virtualsoak/reference"
	"github.com/dynctl/dynctl/internal/router/forward/resume"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/workers/sim/engine"
)

// kill runs one stream whose first engine breaks off after so many tokens, on the fleet of
// a seed, and returns what one engine answers.
func kill(seed uint64, p plant, c script, remote bool) (*stage, reference.Answer) {
	return run(seed, p, c, remote, func(*stage) {})
}

// run is kill with other settings.
func run(seed uint64, p plant, c script, remote bool, change func(s *stage)) (*stage, reference.Answer) {
	s := newStage(seed, p, true)
	s.unlimited()
	d := &s.settings.Decisions
	d.Attempts, d.Continuations = 8, 4
	s.allow(plenty)
	d.Rule.Threshold = 0
	if change(s); !remote {
		d.Rule.Threshold = 1 << 20
	}
	s.pace(1)
	s.script = &c
	s.w.At(probeEvery, s.probe)
	var want reference.Answer
	s.w.At(2*probeEvery, func() {
		s.request()
		for q := range s.open {
			want = q.want
		}
	})
	for len(s.out.Violations) == 0 && (s.started == 0 || len(s.open) > 0) {
		if at, ok := s.w.Next(); !ok || at > time.Minute {
			s.violate("the stream never ended")
		}
		s.w.Step()
		s.settle()
	}
	return s, want
}

// TestDeadlyAtEveryMoment: whenever engines die of a request, before an output or after any
// token, in either phase, streamed or not, with one attempt or many, with and without a
// retry budget and continuation, it takes down two of them at most; and a request that
// every engine answers with an error leaves none of them out.
func TestDeadlyAtEveryMoment(t *testing.T) { synctest.Test(t, deadlyAtEveryMoment) }

func deadlyAtEveryMoment(t *testing.T) {
	died, seeds := map[int]int{}, uint64(2)
	if testing.Short() {
		seeds = 1
	}
	for _, does := range []kind{deadly, poison} {
		for _, remote := range []bool{false, true} {
			for _, whole := range []bool{false, true} {
				for _, attempts := range []int{1, 2, 8} {
					for _, budget := range []int{0, plenty} {
						for _, continuations := range []int{0, 4} {
							for at := range 4 {
								for seed := uint64(1); seed <= seeds; seed++ {
									s, _ := run(seed, nothing, script{kind: api.Completion, on: true, limit: 5, cut: at, does: does, whole: whole}, remote, func(s *stage) {
										s.settings.Decisions.Attempts, s.settings.Decisions.Continuations = attempts, continuations
										s.allow(budget)
									})
									o := s.out
									s.close()
									if o.Err() != nil || o.Hopeless+o.Cut+o.Completed != 1 || o.Completed > o.Continued {
										t.Fatalf("kind %d, remote %v, whole %v, %d attempts, budget %d, %d continuations, after %d tokens, seed %d: %v, %+v\n%s",
											does, remote, whole, attempts, budget, continuations, at, seed, o.Err(), o, tail(o, 30))
									}
									died[o.Died]++
								}
							}
						}
					}
				}
			}
		}
	}
	// One engine where there is one attempt or no budget, two otherwise.
	if len(died) != 3 || died[1] == 0 || died[2] == 0 {
		t.Errorf("requests by the engines that died: %v", died)
	}
}

// TestKilledAtEveryToken: whichever token of an answer with characters of several tokens
// is the last of the first engine, the client reads what one engine says alone: text, ids,
// end, and usage. Only what may not go on ends there, by its name. After none the request
// is tried again, after all of them only the end is missing.
func TestKilledAtEveryToken(t *testing.T) {
	total := 0
	for _, c := range []struct {
		name       string
		kind       api.Kind
		ids, stops bool
		refused    []resume.Refusal // which it may be
	}{
		{"completion", api.Completion, false, false, nil},
		{"completion with ids", api.Completion, true, false, []resume.Refusal{resume.SentIDs}},
		{"completion with stop strings", api.Completion, false, true, nil},
		{"chat", api.Chat, false, false, []resume.Refusal{resume.Silent}},
		{"chat with stop strings", api.Chat, false, true, []resume.Refusal{resume.Silent}},
		{"SGLang's own", api.SGLangGenerate, false, false, []resume.Refusal{resume.SentIDs, resume.Unmatched}},
		{"SGLang's own with stop strings", api.SGLangGenerate, false, true, []resume.Refusal{resume.SentIDs, resume.Unmatched}},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				continued, stopped, closed, ended, remotes, cut := 0, 0, 0, 0, 0, map[string]int{}
				for _, remote := range []bool{false, true} {
					for _, limit := range []int{5, 48} {
						fleets := 2
						if c.stops {
							fleets = 6 // each with stop strings elsewhere
						}
						if testing.Short() && !c.stops {
							fleets /= 2
						}
						for seed := uint64(1); fleets > 0; seed++ {
							if s := newStage(seed, nothing, false); !s.group.Letters || !hasRole(s, workers.Prefill) {
								s.close()
								continue
							}
							fleets--
							for at := range limit + 1 {
								s, want := kill(seed, nothing, script{kind: c.kind, ids: c.ids, stops: c.stops, on: true, limit: limit, cut: at}, remote)
								o := s.out
								if o.Err() != nil {
									t.Fatalf("remote %v, killed after %d of %d tokens: %v\n%s", remote, at, limit, o.Err(), tail(o, 30))
								}
								if remotes += o.Remote; !remote && o.Remote > 0 {
									t.Fatalf("seed %d went to a prefill worker", seed)
								}
								continued, stopped, closed = continued+o.Continued, stopped+o.Stopped, closed+o.Closed
								if o.Continued == 1 && want.Finish == engine.FinishStop {
									ended++
								}
								for why, n := range o.CutFor {
									cut[why] += n
								}
								s.close()
								// A stop string may have come before.
								if moved := o.Continued+o.Cut == 1; moved != (at > 0 && at < limit) && !c.stops || o.Completed+o.Cut != 1 {
									t.Fatalf("remote %v, killed after %d of %d tokens: %+v", remote, at, limit, o)
								}
							}
						}
					}
				}
				allowed := 0
				for _, r := range c.refused {
					allowed += cut[string(r)]
					if cut[string(r)] == 0 {
						t.Errorf("none was refused as %s", string(r))
					}
					delete(cut, string(r))
				}
				// SGLang's endpoint is not split over vLLM's connectors, and across the seam it has no stop string, so that its engines see each.
				type seen struct {
					Continued, Remote, Closed, AtStop, ByRouter bool
					Cut                                         map[string]int
				}
				own := c.kind == api.SGLangGenerate
				want := seen{Continued: true, Remote: !own, Closed: true, AtStop: c.stops, ByRouter: c.stops && !own, Cut: map[string]int{}}
				got := seen{continued >= 50, remotes >= 50, closed > 0, ended > 0, stopped > 0, cut}
				if d := cmp.Diff(want, got); d != "" {
					t.Errorf("%d streams continued, %d remote legs, %d closed, %d ended by a stop string, %d of them by the router (-want +got):\n%s", continued, remotes, closed, ended, stopped, d)
				}
				t.Logf("%d went on (%d to a stop string, %d of them across the seam), %d refused by name", continued, ended, stopped, allowed)
				total += continued
			})
		})
	}
	t.Logf("%d streams went on", total)
}

// TestKilledBeforeItEnds: an answer that ends by itself ends at the same token, whichever
// was the last of the first engine.
func TestKilledBeforeItEnds(t *testing.T) { synctest.Test(t, killedBeforeItEnds) }

func killedBeforeItEnds(t *testing.T) {
	continued := 0
	for seed := uint64(1); seed < 12; seed++ {
		for at, rest := 1, 1; rest > 0; at++ {
			s, want := kill(seed, nothing, script{kind: api.Completion, limit: 200, cut: at}, false)
			o := s.out
			s.close()
			if o.Err() != nil || want.Finish != engine.FinishStop || at < len(want.Tokens) && o.Continued != 1 {
				t.Fatalf("seed %d, killed after %d of %d tokens (%s): %v\n%s", seed, at, len(want.Tokens), want.Finish, o.Err(), tail(o, 30))
			}
			continued += o.Continued
			rest = len(want.Tokens) - at
		}
	}
	t.Logf("%d streams went on", continued)
}

func hasRole(s *stage, r workers.Role) bool {
	for _, n := range s.nodes {
		if n.worker.Role == r {
			return true
		}
	}
	return false
}

// TestKilledAtEveryTokenFindsBugs plants bugs in it.
func TestKilledAtEveryTokenFindsBugs(t *testing.T) { synctest.Test(t, killedAtEveryTokenFindsBugs) }

func killedAtEveryTokenFindsBugs(t *testing.T) {
	for _, p := range []plant{seamTwice, wholeLimit, aheadOfText} {
		found := false
		for seed := uint64(1); seed < 6 && !found; seed++ {
			for at := 1; at < 20 && !found; at++ {
				s, _ := kill(seed, p, script{kind: api.Completion, on: true, limit: 20, cut: at}, true)
				found = s.out.Err() != nil
				s.close()
			}
		}
		if !found {
			t.Errorf("planted bug %d was not found", p)
		}
	}
}
