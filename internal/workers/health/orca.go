package health

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/dynctl/dynctl/internal/workers"
)

// HeaderLoad is the response header in which vLLM tells its load, and
// HeaderLoadFormat the request header that asks for it with "JSON" or "TEXT".
const (
	HeaderLoad       = "Endpoint-Load-Metrics"
	HeaderLoadFormat = "Endpoint-Load-Metrics-Format"
)

const maxORCA = 16 << 10

// ParseORCA reads the value of HeaderLoad as vLLM 0.32 writes it, the format
// word first:
//
//	JSON {"named_metrics": {"num_requests_waiting": 0.0, "kv_cache_usage_perc": 0.25}}
//	TEXT named_metrics.num_requests_waiting=0.0, named_metrics.kv_cache_usage_perc=0.25
//
// The format word may be missing. What the header does not tell is not told in
// the load either; a header that tells nothing of use is an error.
func ParseORCA(value string, at time.Time) (workers.Load, error) {
	l := workers.UnknownLoad(at)
	if len(value) > maxORCA {
		return l, fmt.Errorf("load header of %d bytes (at most %d)", len(value), maxORCA)
	}
	value = strings.TrimSpace(value)
	word, rest, _ := strings.Cut(value, " ")
	isJSON := strings.HasPrefix(value, "{")
	switch strings.ToUpper(word) {
	case "JSON":
		isJSON, value = true, rest
	case "TEXT":
		value = rest
	case "BIN":
		return l, errors.New("load header in binary form")
	}
	if isJSON {
		var body struct {
			Named map[string]float64 `json:"named_metrics"`
		}
		if err := json.Unmarshal([]byte(value), &body); err != nil {
			return l, fmt.Errorf("load header: %w", err)
		}
		for k, v := range body.Named {
			setORCA(&l, k, v)
		}
	} else {
		for pair := range strings.SplitSeq(value, ",") {
			k, v, ok := strings.Cut(strings.TrimSpace(pair), "=")
			if !ok {
				return l, fmt.Errorf("load header: %.40q is not name=value", pair)
			}
			n, err := strconv.ParseFloat(strings.TrimSpace(v), 64)
			if err != nil {
				return l, fmt.Errorf("load header: %.40q is no number", v)
			}
			setORCA(&l, strings.TrimPrefix(strings.TrimSpace(k), "named_metrics."), n)
		}
	}
	if !l.Told() {
		return l, errors.New("load header tells no load")
	}
	return l, nil
}

func setORCA(l *workers.Load, name string, v float64) {
	switch name {
	case "num_requests_waiting":
		l.Waiting = whole(v)
	case "num_requests_running":
		l.Running = whole(v)
	case "kv_cache_usage_perc":
		if !math.IsNaN(v) && v >= 0 && v <= 1.5 {
			l.KVUsage = min(v, 1)
		}
	}
}
