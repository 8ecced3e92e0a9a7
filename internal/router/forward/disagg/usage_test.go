package disagg

import (
	"encoding/json"
	"strings"
	"testing"
)

// recounted passes an answer through in two pieces.
func recounted(answer string, cut, cached int) (string, *Usage) {
	u := &Usage{Cached: func() int { return cached }}
	out := string(u.Pass([]byte(answer[:cut])))
	out += string(u.Pass([]byte(answer[cut:])))
	return out + string(u.Rest()), u
}

// TestUsage: the prefill's count goes into each form of usage, wherever the answer is split,
// and not one other byte changes.
func TestUsage(t *testing.T) {
	for name, c := range map[string]struct {
		in, out string
		own     int // -1 for no change
	}{
		"completion":  {`{"text":"a \"usage\":{","usage":{"prompt_tokens":1024,"completion_tokens":4,"prompt_tokens_details":{"audio":null,"cached_tokens":1023}},"z":1}`, `{"text":"a \"usage\":{","usage":{"prompt_tokens":1024,"completion_tokens":4,"prompt_tokens_details":{"audio":null,"cached_tokens":640}},"z":1}`, 1023},
		"stream":      {"data: {\"usage\": null}\n\ndata: {\"usage\" : { \"prompt_tokens\": 700, \"completion_tokens\": 1, \"prompt_tokens_details\": {\"cached_tokens\": 0} }}\n\ndata: [DONE]\n\n", "data: {\"usage\": null}\n\ndata: {\"usage\" : { \"prompt_tokens\": 700, \"completion_tokens\": 1, \"prompt_tokens_details\": {\"cached_tokens\": 640} }}\n\ndata: [DONE]\n\n", 0},
		"twice":       {`{"usage":{"input_tokens":4,"output_tokens":1,"cache_read_input_tokens":1020}} {"usage":{"input_tokens":4,"output_tokens":2,"cache_read_input_tokens":1020}}`, `{"usage":{"input_tokens":384,"output_tokens":1,"cache_read_input_tokens":640}} {"usage":{"input_tokens":384,"output_tokens":2,"cache_read_input_tokens":640}}`, 1020},
		"written":     {`{"usage":{"cache_creation_input_tokens":30,"input_tokens":900,"output_tokens":1,"cache_read_input_tokens":0}}`, `{"usage":{"cache_creation_input_tokens":30,"input_tokens":260,"output_tokens":1,"cache_read_input_tokens":640}}`, 0},
		"responses":   {`{"response":{"usage":{"input_tokens":1024,"output_tokens":4,"input_tokens_details":{"cached_tokens":1023}}}}`, `{"response":{"usage":{"input_tokens":1024,"output_tokens":4,"input_tokens_details":{"cached_tokens":640}}}}`, 1023},
		"equal":       {`{"usage":{"prompt_tokens":1024,"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":640}},"z":1}`, `{"usage":{"prompt_tokens":1024,"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":640}},"z":1}`, 640},
		"equal read":  {`{"usage":{"input_tokens":384,"output_tokens":1,"cache_read_input_tokens":640}}`, `{"usage":{"input_tokens":384,"output_tokens":1,"cache_read_input_tokens":640}}`, 640},
		"no details":  {in: `{"usage":{"prompt_tokens":1024,"completion_tokens":4,"prompt_tokens_details":null}}`, own: -1},
		"too short":   {in: `{"usage":{"prompt_tokens":639,"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":3}}}`, own: -1},
		"short rest":  {in: `{"usage":{"input_tokens":600,"output_tokens":4,"cache_read_input_tokens":39}}`, own: -1},
		"no usage":    {in: `{"tools":{"usage":{"prompt_tokens_details":{"cached_tokens":3}}}}`, own: -1},
		"other value": {in: `["usage","usage":"x","usage":[1],"usage`, own: -1},
		"no end":      {in: `{"usage":{"prompt_tokens":1024,"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":3}`, own: -1},
		"very large":  {in: `{"usage":{"x":"` + strings.Repeat("y", 2*maxUsage) + `","prompt_tokens":1024`, own: -1},
	} {
		if c.own < 0 {
			c.out = c.in
		}
		for cut := range len(c.in) {
			got, u := recounted(c.in, cut, 640)
			if got != c.out || u.Replaced != (c.own >= 0) || u.Replaced && u.Own != c.own {
				t.Fatalf("%s, split after %d: %s (replaced %v, own %d), want %s", name, cut, got, u.Replaced, u.Own, c.out)
			}
			if got, u = recounted(c.in, cut, -1); got != c.in || u.Replaced {
				t.Fatalf("%s, split after %d, count unknown: %s", name, cut, got)
			}
		}
	}
}

// TestUsageOfPiecesWithoutOne: most pieces have no usage, and cost no memory.
func TestUsageOfPiecesWithoutOne(t *testing.T) {
	u, p := &Usage{Cached: func() int { return 640 }}, []byte("data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"x\"}}]}\n\n")
	if n := testing.AllocsPerRun(100, func() {
		if got := u.Pass(p); &got[0] != &p[0] || len(got) != len(p) {
			t.Fatal("a piece was copied")
		}
	}); n > 0 {
		t.Errorf("%v allocations for each piece", n)
	}
}

// FuzzUsage: where an answer is split does not matter, and what was JSON stays JSON.
func FuzzUsage(f *testing.F) {
	f.Add(`{"usage":{"prompt_tokens":1024,"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":1023}}}`, uint16(20), uint16(640))
	f.Add(`{"usage":{"input_tokens":4,"output_tokens":1,"cache_read_input_tokens":1020}}`, uint16(9), uint16(3))
	f.Add(`{"a":"\"usage\":{","usage":{}`, uint16(5), uint16(0))
	f.Fuzz(func(t *testing.T, answer string, at, cached uint16) {
		if len(answer) > maxUsage { // a larger usage passes as it is when it comes in pieces
			return
		}
		whole, _ := recounted(answer, 0, int(cached))
		if got, _ := recounted(answer, min(int(at), len(answer)), int(cached)); got != whole {
			t.Errorf("%q in two pieces, %q in one", got, whole)
		}
		if json.Valid([]byte(answer)) && !json.Valid([]byte(whole)) {
			t.Errorf("%q became %q", answer, whole)
		}
	})
}
