package kvevent

import (
	"cmp"
	"encoding/binary"
	"math"
	"strings"
)

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
		return d.medium(c, e)
	case fCacheKind:
		return d.cacheKind(c, e)
	case fLocality:
		return locality(c, e)
	case fSession:
		return d.session(c, e)
	case fExtraKeys:
		return raw(c, &d.extras)
	case fTail:
		return raw(c, &d.mm)
	case fAhead:
		return raw(c, &d.ahead)
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
	e.Tokens, e.Bigram, d.wide = nil, false, d.wide[:0]
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
		id, err := token(c, pairs)
		if err != nil {
			d.b.tokens.untake(n)
			return err
		}
		if id > math.MaxUint32 {
			if len(d.wide) == maxWide {
				d.b.tokens.untake(n)
				return errRange
			}
			d.wide = append(d.wide, wideToken{i, id})
			id = math.MaxUint32
		}
		dst[i] = uint32(id)
	}
	e.Tokens, e.Bigram = dst, pairs
	return nil
}

// wideToken is a token id of more than 32 bits, and its place in the event.
type wideToken struct {
	at int
	id uint64
}

const (
	// maxWide bounds the token ids of more than 32 bits in one event, maxAhead the tokens
	// after a block that its name covers.
	maxWide  = 1 << 18
	maxAhead = 64
)

// token reads one token id, or the first one of a pair.
func token(c *cursor, pair bool) (uint64, error) {
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
	if neg {
		return 0, errRange
	}
	return v, nil
}

// tokenRun reads tokens in their usual encodings while at least 5 bytes of input
// are left, and returns how many. Here and in mixedRun decoding spends its time.
func tokenRun(c *cursor, dst []uint32) int {
	p := c.p[c.pos:]
	i := 0
	for i < len(dst) && len(p) >= 5 {
		switch b := p[0]; {
		case b == 0xcd:
			dst[i] = uint32(binary.BigEndian.Uint16(p[1:3]))
			p = p[3:]
		case b <= 0x7f:
			dst[i] = uint32(b)
			p = p[1:]
		case b == 0xcc:
			dst[i] = uint32(p[1])
			p = p[2:]
		case b == 0xce:
			c.pos = len(c.p) - len(p)
			return i + mixedRun(c, dst[i:])
		default:
			c.pos = len(c.p) - len(p)
			return i
		}
		i++
	}
	c.pos = len(c.p) - len(p)
	return i
}

// mixedRun is tokenRun for a vocabulary that needs four bytes. There ids of two
// and of four bytes follow each other at random, and a branch between them is
// mispredicted so often that reading both by the same steps takes half the time.
func mixedRun(c *cursor, dst []uint32) int {
	p, pos := c.p, c.pos
	i := 0
	for i < len(dst) && pos+5 <= len(p) {
		q := p[pos : pos+5]
		b := q[0]
		if wide := b - 0xcd; wide <= 1 { // 0xcd: 2 bytes, 0xce: 4
			dst[i] = binary.BigEndian.Uint32(q[1:5]) >> (16 - 16*wide&31)
			pos += 3 + 2*int(wide)
		} else if b <= 0x7f {
			dst[i] = uint32(b)
			pos++
		} else if b == 0xcc {
			dst[i] = uint32(q[1])
			pos += 2
		} else {
			break
		}
		i++
	}
	c.pos = pos
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
		e.LoRAName = cmp.Or(e.LoRAName, s)
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
	s, err := d.short(c)
	if len(s) > 0 {
		*dst = d.intern(s)
	}
	return err
}

// short reads a str of limited length; null is none.
func (d *Decoder) short(c *cursor) ([]byte, error) {
	if c.null() {
		return nil, nil
	}
	s, ok := c.str()
	switch {
	case !ok:
		return nil, errType
	case len(s) > d.lim.Text:
		return nil, errText
	}
	return s, nil
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
	s, err := d.short(c)
	if s == nil {
		return err
	}
	e.SessionID = d.b.text.take(len(s))
	copy(e.SessionID, s)
	return nil
}

func (d *Decoder) medium(c *cursor, e *Event) error {
	s, err := d.short(c)
	if string(s) == gpuName { // nearly every event; each of a thousand removals says it
		e.MediumName, e.Medium = gpuName, GPU
		return nil
	}
	e.MediumName = ""
	if len(s) > 0 {
		e.MediumName = d.intern(s)
	}
	e.Medium = mediumOf(e.MediumName)
	return err
}

// gpuName is how vLLM names the device's own memory.
const gpuName = "GPU"

func mediumOf(name string) Medium {
	switch {
	case name == "" || strings.EqualFold(name, gpuName):
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

func (d *Decoder) cacheKind(c *cursor, e *Event) error {
	e.CacheKind, e.CacheName = CacheAbsent, ""
	s, err := d.short(c)
	if err != nil {
		return err
	}
	switch string(s) {
	case "":
	case "full_attention", "mla_attention", "sink_full_attention":
		e.CacheKind = FullAttention
	case "sliding_window", "sliding_window_mla":
		e.CacheKind = SlidingWindow
	case "mamba":
		e.CacheKind = Mamba
	case "chunked_local_attention":
		e.CacheKind = ChunkedLocal
	default:
		e.CacheKind, e.CacheName = OtherCache, d.intern(s)
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
