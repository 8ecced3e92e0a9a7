package tui

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	tea "github.com/charmbracelet/bubbletea"

	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/tui/feed"
	"github.com/dynctl/dynctl/internal/tui/page"
	"github.com/dynctl/dynctl/internal/tui/widget"
)

// operate asks whether a worker shall be drained or resumed; without a name it is
// the one under the cursor.
func (a *app) operate(verb, name string) {
	c := a.page()
	if name == "" {
		name = a.workerHere()
	}
	i := slices.IndexFunc(c.R.WorkerList, func(w admin.Worker) bool { return w.Name == name })
	switch {
	case name == "":
		a.say(verb+": name a worker, or put the cursor on one of its ranks", true)
		return
	case i < 0:
		a.say(fmt.Sprintf("%s: the router has no worker %q", verb, name), true)
		return
	case a.recording() != nil:
		a.say("a recording cannot be changed", true)
		return
	case a.frozen != nil:
		a.say("the data stands still: press p for live data before you change something", true)
		return
	}
	client := a.replicas[a.sel].poller.Client
	act, after := client.DrainWorker, "gets no new requests; running ones finish"
	if verb == "resume" {
		act, after = client.ResumeWorker, "takes requests again"
	}
	on := ""
	if len(a.replicas) > 1 {
		on = " on this router alone"
	}
	text := fmt.Sprintf("%s %s%s? y does it, any other key does not", verb, name, on)
	if verb == "drain" && admin.LastUsable(c.R.WorkerList, name) {
		text = fmt.Sprintf("%s is the last usable %s worker: drain it%s? y does it, any other key does not", name, c.R.WorkerList[i].Role, on)
	}
	a.guard = func() tea.Msg {
		var w *admin.Worker
		var err error
		if w, err = act(a.ctx, name); err != nil {
			return saidMsg{text: verb + " " + name + ": " + err.Error(), fault: true}
		}
		return saidMsg{text: w.Name + " " + after}
	}
	a.say(text, true)
}

// workerHere is the worker of the rank under the cursor, "" where there is none.
func (a *app) workerHere() string {
	if a.tab > 1 {
		return ""
	}
	label, _ := a.pages[a.tab].Row(a.page())
	if i := strings.LastIndexByte(label, '/'); i >= 0 {
		label = label[:i]
	}
	return label
}

// describe shows all that is known of a worker and its ranks.
func (a *app) describe(name string) {
	if name == "" {
		name = a.workerHere()
	}
	if !slices.ContainsFunc(a.page().R.WorkerList, func(w admin.Worker) bool { return w.Name == name }) {
		a.say("describe: name a worker, or put the cursor on one of its ranks", true)
		return
	}
	a.overlay = &overlay{title: "describe " + name, live: func() []string { return describeLines(a.page().R, name) }}
}

func describeLines(r *feed.Router, name string) (out []string) {
	add := func(format string, args ...any) { out = append(out, fmt.Sprintf(format, args...)) }
	for i := range r.WorkerList {
		w := &r.WorkerList[i]
		if w.Name != name {
			continue
		}
		add("%s  %s  %s", w.Name, w.Role, w.URL)
		add("engine %s %s, connector %s, models %s, %d ranks, blocks of %d tokens, %s blocks a rank, from %s", w.Engine, w.Version, cmp.Or(w.Connector, widget.Unknown), cmp.Or(strings.Join(w.Models, " "), widget.Unknown), w.DP, w.BlockSizeTokens, widget.Known(w.KVBlocks), w.Source)
		state := "usable"
		switch {
		case w.Draining:
			state = "drains"
		case !w.Usable:
			state = "not usable"
		}
		add("health %s, %s%s%s", w.Health, state, because(w.Reason), because(w.Conflict))
	}
	for _, x := range r.Attention {
		if x.Worker == name {
			add("%s %s: %s", strings.ToUpper(x.Severity.String()), x.Subject, x.Text)
		}
	}
	for i := range r.Ranks {
		k := &r.Ranks[i]
		if k.Worker != name {
			continue
		}
		out = append(out, "", k.Label+"  "+k.Status+because(k.Reason))
		add("  speed    TTFT %s, ITL %s, %s output tokens/s, %s requests/s (the router's measurement)", widget.Millis(feed.Figure(k.TTFT).F()), widget.Millis(feed.Figure(k.ITL).F()), widget.Count(feed.Figure(k.OutputRate).F()), widget.Rate(k.RequestRate.F()))
		add("  engine   %s run, %s wait, KV %s%%, prefix hits %s%% (life %s%%), figures %s old", widget.Count(k.Running().F()), widget.Count(k.Waiting().F()), widget.Percent(k.KVUsage().F()), widget.Percent(k.HitShare.F()), widget.Percent(k.LifeHit.F()), widget.Seconds(k.LoadAge.F()))
		add("  router   %d active, %d prefill tokens, %d decode blocks, %s failed in the last minute", k.ActiveRequests, k.PrefillTokens, k.DecodeBlocks, widget.Count(k.RecentFailures.F()))
		add("  index    %d blocks of %s, events %s for %s%s, %s/s, %d gaps, %d lost, %d restarts", k.IndexBlocks, widget.Known(k.Room()), k.Feed.State, widget.Seconds(k.FeedFor.F()), because(k.Feed.Reason), widget.Rate(k.EventRate.F()), k.Feed.Gaps, k.Feed.Lost, k.Feed.Restarts)
		if caches := k.Caches(); caches != "" {
			add("  caches   %s", caches)
		}
		if moved := page.Moved(k); moved != "" {
			add("  %s", moved)
		}
	}
	return out
}

func because(why string) string {
	if why == "" {
		return ""
	}
	return " (" + why + ")"
}
