package cause_test

import (
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/router/observe/cause"
)

// bench steps a judge over a fleet of one group.
type bench struct {
	judge *cause.Judge
	now   time.Time
	fleet []cause.Worker
}

func newBench(n int) *bench {
	b := &bench{judge: cause.NewJudge(), now: time.Unix(1000, 0)}
	for i := range n {
		b.fleet = append(b.fleet, cause.Worker{
			Name: fmt.Sprint("w", i), Group: "g", Usable: true, Failed: map[string]uint64{},
			Ranks: []cause.Rank{{Label: fmt.Sprintf("w%d/dp0", i), Live: true, Heard: b.now, Block: 16, Plain: true, Process: math.NaN()}},
		})
	}
	return b
}

// step lets a second pass and gives what changed.
func (b *bench) step() []cause.Change {
	b.now = b.now.Add(time.Second)
	in := make([]cause.Worker, len(b.fleet))
	for i, w := range b.fleet {
		w.Failed = map[string]uint64{}
		for reason, n := range b.fleet[i].Failed {
			w.Failed[reason] = n
		}
		w.Ranks = append([]cause.Rank(nil), w.Ranks...)
		for k := range w.Ranks {
			w.Ranks[k].Asked = b.now
		}
		in[i] = w
	}
	return b.judge.Step(b.now, in)
}

// within steps until something changes, and says what did.
func (b *bench) within(seconds int, each func()) []cause.Change {
	for range seconds {
		if each != nil {
			each()
		}
		if c := b.step(); len(c) > 0 {
			return c
		}
	}
	return nil
}

// TestFailing: who fails more than its peers is named, and not any more once that has
// ended; where all fail equally nobody is.
func TestFailing(t *testing.T) {
	b := newBench(4)
	traffic := func(failing ...int) func() {
		return func() {
			for i := range b.fleet {
				b.fleet[i].Requests += 20
			}
			for _, i := range failing {
				b.fleet[i].Failed["status_5xx"] += 2
			}
		}
	}
	if c := b.within(40, traffic()); c != nil {
		t.Fatalf("healthy: %+v", c)
	}
	if c := b.within(40, traffic(0, 1, 2, 3)); c != nil {
		t.Errorf("all alike: %+v", c)
	}
	if c := b.within(40, traffic()); c != nil {
		t.Errorf("healthy again: %+v", c)
	}
	c := b.within(10, traffic(1))
	if len(c) != 1 || c[0].Ended {
		t.Fatalf("one fails: %+v", c)
	}
	if f := c[0]; f.Kind != cause.Failing || f.Subject() != "w1" || !strings.Contains(f.Text, "status_5xx") {
		t.Fatalf("%s of %s: %s", f.Kind, f.Subject(), f.Text)
	}
	b.within(10, traffic(1))
	if f := b.judge.Findings("w1"); len(f) != 1 || !strings.HasPrefix(f[0].Text, "fails 10% of its requests: 20 of 200 in the last 10 s") || !f[0].Since.Equal(c[0].Since) {
		t.Errorf("it is %+v", f)
	}
	if c := b.within(15, traffic()); len(c) != 1 || !c[0].Ended || b.judge.Findings("w1") != nil {
		t.Errorf("mended: %+v", c)
	}
	b.fleet[2].Usable = false
	if c := b.within(20, traffic(2)); c != nil {
		t.Errorf("not usable: %+v", c)
	}
}

// TestFailingQuickly: two answers of 5xx are enough of a worker that gets few requests,
// while its peers fail none of many; they are not where a peer failed one, where it was
// one alone, or where it was the connection.
func TestFailingQuickly(t *testing.T) {
	for name, c := range map[string]struct {
		reason      string
		times, peer uint64
		each        uint64 // requests of a peer in a second
		named       bool
	}{
		"two":                 {"status_5xx", 2, 0, 20, true},
		"one":                 {"status_5xx", 1, 0, 20, false},
		"a peer failed, too":  {"status_5xx", 2, 1, 20, false},
		"peers with little":   {"status_5xx", 2, 0, 1, false},
		"cut connections":     {"broken", 2, 0, 20, false},
		"two of many of them": {"status_5xx", 2, 0, 2000, false},
	} {
		b := newBench(8)
		second := 0
		got := b.within(20, func() {
			second++
			for i := range b.fleet {
				b.fleet[i].Requests += c.each
			}
			w := &b.fleet[3]
			w.Requests -= c.each - max(3, c.each/20)
			if second == 5 {
				b.fleet[4].Failed[c.reason] += c.peer
			}
			if second == 6 || second == 7 && c.times > 1 {
				w.Failed[c.reason]++
			}
		})
		if named := len(got) == 1 && got[0].Kind == cause.Failing && got[0].Subject() == "w3" && second == 7; named != c.named || len(got) > 1 {
			t.Errorf("%s: %+v after %d s", name, got, second)
		}
	}
}

