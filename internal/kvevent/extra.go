package kvevent

import (
	"math"

	"github.com/dynctl/dynctl/internal/blockhash"
)

// foldExtras reads the extra_keys, block_mm_infos and lookahead_token_ids that were noted
// while the event was read: LoRA name and parent, which decide what a bare string means,
// may come after them in a map.
func (d *Decoder) foldExtras(e *Event) error {
	if d.extras != nil {
		if err := d.foldKeys(e); err != nil {
			return err
		}
	}
	if d.mm != nil {
		if err := d.foldInfos(e); err != nil {
			return err
		}
	}
	d.foldWide(e)
	if d.ahead != nil {
		if err := d.foldAhead(e); err != nil {
			return err
		}
	}
	if len(d.items) > 0 && !d.others && d.mm == nil && d.ahead == nil && len(d.wide) == 0 {
		e.Items = d.b.items.take(len(d.items))
		copy(e.Items, d.items)
	}
	for _, x := range e.ExtraKeys {
		if x != 0 {
			return nil
		}
	}
	e.ExtraKeys = nil
	return nil
}

// foldKeys reads vLLM's extra keys: per block the LoRA name, multimodal items as
// [identifier, offset] (before 0.17 or so: a bare identifier), on the first
// block of a prompt the salt, and hashes of prompt embeddings as bin. The last
// bare string of the first block without a parent is taken as the salt. On a
// version with bare identifiers that can be an image's: the block then matches
// only prompts with that salt, which undercounts and never overcounts.
func (d *Decoder) foldKeys(e *Event) error {
	c := cursor{p: d.extras}
	if c.null() {
		return nil
	}
	n, ok := c.arrayLen()
	if !ok {
		return errType
	}
	if n > d.lim.Blocks {
		return errBlocks
	}
	e.ExtraKeys = d.b.hashes.take(n)
	size := e.blockTokens()
	for i := range n {
		digest, err := d.foldBlock(&c, e, i, size)
		if err != nil {
			e.ExtraKeys = nil
			return err
		}
		e.ExtraKeys[i] = digest
	}
	return nil
}

// blockTokens is how many tokens each block of the event has, 0 where it does not say.
func (e *Event) blockTokens() int {
	if size := int(e.BlockSize); size > 0 || len(e.Hashes) == 0 {
		return size
	}
	return len(e.Tokens) / len(e.Hashes)
}

// foldBlock reads the keys of block number nth, of size tokens.
func (d *Decoder) foldBlock(c *cursor, e *Event, nth, size int) (uint64, error) {
	first := nth == 0 && !e.HasParent
	if c.null() {
		return 0, nil
	}
	if !isArray(c.peek()) { // a form not known yet still distinguishes blocks
		d.others = true
		return foldValue(c, 0)
	}
	n, ok := c.arrayLen()
	if !ok {
		return 0, errTruncated
	}
	salt := -1 // index of the salt
	if first && e.Salt == "" {
		probe := *c
		for i := range n {
			if !isStr(probe.peek()) {
				if !probe.skip() {
					return 0, errTruncated
				}
				continue
			}
			s, ok := probe.str()
			if !ok {
				return 0, errTruncated
			}
			if i > 0 || string(s) != e.LoRAName {
				salt = i
			}
		}
	}
	var digest uint64
	for i := range n {
		if isStr(c.peek()) {
			start := c.pos
			s, ok := c.str()
			switch {
			case !ok:
				return 0, errTruncated
			case i == 0 && string(s) == e.LoRAName, first && string(s) == e.Salt && salt < 0:
				continue // in fields of their own
			case i == salt:
				if len(s) > d.lim.Text {
					return 0, errText
				}
				e.Salt = d.intern(s)
				continue
			}
			c.pos = start
		}
		var err error
		if digest, err = d.foldKey(c, digest, e, nth*size, size); err != nil {
			return 0, err
		}
	}
	return digest, nil
}

