package router

import (
	"fmt"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/dynctl/dynctl/internal/router/api"
	"github.com/dynctl/dynctl/internal/router/attempt"
	"github.com/dynctl/dynctl/internal/router/blockhash"
	"github.com/dynctl/dynctl/internal/router/decision"
	"github.com/dynctl/dynctl/internal/router/disagg"
	"github.com/dynctl/dynctl/internal/router/kvindex"
	"github.com/dynctl/dynctl/internal/router/ledger"
	"github.com/dynctl/dynctl/internal/router/prompt"
	"github.com/dynctl/dynctl/internal/router/selector"
	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/workers"
)

// defaultBlock is the block size in tokens while no engine has told its own.
const defaultBlock = 16

// routing is the part of the settings that decisions read, in the types of the
// stages.
type routing struct {
	prefill, decode selector.Policy
	weights         selector.Weights
	busy            selector.Busy
	plan            disagg.Config
	connectors      map[workers.Connector]disagg.Connector
	// blind says that no decision looks at caches.
	blind bool
}

func newEffective(c settings.Config, origin map[string]string, revision uint64) (*effective, error) {
	s := &effective{Config: c, origin: origin, revision: revision}
	r := &c.Routing
	var err error
	if s.proxies, err = c.Proxies(); err != nil {
		return nil, err
	}
	s.routing.prefill, s.routing.decode = r.Policies()
	looks := func(p selector.Policy) bool { return p == selector.KV || p == selector.KVDynamo }
	s.routing.blind = !looks(s.routing.prefill) && !looks(s.routing.decode) && r.Busy.PrefillTokens == 0 && r.PrefillGate == 0 &&
		(r.Threshold <= 0 || r.ThresholdOn == string(disagg.OnISL))
	s.routing.weights, s.routing.busy, s.routing.plan = r.Weights, r.Busy, r.Plan()
	o := disagg.Options{FirstToken: true}
	if r.DecoderRegistry != "" {
		if o.Decoders, err = disagg.ParseDecoderRegistry([]byte(r.DecoderRegistry), nil); err != nil {
			return nil, fmt.Errorf("routing.decoder_registry: %w", err)
		}
	}
	s.routing.connectors = map[workers.Connector]disagg.Connector{}
	for _, k := range workers.Connectors() {
		if s.routing.connectors[k], err = disagg.NewConnector(k, o); err != nil {
			return nil, err
		}
	}
	return s, nil
}

// blockOf is the block size in which the router names a worker's blocks.
func (s *effective) blockOf(w *workers.Worker) int {
	switch own := s.Tokens.BlockSize; {
	case own > 0 && (w.BlockSize == 0 || w.BlockSize%own == 0):
		return own
	case w.BlockSize > 0:
		return w.BlockSize
	default:
		return defaultBlock
	}
}

// hashes are the block names of one prompt at one block size, and who holds
// them.
type hashes struct {
	blockSize   int
	locals, seq []uint64
}

// overlaps is who holds the blocks of a prompt at one block size.
type overlaps struct {
	exact kvindex.Query // from KV events
	guess kvindex.Query // from what was sent
}

// question is everything that a decision is made from. It is reused from
// request to request.
type question struct {
	settings *effective
	fleet    *workers.Snapshot
	model    string
	lora     string
	list     []*workers.Worker

	prompt prompt.Prompt
	ids    []uint32
	// chunked says that blocks are text chunks, not tokens.
	chunked bool
	views   []hashes
	used    int

	asked time.Time // when the index was about to be asked
	in    disagg.Input
	plan  disagg.Plan
	// chosen are the peers of a settled plan.
	chosen [2]disagg.Peer
	// The memory in which in and plan, ids and views stand; nil while it is
	// not held.
	ranked *ranked
	hashed *hashed

	// dry asks without changing anything.
	dry bool
	// chances are those of the decode and of the prefill phase, once taken.
	chances [2]chance
	taken   bool
	// pins of this request, and what became of its attempts.
	pinDecode, pinPrefill string // worker names
	pinRank               int    // -1 for any
	history               attempt.History
	// fallback is why remote prefill was given up in this request.
	fallback string
	took     stageTimes
}

// chance is what a choice depends on besides what is known: the request's turn
// in a phase's round-robin sequence, and its random number.
type chance struct{ turn, draw uint64 }

// stageTimes is the router's own time in its stages.
type stageTimes struct{ read, parse, tokenize, hash, overlap, plan time.Duration }

