package commands

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/cli"
)

func TestDoctorUsage(t *testing.T) {
	for _, args := range []string{"--sim 1x", "-o xml"} {
		code, stdout, stderr := typed(append([]string{"doctor"}, strings.Fields(args)...)...)
		if option, _, _ := strings.Cut(args, " "); code != cli.ExitUsage || stdout != "" || !strings.Contains(stderr, option) {
			t.Errorf("%s: code %d\nstdout %q\nstderr %q", args, code, stdout, stderr)
		}
	}
	if code, _, stderr := typed("doctor", "--router", "http://127.0.0.1:1"); code != cli.ExitUnreachable {
		t.Errorf("nobody there: code %d %s", code, stderr)
	}
}

func TestDoctorOfSimulatedEngines(t *testing.T) {
	code, stdout, stderr := typed("doctor", "--sim", "1p1d:profile=instant")
	if code != cli.ExitOK || !strings.Contains(stdout, " 0 failed") || !strings.Contains(stdout, "tokens moved") {
		t.Errorf("code %d\n%s\n%s", code, stdout, stderr)
	}
	code, stdout, _ = typed("doctor", "--sim", "1p:block=16,profile=instant+1d:block=32,profile=instant", "--passive", "-o", "json")
	var r struct{ Failed int }
	if err := json.Unmarshal([]byte(stdout), &r); err != nil || code != cli.ExitInvalid || r.Failed == 0 {
		t.Errorf("contradicting block sizes: code %d, %d failed, %v", code, r.Failed, err)
	}
}
