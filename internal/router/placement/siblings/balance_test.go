package siblings_test

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// outcome is what a run of requests came to.
type outcome struct {
	p50, p99 time.Duration // to the first token
	uneven   float64       // the most tokens that a rank was given, over the mean
}

// balance serves cold prompts, 110 a second for a minute, that arrive at the routers in turn.
// A rank computes one prompt after the other, 20,000 tokens a second, and then answers for
// two seconds; all ranks together are busy for two thirds of the time.
func balance(t *testing.T, routers int, alone bool, change func(s *stage)) outcome {
	s := newStage(t, 16, routers)
	if change != nil {
		change(s)
	}
	s.run(2 * time.Second)
	rng := rand.New(rand.NewPCG(7, 44))
	busy, given := map[string]time.Time{}, map[string]float64{}
	var took []time.Duration
	for n := 0; s.now().Before(time.Unix(1_800_000_000+62, 0)); n++ {
		r := s.routers[n%routers]
		tokens := int(1500 * math.Exp(0.8*rng.NormFloat64()))
		run := r.tryPrompt(tokens, alone)
		k := run.In.DecodePeers[run.Plan.DecodeIndex].Rank
		claim, _ := run.Claims()
		v := r.ledger.Reserve(k, claim)
		run.Release()
		end := s.now()
		if busy[k.Label].After(end) {
			end = busy[k.Label]
		}
		end = end.Add(time.Duration(float64(tokens) / 20_000 * float64(time.Second)))
		busy[k.Label] = end
		given[k.Label] += float64(tokens)
		took = append(took, end.Sub(s.now()))
		first := s.world.Now() + end.Sub(s.now())
		s.world.At(first, v.FirstToken)
		s.world.At(first+2*time.Second, func() { v.Release() })
		s.run(time.Duration(rng.ExpFloat64() / 110 * float64(time.Second)))
	}
	slices.Sort(took)
	most, sum := 0.0, 0.0
	for _, n := range given {
		most, sum = max(most, n), sum+n
	}
	return outcome{took[len(took)/2], took[len(took)*99/100], most / (sum / 16)}
}

// TestBalance: four routers that share their load give ranks as equal work as one router does,
// also with lost messages, and their prompts wait less than without sharing. What is left to
// one router is the blind time: docs/lab/replicas.md has the table, and that of other rhythms.
func TestBalance(t *testing.T) {
	show := func(name string, o outcome) outcome {
		t.Logf("%-16s TTFT p50 %4d ms, p99 %5d ms; most tokens over mean %.3f", name, o.p50.Milliseconds(), o.p99.Milliseconds(), o.uneven)
		return o
	}
	one, not := show("one router", balance(t, 1, false, nil)), show("not sharing", balance(t, 4, true, nil))
	for _, c := range []struct {
		name   string
		change func(*stage)
		good   bool
	}{
		{"four, sharing", nil, true},
		{"10 % lost", func(s *stage) { s.net.Loss = 0.1 }, true},
		{"200 ms late", func(s *stage) { s.net.Least, s.net.Most = 195*time.Millisecond, 205*time.Millisecond }, false},
		{"30 s cut in two", func(s *stage) {
			s.world.At(15*time.Second, func() { s.routers[2].port.Side, s.routers[3].port.Side = 1, 1 })
			s.world.At(45*time.Second, func() { s.routers[2].port.Side, s.routers[3].port.Side = 0, 0 })
		}, true},
	} {
		got := show(c.name, balance(t, 4, false, c.change))
		if c.good && (got.uneven > 1.05*one.uneven || got.p50 >= not.p50 || got.p99 >= not.p99) {
			t.Errorf("%s: %+v; one router has %+v, four that do not share %+v", c.name, got, one, not)
		}
	}
}
