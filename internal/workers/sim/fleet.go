// Package sim is a fleet of simulated engines on real loopback sockets: each
// engine answers HTTP like vLLM or SGLang, publishes KV events over ZeroMQ,
// moves KV over a side channel, and can be broken on purpose.
//
// The parts are packages of their own: cache (paged KV cache), engine (the pure model of
// one rank, and how long steps take), profiles (timing of real GPUs), vocab (the tokenizer),
// sockets (KV events and transfers), front (HTTP, and ranks in real time), virtual (ranks
// under a virtual clock), fault (what goes wrong). docs/simulator.md describes the options
// and the model.
package sim

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/workers/sim/engine"
	"github.com/dynctl/dynctl/internal/workers/sim/fault"
	"github.com/dynctl/dynctl/internal/workers/sim/profiles"
	"github.com/dynctl/dynctl/internal/workers/sim/vocab"
)

// Group is a number of equal engines.
type Group struct {
	Role  workers.Role
	Count int

	// Engine is whose wire the engines speak: vllm or sglang.
	Engine    workers.Engine
	Connector workers.Connector
	// Version is that of vLLM which the engines claim, "" for 0.32.0. NIXL moves nothing
	// between two of them; from 0.33 on answers have what that added.
	Version string
	// Model is the served name, Aliases further names of it, LoRAs adapters.
	Model          string
	Aliases, LoRAs []string
	// DP is the number of data-parallel ranks of one engine.
	DP int
	// LB says which ranks are behind a port: all of the deployment, in which each engine then is
	// one, or with hybrid and external the DP ranks of each of the group's Count engines, which
	// make one deployment together.
	LB workers.LB
	// BlockSize is in tokens; Blocks counts one rank's blocks, vLLM's null
	// block included.
	BlockSize, Blocks int
	// HostBlocks are blocks of one rank in the host's memory, 0 for none; Storage
	// adds a store behind that.
	HostBlocks       int
	Storage          bool
	MaxModelLen      int
	MaxSeqs          int
	MaxBatchedTokens int
	// Profile is a file, a built-in name ("mocker", "instant", "cpu") or one of package
	// profiles. Transfer is one of that package's transfers, which takes the place of the
	// profile's; empty keeps that.
	Profile, Transfer string
	Noise             float64 // percent
	Speed             float64
	// Seed makes the fleet deterministic; Weights makes the answers, equal for
	// engines that serve the same model.
	Seed, Weights uint64
	// FixedNames keeps block names equal on all engines and over restarts, as
	// with PYTHONHASHSEED set.
	FixedNames bool
	// OSL is the mean length of an answer that nothing else ends.
	OSL int
	// Letters makes answers of characters that take several tokens, and of words.
	Letters bool

	// Events says whether and how KV events are published.
	Events EventForm
	// BinHash sends hashes as bytes instead of integers.
	BinHash bool
	// NoReplay leaves out the replay socket; Steps is its memory in batches.
	NoReplay bool
	Steps    int
	Topic    string
	// Dial makes publishers dial these endpoints instead of binding: one per
	// rank of the fleet, in order.
	Dial []string

	// Recompute is kv_load_failure_policy "recompute".
	Recompute bool
	Lease     time.Duration
	// Patience is how long an unknown engine's side channel port is tried.
	Patience time.Duration
	// BootstrapWait bounds both waits of an SGLang rendezvous.
	BootstrapWait time.Duration
	// Store is the folder of the shared-storage connector; empty keeps it in
	// memory, shared by the fleet.
	Store string
	// TLS serves HTTP over TLS; Running.ClientTLS trusts it.
	TLS bool
	// AutoRestart brings an engine that exited up again after a time;
	// 0 leaves it down.
	AutoRestart time.Duration
	// BasePort makes ports predictable: the first engine listens on it, the
	// next on the following one. 0 continues counting after the group before, or
	// lets the system choose when no group before names a port.
	BasePort int

	Faults fault.Set
}

// EventForm is how KV events are encoded.
type EventForm string

// The event forms.
const (
	EventsMap   EventForm = "map"
	EventsArray EventForm = "array"
	EventsOff   EventForm = "off"
)

// Models are all names that the engines answer to, those of adapters last.
func (g *Group) Models() []string { return slices.Concat([]string{g.Model}, g.Aliases, g.LoRAs) }

