// Package settings is what an operator can set: the values, and one table with a
// row for each. Whatever needs to know a setting reads the table: flags and
// variables, the file and its template, the documents, the checks, what a reload
// may change, and what a what-if may ask.
package settings

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"time"

	"github.com/dynctl/dynctl/internal/router/placement/cost"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/placement/selector"
	"github.com/dynctl/dynctl/internal/workers"
)

// Config is everything that an operator can set. The zero value is not
// usable: start from Default. A Config that a Router runs with is never
// changed; a reload makes a whole new one or keeps the old.
type Config struct {
	// Listen and AdminListen are the addresses of the data plane and of the
	// admin API with /metrics.
	Listen, AdminListen string
	// AdminTokenFile holds the bearer token of the admin API; required when
	// AdminListen is not a loopback address.
	AdminTokenFile string
	// AdminHosts are other names than those of loopback that a request to the admin API may
	// carry in its Host header where there is no token.
	AdminHosts []string

	// TLS and AdminTLS are those of the data plane and of the admin API, EngineTLS is
	// how https engines are spoken to.
	TLS, AdminTLS ServerTLS
	EngineTLS     EngineTLS

	// Keys are the API keys.
	Keys APIKeys

	// TrustedProxies are networks and addresses whose X-Forwarded-For and the
	// like are continued; those of anybody else are replaced.
	TrustedProxies []string

	// RootPath is a path under which the data plane answers too, such as "/llm"; empty for none.
	RootPath string
	// CORSOrigins are the origins of pages that may read answers of the data plane, or "*".
	CORSOrigins []string

	// Worker, Prefill and Decode are worker specs as typed on the command
	// line: "URL,key=value,…" (see workers.ParseSpec).
	Worker, Prefill, Decode []string
	// WorkersFile is a watched file with a list of workers; empty for none.
	WorkersFile string
	// Sim starts simulated engines in this process ("2p2d:dp=2").
	Sim string

	Kubernetes workers.Kubernetes

	// Replicas are the other routers of the fleet.
	Replicas Replicas

	Routing  Routing
	Tokens   Tokens
	Index    Index
	Limits   Limits
	Timeouts Timeouts
	Retry    Retry
	Continue Continue
	Health   Health
	Trace    Trace
	Log      Log

	// Aliases are further names for models.
	Aliases []Alias
	// Receipts is how many decisions are kept in memory.
	Receipts int
	// Events is how many events are kept in memory.
	Events int
}

// ServerTLS is TLS of a server, by watched PEM files; without a certificate the
// server speaks plain HTTP.
type ServerTLS struct {
	// CertFile holds the certificate and its chain, KeyFile its key.
	CertFile, KeyFile string
	// ClientCAFile holds the authorities of the certificates that clients must
	// show; empty asks for none.
	ClientCAFile string
}

// EngineTLS is TLS to engines, by PEM files.
type EngineTLS struct {
	// CAFile holds the authorities that are trusted instead of the system's.
	CAFile string
	// CertFile and KeyFile are the router's own certificate for engines that ask
	// for one.
	CertFile, KeyFile string
	// ServerName is the name that engines' certificates must have instead of their
	// host.
	ServerName string
}

// APIKeys are API keys, by a watched file of their hashes.
type APIKeys struct {
	// File holds them; empty for none.
	File string
	// Required says that requests without one are refused. A wrong one always is.
	Required bool
	// Salt says that each tenant's requests have a cache_salt of its own.
	Salt bool
	// Admin says that the admin API asks for a key with a role, too.
	Admin bool
}

// Replicas joins this router to the others of its fleet.
type Replicas struct {
	// Routers are the cluster ports of other routers, HOST:PORT, or one URL of a NATS server.
	// Empty is a router alone.
	Routers []string
	// Listen is this router's cluster port; a NATS server needs none.
	Listen string
	// Name is unique among the routers; empty takes the host's name and a random part.
	Name string
	// Fleet is the same on all routers of a fleet.
	Fleet string
	// CertFile, KeyFile and CAFile secure the connections of routers, in both directions,
	// or those to a NATS server. With CAFile other routers must show a certificate.
	CertFile, KeyFile, CAFile string
	// PasswordFile has the password that all routers of the fleet share.
	PasswordFile string
	// CredentialsFile are the credentials for a NATS server.
	CredentialsFile string
}

// On reports whether there may be other routers.
func (r *Replicas) On() bool { return len(r.Routers) > 0 }

