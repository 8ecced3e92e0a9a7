package benchcmd

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/dynctl/dynctl/internal/bench/plan"
)

// planFlags are the flags of dynctl bench that a plan holds, with what each of
// them sets.
var planFlags = map[string]func(*plan.Run) any{
	"isl":                   func(r *plan.Run) any { return r.ISL },
	"osl":                   func(r *plan.Run) any { return r.OSL },
	"concurrency":           func(r *plan.Run) any { return loadsOf(r, false) },
	"rate":                  func(r *plan.Run) any { return loadsOf(r, true) },
	"arrival":               func(r *plan.Run) any { return r.Arrival },
	"burstiness":            func(r *plan.Run) any { return r.Burstiness },
	"max-in-flight":         func(r *plan.Run) any { return r.Cap },
	"repeat":                func(r *plan.Run) any { return r.Repeats },
	"max-repeat":            func(r *plan.Run) any { return r.MaxRepeats },
	"requests":              func(r *plan.Run) any { return r.Requests },
	"cached":                func(r *plan.Run) any { return r.Cached },
	"slo":                   func(r *plan.Run) any { return r.SLO },
	"objective":             func(r *plan.Run) any { return r.Objective },
	"level":                 func(r *plan.Run) any { return r.Level },
	"seed":                  func(r *plan.Run) any { return r.Seed },
	"no-refine":             func(r *plan.Run) any { return r.NoRefine },
	"router":                func(r *plan.Run) any { return strings.TrimRight(r.Target.Router, "/") },
	"data":                  func(r *plan.Run) any { return strings.TrimRight(r.Target.Data, "/") },
	"sim":                   func(r *plan.Run) any { return r.Target.Sim },
	"prefill":               func(r *plan.Run) any { return r.Target.Prefill },
	"decode":                func(r *plan.Run) any { return r.Target.Decode },
	"worker":                func(r *plan.Run) any { return r.Target.Worker },
	"disagg-connector-type": func(r *plan.Run) any { return r.Target.Connector },
	"model":                 func(r *plan.Run) any { return r.Target.Model },
}

func loadsOf(r *plan.Run, rate bool) []plan.Load {
	return slices.DeleteFunc(slices.Clone(r.Loads), func(l plan.Load) bool { return l.Rate > 0 != rate })
}

// checkResume checks the flags that were typed against the plan of the run that is
// resumed, and takes the target from it. What the plan says may be said again; what
// contradicts it is refused.
func (f *benchFlags) checkResume(cmd *cobra.Command, run *plan.Run) error {
	typed, err := f.parse()
	if err != nil {
		return err
	}
	given := plan.Run{Spec: *typed, Target: f.target.Target}
	var errs []error
	for name, of := range planFlags {
		if is, want := of(&given), of(run); cmd.Flags().Changed(name) && !reflect.DeepEqual(is, want) {
			errs = append(errs, fmt.Errorf("--%s contradicts the plan of %s, which has %v: leave it out, or begin a new run", name, f.resume, want))
		}
	}
	if cmd.Flags().Changed("out") {
		errs = append(errs, fmt.Errorf("--out contradicts --resume, which writes into %s: leave it out", f.resume))
	}
	if cmd.Flags().Changed("profile") {
		errs = append(errs, fmt.Errorf("--profile contradicts --resume, which takes the fleet from the plan of %s: leave it out", f.resume))
	}
	slices.SortFunc(errs, func(a, b error) int { return strings.Compare(a.Error(), b.Error()) })
	f.target.Target, f.target.Profile = run.Target, ""
	return errors.Join(errs...)
}
