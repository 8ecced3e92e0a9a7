// Package fleet is what a benchmark knows of its target: the router's data
// plane and admin API, and the engines' own counters behind it.
package fleet

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/dynctl/dynctl/internal/bench/workload"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/router/observe/receipt"
	"github.com/dynctl/dynctl/internal/wait"
	"github.com/dynctl/dynctl/internal/workers/samples"
)

// Target is a router.
type Target struct {
	// URL is the data plane, Admin the admin API.
	URL   string
	Admin *admin.Client
	// TLS is how the data plane is spoken to; nil for the system's roots.
	TLS *tls.Config
	// APIKey is shown to the data plane only; empty for none.
	APIKey string
	http   *http.Client
}

// Options say where a target is and how it is spoken to.
type Options struct {
	// URL is the data plane's; empty asks the router for it.
	URL string
	// TLS and APIKey are those of Target.
	TLS    *tls.Config
	APIKey string
}

// maxPage bounds an answer that is read whole.
const maxPage = 32 << 20

// New makes a target.
func New(ctx context.Context, adminClient *admin.Client, o Options) (*Target, error) {
	t := &Target{URL: o.URL, Admin: adminClient, TLS: o.TLS, APIKey: o.APIKey, http: &http.Client{Transport: &http.Transport{
		DialContext: (&net.Dialer{Timeout: 3 * time.Second}).DialContext, MaxIdleConnsPerHost: 4, IdleConnTimeout: 10 * time.Second,
		TLSClientConfig: o.TLS,
	}, Timeout: 60 * time.Second}}
	if t.URL == "" {
		s, err := adminClient.Status(ctx)
		if err != nil {
			return nil, err
		}
		if t.URL, err = dataOf(adminClient.URL(), s); err != nil {
			return nil, err
		}
	}
	return t, nil
}

// dataOf is the data plane's URL from what the router listens on, seen from
// where its admin API was reached.
func dataOf(adminURL string, s *admin.Status) (string, error) {
	u, err := url.Parse(adminURL)
	if err != nil {
		return "", err
	}
	host, port, err := net.SplitHostPort(s.Listen)
	if err != nil {
		return "", fmt.Errorf("the router says that it listens on %q; give --data URL", s.Listen)
	}
	if ip := net.ParseIP(host); host == "" || ip != nil && ip.IsUnspecified() {
		host = u.Hostname()
	}
	scheme := "http"
	if s.Access.Data.TLS {
		scheme = "https"
	}
	return scheme + "://" + net.JoinHostPort(host, port), nil
}

// Close drops idle connections.
func (t *Target) Close() { t.http.CloseIdleConnections() }

// Facts are what the target is.
type Facts struct {
	Router  admin.Status   `json:"-"`
	Workers []admin.Worker `json:"-"`

	Version      string   `json:"router_version"`
	Model        string   `json:"model"`
	Block        int      `json:"block_size_tokens"`
	MaxModelLen  int      `json:"max_model_len_tokens"`
	KVTokens     int      `json:"kv_tokens_per_decode_rank"`
	Prefill      int      `json:"prefill_workers"`
	Decode       int      `json:"decode_workers"`
	Aggregated   int      `json:"aggregated_workers"`
	PrefillRanks int      `json:"prefill_ranks"`
	DecodeRanks  int      `json:"decode_ranks"`
	Engines      []string `json:"engines"`
	Running      int      `json:"running_requests"`
}

