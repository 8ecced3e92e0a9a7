package api

import (
	"strings"
	"testing"
)

func TestMediaOfARequest(t *testing.T) {
	t.Parallel()
	part := func(s string) string {
		return `{"messages":[{"role":"user","content":[{"type":"text","text":"a"},` + s + `]}]}`
	}
	for _, c := range []struct {
		kind    Kind
		body    string
		want    string // kind, uuid, value and whether it is fetched, of each
		opaque  bool
		refused bool
	}{
		{Chat, part(`{"type":"image_url","image_url":{"url":"data:image/png;base64,//8="}}`), `image "" {"url":"data:image/png;base64,//8="}`, false, false},
		{Chat, part(`{"image_url":"https:\/\/h/i"},{"type":"input_audio","input_audio":{"data":"b"},"uuid":"u"}`), `image "" "https:\/\/h/i" fetched|audio "u" {"data":"b"}`, false, false},
		{Chat, part(`{"type":"video_url","video_url":null,"uuid":"\u0061"}`), `video "a" `, false, false},
		{Chat, part(`{"type":"image_url","image_url":null}`), ``, true, false},
		{Chat, part(`{"type":"image_embeds","image_embeds":"x"}`), ``, true, false},
		{Chat, part(`{"type":"file","file":{"file_id":"x"}},{"type":"image_url","image_url":{"url":"data:,b"}}`), `image "" {"url":"data:,b"}`, true, false},
		{Chat, `{"prompt_embeds":"x","messages":[]}`, ``, true, false},
		{Messages, part(`{"type":"image","source":{"type":"base64","data":"x"},"cache_control":{"type":"ephemeral"}}`), `image "" {"type":"base64","data":"x"}`, false, false},
		{Messages, part(`{"type":"tool_result","content":[{"type":"image","source":{"data":"x"}}]}`), `image "" {"data":"x"}`, false, false},
		{Responses, `{"input":[{"role":"user","content":[{"type":"input_image","image_url":"data:,c","detail":"low"}]}]}`, `image "" "data:,c"`, false, false},
		{Responses, `{"input":[{"type":"image_generation_call","result":"x"}]}`, ``, true, false},
		{Chat, part(strings.Repeat(`{"image_url":"data:,a"},`, 9) + `{"image_url":"data:,a"}`), ``, false, true},
	} {
		var v View
		err := v.Parse([]byte(c.body), c.kind, Limits{Texts: 9})
		if (err != nil) != c.refused {
			t.Errorf("%s: %v", c.body, err)
		}
		if err != nil {
			continue
		}
		var got []string
		for i := range v.Media {
			m := &v.Media[i]
			s := m.Kind.String() + ` "` + m.UUID + `" ` + string(m.Value.Of(v.Body))
			if v.Fetched(m) {
				s += " fetched"
			}
			got = append(got, s)
		}
		if s := strings.Join(got, "|"); s != c.want || v.Opaque != c.opaque || !v.Multimodal {
			t.Errorf("%s: %s, opaque %v, multimodal %v; want %s", c.body, s, v.Opaque, v.Multimodal, c.want)
		}
	}
}

// TestMediaName: the name follows the content, or the client's word for it, and nothing else.
func TestMediaName(t *testing.T) {
	t.Parallel()
	name := func(s string) [16]byte {
		var v View
		if err := v.Parse([]byte(`{"messages":[{"role":"user","content":[`+s+`]}]}`), Chat, Limits{}); err != nil || len(v.Media) != 1 {
			t.Fatalf("%s: %v, %d", s, err, len(v.Media))
		}
		return v.MediaName(&v.Media[0])
	}
	a := name(`{"type":"image_url","image_url":{"url":"data:,a"}}`)
	if a != name(`{"image_url":{"url":"data:,a"},"cache_control":{},"type":"image_url"}`) {
		t.Error("what stands beside the content changes its name")
	}
	if a == name(`{"type":"image_url","image_url":{"url":"data:,b"}}`) {
		t.Error("another content has the same name")
	}
	u := name(`{"type":"image_url","image_url":{"url":"data:,a"},"uuid":"u"}`)
	if u == a || u != name(`{"type":"image_url","image_url":null,"uuid":"u"}`) || u == name(`{"type":"image_url","image_url":null,"uuid":"w"}`) {
		t.Error("the UUID is not the name")
	}
}
