package discovery

import (
	"encoding/json"
	"testing"
	"unicode/utf8"

	"github.com/dynctl/dynctl/internal/workers"
)

// FuzzRoles: a worker's label "model" gives one role, whether a flag, the admin
// API or a file states it and before or after the setting, whatever it says.
func FuzzRoles(f *testing.F) {
	for _, s := range []string{"first", "second", "other", "", " first ", "first;model:second", "first,role=decode", "a:b", "'first'", "\"first", "First", "first\n", "\x00", "é", "{}", "*a", "null", "1e3"} {
		f.Add(s, "first", "second")
		f.Add(s, s, s)
	}
	f.Fuzz(func(t *testing.T, value, prefill, decode string) {
		if !utf8.ValidString(value) {
			return // no file can say it
		}
		labels := workers.RoleLabels{Prefill: []string{prefill}, Decode: []string{decode}}
		role := func(source string, specs []workers.Spec, err error) string {
			if err != nil {
				return "refused"
			}
			roles := map[workers.Role]bool{}
			for _, late := range []bool{false, true} {
				reg := workers.NewRegistry(nil)
				label := func() {
					if _, err := reg.ApplyWithRoles("none", nil, labels); err != nil {
						t.Fatal(err)
					}
				}
				if !late {
					label()
				}
				if _, err := reg.Modify(source, func([]workers.Spec) ([]workers.Spec, error) { return specs, nil }); err != nil {
					t.Fatalf("%s: parsed but not applicable: %v", source, err)
				}
				if late {
					label()
				}
				w, ok := reg.Snapshot().Worker("w")
				if !ok {
					t.Fatalf("%s: the worker is not in the fleet", source)
				}
				roles[w.Role] = true
				if len(roles) > 1 {
					t.Fatalf("%s: %v before and after the setting", source, roles)
				}
			}
			for r := range roles {
				return string(r)
			}
			return ""
		}
		file := func(entry any) string {
			raw, err := json.Marshal(map[string]any{"workers": []any{entry}})
			if err != nil {
				t.Fatal(err)
			}
			specs, err := Parse("f", raw)
			return role(workers.SourceFile, specs, err)
		}

		text := "http://127.0.0.1:1,labels=model:" + value + ",name=w"
		s, err := workers.ParseSpec("", text)
		if s.APIKeyFile != "" {
			return
		}
		flag, admin, line := role(workers.SourceFlag, []workers.Spec{s}, err), role("admin", []workers.Spec{s}, err), file(text)
		if flag != admin || flag != line {
			t.Errorf("%q: %s by flag, %s by the admin API, %s by a file", text, flag, admin, line)
		}

		want := workers.Aggregated
		switch value {
		case prefill:
			want = workers.Prefill
		case decode:
			want = workers.Decode
		}
		got := file(map[string]any{"url": "http://127.0.0.1:1", "name": "w", "labels": map[string]string{"model": value}})
		if got != string(want) {
			t.Errorf("%q in a file, with %q for prefill and %q for decode, gives %s, want %s", value, prefill, decode, got, want)
		}
	})
}
