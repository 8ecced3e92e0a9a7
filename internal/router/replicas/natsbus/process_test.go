package natsbus

import (
	"bufio"
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"slices"
	"strings"
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
	if err := list[1].Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	until("the continued one back", 8|32)
	startProcess(t, 1, first)
	until("a new one in the place of the killed one", 2|8|32)
}

// BenchmarkChangeToView measures the time from a change of one router's load to its effect in
// the view of another, over two servers.
func BenchmarkChangeToView(b *testing.B) {
	var buses [2]*Bus
	var ex [2]*replicas.Exchange
	load := make(chan int, 1)
	own := 0
	heard := make(chan int, 64)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	for i := range buses {
		c := Cluster{Name: fmt.Sprint("router-", i), Listen: "127.0.0.1:0", Log: slog.New(slog.DiscardHandler)}
		if i == 1 {
			c.Routes = []string{buses[0].Addr().String()}
		}
		var err error
		if buses[i], err = Embed(c); err != nil {
			b.Fatal(err)
		}
		defer buses[i].Close()
		more := replicas.More{}
		if i == 1 {
			more.Heard = func(*replicas.Message) {
				select {
				case heard <- sumOf(ex[1]).Requests:
				default:
				}
			}
		}
		if ex[i], err = replicas.NewExchange(replicas.Identity{Fleet: "a", Origin: fmt.Sprint(i), Epoch: time.Now()}, buses[i], time.Now, func(into []replicas.Row) []replicas.Row {
			if i > 0 {
				return into
			}
			select {
			case own = <-load:
			default:
			}
			return append(into, replicas.Row{Rank: rank, Load: replicas.Load{Requests: own}})
		}, more); err != nil {
			b.Fatal(err)
		}
		ex[i].View().SetRanks([]replicas.Rank{rank})
	}
	go func() { defer close(done); ex[0].Run(ctx) }()
	defer func() { cancel(); <-done }()
	var took []time.Duration
	for n := 1; b.Loop(); n++ {
		began := time.Now()
		load <- n
		for got := range heard {
			if got == n {
				break
			}
		}
		took = append(took, time.Since(began))
		// Changes come at any time of the rhythm.
		<-time.After(time.Duration(n*37%50) * time.Millisecond)
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Milliseconds()), "ms-p50")
	b.ReportMetric(float64(took[len(took)*99/100].Milliseconds()), "ms-p99")
}
