package trace

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/dynctl/dynctl/internal/kvevent"
)

// dynamoLine is a line of Dynamo's KvRecorder: a RouterEvent with the
// milliseconds since the recorder's start (Dynamo 1.6; older files lack dp_rank,
// storage_tier and start_position).
type dynamoLine struct {
	Timestamp *int64       `json:"timestamp"`
	Event     *dynamoEvent `json:"event"`
}

type dynamoEvent struct {
	Worker  uint64 `json:"worker_id"`
	Tier    string `json:"storage_tier,omitempty"`
	Domain  string `json:"residency_domain,omitempty"`
	Session string `json:"session_id,omitempty"`
	Event   struct {
		ID   uint64          `json:"event_id"`
		DP   uint32          `json:"dp_rank"`
		Data json.RawMessage `json:"data"`
	} `json:"event"`
}

type dynamoData struct {
	Stored *struct {
		Parent *uint64       `json:"parent_hash"`
		Start  *int64        `json:"start_position"`
		Blocks []dynamoBlock `json:"blocks"`
	} `json:"stored"`
	Removed *struct {
		Hashes []uint64 `json:"block_hashes"`
	} `json:"removed"`
}

type dynamoBlock struct {
	Name  uint64          `json:"block_hash"`
	Local uint64          `json:"tokens_hash"`
	Extra json.RawMessage `json:"mm_extra_info"`
}

func (r *Reader) parseDynamoEvent(p []byte, rec *Record) error {
	var l dynamoLine
	if err := json.Unmarshal(p, &l); err != nil {
		return err
	}
	if l.Timestamp == nil || l.Event == nil {
		return errors.New("a recorder line without \"timestamp\" and \"event\"")
	}
	if err := rec.setTime(millis(*l.Timestamp)); err != nil {
		return err
	}
	d := l.Event
	e := Event{ID: d.Event.ID, Tier: d.Tier, Domain: d.Domain, Session: d.Session, Start: -1}
	data := bytes.TrimSpace(d.Event.Data)
	if string(data) == `"cleared"` {
		e.Op = Cleared
	} else {
		var v dynamoData
		if err := json.Unmarshal(data, &v); err != nil {
			return fmt.Errorf("event data: %w", err)
		}
		switch {
		case v.Stored != nil && v.Removed == nil:
			e.Op = Stored
			if v.Stored.Parent != nil {
				e.Parent, e.HasParent = *v.Stored.Parent, true
			}
			if v.Stored.Start != nil {
				e.Start = max(-1, *v.Stored.Start)
			}
			extra := false
			for _, b := range v.Stored.Blocks {
				e.Names = append(e.Names, b.Name)
				e.Locals = append(e.Locals, b.Local)
				extra = extra || len(b.Extra) > 0 && string(b.Extra) != "null"
			}
			if extra {
				all := make([]json.RawMessage, len(v.Stored.Blocks))
				for i, b := range v.Stored.Blocks {
					if all[i] = b.Extra; len(b.Extra) == 0 {
						all[i] = json.RawMessage("null")
					}
				}
				e.Extra, _ = json.Marshal(all) // what was decoded can be encoded
			}
		case v.Removed != nil && v.Stored == nil:
			e.Op, e.Names = Removed, v.Removed.Hashes
		default:
			return errors.New("event data that is neither stored, removed nor \"cleared\"")
		}
	}
	rec.Kind, rec.Event = KindEvent, e
	rec.Rank = dynamoRank(d.Worker, d.Event.DP)
	return nil
}

func dynamoRank(worker uint64, dp uint32) string { return fmt.Sprintf("worker-%d/dp%d", worker, dp) }

// millis is ms in µs; out of range stays so.
func millis(ms int64) int64 {
	if ms > math.MaxInt64/1000 || ms < math.MinInt64/1000 {
		return math.MaxInt64
	}
	return ms * 1000
}

// SplitRank takes a label "worker/dpN" apart; ok is false for another form.
func SplitRank(label string) (worker string, dp int, ok bool) {
	i := strings.LastIndex(label, "/dp")
	if i <= 0 {
		return label, 0, false
	}
	n, err := strconv.Atoi(label[i+3:])
	if err != nil || n < 0 {
		return label, 0, false
	}
	return label[:i], n, true
}

