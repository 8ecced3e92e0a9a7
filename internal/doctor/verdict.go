package doctor

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// verdict is the outcome of an examination in one sentence: what is wrong first, since
// what follows from it stands below.
func verdict(r *Report) string {
	pick := func(s State) (list []Finding) {
		for _, f := range r.Findings {
			if f.State == s {
				list = append(list, f)
			}
		}
		// An engine that is down explains more than any other check.
		slices.SortStableFunc(list, func(a, b Finding) int {
			rank := func(f Finding) int {
				if f.Check == "engine" {
					return 0
				}
				return 1
			}
			return rank(a) - rank(b)
		})
		return list
	}
	failed, warned := pick(Fail), pick(Warn)
	switch {
	case len(failed) > 0 && failed[0].Check == "engines" && len(warned) > 0 && drains(&warned[0]):
		n := slices.IndexFunc(append(warned, failed[0]), func(f Finding) bool { return !drains(&f) })
		verb := " is"
		if n > 1 {
			verb = " are"
		}
		return fmt.Sprintf("%s%s draining, so %s; %s", subjects(warned[:n]), verb, failed[0].Text, warned[0].Advice) + rest(len(failed)-1, "check", " failed", len(warned)-n, "warning")
	case len(failed) > 0:
		text, n := sentence(failed)
		return text + rest(len(failed)-n, "check", " failed", len(warned), "warning")
	case len(warned) > 0:
		text, n := sentence(warned)
		return "nothing failed; " + text + rest(len(warned)-n, "warning", "", 0, "")
	case len(pick(Skip)) > 0:
		return fmt.Sprintf("nothing is wrong in what could be examined; %s could not be made", count(len(pick(Skip)), "check"))
	}
	return "nothing is wrong"
}

// sentence is the first of some findings as part of one, with the n that differ from it in
// their subject only, or are other engines that are down or drain as well.
func sentence(list []Finding) (text string, n int) {
	f := &list[0]
	for n < len(list) && alike(f, &list[n]) {
		n++
	}
	switch {
	case f.Check == "engine":
		kind, _, _ := strings.Cut(f.Text, ":")
		n = 0
		for n < len(list) && list[n].Check == "engine" && strings.HasPrefix(list[n].Text, kind) {
			n++
		}
		if n == 1 {
			return f.Subject + " is " + f.Text, 1
		}
		return subjects(list[:n]) + " are " + kind, n
	case f.Subject == "router" || f.Subject == "engines":
		return f.Check + ": " + f.Text, n
	}
	return fmt.Sprintf("%s of %s: %s", f.Check, subjects(list[:n]), f.Text), n
}

// alike reports whether findings differ in their subject only.
func alike(a, b *Finding) bool {
	return a.Check == b.Check && a.State == b.State && a.Text == b.Text && a.Advice == b.Advice
}

// drains reports whether a finding is of an engine that an operator drains.
func drains(f *Finding) bool { return f.Check == "engine" && strings.HasPrefix(f.Text, draining) }

const draining = "draining: "

// subjects are those of findings, as part of a sentence: two by name and the rest as a number.
func subjects(list []Finding) string {
	switch {
	case len(list) == 1:
		return list[0].Subject
	case len(list) == 2:
		return list[0].Subject + " and " + list[1].Subject
	}
	return fmt.Sprintf("%s, %s and %d more", list[0].Subject, list[1].Subject, len(list)-2)
}

// rest counts what a verdict does not name.
func rest(n int, word, more string, warnings int, warning string) (s string) {
	if n > 0 {
		s = fmt.Sprintf("; %d more%s%s", n, strings.TrimPrefix(count(n, word), strconv.Itoa(n)), more)
	}
	if warnings > 0 {
		s += "; " + count(warnings, warning)
	}
	return s
}
