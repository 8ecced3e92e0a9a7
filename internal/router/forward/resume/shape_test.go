package resume

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// apart reads a stream event by event and takes each one apart.
func apart(s *Stream, stream []byte) (out []byte, err error) {
	for len(stream) > 0 && err == nil {
		n := eventEnd(stream)
		if n == 0 {
			n = len(stream)
		}
		s.shape.forget()
		var piece []byte
		piece, err = s.Pass(bytes.Clone(stream[:n]))
		out = append(out, piece...)
		stream = stream[n:]
	}
	return out, err
}

// same fails unless two streams have read alike.
func same(t *testing.T, what []byte, a, b *Stream, gotA, gotB []byte, errA, errB error) {
	t.Helper()
	type facts struct {
		Out                   string
		Fails                 bool
		Refused               Refusal
		IDs                   []uint32
		Sure, Shown           int
		Tail                  string
		Finished, Done, Usage bool
	}
	of := func(s *Stream, got []byte, err error) facts {
		return facts{string(got), err != nil, s.refused, s.ids, s.sure, s.shown, string(s.tail), s.finished, s.done, s.usage}
	}
	if d := cmp.Diff(of(a, gotA, errA), of(b, gotB, errB), cmpopts.EquateEmpty()); d != "" {
		t.Fatalf("%q: %v and %v (-by shape +apart):\n%s", what, errA, errB, d)
	}
}

// TestShape: an event that is compared with the one before reads as one that is taken
// apart, whatever stands in it, at the first engine and at one that goes on.
func TestShape(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	texts := []string{"", "a", " the", `\"`, `\\`, `\\\"`, `\u00e9`, `\ud83d\ude00`, "é", "}]", `"`, "\n", `x","token_ids":[7],"y":"`, strings.Repeat("long ", 50)}
	lists := []string{"[1]", "[22]", "[4294967295]", "[4294967296]", "[1,2]", "[]", "null", "[-1]", "[007]", "[ 5 ]", "[99999999999]"}
	shapes := []string{
		`{"id":"%[3]s","object":"text_completion","created":%[4]d,"model":"m","choices":[{"index":0,"text":"%[1]s","logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":%[2]s}]}`,
		`{"id":"%[3]s","object":"chat.completion.chunk","created":%[4]d,"model":"m","choices":[{"index":0,"delta":{"content":"%[1]s"},"finish_reason":null,"token_ids":%[2]s}]}`,
		`{"id":"%[3]s","created":%[4]d,"choices":[{"token_ids":%[2]s,"text":"%[1]s","index":0}],"usage":{"prompt_tokens":3,"completion_tokens":1,"total_tokens":4}}`,
		`{"id":"%[3]s","created":%[4]d,"choices":[{"text":"%[1]s","finish_reason":"length","token_ids":%[2]s}]}`,
		`{"id":"%[3]s","created":%[4]d,"choices":[{"text":"%[1]s","token_ids":%[2]s},{"text":"%[1]s"}]}`,
		`{"id":"%[3]s","error":"%[1]s","choices":[{"text":"%[1]s","token_ids":%[2]s}]}`,
	}
	alike := 0
	for range 4000 {
		kind := shapes[min(rng.IntN(30), rng.IntN(len(shapes)))%len(shapes)]
		chat := strings.Contains(kind, "delta")
		event := func(id string, created int) string {
			k, text, list := kind, texts[rng.IntN(9)], lists[rng.IntN(3)]
			if rng.IntN(20) == 0 {
				k, text, list = shapes[rng.IntN(len(shapes))], texts[rng.IntN(len(texts))], lists[rng.IntN(len(lists))]
			}
			end := "\n\n"
			if rng.IntN(20) == 0 {
				end = "\r\n\r\n"
			}
			return "data: " + fmt.Sprintf(k, text, list, id, created) + end
		}
		keep := rng.IntN(2) == 0
		a, b := Stream{KeepIDs: keep, Chat: chat}, Stream{KeepIDs: keep, Chat: chat}
		engine := func(id string, created int) bool {
			first := fmt.Sprintf(`data: {"id":%q,"created":%d,"choices":[{"index":0,"text":"x","token_ids":[9],"prompt_token_ids":[5,6,7]}]}`+"\n\n", id, created)
			var whole strings.Builder
			whole.WriteString(first)
			for range rng.IntN(12) {
				whole.WriteString(event(id, created))
			}
			in := []byte(whole.String())
			gotA, errA := a.Pass(bytes.Clone(in))
			gotA = bytes.Clone(gotA)
			if len(a.shape.in[0]) > 0 {
				alike++
			}
			gotB, errB := apart(&b, in)
			same(t, in, &a, &b, gotA, gotB, errA, errB)
			return errA == nil
		}
		if !engine("one", 3) {
			continue
		}
		_, whyA := a.Next()
		if _, whyB := b.Next(); whyA != whyB {
			t.Fatalf("%q and %q", whyA, whyB)
		}
		if whyA == "" {
			engine("two", 44)
		}
	}
	if alike < 1000 {
		t.Errorf("%d streams had a shape", alike)
	}
}
