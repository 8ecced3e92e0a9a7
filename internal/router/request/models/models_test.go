package models

import (
	"encoding/json"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestMerge(t *testing.T) {
	t.Parallel()
	l, err := Merge([][]byte{
		[]byte(`{"object":"list","data":[{"id":"a","max_model_len":8192,"big":12345678901234567890},{"id":"lora"}]}`),
		[]byte(`{"data":[{"id":"a","max_model_len":1},{"id":"b"}]}`),
	}, []Alias{{"alias", "a"}, {"gone", "nobody"}, {"b", "a"}})
	if err != nil {
		t.Fatal(err)
	}
	want := `{"object":"list","data":[{"id":"a","max_model_len":8192,"big":12345678901234567890},{"id":"lora"},{"id":"b"},` +
		`{"id":"alias","max_model_len":8192,"big":12345678901234567890,"root":"a"}]}`
	if got := string(l.JSON()); got != want || !json.Valid(l.JSON()) {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	if m, ok := l.Model("b"); !ok || string(m) != `{"id":"b"}` {
		t.Errorf("Model: %s", m)
	}
	if diff := cmp.Diff([]string{"a", "lora", "b", "alias"}, l.ids); diff != "" {
		t.Error(diff)
	}
	l, err = Merge([][]byte{[]byte(`oops`), []byte(`{"data":[{"id":"b"},{}]}`)}, nil)
	if err == nil || string(l.JSON()) != `{"object":"list","data":[{"id":"b"}]}` {
		t.Errorf("%s, %v", l.JSON(), err)
	}
	if l, err := Merge(nil, nil); err != nil || string(l.JSON()) != `{"object":"list","data":[]}` {
		t.Errorf("no answers: %v", err)
	}
}
