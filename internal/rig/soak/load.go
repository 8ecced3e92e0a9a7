package soak

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"
	"sync"

	"github.com/dynctl/dynctl/internal/rawjson"
)

// The models of the two engine families in the fleet.
const (
	modelVLLM   = "sim"
	modelSGLang = "sgl"
)

// Kinds of requests.
const (
	kindChat       = "chat"
	kindCompletion = "completion"
	kindIDs        = "token_ids"
	kindCut        = "token_ids_cut" // the engine leaves out the beginning
	kindBatch      = "batch"         // several prompts
	kindMessages   = "messages"
	kindResponses  = "responses"
	kindEmbedding  = "embedding"
)

// Smallest and largest prompt in bytes.
const (
	minPrompt = 1 << 10
	maxPrompt = 220 << 10
)

// job is one request: everything about it follows from its number.
type job struct {
	kind, model, path string
	stream            bool
	bytes             int // of the prompt
	maxTokens         int
	body              func(stream bool) []byte
}

// poolSize is how many different requests one epoch has. They come again and
// again, so that caches hit; the next epoch has others, so that caches evict.
const poolSize = 192

// makeJob makes request number n of an epoch.
func makeJob(seed, epoch uint64, n int) job {
	rng := rand.New(rand.NewPCG(seed^epoch<<20, uint64(n)))
	j := job{model: modelVLLM, maxTokens: 4 + rng.IntN(44), stream: rng.IntN(2) == 0}
	if rng.IntN(3) == 0 {
		j.model = modelSGLang
	}
	// Lengths are even on a logarithmic scale: as many between 1 and 2 KB as
	// between 110 and 220.
	j.bytes = int(minPrompt * math.Exp(rng.Float64()*math.Log(maxPrompt/minPrompt)))
	family, own := rng.IntN(12), rng.Uint64()
	shared := j.bytes * rng.IntN(90) / 100
	text := func() string { return prose(seed^epoch<<8, uint64(family), own, shared, j.bytes) }
	encode := func(v map[string]any, stream bool) []byte {
		v["model"] = j.model
		if j.kind != kindEmbedding {
			limit := "max_tokens"
			if j.kind == kindResponses {
				limit = "max_output_tokens"
			}
			v[limit], v["temperature"] = j.maxTokens, 0
			if stream {
				v["stream"] = true
			}
		}
		b, err := json.Marshal(v)
		if err != nil {
			panic(err) // maps of strings and numbers
		}
		return b
	}
	conversation := []map[string]string{{"role": "system", "content": "answer in plain words"}, {"role": "user"}}
	switch k := rng.IntN(24); {
	case k < 8:
		j.kind, j.path = kindChat, "/v1/chat/completions"
		j.body = func(stream bool) []byte {
			conversation[1]["content"] = text()
			return encode(map[string]any{"messages": conversation}, stream)
		}
	case k < 13:
		j.kind, j.path = kindCompletion, "/v1/completions"
		j.body = func(stream bool) []byte { return encode(map[string]any{"prompt": text()}, stream) }
	case k < 18:
		j.kind, j.path = kindIDs, "/v1/completions"
		j.body = func(stream bool) []byte {
			return encode(map[string]any{"prompt": numbers(seed^epoch<<8, uint64(family), own, shared/6, j.bytes/6)}, stream)
		}
	case k == 18:
		j.kind, j.path, j.model = kindMessages, "/v1/messages", modelVLLM
		j.body = func(stream bool) []byte {
			conversation[1]["content"] = text()
			return encode(map[string]any{"messages": conversation[1:]}, stream)
		}
	case k == 19:
		j.kind, j.path, j.model = kindResponses, "/v1/responses", modelVLLM
		j.body = func(stream bool) []byte {
			conversation[1]["content"] = text()
			return encode(map[string]any{"input": conversation, "store": false}, stream)
		}
	case k == 20:
		j.kind, j.path, j.model = kindCut, "/v1/completions", modelVLLM
		j.body = func(stream bool) []byte {
			n := max(j.bytes/6, 8)
			return encode(map[string]any{"prompt": numbers(seed^epoch<<8, uint64(family), own, shared/6, n), "truncate_prompt_tokens": 1 + n/2}, stream)
		}
	case k == 21:
		j.kind, j.path, j.stream = kindBatch, "/v1/completions", false
		j.body = func(bool) []byte {
			var prompts [3][]uint32
			for i := range prompts {
				prompts[i] = numbers(seed^epoch<<8, uint64(family), own+uint64(i), shared/18, j.bytes/18)
			}
			return encode(map[string]any{"prompt": prompts}, false)
		}
	default:
		j.kind, j.path, j.model, j.stream = kindEmbedding, "/v1/embeddings", modelVLLM, false
		j.body = func(bool) []byte { return encode(map[string]any{"input": text()}, false) }
	}
	return j
}

