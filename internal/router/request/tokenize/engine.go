package tokenize

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/singleflight"

	"github.com/dynctl/dynctl/internal/rawjson"
)

// EngineOptions configures an Engine tokenizer. Client and BaseURL are
// required, the rest has defaults.
type EngineOptions struct {
	Client  *http.Client
	BaseURL string // of the engine; /tokenize is added
	Model   string // sent instead of the request's model, when it is an alias

	Timeout          time.Duration // for one call, default 2 s
	MaxRequestBytes  int           // default 32 MiB
	MaxResponseBytes int64         // default 32 MiB
	CacheBytes       int64         // bound of the answer cache; 0 for none
}

// Engine asks an engine's POST /tokenize. Equal questions asked at the same
// time are one call, and answers are kept, least recently used out first.
type Engine struct {
	o     EngineOptions
	base  string
	group singleflight.Group
	wg    sync.WaitGroup // calls in flight

	cache answerCache
}

// EngineError is an answer of the engine that is not 2xx. It unwraps to
// ErrRefused or ErrUnavailable.
type EngineError struct {
	URL    string
	Status int
	Body   string // its head
	kind   error
}

func (e *EngineError) Error() string {
	return fmt.Sprintf("%s answered %d: %s", e.URL, e.Status, e.Body)
}

func (e *EngineError) Unwrap() error { return e.kind }

// NewEngine returns an Engine tokenizer. It panics when Client or BaseURL is
// missing, which is a mistake of the caller.
func NewEngine(o EngineOptions) *Engine {
	if o.Client == nil || o.BaseURL == "" {
		panic("tokenize: NewEngine needs a client and a base URL")
	}
	o.Timeout = cmp.Or(max(o.Timeout, 0), 2*time.Second)
	o.MaxRequestBytes = cmp.Or(max(o.MaxRequestBytes, 0), 32<<20)
	o.MaxResponseBytes = cmp.Or(max(o.MaxResponseBytes, 0), 32<<20)
	return &Engine{o: o, base: strings.TrimRight(o.BaseURL, "/"), cache: answerCache{max: o.CacheBytes}}
}

// Close waits for the calls that are still in flight; each ends on its own
// within the timeout.
func (e *Engine) Close() { e.wg.Wait() }

// Prompt implements Tokenizer.
func (e *Engine) Prompt(ctx context.Context, text string, addSpecial bool) (Result, error) {
	b := make([]byte, 0, len(text)+len(text)/16+128)
	b = append(b, `{`...)
	if e.o.Model != "" {
		b = append(rawjson.AppendQuote(append(b, `"model":`...), e.o.Model), ',')
	}
	b = rawjson.AppendQuote(append(b, `"prompt":`...), text)
	b = append(b, `,"add_special_tokens":`...)
	b = append(strconv.AppendBool(b, addSpecial), '}')
	return e.fetch(ctx, &question{"/tokenize", b, parseAnswer, true})
}

// chatKeys are the keys of a chat request that POST /tokenize takes.
var chatKeys = []string{
	"model", "messages", "tools", "add_generation_prompt", "continue_final_message", "add_special_tokens",
	"chat_template", "mm_processor_kwargs", "media_io_kwargs",
}

// Chat implements Tokenizer: the keys that matter are passed on as they are,
// and those that /tokenize does not take as arguments of the chat template,
// which is what the engine makes of them.
func (e *Engine) Chat(ctx context.Context, body []byte) (Result, error) {
	b := make([]byte, 1, len(body)+64)
	b[0] = '{'
	messages := false
	var kwargs, effort, documents []byte
	err := rawjson.Object(body, func(k, v []byte) bool {
		switch {
		case rawjson.IsNull(v):
			return true
		case string(k) == "reasoning_effort":
			effort = v
			return true
		case string(k) == "documents":
			documents = v
			return true
		case string(k) == "chat_template_kwargs":
			kwargs = v
			return true
		}
		for _, key := range chatKeys {
			if string(k) != key || key == "model" && e.o.Model != "" {
				continue
			}
			messages = messages || key == "messages"
			b = append(append(append(append(append(b, '"'), key...), '"', ':'), v...), ',')
		}
		return true
	})
	if err != nil || !messages {
		return Result{}, fmt.Errorf("tokenize chat: no messages in the body: %w", ErrBadRequest)
	}
	if e.o.Model != "" {
		b = append(rawjson.AppendQuote(append(b, `"model":`...), e.o.Model), ',')
	}
	if b, err = appendKwargs(b, kwargs, effort, documents); err != nil {
		return Result{}, fmt.Errorf("tokenize chat: chat_template_kwargs: %w: %w", ErrBadRequest, err)
	}
	b[len(b)-1] = '}'
	return e.fetch(ctx, &question{"/tokenize", b, parseAnswer, true})
}

// appendKwargs appends the arguments of the chat template, a comma behind them:
// the client's own, and what vLLM adds for a reasoning effort and for documents.
func appendKwargs(b, kwargs, effort, documents []byte) ([]byte, error) {
	if kwargs == nil && effort == nil && documents == nil {
		return b, nil
	}
	b = append(b, `"chat_template_kwargs":{`...)
	start, thinking := len(b), false
	put := func(key string, v []byte) {
		b = append(append(append(append(append(b, '"'), key...), '"', ':'), v...), ',')
	}
	if kwargs != nil {
		if err := rawjson.Object(kwargs, func(k, v []byte) bool {
			switch {
			case string(k) == "enable_thinking":
				thinking = true
			case string(k) == "reasoning_effort" && effort != nil, string(k) == "documents" && documents != nil:
				return true
			}
			put(string(k), v)
			return true
		}); err != nil {
			return b, err
		}
	}
	if effort != nil {
		put("reasoning_effort", effort)
		if !thinking {
			put("enable_thinking", strconv.AppendBool(nil, string(effort) != `"none"`))
		}
	}
	if documents != nil {
		put("documents", documents)
	}
	if len(b) > start {
		b = b[:len(b)-1]
	}
	return append(b, '}', ','), nil
}

