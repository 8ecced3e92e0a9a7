package trace

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strconv"
	"time"

	"github.com/dynctl/dynctl/internal/router/placement/decide"
)

// AppendHeader appends the first line of an own trace. Rules and terms are those of
// this program unless they are set.
func AppendHeader(dst []byte, h Header) ([]byte, error) {
	h.Schema = Schema
	if h.Rules == 0 {
		h.Rules, h.Terms = decide.Rules, terms
	}
	p, err := appendLine(dst, h)
	if err != nil {
		return dst, fmt.Errorf("trace header: %w", err)
	}
	return p, nil
}

// AppendRecord appends the line of a record in the project's own format. It
// fails only on figures that JSON cannot hold and on a kind that there is not.
// Decisions need a Book.
func AppendRecord(dst []byte, r *Record) ([]byte, error) {
	start := len(dst)
	if r.Kind == KindOutcome {
		return AppendOutcome(dst, r.Time, r.Outcome), nil
	}
	o := begin(dst, r.Kind, r.Time.Microseconds())
	switch r.Kind {
	case KindRank:
		o.str("rank", r.Rank)
		o.uint("slot", uint64(r.RankInfo.Slot))
		o.some("block_size_tokens", r.RankInfo.BlockSize)
		o.some("kv_blocks", r.RankInfo.KVBlocks)
		o.yes("new", r.RankInfo.New)
		o.yes("kept", r.RankInfo.Kept)
		o.yes("once", r.RankInfo.IgnoreCopies)
		o.yes("last_block_dropped", r.RankInfo.Drops)
		o.some("chunk_tokens", r.RankInfo.Chunk)
		o.str("hash_algorithm", r.RankInfo.HashAlgorithm)
		o.str("hash_seed", r.RankInfo.HashSeed)
	case KindBatch:
		o.str("rank", r.Rank)
		o.uint("seq", r.Batch.Seq)
		o.int("at_us", int(r.Batch.Received.Microseconds()))
		o.yes("replayed", r.Batch.Replayed)
		o.p = append(o.p, `,"payload":"`...)
		o.p = base64.StdEncoding.AppendEncode(o.p, r.Batch.Payload)
		o.p = append(o.p, '"')
	case KindClear:
		o.str("rank", r.Rank)
		o.yes("anew", r.Clear.ForgotPublisher)
		o.str("reason", r.Clear.Reason)
	case KindFeed:
		o.str("rank", r.Rank)
		o.yes("trusted", r.Trusted)
	case KindEvent:
		o.str("rank", r.Rank)
		r.Event.appendTo(&o)
	case KindDropped:
		o.uint("records", r.Dropped)
	case KindRequest:
		return o.embed(r.Request, start)
	case KindEnd:
		return o.embed(r.End, start)
	default:
		return dst[:start], fmt.Errorf("trace: no record kind %q", r.Kind)
	}
	return append(o.p, '}', '\n'), nil
}

// embed appends the members of v, a struct, and ends the line.
func (o *object) embed(v any, start int) ([]byte, error) {
	p, err := json.Marshal(v)
	if err != nil {
		return o.p[:start], fmt.Errorf("trace: %w", err)
	}
	o.p = append(o.p, ',')
	o.p = append(o.p, p[1:]...)
	return append(o.p, '\n'), nil
}

func (e *Event) appendTo(o *object) {
	o.uint("id", e.ID)
	o.str("op", string(e.Op))
	o.str("tier", e.Tier)
	o.str("domain", e.Domain)
	o.str("session", e.Session)
	if e.Op == Stored {
		if e.HasParent {
			o.str("parent", fmt.Sprintf("%016x", e.Parent))
		}
		if e.Start >= 0 {
			o.int("start_block", int(e.Start))
		}
		o.key("locals")
		o.p = appendHashes(o.p, e.Locals)
	}
	if e.Op != Cleared {
		o.key("names")
		o.p = appendHashes(o.p, e.Names)
	}
	if len(e.Extra) > 0 {
		o.key("extra")
		o.p = append(o.p, e.Extra...)
	}
}