// Server is the URL of the NATS server; empty where routers connect to each other.
func (r *Replicas) Server() string {
	if len(r.Routers) == 1 && strings.Contains(r.Routers[0], "://") {
		return r.Routers[0]
	}
	return ""
}

// problem is the first contradiction among the settings of replicas, with its key.
func (r *Replicas) problem() *Problem {
	bad := func(key, format string, a ...any) *Problem {
		return &Problem{"replicas." + key, fmt.Errorf(format, a...)}
	}
	external := r.Server() != ""
	switch {
	case !r.On():
		return nil
	case (r.CertFile == "") != (r.KeyFile == ""):
		return bad("cert_file", "a certificate needs its key: set both replicas.cert_file and replicas.key_file, or neither")
	case external && r.PasswordFile != "":
		return bad("password_file", "it is for the cluster ports of routers; for a NATS server set replicas.credentials_file, or a user in its URL")
	case external:
		return nil
	case r.CredentialsFile != "":
		return bad("credentials_file", "it is for a NATS server (replicas.routers: nats://HOST:PORT); routers that connect to each other share replicas.password_file")
	case r.CAFile != "" && r.CertFile == "":
		return bad("ca_file", "routers show certificates over TLS only: set replicas.cert_file and replicas.key_file, too")
	case !Loopback(r.Listen) && r.CertFile == "":
		return bad("listen", "%s is not a loopback address: set replicas.cert_file and replicas.key_file, and replicas.password_file or replicas.ca_file, so that other processes cannot join", r.Listen)
	case !Loopback(r.Listen) && r.PasswordFile == "" && r.CAFile == "":
		return bad("listen", "%s is not a loopback address: set replicas.password_file, or replicas.ca_file for the certificates of other routers, so that other processes cannot join", r.Listen)
	}
	return nil
}

// Alias lets clients ask for Model under the name Name, which may be a pattern
// ([workers.IsPattern]).
type Alias struct {
	Name, Model string
}

// Routing decides where a request goes.
type Routing struct {
	// Policy chooses ranks in both phases; PrefillPolicy and DecodePolicy
	// override it for one.
	Policy, PrefillPolicy, DecodePolicy string
	// Threshold in tokens: remote prefill when the measure named by
	// ThresholdOn ("eff_isl" or "isl") is at least this; 0 or less is always
	// remote. With Auto the path is taken that costs less.
	Threshold   decide.Threshold
	ThresholdOn string
	// Objective is what times are weighed for ("ttft", "itl",
	// "e2e", "goodput"), SLO the limits of a good request ("ttft=2s,itl=25ms").
	Objective, SLO string
	// PrefillFallback is what happens when remote prefill is wanted and
	// cannot be had: "local" or "error".
	PrefillFallback string
	// MissingParams is what happens when a prefill answers 200 without
	// transfer parameters: "error" or "local".
	MissingParams string
	// TransferCheck is "strict" or "report": whether transfer parameters with an unexpected
	// part are used where that does no known harm. A worker may state its own.
	TransferCheck string
	// PrefillUsage has answers report the cached tokens of their prefill engine; without it
	// they keep the decode engine's count.
	PrefillUsage bool
	// Weights are those of the kv cost function.
	Weights selector.Weights
	// Busy limits exclude a rank; 0 turns one off.
	Busy selector.Busy
	// PrefillGate keeps a request local while the chosen prefill rank has more
	// active prefill tokens than this; DecodeGate sends it remote while the
	// chosen decode rank uses more than this share of its KV cache. 0 is off.
	PrefillGate int
	DecodeGate  float64
	// DefaultModel serves requests that name no model, or one that no worker serves and
	// no alias matches; empty for none.
	DefaultModel string
	// AnyModel sends names that no worker serves and no alias matches to the engines.
	AnyModel bool
	// SessionHeader and SessionField name the session of a request for the
	// session policy.
	SessionHeader, SessionField string
	// AllowHeaders lets clients steer with X-Dynctl-* and
	// X-data-parallel-rank; AllowTransferFields passes kv_transfer_params and
	// the like from clients to engines.
	AllowHeaders, AllowTransferFields bool
	// Connector overrides the workers' connector: "" (each worker's own),
	// or one of workers.Connectors.
	Connector string
	// DecoderRegistry maps decoder URLs to LMCache receiver specs (JSON).
	DecoderRegistry string
	// PrefillLabels and DecodeLabels give the role by the label "model" of a
	// worker, as production-stack does.
	PrefillLabels, DecodeLabels []string
	// Seed of the random draws; 0 takes one from the clock.
	Seed uint64
}

