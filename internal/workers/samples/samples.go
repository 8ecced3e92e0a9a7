// Package samples reads the pages on which engines report their metrics: for probes,
// benchmarks and the conformance suite, which share no more of workers than this.
package samples

import (
	"bytes"
	"strconv"
)

// Scan walks over a page in Prometheus' text form (exposition format 0.0.4, or
// OpenMetrics) and calls f for each sample whose name want takes, nil
// for all. It allocates nothing, skips lines that it does not understand, and
// looks at labels only as far as f does. name and labels are parts of page.
//
//	# HELP vllm:num_requests_running …
//	vllm:num_requests_running{engine="0",model_name="m"} 3.0 [timestamp] [# exemplar]
func Scan(page []byte, want func(name []byte) bool, f func(name []byte, l Labels, value float64)) {
	for len(page) > 0 {
		var line []byte
		if i := bytes.IndexByte(page, '\n'); i >= 0 {
			line, page = page[:i], page[i+1:]
		} else {
			line, page = page, nil
		}
		if len(line) == 0 || line[0] == '#' {
			continue
		}
		end := 0
		for end < len(line) && line[end] != '{' && line[end] != ' ' && line[end] != '\t' {
			end++
		}
		if end == 0 || end == len(line) || want != nil && !want(line[:end]) {
			continue
		}
		name, rest := line[:end], line[end:]
		var l Labels
		if rest[0] == '{' {
			closing := closingBrace(rest)
			if closing < 0 {
				continue
			}
			l, rest = Labels(rest[1:closing]), rest[closing+1:]
		}
		rest = bytes.TrimLeft(rest, " \t")
		if i := bytes.IndexAny(rest, " \t\r"); i >= 0 {
			rest = rest[:i]
		}
		if len(rest) == 0 || len(rest) > 32 {
			continue
		}
		value, err := strconv.ParseFloat(string(rest), 64)
		if err != nil {
			continue
		}
		f(name, l, value)
	}
}

// closingBrace finds the end of a label block that b begins with; label values
// may hold braces.
func closingBrace(b []byte) int {
	quoted := false
	for i := 1; i < len(b); i++ {
		switch {
		case quoted && b[i] == '\\':
			i++
		case b[i] == '"':
			quoted = !quoted
		case b[i] == '}' && !quoted:
			return i
		}
	}
	return -1
}

// Labels is the inside of a label block: a="b",c="d".
type Labels []byte

// Get finds a label's raw value, escapes included.
func (l Labels) Get(key string) (value []byte, ok bool) {
	for len(l) > 0 {
		eq := bytes.IndexByte(l, '=')
		if eq < 0 {
			return nil, false
		}
		name := bytes.Trim(l[:eq], " \t,")
		l = bytes.TrimLeft(l[eq+1:], " \t")
		if len(l) == 0 || l[0] != '"' {
			return nil, false
		}
		end := 1
		for end < len(l) && l[end] != '"' {
			if l[end] == '\\' {
				end++
			}
			end++
		}
		if end >= len(l) {
			return nil, false
		}
		if string(name) == key {
			return l[1:end], true
		}
		l = l[end+1:]
	}
	return nil, false
}

// Number reads a label as a whole number of 0 or more; words such as "None"
// are not reported.
func (l Labels) Number(key string) (n int, ok bool) {
	v, ok := l.Get(key)
	if !ok || len(v) > 10 {
		return 0, false
	}
	u, err := strconv.ParseUint(string(v), 10, 63)
	return int(u), err == nil
}
