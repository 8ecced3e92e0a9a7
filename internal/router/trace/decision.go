package trace

import (
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"strconv"
	"unicode/utf8"

	"github.com/dynctl/dynctl/internal/router/decision"
)

// Decision is everything that a routing decision was made from, and what it
// was. It mirrors the inputs of packages selector and decide, so that the
// format does not move with them.
type Decision struct {
	ID        string `json:"id"`
	RequestID string `json:"request_id,omitempty"`
	Attempt   int    `json:"attempt"`
	Model     string `json:"model,omitempty"`
	// BeganUS is when the router got the request. The caches that the decision
	// saw are those of a moment between it and the record's time.
	BeganUS int64 `json:"began_us"`
	// BlockSize is the tokens of a block of Locals, which are the local hashes
	// of the prompt's full blocks. Approximate says that they are text chunks.
	BlockSize   int    `json:"block_size_tokens"`
	Locals      Hashes `json:"locals,omitempty"`
	Approximate bool   `json:"approximate,omitempty"`
	Tokens      Tokens `json:"tokens,omitempty"`

	Config Config `json:"config"`
	Facts  Facts  `json:"facts"`
	Force  string `json:"force,omitempty"`
	// Decode and Prefill are the choices of both phases.
	Decode  Phase `json:"decode"`
	Prefill Phase `json:"prefill"`

	// What was decided.
	Path        string `json:"path,omitempty"`
	Reason      string `json:"reason,omitempty"`
	Error       string `json:"error,omitempty"`
	EffISL      int    `json:"eff_isl_tokens"`
	Cached      int    `json:"cached_tokens"`
	DecodeRank  string `json:"decode_rank,omitempty"`
	PrefillRank string `json:"prefill_rank,omitempty"`
}

// Config mirrors decide.Rule.
type Config struct {
	Threshold   int     `json:"threshold_tokens"`
	On          string  `json:"threshold_on,omitempty"`
	Fallback    string  `json:"fallback,omitempty"`
	PrefillGate int     `json:"prefill_gate_tokens,omitempty"`
	DecodeGate  float64 `json:"decode_gate_ratio,omitempty"`
	Connector   string  `json:"connector,omitempty"`
}

// Facts mirrors disagg.Facts, without token ids.
type Facts struct {
	Kind           string `json:"kind"`
	Splittable     bool   `json:"splittable,omitempty"`
	ISL            int    `json:"isl_tokens"`
	Source         string `json:"isl_source,omitempty"`
	N              int    `json:"n,omitempty"`
	Prompts        int    `json:"prompts,omitempty"`
	Multimodal     bool   `json:"multimodal,omitempty"`
	PromptLogprobs bool   `json:"prompt_logprobs,omitempty"`
	MaxTokens      int64  `json:"max_tokens"`
}

// Phase mirrors selector.Input.
type Phase struct {
	Phase      string      `json:"phase"`
	Policy     string      `json:"policy"`
	Weights    Weights     `json:"weights"`
	Busy       Busy        `json:"busy"`
	ISL        int         `json:"isl_tokens"`
	BlockSize  int         `json:"block_size_tokens"`
	SessionKey uint64      `json:"session_key,omitempty"`
	Draw       uint64      `json:"draw"`
	Turn       uint64      `json:"turn"`
	Candidates []Candidate `json:"candidates"`
}

// Weights mirrors selector.Weights.
type Weights struct {
	OverlapCredit    float64 `json:"overlap_credit"`
	CreditDecay      float64 `json:"credit_decay"`
	PrefillLoadScale float64 `json:"prefill_load_scale"`
	Queue            float64 `json:"queue"`
	DecodeLoad       float64 `json:"decode_load"`
	Spread           float64 `json:"spread"`
	ActiveRequest    float64 `json:"active_request"`
	Temperature      float64 `json:"temperature"`
}

// Busy mirrors selector.Busy.
type Busy struct {
	DecodeBlocksShare float64 `json:"decode_blocks_share,omitempty"`
	PrefillTokens     int     `json:"prefill_tokens,omitempty"`
	Waiting           int     `json:"waiting_requests,omitempty"`
	KVUsage           float64 `json:"kv_usage_ratio,omitempty"`
}

