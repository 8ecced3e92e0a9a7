// Package external finds what tests need and the repository does not have: a Python with
// libzmq (pyzmq) and OpenSSL (ssl), which are other implementations of the same protocols, and
// public traces of requests. A test without them is skipped.
package external

import (
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
)

// PythonVariable names the interpreter, which has everything that tests import.
// .ci/run sets it: then a test that cannot have its peer fails. Without it a
// test takes the python3 of the machine, and is skipped where that lacks a
// module.
const PythonVariable = "DYNCTL_PYTHON"

// found remembers what each module's first look came to, "" for good.
var found sync.Map // of interpreter and module to func() string

// Python returns an interpreter that can import the modules ("zmq", "ssl"). Without one it
// skips the test, or fails it if PythonVariable is set.
func Python(t testing.TB, modules ...string) string {
	t.Helper()
	interpreter, promised := os.LookupEnv(PythonVariable)
	if !promised {
		interpreter = "python3"
	}
	for _, m := range modules {
		look, _ := found.LoadOrStore([2]string{interpreter, m}, sync.OnceValue(func() string {
			out, err := exec.Command(interpreter, "-c", "import "+m).CombinedOutput()
			if err != nil {
				return err.Error() + ": " + strings.TrimSpace(string(out))
			}
			return ""
		}))
		switch why := look.(func() string)(); {
		case why == "":
		case promised:
			t.Fatalf("%s=%q cannot import %s: %s", PythonVariable, interpreter, m, why)
		default:
			t.Skipf("%s cannot import %s (zmq comes with pip install pyzmq; %s names another interpreter): %s", interpreter, m, PythonVariable, why)
		}
	}
	return interpreter
}