// Tokens says how prompts become block hashes.
type Tokens struct {
	// Tokenizer is "auto", "local", "engine" or "estimate".
	Tokenizer string
	// Path is the tokenizer.json, or the folder that holds it.
	Path string
	// BlockSize of the router in tokens; 0 learns it from the engines.
	BlockSize int
	// ChunkBytes is the length of a text chunk in approximate routing.
	ChunkBytes int
	// ApproxTTL is how long a chunk is assumed to stay cached where it went.
	ApproxTTL time.Duration
	// CacheBytes bounds, for each model, the engines' answers to /tokenize that
	// are remembered; 0 remembers none.
	CacheBytes int64
}

// Index bounds the KV index.
type Index struct {
	// MaxBlocks is the greatest number of (block, rank) memberships.
	MaxBlocks int
	// Snapshot is a file that keeps the index across restarts; empty for none.
	Snapshot string
	// StaleAfter is how long a rank may be without connection to its events
	// before it is called stale; it is not trusted from the first moment.
	StaleAfter time.Duration
}

// Limits bounds what clients may request at a time.
type Limits struct {
	// BodyBytes is the greatest request body.
	BodyBytes int64
	// BodyMemory is what the bodies of all requests may take in sum.
	BodyMemory int64
	// ClientConnections is the greatest number of connections from one address; 0 is
	// no limit.
	ClientConnections int
	// Inflight is the greatest number of requests in progress; 0 is no limit.
	Inflight int
	// Legs is the greatest number of requests to workers in progress; 0 is by the limit of
	// open files.
	Legs int
	// Queue is how many requests may wait beyond Inflight, and as many for a rank with
	// room; QueueTimeout how long.
	Queue        int
	QueueTimeout time.Duration
	// WaitForWorker has requests for a known model without a usable worker wait for one, too.
	WaitForWorker bool
	// TenantHeader and TenantField name the tenant of a request that waits, before its
	// API key does.
	TenantHeader, TenantField string
}

// Timeouts bounds waits. A live stream has no total timeout.
type Timeouts struct {
	Dial     time.Duration
	Prefill  time.Duration
	Response time.Duration // to the first byte of a decode answer
	Idle     time.Duration // between two reads of a stream
	Body     time.Duration // to read a client's body
	// ClientIdle is how long a client's connection is kept between two requests.
	ClientIdle time.Duration
	Write      time.Duration // one write to a slow client
	// SSEKeepAlive is the time between two comments to the client of a stream that has no
	// token yet; 0 for none.
	SSEKeepAlive time.Duration
	// Leave is how long new requests are served after the signal to end, Drain how
	// long running ones may take after that.
	Leave, Drain time.Duration
	// KVLease is how long prefill engines keep the KV of a prefill for a decode
	// engine that they have not heard of (vLLM: kv_lease_duration).
	KVLease time.Duration
}

// Retry bounds retries before the first byte.
type Retry struct {
	// Attempts is the greatest number of tries of one request, the first
	// included.
	Attempts int
	// Budget is the share of requests that may be retried at any time, on top
	// of a floor of ten in a ten-second window.
	Budget float64
}

// The values of Continue.Mode.
const (
	ContinueOff   = "off"
	ContinueExact = "exact"
)

// Continue says what happens to a stream whose engine dies in the middle.
type Continue struct {
	// Mode is "off", or "exact": another engine continues those streams whose tokens the
	// router can show to be right.
	Mode string
	// Moves is how often the rest of one stream may come from another engine.
	Moves int
	// PerRank is how many such rests a rank begins with at a time; more wait.
	PerRank int
}

// Health times the probes.
type Health struct {
	Interval, Timeout, Scrape time.Duration
	// SlowFactor is how many times slower than its peers a rank must be to be reported
	// as slow; 0 turns that off.
	SlowFactor float64
}

// OTLPGRPC is the value of [Trace.Protocol] for OTLP over gRPC.
const OTLPGRPC = "grpc"

// Trace sends spans to an OTLP collector.
type Trace struct {
	// Endpoint is the collector's URL; empty is off.
	Endpoint string
	// Protocol carries the spans: "http/protobuf" or [OTLPGRPC].
	Protocol string
	// ServiceName is the service.name of the spans.
	ServiceName string
	// Sample is the share of requests that start a trace of their own, 0 to 1.
	Sample float64
}

// Log shapes the log on stderr.
type Log struct {
	Level, Format string
	// Access is the form of the access log on stdout: "off", "text" or "json".
	Access string
}

// Default is a config with every default in place and no workers.
func Default() Config { return defaults }

