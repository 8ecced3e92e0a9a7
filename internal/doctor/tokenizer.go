package doctor

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/router/observe/receipt"
)

// texts are what tokenizers like to disagree about.
var texts = []string{
	"The quick brown fox jumps over the lazy dog.", "  leading and trailing  ", "naïve café — “quotes” … €5", "日本語のテキスト、混ぜて。", "def f(x):\n\treturn x ** 2  # square\n",
	"1234567890 3.14159 0x7fff", "emoji 👩‍👩‍👧‍👦 and flags 🇨🇭", "CamelCase snake_case kebab-case", "https://example.org/a?b=c&d=%20e", "\n\n\nnew\r\nlines\n", "Привет, мир", "ﬁ ligature ½ Ⅷ", "a", "<|im_start|>user\nhi<|im_end|>",
	`{"json": [1, 2, {"x": null}]}`, strings.Repeat("word ", 200), strings.Repeat("=", 80), "it's we'll I'd they've", "ＦＵＬＬ width", "\u200bzero\u200bwidth",
}

// tokenizer compares the router's count of tokens with each engine's.
func (e *exam) tokenizer(ctx context.Context, own bool) {
	if !own {
		e.add("tokenizer", "router", Skip, "no worker answers /tokenize", "")
		return
	}
	agree, total, source := 0, 0, ""
	var differ []string
	for _, text := range texts {
		a, err := e.o.Target.Admin.Route(ctx, admin.RouteRequest{Model: e.facts.Model, Prompt: text})
		if err != nil {
			e.add("tokenizer", "router", Skip, "the dry run of a text failed: "+err.Error(), "")
			return
		}
		var r receipt.Receipt
		if json.Unmarshal(a.Receipt, &r) != nil {
			e.add("tokenizer", "router", Skip, "the router's receipt is not understood", "")
			return
		}
		source = r.Inputs.ISLSource
		for i := range e.facts.Workers {
			w := &e.facts.Workers[i]
			if !w.Usable || !slices.Contains(w.Models, e.facts.Model) {
				continue
			}
			ids, err := e.o.Target.Tokenize(ctx, w.URL, e.facts.Model, text)
			if err != nil {
				continue
			}
			total++
			if len(ids) == r.Inputs.ISL {
				agree++
			} else if len(differ) < 3 {
				differ = append(differ, fmt.Sprintf("%q: router %d, %s %d", short(text), r.Inputs.ISL, w.Name, len(ids)))
			}
		}
	}
	switch {
	case total == 0:
		e.add("tokenizer", "engines", Skip, "no engine answers /tokenize", "")
	case agree == total:
		e.add("tokenizer", "router", OK, fmt.Sprintf("counts agree with the engines' %d/%d (source %s)", agree, total, source), "")
	case source == "estimate" || source == "none":
		e.add("tokenizer", "router", Warn, fmt.Sprintf("the router estimates: %d of %d counts differ from the engines', as %s", total-agree, total, strings.Join(differ, "; ")), "give --tokenizer-path, or --tokenizer engine")
	default:
		e.add("tokenizer", "router", Fail, fmt.Sprintf("%d of %d counts differ from the engines' (source %s): %s", total-agree, total, source, strings.Join(differ, "; ")), "cached prefixes will not be found: use the model's own tokenizer file")
	}
}

func short(s string) string {
	if r := []rune(s); len(r) > 24 {
		return string(r[:24]) + "…"
	}
	return s
}