// foldKey adds one key to a digest. A media item, [identifier, offset], counts as its values,
// however they are encoded, so that the digest can be computed for a prompt. The block has
// size tokens from from on.
func (d *Decoder) foldKey(c *cursor, digest uint64, e *Event, from, size int) (uint64, error) {
	probe := *c
	if n, ok := probe.arrayLen(); isArray(c.peek()) && ok && n == 2 && isStr(probe.peek()) {
		if id, ok := probe.str(); ok && isInt(probe.peek()) {
			if at, neg, ok := probe.integer(); ok && (neg || at <= math.MaxInt64) {
				*c = probe
				if begins := max(int(at), 0); begins < size && from+begins < len(e.Tokens) && !e.Bigram {
					e.Placeholder.See(e.Tokens[from+begins])
				}
				name := blockhash.MediaName(string(id))
				d.item(name, from, int(at))
				return blockhash.ExtraNamed(digest, name, int(at)), nil
			}
		}
	}
	d.others = true
	return foldValue(c, digest)
}

// item takes note of an item of the event, which begins at tokens behind from, where a block begins.
func (d *Decoder) item(name uint64, from, at int) {
	const far = 1 << 31
	if at < -far || at > far {
		d.others = true
		return
	}
	at += from
	if n := len(d.items); n > 0 {
		switch last := &d.items[n-1]; {
		case last.Name == name && last.At == at: // in the block before, too
			last.Last = from
			return
		case last.At >= at:
			d.others = true
			return
		}
	}
	d.items = append(d.items, Item{name, at, from})
}

// foldInfos adds the per-block multimodal infos of Dynamo's form to the digests.
func (d *Decoder) foldInfos(e *Event) error {
	c := cursor{p: d.mm}
	n, ok := c.arrayLen()
	if !ok {
		return errType
	}
	if n > d.lim.Blocks {
		return errBlocks
	}
	d.needDigests(e, n)
	for i := range n {
		if b := c.peek(); b == 0xc0 || b == 0x90 || b == 0x80 { // null or empty
			c.pos++
			continue
		}
		var err error
		if e.ExtraKeys[i], err = foldValue(&c, e.ExtraKeys[i]); err != nil {
			return err
		}
	}
	return nil
}

// needDigests makes the event have a digest for n blocks or more.
func (d *Decoder) needDigests(e *Event, n int) {
	if len(e.ExtraKeys) < n {
		digests := d.b.hashes.take(n)
		clear(digests[copy(digests, e.ExtraKeys):])
		e.ExtraKeys = digests
	}
}

// foldWide adds the token ids of more than 32 bits to the digests of their blocks.
func (d *Decoder) foldWide(e *Event) {
	size := e.blockTokens()
	if len(d.wide) == 0 || size == 0 {
		return
	}
	d.needDigests(e, (len(e.Tokens)+size-1)/size)
	for _, w := range d.wide {
		x := &e.ExtraKeys[w.at/size]
		*x = blockhash.ExtraWide(*x, w.at%size, w.id)
	}
}

// foldAhead adds the tokens after each block that its name covers (vLLM 0.33's
// lookahead_token_ids), of which all blocks have equally many.
func (d *Decoder) foldAhead(e *Event) error {
	c := cursor{p: d.ahead}
	if c.null() {
		return nil
	}
	n, ok := c.arrayLen()
	if !ok {
		return errType
	}
	if n > d.lim.Blocks {
		return errBlocks
	}
	d.needDigests(e, n)
	for i := range n {
		m, ok := c.arrayLen()
		if !ok {
			return errType
		}
		if m > maxAhead || i > 0 && m != int(e.Ahead) {
			return errRange
		}
		e.Ahead = int32(m)
		for range m {
			id, err := token(&c, false)
			if err != nil {
				return err
			}
			if id > math.MaxUint32 {
				return errRange
			}
			e.ExtraKeys[i] = blockhash.ExtraAhead(e.ExtraKeys[i], uint32(id))
		}
	}
	return nil
}

// foldValue continues digest, 0 at the start, over the msgpack bytes of the
// next value. The result is never 0.
func foldValue(c *cursor, digest uint64) (uint64, error) {
	start := c.pos
	if !c.skip() {
		return 0, errTruncated
	}
	if digest == 0 {
		digest = fnvOffset
	}
	if digest = fnv1a(digest, c.p[start:c.pos]); digest == 0 {
		digest = 1
	}
	return digest, nil
}