// Fleet is the engines to start.
type Fleet struct {
	Groups []Group
}

// DefaultModel is the served name when none is given.
const DefaultModel = "sim"

// DefaultGroup is a group with the defaults of everything but role and count.
func DefaultGroup() Group {
	return Group{
		Engine: workers.VLLM, Model: DefaultModel, DP: 1, BlockSize: 16, Blocks: 4096,
		MaxModelLen: 32768, MaxSeqs: 256, MaxBatchedTokens: 8192, Profile: "mocker", Speed: 1,
		Seed: 1, Weights: 1, OSL: 128, Events: EventsMap, Steps: 10000,
		Lease: 30 * time.Second, Patience: 5 * time.Second, BootstrapWait: 300 * time.Second,
	}
}

var (
	countsPattern = regexp.MustCompile(`^(\d+[pda])+$`)
	// versionPattern is a release that this can play.
	versionPattern = regexp.MustCompile(`^0\.\d{1,3}\.\d{1,3}$`)
	countPattern   = regexp.MustCompile(`(\d+)([pda])`)
)

// maxEngines bounds a fleet.
const maxEngines = 1024

// ParseFleet reads the text form of a fleet:
//
//	fleet   = part *("+" part)
//	part    = counts [":" option *("," option)]
//	counts  = 1*(number ("p" | "d" | "a"))       ; prefill, decode, aggregated
//	option  = key "=" value
//
// as in "2p2d", "3a", "2p4d:dp=2,engine=sglang,block=16" and
// "2p:profile=fast.yaml+4d:kv_blocks=512". Everything wrong is reported together.
func ParseFleet(text string) (Fleet, error) {
	var f Fleet
	var errs []error
	if strings.TrimSpace(text) == "" {
		return f, errors.New(`fleet is empty: want something like "2p2d"`)
	}
	total := 0
	for _, part := range strings.Split(text, "+") {
		counts, options, _ := strings.Cut(strings.TrimSpace(part), ":")
		if !countsPattern.MatchString(counts) {
			errs = append(errs, fmt.Errorf("fleet %q: want counts like 2p2d (p prefill, d decode, a aggregated)", counts))
			continue
		}
		g := DefaultGroup()
		connectorSet := false
		for _, o := range strings.Split(options, ",") {
			if o = strings.TrimSpace(o); o == "" {
				continue
			}
			key, value, ok := strings.Cut(o, "=")
			if !ok {
				errs = append(errs, fmt.Errorf("fleet option %q: want key=value", o))
				continue
			}
			connectorSet = connectorSet || key == "connector"
			if err := g.set(key, value); err != nil {
				errs = append(errs, fmt.Errorf("fleet option %s: %w", key, err))
			}
		}
		for i, m := range countPattern.FindAllStringSubmatch(counts, -1) {
			g := g
			if i > 0 {
				g.BasePort = 0 // the part's port is that of its first engine
			}
			n, err := strconv.Atoi(m[1])
			if total += n; err != nil || n < 1 || total > maxEngines {
				errs = append(errs, fmt.Errorf("fleet %q: want 1 to %d engines", counts, maxEngines))
				break
			}
			g.Count = n
			g.Role = map[string]workers.Role{"p": workers.Prefill, "d": workers.Decode, "a": workers.Aggregated}[m[2]]
			if !connectorSet && g.Role != workers.Aggregated {
				g.Connector = workers.ConnectorNIXL
				if g.Engine == workers.SGLang {
					g.Connector = workers.ConnectorSGLang
				}
			}
			if err := g.Validate(); err != nil {
				errs = append(errs, fmt.Errorf("fleet %q: %w", m[0], err))
			}
			f.Groups = append(f.Groups, g)
		}
	}
	if len(errs) == 0 {
		_, err := f.ports()
		errs = append(errs, err)
	}
	return f, errors.Join(errs...)
}

// ports gives the HTTP port of each group's first engine, 0 where the system
// chooses. Ports that do not exist, or that two engines would share, are an error.
func (f *Fleet) ports() ([]int, error) {
	const last = 1<<16 - 1
	first := make([]int, len(f.Groups))
	next := 0
	for i, g := range f.Groups {
		if g.BasePort != 0 {
			next = g.BasePort
		}
		if first[i] = next; next == 0 {
			continue
		}
		if next += g.Count; next-1 > last {
			return nil, fmt.Errorf("port=%d: the last of the engines would listen on %d, and ports end at %d", first[i], next-1, last)
		}
		for j := range i {
			if b := f.Groups[j]; first[j] != 0 && first[i] < first[j]+b.Count && first[j] < next {
				return nil, fmt.Errorf("port=%d: %d engines (%s) listen on %d to %d already: name a port outside", first[i], b.Count, b.Role, first[j], first[j]+b.Count-1)
			}
		}
	}
	return first, nil
}

