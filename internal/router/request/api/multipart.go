package api

import (
	"bytes"
	"errors"
	"io"
	"mime"
	"mime/multipart"
	"net/http"
	"regexp"
	"slices"
	"strings"
)

// maxParts is how many parts a multipart body may have.
const maxParts = 256

// MultipartModel is the field "model" of a multipart/form-data body, "" when
// there is none. A second one is refused, as in JSON: parsers disagree on which counts,
// so that an engine could take another model than the one that was checked. So is a part
// of which parsers could read different names. The error is an [*Error].
func MultipartModel(contentType string, body []byte) (string, error) {
	media, params, err := mime.ParseMediaType(contentType)
	if err != nil || media != "multipart/form-data" || params["boundary"] == "" {
		return "", &Error{
			Status: http.StatusUnsupportedMediaType, Code: CodeUnsupportedMedia,
			Message: "this path takes multipart/form-data with a boundary", Err: err,
		}
	}
	mr := multipart.NewReader(bytes.NewReader(body), params["boundary"])
	model, found := "", false
	for n := 0; ; n++ {
		part, err := mr.NextRawPart()
		switch {
		case err == io.EOF: //nolint:errorlint // a body that is cut off is an error that wraps io.EOF
			return model, nil
		case err != nil:
			return "", malformed(err)
		case n >= maxParts:
			return "", BadRequest("", "the multipart body has more than %d parts", maxParts)
		}
		name, file, err := disposition(part)
		switch {
		case err != nil:
			return "", malformed(err)
		case name != "model":
			continue
		case found:
			return "", &Error{
				Status: http.StatusBadRequest, Code: CodeDuplicateKey, Param: "model",
				Message: "the multipart body has more than one field \"model\"; give it once",
			}
		case file:
			return "", BadRequest("model", "\"model\" is a file; send it as a plain field")
		case !plain(part):
			return "", BadRequest("model", "\"model\" has a Content-Transfer-Encoding; send it without one")
		}
		value, err := io.ReadAll(io.LimitReader(part, maxNameBytes+1))
		if err != nil {
			return "", BadRequest("model", "the multipart body ends within the field \"model\"")
		}
		if len(value) > maxNameBytes {
			return "", BadRequest("model", "\"model\" is longer than %d bytes", maxNameBytes)
		}
		model, found = string(value), true
	}
}

func malformed(err error) *Error {
	return &Error{
		Status: http.StatusBadRequest, Code: CodeInvalidRequest,
		Message: "the multipart body is malformed: " + clip(err.Error(), 200), Err: err,
	}
}

// nameTwice finds a name in the notation of RFC 2231, which forms must not have: not every
// parser knows it, and beside a plain name it is a second one.
var nameTwice = regexp.MustCompile(`(?i)[;\s]name\*`)

// disposition is the name of a part's field, whatever its kind of disposition, which some
// engines do not look at, and whether the part is a file. What another parser could read
// in another way is an error.
func disposition(part *multipart.Part) (name string, file bool, err error) {
	list := part.Header["Content-Disposition"]
	if len(list) == 0 {
		return "", false, nil
	}
	if len(list) > 1 {
		return "", false, errors.New("a part has more than one Content-Disposition")
	}
	_, params, err := mime.ParseMediaType(list[0])
	if err == nil && nameTwice.MatchString(list[0]) {
		err = errors.New("name* in a Content-Disposition")
	}
	_, file = params["filename"]
	return params["name"], file, err
}

// plain reports whether a part's bytes are its value.
func plain(part *multipart.Part) bool {
	return !slices.ContainsFunc(part.Header["Content-Transfer-Encoding"], func(e string) bool {
		switch strings.ToLower(e) {
		case "7bit", "8bit", "binary":
			return false
		}
		return true
	})
}
