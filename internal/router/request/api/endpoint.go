package api

import (
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
)

// Kind is what an endpoint does.
type Kind uint8

// The kinds of endpoints. Adapter stands for pages that an engine answers
// about itself rather than for a prompt.
const (
	Unknown Kind = iota
	Chat
	Completion
	Responses
	ResponseObject
	Messages
	CountTokens
	Generate
	SGLangGenerate
	Embeddings
	Rerank
	Score
	Classify
	Pooling
	Tokenize
	Detokenize
	Models
	Model
	Transcription
	Speech
	Version
)

var kindNames = [...]string{
	"unknown", "chat", "completion", "responses", "response_object", "messages", "count_tokens", "generate",
	"sglang_generate", "embeddings", "rerank", "score", "classify", "pooling", "tokenize", "detokenize",
	"models", "model", "transcription", "speech", "version", "invalid",
}

// String is the lower-case name of the kind, as in metrics and receipts.
func (k Kind) String() string { return kindNames[min(int(k), len(kindNames)-1)] }

// IsChat reports whether an engine makes the prompt by a chat template.
func (k Kind) IsChat() bool { return k == Chat || k == Messages || k == Responses }

// BodyForm is how a request carries its input.
type BodyForm uint8

// The forms of a body.
const (
	NoBody BodyForm = iota
	JSONBody
	MultipartBody
)

// Endpoint is one path of the data plane.
type Endpoint struct {
	// Path is exact, or, when it ends in "/", the start of a path with one
	// more element.
	Path string
	Kind Kind
	// Methods are the allowed HTTP methods.
	Methods []string
	Body    BodyForm
	// Splittable says that a prefill worker may take the first leg.
	Splittable bool
	// Streamable says that the answer may be an event stream.
	Streamable bool
	// ByRouter reports that the router itself answers.
	ByRouter bool
}

var (
	post    = []string{http.MethodPost}
	get     = []string{http.MethodGet, http.MethodHead}
	anyVerb = []string{http.MethodGet, http.MethodHead, http.MethodPost, http.MethodDelete}
)

func jsonPost(path string, k Kind) Endpoint {
	return Endpoint{Path: path, Kind: k, Methods: post, Body: JSONBody}
}

func generation(path string, k Kind, split bool) Endpoint {
	e := jsonPost(path, k)
	e.Streamable, e.Splittable = true, split
	return e
}

var endpoints = func() map[string]*Endpoint {
	list := []Endpoint{
		generation("/v1/chat/completions", Chat, true),
		generation("/v1/completions", Completion, true),
		generation("/v1/responses", Responses, true),
		generation("/v1/messages", Messages, true),
		jsonPost("/v1/messages/count_tokens", CountTokens),
		generation("/inference/v1/generate", Generate, true),
		generation("/generate", SGLangGenerate, true),
		{Path: "/v1/responses/", Kind: ResponseObject, Methods: anyVerb, Streamable: true},
		jsonPost("/v1/embeddings", Embeddings),
		jsonPost("/v2/embed", Embeddings),
		jsonPost("/rerank", Rerank), jsonPost("/v1/rerank", Rerank), jsonPost("/v2/rerank", Rerank),
		jsonPost("/score", Score), jsonPost("/v1/score", Score),
		jsonPost("/classify", Classify), jsonPost("/v1/classify", Classify),
		jsonPost("/pooling", Pooling), jsonPost("/v1/pooling", Pooling),
		jsonPost("/tokenize", Tokenize), jsonPost("/v1/tokenize", Tokenize),
		jsonPost("/detokenize", Detokenize), jsonPost("/v1/detokenize", Detokenize),
		{Path: "/v1/models", Kind: Models, Methods: get, ByRouter: true},
		{Path: "/v1/models/", Kind: Model, Methods: get, ByRouter: true},
		{Path: "/v1/audio/transcriptions", Kind: Transcription, Methods: post, Body: MultipartBody, Streamable: true},
		{Path: "/v1/audio/translations", Kind: Transcription, Methods: post, Body: MultipartBody, Streamable: true},
		generation("/v1/audio/speech", Speech, false),
		{Path: "/version", Kind: Version, Methods: get},
	}
	m := make(map[string]*Endpoint, len(list))
	for i := range list {
		m[list[i].Path] = &list[i]
	}
	return m
}()

