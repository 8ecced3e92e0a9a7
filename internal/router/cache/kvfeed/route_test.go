package kvfeed

import (
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/kvevent"
)

// hubOf is a listener of ranks, as (worker, dp, host, topic).
func hubOf(ranks ...[4]string) *hub {
	h := &hub{}
	for _, k := range ranks {
		r := &rank{key: Key{Worker: k[0], DP: int(k[1][0] - '0'), Host: k[2]}, boundTopic: k[3]}
		r.label = r.key.String()
		h.add(r)
	}
	return h
}

// TestRoute: which rank a message is of that comes to a shared listener.
func TestRoute(t *testing.T) {
	t.Parallel()
	named := hubOf([4]string{"a", "0", "10.0.0.1", "kv@10.0.0.1"}, [4]string{"b", "0", "10.0.0.11", "kv@10.0.0.11"})
	nodes := hubOf([4]string{"a", "0", "10.0.0.1", "kv@10.0.0.1"}, [4]string{"a", "1", "10.0.0.1", "kv@10.0.0.1"},
		[4]string{"b", "0", "10.0.0.2", "kv@10.0.0.2"}, [4]string{"b", "1", "10.0.0.2", "kv@10.0.0.2"})
	same := hubOf([4]string{"a", "0", "10.0.0.1", ""}, [4]string{"b", "0", "10.0.0.2", ""})
	beside := hubOf([4]string{"a", "0", "10.0.0.1", "kv"}, [4]string{"b", "0", "10.0.0.1", "kv"})
	models := hubOf([4]string{"a", "0", "", "kv@h"}, [4]string{"b", "0", "", "kv@h@m"})
	ports := hubOf([4]string{"a", "0", "10.0.0.1", "kv@10.0.0.1:8000"}, [4]string{"b", "0", "10.0.0.1", "kv@10.0.0.1:80"})
	six := hubOf([4]string{"a", "0", "fd00::1", "kv@fd00::1"}, [4]string{"b", "0", "fd00::1:5", "kv@fd00::1:5"}, [4]string{"c", "0", "fd00::2", "kv@[fd00::2]"})
	// Three ranks that begin at 4, of which it is known.
	placed := hubOf([4]string{"a", "0", "10.0.0.1", ""}, [4]string{"a", "1", "10.0.0.1", ""}, [4]string{"a", "2", "10.0.0.1", ""})
	for _, r := range *placed.ranks.Load() {
		r.key.Start = 4
	}
	for _, tt := range []struct {
		name  string
		h     *hub
		topic string
		said  int32
		peer  string
		want  string
	}{
		{"a host that begins as another", named, "kv@10.0.0.11@m", 0, "10.0.0.11", "b/dp0"},
		{"a host that nobody has", named, "kv@10.0.0.12@m", 0, "10.0.0.1", ""},
		{"the host as it is", named, "kv@10.0.0.1@m", 0, "10.0.0.1", "a/dp0"},
		{"a host with a port", named, "kv@10.0.0.1:8000@m", 0, "192.168.0.1", "a/dp0"},
		{"less than a host", named, "kv", 0, "10.0.0.1", ""},
		{"half a word", named, "kvx@10.0.0.1", 0, "10.0.0.1", ""},
		{"rank 3 of a deployment, alone in its worker", named, "kv@10.0.0.11@m", 3, "10.0.0.11", "b/dp0"},
		{"no rank claimed", named, "kv@10.0.0.1", -1, "10.0.0.1", "a/dp0"},
		{"first node", nodes, "kv@10.0.0.1@m", 1, "10.0.0.1", "a/dp1"},
		{"second node counts on", nodes, "kv@10.0.0.2@m", 3, "10.0.0.2", "b/dp1"},
		{"second node counts on, its first", nodes, "kv@10.0.0.2@m", 2, "10.0.0.2", "b/dp0"},
		{"first of those from 4 on", placed, "", 4, "10.0.0.1", "a/dp0"},
		{"last of those from 4 on", placed, "", 6, "10.0.0.1", "a/dp2"},
		{"before those from 4 on", placed, "", 1, "10.0.0.1", ""},
		{"one of two, not said which", nodes, "kv@10.0.0.2@m", -1, "10.0.0.2", ""},
		{"no topics, by the peer", same, "", 0, "10.0.0.2", "b/dp0"},
		{"no topics, rank 1 of a deployment", same, "", 1, "10.0.0.2", "b/dp0"},
		{"the topic's host before the peer's", same, "kv@10.0.0.2@m", 0, "10.0.0.1", "b/dp0"},
		{"a peer that nobody is", same, "", 0, "10.0.0.9", ""},
		{"two workers on a host with one topic", beside, "kv", 1, "10.0.0.1", ""},
		{"the longer topic", models, "kv@h@m", 0, "", "b/dp0"},
		{"another model", models, "kv@h@mm", 0, "", "a/dp0"},
		{"a port that begins as another", ports, "kv@10.0.0.1:8000@m", 0, "", "a/dp0"},
		{"a shorter port", ports, "kv@10.0.0.1:80@m", 0, "", "b/dp0"},
		{"IPv6", six, "kv@fd00::1@m", 0, "", "a/dp0"},
		{"IPv6 that looks like a port", six, "kv@fd00::1:5@m", 0, "", "b/dp0"},
		{"IPv6 with a port", six, "kv@[fd00::2]:8000@m", 0, "", "c/dp0"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := ""
			if r := tt.h.route([]byte(tt.topic), &kvevent.Batch{Rank: tt.said}, tt.peer, nil); r != nil {
				got = r.label
			}
			if got != tt.want {
				t.Errorf("%q of rank %d from %s is of %q, want %q", tt.topic, tt.said, tt.peer, got, tt.want)
			}
		})
	}
}