// Candidate is a candidate as the decision saw it, with what is needed of its
// worker and the cost that it got.
type Candidate struct {
	decision.Candidate
	Engine, Connector string
	// EngineBlock is the worker's own block in tokens, 0 when unknown.
	EngineBlock int
}

// UnmarshalJSON reads the names of this format, which are not those of receipts.
func (c *Candidate) UnmarshalJSON(p []byte) error {
	var v struct {
		Rank        string  `json:"rank"`
		Slot        uint32  `json:"slot"`
		Engine      string  `json:"engine"`
		Connector   string  `json:"connector"`
		EngineBlock int     `json:"engine_block_tokens"`
		Overlap     int     `json:"overlap_blocks"`
		Requests    int     `json:"active_requests"`
		Prefill     int     `json:"prefill_tokens"`
		Decode      int     `json:"decode_blocks"`
		Fresh       int     `json:"fresh_tokens"`
		LastTurn    uint64  `json:"last_turn"`
		Resident    int     `json:"resident_blocks"`
		KVBlocks    int     `json:"kv_blocks"`
		HasLoad     bool    `json:"has_load"`
		Running     int     `json:"running"`
		Waiting     int     `json:"waiting"`
		KVUsage     float64 `json:"kv_usage_ratio"`
		Excluded    string  `json:"excluded"`
		Tried       bool    `json:"tried"`
		Cost        float64 `json:"cost"`
	}
	if err := json.Unmarshal(p, &v); err != nil {
		return err
	}
	*c = Candidate{
		Candidate: decision.Candidate{
			Rank: v.Rank, Slot: v.Slot, OverlapBlocks: v.Overlap, Cost: v.Cost, ActiveRequests: v.Requests, PrefillTokens: v.Prefill,
			DecodeBlocks: v.Decode, FreshTokens: v.Fresh, LastTurn: v.LastTurn, ResidentBlocks: v.Resident, KVBlocks: v.KVBlocks,
			HasLoad: v.HasLoad, Running: v.Running, Waiting: v.Waiting, KVUsage: v.KVUsage, KeptOut: v.Excluded, Tried: v.Tried,
		},
		Engine: v.Engine, Connector: v.Connector, EngineBlock: v.EngineBlock,
	}
	return nil
}

// Hashes are 64-bit hashes, in JSON the base64 of their little-endian bytes.
type Hashes []uint64

// MarshalJSON writes base64.
func (h Hashes) MarshalJSON() ([]byte, error) { return appendHashes(nil, h), nil }

// UnmarshalJSON reads base64.
func (h *Hashes) UnmarshalJSON(p []byte) error {
	s, err := textOf(p)
	if err != nil {
		return err
	}
	*h, err = decodeHashes(nil, s)
	return err
}

// Tokens are token ids, in JSON the base64 of their little-endian bytes.
type Tokens []uint32

// MarshalJSON writes base64.
func (t Tokens) MarshalJSON() ([]byte, error) { return appendTokens(nil, t), nil }

// UnmarshalJSON reads base64.
func (t *Tokens) UnmarshalJSON(p []byte) error {
	s, err := textOf(p)
	if err != nil {
		return err
	}
	raw, err := base64.StdEncoding.DecodeString(s)
	if err != nil {
		return fmt.Errorf("token ids: %w", err)
	}
	if len(raw)%4 != 0 {
		return fmt.Errorf("token ids: %d bytes are not a multiple of 4", len(raw))
	}
	*t = make(Tokens, len(raw)/4)
	for i := range *t {
		(*t)[i] = binary.LittleEndian.Uint32(raw[4*i:])
	}
	return nil
}

func textOf(p []byte) (string, error) {
	var s string
	if err := json.Unmarshal(p, &s); err != nil {
		return "", fmt.Errorf("want base64 in a string: %w", err)
	}
	return s, nil
}

// appendHashes appends the JSON string of hashes.
func appendHashes(dst []byte, h []uint64) []byte {
	dst = append(dst, '"')
	var raw [240]byte // a multiple of 3 and 8, so that pieces join
	for len(h) > 0 {
		n := min(len(h), len(raw)/8)
		for i, v := range h[:n] {
			binary.LittleEndian.PutUint64(raw[8*i:], v)
		}
		dst = base64.StdEncoding.AppendEncode(dst, raw[:8*n])
		h = h[n:]
	}
	return append(dst, '"')
}

