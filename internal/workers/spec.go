package workers

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
)

// Limits of a Spec; they bound what a typo can make the router allocate.
const (
	maxDP       = 1024
	maxNameLen  = 128
	maxSpecLen  = 16 << 10
	maxListLen  = 1024
	maxKeyFile  = 64 << 10
	maxBlockTok = 1 << 20
	maxChunkTok = 1 << 24
)

// Sources of workers in a registry.
const (
	SourceFlag  = "flag"
	SourceFile  = "file"
	SourceSim   = "sim"
	SourceAdmin = "admin"
	SourceKube  = "kubernetes"
)

// Spec is what an operator states of a worker. Everything but the URL may be left open; what
// the engine reports fills it in.
type Spec struct {
	Facts
	Name   string
	URL    *url.URL
	Labels map[string]string
	// DP is the number of data-parallel ranks; 0 when the engine is to report it.
	DP int
	// DPStart is as in Worker. The ports of Events and Replay, where there is one endpoint
	// for all ranks, count from that of the deployment's first rank.
	DPStart int
	// Events are the endpoints of the KV event publishers: one whose port
	// counts up with the rank, or one for each rank. Replay likewise.
	Events, Replay []string
	// Topic is the subscription prefix.
	Topic string
	// EventsBind says that the router listens on Events.
	EventsBind bool
	// EventsOff says that the router takes no events from this worker, whatever
	// the engine offers.
	EventsOff bool
	// APIKeyFile names a file with the engine's key; APIKey is the key itself.
	APIKeyFile, APIKey string
	// Origin is where this was stated, such as "workers.yaml:12" or "--prefill".
	Origin string

	// The rest is for sources that follow processes. Process names the one behind
	// the URL: another one there is another worker.
	Process string
	// NotReady says why the worker must not be used yet, although it may answer;
	// Leaving why it gets nothing new for good. Both are empty in ordinary times.
	NotReady, Leaving string
}

// specKeys are the keys of facts that Spec.Set takes by their rows, and those that have
// a case there.
var specKeys = func() []string {
	keys := []string{
		"api_key_file", "bootstrap", "dialect", "dp", "dp_start", "events", "kv_hash_seed", "labels", "lmcache", "model", "name", "replay", "topic",
	}
	for i := range facts {
		if facts[i].settable() {
			keys = append(keys, string(facts[i].field))
		}
	}
	slices.Sort(keys)
	return keys
}()

// SpecKeys are the keys that Spec.Set takes, sorted. A file's entry knows "url", too.
func SpecKeys() []string { return slices.Clone(specKeys) }

// ParseSpec reads the flag form of a worker: a URL, then key=value pairs, all
// separated by commas:
//
//	http://10.0.0.1:8000,engine=vllm,dp=2,events=tcp://*:5557,replay=tcp://*:5657
//
// Lists inside a value are separated by semicolons; events, replay, model and labels may also
// be repeated. The role comes from the flag; when that says none, the key role= may. All
// problems are reported together.
func ParseSpec(role Role, text string) (Spec, error) {
	s := Spec{Facts: Facts{Role: role}}
	if len(text) > maxSpecLen {
		return s, fmt.Errorf("a worker of %d bytes (at most %d)", len(text), maxSpecLen)
	}
	head, rest, more := strings.Cut(text, ",")
	var errs []error
	u, err := ParseURL(strings.TrimSpace(head))
	if err != nil {
		errs = append(errs, err)
	}
	s.URL = u
	seen := map[string]bool{}
	for more {
		var part string
		part, rest, more = strings.Cut(rest, ",")
		part = strings.TrimSpace(part)
		key, value, eq := strings.Cut(part, "=")
		key = strings.TrimSpace(key)
		switch {
		case part == "":
			errs = append(errs, errors.New("an empty option (two commas, or one at the end)"))
			continue
		case !eq:
			errs = append(errs, fmt.Errorf("option %q is not key=value", part))
			continue
		case key == "role" && role != "" && value != string(role):
			errs = append(errs, fmt.Errorf("role=%s, but the flag says %s", value, role))
			continue
		case seen[key] && !repeatable(key):
			errs = append(errs, fmt.Errorf("%s is given twice", key))
			continue
		}
		seen[key] = true
		if err := s.Set(key, strings.TrimSpace(value)); err != nil {
			errs = append(errs, err)
		}
	}
	if err := errors.Join(errs...); err != nil {
		return s, fmt.Errorf("worker %q: %w", abbreviate(head), oneLine(err))
	}
	if err := s.Validate(); err != nil {
		return s, err
	}
	return s, nil
}

func repeatable(key string) bool {
	switch key {
	case "events", "replay", "model", "labels":
		return true
	}
	return false
}

