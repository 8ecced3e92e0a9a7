package sim_test

import (
	"context"
	"encoding/json"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/dynctl/dynctl/internal/workers/sim"
)

type sglAnswer struct {
	Text string
	Meta struct {
		FinishReason     object `json:"finish_reason"`
		CompletionTokens int    `json:"completion_tokens"`
		CachedTokens     int    `json:"cached_tokens"`
		DPRank           int    `json:"dp_rank"`
	} `json:"meta_info"`
}

func generate(t *testing.T, e *sim.Engine, prompt []int, extra object) (int, string) {
	t.Helper()
	body := object{"input_ids": prompt, "sampling_params": object{"max_new_tokens": 12, "ignore_eos": true}}
	for k, v := range extra {
		body[k] = v
	}
	status, b, err := tryPost(t.Context(), e.URL()+"/generate", body)
	if err != nil {
		return 0, err.Error()
	}
	return status, string(b)
}

func TestSGLangRendezvous(t *testing.T) {
	r := start(t, "1p1d1a:engine=sglang,profile=instant,block=1,kv_blocks=4096,dp=2,bootstrap_wait=300ms")
	p, d, a := r.Engine(0), r.Engine(1), r.Engine(2)
	boot := p.Worker().Bootstrap
	prompt := ids(40, 3)
	status, b := generate(t, a, prompt, nil)
	if status != 200 {
		t.Fatal(status, b)
	}
	want := decode[sglAnswer](t, []byte(b)).Text
	triple := func(room int) object {
		return object{"bootstrap_host": boot.Host, "bootstrap_port": boot.Port, "bootstrap_room": room}
	}
	legs := func(room int) (ps int, pb string, ds int, db string) {
		var wg sync.WaitGroup
		wg.Add(1)
		go func() {
			defer wg.Done()
			ps, pb = generate(t, p, prompt, triple(room))
		}()
		ds, db = generate(t, d, prompt, triple(room))
		wg.Wait()
		return ps, pb, ds, db
	}
	ps, pb, ds, db := legs(7)
	if ps != 200 || ds != 200 {
		t.Fatalf("prefill %d %s\ndecode %d %s", ps, pb, ds, db)
	}
	if got := decode[sglAnswer](t, []byte(db)); got.Text != want {
		t.Errorf("decode says %q, want %q", got.Text, want)
	}
	if got := decode[sglAnswer](t, []byte(pb)); got.Meta.CompletionTokens != 1 || got.Meta.DPRank != 1 {
		t.Errorf("prefill leg: %+v, want one token on rank room mod dp = 1", got)
	}
	s, err := d.Counters()
	if err != nil {
		t.Fatal(err)
	}
	if s[0].External+s[1].External != 40 || s[0].Local+s[1].Local != 0 {
		t.Errorf("decode ranks: %d pulled, %d computed", s[0].External+s[1].External, s[0].Local+s[1].Local)
	}
	eventually(t, "prefill keeps nothing", func() bool {
		s, err := p.Counters()
		return err == nil && s[0].Pinned+s[1].Pinned == 0
	})
	t.Run("decode alone times out", func(t *testing.T) {
		if status, b := generate(t, d, ids(9, 1), triple(8)); status != 500 || !strings.Contains(b, `"object":"error"`) {
			t.Errorf("%d %s", status, b)
		}
	})
	t.Run("prefill alone times out", func(t *testing.T) {
		if status, b := generate(t, p, ids(9, 1), triple(9)); status != 500 {
			t.Errorf("%d %s", status, b)
		}
	})
	t.Run("prefill that leaves fails the decode", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			_, _, _ = tryPost(ctx, p.URL()+"/generate", object{"input_ids": prompt, "bootstrap_host": boot.Host, "bootstrap_port": boot.Port, "bootstrap_room": 10})
		}()
		cancel()
		<-done
		if status, b := generate(t, d, prompt, triple(10)); status != 500 {
			t.Errorf("%d %s", status, b)
		}
	})
	t.Run("no room", func(t *testing.T) {
		if status, b := generate(t, p, prompt, nil); status != 400 || !strings.Contains(b, "boostrap room id") {
			t.Errorf("%d %s", status, b)
		}
	})
	t.Run("fake host probes alone", func(t *testing.T) {
		for _, e := range []*sim.Engine{p, d} {
			status, b := generate(t, e, prompt, object{"bootstrap_host": "2.2.2.2", "bootstrap_room": 0})
			if status != 200 {
				t.Errorf("%s: %d %s", e.Name(), status, b)
			}
		}
	})
	t.Run("rank out of range", func(t *testing.T) {
		if status, b := generate(t, a, prompt, object{"routed_dp_rank": 2}); status != 400 {
			t.Errorf("%d %s", status, b)
		}
	})
	t.Run("server info", func(t *testing.T) {
		resp, err := http.Get(p.URL() + "/server_info")
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		var info struct {
			Mode string `json:"disaggregation_mode"`
			Port int    `json:"disaggregation_bootstrap_port"`
			Page int    `json:"page_size"`
			DP   int    `json:"dp_size"`
		}
		if err := json.NewDecoder(resp.Body).Decode(&info); err != nil {
			t.Fatal(err)
		}
		if info.Mode != "prefill" || info.Port != boot.Port || info.Page != 1 || info.DP != 2 {
			t.Errorf("%+v", info)
		}
	})
}

