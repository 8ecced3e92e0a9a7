package api

import (
	"encoding/json"
	"errors"
	"fmt"
	"go/token"
	"reflect"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/dynctl/dynctl/internal/rawjson"
	"github.com/dynctl/dynctl/internal/rig/property"
)

func texts(v *View) []string {
	var out []string
	for _, s := range v.Texts {
		out = append(out, string(s.Of(v.Body)))
	}
	return out
}

// plain compares what a request says in one word each, and leaves its prompt and what it is
// read from.
var plain = cmp.FilterPath(func(p cmp.Path) bool {
	f, ok := p.Last().(cmp.StructField)
	if !ok {
		return false
	}
	switch f.Type().Kind() {
	case reflect.String, reflect.Bool, reflect.Int64:
		return f.Name() == "PromptKey" || !token.IsExported(f.Name())
	default:
		return true
	}
}, cmp.Ignore())

func TestViewReadsWhatARequestSays(t *testing.T) {
	t.Parallel()
	v := parse(t, Chat, `{"model":"a\u002fb","stream":true,"stream_options":{"include_usage":true},"max_tokens":10,"max_completion_tokens":2e1,
		"min_tokens":3,"n":2,"logprobs":true,"priority":-5,"cache_salt":"s","user":"u","session_id":"c","x":[{}],
		"messages":[{"role":"system","content":"Be \"kind\""},{"content":[{"type":"text","text":"one"},{"text":"two","type":"text"},"three"],"role":"user"},
		{"role":"assistant","content":null,"tool_calls":[{"function":{"arguments":"{}"}}]},{"role":"tool","content":"four"}]}`)
	want := View{
		Model: "a/b", Stream: true, IncludeUsage: true, MaxTokens: 20, MaxTokensKey: "max_completion_tokens", MinTokens: 3,
		N: 2, Logprobs: true, CacheSalt: "s",
	}
	if diff := cmp.Diff(want, *v, plain); diff != "" {
		t.Errorf("view (-want +got):\n%s", diff)
	}
	if v.Prompt != PromptMessages || v.PromptKey != "messages" || v.Multimodal || v.Prompts() != 1 {
		t.Errorf("prompt %v %q multimodal %v", v.Prompt, v.PromptKey, v.Multimodal)
	}
	if diff := cmp.Diff([]string{`Be \"kind\"`, "one", "two", "three", "four"}, texts(v)); diff != "" {
		t.Errorf("texts (-want +got):\n%s", diff)
	}
	if raw, ok := v.Get("x"); !ok || string(raw) != "[{}]" || has(v, "y") || !has(v, "n") {
		t.Errorf("Get: %s %v", raw, ok)
	}
	empty := parse(t, Chat, ` {"max_tokens":null,"model":null,"stream":null,"messages":null} `)
	if diff := cmp.Diff(View{MaxTokens: -1, MinTokens: -1, N: 1}, *empty, plain); diff != "" {
		t.Errorf("nulls count as something (-want +got):\n%s", diff)
	}
	if empty.Prompt != PromptNone || has(empty, "model") {
		t.Errorf("nulls count as something: prompt %v, model %v", empty.Prompt, has(empty, "model"))
	}
}

