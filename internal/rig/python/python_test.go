package python

import (
	"fmt"
	"os"
	"testing"
)

// verdict takes the test's place: With ends it by a panic.
type verdict struct {
	testing.TB
}

func (verdict) Helper()                   {}
func (verdict) Skipf(f string, a ...any)  { panic("skip: " + fmt.Sprintf(f, a...)) }
func (verdict) Fatalf(f string, a ...any) { panic("fail: " + fmt.Sprintf(f, a...)) }

func ask(module string) (said string) {
	defer func() {
		if r := recover(); r != nil {
			said = r.(string)[:4]
		}
	}()
	With(verdict{}, module)
	return "have"
}

// TestAPromisedModuleIsNeverSkipped: where Variable is set, as in .ci/run, what
// is missing fails the test.
func TestAPromisedModuleIsNeverSkipped(t *testing.T) {
	t.Setenv(Variable, "") // has it restored in the end
	if err := os.Unsetenv(Variable); err != nil {
		t.Fatal(err)
	}
	if got := ask("no_such_module"); got != "skip" {
		t.Errorf("without %s: %q, want a skip", Variable, got)
	}
	for interpreter, module := range map[string]string{"python3": "no_such_module", "/no/such/python3": "sys", "": "sys"} {
		t.Setenv(Variable, interpreter)
		if got := ask(module); got != "fail" {
			t.Errorf("%s=%q without %s: %q, want a failure", Variable, interpreter, module, got)
		}
	}
}
