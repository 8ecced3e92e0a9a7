// Package property checks what must hold for any input, with random inputs from a
// known seed: the same ones in every run of go test, others where RAPID_SEED names
// another seed, new ones where it is 0 (as in make soak). A flag of rapid
// (-rapid.seed) goes before both.
package property

import (
	"flag"
	"os"
	"strconv"
	"testing"

	"pgregory.net/rapid"
)

func init() {
	if _, named := os.LookupEnv("RAPID_SEED"); named {
		return
	}
	if err := flag.Set("rapid.seed", "1"); err != nil {
		panic(err)
	}
}

// Check fails t with the smallest input it finds that breaks property.
func Check(t testing.TB, property func(*rapid.T)) {
	t.Helper()
	rapid.Check(t, property) //nolint:forbidigo // the one place
}

// FromEnv is a number of the environment, such as a seed, or otherwise without one.
func FromEnv(t testing.TB, name string, otherwise uint64) uint64 {
	t.Helper()
	text := os.Getenv(name)
	if text == "" {
		return otherwise
	}
	v, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return v
}