func TestPromptForms(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		kind   Kind
		body   string
		prompt PromptKind
		texts  []string
		ids    [][]uint32
		media  bool
	}{
		{Completion, `{"prompt":"a b"}`, PromptText, []string{"a b"}, nil, false},
		{Completion, `{"prompt":["a", "b"]}`, PromptTexts, []string{"a", "b"}, nil, false},
		{Completion, `{"prompt":[ 1,22 , 4294967295 ]}`, PromptIDs, nil, [][]uint32{{1, 22, 4294967295}}, false},
		{Completion, `{"prompt":[[1],[2,0],[ ]]}`, PromptIDLists, nil, [][]uint32{{1}, {2, 0}, {}}, false},
		{Completion, `{"prompt":[]}`, PromptTexts, nil, nil, false},
		{Completion, `{"prompt":null,"prompt_embeds":"x"}`, PromptNone, nil, nil, true},
		{Completion, `{"prompt":{"x":1}}`, 0, nil, nil, false},
		{Generate, `{"token_ids":[7,8],"sampling_params":{"max_tokens":3}}`, PromptIDs, nil, [][]uint32{{7, 8}}, false},
		{Generate, `{"token_ids":[7,8],"features":{"mm_hashes":{}}}`, PromptIDs, nil, [][]uint32{{7, 8}}, true},
		{SGLangGenerate, `{"text":"hi"}`, PromptText, []string{"hi"}, nil, false},
		{SGLangGenerate, `{"text":["hi","ho"]}`, PromptTexts, []string{"hi", "ho"}, nil, false},
		{SGLangGenerate, `{"input_ids":[[1,2],[3]]}`, PromptIDLists, nil, [][]uint32{{1, 2}, {3}}, false},
		{SGLangGenerate, `{"text":null,"input_ids":[5]}`, PromptIDs, nil, [][]uint32{{5}}, false},
		{Embeddings, `{"input":[[1,2],[3]]}`, PromptIDLists, nil, [][]uint32{{1, 2}, {3}}, false},
		{Embeddings, `{"input":"x"}`, PromptText, []string{"x"}, nil, false},
		{Responses, `{"input":"x","instructions":"be"}`, PromptText, []string{"be", "x"}, nil, false},
		{Responses, `{"instructions":"be","input":[{"role":"user","content":[{"type":"input_text","text":"x"},{"type":"input_image","image_url":"u"}]},
			{"type":"function_call_output","output":"y"}],"text":{"format":{}}}`, PromptItems, []string{"be", "x", "y"}, nil, true},
		{Messages, `{"messages":[{"role":"user","content":"x"},{"role":"user","content":[{"type":"tool_result","content":[{"type":"text","text":"y"}]}]}],
			"system":[{"type":"text","text":"s1"},{"type":"text","text":"s2"}]}`, PromptMessages, []string{"s1", "s2", "x", "y"}, nil, false},
		{Messages, `{"system":"s","messages":[{"role":"user","content":[{"type":"image","source":{}}]}]}`, PromptMessages, []string{"s"}, nil, true},
		{Chat, `{"messages":[{"role":"user","content":[{"image_url":{"url":"u"}}]}]}`, PromptMessages, nil, nil, true},
		{Chat, `{"messages":[],"prompt":7}`, PromptMessages, nil, nil, false},
		{Tokenize, `{"prompt":"x"}`, PromptText, []string{"x"}, nil, false},
		{Tokenize, `{"messages":[{"content":"x"}]}`, PromptMessages, []string{"x"}, nil, false},
		{Rerank, `{"query":"q","documents":["a"],"prompt":7}`, PromptNone, nil, nil, false},
	} {
		var v View
		err := v.Parse([]byte(c.body), c.kind, Limits{})
		if c.prompt == 0 && strings.Contains(c.body, `{"x":1}`) {
			if err == nil {
				t.Errorf("%s is accepted", c.body)
			}
			continue
		}
		if err != nil {
			t.Errorf("%v %s: %v", c.kind, c.body, err)
			continue
		}
		if v.Prompt != c.prompt || v.Multimodal != c.media {
			t.Errorf("%v %s: prompt %v multimodal %v", c.kind, c.body, v.Prompt, v.Multimodal)
		}
		if diff := cmp.Diff(c.texts, texts(&v)); diff != "" {
			t.Errorf("%v %s texts:\n%s", c.kind, c.body, diff)
		}
		var ids [][]uint32
		total := 0
		for i := range v.Lists {
			ids = append(ids, v.AppendIDs([]uint32{}, i))
			total += len(ids[i])
		}
		if diff := cmp.Diff(c.ids, ids); diff != "" || total != v.IDs {
			t.Errorf("%v %s ids (%d counted, %d read):\n%s", c.kind, c.body, v.IDs, total, diff)
		}
	}
}

func TestNestedSamplingParams(t *testing.T) {
	t.Parallel()
	v := parse(t, SGLangGenerate, `{"text":["a","b"],"sampling_params":[{"max_new_tokens":5,"n":2},{"max_new_tokens":9,"min_new_tokens":1}],"return_logprob":true}`)
	want := View{MaxTokens: 9, MaxTokensKey: "sampling_params.max_new_tokens", N: 2, MinTokens: 1, Logprobs: true, PromptLogprobs: true}
	if diff := cmp.Diff(want, *v, plain); diff != "" {
		t.Errorf("view (-want +got):\n%s", diff)
	}
}

