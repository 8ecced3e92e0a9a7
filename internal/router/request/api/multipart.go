package api

import (
	"bytes"
	"mime"
	"net/http"
	"regexp"
	"slices"
	"strings"
)

// maxParts is how many parts a multipart body may have.
const maxParts = 256

// Form is what the router reads of a multipart/form-data body.
type Form struct {
	// Model is the value of the field "model", "" without one.
	Model string

	cuts      []formCut // in the order of the body
	model     Span      // the field's value, or where the first part begins when there is none
	named     bool      // there is such a field
	delimiter []byte
}

// formCut is a piece of a body that engines get other bytes for.
type formCut struct {
	at   Span
	with [][]byte
}

// ReadForm reads a multipart/form-data body of a request with the headers h. It refuses
// what parsers could read in different ways: an engine could take another model than the
// one that was checked, or a steering field that the router did not see. With steer the
// client may steer transfers. The error is an [*Error].
func ReadForm(h http.Header, body []byte, steer bool) (*Form, error) {
	r, err := newFormReader(h["Content-Type"], body)
	if err != nil {
		return nil, err
	}
	f := &Form{model: Span{r.at, r.at}, delimiter: r.delimiter}
	var read []string // the fields whose values are read; each may be given once
	for n := 0; ; n++ {
		p, err := r.next()
		switch {
		case err != nil:
			return nil, err
		case p == nil:
			return f, nil
		case n >= maxParts:
			return nil, BadRequest("", "the multipart body has more than %d parts; send fewer fields", maxParts)
		}
		steers, args := steering(p.name)
		switch {
		case p.name == "model":
		case p.name == charsetField:
		case steer:
			continue
		case steers:
			f.cuts = append(f.cuts, formCut{at: p.all})
			continue
		case !args:
			continue
		}
		if slices.Contains(read, p.name) {
			return nil, &Error{
				Status: http.StatusBadRequest, Code: CodeDuplicateKey, Param: p.name,
				Message: "the multipart body has more than one field \"" + p.name + "\"; give it once",
			}
		}
		read = append(read, p.name)
		value, err := r.plain(p)
		switch {
		case err != nil:
			return nil, err
		case p.name == charsetField && !strings.EqualFold(string(value), utf8Name):
			return nil, BadRequest(p.name, "the multipart body names another charset than UTF-8; send its fields in UTF-8")
		case p.name == "model" && len(value) > maxNameBytes:
			return nil, BadRequest("model", "\"model\" is longer than %d bytes", maxNameBytes)
		case p.name == "model":
			f.Model, f.model, f.named = string(value), p.value, true
		case args:
			with, changed, err := stripArgs(p.name, value)
			if err != nil {
				return nil, err
			}
			if changed {
				f.cuts = append(f.cuts, formCut{p.value, with})
			}
		}
	}
}

// SetModel gives the field "model" another value, and adds the field if it is missing. It
// may be called once.
func (f *Form) SetModel(model string) {
	cut := formCut{f.model, [][]byte{[]byte(model)}}
	if !f.named {
		cut.with = [][]byte{f.delimiter, []byte("\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\n" + model + "\r\n")}
	}
	i := slices.IndexFunc(f.cuts, func(c formCut) bool { return c.at.Start >= f.model.End })
	if i < 0 {
		i = len(f.cuts)
	}
	f.cuts = slices.Insert(f.cuts, i, cut)
}

// Segments appends to dst the pieces of the body that engines get, which are those of
// the body that f was read from but for the steering fields and the model.
func (f *Form) Segments(dst [][]byte, body []byte) [][]byte {
	from := 0
	for i := range f.cuts {
		c := &f.cuts[i]
		dst = append(append(dst, body[from:c.at.Start]), c.with...)
		from = c.at.End
	}
	return append(dst, body[from:])
}

// charsetField is the field by which a form names the charset of its fields.
const charsetField = "_charset_"

const utf8Name = "utf-8"

// formReader gives the parts of a multipart body. It takes only what all parsers read
// alike.
type formReader struct {
	body      []byte
	delimiter []byte // "--" and the boundary
	charset   string // of the fields, as the request says
	at        int    // of the next part's delimiter
	last      bool   // that delimiter is the last
}

// formPart is one part of a multipart body.
type formPart struct {
	all, value Span // all has the delimiter before the part, value is its content
	name       string
	file       bool
	encoding   string
	media      string // Content-Type
}

var (
	// simpleBoundary is a boundary that needs no quotes or escapes (RFC 2046).
	simpleBoundary = regexp.MustCompile(`^[0-9A-Za-z'()+_,./:=?-]{1,70}$`)
	boundaryParam  = regexp.MustCompile(`(?i)boundary\s*[=*]`)
	// simpleName is a field's name that no parser decodes.
	simpleName = regexp.MustCompile(`^[0-9A-Za-z_.:\[\]-]*$`)
	// nameParam finds the parameter "name" wherever a parser could see it, also in quotes
	// and in the notation of RFC 2231 (name*=).
	nameParam    = regexp.MustCompile(`(?i)(?:^|[^0-9a-z_-])name\s*[=*]`)
	fileParam    = regexp.MustCompile(`(?i)filename`)
	simpleHeader = regexp.MustCompile(`^[0-9A-Za-z-]+$`)
)

