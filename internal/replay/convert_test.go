package replay

import (
	"bytes"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/router/cache/kvevent"
	"github.com/dynctl/dynctl/internal/router/observe/trace"
)

// TestEveryKindOfEventIsConverted: what a KV event of each kind is in Dynamo's format.
func TestEveryKindOfEventIsConverted(t *testing.T) {
	t.Parallel()
	tokens := make([]uint32, testBlock)
	rows := map[kvevent.Kind]struct {
		event kvevent.Event
		want  trace.Op // "" for none
		why   string   // there is none
	}{
		kvevent.Stored:  {event: kvevent.Event{Hashes: []uint64{1}, Tokens: tokens, BlockSize: testBlock}, want: trace.Stored},
		kvevent.Removed: {event: kvevent.Event{Hashes: []uint64{1}}, want: trace.Removed},
		kvevent.Cleared: {want: trace.Cleared},
	}
	for kind := kvevent.Unknown + 1; kind.String() != kvevent.Unknown.String(); kind++ {
		row, ok := rows[kind]
		if !ok || row.want == "" && row.why == "" {
			t.Errorf("nothing is said here of events of kind %s: say in events (convert.go) what one becomes, and here what that is, or why it becomes nothing", kind)
			continue
		}
		row.event.Kind, row.event.Group = kind, -1
		raw, err := trace.AppendHeader(nil, trace.Header{Source: "test", Start: time.Unix(1_800_000_000, 0)})
		if err != nil {
			t.Fatal(err)
		}
		batch := kvevent.Batch{TS: 1, Rank: -1, Events: []kvevent.Event{row.event}}
		if raw, err = trace.AppendRecord(raw, &trace.Record{Kind: trace.KindBatch, Rank: rankName(0), Batch: trace.Batch{Payload: kvevent.AppendBatch(nil, &batch, kvevent.Encoding{})}}); err != nil {
			t.Fatal(err)
		}
		open := func(p []byte) func() (*trace.Reader, error) {
			return func() (*trace.Reader, error) { return trace.NewReader(bytes.NewReader(p), "t", trace.Options{}) }
		}
		var out bytes.Buffer
		if _, err := Convert(open(raw), &out, ConvertOptions{To: trace.DynamoEvents}); err != nil {
			t.Fatalf("%s: %v", kind, err)
		}
		var got trace.Op
		if out.Len() > 0 {
			r, err := open(out.Bytes())()
			if err != nil {
				t.Fatal(err)
			}
			for rec, err := range r.All() {
				if err != nil {
					t.Fatal(err)
				}
				got = rec.Event.Op
			}
			r.Close()
		}
		if got != row.want {
			t.Errorf("an event of kind %s becomes %q, want %q: see events in convert.go", kind, got, row.want)
		}
	}
}