func TestBadBodies(t *testing.T) {
	t.Parallel()
	deep := strings.Repeat("[", 200) + strings.Repeat("]", 200)
	for _, c := range []struct {
		kind  Kind
		body  string
		code  Code
		param string
		says  string
	}{
		{Chat, ``, CodeInvalidJSON, "", "empty"},
		{Chat, `  `, CodeInvalidJSON, "", "empty"},
		{Chat, `[1]`, CodeInvalidJSON, "", "object"},
		{Chat, "\xef\xbb\xbf{}", CodeInvalidJSON, "", "byte order mark"},
		{Chat, `{`, CodeInvalidJSON, "", "at byte 1"},
		{Chat, `{"a":1`, CodeInvalidJSON, "", "at byte 6"},
		{Chat, `{"a":1,}`, CodeInvalidJSON, "", "at byte 7"},
		{Chat, `{"a" 1}`, CodeInvalidJSON, "", "':'"},
		{Chat, `{"a":01}`, CodeInvalidJSON, "", "begin with 0"},
		{Chat, `{"a":1.}`, CodeInvalidJSON, "", "decimal"},
		{Chat, `{"a":NaN}`, CodeInvalidJSON, "", "value"},
		{Chat, `{"a":tru}`, CodeInvalidJSON, "", "value"},
		{Chat, `{"a":"x}`, CodeInvalidJSON, "", "not closed"},
		{Chat, `{"a":"\x"}`, CodeInvalidJSON, "", "backslash"},
		{Chat, `{"a":"\u12g4"}`, CodeInvalidJSON, "", "hexadecimal"},
		{Chat, "{\"a\":\"x\ny\"}", CodeInvalidJSON, "", "control character"},
		{Chat, "{\"a\":\"caf\xe9 and more text to fill words\"}", CodeInvalidJSON, "", "UTF-8"},
		{Chat, `{"a":1} {}`, CodeInvalidJSON, "", "nothing may follow"},
		{Chat, `{"a":` + deep + `}`, CodeInvalidJSON, "", "deeper than 128"},
		{Chat, `{"a":[1,]}`, CodeInvalidJSON, "", "value"},
		{Chat, `{"model":"a","model":"b"}`, CodeDuplicateKey, "model", "byte 2 and at byte 14"},
		{Chat, `{"model":"a","mo\u0064el":"b"}`, CodeDuplicateKey, "model", "twice"},
		{Chat, `{"kv_transfer_params":1,"kv_transfer_params":2}`, CodeDuplicateKey, "kv_transfer_params", "twice"},
		{Chat, `{"model":7}`, CodeInvalidRequest, "model", "a string, got 7"},
		{Chat, `{"model":"` + strings.Repeat("m", 600) + `"}`, CodeInvalidRequest, "model", "longer than 512"},
		{Chat, `{"stream":"maybe"}`, CodeInvalidRequest, "stream", "true or false, got a string"},
		{Chat, `{"stream":2}`, CodeInvalidRequest, "stream", "true or false, got 2"},
		{Chat, `{"stream":""}`, CodeInvalidRequest, "stream", "true or false"},
		{Chat, `{"stream":[]}`, CodeInvalidRequest, "stream", "true or false"},
		{Chat, `{"stream_options":[]}`, CodeInvalidRequest, "stream_options", "object"},
		{Chat, `{"max_tokens":-1}`, CodeInvalidRequest, "max_tokens", "from 0 to 2147483647, got -1"},
		{Chat, `{"max_tokens":1.5}`, CodeInvalidRequest, "max_tokens", "whole number"},
		{Chat, `{"max_tokens":1e30}`, CodeInvalidRequest, "max_tokens", "got 1e30"},
		{Chat, `{"max_tokens":99999999999999999999999}`, CodeInvalidRequest, "max_tokens", "from 0"},
		{Chat, `{"max_completion_tokens":"16x"}`, CodeInvalidRequest, "max_completion_tokens", "whole number"},
		{Chat, `{"max_completion_tokens":"1.5"}`, CodeInvalidRequest, "max_completion_tokens", "whole number"},
		{Chat, `{"max_completion_tokens":"-1"}`, CodeInvalidRequest, "max_completion_tokens", "from 0"},
		{Chat, `{"max_tokens":"Infinity"}`, CodeInvalidRequest, "max_tokens", "whole number"},
		{Chat, `{"max_tokens":"0x10"}`, CodeInvalidRequest, "max_tokens", "whole number"},
		{Chat, `{"max_tokens":"1-6"}`, CodeInvalidRequest, "max_tokens", "whole number"},
		{Chat, `{"max_tokens":"1_6"}`, CodeInvalidRequest, "max_tokens", "whole number"},
		{Chat, `{"max_tokens":""}`, CodeInvalidRequest, "max_tokens", "whole number"},
		{Chat, `{"max_tokens":"` + strings.Repeat("1", 100) + `"}`, CodeInvalidRequest, "max_tokens", "whole number"},
		{Chat, `{"n":0}`, CodeInvalidRequest, "n", "from 1"},
		{Chat, `{"n":true}`, CodeInvalidRequest, "n", "got true"},
		{Chat, `{"messages":{}}`, CodeInvalidRequest, "messages", "a list, got an object"},
		{Chat, `{"messages":"hi"}`, CodeInvalidRequest, "messages", "a list, got a string"},
		{Chat, `{"messages":[{"content":"a"},7]}`, CodeInvalidRequest, "messages[1]", "an object, got 7"},
		{Chat, `{"messages":[{"content":7}]}`, CodeInvalidRequest, "messages[0].content", "got 7"},
		{Chat, `{"messages":[{"content":[7]}]}`, CodeInvalidRequest, "messages[0].content[0]", "got 7"},
		{Completion, `{"prompt":7}`, CodeInvalidRequest, "prompt", "a string or a list"},
		{Completion, `{"prompt":["a",7]}`, CodeInvalidRequest, "prompt[1]", "like the first"},
		{Completion, `{"prompt":[1,"a"]}`, CodeInvalidRequest, "prompt[1]", "token id"},
		{Completion, `{"prompt":[1,-2]}`, CodeInvalidRequest, "prompt[1]", "got -2"},
		{Completion, `{"prompt":[1,2.5]}`, CodeInvalidRequest, "prompt[1]", "got 2.5"},
		{Completion, `{"prompt":[4294967296]}`, CodeInvalidRequest, "prompt[0]", "4294967296"},
		{Completion, `{"prompt":[[1],[2,null]]}`, CodeInvalidRequest, "prompt[1][1]", "null"},
		{Completion, `{"prompt":[[1],2]}`, CodeInvalidRequest, "prompt[1]", "like the first"},
		{Completion, `{"prompt":[1,]}`, CodeInvalidJSON, "", "value"},
		{Completion, `{"prompt":[1 2]}`, CodeInvalidJSON, "", "','"},
		{Completion, `{"prompt":[01]}`, CodeInvalidJSON, "", "begin with 0"},
		{Completion, `{"prompt":[1`, CodeInvalidJSON, "", "']'"},
		{SGLangGenerate, `{"text":"a","input_ids":[1]}`, CodeInvalidRequest, "input_ids", "both given"},
		{SGLangGenerate, `{"sampling_params":7}`, CodeInvalidRequest, "sampling_params", "object"},
		{SGLangGenerate, `{"sampling_params":[{},7]}`, CodeInvalidRequest, "sampling_params[1]", "object"},
		{SGLangGenerate, `{"sampling_params":{"max_new_tokens":-4}}`, CodeInvalidRequest, "sampling_params.max_new_tokens", "-4"},
		{Generate, `{"token_ids":"x"}`, CodeInvalidRequest, "token_ids", "a list"},
		{Chat, `{"vllm_xargs":7}`, CodeInvalidRequest, "vllm_xargs", "object"},
	} {
		var v View
		err := v.Parse([]byte(c.body), c.kind, Limits{})
		var e *Error
		if !errors.As(err, &e) {
			t.Errorf("%.80s: error %v", c.body, err)
			continue
		}
		if e.Status != 400 || e.Code != c.code || e.Param != c.param || !strings.Contains(e.Message, c.says) {
			t.Errorf("%.80s:\n got %d %s %q: %s\nwant 400 %s %q: …%s…", c.body, e.Status, e.Code, e.Param, e.Message, c.code, c.param, c.says)
		}
	}
}

