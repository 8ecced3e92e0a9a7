package lifecycle

import (
	"errors"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/router/forward/sse"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/placement/outputs"
	"github.com/dynctl/dynctl/internal/router/request/api"
	"github.com/dynctl/dynctl/internal/router/request/media"
	"github.com/dynctl/dynctl/internal/router/request/prompt"
	"github.com/dynctl/dynctl/internal/router/route"
)

// TestTokensByTenant: the engine's usage counts, and where it reports none what the router
// counted, marked so. What is unknown has no series.
func TestTokensByTenant(t *testing.T) {
	t.Parallel()
	left := Outcome{Status: api.StatusClientClosed, Err: &api.Error{Status: api.StatusClientClosed}}
	for _, c := range []struct {
		what     string
		streamed bool
		usage    sse.Usage
		source   route.Source
		end      Outcome
		want     string
	}{
		{"usage", true, sse.Usage{PromptTokens: 30, CompletionTokens: 7, CachedTokens: 16}, route.FromIDs, Outcome{Status: 200}, "cached engine 16, completion engine 7, prompt engine 30"},
		{"usage without cached tokens", false, sse.Usage{PromptTokens: 30, CompletionTokens: 7, CachedTokens: -1}, route.FromIDs, Outcome{Status: 200}, "completion engine 7, prompt engine 30"},
		{"a stream without usage", true, sse.Usage{PromptTokens: -1, CompletionTokens: -1, CachedTokens: -1}, route.FromIDs, Outcome{Status: 200}, "completion router 5, prompt router 32"},
		{"a stream whose client left", true, sse.Usage{PromptTokens: -1, CompletionTokens: -1, CachedTokens: -1}, route.FromIDs, left, "completion router 5, prompt router 32"},
		{"a prompt of unknown length", true, sse.Usage{PromptTokens: -1, CompletionTokens: -1, CachedTokens: -1}, route.FromNothing, Outcome{Status: 200}, "completion router 5"},
		{"a client that left before the answer", false, sse.Usage{PromptTokens: -1, CompletionTokens: -1, CachedTokens: -1}, route.FromIDs, left, ""},
		{"a failure", false, sse.Usage{}, route.FromIDs, Outcome{Status: 502, Err: &api.Error{Status: 502}}, ""},
	} {
		s := newStand(t, decide.Plan{Path: route.Local})
		s.To = NewStream(TokensByTenant(s.metrics))
		s.Tenant = "web"
		s.Routing.Prompt.ISL, s.Routing.Prompt.Source = 32, c.source
		leg := s.BeginLeg(route.Decode, s.peer, nil, time.Now())
		s.Answer.Of(leg)
		s.Answer.Unknown()
		if c.streamed {
			now := time.Now()
			leg.Streams(now, true)
			leg.Runs(1, now)
			s.Answer.Piece(now, 3)
			s.Answer.Piece(now, 1)
		}
		s.Answer.Learn(sse.Summary{Usage: c.usage})
		s.Ended(c.end)
		var got []string
		for _, m := range regexp.MustCompile(`(?m)^dynctl_tokens_total\{kind="(\w+)",model="m",source="(\w+)",tenant="web"\} (\d+)$`).FindAllStringSubmatch(s.page(), -1) {
			got = append(got, strings.Join(m[1:], " "))
		}
		if strings.Join(got, ", ") != c.want {
			t.Errorf("%s: %q, want %q", c.what, got, c.want)
		}
	}
	s := newStand(t, decide.Plan{})
	s.Record = Record{To: NewStream(TokensByTenant(s.metrics))} // refused before it was routed
	s.Ended(Outcome{Status: 401, Err: &api.Error{Status: 401}, Cause: errors.New("no key")})
	if strings.Contains(s.page(), "dynctl_tokens_total{") {
		t.Error("a refused request has tokens")
	}
}

// TestAnswerLengths: what an engine reports or the router counts of a good answer is learned,
// as the tokens of one of several answers.
func TestAnswerLengths(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		what             string
		n, prompts, used int
		err              *api.Error
		want             int
	}{
		{"one answer", 1, 1, 120, nil, 120},
		{"four answers to each of two prompts", 4, 2, 960, nil, 120},
		{"no usage", 1, 1, -1, nil, 0},
		{"a failure", 1, 1, 120, &api.Error{Status: 502}, 0},
	} {
		s := newStand(t, decide.Plan{Path: route.Local})
		lengths := outputs.New()
		s.To, s.Tenant = NewStream(AnswerLengths(lengths)), "web"
		s.Routing.Run.Criteria.Facts.N, s.Routing.Run.Criteria.Facts.Prompts = c.n, c.prompts
		s.Answer.Of(s.BeginLeg(route.Decode, s.peer, nil, time.Now()))
		s.Answer.Learn(sse.Summary{Usage: sse.Usage{CompletionTokens: int64(c.used)}})
		s.Ended(Outcome{Status: 200, Err: c.err})
		if got := lengths.Expect("m", "web"); got != c.want {
			t.Errorf("%s: %d, want %d", c.what, got, c.want)
		}
	}
}

// TestMediaLengths: what an engine counts beyond the estimate of the text is learned as media.
func TestMediaLengths(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		what string
		p    prompt.Prompt
		used int
		err  *api.Error
		want int
	}{
		{"two images", prompt.Prompt{Text: 100, Each: []int{1, 1}}, 700, nil, 300},
		{"ids of the engine", prompt.Prompt{Text: 100}, 700, nil, media.FirstGuess},
		{"a prompt that may be cut", prompt.Prompt{Text: 100, Each: []int{1, 1}, Truncated: true}, 700, nil, media.FirstGuess},
		{"no usage", prompt.Prompt{Text: 100, Each: []int{1, 1}}, -1, nil, media.FirstGuess},
		{"a failure", prompt.Prompt{Text: 100, Each: []int{1, 1}}, 700, &api.Error{Status: 502}, media.FirstGuess},
	} {
		s := newStand(t, decide.Plan{Path: route.Local})
		table := media.NewTable()
		s.To = NewStream(MediaLengths(table))
		s.Routing.Model, s.Routing.Prompt = "m", c.p
		s.Routing.Prompt.Has[api.MediaImage] = 2
		s.Answer.Of(s.BeginLeg(route.Decode, s.peer, nil, time.Now()))
		s.Answer.Learn(sse.Summary{Usage: sse.Usage{PromptTokens: int64(c.used)}})
		s.Ended(Outcome{Status: 200, Err: c.err})
		if got, _ := table.Expect("m", api.MediaImage); got != c.want {
			t.Errorf("%s: %d, want %d", c.what, got, c.want)
		}
	}
}