// line is every member of the small kinds.
type line struct {
	Kind            Kind            `json:"kind"`
	Time            int64           `json:"t_us"`
	Rank            string          `json:"rank"`
	Seq             uint64          `json:"seq"`
	At              int64           `json:"at_us"`
	Replayed        bool            `json:"replayed"`
	Payload         *string         `json:"payload"`
	ForgotPublisher bool            `json:"anew"`
	Reason          string          `json:"reason"`
	Trusted         bool            `json:"trusted"`
	ID              json.RawMessage `json:"id"` // a number in event, a string elsewhere
	Op              Op              `json:"op"`
	Tier            string          `json:"tier"`
	Domain          string          `json:"domain"`
	Session         string          `json:"session"`
	Parent          string          `json:"parent"`
	Start           *int64          `json:"start_block"`
	Locals          Hashes          `json:"locals"`
	Names           Hashes          `json:"names"`
	Extra           json.RawMessage `json:"extra"`
	Records         uint64          `json:"records"`
	Dropped         uint64          `json:"dropped"`
	RankInfo
}

// parseOwn reads a line of the project's own format. A kind that is not known
// is no error: the record is then empty.
func (r *Reader) parseOwn(p []byte, rec *Record) error {
	if r.fastBatch(p, rec) || r.fastEvent(p, rec) {
		return nil
	}
	var head struct {
		Kind   Kind   `json:"kind"`
		Time   *int64 `json:"t_us"`
		Schema string `json:"schema"`
	}
	if err := json.Unmarshal(p, &head); err != nil {
		return err
	}
	if head.Schema != "" {
		return r.restart(p)
	}
	if head.Kind == "" || head.Time == nil {
		return errors.New("a record without \"kind\" and \"t_us\"")
	}
	if err := rec.setTime(*head.Time); err != nil {
		return err
	}
	rec.Kind = head.Kind
	switch head.Kind {
	case KindRequest:
		rec.Request = new(Request)
		if err := json.Unmarshal(p, rec.Request); err != nil {
			return err
		}
		return rec.Request.check()
	case KindSettings, KindWorker, KindCosts:
		rec.Kind = "" // decisions have what they refer to
		switch head.Kind {
		case KindSettings:
			return r.parseSettings(p)
		case KindCosts:
			return r.parseCosts(p)
		}
		return r.parseWorker(p)
	case KindDecision:
		var err error
		rec.Decision, err = r.parseDecision(p)
		return err
	case KindOutcome:
		var err error
		rec.Outcome, err = parseOutcome(p)
		return err
	case KindEnd:
		rec.End = new(End)
		return json.Unmarshal(p, rec.End)
	case KindRank, KindBatch, KindClear, KindFeed, KindEvent, KindDropped:
	default:
		rec.Kind = ""
		r.stats.Unknown++
		return nil
	}
	var l line
	if err := json.Unmarshal(p, &l); err != nil {
		return err
	}
	rec.Rank = l.Rank
	if rec.Rank == "" && head.Kind != KindDropped {
		return fmt.Errorf("a %s record without \"rank\"", head.Kind)
	}
	switch head.Kind {
	case KindRank:
		rec.RankInfo = l.RankInfo
	case KindBatch:
		if l.Payload == nil {
			return errors.New("a kv record without \"payload\"")
		}
		raw, err := base64.StdEncoding.DecodeString(*l.Payload)
		if err != nil {
			return fmt.Errorf("payload: %w", err)
		}
		rec.Batch = Batch{Seq: l.Seq, Received: time.Duration(l.At) * time.Microsecond, Replayed: l.Replayed, Payload: raw}
	case KindClear:
		rec.Clear = Clear{ForgotPublisher: l.ForgotPublisher, Reason: l.Reason}
	case KindFeed:
		rec.Trusted = l.Trusted
	case KindEvent:
		return rec.setEvent(&l)
	case KindDropped:
		rec.Dropped = l.Records
	}
	return nil
}

