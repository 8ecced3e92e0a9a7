package e2e

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// retrying are clients that send a request again when it fails before the first byte of its
// answer.
type retrying struct {
	answered, retries, cut atomic.Int64 // cut are answers that broke off after their first byte
	mu                     sync.Mutex
	failed                 []string
	stop                   context.CancelFunc
	done                   sync.WaitGroup
}

// triesOfClients is more than a client needs that finds the dead one of four routers in turn.
const triesOfClients = 8

func startRetrying(t *testing.T, url string, clients int) *retrying {
	ctx, stop := context.WithCancel(t.Context())
	l := &retrying{stop: stop}
	for client := range clients {
		l.done.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				l.ask(url, fmt.Sprintf(`{"model":"sim","stream":true,"max_tokens":24,"messages":[{"role":"user","content":"%d %d %s"}]}`, client, n, strings.Repeat("some words of a prompt ", 40)))
			}
		})
	}
	t.Cleanup(func() { stop(); l.done.Wait() })
	return l
}

// ask sends one request until an answer begins, and reads it to its end.
func (l *retrying) ask(url, body string) {
	var failure string
	for range triesOfClients {
		resp, err := http.Post(url+"/v1/chat/completions", "application/json", strings.NewReader(body))
		if err != nil {
			failure = err.Error()
			l.retries.Add(1)
			continue
		}
		raw, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		switch {
		case resp.StatusCode != http.StatusOK:
			failure = fmt.Sprintf("status %d: %.300s", resp.StatusCode, raw)
			l.retries.Add(1)
			continue
		case err != nil:
			failure = err.Error()
			l.cut.Add(1)
			continue
		case !strings.Contains(string(raw), "[DONE]"):
			l.fail(fmt.Sprintf("an answer without an end: %.300s", raw))
		default:
			l.answered.Add(1)
		}
		return
	}
	l.fail(failure)
}

func (l *retrying) fail(text string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.failed = append(l.failed, text)
}

// TestReplicasKilled: four routers behind a plain round-robin balancer, of which one is killed
// with SIGKILL under load. Clients that retry see no failure before a first byte, and the other
// routers no longer count its load.
func TestReplicasKilled(t *testing.T) {
	need(t)
	engines := simulate(t, "4a")
	var ports []string
	for range 4 {
		ports = append(ports, freeAddr(t))
	}
	var routers []*router
	for i := range ports {
		args := []string{"--replicas", ports[0], "--replicas-listen", ports[i], "--replicas-name", fmt.Sprint("router-", i)}
		for n, a := range engines["aggregated"] {
			args = append(args, "--worker", fmt.Sprintf("http://%s,name=w%d", a, n))
		}
		routers = append(routers, serve(t, args...))
	}
	live := func(n int) func() bool {
		return func() bool {
			for _, r := range routers {
				if r.killed {
					continue
				}
				s, err := r.admin.Status(t.Context())
				if err != nil || s.Replicas == nil || s.Replicas.Live != n {
					return false
				}
			}
			return true
		}
	}
	routers[0].until("all routers know each other", live(3))
	var s service
	s.set(routers...)
	l := startRetrying(t, s.listen(t), 16)
	more := func(what string) {
		t.Helper()
		from := l.answered.Load()
		routers[0].until("answers "+what, func() bool { return l.answered.Load() >= from+300 })
	}
	more("before the kill")
	routers[2].kill()
	routers[0].until("the load of the killed router is gone", live(2))
	more("after the kill")
	l.stop()
	l.done.Wait()
	for _, f := range l.failed {
		t.Errorf("failed: %s", f)
	}
	if l.retries.Load() == 0 {
		t.Error("no request met the killed router")
	}
	t.Logf("%d answers, %d tries again, %d answers that broke off after their first byte", l.answered.Load(), l.retries.Load(), l.cut.Load())
}

// TestReplicasCost prints what sharing takes of a router with 128 ranks and without requests: CPU
// and memory of one without --replicas, of one with it that finds no other, and of one of four.
func TestReplicasCost(t *testing.T) {
	need(t)
	port := thousandfold(t, simulate(t, "1a")["aggregated"][0])
	var args []string
	for n := range 128 {
		args = append(args, "--worker", fmt.Sprintf("http://127.2.0.%d:%d,name=w%d", n+1, port, n))
	}
	const idle = 10 * time.Second
	measure := func(what string, replicas ...[]string) {
		var routers []*router
		for _, own := range replicas {
			routers = append(routers, serveUntil(t, "128 ranks are usable", func(r *router) bool {
				s, err := r.admin.Status(t.Context())
				return err == nil && s.Workers.Usable == 128
			}, append(own, args...)...))
		}
		r := routers[0]
		r.until("all know each other", func() bool {
			s, err := r.admin.Status(t.Context())
			return err == nil && (s.Replicas == nil || s.Replicas.Live == len(routers)-1)
		})
		before, began := counter(t, r.metrics, "process_cpu_seconds_total"), time.Now()
		r.until("the time is over", func() bool { return time.Since(began) > idle })
		used := counter(t, r.metrics, "process_cpu_seconds_total") - before
		t.Logf("%s: %.2f %% of a core, %.0f MB", what, 100*used/time.Since(began).Seconds(), counter(t, r.metrics, "process_resident_memory_bytes")/1e6)
		for _, r := range routers {
			r.kill()
		}
	}
	share := func(n int) (list [][]string) {
		first := freeAddr(t)
		for i := range n {
			own := first
			if i > 0 {
				own = freeAddr(t)
			}
			list = append(list, []string{"--replicas", first, "--replicas-listen", own, "--replicas-name", fmt.Sprint("router-", i)})
		}
		return list
	}
	measure("without --replicas", nil)
	measure("alone with --replicas", share(1)...)
	measure("one of four", share(4)...)
}
