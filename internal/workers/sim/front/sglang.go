package front

import (
	"cmp"
	"encoding/json"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/dynctl/dynctl/internal/workers"
)

type sglRequest struct {
	sampling
	Text           json.RawMessage `json:"text"`
	InputIDs       json.RawMessage `json:"input_ids"`
	RID            string          `json:"rid"`
	SamplingParams struct {
		MaxNewTokens *int            `json:"max_new_tokens"`
		MinNewTokens int             `json:"min_new_tokens"`
		IgnoreEOS    bool            `json:"ignore_eos"`
		Stop         json.RawMessage `json:"stop"`
		N            *int            `json:"n"`
	} `json:"sampling_params"`
	LoRAPath string `json:"lora_path"`
}

type sglMeta struct {
	ID               string `json:"id"`
	FinishReason     any    `json:"finish_reason"`
	PromptTokens     int    `json:"prompt_tokens"`
	WeightVersion    string `json:"weight_version"`
	CompletionTokens int    `json:"completion_tokens"`
	CachedTokens     int    `json:"cached_tokens"`
	DPRank           int    `json:"dp_rank"`
}

type sglAnswer struct {
	Text      string   `json:"text"`
	OutputIDs []uint32 `json:"output_ids"`
	Meta      sglMeta  `json:"meta_info"`
}

// sglListed is the answer to one of several prompts in a stream.
type sglListed struct {
	Index int `json:"index"`
	sglAnswer
}

func (s *Server) sglAnswer(base string, c *choice, text string) sglAnswer {
	a := sglAnswer{Text: text, OutputIDs: c.tokens, Meta: sglMeta{ID: base, PromptTokens: len(c.prompt), WeightVersion: "default", CompletionTokens: len(c.tokens), CachedTokens: c.cached, DPRank: c.rank}}
	switch c.finish {
	case "":
	case "length":
		a.Meta.FinishReason = map[string]any{"type": "length", "length": len(c.tokens)}
	default:
		m := map[string]any{"type": c.finish}
		if c.stop != nil {
			m["matched"] = c.stop
		}
		a.Meta.FinishReason = m
	}
	return a
}

// sglGenerate is POST /generate, SGLang's own API.
func (s *Server) sglGenerate(w http.ResponseWriter, r *http.Request, q *sglRequest) *Error {
	raw := q.InputIDs
	if absent(raw) {
		raw = q.Text
	}
	prompts, err := s.promptsOf(raw)
	if err != nil {
		return err
	}
	f := q.sampling
	f.MaxTokens, f.MinTokens, f.IgnoreEOS = cmp.Or(q.SamplingParams.MaxNewTokens, new(128)), q.SamplingParams.MinNewTokens, q.SamplingParams.IgnoreEOS
	f.Stop, f.N, f.StreamOptions = q.SamplingParams.Stop, q.SamplingParams.N, nil
	if q.LoRAPath != "" {
		f.Model = q.LoRAPath
	}
	j, err := s.check(r, f, prompts)
	if err != nil {
		return err
	}
	base := q.RID
	if base == "" {
		base = s.id() + s.id()
	}
	list := raw[0] == '[' && len(prompts) > 1
	if j.stream {
		e := newEvents(w)
		s.streaming(w, r, base, j, e, nil, func(c *choice, _ delta) error {
			var a any = s.sglAnswer(base, c, c.text.String())
			if list {
				a = sglListed{c.index, a.(sglAnswer)}
			}
			if err := e.Add("", a); err != nil {
				return err
			}
			return e.Send()
		}, func(usage) {})
		return nil
	}
	all, ok := s.whole(w, r, base, j)
	if !ok {
		return nil
	}
	var out []sglAnswer
	for _, c := range all {
		out = append(out, s.sglAnswer(base, c, c.text.String()))
	}
	if list {
		WriteJSON(w, http.StatusOK, out)
		return nil
	}
	WriteJSON(w, http.StatusOK, out[0])
	return nil
}