// TestLaxValues: what engines read as a boolean or a whole number is one for the router, and
// names of any length that it does not use pass.
func TestLaxValues(t *testing.T) {
	t.Parallel()
	for value, want := range map[string]bool{
		`"true"`: true, `"True"`: true, `1`: true, `1.0`: true, `"1"`: true, `"yes"`: true, `"ON"`: true, `"t"`: true, `"\u0074rue"`: true,
		`"false"`: false, `0`: false, `-0.0`: false, `"0"`: false, `"no"`: false, `"off"`: false, `"F"`: false, `null`: false,
	} {
		v := parse(t, Chat, `{"stream":`+value+`,"stream_options":{"include_usage":`+value+`},"echo":`+value+`,"logprobs":`+value+`}`)
		if v.Stream != want || v.IncludeUsage != want || v.Echo != want || v.Logprobs != want {
			t.Errorf("%s: %v %v %v %v", value, v.Stream, v.IncludeUsage, v.Echo, v.Logprobs)
		}
	}
	for _, value := range []string{`3`, `3.0`, `3e0`, `"3"`, `" 3 "`, `"+3"`, `"3.0"`, `"\u0033"`} {
		v := parse(t, Chat, `{"max_completion_tokens":`+value+`,"n":`+value+`,"min_tokens":`+value+`,"priority":`+value+`,"truncate_prompt_tokens":`+value+`,
			"user":"`+strings.Repeat("u", 5000)+`","prompt_cache_key":"`+strings.Repeat("k", 5000)+`"}`)
		if v.MaxTokens != 3 || v.N != 3 || v.MinTokens != 3 || v.MaxTokensKey != "max_completion_tokens" {
			t.Errorf("%s: %d %d %d", value, v.MaxTokens, v.N, v.MinTokens)
		}
	}
	if v := parse(t, SGLangGenerate, `{"sampling_params":{"max_new_tokens":"7","n":"2"}}`); v.MaxTokens != 7 || v.N != 2 {
		t.Errorf("%d %d", v.MaxTokens, v.N)
	}
}

