package repository

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"

	"github.com/dynctl/dynctl/internal/cli"
	"github.com/dynctl/dynctl/internal/cli/commands"
	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/workers/discovery"
)

// TestReleaseArchives: what README.md links to is in the archives of a release. Files and
// folders are named as they are there: "docs/**/*" once left out all that was not in a
// folder below docs.
func TestReleaseArchives(t *testing.T) {
	raw, err := os.ReadFile(filepath.Join(repository, "goreleaser.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var release struct {
		Archives []struct{ Files []any }
	}
	if err := yaml.Unmarshal(raw, &release); err != nil || len(release.Archives) != 1 {
		t.Fatalf("%d archives: %v", len(release.Archives), err)
	}
	var packed []string
	for _, f := range release.Archives[0].Files {
		if name, ok := f.(string); ok {
			packed = append(packed, name)
			if _, err := os.Stat(filepath.Join(repository, name)); err != nil {
				t.Error(err)
			}
		}
	}
	doc, err := os.ReadFile(filepath.Join(repository, "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	found := 0
	for _, m := range links.FindAllStringSubmatch(string(doc), -1) {
		file, _, _ := strings.Cut(m[1], "#")
		if file == "" || strings.Contains(file, "://") {
			continue
		}
		found++
		if !slices.ContainsFunc(packed, func(p string) bool { return file == p || strings.HasPrefix(file, p+"/") }) {
			t.Errorf("README.md links to %s, which no archive has (goreleaser.yaml)", file)
		}
	}
	if found < 8 {
		t.Errorf("found only %d links", found)
	}
}

// TestReleaseNames: README.md names an archive as the release builds it.
func TestReleaseNames(t *testing.T) {
	release := readYAML(t, filepath.Join(repository, "goreleaser.yaml"))[0]
	name := at[string](t, release, "archives", 0, "name_template") + "." + at[string](t, release, "archives", 0, "formats", 0)
	for field, is := range map[string]string{"ProjectName": at[string](t, release, "project_name"), "Version": "VERSION", "Os": "linux", "Arch": "amd64"} {
		name = strings.ReplaceAll(name, "{{ ."+field+" }}", is)
	}
	raw, err := os.ReadFile(filepath.Join(repository, "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	url := fmt.Sprintf("https://github.com/%s/%s/releases/download/vVERSION/%s", at[string](t, release, "release", "github", "owner"), at[string](t, release, "release", "github", "name"), name)
	if !strings.Contains(string(raw), url) {
		t.Errorf("README.md lacks %s", url)
	}
}

// TestReleasesSetTheVersion: the linker sets a variable that is not there without a word.
func TestReleasesSetTheVersion(t *testing.T) {
	const pkg = "internal/cli"
	for name, want := range map[string]string{"goreleaser.yaml": "-X " + module + pkg + ".version=", "scripts/image.sh": "-X " + module + pkg + ".version=", pkg + "/version.go": "\nvar version = "} {
		if raw, err := os.ReadFile(filepath.Join(repository, name)); err != nil || !strings.Contains(string(raw), want) {
			t.Errorf("%s lacks %q (%v)", name, want, err)
		}
	}
}

// serveCmd is the command serve with its flags.
func serveCmd() *cobra.Command { return cli.Child(commands.Root(), "serve") }

// TestDeployExamples: the examples that operators copy are valid.
func TestDeployExamples(t *testing.T) {
	if _, err := cli.LoadConfig(filepath.Join(repository, "deploy", "dynctl.yaml"), serveCmd().Flags()); err != nil {
		t.Error(err)
	}
	file := filepath.Join(repository, "deploy", "workers.yaml")
	content, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	specs, err := discovery.Parse(file, content)
	if err != nil {
		t.Error(err)
	}
	if _, err := workers.NewRegistry(nil).Apply("file", specs); err != nil || len(specs) != 2 {
		t.Errorf("%d workers: %v", len(specs), err)
	}
	if got, err := cli.LoadConfig("", serveCmd().Flags()); err != nil || got.Config.Routing.Policy != "kv" {
		t.Errorf("defaults: %v", err)
	}
}
