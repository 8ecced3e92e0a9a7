package control

import (
	"reflect"
	"testing"

	"github.com/dynctl/dynctl/internal/router/cache/kvfeed"
)

// unscraped are the counters of a feed that no metric shows, and why.
var unscraped = map[string]string{
	"Connects":        "goes up with every good connection; what goes wrong is counted by itself",
	"Duplicates":      "harmless: batches that a replay and the live socket both brought",
	"Missing":         "part of a gap; those that stayed missing are counted as lost",
	"Replays":         "a quiet publisher is asked all the time",
	"ReplayedBatches": "shown by the admin API; what could not be replayed is counted as lost",
	"Batches":         "shown by the admin API",
	"Events":          "shown by the admin API",
	"Stored":          "the index counts its blocks",
	"Removed":         "the index counts its blocks",
	"Clears":          "the engine's own resets are no fault",
	"Partial":         "blocks that are not full yet, which nobody can reuse",
	"Tiered":          "the blocks of other tiers are counted by rank and tier",
	"OtherTier":       "tiers of media that are not known, or of hybrid models, are not used",
	"OtherGroup":      "cache groups beside the one in the index: kvgroup has them",
	"Resized":         "each empties the rank, which is counted as dropped",
	"Skipped":         "each empties the rank, which is counted as dropped",
	"Unknown":         "events of kinds that say nothing of blocks",
	"Renamed":         "blocks that are named twice; the index counts what it holds",
}

// counted is what the counters of a subject come to.
func counted[S any](list []metric[S], of S) (n uint64) {
	for _, m := range list {
		if m.kind == counter {
			n += uint64(m.read(of))
		}
	}
	return n
}

// TestEveryFaultOfAFeedIsScraped: a counter of a feed is in a metric, or it is
// said why not.
func TestEveryFaultOfAFeedIsScraped(t *testing.T) {
	sum := func(s *kvfeed.Status) uint64 {
		f := feed(s)
		return counted(feedMetrics, &f)
	}
	tried := 0
	var each func(v reflect.Value, all *kvfeed.Status)
	each = func(v reflect.Value, all *kvfeed.Status) {
		for i := range v.NumField() {
			name, f := v.Type().Field(i).Name, v.Field(i)
			switch f.Kind() {
			case reflect.Struct:
				if v.Type().Field(i).Anonymous {
					each(f, all)
				}
			case reflect.Uint64:
				tried++
				f.SetUint(7)
				if got := sum(all); (got == 7) == (unscraped[name] != "") || got != 7 && got != 0 {
					t.Errorf("%s of 7 gives metrics of %d; no metric is wanted because: %q", name, got, unscraped[name])
				}
				f.SetUint(0)
			default:
			}
		}
	}
	var s kvfeed.Status
	each(reflect.ValueOf(&s).Elem(), &s)
	if tried < 20 {
		t.Errorf("only %d counters found", tried)
	}
}

// TestEveryFigureOfAListenerIsScraped: so is what is counted of a listener.
func TestEveryFigureOfAListenerIsScraped(t *testing.T) {
	tried := 0
	s := kvfeed.ListenerStatus{Endpoint: "tcp://*:1"}
	v := reflect.ValueOf(&s).Elem()
	for i := range v.NumField() {
		if f := v.Field(i); f.Kind() == reflect.Uint64 {
			tried++
			f.SetUint(7)
			n := counted(listenerMetrics, &s)
			for _, list := range publisherMetrics {
				n += counted(list, &s)
			}
			if n != 7 {
				t.Errorf("%s of 7 gives metrics of %d", v.Type().Field(i).Name, n)
			}
			f.SetUint(0)
		}
	}
	if tried < 4 {
		t.Errorf("only %d counters found", tried)
	}
}