// FuzzTopic: a rank's topic fits a message's only where it is the whole of it
// up to an @, or up to a port.
func FuzzTopic(f *testing.F) {
	for _, s := range [][2]string{{"kv@10.0.0.1", "kv@10.0.0.11@m"}, {"kv@h", "kv@h:80@m"}, {"", "x"}, {"kv@", "kv"}, {"kv@[::1]", "kv@[::1]:5"}, {"@@", "@:1@"}} {
		f.Add(s[0], s[1])
	}
	f.Fuzz(func(t *testing.T, rank, topic string) {
		fits := topicFits(rank, []byte(topic))
		whole := strings.TrimSuffix(rank, "@")
		switch {
		case whole == "" || topic == whole || strings.HasPrefix(topic, whole+"@"):
			if !fits {
				t.Errorf("%q does not fit %q", rank, topic)
			}
		case fits && !strings.Contains(topic, ":"):
			t.Errorf("%q fits %q", rank, topic)
		}
		topicHost([]byte(topic))
	})
}

// FuzzRoute: however workers and topics are drawn, a message that an engine sends
// under the topic of its own host is of its worker's rank, counted as a deployment
// counts them, and never of another worker.
func FuzzRoute(f *testing.F) {
	hosts := []string{"10.0.0.1", "10.0.0.11", "10.0.0.111", "110.0.0.1", "h", "h1", "h1.x", "fd00::1", "fd00::1:1"}
	rng := rand.New(rand.NewPCG(7, 7))
	for range 500 {
		f.Add(rng.Uint64(), uint16(rng.Uint32()), uint8(rng.UintN(3)), uint8(rng.UintN(9)), uint8(rng.UintN(9)), uint8(rng.UintN(8)))
	}
	// order shuffles the workers, one for each bit of with that is set.
	f.Fuzz(func(t *testing.T, order uint64, with uint16, more, from, peer, said uint8) {
		var ranks [][4]string
		dp, known, host := 1+int(more%4), false, hosts[int(from)%len(hosts)]
		for _, i := range rand.New(rand.NewPCG(order, 7)).Perm(len(hosts)) {
			if with>>i&1 == 0 {
				continue
			}
			known = known || hosts[i] == host
			topic := "kv@" + hosts[i]
			if order>>i&1 == 0 {
				topic += "@m"
			}
			for d := range dp {
				ranks = append(ranks, [4]string{hosts[i], string(rune('0' + d)), hosts[i], topic})
			}
		}
		r := hubOf(ranks...).route([]byte("kv@"+host+"@m"), &kvevent.Batch{Rank: int32(said)}, hosts[int(peer)%len(hosts)], nil)
		switch {
		case !known && r != nil:
			t.Errorf("a batch of %s, where no worker is, went to %s of %v", host, r.label, ranks)
		case known && r == nil:
			t.Errorf("rank %d of %s went to nobody of %v", said, host, ranks)
		case known && (r.key.Worker != host || r.key.DP != int(said)%dp):
			t.Errorf("rank %d of %s went to %s of %v", said, host, r.label, ranks)
		}
	})
}
