// Command kvindex drives the KV index with a KVOPS1 op stream. It has the modes and writes the
// JSON lines of the shared index harness, so that one run compares it with other routers'
// indexes.
//
//	kvindex INDEX MODE FILE [THREADS] [RATE]
//
// INDEX is only printed. MODE is check, throughput, throughput-noshare, memory or latency. FORM=vllm in
// the environment delivers each removed block as an event of its own and stores of at most 512 blocks.
// Events are put into the index one by one as an event feed does it: those of one rank go into a batch
// of at most 256 events, which is applied at the latest before the next query of the same thread.
// NAMES=opaque gives each rank names of its own (the file has the same name for a block on all ranks).
// CPUPROFILE names a file for a profile of the whole run.
package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"runtime/pprof"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dynctl/dynctl/internal/router/cache/kvindex"
)

const (
	batchEvents = 256
	chainQuery  = 512 // blocks per lookup of the latency mode
)

func main() {
	if err := run(os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "kvindex:", err)
		os.Exit(1)
	}
}

func run(args []string, out io.Writer) (err error) {
	if len(args) < 3 {
		return errors.New("usage: kvindex INDEX MODE FILE [THREADS] [RATE]")
	}
	threads, rate := 1, 0.0
	if len(args) > 3 {
		if threads, err = strconv.Atoi(args[3]); err != nil || threads < 1 {
			return fmt.Errorf("threads %q: not a positive number", args[3])
		}
	}
	if len(args) > 4 {
		if rate, err = strconv.ParseFloat(args[4], 64); err != nil || rate < 0 {
			return fmt.Errorf("rate %q: not a number of block ops per second", args[4])
		}
	}
	form := "grouped"
	if os.Getenv("FORM") == "vllm" {
		form = "vllm"
	}
	w, err := load(args[2], form == "vllm")
	if err != nil {
		return err
	}
	if os.Getenv("NAMES") == "opaque" {
		form += "-opaque"
		w.opaque()
	}
	if p := os.Getenv("CPUPROFILE"); p != "" {
		f, err := os.Create(p)
		if err != nil {
			return err
		}
		defer f.Close()
		if err := pprof.StartCPUProfile(f); err != nil {
			return err
		}
		defer pprof.StopCPUProfile()
	}
	var fields string
	switch mode := args[1]; mode {
	case "check":
		fields, err = check(w)
	case "throughput", "throughput-noshare":
		fields, err = throughput(w, threads, mode == "throughput")
	case "memory":
		fields, err = memory(w)
	case "latency":
		fields, err = latency(w, rate)
	default:
		err = fmt.Errorf("unknown mode %q", mode)
	}
	if err != nil {
		return err
	}
	stem := strings.TrimSuffix(filepath.Base(args[2]), ".kvops")
	_, err = fmt.Fprintf(out, "{\"index\":%q,\"mode\":%q,\"form\":%q,\"workload\":%q,%s}\n", args[0], args[1], form, stem, fields)
	return err
}

func open(w *workload) (*kvindex.Index, error) {
	x := kvindex.New(kvindex.Options{})
	for r := range w.ranks {
		if err := x.AddRank(kvindex.Rank(r), fmt.Sprintf("rank-%d", r)); err != nil {
			return nil, err
		}
	}
	return x, nil
}

// feeder collects events of one rank at a time and applies them.
type feeder struct {
	w    *workload
	x    *kvindex.Index
	b    kvindex.Batch
	rank uint32
	n    int
	lost int
}

func (f *feeder) put(e *event) {
	if f.n == batchEvents || f.n > 0 && f.rank != e.rank {
		f.flush()
	}
	f.rank = e.rank
	f.n++
	seqs := f.w.seqs[e.at : e.at+e.n]
	if e.kind == kindStore {
		f.b.Store(e.parent, e.hasParent, seqs, f.w.locals[e.at:e.at+e.n])
	} else {
		f.b.Remove(seqs...)
	}
}

func (f *feeder) flush() {
	if f.n == 0 {
		return
	}
	if r := f.x.Apply(kvindex.Rank(f.rank), &f.b); r.Lost || r.Unknown > 0 {
		f.lost++
	}
	f.b.Reset()
	f.n = 0
}

// whole reports an error if a batch was not taken in full: then the figures would mean nothing.
func (f *feeder) whole() error {
	if f.lost > 0 {
		return fmt.Errorf("%d batches were not applied in full", f.lost)
	}
	return nil
}

