package main

import (
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/dynctl/dynctl/internal/router"
	"github.com/dynctl/dynctl/internal/router/admin"
)

// A setting is one key of the configuration with the flag that sets it.
type setting struct {
	key  string // as in the file: "routing.threshold"
	flag string // without the dashes
	help string
}

// settings lists every key. The flags keep the names that users of other
// routers already type where there is one.
var settings = []setting{
	{"listen", "listen", "address of the data plane, `HOST:PORT`"},
	{"admin_listen", "admin-listen", "address of the admin API and /metrics, `HOST:PORT`"},
	{"admin_token_file", "admin-token-file", "`FILE` with the bearer token of the admin API"},
	{"admin_hosts", "admin-host", "`NAME` besides localhost under which the admin API answers without a token (repeatable)"},
	{"trusted_proxies", "trusted-proxy", "`CIDR` of proxies whose X-Forwarded-For and the like are continued (repeatable)"},
	{"worker", "worker", "engine that prefills and decodes, `URL[,key=value…]` (repeatable)"},
	{"prefill", "prefill", "engine that prefills, `URL[,key=value…]` (repeatable)"},
	{"decode", "decode", "engine that decodes, `URL[,key=value…]` (repeatable)"},
	{"workers_file", "workers-file", "watched `FILE` with a list of workers"},
	{"sim", "sim", "start simulated engines in this process, `FLEET` such as 2p2d or 2p4d:dp=2,engine=sglang"},
	{"routing.policy", "policy", "how ranks are chosen: kv|kv_dynamo|least_loaded|round_robin|power_of_two|random|session"},
	{"routing.prefill_policy", "prefill-policy", "policy for prefill ranks, when it differs"},
	{"routing.decode_policy", "decode-policy", "policy for decode ranks, when it differs"},
	{"routing.threshold", "routing-threshold", "remote prefill from this many `TOKENS` on; 0 is always remote"},
	{"routing.threshold_on", "routing-threshold-on", "what the threshold counts: eff_isl (uncached tokens) or isl (the whole prompt)"},
	{"routing.prefill_fallback", "prefill-fallback", "when no prefill worker can be had: local|error"},
	{"routing.missing_params", "missing-params", "when a prefill answers without transfer parameters: error|local"},
	{"routing.transfer_check", "transfer-check", "transfer parameters that are not as expected and do no known harm: strict (refused) or report (used and told)"},
	{"routing.overlap_credit", "overlap-credit", "weight of cached blocks in the kv cost"},
	{"routing.credit_decay", "overlap-credit-decay", "how fast the credit fades on ranks with more prefill work"},
	{"routing.prefill_load_scale", "prefill-load-scale", "weight of prefill work in the kv cost"},
	{"routing.queue_weight", "queue-weight", "weight of prefill work that a rank has already in the kv cost"},
	{"routing.decode_load", "decode-load", "weight of a rank's active blocks in the kv cost"},
	{"routing.spread", "spread", "weight of a rank's recent share of uncached prompts in the kv cost"},
	{"routing.request_weight", "request-weight", "blocks that each active request adds to the kv cost"},
	{"routing.temperature", "temperature", "0 takes the best rank; more draws among near ones"},
	{"routing.busy_decode_blocks", "busy-decode-blocks", "leave out ranks whose active blocks exceed this share of their cache; 0 is off"},
	{"routing.busy_prefill_tokens", "busy-prefill-tokens", "leave out ranks with more active prefill `TOKENS`; 0 is off"},
	{"routing.busy_waiting", "busy-waiting", "leave out ranks with more waiting requests; 0 is off"},
	{"routing.busy_kv_usage", "busy-kv-usage", "leave out ranks whose engine reports a higher cache usage; 0 is off"},
	{"routing.prefill_gate", "prefill-gate", "stay local when the prefill rank has more active `TOKENS`; 0 is off"},
	{"routing.decode_gate", "decode-gate", "go remote when the decode rank's cache usage is higher than this share; 0 is off"},
	{"routing.session_header", "session-key", "`HEADER` that names the session for the session policy"},
	{"routing.session_field", "session-field", "body `FIELD` that names the session when the header is absent"},
	{"routing.allow_headers", "allow-routing-headers", "let clients steer with X-Dynctl-Path, X-Dynctl-Worker and X-data-parallel-rank"},
	{"routing.allow_transfer_fields", "allow-transfer-fields", "pass kv_transfer_params and the like from clients to engines"},
	{"routing.connector", "disagg-connector-type", "how KV moves, for all workers: nixl|sglang|lmcache|shared-storage"},
	{"routing.decoder_registry", "decoder-registry", "`JSON` object from decoder URL to LMCache receiver"},
	{"routing.prefill_labels", "prefill-model-labels", "values of a worker's label \"model\" that make it a prefill worker"},
	{"routing.decode_labels", "decode-model-labels", "values of a worker's label \"model\" that make it a decode worker"},
	{"routing.seed", "seed", "seed of random choices; 0 takes one from the clock"},
	{"tokens.tokenizer", "tokenizer", "where token ids come from: auto|local|engine|estimate"},
	{"tokens.path", "tokenizer-path", "`PATH` of tokenizer.json or of the folder that holds it"},
	{"tokens.block_size", "block-size", "`TOKENS` per block; 0 learns it from the engines"},
	{"tokens.chunk_bytes", "chunk-bytes", "`BYTES` of a text chunk when there are no tokens"},
	{"tokens.approx_ttl", "approx-ttl", "how long a text chunk is assumed to stay cached"},
	{"tokens.cache_bytes", "tokenize-cache", "`BYTES` of engines' tokenizer answers that are remembered for each model; 0 is none"},
	{"index.max_blocks", "index-max-blocks", "greatest number of (block, rank) entries in the index"},
	{"index.snapshot", "index-snapshot", "`FILE` that keeps the index across restarts"},
	{"index.stale_after", "stale-after", "how long a rank may be without event connection before it is called stale"},
	{"limits.body_bytes", "max-body-bytes", "greatest request body in `BYTES`"},
	{"limits.body_memory", "body-memory", "`BYTES` that all request bodies may take together; beyond, requests get 503"},
	{"limits.inflight", "max-inflight", "greatest number of requests in progress; 0 is no limit"},
	{"limits.queue", "queue-size", "how many requests wait beyond that"},
	{"limits.queue_timeout", "queue-timeout", "longest wait in the queue"},
	{"timeouts.dial", "dial-timeout", "to connect to a worker"},
	{"timeouts.prefill", "prefill-timeout", "for a prefill leg"},
	{"timeouts.response", "response-timeout", "to the first byte of a decode answer"},
	{"timeouts.idle", "idle-timeout", "between two reads of a stream"},
	{"timeouts.body", "body-timeout", "to read a client's body"},
	{"timeouts.write", "write-timeout", "for one write to a slow client"},
	{"timeouts.drain", "drain-timeout", "for running streams when the router stops"},
	{"timeouts.kv_lease", "kv-lease", "how long prefill engines keep KV for a decode engine that is silent (vLLM: kv_lease_duration)"},
	{"retry.attempts", "attempts", "greatest number of tries before the first byte"},
	{"retry.budget", "retry-budget", "share of requests that may be retried"},
	{"health.interval", "health-interval", "between two probes of a worker"},
	{"health.timeout", "health-timeout", "for one probe"},
	{"health.scrape", "scrape-interval", "between two reads of a worker's metrics"},
	{"trace.endpoint", "otlp-endpoint", "`URL` of an OTLP/HTTP collector; empty is off"},
	{"trace.sample", "trace-sample", "share of requests traced, 0 to 1"},
	{"log.level", "log-level", "debug|info|warn|error"},
	{"log.format", "log-format", "auto|text|json"},
	{"receipts", "receipts", "how many decisions are kept in memory"},
	{"events", "events", "how many events are kept in memory"},
}