// options are those of ParseFleet: each reads its value into the group.
func (g *Group) options() map[string]func(value string) error {
	f := &g.Faults
	return map[string]func(string) error{
		"engine":             oneOf(&g.Engine, map[string]workers.Engine{"vllm": workers.VLLM, "sglang": workers.SGLang}),
		"connector":          oneOf(&g.Connector, connectors()),
		"version":            into(&g.Version, word),
		"model":              into(&g.Model, word),
		"aliases":            into(&g.Aliases, words),
		"loras":              into(&g.LoRAs, words),
		"dp":                 into(&g.DP, strconv.Atoi),
		"lb":                 oneOf(&g.LB, map[string]workers.LB{"internal": workers.LBInternal, "hybrid": workers.LBHybrid, "external": workers.LBExternal}),
		"block":              into(&g.BlockSize, strconv.Atoi),
		"kv_blocks":          into(&g.Blocks, strconv.Atoi),
		"cpu_blocks":         into(&g.HostBlocks, strconv.Atoi),
		"storage":            oneOf(&g.Storage, map[string]bool{"on": true, "off": false}),
		"max_model_len":      into(&g.MaxModelLen, strconv.Atoi),
		"max_seqs":           into(&g.MaxSeqs, strconv.Atoi),
		"max_batched_tokens": into(&g.MaxBatchedTokens, strconv.Atoi),
		"profile":            into(&g.Profile, word),
		"transfer":           oneOf(&g.Transfer, transfers()),
		"noise":              into(&g.Noise, float),
		"speed":              into(&g.Speed, float),
		"seed":               into(&g.Seed, natural),
		"weights":            into(&g.Weights, natural),
		"osl":                into(&g.OSL, strconv.Atoi),
		"answers":            oneOf(&g.Letters, map[string]bool{"words": false, "letters": true}),
		"fixed_names":        into(&g.FixedNames, strconv.ParseBool),
		"events":             oneOf(&g.Events, map[string]EventForm{"map": EventsMap, "array": EventsArray, "off": EventsOff}),
		"hash":               oneOf(&g.BinHash, map[string]bool{"int": false, "bin": true}),
		"replay":             oneOf(&g.NoReplay, map[string]bool{"on": false, "off": true}),
		"steps":              into(&g.Steps, strconv.Atoi),
		"topic":              into(&g.Topic, word),
		"dial":               into(&g.Dial, words),
		"policy":             oneOf(&g.Recompute, map[string]bool{"fail": false, "recompute": true}),
		"lease":              into(&g.Lease, time.ParseDuration),
		"patience":           into(&g.Patience, time.ParseDuration),
		"bootstrap_wait":     into(&g.BootstrapWait, time.ParseDuration),
		"store":              into(&g.Store, word),
		"tls":                oneOf(&g.TLS, map[string]bool{"on": true, "off": false}),
		"auto_restart":       into(&g.AutoRestart, time.ParseDuration),
		"port":               into(&g.BasePort, strconv.Atoi),
		"delay":              into((*time.Duration)(&f.Delay), time.ParseDuration),
		"error_rate":         into(&f.ErrorRate, float),
		"poison":             into(&f.Poison, word),
		"deadly":             into(&f.Deadly, word),
		"hang_rate":          into(&f.HangRate, float),
		"die_rate":           into(&f.DieRate, float),
		"close_idle":         into((*time.Duration)(&f.CloseIdle), time.ParseDuration),
		"late_rate":          into(&f.LateRate, float),
		"end_rate":           into(&f.EndRate, float),
		"drop_events":        into(&f.DropEvents, float),
		"reorder_events":     into(&f.ReorderEvents, float),
		"corrupt_events":     into(&f.CorruptEvents, float),
		"lose_events":        into(&f.LoseEvents, float),
		"drop_replay":        into(&f.DropReplay, float),
		"slow":               into(&f.Slow, float),
	}
}

