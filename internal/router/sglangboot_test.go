package router_test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/loopback"
	"github.com/dynctl/dynctl/internal/rawjson"
	"github.com/dynctl/dynctl/internal/workers"
)

// sglangBootstrap is SGLang's own bootstrap servers, and its decode engine's way to them.
type sglangBootstrap struct {
	t       *testing.T
	cmd     *exec.Cmd
	servers []string // host:port
	in      io.WriteCloser
	out     *bufio.Scanner
	stderr  bytes.Buffer
}

// found is the prefill rank that SGLang's decode engine asks for KV.
type found struct {
	Rank, DP int
	At       string
}

func startSGLangBootstrap(t *testing.T, dp ...int) *sglangBootstrap {
	interpreter := os.Getenv("DYNCTL_SGLANG")
	if interpreter == "" {
		t.Skip("skipped: DYNCTL_SGLANG names no Python with SGLang's package (e2e/engines.py sglang installs one)")
	}
	cmd := exec.Command(interpreter, filepath.Join("testdata", "sglang_bootstrap.py"))
	b := &sglangBootstrap{t: t, cmd: cmd}
	for _, n := range dp {
		cmd.Args = append(cmd.Args, strconv.Itoa(n))
	}
	cmd.Stderr = &b.stderr
	b.in, b.out = talkTo(t, cmd)
	t.Cleanup(func() { b.in.Close(); _ = cmd.Wait() })
	b.read(&b.servers)
	return b
}

func (b *sglangBootstrap) read(into any) {
	b.t.Helper()
	if !b.out.Scan() {
		_ = b.cmd.Wait() // its last words
		b.t.Fatalf("SGLang's package gave no answer: %s", &b.stderr)
	}
	if err := json.Unmarshal(b.out.Bytes(), into); err != nil {
		b.t.Fatalf("%v: %s", err, b.out.Bytes())
	}
}

// lookUp is what a decode engine makes of a body: by the rank that it names, and by the
// room alone.
func (b *sglangBootstrap) lookUp(body []byte) (byRank, byRoom *found) {
	b.t.Helper()
	fmt.Fprintf(b.in, "%s\n", body)
	var a struct {
		ByRank *found `json:"by_rank"`
		ByRoom *found `json:"by_room"`
	}
	b.read(&a)
	return a.ByRank, a.ByRoom
}

