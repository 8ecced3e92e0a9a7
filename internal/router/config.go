package router

import (
	"errors"
	"fmt"
	"net"
	"strings"
	"time"

	"github.com/dynctl/dynctl/internal/router/selector"
)

// Config is everything that an operator can set. The zero value is not
// usable: start from DefaultConfig. A Config that a Router runs with is never
// changed; a reload makes a whole new one or keeps the old.
type Config struct {
	// Listen and AdminListen are the addresses of the data plane and of the
	// admin API with /metrics.
	Listen      string `mapstructure:"listen"`
	AdminListen string `mapstructure:"admin_listen"`
	// AdminTokenFile holds the bearer token of the admin API; required when
	// AdminListen is not a loopback address.
	AdminTokenFile string `mapstructure:"admin_token_file"`
	// AdminHosts are names besides those of loopback that a request to the admin
	// API may carry in its Host header where there is no token.
	AdminHosts []string `mapstructure:"admin_hosts"`

	// TrustedProxies are networks and addresses whose X-Forwarded-For and the
	// like are continued; those of anybody else are replaced.
	TrustedProxies []string `mapstructure:"trusted_proxies"`

	// Worker, Prefill and Decode are worker specs as typed on the command
	// line: "URL,key=value,…" (see workers.ParseSpec).
	Worker  []string `mapstructure:"worker"`
	Prefill []string `mapstructure:"prefill"`
	Decode  []string `mapstructure:"decode"`
	// WorkersFile is a watched file with a list of workers; empty for none.
	WorkersFile string `mapstructure:"workers_file"`
	// Sim starts simulated engines in this process ("2p2d:dp=2").
	Sim string `mapstructure:"sim"`

	Routing  RoutingConfig  `mapstructure:"routing"`
	Tokens   TokensConfig   `mapstructure:"tokens"`
	Index    IndexConfig    `mapstructure:"index"`
	Limits   LimitsConfig   `mapstructure:"limits"`
	Timeouts TimeoutsConfig `mapstructure:"timeouts"`
	Retry    RetryConfig    `mapstructure:"retry"`
	Health   HealthConfig   `mapstructure:"health"`
	Trace    TraceConfig    `mapstructure:"trace"`
	Log      LogConfig      `mapstructure:"log"`

	// Aliases are further names for models.
	Aliases []Alias `mapstructure:"aliases"`
	// Receipts is how many decisions are kept in memory.
	Receipts int `mapstructure:"receipts"`
	// Events is how many events are kept in memory.
	Events int `mapstructure:"events"`
}

// Alias lets clients ask for Model under the name Name.
type Alias struct {
	Name  string `mapstructure:"name"`
	Model string `mapstructure:"model"`
}

