package doctor_test

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/dynctl/dynctl/internal/doctor"
	"github.com/dynctl/dynctl/internal/loopback"
	"github.com/dynctl/dynctl/internal/workers"
)

// cells are the states of the transfer matrix, a row for each prefill worker.
func cells(t *testing.T, r *doctor.Report) string {
	t.Helper()
	if r.Transfer == nil {
		t.Fatalf("no matrix: %v", r.Findings)
	}
	var rows []string
	for _, row := range r.Transfer.Cells {
		var states []string
		for _, c := range row {
			states = append(states, string(c.State))
			if strings.Contains(c.Text+c.Advice, "steer") || strings.Contains(c.Advice, "--allow-routing-headers") {
				t.Errorf("clients may steer here: %+v", c)
			}
		}
		rows = append(rows, strings.Join(states, " "))
	}
	return strings.Join(rows, "\n")
}

// TestADeadEngineSpoilsItsOwnPairs: one decode engine that is gone says nothing
// about the others.
func TestADeadEngineSpoilsItsOwnPairs(t *testing.T) {
	r := examineAfter(t, loopback.Options{Fleet: "2p3d:profile=instant"}, false, func(_ context.Context, g *loopback.Rig) {
		g.Sim.Named("decode-1").Kill()
	})
	got := cells(t, r)
	for _, row := range strings.Split(got, "\n") {
		if state := strings.Fields(row); state[0] != "ok" || state[1] == "ok" || state[2] != "ok" {
			t.Fatalf("decode-1 is gone, and the matrix is\n%s", got)
		}
	}
	for i := range r.Transfer.Cells {
		if c := r.Transfer.Cells[i][1]; !strings.Contains(c.Text, "decode-1") {
			t.Errorf("the engine that is gone is not named: %+v", c)
		}
	}
	if ok := states(r, "transfer")[doctor.OK]; len(ok) != 1 || !strings.Contains(ok[0], "and 2 more") {
		t.Errorf("four good pairs make one finding: %v", ok)
	}
	var b bytes.Buffer
	if err := doctor.Text(&b, r); err != nil || !strings.Contains(b.String(), "decode-0   OK") {
		t.Errorf("%v\n%s", err, b.String())
	}
}

// TestAPrefillThatFails: 5xx of a prefill engine are reported as that.
func TestAPrefillThatFails(t *testing.T) {
	r := examine(t, loopback.Options{Fleet: "1p:profile=instant+1p2d:profile=instant"}, false)
	if got := cells(t, r); got != "ok ok\nok ok" {
		t.Fatalf("a healthy fleet:\n%s", got)
	}
	r = examine(t, loopback.Options{Fleet: "1p:profile=instant,error_rate=1+1p2d:profile=instant"}, false)
	if got := cells(t, r); got != "fail fail\nok ok" {
		t.Fatalf("prefill-0 fails:\n%s", got)
	}
	for _, c := range r.Transfer.Cells[0] {
		if !strings.Contains(c.Text, "prefill-0") || !strings.Contains(c.Text, "status 500") {
			t.Errorf("%+v", c)
		}
	}
	if bad := states(r, "transfer")[doctor.Fail]; len(bad) != 1 {
		t.Errorf("one cause is one finding: %v", bad)
	}
}

// TestTransfersUnderLoad: while other requests move KV to the same engine, a probe is proven
// by what all of them computed there, and by nothing that they moved.
func TestTransfersUnderLoad(t *testing.T) {
	var wg sync.WaitGroup
	defer wg.Wait()
	r := examineAfter(t, loopback.Options{Fleet: "1p1d:profile=instant"}, false, func(ctx context.Context, g *loopback.Rig) {
		for n := range 4 {
			wg.Go(func() { traffic(ctx, g.URL, n) })
		}
	})
	c := r.Transfer.Cells[0][0]
	var took, of int
	switch c.State {
	case doctor.OK:
		_, err := fmt.Sscanf(strings.TrimPrefix(c.Text, "at least "), "%d of %d tokens", &took, &of)
		if err != nil || took > of {
			t.Errorf("proven by others' requests: %+v", c)
		}
	case doctor.Warn: // more was computed there than the longest probe has
		if !strings.Contains(c.Text, "other requests computed prompts on decode-0") {
			t.Errorf("%+v", c)
		}
	case doctor.Fail, doctor.Skip:
		t.Errorf("%+v", c)
	}
}

// TestTransfersBesideAStream: an engine that is never idle is examined, too: what moves is
// proven, and so is what does not.
func TestTransfersBesideAStream(t *testing.T) {
	for fleet, want := range map[string]string{
		"1p1d":                "at least 641 of 641 tokens moved",
		"1p1d:connector=none": "computed the prompt again",
	} {
		t.Run(fleet, func(t *testing.T) {
			r := examineAfter(t, loopback.Options{
				Fleet: fleet,
				Specs: func(s []workers.Spec) []workers.Spec {
					for i := range s {
						if strings.Contains(fleet, "none") { // as if they had one
							s[i].Connector = workers.ConnectorSharedStorage
						}
					}
					return s
				},
			}, false, func(ctx context.Context, g *loopback.Rig) { stream(ctx, t, g) })
			if c := r.Transfer.Cells[0][0]; !strings.Contains(c.Text, want) {
				t.Errorf("%+v, want %s", c, want)
			}
		})
	}
}

// stream begins an answer that lasts longer than any examination.
func stream(ctx context.Context, t *testing.T, g *loopback.Rig) {
	t.Helper()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, g.URL+"/v1/completions", strings.NewReader(`{"model":"sim","stream":true,"ignore_eos":true,"max_tokens":8000,"prompt":"Tell me all."}`))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("X-Dynctl-Path", "local")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { resp.Body.Close() })
	if _, err := resp.Body.Read(make([]byte, 1)); err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("status %d, %v", resp.StatusCode, err)
	}
}

// traffic sends prompts, each its own, until the test or the router ends.
func traffic(ctx context.Context, url string, n int) {
	for i := 0; ctx.Err() == nil; i++ {
		body := fmt.Sprintf(`{"model":"sim","max_tokens":2,"prompt":"%s"}`, strings.Repeat(fmt.Sprintf("%d %d ", n, i), 100))
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/completions", strings.NewReader(body))
		if err != nil {
			return
		}
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("X-Dynctl-Path", "remote")
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			return
		}
		resp.Body.Close()
	}
}

// TestSGLangPairsAreHealthy: decode engines that cannot prefill are not asked to.
func TestSGLangPairsAreHealthy(t *testing.T) {
	r := examine(t, loopback.Options{Fleet: "1p2d:engine=sglang,profile=instant"}, false)
	if r.Failed > 0 || cells(t, r) != "ok ok" || len(states(r, "cache probe")[doctor.Skip]) != 2 {
		t.Errorf("%+v", r.Findings)
	}
}
