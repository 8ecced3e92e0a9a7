package commands

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/dynctl/dynctl/internal/cli"
	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/workers/sim"
	"github.com/dynctl/dynctl/internal/workers/sim/profiles"
)

// newSimCmd makes the command sim: simulated engines on loopback sockets.
func newSimCmd() *cobra.Command {
	var output, control, profile string
	cmd := &cobra.Command{
		Use:   "sim FLEET",
		Short: "Run simulated engines",
		Long: `Run simulated engines on loopback sockets until interrupted: OpenAI HTTP, KV
events over ZeroMQ, KV transfer between prefill and decode. FLEET is a number of
(p)refill, (d)ecode and (a)ggregated engines with options, such as 2p2d,
3a:dp=2 or 2p4d:engine=sglang,block=16,kv_blocks=4096,speed=10. What each one
listens on is written to standard output; docs/simulator.md lists the options,
the timing model and the faults that can be set at run time.

Steps take the time that a profile says: --profile, or profile= in a part of
FLEET: mocker (the default), instant, cpu, a file, or a model of a real GPU. These
are fitted to published measurements (ai-dynamo/aiconfigurator), h100-8b to one of
our own, and are never measurements of your engines. The percentages are their
errors on measurements held out of the fit, median and 90th percentile.
They cannot say how much running answers suffer from a prefill beside them, or what
holds beyond the measured lengths and loads. docs/profiles.md has sources and limits.

` + profileTable() + `
transfer= in a part of FLEET sets the time that moving KV takes:

` + transferTable(),
		Example: "  dynctl sim 1p1d:port=18100\n  dynctl sim 2d:dp=2 -o json\n  dynctl sim 1p1d:transfer=nixl-64 --profile h100-70b-fp8-tp4",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			fleet, err := sim.ParseFleet(sim.WithProfile(args[0], profile))
			if err != nil {
				return cli.WithCode(cli.ExitUsage, err)
			}
			r, err := sim.Start(cmd.Context(), fleet)
			if err != nil {
				return err
			}
			defer func() { err = errors.Join(err, r.Close()) }()
			type engine struct {
				Name   string   `json:"name"`
				Role   string   `json:"role"`
				URL    string   `json:"url"`
				Events []string `json:"events"`
				Replay []string `json:"replay"`
				Flag   string   `json:"flag"`
			}
			var list []engine
			for _, w := range r.Workers() {
				e := engine{Name: w.Name, Role: string(w.Role), URL: w.URL.String(), Events: []string{}, Replay: []string{}}
				for _, s := range w.Events {
					e.Events = append(e.Events, s.Endpoint)
					if s.Replay != "" {
						e.Replay = append(e.Replay, s.Replay)
					}
				}
				flag := "--worker"
				switch w.Role {
				case workers.Prefill:
					flag = "--prefill"
				case workers.Decode:
					flag = "--decode"
				}
				e.Flag = fmt.Sprintf("%s %s,name=%s", flag, w.URL, w.Name)
				list = append(list, e)
			}
			t := cli.Listing{Whole: list, Head: []string{"NAME", "ROLE", "URL", "EVENTS"}}
			flags := ""
			for _, e := range list {
				events := "-"
				if len(e.Events) > 0 {
					events = e.Events[0]
				}
				if len(e.Events) > 1 {
					events += fmt.Sprintf(" and %d more", len(e.Events)-1)
				}
				t.Add(e, e.Name, e.Role, e.URL, events)
				flags += " " + e.Flag
			}
			if err := t.Write(cmd.OutOrStdout(), output); err != nil {
				return err
			}
			if output == "table" {
				for _, note := range fleet.Notes() {
					fmt.Fprintf(cmd.ErrOrStderr(), "\n%s\n", note)
				}
				fmt.Fprintf(cmd.ErrOrStderr(), "\nroute to them with: dynctl serve%s\nctrl-c ends them\n", flags)
			}
			if control == "" {
				<-cmd.Context().Done()
				return nil
			}
			ln, err := cli.Listen("--control-listen", control)
			if err != nil {
				return err
			}
			fmt.Fprintf(cmd.ErrOrStderr(), "faults: curl http://%s/sim/v1/engines\n", ln.Addr())
			server := &http.Server{Handler: r.Control(), ReadHeaderTimeout: 10 * time.Second}
			stop := context.AfterFunc(cmd.Context(), func() { _ = server.Close() })
			defer stop()
			if err := server.Serve(ln); !errors.Is(err, http.ErrServerClosed) {
				return err
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&control, "control-listen", "", "`HOST:PORT` of an API that kills, restarts and breaks engines")
	cmd.Flags().StringVar(&profile, "profile", "", "timing of every part of FLEET that names none: a `NAME` above or a file")
	cli.OutputFlag(cmd, &output, cli.ListFormats()...)
	return cmd
}

// profileTable lists the models of real GPUs for the help.
func profileTable() string {
	var b strings.Builder
	fmt.Fprintf(&b, "  %-17s %-11s %-11s %s\n", "NAME", "TTFT", "TPOT", "OF")
	for _, p := range profiles.All() {
		name := func(e profiles.Errors) string { return fmt.Sprintf("%.0f%%, %.0f%%", e.Median, e.P90) }
		rough := ""
		if p.Rough() {
			rough = " (rough)"
		}
		fmt.Fprintf(&b, "  %-17s %-11s %-11s %s%s\n", p.Timing.Name, name(p.TTFT), name(p.TPOT), p.What, rough)
	}
	return b.String()
}

// transferTable lists the transfers for the help.
func transferTable() string {
	var b strings.Builder
	for _, t := range profiles.Transfers() {
		fmt.Fprintf(&b, "  %-9s %g ms + %g ms for 1000 tokens: %s\n", t.Name, t.Millis[0], 1000*t.Millis[1], t.What)
	}
	return strings.TrimSuffix(b.String(), "\n")
}
