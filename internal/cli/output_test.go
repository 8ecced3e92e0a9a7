package cli

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/dynctl/dynctl/internal/rig/hostile"
)

// FuzzWriteData: what others named is harmless on a terminal in every format of data, and
// programs read it unchanged.
func FuzzWriteData(f *testing.F) {
	for _, s := range []string{hostile.Text, "", "a\nb\n", "\u202e", "\u009b1m", "é模🚀", "1", ": - {", `\u001b`, "\t", "\ufeff", "\uffff", "\xff", strings.Repeat("k", 2000)} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		s = strings.ToValidUTF8(hostile.Name+s, "\ufffd")
		v := any(map[string]any{s: []any{s, 1, 0.5, nil, true}})
		for format, parse := range map[string]func([]byte, any) error{"json": json.Unmarshal, "jsonl": json.Unmarshal, "yaml": yaml.Unmarshal} {
			var b strings.Builder
			if err := WriteData(&b, format, v); err != nil {
				t.Fatalf("%s of %q: %v", format, s, err)
			}
			hostile.Check(t, format, b.String())
			var got any
			if err := parse([]byte(b.String()), &got); err != nil {
				t.Fatalf("%s of %q: %v\n%s", format, s, err, b.String())
			}
			want := v
			if format != "yaml" { // all numbers are one type
				want = map[string]any{s: []any{s, 1., 0.5, nil, true}}
			}
			if !reflect.DeepEqual(got, want) {
				t.Errorf("%s of %q became %q", format, s, got)
			}
		}
	})
}