func newFormReader(types []string, body []byte) (*formReader, error) {
	want := &Error{
		Status: http.StatusUnsupportedMediaType, Code: CodeUnsupportedMedia,
		Message: "this path takes multipart/form-data with a boundary",
	}
	if len(types) != 1 {
		return nil, want
	}
	media, params, err := mime.ParseMediaType(types[0])
	if want.Err = err; err != nil || media != "multipart/form-data" || params["boundary"] == "" {
		return nil, want
	}
	if !simpleBoundary.MatchString(params["boundary"]) || len(boundaryParam.FindAllStringIndex(types[0], -1)) != 1 || strings.ContainsAny(types[0], `*\`) {
		want.Message = "header Content-Type: parsers could read different boundaries; give one of letters, digits and dashes"
		return nil, want
	}
	r := &formReader{body: body, delimiter: []byte("--" + params["boundary"]), charset: params["charset"]}
	if err := r.find(0); err != nil {
		return nil, err
	}
	if before := body[:r.at]; len(before) > 0 && string(before) != "\r\n" {
		return nil, malformed("it begins with something else than its boundary", 0)
	}
	return r, nil
}

// find finds the next delimiter. One that some parsers could overlook is an error.
func (r *formReader) find(from int) error {
	i := bytes.Index(r.body[from:], r.delimiter)
	if i < 0 {
		return malformed("its last boundary is missing", len(r.body))
	}
	r.at = from + i
	after := r.body[r.at+len(r.delimiter):]
	end, closed := bytes.CutPrefix(after, []byte("--"))
	r.last = closed && (len(end) == 0 || bytes.HasPrefix(end, []byte("\r\n")))
	switch {
	case r.at > 0 && !bytes.HasSuffix(r.body[:r.at], []byte("\r\n")), !r.last && !bytes.HasPrefix(after, []byte("\r\n")):
		return malformed("its boundary is not alone on a line that CRLF ends", r.at)
	case r.last && bytes.Contains(r.body[r.at+1:], r.delimiter):
		return malformed("its boundary comes after the last one", r.at)
	}
	return nil
}

// next is the next part, nil behind the last.
func (r *formReader) next() (*formPart, error) {
	if r.last {
		return nil, nil
	}
	start := r.at
	begin := start + len(r.delimiter) + len("\r\n")
	if err := r.find(start + 1); err != nil {
		return nil, err
	}
	end := r.at - len("\r\n")
	p := &formPart{all: Span{start, r.at}, value: Span{begin, end}}
	if begin > end {
		return nil, malformed("a part has no headers", start)
	}
	part := r.body[begin:end]
	if bytes.HasPrefix(part, []byte("\r\n")) { // no headers
		p.value.Start += len("\r\n")
		return p, nil
	}
	head, _, ok := bytes.Cut(part, []byte("\r\n\r\n"))
	if !ok {
		return nil, malformed("the headers of a part have no end", start)
	}
	p.value.Start += len(head) + len("\r\n\r\n")
	if what := p.headers(string(head)); what != "" {
		return nil, malformed(what, start)
	}
	return p, nil
}

// headers reads the headers of a part. It reports what is wrong with them, "" for nothing.
func (p *formPart) headers(head string) (wrong string) {
	var seen []string
	for line := range strings.SplitSeq(head, "\r\n") {
		key, value, ok := strings.Cut(line, ":")
		if !ok || !simpleHeader.MatchString(key) || strings.ContainsFunc(value, func(c rune) bool { return c < ' ' && c != '\t' || c == 0x7f }) {
			return "a part has a header that parsers could read in different ways"
		}
		key, value = http.CanonicalHeaderKey(key), strings.Trim(value, " \t")
		if strings.HasPrefix(key, "Content-") {
			if slices.Contains(seen, key) {
				return "a part has more than one " + key
			}
			seen = append(seen, key)
		}
		switch key {
		case "Content-Transfer-Encoding":
			p.encoding = value
		case "Content-Type":
			p.media = value
			if len(value) >= 10 && strings.EqualFold(value[:10], "multipart/") {
				return "a part has parts of its own"
			}
		case "Content-Disposition":
			// The kind is not looked at, as some engines do not.
			_, params, err := mime.ParseMediaType(value)
			name, named := params["name"]
			texts := nameParam.FindAllString(value, -1)
			if err != nil || len(texts) > 1 || named != (len(texts) == 1) || named && strings.HasSuffix(texts[0], "*") || !simpleName.MatchString(name) {
				return "a part has a Content-Disposition that parsers could read in different ways"
			}
			p.name, p.file = name, fileParam.MatchString(value)
		}
	}
	return ""
}

// plain is the value of a field that the router reads. One that needs decoding, which
// not every parser does, is an error.
func (r *formReader) plain(p *formPart) ([]byte, error) {
	value := p.value.Of(r.body)
	switch strings.ToLower(p.encoding) {
	case "", "7bit", "8bit", "binary":
	default:
		return nil, BadRequest(p.name, "%q has a Content-Transfer-Encoding; send it without one", p.name)
	}
	if p.file {
		return nil, BadRequest(p.name, "%q is a file; send it as a plain field", p.name)
	}
	_, params, err := mime.ParseMediaType(p.media)
	if p.media != "" && err != nil || strings.Contains(p.media, "*") || !sameInUTF8(params["charset"], value) || !sameInUTF8(r.charset, value) {
		return nil, BadRequest(p.name, "%q has a charset; send it in UTF-8, without one", p.name)
	}
	return value, nil
}

// sameInUTF8 reports whether a text in a charset is the same in UTF-8. "" stands for UTF-8.
func sameInUTF8(charset string, text []byte) bool {
	switch strings.ToLower(charset) {
	case "", utf8Name:
		return true
	case "us-ascii", "iso-8859-1":
		return !slices.ContainsFunc(text, func(c byte) bool { return c >= 0x80 })
	}
	return false
}

func malformed(what string, at int) *Error {
	return BadRequest("", "the multipart body is not one that all parsers read alike: %s (byte %d)", what, at)
}
