package api

import (
	"bufio"
	"bytes"
	"mime"
	"net/textproto"
)

// SetFormModel is a multipart/form-data body, in pieces, whose field "model" has another
// value: model in the place of asked, which [MultipartModel] has found there. Where asked is
// empty the field may be missing, and is put before the others. All other bytes stay, and
// most pieces are parts of body. The error, an [*Error], is for a body that begins with
// something else than its first part, or has lines that do not end with CRLF.
func SetFormModel(contentType string, body []byte, asked, model string) ([][]byte, error) {
	_, params, err := mime.ParseMediaType(contentType)
	if err != nil {
		return nil, malformed(err)
	}
	delimiter := []byte("--" + params["boundary"])
	fields, ok := formModels(body, delimiter)
	switch {
	case ok && len(fields) == 1 && fields[0].Start >= 0 && string(fields[0].Of(body)) == asked:
		at := fields[0]
		return [][]byte{body[:at.Start], []byte(model), body[at.End:]}, nil
	case ok && len(fields) == 0 && asked == "":
		return [][]byte{delimiter, []byte("\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\n" + model + "\r\n"), body}, nil
	}
	return nil, BadRequest("model", "the router cannot put the engine's name for the model into this multipart body; begin it with its boundary and end its lines with CRLF, or name the model %q", model)
}

// formModels finds the values of the fields "model" of a multipart body, which must begin
// with a delimiter.
func formModels(body, delimiter []byte) (values []Span, ok bool) {
	next := append([]byte("\r\n"), delimiter...)
	begin := -1 // of the part that the next delimiter ends
	for at := 0; bytes.HasPrefix(body[at:], delimiter); {
		end := at + len(delimiter)
		after, last := bytes.CutPrefix(body[end:], []byte("--"))
		after = bytes.TrimLeft(after, " \t")
		whole := bytes.HasPrefix(after, []byte("\r\n")) || last && len(after) == 0
		if last && !whole {
			return nil, false
		}
		if whole {
			if v, is := formModel(body, begin, at-2); is {
				values = append(values, v)
			}
			begin = len(body) - len(after) + 2
		}
		i := bytes.Index(body[end:], next)
		if last || begin < 0 || i < 0 {
			return values, last
		}
		at = end + i + 2
	}
	return nil, false
}

// formModel is the value of the part from begin to end if its name is "model"; before 0 for
// one that ends with its headers, so that their last CRLF is the delimiter's.
func formModel(body []byte, begin, end int) (value Span, ok bool) {
	for at := begin; begin >= 0 && at < end+2; {
		line, _, _ := bytes.Cut(body[at:end+2], []byte("\n"))
		at = min(end+2, at+len(line)+1)
		if len(bytes.TrimSuffix(line, []byte("\r"))) > 0 {
			continue
		}
		if value = (Span{at, end}); at > end {
			value = Span{-1, -1}
		}
		h, err := textproto.NewReader(bufio.NewReader(bytes.NewReader(body[begin:at]))).ReadMIMEHeader()
		if err != nil {
			return Span{}, false
		}
		_, params, err := mime.ParseMediaType(h.Get("Content-Disposition"))
		return value, err == nil && params["name"] == "model"
	}
	return Span{}, false
}
