package tui

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/charmbracelet/bubbles/progress"
	tea "github.com/charmbracelet/bubbletea"
	"github.com/muesli/termenv"

	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/tui/theme"
	"github.com/dynctl/dynctl/internal/tui/widget"
)

// recording is where the recording stands that is watched, nil for a running router.
func (a *app) recording() *admin.Replay { return a.view.Routers[a.sel].Replay }

// playKey does what keys do while a recording is watched, and reports whether it is
// one of them.
func (a *app) playKey(key string) (tea.Cmd, bool) {
	e, ok := a.playKeys[key]
	if !ok || a.recording() == nil {
		return nil, false
	}
	return a.control(e.Do, e.To), true
}

// control asks for something of the recording that is watched.
func (a *app) control(do, to string) tea.Cmd {
	i := a.sel
	client := a.replicas[i].poller.Client
	return a.ask(func(ctx context.Context) tea.Msg {
		_, err := client.Replay(ctx, do, to)
		return controlledMsg{i, err}
	})
}

// controlled looks at what the recording shows after that.
func (a *app) controlled(m controlledMsg) tea.Cmd {
	if m.err != nil {
		a.say(m.err.Error(), true)
		return nil
	}
	return a.poll(m.replica)
}

// seekAt goes to where the bar was clicked.
func (a *app) seekAt(x int) tea.Cmd {
	from, to := a.bar[0], a.bar[1]
	if x < from || x >= to {
		return nil
	}
	share := 100 * (float64(x-from) + .5) / float64(to-from)
	return a.control("seek", strconv.FormatFloat(share, 'f', 2, 64)+"%")
}

// drawRecording is the line of a recording: whether it plays, where it stands, how
// long it is and how fast it goes.
func (a *app) drawRecording(p *widget.Painter) {
	r := a.recording()
	if r == nil {
		return
	}
	state, style := "PLAYING", theme.Good
	switch {
	case r.Seeking:
		state, style = "SEEKING", theme.Warn
	case r.Ended:
		state, style = "AT END", theme.Warn
	case r.Paused:
		state, style = "PAUSED", theme.Warn
	}
	speed := "as fast as it goes"
	if r.Speed > 0 {
		speed = strconv.FormatFloat(r.Speed, 'g', 4, 64) + "x"
	}
	at, total := time.Duration(r.AtUS)*time.Microsecond, widget.Unknown
	if r.TotalUS != nil {
		total = clock(time.Duration(*r.TotalUS) * time.Microsecond)
	}
	right := fmt.Sprintf(" %s of %s  %s  %s records ", clock(at), total, speed, widget.Whole(float64(r.Records)))
	p.Put(style, fmt.Sprintf(" %-7s ", state))
	a.bar = [2]int{p.X(), a.w - widget.Width(right)}
	width := a.bar[1] - a.bar[0]
	if r.TotalUS == nil || width < 3 {
		a.bar = [2]int{} // how much of it has passed is not known
		p.To(a.w - widget.Width(right))
	} else {
		full, empty := '█', '░'
		if a.th.ASCII {
			full, empty = '#', '-'
		}
		share := 1.
		if *r.TotalUS > 0 {
			share = min(float64(r.AtUS)/float64(*r.TotalUS), 1)
		}
		// Colours come from the theme; the bar is characters.
		bar := progress.New(progress.WithWidth(width), progress.WithoutPercentage(), progress.WithFillCharacters(full, empty), progress.WithColorProfile(termenv.Ascii))
		p.Put(theme.Bar, bar.ViewAs(share))
	}
	p.Put(theme.Plain, right)
	p.End()
}

// clock is a time of a recording, in the form that :seek takes.
func clock(d time.Duration) string {
	if d < time.Minute {
		return d.Round(100 * time.Millisecond).String()
	}
	return d.Round(time.Second).String()
}