// ranked is the memory of a decision's candidates, their overlaps and their
// ranking: 100 KB in a fleet of 256 ranks. A request has it while it is decided,
// not while its engine works.
type ranked struct {
	overlaps []overlaps // by view
	in       disagg.Input
	plan     disagg.Plan
}

// hashed is the memory of a prompt's ids and hashes.
type hashed struct {
	ids   []uint32
	views []hashes
}

var (
	rankings = sync.Pool{New: func() any { return new(ranked) }}
	prompts  = sync.Pool{New: func() any { return new(hashed) }}
)

// reset makes the decision empty. It must hold no memory.
func (d *question) reset() {
	d.history.Reset()
	*d = question{history: d.history, pinRank: -1}
	d.plan.DecodeIndex, d.plan.PrefillIndex = -1, -1
}

// release gives all memory back.
func (d *question) release() {
	d.giveRanking()
	d.giveHashes()
	d.reset()
}

// takeHashes gets memory for ids and hashes.
func (d *question) takeHashes() {
	if d.hashed == nil {
		d.hashed = prompts.Get().(*hashed)
		d.ids, d.views, d.used = d.hashed.ids[:0], d.hashed.views, 0
	}
}

func (d *question) giveHashes() {
	m := d.hashed
	if m == nil {
		return
	}
	m.ids, m.views = d.ids, d.views
	if cap(m.ids) > maxKeep {
		m.ids = nil
	}
	for i := range m.views {
		if h := &m.views[i]; cap(h.locals) > maxKeep/4 {
			h.locals, h.seq = nil, nil
		}
	}
	d.hashed, d.ids, d.views, d.used = nil, nil, nil, 0
	prompts.Put(m)
}

// takeRanking gets memory for candidates.
func (d *question) takeRanking() {
	if d.ranked == nil {
		d.ranked = rankings.Get().(*ranked)
		d.in, d.plan = d.ranked.in, d.ranked.plan
	}
}

// settled keeps of a plan that can be carried out what was chosen and its
// figures, and gives the rest back.
func (d *question) settled() {
	if d.ranked == nil || d.plan.Err != nil {
		return
	}
	p := d.plan
	kept := disagg.Plan{
		Path: p.Path, Reason: p.Reason, EffISL: p.EffISL, Threshold: p.Threshold, On: p.On,
		CachedTokens: p.CachedTokens, PrefillCached: p.PrefillCached, Connector: p.Connector,
		DecodeIndex: -1, PrefillIndex: -1, Local: p.Local, Remote: p.Remote, HasRemote: p.HasRemote,
	}
	var in disagg.Input
	in.Decode.BlockSize, in.Prefill.BlockSize = d.in.Decode.BlockSize, d.in.Prefill.BlockSize
	if p.DecodeIndex >= 0 {
		d.chosen[0], kept.DecodeIndex = d.in.DecodePeers[p.DecodeIndex], 0
		in.DecodePeers = d.chosen[:1]
	}
	if p.PrefillIndex >= 0 {
		d.chosen[1], kept.PrefillIndex = d.in.PrefillPeers[p.PrefillIndex], 0
		in.PrefillPeers = d.chosen[1:2]
	}
	d.giveRanking() // another request may have it from here on
	d.in, d.plan = in, kept
}

func (d *question) giveRanking() {
	m := d.ranked
	if m == nil {
		return
	}
	m.in = disagg.Input{
		Decode: selector.Input{Candidates: d.in.Decode.Candidates[:0]}, DecodePeers: d.in.DecodePeers[:0],
		Prefill: selector.Input{Candidates: d.in.Prefill.Candidates[:0]}, PrefillPeers: d.in.PrefillPeers[:0],
	}
	m.plan = d.plan
	d.ranked, d.in, d.plan = nil, disagg.Input{}, disagg.Plan{DecodeIndex: -1, PrefillIndex: -1}
	rankings.Put(m)
}

// view finds or makes the hashes of a block size.
func (d *question) view(blockSize int) *hashes {
	for i := range d.views[:d.used] {
		if d.views[i].blockSize == blockSize {
			return &d.views[i]
		}
	}
	if d.used == len(d.views) {
		d.views = append(d.views, hashes{})
	}
	h := &d.views[d.used]
	d.used++
	h.blockSize, h.locals, h.seq = blockSize, h.locals[:0], h.seq[:0]
	return h
}