// RoutingConfig decides where a request goes.
type RoutingConfig struct {
	// Policy chooses ranks in both phases; PrefillPolicy and DecodePolicy
	// override it for one.
	Policy        string `mapstructure:"policy"`
	PrefillPolicy string `mapstructure:"prefill_policy"`
	DecodePolicy  string `mapstructure:"decode_policy"`
	// Threshold in tokens: remote prefill when the measure named by
	// ThresholdOn ("eff_isl" or "isl") is at least this; 0 or less is always
	// remote.
	Threshold   int    `mapstructure:"threshold"`
	ThresholdOn string `mapstructure:"threshold_on"`
	// PrefillFallback is what happens when remote prefill is wanted and
	// cannot be had: "local" or "error".
	PrefillFallback string `mapstructure:"prefill_fallback"`
	// MissingParams is what happens when a prefill answers 200 without
	// transfer parameters: "error" or "local".
	MissingParams string `mapstructure:"missing_params"`
	// TransferCheck is "strict" or "report": whether transfer parameters of
	// which a part is not as expected are used where that does no known harm.
	// A worker may state its own.
	TransferCheck string `mapstructure:"transfer_check"`
	// Weights of the kv cost function.
	OverlapCredit    float64 `mapstructure:"overlap_credit"`
	CreditDecay      float64 `mapstructure:"credit_decay"`
	PrefillLoadScale float64 `mapstructure:"prefill_load_scale"`
	QueueWeight      float64 `mapstructure:"queue_weight"`
	DecodeLoad       float64 `mapstructure:"decode_load"`
	Spread           float64 `mapstructure:"spread"`
	RequestWeight    float64 `mapstructure:"request_weight"`
	Temperature      float64 `mapstructure:"temperature"`
	// Busy limits exclude a rank; 0 turns one off.
	BusyDecodeBlocks  float64 `mapstructure:"busy_decode_blocks"`  // share of the rank's KV blocks, 0 to 1
	BusyPrefillTokens int     `mapstructure:"busy_prefill_tokens"` // tokens
	BusyWaiting       int     `mapstructure:"busy_waiting"`        // requests
	BusyKVUsage       float64 `mapstructure:"busy_kv_usage"`       // share, 0 to 1
	// PrefillGate keeps a request local while the chosen prefill rank has more
	// active prefill tokens than this; DecodeGate sends it remote while the
	// chosen decode rank uses more than this share of its KV cache. 0 is off.
	PrefillGate int     `mapstructure:"prefill_gate"`
	DecodeGate  float64 `mapstructure:"decode_gate"`
	// SessionHeader and SessionField name the session of a request for the
	// session policy.
	SessionHeader string `mapstructure:"session_header"`
	SessionField  string `mapstructure:"session_field"`
	// AllowHeaders lets clients steer with X-Dynctl-* and
	// X-data-parallel-rank; AllowTransferFields passes kv_transfer_params and
	// the like from clients to engines.
	AllowHeaders        bool `mapstructure:"allow_headers"`
	AllowTransferFields bool `mapstructure:"allow_transfer_fields"`
	// Connector overrides the workers' connector: "" (each worker's own),
	// "nixl", "sglang", "lmcache" or "shared-storage".
	Connector string `mapstructure:"connector"`
	// DecoderRegistry maps decoder URLs to LMCache receiver specs (JSON).
	DecoderRegistry string `mapstructure:"decoder_registry"`
	// PrefillLabels and DecodeLabels give the role by the label "model" of a
	// worker, as production-stack does.
	PrefillLabels []string `mapstructure:"prefill_labels"`
	DecodeLabels  []string `mapstructure:"decode_labels"`
	// Seed of the random draws; 0 takes one from the clock.
	Seed uint64 `mapstructure:"seed"`
}

// TokensConfig says how prompts become block hashes.
type TokensConfig struct {
	// Tokenizer is "auto", "local", "engine" or "estimate".
	Tokenizer string `mapstructure:"tokenizer"`
	// Path is the tokenizer.json, or the folder that holds it.
	Path string `mapstructure:"path"`
	// BlockSize of the router in tokens; 0 learns it from the engines.
	BlockSize int `mapstructure:"block_size"`
	// ChunkBytes is the length of a text chunk in approximate routing.
	ChunkBytes int `mapstructure:"chunk_bytes"`
	// ApproxTTL is how long a chunk is assumed to stay cached where it went.
	ApproxTTL time.Duration `mapstructure:"approx_ttl"`
	// CacheBytes bounds, for each model, the engines' answers to /tokenize that
	// are remembered; 0 remembers none.
	CacheBytes int64 `mapstructure:"cache_bytes"`
}

// IndexConfig bounds the KV index.
type IndexConfig struct {
	// MaxBlocks is the greatest number of (block, rank) memberships.
	MaxBlocks int `mapstructure:"max_blocks"`
	// Snapshot is a file that keeps the index across restarts; empty for none.
	Snapshot string `mapstructure:"snapshot"`
	// StaleAfter is how long a rank may be without connection to its events
	// before it is called stale; it is not trusted from the first moment.
	StaleAfter time.Duration `mapstructure:"stale_after"`
}