// Shared storage and LMCache

func TestSharedStorage(t *testing.T) {
	for name, opt := range map[string]string{"memory": "", "folder": ",store=" + t.TempDir()} {
		t.Run(name, func(t *testing.T) {
			r := start(t, "1p1d:connector=shared-storage,profile=instant"+opt)
			p, d := r.Engine(0), r.Engine(1)
			prompt := ids(100, 4)
			_, want, _ := complete(t, p, prompt, nil)
			status, got, c := complete(t, d, prompt, nil)
			if status != 200 || got != want || c.Usage.PromptTokensDetails.CachedTokens != 96 {
				t.Errorf("%d %q (want %q), %+v", status, got, want, c.Usage)
			}
			// Whole prompts only.
			if _, _, c := complete(t, d, append(ids(100, 4), ids(40, 5)...), nil); c.Usage.PromptTokensDetails.CachedTokens != 96 {
				t.Errorf("local prefix of another prompt: %+v", c.Usage)
			}
			if s := counters(t, d); s.External != 96 {
				t.Errorf("%d external tokens, want 96", s.External)
			}
		})
	}
}

func TestLMCache(t *testing.T) {
	r := start(t, "1p1d:connector=lmcache,profile=instant")
	p, d := r.Engine(0), r.Engine(1)
	prompt := ids(100, 6)
	_, want, _ := complete(t, p, prompt, nil)
	l := d.Worker().LMCache
	if l == nil {
		t.Fatal("the decode reports no receiver")
	}
	status, b := post(t, p.URL()+"/v1/completions", object{"prompt": prompt, "max_tokens": 1, "kv_transfer_params": object{
		"ret_first_tok": true,
		"disagg_spec":   object{"req_id": "r1", "receiver_host": l.Host, "receiver_init_port": l.InitPorts, "receiver_alloc_port": l.AllocPorts},
	}})
	var kv struct {
		First *int `json:"first_tok"`
	}
	if err := json.Unmarshal(decode[completion](t, b).KV, &kv); err != nil || status != 200 || kv.First == nil {
		t.Fatalf("%d %s", status, b)
	}
	first := r.Vocab().Text(uint32(*kv.First))
	status, b = post(t, d.URL()+"/v1/completions", object{"prompt": append(slices.Clone(prompt), *kv.First), "max_tokens": 11, "ignore_eos": true})
	c := decode[completion](t, b)
	if got := first + c.Choices[0].Text; status != 200 || got != want {
		t.Errorf("%d %q, want %q", status, got, want)
	}
	if s := counters(t, d); s.External != 96 || s.Local != 5 {
		t.Errorf("external %d, local %d, want 96 and 5", s.External, s.Local)
	}
	if status, b := post(t, p.URL()+"/v1/completions", object{"prompt": prompt, "max_tokens": 1, "kv_transfer_params": object{"disagg_spec": object{"receiver_host": "127.0.0.1", "receiver_init_port": []int{}}}}); status != 500 {
		t.Errorf("no receiver port: %d %s", status, b)
	}
}

// Events
