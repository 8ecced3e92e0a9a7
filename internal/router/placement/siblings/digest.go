package siblings

import (
	"fmt"
	"strings"

	"github.com/zeebo/xxh3"
)

// Section is a part of the settings, by name and as text.
type Section struct{ Name, Text string }

// Digest names sections with a short hash of each, for [replicas.Identity].
func Digest(sections []Section) string {
	list := make([]string, len(sections))
	for i, s := range sections {
		list[i] = fmt.Sprintf("%s=%06x", s.Name, xxh3.HashString(s.Text)&0xffffff)
	}
	return strings.Join(list, " ")
}

// Differing names the sections in which two digests differ, as words for people. It is empty
// if they are the same, or if either is unknown.
func Differing(a, b string) string {
	if a == "" || b == "" || a == b {
		return ""
	}
	ours := map[string]string{}
	for _, f := range strings.Fields(a) {
		name, sum, _ := strings.Cut(f, "=")
		ours[name] = sum
	}
	var list []string
	for _, f := range strings.Fields(b) {
		name, sum, _ := strings.Cut(f, "=")
		if was, ok := ours[name]; !ok || was != sum {
			list = append(list, name)
		}
		delete(ours, name)
	}
	for _, f := range strings.Fields(a) {
		if name, _, _ := strings.Cut(f, "="); ours[name] != "" {
			list = append(list, name)
		}
	}
	return strings.Join(list, ", ")
}