// Describe asks the router for what it is and what it routes to. model may be
// empty when only one is served.
func (t *Target) Describe(ctx context.Context, model string) (*Facts, error) {
	s, err := t.Admin.Status(ctx)
	if err != nil {
		return nil, err
	}
	w, err := t.Admin.Workers(ctx)
	if err != nil {
		return nil, err
	}
	f := &Facts{Router: *s, Workers: w.Workers, Version: s.Version, Model: model, Block: s.BlockSizeTokens, Running: s.Traffic.Inflight, Engines: []string{}}
	if f.Model == "" {
		if len(s.Models) != 1 {
			return nil, fmt.Errorf("the router serves %d models (%s): choose one with --model", len(s.Models), strings.Join(s.Models, ", "))
		}
		f.Model = s.Models[0]
	}
	seen := map[string]bool{}
	for _, w := range w.Workers {
		if !w.Usable || !slices.Contains(w.Models, f.Model) {
			continue
		}
		if name := strings.TrimSpace(w.Engine + " " + w.Version); !seen[name] {
			seen[name] = true
			f.Engines = append(f.Engines, name)
		}
		if w.MaxModelLen > 0 && (f.MaxModelLen == 0 || w.MaxModelLen < f.MaxModelLen) {
			f.MaxModelLen = w.MaxModelLen
		}
		switch w.Role {
		case "prefill":
			f.Prefill++
			f.PrefillRanks += w.DP
		default:
			if w.Role == "decode" {
				f.Decode++
			} else {
				f.Aggregated++
			}
			f.DecodeRanks += w.DP
			if kv := w.KVBlocks * w.BlockSizeTokens; kv > 0 && (f.KVTokens == 0 || kv < f.KVTokens) {
				f.KVTokens = kv
			}
			f.Block = cmp.Or(f.Block, w.BlockSizeTokens)
		}
	}
	if f.Decode+f.Aggregated == 0 {
		if !slices.Contains(s.Models, f.Model) && len(s.Models) > 0 {
			return nil, fmt.Errorf("no worker serves model %q; the router serves %s", f.Model, strings.Join(s.Models, ", "))
		}
		return nil, fmt.Errorf("no usable worker decodes model %q", f.Model)
	}
	return f, nil
}

// Counters are sums of the engines' own counters over all workers of a kind;
// NaN for what no engine reported. Tokens unless said.
type Counters struct {
	Prefill, Decode Sums
	// Prompt has the prompt tokens that each worker counted, by name.
	Prompt map[string]float64
}

// Restarted names a worker whose count went backwards since an earlier reading: its engine
// restarted. Empty when no worker did.
func (c Counters) Restarted(before Counters) string {
	for _, name := range slices.Sorted(maps.Keys(c.Prompt)) {
		if c.Prompt[name] < before.Prompt[name] {
			return name
		}
	}
	return ""
}

// Sums are counters of one kind of workers.
type Sums struct {
	Queries, Hits, ExternalHits, Prompt, Preemptions float64
	External                                         float64 // prompt tokens that came from elsewhere
	Computed                                         float64 // prompt tokens that the engine computed
	QueueSum, QueueCount                             float64 // seconds
	TransferSum, TransferCount, TransferBytes        float64
	Running, Waiting                                 float64
}

// newSums are sums of which nothing is known.
func newSums() (s Sums) {
	for _, x := range figures {
		*x.of(&s) = math.NaN()
	}
	return s
}

// Minus is the growth since an earlier reading.
func (s Sums) Minus(o Sums) Sums {
	for _, x := range figures {
		if !x.gauge {
			*x.of(&s) -= *x.of(&o)
		}
	}
	return s
}

// Counters reads the /metrics page of every worker that serves the model. A
// worker that does not answer makes an error: a cell without counters proves
// nothing.
func (t *Target) Counters(ctx context.Context, f *Facts) (Counters, error) {
	c := Counters{newSums(), newSums(), make(map[string]float64, len(f.Workers))}
	var mu sync.Mutex
	var wg sync.WaitGroup
	var errs []error
	for i := range f.Workers {
		w := &f.Workers[i]
		wg.Go(func() {
			page, err := t.get(ctx, strings.TrimRight(w.URL, "/")+"/metrics")
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				errs = append(errs, fmt.Errorf("counters of %s: %w", w.Name, err))
				return
			}
			own := newSums()
			addPage(&own, page)
			c.Prompt[w.Name] = own.Prompt
			if w.Role == "prefill" {
				addPage(&c.Prefill, page)
			} else {
				addPage(&c.Decode, page)
			}
		})
	}
	wg.Wait()
	return c, errors.Join(errs...)
}

