// Package reference says what is right: an engine that nothing is done to has the answers.
// How engines send tokens to clients, and how clients read them, is made independently of the
// simulator's front and of the router: what a stream that several engines had a part in is
// compared with.
package reference

import (
	"fmt"

	"github.com/dynctl/dynctl/internal/workers/sim"
	"github.com/dynctl/dynctl/internal/workers/sim/engine"
	"github.com/dynctl/dynctl/internal/workers/sim/virtual"
	"github.com/dynctl/dynctl/internal/workers/sim/vocab"
)

// Engine is that engine, with a world of its own.
type Engine struct {
	w    *virtual.World
	r    *virtual.Rank
	n    int
	said map[string]Answer
}

// Answer is the tokens of an answer and how it ends.
type Answer struct {
	Tokens []uint32
	Finish engine.Finish
}

// New is an engine like those of a group, with room for everything and no waiting.
func New(g sim.Group, words *vocab.Vocab) *Engine {
	g.Blocks, g.Profile, g.MaxSeqs = 256, "instant", 4
	ref := &Engine{w: virtual.NewWorld(), said: map[string]Answer{}}
	cfg, err := g.RankConfig(words, 1000, 0, 0)
	if err == nil {
		ref.r, err = ref.w.Add(cfg)
	}
	if err != nil {
		panic(err) // the group is ours
	}
	return ref
}

// Answer is the right answer to a prompt; on says that nothing but the limit ends it.
func (ref *Engine) Answer(prompt []uint32, limit int, on bool) Answer {
	key := fmt.Sprint(limit, on, prompt)
	if a, ok := ref.said[key]; ok {
		return a
	}
	var a Answer
	ref.n++
	err := ref.r.Submit(engine.Request{
		ID: fmt.Sprint(ref.n), Tokens: prompt, MaxTokens: limit, IgnoreEOS: on,
		Sink: func(o engine.Output) {
			if o.HasToken {
				a.Tokens = append(a.Tokens, o.Token)
			}
			if o.Finish != engine.Running {
				a.Finish = o.Finish
			}
		},
	})
	if err == nil {
		err = ref.w.Drain(200_000)
	}
	if err != nil {
		panic(err) // a prompt that fits the others fits here
	}
	ref.said[key] = a
	return a
}
