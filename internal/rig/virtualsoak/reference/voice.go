package reference

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/workers/sim/engine"
	"github.com/dynctl/dynctl/internal/workers/sim/vocab"
)

// Voice makes text and events of one engine's tokens: whole characters only, and as
// much held back as may begin a stop string. SGLang (0.5.23) holds back all of an event
// whose text ends with the beginning of one, but not within a character.
type Voice struct {
	vocab  *vocab.Vocab
	kind   api.Kind
	prompt []uint32
	ids    bool // sends ids
	stops  []string
	hold   int // characters
	tokens []uint32

	// All is the text so far, Shown how many bytes of it were sent, and Rest what was
	// said since that may not be whole characters yet.
	All   string
	Shown int
	Rest  string
	// Stop is the stop string that has ended the answer, "" for none.
	Stop string
	// Events are those of SGLang, Ahead the tokens that the text of the newest leaves out.
	Events, Ahead int
	whole         int // tokens before the last place at which none was left out
}

// NewVoice is an engine that answers a prompt at an endpoint of a kind from the first token
// on. It sends ids if they are requested.
func NewVoice(words *vocab.Vocab, kind api.Kind, prompt []uint32, ids bool, stops []string) *Voice {
	v := &Voice{vocab: words, kind: kind, ids: ids, prompt: prompt, stops: stops}
	for _, w := range stops {
		if kind != api.SGLangGenerate {
			v.hold = max(v.hold, utf8.RuneCountInString(w)-1)
		}
	}
	// vLLM repeats a prompt that ends within a character, all of it, once that is whole.
	if tail := words.Decode(prompt[max(0, len(prompt)-utf8.UTFMax):], true); !utf8.ValidString(tail) && strings.HasSuffix(vocab.Printable(tail), "\uFFFD") {
		v.Rest = words.Decode(prompt, true)
	}
	return v
}

// Text is what a token adds, and how the answer ends with it.
func (v *Voice) Text(token uint32, finish engine.Finish) (string, engine.Finish) {
	v.tokens = append(v.tokens, token)
	if token != vocab.End {
		v.Rest += v.vocab.Text(token)
	}
	text := vocab.Printable(v.Rest)
	if !strings.HasSuffix(text, "\uFFFD") || v.kind == api.SGLangGenerate && finish != engine.Running {
		before := len(v.All)
		v.All, v.Rest = v.All+text, ""
		for _, w := range v.stops {
			from := max(0, before-len(w)+1)
			if k := strings.Index(v.All[from:], w); k >= 0 {
				v.All, v.Stop, finish = v.All[:from+k], w, engine.FinishStop
				break
			}
		}
	}
	show := v.All
	if finish == engine.Running {
		for range v.hold {
			_, n := utf8.DecodeLastRuneInString(show)
			show = show[:len(show)-n]
		}
		if v.kind == api.SGLangGenerate && v.stopBegins() {
			return "", finish
		}
	}
	show = show[min(v.Shown, len(show)):]
	v.Shown += len(show)
	return show, finish
}

// stopBegins reports whether a stop string may begin in the text and end behind it.
func (v *Voice) stopBegins() bool {
	return slices.ContainsFunc(v.stops, func(w string) bool {
		for n := range len(w) {
			if n > 0 && strings.HasSuffix(v.All, w[:n]) {
				return true
			}
		}
		return false
	})
}

func (v *Voice) chunk(id string, choices ...chunkChoice) *chunk {
	return &chunk{ID: id, Object: object(v.kind), Created: created, Model: "sim", Choices: choices}
}