// abbreviate keeps a message readable and hides what may be a password.
func abbreviate(head string) string {
	if at := strings.LastIndexByte(head, '@'); at >= 0 {
		head = "…" + head[at:]
	}
	if len(head) > 80 {
		head = head[:77] + "…"
	}
	return head
}

// oneLine joins the lines of a joined error by semicolons; what it wraps stays
// reachable.
func oneLine(err error) error {
	if !strings.Contains(err.Error(), "\n") {
		return err
	}
	return &lineError{err}
}

type lineError struct{ err error }

func (e *lineError) Error() string { return strings.ReplaceAll(e.err.Error(), "\n", "; ") }
func (e *lineError) Unwrap() error { return e.err }

// UnknownKeyError is the error for a key that is not in the list, with the one that was
// probably meant.
func UnknownKeyError(key string, valid []string) error {
	if n := Nearest(key, valid); n != "" {
		return fmt.Errorf("unknown key %q (did you mean %q?)", key, n)
	}
	return fmt.Errorf("unknown key %q (valid: %s)", key, strings.Join(valid, ", "))
}

// Set sets one field from its text form, as in a flag.
func (s *Spec) Set(key, value string) error {
	if !slices.Contains(specKeys, key) {
		return UnknownKeyError(key, specKeys)
	}
	if value == "" && key != "topic" {
		return fmt.Errorf("%s is empty", key)
	}
	var err error
	switch key {
	case "name":
		s.Name = value
	case "dialect":
		s.Dialect, err = oneOf(value, VLLM, SGLang)
	case "model":
		s.Models, err = appendList(s.Models, value)
	case "labels":
		err = s.setLabels(value)
	case "dp":
		s.DP, err = number(value, maxDP)
	case "events":
		err = s.setEvents(value)
	case "replay":
		s.Replay, err = appendEndpoints(s.Replay, value)
	case "topic":
		s.Topic = value
	case "bootstrap":
		s.Bootstrap, err = parseBootstrap(value)
	case "lmcache":
		s.LMCache, err = parseLMCache(value)
	case "dp_start":
		s.DPStart, err = number(value, maxDP-1)
	case "kv_hash_seed":
		s.KVHashSeed = value
	case "api_key_file":
		s.APIKeyFile = value
	default:
		if key == string(FieldConnector) && value == "none" {
			s.Connector = ConnectorNone
			break
		}
		err = factNamed(Field(key)).set(&s.Facts, value)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", key, err)
	}
	return nil
}

// Validate reports every problem of the spec together. It completes the name, and what labels
// state in dynctl's own words.
func (s *Spec) Validate() error {
	var errs []error
	if err := s.StateOwn(s.Labels, nil, false); err != nil {
		errs = append(errs, err)
	}
	add := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if s.URL == nil {
		add("no url")
	} else if s.Name == "" {
		s.Name = DefaultName(s.URL)
	}
	if s.Name != "" {
		if err := validName(s.Name); err != nil {
			errs = append(errs, err)
		}
	}
	if err := known("dialect", s.Dialect, VLLM, SGLang); err != nil {
		errs = append(errs, err)
	}
	var outside error // of a number
	for i := range facts {
		if !facts[i].settable() {
			continue
		}
		switch err := facts[i].check(&s.Facts); {
		case errors.Is(err, errNumber):
			outside = err
		case err != nil:
			errs = append(errs, err)
		}
	}
	if s.Dialect != "" && s.Engine != Sim {
		add("dialect is for engine=sim only")
	}
	if s.EventsOff && (len(s.Events) > 0 || len(s.Replay) > 0) {
		add("events=none beside event or replay endpoints")
	}
	if s.LB == LBExternal && s.DP > 1 {
		add("lb=external has one rank behind each port, not dp=%d", s.DP)
	}
	if s.LB == LBInternal && s.DPStart > 0 {
		add("lb=internal has all ranks behind one port, from 0 on, not from dp_start=%d", s.DPStart)
	}
	if len(s.Replay) > 0 && len(s.Events) == 0 && !s.EventsOff {
		add("replay without events")
	}
	if n := len(s.Events); s.DP > 0 && n > 1 && n != s.DP {
		add("events: %d endpoints for %d data-parallel ranks (one, or one for each rank)", n, s.DP)
	}
	if n := len(s.Replay); s.DP > 0 && n > 1 && n != s.DP {
		add("replay: %d endpoints for %d data-parallel ranks (one, or one for each rank)", n, s.DP)
	}
	if s.URL != nil && len(errs) == 0 {
		if _, err := s.eventSources(max(s.DP, 1)); err != nil && s.DP > 0 {
			errs = append(errs, err)
		}
	}
	if outside != nil || s.DP < 0 || s.DP > maxDP || s.DPStart < 0 || s.DPStart >= maxDP {
		errs = append(errs, errNumber)
	}
	if s.KVHash == "" && s.KVHashSeed != "" || s.KVHashSeed == "" && strings.HasPrefix(s.KVHash, "xxhash") {
		add("kv_hash %q with kv_hash_seed %q: a seed needs kv_hash, and xxhash and xxhash_cbor need the seed, as vLLM draws one without PYTHONHASHSEED", s.KVHash, s.KVHashSeed)
	}
	if b := s.Bootstrap; b != nil && (b.Port < 1 || b.Port > 65535) {
		add("bootstrap: %d is no port (1 to 65535)", b.Port)
	}
	for _, m := range s.Models {
		if m == "" {
			add("an empty model name")
		}
	}
	if len(errs) == 0 {
		return nil
	}
	name := cmp.Or(s.Name, "without a name")
	return fmt.Errorf("worker %s: %w", name, oneLine(errors.Join(errs...)))
}

