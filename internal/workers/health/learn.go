package health

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"maps"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/dynctl/dynctl/internal/workers"
)

const maxModels = 10_000

// answer is all that a worker reported when it was queried what it is.
type answer struct {
	learned workers.Learned
	loads   []*workers.Load // by rank; nil when not reported
	// sleepPath says that /is_sleeping answers and /metrics lacks the state.
	asleep, sleepPath bool
	// notes are oddities for the operator, retry says that a page failed in a
	// way that may pass.
	notes []string
	retry bool
}

// owners are the engines by what they say in /v1/models of who owns a model.
var owners = map[string]workers.Engine{"vllm": workers.VLLM, "sglang": workers.SGLang, "tensorrt_llm": workers.TRTLLM}

// learn asks a worker what it is. Every page is optional; a missing one leaves
// its facts unknown.
func (a *probeClient) learn(ctx context.Context, w *workers.Worker) *answer {
	l := &learner{a: a, w: w}
	l.learned.From = map[workers.Field]string{}
	var wg sync.WaitGroup
	asked := time.Now()
	var owner, version string
	p := parsePage(nil)
	wg.Go(func() {
		owner = l.models(ctx)
	})
	wg.Go(func() {
		l.ask(ctx, "/metrics", func(b []byte) error {
			p = parsePage(b)
			return nil
		})
	})
	wg.Go(func() {
		l.ask(ctx, "/version", func(b []byte) error {
			var v struct{ Version string }
			if err := json.Unmarshal(b, &v); err != nil {
				return err
			}
			version = clip(v.Version, 64)
			return nil
		})
	})
	wg.Wait()

	engine := p.engine
	if engine != "" {
		l.setFrom(workers.FieldEngine, "/metrics")
	} else if engine = owners[owner]; engine != "" {
		l.setFrom(workers.FieldEngine, "/v1/models")
	}
	l.learned.Engine = engine
	if version != "" {
		l.learned.Version = version
		l.setFrom(workers.FieldVersion, "/version")
	}
	l.metrics(p)
	ans := &answer{asleep: p.asleep}
	if engine == workers.VLLM || engine == "" {
		wg.Go(func() { l.eventSources(ctx) })
		wg.Go(func() { l.chatTokens(ctx) })
		if !p.sleepKnown {
			wg.Go(func() {
				l.ask(ctx, "/is_sleeping", func(b []byte) error {
					asleep, err := parseSleeping(b)
					ans.asleep, ans.sleepPath = asleep, err == nil
					return err
				})
			})
		}
	}
	if engine == workers.SGLang || engine == "" {
		wg.Go(func() { l.serverInfo(ctx) })
	}
	wg.Wait()
	slices.Sort(l.notes)
	ans.learned, ans.notes, ans.retry = l.learned, l.notes, l.retry
	ans.loads = p.loads(max(l.learned.DP, len(w.Ranks)), asked, time.Now())
	return ans
}

func parseSleeping(b []byte) (bool, error) {
	var v struct {
		Sleeping *bool `json:"is_sleeping"`
	}
	if err := json.Unmarshal(b, &v); err != nil {
		return false, err
	}
	if v.Sleeping == nil {
		return false, errors.New("no is_sleeping")
	}
	return *v.Sleeping, nil
}

// learner gathers the answers of pages that are asked at the same time.
type learner struct {
	a *probeClient
	w *workers.Worker

	mu      sync.Mutex
	learned workers.Learned
	notes   []string
	retry   bool
}

// ask gets one page; what goes wrong is noted.
func (l *learner) ask(ctx context.Context, path string, use func([]byte) error) bool {
	return l.askWith(ctx, http.MethodGet, path, nil, use)
}

func (l *learner) askWith(ctx context.Context, method, path string, body []byte, use func([]byte) error) bool {
	err := l.a.send(ctx, l.w, method, path, body, func(b []byte) error {
		if err := use(b); err != nil {
			return &badPage{path, err}
		}
		return nil
	})
	l.mu.Lock()
	defer l.mu.Unlock()
	bad, isBad := errors.AsType[*badPage](err)
	switch {
	case err == nil:
		return true
	case isBad:
		l.notes = append(l.notes, bad.Error())
	case !notThere(err):
		l.retry = true
	}
	return false
}

type badPage struct {
	path string
	err  error
}