func appendLine(dst []byte, v any) ([]byte, error) {
	p, err := json.Marshal(v)
	if err != nil {
		return dst, err
	}
	return append(append(dst, p...), '\n'), nil
}

// dynamoRequest is a line of a Dynamo request trace.
type dynamoRequest struct {
	Schema  string `json:"schema"`
	Type    string `json:"event_type"`
	AtMS    int64  `json:"event_time_unix_ms"`
	Request *struct {
		ID         string `json:"request_id"`
		ReceivedMS *int64 `json:"request_received_ms"`
		Model      string `json:"model,omitempty"`
		OSL        int    `json:"output_tokens"`
		Replay     *struct {
			BlockSize int      `json:"trace_block_size"`
			ISL       int      `json:"input_length"`
			Hashes    []uint64 `json:"input_sequence_hashes"`
		} `json:"replay"`
	} `json:"request"`
}

func (r *Reader) parseDynamoRequest(p []byte, rec *Record) error {
	var l dynamoRequest
	if err := json.Unmarshal(p, &l); err != nil {
		return err
	}
	switch {
	case l.Schema != dynamoReqSchema:
		return fmt.Errorf("schema %q in a file of %s", l.Schema, dynamoReqSchema)
	case l.Type != "request_end":
		r.stats.Skipped++ // tool calls and the like
		return nil
	case l.Request == nil || l.Request.Replay == nil:
		return errors.New("a request_end without \"request\" and its \"replay\"")
	}
	q, v := l.Request, l.Request.Replay
	at := l.AtMS
	if q.ReceivedMS != nil && *q.ReceivedMS > 0 {
		at = *q.ReceivedMS
	}
	if !r.based {
		r.base, r.based = at, true
	}
	if err := rec.setTime(millis(at - r.base)); err != nil {
		return err
	}
	rec.Kind = KindRequest
	rec.Request = &Request{ID: q.ID, Model: q.Model, ISL: v.ISL, OSL: q.OSL, BlockSize: v.BlockSize, IDs: PrefixIDs, Blocks: v.Hashes}
	if len(v.Hashes) == 0 {
		rec.Request.BlockSize = 0
	}
	return rec.Request.check()
}

// mooncakeLine is a line of a Mooncake request trace (FAST'25 release); one
// hash id names a prefix of 512 tokens more, the last one may be partial.
type mooncakeLine struct {
	Timestamp *float64 `json:"timestamp"` // ms since the start
	ISL       *int     `json:"input_length"`
	OSL       *int     `json:"output_length"`
	Hashes    []uint64 `json:"hash_ids"`
	Session   any      `json:"session_id,omitempty"`
}

// mooncakeMembers are all that such a line may have; it must have the first four.
var mooncakeMembers = []string{"timestamp", "input_length", "output_length", "hash_ids", "session_id"}

// mooncake reads a line, which must have all members that Mooncake's lines have.
func mooncake(p []byte) (l mooncakeLine, err error) {
	if err := json.Unmarshal(p, &l); err != nil {
		return l, err
	}
	for i, missing := range []bool{l.Timestamp == nil, l.ISL == nil, l.OSL == nil, l.Hashes == nil} {
		if missing {
			return l, fmt.Errorf("a Mooncake line without %q", mooncakeMembers[i])
		}
	}
	return l, nil
}

func (r *Reader) parseMooncake(p []byte, rec *Record) error {
	l, err := mooncake(p)
	if err != nil {
		return err
	}
	rec.Request = &Request{ISL: *l.ISL, OSL: *l.OSL, BlockSize: mooncakeBlock, IDs: PrefixIDs, Blocks: l.Hashes}
	switch s := l.Session.(type) {
	case string:
		rec.Request.Session = s
	case float64:
		rec.Request.Session = strconv.FormatFloat(s, 'f', -1, 64)
	}
	return rec.setArrival(*l.Timestamp, time.Millisecond)
}

// setArrival makes a request record whose timestamp counts units from the trace's start.
func (rec *Record) setArrival(timestamp float64, unit time.Duration) error {
	us := timestamp * float64(unit/time.Microsecond)
	if !(us >= 0 && us <= float64(maxTime.Microseconds())) {
		return fmt.Errorf("timestamp %v (in units of %v since the trace's start) is out of range: before the start, or more than 100 years after it", timestamp, unit)
	}
	rec.Kind, rec.Time = KindRequest, time.Duration(timestamp*float64(unit))
	if len(rec.Request.Blocks) == 0 {
		rec.Request.BlockSize = 0
	}
	return rec.Request.check()
}

