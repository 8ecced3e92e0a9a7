package reference

import (
	"encoding/json"
	"fmt"
	"strings"

	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/workers/sim/engine"
)

// Heard is what a client has read of a stream.
type Heard struct {
	// Text is all of it, Finish how it ended, by every event that said so, and Stop the
	// stop string that it was said to end with.
	Text   string
	Finish []engine.Finish
	Stop   string
	// IDs are the tokens whose ids were sent.
	IDs []uint32
	// Names are the ids of the events, Done whether the end mark has come.
	Names map[string]bool
	Done  bool
	Usage map[string]int
}

// Read reads the whole events of a stream of a kind, of a prompt with that many tokens. ids
// says that the client has asked for the tokens of a completion or a chat. The error is
// what no engine would have said.
func Read(stream string, kind api.Kind, prompt int, ids bool) (h Heard, err error) {
	h.Names = map[string]bool{}
	for e := range strings.SplitSeq(stream, "\n\n") {
		data, ok := strings.CutPrefix(e, "data: ")
		if !ok {
			continue
		}
		if h.Done = data == "[DONE]"; h.Done {
			continue
		}
		if kind == api.SGLangGenerate {
			err = h.generated(data, prompt)
		} else {
			err = h.chunk(data, kind, ids)
		}
		if err != nil {
			return h, err
		}
	}
	return h, nil
}

func (h *Heard) generated(data string, prompt int) error {
	var g generated
	if err := json.Unmarshal([]byte(data), &g); err != nil {
		return fmt.Errorf("the client got %q: %w", data, err)
	}
	m := &g.Meta
	if !strings.HasPrefix(g.Text, h.Text) || m.Prompt != prompt || m.Completion != len(g.IDs) || len(g.IDs) <= len(h.IDs) {
		return fmt.Errorf("after %q and %d ids the client got %s", h.Text, len(h.IDs), data)
	}
	h.Text, h.IDs, h.Names[m.ID] = g.Text, g.IDs, true
	if m.Finish != nil {
		h.Stop, h.Finish = m.Finish.Matched, append(h.Finish, m.Finish.Type)
		if h.Finish[0] == engine.FinishLength && m.Finish.Length != len(h.IDs) {
			return fmt.Errorf("%d ids end with %s", len(h.IDs), data)
		}
	}
	return nil
}

func (h *Heard) chunk(data string, kind api.Kind, ids bool) error {
	var c chunk
	if err := json.Unmarshal([]byte(data), &c); err != nil {
		return fmt.Errorf("the client got %q: %w", data, err)
	}
	if h.Names[c.ID] = true; c.Object != object(kind) {
		return fmt.Errorf("the client got a %s", data)
	}
	if c.Usage != nil {
		h.Usage = c.Usage
	}
	shown := c.Prompt != nil
	for _, choice := range c.Choices {
		if kind == api.Chat && choice.Delta != nil {
			h.Text += choice.Delta.Content
		} else if kind == api.Completion && choice.Text != nil {
			h.Text += *choice.Text
		}
		if choice.Finish != nil {
			h.Finish = append(h.Finish, *choice.Finish)
		}
		if choice.Stop != nil {
			h.Stop = *choice.Stop
		}
		shown = shown || choice.IDs != nil || choice.Prompt != nil
		h.IDs = append(h.IDs, choice.IDs...)
	}
	if shown && !ids {
		return fmt.Errorf("the client did not ask for ids: %s", data)
	}
	return nil
}