func (e *badPage) Error() string { return fmt.Sprintf("%s is not understood: %.200v", e.path, e.err) }

func (l *learner) note(format string, args ...any) {
	l.mu.Lock()
	l.notes = append(l.notes, fmt.Sprintf(format, args...))
	l.mu.Unlock()
}

// setFrom notes which page reported a fact.
func (l *learner) setFrom(f workers.Field, from string) {
	l.mu.Lock()
	l.learned.From[f] = from
	l.mu.Unlock()
}

// models reads /v1/models; the owner names the engine.
func (l *learner) models(ctx context.Context) (owner string) {
	const path = "/v1/models"
	l.ask(ctx, path, func(b []byte) error {
		var list struct {
			Data []struct {
				ID      string  `json:"id"`
				OwnedBy string  `json:"owned_by"`
				Parent  *string `json:"parent"`
				// Root is the path of the weights, the same for all names of one model.
				Root        json.RawMessage `json:"root"`
				MaxModelLen *int            `json:"max_model_len"`
			} `json:"data"`
		}
		if err := json.Unmarshal(b, &list); err != nil {
			return err
		}
		if list.Data == nil {
			return errors.New("no data")
		}
		if len(list.Data) > maxModels {
			return fmt.Errorf("%d models (at most %d)", len(list.Data), maxModels)
		}
		models, loras, length := []string{}, []string(nil), 0
		several, roots := false, []string(nil)
		for _, m := range list.Data {
			if m.ID == "" || len(m.ID) > 512 || slices.Contains(models, m.ID) {
				continue
			}
			models = append(models, m.ID)
			if m.Parent != nil && *m.Parent != "" {
				loras = append(loras, m.ID)
			} else {
				roots = append(roots, string(m.Root))
				several = len(roots) > 1 && (several || roots[0] != roots[len(roots)-1] || slices.Contains([]string{"", `""`, "null"}, roots[0]))
				if m.MaxModelLen != nil && *m.MaxModelLen > 0 {
					length = max(length, *m.MaxModelLen)
				}
			}
			owner = cmp.Or(owner, m.OwnedBy)
		}
		l.mu.Lock()
		defer l.mu.Unlock()
		l.learned.Models, l.learned.LoRAs, l.learned.Several = models, loras, several
		l.learned.From[workers.FieldModels] = path
		l.number(workers.FieldModelLen, &l.learned.MaxModelLen, length, path)
		return nil
	})
	return owner
}

// chatTokens asks for the tokens of a chat that shows a template's parts: who
// speaks, what an assistant said before, where the answer begins. The day is
// given, for templates that would give today's.
func (l *learner) chatTokens(ctx context.Context) {
	const path = "/tokenize"
	l.mu.Lock()
	model := ""
	for _, m := range l.learned.Models {
		if !slices.Contains(l.learned.LoRAs, m) {
			model = m
			break
		}
	}
	l.mu.Unlock()
	if model == "" {
		return
	}
	body, err := json.Marshal(map[string]any{
		"model": model,
		"messages": []map[string]string{
			{"role": "user", "content": "Does 1+1 make 2?\n\n  Say «yes» or <no>."},
			{"role": "assistant", "content": "Yes: 1+1=2."},
			{"role": "user", "content": "Und 10+10? 🙂"},
		},
		"chat_template_kwargs": map[string]string{"date_string": "01 Jan 2025"},
	})
	if err != nil {
		return // strings marshal
	}
	l.askWith(ctx, http.MethodPost, path, body, func(b []byte) error {
		var v struct{ Tokens []uint32 }
		if err := json.Unmarshal(b, &v); err != nil {
			return err
		}
		if len(v.Tokens) == 0 {
			return errors.New("no tokens")
		}
		h := fnv.New64a()
		for _, id := range v.Tokens {
			_, _ = h.Write(binary.LittleEndian.AppendUint32(nil, id)) // a hash takes everything
		}
		l.mu.Lock()
		defer l.mu.Unlock()
		l.learned.ChatTokens = fmt.Sprintf("%d:%016x", len(v.Tokens), h.Sum64())
		l.learned.From[workers.FieldChatTokens] = path
		return nil
	})
}

// number takes a number that a page reports; 0 is none. The caller holds mu, or no
// page is being asked for.
func (l *learner) number(f workers.Field, dst *int, n int, from string) {
	if n > 0 {
		*dst = n
		l.learned.From[f] = from
	}
}