func check(w *workload) (string, error) {
	x, err := open(w)
	if err != nil {
		return "", err
	}
	defer x.Close()
	var q kvindex.Query
	f := feeder{w: w, x: x}
	var n, bad, over, under, missing int
	want := make([]int, w.ranks)
	for i := range w.events {
		switch e := &w.events[i]; e.kind {
		case kindQuery, kindCheck:
			f.flush()
			x.Overlap(w.locals[e.at:e.at+e.n], &q)
		case kindExpect:
			n++
			clear(want)
			for _, s := range w.scores[e.at : e.at+e.n] {
				want[s.rank] = int(s.depth)
			}
			wrong := false
			for r, d := range want {
				got := q.Depth(kvindex.Rank(r))
				wrong = wrong || got != d
				switch {
				case got > d:
					over++
				case got == 0 && d > 0:
					missing++
				case got < d:
					under++
				}
			}
			if wrong {
				bad++
			}
		default:
			f.put(e)
		}
	}
	f.flush()
	if s := x.Stats(); s.Memberships != int64(w.memberships) {
		return "", fmt.Errorf("%d memberships at the end, the file says %d", s.Memberships, w.memberships)
	}
	return fmt.Sprintf(`"checked":%d,"queries_wrong":%d,"ranks_over":%d,"ranks_under":%d,"ranks_missing":%d`,
		n, bad, over, under, missing), f.whole()
}

// throughput replays all counted ops; thread i has the ranks r with r mod threads = i. Without share
// each thread has an index of its own: no router, but what there is to gain.
func throughput(w *workload, threads int, share bool) (string, error) {
	lanes := make([][]event, threads)
	for i := range w.events {
		if e := &w.events[i]; e.kind == kindQuery || e.kind == kindStore || e.kind == kindRemove {
			l := int(e.rank) % threads
			lanes[l] = append(lanes[l], *e)
		}
	}
	feeders := make([]feeder, threads)
	for i := range feeders {
		feeders[i] = feeder{w: w}
		if i > 0 && share {
			feeders[i].x = feeders[0].x
			continue
		}
		x, err := open(w)
		if err != nil {
			return "", err
		}
		defer x.Close()
		feeders[i].x = x
	}
	runtime.GC()
	var wg sync.WaitGroup
	var asking atomic.Int64
	own0, host0 := cpu()
	start := time.Now()
	for i, lane := range lanes {
		wg.Go(func() {
			pin(i + max(0, runtime.NumCPU()-threads))
			f := &feeders[i]
			var q kvindex.Query
			var ns time.Duration
			for j := range lane {
				e := &lane[j]
				if e.kind != kindQuery {
					f.put(e)
					continue
				}
				f.flush()
				t := time.Now()
				f.x.Overlap(w.locals[e.at:e.at+e.n], &q)
				ns += time.Since(t)
			}
			f.flush()
			asking.Add(int64(ns))
		})
	}
	wg.Wait()
	wall := time.Since(start).Seconds()
	own, host := cpu()
	own -= own0
	var errs []error
	for i := range feeders {
		errs = append(errs, feeders[i].whole())
	}
	ops := float64(w.blockOps)
	return fmt.Sprintf(`"threads":%d,"shared":%v,"wall_s":%.4f,"block_ops":%d,"mops":%.3f,"cpu_ns_per_block_op":%.2f,"other_cores":%.2f,"query_ns_per_hash":%.1f`,
		threads, share, wall, w.blockOps, ops/wall/1e6, own*1e9/ops, max(0, (host-host0-own)/wall), float64(asking.Load())/float64(max(1, w.queryHashes))), errors.Join(errs...)
}

func memory(w *workload) (string, error) {
	debug.FreeOSMemory()
	before := rss()
	x, err := open(w)
	if err != nil {
		return "", err
	}
	defer x.Close()
	f := feeder{w: w, x: x}
	for i := range w.events {
		if e := &w.events[i]; e.kind == kindStore || e.kind == kindRemove {
			f.put(e)
		}
	}
	f.flush()
	raw := rss() - before
	debug.FreeOSMemory()
	trimmed := rss() - before
	s := x.Stats()
	if s.Memberships != int64(w.memberships) {
		return "", fmt.Errorf("%d memberships at the end, the file says %d", s.Memberships, w.memberships)
	}
	m := float64(w.memberships)
	return fmt.Sprintf(`"memberships":%d,"distinct":%d,"rss_growth":%d,"rss_growth_trimmed":%d,"bytes_per_membership":%.1f,"bytes_per_membership_trimmed":%.1f,"mapped":%d`,
		w.memberships, w.resident, raw, trimmed, float64(raw)/m, float64(trimmed)/m, s.Bytes), f.whole()
}