// IdleCounters reads the counters once no engine runs anything any more, or most is
// over: engines book a request's figures a little after its last token.
func (t *Target) IdleCounters(ctx context.Context, f *Facts, most time.Duration) (c Counters, err error) {
	ctx2, cancel := context.WithTimeout(ctx, most)
	defer cancel()
	if wait.Until(ctx2, 20*time.Millisecond, func() bool {
		c, err = t.Counters(ctx, f)
		busy := c.Decode.Running > 0 || c.Decode.Waiting > 0 || c.Prefill.Running > 0 || c.Prefill.Waiting > 0
		return err != nil || !busy
	}) {
		return c, err
	}
	return c, ctx.Err()
}

func (t *Target) get(ctx context.Context, u string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u, nil)
	if err != nil {
		return nil, err
	}
	return t.Do(req)
}

// Authorize puts the key into a request to the data plane; others it leaves alone.
func (t *Target) Authorize(req *http.Request) {
	if t.APIKey != "" && strings.HasPrefix(req.URL.String(), t.URL+"/") {
		req.Header.Set("Authorization", "Bearer "+t.APIKey)
	}
}

// Do sends a request and returns the body of a good answer.
func (t *Target) Do(req *http.Request) ([]byte, error) {
	t.Authorize(req)
	resp, err := t.http.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, maxPage))
	if err != nil {
		return nil, err
	}
	if resp.StatusCode/100 != 2 {
		return nil, fmt.Errorf("%s %s: status %d: %s", req.Method, req.URL, resp.StatusCode, bytes.TrimSpace(b[:min(len(b), 300)]))
	}
	return b, nil
}

// addPage adds the series of one Prometheus text page (vLLM 0.32, SGLang 0.5).
func addPage(s *Sums, page []byte) {
	add := func(dst *float64, v float64) {
		if math.IsNaN(*dst) {
			*dst = 0
		}
		*dst += v
	}
	samples.Scan(page, nil, func(name []byte, l samples.Labels, v float64) {
		for _, x := range figures {
			for _, n := range x.series {
				if string(name) == n[0] && (len(n) == 1 || bytes.Contains(l, []byte(n[1]))) {
					add(x.of(s), v)
				}
			}
		}
	})
}

// figures are what is summed, by the engines' names. What is not a counter is no
// sum over time.
var figures = []struct {
	of    func(s *Sums) *float64
	gauge bool
	// series name it; a part of the labels follows the name, where it counts.
	series [][]string
}{
	{func(s *Sums) *float64 { return &s.Queries }, false, [][]string{{"vllm:prefix_cache_queries_total"}, {"sglang:prompt_tokens_total"}}},
	{func(s *Sums) *float64 { return &s.Hits }, false, [][]string{{"vllm:prefix_cache_hits_total"}, {"sglang:cached_tokens_total"}}},
	{func(s *Sums) *float64 { return &s.ExternalHits }, false, [][]string{{"vllm:external_prefix_cache_hits_total"}, {"sglang:kv_transfer_total_tokens_total"}}},
	{func(s *Sums) *float64 { return &s.Prompt }, false, [][]string{{"vllm:prompt_tokens_total"}, {"sglang:prompt_tokens_total"}}},
	{func(s *Sums) *float64 { return &s.External }, false, [][]string{{"vllm:prompt_tokens_by_source_total", `source="external_kv_transfer"`}, {"sglang:kv_transfer_total_tokens_total"}}},
	{func(s *Sums) *float64 { return &s.Computed }, false, [][]string{{"vllm:prompt_tokens_by_source_total", `source="local_compute"`}}},
	{func(s *Sums) *float64 { return &s.Preemptions }, false, [][]string{{"vllm:num_preemptions_total"}, {"sglang:num_retracted_requests_total"}}},
	{func(s *Sums) *float64 { return &s.QueueSum }, false, [][]string{{"vllm:request_queue_time_seconds_sum"}}},
	{func(s *Sums) *float64 { return &s.QueueCount }, false, [][]string{{"vllm:request_queue_time_seconds_count"}}},
	{func(s *Sums) *float64 { return &s.TransferSum }, false, [][]string{{"vllm:nixl_xfer_time_seconds_sum"}}},
	{func(s *Sums) *float64 { return &s.TransferCount }, false, [][]string{{"vllm:nixl_xfer_time_seconds_count"}}},
	{func(s *Sums) *float64 { return &s.TransferBytes }, false, [][]string{{"vllm:nixl_bytes_transferred_sum"}}},
	{func(s *Sums) *float64 { return &s.Running }, true, [][]string{{"vllm:num_requests_running"}, {"sglang:num_running_reqs"}}},
	{func(s *Sums) *float64 { return &s.Waiting }, true, [][]string{{"vllm:num_requests_waiting"}, {"sglang:num_queue_reqs"}}},
}

