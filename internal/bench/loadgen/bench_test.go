package loadgen

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// stubEnv makes the test binary a stub engine in a process of its own, so that
// its scheduler and garbage are not the client's.
const stubEnv = "DYNCTL_LOADGEN_STUB"

func TestMain(m *testing.M) {
	if os.Getenv(stubEnv) != "" {
		if err := serveStub(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	goleak.VerifyTestMain(m)
}

// serveStub serves until its input ends.
func serveStub() error {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	s := NewStub(ln)
	defer s.Close()
	if _, err := fmt.Fprintln(os.Stdout, ln.Addr()); err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

// otherProcess starts a stub in a process of its own.
func otherProcess(t testing.TB) string {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), stubEnv+"=1")
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		in.Close()
		if err := cmd.Wait(); err != nil {
			t.Error(err)
		}
	})
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	return "http://" + strings.TrimSpace(line)
}

// cpu is what this process has used.
func cpu(t testing.TB) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkClosedLoop is the client's ceiling on this machine, which it shares
// with the stub.
func BenchmarkClosedLoop(b *testing.B) {
	url := otherProcess(b)
	b.ReportAllocs()
	b.ResetTimer()
	before := cpu(b)
	sum, err := Run(b.Context(), Options{Base: url, Concurrency: 32, Keep: 1}, Repeated(b.N))
	if err != nil || sum.Failed > 0 {
		b.Fatal(err, sum.Errors)
	}
	b.ReportMetric(float64(sum.Requests)/sum.Wall.Seconds(), "rps")
	b.ReportMetric(float64((cpu(b)-before).Microseconds())/float64(b.N), "client_cpu_us/op")
}

// BenchmarkOpenLoop sends at half of the promised 5,000 a second and reports
// how late. BenchmarkWake beside it says how much of that is the machine.
func BenchmarkOpenLoop(b *testing.B) {
	for _, a := range []Arrival{Constant, Poisson} {
		b.Run(string(a), func(b *testing.B) {
			url := otherProcess(b)
			plan, err := Schedule(max(b.N, 2), 2500, a, 0, 1)
			if err != nil {
				b.Fatal(err)
			}
			b.ReportAllocs()
			b.ResetTimer()
			before := cpu(b)
			sum, err := Run(b.Context(), Options{Base: url, Schedule: plan, Keep: 1}, Repeated(len(plan)))
			if err != nil || sum.Failed > 0 {
				b.Fatal(err, sum.Errors)
			}
			b.ReportMetric(float64((cpu(b)-before).Microseconds())/float64(b.N), "client_cpu_us/op")
			b.ReportMetric(sum.Achieved*2500, "rps")
			b.ReportMetric(sum.Dispatch.P50*1000, "dispatch_p50_us")
			b.ReportMetric(sum.Dispatch.P99*1000, "dispatch_p99_us")
			b.ReportMetric(sum.Dispatch.P999*1000, "dispatch_p999_us")
		})
	}
}

// BenchmarkWake is how late a thread that does nothing else wakes on this
// machine, 2,500 times a second: no client can be earlier.
func BenchmarkWake(b *testing.B) {
	var late []time.Duration
	done := make(chan struct{})
	go func() { // a thread of its own, which ends with it
		defer close(done)
		runtime.LockOSThread()
		punctual()
		start := time.Now()
		for i := range b.N {
			at := time.Duration(i) * 400 * time.Microsecond
			for d := at - time.Since(start); d > 0; d = at - time.Since(start) {
				nap(d)
			}
			late = append(late, time.Since(start)-at)
		}
	}()
	<-done
	slices.Sort(late)
	b.ReportMetric(float64(late[len(late)/2].Nanoseconds())/1000, "late_p50_us")
	b.ReportMetric(float64(late[len(late)*99/100].Nanoseconds())/1000, "late_p99_us")
}

// heap is what is in use after a collection, in bytes.
func heap() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// TestMemoryIsFlat holds the memory at the end against that after a tenth of
// the requests. DYNCTL_LOADGEN_REQUESTS=1000000 makes it the whole million.
func TestMemoryIsFlat(t *testing.T) {
	n := 30000
	if v := os.Getenv("DYNCTL_LOADGEN_REQUESTS"); v != "" {
		var err error
		if n, err = strconv.Atoi(v); err != nil || n < 1000 {
			t.Fatalf("DYNCTL_LOADGEN_REQUESTS=%s: not a number of at least 1000", v)
		}
	}
	url := otherProcess(t)
	var early, late uint64
	ended := 0
	sum, err := Run(t.Context(), Options{Base: url, Concurrency: 16, Keep: 10, OnResult: func(*Result) {
		switch ended++; ended {
		case n / 10:
			early = heap()
		case n - 1:
			late = heap()
		}
	}}, Repeated(n))
	if err != nil || sum.Requests != n {
		t.Fatal(err, sum.Requests, sum.Errors)
	}
	t.Logf("heap %.2f MiB after %d requests, %.2f MiB after %d; %.0f requests/s", float64(early)/(1<<20), n/10, float64(late)/(1<<20), n, float64(n)/sum.Wall.Seconds())
	if late > early+256<<10 {
		t.Errorf("heap grew from %d bytes after %d requests to %d after %d", early, n/10, late, n)
	}
}
