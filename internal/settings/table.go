package settings

import (
	"strings"
	"time"

	"github.com/dynctl/dynctl/internal/router/decide"
	"github.com/dynctl/dynctl/internal/router/selector"
	"github.com/dynctl/dynctl/internal/workers"
)

// A Row is one setting.
type Row struct {
	// Key is its name in the file: "routing.threshold". Flags keep the names that
	// users of other routers already type where there is one; without, it can be
	// set in the file only.
	Key, Flag string
	// At is the field that holds it.
	At func(*Config) any
	// Default is of the field's type; nil for its zero value.
	Default any
	// Values are the words that are allowed beside the default; nil for any text.
	Values []string
	// Check says what is wrong with a value of the field's type; nil for nothing.
	Check func(value any) error
	// Fixed says that it cannot change while the router runs.
	Fixed bool
	// WhatIf says that recorded decisions can be made again under other values, by
	// its name without the section.
	WhatIf bool
	// Help says what it is; what stands in backquotes is the flag's value.
	Help string
}

// rows lists every setting, in the order of the documentation.
var rows = []*Row{
	{Key: "listen", Flag: "listen", At: func(c *Config) any { return &c.Listen }, Default: "127.0.0.1:8000", Check: hostPort, Fixed: true,
		Help: "address of the data plane, `HOST:PORT`"},
	{Key: "admin_listen", Flag: "admin-listen", At: func(c *Config) any { return &c.AdminListen }, Default: "127.0.0.1:8001", Check: hostPort, Fixed: true,
		Help: "address of the admin API and /metrics, `HOST:PORT`"},
	{Key: "admin_token_file", Flag: "admin-token-file", At: func(c *Config) any { return &c.AdminTokenFile }, Fixed: true,
		Help: "`FILE` with the bearer token of the admin API"},
	{Key: "admin_hosts", Flag: "admin-host", At: func(c *Config) any { return &c.AdminHosts },
		Help: "`NAME` besides localhost under which the admin API answers without a token (repeatable)"},
	{Key: "tls.cert_file", Flag: "tls-cert-file", At: func(c *Config) any { return &c.TLS.CertFile }, Fixed: true,
		Help: "watched PEM `FILE` with the data plane's certificate and chain; empty is plain HTTP"},
	{Key: "tls.key_file", Flag: "tls-key-file", At: func(c *Config) any { return &c.TLS.KeyFile }, Fixed: true,
		Help: "watched PEM `FILE` with the key of that certificate"},
	{Key: "tls.client_ca_file", Flag: "tls-client-ca-file", At: func(c *Config) any { return &c.TLS.ClientCAFile }, Fixed: true,
		Help: "watched PEM `FILE` with the authorities of certificates that clients of the data plane must show"},
	{Key: "admin_tls.cert_file", Flag: "admin-tls-cert-file", At: func(c *Config) any { return &c.AdminTLS.CertFile }, Fixed: true,
		Help: "watched PEM `FILE` with the admin API's certificate and chain; empty is plain HTTP"},
	{Key: "admin_tls.key_file", Flag: "admin-tls-key-file", At: func(c *Config) any { return &c.AdminTLS.KeyFile }, Fixed: true,
		Help: "watched PEM `FILE` with the key of that certificate"},
	{Key: "admin_tls.client_ca_file", Flag: "admin-tls-client-ca-file", At: func(c *Config) any { return &c.AdminTLS.ClientCAFile }, Fixed: true,
		Help: "watched PEM `FILE` with the authorities of certificates that users of the admin API must show"},
	{Key: "engine_tls.ca_file", Flag: "engine-tls-ca-file", At: func(c *Config) any { return &c.EngineTLS.CAFile }, Fixed: true,
		Help: "watched PEM `FILE` with the authorities that are trusted for https engines instead of the system's"},
	{Key: "engine_tls.cert_file", Flag: "engine-tls-cert-file", At: func(c *Config) any { return &c.EngineTLS.CertFile }, Fixed: true,
		Help: "watched PEM `FILE` with the certificate that the router shows to https engines"},
	{Key: "engine_tls.key_file", Flag: "engine-tls-key-file", At: func(c *Config) any { return &c.EngineTLS.KeyFile }, Fixed: true,
		Help: "watched PEM `FILE` with the key of that certificate"},
	{Key: "engine_tls.server_name", Flag: "engine-tls-server-name", At: func(c *Config) any { return &c.EngineTLS.ServerName }, Fixed: true,
		Help: "`NAME` that the certificates of https engines must have, when it is not the host of their URL"},
	{Key: "keys.file", Flag: "api-keys-file", At: func(c *Config) any { return &c.Keys.File }, Fixed: true,
		Help: "watched `FILE` with the hashes of API keys and what each may do"},
	{Key: "keys.required", Flag: "api-keys-required", At: func(c *Config) any { return &c.Keys.Required }, Default: true,
		Help: "refuse requests to the data plane without a key, where there is a file of keys; a wrong key is always refused"},
	{Key: "keys.salt", Flag: "api-keys-salt", At: func(c *Config) any { return &c.Keys.Salt }, Fixed: true,
		Help: "keep tenants apart in the engines' caches: each request gets its tenant's cache_salt, and endpoints without one are refused"},
	{Key: "keys.admin", Flag: "api-keys-admin", At: func(c *Config) any { return &c.Keys.Admin }, Fixed: true,
		Help: "let users of the admin API in by keys with a role (read, operate, admin), beside the token"},
	{Key: "trusted_proxies", Flag: "trusted-proxy", At: func(c *Config) any { return &c.TrustedProxies }, Check: proxies,
		Help: "`CIDR` of proxies whose X-Forwarded-For and the like are continued (repeatable)"},
	{Key: "worker", Flag: "worker", At: func(c *Config) any { return &c.Worker },
		Help: "engine that prefills and decodes, `URL[,key=value…]` (repeatable)"},
	{Key: "prefill", Flag: "prefill", At: func(c *Config) any { return &c.Prefill },
		Help: "engine that prefills, `URL[,key=value…]` (repeatable)"},
	{Key: "decode", Flag: "decode", At: func(c *Config) any { return &c.Decode },
		Help: "engine that decodes, `URL[,key=value…]` (repeatable)"},
	{Key: "workers_file", Flag: "workers-file", At: func(c *Config) any { return &c.WorkersFile }, Fixed: true,
		Help: "watched `FILE` with a list of workers"},
	{Key: "sim", Flag: "sim", At: func(c *Config) any { return &c.Sim }, Fixed: true,
		Help: "start simulated engines in this process, `FLEET` such as 2p2d or 2p4d:dp=2,engine=sglang"},
	{Key: "kubernetes.selector", Flag: "kube-selector", At: func(c *Config) any { return &c.Kubernetes.Selector }, Fixed: true,
		Help: "label `SELECTOR` of engines' pods, whose labels tell what they are"},
	{Key: "kubernetes.prefill_selector", Flag: "kube-prefill-selector", At: func(c *Config) any { return &c.Kubernetes.PrefillSelector }, Fixed: true,
		Help: "label `SELECTOR` of pods that prefill"},
	{Key: "kubernetes.decode_selector", Flag: "kube-decode-selector", At: func(c *Config) any { return &c.Kubernetes.DecodeSelector }, Fixed: true,
		Help: "label `SELECTOR` of pods that decode"},
	{Key: "kubernetes.namespaces", Flag: "kube-namespace", At: func(c *Config) any { return &c.Kubernetes.Namespaces }, Fixed: true,
		Help: "`NAMESPACE` of the pods; the router's own unless given, * is all (repeatable)"},
	{Key: "kubernetes.kubeconfig", Flag: "kubeconfig", At: func(c *Config) any { return &c.Kubernetes.Kubeconfig }, Fixed: true,
		Help: "`FILE` that says where the API server is; the pod's service account, or kubectl's file, unless given"},
	{Key: "kubernetes.port", Flag: "kube-port", At: func(c *Config) any { return &c.Kubernetes.Port }, Default: 8000, Check: between(1, 65535, "as a port"), Fixed: true,
		Help: "`PORT` of engines whose pods do not tell another"},
	{Key: "kubernetes.worker", Flag: "kube-worker", At: func(c *Config) any { return &c.Kubernetes.Worker }, Fixed: true,
		Help: "what holds for all of them, `key=value,…` as in --worker"},
	{Key: "kubernetes.revision_label", Flag: "kube-revision-label", At: func(c *Config) any { return &c.Kubernetes.RevisionLabel }, Fixed: true,
		Help: "pod `LABEL` that names a rollout: prefill and decode pair within one"},
	{Key: "routing.policy", Flag: "policy", At: func(c *Config) any { return &c.Routing.Policy }, Default: string(selector.KV), Values: policies, WhatIf: true,
		Help: "how ranks are chosen: " + strings.Join(policies, "|")},
	{Key: "routing.prefill_policy", Flag: "prefill-policy", At: func(c *Config) any { return &c.Routing.PrefillPolicy }, Values: policies, WhatIf: true,
		Help: "policy for prefill ranks, when it differs"},
	{Key: "routing.decode_policy", Flag: "decode-policy", At: func(c *Config) any { return &c.Routing.DecodePolicy }, Values: policies, WhatIf: true,
		Help: "policy for decode ranks, when it differs"},
	{Key: "routing.threshold", Flag: "routing-threshold", At: func(c *Config) any { return &c.Routing.Threshold }, WhatIf: true,
		Help: "remote prefill from this many `TOKENS` on; 0 is always remote"},
	{Key: "routing.threshold_on", Flag: "routing-threshold-on", At: func(c *Config) any { return &c.Routing.ThresholdOn }, Default: string(decide.OnEffISL), Values: []string{string(decide.OnEffISL), string(decide.OnISL)}, WhatIf: true,
		Help: "what the threshold counts: eff_isl (uncached tokens) or isl (the whole prompt)"},
	{Key: "routing.prefill_fallback", Flag: "prefill-fallback", At: func(c *Config) any { return &c.Routing.PrefillFallback }, Default: string(decide.FallbackLocal), Values: []string{string(decide.FallbackLocal), string(decide.FallbackError)}, WhatIf: true,
		Help: "when no prefill worker can be had: local|error"},
	{Key: "routing.missing_params", Flag: "missing-params", At: func(c *Config) any { return &c.Routing.MissingParams }, Default: "error", Values: []string{"error", "local"},
		Help: "when a prefill answers without transfer parameters: error|local"},
	{Key: "routing.transfer_check", Flag: "transfer-check", At: func(c *Config) any { return &c.Routing.TransferCheck }, Default: string(workers.TransferStrict), Values: []string{string(workers.TransferStrict), string(workers.TransferReport)},
		Help: "transfer parameters that are not as expected and do no known harm: strict (refused) or report (used and told)"},
	{Key: "routing.overlap_credit", Flag: "overlap-credit", At: func(c *Config) any { return &c.Routing.Weights.OverlapCredit }, Default: weights.OverlapCredit, Check: weight, WhatIf: true,
		Help: "weight of cached blocks in the kv cost"},
	{Key: "routing.credit_decay", Flag: "overlap-credit-decay", At: func(c *Config) any { return &c.Routing.Weights.CreditDecay }, Default: weights.CreditDecay, Check: weight, WhatIf: true,
		Help: "how fast the credit fades on ranks with more prefill work"},
	{Key: "routing.prefill_load_scale", Flag: "prefill-load-scale", At: func(c *Config) any { return &c.Routing.Weights.PrefillLoadScale }, Default: weights.PrefillLoadScale, Check: weight, WhatIf: true,
		Help: "weight of prefill work in the kv cost"},
	{Key: "routing.queue_weight", Flag: "queue-weight", At: func(c *Config) any { return &c.Routing.Weights.Queue }, Default: weights.Queue, Check: weight, WhatIf: true,
		Help: "weight of prefill work that a rank has already in the kv cost"},
	{Key: "routing.decode_load", Flag: "decode-load", At: func(c *Config) any { return &c.Routing.Weights.DecodeLoad }, Default: weights.DecodeLoad, Check: weight, WhatIf: true,
		Help: "weight of a rank's active blocks in the kv cost"},
	{Key: "routing.spread", Flag: "spread", At: func(c *Config) any { return &c.Routing.Weights.Spread }, Default: weights.Spread, Check: weight, WhatIf: true,
		Help: "weight of a rank's recent share of uncached prompts in the kv cost"},
	{Key: "routing.request_weight", Flag: "request-weight", At: func(c *Config) any { return &c.Routing.Weights.ActiveRequest }, Default: weights.ActiveRequest, Check: weight, WhatIf: true,
		Help: "blocks that each active request adds to the kv cost"},
	{Key: "routing.temperature", Flag: "temperature", At: func(c *Config) any { return &c.Routing.Weights.Temperature }, Default: weights.Temperature, Check: weight, WhatIf: true,
		Help: "0 takes the best rank; more draws among near ones"},
	{Key: "routing.busy_decode_blocks", Flag: "busy-decode-blocks", At: func(c *Config) any { return &c.Routing.Busy.DecodeBlocksShare }, Check: share, WhatIf: true,
		Help: "leave out ranks whose active blocks exceed this share of their cache; 0 is off"},
	{Key: "routing.busy_prefill_tokens", Flag: "busy-prefill-tokens", At: func(c *Config) any { return &c.Routing.Busy.PrefillTokens }, Check: notNegative, WhatIf: true,
		Help: "leave out ranks with more active prefill `TOKENS`; 0 is off"},
	{Key: "routing.busy_waiting", Flag: "busy-waiting", At: func(c *Config) any { return &c.Routing.Busy.Waiting }, Check: notNegative, WhatIf: true,
		Help: "leave out ranks with more waiting requests; 0 is off"},
	{Key: "routing.busy_kv_usage", Flag: "busy-kv-usage", At: func(c *Config) any { return &c.Routing.Busy.KVUsage }, Check: share, WhatIf: true,
		Help: "leave out ranks whose engine reports a higher cache usage; 0 is off"},
	{Key: "routing.busy_requests", Flag: "busy-requests", At: func(c *Config) any { return &c.Routing.Busy.Requests }, Check: notNegative, WhatIf: true,
		Help: "leave out decode ranks with this many requests of the router in progress; 0 is off"},
	{Key: "routing.prefill_gate", Flag: "prefill-gate", At: func(c *Config) any { return &c.Routing.PrefillGate }, Check: notNegative, WhatIf: true,
		Help: "stay local when the prefill rank has more active `TOKENS`; 0 is off"},
	{Key: "routing.decode_gate", Flag: "decode-gate", At: func(c *Config) any { return &c.Routing.DecodeGate }, Check: share, WhatIf: true,
		Help: "go remote when the decode rank's cache usage is higher than this share; 0 is off"},
	{Key: "routing.session_header", Flag: "session-key", At: func(c *Config) any { return &c.Routing.SessionHeader }, Default: "X-Session-ID",
		Help: "`HEADER` that names the session for the session policy"},
	{Key: "routing.session_field", Flag: "session-field", At: func(c *Config) any { return &c.Routing.SessionField }, Default: "user",
		Help: "body `FIELD` that names the session when the header is absent"},
	{Key: "routing.allow_headers", Flag: "allow-routing-headers", At: func(c *Config) any { return &c.Routing.AllowHeaders },
		Help: "let clients steer with X-Dynctl-Path, X-Dynctl-Worker and X-data-parallel-rank"},
	{Key: "routing.allow_transfer_fields", Flag: "allow-transfer-fields", At: func(c *Config) any { return &c.Routing.AllowTransferFields },
		Help: "pass kv_transfer_params and the like from clients to engines"},
	{Key: "routing.connector", Flag: "disagg-connector-type", At: func(c *Config) any { return &c.Routing.Connector }, Values: connectors, WhatIf: true,
		Help: "how KV moves, for all workers: " + strings.Join(connectors, "|")},
	{Key: "routing.decoder_registry", Flag: "decoder-registry", At: func(c *Config) any { return &c.Routing.DecoderRegistry },
		Help: "`JSON` object from decoder URL to LMCache receiver"},
	{Key: "routing.prefill_labels", Flag: "prefill-model-labels", At: func(c *Config) any { return &c.Routing.PrefillLabels },
		Help: "values of a worker's label \"model\" that make it a prefill worker"},
	{Key: "routing.decode_labels", Flag: "decode-model-labels", At: func(c *Config) any { return &c.Routing.DecodeLabels },
		Help: "values of a worker's label \"model\" that make it a decode worker"},
	{Key: "routing.seed", Flag: "seed", At: func(c *Config) any { return &c.Routing.Seed }, Fixed: true,
		Help: "seed of random choices; 0 takes one from the clock"},
	{Key: "tokens.tokenizer", Flag: "tokenizer", At: func(c *Config) any { return &c.Tokens.Tokenizer }, Default: "auto", Values: []string{"auto", "local", "engine", "estimate"}, Fixed: true,
		Help: "where token ids come from: auto|local|engine|estimate"},
	{Key: "tokens.path", Flag: "tokenizer-path", At: func(c *Config) any { return &c.Tokens.Path }, Fixed: true,
		Help: "`PATH` of tokenizer.json or of the folder that holds it"},
	{Key: "tokens.block_size", Flag: "block-size", At: func(c *Config) any { return &c.Tokens.BlockSize }, Check: between(0, 4096, "tokens"), Fixed: true,
		Help: "`TOKENS` per block; 0 learns it from the engines"},
	{Key: "tokens.chunk_bytes", Flag: "chunk-bytes", At: func(c *Config) any { return &c.Tokens.ChunkBytes }, Default: 256, Check: between(16, 1<<20, "bytes"), Fixed: true,
		Help: "`BYTES` of a text chunk when there are no tokens"},
	{Key: "tokens.approx_ttl", Flag: "approx-ttl", At: func(c *Config) any { return &c.Tokens.ApproxTTL }, Default: 2 * time.Minute, Check: positive, Fixed: true,
		Help: "how long a text chunk is assumed to stay cached"},
	{Key: "tokens.cache_bytes", Flag: "tokenize-cache", At: func(c *Config) any { return &c.Tokens.CacheBytes }, Default: int64(32 << 20), Check: notNegative, Fixed: true,
		Help: "`BYTES` of engines' tokenizer answers that are remembered for each model; 0 is none"},
	{Key: "index.max_blocks", Flag: "index-max-blocks", At: func(c *Config) any { return &c.Index.MaxBlocks }, Default: 64 << 20, Check: atLeast(1024), Fixed: true,
		Help: "greatest number of (block, rank) entries in the index"},
	{Key: "index.snapshot", Flag: "index-snapshot", At: func(c *Config) any { return &c.Index.Snapshot }, Fixed: true,
		Help: "`FILE` that keeps the index across restarts"},
	{Key: "index.stale_after", Flag: "stale-after", At: func(c *Config) any { return &c.Index.StaleAfter }, Default: 10 * time.Second, Check: positive, Fixed: true,
		Help: "how long a rank may be without event connection before it is called stale"},
	{Key: "limits.body_bytes", Flag: "max-body-bytes", At: func(c *Config) any { return &c.Limits.BodyBytes }, Default: int64(32 << 20), Check: atLeast(1024),
		Help: "greatest request body in `BYTES`"},
	{Key: "limits.body_memory", Flag: "body-memory", At: func(c *Config) any { return &c.Limits.BodyMemory }, Default: int64(1 << 30),
		Help: "`BYTES` that all request bodies may take together; beyond, requests get 503"},
	{Key: "limits.client_connections", Flag: "max-client-connections", At: func(c *Config) any { return &c.Limits.ClientConnections }, Default: 1024, Check: notNegative,
		Help: "greatest number of connections from one address, of IPv6 from one /64; 0 is no limit; loopback and trusted_proxies have none"},
	{Key: "limits.inflight", Flag: "max-inflight", At: func(c *Config) any { return &c.Limits.Inflight }, Check: notNegative,
		Help: "greatest number of requests in progress; 0 is no limit"},
	{Key: "limits.queue", Flag: "queue-size", At: func(c *Config) any { return &c.Limits.Queue }, Default: 1024, Check: notNegative,
		Help: "how many requests may wait for that, and as many for a rank that is under the limits of routing.busy_*; 0 refuses them at once"},
	{Key: "limits.queue_timeout", Flag: "queue-timeout", At: func(c *Config) any { return &c.Limits.QueueTimeout }, Default: 30 * time.Second, Check: positive,
		Help: "longest wait in the queue"},
	{Key: "limits.tenant_header", Flag: "tenant-header", At: func(c *Config) any { return &c.Limits.TenantHeader },
		Help: "request `HEADER` that names the tenant whose turn it takes where requests wait; without it, or without the header, tenant_field, then the API key's tenant"},
	{Key: "limits.tenant_field", Flag: "tenant-field", At: func(c *Config) any { return &c.Limits.TenantField },
		Help: "`FIELD` of the request's body that names the tenant, such as user"},
	{Key: "timeouts.dial", Flag: "dial-timeout", At: func(c *Config) any { return &c.Timeouts.Dial }, Default: 2 * time.Second, Check: positive, Fixed: true,
		Help: "to connect to a worker"},
	{Key: "timeouts.prefill", Flag: "prefill-timeout", At: func(c *Config) any { return &c.Timeouts.Prefill }, Default: 5 * time.Minute, Check: positive,
		Help: "for a prefill leg"},
	{Key: "timeouts.response", Flag: "response-timeout", At: func(c *Config) any { return &c.Timeouts.Response }, Default: 10 * time.Minute, Check: positive,
		Help: "to the first byte of a decode answer"},
	{Key: "timeouts.idle", Flag: "idle-timeout", At: func(c *Config) any { return &c.Timeouts.Idle }, Default: 5 * time.Minute, Check: positive,
		Help: "between two reads of a stream"},
	{Key: "timeouts.body", Flag: "body-timeout", At: func(c *Config) any { return &c.Timeouts.Body }, Default: time.Minute, Check: positive,
		Help: "to read a client's body"},
	{Key: "timeouts.write", Flag: "write-timeout", At: func(c *Config) any { return &c.Timeouts.Write }, Default: 30 * time.Second, Check: positive,
		Help: "for one write to a slow client"},
	{Key: "timeouts.drain", Flag: "drain-timeout", At: func(c *Config) any { return &c.Timeouts.Drain }, Default: 30 * time.Second, Check: positive,
		Help: "for running streams when the router stops"},
	{Key: "timeouts.kv_lease", Flag: "kv-lease", At: func(c *Config) any { return &c.Timeouts.KVLease }, Default: 30 * time.Second, Check: positive,
		Help: "how long prefill engines keep KV for a decode engine that is silent (vLLM: kv_lease_duration)"},
	{Key: "retry.attempts", Flag: "attempts", At: func(c *Config) any { return &c.Retry.Attempts }, Default: 3, Check: between(1, 16, "tries"),
		Help: "greatest number of tries before the first byte"},
	{Key: "retry.budget", Flag: "retry-budget", At: func(c *Config) any { return &c.Retry.Budget }, Default: 0.2, Check: share,
		Help: "share of requests that may be retried"},
	{Key: "continue.mode", Flag: "continue", At: func(c *Config) any { return &c.Continue.Mode }, Default: ContinueOff, Values: []string{ContinueOff, ContinueExact},
		Help: "off|exact; exact has another engine go on with a stream whose engine dies in the middle"},
	{Key: "continue.moves", Flag: "continue-moves", At: func(c *Config) any { return &c.Continue.Moves }, Default: 4, Check: between(1, 64, "times"),
		Help: "how often one stream may go on elsewhere"},
	{Key: "health.interval", Flag: "health-interval", At: func(c *Config) any { return &c.Health.Interval }, Default: time.Second, Check: positive, Fixed: true,
		Help: "between two probes of a worker"},
	{Key: "health.timeout", Flag: "health-timeout", At: func(c *Config) any { return &c.Health.Timeout }, Default: 2 * time.Second, Check: positive, Fixed: true,
		Help: "for one probe"},
	{Key: "health.scrape", Flag: "scrape-interval", At: func(c *Config) any { return &c.Health.Scrape }, Default: time.Second, Check: positive, Fixed: true,
		Help: "between two reads of a worker's metrics"},
	{Key: "health.slow_factor", Flag: "slow-factor", At: func(c *Config) any { return &c.Health.SlowFactor }, Default: 2.0, Check: slowFactor,
		Help: "ranks this many times slower than their peers and their own past are told of; 0 is off"},
	{Key: "trace.endpoint", Flag: "otlp-endpoint", At: func(c *Config) any { return &c.Trace.Endpoint }, Fixed: true,
		Help: "`URL` of an OTLP/HTTP collector; empty is off"},
	{Key: "trace.sample", Flag: "trace-sample", At: func(c *Config) any { return &c.Trace.Sample }, Default: 1.0, Check: share, Fixed: true,
		Help: "share of requests traced, 0 to 1"},
	{Key: "log.level", Flag: "log-level", At: func(c *Config) any { return &c.Log.Level }, Default: "info", Values: []string{"debug", "info", "warn", "error"},
		Help: "debug|info|warn|error"},
	{Key: "log.format", Flag: "log-format", At: func(c *Config) any { return &c.Log.Format }, Default: "auto", Values: []string{"auto", "text", "json"}, Fixed: true,
		Help: "auto|text|json"},
	{Key: "aliases", At: func(c *Config) any { return &c.Aliases }, Help: "further names for models, in the file only"},
	{Key: "receipts", Flag: "receipts", At: func(c *Config) any { return &c.Receipts }, Default: 4096, Check: between(16, 1<<20, "decisions"), Fixed: true,
		Help: "how many decisions are kept in memory"},
	{Key: "events", Flag: "events", At: func(c *Config) any { return &c.Events }, Default: 4096, Check: between(16, 1<<20, "events"), Fixed: true,
		Help: "how many events are kept in memory"},
}

var (
	weights    = selector.DefaultWeights()
	policies   = words(selector.Policies())
	connectors = words(workers.Connectors())
)

func words[T ~string](list []T) []string {
	texts := make([]string, len(list))
	for i, w := range list {
		texts[i] = string(w)
	}
	return texts
}