func appendTokens(dst []byte, t []uint32) []byte {
	dst = append(dst, '"')
	var raw [240]byte
	for len(t) > 0 {
		n := min(len(t), len(raw)/4)
		for i, v := range t[:n] {
			binary.LittleEndian.PutUint32(raw[4*i:], v)
		}
		dst = base64.StdEncoding.AppendEncode(dst, raw[:4*n])
		t = t[n:]
	}
	return append(dst, '"')
}

// decodeHashes appends the hashes of base64 text to dst.
func decodeHashes[T string | []byte](dst []uint64, s T) ([]uint64, error) {
	var raw [240]byte
	var quad [320]byte
	for len(s) > 0 {
		n := copy(quad[:], s)
		m, err := base64.StdEncoding.Decode(raw[:], quad[:n])
		if err != nil {
			return dst, fmt.Errorf("hashes: %w", err)
		}
		if m%8 != 0 {
			return dst, fmt.Errorf("hashes: %d bytes are not a multiple of 8", m)
		}
		for i := 0; i < m; i += 8 {
			dst = append(dst, binary.LittleEndian.Uint64(raw[i:]))
		}
		s = s[n:]
	}
	return dst, nil
}

// object writes JSON members by hand: decisions are written on the request
// path. The zero value with dst set is ready; first is cleared by the first member.
type object struct {
	p     []byte
	begun bool
}

func (o *object) open()  { o.p, o.begun = append(o.p, '{'), false }
func (o *object) close() { o.p, o.begun = append(o.p, '}'), true }

func (o *object) key(k string) {
	if o.begun {
		o.p = append(o.p, ',')
	}
	o.begun = true
	o.p = append(o.p, '"')
	o.p = append(o.p, k...)
	o.p = append(o.p, '"', ':')
}

func (o *object) str(k, v string) {
	if v != "" {
		o.key(k)
		o.p = appendString(o.p, v)
	}
}

func (o *object) int(k string, v int) { o.key(k); o.p = strconv.AppendInt(o.p, int64(v), 10) }

func (o *object) uint(k string, v uint64) { o.key(k); o.p = strconv.AppendUint(o.p, v, 10) }

func (o *object) some(k string, v int) {
	if v != 0 {
		o.int(k, v)
	}
}

func (o *object) yes(k string, v bool) {
	if v {
		o.key(k)
		o.p = append(o.p, "true"...)
	}
}

// num writes a number; JSON has none for NaN and infinities, which read as -1.
func (o *object) num(k string, v float64) {
	o.key(k)
	if math.IsNaN(v) || math.IsInf(v, 0) {
		v = -1
	}
	o.p = strconv.AppendFloat(o.p, v, 'g', -1, 64)
}

// appendString appends s as a JSON string.
func appendString(dst []byte, s string) []byte {
	plain := true
	for i := 0; i < len(s); i++ {
		if c := s[i]; c < ' ' || c == '"' || c == '\\' || c >= utf8.RuneSelf {
			plain = false
			break
		}
	}
	if plain {
		dst = append(dst, '"')
		dst = append(dst, s...)
		return append(dst, '"')
	}
	q, _ := json.Marshal(s) // a string cannot fail
	return append(dst, q...)
}