// TestMute: a rank that computes and sends nothing is named until it sends something;
// one that finds its prompts, computes too little for a block, is not connected, or
// whose engine has no counters, is not.
func TestMute(t *testing.T) {
	for name, c := range map[string]struct {
		requests      uint64
		looked, found float64
		change        func(*cause.Rank)
		named         bool
	}{
		"computes":           {requests: 5, looked: 5000, named: true},
		"answers nothing":    {requests: 5, looked: 5000, change: func(k *cause.Rank) { k.Answered, k.Pending = 100, k.Pending+5 }},
		"answers old ones":   {requests: 5, looked: 5000, change: func(k *cause.Rank) { k.Answered, k.Pending = min(k.Answered, 70), 70 }},
		"finds its prompts":  {requests: 5, looked: 5000, found: 4500},
		"prompts of a block": {requests: 50, looked: 800},
		"too few requests":   {requests: 0, looked: 5000},
		"is not connected":   {requests: 5, looked: 5000, change: func(k *cause.Rank) { k.Live = false }},
		"has no counters":    {requests: 5, looked: 5000, change: func(k *cause.Rank) { k.Looked = math.NaN() }},
		"sends the blocks":   {requests: 5, looked: 5000, change: func(k *cause.Rank) { k.Heard = k.Heard.Add(time.Second) }},
	} {
		b := newBench(3)
		k := &b.fleet[1].Ranks[0]
		got := b.within(10, func() {
			k.Requests += c.requests
			k.Answered += c.requests
			b.fleet[1].Requests += c.requests
			k.Looked += c.looked
			k.Found += c.found
			if c.change != nil {
				c.change(k)
			}
		})
		if (len(got) == 1 && got[0].Kind == cause.Mute && got[0].Subject() == "w1/dp0") != c.named || len(got) > 1 {
			t.Errorf("%s: %+v", name, got)
		}
		if c.named {
			k.Live, k.Muted = false, true // what its feed makes of it
			k.Looked = math.NaN()
			if got := b.step(); got != nil || len(b.judge.Findings("w1")) != 1 {
				t.Errorf("%s: it is forgotten: %+v", name, got)
			}
			k.Live, k.Muted, k.Looked, k.Heard = true, false, 0, b.now
			if got := b.step(); len(got) != 1 || !got[0].Ended {
				t.Errorf("%s, and speaks again: %+v", name, got)
			}
		}
	}
}

// TestSmallCache: one of a group that has less is named, by what its engine says or
// by its evictions; two are hardware of their own, and so is one that is alone.
func TestSmallCache(t *testing.T) {
	for name, c := range map[string]struct {
		sizes []int64
		named int
	}{
		"equal":          {[]int64{1000, 1000, 1010, 990}, -1},
		"half":           {[]int64{1000, 500, 1000, 1000}, 1},
		"a little less":  {[]int64{1000, 800, 1000, 1000}, -1},
		"two of four":    {[]int64{1000, 500, 1000, 500}, -1},
		"two kinds":      {[]int64{1000, 1000, 1000, 1000, 1000, 500, 520, 1000}, -1},
		"two of sixteen": {append([]int64{500, 500}, repeated(14, 1000)...), 0},
		"a larger one":   {[]int64{1000, 2000, 1000, 1000}, -1},
		"of two":         {[]int64{1000, 500}, -1},
		"some say it":    {[]int64{1000, 500, 0, 1000}, 1},
		"nobody says it": {[]int64{0, 0, 0, 0}, -1},
	} {
		b := newBench(len(c.sizes))
		for i, n := range c.sizes {
			b.fleet[i].Capacity = n
		}
		got := b.within(5, nil)
		small := len(got) > 0 && got[0].Kind == cause.SmallCache && got[0].Worker == fmt.Sprint("w", c.named)
		if small != (c.named >= 0) || !small && got != nil {
			t.Errorf("%s: %+v, want w%d", name, got, c.named)
		}
	}
	b := newBench(4)
	for i := range b.fleet {
		b.fleet[i].Ranks[0].Held = 1000
	}
	b.fleet[2].Ranks[0].Held = 500
	if c := b.within(5, nil); c != nil {
		t.Fatalf("it has evicted nothing: %+v", c)
	}
	if c := b.within(5, func() { b.fleet[2].Ranks[0].Removed += 10 }); len(c) != 1 || c[0].Worker != "w2" || !strings.Contains(c[0].Text, "room for 8000 tokens (by its evictions), 50% of the median") {
		t.Errorf("it evicts: %+v", c)
	}
	b.fleet[2].Ranks[0].Held = 1000
	if c := b.within(5, nil); len(c) != 1 || !c[0].Ended {
		t.Errorf("it holds more: %+v", c)
	}
}

func repeated(n int, v int64) (out []int64) {
	for range n {
		out = append(out, v)
	}
	return out
}
