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
	url   string
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
	return &Engine{o: o, url: strings.TrimRight(o.BaseURL, "/") + "/tokenize", cache: answerCache{max: o.CacheBytes}}
}

// Close waits for the calls that are still in flight; each ends by itself
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
	return e.fetch(ctx, b)
}

// chatKeys are the keys of a chat request that POST /tokenize takes.
var chatKeys = []string{
	"model", "messages", "tools", "add_generation_prompt", "continue_final_message", "add_special_tokens",
	"chat_template", "mm_processor_kwargs", "media_io_kwargs",
}

// Chat implements Tokenizer: the keys that matter are passed on as they stand,
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
	return e.fetch(ctx, b)
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

type answer struct{ ids []uint32 }

// fetch answers from the cache or calls the engine. A caller that leaves does
// not end the call for others that wait for it.
func (e *Engine) fetch(ctx context.Context, body []byte) (Result, error) {
	if len(body) > e.o.MaxRequestBytes {
		return Result{}, fmt.Errorf("tokenize: request of %d bytes: %w", len(body), ErrTooLarge)
	}
	if err := ctx.Err(); err != nil {
		return Result{}, err
	}
	sum := sha256.Sum256(body)
	if ids, ok := e.cache.get(sum); ok {
		return Result{IDs: ids, Tokens: len(ids), Engine: true, Cached: true}, nil
	}
	e.wg.Add(1)
	ch := e.group.DoChan(string(sum[:]), func() (any, error) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), e.o.Timeout)
		defer cancel()
		if ids, ok := e.cache.get(sum); ok { // answered since this caller looked
			return answer{ids}, nil
		}
		ids, err := e.call(ctx, body)
		if err == nil {
			e.cache.put(sum, ids)
		}
		return answer{ids}, err
	})
	done := func(r singleflight.Result) (Result, error) {
		e.wg.Done()
		if r.Err != nil {
			return Result{}, r.Err
		}
		ids := r.Val.(answer).ids
		return Result{IDs: ids, Tokens: len(ids), Engine: true, Cached: r.Shared}, nil
	}
	select {
	case r := <-ch:
		return done(r)
	case <-ctx.Done():
		go func() { _, _ = done(<-ch) }() // joined by Close
		return Result{}, ctx.Err()
	}
}

func (e *Engine) call(ctx context.Context, body []byte) ([]uint32, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, e.url, bytes.NewReader(body))
	if err != nil {
		return nil, fmt.Errorf("tokenize: %w", err)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header["Idempotency-Key"] = nil // not sent; net/http asks again when the engine closed the idle connection
	resp, err := e.o.Client.Do(req)
	if err != nil {
		return nil, fmt.Errorf("tokenize: %w: %w", ErrUnavailable, err)
	}
	defer resp.Body.Close()
	if resp.StatusCode/100 != 2 {
		head, _ := io.ReadAll(io.LimitReader(resp.Body, 512))
		kind := ErrUnavailable
		if Refuses(resp.StatusCode) {
			kind = ErrRefused
		}
		return nil, &EngineError{URL: e.url, Status: resp.StatusCode, Body: strings.ToValidUTF8(string(bytes.TrimSpace(head)), "?"), kind: kind}
	}
	data, err := io.ReadAll(io.LimitReader(resp.Body, e.o.MaxResponseBytes+1))
	if err != nil {
		return nil, fmt.Errorf("tokenize: read answer of %s: %w: %w", e.url, ErrUnavailable, err)
	}
	if int64(len(data)) > e.o.MaxResponseBytes {
		return nil, fmt.Errorf("tokenize: answer of %s: %w", e.url, ErrTooLarge)
	}
	ids, err := parseAnswer(data)
	if err != nil {
		return nil, fmt.Errorf("tokenize: answer of %s: %w: %w", e.url, ErrBadAnswer, err)
	}
	return ids, nil
}

// Refuses reports whether an engine's status is about the question and not about
// the engine: one that has no /tokenize (404), or wants another key (401), has
// refused nothing.
func Refuses(status int) bool {
	return status == http.StatusBadRequest || status == http.StatusRequestEntityTooLarge || status == http.StatusUnprocessableEntity
}

// parseAnswer reads {"count":N,"tokens":[…]}.
func parseAnswer(data []byte) ([]uint32, error) {
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
		return nil, err
	}
	if tokens == nil {
		return nil, errors.New("no tokens")
	}
	ids, err := parseIDs(tokens)
	if err != nil {
		return nil, err
	}
	if n, ok := rawjson.Uint32(count); ok && int(n) != len(ids) {
		return nil, fmt.Errorf("count %d with %d tokens", n, len(ids))
	}
	return ids, nil
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
