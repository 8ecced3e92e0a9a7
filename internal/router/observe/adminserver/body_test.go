package adminserver

import (
	"net/http/httptest"
	"strings"
	"testing"
)

// A body is one JSON value or nothing; what follows it is not left out in silence.
func TestBodies(t *testing.T) {
	t.Parallel()
	for body, want := range map[string]string{
		``:                           "",
		`{"url":"http://a"}`:         "",
		" {\"url\":\"http://a\"} \n": "",
		`{"url":"a"}{"url":"b"}`:     "something follows",
		`{"url":"a"} x`:              "something follows",
		`{"url":"a"`:                 "unexpected EOF",
		`{"uri":"a"}`:                `unknown field "uri"`,
	} {
		var v struct{ URL string }
		err := readJSON(httptest.NewRequest("POST", "/", strings.NewReader(body)), &v)
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", body, err, want)
		}
	}
}
