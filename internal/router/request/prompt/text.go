package prompt

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"

	"github.com/dynctl/dynctl/internal/router/request/tokenize"
	"github.com/dynctl/dynctl/internal/workers"
)

// Decoder appends the bytes of a token, none of a special one, by the local tokenizer; ok is
// false for an id that it does not know. It is nil without one, or where the
// file's decoder is not known exactly.
func (t *Stage) Decoder() func(dst []byte, id uint32) (b []byte, ok bool) {
	if t.local == nil {
		return nil
	}
	return t.local.Decoder()
}

// maxText bounds an engine's answer to /detokenize, in bytes.
const maxText = 4 << 20

// Text is what an engine of the list makes of token ids: the first that answers. It
// is tokenize.ErrUnavailable that none does.
func (t *Stage) Text(ctx context.Context, model string, list []*workers.Worker, ids []uint32) (string, error) {
	body, err := json.Marshal(struct {
		Model  string   `json:"model"`
		Tokens []uint32 `json:"tokens"`
	}{model, ids})
	if err != nil {
		return "", err
	}
	last := fmt.Errorf("no usable worker for model %q: %w", model, tokenize.ErrUnavailable)
	for _, w := range list {
		if ok, _ := w.State.Usable(); !ok || ctx.Err() != nil {
			continue
		}
		text, err := t.text(ctx, w, body)
		if err == nil {
			return text, nil
		}
		last = fmt.Errorf("%s: %w", w.Name, err)
	}
	return "", last
}

func (t *Stage) text(ctx context.Context, w *workers.Worker, body []byte) (string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://engine/detokenize", bytes.NewReader(body))
	if err != nil {
		return "", err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := t.put(req, w)
	if err != nil {
		return "", err
	}
	defer func() { _ = resp.Body.Close() }() // it was read
	raw, err := io.ReadAll(io.LimitReader(resp.Body, maxText))
	if err != nil {
		return "", err
	}
	var a struct {
		Prompt *string `json:"prompt"` // vLLM
		Text   *string `json:"text"`   // SGLang
	}
	switch err := json.Unmarshal(raw, &a); {
	case resp.StatusCode != http.StatusOK:
		return "", fmt.Errorf("/detokenize answers %d: %w", resp.StatusCode, tokenize.ErrUnavailable)
	case err != nil:
		return "", fmt.Errorf("/detokenize: %w", err)
	case a.Prompt != nil:
		return *a.Prompt, nil
	case a.Text != nil:
		return *a.Text, nil
	}
	return "", fmt.Errorf("/detokenize answers without a text: %w", tokenize.ErrUnavailable)
}