func (s *Server) sglServerInfo(w http.ResponseWriter, r *http.Request) {
	mode := "null"
	switch s.cfg.Role {
	case workers.Prefill:
		mode = "prefill"
	case workers.Decode:
		mode = "decode"
	case workers.Aggregated:
	}
	info := map[string]any{
		"model_path": s.cfg.Models[0], "served_model_name": s.cfg.Models[0], "tokenizer_path": s.cfg.Models[0],
		"version": Version[workers.SGLang], "page_size": s.cfg.BlockSize, "dp_size": len(s.cfg.Ranks), "tp_size": 1,
		"context_length": s.cfg.MaxModelLen, "max_running_requests": s.cfg.MaxSeqs,
		"max_total_num_tokens": (s.cfg.Blocks - 1) * s.cfg.BlockSize, "max_prefill_tokens": s.cfg.MaxBatchedTokens,
		"chunked_prefill_size": s.cfg.MaxBatchedTokens, "disaggregation_mode": mode, "kv_events": nil,
		"status": "ready",
	}
	if s.cfg.Links != nil && s.cfg.Role == workers.Prefill && len(s.cfg.Links) > 0 {
		info["disaggregation_bootstrap_port"] = s.cfg.Links[0].Port
	}
	if len(s.cfg.Sources) > 0 {
		u, err := url.Parse(s.cfg.Sources[0].Endpoint)
		if err == nil {
			port, _ := strconv.Atoi(u.Port())
			ev := map[string]any{
				"publisher": "zmq", "endpoint_host": u.Hostname(), "endpoint_port_base": port,
				"topic": s.cfg.Sources[0].Topic, "block_size": s.cfg.BlockSize, "dp_size": len(s.cfg.Ranks),
			}
			if ru, err := url.Parse(s.cfg.Sources[0].Replay); err == nil && ru.Port() != "" {
				rp, _ := strconv.Atoi(ru.Port())
				ev["replay_endpoint_host"], ev["replay_endpoint_port_base"] = ru.Hostname(), rp
			}
			pubs := make([]map[string]any, len(s.cfg.Sources))
			for i, e := range s.cfg.Sources {
				pubs[i] = map[string]any{"dp_rank": i, "endpoint": e.Endpoint}
			}
			ev["publishers"] = pubs
			info["kv_events"] = ev
		}
	}
	WriteJSON(w, http.StatusOK, info)
}

func (s *Server) sglModelInfo(w http.ResponseWriter, _ *http.Request) {
	WriteJSON(w, http.StatusOK, map[string]any{"model_path": s.cfg.Models[0], "tokenizer_path": s.cfg.Models[0], "is_generation": true, "preferred_sampling_params": nil, "weight_version": "default"})
}

func (s *Server) sglLoads(w http.ResponseWriter, _ *http.Request) {
	type load struct {
		DPRank      int     `json:"dp_rank"`
		Running     int     `json:"num_running_reqs"`
		Waiting     int     `json:"num_waiting_reqs"`
		Used        int     `json:"num_used_tokens"`
		Total       int     `json:"num_total_tokens"`
		Max         int     `json:"max_total_num_tokens"`
		MaxRunning  int     `json:"max_running_requests"`
		Usage       float64 `json:"token_usage"`
		Utilization float64 `json:"utilization"`
	}
	loads := make([]load, len(s.cfg.Ranks))
	room := (s.cfg.Blocks - 1) * s.cfg.BlockSize
	for i, k := range s.cfg.Ranks {
		t := k.Stats()
		used := t.UsedBlocks * s.cfg.BlockSize
		loads[i] = load{i, t.Running, t.Waiting, used, used, room, s.cfg.MaxSeqs, t.KVUsage, float64(t.Running) / float64(s.cfg.MaxSeqs)}
	}
	WriteJSON(w, http.StatusOK, map[string]any{"timestamp": time.Now().Format(time.RFC3339), "version": Version[workers.SGLang], "accelerator": "sim", "num_accelerators": len(s.cfg.Ranks), "loads": loads})
}

func (s *Server) sglGetLoad(w http.ResponseWriter, _ *http.Request) {
	type load struct {
		DPRank  int `json:"dp_rank"`
		Reqs    int `json:"num_reqs"`
		Waiting int `json:"num_waiting_reqs"`
		Tokens  int `json:"num_tokens"`
	}
	loads := make([]load, len(s.cfg.Ranks))
	for i, k := range s.cfg.Ranks {
		t := k.Stats()
		loads[i] = load{i, t.Running, t.Waiting, t.UsedBlocks * s.cfg.BlockSize}
	}
	WriteJSON(w, http.StatusOK, loads)
}

func (s *Server) sglFlush(w http.ResponseWriter, _ *http.Request) {
	if !s.clearCaches() {
		writeBody(w, http.StatusBadRequest, "text/plain; charset=utf-8", []byte("Failed to flush cache: requests are running.\n"))
		return
	}
	writeBody(w, http.StatusOK, "text/plain; charset=utf-8", []byte("Cache flushed.\nPlease check backend logs for more details.\n"))
}