func (rec *Record) setEvent(l *line) error {
	e := Event{Op: l.Op, Tier: l.Tier, Domain: l.Domain, Session: l.Session, Names: l.Names, Locals: l.Locals, Start: -1, Extra: l.Extra}
	if l.Start != nil {
		e.Start = *l.Start
	}
	if len(l.ID) > 0 {
		id, err := strconv.ParseUint(string(l.ID), 10, 64)
		if err != nil {
			return fmt.Errorf("event id: %w", err)
		}
		e.ID = id
	}
	if l.Parent != "" {
		v, err := strconv.ParseUint(l.Parent, 16, 64)
		if err != nil {
			return fmt.Errorf("parent: %w", err)
		}
		e.Parent, e.HasParent = v, true
	}
	rec.Event = e
	return e.check()
}

func (e *Event) check() error {
	switch e.Op {
	case Stored:
		if len(e.Names) != len(e.Locals) {
			return fmt.Errorf("a stored event with %d names and %d local hashes", len(e.Names), len(e.Locals))
		}
	case Removed, Cleared:
	default:
		return fmt.Errorf("an event that does %q", e.Op)
	}
	return nil
}

// maxTokens bounds the lengths of a request: beyond it is no context window
// that anyone has.
const maxTokens = 1 << 27

func (q *Request) check() error {
	switch {
	case q.ISL < 0 || q.ISL > maxTokens || q.OSL < 0 || q.OSL > maxTokens:
		return fmt.Errorf("a request of %d and an answer of %d tokens", q.ISL, q.OSL)
	case len(q.Blocks) > 0 && (q.BlockSize < 1 || q.BlockSize > maxTokens):
		return fmt.Errorf("blocks of %d tokens", q.BlockSize)
	case len(q.Blocks) > 0 && len(q.Blocks) > (q.ISL+q.BlockSize-1)/q.BlockSize:
		return fmt.Errorf("%d blocks of %d tokens in a prompt of %d tokens", len(q.Blocks), q.BlockSize, q.ISL)
	case len(q.Tokens) > 0 && len(q.Tokens) != q.ISL:
		return fmt.Errorf("%d token ids in a prompt of %d tokens", len(q.Tokens), q.ISL)
	case q.ThinkUS != nil && (*q.ThinkUS < 0 || *q.ThinkUS > maxTime.Microseconds()):
		return fmt.Errorf("a thinking time of %d µs: want 0 to 100 years", *q.ThinkUS)
	}
	switch q.IDs {
	case "", LocalIDs, PrefixIDs:
		return nil
	}
	return fmt.Errorf("block ids of kind %q", q.IDs)
}

// maxTime bounds the distance of a record from the trace's start, so that times can be
// added and subtracted.
const maxTime = 100 * 365 * 24 * time.Hour

// setTime sets the time in µs, which may be a little before the start.
func (rec *Record) setTime(us int64) error {
	if limit := maxTime.Microseconds(); us > limit || us < -limit {
		return fmt.Errorf("time %d µs is out of range: more than 100 years from the trace's start", us)
	}
	rec.Time = time.Duration(us) * time.Microsecond
	return nil
}

// scanner reads a line that was written by AppendRecord, member by member. Any
// other order or spacing makes it give up, and the general way is taken.
type scanner struct {
	p  []byte
	ok bool
}

func (s *scanner) lit(text string) bool {
	if len(s.p) >= len(text) && string(s.p[:len(text)]) == text {
		s.p = s.p[len(text):]
		return true
	}
	return false
}

func (s *scanner) want(text string) { s.ok = s.lit(text) && s.ok }

func (s *scanner) uint() uint64 {
	v, n := uint64(0), 0
	for n < len(s.p) && s.p[n] >= '0' && s.p[n] <= '9' {
		if v > (math.MaxUint64-9)/10 {
			s.ok = false
			return 0
		}
		v = v*10 + uint64(s.p[n]-'0')
		n++
	}
	s.ok = s.ok && n > 0
	s.p = s.p[n:]
	return v
}