// answer is what an engine made of a question.
type answer struct {
	ids   []uint32
	media []Media
}

// question is one call of an engine. keep allows to remember its answer.
type question struct {
	path  string
	body  []byte
	parse func([]byte) (answer, error)
	keep  bool
}

// fetch answers from the cache or calls the engine. A caller that leaves does
// not end the call for others that wait for it.
func (e *Engine) fetch(ctx context.Context, q *question) (Result, error) {
	if len(q.body) > e.o.MaxRequestBytes {
		return Result{}, fmt.Errorf("tokenize: request of %d bytes: %w", len(q.body), ErrTooLarge)
	}
	if err := ctx.Err(); err != nil {
		return Result{}, err
	}
	h := sha256.New()
	_, _ = io.WriteString(h, q.path+"\x00") // a hash takes everything
	_, _ = h.Write(q.body)
	var sum [sha256.Size]byte
	h.Sum(sum[:0])
	result := func(a answer, cached bool) Result {
		return Result{IDs: a.ids, Tokens: len(a.ids), Engine: true, Cached: cached, Media: a.media}
	}
	if a, ok := e.cache.get(sum); ok {
		return result(a, true), nil
	}
	e.wg.Add(1)
	ch := e.group.DoChan(string(sum[:]), func() (any, error) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), e.o.Timeout)
		defer cancel()
		if a, ok := e.cache.get(sum); ok { // answered since this caller looked
			return a, nil
		}
		a, err := e.call(ctx, q)
		if err == nil && q.keep {
			e.cache.put(sum, a)
		}
		return a, err
	})
	done := func(r singleflight.Result) (Result, error) {
		e.wg.Done()
		if r.Err != nil {
			return Result{}, r.Err
		}
		return result(r.Val.(answer), r.Shared), nil
	}
	select {
	case r := <-ch:
		return done(r)
	case <-ctx.Done():
		go func() { _, _ = done(<-ch) }() // joined by Close
		return Result{}, ctx.Err()
	}
}

func (e *Engine) call(ctx context.Context, q *question) (a answer, err error) {
	addr := e.base + q.path
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, addr, bytes.NewReader(q.body))
	if err != nil {
		return a, fmt.Errorf("tokenize: %w", err)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header["Idempotency-Key"] = nil // not sent; net/http asks again when the engine closed the idle connection
	resp, err := e.o.Client.Do(req)
	if err != nil {
		if u, ok := errors.AsType[*url.Error](err); ok {
			err = u.Err // the transport chooses the engine, and names it
		}
		return a, fmt.Errorf("tokenize: %w: %w", ErrUnavailable, err)
	}
	defer resp.Body.Close()
	if resp.StatusCode/100 != 2 {
		head, _ := io.ReadAll(io.LimitReader(resp.Body, 512))
		kind := ErrUnavailable
		if Refuses(resp.StatusCode) {
			kind = ErrRefused
		}
		return a, &EngineError{URL: addr, Status: resp.StatusCode, Body: strings.ToValidUTF8(string(bytes.TrimSpace(head)), "?"), kind: kind}
	}
	data, err := io.ReadAll(io.LimitReader(resp.Body, e.o.MaxResponseBytes+1))
	if err != nil {
		return a, fmt.Errorf("tokenize: read answer of %s: %w: %w", addr, ErrUnavailable, err)
	}
	if int64(len(data)) > e.o.MaxResponseBytes {
		return a, fmt.Errorf("tokenize: answer of %s: %w", addr, ErrTooLarge)
	}
	if a, err = q.parse(data); err != nil {
		return answer{}, fmt.Errorf("tokenize: answer of %s: %w: %w", addr, ErrBadAnswer, err)
	}
	return a, nil
}

// Refuses reports whether an engine's status is about the question and not about
// the engine: one that has no /tokenize (404), or wants another key (401), has
// refused nothing.
func Refuses(status int) bool {
	return status == http.StatusBadRequest || status == http.StatusRequestEntityTooLarge || status == http.StatusUnprocessableEntity
}

// parseAnswer reads {"count":N,"tokens":[…]}.
func parseAnswer(data []byte) (a answer, err error) {
	var tokens, count []byte
	if err := rawjson.Object(data, func(k, v []byte) bool {
		switch string(k) {
		case "tokens":
			tokens = v
		case "count":
			count = v
		}
		return true
	}); err != nil {
		return a, err
	}
	if tokens == nil {
		return a, errors.New("no tokens")
	}
	if a.ids, err = parseIDs(tokens); err != nil {
		return answer{}, err
	}
	if n, ok := rawjson.Uint32(count); ok && int(n) != len(a.ids) {
		return answer{}, fmt.Errorf("count %d with %d tokens", n, len(a.ids))
	}
	return a, nil
}

// parseIDs reads a JSON list of token ids.
func parseIDs(v []byte) ([]uint32, error) {
	ids := make([]uint32, 0, len(v)/6+1)
	bad := -1
	err := rawjson.Array(v, func(e []byte) bool {
		id, ok := rawjson.Uint32(e)
		if !ok {
			bad = len(ids)
			return false
		}
		ids = append(ids, id)
		return true
	})
	if err != nil {
		return nil, err
	}
	if bad >= 0 {
		return nil, fmt.Errorf("element %d is not a token id", bad)
	}
	return ids, nil
}