func word(s string) (string, error)    { return s, nil }
func words(s string) ([]string, error) { return strings.Split(s, "|"), nil }
func float(s string) (float64, error)  { return strconv.ParseFloat(s, 64) }
func natural(s string) (uint64, error) { return strconv.ParseUint(s, 10, 64) }

func transfers() map[string]string {
	all := map[string]string{}
	for _, t := range profiles.Transfers() {
		all[t.Name] = t.Name
	}
	return all
}

func connectors() map[string]workers.Connector {
	all := map[string]workers.Connector{"none": workers.ConnectorNone}
	for _, c := range workers.Connectors() {
		all[string(c)] = c
	}
	return all
}

// into is an option whose value is parsed.
func into[T any](dst *T, parse func(string) (T, error)) func(string) error {
	return func(value string) error {
		v, err := parse(value)
		if err == nil {
			*dst = v
		}
		return err
	}
}

// oneOf is an option with few values.
func oneOf[T any](dst *T, values map[string]T) func(string) error {
	return func(value string) error {
		v, ok := values[value]
		if !ok {
			return fmt.Errorf("%q is not one of %s", value, strings.Join(slices.Sorted(maps.Keys(values)), ", "))
		}
		*dst = v
		return nil
	}
}

func (g *Group) set(key, value string) error {
	options := g.options()
	set, ok := options[key]
	if !ok {
		known := slices.Sorted(maps.Keys(options))
		if near := workers.Nearest(key, known); near != "" {
			return fmt.Errorf("unknown option (did you mean %s?)", near)
		}
		return fmt.Errorf("unknown option (known: %s)", strings.Join(known, ", "))
	}
	return set(value)
}

