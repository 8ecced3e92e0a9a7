package replaycmd

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/dynctl/dynctl/internal/cli"
	"github.com/dynctl/dynctl/internal/cli/topcmd"
	"github.com/dynctl/dynctl/internal/replay"
	"github.com/dynctl/dynctl/internal/router"
	"github.com/dynctl/dynctl/internal/router/observe/adminserver"
	"github.com/dynctl/dynctl/internal/settings"
)

// show serves a trace as the admin API of the router that was recorded, and
// drives top from it.
func (f *replayFlags) show(cmd *cobra.Command, files *traceFiles) (err error) {
	if err := files.again(); err != nil {
		return err
	}
	speed, err := parseSpeed(f.speed)
	if err != nil {
		return cli.WithCode(cli.ExitUsage, err)
	}
	if !cmd.Flags().Changed("speed") {
		speed = 1
	}
	addr := cmp.Or(f.listen, "127.0.0.1:0")
	if host, _, err := net.SplitHostPort(addr); err != nil || net.ParseIP(host) == nil || !net.ParseIP(host).IsLoopback() {
		return cli.WithCode(cli.ExitUsage, fmt.Errorf("--admin-listen %s: want a loopback HOST:PORT, since it asks for no token", addr))
	}
	if f.tui {
		files.options.OnBad = nil // its words would stand on the screen
	}
	stage, err := replay.NewStage(files.open, replay.PlayerOptions{BlockSize: f.blockSize}, speed)
	if err != nil {
		return traceError(err)
	}
	defer stage.Close()
	if f.from > 0 {
		if err := stage.Seek(f.from.String()); err != nil {
			return err
		}
	}
	ln, err := cli.Listen("--admin-listen", addr)
	if err != nil {
		return err
	}
	bounds := settings.Default().Timeouts
	handler := stage.Handler(adminserver.Access{Terms: func() adminserver.Terms { return adminserver.Terms{Body: bounds.Body, Write: bounds.Write} }})
	server := router.NewServer(handler, slog.NewLogLogger(slog.DiscardHandler, slog.LevelDebug))
	ctx, stop := context.WithCancel(cmd.Context())
	defer stop()
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		if err := server.Serve(ln); !errors.Is(err, http.ErrServerClosed) {
			return err
		}
		return nil
	})
	g.Go(func() error { return traceError(stage.Run(ctx)) })
	url := "http://" + ln.Addr().String()
	if f.tui {
		top := topcmd.New()
		top.SilenceErrors, top.SilenceUsage = true, true // its error is reported below
		top.SetArgs([]string{"--router", url, "--rate", "250ms"})
		top.SetIn(cmd.InOrStdin())
		top.SetOut(cmd.OutOrStdout())
		top.SetErr(cmd.ErrOrStderr())
		err = top.ExecuteContext(ctx)
	} else {
		fmt.Fprintf(cmd.ErrOrStderr(), "dynctl top --router %s\ncurl -X POST '%s/admin/v1/replay?do=pause'   (play, step&n=1, back&n=100, seek&to=90s, faster, slower)\n", url, url)
		<-ctx.Done()
	}
	stop()
	return errors.Join(err, server.Close(), g.Wait())
}
