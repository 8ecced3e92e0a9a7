package kvevent

import (
	"cmp"
	"errors"
	"fmt"
	"math"
)

// ErrPayload marks a payload that is not a batch of events: broken msgpack, or
// a well-formed value of another shape.
var ErrPayload = errors.New("kvevent: unreadable batch")

// Reasons why an event is skipped.
var (
	errShape     = errors.New("kvevent: event is neither an array nor a map")
	errTag       = errors.New("kvevent: event without a readable tag")
	errType      = errors.New("kvevent: field of an unexpected type")
	errRange     = errors.New("kvevent: number out of range")
	errMissing   = errors.New("kvevent: required field is missing")
	errBlocks    = errors.New("kvevent: more blocks in one event than the limit")
	errTokens    = errors.New("kvevent: more tokens in one event than the limit")
	errText      = errors.New("kvevent: string longer than the limit")
	errTruncated = errors.New("kvevent: truncated or invalid msgpack")
)

// Limits bound what one payload can make a Batch hold; a zero field means its
// default. Memory follows the payload too: at most 8 bytes per byte in arrays.
type Limits struct {
	// Payload is the largest payload in bytes (32 MiB), Events the largest
	// number of events in it (65,536). A payload beyond them is an error.
	Payload, Events int
	// Blocks and Tokens are the largest numbers of them in one event (262,144
	// and 4,194,304), Text the longest string in bytes (1,024). An event beyond
	// them is skipped.
	Blocks, Tokens, Text int
}

func (l Limits) withDefaults() Limits {
	return Limits{
		Payload: cmp.Or(max(l.Payload, 0), 32<<20),
		Events:  cmp.Or(max(l.Events, 0), 1<<16),
		Blocks:  cmp.Or(max(l.Blocks, 0), 1<<18),
		Tokens:  cmp.Or(max(l.Tokens, 0), 1<<22),
		Text:    cmp.Or(max(l.Text, 0), 1<<10),
	}
}

// Decoder decodes payloads. The zero value has the default limits. It is for one
// goroutine at a time; it keeps a small table of the strings it met, so that
// repeated names cost no allocation.
type Decoder struct {
	Limits Limits

	names  [256]string
	lim    Limits
	b      *Batch // in work
	extras []byte // the raw extra_keys of the event in work
	mm     []byte // the raw block_mm_infos of the event in work
	ahead  []byte // the raw lookahead_token_ids of the event in work
	wide   []wideToken
	items  []Item // of the event in work
	others bool   // there is more than items in its extra keys
}

// Decode reads payload into b, whose former contents are overwritten. Events
// that cannot be understood are counted in b and stepped over; an error, which
// is ErrPayload, means that the payload as a whole is unreadable, and b is then
// empty.
func (d *Decoder) Decode(payload []byte, b *Batch) error {
	b.reset()
	d.lim, d.b = d.Limits.withDefaults(), b
	defer func() { d.b, d.extras, d.mm, d.ahead = nil, nil, nil, nil }()
	if len(payload) > d.lim.Payload {
		return fmt.Errorf("%w: %d bytes, at most %d", ErrPayload, len(payload), d.lim.Payload)
	}
	c := cursor{p: payload}
	err := d.batch(&c, b)
	if err == nil && c.pos != len(payload) {
		err = fmt.Errorf("%d bytes after the end", len(payload)-c.pos)
	}
	if err != nil {
		b.reset()
		return fmt.Errorf("%w: %w", ErrPayload, err)
	}
	return nil
}

func (d *Decoder) batch(c *cursor, b *Batch) error {
	if isMap(c.peek()) {
		return d.mapBatch(c, b)
	}
	n, ok := c.arrayLen()
	if !ok {
		return errors.New("neither an array nor a map")
	}
	if n < 2 {
		return fmt.Errorf("array of %d elements", n)
	}
	if b.TS, ok = c.number(); !ok {
		return errors.New("timestamp is not a number")
	}
	if err := d.events(c, b); err != nil {
		return err
	}
	if n > 2 && !rank(c, b) {
		return errTruncated
	}
	for i := 3; i < n; i++ {
		if !c.skip() {
			return errTruncated
		}
	}
	return nil
}

func (d *Decoder) mapBatch(c *cursor, b *Batch) error {
	n, ok := c.mapLen()
	if !ok {
		return errTruncated
	}
	found := false
	for range n {
		if !isStr(c.peek()) {
			if !c.skip() || !c.skip() { //nolint:staticcheck // key and value: each call moves on
				return errTruncated
			}
			continue
		}
		key, ok := c.str()
		if !ok {
			return errTruncated
		}
		switch string(key) {
		case "ts":
			if b.TS, ok = c.number(); !ok {
				return errors.New("timestamp is not a number")
			}
		case "events":
			if found {
				return errors.New("two lists of events")
			}
			found = true
			if err := d.events(c, b); err != nil {
				return err
			}
		case "data_parallel_rank", "attn_dp_rank", "dp_rank":
			if !rank(c, b) {
				return errTruncated
			}
		default:
			if !c.skip() {
				return errTruncated
			}
		}
	}
	if !found {
		return errors.New("map without events")
	}
	return nil
}

// rank reads a data parallel rank; what is not a plausible one counts as absent.
func rank(c *cursor, b *Batch) bool {
	if isInt(c.peek()) {
		v, neg, ok := c.integer()
		if ok && !neg && v <= math.MaxInt32 {
			b.Rank = int32(v)
		}
		return ok
	}
	return c.skip()
}