var defaults = func() (c Config) {
	for _, r := range rows {
		if r.Default != nil {
			r.Set(&c, r.Default)
		}
	}
	return c
}()

// A Problem is what is wrong with the value of a key.
type Problem struct {
	Key string // with an index for one of a list: "aliases[1]"
	Err error
}

func (p *Problem) Error() string { return p.Key + ": " + p.Err.Error() }

// Unwrap returns the cause.
func (p *Problem) Unwrap() error { return p.Err }

// Validate returns every problem of the config together, each naming its key.
func (c *Config) Validate() error { return joined(c.Problems()) }

func joined(list []*Problem) error {
	var errs []error
	for _, p := range list {
		errs = append(errs, p)
	}
	return errors.Join(errs...)
}

// Problems are what Validate reports.
func (c *Config) Problems() []*Problem {
	var list []*Problem
	bad := func(key, format string, a ...any) {
		list = append(list, &Problem{key, fmt.Errorf(format, a...)})
	}
	for _, r := range rows {
		if err := r.check(r.Get(c)); err != nil {
			bad(r.Key, "%w", err)
		}
	}
	// What more than one value has a part in.
	if c.Keys.Admin && c.Keys.File == "" {
		bad("keys.admin", "there are no keys to ask for: set keys.file (--api-keys-file), too")
	}
	if c.Keys.Salt && c.Keys.File == "" {
		bad("keys.salt", "tenants are those of API keys: set keys.file (--api-keys-file), too")
	}
	if c.AdminTokenFile == "" && c.AdminTLS.ClientCAFile == "" && !c.Keys.Admin && !Loopback(c.AdminListen) {
		bad("admin_listen", "%s is not a loopback address: set admin_token_file (--admin-token-file), or ask for keys (--api-keys-admin) or certificates (--admin-tls-client-ca-file), so that not everyone can steer the router", c.AdminListen)
	}
	for _, pair := range []struct{ section, cert, key string }{
		{"tls", c.TLS.CertFile, c.TLS.KeyFile}, {"admin_tls", c.AdminTLS.CertFile, c.AdminTLS.KeyFile}, {"engine_tls", c.EngineTLS.CertFile, c.EngineTLS.KeyFile},
	} {
		if (pair.cert == "") != (pair.key == "") {
			bad(pair.section+".cert_file", "a certificate needs its key: set both %[1]s.cert_file and %[1]s.key_file, or neither", pair.section)
		}
	}
	for _, server := range []struct {
		section string
		tls     ServerTLS
	}{{"tls", c.TLS}, {"admin_tls", c.AdminTLS}} {
		if server.tls.ClientCAFile != "" && server.tls.CertFile == "" {
			bad(server.section+".client_ca_file", "clients show certificates over TLS only: set %[1]s.cert_file and %[1]s.key_file, too", server.section)
		}
	}
	if c.Tokens.Tokenizer == "local" && c.Tokens.Path == "" {
		bad("tokens.path", "tokenizer \"local\" needs the path of a tokenizer.json (--tokenizer-path)")
	}
	if c.Trace.Protocol == OTLPGRPC && collector(c.Trace.Endpoint) == nil && !hostPortOnly(c.Trace.Endpoint) {
		bad("trace.endpoint", "with trace.protocol grpc this is a URL of host and port alone, such as http://collector:4317")
	}
	if c.Limits.BodyMemory < c.Limits.BodyBytes {
		bad("limits.body_memory", "%d is less than limits.body_bytes (%d): not even one request of that size could be read", c.Limits.BodyMemory, c.Limits.BodyBytes)
	}
	if p := c.Replicas.problem(); p != nil {
		list = append(list, p)
	}
	names, seen := c.Names(), map[string]bool{}
	for i, a := range c.Aliases {
		key := fmt.Sprintf("aliases[%d]", i)
		switch err := names.CheckAlias(a.Name); {
		case a.Model == "": // another one of its name may have one
			bad(key, "an alias needs a name and a model")
		case err != nil:
			bad(key, "%w", err)
		}
		if seen[a.Name] {
			bad(key, "alias %q appears twice", a.Name)
		}
		seen[a.Name] = true
	}
	if err := names.CheckDefault(); err != nil {
		bad("routing.default_model", "%w", err)
	}
	return list
}

// Specs are the workers that the config lists, each with the flag that it belongs to as
// its origin. The error names every entry that cannot be read.
func (c *Config) Specs() ([]workers.Spec, error) {
	specs, problems := c.ReadSpecs()
	return specs, joined(problems)
}

