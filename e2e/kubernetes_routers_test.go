package e2e

import (
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"syscall"
	"testing"
)

// service carries each connection on to one of its routers in turn, as a Service does:
// connections that exist stay where they are when the list changes.
type service struct {
	mu      sync.Mutex
	routers []string
	next    int
}

func (s *service) set(routers ...*router) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.routers = nil
	for _, r := range routers {
		s.routers = append(s.routers, strings.TrimPrefix(r.url, "http://"))
	}
}

func (s *service) pick() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.next++
	return s.routers[s.next%len(s.routers)]
}

// listen is the service's URL.
func (s *service) listen(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var conns sync.WaitGroup
	conns.Go(func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("tcp", s.pick())
			if err != nil {
				in.Close()
				continue
			}
			for _, way := range [][2]net.Conn{{in, out}, {out, in}} {
				conns.Go(func() {
					_, _ = io.Copy(way[0], way[1])
					in.Close()
					out.Close()
				})
			}
		}
	})
	t.Cleanup(func() { l.Close() })
	return "http://" + l.Addr().String()
}

// TestKubernetesRouters: a rolling update of the routers themselves, as the Deployment
// has it, under load: a new one is ready before an old one is asked to end, and the Service
// leaves it out some time after that. Clients keep their connections and send each request
// once. No request is lost.
func TestKubernetesRouters(t *testing.T) {
	need(t)
	engines := simulate(t, "2p2d")
	var args []string
	for role, addresses := range engines {
		for i, a := range addresses {
			args = append(args, "--"+role, fmt.Sprintf("http://%s,name=pair-one-%s-%d", a, role, i))
		}
	}
	args = append(args, "--leave-time", "3s")
	old := []*router{serve(t, args...), serve(t, args...)}
	var s service
	s.set(old...)
	st, err := old[0].admin.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	l := startLoad(t, s.listen(t), st.Models[0], 8)
	more := func(r *router, what string) {
		t.Helper()
		from := l.requests.Load()
		r.until("requests go on "+what, func() bool { return l.requests.Load() >= from+100 })
	}
	more(old[0], "before anything")
	current := old
	for i := range old {
		fresh := serve(t, args...)
		s.set(append(current, fresh)...)
		more(fresh, "with one router more")
		if err := old[i].process.Signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		fresh.until("the old router is not ready", func() bool {
			st, err := old[i].admin.Status(t.Context())
			return err == nil && st.State == "draining"
		})
		more(fresh, "before the Service leaves the old router out")
		current = append(current[1:len(current):len(current)], fresh)
		s.set(current...)
		fresh.until("the old router has ended", func() bool {
			_, err := old[i].admin.Status(t.Context())
			return err != nil
		})
		more(fresh, "without the old router")
	}
	l.stop()
	l.done.Wait()
	if len(l.failed) > 0 {
		t.Errorf("%d of %d requests failed, the first: %s", len(l.failed), l.requests.Load(), l.failed[0])
	}
	t.Logf("%d requests", l.requests.Load())
}
