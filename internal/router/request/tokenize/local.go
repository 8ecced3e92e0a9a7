package tokenize

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/dynctl/dynctl/internal/router/request/tokenize/bpe"
	"github.com/dynctl/dynctl/internal/router/request/tokenize/jinja"
)

// Options configures Load. The zero value means the defaults.
type Options struct {
	MaxTextBytes int // of a prompt or a rendered chat, default 16 MiB
}

// Local is a tokenizer that runs in process.
type Local struct {
	tok     *bpe.Tokenizer
	maxText int
	special *jinja.Dict // bos_token and the like, for templates

	template     *jinja.Template // nil for none
	toolTemplate *jinja.Template // used when there are tools; nil for the same
	templateErr  error           // why there is no template
}

// maxConfig bounds tokenizer_config.json and chat_template.jinja.
const maxConfig = 8 << 20

// Load reads a model's tokenizer.json, given as the file or as the folder that
// it is in, and the chat template beside it (chat_template.jinja, else
// tokenizer_config.json). A missing or unusable template is no error here: it
// makes Chat answer ErrUnsupported; see TemplateError.
func Load(path string, o Options) (*Local, error) {
	tok, err := bpe.Load(path, bpe.Options{})
	if err != nil {
		return nil, err
	}
	o.MaxTextBytes = cmp.Or(max(o.MaxTextBytes, 0), 16<<20)
	l := &Local{tok: tok, maxText: o.MaxTextBytes, special: &jinja.Dict{}}
	dir := path
	if st, err := os.Stat(path); err == nil && !st.IsDir() {
		dir = filepath.Dir(path)
	}
	l.templateErr = l.loadTemplate(dir)
	return l, nil
}

// readFile reads a file of at most maxConfig bytes; nil for none.
func readFile(path string) ([]byte, error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxConfig+1))
	if err == nil && len(data) > maxConfig {
		return nil, fmt.Errorf("%s: %w", path, ErrTooLarge)
	}
	return data, err
}

func (l *Local) loadTemplate(dir string) error {
	data, err := readFile(filepath.Join(dir, "tokenizer_config.json"))
	if err != nil {
		return err
	}
	cfg := &jinja.Dict{}
	if data != nil {
		v, err := jinja.ParseJSON(data)
		if err != nil {
			return fmt.Errorf("tokenizer_config.json: %w", err)
		}
		if d, ok := v.(*jinja.Dict); ok {
			cfg = d
		}
	}
	for _, k := range []string{"bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"} {
		v, _ := cfg.Get(k)
		if d, ok := v.(*jinja.Dict); ok {
			v, _ = d.Get("content")
		}
		if s, ok := v.(string); ok {
			l.special.Set(k, s)
		}
	}
	file, err := readFile(filepath.Join(dir, "chat_template.jinja"))
	if err != nil {
		return err
	}
	chat, tools := string(file), ""
	if chat == "" {
		v, _ := cfg.Get("chat_template")
		switch v := v.(type) {
		case string:
			chat = v
		case *jinja.List: // of {"name","template"}
			for _, e := range v.Items {
				d, ok := e.(*jinja.Dict)
				if !ok {
					continue
				}
				name, _ := d.Get("name")
				text, _ := d.Get("template")
				switch s, _ := text.(string); name {
				case "default":
					chat = s
				case "tool_use":
					tools = s
				}
			}
		}
	}
	if chat == "" {
		return errors.New("the model has no chat template")
	}
	if l.template, err = jinja.Parse(chat); err != nil {
		return err
	}
	if tools != "" {
		if l.toolTemplate, err = jinja.Parse(tools); err != nil {
			l.template = nil
			return err
		}
	}
	return nil
}

// Decoder appends the bytes of a token, none of a special one. It is nil where the
// file's decoder is not known exactly.
func (l *Local) Decoder() func(dst []byte, id uint32) (b []byte, ok bool) {
	if !l.tok.Decodes() {
		return nil
	}
	return func(dst []byte, id uint32) ([]byte, bool) { return l.tok.AppendBytes(dst, id, false) }
}

// TemplateError says why chats cannot be rendered locally, nil if they can.
func (l *Local) TemplateError() error { return l.templateErr }

// Prompt implements Tokenizer.
func (l *Local) Prompt(ctx context.Context, text string, addSpecial bool) (Result, error) {
	if err := ctx.Err(); err != nil {
		return Result{}, err
	}
	if len(text) > l.maxText {
		return Result{}, fmt.Errorf("tokenize: text of %d bytes: %w", len(text), ErrTooLarge)
	}
	return ids(l.tok, text, addSpecial, l.tok.AppendString), nil
}

// ids are the ids of a text, which add appends.
func ids[T string | []byte](tok *bpe.Tokenizer, text T, addSpecial bool, add func([]uint32, T) []uint32) Result {
	ids := make([]uint32, 0, len(text)/3+16)
	if addSpecial {
		ids = append(ids, tok.Prefix()...)
	}
	ids = add(ids, text)
	if addSpecial {
		ids = append(ids, tok.Suffix()...)
	}
	return Result{IDs: ids, Tokens: len(ids)}
}

// Chat implements Tokenizer: it renders the chat template and tokenizes the
// text, as POST /tokenize does.
func (l *Local) Chat(ctx context.Context, body []byte) (Result, error) {
	if err := ctx.Err(); err != nil {
		return Result{}, err
	}
	text, addSpecial, err := l.render(body)
	if err != nil {
		return Result{}, fmt.Errorf("tokenize chat: %w", err)
	}
	return ids(l.tok, text, addSpecial, l.tok.Append), nil
}

// render returns the text of a chat request's prompt.
func (l *Local) render(body []byte) (text []byte, addSpecial bool, err error) {
	if l.template == nil {
		return nil, false, fmt.Errorf("no usable chat template: %w: %w", ErrUnsupported, l.templateErr)
	}
	if len(body) > 2*l.maxText {
		return nil, false, fmt.Errorf("body of %d bytes: %w", len(body), ErrTooLarge)
	}
	req, err := parseChat(body)
	if err != nil {
		return nil, false, err
	}
	template := l.template
	if req.tools != nil && l.toolTemplate != nil {
		template = l.toolTemplate
	}
	vars, err := req.vars(template.LoopsOverContent(), l.special)
	if err != nil {
		return nil, false, err
	}
	text, err = template.Render(vars, l.maxText)
	if err != nil {
		// The engine may know better: a template that refuses a request there
		// too answers 400 itself.
		return nil, false, fmt.Errorf("%w: %w", ErrUnsupported, err)
	}
	return text, req.addSpecial, nil
}