// ReadAPIKey fills APIKey from APIKeyFile, if one is named.
func (s *Spec) ReadAPIKey() error {
	if s.APIKeyFile == "" {
		return nil
	}
	f, err := os.Open(s.APIKeyFile)
	if err != nil {
		return fmt.Errorf("worker %s: api_key_file: %w", s.Name, err)
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxKeyFile+1))
	if err != nil {
		return fmt.Errorf("worker %s: api_key_file: %w", s.Name, err)
	}
	b = bytes.TrimSpace(b)
	switch {
	case len(b) == 0:
		return fmt.Errorf("worker %s: api_key_file %s is empty", s.Name, s.APIKeyFile)
	case len(b) > maxKeyFile:
		return fmt.Errorf("worker %s: api_key_file %s is longer than %d bytes", s.Name, s.APIKeyFile, maxKeyFile)
	case bytes.ContainsFunc(b, func(r rune) bool { return r <= ' ' || r >= 0x7f }):
		return fmt.Errorf("worker %s: api_key_file %s holds more than one word of printable ASCII", s.Name, s.APIKeyFile)
	}
	s.APIKey = string(b)
	return nil
}

// Host is the host of the worker's URL, without brackets.
func (s *Spec) Host() string { return s.URL.Hostname() }

// eventSources are the stated sources of a worker with so many ranks.
func (s *Spec) eventSources(ranks int) ([]EventSource, error) {
	live, err := rankEndpoints(s.Events, s.DPStart, ranks, s.Host(), s.EventsBind)
	if err != nil {
		return nil, fmt.Errorf("events: %w", err)
	}
	replay, err := rankEndpoints(s.Replay, s.DPStart, ranks, s.Host(), false)
	if err != nil {
		return nil, fmt.Errorf("replay: %w", err)
	}
	out := make([]EventSource, len(live))
	for i := range live {
		out[i] = EventSource{DP: i, Endpoint: live[i], Topic: s.Topic, Bind: s.EventsBind}
		if replay != nil {
			out[i].Replay = replay[i]
		}
	}
	return out, nil
}

// ShiftEvents moves the ports of stated event and replay endpoints up by n, for a
// worker that is one rank of several. Endpoints on which the router listens stay.
func (s *Spec) ShiftEvents(n int) error {
	if s.EventsBind {
		return nil
	}
	for _, list := range []*[]string{&s.Events, &s.Replay} {
		moved := make([]string, len(*list))
		for i, e := range *list {
			host, port, err := splitTCP(e)
			if err != nil {
				return err
			}
			if moved[i], err = joinTCP(host, port+n); err != nil {
				return err
			}
		}
		if len(moved) > 0 {
			*list = moved
		}
	}
	return nil
}

// clone makes a copy that shares nothing which a caller could change.
func (s Spec) clone() Spec {
	if s.URL != nil {
		u := *s.URL
		s.URL = &u
	}
	s.Models = slices.Clone(s.Models)
	s.Labels = maps.Clone(s.Labels)
	s.From = maps.Clone(s.From)
	s.Events = slices.Clone(s.Events)
	s.Replay = slices.Clone(s.Replay)
	if s.Bootstrap != nil {
		b := *s.Bootstrap
		s.Bootstrap = &b
	}
	if s.LMCache != nil {
		l := *s.LMCache
		l.InitPorts, l.AllocPorts = slices.Clone(l.InitPorts), slices.Clone(l.AllocPorts)
		s.LMCache = &l
	}
	return s
}

func validNameRune(r rune) bool {
	return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("._-:[]", r)
}

func validName(name string) error {
	if len(name) > maxNameLen {
		return fmt.Errorf("a name of %d bytes (at most %d)", len(name), maxNameLen)
	}
	for _, r := range name {
		if !validNameRune(r) {
			return fmt.Errorf("name %q holds %q (letters, digits and . _ - : [ ] only)", name, r)
		}
	}
	return nil
}

