package prompt

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"time"

	"github.com/dynctl/dynctl/internal/blockhash"
	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/request/media"
	"github.com/dynctl/dynctl/internal/router/request/tokenize"
	"github.com/dynctl/dynctl/internal/router/route"
	"github.com/dynctl/dynctl/internal/workers"
)

// renderPaths are the endpoints whose prompts vLLM renders.
var renderPaths = map[api.Kind]string{api.Chat: "/v1/chat/completions", api.Messages: "/v1/messages", api.Responses: "/v1/responses"}

// findMedia finds the ids of a prompt with images, sounds or videos, and what the engine calls
// these: only an engine that prepares them knows how many tokens each takes, and where.
func (t *Stage) findMedia(ctx context.Context, v *api.View, m *modelTokens, model string, list []*workers.Worker) Prompt {
	estimate := func(note string) Prompt { return Estimate(v, t.o.Media, model, note) }
	path := renderPaths[v.Kind]
	switch {
	case v.Opaque:
		return estimate("the prompt holds more than text, images, sounds and videos")
	case path == "" || v.Continues() || !slices.ContainsFunc(list, renders):
		return estimate("no engine names the images, sounds or videos of this kind of request")
	}
	keep := true
	for i := range v.Media {
		keep = keep && !v.Fetched(&v.Media[i])
	}
	res, err := m.engine.Render(ctx, path, v.Body, keep)
	rendered := err == nil
	if errors.Is(err, tokenize.ErrUnavailable) {
		if own, ok := t.byUUID(ctx, v, m, list); ok {
			res, err = own, nil
		}
	}
	switch {
	case err != nil:
		if ctx.Err() == nil && errors.Is(err, tokenize.ErrUnavailable) {
			t.blinded(m, model, reason(err))
		}
		return estimate("routed by predictions, since no engine names its images, sounds or videos: " + reason(err))
	case len(res.Media) == 0:
		return estimate("routed by predictions: the engine names no image, sound or video in it")
	}
	if rendered && !res.Cached && m.blind.CompareAndSwap(true, false) {
		t.o.Event(eventlog.Event{Kind: "tokenizer_recovered", Text: fmt.Sprintf("engines name the images, sounds and videos in prompts of %s again", model)})
	}
	t.learn(v, model, res, keep)
	p := Prompt{IDs: res.IDs, ISL: res.Tokens, Source: route.FromEngine, Has: media.Count(v)}
	for _, it := range res.Media {
		p.Media = append(p.Media, it.Media)
	}
	return p
}

// maxUUID bounds a client's name of an item that counts, in bytes.
const maxUUID = 1024

// byUUID finds the ids and the names of media where the client names all of them, as engines
// without the page take these names for theirs: their ids come from /tokenize, which
// prepares the media, too, and the placeholders are those of the engines' events. ok is
// false where a name or a place is not certain.
func (t *Stage) byUUID(ctx context.Context, v *api.View, m *modelTokens, list []*workers.Worker) (res tokenize.Result, ok bool) {
	if v.Kind != api.Chat || !slices.ContainsFunc(list, renders) || slices.ContainsFunc(list, func(w *workers.Worker) bool { return !renders(w) }) {
		return res, false
	}
	for _, name := range processing {
		if _, ok := v.Get(name); ok { // they are part of the engine's names
			return res, false
		}
	}
	for i := range v.Media {
		// Where a prompt has several kinds, the engine may put one before the other.
		if it := &v.Media[i]; it.UUID == "" || len(it.UUID) > maxUUID || it.Kind != v.Media[0].Kind {
			return res, false
		}
	}
	token, ok := t.placeholder(list)
	if !ok || len(v.Media) == 0 {
		return res, false
	}
	res, err := m.engine.Chat(ctx, v.Body)
	if err != nil {
		return res, false
	}
	// Items are runs of the placeholder. In other prompts than these, as where an item's rows
	// have other tokens between them or two items touch, there are more or fewer.
	res.Media = nil
	for i := 0; i < len(res.IDs); i++ {
		from := i
		for i < len(res.IDs) && res.IDs[i] == token {
			i++
		}
		if i == from {
			continue
		}
		if len(res.Media) == len(v.Media) {
			return res, false
		}
		it := &v.Media[len(res.Media)]
		res.Media = append(res.Media, tokenize.Media{Modality: it.Kind.String(), Media: blockhash.Media{ID: it.UUID, Offset: from, Length: i - from}})
	}
	return res, len(res.Media) == len(v.Media)
}