// LimitsConfig bounds what clients may ask at once.
type LimitsConfig struct {
	// BodyBytes is the greatest request body.
	BodyBytes int64 `mapstructure:"body_bytes"`
	// BodyMemory is what the bodies of all requests may take in sum.
	BodyMemory int64 `mapstructure:"body_memory"`
	// Inflight is the greatest number of requests in progress; 0 is no limit.
	Inflight int `mapstructure:"inflight"`
	// Queue is how many requests wait beyond Inflight; QueueTimeout how long.
	Queue        int           `mapstructure:"queue"`
	QueueTimeout time.Duration `mapstructure:"queue_timeout"`
}

// TimeoutsConfig bounds waits. A live stream has no total timeout.
type TimeoutsConfig struct {
	Dial     time.Duration `mapstructure:"dial"`
	Prefill  time.Duration `mapstructure:"prefill"`
	Response time.Duration `mapstructure:"response"` // to the first byte of a decode answer
	Idle     time.Duration `mapstructure:"idle"`     // between two reads of a stream
	Body     time.Duration `mapstructure:"body"`     // to read a client's body
	Write    time.Duration `mapstructure:"write"`    // one write to a slow client
	Drain    time.Duration `mapstructure:"drain"`
	// KVLease is how long prefill engines keep the KV of a prefill for a decode
	// engine that they have not heard of (vLLM: kv_lease_duration).
	KVLease time.Duration `mapstructure:"kv_lease"`
}

// RetryConfig bounds retries before the first byte.
type RetryConfig struct {
	// Attempts is the greatest number of tries of one request, the first
	// included.
	Attempts int `mapstructure:"attempts"`
	// Budget is the share of requests that may be retried at any time, on top
	// of a floor of ten in a ten-second window.
	Budget float64 `mapstructure:"budget"`
}

// HealthConfig times the probes.
type HealthConfig struct {
	Interval time.Duration `mapstructure:"interval"`
	Timeout  time.Duration `mapstructure:"timeout"`
	Scrape   time.Duration `mapstructure:"scrape"`
}

// TraceConfig sends spans to an OTLP/HTTP collector.
type TraceConfig struct {
	// Endpoint is the collector's URL; empty is off.
	Endpoint string `mapstructure:"endpoint"`
	// Sample is the share of requests that start a trace of their own, 0 to 1.
	Sample float64 `mapstructure:"sample"`
}

// LogConfig shapes the log on stderr.
type LogConfig struct {
	Level  string `mapstructure:"level"`
	Format string `mapstructure:"format"`
}

// DefaultConfig is a config with every default in place and no workers.
func DefaultConfig() Config {
	weights := selector.DefaultWeights()
	return Config{
		Listen:      "127.0.0.1:8000",
		AdminListen: "127.0.0.1:8001",
		Routing: RoutingConfig{
			Policy: "kv", ThresholdOn: "eff_isl", PrefillFallback: "local", MissingParams: "error", TransferCheck: "strict",
			OverlapCredit: weights.OverlapCredit, CreditDecay: weights.CreditDecay, PrefillLoadScale: weights.PrefillLoadScale,
			QueueWeight: weights.Queue, DecodeLoad: weights.DecodeLoad, Spread: weights.Spread,
			RequestWeight: weights.ActiveRequest, Temperature: weights.Temperature,
			SessionHeader: "X-Session-ID", SessionField: "user",
		},
		Tokens:   TokensConfig{Tokenizer: "auto", ChunkBytes: 256, ApproxTTL: 2 * time.Minute, CacheBytes: 32 << 20},
		Index:    IndexConfig{MaxBlocks: 64 << 20, StaleAfter: 10 * time.Second},
		Limits:   LimitsConfig{BodyBytes: 32 << 20, BodyMemory: 1 << 30, Queue: 1024, QueueTimeout: 30 * time.Second},
		Timeouts: TimeoutsConfig{Dial: 2 * time.Second, Prefill: 5 * time.Minute, Response: 10 * time.Minute, Idle: 5 * time.Minute, Body: time.Minute, Write: 30 * time.Second, Drain: 30 * time.Second, KVLease: 30 * time.Second},
		Retry:    RetryConfig{Attempts: 3, Budget: 0.2},
		Health:   HealthConfig{Interval: time.Second, Timeout: 2 * time.Second, Scrape: time.Second},
		Trace:    TraceConfig{Sample: 1},
		Log:      LogConfig{Level: "info", Format: "auto"},
		Receipts: 4096, Events: 4096,
	}
}

