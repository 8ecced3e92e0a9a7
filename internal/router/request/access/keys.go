// Package access knows who asks: API keys from a watched file, with what each may
// do. Of a key the file holds the SHA-256 only. Keys are long random words, so that
// a fast hash is no weakness: there is nothing to guess.
package access

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
	"golang.org/x/time/rate"

	"github.com/dynctl/dynctl/internal/router/request/admission"
)

// Bounds on a file of keys.
const (
	maxFile = 8 << 20 // bytes
	maxKeys = 20_000
	maxName = 128 // bytes of a name, a tenant, a model

	maxTokens = 1_000_000_000_000 // a minute
)

// Role is what a key may do.
type Role string

// The roles. Use is that of the data plane. On the admin API each of the others
// includes those before it: Read looks, Operate takes workers out and in and asks what
// would be decided, Admin changes everything and sees prompts' tokens.
const (
	Use     Role = "use"
	Read    Role = "read"
	Operate Role = "operate"
	Admin   Role = "admin"
)

// roles are all, those of the admin API in rising order.
var roles = []Role{Use, Read, Operate, Admin}

// Key is what is known of one key. Only what its rate and its tokens have let through changes.
type Key struct {
	// Name is the key's for people and logs; unique.
	Name string
	// Tenant shares its keys' caches and turns; the name when none is stated.
	Tenant string
	// Models are those that may be requested; empty for all.
	Models []string
	// Rate is how many requests a minute may begin; 0 is no limit.
	Rate int
	// Tokens is how many tokens, of prompts and answers, it may use a minute; 0 is no limit.
	Tokens int
	// Weight is its tenant's share of places that many wait for, against that of
	// others; 1 when none is stated.
	Weight int
	// Priority is the band in which its requests wait; normal when none is stated.
	Priority admission.Band
	// Roles are what it may do.
	Roles []Role

	sum    [sha256.Size]byte
	limit  *rate.Limiter // kept when the file is read again
	tokens *allowance    // also kept
	meter  *meter        // also kept; nil outside of a Store
}

// Owner is the tenant that owns a request with this key, and what an engine keeps of it;
// empty for one without a key.
func (k *Key) Owner() string {
	if k == nil {
		return ""
	}
	return k.Tenant
}

// Claim is what such a request begins with where requests wait.
func (k *Key) Claim() admission.Claim {
	if k == nil {
		return admission.Claim{}
	}
	return admission.Claim{Tenant: k.Tenant, Weight: k.Weight, Band: k.Priority}
}

// Has reports whether the key has a role, or one that includes it.
func (k *Key) Has(r Role) bool {
	if r == Use {
		return slices.Contains(k.Roles, Use)
	}
	return slices.ContainsFunc(k.Roles, func(has Role) bool { return has != Use && slices.Index(roles, has) >= slices.Index(roles, r) })
}

// May reports whether the key may ask for a model, under any of its names. No key at all
// may ask for every one.
func (k *Key) May(names ...string) bool {
	return k == nil || len(k.Models) == 0 || slices.ContainsFunc(names, func(n string) bool { return slices.Contains(k.Models, n) })
}

// bucket is how fast a key's rate comes back, and how many requests may begin at once: the
// share of ten seconds, and one at least.
func (k *Key) bucket() (refill rate.Limit, size int) {
	if k.Rate == 0 {
		return rate.Inf, 1
	}
	return rate.Limit(k.Rate) / 60, max(1, k.Rate/6)
}

// Take begins a request, or says how long to wait: a key may begin its rate's share of ten
// seconds, and one at least, immediately, and its rate over any longer time.
func (k *Key) Take(now time.Time) (wait time.Duration) {
	if wait = k.hold(now); wait > 0 {
		return wait
	}
	if k.limit.AllowN(now, 1) {
		k.spent(1, 0, now)
		return 0
	}
	missing := 1 - k.limit.TokensAt(now)
	return max(1, time.Duration(math.Ceil(missing/float64(k.limit.Limit())*float64(time.Second))))
}