// Receipts fetches the newest receipts and gives those that want accepts, by
// request id. It looks at no more than limit of them.
func (t *Target) Receipts(ctx context.Context, limit int, want func(requestID string) bool) (map[string]*receipt.Receipt, error) {
	out := make(map[string]*receipt.Receipt)
	cursor := ""
	for seen := 0; seen < limit; {
		l, err := t.Admin.DecisionsBrief(ctx, min(500, limit-seen), "", cursor)
		if err != nil {
			return out, err
		}
		for _, raw := range l.Decisions {
			var r receipt.Receipt
			if err := json.Unmarshal(raw, &r); err != nil {
				return out, fmt.Errorf("the router's receipt is not understood: %w", err)
			}
			if want(r.RequestID) {
				out[r.RequestID] = &r
			}
		}
		seen += len(l.Decisions)
		if cursor = l.Next; cursor == "" || len(l.Decisions) == 0 {
			break
		}
	}
	return out, nil
}

// words are text of which a vocabulary gives ids that are plain words.
const words = "the of and to in a is that for it as was with be by on not he this are or his from at which but have an had they you were their one all we can her has there been if more when will would who so no said what up its about into than them only other new some could time these two may then do first any my now such like our over man me even most made after also did many before must through back years where much your way well down should because each just those people how too little state good very make world still own see men work long get here between both life being under never day same another know while last might us great old year off come since against go came right used take three"

// Pool asks the target to tokenize plain words and gives the ids; the default
// pool, and false, when it cannot.
func (t *Target) Pool(ctx context.Context, model string) (workload.Pool, bool) {
	ids, err := t.Tokenize(ctx, t.URL, model, words)
	if err != nil {
		return workload.DefaultPool(), false
	}
	seen := map[uint32]bool{}
	var pool workload.Pool
	for i, id := range ids {
		// The first may be a beginning-of-text token.
		if i > 0 && !seen[id] {
			seen[id] = true
			pool = append(pool, id)
		}
	}
	if len(pool) < 32 {
		return workload.DefaultPool(), false
	}
	return pool, true
}

// Tokenize asks a router or an engine for the ids of a text.
func (t *Target) Tokenize(ctx context.Context, base, model, text string) ([]uint32, error) {
	var out struct {
		Tokens []uint32 `json:"tokens"`
	}
	err := t.post(ctx, strings.TrimRight(base, "/")+"/tokenize", map[string]any{"model": model, "prompt": text}, &out)
	return out.Tokens, err
}

func (t *Target) post(ctx context.Context, u string, in, out any) error {
	raw, err := json.Marshal(in)
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, u, bytes.NewReader(raw))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	b, err := t.Do(req)
	if err != nil {
		return err
	}
	return json.Unmarshal(b, out)
}