// latency applies the first half, then the second half at rate block ops per second (0: as fast as it
// goes) while another thread looks up prompts that were stored not long ago.
func latency(w *workload, rate float64) (string, error) {
	x, err := open(w)
	if err != nil {
		return "", err
	}
	defer x.Close()
	f := feeder{w: w, x: x}
	var asked []int // events whose prompt is long enough
	for i := range w.events {
		e := &w.events[i]
		if i < w.mid && (e.kind == kindStore || e.kind == kindRemove) {
			f.put(e)
		}
		if e.kind == kindQuery && e.n >= chainQuery {
			asked = append(asked, i)
		}
	}
	f.flush()
	if len(asked) == 0 {
		return "", fmt.Errorf("no prompt of %d blocks to look up", chainQuery)
	}
	// Prompts of 50 to 800 ops of the file ago; events are more than ops in the vLLM form.
	scale := float64(len(w.events)) / float64(w.ops)
	far, near := int(800*scale), int(50*scale)
	runtime.GC()
	var at atomic.Int64
	var done atomic.Bool
	at.Store(int64(w.mid))
	total, wrote := 0, 0.0
	own0, host0 := cpu()
	began := time.Now()
	var wg sync.WaitGroup
	wg.Go(func() {
		defer done.Store(true)
		runtime.LockOSThread()
		start := time.Now()
		for i := w.mid; i < len(w.events); i++ {
			e := &w.events[i]
			if e.kind != kindStore && e.kind != kindRemove {
				continue
			}
			for rate > 0 {
				ahead := time.Duration(float64(total)/rate*1e9) - time.Since(start)
				if ahead <= 0 {
					break
				}
				if ahead > 150*time.Microsecond {
					time.Sleep(ahead - 100*time.Microsecond) //nolint:forbidigo // paces a load by the clock; there is nothing else to wait for
				}
			}
			// A store by itself, or up to 256 removals of a rank, like an engine's message.
			for {
				f.put(&w.events[i])
				total += int(w.events[i].n)
				if n := i + 1; e.kind == kindRemove && n < len(w.events) && f.n < batchEvents &&
					w.events[n].kind == kindRemove && w.events[n].rank == e.rank {
					i = n
					continue
				}
				break
			}
			f.flush()
			at.Store(int64(i))
		}
		wrote = time.Since(start).Seconds()
	})
	ns := make([]uint32, 0, 1<<24)
	var depth, ranks uint64
	rnd := uint64(88172645463325252)
	var q kvindex.Query
	for !done.Load() && len(ns) < cap(ns) {
		rnd ^= rnd << 13
		rnd ^= rnd >> 7
		rnd ^= rnd << 17
		i := int(at.Load())
		lo, _ := slices.BinarySearch(asked, i-far)
		hi, _ := slices.BinarySearch(asked, i-near)
		lo = min(lo, len(asked)-1)
		e := &w.events[asked[lo+int(rnd%uint64(max(1, hi-lo)))]]
		prompt := w.locals[e.at : e.at+chainQuery]
		t := time.Now()
		x.Overlap(prompt, &q)
		ns = append(ns, uint32(min(time.Since(t), 1<<32-1)))
		if len(ns)%64 == 0 {
			depth += uint64(q.Best())
			ranks += uint64(q.Len())
		}
	}
	wg.Wait()
	own, host := cpu()
	wall := time.Since(began).Seconds()
	if len(ns) == 0 {
		return "", errors.New("the writer was done before the first lookup")
	}
	slices.Sort(ns)
	us := func(p float64) float64 { return float64(ns[int(float64(len(ns)-1)*p)]) / 1e3 }
	k := float64(max(1, len(ns)/64))
	return fmt.Sprintf(`"target_rate":%g,"writer_mops":%.3f,"n":%d,"mean_best_depth":%.1f,"mean_ranks":%.1f,"p50_us":%.2f,"p99_us":%.2f,"p999_us":%.2f,"max_us":%.1f,"other_cores":%.2f`,
		rate, float64(total)/wrote/1e6, len(ns), float64(depth)/k, float64(ranks)/k, us(0.5), us(0.99), us(0.999), us(1),
		max(0, (host-host0-(own-own0))/wall)), f.whole()
}