func (s *scanner) time() time.Duration {
	neg := s.lit("-")
	v := s.uint()
	if v > math.MaxInt64/1000 {
		s.ok = false
		return 0
	}
	d := time.Duration(v) * time.Microsecond
	if neg {
		return -d
	}
	return d
}

// text reads up to the next quote; a backslash makes it give up.
func (s *scanner) text() []byte {
	i := bytes.IndexByte(s.p, '"')
	if i < 0 || bytes.IndexByte(s.p[:i], '\\') >= 0 {
		s.ok = false
		return nil
	}
	t := s.p[:i]
	s.p = s.p[i+1:]
	return t
}

// name is text that needs no decoding; for
// other bytes it gives up, so that encoding/json says what they are.
func (s *scanner) name() []byte {
	t := s.text()
	for _, c := range t {
		if c < 0x20 || c >= 0x80 {
			s.ok = false
		}
	}
	return t
}

// fastBatch reads a kv line as AppendRecord writes it.
func (r *Reader) fastBatch(p []byte, rec *Record) bool {
	s := scanner{p: p, ok: true}
	if !s.lit(`{"kind":"kv","t_us":`) {
		return false
	}
	at := s.time()
	s.want(`,"rank":"`)
	rank := s.name()
	s.want(`,"seq":`)
	seq := s.uint()
	s.want(`,"at_us":`)
	received := s.time()
	replayed := s.lit(`,"replayed":true`)
	s.want(`,"payload":"`)
	if !s.ok || len(s.p) < 2 || string(s.p[len(s.p)-2:]) != `"}` || len(rank) == 0 {
		return false
	}
	text := s.p[:len(s.p)-2]
	if n := base64.StdEncoding.DecodedLen(len(text)); cap(r.payload) < n {
		r.payload = make([]byte, n+n/2)
	}
	n, err := base64.StdEncoding.Decode(r.payload[:cap(r.payload)], text)
	if err != nil {
		return false
	}
	rec.Kind, rec.Time, rec.Rank = KindBatch, at, r.intern(rank)
	rec.Batch = Batch{Seq: seq, Received: received, Replayed: replayed, Payload: r.payload[:n]}
	return true
}

// fastEvent reads an event line of a full cache tier as AppendRecord writes it.
func (r *Reader) fastEvent(p []byte, rec *Record) bool {
	s := scanner{p: p, ok: true}
	if !s.lit(`{"kind":"event","t_us":`) {
		return false
	}
	e := Event{Start: -1}
	at := s.time()
	s.want(`,"rank":"`)
	rank := s.name()
	s.want(`,"id":`)
	e.ID = s.uint()
	s.want(`,"op":"`)
	op := s.text()
	switch string(op) {
	case string(Stored):
		e.Op = Stored
		if s.lit(`,"parent":"`) {
			v, err := strconv.ParseUint(string(s.text()), 16, 64)
			s.ok = s.ok && err == nil
			e.Parent, e.HasParent = v, true
		}
		if s.lit(`,"start_block":`) {
			v := s.uint()
			s.ok = s.ok && v < math.MaxInt64
			e.Start = int64(v)
		}
		s.want(`,"locals":"`)
		var err error
		r.locals, err = decodeHashes(r.locals[:0], s.text())
		s.ok = s.ok && err == nil
		e.Locals = r.locals
	case string(Removed):
		e.Op = Removed
	default:
		return false
	}
	s.want(`,"names":"`)
	var err error
	r.names, err = decodeHashes(r.names[:0], s.text())
	if !s.ok || err != nil || string(s.p) != "}" || len(rank) == 0 {
		return false
	}
	e.Names = r.names
	if e.check() != nil {
		return false
	}
	rec.Kind, rec.Time, rec.Rank, rec.Event = KindEvent, at, r.intern(rank), e
	return true
}
