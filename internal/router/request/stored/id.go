package stored

import (
	"bytes"

	"github.com/dynctl/dynctl/internal/rawjson"
)

// ID is the id of the response that an answer is; empty for none.
func ID(body []byte) string { return rawjson.Value(body).Get("id").String() }

// StreamID is the id of the response that a stream is, from its first event; empty for none.
func StreamID(head []byte) string {
	_, data, ok := bytes.Cut(head, []byte("data:"))
	if !ok {
		return ""
	}
	line, _, _ := bytes.Cut(data, []byte("\n"))
	return rawjson.Value(line).Get("response.id").String()
}