func oneOf[T ~string](value string, allowed ...T) (T, error) {
	words := make([]string, len(allowed))
	for i, a := range allowed {
		if value == string(a) {
			return a, nil
		}
		words[i] = string(a)
	}
	if n := Nearest(value, words); n != "" {
		return "", fmt.Errorf("%q is not one of %s (did you mean %q?)", value, strings.Join(words, ", "), n)
	}
	return "", fmt.Errorf("%q is not one of %s", value, strings.Join(words, ", "))
}

// known checks a field that did not come through Set and is stated.
func known[T ~string](field string, value T, allowed ...T) error {
	if value == "" || slices.Contains(allowed, value) {
		return nil
	}
	_, err := oneOf(string(value), allowed...)
	return fmt.Errorf("%s: %w", field, err)
}

var errNumber = errors.New("a negative or too large number")

func number(value string, limit int) (int, error) {
	n, err := strconv.Atoi(value)
	if err != nil || n < 1 || n > limit {
		return 0, fmt.Errorf("%q is no whole number from 1 to %d", value, limit)
	}
	return n, nil
}

func appendList(list []string, value string) ([]string, error) {
	for w := range strings.SplitSeq(value, ";") {
		if w = strings.TrimSpace(w); w == "" {
			return list, fmt.Errorf("an empty entry in %q", value)
		}
		list = append(list, w)
	}
	if len(list) > maxListLen {
		return list, fmt.Errorf("more than %d entries", maxListLen)
	}
	return list, nil
}

func appendEndpoints(list []string, value string) ([]string, error) {
	list, err := appendList(list, value)
	if err != nil {
		return list, err
	}
	for _, e := range list {
		if _, _, err := splitTCP(e); err != nil {
			return list, err
		}
	}
	return list, nil
}

func (s *Spec) setEvents(value string) error {
	if value == "none" {
		s.EventsOff = true
		return nil
	}
	rest, bind := strings.CutPrefix(value, "bind:")
	if len(s.Events) > 0 && bind != s.EventsBind {
		return errors.New("some endpoints with bind: and some without")
	}
	s.EventsBind = bind
	var err error
	s.Events, err = appendEndpoints(s.Events, rest)
	return err
}

func (s *Spec) setLabels(value string) error {
	for pair := range strings.SplitSeq(value, ";") {
		k, v, ok := strings.Cut(pair, ":")
		k, v = strings.TrimSpace(k), strings.TrimSpace(v)
		if !ok || k == "" {
			return fmt.Errorf("%q is not key:value", pair)
		}
		if err := s.SetLabel(k, v); err != nil {
			return err
		}
	}
	return nil
}

// SetLabel adds one label; a key may come only once.
func (s *Spec) SetLabel(key, value string) error {
	if _, dup := s.Labels[key]; dup {
		return fmt.Errorf("label %q is given twice", key)
	}
	if len(s.Labels) >= maxListLen {
		return fmt.Errorf("more than %d labels", maxListLen)
	}
	if s.Labels == nil {
		s.Labels = map[string]string{}
	}
	s.Labels[key] = value
	return nil
}

// parseBootstrap reads "host:port", or a port alone for the worker's own host.
func parseBootstrap(value string) (*Bootstrap, error) {
	host, p, err := net.SplitHostPort(value)
	if err != nil {
		if strings.ContainsAny(value, ":[]") {
			return nil, fmt.Errorf("%q is not host:port", value)
		}
		host, p = "", value
	}
	port, err := ParsePort(p)
	if err != nil {
		return nil, err
	}
	if strings.ContainsAny(host, " \t/@;") {
		return nil, fmt.Errorf("bad host %q", host)
	}
	return &Bootstrap{Host: host, Port: port}, nil
}

// parseLMCache reads "host/init/alloc", where init and alloc are ports, one for
// each tensor-parallel rank, separated by semicolons.
func parseLMCache(value string) (*LMCacheDecoder, error) {
	parts := strings.Split(value, "/")
	if len(parts) != 3 || parts[0] == "" {
		return nil, fmt.Errorf("%q is not host/init-port/alloc-port", value)
	}
	d := &LMCacheDecoder{Host: strings.Trim(parts[0], "[]")}
	for i, dst := range []*[]int{&d.InitPorts, &d.AllocPorts} {
		for w := range strings.SplitSeq(parts[i+1], ";") {
			port, err := ParsePort(strings.TrimSpace(w))
			if err != nil {
				return nil, err
			}
			*dst = append(*dst, port)
		}
	}
	if len(d.InitPorts) != len(d.AllocPorts) {
		return nil, fmt.Errorf("%d init ports but %d alloc ports", len(d.InitPorts), len(d.AllocPorts))
	}
	return d, nil
}