// TestSGLangBootstrapServer: the host, port, room and rank that decode engines are sent lead
// by SGLang's own bootstrap server to the prefill rank that got the other leg, whether the
// server's address was stated or learned; and the simulated server leads as it does.
// DYNCTL_SGLANG names a Python that has the package.
func TestSGLangBootstrapServer(t *testing.T) {
	t.Parallel()
	const dp = 3
	b := startSGLangBootstrap(t, dp, dp)
	const fleet = "2p:profile=instant,engine=sglang,block=16,dp=3+1d:profile=instant,engine=sglang,block=16"

	t.Run("its own", func(t *testing.T) {
		p := &tap{}
		prefills := map[string]int{} // name: which server is its own
		var engines []string         // host:port of the prefills
		specs := func(in []workers.Spec) []workers.Spec {
			to := make([]string, len(in))
			for i := range in {
				to[i] = in[i].URL.Host
			}
			in = p.specs(t)(in)
			for i := range in {
				if in[i].Role != workers.Prefill {
					continue
				}
				n := len(prefills)
				engines = append(engines, to[i])
				prefills[in[i].Name] = n
				host, port, _ := strings.Cut(b.servers[n], ":")
				number, err := strconv.Atoi(port)
				if err != nil {
					t.Fatal(err)
				}
				in[i].Bootstrap = &workers.Bootstrap{Host: host, Port: number}
				if n == 1 {
					in[i].Bootstrap = nil // the engine reports it
				}
			}
			return in
		}
		p.set(func(engine string, w http.ResponseWriter, q *http.Request, _ []byte) bool {
			n, prefill := prefills[engine]
			switch {
			case prefill && strings.HasSuffix(q.URL.Path, "server_info"):
				_, port, _ := strings.Cut(b.servers[n], ":")
				_, info := ask(t, engines[n]+q.URL.Path)
				w.Write(bootstrapPort.ReplaceAll(info, []byte("${1}"+port)))
			case q.URL.Path == "/v1/completions": // no KV is moved
				fmt.Fprint(w, `{"id":"a","object":"text_completion","created":1,"model":"sim","choices":[{"index":0,"text":"a","finish_reason":"length"}],"usage":{"prompt_tokens":40,"completion_tokens":1,"total_tokens":41}}`)
			default:
				return false
			}
			return true
		})
		r := startWith(t, loopback.Options{Fleet: fleet, Specs: specs})
		seen := map[string]bool{}
		for n := range 24 {
			p.reset()
			if a := r.post("/v1/completions", object{"model": "sim", "prompt": ids(40, n), "max_tokens": 5}); a.status != http.StatusOK {
				t.Fatalf("%s", a)
			}
			legs := p.legs()
			i := slices.IndexFunc(legs, func(c tapped) bool { _, ok := prefills[c.engine]; return ok })
			if len(legs) != 2 || i < 0 {
				t.Fatalf("legs %+v", legs)
			}
			prefill, decode := legs[i], legs[1-i]
			room, _ := rawjson.Value(prefill.body).Get("bootstrap_room").Int()
			if got, _ := rawjson.Value(decode.body).Get("bootstrap_room").Int(); got != room {
				t.Fatalf("rooms %d and %d", room, got)
			}
			rank := room % dp // by which SGLang's prefill server chooses its rank
			want := found{Rank: rank, DP: dp, At: fmt.Sprintf("10.0.%d.%d:%d", prefills[prefill.engine], rank, 5000+rank)}
			if byRank, byRoom := b.lookUp(decode.body); byRank == nil || byRoom == nil || *byRank != want || *byRoom != want {
				t.Errorf("%s: %+v by its rank, %+v by its room, want %+v", decode.body, byRank, byRoom, want)
			}
			seen[want.At] = true
		}
		if len(seen) != 2*dp {
			t.Errorf("of %d ranks those at %v were asked", 2*dp, seen)
		}
	})

	t.Run("the simulated one", func(t *testing.T) {
		r, p := tappedRig(t, fleet)
		r.post("/v1/completions", object{"model": "sim", "prompt": ids(40, 1), "max_tokens": 5})
		legs := p.legs()
		if len(legs) != 2 {
			t.Fatalf("legs %+v", legs)
		}
		i := slices.IndexFunc(legs, func(c tapped) bool { return rawjson.Value(c.body).Get("disagg_prefill_dp_rank").Exists() })
		if i < 0 {
			t.Fatalf("legs %+v", legs)
		}
		body := rawjson.Value(legs[i].body)
		at := body.Get("bootstrap_host").String() + ":" + body.Get("bootstrap_port").String()
		room, _ := body.Get("bootstrap_room").Int()
		want := found{Rank: room % dp, DP: dp, At: at}
		if byRank, byRoom := b.lookUp(legs[i].body); byRank == nil || byRoom == nil || *byRank != want || *byRoom != want {
			t.Errorf("%s: %+v by its rank, %+v by its room, want %+v", legs[i].body, byRank, byRoom, want)
		}
		const layout = "/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"
		for _, path := range []string{
			"/health", "/route", layout, "/route?prefill_dp_rank=0",
			"/route?prefill_dp_rank=2&prefill_cp_rank=0&target_tp_rank=0&target_pp_rank=0",
			"/route?prefill_dp_rank=3&prefill_cp_rank=0&target_tp_rank=0&target_pp_rank=0",
			"/route?prefill_dp_rank=0&prefill_cp_rank=0&target_tp_rank=1&target_pp_rank=0",
		} {
			status, own := ask(t, b.servers[0]+path)
			if got, simulated := ask(t, at+path); got != status {
				t.Errorf("%s: %d, SGLang's %d", path, got, status)
			} else if path == layout {
				for name, value := range rawjson.Value(simulated).Members() {
					if own := rawjson.Value(own).Get(string(name)); !bytes.Equal(own, value) {
						t.Errorf("%s is %s, SGLang's %q", name, value, own)
					}
				}
			}
		}
	})
}

var bootstrapPort = regexp.MustCompile(`("disaggregation_bootstrap_port": ?)\d+`)

func ask(t *testing.T, at string) (status int, body []byte) {
	t.Helper()
	a, err := http.Get("http://" + at)
	if err != nil {
		t.Error(err)
		return 0, nil
	}
	defer a.Body.Close()
	body, err = io.ReadAll(a.Body)
	if err != nil {
		t.Error(err)
	}
	return a.StatusCode, body
}
