package access

import (
	"fmt"
	"net/http"
	"time"

	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/workers"
)

// Why a request was not let in, for the metrics.
const (
	ReasonKey  = "key"
	ReasonRate = "rate"
	// ReasonTokens is that the key has used its tokens.
	ReasonTokens = "tokens"
)

// Admit finds the key of a request, nil for none, and whether it may begin; if it may not,
// the error comes with one of the reasons. It takes the key out of the headers.
func (s *Store) Admit(h http.Header, required bool, now time.Time) (k *Key, reason string, err error) {
	shown := Shown(h)
	Hide(h)
	if shown == "" {
		if required {
			return nil, ReasonKey, &api.Error{Status: http.StatusUnauthorized, Code: api.CodeUnauthorized, Message: "this router requires an API key: send it as Authorization: Bearer KEY"}
		}
		return nil, "", nil
	}
	k = s.Find(shown)
	switch {
	case shown == noBearer:
		return nil, ReasonKey, &api.Error{Status: http.StatusUnauthorized, Code: api.CodeUnauthorized, Message: "the header Authorization is not one bearer token: send the API key as Authorization: Bearer KEY"}
	case k == nil:
		return nil, ReasonKey, &api.Error{Status: http.StatusUnauthorized, Code: api.CodeUnauthorized, Message: "the API key is not known here: it is wrong, or was revoked"}
	case !k.Has(Use):
		return nil, ReasonKey, &api.Error{Status: http.StatusForbidden, Code: api.CodeForbidden, Message: fmt.Sprintf("the API key %q is for the admin API only: it lacks the role use", k.Name)}
	}
	if wait := k.tokens.wait(k.Tokens, now); wait > 0 {
		return nil, ReasonTokens, &api.Error{
			Status: http.StatusTooManyRequests, Code: api.CodeRateLimited, RetryAfter: wait,
			Message: fmt.Sprintf("the API key %q has used its %d tokens a minute; try again later", k.Name, k.Tokens),
		}
	}
	if wait := k.Take(now); wait > 0 {
		return nil, ReasonRate, &api.Error{
			Status: http.StatusTooManyRequests, Code: api.CodeRateLimited, RetryAfter: wait,
			Message: fmt.Sprintf("the API key %q has used up its requests, its rate is %d a minute; try again later", k.Name, k.Rate),
		}
	}
	return k, "", nil
}

// Refusal is the error for a request whose model the key is not for, whether it exists or
// not; nil where the key is for one of the model's names. requested is what the client calls
// it, empty where the request names none.
func (k *Key) Refusal(requested string, names ...string) error {
	if k.May(names...) {
		return nil
	}
	e := &api.Error{Status: http.StatusForbidden, Code: api.CodeForbidden, Param: "model"}
	if requested == "" {
		e.Message = fmt.Sprintf("the request names no model, and the API key %q is not for the one that would serve it; the key is for %q", k.Name, k.Models)
	} else {
		e.Message = fmt.Sprintf("the API key %q is not for the model %q; it is for %q", k.Name, api.Clip(requested), k.Models)
	}
	return e
}

// AdapterRefusal is the error for a request that chooses an adapter beside its model which the
// key is not for; nil otherwise. A key for some models may choose adapters by lora_path
// (SGLang), one or a list of them. The router cannot tell which one other members choose.
func (k *Key) AdapterRefusal(v *api.View) error {
	if k.May() {
		return nil
	}
	for _, member := range []string{"lora_id", "lora_request"} { // of SGLang and TensorRT-LLM
		if raw, ok := v.Get(member); ok && string(raw) != "null" {
			return &api.Error{
				Status: http.StatusForbidden, Code: api.CodeForbidden, Param: member,
				Message: fmt.Sprintf("the API key %q is for the models %q, and %q could choose another; name the adapter in \"model\"", k.Name, k.Models, member),
			}
		}
	}
	for _, name := range v.Adapters() {
		if !k.May(name) {
			return &api.Error{
				Status: http.StatusForbidden, Code: api.CodeForbidden, Param: "lora_path",
				Message: fmt.Sprintf("the API key %q is not for the adapter %q; it is for %q", k.Name, api.Clip(name), k.Models),
			}
		}
	}
	return nil
}

// Withheld are the members of a body by which one tenant could act on another's requests.
// vLLM and SGLang store a response under request_id, over any that is there, and schedule by
// priority; clients that may steer keep that.
func Withheld(kind api.Kind, steers bool) (members []string) {
	if !steers {
		members = append(members, "priority")
	}
	if kind == api.Responses {
		members = append(members, "request_id")
	}
	return members
}

// SaltPrompt keeps a request's blocks apart from those of other tenants, in the engine
// and in the index: whatever salt the client sends is its tenant's own. It reports
// whether there is a prompt to salt. Where an engine of the list takes no salt, the
// prompt must not reach it, and that is the error.
func SaltPrompt(v *api.View, kind api.Kind, path, tenant string, list []*workers.Worker) (salted bool, err error) {
	switch kind {
	case api.Chat, api.Completion, api.Responses, api.Generate:
	case api.CountTokens, api.Tokenize, api.Detokenize, api.ResponseObject, api.Models, api.Model, api.Version:
		return false, nil // no prompt of them gets into a cache
	default:
		if why := takesNoSalt(kind, path, list); why != "" {
			return false, &api.Error{
				Status: http.StatusForbidden, Code: api.CodeForbidden,
				Message: fmt.Sprintf("this router keeps tenants apart in the engines' caches (keys.salt), which %s has no cache_salt for (%s); use /v1/chat/completions, /v1/completions or /v1/responses", path, why),
			}
		}
	}
	v.CacheSalt = Salt(tenant, v.CacheSalt)
	return true, nil
}

// takesNoSalt says why the prompt of an endpoint beside the most common ones could not be
// salted; empty if it can. vLLM's Messages and pooling endpoints have had the field for
// sure since 0.32; an engine that does not know it would drop it silently.
func takesNoSalt(kind api.Kind, path string, list []*workers.Worker) string {
	if kind == api.SGLangGenerate || kind == api.Transcription || kind == api.Speech || path == "/v2/embed" {
		return "it is no member of the body there"
	}
	if len(list) == 0 {
		return "no worker of its model is there, so that its engine is not known"
	}
	for _, w := range list {
		if w.WireEngine() != workers.VLLM || !w.VersionAtLeast(0, 32) {
			return fmt.Sprintf("worker %s is not known to be vLLM 0.32 or later", w.Name)
		}
	}
	return ""
}
