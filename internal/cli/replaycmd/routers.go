package replaycmd

import (
	"fmt"
	"slices"

	"github.com/spf13/cobra"

	"github.com/dynctl/dynctl/internal/cli"
	"github.com/dynctl/dynctl/internal/printable"
	"github.com/dynctl/dynctl/internal/replay"
	"github.com/dynctl/dynctl/internal/router/observe/trace"
)

// routerFiles are the recording of one router, in its parts.
type routerFiles struct {
	name string
	*traceFiles
}

// byRouter divides files by the router that recorded them; nil unless there are several.
func (t *traceFiles) byRouter() (list []routerFiles, err error) {
	if len(t.paths) < 2 {
		return nil, nil
	}
	for _, path := range t.paths {
		r, err := trace.Open(path, nil, trace.Options{Format: t.options.Format, MaxBad: t.options.MaxBad, MaxLine: t.options.MaxLine})
		if err != nil {
			return nil, cli.WithCode(cli.ExitInvalid, err)
		}
		name := r.Header().Router
		r.Close()
		i := slices.IndexFunc(list, func(f routerFiles) bool { return f.name == name })
		if i < 0 {
			one := &traceFiles{options: t.options, stdin: t.stdin}
			one.options.OnCut = func(line int64) { one.cut.Store(line) }
			list, i = append(list, routerFiles{name, one}), len(list)
		}
		list[i].paths = append(list[i].paths, path)
	}
	if len(list) < 2 {
		return nil, nil
	}
	return list, nil
}

// verifyRouters verifies the recordings of several routers, each by itself, and reports what
// they did not see of each other.
func (f *replayFlags) verifyRouters(cmd *cobra.Command, list []routerFiles, minMatch float64) error {
	type verified struct {
		Router string         `json:"router"`
		Report *replay.Report `json:"report"`
	}
	whole := struct {
		Routers []verified          `json:"routers"`
		Blind   *replay.BlindReport `json:"blindness"`
	}{}
	blind := replay.NewBlindness()
	read := func(i int, do func(*trace.Reader) error) error {
		r, err := list[i].open()
		if err != nil {
			return err
		}
		defer r.Close()
		blind.Begin(i, r.Header())
		return traceError(do(r))
	}
	decisions, proven, differ := uint64(0), uint64(0), uint64(0)
	for i := range list {
		if err := read(i, func(r *trace.Reader) error {
			rep, err := replay.Play(cmd.Context(), r, replay.Options{
				Player: replay.PlayerOptions{BlockSize: f.blockSize}, From: f.from, To: f.to, Verify: true,
				Each: func(rec *trace.Record, _ *replay.Player) error { blind.Note(rec); return nil },
			})
			if err != nil {
				return err
			}
			whole.Routers = append(whole.Routers, verified{list[i].name, rep})
			decisions, proven, differ = decisions+rep.Verify.Decisions, proven+rep.Verify.Proven, differ+rep.Verify.Divergent()+rep.Verify.Unverifiable
			return nil
		}); err != nil {
			return err
		}
	}
	for i := range list {
		if err := read(i, func(r *trace.Reader) error { return blind.Judge(cmd.Context(), r, f.from, f.to) }); err != nil {
			return err
		}
	}
	whole.Blind = blind.Report()
	out := cmd.OutOrStdout()
	switch f.output {
	case "json", "jsonl", "yaml":
		if err := cli.WriteData(out, f.output, whole); err != nil {
			return err
		}
	default:
		for _, v := range whole.Routers {
			printable.Fprintf(out, "ROUTER  %s\n", cli.OrDash(v.Router))
			if err := writeReport(out, f.output, replay.Head, v.Report); err != nil {
				return err
			}
			fmt.Fprintln(out)
		}
		if err := whole.Blind.Text(out); err != nil {
			return err
		}
	}
	switch {
	case f.minMatch != "" && float64(proven) < minMatch*float64(decisions):
		return cli.WithCode(cli.ExitMissed, fmt.Errorf("%d of %d decisions are proven to come out the same, fewer than --min-match %s", proven, decisions, f.minMatch))
	case f.minMatch == "" && differ > 0:
		return cli.WithCode(cli.ExitMissed, fmt.Errorf("of %d decisions, %d come out differently or cannot be made again, see above; --min-match sets how many must be proven", decisions, differ))
	}
	for i := range list {
		if err := list[i].whole(); err != nil {
			return err
		}
	}
	return nil
}