// settingValue is the value of a setting's flag. A wrong text is no error of the
// command line yet, so that all wrong settings are told at once.
type settingValue struct {
	value any
	set   bool
	err   error
}

// Set implements pflag.Value. Lists grow with every use.
func (v *settingValue) Set(text string) error {
	if list, ok := v.value.([]string); ok {
		if !v.set {
			list = nil
		}
		v.value, v.set = append(slices.Clone(list), text), true
		return nil
	}
	value, err := parseValue(v.value, text)
	if v.set = true; err != nil {
		v.err = err
		return nil
	}
	v.value = value
	return nil
}

// String implements pflag.Value.
func (v *settingValue) String() string {
	if v == nil || v.value == nil {
		return ""
	}
	if list, ok := v.value.([]string); ok {
		return strings.Join(list, " ")
	}
	return fmt.Sprint(v.value)
}

// Type implements pflag.Value.
func (v *settingValue) Type() string {
	switch v.value.(type) {
	case []string:
		return "stringArray"
	case time.Duration:
		return "duration"
	}
	return fmt.Sprintf("%T", v.value)
}

// settingFlags adds a flag for every setting, with the default of the config.
func settingFlags(cmd *cobra.Command) {
	defaults := router.DefaultConfig()
	for _, s := range settings {
		f := cmd.Flags()
		v := &settingValue{value: field(&defaults, s.key).Interface()}
		switch v.Type() {
		case "bool":
			f.VarPF(v, s.flag, "", s.help).NoOptDefVal = "true"
		case "stringArray":
			f.VarPF(v, s.flag, "", s.help).DefValue = ""
		default:
			f.Var(v, s.flag, s.help)
		}
	}
	f := cmd.Flags()
	for flag, values := range map[string][]string{
		"policy": policyNames, "prefill-policy": policyNames, "decode-policy": policyNames,
		"routing-threshold-on": {"eff_isl", "isl"}, "prefill-fallback": {"local", "error"}, "missing-params": {"error", "local"}, "transfer-check": {"strict", "report"},
		"disagg-connector-type": {"nixl", "sglang", "lmcache", "shared-storage"},
		"tokenizer":             {"auto", "local", "engine", "estimate"}, "log-level": {"debug", "info", "warn", "error"}, "log-format": {"auto", "text", "json"},
	} {
		_ = cmd.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp))
	}
	// Names that users of production-stack type; they mean the same.
	f.SetNormalizeFunc(func(_ *pflag.FlagSet, name string) pflag.NormalizedName {
		if name == "load-balancing-strategy" {
			name = "policy"
		}
		return pflag.NormalizedName(name)
	})
}