// streams reports whether the answer can be asked for as a stream. That of a
// batch could, but its parts mingle as the engine likes, so that there is
// nothing to compare.
func (j *job) streams() bool { return j.kind != kindEmbedding && j.kind != kindBatch }

var words = strings.Fields(`the of and to in is was for on are with as his they at be this from have or by one had not but what all were when we there can an your which their said if do will each about how up out them then she many some so these would other into has more her two like him see time could no make than first been its who now people my made over did down only way find use may water long little very after called just where most know get through back much before go good new write our used me man too any day same right look think also around another came come work three word must because does part even place well such here take why things help put years different away again off went old number great tell men say small every found still between name should home big give air line set own under read last never us left end along while might next sound below saw something thought both few those always looked show large often together asked house world going want school important until form food keep children feet land side without boy once animals life enough took sometimes four head above kind began almost live page got earth need far hand high year mother light parts country father let night following picture being study second eyes soon times story boys since white days ever paper hard near sentence better best across during today others however sure means knew try told young miles sun ways thing whole hear example heard several change answer room sea against top turned learn point city play toward five using himself usually`)

// prose is text of n bytes whose first shared bytes depend on the family alone.
func prose(seed, family, own uint64, shared, n int) string {
	var b strings.Builder
	b.Grow(n + 16)
	rng := rand.New(rand.NewPCG(seed, family))
	for b.Len() < shared {
		b.WriteString(words[rng.IntN(len(words))])
		b.WriteByte(' ')
	}
	rng = rand.New(rand.NewPCG(own, family))
	for b.Len() < n {
		b.WriteString(words[rng.IntN(len(words))])
		b.WriteByte(' ')
	}
	return b.String()
}

// numbers are n token ids of which the first shared depend on the family alone.
func numbers(seed, family, own uint64, shared, n int) []uint32 {
	out := make([]uint32, max(n, 8))
	rng := rand.New(rand.NewPCG(seed, ^family))
	for i := range out {
		if i == shared {
			rng = rand.New(rand.NewPCG(own, family))
		}
		out[i] = 300 + uint32(rng.IntN(3000))
	}
	return out
}

// said is what an engine answered.
type said struct {
	text   string
	finish string
	failed string // an error event within the stream
	done   bool   // the answer is complete
}

// read reads an answer of status 200 to its end. each, when not nil, is called
// after every event of a stream; false ends the reading.
func (j *job) read(body io.Reader, stream bool, each func() bool) (s said, err error) {
	if !stream {
		b, err := io.ReadAll(body)
		if err != nil {
			return s, err
		}
		if !json.Valid(b) {
			return s, fmt.Errorf("the answer is not JSON: %.200q", b)
		}
		s.done = true
		switch j.kind {
		case kindEmbedding:
			s.text, s.finish = string(rawjson.Value(b).Get("data.0.embedding")), "embedding"
		case kindChat:
			s.text, s.finish = rawjson.Value(b).Get("choices.0.message.content").String(), rawjson.Value(b).Get("choices.0.finish_reason").String()
		case kindMessages:
			s.text, s.finish = rawjson.Value(b).Get("content.0.text").String(), rawjson.Value(b).Get("stop_reason").String()
		case kindResponses:
			s.text, s.finish = rawjson.Value(b).Get("output.0.content.0.text").String(), rawjson.Value(b).Get("status").String()
		case kindBatch:
			for c := range rawjson.Value(b).Get("choices").Elements() {
				s.text += string(c.Get("text"))
				s.finish += string(c.Get("finish_reason"))
			}
		default:
			s.text, s.finish = rawjson.Value(b).Get("choices.0.text").String(), rawjson.Value(b).Get("choices.0.finish_reason").String()
		}
		return s, nil
	}
	var text strings.Builder
	defer func() { s.text = text.String() }()
	lines := bufio.NewReader(body)
	for {
		line, err := lines.ReadBytes('\n') // an event may be longer than any buffer
		if errors.Is(err, io.EOF) {
			return s, nil
		}
		if err != nil {
			return s, err
		}
		data, ok := bytes.CutPrefix(bytes.TrimRight(line, "\r\n"), []byte("data: "))
		if !ok {
			continue
		}
		if string(data) == "[DONE]" {
			s.done = s.failed == ""
			continue
		}
		e := rawjson.Value(data)
		kind := e.Get("type").String() // of the events that have one
		if failed := e.Get("error"); failed.Exists() || kind == "error" {
			if s.failed = string(failed); s.failed == "" {
				s.failed = string(e)
			}
			continue
		}
		c, finish := e.Get("choices.0"), "choices.0.finish_reason"
		switch j.kind {
		case kindChat:
			text.WriteString(c.Get("delta.content").String())
		case kindMessages:
			text.WriteString(e.Get("delta.text").String())
			finish = "delta.stop_reason"
			s.done = kind == "message_stop"
		case kindResponses:
			if kind == "response.output_text.delta" {
				text.WriteString(e.Get("delta").String())
			}
			s.done = kind == "response.completed"
			finish = ""
			if s.done {
				finish = "response.status"
			}
		default:
			text.WriteString(c.Get("text").String())
		}
		if f := e.Get(finish).String(); finish != "" && f != "" {
			s.finish = f
		}
		if each != nil && !each() {
			return s, errLeft
		}
	}
}