func TestLimits(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ body, says string }{
		{`{"a":1,"b":2,"c":3}`, "more than 2 members"},
		{`{"messages":[{"content":"a"},{"content":"b"},{"content":"c"}]}`, "more than 2 texts"},
		{`{"max_tokens":101}`, "to 100"},
		{`{"a":[[[1]]]}`, "deeper than 3"},
	} {
		var v View
		err := v.Parse([]byte(c.body), Chat, Limits{Depth: 3, Members: 2, Texts: 2, MaxTokens: 100})
		if c.body[2] == 'm' && strings.Contains(c.body, "messages") {
			err = v.Parse([]byte(c.body), Chat, Limits{Texts: 2})
		}
		if err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v", c.body, err)
		}
	}
}

// Our scanner and encoding/json agree on what is valid JSON.
func TestValidityEqualsEncodingJSON(t *testing.T) {
	t.Parallel()
	property.Check(t, func(t *rapid.T) {
		body := []byte(genObject(t, 3, []string{`"a"`, `"b"`, `"z"`, `"日"`, `"\u0041"`}))
		for range rapid.IntRange(0, 3).Draw(t, "damages") {
			i := rapid.IntRange(0, len(body)-1).Draw(t, "at")
			switch rapid.IntRange(0, 2).Draw(t, "damage") {
			case 0:
				body[i] = rapid.SampledFrom([]byte("{}[]\",:\\0 19eE+-.tfn\x00\x1f\x7f")).Draw(t, "byte")
			case 1:
				body = append(body[:i:i], body[i+1:]...)
			case 2:
				body = body[:i]
			}
			if len(body) == 0 {
				return
			}
		}
		agree(t, body)
	})
}

func agree(t interface{ Fatalf(string, ...any) }, body []byte) {
	var v View
	err := v.Parse(body, Unknown, Limits{Members: 1 << 20})
	var e *Error
	if err != nil && !errors.As(err, &e) {
		t.Fatalf("Parse(%q): %T", body, err)
	}
	var members map[string]json.RawMessage
	valid := json.Valid(body) && utf8.Valid(body) && json.Unmarshal(body, &members) == nil && members != nil
	if depthOf(body) > DefaultDepth {
		return
	}
	if e != nil && e.Code != CodeInvalidJSON {
		if !valid {
			return // both problems are there
		}
		return
	}
	if valid != (err == nil) {
		t.Fatalf("Parse(%q): %v, encoding/json says valid=%v", body, err, valid)
	}
}

func depthOf(b []byte) int {
	d, deepest := 0, 0
	for _, c := range b {
		switch c {
		case '{', '[':
			d++
			deepest = max(deepest, d)
		case '}', ']':
			d--
		}
	}
	return deepest
}

