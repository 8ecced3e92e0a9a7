package main

import (
	"encoding/json"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// metricLabels are the labels of every metric that is exported, as the document has
// them, which a test writes from the source.
func metricLabels(t *testing.T) map[string][]string {
	t.Helper()
	raw, err := os.ReadFile(configurationDoc)
	if err != nil {
		t.Fatal(err)
	}
	out := map[string][]string{}
	word := regexp.MustCompile("`([a-z_]+)`")
	for _, row := range regexp.MustCompile("(?m)^\\| `(dynctl_[a-z_]+)` \\|([^|]*)\\|").FindAllStringSubmatch(string(raw), -1) {
		out[row[1]] = []string{}
		for _, l := range word.FindAllStringSubmatch(row[2], -1) {
			out[row[1]] = append(out[row[1]], l[1])
		}
	}
	if len(out) < 40 {
		t.Fatalf("found only %d metrics in %s", len(out), configurationDoc)
	}
	return out
}

var (
	promMetric = regexp.MustCompile(`(dynctl_[a-z_]+)(?:\{([^}]*)\})?`)
	promLabel  = regexp.MustCompile(`([a-z_]+)\s*(?:=~|!~|!=|=)`)
	promBy     = regexp.MustCompile(`by \(([^)]*)\)`)
)

// checkQuery compares the metrics and labels of a query, and the labels that its
// text shows, with what is exported.
func checkQuery(t *testing.T, where, query, text string, known map[string][]string) {
	t.Helper()
	labels := []string{"job", "le"}
	found := promMetric.FindAllStringSubmatch(query, -1)
	if len(found) == 0 {
		t.Errorf("%s: no metric in %s", where, query)
	}
	for _, m := range found {
		name := m[1]
		of, ok := known[name]
		if base, cut := strings.CutSuffix(name, "_bucket"); !ok && cut {
			of, ok = known[base]
		}
		if !ok {
			t.Errorf("%s: there is no metric %s", where, name)
			continue
		}
		for _, l := range promLabel.FindAllStringSubmatch(m[2], -1) {
			if l[1] != "job" && !slices.Contains(of, l[1]) {
				t.Errorf("%s: %s has no label %s", where, name, l[1])
			}
		}
		labels = append(labels, of...)
	}
	for _, by := range promBy.FindAllStringSubmatch(query, -1) {
		for l := range strings.SplitSeq(by[1], ",") {
			if l = strings.TrimSpace(l); !slices.Contains(labels, l) {
				t.Errorf("%s: the sum is by %s, which none of its metrics has", where, l)
			}
		}
	}
	for _, shown := range regexp.MustCompile(`\{\{\s*(?:\$labels\.)?([a-z_]+)\s*\}\}`).FindAllStringSubmatch(text, -1) {
		if !slices.Contains(labels, shown[1]) {
			t.Errorf("%s: %s is shown, which no metric of its query has", where, shown[1])
		}
	}
}

// TestAlerts holds the alert rules to the metrics that are exported.
func TestAlerts(t *testing.T) {
	known := metricLabels(t)
	rules := at[[]any](t, readYAML(t, "../../deploy/monitoring/alerts.yaml")[0], "groups", 0, "rules")
	if len(rules) < 5 {
		t.Fatalf("%d rules", len(rules))
	}
	for _, r := range rules {
		name := at[string](t, r, "alert")
		checkQuery(t, name, at[string](t, r, "expr"), at[string](t, r, "annotations", "summary"), known)
		if s := at[string](t, r, "labels", "severity"); !slices.Contains([]string{"info", "warning", "critical"}, s) {
			t.Errorf("%s: severity %s", name, s)
		}
	}
}

// TestDashboard holds the dashboard to the metrics that are exported.
func TestDashboard(t *testing.T) {
	known := metricLabels(t)
	raw, err := os.ReadFile("../../deploy/monitoring/dashboard.json")
	if err != nil {
		t.Fatal(err)
	}
	var board any
	if err := json.Unmarshal(raw, &board); err != nil {
		t.Fatal(err)
	}
	panels := at[[]any](t, board, "panels")
	if len(panels) < 10 {
		t.Fatalf("%d panels", len(panels))
	}
	for _, p := range panels {
		for _, target := range at[[]any](t, p, "targets") {
			checkQuery(t, at[string](t, p, "title"), at[string](t, target, "expr"), at[string](t, target, "legendFormat"), known)
		}
	}
}