// hash names the prompt's blocks at every block size of the candidates.
func (r *Router) hash(d *question, v *api.View) {
	start := time.Now()
	key := blockhash.Key{LoRA: d.lora, Salt: v.CacheSalt}
	d.takeHashes()
	d.used = 0
	d.chunked = d.prompt.IDs == nil && d.prompt.Source == disagg.FromEstimate
	switch {
	case d.chunked && d.settings.routing.blind:
		// Guesses that nobody asks for are not worth reading the prompt.
	case d.chunked:
		// A text chunk stands for the tokens it is estimated to have.
		bytes := d.settings.Tokens.ChunkBytes
		h := d.view(max(1, bytes/4))
		h.locals = blockhash.TextChunksKey(h.locals, v.PromptValue.Of(v.Body), bytes, key)
		h.seq = blockhash.Chain(h.seq, h.locals)
	default:
		for _, w := range d.list {
			size := d.settings.blockOf(w)
			if h := d.view(size); len(h.locals) == 0 {
				h.locals = blockhash.Locals(h.locals, d.prompt.IDs, size, key)
				h.seq = blockhash.Chain(h.seq, h.locals)
			}
		}
	}
	d.took.hash = time.Since(start)
}

// ask finds who holds the prompt's blocks.
func (r *Router) ask(d *question) {
	d.asked = time.Now()
	for len(d.ranked.overlaps) < d.used {
		d.ranked.overlaps = append(d.ranked.overlaps, overlaps{})
	}
	for i := range d.views[:d.used] {
		locals, o := d.views[i].locals, &d.ranked.overlaps[i]
		if !d.chunked {
			r.index.Overlap(locals, &o.exact)
		}
		r.guesses.Overlap(locals, &o.guess)
	}
	d.took.overlap += time.Since(d.asked)
}

// decide asks the index and fills the plan. It may be called again after ranks
// were banned.
func (r *Router) decide(d *question, facts disagg.Facts, force disagg.Force, session uint64) {
	d.takeRanking()
	r.ask(d)
	start := time.Now()
	s := d.settings
	d.in.Config, d.in.Facts, d.in.Force = s.routing.plan, facts, force
	unit := math.MaxInt
	for i := range d.views[:d.used] {
		unit = min(unit, d.views[i].blockSize)
	}
	if unit == math.MaxInt {
		unit = defaultBlock
	}
	first := !d.taken
	r.take(d)
	phase := func(in *selector.Input, peers *[]disagg.Peer, p selector.Phase, policy selector.Policy, own chance) {
		in.Phase, in.Policy, in.Weights, in.Busy = p, policy, s.routing.weights, s.routing.busy
		in.ISL, in.BlockSize, in.SessionKey = facts.ISL, unit, session
		in.Draw, in.Turn = own.draw, own.turn
		r.collect(d, p, unit, in, peers)
		if r.readmit(d, p, in) {
			r.collect(d, p, unit, in, peers)
		}
	}
	phase(&d.in.Decode, &d.in.DecodePeers, selector.Decode, s.routing.decode, d.chances[0])
	phase(&d.in.Prefill, &d.in.PrefillPeers, selector.Prefill, s.routing.prefill, d.chances[1])
	d.in.Settle()
	disagg.Make(&d.in, &d.plan)
	if first && !d.dry && d.plan.Path != disagg.Remote {
		// No prefill rank is used, so the turn is the next request's, unless
		// that has one already.
		turn := d.chances[1].turn
		r.turns[1].CompareAndSwap(turn+1, turn)
	}
	d.took.plan += time.Since(start)
}

// take gives a request its turns and random numbers, once: its retries go on
// from where it began, and shift nobody else's turn. A dry run sees those of the
// next request and takes none.
func (r *Router) take(d *question) {
	switch {
	case d.taken:
		return
	case d.dry:
		d.chances = [2]chance{{turn: r.turns[0].Load()}, {turn: r.turns[1].Load()}}
	default:
		d.chances = [2]chance{{turn: r.turns[0].Add(1) - 1}, {turn: r.turns[1].Add(1) - 1}}
	}
	d.chances[0].draw, d.chances[1].draw = r.rng.pair(!d.dry)
	d.taken = true
}

// collect lists the ranks that can do a phase.
func (r *Router) collect(d *question, p selector.Phase, unit int, in *selector.Input, peers *[]disagg.Peer) {
	in.Candidates, *peers = in.Candidates[:0], (*peers)[:0]
	for _, w := range d.list {
		if can(w, p) {
			r.candidates(d, w, p, unit, in, peers)
		}
	}
}

func can(w *workers.Worker, p selector.Phase) bool {
	if p == selector.Prefill {
		return w.Role.CanPrefill()
	}
	return w.Role.CanDecode()
}

// ejected reports whether nothing but its ejection keeps a worker from use.
func ejected(w *workers.Worker) bool {
	return !w.State.Draining() && w.State.Condition().Health == workers.Ejected
}

