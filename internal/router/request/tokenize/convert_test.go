package tokenize

import (
	"encoding/json"
	"errors"
	"reflect"
	"testing"
)

// TestChatOfOtherAPIs: a request of another API becomes the chat that vLLM 0.32
// makes of it.
func TestChatOfOtherAPIs(t *testing.T) {
	const tool = `{"type":"object","properties":{"z":{"type":"string"},"a":{}}}`
	for _, c := range []struct {
		name    string
		convert func([]byte) ([]byte, error)
		body    string
		want    string // empty: cannot be converted
	}{
		{"text", ChatOfMessages, `{"max_tokens":9,"messages":[{"role":"user","content":"a\u00e9 \"b\""}]}`, `{"messages":[{"role":"user","content":"aé \"b\""}]}`},
		{"system text", ChatOfMessages, `{"system":"be brief","messages":[]}`, `{"messages":[{"role":"system","content":"be brief"}]}`},
		{
			"system blocks are joined, the billing header is not one", ChatOfMessages,
			`{"system":[{"type":"text","text":"x-anthropic-billing-header: cc=1"},{"type":"text","text":"be ","cache_control":{"type":"ephemeral"}},{"type":"text","text":"brief"}],"messages":[{"role":"user","content":"x-anthropic-billing-header stays here"}]}`,
			`{"messages":[{"role":"system","content":"be brief"},{"role":"user","content":"x-anthropic-billing-header stays here"}]}`,
		},
		{"one block is a text", ChatOfMessages, `{"messages":[{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":""}]}]}`, `{"messages":[{"role":"user","content":"a"}]}`},
		{"several blocks stay parts", ChatOfMessages, `{"messages":[{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}]}`, `{"messages":[{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}]}`},
		{
			"a call and its result", ChatOfMessages,
			`{"messages":[{"role":"user","content":"go"},{"role":"assistant","content":[{"type":"thinking","thinking":"hm","signature":"s"},{"type":"thinking","thinking":"!"},{"type":"text","text":"ok"},{"type":"tool_use","id":"t1","name":"f","input":{"a":[1,2.50]}}]},
			  {"role":"user","content":[{"type":"tool_result","tool_use_id":"t1","content":[{"type":"text","text":"x"},{"type":"text","text":"y"}]},{"type":"tool_result","tool_use_id":"t2","content":"z"},{"type":"text","text":"and now"}]}]}`,
			`{"messages":[{"role":"user","content":"go"},{"role":"assistant","reasoning":"hm!","content":"ok","tool_calls":[{"id":"t1","type":"function","function":{"name":"f","arguments":"{\"a\":[1,2.50]}"}}]},
			  {"role":"tool","tool_call_id":"t1","content":"x\ny"},{"role":"tool","tool_call_id":"t2","content":"z"},{"role":"user","content":"and now"}]}`,
		},
		{"only results: no message of the user", ChatOfMessages, `{"messages":[{"role":"user","content":[{"type":"tool_result","tool_use_id":"t"}]}]}`, `{"messages":[{"role":"tool","tool_call_id":"t","content":""}]}`},
		{"an assistant with nothing to say", ChatOfMessages, `{"messages":[{"role":"assistant","content":[{"type":"redacted_thinking","data":"x"}]}]}`, `{"messages":[{"role":"assistant"}]}`},
		{"tools", ChatOfMessages, `{"messages":[],"tools":[{"name":"f","description":"d","input_schema":` + tool + `,"strict":true},{"name":"g","input_schema":{"properties":{}}},{"name":"h","input_schema":{}}]}`,
			`{"messages":null,"tools":[{"type":"function","function":{"name":"f","description":"d","parameters":` + tool + `,"strict":true}},{"type":"function","function":{"name":"g","parameters":{"properties":{},"type":"object"}}},{"type":"function","function":{"name":"h","parameters":{"type":"object"}}}]}`},
		{"effort", ChatOfMessages, `{"messages":[],"output_config":{"effort":"high"},"thinking":{"type":"adaptive"},"chat_template_kwargs":{"k":1}}`, `{"messages":null,"reasoning_effort":"high","chat_template_kwargs":{"k":1}}`},
		{"no thinking", ChatOfMessages, `{"messages":[],"output_config":{"effort":"high"},"thinking":{"type":"disabled"}}`, `{"messages":null,"reasoning_effort":"none"}`},
		{"a system message in between", ChatOfMessages, `{"messages":[{"role":"user","content":"a"},{"role":"system","content":"b"}]}`, ""},
		{"an image", ChatOfMessages, `{"messages":[{"role":"user","content":[{"type":"image","source":{}}]}]}`, ""},
		{"a tool of the server", ChatOfMessages, `{"messages":[],"tools":[{"type":"web_search_20250305","name":"web_search"}]}`, ""},
		{"a changed tool", ChatOfMessages, `{"messages":[{"role":"user","content":[{"type":"tool_addition","tool":{}}]}]}`, ""},

		{"input text", ChatOfResponses, `{"input":"hello","instructions":"be brief","max_output_tokens":3}`, `{"messages":[{"role":"system","content":"be brief"},{"role":"user","content":"hello"}]}`},
		{
			"input items", ChatOfResponses,
			`{"input":[{"role":"developer","content":"d"},{"type":"message","role":"user","content":[{"type":"input_text","text":"a"},{"type":"input_text","text":"b"}]},
			  {"type":"reasoning","id":"r","summary":[],"content":[{"type":"reasoning_text","text":"hm"}]},{"type":"message","role":"assistant","id":"m","status":"completed","content":[{"type":"output_text","text":"ok","annotations":[]}]},
			  {"type":"function_call","call_id":"c1","name":"f","arguments":"{}"},{"type":"function_call","call_id":"c2","name":"g","arguments":"{\"x\":1}"},{"type":"function_call_output","call_id":"c1","output":"1"},
			  {"role":"assistant","content":"one"},{"role":"assistant","content":"two"}]}`,
			`{"messages":[{"role":"developer","content":"d"},{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]},
			  {"role":"assistant","reasoning":"hm","content":"ok","tool_calls":[{"id":"c1","type":"function","function":{"name":"f","arguments":"{}"}},{"id":"c2","type":"function","function":{"name":"g","arguments":"{\"x\":1}"}}]},
			  {"role":"tool","tool_call_id":"c1","content":"1"},{"role":"assistant","content":"one"},{"role":"assistant","content":"two"}]}`,
		},
		{"tools of functions", ChatOfResponses, `{"input":"x","tools":[{"type":"function","name":"f","description":"d","parameters":` + tool + `,"strict":null}],"reasoning":{"effort":"low"}}`,
			`{"messages":[{"role":"user","content":"x"}],"tools":[{"type":"function","function":{"name":"f","description":"d","parameters":` + tool + `}}],"reasoning_effort":"low"}`},
		{"an answer to go on with", ChatOfResponses, `{"input":[{"role":"user","content":"a"},{"type":"message","role":"assistant","status":"incomplete","content":[{"type":"output_text","text":"b"}]}]}`,
			`{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"}],"add_generation_prompt":false,"continue_final_message":true}`},
		{"a tool that the engine runs", ChatOfResponses, `{"input":"x","tools":[{"type":"code_interpreter"}]}`, ""},
		{"an earlier response", ChatOfResponses, `{"input":"x","previous_response_id":"resp_1"}`, ""},
		{"an image in the input", ChatOfResponses, `{"input":[{"role":"user","content":[{"type":"input_image","image_url":"x"}]}]}`, ""},
		{"a reference", ChatOfResponses, `{"input":[{"type":"item_reference","id":"x"}]}`, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := c.convert([]byte(c.body))
			if c.want == "" {
				if !errors.Is(err, ErrUnsupported) {
					t.Fatalf("got %s, %v", got, err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			var a, b any
			if err := json.Unmarshal(got, &a); err != nil {
				t.Fatal(err)
			}
			if err := json.Unmarshal([]byte(c.want), &b); err != nil {
				t.Fatal(err)
			}
			if !reflect.DeepEqual(a, b) {
				t.Errorf("got  %s\nwant %s", got, c.want)
			}
		})
	}
}

// FuzzChatOfOtherAPIs: whatever a client sends, what comes out is a chat.
func FuzzChatOfOtherAPIs(f *testing.F) {
	f.Add([]byte(`{"system":[{"type":"text","text":"a"}],"messages":[{"role":"user","content":[{"type":"tool_result","content":[{"type":"text","text":"x"}]}]}],"tools":[{"name":"f","input_schema":{ }}]}`))
	f.Add([]byte(`{"input":[{"role":"user","content":[{"type":"input_text","text":"\ud800"}]},{"type":"reasoning","summary":[{"text":1}]}],"tools":[{"type":"function","name":"f"}]}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		for _, convert := range []func([]byte) ([]byte, error){ChatOfMessages, ChatOfResponses} {
			if out, err := convert(body); err == nil && !json.Valid(out) {
				t.Errorf("%q became %q", body, out)
			}
		}
	})
}

// TestKwargsOfTokenize: what /tokenize does not take becomes arguments of the
// chat template, as the engine has them.
func TestKwargsOfTokenize(t *testing.T) {
	for _, c := range []struct{ kwargs, effort, documents, want string }{
		{"", "", "", ``},
		{`{"a":{"b":1},"c\u0041":2}`, "", "", `"chat_template_kwargs":{"a":{"b":1},"c\u0041":2},`},
		{"", `"low"`, "", `"chat_template_kwargs":{"reasoning_effort":"low","enable_thinking":true},`},
		{"", `"none"`, "", `"chat_template_kwargs":{"reasoning_effort":"none","enable_thinking":false},`},
		{`{"enable_thinking":false,"reasoning_effort":"high"}`, `"low"`, `[{"text":"d"}]`, `"chat_template_kwargs":{"enable_thinking":false,"reasoning_effort":"low","documents":[{"text":"d"}]},`},
		{`{}`, "", "", `"chat_template_kwargs":{},`},
	} {
		raw := func(s string) []byte {
			if s == "" {
				return nil
			}
			return []byte(s)
		}
		got, err := appendKwargs(nil, raw(c.kwargs), raw(c.effort), raw(c.documents))
		if err != nil || string(got) != c.want {
			t.Errorf("%+v: %s, %v", c, got, err)
		}
	}
}