func FuzzView(f *testing.F) {
	for _, s := range []string{
		`{"model":"m","messages":[{"role":"user","content":"hi"}],"stream":true}`, `{"prompt":[1,2,[3]]}`, `{"sampling_params":{"extra_args":{"kv_transfer_params":{}}}}`,
		`{"a":"\ud83d\ude00 \\","b":1e5}`,
		`{"tools":[{"name":"\u0061"}],"messages":[{"tool_calls":[{"id":"\\"}]},{"content":[{"input":{}}]}],"nvext":{"agent_hints":{"osl":7}}}`, `{"vllm_xargs":{"bootstrap_room":1},"bootstrap_room":2}`,
		`{"messages":[{"content":[{"type":"image_url","image_url":{"url":"data:,a"},"uuid":"u"},{"input_audio":{"data":"://"}},{"video_url":null}]}]}`,
	} {
		f.Add([]byte(s), byte(Chat))
	}
	f.Fuzz(func(t *testing.T, body []byte, kind byte) {
		agree(t, body)
		var v View
		if v.Parse(body, Kind(kind%21), Limits{}) != nil {
			return
		}
		v.EstimateTokens()
		for i := range v.Lists {
			v.AppendIDs(nil, i)
		}
		for i := range v.Media {
			m := &v.Media[i]
			if m.Kind < MediaImage || m.Kind >= MediaOther || m.UUID == "" && m.Value.Len() == 0 || !v.Multimodal {
				t.Fatalf("%q has %+v", body, m)
			}
			v.MediaName(m)
			v.Fetched(m)
		}
		out := Splice(nil, &v, append(v.AppendStrip(nil), Set("max_tokens", RawOne), Delete("stream"), Set("sampling_params.n", RawOne)))
		var again View
		if err := again.Parse(out, Unknown, Limits{Members: 2048, Depth: 256}); err != nil {
			t.Fatalf("Splice(%q) = %q: %v", body, out, err)
		}
		if raw, _ := again.Get("max_tokens"); string(raw) != "1" || has(&again, "stream") || again.transferIn != 0 {
			t.Fatalf("Splice(%q) = %q", body, out)
		}
	})
}

func TestEstimateTokens(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		kind Kind
		body string
		want int
	}{
		{Completion, fmt.Sprintf(`{"prompt":%q}`, strings.Repeat("a", 400)), 100},
		{Completion, `{"prompt":[` + strings.Repeat("1,", 499) + `1]}`, 500},
		{Chat, fmt.Sprintf(`{"messages":[{"role":"user","content":%q},{"role":"user","content":%q}]}`, strings.Repeat("a", 800), strings.Repeat("b", 1200)), 500},
		{Chat, fmt.Sprintf(`{"messages":[{"role":"user","content":[{"type":"text","text":%q},{"type":"image_url","image_url":{"url":"data:xxxxxxxxxxxx"}}]}]}`, strings.Repeat("a", 400)), 100},
		{Chat, `{}`, 0},
		{Completion, `{"prompt":"abc"}`, 0},
		{Completion, `{"prompt":"abcd"}`, 1},
		{Completion, `{"prompt":"abcdefg"}`, 1},
		{Completion, `{"prompt":"日本語の"}`, 1},
		{Completion, `{"prompt":"\n\u00e9\ud83d\ude00😀"}`, 1},
		{Completion, `{"prompt":"日本語テスト文字"}`, 2},
		{Completion, fmt.Sprintf(`{"prompt":%q}`, strings.Repeat("😀", 8)), 2},
		{Completion, `{"prompt":["abc","d"]}`, 1},
		{Completion, `{"prompt":[[` + strings.Repeat("1,", 29) + `1],[` + strings.Repeat("2,", 29) + `2]]}`, 60},
		{Chat, fmt.Sprintf(`{"prompt":null,"messages":[{"role":"user","content":%q}]}`, strings.Repeat("a", 80)), 20},
		{Chat, `{"messages":[{"content":"abc"},{"content":"d"}]}`, 1},
		// Tools, calls of them and their results count as the JSON that the client wrote.
		{Chat, fmt.Sprintf(`{"tools":[{"type":"function","function":{"name":%q}}],"messages":[{"content":"abcd"}]}`, strings.Repeat("a", 752)), 200},
		{Responses, fmt.Sprintf(`{"input":"abcd","tools":[{"type":"function","name":%q}]}`, strings.Repeat("a", 765)), 200},
		{Messages, fmt.Sprintf(`{"tools":[{"name":%q}],"messages":[{"content":"abcd"}]}`, strings.Repeat("a", 786)), 200},
		{CountTokens, fmt.Sprintf(`{"tools":[{"name":%q}],"messages":[{"content":"abcd"}]}`, strings.Repeat("a", 786)), 200},
		{Completion, fmt.Sprintf(`{"tools":[{"name":%q}],"prompt":"abcd"}`, strings.Repeat("a", 786)), 1},
		{Chat, `{"tools":null,"messages":[{"content":"abcd","tool_calls":null}]}`, 1},
		{Chat, fmt.Sprintf(`{"messages":[{"content":null,"tool_calls":[{"function":{"arguments":%q}}]},{"role":"tool","content":"%s"}]}`, `{"a":"`+strings.Repeat(`"`, 362)+`"}`, strings.Repeat("b", 400)), 200},
		{Responses, fmt.Sprintf(`{"input":[{"type":"function_call","arguments":%q},{"type":"function_call_output","output":%q},{"type":"custom_tool_call","input":%q}]}`, strings.Repeat("a", 398), strings.Repeat("b", 400), strings.Repeat("c", 398)), 300},
		{Messages, fmt.Sprintf(`{"messages":[{"content":[{"type":"tool_use","input":{"a":%q}}]},{"content":[{"type":"tool_result","content":[{"type":"text","text":%q}]}]}]}`, strings.Repeat("a", 392), strings.Repeat("b", 400)), 200},
	} {
		if got := parse(t, c.kind, c.body).EstimateTokens(); got != c.want {
			t.Errorf("%.60s: %d, want %d", c.body, got, c.want)
		}
	}
}