// metrics takes what a /metrics page reports besides the load.
func (l *learner) metrics(p *page) {
	source := "vllm:cache_config_info"
	if p.engine == workers.SGLang {
		source = "sglang:page_size"
	}
	l.number(workers.FieldBlockSize, &l.learned.BlockSize, p.blockSize, source)
	l.number(workers.FieldKVBlocks, &l.learned.KVBlocks, p.kvBlocks(), source)
	if n := p.poolBlocks(); n > 0 {
		l.learned.PoolBlocks = n
	}
	// SGLang labels only ranks that have run something, vLLM all of them.
	if p.engine == workers.VLLM {
		ranks := p.rankLabels()
		l.number(workers.FieldDP, &l.learned.DP, len(ranks), `engine labels in /metrics`)
		l.first(ranks, `engine labels in /metrics`)
	}
	if p.engine == workers.VLLM {
		// Which method drafts is not reported: those that look words up in the prompt, or
		// have a model of their own, drop nothing, and are taken to until it is stated.
		if l.learned.LastBlock = workers.LastBlockKept; p.drafts {
			l.learned.LastBlock = workers.LastBlockDropped
			l.setFrom(workers.FieldLastBlock, "vllm:spec_decode_num_drafts")
		}
	}
	if p.connector != workers.ConnectorNone {
		l.learned.Connector = p.connector
		l.setFrom(workers.FieldConnector, "vllm:"+string(p.connector)+"_xfer_time_seconds")
	}
	if p.cacheType != "" {
		l.learned.CacheType = p.cacheType
		l.setFrom(workers.FieldCacheType, source)
	}
}

// first takes the place of a worker's first rank in its deployment, which consecutive
// ranks show. The caller holds mu, or no page is being asked for.
func (l *learner) first(ranks []int, from string) {
	if n := len(ranks); n > 0 && ranks[n-1]-ranks[0] == n-1 && ranks[0] < maxRanks {
		l.learned.DPStart = &ranks[0]
		l.learned.From[workers.FieldDPStart] = from
	}
}

// eventSource is one rank's entry of /kv_event_sources (vLLM since 0.30).
type eventSource struct {
	Rank      *int    `json:"data_parallel_rank"`
	Enabled   *bool   `json:"enable_kv_cache_events"`
	Publisher *string `json:"publisher"`
	Endpoint  *string `json:"endpoint"`
	Replay    *string `json:"replay_endpoint"`
	Topic     string  `json:"topic"`
	counted   bool    // Rank is the place in the list, for want of a number
}

// parseEventSources reads both forms of /kv_event_sources: a list, or an
// object by rank. The result is sorted by rank.
func parseEventSources(b []byte) ([]eventSource, error) {
	var list []eventSource
	if b = bytes.TrimSpace(b); len(b) > 0 && b[0] == '{' {
		var byRank map[string]*eventSource
		if err := json.Unmarshal(b, &byRank); err != nil {
			return nil, err
		}
		for _, key := range slices.Sorted(maps.Keys(byRank)) {
			rank, err := strconv.Atoi(key)
			if err != nil || byRank[key] == nil {
				return nil, fmt.Errorf("%.40q is no rank", key)
			}
			s := *byRank[key]
			s.Rank = &rank
			list = append(list, s)
		}
	} else if err := json.Unmarshal(b, &list); err != nil {
		return nil, err
	}
	if len(list) > maxRanks {
		return nil, fmt.Errorf("%d ranks (at most %d)", len(list), maxRanks)
	}
	seen := map[int]bool{}
	for i := range list {
		if list[i].Rank == nil {
			list[i].Rank, list[i].counted = &i, true
		}
		if r := *list[i].Rank; r < 0 || seen[r] {
			return nil, fmt.Errorf("rank %d is negative or comes twice", r)
		}
		seen[*list[i].Rank] = true
	}
	slices.SortFunc(list, func(a, b eventSource) int { return *a.Rank - *b.Rank })
	return list, nil
}

