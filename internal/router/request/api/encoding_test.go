package api

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zlib"
	"github.com/klauspost/compress/zstd"
)

// packed is a body in a coding.
func packed(t testing.TB, encoding string, parts ...string) []byte {
	t.Helper()
	var out bytes.Buffer
	var w io.WriteCloser
	switch encoding {
	case "zstd":
		e, err := zstd.NewWriter(&out, zstd.WithEncoderConcurrency(1))
		if err != nil {
			t.Fatal(err)
		}
		w = e
	case "deflate":
		w = zlib.NewWriter(&out)
	default:
		w = gzip.NewWriter(&out)
	}
	for _, p := range parts {
		if _, err := io.WriteString(w, p); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// counted is a memory of some bytes, and what is taken of it.
type counted struct {
	size  int64
	taken atomic.Int64
	most  int64
}

func (c *counted) Take(n int64) bool {
	if c.taken.Add(n) > c.size {
		c.taken.Add(-n)
		return false
	}
	c.most = max(c.most, c.taken.Load())
	return true
}

func (c *counted) Give(n int64) { c.taken.Add(-n) }

// encoded is a request with a body in a coding.
func encoded(body []byte, encoding ...string) *http.Request {
	r := httptest.NewRequest(http.MethodPost, "/v1/completions", bytes.NewReader(body))
	r.Header["Content-Encoding"] = encoding
	return r
}

// TestEncodedBodies: a body in a coding is what it stands for, within the limit of bodies and
// of memory; what is not of the coding is refused.
func TestEncodedBodies(t *testing.T) {
	t.Parallel()
	const limit = 1 << 20
	text := `{"prompt":"` + strings.Repeat("hello ", 20_000) + `"}`
	blanks := strings.Repeat(" ", 1<<20)
	bomb := []string{"{"}
	for range 64 {
		bomb = append(bomb, blanks)
	}
	for _, encoding := range []string{"gzip", "GZIP", "x-gzip", "zstd", "deflate"} {
		name := strings.ToLower(encoding)
		whole := packed(t, name, text)
		spoilt := bytes.Clone(whole)
		for i := len(spoilt) / 2; i < len(spoilt)/2+8; i++ {
			spoilt[i] ^= 0xff
		}
		for what, c := range map[string]struct {
			body   []byte
			status int
		}{
			"whole":   {whole, 0},
			"a bomb":  {packed(t, name, bomb...), http.StatusRequestEntityTooLarge},
			"cut off": {whole[:len(whole)-9], http.StatusBadRequest},
			"spoilt":  {spoilt, http.StatusBadRequest},
			"plain":   {[]byte(text), http.StatusBadRequest},
		} {
			memory, r := &counted{size: 64 << 20}, encoded(c.body, encoding)
			b, err := ReadBody(r, limit, memory)
			var e *Error
			switch {
			case c.status == 0 && err == nil:
				if string(b.B) != text || r.Header.Get("Content-Encoding") != "" {
					t.Errorf("%s: %d bytes, %v", encoding, len(b.B), r.Header)
				}
				b.Release()
			case !errors.As(err, &e) || e.Status != c.status:
				t.Errorf("%s, %s: %v, want %d", encoding, what, err, c.status)
			}
			if memory.taken.Load() != 0 || memory.most > zstdMemory+4*limit {
				t.Errorf("%s, %s: %d bytes are taken, %d at most", encoding, what, memory.taken.Load(), memory.most)
			}
		}
		memory := &counted{size: 32 << 10}
		if _, err := ReadBody(encoded(whole, encoding), limit, memory); FromError(err).Status != http.StatusServiceUnavailable || memory.taken.Load() != 0 {
			t.Errorf("%s without memory: %v, %d are taken", encoding, err, memory.taken.Load())
		}
	}
	for _, encoding := range [][]string{{"br"}, {"gzip, zstd"}, {"gzip", "gzip"}, {strings.Repeat("x", 1000)}} {
		_, err := ReadBody(encoded([]byte("{}"), encoding...), limit, plenty{})
		e := FromError(err)
		if e == nil || e.Status != http.StatusUnsupportedMediaType || len(e.Message) > 200 {
			t.Fatalf("%q: %v", encoding, err)
		}
		w := httptest.NewRecorder()
		if WriteError(w, encoded(nil), e); w.Header().Get("Accept-Encoding") != acceptedEncodings {
			t.Errorf("%q: %v", encoding, w.Header())
		}
	}
	if b, err := ReadBody(encoded([]byte("{}"), "identity"), limit, plenty{}); err != nil || string(b.B) != "{}" {
		t.Errorf("identity: %v", err)
	}
}

// FuzzEncodedBody: whatever comes, a body keeps to its limit and gives its memory back.
func FuzzEncodedBody(f *testing.F) {
	for i, encoding := range []string{"gzip", "zstd", "deflate"} {
		whole := packed(f, encoding, `{"prompt":"hello"}`)
		f.Add(whole, byte(i))
		f.Add(append(bytes.Clone(whole), whole...), byte(i))
		f.Add(whole[:len(whole)-3], byte(i))
	}
	f.Fuzz(func(t *testing.T, body []byte, encoding byte) {
		const limit = 64 << 10
		memory := &counted{size: 32 << 20}
		b, err := ReadBody(encoded(body, []string{"gzip", "zstd", "deflate"}[encoding%3]), limit, memory)
		if err == nil {
			if len(b.B) > limit {
				t.Errorf("%d bytes", len(b.B))
			}
			b.Release()
		} else if s := FromError(err).Status; s != http.StatusBadRequest && s != http.StatusRequestEntityTooLarge {
			t.Errorf("%d: %v", s, err)
		}
		if n := memory.taken.Load(); n != 0 {
			t.Errorf("%d bytes are taken", n)
		}
	})
}