// TestTools: those of a chat come raw, and no others.
func TestTools(t *testing.T) {
	t.Parallel()
	const tools = `[ {"name":"\u0061"} ]`
	for body, want := range map[string]string{
		`{"tools":` + tools + `,"messages":[]}`: tools, `{"messages":[],"tools":` + tools + `}`: tools,
		`{"tools":null}`: "", `{"tools":{}}`: "", `{}`: "",
	} {
		if got := string(parse(t, Chat, body).Tools()); got != want {
			t.Errorf("%s: %q", body, got)
		}
	}
	if got := parse(t, Completion, `{"tools":`+tools+`}`).Tools(); got != nil {
		t.Errorf("of a completion: %q", got)
	}
	var v View
	if err := v.Parse([]byte(`{"tools":[],"tools":[]}`), Chat, Limits{}); err == nil {
		t.Error("tools that are given twice")
	}
}

// TestOutputHint: it is a positive number in its place; a request with anything else there is
// served all the same.
func TestOutputHint(t *testing.T) {
	t.Parallel()
	for nvext, want := range map[string]int{
		`{"agent_hints":{"priority":3,"osl":250}}`: 250, `{"agent_hints":{"osl":1e3}}`: 0, `{"agent_hints":{"osl":-4}}`: 0,
		`{"agent_hints":{"osl":"250"}}`: 0, `{"agent_hints":[{"osl":1}]}`: 0, `{"osl":250}`: 0, `null`: 0, `7`: 0,
		`{"agent_hints":{"osl":99999999999}}`: DefaultMaxTokens, `{"agent_hints":{"osl":99999999999999999999}}`: 0,
	} {
		if got := parse(t, Chat, `{"nvext":`+nvext+`,"messages":[]}`).OutputHint; got != want {
			t.Errorf("%s: %d, want %d", nvext, got, want)
		}
	}
}

func TestCodePointsEqualsDecoding(t *testing.T) {
	t.Parallel()
	property.Check(t, func(t *rapid.T) {
		raw, err := json.Marshal(rapid.StringOf(rapid.RuneFrom([]rune("ab \"\\\n\x01é日😀<&"))).Draw(t, "s"))
		if err != nil {
			t.Fatal(err)
		}
		var s string
		if err := json.Unmarshal(raw, &s); err != nil {
			t.Fatal(err)
		}
		if got := rawjson.CodePoints(raw[1 : len(raw)-1]); got != utf8.RuneCountInString(s) {
			t.Fatalf("CodePoints(%s) = %d, want %d", raw, got, utf8.RuneCountInString(s))
		}
		// Most are counted while they are read.
		var v View
		if err := v.Parse([]byte(`{"prompt":`+string(raw)+`}`), Completion, Limits{}); err != nil {
			t.Fatal(err)
		}
		if v.points != utf8.RuneCountInString(s) {
			t.Fatalf("%s has %d code points, want %d", raw, v.points, utf8.RuneCountInString(s))
		}
	})
}

// transferFields are those of isTransferField.
var transferFields = [...]string{
	"kv_transfer_params", "ec_transfer_params", "disaggregated_params", "disagg_spec",
	"bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key", "kv_cache_report_mode",
	"routed_dp_rank", "data_parallel_rank", "disagg_prefill_dp_rank", "decode_tp_size",
	"disagg_request_id", "ctx_request_id", "ret_first_tok",
}

