// Package sim is a fleet of simulated engines on real loopback sockets: each
// engine answers HTTP like vLLM or SGLang, publishes KV events over ZeroMQ,
// moves KV over a side channel, and can be broken on purpose.
//
// The parts are packages of their own: cache (paged KV cache), timing (how
// long steps take), engine (the pure model of one rank), live (a rank in real
// time), vocab (the tokenizer), publish (KV events), sidechannel (KV transfer),
// front (HTTP), fault (what goes wrong). docs/simulator.md describes the
// options and the model.
package sim

import (
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/workers/sim/engine"
	"github.com/dynctl/dynctl/internal/workers/sim/fault"
	"github.com/dynctl/dynctl/internal/workers/sim/timing"
	"github.com/dynctl/dynctl/internal/workers/sim/vocab"
)

// Group is a number of equal engines.
type Group struct {
	Role  workers.Role
	Count int

	// Engine is whose wire the engines speak: vllm or sglang.
	Engine    workers.Engine
	Connector workers.Connector
	// Model is the served name, Aliases further names of it, LoRAs adapters.
	Model          string
	Aliases, LoRAs []string
	// DP is the number of data-parallel ranks of one engine.
	DP int
	// BlockSize is in tokens; Blocks counts one rank's blocks, vLLM's null
	// block included.
	BlockSize, Blocks int
	MaxModelLen       int
	MaxSeqs           int
	MaxBatchedTokens  int
	// Profile is a file or a built-in name ("mocker", "instant", "cpu").
	Profile string
	Noise   float64 // percent
	Speed   float64
	// Seed makes the fleet deterministic; Weights makes the answers, equal for
	// engines that serve the same model.
	Seed, Weights uint64
	// FixedNames keeps block names equal on all engines and over restarts, as
	// with PYTHONHASHSEED set.
	FixedNames bool
	// OSL is the mean length of an answer that nothing else ends.
	OSL int

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
	// AutoRestart brings an engine that exited by itself up again after a time;
	// 0 leaves it down.
	AutoRestart time.Duration
	// BasePort makes ports predictable: the first engine listens on it, the
	// next on the following one. 0 lets the system choose.
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
	countPattern  = regexp.MustCompile(`(\d+)([pda])`)
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
// "2p:profile=fast.yaml+4d:kv_blocks=512". Everything wrong is reported at once.
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
		for _, m := range countPattern.FindAllStringSubmatch(counts, -1) {
			g := g
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
	return f, errors.Join(errs...)
}

// keys are the options of ParseFleet, for messages.
const keys = "aliases, auto_restart, block, bootstrap_wait, connector, dial, dp, engine, events, fixed_names, hash, kv_blocks, lease, loras, max_batched_tokens, max_model_len, max_seqs, model, noise, osl, patience, policy, port, profile, replay, seed, speed, steps, store, tls, topic, weights, and the faults close_idle, delay, die_rate, end_rate, error_rate, hang_rate, late_rate, drop_events, reorder_events, corrupt_events, lose_events, drop_replay, slow"

func (g *Group) set(key, value string) error {
	var err error
	number := func(dst *int) {
		var n int
		if n, err = strconv.Atoi(value); err == nil {
			*dst = n
		}
	}
	float := func(dst *float64) { *dst, err = strconv.ParseFloat(value, 64) }
	big := func(dst *uint64) { *dst, err = strconv.ParseUint(value, 10, 64) }
	duration := func(dst *time.Duration) { *dst, err = time.ParseDuration(value) }
	oneOf := func(allowed ...string) {
		for _, a := range allowed {
			if a == value {
				return
			}
		}
		err = fmt.Errorf("%q is not one of %s", value, strings.Join(allowed, ", "))
	}
	switch key {
	case "engine":
		oneOf("vllm", "sglang")
		g.Engine = workers.Engine(value)
	case "connector":
		if value == "none" {
			g.Connector = workers.ConnectorNone
			break
		}
		known := []string{"none"}
		for _, c := range workers.Connectors() {
			known = append(known, string(c))
		}
		oneOf(known...)
		g.Connector = workers.Connector(value)
	case "model":
		g.Model = value
	case "aliases":
		g.Aliases = strings.Split(value, "|")
	case "loras":
		g.LoRAs = strings.Split(value, "|")
	case "dp":
		number(&g.DP)
	case "block":
		number(&g.BlockSize)
	case "kv_blocks":
		number(&g.Blocks)
	case "max_model_len":
		number(&g.MaxModelLen)
	case "max_seqs":
		number(&g.MaxSeqs)
	case "max_batched_tokens":
		number(&g.MaxBatchedTokens)
	case "profile":
		g.Profile = value
	case "noise":
		float(&g.Noise)
	case "speed":
		float(&g.Speed)
	case "seed":
		big(&g.Seed)
	case "weights":
		big(&g.Weights)
	case "osl":
		number(&g.OSL)
	case "fixed_names":
		g.FixedNames, err = strconv.ParseBool(value)
	case "events":
		oneOf("map", "array", "off")
		g.Events = EventForm(value)
	case "hash":
		oneOf("int", "bin")
		g.BinHash = value == "bin"
	case "replay":
		oneOf("on", "off")
		g.NoReplay = value == "off"
	case "steps":
		number(&g.Steps)
	case "topic":
		g.Topic = value
	case "dial":
		g.Dial = strings.Split(value, "|")
	case "policy":
		oneOf("fail", "recompute")
		g.Recompute = value == "recompute"
	case "lease":
		duration(&g.Lease)
	case "patience":
		duration(&g.Patience)
	case "bootstrap_wait":
		duration(&g.BootstrapWait)
	case "store":
		g.Store = value
	case "tls":
		oneOf("on", "off")
		g.TLS = value == "on"
	case "auto_restart":
		duration(&g.AutoRestart)
	case "port":
		number(&g.BasePort)
	case "delay":
		var d time.Duration
		duration(&d)
		g.Faults.Delay = fault.Duration(d)
	case "error_rate":
		float(&g.Faults.ErrorRate)
	case "hang_rate":
		float(&g.Faults.HangRate)
	case "die_rate":
		float(&g.Faults.DieRate)
	case "close_idle":
		var d time.Duration
		duration(&d)
		g.Faults.CloseIdle = fault.Duration(d)
	case "late_rate":
		float(&g.Faults.LateRate)
	case "end_rate":
		float(&g.Faults.EndRate)
	case "drop_events":
		float(&g.Faults.DropEvents)
	case "reorder_events":
		float(&g.Faults.ReorderEvents)
	case "corrupt_events":
		float(&g.Faults.CorruptEvents)
	case "lose_events":
		float(&g.Faults.LoseEvents)
	case "drop_replay":
		float(&g.Faults.DropReplay)
	case "slow":
		float(&g.Faults.Slow)
	default:
		return fmt.Errorf("unknown option (known: %s)", keys)
	}
	return err
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
	within("block", g.BlockSize, 1, 4096)
	within("kv_blocks", g.Blocks, 2, 1<<24)
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
func (g *Group) timing() (m timing.Model, noise, speed float64, err error) {
	noise, speed = g.Noise/100, g.Speed
	if g.Profile == "" || g.Profile == "mocker" {
		return timing.Mocker{}, noise, speed, nil
	}
	p, ok := timing.Builtin(g.Profile)
	if !ok {
		if p, err = timing.ReadProfile(g.Profile); err != nil {
			return nil, 0, 0, err
		}
	}
	if noise == 0 {
		noise = p.Noise / 100
	}
	if p.Speed > 0 {
		speed *= p.Speed
	}
	return p, noise, speed, nil
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
	return engine.Config{
		BlockSize: g.BlockSize, Blocks: g.Blocks, MaxSeqs: g.MaxSeqs, MaxBatchedTokens: g.MaxBatchedTokens,
		MaxModelLen: g.MaxModelLen, Model: g.Model, Seed: g.Weights, NameSeed: names,
		NoiseSeed: mixSeed(g.Seed, uint64(index), incarnation, 0x6e6f697365, uint64(rank)),
		Timing:    model, Noise: noise, Speed: speed, Words: v.Words(), EOS: vocab.End, OSL: g.OSL,
		Recompute: g.Recompute, Lease: g.Lease, Connector: g.Connector != workers.ConnectorNone, Unique: g.Engine == workers.SGLang,
	}, nil
}