// Lookup finds the endpoint of a request. The error is an [*Error]: 404 that
// names the supported paths, or where a path of the admin API belongs, 405 that
// names the allowed methods, or 505 for the preface of HTTP/2.
func Lookup(method, path string) (*Endpoint, error) {
	e := endpoints[path]
	if e == nil {
		e = lookupPrefix(path)
	}
	if method == "PRI" { // how a client begins that knows that it speaks to HTTP/2
		return nil, &Error{
			Status: http.StatusHTTPVersionNotSupported, Code: CodeHTTPVersion,
			Message: "this router speaks HTTP/1.1 and no HTTP/2: tell the client or the proxy in front to use HTTP/1.1 towards it",
		}
	}
	if e == nil && (strings.HasPrefix(path, "/admin/") || path == "/metrics") {
		return nil, &Error{
			Status: http.StatusNotFound, Code: CodeAdminPath,
			Message: "no such path: " + clip(path, 128) + "; this is the data plane, the admin API and /metrics are at the address of --admin-listen",
		}
	}
	if e == nil {
		return nil, &Error{Status: http.StatusNotFound, Code: CodeUnknownPath, Message: "no such path: " + clip(path, 128) + instead(path)}
	}
	if slices.Contains(e.Methods, method) {
		return e, nil
	}
	return nil, &Error{
		Status: http.StatusMethodNotAllowed, Code: CodeMethodNotAllowed,
		Message: "method " + clip(method, 32) + " is not allowed for " + e.Path + "; use " + strings.Join(e.Methods, " or "),
		Allow:   strings.Join(e.Methods, ", "),
	}
}

// instead is advice for a path that this router does not answer.
func instead(path string) string {
	switch near := "/v1" + strings.TrimSuffix(path, "/"); {
	case endpoints[near] != nil:
		return "; did you mean " + near + "? The base URL of OpenAI clients ends with /v1"
	case endpoints[near[len("/v1"):]] != nil:
		return "; did you mean " + near[len("/v1"):] + "?"
	case strings.HasPrefix(path, "/v1/v1/"):
		return "; did you mean " + clip(path[len("/v1"):], 128) + "? The client adds /v1 to its base URL"
	}
	advice := ""
	if !strings.HasPrefix(path, "/v1/") || strings.HasSuffix(path, "_lora_adapter") {
		advice = "; calls that control engines go through the admin API (dynctl workers call)"
	}
	return advice + "; this router answers " + strings.Join(slices.Sorted(maps.Keys(endpoints)), ", ")
}

// LookupURL is [Lookup] for a URL. Its error for a path that has an escape where the endpoint
// has none, such as /v1%2fcompletions, is a 404: what stands in front of the router and
// judges paths may have taken it for another one. Only the last part of /v1/models/ may have
// escapes.
func LookupURL(method string, u *url.URL) (*Endpoint, error) {
	e, err := Lookup(method, u.Path)
	if err != nil || u.RawPath == "" {
		return e, err
	}
	if e.Kind == Model && strings.HasPrefix(u.RawPath, e.Path) {
		return e, nil
	}
	return nil, &Error{
		Status: http.StatusNotFound, Code: CodeUnknownPath,
		Message: "no such path: " + clip(u.RawPath, 128) + "; write " + clip(u.Path, 128) + " without escapes",
	}
}

// WithoutRoot takes root ("/llm") off the path of a URL that begins with it.
func WithoutRoot(u *url.URL, root string) {
	rest, ok := strings.CutPrefix(u.Path, root)
	if root == "" || !ok || !strings.HasPrefix(rest, "/") {
		return
	}
	u.Path = rest
	if u.RawPath, ok = strings.CutPrefix(u.RawPath, root); !ok {
		u.RawPath = ""
	}
}

// lookupPrefix finds /v1/models/{id}, where an id may hold slashes, and
// /v1/responses/{id}, with or without /cancel or /input_items.
func lookupPrefix(path string) *Endpoint {
	if id, ok := strings.CutPrefix(path, "/v1/models/"); ok && id != "" {
		return endpoints["/v1/models/"]
	}
	if id, ok := strings.CutPrefix(path, "/v1/responses/"); ok {
		id = strings.TrimSuffix(strings.TrimSuffix(id, "/cancel"), "/input_items")
		if id != "" && !strings.Contains(id, "/") {
			return endpoints["/v1/responses/"]
		}
	}
	return nil
}

// clip shortens client text for an error that quotes it.
func clip(s string, n int) string {
	if len(s) <= n {
		return s
	}
	for n > 0 && s[n]&0xc0 == 0x80 {
		n--
	}
	return s[:n] + "…"
}

// Clip shortens what a client sent to 100 bytes, for a message that quotes it.
func Clip(s string) string { return clip(s, 100) }