func TestClientCannotSteer(t *testing.T) {
	t.Parallel()
	for _, name := range transferFields {
		if !isTransferField([]byte(name)) {
			t.Errorf("%s is not looked for", name)
		}
		escaped := fmt.Sprintf("\\u%04x%s", name[0], name[1:])
		for _, key := range []string{name, escaped} {
			for _, c := range []struct{ body, want string }{
				{`{"a":1,"` + key + `":{"x":1},"b":2}`, `{"a":1,"b":2}`},
				{`{"vllm_xargs":{"` + key + `":"7","k":1}}`, `{"vllm_xargs":{"k":1}}`},
				{`{"sampling_params":{"n":1,"` + key + `":1}}`, `{"sampling_params":{"n":1}}`},
				{`{"sampling_params":{"extra_args":{"` + key + `":{}},"n":1}}`, `{"sampling_params":{"extra_args":{},"n":1}}`},
				{`{"sampling_params":[{"` + key + `":1},{"n":1}]}`, `{"sampling_params":[{},{"n":1}]}`},
			} {
				v := parse(t, SGLangGenerate, c.body)
				if got := string(Splice(nil, v, v.AppendStrip(nil))); got != c.want || len(v.AppendStrip(nil)) == 0 {
					t.Errorf("%s: got %s, want %s", c.body, got, c.want)
				}
			}
		}
	}
	if v := parse(t, Chat, `{"messages":[{"role":"user","content":"kv_transfer_params"}],"metadata":{"bootstrap_room":1}}`); len(v.AppendStrip(nil)) > 0 {
		t.Error("a request without such fields is changed")
	}
}

// chatBody is a chat of about size bytes.
func chatBody(size int) []byte {
	text := strings.Repeat("lorem ipsum dolor sit amet, consetetur sadipscing elitr ", 1+size/50)[:size]
	b, _ := json.Marshal(map[string]any{
		"model": "m", "max_tokens": 16, "temperature": 0.5,
		"messages": []map[string]string{{"role": "system", "content": "You are kind."}, {"role": "user", "content": text}},
	})
	return b
}

func TestAllocations(t *testing.T) {
	body := chatBody(4096)
	var v View
	if n := testing.AllocsPerRun(100, func() {
		if v.Parse(body, Chat, Limits{}) != nil {
			t.Fatal("bad body")
		}
	}); n > 1 { // the model's name
		t.Errorf("Parse allocates %v times", n)
	}
	edits := []Edit{Set("max_tokens", RawOne), Set("stream", RawFalse), Delete("stream_options")}
	dst := make([][]byte, 0, 32)
	if n := testing.AllocsPerRun(100, func() { dst = v.Segments(dst[:0], edits) }); n > 3 {
		t.Errorf("Segments allocates %v times", n)
	}
}

func BenchmarkParse(b *testing.B) {
	code, _ := json.Marshal(map[string]any{"messages": []map[string]string{{"content": strings.Repeat("if x == \"y\" {\n\treturn \"z\\n\"\n}\n", 1000)}}})
	ids := []byte(`{"prompt":[` + strings.Repeat("12345,", 8191) + `1]}`)
	for _, c := range []struct {
		name string
		kind Kind
		body []byte
	}{{"1KB", Chat, chatBody(1 << 10)}, {"32KB", Chat, chatBody(32 << 10)}, {"220KB", Chat, chatBody(220 << 10)}, {"code", Chat, code}, {"8192ids", Completion, ids}} {
		b.Run(c.name, func(b *testing.B) {
			var v View
			b.SetBytes(int64(len(c.body)))
			b.ReportAllocs()
			for b.Loop() {
				if err := v.Parse(c.body, c.kind, Limits{}); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkSegments(b *testing.B) {
	var v View
	if err := v.Parse(chatBody(220<<10), Chat, Limits{}); err != nil {
		b.Fatal(err)
	}
	edits := []Edit{
		Set("max_tokens", RawOne), Replace("max_completion_tokens", RawOne), Set("stream", RawFalse), Delete("stream_options"),
		Delete("min_tokens"), Set("kv_transfer_params", []byte(`{"do_remote_decode":true}`)),
	}
	dst := make([][]byte, 0, 32)
	b.ReportAllocs()
	for b.Loop() {
		dst = v.Segments(dst[:0], edits)
	}
}

func BenchmarkAppendIDs(b *testing.B) {
	var v View
	if err := v.Parse([]byte(`{"prompt":[`+strings.Repeat("12345,", 8191)+`1]}`), Completion, Limits{}); err != nil {
		b.Fatal(err)
	}
	var ids []uint32
	b.ReportAllocs()
	for b.Loop() {
		ids = v.AppendIDs(ids[:0], 0)
	}
}

// has reports whether a top-level member is there with a value that is not null.
func has(v *View, name string) bool {
	b, ok := v.Get(name)
	return ok && b[0] != 'n'
}
