package tokenize

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"github.com/dynctl/dynctl/internal/blockhash"
	"github.com/dynctl/dynctl/internal/rawjson"
)

// maxMediaID bounds an engine's name of the content of an item, in bytes.
const maxMediaID = 1024

// notRendered are members of a request that have no effect on its prompt, and those that must
// not reach an engine by this way.
var notRendered = []string{"model", "stream", "stream_options", "store", "background", "n", "kv_transfer_params", "ec_transfer_params", "return_mm_kwargs", "mm_payload"}

// Render returns the ids of a request's prompt with its media: where their placeholders are and
// how the engine names their content. path is that of the endpoint, as
// /v1/chat/completions. The engine prepares the media for that, which is work for its CPU.
// keep allows to remember the answer: media that are fetched from an address may be others the
// next time. vLLM (0.32) has the pages with --enable-scale-out.
func (e *Engine) Render(ctx context.Context, path string, body []byte, keep bool) (Result, error) {
	b := make([]byte, 1, len(body)+128)
	b[0] = '{'
	model := e.o.Model
	err := rawjson.Object(body, func(k, v []byte) bool {
		if string(k) == "model" && model == "" {
			model = rawjson.Value(v).String()
		}
		if !slices.Contains(notRendered, string(k)) {
			b = append(append(append(rawjson.AppendQuote(b, string(k)), ':'), v...), ',')
		}
		return true
	})
	if err != nil {
		return Result{}, fmt.Errorf("render: %w: %w", ErrBadRequest, err)
	}
	// Without the tensors: by the newer name (0.32) and by the older one.
	b = append(b, `"mm_payload":"none","return_mm_kwargs":false,"model":`...)
	b = append(rawjson.AppendQuote(b, model), '}')
	return e.fetch(ctx, &question{path + "/render", b, parseRendered, keep})
}

// rendered is what is read of vLLM's GenerateRequest.
type rendered struct {
	Features *struct {
		Hashes       map[string][]string `json:"mm_hashes"`
		Placeholders map[string][]struct {
			Offset int `json:"offset"`
			Length int `json:"length"`
		} `json:"mm_placeholders"`
	} `json:"features"`
}

// parseRendered reads {"token_ids":[…],"features":{"mm_hashes":…,"mm_placeholders":…}}.
func parseRendered(data []byte) (a answer, err error) {
	var ids, features []byte
	if err := rawjson.Object(data, func(k, v []byte) bool {
		switch string(k) {
		case "token_ids":
			ids = v
		case "features":
			features = v
		}
		return true
	}); err != nil {
		return a, err
	}
	if ids == nil {
		return a, errors.New("no token_ids")
	}
	if a.ids, err = parseIDs(ids); err != nil {
		return answer{}, err
	}
	if features == nil || rawjson.IsNull(features) {
		return a, nil
	}
	var r rendered
	if err := json.Unmarshal(features, &r.Features); err != nil {
		return answer{}, fmt.Errorf("features: %w", err)
	}
	for modality, names := range r.Features.Hashes {
		places := r.Features.Placeholders[modality]
		if len(places) != len(names) {
			return answer{}, fmt.Errorf("%d names and %d placeholders of %q", len(names), len(places), modality)
		}
		for i, name := range names {
			at := places[i]
			if name == "" || len(name) > maxMediaID || at.Offset < 0 || at.Length < 1 || at.Offset > len(a.ids) || at.Length > len(a.ids)-at.Offset {
				return answer{}, fmt.Errorf("%q[%d] has no name, or no place among %d ids", modality, i, len(a.ids))
			}
			a.media = append(a.media, Media{modality, blockhash.Media{ID: name, Offset: at.Offset, Length: at.Length}})
		}
	}
	slices.SortFunc(a.media, func(x, y Media) int { return x.Offset - y.Offset })
	for i := 1; i < len(a.media); i++ {
		if a.media[i].Offset < a.media[i-1].Offset+a.media[i-1].Length {
			return answer{}, errors.New("placeholders overlap")
		}
	}
	return a, nil
}