// bailianLine is a line of a request trace of Alibaba's Bailian
// (qwen-bailian-usagetraces-anon); one hash id stands for 16 tokens.
type bailianLine struct {
	Chat      *int64   `json:"chat_id"`
	Parent    *int64   `json:"parent_chat_id"` // -1 for a conversation's first request
	Timestamp *float64 `json:"timestamp"`      // s since the start
	ISL       *int     `json:"input_length"`
	OSL       *int     `json:"output_length"`
	Hashes    []uint64 `json:"hash_ids"`
}

// maxChats bounds the remembered requests of conversations in a Bailian trace. A request
// whose parent is not remembered begins a session of its own.
const maxChats = 1 << 20

func (r *Reader) parseBailian(p []byte, rec *Record) error {
	var l bailianLine
	if err := json.Unmarshal(p, &l); err != nil {
		return err
	}
	if l.Chat == nil || l.Timestamp == nil || l.ISL == nil || l.OSL == nil {
		return errors.New(`a Bailian line without "chat_id", "timestamp", "input_length" or "output_length"`)
	}
	first := *l.Chat
	if l.Parent != nil {
		if of, ok := r.chats[*l.Parent]; ok {
			first = of
		}
	}
	if len(r.chats) < maxChats {
		r.chats[*l.Chat] = first
	}
	// Ids of blocks by themselves or of prefixes: read as the former, both are right.
	rec.Request = &Request{
		ID: strconv.FormatInt(*l.Chat, 10), ISL: *l.ISL, OSL: *l.OSL, BlockSize: bailianBlock, IDs: LocalIDs, Blocks: l.Hashes,
		Session: strconv.FormatInt(first, 10),
	}
	return rec.setArrival(*l.Timestamp, time.Second)
}

// AppendMooncake appends a request record as a line of a Mooncake trace; its
// blocks must be prefix ids of 512 tokens.
func AppendMooncake(dst []byte, rec *Record) ([]byte, error) {
	q := rec.Request
	if rec.Kind != KindRequest || q == nil {
		return dst, fmt.Errorf("a %s record has no form in a Mooncake trace", rec.Kind)
	}
	if len(q.Blocks) > 0 && (q.BlockSize != mooncakeBlock || q.IDs != PrefixIDs) {
		return dst, fmt.Errorf("a Mooncake trace has prefix ids of %d tokens, not %s ids of %d", mooncakeBlock, q.IDs, q.BlockSize)
	}
	ms := float64(rec.Time.Microseconds()) / 1000
	l := mooncakeLine{Timestamp: &ms, ISL: &q.ISL, OSL: &q.OSL, Hashes: append([]uint64{}, q.Blocks...)}
	if q.Session != "" {
		l.Session = q.Session
	}
	return appendLine(dst, l)
}

// captureLine is one ZeroMQ message of a KV event socket, as it was received.
type captureLine struct {
	Source string   `json:"src"`
	AtNS   int64    `json:"recv_unix_ns"`
	Frames [][]byte `json:"frames_b64"`
}

func (r *Reader) parseCapture(p []byte, rec *Record) error {
	var l captureLine
	if err := json.Unmarshal(p, &l); err != nil {
		return err
	}
	if l.Source == "" || l.Frames == nil {
		return errors.New("a capture line without \"src\" and \"frames_b64\"")
	}
	if strings.HasPrefix(l.Source, "replay:") {
		r.stats.Skipped++ // the same batches once more
		return nil
	}
	_, seq, payload, err := kvevent.ParseLive(l.Frames)
	if err != nil {
		return err
	}
	if !r.based {
		r.base, r.based = l.AtNS, true
	}
	at := time.Duration(l.AtNS - r.base)
	rec.Kind, rec.Time = KindBatch, at
	rec.Rank = l.Source
	if _, _, ok := SplitRank(l.Source); !ok {
		rec.Rank += "/dp0"
	}
	rec.Batch = Batch{Seq: seq, Received: at, Payload: payload}
	return nil
}
