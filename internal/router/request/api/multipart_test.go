package api

import (
	"bytes"
	"mime"
	"mime/multipart"
	"strings"
	"testing"
)

func TestMultipartModel(t *testing.T) {
	t.Parallel()
	var body bytes.Buffer
	mw := multipart.NewWriter(&body)
	part, err := mw.CreateFormFile("file", "model")
	if err != nil {
		t.Fatal(err)
	}
	_, _ = part.Write(make([]byte, 100_000))
	_ = mw.WriteField("model", "whisper")
	_ = mw.Close()
	if got, err := MultipartModel(mw.FormDataContentType(), body.Bytes()); got != "whisper" || err != nil {
		t.Errorf("%q, %v", got, err)
	}
	if _, err := MultipartModel("application/json", body.Bytes()); FromError(err).Status != 415 {
		t.Errorf("another type: %v", err)
	}
	if _, err := MultipartModel(mw.FormDataContentType(), body.Bytes()[:1000]); FromError(err).Status != 400 {
		t.Errorf("cut off: %v", err)
	}
	var long bytes.Buffer
	mw = multipart.NewWriter(&long)
	_ = mw.WriteField("model", strings.Repeat("m", 1000))
	_ = mw.Close()
	if _, err := MultipartModel(mw.FormDataContentType(), long.Bytes()); FromError(err).Status != 400 {
		t.Errorf("long name: %v", err)
	}
}

// form is a multipart body with the boundary b, of parts that each begin with their headers.
func form(parts ...string) string {
	body := ""
	for _, p := range parts {
		body += "--b\r\n" + p + "\r\n"
	}
	return body + "--b--\r\n"
}

// field is a part with a Content-Disposition.
func field(disposition, value string) string {
	return "Content-Disposition: " + disposition + "\r\n\r\n" + value
}

const plainModel = `form-data; name="model"`

// TestMultipartModelIsOne: a key may be for some models only, so that no body may name one
// to the router and another to the engine.
func TestMultipartModelIsOne(t *testing.T) {
	t.Parallel()
	first := field(plainModel, "base")
	for _, c := range []struct {
		name, body, model string
		code              Code
	}{
		{"one", form(field(`form-data; name="language"`, "en"), first, field(`form-data; name="file"; filename="model"`, "RIFF")), "base", ""},
		{"none", form(field(`form-data; name="file"; filename="ä b.wav"`, "RIFF")), "", ""},
		{"a part without a name", form(first, "X-A: b\r\n\r\nx"), "base", ""},
		{"a harmless transfer encoding", form("Content-Transfer-Encoding: 8BIT\r\n" + first), "base", ""},
		{"twice", form(first, field(plainModel, "other")), "", CodeDuplicateKey},
		{"twice, the first empty", form(field(plainModel, ""), first), "", CodeDuplicateKey},
		{"the same twice", form(first, first), "", CodeDuplicateKey},
		{"far apart", form(first, field(`form-data; name="file"; filename="f"`, strings.Repeat("x\r\n--", 10_000)), field(plainModel, "other")), "", CodeDuplicateKey},
		{"the second a file", form(first, field(plainModel+`; filename="f"`, "other")), "", CodeDuplicateKey},
		{"the second a file without a name", form(first, field(plainModel+`; filename=""`, "other")), "", CodeDuplicateKey},
		{"the second of another kind", form(first, field(`attachment; name=model`, "other")), "", CodeDuplicateKey},
		{"the second in other letters", form(first, "content-disposition: Form-Data; NAME=model\r\n\r\nother"), "", CodeDuplicateKey},
		{"a file", form(field(plainModel+`; filename="f"`, "other")), "", CodeInvalidRequest},
		{"two dispositions", form(first, "Content-Disposition: form-data; name=a\r\n"+field(plainModel, "other")), "", CodeInvalidRequest},
		{"two names", form(first, field(`form-data; name="a"; name="model"`, "other")), "", CodeInvalidRequest},
		{"a name beside a name", form(first, field(plainModel+`; name*=utf-8''a`, "other")), "", CodeInvalidRequest},
		{"no disposition that can be read", form(first, field(`form-data; x y; name="model"`, "other")), "", CodeInvalidRequest},
		{"encoded", form("Content-Transfer-Encoding: base64\r\n" + field(plainModel, "b3RoZXI=")), "", CodeInvalidRequest},
		{"cut off behind it", form(first)[:60], "", CodeInvalidRequest},
		{"many parts behind it", form(append([]string{first}, strings.Split(strings.Repeat(field("form-data; name=a", "b")+"|", 256), "|")[:256]...)...), "", CodeInvalidRequest},
	} {
		model, err := MultipartModel("multipart/form-data; boundary=b", []byte(c.body))
		switch {
		case c.code == "" && (err != nil || model != c.model):
			t.Errorf("%s: %q, %v", c.name, model, err)
		case c.code != "" && (err == nil || FromError(err).Code != c.code || FromError(err).Status != 400):
			t.Errorf("%s: %q, %v, want %s", c.name, model, err, c.code)
		}
	}
}

// FuzzMultipartModel: what is accepted has one field "model" at most, with the value that
// the standard library finds.
func FuzzMultipartModel(f *testing.F) {
	for _, s := range []string{
		form(field(plainModel, "m")), form(field(plainModel, "m"), field(plainModel, "n")), form(field(plainModel+`; filename=f`, "m")),
		"--b\nContent-Disposition: form-data; name=model\n\nm\n--b--", "before\r\n" + form(field(plainModel, ""), field("form-data; name=a", "\r\n--b-\r\n--bb")),
	} {
		f.Add("multipart/form-data; boundary=b", []byte(s))
	}
	f.Fuzz(func(t *testing.T, contentType string, body []byte) {
		model, err := MultipartModel(contentType, body)
		if err != nil {
			if FromError(err).Status < 400 || FromError(err).Status > 499 {
				t.Fatalf("%v", err)
			}
			return
		}
		_, params, err := mime.ParseMediaType(contentType)
		if err != nil {
			t.Fatal(err)
		}
		all, err := multipart.NewReader(bytes.NewReader(body), params["boundary"]).ReadForm(1 << 30)
		if err != nil { // it wants names of fields, for one
			return
		}
		defer func() { _ = all.RemoveAll() }()
		if values := all.Value["model"]; len(all.File["model"]) > 0 || len(values) > 1 || len(values) == 1 && values[0] != model {
			t.Fatalf("%q: %q, want %q", body, values, model)
		}
	})
}
