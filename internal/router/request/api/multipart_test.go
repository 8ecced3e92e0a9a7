package api

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"mime/multipart"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"testing"
)

// modelOf is the model that a form of a Content-Type names.
func modelOf(contentType string, body []byte) (string, error) {
	f, err := ReadForm(http.Header{"Content-Type": {contentType}}, body, false)
	if err != nil {
		return "", err
	}
	return f.Model, nil
}

func TestFormModel(t *testing.T) {
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
	if got, err := modelOf(mw.FormDataContentType(), body.Bytes()); got != "whisper" || err != nil {
		t.Errorf("%q, %v", got, err)
	}
	if _, err := modelOf("application/json", body.Bytes()); FromError(err).Status != 415 {
		t.Errorf("another type: %v", err)
	}
	if _, err := modelOf(mw.FormDataContentType(), body.Bytes()[:1000]); FromError(err).Status != 400 {
		t.Errorf("cut off: %v", err)
	}
	var long bytes.Buffer
	mw = multipart.NewWriter(&long)
	_ = mw.WriteField("model", strings.Repeat("m", 1000))
	_ = mw.Close()
	if _, err := modelOf(mw.FormDataContentType(), long.Bytes()); FromError(err).Status != 400 {
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

// TestFormModelIsOne: a key may be for some models only, so that no body may name one
// to the router and another to the engine.
func TestFormModelIsOne(t *testing.T) {
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
		model, err := modelOf("multipart/form-data; boundary=b", []byte(c.body))
		switch {
		case c.code == "" && (err != nil || model != c.model):
			t.Errorf("%s: %q, %v", c.name, model, err)
		case c.code != "" && (err == nil || FromError(err).Code != c.code || FromError(err).Status != 400):
			t.Errorf("%s: %q, %v, want %s", c.name, model, err, c.code)
		}
	}
}

// xargs is a part with the field vllm_xargs.
func xargs(value string) string { return field(`form-data; name="vllm_xargs"`, value) }

// stripped is the form that engines get.
func stripped(f *Form, body []byte) string { return string(bytes.Join(f.Segments(nil, body), nil)) }

// TestFormCannotSteer: what JSON bodies may not have, forms may not have either, however
// it is written. What else they have goes on byte for byte.
func TestFormCannotSteer(t *testing.T) {
	t.Parallel()
	head := []string{field(`form-data; name="file"; filename="a.wav"`, "RIFF\x00\xff\r\n\r\n--\r\n--a kv_transfer_params"), field(plainModel, "base")}
	type row struct{ name, part, want string }
	rows := []row{
		{"harmless", field(`form-data; name="timestamp_granularities[]"`, "word"), field(`form-data; name="timestamp_granularities[]"`, "word")},
		{"a value with the name", field(`form-data; name="prompt"`, "kv_transfer_params"), field(`form-data; name="prompt"`, "kv_transfer_params")},
		{"harmless arguments", xargs(" {\"mine\" : 1}\n"), xargs(" {\"mine\" : 1}\n")},
		{"no arguments", xargs(""), xargs("")},
		{"null", xargs("null"), xargs("null")},
		{"arguments in a part of type JSON", "Content-Type: application/json; charset=UTF-8\r\n" + xargs(`{"ret_first_tok":1}`), "Content-Type: application/json; charset=UTF-8\r\n" + xargs(`{}`)},
		{"arguments in Latin-1 that are ASCII", "Content-Type: text/plain; charset=ISO-8859-1\r\n" + xargs(`{"ret_first_tok":1}`), "Content-Type: text/plain; charset=ISO-8859-1\r\n" + xargs(`{}`)},
		{"an object that is no argument", xargs(`{"mine":{"kv_transfer_params":1}}`), xargs(`{"mine":{"kv_transfer_params":1}}`)},
		{"twice in one object", xargs(`{"kv_transfer_params":1,"a":2,"kv_transfer_params":3}`), xargs(`{"a":2}`)},
		{"sampling parameters", field(`form-data; name=sampling_params`, `{"extra_args":{"kv_transfer_params":{}},"n":1}`), field(`form-data; name=sampling_params`, `{"extra_args":{},"n":1}`)},
		{"arguments of brackets", field(`form-data; name="vllm_xargs[extra_args]"`, `{"kv_transfer_params":{}}`), field(`form-data; name="vllm_xargs[extra_args]"`, `{}`)},
		{"one argument of brackets", field(`form-data; name="vllm_xargs[mine]"`, `x`), field(`form-data; name="vllm_xargs[mine]"`, `x`)},
	}
	for _, name := range transferFields {
		escaped := fmt.Sprintf("\\u%04x%s", name[0], name[1:])
		rows = append(rows,
			row{"a field " + name, field(`form-data; name="`+name+`"`, "x"), ""},
			row{"without quotes " + name, field(`form-data; name=`+name, "x"), ""},
			row{"in other letters " + name, "CONTENT-DISPOSITION:form-data;NAME = " + name + "\r\n\r\nx", ""},
			row{"of another kind " + name, field(`attachment; name="`+name+`"`, "x"), ""},
			row{"a file " + name, field(`form-data; name="`+name+`"; filename="f"`, "x"), ""},
			row{"encoded " + name, "Content-Transfer-Encoding: base64\r\n" + field(`form-data; name="`+name+`"`, "x"), ""},
			row{"a list " + name, field(`form-data; name="`+name+`[]"`, "x"), ""},
			row{"a member " + name, field(`form-data; name="`+name+`[remote_host]"`, "x"), ""},
			row{"in brackets " + name, field(`form-data; name="vllm_xargs[`+name+`]"`, "x"), ""},
			row{"behind a dot " + name, field(`form-data; name="vllm_xargs.`+name+`"`, "x"), ""},
			row{"an argument " + name, xargs(`{"` + name + `":"x","mine":1}`), xargs(`{"mine":1}`)},
			row{"an escaped argument " + name, xargs(`{"mine":1,"` + escaped + `":[1]}`), xargs(`{"mine":1}`)},
		)
	}
	h := http.Header{"Content-Type": {"multipart/form-data; boundary=b"}}
	for _, c := range rows {
		for _, body := range []string{form(append(head[:2:2], c.part)...), form(append([]string{c.part}, head...)...)} {
			want := strings.Replace(body, c.part, c.want, 1)
			if c.want == "" {
				want = strings.Replace(body, "--b\r\n"+c.part+"\r\n", "", 1)
			}
			f, err := ReadForm(h, []byte(body), false)
			if err != nil || f.Model != "base" || stripped(f, []byte(body)) != want {
				t.Errorf("%s: %v, %+v of %q", c.name, err, f, body)
				continue
			}
			if f, err = ReadForm(h, []byte(body), true); err != nil || f.Model != "base" || stripped(f, []byte(body)) != body {
				t.Errorf("%s, where the operator lets clients steer: %v, %+v", c.name, err, f)
			}
		}
	}
}

// TestFormThatCannotBeExamined: what parsers could read in different ways is refused.
func TestFormThatCannotBeExamined(t *testing.T) {
	t.Parallel()
	const plain, kv = "multipart/form-data; boundary=b", "kv_transfer_params"
	ok := form(field(plainModel, "m"))
	for _, c := range []struct {
		name, contentType, body string
		status                  int
		says                    string
	}{
		{"an ordinary form", plain, ok, 0, ""},
		{"a charset that is UTF-8", plain + "; charset=UTF-8", ok, 0, ""},
		{"a charset of ASCII", plain + "; charset=iso-8859-1", ok, 0, ""},
		{"a boundary of a browser", `multipart/form-data; boundary="----WebKitFormBoundaryA1"`, strings.ReplaceAll(ok, "--b", "------WebKitFormBoundaryA1"), 0, ""},
		{"a file with two names", plain, form(field(`form-data; name="file"; filename="a.wav"; filename*=utf-8''%e2.wav`, "x")), 0, ""},
		{"a file with a path", plain, form(field(`form-data; name="file"; filename="C:\a\b.wav"`, "x")), 0, ""},

		{"another charset", plain + "; charset=utf-7", ok, 400, "charset"},
		{"a charset of more than ASCII", plain + "; charset=iso-8859-1", form(field(plainModel, "ä")), 400, "charset"},
		{"a charset of a field", plain, form("Content-Type: text/plain; charset=utf-16\r\n" + xargs("{}")), 400, "charset"},
		{"a field for the charset", plain, form(field(`form-data; name=_charset_`, "utf-7")), 400, "charset"},
		{"two boundaries", plain + "; boundary*=utf-8''c", ok, 415, ""},
		{"an escaped boundary", `multipart/form-data; boundary="a\b"`, ok, 415, "boundaries"},
		{"a boundary with blanks", `multipart/form-data; boundary="b b"`, ok, 415, "boundaries"},

		{"a preamble", plain, "x\r\n" + ok, 400, "begins with"},
		{"lines that LF ends", plain, strings.ReplaceAll(ok, "\r", ""), 400, "boundary"},
		{"a boundary that LF ends", plain, form(field("form-data; name=a", "\n--b\r\n"+field("form-data; name="+kv, "x"))), 400, "boundary"},
		{"a boundary with blanks behind", plain, strings.Replace(ok, "--b\r\n", "--b \r\n", 1), 400, "boundary"},
		{"a longer boundary", plain, form(field("form-data; name=a", "\r\n--bc\r\n")), 400, "boundary"},
		{"a boundary behind the last", plain, ok + form(field("form-data; name="+kv, "x")), 400, "after the last"},
		{"no end", plain, strings.TrimSuffix(ok, "--\r\n"), 400, "boundary"},
		{"parts that share a line", plain, "--b\r\n--b--", 400, "no headers"},
		{"headers without end", plain, "--b\r\nContent-Disposition: form-data; name=a\r\n--b--", 400, "no end"},

		{"a name of RFC 2231", plain, form(field("form-data; name*=utf-8''"+kv, "x")), 400, "Disposition"},
		{"a name in pieces", plain, form(field("form-data; name*0=kv_transfer; name*1=_params", "x")), 400, "Disposition"},
		{"a name with escapes", plain, form(field(`form-data; name="kv_transfer\_params"`, "x")), 400, "Disposition"},
		{"a name with percent signs", plain, form(field(`form-data; name="kv_transfer%5Fparams"`, "x")), 400, "Disposition"},
		{"an encoded word", plain, form(field(`form-data; name="=?utf-8?q?kv=5Ftransfer=5Fparams?="`, "x")), 400, "Disposition"},
		{"a name with blanks", plain, form(field(`form-data; name=" kv_transfer_params"`, "x")), 400, "Disposition"},
		{"a name in the name of a file", plain, form(field(`form-data; filename="x\"; name=`+kv+`; y=\""`, "x")), 400, "Disposition"},
		{"a name in quotes, and another", plain, form(field(`form-data; x="\"; name=`+kv+`; y="; name=a`, "x")), 400, "Disposition"},
		{"a header on two lines", plain, form("Content-Disposition: form-data;\r\n name=" + kv + "\r\n\r\nx"), 400, "header"},
		{"a header with LF", plain, form("X: y\nContent-Disposition: form-data; name=" + kv + "\r\n\r\nx"), 400, "header"},
		{"a header with CR", plain, form("X: y\rContent-Disposition: form-data; name=" + kv + "\r\n\r\nx"), 400, "header"},
		{"a blank before the colon", plain, form("Content-Disposition : form-data; name=" + kv + "\r\n\r\nx"), 400, "header"},
		{"two types", plain, form("Content-Type: text/plain\r\ncontent-type: text/plain\r\n" + xargs("{}")), 400, "Content-Type"},
		{"parts within a part", plain, form("Content-Type: Multipart/Mixed; boundary=c\r\n" + field("form-data; name=a", "--c\r\n"+field("form-data; name="+kv, "x")+"\r\n--c--")), 400, "parts of its own"},

		{"arguments twice", plain, form(xargs("{}"), xargs("{}")), 400, "give it once"},
		{"arguments in a file", plain, form(field(`form-data; name="vllm_xargs"; filename="f"`, "{}")), 400, "is a file"},
		{"encoded arguments", plain, form("Content-Transfer-Encoding: quoted-printable\r\n" + xargs(`{"kv=5Ftransfer_params":1}`)), 400, "Transfer-Encoding"},
		{"arguments that are no JSON", plain, form(xargs(`{"kv_transfer_params":NaN}`)), 400, "not valid JSON"},
		{"arguments in a text", plain, form(xargs(`"{\"kv_transfer_params\":1}"`)), 400, "JSON object"},
		{"arguments in a list", plain, form(xargs(`[{"kv_transfer_params":1}]`)), 400, "JSON object"},
		{"arguments and more", plain, form(xargs(`{} {"kv_transfer_params":1}`)), 400, "nothing else"},
	} {
		_, err := ReadForm(http.Header{"Content-Type": {c.contentType}}, []byte(c.body), false)
		switch e := FromError(err); {
		case c.status == 0 && err != nil:
			t.Errorf("%s: %v", c.name, err)
		case c.status != 0 && (err == nil || e.Status != c.status || !strings.Contains(e.Message, c.says)):
			t.Errorf("%s: %v, want %d with %q", c.name, err, c.status, c.says)
		}
	}
	if _, err := ReadForm(http.Header{"Content-Type": {plain, plain}}, []byte(ok), false); FromError(err).Status != 415 {
		t.Errorf("two headers Content-Type: %v", err)
	}
}

// FuzzForm: what is accepted has one field "model" at most, with the value that the
// standard library finds. What engines get of it has no field that steers, neither for this
// reader nor for the standard library's, and the other fields as they were.
func FuzzForm(f *testing.F) {
	for _, s := range []string{
		form(field(plainModel, "m")), form(field(plainModel, "m"), field(plainModel, "n")), form(field(plainModel+`; filename=f`, "m")),
		"--b\nContent-Disposition: form-data; name=model\n\nm\n--b--", "\r\n" + form(field(plainModel, ""), field("form-data; name=a", "\r\n--b-\r\n--bb")),
		form(xargs(`{"kv_transfer_params":{"a":1},"mine":1}`), field(`form-data; name="bootstrap_room"`, "1"), field(`form-data; name="file"; filename="f"`, "RIFF")),
		form(field(`form-data; name="vllm_xargs[extra_args]"`, `{"a":1, "ret_first_tok" : 2}`), "X: y\r\n\r\n", "\r\n"),
	} {
		f.Add("multipart/form-data; boundary=b", []byte(s))
	}
	f.Fuzz(func(t *testing.T, contentType string, body []byte) {
		h := http.Header{"Content-Type": {contentType}}
		read, err := ReadForm(h, body, false)
		if err != nil {
			if FromError(err).Status < 400 || FromError(err).Status > 499 {
				t.Fatalf("%v", err)
			}
			return
		}
		sent := stripped(read, body)
		if again, err := ReadForm(h, []byte(sent), false); err != nil || again.Model != read.Model || len(again.cuts) > 0 {
			t.Fatalf("%q of %q: %v, %+v", sent, body, err, again)
		}
		before, after := fieldsOf(t, contentType, body), fieldsOf(t, contentType, []byte(sent))
		if values := after["model"]; len(values) > 1 || len(values) == 1 && values[0] != read.Model {
			t.Fatalf("%q: %q, want %q", body, values, read.Model)
		}
		for name, values := range before {
			steers, args := steering(name)
			switch {
			case steers && len(after[name]) > 0:
				t.Fatalf("%q reaches the engine in %q", name, sent)
			case args && len(after[name]) == 1:
				var members map[string]json.RawMessage
				if text := after[name][0]; strings.Trim(text, " \t\r\n") != "" && json.Unmarshal([]byte(text), &members) != nil {
					t.Fatalf("%q has %q in %q", name, text, sent)
				}
				for member := range members {
					if isTransferField([]byte(member)) {
						t.Fatalf("%q of %q reaches the engine in %q", member, name, sent)
					}
				}
			case !steers && !slices.Equal(values, after[name]):
				t.Fatalf("%q is %q, was %q", name, after[name], values)
			}
		}
		read.SetModel("new")
		named := []byte(stripped(read, body))
		if again, err := ReadForm(h, named, false); err != nil || again.Model != "new" {
			t.Fatalf("%q became %q: %v, %+v", body, named, err, again)
		}
		with := fieldsOf(t, contentType, named)
		delete(with, "model")
		delete(after, "model")
		if !reflect.DeepEqual(with, after) {
			t.Fatalf("%q became %q: %q, want %q", body, named, with, after)
		}
	})
}

// TestSetModel: the value of one field changes, or the field is added, and no other byte
// but those of steering fields does.
func TestSetModel(t *testing.T) {
	t.Parallel()
	file, steers := field(`form-data; name="file"; filename="model"`, "RIFF\r\n--c\r\n\r\n--"), field(`form-data; name="bootstrap_room"`, "1")
	for _, c := range []struct{ name, body, want string }{
		{"an alias", form(file, field(plainModel, "nice")), form(file, field(plainModel, "whisper"))},
		{"first, with more headers", form("X-A: b\r\ncontent-disposition: Form-Data; NAME=model\r\n\r\nnice", file), form("X-A: b\r\ncontent-disposition: Form-Data; NAME=model\r\n\r\nwhisper", file)},
		{"an empty one", form(field(plainModel, ""), file), form(field(plainModel, "whisper"), file)},
		{"none", form(file), form(field(plainModel, "whisper"), file)},
		{"none, and the word elsewhere", form(field(`form-data; name="prompt"`, "\r\n"+plainModel)), form(field(plainModel, "whisper"), field(`form-data; name="prompt"`, "\r\n"+plainModel))},
		{"behind and before what is cut", form(steers, field(plainModel, "nice"), steers), form(field(plainModel, "whisper"))},
		{"none, before what is cut", form(steers, file), form(field(plainModel, "whisper"), file)},
		{"no parts", "--b--", "--b\r\nContent-Disposition: " + plainModel + "\r\n\r\nwhisper\r\n--b--"},
	} {
		f, err := ReadForm(http.Header{"Content-Type": {"multipart/form-data; boundary=b"}}, []byte(c.body), false)
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		f.SetModel("whisper")
		if got := stripped(f, []byte(c.body)); got != c.want {
			t.Errorf("%s:\n got %q\nwant %q", c.name, got, c.want)
		}
	}
}

// fieldsOf are the fields of a form as the standard library reads them.
func fieldsOf(t *testing.T, contentType string, body []byte) map[string][]string {
	_, params, err := mime.ParseMediaType(contentType)
	if err != nil {
		t.Fatal(err)
	}
	fields := map[string][]string{}
	for r := multipart.NewReader(bytes.NewReader(body), params["boundary"]); ; {
		p, err := r.NextRawPart()
		if errors.Is(err, io.EOF) {
			return fields
		}
		if err != nil {
			t.Fatalf("%q: %v", body, err)
		}
		value, err := io.ReadAll(p)
		if err != nil {
			t.Fatalf("%q: %v", body, err)
		}
		_, params, _ := mime.ParseMediaType(p.Header.Get("Content-Disposition"))
		fields[params["name"]] = append(fields[params["name"]], string(value))
	}
}

// TestQueryCannotSteer: a query may not name what steers, in whatever escapes.
func TestQueryCannotSteer(t *testing.T) {
	t.Parallel()
	for query, want := range map[string]string{
		"": "", "stream=true&starting_after=3": "", "q=kv_transfer_params": "", "a%20b=1&c": "", "x=%zz": "",
		"kv_transfer_params=1": "leave it out", "a=1&kv_transfer_param%73": "leave it out", "a;bootstrap_room=1": "leave it out",
		"vllm_xargs[kv_transfer_params]=1": "leave it out", "vllm_xargs%5Bmine%5D.ret_first_tok=1": "leave it out", "vllm_xargs={}": "leave it out",
		"kv_transfer_params%zz=1": "escape",
	} {
		err := CheckQuery(query)
		if (err == nil) != (want == "") || !strings.Contains(fmt.Sprint(err), want) || err != nil && FromError(err).Status != 400 {
			t.Errorf("%s: %v, want %q", query, err, want)
		}
	}
}

// TestPlainJSON: a body that was read as JSON in UTF-8 goes on as nothing else.
func TestPlainJSON(t *testing.T) {
	t.Parallel()
	for types, want := range map[string]bool{
		"": true, "application/json": true, "Application/JSON; charset=UTF-8": true, "application/vnd.api+json": true,
		"application/json|application/json": false, "application/x-www-form-urlencoded": false, "multipart/form-data; boundary=b": false,
		"application/json; charset=utf-7": false, "application/json; charset*=utf-8''utf-7": false, "text/plain": false, "a b": false,
	} {
		h := http.Header{}
		if types != "" {
			h["Content-Type"] = strings.Split(types, "|")
		}
		if PlainJSON(h) != want {
			t.Errorf("%s: %v", types, !want)
		}
	}
}