// Says is the event of an output that has a token, how the answer ends with it, and what
// comes behind it when it is the last.
func (v *Voice) Says(id string, o engine.Output, usage bool) (now, end []byte, finish engine.Finish) {
	first := len(v.tokens) == 0
	text, finish := v.Text(o.Token, o.Finish)
	if finish != engine.Running {
		end = []byte("data: [DONE]\n\n")
	}
	p, n := len(v.prompt), len(v.tokens)
	if v.kind == api.SGLangGenerate {
		if v.Rest == "" && v.Shown < len(v.All) {
			return nil, nil, finish
		}
		if v.Rest == "" {
			v.whole = n
		}
		v.Events, v.Ahead = v.Events+1, n-v.whole
		g := &generated{Text: v.All[:v.Shown], IDs: v.tokens}
		g.Meta.ID, g.Meta.Prompt, g.Meta.Completion, g.Meta.Cached = id, p, n, o.Cached
		switch finish {
		case engine.Running:
		case engine.FinishStop:
			g.Meta.Finish = &finished{Type: finish, Matched: v.Stop}
		default:
			g.Meta.Finish = &finished{Type: finish, Length: n}
		}
		return event(g), end, finish
	}
	choice := chunkChoice{Text: &text}
	if v.ids {
		choice.IDs = []uint32{o.Token}
	}
	if v.kind == api.Chat {
		choice.Text, choice.Delta = nil, &chunkDelta{Content: text}
		if first {
			role := v.chunk(id, chunkChoice{Delta: &chunkDelta{Role: "assistant"}})
			if v.ids {
				role.Prompt = v.prompt
			}
			now = event(role)
		}
	} else if first && v.ids {
		choice.Prompt = v.prompt
	}
	if finish != engine.Running {
		if choice.Finish = &finish; v.Stop != "" {
			choice.Stop = &v.Stop
		}
		if usage {
			u := v.chunk(id)
			u.Choices, u.Usage = []chunkChoice{}, map[string]int{"prompt_tokens": p, "completion_tokens": n, "total_tokens": p + n}
			end = append(event(u), end...)
		}
	}
	return append(now, event(v.chunk(id, choice))...), end, finish
}

// Answer is the body of a completion that is no stream, of what was said.
func (v *Voice) Answer(id string, finish engine.Finish) []byte {
	text, p, n := v.All, len(v.prompt), len(v.tokens)
	c := v.chunk(id, chunkChoice{Text: &text, Finish: &finish})
	c.Usage = map[string]int{"prompt_tokens": p, "completion_tokens": n, "total_tokens": p + n}
	raw, err := json.Marshal(c)
	if err != nil {
		panic(err) // strings and numbers
	}
	return raw
}

// chunk is an event of a completion or a chat.
type chunk struct {
	ID      string         `json:"id"`
	Object  string         `json:"object"`
	Created int64          `json:"created"`
	Model   string         `json:"model"`
	Choices []chunkChoice  `json:"choices"`
	Prompt  []uint32       `json:"prompt_token_ids,omitempty"` // of a chat
	Usage   map[string]int `json:"usage"`
}

type chunkChoice struct {
	Index  int            `json:"index"`
	Text   *string        `json:"text,omitempty"`
	Delta  *chunkDelta    `json:"delta,omitempty"`
	IDs    []uint32       `json:"token_ids"`
	Prompt []uint32       `json:"prompt_token_ids,omitempty"`
	Finish *engine.Finish `json:"finish_reason"`
	Stop   *string        `json:"stop_reason"`
}

type chunkDelta struct {
	Role    string `json:"role,omitempty"`
	Content string `json:"content"`
}

// generated is an event of SGLang's /generate: the answer so far.
type generated struct {
	Text string   `json:"text"`
	IDs  []uint32 `json:"output_ids"`
	Meta struct {
		ID         string    `json:"id"`
		Finish     *finished `json:"finish_reason"`
		Prompt     int       `json:"prompt_tokens"`
		Completion int       `json:"completion_tokens"`
		Cached     int       `json:"cached_tokens"`
	} `json:"meta_info"`
}

type finished struct {
	Type    engine.Finish `json:"type"`
	Length  int           `json:"length,omitempty"`
	Matched string        `json:"matched,omitempty"`
}

// created is when every answer was made, in Unix seconds.
const created = 1_700_000_000

// object is what the events of a kind are called.
func object(kind api.Kind) string {
	if kind == api.Chat {
		return "chat.completion.chunk"
	}
	return "text_completion"
}

func event(c any) []byte {
	raw, err := json.Marshal(c)
	if err != nil {
		panic(err) // strings and numbers
	}
	return fmt.Appendf(nil, "data: %s\n\n", raw)
}
