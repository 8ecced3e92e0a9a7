package front

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/dynctl/dynctl/internal/workers/sim/engine"
	"github.com/dynctl/dynctl/internal/workers/sim/fault"
	"github.com/dynctl/dynctl/internal/workers/sim/vocab"
)

type modelPermission struct {
	ID                 string  `json:"id"`
	Object             string  `json:"object"`
	Created            int64   `json:"created"`
	AllowCreateEngine  bool    `json:"allow_create_engine"`
	AllowSampling      bool    `json:"allow_sampling"`
	AllowLogprobs      bool    `json:"allow_logprobs"`
	AllowSearchIndices bool    `json:"allow_search_indices"`
	AllowView          bool    `json:"allow_view"`
	AllowFineTuning    bool    `json:"allow_fine_tuning"`
	Organization       string  `json:"organization"`
	Group              *string `json:"group"`
	IsBlocking         bool    `json:"is_blocking"`
}

type modelEntry struct {
	ID          string            `json:"id"`
	Object      string            `json:"object"`
	Created     int64             `json:"created"`
	OwnedBy     string            `json:"owned_by"`
	Root        string            `json:"root"`
	Parent      *string           `json:"parent"`
	MaxModelLen *int              `json:"max_model_len"`
	Permission  []modelPermission `json:"permission"`
}

func (s *Server) modelList() []modelEntry {
	created := s.cfg.Started.Unix()
	base := s.cfg.Models[0]
	var list []modelEntry
	for i, name := range slices.Concat(s.cfg.Models, s.cfg.LoRAs) {
		m := modelEntry{
			ID: name, Object: "model", Created: created, OwnedBy: string(s.cfg.Dialect), Root: base,
			Permission: []modelPermission{{
				ID: "modelperm-" + s.id(), Object: "model_permission", Created: created,
				AllowSampling: true, AllowLogprobs: true, AllowView: true, Organization: "*",
			}},
		}
		if i < len(s.cfg.Models) {
			m.MaxModelLen = &s.cfg.MaxModelLen
		} else {
			m.Parent, m.Root = &base, name
		}
		list = append(list, m)
	}
	return list
}

func (s *Server) models(w http.ResponseWriter, _ *http.Request) {
	WriteJSON(w, http.StatusOK, map[string]any{"object": "list", "data": s.modelList()})
}

func (s *Server) modelCard(w http.ResponseWriter, r *http.Request) {
	if _, _, err := s.model(r.PathValue("id")); err != nil {
		s.refuse(w, err)
		return
	}
	for _, m := range s.modelList() {
		if m.ID == r.PathValue("id") {
			WriteJSON(w, http.StatusOK, m)
			return
		}
	}
	s.fail(w, http.StatusNotFound, "The model `"+r.PathValue("id")+"` does not exist.", "NotFoundError", "model")
}

func (s *Server) health(w http.ResponseWriter, _ *http.Request) {
	if s.cfg.Dead.Err() != nil {
		w.WriteHeader(http.StatusServiceUnavailable)
		return
	}
	w.Header().Set("Content-Length", "0")
	w.WriteHeader(http.StatusOK)
}

func (s *Server) version(w http.ResponseWriter, _ *http.Request) {
	WriteJSON(w, http.StatusOK, map[string]string{"version": cmp.Or(s.cfg.Version, Version[s.cfg.Dialect])})
}

func (s *Server) metrics(w http.ResponseWriter, _ *http.Request) {
	all := make([]engine.Stats, len(s.cfg.Ranks))
	for i, r := range s.cfg.Ranks {
		all[i] = r.Stats()
	}
	f := metricsFacts{
		Model: s.cfg.Models[0], Role: s.cfg.Role, Connector: s.cfg.Connector, BlockSize: s.cfg.BlockSize,
		Blocks: s.cfg.Blocks, MaxModelLen: s.cfg.MaxModelLen, SleepLevel: int(s.level.Load()),
		Started: s.cfg.Started, FirstRank: s.cfg.FirstRank,
	}
	text := vllmMetrics
	if s.sglang() {
		text = sglangMetrics
	}
	writeBody(w, http.StatusOK, "text/plain; version=1.0.0; charset=utf-8", []byte(text(f, all)))
}