func (l *learner) eventSources(ctx context.Context) {
	const path = "/kv_event_sources"
	var list []eventSource
	ok := l.ask(ctx, path, func(b []byte) (err error) {
		list, err = parseEventSources(b)
		return err
	})
	if !ok {
		return
	}
	// Ranks of a larger group that runs elsewhere too are counted from 0 here,
	// like the ranks of the worker.
	contiguous := len(list) > 0 && *list[len(list)-1].Rank == len(list)-1
	sources := []workers.EventSource{}
	for i, s := range list {
		rank := *s.Rank
		if !contiguous {
			rank = i
		}
		if s.Enabled != nil && !*s.Enabled || s.Publisher != nil && *s.Publisher != "zmq" || s.Endpoint == nil || *s.Endpoint == "" {
			continue
		}
		src := workers.EventSource{DP: rank, Topic: clip(s.Topic, 512)}
		var err error
		if src.Endpoint, err = workers.DialEndpoint(*s.Endpoint, l.w.URL.Hostname(), 0); err != nil {
			l.note("%s: rank %d: %.200v", path, rank, err)
			continue
		}
		if s.Replay != nil && *s.Replay != "" {
			if src.Replay, err = workers.DialEndpoint(*s.Replay, l.w.URL.Hostname(), 0); err != nil {
				l.note("%s: rank %d: replay: %.200v", path, rank, err)
			}
		}
		sources = append(sources, src)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.learned.Events = sources
	l.learned.From[workers.FieldEvents] = path
	if l.learned.DP == 0 {
		l.number(workers.FieldDP, &l.learned.DP, len(list), path)
	}
	if l.learned.DPStart == nil && !slices.ContainsFunc(list, func(s eventSource) bool { return s.counted }) {
		ranks := make([]int, len(list))
		for i := range list {
			ranks[i] = *list[i].Rank
		}
		l.first(ranks, path)
	}
}

// serverInfo reads SGLang's /server_info, or /get_server_info as it was called
// before. The page holds keys in clear: nothing of it is logged.
func (l *learner) serverInfo(ctx context.Context) {
	for _, path := range []string{"/server_info", "/get_server_info"} {
		var info map[string]json.RawMessage
		if l.ask(ctx, path, func(b []byte) error {
			if json.Unmarshal(b, &info) != nil {
				return errors.New("no JSON object")
			}
			return nil
		}) {
			l.sglang(path, info)
			return
		}
	}
}

func (l *learner) sglang(path string, info map[string]json.RawMessage) {
	l.mu.Lock()
	defer l.mu.Unlock()
	_, paged := info["page_size"]
	_, split := info["disaggregation_mode"]
	if !paged && !split {
		return // vLLM's page of the same name
	}
	t := &l.learned
	if t.Engine == "" {
		t.Engine = workers.SGLang
		t.From[workers.FieldEngine] = path
	}
	number := func(key string, limit int) int {
		var n float64
		if json.Unmarshal(info[key], &n) != nil || n < 1 || n > float64(limit) {
			return 0
		}
		return int(n)
	}
	text := func(key string) string {
		var s string
		if json.Unmarshal(info[key], &s) != nil {
			return ""
		}
		return s
	}
	set := func(f workers.Field, dst *int, n int) { l.number(f, dst, n, path) }
	set(workers.FieldBlockSize, &t.BlockSize, number("page_size", 1<<20))
	set(workers.FieldDP, &t.DP, number("dp_size", maxRanks))
	set(workers.FieldBatched, &t.MaxBatchedTokens, number("chunked_prefill_size", 1<<30))
	if t.BlockSize > 0 {
		set(workers.FieldKVBlocks, &t.KVBlocks, number("max_total_num_tokens", 1<<40)/t.BlockSize)
	}
	if t.MaxModelLen == 0 {
		set(workers.FieldModelLen, &t.MaxModelLen, number("context_length", 1<<30))
	}
	if v := text("version"); v != "" {
		t.Version = clip(v, 64)
		t.From[workers.FieldVersion] = path
	}
	if split {
		switch text("disaggregation_mode") {
		case "prefill":
			t.Role, t.Connector = workers.Prefill, workers.ConnectorSGLang
			if port := number("disaggregation_bootstrap_port", 65535); port > 0 {
				t.Bootstrap = &workers.Bootstrap{Host: l.w.URL.Hostname(), Port: port}
				t.From[workers.FieldBootstrap] = path
			}
		case "decode":
			t.Role, t.Connector = workers.Decode, workers.ConnectorSGLang
		case "null", "":
			t.Role = workers.Aggregated
		}
		t.From[workers.FieldRole], t.From[workers.FieldConnector] = path, path
	}
	raw, ok := info["kv_events"]
	if !ok {
		return // an older server does not say
	}
	sources, notes, err := sglangEvents(raw, l.w.URL, max(t.DP, 1))
	if err != nil {
		l.notes = append(l.notes, fmt.Sprintf("%s: kv_events: %.200v", path, err))
		return
	}
	l.notes = append(l.notes, notes...)
	t.Events = sources
	t.From[workers.FieldEvents] = path
}

type sglangPublisher struct {
	Rank     int    `json:"dp_rank"`
	Endpoint string `json:"endpoint"`
}

// sglangEvents reads the kv_events object of /server_info (SGLang since 0.5.14):
// a base port that counts up with the rank, or a list of publishers.
func sglangEvents(raw json.RawMessage, base *url.URL, dp int) (out []workers.EventSource, notes []string, err error) {
	var kv *struct {
		Publisher  string            `json:"publisher"`
		Host       string            `json:"endpoint_host"`
		Port       int               `json:"endpoint_port_base"`
		Topic      string            `json:"topic"`
		DP         int               `json:"dp_size"`
		ReplayHost string            `json:"replay_endpoint_host"`
		ReplayPort int               `json:"replay_endpoint_port_base"`
		Publishers []sglangPublisher `json:"publishers"`
	}
	if err := json.Unmarshal(raw, &kv); err != nil {
		return nil, nil, errors.New("not the expected object")
	}
	out = []workers.EventSource{}
	if kv == nil || kv.Publisher != "" && kv.Publisher != "zmq" {
		return out, nil, nil
	}
	if kv.DP > 0 {
		dp = min(kv.DP, maxRanks)
	}
	endpoint := func(host string, port, rank int) (string, error) {
		return workers.DialEndpoint("tcp://"+net.JoinHostPort(strings.Trim(host, "[]"), strconv.Itoa(port)), base.Hostname(), rank)
	}
	for rank := range dp {
		src := workers.EventSource{DP: rank, Topic: clip(kv.Topic, 512)}
		var err error
		if i := slices.IndexFunc(kv.Publishers, func(p sglangPublisher) bool { return p.Rank == rank }); i >= 0 {
			src.Endpoint, err = workers.DialEndpoint(kv.Publishers[i].Endpoint, base.Hostname(), 0)
		} else {
			src.Endpoint, err = endpoint(kv.Host, kv.Port, rank)
		}
		if err != nil {
			notes = append(notes, fmt.Sprintf("kv_events of rank %d: %.200v", rank, err))
			continue
		}
		if kv.ReplayPort > 0 {
			if src.Replay, err = endpoint(kv.ReplayHost, kv.ReplayPort, rank); err != nil {
				notes = append(notes, fmt.Sprintf("kv_events of rank %d: replay: %.200v", rank, err))
			}
		}
		out = append(out, src)
	}
	return out, notes, nil
}

func clip(s string, n int) string { return s[:min(len(s), n)] }

// parseLoads reads SGLang's /v1/loads (since 0.5.8) by rank.
func parseLoads(b []byte, ranks int, at time.Time) ([]*workers.Load, error) {
	var body struct {
		Loads []struct {
			Rank    *int     `json:"dp_rank"`
			Running *float64 `json:"num_running_reqs"`
			Waiting *float64 `json:"num_waiting_reqs"`
			Usage   *float64 `json:"token_usage"`
			Total   *float64 `json:"max_total_num_tokens"`
		} `json:"loads"`
	}
	if err := json.Unmarshal(b, &body); err != nil {
		return nil, err
	}
	out := make([]*workers.Load, ranks)
	for i, l := range body.Loads {
		rank := i
		if l.Rank != nil {
			rank = *l.Rank
		}
		// A cache of no tokens means that the rank is not ready: its load is unknown.
		if rank < 0 || rank >= ranks || l.Total != nil && *l.Total == 0 {
			continue
		}
		load := workers.UnknownLoad(at)
		if l.Running != nil {
			load.Running = whole(*l.Running)
		}
		if l.Waiting != nil {
			load.Waiting = whole(*l.Waiting)
		}
		if l.Usage != nil && *l.Usage >= 0 && *l.Usage <= 1.5 {
			load.KVUsage = min(*l.Usage, 1)
		}
		if load.Known() {
			out[rank] = &load
		}
	}
	return out, nil
}
