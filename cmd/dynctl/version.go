package main

import (
	"cmp"
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"

	"github.com/dynctl/dynctl/internal/router/admin"
	"github.com/dynctl/dynctl/internal/router/trace"
)

// version is set by the release build; other builds tell their commit.
var version = ""

type versionInfo struct {
	Schema   string `json:"schema"`
	Version  string `json:"version"`
	Revision string `json:"revision"`
	Modified bool   `json:"modified"`
	Go       string `json:"go"`
	Platform string `json:"platform"`
	// Schemas are what this binary writes and reads.
	Schemas []string `json:"schemas"`
}

func buildVersion() versionInfo {
	v := versionInfo{
		Schema: "dynctl.version/v1", Schemas: []string{admin.Schema, trace.Schema},
		Version: version, Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH,
	}
	if info, ok := debug.ReadBuildInfo(); ok {
		v.Version = cmp.Or(v.Version, info.Main.Version)
		for _, s := range info.Settings {
			switch s.Key {
			case "vcs.revision":
				v.Revision = s.Value
			case "vcs.modified":
				v.Modified = s.Value == "true"
			}
		}
	}
	if v.Version == "" || v.Version == "(devel)" {
		v.Version = "devel"
	}
	return v
}

// String is the version in one line.
func (v versionInfo) String() string {
	out := "dynctl " + v.Version
	if rev := v.Revision; rev != "" {
		rev = rev[:min(12, len(rev))]
		if v.Modified {
			rev += ", modified"
		}
		out += " (" + rev + ")"
	}
	return out + " " + v.Go + " " + v.Platform
}

func newVersionCmd() *cobra.Command {
	var output string
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Print the version of this binary",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			v := buildVersion()
			if output != "table" {
				return writeData(cmd.OutOrStdout(), output, v)
			}
			_, err := fmt.Fprintln(cmd.OutOrStdout(), v)
			return err
		},
	}
	outputFlag(cmd, &output, "table", "json", "jsonl", "yaml")
	return cmd
}
