package blockhash

import (
	"encoding/hex"
	"math"
	"strings"
	"testing"
)

// The names are those of Python: pickle of protocol 5 and cbor2's canonical form, hashed
// with hashlib and xxhash, over token ids of every width, tuples of every form, and salts.
func TestEngineNamesArePythons(t *testing.T) {
	t.Parallel()
	var long []uint32
	for i := uint32(0); i < 40000; i += 157 {
		long = append(long, i)
	}
	blocks := [][]uint32{
		{0, 23, 24, 255, 256, 65535, 65536, math.MaxInt32, 1 << 31, math.MaxUint32},
		{7}, {7, 8}, {7, 8, 9}, long,
	}
	for _, want := range []struct{ algorithm, seed, name string }{
		{"sha256", "", "e76586a64d394376c19a549910430a06ede85d370c1bb830db03b11481353679"},
		{"sha256", "0", "1d71e7f017aa2eff50d1043a7b5cb5f1ef1e2a6a30b004a527f57ac2598ee330"},
		{"sha256", "4294967295", "282985c94184d28ea8340f400d467b71b7ca1e2a55f62cdbf940f465ae3f203a"},
		{"sha256_cbor", "", "2723fc7136152968f14695e62f87f546a51c06a17940fabc137e17b4cd7e9ed3"},
		{"sha256_cbor", "0", "9806e80108e606816ab31565547ebb7247d88e4afeb81e81dec4175323e4605f"},
		{"sha256_cbor", "4294967295", "26faca2ac46e0f5067f2b4330d63cb8391775e7fbda302afc8ddcb07d6de7b58"},
		{"xxhash", "0", "e8ce8b52668402f578b50594031218fe"},
		{"xxhash", "4294967295", "c1a5c36e9863d294176f69d3bfda28c6"},
		{"xxhash_cbor", "0", "9f2a28299f5f1badb0f4b95a1e3e0adf"},
		{"xxhash_cbor", "4294967295", "ae836e0b94338722e23717f1163dbf50"},
	} {
		e := NewEngineNames(want.algorithm, want.seed)
		if e == nil {
			t.Fatalf("%s is not known", want.algorithm)
		}
		salt := map[string]string{"0": strings.Repeat("tenant-ü", 40), "4294967295": "a"}[want.seed]
		name := e.Root()
		for _, b := range blocks {
			name, salt = e.Next(nil, name, b, salt), ""
		}
		if got := hex.EncodeToString(name); got != want.name {
			t.Errorf("%s with seed %q: %s, Python has %s", want.algorithm, want.seed, got, want.name)
		}
	}
	for _, a := range []string{"", "xxhash", "xxhash_cbor", "md5"} {
		if NewEngineNames(a, "") != nil {
			t.Errorf("%q without a seed can be computed", a)
		}
	}
}
