package disagg

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"

	"github.com/dynctl/dynctl/internal/rawjson"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/workers"
)

// lmcacheBody is LMCache's prefill/decode mode ("disagg_spec"): the prefill engine
// pushes KV to the receiver that the request names. Where the request allows it, it also
// returns the token that it sampled: the router sends that to the client, and the decode leg
// continues behind it.
func lmcacheBody(t *Transfer) error {
	d := &t.dispatch
	spec, err := t.of.o.Decoders.Spec(d.Decode.Worker) // of the decode worker that was chosen
	if err != nil {
		return err
	}
	first := takesFirstToken(&d.Facts)
	ask := append(make([]byte, 0, 256), `{"ret_first_tok":`...)
	ask = strconv.AppendBool(ask, first)
	ask = append(ask, `,"disagg_spec":{"req_id":`...)
	ask = append(ask, api.RawString(d.RequestID)...)
	ask = append(ask, `,"receiver_host":`...)
	ask = append(ask, api.RawString(spec.Host)...)
	ask = appendInts(append(ask, `,"receiver_init_port":`...), spec.InitPorts)
	ask = appendInts(append(ask, `,"receiver_alloc_port":`...), spec.AllocPorts)
	ask = append(ask, "}}"...)
	t.prefill = oneToken(&d.Facts, api.Set(transferParams, ask))
	if first {
		t.prefill = append(t.prefill, api.Set("prompt", appendInts(nil, d.Facts.TokenIDs)))
	}
	return nil
}

// takesFirstToken reports whether the first token can be taken from the
// prefill without a change of what the client sees. A chat cannot: its decode
// leg has no place for a token behind the messages. Neither can a request whose
// own limit is not known, as the decode leg must generate one token less, nor a
// stream with usage, which would count the token as prompt.
func takesFirstToken(f *api.Facts) bool {
	return f.Kind == api.Completion && len(f.TokenIDs) > 0 && f.MaxTokens >= 2 && f.MaxTokensKey != "" &&
		f.N <= 1 && f.Prompts <= 1 && !f.Logprobs && !f.Echo && !f.StreamUsage
}

func checkLMCache(t *Transfer, a *answer) error {
	if !takesFirstToken(&t.dispatch.Facts) {
		return nil
	}
	if a.ended() {
		// The answer ended with its first token; the decode leg finds that
		// out by itself from the whole prompt.
		return nil
	}
	if !a.params.Exists() {
		return ErrMissingParams
	}
	var first rawjson.Value
	for key, v := range a.params.Members() {
		if string(key) == "first_tok" {
			first = v
		}
	}
	if !rawjson.IsObject(a.params) {
		return &ParamsError{Field: transferParams, Problem: "not an object"}
	}
	if !present(first) {
		return fmt.Errorf("%w: no first_tok", ErrMissingParams)
	}
	id, ok := first.Int()
	if !ok || id < 0 || id > math.MaxInt32 {
		return &ParamsError{Field: "first_tok", Problem: "not a token id"}
	}
	f := &t.dispatch.Facts
	t.first = &FirstToken{a.text}
	ids := appendInts(nil, f.TokenIDs)
	ids = append(ids[:len(ids)-1], ',')
	ids = append(strconv.AppendInt(ids, int64(id), 10), ']')
	t.decode = []api.Edit{api.Set("prompt", ids), api.Set(f.MaxTokensKey, api.RawInt(f.MaxTokens-1))}
	if f.MinTokens > 0 {
		t.decode = append(t.decode, api.Replace("min_tokens", api.RawInt(f.MinTokens-1)))
	}
	return nil
}

// DecoderRegistry finds the LMCache receiver of a decode worker: by its URL, else what the
// worker itself was given. The values that it hands out are the caller's own.
type DecoderRegistry struct {
	byURL map[string]workers.LMCacheDecoder
}

// maxDecoders bounds a registry.
const maxDecoders = 4096

// ParseDecoderRegistry reads the JSON object of --decoder-registry:
//
//	{"http://decode-0:8000": {"receiver_host": "decode-0",
//	  "receiver_init_port": [7300], "receiver_alloc_port": [7400]}, …}
func ParseDecoderRegistry(text []byte) (*DecoderRegistry, error) {
	var in map[string]struct {
		Host  string `json:"receiver_host"`
		Init  []int  `json:"receiver_init_port"`
		Alloc []int  `json:"receiver_alloc_port"`
	}
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(&in); err != nil {
		return nil, fmt.Errorf("decoder registry: %w", err)
	}
	if _, err := d.Token(); err != io.EOF {
		return nil, errors.New("decoder registry: something follows the object")
	}
	if len(in) > maxDecoders {
		return nil, fmt.Errorf("decoder registry: %d decoders, at most %d", len(in), maxDecoders)
	}
	r := &DecoderRegistry{byURL: make(map[string]workers.LMCacheDecoder, len(in))}
	var errs []error
	for u, s := range in {
		spec := workers.LMCacheDecoder{Host: s.Host, InitPorts: s.Init, AllocPorts: s.Alloc}
		if err := checkSpec(&spec); err != nil {
			errs = append(errs, fmt.Errorf("decoder registry: %s: %w", u, err))
		}
		r.byURL[normalURL(u)] = spec
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return r, nil
}

func checkSpec(s *workers.LMCacheDecoder) error {
	if s.Host == "" {
		return errors.New("no receiver_host")
	}
	if len(s.InitPorts) == 0 || len(s.InitPorts) != len(s.AllocPorts) {
		return fmt.Errorf("%d init ports and %d alloc ports: one of each for every tensor-parallel rank", len(s.InitPorts), len(s.AllocPorts))
	}
	for _, p := range append(append([]int(nil), s.InitPorts...), s.AllocPorts...) {
		if p < 1 || p > 65535 {
			return fmt.Errorf("%d is not a port", p)
		}
	}
	return nil
}

// Spec is the receiver of a decode worker.
func (r *DecoderRegistry) Spec(w *workers.Worker) (workers.LMCacheDecoder, error) {
	if r != nil && w.URL != nil {
		if s, ok := r.byURL[normalURL(w.URL.String())]; ok {
			return clone(s), nil
		}
	}
	if w.LMCache == nil {
		return workers.LMCacheDecoder{}, fmt.Errorf("lmcache: decode worker %s has no receiver: name it in the decoder registry", w.Name)
	}
	return clone(*w.LMCache), nil
}

func clone(s workers.LMCacheDecoder) workers.LMCacheDecoder {
	s.InitPorts = append([]int(nil), s.InitPorts...)
	s.AllocPorts = append([]int(nil), s.AllocPorts...)
	return s
}

func normalURL(u string) string { return strings.TrimRight(u, "/") }
