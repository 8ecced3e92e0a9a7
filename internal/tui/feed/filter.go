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
type Filter[R any] struct {
	Text  string // as it was written
	terms []term[R]
}

type term[R any] struct {
	not    bool
	of     func(R) string // the field, or the row's text
	op     string         // "" text, "re", ":", "=", ">", ">=", "<", "<="
	value  string
	number float64
	re     *regexp.Regexp
}

// Kind is what filters know of one kind of rows.
type Kind[R any] struct {
	text   func(R) string
	fields []field[R] // in the order of messages
}

// field is a field of rows; an unknown figure is "".
type field[R any] struct {
	key string
	of  func(R) string
}

// Parse reads a filter.
func (k *Kind[R]) Parse(text string) (Filter[R], error) {
	f := Filter[R]{Text: strings.TrimSpace(text)}
	for _, word := range strings.Fields(text) {
		t := term[R]{of: k.text}
		if rest, ok := strings.CutPrefix(word, "!"); ok && rest != "" {
			t.not, word = true, rest
		}
		if expr, ok := strings.CutPrefix(word, "re:"); ok {
			re, err := regexp.Compile("(?i)" + expr)
			if err != nil {
				return Filter[R]{}, fmt.Errorf("filter %q: %w", word, err)
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
		key := strings.ToLower(word[:i])
		t.op = word[i : i+1]
		t.value = strings.ToLower(word[i+1:])
		if (t.op == "<" || t.op == ">") && strings.HasPrefix(t.value, "=") {
			t.op, t.value = t.op+"=", t.value[1:]
		}
		at := slices.IndexFunc(k.fields, func(x field[R]) bool { return x.key == key })
		if at < 0 {
			return Filter[R]{}, fmt.Errorf("filter: there is no field %q here; fields are %s", key, k.names())
		}
		t.of = k.fields[at].of
		if t.op[0] == '<' || t.op[0] == '>' {
			n, err := strconv.ParseFloat(strings.TrimSuffix(t.value, "%"), 64)
			if err != nil {
				return Filter[R]{}, fmt.Errorf("filter: %q needs a number after %s", word, t.op)
			}
			t.number = n
		}
		f.terms = append(f.terms, t)
	}
	return f, nil
}

func (k *Kind[R]) names() string {
	names := make([]string, len(k.fields))
	for i := range k.fields {
		names[i] = k.fields[i].key
	}
	return strings.Join(names, ", ")
}

// Empty reports whether the filter picks all.
func (f *Filter[R]) Empty() bool { return len(f.terms) == 0 }

// Match reports whether the filter picks the row.
func (f *Filter[R]) Match(row R) bool {
	for i := range f.terms {
		if t := &f.terms[i]; t.match(t.of(row)) == t.not {
			return false
		}
	}
	return true
}

func (t *term[R]) match(v string) bool {
	switch t.op {
	case "", ":":
		return strings.Contains(strings.ToLower(v), t.value)
	case "re":
		return t.re.MatchString(v)
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

// RankFilter picks ranks; kv and hit are in percent.
var RankFilter = Kind[*Rank]{func(k *Rank) string {
	return k.Label + " " + k.Role + " " + k.Status + " " + k.Model + " " + k.Reason + " " + k.Feed.State
}, []field[*Rank]{
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
}}

// DecisionFilter picks decisions; ttft and e2e are in milliseconds.
var DecisionFilter = Kind[*Decision]{func(d *Decision) string {
	return d.ID + " " + d.RequestID + " " + d.Path + " " + d.ReasonText + " " + d.Decode.Chosen + " " + d.PrefillRank() + " " + d.Model + " " + d.Outcome.Error
}, []field[*Decision]{
	{"id", func(d *Decision) string { return d.ID }},
	{"request", func(d *Decision) string { return d.RequestID }},
	{"path", func(d *Decision) string { return d.Path }},
	{"reason", func(d *Decision) string { return d.Reason }},
	{"model", func(d *Decision) string { return d.Model }},
	{"decode", func(d *Decision) string { return d.Decode.Chosen }},
	{"prefill", func(d *Decision) string { return d.PrefillRank() }},
	{"worker", func(d *Decision) string { return d.Decode.Chosen + " " + d.PrefillRank() }},
	{"isl", func(d *Decision) string { return strconv.Itoa(d.Inputs.ISL) }},
	{"eff", func(d *Decision) string { return strconv.Itoa(d.EffISL) }},
	{"cached", func(d *Decision) string { return strconv.Itoa(d.Predicted.CachedTokens) }},
	{"ttft", func(d *Decision) string { return number(d.TTFT().F()) }},
	{"e2e", func(d *Decision) string { return number(d.E2E().F()) }},
	{"status", func(d *Decision) string {
		if d.Live {
			return ""
		}
		return strconv.Itoa(d.Outcome.Status)
	}},
	{"live", func(d *Decision) string { return strconv.FormatBool(d.Live) }},
	{"margin", func(d *Decision) string { return number(d.Margin().F()) }},
	{"error", func(d *Decision) string { return d.Outcome.Error }},
}}

// EventFilter picks events.
var EventFilter = Kind[*admin.Event]{func(e *admin.Event) string {
	return string(e.Severity) + " " + e.Kind + " " + e.Worker + " " + e.Rank + " " + e.Text
}, []field[*admin.Event]{
	{"kind", func(e *admin.Event) string { return e.Kind }},
	{"severity", func(e *admin.Event) string { return string(e.Severity) }},
	{"worker", func(e *admin.Event) string { return e.Worker }},
	{"rank", func(e *admin.Event) string { return e.Rank }},
	{"text", func(e *admin.Event) string { return e.Text }},
	{"seq", func(e *admin.Event) string { return strconv.FormatUint(e.Seq, 10) }},
}}