// Validate reports everything that is wrong with the group.
func (g *Group) Validate() error {
	var errs []error
	within := func(key string, v, low, high int) {
		if v < low || v > high {
			errs = append(errs, fmt.Errorf("%s=%d is not between %d and %d", key, v, low, high))
		}
	}
	within("dp", g.DP, 1, 256)
	switch {
	case g.LB != "" && g.LB != workers.LBInternal && g.Engine != workers.VLLM:
		errs = append(errs, fmt.Errorf("lb=%s is for engine=vllm", g.LB))
	case g.LB == workers.LBExternal && g.DP > 1:
		errs = append(errs, fmt.Errorf("lb=external has one rank behind each port, not dp=%d", g.DP))
	}
	if g.Version != "" && (g.Engine != workers.VLLM || !versionPattern.MatchString(g.Version)) {
		errs = append(errs, fmt.Errorf("version=%s is not a release of vLLM's, like 0.33.0", g.Version))
	}
	within("block", g.BlockSize, 1, 4096)
	within("kv_blocks", g.Blocks, 2, 1<<24)
	within("cpu_blocks", g.HostBlocks, 0, 1<<24)
	switch c := g.Connector; {
	case g.DP > 1 && (c == workers.ConnectorOffloadP2P || c == workers.ConnectorNIXLOffload):
		errs = append(errs, fmt.Errorf("connector=%s is simulated with one rank for an engine, not dp=%d", c, g.DP))
	case g.HostBlocks > 0 && (g.Engine != workers.VLLM || c == workers.ConnectorLMCache || c == workers.ConnectorSharedStorage):
		errs = append(errs, fmt.Errorf("cpu_blocks is for engine=vllm without a connector, or with one of NIXL's, not for connector=%s", c))
	case g.Storage && g.HostBlocks == 0:
		errs = append(errs, errors.New("storage=on needs cpu_blocks: what is stored goes through the host's memory"))
	}
	within("max_model_len", g.MaxModelLen, 2, 1<<24)
	within("max_seqs", g.MaxSeqs, 1, 1<<16)
	within("max_batched_tokens", g.MaxBatchedTokens, 1, 1<<24)
	within("osl", g.OSL, 1, 1<<20)
	within("steps", g.Steps, 1, 1<<24)
	within("port", g.BasePort, 0, 65535)
	if g.Model == "" {
		errs = append(errs, errors.New("model is empty"))
	}
	if !(g.Speed > 0 && g.Speed <= 1e9) {
		errs = append(errs, fmt.Errorf("speed=%v is not between 0 and 1e9", g.Speed))
	}
	if !(g.Noise >= 0 && g.Noise <= 100) {
		errs = append(errs, fmt.Errorf("noise=%v is not between 0 and 100 percent", g.Noise))
	}
	if (g.Engine == workers.SGLang) != (g.Connector == workers.ConnectorSGLang) && g.Connector != workers.ConnectorNone {
		errs = append(errs, fmt.Errorf("connector=%s does not fit engine=%s", g.Connector, g.Engine))
	}
	if err := g.Faults.Validate(); err != nil {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// timing is the group's model with noise as a share and the total speed.
func (g *Group) timing() (m engine.Timing, noise, speed float64, err error) {
	noise, speed = g.Noise/100, g.Speed
	if m, err = g.model(); err != nil {
		return nil, 0, 0, err
	}
	if p, ok := m.(engine.Profile); ok {
		noise = cmp.Or(noise, p.Noise/100)
		speed *= cmp.Or(p.Speed, 1)
	}
	if t, ok := profiles.FindTransfer(g.Transfer); ok {
		m = engine.WithTransfer(m, t.Millis)
	}
	return m, noise, speed, nil
}

// model is what the group's profile names.
func (g *Group) model() (engine.Timing, error) {
	if g.Profile == "" || g.Profile == "mocker" {
		return engine.Mocker{}, nil
	}
	if p, ok := engine.BuiltinProfile(g.Profile); ok {
		return p, nil
	}
	if p, ok := profiles.Find(g.Profile); ok {
		return p.Timing, nil
	}
	p, err := engine.ReadProfile(g.Profile)
	if errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("profile=%s: no file, and not one of %s", g.Profile, strings.Join(ProfileNames(), ", "))
	}
	return p, err
}

// ProfileNames are the profiles that need no file.
func ProfileNames() []string {
	names := []string{"mocker", "instant", "cpu"}
	for _, p := range profiles.All() {
		names = append(names, p.Timing.Name)
	}
	return names
}

// Notes has a line for each profile of a real GPU in the fleet: that it is a model, and of what.
func (f *Fleet) Notes() []string {
	var out []string
	for i := range f.Groups {
		if p, ok := profiles.Find(f.Groups[i].Profile); ok && !slices.Contains(out, p.Note()) {
			out = append(out, p.Note())
		}
	}
	return out
}

// WithProfile is the text of a fleet with a profile for the parts that name none; "" changes
// nothing.
func WithProfile(text, profile string) string {
	if profile == "" {
		return text
	}
	return WithOptions(text, "profile="+profile)
}

// WithOptions is the text of a fleet with options in front of those of each part, which
// therefore win.
func WithOptions(text, options string) string {
	parts := strings.Split(text, "+")
	for i, part := range parts {
		counts, rest, _ := strings.Cut(part, ":")
		parts[i] = strings.TrimSuffix(counts+":"+options+","+rest, ",")
	}
	return strings.Join(parts, "+")
}

// RankConfig is the model of one rank of an engine, index being the engine's
// number in the fleet and incarnation the number of its restarts. What connects
// the rank to others (Publish, Network, Store, Exit) is the caller's. The same
// configuration serves real time and a virtual clock.
func (g *Group) RankConfig(v *vocab.Vocab, index, rank int, incarnation uint64) (engine.Config, error) {
	model, noise, speed, err := g.timing()
	if err != nil {
		return engine.Config{}, err
	}
	names := mixSeed(g.Seed, uint64(index), incarnation, 0x6e616d65, uint64(rank))
	if g.FixedNames {
		names = mixSeed(g.Seed, 0x6e616d65)
	}
	next := v.Word
	if g.Letters {
		next = v.Letter
	}
	return engine.Config{
		BlockSize: g.BlockSize, Blocks: g.Blocks, MaxSeqs: g.MaxSeqs, MaxBatchedTokens: g.MaxBatchedTokens,
		MaxModelLen: g.MaxModelLen, Model: g.Model, Seed: g.Weights, NameSeed: names,
		NoiseSeed: mixSeed(g.Seed, uint64(index), incarnation, 0x6e6f697365, uint64(rank)),
		Timing:    model, Noise: noise, Speed: speed, Next: next, EOS: vocab.End, OSL: g.OSL,
		Recompute: g.Recompute, Lease: g.Lease, HostBlocks: g.HostBlocks, Storage: g.Storage,
		Connector: g.Connector != workers.ConnectorNone || g.HostBlocks > 0, Unique: g.Engine == workers.SGLang,
	}, nil
}
