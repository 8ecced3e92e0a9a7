package external

import (
	"fmt"
	"os"
	"testing"
)

// verdict takes the test's place: Python ends it by a panic.
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
	Python(verdict{}, module)
	return "have"
}

// TestAPromisedModuleIsNeverSkipped: where PythonVariable is set, as in .ci/run, what
// is missing fails the test.
func TestAPromisedModuleIsNeverSkipped(t *testing.T) {
	t.Setenv(PythonVariable, "") // has it restored in the end
	if err := os.Unsetenv(PythonVariable); err != nil {
		t.Fatal(err)
	}
	if got := ask("no_such_module"); got != "skip" {
		t.Errorf("without %s: %q, want a skip", PythonVariable, got)
	}
	for interpreter, module := range map[string]string{"python3": "no_such_module", "/no/such/python3": "sys", "": "sys"} {
		t.Setenv(PythonVariable, interpreter)
		if got := ask(module); got != "fail" {
			t.Errorf("%s=%q without %s: %q, want a failure", PythonVariable, interpreter, module, got)
		}
	}
}