var policyNames = []string{"kv", "kv_dynamo", "least_loaded", "round_robin", "power_of_two", "random", "session"}

// field finds the value of a dotted key in the config by its mapstructure
// tags; the zero Value when there is none.
func field(c *router.Config, key string) reflect.Value {
	v := reflect.ValueOf(c).Elem()
	for part := range strings.SplitSeq(key, ".") {
		if v.Kind() != reflect.Struct {
			return reflect.Value{}
		}
		i := slices.IndexFunc(reflect.VisibleFields(v.Type()), func(f reflect.StructField) bool { return f.Tag.Get("mapstructure") == part })
		if i < 0 {
			return reflect.Value{}
		}
		v = v.Field(i)
	}
	return v
}

// settingValues lists the effective configuration for the admin API.
func settingValues(c *router.Config) []admin.ConfigValue {
	var out []admin.ConfigValue
	for _, k := range configKeys() {
		v := field(c, k).Interface()
		if d, ok := v.(time.Duration); ok {
			v = d.String()
		}
		out = append(out, admin.ConfigValue{Key: k, Value: v})
	}
	return out
}

// patchConfig changes settings of a configuration by their keys.
func patchConfig(c router.Config, changes map[string]any) (router.Config, error) {
	var errs []error
	for _, key := range slices.Sorted(maps.Keys(changes)) {
		f := field(&c, key)
		if !f.IsValid() || f.Kind() == reflect.Struct {
			errs = append(errs, fmt.Errorf("unknown key %q%s", key, suggest(key, configKeys())))
			continue
		}
		text, err := plainText(changes[key])
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", key, err))
			continue
		}
		value, err := parseValue(f.Interface(), text)
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", key, err))
			continue
		}
		f.Set(reflect.ValueOf(value))
	}
	return c, errors.Join(errs...)
}

// plainText is a JSON value as an environment variable would hold it.
func plainText(v any) (string, error) {
	switch v := v.(type) {
	case float64:
		return strconv.FormatFloat(v, 'f', -1, 64), nil
	case []any:
		words := make([]string, len(v))
		for i, e := range v {
			word, ok := e.(string)
			if !ok || strings.ContainsAny(word, " \t\r\n") {
				return "", fmt.Errorf("%v is not a text without blanks", e)
			}
			words[i] = word
		}
		return strings.Join(words, " "), nil
	case nil, map[string]any:
		return "", errors.New("want a text, a number, true, false or a list of texts")
	default:
		return fmt.Sprint(v), nil
	}
}