func (s *Server) load(w http.ResponseWriter, _ *http.Request) {
	WriteJSON(w, http.StatusOK, map[string]int64{"server_load": s.inflight.Load()})
}

func (s *Server) eventSources(w http.ResponseWriter, _ *http.Request) {
	type source struct {
		Enable   bool    `json:"enable_kv_cache_events"`
		Kind     string  `json:"publisher"`
		Endpoint string  `json:"endpoint"`
		Replay   *string `json:"replay_endpoint"`
		Steps    int     `json:"buffer_steps"`
		HWM      int     `json:"hwm"`
		MaxQueue int     `json:"max_queue_size"`
		Topic    string  `json:"topic"`
	}
	out := make(map[string]source, len(s.cfg.Sources))
	for i, e := range s.cfg.Sources {
		x := source{Enable: true, Kind: "zmq", Endpoint: e.Endpoint, Steps: e.Steps, HWM: 100000, MaxQueue: 100000, Topic: e.Topic}
		if e.Replay != "" {
			x.Replay = &e.Replay
		}
		out[strconv.Itoa(s.cfg.FirstRank+i)] = x
	}
	WriteJSON(w, http.StatusOK, out)
}

func (s *Server) isSleeping(w http.ResponseWriter, _ *http.Request) {
	WriteJSON(w, http.StatusOK, map[string]bool{"is_sleeping": s.level.Load() > 0})
}

func (s *Server) sleep(w http.ResponseWriter, r *http.Request) {
	level := int64(1)
	if v := r.URL.Query().Get("level"); v != "" {
		n, err := strconv.ParseInt(v, 10, 32)
		if err != nil || n < 0 || n > 2 {
			s.refuse(w, badRequest("level", "level must be 0, 1 or 2, got %q.", v))
			return
		}
		level = n
	}
	s.level.Store(int32(level))
	for _, k := range s.cfg.Ranks {
		k.Do(func(core *engine.Rank, now engine.Time) {
			core.Sleep(now, level > 0)
			core.ClearCache(now)
		})
	}
	w.WriteHeader(http.StatusOK)
}

func (s *Server) wakeUp(w http.ResponseWriter, _ *http.Request) {
	s.level.Store(0)
	for _, k := range s.cfg.Ranks {
		k.Do(func(core *engine.Rank, now engine.Time) { core.Sleep(now, false) })
	}
	w.WriteHeader(http.StatusOK)
}

// clearCaches clears the prefix cache of every rank that has no block in use.
func (s *Server) clearCaches() bool {
	all := true
	for _, k := range s.cfg.Ranks {
		k.Do(func(core *engine.Rank, now engine.Time) { all = core.ClearCache(now) && all })
	}
	return all
}

func (s *Server) resetCache(w http.ResponseWriter, _ *http.Request) {
	s.clearCaches() // vLLM answers 200 whether or not it could
	w.WriteHeader(http.StatusOK)
}

// orca adds the load report that the request asks for (endpoint-load-metrics).
func (s *Server) orca(w http.ResponseWriter, r *http.Request, rank int) {
	format := strings.ToUpper(r.Header.Get("endpoint-load-metrics-format"))
	if format == "" || s.sglang() {
		return
	}
	_, waiting, usage := s.cfg.Ranks[rank].Load()
	switch format {
	case "JSON":
		w.Header()["endpoint-load-metrics"] = []string{fmt.Sprintf(`JSON {"named_metrics": {"num_requests_waiting": %s, "kv_cache_usage_perc": %s}}`, formatFloat(float64(waiting)), formatFloat(usage))}
	case "TEXT":
		w.Header()["endpoint-load-metrics"] = []string{fmt.Sprintf("TEXT named_metrics.num_requests_waiting=%s, named_metrics.kv_cache_usage_perc=%s", formatFloat(float64(waiting)), formatFloat(usage))}
	}
}