// readmit brings ejected workers back when a phase has nobody else. It reports
// whether it did.
func (r *Router) readmit(d *question, p selector.Phase, in *selector.Input) (changed bool) {
	for i := range in.Candidates {
		if in.Candidates[i].KeptOut == "" {
			return false
		}
	}
	for _, w := range d.list {
		if pin := d.pin(p); d.dry || pin != "" && pin != w.Name {
			continue
		}
		if ok, _ := w.State.Usable(); ok || !can(w, p) || !ejected(w) {
			continue
		}
		if _, out := d.history.Banned(w.State, p); out {
			continue
		}
		r.outliers.Last(w)
		changed = true
	}
	return changed
}

// pin is the worker that was asked for; "" for any.
func (d *question) pin(p selector.Phase) string {
	if p == selector.Prefill {
		return d.pinPrefill
	}
	return d.pinDecode
}

// candidates adds the ranks of a worker to a phase.
func (r *Router) candidates(d *question, w *workers.Worker, p selector.Phase, unit int, in *selector.Input, peers *[]disagg.Peer) {
	excluded := ""
	if ok, why := w.State.Usable(); !ok {
		excluded = why
	}
	why, tried := d.history.Banned(w.State, p)
	if tried {
		excluded = why
	}
	if pin := d.pin(p); pin != "" && w.Name != pin && excluded == "" {
		excluded = "another worker was asked for"
	}
	size := d.settings.blockOf(w)
	for _, k := range w.Ranks {
		c := decision.Candidate{Rank: k.Label, Slot: k.Slot, KeptOut: excluded, Tried: tried}
		if p == selector.Decode && d.pinRank >= 0 && k.DP != d.pinRank && c.KeptOut == "" {
			c.KeptOut = "another rank was asked for"
		}
		c.OverlapBlocks = r.overlapOf(d, k, size) / unit
		l := r.ledger.Load(k)
		fillLoad(&c, k, l)
		c.ResidentBlocks = r.residentBlocks(k)
		if w.KVBlocks > 0 && w.BlockSize > 0 {
			c.KVBlocks = w.KVBlocks * w.BlockSize / unit
		}
		in.Candidates = append(in.Candidates, c)
		*peers = append(*peers, disagg.Peer{Worker: w, Rank: k})
	}
}

func fillLoad(c *decision.Candidate, k *workers.Rank, l ledger.Load) {
	c.ActiveRequests, c.PrefillTokens, c.DecodeBlocks = l.Requests, l.PrefillTokens, l.DecodeBlocks
	c.FreshTokens, c.LastTurn, c.KVUsage = l.Fresh, l.LastTurn, -1
	if e := k.Load(); e != nil && e.Told() {
		c.HasLoad = true
		c.Running, c.Waiting, c.KVUsage = max(0, e.Running), max(0, e.Waiting), e.KVUsage
	}
}

// overlapOf is how many leading tokens of the prompt a rank is known, or where
// its engine tells no events is guessed, to hold.
func (r *Router) overlapOf(d *question, k *workers.Rank, size int) int {
	slot := kvindex.Rank(k.Slot)
	if d.chunked {
		if d.used == 0 {
			return 0
		}
		return d.ranked.overlaps[0].guess.Depth(slot) * d.views[0].blockSize
	}
	for i := range d.views[:d.used] {
		if d.views[i].blockSize != size {
			continue
		}
		o := &d.ranked.overlaps[i]
		if r.fleet.Fed(k) {
			return r.feeds.Usable(slot, o.exact.Depth(slot)) * size
		}
		return o.guess.Depth(slot) * size
	}
	return 0
}

func (r *Router) residentBlocks(k *workers.Rank) int {
	if s, ok := r.index.RankStats(kvindex.Rank(k.Slot)); ok {
		return int(s.Blocks)
	}
	return 0
}

// sent notes for approximate routing that a prompt went to a rank.
func (r *Router) sent(d *question, w *workers.Worker, k *workers.Rank, now time.Time) {
	if !d.chunked && r.fleet.Fed(k) {
		return
	}
	size := d.settings.blockOf(w)
	for i := range d.views[:d.used] {
		if h := &d.views[i]; d.chunked || h.blockSize == size {
			r.guesses.Sent(kvindex.Rank(k.Slot), k.Number, h.locals, h.seq, now)
			return
		}
	}
}

// loraOf is the model's name if it is an adapter on the workers that serve it.
func loraOf(model string, list []*workers.Worker) string {
	for _, w := range list {
		if slices.Contains(w.LoRAs, model) {
			return model
		}
	}
	return ""
}
