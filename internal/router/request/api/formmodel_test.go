package api

import (
	"bytes"
	"mime/multipart"
	"strings"
	"testing"
)

const formType = "multipart/form-data; boundary=b"

// TestSetFormModel: the value of one field changes, or the field is added, and no other
// byte does.
func TestSetFormModel(t *testing.T) {
	t.Parallel()
	file := field(`form-data; name="file"; filename="model"`, "RIFF\r\n--bb\r\n\r\n--")
	for _, c := range []struct{ name, body, asked, want string }{
		{"an alias", form(file, field(plainModel, "nice")), "nice", form(file, field(plainModel, "whisper"))},
		{"first, with more headers", form("X-A: b\r\ncontent-disposition: Form-Data; NAME=model\r\n\r\nnice", file), "nice", form("X-A: b\r\ncontent-disposition: Form-Data; NAME=model\r\n\r\nwhisper", file)},
		{"an empty one", form(field(plainModel, ""), file), "", form(field(plainModel, "whisper"), file)},
		{"none", form(file), "", form(field(plainModel, "whisper"), file)},
		{"none, and the word elsewhere", form(field(`form-data; name="prompt"`, "\r\n"+plainModel)), "", form(field(plainModel, "whisper"), field(`form-data; name="prompt"`, "\r\n"+plainModel))},
		{"white space behind a boundary", strings.Replace(form(field(plainModel, "nice")), "--b\r\n", "--b \t\r\n", 1), "nice", strings.Replace(form(field(plainModel, "whisper")), "--b\r\n", "--b \t\r\n", 1)},
		{"something before the first part", "preamble\r\n" + form(field(plainModel, "nice")), "nice", ""},
		{"lines that end with LF", strings.ReplaceAll(form(field(plainModel, "nice")), "\r\n", "\n"), "nice", ""},
		{"no end", strings.TrimSuffix(form(field(plainModel, "nice")), "--\r\n"), "nice", ""},
		{"another value", form(field(plainModel, "other")), "nice", ""},
		{"no value at all", "--b\r\nContent-Disposition: " + plainModel + "\r\n\r\n--b--", "", ""},
		{"nothing", "", "", ""},
	} {
		got, err := SetFormModel(formType, []byte(c.body), c.asked, "whisper")
		if c.want == "" {
			if e := FromError(err); err == nil || e.Status != 400 || e.Param != "model" || !strings.Contains(e.Message, `name the model "whisper"`) {
				t.Errorf("%s: %q, %v", c.name, got, err)
			}
			continue
		}
		if all := string(bytes.Join(got, nil)); err != nil || all != c.want {
			t.Errorf("%s: %v\n got %q\nwant %q", c.name, err, all, c.want)
		}
	}
	var body bytes.Buffer
	mw := multipart.NewWriter(&body)
	part, err := mw.CreateFormFile("file", "a.wav")
	if err != nil {
		t.Fatal(err)
	}
	_, _ = part.Write(make([]byte, 100_000))
	_ = mw.WriteField("model", "nice")
	_ = mw.Close()
	got, err := SetFormModel(mw.FormDataContentType(), body.Bytes(), "nice", "whisper")
	if want := bytes.Replace(body.Bytes(), []byte("\r\nnice\r\n"), []byte("\r\nwhisper\r\n"), 1); err != nil || !bytes.Equal(bytes.Join(got, nil), want) {
		t.Errorf("a form of mime/multipart: %v", err)
	}
}

// FuzzSetFormModel: the router reads the new name out of the body that it has made, and
// every other byte of the old one is there.
func FuzzSetFormModel(f *testing.F) {
	for _, s := range []string{
		form(field(plainModel, "m")), form(field(plainModel, ""), field("form-data; name=a", "\r\n--b-\r\n--bb")), form(field("form-data; name=a", "x")),
		"--b\r\nContent-Disposition: form-data; name=model\n\nm\r\n--b--", "--b\r\n\r\n--b\r\n--b--", "--b--", "--b \r\n\r\n\r\n--b--\r\n--b\r\n" + field(plainModel, "m"),
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		asked, err := MultipartModel(formType, body)
		if err != nil {
			return
		}
		pieces, err := SetFormModel(formType, body, asked, "new")
		if err != nil {
			return
		}
		all := bytes.Join(pieces, nil)
		if got, err := MultipartModel(formType, all); err != nil || got != "new" {
			t.Fatalf("%q became %q, of which the model is %q, %v", body, all, got, err)
		}
		if asked != "" && len(all)-len("new") != len(body)-len(asked) || asked == "" && !bytes.HasSuffix(all, pieces[2]) {
			t.Fatalf("%q became %q", body, all)
		}
	})
}