// oracle knows the right answer to every request: it asks an engine that
// nothing is ever done to, once for each request of an epoch.
type oracle struct {
	urls   map[string]string // by model
	client *http.Client
	seed   uint64

	mu     sync.Mutex
	epoch  uint64
	now    []*asked
	before []*asked
}

type asked struct {
	once sync.Once
	said said
	err  error
}

// entry is the place of an answer; nil when the epoch is over for long.
func (o *oracle) entry(epoch uint64, n int) *asked {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.now == nil || epoch > o.epoch {
		o.before = nil
		if o.now != nil && epoch == o.epoch+1 {
			o.before = o.now
		}
		o.now, o.epoch = make([]*asked, poolSize), epoch
	}
	page := o.now
	if epoch == o.epoch-1 && o.before != nil {
		page = o.before
	} else if epoch != o.epoch {
		return nil
	}
	if page[n] == nil {
		page[n] = &asked{}
	}
	return page[n]
}

// answer is the right answer to request n of an epoch.
func (o *oracle) answer(ctx context.Context, epoch uint64, n int) (said, error) {
	e := o.entry(epoch, n)
	if e == nil {
		e = &asked{}
	}
	e.once.Do(func() {
		j := makeJob(o.seed, epoch, n)
		e.said, e.err = o.ask(context.WithoutCancel(ctx), &j)
	})
	return e.said, e.err
}

func (o *oracle) ask(ctx context.Context, j *job) (said, error) {
	q, err := http.NewRequestWithContext(ctx, http.MethodPost, o.urls[j.model]+j.path, bytes.NewReader(j.body(false)))
	if err != nil {
		return said{}, err
	}
	q.Header.Set("Content-Type", "application/json")
	q.Header["Idempotency-Key"] = nil // not sent; net/http asks again when the engine closed the idle connection
	resp, err := o.client.Do(q)
	if err != nil {
		return said{}, fmt.Errorf("the reference engine: %w", err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		b, _ := io.ReadAll(io.LimitReader(resp.Body, 512))
		return said{}, fmt.Errorf("the reference engine answers %d: %s", resp.StatusCode, b)
	}
	return j.read(resp.Body, false, nil)
}

// garbage is what clients send that mean harm or know no better. Each wants an
// answer that blames the client.
func garbage(n uint64) (method, path, contentType string, body []byte) {
	const json = "application/json"
	pick := func(list ...string) string { return list[(n/16)%uint64(len(list))] }
	switch n % 10 {
	case 0:
		return http.MethodPost, "/v1/completions", json, []byte(`{"model":"sim","prompt":`)
	case 1:
		return http.MethodPost, "/v1/chat/completions", json, []byte(`{"model":"sim","messages":"` + pick("hello", "", `\ud800`) + `"}`)
	case 2:
		return http.MethodPost, "/v1/completions", json, []byte(`{"model":"no such model ` + strconv.FormatUint(n, 10) + `","prompt":"x"}`)
	case 3:
		return http.MethodPost, "/v1/completions", json, bytes.Repeat([]byte("["), 70_000)
	case 4:
		return http.MethodPost, "/v1/nothing/" + strconv.FormatUint(n, 10), json, []byte(`{}`)
	case 5:
		return http.MethodDelete, "/v1/chat/completions", json, nil
	case 6:
		return http.MethodPost, "/v1/chat/completions", "text/plain", bytes.Repeat([]byte{0xff, 0, 0xfe}, 1000)
	case 7:
		return http.MethodPost, "/v1/completions", json, []byte(`{"model":"sim","prompt":"x","prompt":"y","max_tokens":3}`)
	case 8:
		return http.MethodPost, "/v1/completions", json, []byte(`{"model":"sim","max_tokens":1}`)
	}
	return http.MethodPost, "/v1/completions", json, []byte(`{"model":"sim","prompt":"x","max_tokens":` + pick("-5", `"many"`, "1e99") + `}`)
}
