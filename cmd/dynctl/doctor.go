package main

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/dynctl/dynctl/internal/bench/doctor"
)

func newDoctorCmd() *cobra.Command {
	var f targetFlags
	var output string
	var passive bool
	var tokens int
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Examine a router and its engines",
		Long: `Examine a router and its engines: is everything reachable, do clocks and
tokenizers agree, are there gaps in the KV events, do block sizes and ranks
contradict each other, does the cache hold what the router believes, and does
remote prefill really move KV, or does the decode engine compute the prompt
again without a word.

The last two send a few small requests and need --allow-routing-headers on the
router; --passive leaves them out. Nothing is changed. The exit code is 3 when
a check failed, 4 when the router cannot be reached.`,
		Example: `  dynctl doctor
  dynctl doctor --router http://10.0.0.1:8001 --passive
  dynctl doctor --prefill http://127.0.0.1:18100 --decode http://127.0.0.1:18101`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			if f.router == "" && f.sim == "" && len(f.prefill)+len(f.decode)+len(f.worker) == 0 {
				if f.router = os.Getenv("DYNCTL_ROUTER"); f.router == "" {
					f.router = defaultRouter
				}
			}
			t, err := f.open(cmd.Context(), cmd.ErrOrStderr(), "")
			if err != nil {
				return err
			}
			defer func() { err = errors.Join(err, t.close()) }()
			if output == "table" {
				fmt.Fprintf(cmd.ErrOrStderr(), "examining %s\n", t.what)
			}
			r, err := doctor.Run(cmd.Context(), doctor.Options{Target: t.Target, Model: f.model, Passive: passive, Tokens: tokens})
			if err != nil {
				return adminError(err)
			}
			if output == "table" {
				err = doctor.Text(cmd.OutOrStdout(), r, false)
			} else {
				l := listing{whole: r, head: []string{"STATE", "CHECK", "SUBJECT", "TEXT", "ADVICE"}}
				for _, f := range r.Findings {
					l.add(f, string(f.State), f.Check, f.Subject, f.Text, f.Advice)
				}
				err = l.write(cmd.OutOrStdout(), output)
			}
			if err == nil && r.Failed > 0 {
				err = withCode(exitInvalid, fmt.Errorf("%s failed", plural(r.Failed, "check")))
			}
			return err
		},
	}
	fl := cmd.Flags()
	fl.StringVar(&f.router, "router", "", "admin `URL` of the router (default $DYNCTL_ROUTER or "+defaultRouter+")")
	fl.StringVar(&f.data, "data", "", "data plane `URL` of that router, when it is not what the router says")
	f.access.add(fl)
	f.access.addData(fl)
	fl.StringArrayVar(&f.prefill, "prefill", nil, "engine that prefills, `URL[,key=value,...]` (repeatable): a router in this process examines it")
	fl.StringArrayVar(&f.decode, "decode", nil, "engine that decodes, `URL[,key=value,...]` (repeatable)")
	fl.StringArrayVar(&f.worker, "worker", nil, "engine that does both, `URL[,key=value,...]` (repeatable)")
	fl.StringVar(&f.sim, "sim", "", "simulated `FLEET` such as 2p2d")
	fl.StringVar(&f.connector, "disagg-connector-type", "", "how KV moves, with --prefill and --decode: "+strings.Join(settingWords("routing.connector"), "|"))
	fl.StringVar(&f.model, "model", "", "model; the first one unless given")
	fl.BoolVar(&f.verbose, "verbose", false, "show the log of the router in this process")
	fl.BoolVar(&passive, "passive", false, "send no request to an engine's model")
	fl.IntVar(&tokens, "tokens", 0, "length of the probes' prompts in `TOKENS` (default 40 blocks)")
	outputFlag(cmd, &output, listFormats...)
	return cmd
}