type tokenizeRequest struct {
	Model               string          `json:"model"`
	Prompt              *string         `json:"prompt"`
	Messages            []chatMessage   `json:"messages"`
	Tools               json.RawMessage `json:"tools"`
	AddGenerationPrompt *bool           `json:"add_generation_prompt"`
	ReturnTokenStrs     bool            `json:"return_token_strs"`
}

func (s *Server) tokenize(w http.ResponseWriter, r *http.Request, q *tokenizeRequest) *Error {
	if _, _, err := s.model(q.Model); err != nil {
		return err
	}
	ids := []uint32{}
	if q.Messages != nil {
		msgs, err := renderChat(q.Messages)
		if err != nil {
			return err
		}
		ids = s.cfg.Vocab.Chat(ids, templateTools(q.Tools), msgs, q.AddGenerationPrompt == nil || *q.AddGenerationPrompt)
	} else {
		if q.Prompt == nil {
			return badRequest("prompt", "1 validation error:\n  {'type': 'missing', 'loc': 'body.prompt', 'msg': 'Field required'}")
		}
		ids = s.cfg.Vocab.Encode(ids, *q.Prompt)
	}
	out := struct {
		Count       int      `json:"count"`
		MaxModelLen int      `json:"max_model_len"`
		Tokens      []uint32 `json:"tokens"`
		TokenStrs   []string `json:"token_strs"`
	}{len(ids), s.cfg.MaxModelLen, ids, nil}
	if q.ReturnTokenStrs {
		for _, id := range ids {
			out.TokenStrs = append(out.TokenStrs, vocab.Printable(s.cfg.Vocab.Text(id)))
		}
	}
	WriteJSON(w, http.StatusOK, out)
	return nil
}

type detokenizeRequest struct {
	Model  string   `json:"model"`
	Tokens []uint32 `json:"tokens"`
}

func (s *Server) detokenize(w http.ResponseWriter, r *http.Request, q *detokenizeRequest) *Error {
	if _, _, err := s.model(q.Model); err != nil {
		return err
	}
	text := vocab.Printable(s.cfg.Vocab.Decode(q.Tokens, false))
	key := "prompt"
	if s.sglang() {
		key = "text"
	}
	WriteJSON(w, http.StatusOK, map[string]string{key: text})
	return nil
}

func (s *Server) getFaults(w http.ResponseWriter, _ *http.Request) {
	set, _ := s.cfg.Faults.Set()
	WriteJSON(w, http.StatusOK, set)
}

func (s *Server) setFaults(w http.ResponseWriter, r *http.Request) {
	var set fault.Set
	d := json.NewDecoder(http.MaxBytesReader(w, r.Body, 1<<20))
	d.DisallowUnknownFields()
	if err := d.Decode(&set); err != nil {
		s.refuse(w, badRequest(nil, "faults: %v", err))
		return
	}
	s.putFaults(w, set)
}

func (s *Server) clearFaults(w http.ResponseWriter, _ *http.Request) { s.putFaults(w, fault.Set{}) }

func (s *Server) putFaults(w http.ResponseWriter, set fault.Set) {
	if err := s.cfg.SetFaults(set); err != nil {
		s.refuse(w, badRequest(nil, "faults: %v", err))
		return
	}
	WriteJSON(w, http.StatusOK, set)
}

func (s *Server) restart(w http.ResponseWriter, _ *http.Request) {
	WriteJSON(w, http.StatusAccepted, map[string]string{"status": "restarting"})
	s.cfg.Restart()
}

func (s *Server) exit(w http.ResponseWriter, _ *http.Request) {
	WriteJSON(w, http.StatusAccepted, map[string]string{"status": "exiting"})
	s.cfg.Exit()
}