// Set is the keys of one file. It is not changed.
type Set struct {
	keys []Key
	// by finds keys by the first bytes of their sum.
	by map[uint64]*Key
	// named finds keys by a hash of their names; nil outside of a Store.
	named map[uint64]*Key
}

// Keys are all keys, in the file's order.
func (s *Set) Keys() []Key { return s.keys }

// Find returns the key for a presented secret, or nil. How long it takes reveals nothing of the
// keys: what is looked up is a hash, and what is compared last is compared whole.
func (s *Set) Find(shown string) *Key {
	var buf [128]byte
	sum := sha256.Sum256(append(buf[:0], shown...))
	k := s.by[binary.BigEndian.Uint64(sum[:])]
	if k == nil || subtle.ConstantTimeCompare(sum[:], k.sum[:]) != 1 {
		return nil
	}
	return k
}

// entry is a key as the file has it.
type entry struct {
	Name     string   `yaml:"name"`
	SHA256   string   `yaml:"sha256"`
	Tenant   string   `yaml:"tenant,omitempty"`
	Models   []string `yaml:"models,omitempty,flow"`
	Rate     int      `yaml:"rate,omitempty"`
	Tokens   int      `yaml:"tokens,omitempty"`
	Weight   int      `yaml:"weight,omitempty"`
	Priority string   `yaml:"priority,omitempty"`
	Roles    []Role   `yaml:"roles,omitempty,flow"`
}

// file is the whole file.
type file struct {
	Keys []entry `yaml:"keys"`
}

// Parse reads a file of keys. The error names all that is wrong, each with the
// key's name or place, and nothing of a hash.
func Parse(raw []byte) (*Set, error) {
	var f file
	dec := yaml.NewDecoder(bytes.NewReader(raw))
	dec.KnownFields(true)
	if err := dec.Decode(&f); err != nil && !errors.Is(err, io.EOF) {
		return nil, errors.New(firstLines(err.Error()))
	}
	if err := dec.Decode(new(yaml.Node)); !errors.Is(err, io.EOF) {
		return nil, errors.New("there is more than one YAML document")
	}
	if len(f.Keys) > maxKeys {
		return nil, fmt.Errorf("%d keys are more than %d", len(f.Keys), maxKeys)
	}
	s := &Set{keys: make([]Key, len(f.Keys)), by: make(map[uint64]*Key, len(f.Keys))}
	var errs []error
	names := map[string]bool{}
	for i := range f.Keys {
		e, k := &f.Keys[i], &s.keys[i]
		what := fmt.Sprintf("key %d", i+1)
		if e.Name != "" {
			what = fmt.Sprintf("key %.*q", maxName, e.Name)
		}
		bad := func(format string, a ...any) { errs = append(errs, fmt.Errorf(what+": "+format, a...)) }
		*k = Key{Name: e.Name, Tenant: e.Tenant, Models: e.Models, Rate: e.Rate, Tokens: e.Tokens, Weight: max(1, e.Weight), Roles: e.Roles}
		k.limit, k.tokens = rate.NewLimiter(k.bucket()), new(allowance)
		if k.Tenant == "" {
			k.Tenant = k.Name
		}
		if len(k.Roles) == 0 {
			k.Roles = []Role{Use}
		}
		switch {
		case e.Name == "":
			bad("it has no name")
		case names[e.Name]:
			bad("another key has this name")
		}
		names[e.Name] = true
		for _, text := range append([]string{e.Name, e.Tenant}, e.Models...) {
			if len(text) > maxName || strings.ContainsFunc(text, func(r rune) bool { return r < ' ' || r == 0x7f }) {
				bad("a name, tenant or model is longer than %d bytes or has control characters", maxName)
			}
		}
		if e.Rate < 0 || e.Rate > 60_000_000 {
			bad("rate %d is not a number of requests a minute", e.Rate)
		}
		if e.Tokens < 0 || e.Tokens > maxTokens {
			bad("tokens %d is not a number of tokens a minute up to %d", e.Tokens, int64(maxTokens))
		}
		if e.Weight < 0 || e.Weight > 1000 {
			bad("weight %d is not between 1 and 1000", e.Weight)
		}
		if e.Priority != "" {
			var ok bool
			if k.Priority, ok = admission.ParseBand(e.Priority); !ok {
				bad("priority %.*q is not one of %s", maxName, e.Priority, strings.Join(admission.Bands[:], ", "))
			}
		}
		for _, r := range e.Roles {
			if !slices.Contains(roles, r) {
				bad("role %.*q is not one of use, read, operate, admin", maxName, r)
			}
		}
		sum, err := hex.DecodeString(e.SHA256)
		if err != nil || len(sum) != sha256.Size {
			bad("sha256 is not 64 hexadecimal digits; dynctl keys new makes a key with its entry")
			continue
		}
		copy(k.sum[:], sum)
		short := binary.BigEndian.Uint64(sum)
		if s.by[short] != nil {
			bad("it has the same key as %q", s.by[short].Name)
		}
		s.by[short] = k
	}
	return s, errors.Join(errs...)
}