// placeholder is what stands for media in the prompts of all engines of a model.
func (t *Stage) placeholder(list []*workers.Worker) (token uint32, ok bool) {
	if t.o.Placeholder == nil {
		return 0, false
	}
	for _, w := range list {
		switch own, known := t.o.Placeholder(w); {
		case !known:
		case ok && own != token:
			return 0, false
		default:
			token, ok = own, true
		}
	}
	return token, ok
}

// processing are members of a request that change how engines prepare media.
var processing = []string{"mm_processor_kwargs", "media_io_kwargs"}

// renders reports whether a worker's engine may have pages that render prompts.
func renders(w *workers.Worker) bool { return w.WireEngine() == workers.VLLM }

// learn learns from an engine's answer how many tokens media have.
func (t *Stage) learn(v *api.View, model string, res tokenize.Result, keep bool) {
	if t.o.Media == nil || res.Cached {
		return
	}
	for _, name := range processing {
		if _, ok := v.Get(name); ok { // they change how many tokens an item has
			keep = false
		}
	}
	var next [api.MediaOther]int // of each kind, how many were found
	for _, it := range res.Media {
		for kind := api.MediaImage; kind < api.MediaOther; kind++ {
			if it.Modality != kind.String() {
				continue
			}
			t.o.Media.Learn(model, kind, it.Length)
			if at := nth(v, kind, next[kind]); keep && at != nil {
				t.o.Media.Keep(model, v.MediaName(at), it.Length)
			}
			next[kind]++
		}
	}
}

// nth is item number n of a kind; nil without one.
func nth(v *api.View, kind api.MediaKind, n int) *api.Media {
	for i := range v.Media {
		if v.Media[i].Kind != kind {
			continue
		}
		if n == 0 {
			return &v.Media[i]
		}
		n--
	}
	return nil
}

// blinded reports, once, that no engine of a model names the media of its prompts.
func (t *Stage) blinded(m *modelTokens, model, why string) {
	if m.blind.CompareAndSwap(false, true) {
		t.o.Event(eventlog.Event{
			Kind: "tokenizer_degraded", Severity: eventlog.Warn,
			Text: fmt.Sprintf("prompts of %s with images, sounds or videos are routed by predictions and have estimated lengths, because no engine reports their positions and names (vLLM does with --enable-scale-out): %s", model, why),
		})
	}
}

// noPage are the statuses of an engine that renders no prompt: vLLM 0.32 without
// --enable-scale-out answers 403.
var noPage = []int{http.StatusUnauthorized, http.StatusForbidden, http.StatusNotFound, http.StatusMethodNotAllowed, http.StatusNotImplemented}

// render asks the engines of the model one after the other for a rendered prompt. An engine
// without the page, or one that failed repeatedly, is asked again after a pause.
func (a anyWorker) render(req *http.Request) (*http.Response, error) {
	list := a.t.o.Registry.Snapshot().Model(a.model)
	rests := &a.m.renders
	last := error(&trouble{fmt.Sprintf("no usable vLLM worker for model %q", a.model), tokenize.ErrUnavailable})
	start := int(a.m.nextEngine.Add(1) % uint64(max(1, len(list))))
	for i := range list {
		w := list[(start+i)%len(list)]
		if ok, _ := w.State.Usable(); !ok || !renders(w) {
			continue
		}
		now := time.Now()
		if why := rests.at(w.Name); why != "" && !rests.due(w.Name, now) {
			last = &trouble{why, tokenize.ErrUnavailable}
			continue
		}
		resp, err := a.t.put(req, w)
		switch {
		case err != nil:
			last = &trouble{fmt.Sprintf("%s: %s: %s", w.Name, req.URL.Path, oneLine(err)), err}
			if !rests.failed(w.Name, last.Error(), now) && rests.at(w.Name) != "" {
				rests.tried(w.Name, err, time.Now())
			}
		case slices.Contains(noPage, resp.StatusCode):
			_ = resp.Body.Close()
			last = &trouble{fmt.Sprintf("%s answers %s with %d", w.Name, req.URL.Path, resp.StatusCode), tokenize.ErrUnavailable}
			rests.absent(w.Name, last.Error(), now)
		default: // an error of the engine may be one of this prompt: of an address that is not reached
			rests.answered(w.Name)
			return resp, nil
		}
		if req.Context().Err() != nil || req.GetBody == nil {
			break
		}
	}
	return nil, last
}
