package topcmd

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/cli"
	"github.com/dynctl/dynctl/internal/loopback"
	"github.com/dynctl/dynctl/internal/settings"
)

// TestTopOnceOfManyRanks: 250 workers with 1,000 ranks in one process, under a load of
// texts and after it: top --once ends well, within its own timeouts, has every rank, and shows
// no trouble that the router does not have.
func TestTopOnceOfManyRanks(t *testing.T) {
	if testing.Short() {
		t.Skip("starts 250 engines")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 8*time.Minute)
	defer cancel()
	rig, err := loopback.Start(ctx, loopback.Options{Fleet: "125p125d:dp=4", Configure: func(c *settings.Config) {
		c.Health.Timeout = time.Minute // on a busy machine engines are late, and not down
	}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		_ = rig.Close(ctx) // requests that a failed test left are cut
	})
	if err := rig.Ready(ctx); err != nil {
		t.Fatal(err)
	}
	// troubles are what the router reports of itself: on a busy machine engines may be late.
	troubles := func() string {
		s, err := rig.Admin.Status(ctx)
		if err != nil {
			return err.Error()
		}
		return strings.Join(s.Reasons, "; ")
	}
	// look has top look until the router answers in time and has no trouble that top shows.
	look := func(when string) (out string) {
		t.Helper()
		err := loopback.Wait(ctx, "a look at a router without trouble", func() error {
			trouble := troubles()
			began := time.Now()
			code, text, errs := typed("top", "--once", "--router", rig.AdminURL)
			t.Logf("%s: %s", when, time.Since(began)) // logged only: the machine may be busy with other tests
			if code == cli.ExitUnreachable {
				return errors.New(errs)
			}
			if code != cli.ExitOK || errs != "" {
				t.Fatalf("%s: exit %d: %s", when, code, errs)
			}
			wrong := ""
			for _, word := range []string{"tokenize", "stale", "unreachable", "down", "unknown"} {
				if strings.Contains(text, word) {
					wrong += fmt.Sprintf("it says %q; ", word)
				}
			}
			if !strings.Contains(text, "250 usable, 1000 ranks") {
				wrong += "not all are usable"
			}
			if wrong != "" {
				if trouble = cmp.Or(trouble, troubles()); trouble != "" {
					return errors.New(trouble)
				}
				t.Errorf("%s: %s, which is not so:\n%.2000s … %s", when, wrong, text, text[max(0, len(text)-1000):])
			}
			if n := len(regexp.MustCompile(`(?m)^  \S+/dp\d `).FindAllString(text, -1)); n != 1000 {
				t.Errorf("%s: %d ranks are shown:\n%.2000s", when, n, text)
			}
			out = text
			return nil
		})
		if err != nil {
			t.Fatalf("%s: %v", when, err)
		}
		return out
	}
	load, stop := context.WithCancel(ctx)
	var clients sync.WaitGroup
	var number, failed atomic.Int64
	for range 8 { // more would starve what is looked at on two cores
		clients.Go(func() {
			for load.Err() == nil {
				text := fmt.Sprintf("%d: %s", number.Add(1), strings.Repeat("tell me how a router chooses ", 20))
				status, _, _, err := rig.Post(load, "/v1/chat/completions", map[string]any{
					"model": "sim", "max_tokens": 200, "ignore_eos": true, "messages": []map[string]string{{"role": "user", "content": text}},
				})
				if err == nil && status != http.StatusOK { // an error is the end of the load
					failed.Add(1)
				}
			}
		})
	}
	if err := loopback.Wait(ctx, "requests in progress", func() error {
		s, err := rig.Admin.Status(ctx)
		if err == nil && s.Traffic.Inflight == 0 {
			err = errors.New("none")
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		look("under load")
	}
	// On a busy machine all clients may be between two requests at a look.
	if err := loopback.Wait(ctx, "a look that shows the load", func() error {
		if out := look("under load"); strings.Contains(out, "active 0,") {
			return fmt.Errorf("nothing is active:\n%.600s", out)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	stop()
	clients.Wait()
	if n := failed.Load(); n > 0 {
		t.Errorf("%d requests failed", n)
	}
	for tick := time.NewTicker(100 * time.Millisecond); ; {
		s, err := rig.Admin.Status(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if s.Traffic.Inflight == 0 {
			tick.Stop()
			break
		}
		<-tick.C
	}
	if out := look("after the load"); !strings.Contains(out, "active 0,") {
		t.Errorf("idle, and not said so:\n%.600s", out)
	}
}