// firstLines keeps an error of the YAML library short.
func firstLines(s string) string {
	lines := strings.SplitN(s, "\n", 6)
	return strings.Join(lines[:min(5, len(lines))], "; ")
}

// ReadFile reads a file of keys.
func ReadFile(path string) (*Set, error) {
	raw, err := readFile(path)
	if err != nil {
		return nil, err
	}
	s, err := Parse(raw)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return s, nil
}

func readFile(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	raw, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err == nil && len(raw) > maxFile {
		err = fmt.Errorf("%s has more than %d bytes", path, maxFile)
	}
	return raw, err
}

// prefix shows people, and tools that look for lost secrets, that a word is a key.
const prefix = "dynctl_"

// New makes a key of 256 random bits, and puts what a file holds of it at the end of
// a file's content, which may be empty.
func New(k Key, content []byte) (secret string, with []byte, err error) {
	var b [32]byte
	if _, err := rand.Read(b[:]); err != nil {
		return "", nil, err
	}
	secret = prefix + base64.RawURLEncoding.EncodeToString(b[:])
	sum := sha256.Sum256([]byte(secret))
	priority := "" // normal
	if k.Priority != admission.Normal {
		priority = k.Priority.String()
	}
	with, err = appendEntry(content, entry{Name: k.Name, SHA256: hex.EncodeToString(sum[:]), Tenant: k.Tenant, Models: k.Models, Rate: k.Rate, Tokens: k.Tokens, Weight: k.Weight, Priority: priority, Roles: k.Roles})
	return secret, with, err
}

// appendEntry puts an entry at the end of a file's content, whose comments stay.
func appendEntry(content []byte, e entry) ([]byte, error) {
	if _, err := Parse(content); err != nil {
		return nil, err
	}
	var doc, item yaml.Node
	if err := yaml.Unmarshal(content, &doc); err != nil {
		return nil, err
	}
	if err := item.Encode(e); err != nil {
		return nil, err
	}
	if len(doc.Content) == 0 || doc.Content[0].Kind != yaml.MappingNode || len(doc.Content[0].Content) == 0 {
		if err := doc.Encode(map[string][]yaml.Node{"keys": {item}}); err != nil {
			return nil, err
		}
	} else {
		// Parse knows of no member but keys.
		list := doc.Content[0].Content[1]
		if list.Kind != yaml.SequenceNode {
			*list = yaml.Node{Kind: yaml.SequenceNode}
		}
		list.Style = 0
		list.Content = append(list.Content, &item)
	}
	var out bytes.Buffer
	enc := yaml.NewEncoder(&out)
	enc.SetIndent(2)
	if err := errors.Join(enc.Encode(&doc), enc.Close()); err != nil {
		return nil, err
	}
	if _, err := Parse(out.Bytes()); err != nil {
		return nil, err
	}
	return out.Bytes(), nil
}

// Salt is the cache salt of a tenant's requests that carry a salt of the client's,
// or none. No other tenant's requests have it, whatever they carry; another router
// gives the same one.
func Salt(tenant, client string) string {
	h := sha256.New()
	fmt.Fprintf(h, "dynctl tenant salt %d\n%s%s", len(tenant), tenant, client)
	return hex.EncodeToString(h.Sum(nil)[:16])
}
