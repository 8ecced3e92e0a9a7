package kvstream

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/blockhash"
	"github.com/dynctl/dynctl/internal/kvevent"
	"github.com/dynctl/dynctl/internal/rig/kvmodel"
)

// capture is one captured message.
type capture struct {
	Src     string
	Frames  [][]byte          `json:"-"`
	B64     []string          `json:"frames_b64"`
	Decoded []json.RawMessage `json:"decoded"`
}

// linesOf reads the lines of a compressed recording, each of up to 16 MiB. What cut them off,
// if something did, fails the test; line is valid until the next one.
func linesOf(t testing.TB, path string, read func(line []byte)) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	sc := bufio.NewScanner(z)
	sc.Buffer(nil, 16<<20)
	for sc.Scan() {
		read(sc.Bytes())
	}
	if err := sc.Err(); err != nil {
		t.Fatal(err)
	}
}

func readCaptures(t testing.TB, name string) map[string][]capture {
	t.Helper()
	all := map[string][]capture{}
	linesOf(t, filepath.Join("..", "..", "..", "..", "testdata", "captures", name), func(line []byte) {
		var c capture
		d := json.NewDecoder(bytes.NewReader(line))
		d.UseNumber()
		if err := d.Decode(&c); err != nil {
			t.Fatal(err)
		}
		for _, f := range c.B64 {
			b, err := base64.StdEncoding.DecodeString(f)
			if err != nil {
				t.Fatal(err)
			}
			c.Frames = append(c.Frames, b)
		}
		all[c.Src] = append(all[c.Src], c)
	})
	return all
}

// hashValue reads a block hash as the captures write it.
func hashValue(t testing.TB, raw json.RawMessage) uint64 {
	t.Helper()
	s := strings.Trim(string(raw), `"`)
	if h, ok := strings.CutPrefix(s, "bin:"); ok {
		b, err := hex.DecodeString(h)
		if err != nil || len(b) < 8 {
			t.Fatalf("hash %q", s)
		}
		return binary.BigEndian.Uint64(b[len(b)-8:])
	}
	n, err := strconv.ParseUint(strings.TrimPrefix(s, "u64:"), 10, 64)
	if err != nil {
		t.Fatalf("hash %q: %v", s, err)
	}
	return n
}

// naive reads events in map form into the set of names held and the whole
// tokens of each block, knowing nothing of this package.
type naive struct {
	held   map[uint64]bool
	chains map[uint64][]uint32
	salts  map[uint64]string // of the block's prompt
}

func (n *naive) apply(t testing.TB, c capture) {
	t.Helper()
	var events []struct {
		Type   string            `json:"type"`
		Hashes []json.RawMessage `json:"block_hashes"`
		Parent json.RawMessage   `json:"parent_block_hash"`
		Tokens []uint32          `json:"token_ids"`
		Size   int               `json:"block_size"`
		Extra  [][]string        `json:"extra_keys"`
	}
	if len(c.Decoded) < 2 {
		t.Fatalf("message of %s has no decoded batch", c.Src)
	}
	if err := json.Unmarshal(c.Decoded[1], &events); err != nil {
		t.Fatal(err)
	}
	for _, e := range events {
		switch e.Type {
		case "BlockStored":
			chain, known, salt := []uint32(nil), true, ""
			if p := string(e.Parent); p != "null" {
				chain, known = n.chains[hashValue(t, e.Parent)]
				salt = n.salts[hashValue(t, e.Parent)]
			} else if len(e.Extra) > 0 && len(e.Extra[0]) > 0 {
				salt = e.Extra[0][0]
			}
			for i, raw := range e.Hashes {
				h := hashValue(t, raw)
				n.held[h] = true
				if known {
					chain = append(chain[:len(chain):len(chain)], e.Tokens[i*e.Size:(i+1)*e.Size]...)
					n.chains[h], n.salts[h] = chain, salt
				}
			}
		case "BlockRemoved":
			for _, raw := range e.Hashes {
				delete(n.held, hashValue(t, raw))
			}
		case "AllBlocksCleared":
			clear(n.held)
		default:
			t.Fatalf("event %q", e.Type)
		}
	}
}

