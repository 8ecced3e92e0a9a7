// Package route is the vocabulary of routing: the words that the groups of the router
// share. It says what phase of a request a rank runs, where its prompt is prefilled and
// why, how its length is known, and what a rank is called. It has names and their parsing,
// no decisions, and imports nothing of this module, so that every layer may use it.
package route

import "fmt"

// Phase says which work of a request a rank is chosen for.
type Phase string

// The phases.
const (
	Prefill    Phase = "prefill"
	Decode     Phase = "decode"
	Aggregated Phase = "aggregated"
)

// Path says where the prompt is prefilled.
type Path string

// The paths.
const (
	Local  Path = "local"
	Remote Path = "remote"
)

// Force is a wish for a path from outside (header X-Dynctl-Path).
type Force string

// The wishes; the empty Force is ForceAuto.
const (
	ForceAuto   Force = "auto"
	ForceLocal  Force = "local"
	ForceRemote Force = "remote"
)

// ParseForce reads a wish; the empty string is ForceAuto.
func ParseForce(s string) (Force, error) {
	switch f := Force(s); f {
	case "":
		return ForceAuto, nil
	case ForceAuto, ForceLocal, ForceRemote:
		return f, nil
	}
	return "", fmt.Errorf("unknown path %q (one of auto, local, remote)", s)
}

// Source says where a prompt's length comes from.
type Source string

// The sources, from the surest to none at all.
const (
	FromIDs      Source = "ids"      // the client sent token ids
	FromEngine   Source = "engine"   // an engine tokenized the prompt
	FromLocal    Source = "local"    // the router's own tokenizer did
	FromEstimate Source = "estimate" // code points / 4
	FromNothing  Source = "none"
)

// Counted reports whether the length is that of the prompt's tokens, not an estimate.
func (s Source) Counted() bool { return s == FromIDs || s == FromEngine || s == FromLocal }

// RankLabel is the name of a rank everywhere that ranks are shown or recorded: its worker
// and its data-parallel number.
func RankLabel(worker string, dp int) string { return fmt.Sprintf("%s/dp%d", worker, dp) }
