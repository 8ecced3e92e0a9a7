package repository

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
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
	promMade   = regexp.MustCompile(`label_replace\([^"]*"([a-z_]+)"`)
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
	for _, made := range promMade.FindAllStringSubmatch(query, -1) {
		labels = append(labels, made[1])
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
	rules := at[[]any](t, readYAML(t, repository+"/deploy/monitoring/alerts.yaml")[0], "groups", 0, "rules")
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

// runbook is where an alert's runbook_url leads, with the name of a section.
const runbook = "https://github.com/dynctl/dynctl/blob/main/docs/troubleshooting.md#"

// TestDocumentAlerts keeps the table of alerts equal to the rules, and the links of the
// rules equal to sections of the document.
func TestDocumentAlerts(t *testing.T) {
	path := filepath.Join(repository, "docs/troubleshooting.md")
	sections := anchors(markdown(t)[path])
	var table strings.Builder
	table.WriteString("\n| alert | severity | query | for |\n|---|---|---|---|\n")
	for _, r := range at[[]any](t, readYAML(t, repository+"/deploy/monitoring/alerts.yaml")[0], "groups", 0, "rules") {
		name := at[string](t, r, "alert")
		section, ok := strings.CutPrefix(at[string](t, r, "annotations", "runbook_url"), runbook)
		if !ok || !sections[section] {
			t.Errorf("%s: runbook_url is not %s and a section of the document, but %s", name, runbook, section)
		}
		fmt.Fprintf(&table, "| [`%s`](#%s) | %s | `%s` | %s |\n", name, section,
			at[string](t, r, "labels", "severity"), strings.ReplaceAll(at[string](t, r, "expr"), "|", `\|`), at[string](t, r, "for"))
	}
	Document(t, path, "alerts", table.String()+"\n", writes, *update)
}

// TestScaling holds what is recorded for autoscalers to the metrics that are exported,
// and the autoscalers to what is recorded.
func TestScaling(t *testing.T) {
	known := metricLabels(t)
	recorded := map[string]map[string]any{} // labels by name
	for _, g := range at[[]any](t, readYAML(t, repository+"/deploy/monitoring/scaling.yaml")[0], "groups") {
		for _, r := range at[[]any](t, g, "rules") {
			name := at[string](t, r, "record")
			checkQuery(t, name, at[string](t, r, "expr"), "", known)
			recorded[name] = map[string]any{}
			if labels, ok := r.(map[string]any)["labels"]; ok {
				recorded[name] = labels.(map[string]any)
			}
			for _, by := range promBy.FindAllStringSubmatch(at[string](t, r, "expr"), -1) {
				recorded[name][by[1]] = true
			}
		}
	}
	// The names and labels that llm-d's scalers ask for.
	for name, label := range map[string]string{
		"llm_d_epp_flow_control_pool_saturation": "inference_pool", "llm_d_epp_flow_control_queue_size": "inference_pool", "llm_d_epp_request_running": "model_name",
	} {
		if recorded[name][label] == nil {
			t.Errorf("%s is not recorded with a label %s", name, label)
		}
	}
	asked := 0
	uses := func(where, query string) {
		asked++
		name, rest, _ := strings.Cut(query, "{")
		labels, ok := recorded[name]
		if !ok {
			t.Errorf("%s asks for %s, which no rule records", where, name)
		}
		for _, l := range promLabel.FindAllStringSubmatch(rest, -1) {
			if labels[l[1]] == nil {
				t.Errorf("%s asks for %s by %s, which its rule does not set", where, name, l[1])
			}
		}
	}
	const dir = repository + "/deploy/kubernetes/autoscaling/"
	for _, doc := range readYAML(t, dir+"hpa.yaml") {
		for _, m := range at[[]any](t, doc, "spec", "metrics") {
			uses("hpa.yaml", at[string](t, m, "external", "metric", "name"))
		}
		if at[int](t, doc, "spec", "minReplicas") < 1 {
			t.Error("hpa.yaml scales to zero, where routers refuse requests")
		}
	}
	for _, doc := range readYAML(t, dir+"keda.yaml") {
		for _, m := range at[[]any](t, doc, "spec", "triggers") {
			uses("keda.yaml", at[string](t, m, "metadata", "query"))
		}
		if at[int](t, doc, "spec", "minReplicaCount") < 1 {
			t.Error("keda.yaml scales to zero, where routers refuse requests")
		}
	}
	if asked < 5 {
		t.Errorf("autoscalers ask %d queries", asked)
	}
}

// TestDashboard holds the dashboard to the metrics that are exported.
func TestDashboard(t *testing.T) {
	known := metricLabels(t)
	raw, err := os.ReadFile(repository + "/deploy/monitoring/dashboard.json")
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
