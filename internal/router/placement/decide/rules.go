package decide

import "github.com/dynctl/dynctl/internal/workers"

// Rules is the version of MakePlan: it grows when an input can get another plan than
// before, unless that is by a new term of the cost, which recordings name. A recorded
// decision that comes out otherwise is then distinguished from one that a defect has
// changed. Version 1 chose the decode rank without a look at who could prefill for it, version 2
// without a look at which are slow, version 3 ranked by cost as if prompts were prefilled elsewhere
// wherever there was a prefill rank, though none could be chosen, version 4 kept prompts with images
// whole over NIXL and shared storage, too, and paired engines whose NIXL handshake fails. That a pair
// serves one
// model is in all versions: recordings from before the rule do not have workers' models.
const Rules = 5

// Capacity is the KV capacity of a rank of w in blocks of unit tokens; 0 when it is
// not known.
func Capacity(w *workers.Worker, unit int) int {
	if w.KVBlocks <= 0 || w.BlockSize <= 0 || unit <= 0 {
		return 0
	}
	return w.KVBlocks * w.BlockSize / unit
}