// appendTo writes the members of d but the kind and the time.
func (d *Decision) appendTo(o *object) {
	o.str("id", d.ID)
	o.str("request_id", d.RequestID)
	o.int("attempt", d.Attempt)
	o.str("model", d.Model)
	o.int("began_us", int(d.BeganUS))
	o.int("block_size_tokens", d.BlockSize)
	if len(d.Locals) > 0 {
		o.key("locals")
		o.p = appendHashes(o.p, d.Locals)
	}
	o.yes("approximate", d.Approximate)
	if len(d.Tokens) > 0 {
		o.key("tokens")
		o.p = appendTokens(o.p, d.Tokens)
	}
	o.key("config")
	o.open()
	o.int("threshold_tokens", d.Config.Threshold)
	o.str("threshold_on", d.Config.On)
	o.str("fallback", d.Config.Fallback)
	o.some("prefill_gate_tokens", d.Config.PrefillGate)
	if d.Config.DecodeGate != 0 {
		o.num("decode_gate_ratio", d.Config.DecodeGate)
	}
	o.str("connector", d.Config.Connector)
	o.close()
	f := &d.Facts
	o.key("facts")
	o.open()
	o.str("kind", f.Kind)
	o.yes("splittable", f.Splittable)
	o.int("isl_tokens", f.ISL)
	o.str("isl_source", f.Source)
	o.some("n", f.N)
	o.some("prompts", f.Prompts)
	o.yes("multimodal", f.Multimodal)
	o.yes("prompt_logprobs", f.PromptLogprobs)
	o.int("max_tokens", int(f.MaxTokens))
	o.close()
	o.str("force", d.Force)
	o.key("decode")
	d.Decode.appendTo(o)
	o.key("prefill")
	d.Prefill.appendTo(o)
	o.str("path", d.Path)
	o.str("reason", d.Reason)
	o.str("error", d.Error)
	o.int("eff_isl_tokens", d.EffISL)
	o.int("cached_tokens", d.Cached)
	o.str("decode_rank", d.DecodeRank)
	o.str("prefill_rank", d.PrefillRank)
}

func (p *Phase) appendTo(o *object) {
	o.open()
	o.str("phase", p.Phase)
	o.str("policy", p.Policy)
	o.key("weights")
	o.open()
	w := &p.Weights
	o.num("overlap_credit", w.OverlapCredit)
	o.num("credit_decay", w.CreditDecay)
	o.num("prefill_load_scale", w.PrefillLoadScale)
	o.num("queue", w.Queue)
	o.num("decode_load", w.DecodeLoad)
	o.num("spread", w.Spread)
	o.num("active_request", w.ActiveRequest)
	o.num("temperature", w.Temperature)
	o.close()
	o.key("busy")
	o.open()
	b := &p.Busy
	if b.DecodeBlocksShare != 0 {
		o.num("decode_blocks_share", b.DecodeBlocksShare)
	}
	o.some("prefill_tokens", b.PrefillTokens)
	o.some("waiting_requests", b.Waiting)
	if b.KVUsage != 0 {
		o.num("kv_usage_ratio", b.KVUsage)
	}
	o.close()
	o.int("isl_tokens", p.ISL)
	o.int("block_size_tokens", p.BlockSize)
	if p.SessionKey != 0 {
		o.uint("session_key", p.SessionKey)
	}
	o.uint("draw", p.Draw)
	o.uint("turn", p.Turn)
	o.key("candidates")
	o.p = append(o.p, '[')
	for i := range p.Candidates {
		if i > 0 {
			o.p = append(o.p, ',')
		}
		p.Candidates[i].appendTo(o)
	}
	o.p = append(o.p, ']')
	o.close()
}

func (c *Candidate) appendTo(o *object) {
	o.open()
	o.str("rank", c.Rank)
	o.uint("slot", uint64(c.Slot))
	o.str("engine", c.Engine)
	o.str("connector", c.Connector)
	o.some("engine_block_tokens", c.EngineBlock)
	o.int("overlap_blocks", c.OverlapBlocks)
	o.int("active_requests", c.ActiveRequests)
	o.int("prefill_tokens", c.PrefillTokens)
	o.int("decode_blocks", c.DecodeBlocks)
	o.int("fresh_tokens", c.FreshTokens)
	o.uint("last_turn", c.LastTurn)
	o.int("resident_blocks", c.ResidentBlocks)
	o.some("kv_blocks", c.KVBlocks)
	o.yes("has_load", c.HasLoad)
	o.some("running", c.Running)
	o.some("waiting", c.Waiting)
	usage := c.KVUsage
	if !c.HasLoad {
		usage = -1 // nobody told
	}
	o.num("kv_usage_ratio", usage)
	o.str("excluded", c.KeptOut)
	o.yes("tried", c.Tried)
	o.num("cost", c.Cost)
	o.close()
}
