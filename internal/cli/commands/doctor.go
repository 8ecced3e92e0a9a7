package commands

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"github.com/spf13/cobra"

	"github.com/dynctl/dynctl/internal/cli"
	"github.com/dynctl/dynctl/internal/doctor"
	"github.com/dynctl/dynctl/internal/printable"
	"github.com/dynctl/dynctl/internal/wait"
)

// newDoctorCmd makes the command doctor: the examination of a router and its engines.
func newDoctorCmd() *cobra.Command {
	var f cli.TargetFlags
	var output string
	var passive bool
	var tokens int
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Examine a router and its engines",
		Long: `Examine a router and its engines. Is everything reachable? Do clocks and
tokenizers agree? Are there gaps in the KV events? Do block sizes and ranks
contradict each other? Does the cache hold what the router believes? Does remote
prefill really move KV, or does the decode engine silently compute the prompt again?

The last two send a few small requests and need --allow-routing-headers on the
router; --passive leaves them out. Nothing is changed. The first line is the verdict.

Exit codes: 0 when no check failed, also with warnings, as for workers that are
drained; 2 for wrong flags or an address that is no admin API; 3 when a check failed;
4 when the router or an engine that was named cannot be reached.`,
		Example: `  dynctl doctor
  dynctl doctor --router http://10.0.0.1:8001 --passive
  dynctl doctor --prefill http://127.0.0.1:18100 --decode http://127.0.0.1:18101`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			if f.Router == "" && f.Sim == "" && len(f.Prefill)+len(f.Decode)+len(f.Worker) == 0 {
				f.Router = cli.RouterOfEnvironment()
			}
			p := startProgress(cmd.Context(), cmd.ErrOrStderr())
			defer p.stop()
			t, err := f.Open(cmd.Context(), cmd.ErrOrStderr(), "")
			if err != nil {
				return err
			}
			defer func() { err = errors.Join(err, t.Close()) }()
			r, err := doctor.Run(cmd.Context(), doctor.Options{Target: t.Target, Model: f.Model, Passive: passive, Tokens: tokens, Step: p.step})
			p.stop()
			if err != nil {
				return cli.AdminError(err)
			}
			if output == "table" {
				err = doctor.Text(cmd.OutOrStdout(), r)
				printable.Fprintf(cmd.ErrOrStderr(), "examined %s\n", t.What)
			} else {
				l := cli.Listing{Whole: r, Head: []string{"STATE", "CHECK", "SUBJECT", "TEXT", "ADVICE"}}
				for _, f := range r.Findings {
					l.Add(f, string(f.State), f.Check, f.Subject, f.Text, f.Advice)
				}
				err = l.Write(cmd.OutOrStdout(), output)
			}
			if err == nil && r.Failed > 0 {
				err = cli.WithCode(cli.ExitInvalid, fmt.Errorf("%s failed", cli.Plural(r.Failed, "check")))
			}
			return err
		},
	}
	fl := cmd.Flags()
	f.Add(fl)
	fl.StringVar(&f.Router, "router", "", "admin `URL` of the router (default $DYNCTL_ROUTER or "+cli.DefaultRouter+")")
	fl.StringArrayVar(&f.Prefill, "prefill", nil, "engine that prefills, `URL[,key=value,...]` (repeatable): a router in this process examines it")
	fl.StringVar(&f.Sim, "sim", "", "simulated `FLEET` such as 2p2d")
	fl.StringVar(&f.Model, "model", "", "model; the first one unless given")
	fl.BoolVar(&passive, "passive", false, "send no request to an engine's model")
	fl.IntVar(&tokens, "tokens", 0, "length of the probes' prompts in `TOKENS` (default 40 blocks)")
	cli.OutputFlag(cmd, &output, cli.ListFormats()...)
	return cmd
}

// progressEvery is how long an examination takes until it shows what it is at, and how
// long until it shows that again.
const progressEvery = 2 * time.Second

// progress shows what a slow examination is at.
type progress struct {
	what atomic.Pointer[string]
	end  context.CancelFunc
	done sync.WaitGroup
}

// startProgress shows on w what the examination is at, until it is stopped.
func startProgress(ctx context.Context, w io.Writer) *progress {
	p := &progress{}
	ctx, p.end = context.WithCancel(ctx)
	p.step("whether all that is named answers")
	p.done.Go(func() {
		for range wait.Every(ctx, progressEvery) {
			printable.Fprintf(w, "still examining %s\n", *p.what.Load())
		}
	})
	return p
}

// step sets what is shown next.
func (p *progress) step(what string) { p.what.Store(&what) }

// stop ends it; afterwards nothing is written. It may be called again.
func (p *progress) stop() {
	p.end()
	p.done.Wait()
}
