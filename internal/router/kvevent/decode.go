package kvevent

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"strings"
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
	set := func(p *int, def int) {
		if *p <= 0 {
			*p = def
		}
	}
	set(&l.Payload, 32<<20)
	set(&l.Events, 1<<16)
	set(&l.Blocks, 1<<18)
	set(&l.Tokens, 1<<22)
	set(&l.Text, 1<<10)
	return l
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
}

// Decode reads payload into b, whose former contents are overwritten. Events
// that cannot be understood are counted in b and stepped over; an error, which
// is ErrPayload, means that the payload as a whole is unreadable, and b is then
// empty.
func (d *Decoder) Decode(payload []byte, b *Batch) error {
	b.reset()
	d.lim, d.b = d.Limits.withDefaults(), b
	defer func() { d.b, d.extras, d.mm = nil, nil, nil }()
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
			if !c.skip() || !c.skip() {
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
	d.extras, d.mm = nil, nil
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
	switch e.Kind {
	case Stored:
		if present&(1<<fHashes|1<<fTokens) != 1<<fHashes|1<<fTokens {
			return errMissing
		}
		return d.foldExtras(e)
	case Removed:
		if present&(1<<fHashes) == 0 {
			return errMissing
		}
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
	fTail // told apart by type
	fGroup
	fCacheKind
	fWindow
	fSalt
	fSession
	fLocality
	fOwnership
)

// The positions of array events.
var (
	storedFields  = [...]field{fTag, fHashes, fParent, fTokens, fBlockSize, fLoRAID, fMedium, fLoRANameOrSalt, fExtraKeys, fTail, fTail, fTail, fTail}
	removedFields = [...]field{fTag, fHashes, fMedium, fGroup}
	clearedFields = [...]field{fTag, fMedium}
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
	}
	return fNone
}

func kindOf(tag []byte) Kind {
	switch string(tag) {
	case "BlockStored":
		return Stored
	case "BlockRemoved":
		return Removed
	case "AllBlocksCleared":
		return Cleared
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
	var table []field
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
	switch e.Kind {
	case Stored:
		table = storedFields[:]
	case Removed:
		table = removedFields[:]
	case Cleared:
		table = clearedFields[:]
	}
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

// tailField tells what the element at index i > 8 of a BlockStored is. vLLM has
// group, kind, window at 9, 10, 11; Dynamo's tolerant form puts a list first.
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

// value reads one field into e. It consumes the value whatever it is; the only
// error after which it has not is errTruncated.
func (d *Decoder) value(c *cursor, e *Event, f field) error {
	start := c.pos
	err := d.known(c, e, f)
	if err == nil {
		return nil
	}
	c.pos = start
	if !c.skip() {
		return errTruncated
	}
	return err
}

func (d *Decoder) known(c *cursor, e *Event, f field) error {
	switch f {
	case fHashes:
		return d.hashes(c, e)
	case fTokens:
		return d.tokens(c, e)
	case fParent:
		e.Parent, e.HasParent = 0, false
		if c.null() {
			return nil
		}
		h, ok := hash(c)
		if !ok {
			return errType
		}
		e.Parent, e.HasParent = h, h != 0
		return nil
	case fBlockSize:
		return int32Field(c, &e.BlockSize, 0)
	case fGroup:
		return int32Field(c, &e.Group, -1)
	case fWindow:
		return int32Field(c, &e.SlidingWindow, 0)
	case fLoRAID:
		return d.loraID(c, e)
	case fLoRANameOrSalt:
		if isMap(c.peek()) {
			return d.saltMap(c, e)
		}
		return d.text(c, &e.LoRAName)
	case fLoRAName:
		return d.text(c, &e.LoRAName)
	case fSalt:
		return d.text(c, &e.Salt)
	case fOwnership:
		return d.text(c, &e.Ownership)
	case fMedium:
		if err := d.text(c, &e.MediumName); err != nil {
			return err
		}
		e.Medium = mediumOf(e.MediumName)
		return nil
	case fCacheKind:
		return cacheKind(c, e)
	case fLocality:
		return locality(c, e)
	case fSession:
		return d.session(c, e)
	case fExtraKeys:
		return raw(c, &d.extras)
	case fTail:
		return raw(c, &d.mm)
	}
	if !c.skip() {
		return errTruncated
	}
	return nil
}

func int32Field(c *cursor, dst *int32, absent int32) error {
	*dst = absent
	if c.null() {
		return nil
	}
	v, neg, ok := c.integer()
	if !ok {
		return errType
	}
	if neg || v > math.MaxInt32 {
		return errRange
	}
	*dst = int32(v)
	return nil
}

// raw notes the bytes of a value that is read when the whole event is known.
func raw(c *cursor, dst *[]byte) error {
	start := c.pos
	if !c.skip() {
		return errTruncated
	}
	*dst = c.p[start:c.pos]
	return nil
}

// hash reads a block hash in canonical form; see Hash.
func hash(c *cursor) (Hash, bool) {
	b := c.peek()
	switch {
	case isBin(b):
		s, ok := c.bin()
		if !ok || len(s) == 0 {
			return 0, false
		}
		return lastBytes(s), true
	case isStr(b):
		s, ok := c.str()
		if !ok || len(s) == 0 {
			return 0, false
		}
		return textHash(s), true
	}
	v, _, ok := c.integer()
	return v, ok
}

func lastBytes(s []byte) uint64 {
	if len(s) >= 8 {
		return binary.BigEndian.Uint64(s[len(s)-8:])
	}
	var v uint64
	for _, b := range s {
		v = v<<8 | uint64(b)
	}
	return v
}

func textHash(s []byte) uint64 {
	if len(s) >= 16 {
		var v uint64
		for _, b := range s[len(s)-16:] {
			switch {
			case b >= '0' && b <= '9':
				b -= '0'
			case b >= 'a' && b <= 'f':
				b -= 'a' - 10
			case b >= 'A' && b <= 'F':
				b -= 'A' - 10
			default:
				return fnv1a(fnvOffset, s)
			}
			v = v<<4 | uint64(b)
		}
		return v
	}
	return fnv1a(fnvOffset, s)
}

func (d *Decoder) hashes(c *cursor, e *Event) error {
	n, ok := c.arrayLen()
	if !ok {
		return errType
	}
	if n > d.lim.Blocks {
		return errBlocks
	}
	e.Hashes = nil
	dst := d.b.hashes.take(n)
	for i := range dst {
		if p := c.p[c.pos:]; len(p) >= 9 && p[0] == 0xcf {
			dst[i] = binary.BigEndian.Uint64(p[1:9])
			c.pos += 9
			continue
		}
		if dst[i], ok = hash(c); !ok {
			d.b.hashes.untake(n)
			return errType
		}
	}
	e.Hashes = dst
	return nil
}

func (d *Decoder) tokens(c *cursor, e *Event) error {
	e.Tokens, e.Bigram = nil, false
	if c.null() {
		return nil
	}
	n, ok := c.arrayLen()
	if !ok {
		return errType
	}
	if n > d.lim.Tokens {
		return errTokens
	}
	dst := d.b.tokens.take(n)
	pairs := n > 0 && isArray(c.peek())
	i := 0
	if !pairs {
		i = tokenRun(c, dst)
	}
	for ; i < n; i++ {
		var err error
		if dst[i], err = token(c, pairs); err != nil {
			d.b.tokens.untake(n)
			return err
		}
	}
	e.Tokens, e.Bigram = dst, pairs
	return nil
}

// token reads one token id, or the first one of a pair.
func token(c *cursor, pair bool) (uint32, error) {
	if pair {
		if m, ok := c.arrayLen(); !ok || m != 2 {
			return 0, errType
		}
	}
	v, neg, ok := c.integer()
	if !ok {
		return 0, errType
	}
	if pair {
		if _, _, ok := c.integer(); !ok {
			return 0, errType
		}
	}
	if neg || v > math.MaxUint32 {
		return 0, errRange
	}
	return uint32(v), nil
}

// tokenRun reads tokens in their usual encodings while at least 5 bytes of input
// are left, and returns how many. This loop is where decoding spends its time.
func tokenRun(c *cursor, dst []uint32) int {
	p := c.p[c.pos:]
	i := 0
	for i < len(dst) && len(p) >= 5 {
		switch b := p[0]; {
		case b == 0xcd:
			dst[i] = uint32(binary.BigEndian.Uint16(p[1:3]))
			p = p[3:]
		case b == 0xce:
			dst[i] = binary.BigEndian.Uint32(p[1:5])
			p = p[5:]
		case b <= 0x7f:
			dst[i] = uint32(b)
			p = p[1:]
		case b == 0xcc:
			dst[i] = uint32(p[1])
			p = p[2:]
		default:
			c.pos = len(c.p) - len(p)
			return i
		}
		i++
	}
	c.pos = len(c.p) - len(p)
	return i
}

func (d *Decoder) loraID(c *cursor, e *Event) error {
	e.LoRAID, e.HasLoRAID = 0, false
	if c.null() {
		return nil
	}
	if isStr(c.peek()) { // an id that is a name serves as one
		var s string
		if err := d.text(c, &s); err != nil {
			return err
		}
		if e.LoRAName == "" {
			e.LoRAName = s
		}
		return nil
	}
	v, neg, ok := c.integer()
	if !ok {
		return errType
	}
	if !neg && v > math.MaxInt64 {
		return errRange
	}
	e.LoRAID, e.HasLoRAID = int64(v), true
	return nil
}

// saltMap reads the map that SGLang puts at index 7.
func (d *Decoder) saltMap(c *cursor, e *Event) error {
	n, ok := c.mapLen()
	if !ok {
		return errTruncated
	}
	for range n {
		key, ok := c.str()
		if !ok {
			return errType
		}
		if string(key) == "cache_salt" {
			if err := d.text(c, &e.Salt); err != nil {
				return err
			}
		} else if !c.skip() {
			return errTruncated
		}
	}
	return nil
}

// text reads a str or null; null is the empty string.
func (d *Decoder) text(c *cursor, dst *string) error {
	*dst = ""
	if c.null() {
		return nil
	}
	s, ok := c.str()
	if !ok {
		return errType
	}
	if len(s) > d.lim.Text {
		return errText
	}
	*dst = d.intern(s)
	return nil
}

// intern returns s as a string, from the table if it is there. A new string
// takes the place of whatever shared its slot: the table never grows.
func (d *Decoder) intern(s []byte) string {
	slot := &d.names[fnv1a(fnvOffset, s)%uint64(len(d.names))]
	if *slot != string(s) {
		*slot = string(s)
	}
	return *slot
}

func (d *Decoder) session(c *cursor, e *Event) error {
	e.SessionID = nil
	if c.null() {
		return nil
	}
	s, ok := c.str()
	if !ok {
		return errType
	}
	if len(s) > d.lim.Text {
		return errText
	}
	e.SessionID = d.b.text.take(len(s))
	copy(e.SessionID, s)
	return nil
}

func mediumOf(name string) Medium {
	switch {
	case name == "" || strings.EqualFold(name, "GPU"):
		return GPU
	case strings.EqualFold(name, "CPU") || strings.EqualFold(name, "CPU_PINNED"):
		return CPU
	case strings.EqualFold(name, "STORAGE") || strings.EqualFold(name, "DISK"):
		return Disk
	case strings.EqualFold(name, "EXTERNAL"):
		return External
	}
	return OtherMedium
}

func cacheKind(c *cursor, e *Event) error {
	e.CacheKind = CacheAbsent
	if c.null() {
		return nil
	}
	s, ok := c.str()
	if !ok {
		return errType
	}
	switch string(s) {
	case "full_attention", "mla_attention":
		e.CacheKind = FullAttention
	case "sliding_window", "sliding_window_mla":
		e.CacheKind = SlidingWindow
	case "mamba":
		e.CacheKind = Mamba
	default:
		e.CacheKind = OtherCache
	}
	return nil
}

func locality(c *cursor, e *Event) error {
	e.Locality = LocalityAbsent
	if c.null() {
		return nil
	}
	s, ok := c.str()
	if !ok {
		return errType
	}
	switch string(s) {
	case "LOCAL":
		e.Locality = Local
	case "REMOTE":
		e.Locality = Remote
	}
	return nil
}

const (
	fnvOffset = 14695981039346656037
	fnvPrime  = 1099511628211
)

// fnv1a continues the FNV-1a hash h over s.
func fnv1a(h uint64, s []byte) uint64 {
	for _, b := range s {
		h = (h ^ uint64(b)) * fnvPrime
	}
	return h
}
