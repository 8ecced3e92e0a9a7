package natsbus

import (
	"bufio"
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/router/replicas"
)

// processEnv makes the test binary a router's process: its number and the address of the
// first router.
const processEnv = "DYNCTL_TEST_REPLICA"

// TestProcess is that process. It ends when its standard input does.
func TestProcess(t *testing.T) {
	text := os.Getenv(processEnv)
	if text == "" {
		t.Skip("it is started by TestKilledProcess")
	}
	var n int
	var first string
	if _, err := fmt.Sscan(text, &n, &first); err != nil {
		t.Fatal(err)
	}
	r := start(t, n, embed(t, Cluster{Name: fmt.Sprint("router-", n), Listen: "127.0.0.1:0", Routes: []string{first}, Log: slog.New(slog.DiscardHandler)}))
	defer r.end()
	_, _ = fmt.Fprintln(os.Stdout, "joined")
	_, _ = bufio.NewReader(os.Stdin).ReadString('\n')
}

type process struct {
	*exec.Cmd
	end func() error
}

func startProcess(t *testing.T, n int, first string) *process {
	t.Helper()
	cmd := exec.Command(os.Args[0], "-test.run=^TestProcess$", "-test.timeout=0")
	cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%d %s", processEnv, n, first))
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
	p := &process{Cmd: cmd, end: in.Close}
	t.Cleanup(func() {
		_ = p.end()
		_ = p.Process.Signal(syscall.SIGCONT)
		_ = p.Wait()
	})
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		if strings.HasPrefix(lines.Text(), "joined") {
			return p
		}
	}
	t.Fatalf("the process ended: %v", lines.Err())
	return nil
}

// stopped is how long a process is stopped.
const stopped = 5 * time.Second

// TestKilledProcess: the load of a process that is killed, or stopped and continued, is gone
// and comes back, and is never negative, doubled or in part. The load of the others stays.
func TestKilledProcess(t *testing.T) {
	if testing.Short() {
		t.Skip("starts processes")
	}
	a := start(t, 0, embed(t, Cluster{Name: "router-0", Listen: "127.0.0.1:0"}))
	defer a.end()
	first := a.bus.Addr().String()
	var list []*process
	for _, n := range []int{1, 3, 5} {
		list = append(list, startProcess(t, n, first))
	}
	sum := func() int { return sumOf(a.ex).Requests }
	// Loads are 2, 8 and 32, so that each sum shows whose load counts, and a doubled one is none.
	until := func(what string, want int) {
		t.Helper()
		began := time.Now()
		eventually(t, what, func() bool {
			got := sum()
			if got&^(2|8|32) != 0 {
				t.Fatalf("the sum is %d", got)
			}
			return got == want
		})
		t.Logf("%s after %v", what, time.Since(began))
	}
	until("all", 2|8|32)
	if err := list[0].Process.Kill(); err != nil {
		t.Fatal(err)
	}
	until("the killed one gone", 8|32)
	if err := list[1].Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	until("the stopped one gone", 32)
	over := time.After(stopped)
	eventually(t, "the end of the stop", func() bool {
		if got := sum(); got != 32 {
			t.Fatalf("the sum is %d", got)
		}
		select {
		case <-over:
			return true
		default:
			return false
		}
	})
	if err := list[1].Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	until("the continued one back", 8|32)
	startProcess(t, 1, first)
	until("a new one in the place of the killed one", 2|8|32)
}

// BenchmarkFourRouters is what four routers take over four servers while each of 128 ranks changes
// at every router all the time, in one process: a router's share of a core, and what they send.
func BenchmarkFourRouters(b *testing.B) {
	const routers, ranks = 4, 128
	list := make([]replicas.Rank, ranks)
	for i := range list {
		list[i] = replicas.RankOf("http://engine", i)
	}
	var buses [routers]*Bus
	ctx, cancel := context.WithCancel(b.Context())
	var running sync.WaitGroup
	var sees [routers]*replicas.Exchange
	for i := range buses {
		c := Cluster{Name: fmt.Sprint("router-", i), Listen: "127.0.0.1:0", Log: slog.New(slog.DiscardHandler)}
		if i > 0 {
			c.Routes = []string{buses[0].Addr().String()}
		}
		var err error
		if buses[i], err = Embed(c); err != nil {
			b.Fatal(err)
		}
		n := i
		x, err := replicas.NewExchange(replicas.Identity{Fleet: "a", Origin: c.Name, Epoch: time.Now()}, buses[i], time.Now, func(into []replicas.Row) []replicas.Row {
			for _, r := range list {
				n++
				into = append(into, replicas.Row{Rank: r, Load: replicas.Load{Requests: 1 + n%50, Answering: n % 20, PrefillTokens: n % 100_000, DecodeBlocks: n % 9000, FreshTokens: n % 100_000}})
			}
			return into
		}, replicas.More{})
		if err != nil {
			b.Fatal(err)
		}
		x.View().SetRanks(list)
		sees[i] = x
		running.Go(func() { x.Run(ctx) })
	}
	for _, x := range sees {
		for live := 0; live < routers-1; {
			<-time.After(replicas.Pace)
			live = 0
			for _, o := range x.View().Snapshot(time.Now()).Origins {
				if o.Live && o.Complete {
					live++
				}
			}
		}
	}
	used := func() (cpu time.Duration, sent uint64) {
		var u syscall.Rusage
		if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
			b.Fatal(err)
		}
		for _, bus := range buses {
			sent += bus.conn.Stats().OutBytes
		}
		return time.Duration(u.Utime.Nano() + u.Stime.Nano()), sent
	}
	began := time.Now()
	cpu, sent := used()
	for b.Loop() {
		<-time.After(time.Second)
	}
	took := time.Since(began).Seconds()
	cpuNow, sentNow := used()
	b.ReportMetric(100*(cpuNow-cpu).Seconds()/took/routers, "%-of-a-core")
	b.ReportMetric(float64(sentNow-sent)*(routers-1)/took/1000, "KB/s-in-all")
	cancel()
	running.Wait()
	for _, bus := range buses {
		_ = bus.Close()
	}
}