func (d *Decoder) events(c *cursor, b *Batch) error {
	if c.null() {
		return nil
	}
	n, ok := c.arrayLen()
	if !ok {
		return errors.New("no list of events")
	}
	if n > d.lim.Events {
		return fmt.Errorf("%d events, at most %d", n, d.lim.Events)
	}
	for range n {
		e := b.next()
		err := d.event(c, e)
		if err == errTruncated { //nolint:errorlint // own sentinel, never wrapped
			return err
		}
		if err == nil && e.Kind != Unknown {
			continue
		}
		b.Events = b.Events[:len(b.Events)-1]
		if err == nil {
			b.Unknown++
			continue
		}
		b.Skipped++
		if b.Reason == nil {
			b.Reason = err
		}
	}
	return nil
}

// event reads one event and always consumes the whole of it, unless it returns
// errTruncated. Kind Unknown without an error is an unknown tag.
func (d *Decoder) event(c *cursor, e *Event) error {
	d.extras, d.mm, d.ahead, d.wide, d.items, d.others = nil, nil, nil, d.wide[:0], d.items[:0], false
	var present fields
	var err error
	switch b := c.peek(); {
	case isArray(b):
		present, err = d.arrayEvent(c, e)
	case isMap(b):
		present, err = d.mapEvent(c, e)
	default:
		if !c.skip() {
			return errTruncated
		}
		return errShape
	}
	if err != nil {
		return err
	}
	if needs := kinds[e.Kind].needs; present&needs != needs {
		return errMissing
	}
	if e.Kind == Stored {
		return d.foldExtras(e)
	}
	return nil
}

// field is a field of any event, fields a set of them.
type (
	field  uint8
	fields uint32
)

const (
	fNone field = iota
	fTag
	fHashes
	fParent
	fTokens
	fBlockSize
	fLoRAID
	fMedium
	fLoRAName
	fLoRANameOrSalt
	fExtraKeys
	fTail // distinguished by type
	fGroup
	fCacheKind
	fWindow
	fSalt
	fSession
	fLocality
	fOwnership
	fAhead
)

func fieldOf(key []byte) field {
	switch string(key) {
	case "type":
		return fTag
	case "block_hashes":
		return fHashes
	case "parent_block_hash":
		return fParent
	case "token_ids":
		return fTokens
	case "block_size":
		return fBlockSize
	case "lora_id":
		return fLoRAID
	case "medium":
		return fMedium
	case "lora_name":
		return fLoRAName
	case "extra_keys":
		return fExtraKeys
	case "group_idx":
		return fGroup
	case "kv_cache_spec_kind":
		return fCacheKind
	case "kv_cache_spec_sliding_window":
		return fWindow
	case "cache_salt":
		return fSalt
	case "session_id":
		return fSession
	case "locality":
		return fLocality
	case "ownership":
		return fOwnership
	case "lookahead_token_ids":
		return fAhead
	}
	return fNone
}

func kindOf(tag []byte) Kind {
	for k := Unknown + 1; int(k) < len(kinds); k++ {
		if kinds[k].tag == string(tag) {
			return k
		}
	}
	return Unknown
}

func (d *Decoder) arrayEvent(c *cursor, e *Event) (fields, error) {
	n, ok := c.arrayLen()
	if !ok {
		return 0, errTruncated
	}
	if n == 0 {
		return 0, errTag
	}
	var bad error
	if isStr(c.peek()) {
		tag, ok := c.str()
		if !ok {
			return 0, errTruncated
		}
		e.Kind = kindOf(tag)
	} else {
		bad = errTag
		if !c.skip() {
			return 0, errTruncated
		}
	}
	table := kinds[e.Kind].array
	var present fields
	for i := 1; i < n; i++ {
		f := fNone
		if i < len(table) {
			f = table[i]
		}
		if f == fTail {
			f = tailField(c.peek(), i, present)
		}
		if err := d.value(c, e, f); err == errTruncated { //nolint:errorlint // own sentinel
			return 0, err
		} else if err != nil && bad == nil {
			bad = err
		}
		present |= 1 << f
	}
	return present, bad
}

// tailField returns which field the element at index i > 8 of a BlockStored is.
// vLLM has group, kind, window at 9, 10, 11; Dynamo's tolerant form puts a list
// first.
func tailField(b byte, i int, present fields) field {
	switch {
	case isArray(b):
		return fTail
	case isStr(b):
		if present&(1<<fCacheKind) != 0 {
			return fNone
		}
		return fCacheKind
	case isInt(b):
		if present&(1<<fWindow) != 0 {
			return fNone
		}
		if i >= 11 || present&(1<<fCacheKind|1<<fGroup) != 0 {
			return fWindow
		}
		return fGroup
	}
	return fNone
}

func (d *Decoder) mapEvent(c *cursor, e *Event) (fields, error) {
	n, ok := c.mapLen()
	if !ok {
		return 0, errTruncated
	}
	var present fields
	var bad error
	for range n {
		f := fNone
		if isStr(c.peek()) {
			key, ok := c.str()
			if !ok {
				return 0, errTruncated
			}
			f = fieldOf(key)
		} else if !c.skip() {
			return 0, errTruncated
		}
		if f == fTag {
			if !isStr(c.peek()) {
				bad = errTag
				if !c.skip() {
					return 0, errTruncated
				}
				continue
			}
			tag, ok := c.str()
			if !ok {
				return 0, errTruncated
			}
			e.Kind = kindOf(tag)
		} else if err := d.value(c, e, f); err == errTruncated { //nolint:errorlint // own sentinel
			return 0, err
		} else if err != nil && bad == nil {
			bad = err
		}
		present |= 1 << f
	}
	if present&(1<<fTag) == 0 {
		return 0, errTag
	}
	if e.Kind == Unknown {
		// Whatever its fields are, they are not the ones known here.
		return 0, nil
	}
	return present, bad
}
