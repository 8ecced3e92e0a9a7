package front

import (
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"math"
	"net/http"
	"sort"
	"time"

	"github.com/dynctl/dynctl/internal/blockhash"
)

// pool sends prompts through the scheduler for their prefill only.
func (s *Server) pool(w http.ResponseWriter, r *http.Request, model string, prompts [][]uint32) (*job, bool) {
	j, err := s.check(r, sampling{common: common{Model: model}}, prompts)
	if err != nil {
		s.refuse(w, err)
		return nil, false
	}
	j.embed, j.Pulls = true, nil
	_, ok := s.whole(w, r, "pool-"+s.requestID(r), j)
	return j, ok
}

func poolUsage(j *job) usage {
	var u usage
	for _, p := range j.prompts {
		u.PromptTokens += len(p)
	}
	u.TotalTokens = u.PromptTokens
	return u
}

// vector is a unit vector that depends on every token; texts with common
// tokens have similar vectors.
func vector(tokens []uint32, size int) []float32 {
	v := make([]float64, size)
	for i, t := range tokens {
		h := blockhash.Next(uint64(t), uint64(i%4))
		for d := range v {
			h = h*6364136223846793005 + 1442695040888963407
			v[d] += float64(int64(h)>>40) / (1 << 23)
		}
	}
	norm := 0.0
	for _, x := range v {
		norm += x * x
	}
	norm = math.Sqrt(norm)
	out := make([]float32, size)
	for i, x := range v {
		if norm > 0 {
			out[i] = float32(x / norm)
		}
	}
	return out
}

// similarity is between 0 and 1.
func similarity(a, b []uint32) float64 {
	x, y := vector(a, 64), vector(b, 64)
	dot := 0.0
	for i := range x {
		dot += float64(x[i]) * float64(y[i])
	}
	return (1 + math.Max(-1, math.Min(1, dot))) / 2
}

type embeddingRequest struct {
	Model      string          `json:"model"`
	Input      json.RawMessage `json:"input"`
	Encoding   string          `json:"encoding_format"`
	Dimensions *int            `json:"dimensions"`
}

func (s *Server) embeddings(w http.ResponseWriter, r *http.Request, q *embeddingRequest) *Error {
	size := embedSize
	if q.Dimensions != nil {
		if size = *q.Dimensions; size < 1 || size > 8192 {
			return badRequest("dimensions", "dimensions must be between 1 and 8192, got %d.", size)
		}
	}
	if q.Encoding != "" && q.Encoding != "float" && q.Encoding != "base64" {
		return badRequest("encoding_format", "encoding_format must be float or base64.")
	}
	prompts, err := s.promptsOf(q.Input)
	if err != nil {
		return err
	}
	j, ok := s.pool(w, r, q.Model, prompts)
	if !ok {
		return nil
	}
	type item struct {
		Index     int    `json:"index"`
		Object    string `json:"object"`
		Embedding any    `json:"embedding"`
	}
	items := make([]item, len(prompts))
	for i, p := range prompts {
		v := vector(p, size)
		items[i] = item{i, "embedding", v}
		if q.Encoding == "base64" {
			b := make([]byte, 0, 4*size)
			for _, x := range v {
				b = binary.LittleEndian.AppendUint32(b, math.Float32bits(x))
			}
			items[i].Embedding = base64.StdEncoding.EncodeToString(b)
		}
	}
	WriteJSON(w, http.StatusOK, map[string]any{"id": "embd-" + s.id(), "object": "list", "created": time.Now().Unix(), "model": j.shown, "data": items, "usage": poolUsage(j)})
	return nil
}

type rerankRequest struct {
	Model           string            `json:"model"`
	Query           string            `json:"query"`
	Documents       []json.RawMessage `json:"documents"`
	TopN            int               `json:"top_n"`
	ReturnDocuments *bool             `json:"return_documents"`
}

func (s *Server) rerank(w http.ResponseWriter, r *http.Request, q *rerankRequest) *Error {
	if q.Query == "" || len(q.Documents) == 0 {
		return badRequest("documents", "query and documents must not be empty.")
	}
	type document struct {
		Text string `json:"text"`
	}
	type result struct {
		Index    int      `json:"index"`
		Document document `json:"document"`
		Score    float64  `json:"relevance_score"`
	}
	query := s.cfg.Vocab.Encode(nil, q.Query)
	prompts := make([][]uint32, len(q.Documents))
	results := make([]result, len(q.Documents))
	for i, raw := range q.Documents {
		var text string
		var d document
		if json.Unmarshal(raw, &text) != nil {
			if json.Unmarshal(raw, &d) != nil {
				return badRequest("documents", "documents must be strings or objects with a text.")
			}
			text = d.Text
		}
		doc := s.cfg.Vocab.Encode(nil, text)
		prompts[i] = append(append([]uint32(nil), query...), doc...)
		results[i] = result{i, document{text}, similarity(query, doc)}
	}
	j, ok := s.pool(w, r, q.Model, prompts)
	if !ok {
		return nil
	}
	sort.SliceStable(results, func(a, b int) bool { return results[a].Score > results[b].Score })
	if q.TopN > 0 && q.TopN < len(results) {
		results = results[:q.TopN]
	}
	u := poolUsage(j)
	WriteJSON(w, http.StatusOK, map[string]any{"id": "rerank-" + s.id(), "model": j.shown, "usage": u, "results": results})
	return nil
}

type scoreRequest struct {
	Model string          `json:"model"`
	Text1 json.RawMessage `json:"text_1"`
	Text2 json.RawMessage `json:"text_2"`
	// The names since vLLM 0.14.
	Queries   json.RawMessage `json:"queries"`
	Documents json.RawMessage `json:"documents"`
}

func (s *Server) score(w http.ResponseWriter, r *http.Request, q *scoreRequest) *Error {
	if absent(q.Text1) {
		q.Text1, q.Text2 = q.Queries, q.Documents
	}
	one, ok1 := oneOrMany(q.Text1)
	two, ok2 := oneOrMany(q.Text2)
	if !ok1 || !ok2 || len(one) == 0 || len(two) == 0 || len(one) != 1 && len(one) != len(two) {
		return badRequest("text_1", "Input lengths must be either 1:1, 1:N or N:N")
	}
	type item struct {
		Index  int     `json:"index"`
		Object string  `json:"object"`
		Score  float64 `json:"score"`
	}
	var items []item
	var prompts [][]uint32
	for i, b := range two {
		a := one[0]
		if len(one) > 1 {
			a = one[i]
		}
		x, y := s.cfg.Vocab.Encode(nil, a), s.cfg.Vocab.Encode(nil, b)
		prompts = append(prompts, append(append([]uint32(nil), x...), y...))
		items = append(items, item{i, "score", similarity(x, y)})
	}
	j, ok := s.pool(w, r, q.Model, prompts)
	if !ok {
		return nil
	}
	WriteJSON(w, http.StatusOK, map[string]any{"id": "score-" + s.id(), "object": "list", "created": time.Now().Unix(), "model": j.shown, "data": items, "usage": poolUsage(j)})
	return nil
}
