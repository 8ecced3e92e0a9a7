package fakeengine

import (
	"encoding/json"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/dynctl/dynctl/internal/rawjson"
)

// Model is what all engines of a fleet have loaded. Its tokens are bytes; it answers every
// prompt with the same text. A prompt's own ids are above those of bytes.
type Model struct {
	Text string
	// Pace is the time between two tokens.
	Pace time.Duration
}

// promptIDs are the ids that a chat or a text is to the model.
var promptIDs = []uint32{1000, 1001, 1002, 1003}

// Answer is what a good engine answers: completions and chats, streamed and not, and
// prefills of NIXL, LMCache and SGLang, whose decode engine waits for its prefill engine.
func (m *Model) Answer(q *Request) Answer {
	a := m.answer(q)
	if room := rawjson.Value(q.Body).Get("bootstrap_room"); room.Exists() {
		a.Meets, a.Waits = room.String(), !strings.HasPrefix(q.Worker, "prefill")
	}
	return a
}

func (m *Model) answer(q *Request) Answer {
	if q.Method == "GET" || q.Method == "HEAD" {
		return JSON(200, `{"object":"some"}`)
	}
	v := rawjson.Value(q.Body)
	ids := promptIDs
	if p := v.Get("prompt"); rawjson.IsArray(p) {
		ids = nil
		for v := range p.Elements() {
			id, _ := rawjson.Uint32(v)
			ids = append(ids, id)
		}
	}
	after := len(ids)
	for after > 0 && ids[after-1] < 256 {
		after--
	}
	after = len(ids) - after // tokens of the answer that the prompt has already
	switch {
	case v.Get("kv_transfer_params.do_remote_decode").Bool():
		return JSON(200, Prefilled(q.ID, len(ids), fmt.Sprintf(`{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[%s]],"remote_engine_id":"life","remote_request_id":"cmpl-%s-0","remote_host":"prefill","remote_port":5600,"tp_size":1,"remote_num_tokens":%d}`, blocks(len(ids)), q.ID, len(ids))))
	case v.Get("kv_transfer_params.disagg_spec").Exists():
		return JSON(200, strings.Replace(Prefilled(q.ID, len(ids), fmt.Sprintf(`{"first_tok":%d}`, m.Text[after])), `" x"`, quote(m.Text[after:after+1]), 1))
	}
	limit := len(m.Text) - after
	for _, name := range []string{"max_tokens", "max_completion_tokens"} {
		if n, ok := v.Get(name).Int(); ok {
			limit = min(limit, n)
		}
	}
	var stops []string
	s := v.Get("stop")
	for one := range s.Elements() {
		stops = append(stops, one.String())
	}
	if rawjson.IsString(s) {
		stops = []string{s.String()}
	}
	pace := m.Pace
	if v.Get("bootstrap_room").Exists() && strings.HasPrefix(q.Worker, "prefill") {
		limit, pace = 1, 0
	}
	events, text, finish, n := m.events(q, v, ids, after, limit, stops)
	if v.Get("stream").Bool() {
		return Stream(events...).Every(pace)
	}
	choice, object := `"text":`+quote(text), "text_completion"
	if strings.Contains(q.Path, "chat") {
		choice, object = `"message":{"role":"assistant","content":`+quote(text)+`}`, "chat.completion"
	}
	return JSON(200, fmt.Sprintf(`{"id":"cmpl-%s","object":%q,"created":1,"model":"m","choices":[{"index":0,%s,"finish_reason":%q}],"usage":%s}`, q.ID, object, choice, finish, usage(len(ids), n)))
}

// Prefilled is the answer to a prefill of a prompt with this many tokens, with what is handed
// over, raw.
func Prefilled(id string, tokens int, params string) string {
	return fmt.Sprintf(`{"id":"cmpl-%s","choices":[{"index":0,"text":" x","finish_reason":"length"}],"usage":%s,"kv_transfer_params":%s}`, id, usage(tokens, 1), params)
}

func blocks(tokens int) string {
	var ids []string
	for i := range (tokens + 15) / 16 {
		ids = append(ids, fmt.Sprint(7+i))
	}
	return strings.Join(ids, ",")
}

func usage(prompt, completion int) string {
	return fmt.Sprintf(`{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}`, prompt, completion, prompt+completion)
}

func quote(s string) string {
	b, err := json.Marshal(s)
	if err != nil {
		panic(err) // strings only
	}
	return string(b)
}

// events streams that many tokens of the text behind some, as vLLM does: each event has one
// token, text comes with the last byte of a character, and as many characters as a stop
// string may still need are held back.
func (m *Model) events(q *Request, v rawjson.Value, ids []uint32, after, limit int, stops []string) (events []string, text, finish string, n int) {
	chat := strings.Contains(q.Path, "chat")
	wantIDs := v.Get("return_token_ids").Bool()
	id, object := "cmpl-"+q.ID, "text_completion"
	if chat {
		object = "chat.completion.chunk"
	}
	add := func(choices string, more string) {
		events = append(events, fmt.Sprintf(`{"id":%q,"object":%q,"created":1,"model":"m","choices":[%s]%s}`, id, object, choices, more))
	}
	whole := ""
	if wantIDs {
		whole = `,"prompt_token_ids":` + list(ids)
	}
	if chat {
		add(`{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}`, whole)
		whole = ""
	}
	hold := 0
	for _, s := range stops {
		hold = max(hold, utf8.RuneCountInString(s)-1)
	}
	pend, sent := "", 0
	for finish == "" {
		token := m.Text[after+n]
		n++
		if pend += string([]byte{token}); utf8.ValidString(pend) {
			text, pend = text+pend, ""
		}
		reason := "null"
		for _, s := range stops {
			if k := strings.Index(text, s); k >= 0 {
				text, finish, reason = text[:k], "stop", quote(s)
				break
			}
		}
		if n == limit && finish == "" {
			finish = "length"
		}
		show := text
		if finish == "" {
			for range hold {
				_, size := utf8.DecodeLastRuneInString(show)
				show = show[:len(show)-size]
			}
		}
		show = show[min(sent, len(show)):]
		sent += len(show)
		choice := `"text":` + quote(show)
		if chat {
			choice = `"delta":{"content":` + quote(show) + `}`
		}
		end := "null"
		if finish != "" {
			end = quote(finish)
		}
		choice = fmt.Sprintf(`{"index":0,%s,"logprobs":null,"finish_reason":%s,"stop_reason":%s`, choice, end, reason)
		if wantIDs {
			choice += fmt.Sprintf(`,"token_ids":[%d]%s`, token, whole)
			whole = ""
		}
		add(choice+"}", "")
	}
	if v.Get("stream_options.include_usage").Bool() {
		add("", `,"usage":`+usage(len(ids), n))
	}
	return append(events, "[DONE]"), text, finish, n
}

func list(ids []uint32) string { return strings.ReplaceAll(fmt.Sprint(ids), " ", ",") }
