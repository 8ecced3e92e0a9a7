package feed

import (
	"fmt"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/dynctl/dynctl/internal/router/observe/admin"
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
		if !slices.Contains(keys, t.key) {
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

// Empty reports whether the filter picks all.
func (f *Filter) Empty() bool { return len(f.terms) == 0 }

// Match reports whether the filter picks the row.
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

// fields are what filters know of one kind of rows, in the order of messages.
type fields[R any] []struct {
	key string
	of  func(R) string
}

func (f fields[R]) keys() (keys []string) {
	for _, x := range f {
		keys = append(keys, x.key)
	}
	return keys
}

func (f fields[R]) of(row R, key string) (string, bool) {
	for _, x := range f {
		if x.key == key {
			return x.of(row), true
		}
	}
	return "", false
}

func number(v float64) string {
	if math.IsNaN(v) {
		return ""
	}
	return strconv.FormatFloat(v, 'f', -1, 64)
}

var rankFields = fields[*Rank]{
	{"rank", func(k *Rank) string { return k.Label }},
	{"worker", func(k *Rank) string { return k.Worker }},
	{"role", func(k *Rank) string { return k.Role }},
	{"st", func(k *Rank) string { return k.Status }},
	{"health", func(k *Rank) string { return k.Health }},
	{"model", func(k *Rank) string { return k.Model }},
	{"feed", func(k *Rank) string { return k.Feed.State }},
	{"kv", func(k *Rank) string { return number(100 * k.KVUsage().F()) }},
	{"run", func(k *Rank) string { return number(k.Running().F()) }},
	{"wait", func(k *Rank) string { return number(k.Waiting().F()) }},
	{"hit", func(k *Rank) string { return number(100 * k.HitShare.F()) }},
	{"ttft", func(k *Rank) string { return number(Figure(k.TTFT).F()) }},
	{"itl", func(k *Rank) string { return number(Figure(k.ITL).F()) }},
	{"out", func(k *Rank) string { return number(Figure(k.OutputRate).F()) }},
	{"active", func(k *Rank) string { return strconv.Itoa(k.ActiveRequests) }},
	{"prefill", func(k *Rank) string { return strconv.FormatInt(k.PrefillTokens, 10) }},
	{"blocks", func(k *Rank) string { return strconv.FormatInt(k.IndexBlocks, 10) }},
	{"gaps", func(k *Rank) string { return strconv.FormatUint(k.Feed.Gaps, 10) }},
}

// RankKeys are the fields of ranks.
var RankKeys = rankFields.keys()

// Field implements Row; kv and hit are in percent.
func (k *Rank) Field(key string) (string, bool) { return rankFields.of(k, key) }

// FullText implements Row.
func (k *Rank) FullText() string {
	return k.Label + " " + k.Role + " " + k.Status + " " + k.Model + " " + k.Reason + " " + k.Feed.State
}

var decisionFields = fields[*Decision]{
	{"id", func(d *Decision) string { return d.ID }},
	{"request", func(d *Decision) string { return d.Request }},
	{"path", func(d *Decision) string { return d.Path }},
	{"reason", func(d *Decision) string { return d.Reason }},
	{"model", func(d *Decision) string { return d.Model }},
	{"decode", func(d *Decision) string { return d.Decode }},
	{"prefill", func(d *Decision) string { return d.Prefill }},
	{"worker", func(d *Decision) string { return d.Decode + " " + d.Prefill }},
	{"isl", func(d *Decision) string { return strconv.Itoa(d.ISL) }},
	{"eff", func(d *Decision) string { return strconv.Itoa(d.EffISL) }},
	{"cached", func(d *Decision) string { return strconv.Itoa(d.Predicted) }},
	{"ttft", func(d *Decision) string { return number(d.TTFT.F()) }},
	{"e2e", func(d *Decision) string { return number(d.E2E.F()) }},
	{"status", func(d *Decision) string {
		if d.Live {
			return ""
		}
		return strconv.Itoa(d.Status)
	}},
	{"live", func(d *Decision) string { return strconv.FormatBool(d.Live) }},
	{"margin", func(d *Decision) string { return number(d.Margin.F()) }},
	{"error", func(d *Decision) string { return d.Error }},
}

// DecisionKeys are the fields of decisions.
var DecisionKeys = decisionFields.keys()

// Field implements Row; ttft and e2e are in milliseconds.
func (d *Decision) Field(key string) (string, bool) { return decisionFields.of(d, key) }

// FullText implements Row.
func (d *Decision) FullText() string {
	return d.ID + " " + d.Request + " " + d.Path + " " + d.ReasonText + " " + d.Decode + " " + d.Prefill + " " + d.Model + " " + d.Error
}

// EventRow is an event as a Row.
type EventRow struct{ *admin.Event }

var eventFields = fields[EventRow]{
	{"kind", func(e EventRow) string { return e.Kind }},
	{"severity", func(e EventRow) string { return string(e.Severity) }},
	{"worker", func(e EventRow) string { return e.Worker }},
	{"rank", func(e EventRow) string { return e.Rank }},
	{"text", func(e EventRow) string { return e.Text }},
	{"seq", func(e EventRow) string { return strconv.FormatUint(e.Seq, 10) }},
}

// EventKeys are the fields of events.
var EventKeys = eventFields.keys()

// Field implements Row.
func (e EventRow) Field(key string) (string, bool) { return eventFields.of(e, key) }

// FullText implements Row.
func (e EventRow) FullText() string {
	return string(e.Severity) + " " + e.Kind + " " + e.Worker + " " + e.Rank + " " + e.Text
}
