package admin

import (
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// TestParseControl: a call keeps its parameters on the way, and what an action does not take is
// refused, not ignored.
func TestParseControl(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ action, query, want string }{
		{ResetPrefixCache, "worker=a&worker=b", ""},
		{Sleep, "level=1&tag=weights&timeout=2m", ""},
		{LoadAdapter, "adapter=x&path=%2Fa%2Fb", ""},
		{"delete", "", `"delete" is no call`},
		{ResetPrefixCache, "wroker=a", `takes no "wroker"`},
		{WakeUp, "level=1", `takes no "level"`},
		{Sleep, "level=3", "not a number from 0 to 2"},
		{Sleep, "level=1&level=2", "stated twice"},
		{Sleep, "worker=", "worker is empty"},
		{Sleep, "timeout=1h", "up to 10m"},
		{LoadAdapter, "adapter=x", "needs the path"},
		{UnloadAdapter, "", "needs the name"},
	} {
		q, err := url.ParseQuery(c.query)
		if err != nil {
			t.Fatal(err)
		}
		call, param, err := ParseControl(c.action, q)
		if c.want != "" {
			if err == nil || !strings.Contains(err.Error(), c.want) || param == "" {
				t.Errorf("%s?%s: %q %v, want %q", c.action, c.query, param, err, c.want)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s?%s: %v", c.action, c.query, err)
			continue
		}
		again, _, err := ParseControl(c.action, call.Query())
		if d := cmp.Diff(call, again); err != nil || d != "" {
			t.Errorf("%s?%s: %v\n%s", c.action, c.query, err, d)
		}
	}
}

// FuzzParseControl: no query makes a call that is not bounded, or that is another one after it
// was sent.
func FuzzParseControl(f *testing.F) {
	f.Add(Sleep, "level=1&worker=a")
	f.Add(LoadAdapter, "adapter=a&path=b&timeout=1s")
	f.Fuzz(func(t *testing.T, action, query string) {
		q, err := url.ParseQuery(query)
		if err != nil {
			return
		}
		call, _, err := ParseControl(action, q)
		if err != nil {
			return
		}
		if call.Timeout <= 0 || call.Timeout > 10*time.Minute {
			t.Errorf("%s?%s may take %s", action, query, call.Timeout)
		}
		again, _, err := ParseControl(action, call.Query())
		if d := cmp.Diff(call, again); err != nil || d != "" {
			t.Errorf("%s?%s: %v\n%s", action, query, err, d)
		}
	})
}
