package feed

import (
	"fmt"
	"math"
	"regexp"
	"strconv"
	"strings"

	"github.com/dynctl/dynctl/internal/router/admin"
)

// Filter picks rows: all of its terms must hold. The zero Filter picks all.
//
//	word        the row's text contains it (upper and lower case alike)
//	!term       the term does not hold
//	re:EXPR     the row's text matches the regular expression
//	key:value   the field contains the value; key=value: it equals it
//	key>n key>=n key<n key<=n   the field is a number beyond it
type Filter struct {
	Text  string // as it was written
	terms []term
}

type term struct {
	not    bool
	key    string
	op     string // "" text, "re", ":", "=", ">", ">=", "<", "<="
	value  string
	number float64
	re     *regexp.Regexp
}

// Row gives a filter the fields of one row. ok is false for a field that rows
// of its kind do not have; an unknown figure is "".
type Row interface {
	Field(key string) (value string, ok bool)
	FullText() string
}

// ParseFilter reads a filter; keys are the fields that rows have.
func ParseFilter(text string, keys []string) (Filter, error) {
	f := Filter{Text: strings.TrimSpace(text)}
	for _, word := range strings.Fields(text) {
		t := term{}
		if rest, ok := strings.CutPrefix(word, "!"); ok && rest != "" {
			t.not, word = true, rest
		}
		if expr, ok := strings.CutPrefix(word, "re:"); ok {
			re, err := regexp.Compile("(?i)" + expr)
			if err != nil {
				return Filter{}, fmt.Errorf("filter %q: %w", word, err)
			}
			t.op, t.re = "re", re
			f.terms = append(f.terms, t)
			continue
		}
		i := strings.IndexAny(word, ":=<>")
		if i <= 0 {
			t.value = strings.ToLower(word)
			f.terms = append(f.terms, t)
			continue
		}
		t.key = strings.ToLower(word[:i])
		t.op = word[i : i+1]
		t.value = strings.ToLower(word[i+1:])
		if (t.op == "<" || t.op == ">") && strings.HasPrefix(t.value, "=") {
			t.op, t.value = t.op+"=", t.value[1:]
		}
		known := false
		for _, k := range keys {
			known = known || k == t.key
		}
		if !known {
			return Filter{}, fmt.Errorf("filter: there is no field %q here; fields are %s", t.key, strings.Join(keys, ", "))
		}
		if t.op[0] == '<' || t.op[0] == '>' {
			n, err := strconv.ParseFloat(strings.TrimSuffix(t.value, "%"), 64)
			if err != nil {
				return Filter{}, fmt.Errorf("filter: %q needs a number after %s", word, t.op)
			}
			t.number = n
		}
		f.terms = append(f.terms, t)
	}
	return f, nil
}

// Empty tells whether the filter picks all.
func (f *Filter) Empty() bool { return len(f.terms) == 0 }

// Match tells whether the filter picks the row.
func (f *Filter) Match(r Row) bool {
	for i := range f.terms {
		if f.terms[i].match(r) == f.terms[i].not {
			return false
		}
	}
	return true
}

func (t *term) match(r Row) bool {
	switch t.op {
	case "":
		return strings.Contains(strings.ToLower(r.FullText()), t.value)
	case "re":
		return t.re.MatchString(r.FullText())
	}
	v, ok := r.Field(t.key)
	if !ok {
		return false
	}
	switch t.op {
	case ":":
		return strings.Contains(strings.ToLower(v), t.value)
	case "=":
		return strings.EqualFold(v, t.value)
	}
	n, err := strconv.ParseFloat(v, 64)
	if err != nil {
		return false
	}
	switch t.op {
	case ">":
		return n > t.number
	case ">=":
		return n >= t.number
	case "<":
		return n < t.number
	}
	return n <= t.number
}

func number(v float64) string {
	if math.IsNaN(v) {
		return ""
	}
	return strconv.FormatFloat(v, 'f', -1, 64)
}

// RankKeys are the fields of ranks.
var RankKeys = []string{"rank", "worker", "role", "st", "health", "model", "feed", "kv", "run", "wait", "hit", "active", "prefill", "blocks", "gaps"}

// Field implements Row; kv and hit are in percent.
func (k *Rank) Field(key string) (string, bool) {
	switch key {
	case "rank":
		return k.Label, true
	case "worker":
		return k.Worker, true
	case "role":
		return k.Role, true
	case "st":
		return k.Status, true
	case "health":
		return k.Health, true
	case "model":
		return k.Model, true
	case "feed":
		return k.Feed.State, true
	case "kv":
		return number(100 * k.KVUsage.F()), true
	case "run":
		return number(k.Running.F()), true
	case "wait":
		return number(k.Waiting.F()), true
	case "hit":
		return number(100 * k.HitShare.F()), true
	case "active":
		return strconv.Itoa(k.Active), true
	case "prefill":
		return strconv.FormatInt(k.PrefillTokens, 10), true
	case "blocks":
		return strconv.FormatInt(k.IndexBlocks, 10), true
	case "gaps":
		return strconv.FormatUint(k.Feed.Gaps, 10), true
	}
	return "", false
}

// FullText implements Row.
func (k *Rank) FullText() string {
	return k.Label + " " + k.Role + " " + k.Status + " " + k.Model + " " + k.Reason + " " + k.Feed.State
}

// DecisionKeys are the fields of decisions.
var DecisionKeys = []string{"id", "request", "path", "reason", "model", "decode", "prefill", "worker", "isl", "eff", "cached", "ttft", "e2e", "status", "live", "margin", "error"}

// Field implements Row; ttft and e2e are in milliseconds.
func (d *Decision) Field(key string) (string, bool) {
	switch key {
	case "id":
		return d.ID, true
	case "request":
		return d.Request, true
	case "path":
		return d.Path, true
	case "reason":
		return d.Reason, true
	case "model":
		return d.Model, true
	case "decode":
		return d.Decode, true
	case "prefill":
		return d.Prefill, true
	case "worker":
		return d.Decode + " " + d.Prefill, true
	case "isl":
		return strconv.Itoa(d.ISL), true
	case "eff":
		return strconv.Itoa(d.EffISL), true
	case "cached":
		return strconv.Itoa(d.Predicted), true
	case "ttft":
		return number(d.TTFT.F()), true
	case "e2e":
		return number(d.E2E.F()), true
	case "status":
		if d.Live {
			return "", true
		}
		return strconv.Itoa(d.Status), true
	case "live":
		return strconv.FormatBool(d.Live), true
	case "margin":
		return number(d.Margin.F()), true
	case "error":
		return d.Error, true
	}
	return "", false
}

// FullText implements Row.
func (d *Decision) FullText() string {
	return d.ID + " " + d.Request + " " + d.Path + " " + d.ReasonText + " " + d.Decode + " " + d.Prefill + " " + d.Model + " " + d.Error
}

// EventKeys are the fields of events.
var EventKeys = []string{"kind", "severity", "worker", "rank", "text", "seq"}

// EventRow is an event as a Row.
type EventRow struct{ *admin.Event }

// Field implements Row.
func (e EventRow) Field(key string) (string, bool) {
	switch key {
	case "kind":
		return e.Kind, true
	case "severity":
		return string(e.Severity), true
	case "worker":
		return e.Worker, true
	case "rank":
		return e.Rank, true
	case "text":
		return e.Text, true
	case "seq":
		return strconv.FormatUint(e.Seq, 10), true
	}
	return "", false
}

// FullText implements Row.
func (e EventRow) FullText() string {
	return string(e.Severity) + " " + e.Kind + " " + e.Worker + " " + e.Rank + " " + e.Text
}
