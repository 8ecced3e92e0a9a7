package repository

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"text/template"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"go.yaml.in/yaml/v3"
	kubeyaml "sigs.k8s.io/yaml"
)

const chartDir = repository + "/deploy/helm/dynctl"

// render is the chart as release dynctl in namespace ns, with values over its own.
// It knows the few functions that the templates use; TestChartAsHelm holds it to Helm.
func render(t *testing.T, values string) map[string]any {
	t.Helper()
	merged := map[string]any{}
	for _, file := range []string{filepath.Join(chartDir, "values.yaml"), values} {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var v map[string]any
		if err := kubeyaml.Unmarshal(text, &v); err != nil {
			t.Fatal(err)
		}
		overlay(merged, v)
	}
	var chart map[string]any
	about, err := os.ReadFile(filepath.Join(chartDir, "Chart.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	if err := yaml.Unmarshal(about, &chart); err != nil {
		t.Fatal(err)
	}
	for _, k := range []string{"name", "version", "appVersion"} { // as Helm names them
		chart[strings.ToUpper(k[:1])+k[1:]] = chart[k]
	}
	data := map[string]any{"Values": merged, "Chart": chart, "Release": map[string]any{"Name": "dynctl", "Namespace": "ns", "Service": "Helm"}}

	all := template.New("")
	all.Funcs(template.FuncMap{
		"include": func(name string, data any) (string, error) {
			var b strings.Builder
			err := all.ExecuteTemplate(&b, name, data)
			return b.String(), err
		},
		"toYaml": func(v any) (string, error) {
			b, err := kubeyaml.Marshal(v)
			return strings.TrimSuffix(string(b), "\n"), err
		},
		"nindent": func(n int, s string) string {
			pad := "\n" + strings.Repeat(" ", n)
			return pad + strings.ReplaceAll(s, "\n", pad)
		},
		"quote":     func(v any) string { return fmt.Sprintf("%q", fmt.Sprint(v)) },
		"sha256sum": func(s string) string { return fmt.Sprintf("%x", sha256.Sum256([]byte(s))) },
		"list":      func(v ...any) []any { return v },
		"default": func(other, v any) any {
			if v == nil || v == "" {
				return other
			}
			return v
		},
	})
	files, err := filepath.Glob(filepath.Join(chartDir, "templates", "*"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := all.ParseFiles(files...); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	for _, file := range files {
		if strings.HasPrefix(filepath.Base(file), "_") {
			continue
		}
		out.WriteString("\n---\n")
		if err := all.ExecuteTemplate(&out, filepath.Base(file), data); err != nil {
			t.Fatal(err)
		}
	}
	return manifests(t, out.Bytes())
}

// overlay lays values over others as Helm does.
func overlay(under, over map[string]any) {
	for k, v := range over {
		below, ok := under[k].(map[string]any)
		above, also := v.(map[string]any)
		switch {
		case v == nil:
			delete(under, k)
		case ok && also:
			overlay(below, above)
		default:
			under[k] = v
		}
	}
}

// manifests are the documents of a text by kind and name, and namespace where there is
// one.
func manifests(t *testing.T, text []byte) map[string]any {
	t.Helper()
	out := map[string]any{}
	for dec := yaml.NewDecoder(bytes.NewReader(text)); ; {
		var doc map[string]any
		err := dec.Decode(&doc)
		if errors.Is(err, io.EOF) {
			return out
		}
		if err != nil {
			t.Fatalf("%v in\n%s", err, text)
		}
		if len(doc) == 0 {
			continue
		}
		name := at[string](t, doc, "kind") + "/" + at[string](t, doc, "metadata", "name")
		if ns, ok := at[map[string]any](t, doc, "metadata")["namespace"].(string); ok && ns != "ns" {
			name += "." + ns
		}
		out[name] = doc
	}
}

// charts are the values that the chart is tried with, and how many documents they
// come to.
var charts = map[string]int{"default": 9, "everything": 13, "all-namespaces": 7}

func chartValues(name string) string { return filepath.Join(chartDir, "ci", name+"-values.yaml") }

// TestChart holds the Helm chart to the binary's flags, settings and probes, and to the
// kustomize base: both make the same routers.
func TestChart(t *testing.T) {
	base := documents(t)
	baseArgs := serveArgs(t, at[[]any](t, base["Deployment/dynctl"], "spec", "template", "spec", "containers", 0, "args"), "")
	for name, want := range charts {
		t.Run(name, func(t *testing.T) {
			docs := render(t, chartValues(name))
			if len(docs) != want {
				t.Errorf("%d documents: %v", len(docs), slices.Sorted(maps.Keys(docs)))
			}
			pod := at[map[string]any](t, docs["Deployment/dynctl"], "spec", "template")
			c := serveArgs(t, at[[]any](t, pod, "spec", "containers", 0, "args"), at[string](t, docs["ConfigMap/dynctl"], "data", "dynctl.yaml"))
			full := maps.Clone(docs)
			for _, name := range []string{"NetworkPolicy/dynctl", "PodDisruptionBudget/dynctl", "Role/dynctl", "RoleBinding/dynctl"} {
				if full[name] == nil { // switched off, or for all namespaces
					full[name] = base[name]
				}
			}
			if all := docs["ClusterRole/ns-dynctl"]; all != nil {
				full["Role/dynctl"], full["RoleBinding/dynctl"] = all, docs["ClusterRoleBinding/ns-dynctl"]
			}
			checkRouter(t, full, at[map[string]any](t, pod, "metadata", "labels"), c)
			for _, svc := range []string{"Service/dynctl", "Service/dynctl-admin", "Deployment/dynctl"} {
				chosen := at[map[string]any](t, docs[svc], "spec", "selector")
				if m, ok := chosen["matchLabels"].(map[string]any); ok {
					chosen = m
				}
				for k, v := range chosen {
					if at[map[string]any](t, pod, "metadata", "labels")[k] != v {
						t.Errorf("%s chooses %v, which the pods do not have", svc, chosen)
					}
				}
			}
			if m := docs["ServiceMonitor/dynctl"]; m != nil {
				for k, v := range at[map[string]any](t, m, "spec", "selector", "matchLabels") {
					if at[map[string]any](t, docs["Service/dynctl-admin"], "metadata", "labels")[k] != v {
						t.Errorf("the ServiceMonitor chooses %s=%v, which the admin Service does not have", k, v)
					}
				}
				if port := at[string](t, m, "spec", "endpoints", 0, "port"); port != at[string](t, docs["Service/dynctl-admin"], "spec", "ports", 0, "name") {
					t.Errorf("the ServiceMonitor asks port %s", port)
				}
			}
			if name != "default" {
				return
			}
			if d := cmp.Diff(baseArgs, c, cmpopts.EquateEmpty()); d != "" {
				t.Errorf("the chart's routers are not set as those of the base (-base +chart):\n%s", d)
			}
			strip := func(doc any) map[string]any {
				spec := maps.Clone(at[map[string]any](t, doc, "spec", "template", "spec"))
				container := maps.Clone(at[map[string]any](t, spec, "containers", 0))
				for _, k := range []string{"args", "image", "imagePullPolicy", "volumeMounts"} {
					delete(container, k)
				}
				for _, probe := range []string{"startupProbe", "readinessProbe", "livenessProbe"} {
					delete(at[map[string]any](t, container, probe, "httpGet"), "scheme")
				}
				spec["containers"] = container
				delete(spec, "volumes")
				return spec
			}
			if d := cmp.Diff(strip(base["Deployment/dynctl"]), strip(docs["Deployment/dynctl"])); d != "" {
				t.Errorf("the chart's pods are not those of the base (-base +chart):\n%s", d)
			}
		})
	}
}

// TestChartAsHelm: Helm itself makes the same documents of the chart.
func TestChartAsHelm(t *testing.T) {
	helm, err := exec.LookPath("helm")
	if err != nil {
		t.Skipf("skipped: no helm on this machine (%v)", err)
	}
	for name := range charts {
		t.Run(name, func(t *testing.T) {
			cmd := exec.Command(helm, "template", "dynctl", chartDir, "--namespace", "ns", "--kube-version", "1.30.0", "--values", chartValues(name))
			var stderr bytes.Buffer
			cmd.Stderr = &stderr
			out, err := cmd.Output()
			if err != nil {
				t.Fatalf("%v\n%s", err, stderr.String())
			}
			if d := cmp.Diff(render(t, chartValues(name)), manifests(t, out)); d != "" {
				t.Errorf("what Helm makes is not what the other test checks (-test +helm):\n%s", d)
			}
		})
	}
}