// ReadSpecs is Specs with the problems one by one.
func (c *Config) ReadSpecs() (specs []workers.Spec, problems []*Problem) {
	for _, list := range []struct {
		key   string
		role  workers.Role
		specs []string
	}{{"worker", "", c.Worker}, {"prefill", workers.Prefill, c.Prefill}, {"decode", workers.Decode, c.Decode}} {
		for i, text := range list.specs {
			s, err := workers.ParseSpec(list.role, text)
			if err != nil {
				problems = append(problems, &Problem{fmt.Sprintf("%s[%d]", list.key, i), err})
				continue
			}
			s.Origin = "--" + list.key
			specs = append(specs, s)
		}
	}
	return specs, problems
}

// CanFollow returns every setting in which c differs from the config that is in
// force and that cannot change while the router runs.
func (c *Config) CanFollow(old *Config) error {
	var errs []error
	for _, r := range Changed(old, c) {
		if r.Fixed {
			errs = append(errs, fmt.Errorf("%s cannot change while the router runs (now %v): restart it", r.Key, r.Shown(old)))
		}
	}
	return errors.Join(errs...)
}

// Policies are those of the prefill and of the decode phase.
func (r *Routing) Policies() (prefill, decode selector.Policy) {
	return selector.Policy(cmp.Or(r.PrefillPolicy, r.Policy)), selector.Policy(cmp.Or(r.DecodePolicy, r.Policy))
}

// Plan is what a plan reads of the settings.
func (r *Routing) Plan() decide.Rule {
	rule := decide.Rule{
		On: decide.Measure(r.ThresholdOn), Fallback: decide.Fallback(r.PrefillFallback),
		PrefillGate: r.PrefillGate, DecodeGate: r.DecodeGate, Connector: workers.Connector(r.Connector),
		LoadCredit: decide.LoadCredit,
	}
	r.Threshold.Apply(&rule)
	return rule
}

// Aim is what times are weighed for.
func (r *Routing) Aim() cost.Objective {
	o := cost.Objective{For: cost.Aim(r.Objective)}
	o.TTFT, o.ITL, _ = cost.ParseSLO(r.SLO) // checked by its row
	return o
}

// RoleLabels are the values of a worker's label that stand for a role.
func (r *Routing) RoleLabels() workers.RoleLabels {
	return workers.RoleLabels{Prefill: r.PrefillLabels, Decode: r.DecodeLabels}
}

// Names are the rules for the models that clients name.
func (c *Config) Names() workers.Names {
	n := workers.Names{Aliases: make(map[string]string, len(c.Aliases)), Default: c.Routing.DefaultModel, Any: c.Routing.AnyModel}
	for _, a := range c.Aliases {
		n.Aliases[a.Name] = a.Model
	}
	return n
}

// Decisions is what decisions read of the settings.
func (c *Config) Decisions() decide.Options {
	r := &c.Routing
	s := decide.Options{
		Weights: r.Weights, Busy: r.Busy, Rule: r.Plan(),
		Attempts: c.Retry.Attempts, LocalWithoutParams: r.MissingParams == "local",
	}
	if c.Continue.Mode == ContinueExact {
		s.Continuations = c.Continue.Moves
	}
	s.Prefill, s.Decode = r.Policies()
	return s
}

// SetPlan is the other direction, for a plan's settings that were recorded.
func (r *Routing) SetPlan(c decide.Rule) {
	r.Threshold, r.ThresholdOn, r.PrefillFallback = decide.Threshold{Tokens: c.Threshold, Auto: c.Auto}, string(c.On), string(c.Fallback)
	r.PrefillGate, r.DecodeGate, r.Connector = c.PrefillGate, c.DecodeGate, string(c.Connector)
}

// Proxies reads TrustedProxies: networks ("10.0.0.0/8") and single addresses.
func (c *Config) Proxies() ([]netip.Prefix, error) { return parseProxies(c.TrustedProxies) }

func parseProxies(texts []string) ([]netip.Prefix, error) {
	list := make([]netip.Prefix, 0, len(texts))
	for _, t := range texts {
		p, err := netip.ParsePrefix(t)
		if a, e := netip.ParseAddr(t); e == nil {
			p, err = netip.PrefixFrom(a.Unmap(), a.Unmap().BitLen()), nil
		}
		if err != nil {
			return nil, fmt.Errorf("%q is neither a network such as 10.0.0.0/8 nor an address", t)
		}
		list = append(list, p.Masked())
	}
	return list, nil
}

// Loopback reports whether a listen address is reached from this machine only.
func Loopback(addr string) bool {
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