// Validate returns every problem of the config at once, each naming its key.
func (c *Config) Validate() error {
	var errs []error
	bad := func(key, format string, a ...any) {
		errs = append(errs, fmt.Errorf("%s: %s", key, fmt.Sprintf(format, a...)))
	}
	oneOf := func(key, v string, allowed ...string) {
		for _, a := range allowed {
			if v == a {
				return
			}
		}
		bad(key, "%q is not one of %s", v, strings.Join(nonEmpty(allowed), ", "))
	}
	addr := func(key, v string) {
		if _, _, err := net.SplitHostPort(v); err != nil {
			bad(key, "%q is not HOST:PORT", v)
		}
	}
	share := func(key string, v float64) {
		if !(v >= 0 && v <= 1) {
			bad(key, "%v is not a share between 0 and 1", v)
		}
	}
	nonNeg := func(key string, v float64) {
		if !(v >= 0) {
			bad(key, "%v must not be negative", v)
		}
	}
	positive := func(key string, d time.Duration) {
		if d <= 0 {
			bad(key, "%v must be more than 0", d)
		}
	}
	addr("listen", c.Listen)
	addr("admin_listen", c.AdminListen)
	if c.AdminTokenFile == "" && !isLoopback(c.AdminListen) {
		bad("admin_listen", "%s is not a loopback address: set admin_token_file (--admin-token-file) so that not everyone can steer the router", c.AdminListen)
	}
	if _, err := parseProxies(c.TrustedProxies); err != nil {
		bad("trusted_proxies", "%v", err)
	}
	r := &c.Routing
	policies := []string{"kv", "kv_dynamo", "least_loaded", "round_robin", "power_of_two", "random", "session"}
	oneOf("routing.policy", r.Policy, policies...)
	oneOf("routing.prefill_policy", r.PrefillPolicy, append([]string{""}, policies...)...)
	oneOf("routing.decode_policy", r.DecodePolicy, append([]string{""}, policies...)...)
	oneOf("routing.threshold_on", r.ThresholdOn, "eff_isl", "isl")
	oneOf("routing.prefill_fallback", r.PrefillFallback, "local", "error")
	oneOf("routing.missing_params", r.MissingParams, "local", "error")
	oneOf("routing.transfer_check", r.TransferCheck, "strict", "report")
	oneOf("routing.connector", r.Connector, "", "nixl", "sglang", "lmcache", "shared-storage")
	nonNeg("routing.overlap_credit", r.OverlapCredit)
	nonNeg("routing.credit_decay", r.CreditDecay)
	nonNeg("routing.prefill_load_scale", r.PrefillLoadScale)
	nonNeg("routing.queue_weight", r.QueueWeight)
	nonNeg("routing.decode_load", r.DecodeLoad)
	nonNeg("routing.spread", r.Spread)
	nonNeg("routing.request_weight", r.RequestWeight)
	nonNeg("routing.temperature", r.Temperature)
	share("routing.busy_decode_blocks", r.BusyDecodeBlocks)
	share("routing.busy_kv_usage", r.BusyKVUsage)
	share("routing.decode_gate", r.DecodeGate)
	nonNeg("routing.busy_prefill_tokens", float64(r.BusyPrefillTokens))
	nonNeg("routing.busy_waiting", float64(r.BusyWaiting))
	nonNeg("routing.prefill_gate", float64(r.PrefillGate))
	oneOf("tokens.tokenizer", c.Tokens.Tokenizer, "auto", "local", "engine", "estimate")
	if c.Tokens.Tokenizer == "local" && c.Tokens.Path == "" {
		bad("tokens.path", "tokenizer \"local\" needs the path of a tokenizer.json (--tokenizer-path)")
	}
	if c.Tokens.BlockSize < 0 || c.Tokens.BlockSize > 4096 {
		bad("tokens.block_size", "%d is not between 0 (learn) and 4096 tokens", c.Tokens.BlockSize)
	}
	if c.Tokens.ChunkBytes < 16 || c.Tokens.ChunkBytes > 1<<20 {
		bad("tokens.chunk_bytes", "%d is not between 16 and 1048576 bytes", c.Tokens.ChunkBytes)
	}
	positive("tokens.approx_ttl", c.Tokens.ApproxTTL)
	if c.Tokens.CacheBytes < 0 {
		bad("tokens.cache_bytes", "%d is negative; 0 remembers nothing", c.Tokens.CacheBytes)
	}
	if c.Index.MaxBlocks < 1024 {
		bad("index.max_blocks", "%d is less than 1024", c.Index.MaxBlocks)
	}
	positive("index.stale_after", c.Index.StaleAfter)
	if c.Limits.BodyBytes < 1024 {
		bad("limits.body_bytes", "%d is less than 1024", c.Limits.BodyBytes)
	}
	if c.Limits.BodyMemory < c.Limits.BodyBytes {
		bad("limits.body_memory", "%d is less than limits.body_bytes (%d): not even one request of that size could be read", c.Limits.BodyMemory, c.Limits.BodyBytes)
	}
	nonNeg("limits.inflight", float64(c.Limits.Inflight))
	nonNeg("limits.queue", float64(c.Limits.Queue))
	positive("limits.queue_timeout", c.Limits.QueueTimeout)
	positive("timeouts.dial", c.Timeouts.Dial)
	positive("timeouts.prefill", c.Timeouts.Prefill)
	positive("timeouts.response", c.Timeouts.Response)
	positive("timeouts.idle", c.Timeouts.Idle)
	positive("timeouts.body", c.Timeouts.Body)
	positive("timeouts.write", c.Timeouts.Write)
	positive("timeouts.drain", c.Timeouts.Drain)
	positive("timeouts.kv_lease", c.Timeouts.KVLease)
	if c.Retry.Attempts < 1 || c.Retry.Attempts > 16 {
		bad("retry.attempts", "%d is not between 1 and 16", c.Retry.Attempts)
	}
	share("retry.budget", c.Retry.Budget)
	positive("health.interval", c.Health.Interval)
	positive("health.timeout", c.Health.Timeout)
	positive("health.scrape", c.Health.Scrape)
	share("trace.sample", c.Trace.Sample)
	oneOf("log.level", c.Log.Level, "debug", "info", "warn", "error")
	oneOf("log.format", c.Log.Format, "auto", "text", "json")
	seen := map[string]bool{}
	for i, a := range c.Aliases {
		key := fmt.Sprintf("aliases[%d]", i)
		if a.Name == "" || a.Model == "" {
			bad(key, "an alias needs a name and a model")
		}
		if seen[a.Name] {
			bad(key, "alias %q stands twice", a.Name)
		}
		seen[a.Name] = true
	}
	if c.Receipts < 16 || c.Receipts > 1<<20 {
		bad("receipts", "%d is not between 16 and 1048576", c.Receipts)
	}
	if c.Events < 16 || c.Events > 1<<20 {
		bad("events", "%d is not between 16 and 1048576", c.Events)
	}
	return errors.Join(errs...)
}

func nonEmpty(in []string) []string {
	var out []string
	for _, s := range in {
		if s != "" {
			out = append(out, s)
		}
	}
	return out
}

// isLoopback reports whether a listen address reaches this machine only.
func isLoopback(addr string) bool {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return false
	}
	if host == "localhost" {
		return true
	}
	ip := net.ParseIP(host)
	return ip != nil && ip.IsLoopback()
}
