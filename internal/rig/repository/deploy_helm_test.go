package repository

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"text/template"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"go.yaml.in/yaml/v3"
	kubeyaml "sigs.k8s.io/yaml"

	"github.com/dynctl/dynctl/internal/rig/jsonschema"
)

const chartDir = repository + "/deploy/helm/dynctl"

// rendered is what Helm makes of a chart.
type rendered struct {
	manifests []byte
	notes     string // what helm install prints
}

// chartRelease is the release that tests render, in namespace ns.
const chartRelease = "dynctl"

// renderChart renders the chart as a release in namespace ns, with values over its own.
// It checks the values against the schema, as Helm does, and knows the few functions that
// the templates use; TestChartAsHelm compares it with Helm.
func renderChart(t *testing.T, release string, values map[string]any) (rendered, error) {
	t.Helper()
	merged := yamlFile(t, filepath.Join(chartDir, "values.yaml"))
	overlay(merged, values)
	var schema map[string]any
	if err := json.Unmarshal(chartFiles(chartDir).read(t, "values.schema.json"), &schema); err != nil {
		t.Fatal(err)
	}
	if faults := jsonschema.Check("values", schema, merged); len(faults) > 0 {
		return rendered{}, errors.New(strings.Join(faults, "\n"))
	}
	chart := yamlFile(t, filepath.Join(chartDir, "Chart.yaml"))
	for _, k := range []string{"name", "version"} { // as Helm names them
		chart[strings.ToUpper(k[:1])+k[1:]] = chart[k]
	}
	data := map[string]any{
		"Values": merged, "Chart": chart, "Files": chartFiles(chartDir),
		"Release": map[string]any{"Name": release, "Namespace": "ns", "Service": "Helm"},
	}
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
		"default": func(other, v any) any {
			if ok, _ := template.IsTrue(v); !ok {
				return other
			}
			return v
		},
		// The token is the one random thing in the chart, and nothing is installed yet.
		"randAlphaNum": func(n int) string { return strings.Repeat("x", n) },
		"lookup":       func(_, _, _, _ string) map[string]any { return map[string]any{} },
		"dig": func(path ...any) any { // of a map that is empty
			return path[len(path)-2]
		},
		"quote":      func(v any) string { return fmt.Sprintf("%q", fmt.Sprint(v)) },
		"b64enc":     func(s string) string { return base64.StdEncoding.EncodeToString([]byte(s)) },
		"sha256sum":  func(s string) string { return fmt.Sprintf("%x", sha256.Sum256([]byte(s))) },
		"list":       func(v ...any) []any { return v },
		"fail":       func(text string) (string, error) { return "", errors.New(text) },
		"contains":   func(part, s string) bool { return strings.Contains(s, part) },
		"replace":    func(from, to, s string) string { return strings.ReplaceAll(s, from, to) },
		"trunc":      func(n int, s string) string { return s[:min(n, len(s))] },
		"trimSuffix": func(end, s string) string { return strings.TrimSuffix(s, end) },
		"ceil":       math.Ceil,
		"float64":    func(v float64) float64 { return v },
		"toDate":     time.Parse,
		"mustDateModify": func(by string, at time.Time) (time.Time, error) {
			d, err := time.ParseDuration(by)
			return at.Add(d), err
		},
	})
	files, err := filepath.Glob(filepath.Join(chartDir, "templates", "*"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := all.ParseFiles(files...); err != nil {
		t.Fatal(err)
	}
	var out rendered
	for _, file := range files {
		name := filepath.Base(file)
		if strings.HasPrefix(name, "_") {
			continue
		}
		var b bytes.Buffer
		if err := all.ExecuteTemplate(&b, name, data); err != nil {
			return rendered{}, err
		}
		if name == "NOTES.txt" {
			out.notes = b.String()
			continue
		}
		out.manifests = fmt.Appendf(out.manifests, "\n---\n%s", b.Bytes())
	}
	return out, nil
}

// chartFiles are the files of a chart, by their paths in it.
type chartFiles string

// Get is a file's text, and empty where there is none, as in Helm.
func (dir chartFiles) Get(name string) string {
	text, _ := os.ReadFile(filepath.Join(string(dir), name))
	return string(text)
}

func (dir chartFiles) read(t *testing.T, name string) []byte {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(string(dir), name))
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// yamlFile is a file with one YAML object, as Helm reads it.
func yamlFile(t *testing.T, path string) map[string]any {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	v := map[string]any{}
	if err := kubeyaml.Unmarshal(text, &v); err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	return v
}

// render is the manifests of the chart with the values of a file, and Helm's notes.
func render(t *testing.T, values string) (map[string]any, string) {
	t.Helper()
	out, err := renderChart(t, chartRelease, yamlFile(t, values))
	if err != nil {
		t.Fatal(err)
	}
	return manifests(t, out.manifests), out.notes
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

// charts are the values that the chart is tried with, and how many documents each makes.
var charts = map[string]int{"default": 10, "everything": 17, "all-namespaces": 6}

func chartValues(name string) string { return filepath.Join(chartDir, "ci", name+"-values.yaml") }

// TestChart holds the Helm chart to the binary's flags, settings and probes, and to the
// kustomize base: both make the same routers.
func TestChart(t *testing.T) {
	base := documents(t)
	baseArgs := serveArgs(t, at[[]any](t, base["Deployment/dynctl"], "spec", "template", "spec", "containers", 0, "args"), "")
	for name, want := range charts {
		t.Run(name, func(t *testing.T) {
			docs, notes := render(t, chartValues(name))
			if len(docs) != want {
				t.Errorf("%d documents: %v", len(docs), slices.Sorted(maps.Keys(docs)))
			}
			pod := at[map[string]any](t, docs["Deployment/dynctl"], "spec", "template")
			c := serveArgs(t, at[[]any](t, pod, "spec", "containers", 0, "args"), at[string](t, docs["ConfigMap/dynctl"], "data", "dynctl.yaml"))
			full := maps.Clone(docs)
			for _, name := range []string{"NetworkPolicy/dynctl", "PodDisruptionBudget/dynctl", "Role/dynctl", "RoleBinding/dynctl", "ServiceAccount/dynctl"} {
				if full[name] == nil { // switched off, for all namespaces, or made by hand
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
			if share := docs["Service/dynctl-share"]; share != nil {
				port := at[int](t, share, "spec", "ports", 0, "port")
				if got := fmt.Sprintf("dynctl-share:%d", port); !slices.Equal(c.Replicas.Routers, []string{got}) || c.Replicas.Listen != fmt.Sprintf("0.0.0.0:%d", port) {
					t.Errorf("routers look for each other at %v and listen on %s, the Service has %s", c.Replicas.Routers, c.Replicas.Listen, got)
				}
				if d := cmp.Diff(at[any](t, docs["Service/dynctl"], "spec", "selector"), at[any](t, share, "spec", "selector")); d != "" || at[string](t, share, "spec", "clusterIP") != "None" {
					t.Errorf("the routers' Service is not that of all routers: %s", d)
				}
			} else if c.Replicas.On() {
				t.Error("the routers look for each other, and no Service has their addresses")
			}
			checkFields(t, docs)
			checkReferences(t, docs)
			if rule := docs["PrometheusRule/dynctl"]; rule != nil {
				if d := cmp.Diff(readYAML(t, repository+"/deploy/monitoring/alerts.yaml")[0], at[any](t, rule, "spec")); d != "" {
					t.Errorf("the PrometheusRule has other alerts (-want +got):\n%s", d)
				}
				if got := at[string](t, docs["ConfigMap/dynctl-dashboard"], "data", "dynctl.json"); got != chartFiles(repository).Get("deploy/monitoring/dashboard.json") {
					t.Errorf("the ConfigMap has another dashboard:\n%s", got)
				}
			}
			checkNotes(t, notes)
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
				for _, c := range at[[]any](t, spec, "topologySpreadConstraints") {
					delete(c.(map[string]any), "labelSelector") // the chart's has the release, too
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

// checkReferences: what the chart's objects refer to is in the chart, or named by the values.
func checkReferences(t *testing.T, docs map[string]any) {
	t.Helper()
	for _, v := range at[[]any](t, docs["Deployment/dynctl"], "spec", "template", "spec", "volumes") {
		v := v.(map[string]any)
		if m, ok := v["configMap"].(map[string]any); ok && v["name"] == "settings" && docs["ConfigMap/"+m["name"].(string)] == nil {
			t.Errorf("there is no ConfigMap %s", m["name"])
		}
		if v["name"] != "admin" {
			continue
		}
		name := at[string](t, v, "secret", "secretName")
		if secret := docs["Secret/"+name]; secret != nil {
			file := at[[]any](t, docs["Deployment/dynctl"], "spec", "template", "spec", "containers", 0, "args")
			for key := range at[map[string]any](t, secret, "data") {
				if !slices.Contains(file, any("--admin-token-file=/etc/dynctl/admin/"+key)) {
					t.Errorf("the secret has the key %s, and the arguments are %v", key, file)
				}
			}
		} else if name != "by-hand" {
			t.Errorf("there is no Secret %s", name)
		}
		if m := docs["ServiceMonitor/dynctl"]; m != nil && at[string](t, m, "spec", "endpoints", 0, "authorization", "credentials", "name") != name {
			t.Errorf("the ServiceMonitor takes another token than the secret %s", name)
		}
	}
}

// checkNotes: the command lines of dynctl in the notes are right.
func checkNotes(t *testing.T, notes string) {
	t.Helper()
	seen := 0
	for line := range strings.Lines(notes) {
		if line, ok := strings.CutPrefix(line, "    dynctl "); ok {
			seen++
			if err := parses(strings.Fields(line)); err != nil {
				t.Errorf("%s: %v", line, err)
			}
		}
	}
	if seen == 0 {
		t.Errorf("no command line of dynctl in\n%s", notes)
	}
}

// refused are values that the chart refuses, as YAML, and a part of what it says.
var refused = map[string]string{
	`{image: {repository: ""}}`:                                               "scripts/image.sh",
	`{image: {tag: ""}}`:                                                      "skopeo copy",
	`{settings: {routing: {treshold: 4096}}}`:                                 "treshold",
	`{settings: {routing: {threshold: some}}}`:                                "threshold",
	`{settings: {timeouts: {drain: soon}}}`:                                   "drain",
	`{settings: {admin_listen: "0.0.0.0:1"}}`:                                 "admin_listen",
	`{replica: 3}`:                                                            "replica",
	`{image: {pullPolicy: Sometimes}}`:                                        "pullPolicy",
	`{podLabels: {team: 1}}`:                                                  "team",
	`{settings: {timeouts: {drain: 10m}}, terminationGracePeriodSeconds: 60}`: "need 620",
}

// TestChartRefuses: mistakes in the values end an installation, with the reason.
func TestChartRefuses(t *testing.T) {
	for text, reason := range refused {
		values := yamlFile(t, chartValues("default"))
		var over map[string]any
		if err := kubeyaml.Unmarshal([]byte(text), &over); err != nil {
			t.Fatal(err)
		}
		overlay(values, over)
		if _, err := renderChart(t, chartRelease, values); err == nil || !strings.Contains(err.Error(), reason) {
			t.Errorf("%s: %v, want %s", text, err, reason)
		}
	}
	// A longer time than needed is taken, and a chart above may say enabled and global.
	for text, want := range map[string]float64{`{terminationGracePeriodSeconds: 90}`: 90, `{enabled: true, global: {a: b}}`: 60} {
		values := yamlFile(t, chartValues("default"))
		if err := kubeyaml.Unmarshal([]byte(text), &values); err != nil {
			t.Fatal(err)
		}
		out, err := renderChart(t, chartRelease, values)
		if err != nil {
			t.Fatal(err)
		}
		if got := at[int](t, manifests(t, out.manifests)["Deployment/dynctl"], "spec", "template", "spec", "terminationGracePeriodSeconds"); float64(got) != want {
			t.Errorf("%s: %d seconds, want %v", text, got, want)
		}
	}
}

// TestChartNames: names follow the release and the overrides, in every object, and the
// label by which routers are told from engines does not.
func TestChartNames(t *testing.T) {
	for _, c := range []struct{ release, values, want string }{
		{"dynctl", `{}`, "dynctl"},
		{"my-dynctl", `{}`, "my-dynctl"},
		{"front", `{}`, "front-dynctl"},
		{"front", `{nameOverride: router}`, "front-router"},
		{"front", `{fullnameOverride: other}`, "other"},
		{"front", `{fullnameOverride: ` + strings.Repeat("a", 80) + `}`, strings.Repeat("a", 57)},
	} {
		values := yamlFile(t, chartValues("everything"))
		if err := kubeyaml.Unmarshal([]byte(c.values), &values); err != nil {
			t.Fatal(err)
		}
		out, err := renderChart(t, c.release, values)
		if err != nil {
			t.Fatal(err)
		}
		for name, doc := range manifests(t, out.manifests) {
			_, is, _ := strings.Cut(name, "/")
			if is, _, _ = strings.Cut(is, "."); is != c.want && is != c.want+"-admin" && is != c.want+"-share" && is != c.want+"-dashboard" {
				t.Errorf("release %s with %s: %s", c.release, c.values, name)
			}
			labels := at[map[string]any](t, doc, "metadata", "labels")
			if labels["app.kubernetes.io/name"] != "dynctl" || labels["app.kubernetes.io/instance"] != c.release {
				t.Errorf("release %s: %s has the labels %v", c.release, name, labels)
			}
		}
	}
}

// TestChartAsHelm: Helm itself finds no fault with the chart, makes the same documents of
// it, and refuses the same values.
func TestChartAsHelm(t *testing.T) {
	helm, err := exec.LookPath("helm")
	if err != nil {
		t.Skipf("skipped: no helm on this machine (%v)", err)
	}
	made := func(args ...string) ([]byte, string, error) {
		cmd := exec.Command(helm, append([]string{"template", chartRelease, chartDir, "--namespace", "ns", "--kube-version", "1.30.0", "--values"}, args...)...)
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		out, err := cmd.Output()
		return out, stderr.String(), err
	}
	for name := range charts {
		t.Run(name, func(t *testing.T) {
			out, stderr, err := made(chartValues(name))
			if err != nil {
				t.Fatalf("%v\n%s", err, stderr)
			}
			want, _ := render(t, chartValues(name))
			got := manifests(t, out)
			for _, docs := range []map[string]any{want, got} {
				if s := docs["Secret/dynctl-admin"]; s != nil { // its token is random
					for key, token := range at[map[string]any](t, s, "data") {
						at[map[string]any](t, s, "data")[key] = len(token.(string))
					}
				}
			}
			if d := cmp.Diff(want, got); d != "" {
				t.Errorf("what Helm makes is not what the other test checks (-test +helm):\n%s", d)
			}
		})
	}
	t.Run("lint", func(t *testing.T) {
		if out, err := exec.Command(helm, "lint", "--strict", chartDir, "--kube-version", "1.30.0").CombinedOutput(); err != nil {
			t.Errorf("%v\n%s", err, out)
		}
	})
	t.Run("refused", func(t *testing.T) {
		for text, reason := range refused {
			file := filepath.Join(t.TempDir(), "values.yaml")
			if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
			if _, stderr, err := made(chartValues("default"), "--values", file); err == nil || !strings.Contains(stderr, reason) {
				t.Errorf("%s: %v, want %s: %s", text, err, reason, stderr)
			}
		}
	})
}
