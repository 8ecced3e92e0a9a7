package commands

import (
	"bytes"
	"strings"
	"testing"
)

// slowReader takes a write when it is let.
type slowReader struct {
	begun, let chan struct{}
	got        bytes.Buffer
}

func (s *slowReader) Write(p []byte) (int, error) {
	s.begun <- struct{}{}
	<-s.let
	return s.got.Write(p)
}

// TestAccessLines: lines come whole and in order; where they are not read, requests do not
// wait, and what is lost is counted.
func TestAccessLines(t *testing.T) {
	out := &slowReader{begun: make(chan struct{}, 8), let: make(chan struct{})}
	l := newAccessLines(out)
	line := []byte(strings.Repeat("x", 1023) + "\n")
	write := func() {
		if n, err := l.Write(line); n != len(line) || err != nil {
			t.Fatal(n, err)
		}
	}
	write()
	<-out.begun // the first is on its way
	const lost = 3
	for range maxAccessLines/len(line) + lost {
		write()
	}
	close(out.let)
	l.Close()
	text := out.got.String()
	if n := strings.Count(text, string(line)); n != 1+maxAccessLines/len(line) {
		t.Errorf("%d lines", n)
	}
	if !strings.HasSuffix(text, "\"dropped\":3}\n") || strings.Count(text, "dropped\":") != 1 {
		t.Errorf("ends with %q", text[len(text)-100:])
	}
}