// What real vLLM engines sent: the index holds exactly the blocks that a naive
// reading of the decoded events leaves, split or not, and after a gap that the
// captured replay closes.
func TestCapturesOfVLLM(t *testing.T) {
	t.Parallel()
	all := readCaptures(t, "kvevents-vllm-0.32.0-real.jsonl.gz")
	for _, tt := range []struct {
		src     string
		block   int // of the engine
		partial bool
	}{{"dp0", 32, false}, {"dp1", 32, false}, {"agg", 64, false}, {"prefill", 32, true}, {"decode", 32, true}} {
		for _, size := range []int{tt.block, 16, 8} {
			t.Run(tt.src+"/"+strconv.Itoa(size), func(t *testing.T) {
				t.Parallel()
				x, y := kvmodel.NewIndex(t), kvmodel.NewIndex(t)
				s, gapped := New(x, 0, size), New(y, 0, size)
				n := naive{map[uint64]bool{}, map[uint64][]uint32{}, map[uint64]string{}}
				replay := all["replay:"+tt.src]
				cut := -1 // first batch of the captured replay
				if len(replay) > 0 {
					seq, _, _, err := kvevent.ParseReplay(replay[0].Frames)
					if err != nil {
						t.Fatal(err)
					}
					cut = int(seq)
				}
				want := func() kvmodel.Set {
					w := kvmodel.Set{}
					for h := range n.held {
						chain := n.chains[h]
						if chain == nil {
							continue // its parent came before the capture
						}
						seqs := blockhash.Chain(nil, blockhash.Locals(nil, chain, size, blockhash.Key{Salt: n.salts[h]}))
						for i := range tt.block / size {
							w[seqs[len(seqs)-1-i]] = true
						}
					}
					return w
				}
				for i, c := range all[tt.src] {
					_, seq, payload, err := kvevent.ParseLive(c.Frames)
					if err != nil {
						t.Fatal(err)
					}
					if i == 0 && seq > 0 {
						s.Skip(seq)
					}
					if v := s.Offer(seq, payload); v.Kind != Apply {
						t.Fatalf("batch %d is %v", seq, v)
					}
					if cut >= 0 && int(seq) < cut {
						gapped.Offer(seq, payload)
					}
					n.apply(t, c)
					kvmodel.Equal(t, "batch "+strconv.FormatUint(seq, 10), want(), kvmodel.Holds(t, x))
				}
				c := s.Counters()
				if !tt.partial && (c.Orphans != 0 || !s.Complete()) || c.Skipped+c.Unknown+c.Unreadable+c.Partial+c.Misfit+c.Mismatched != 0 {
					t.Errorf("counters %+v", c)
				}
				if cut < 0 {
					return
				}
				for _, r := range replay {
					seq, payload, end, err := kvevent.ParseReplay(r.Frames)
					if err != nil {
						t.Fatal(err)
					}
					if end {
						break
					}
					if v := gapped.Offer(seq, payload); v.Kind != Apply {
						t.Fatalf("replayed batch %d is %v", seq, v)
					}
				}
				kvmodel.Equal(t, "after the replay", kvmodel.Holds(t, x), kvmodel.Holds(t, y))
			})
		}
	}
}

// Another project's engine simulator: names come and go as it says. Its events
// that fill holes are taken as chains, so only names are compared.
func TestCapturesOfSimulator(t *testing.T) {
	t.Parallel()
	all := readCaptures(t, "kvevents-vllm-format.jsonl.gz")
	for src, size := range map[string]int{"agg": 16, "prefill": 64, "decode": 16, "dp0": 16, "dp1": 16} {
		t.Run(src, func(t *testing.T) {
			t.Parallel()
			x := kvmodel.NewIndex(t)
			s := New(x, 0, size)
			for i, c := range all[src] {
				_, seq, payload, err := kvevent.ParseLive(c.Frames)
				if err != nil {
					t.Fatal(err)
				}
				if i == 0 {
					s.Skip(seq) // it counts from 1
				}
				if v := s.Offer(seq, payload); v.Kind != Apply {
					t.Fatalf("batch %d is %v", seq, v)
				}
			}
			c := s.Counters()
			if c.Stored == 0 || c.Skipped+c.Unknown+c.Unreadable+c.Partial+c.Misfit+c.Mismatched+c.Dropped != 0 {
				t.Errorf("counters %+v", c)
			}
			t.Logf("%d blocks held; %d stored, %d removed, %d orphans, %d renamed", len(kvmodel.Holds(t, x)), c.Stored, c.Removed, c.Orphans, c.Renamed)
		})
	}
}
