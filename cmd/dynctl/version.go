package main

import (
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"
)

// version is set by the release build; other builds tell their commit.
var version = ""

type versionInfo struct {
	Version  string `json:"version"`
	Revision string `json:"revision"`
	Modified bool   `json:"modified"`
	Go       string `json:"go"`
	Platform string `json:"platform"`
}

func buildVersion() versionInfo {
	v := versionInfo{Version: version, Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH}
	if info, ok := debug.ReadBuildInfo(); ok {
		if v.Version == "" {
			v.Version = info.Main.Version
		}
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
			rev := v.Revision
			if len(rev) > 12 {
				rev = rev[:12]
			}
			if rev == "" {
				rev = "unknown revision"
			}
			if v.Modified {
				rev += ", modified"
			}
			_, err := fmt.Fprintf(cmd.OutOrStdout(), "dynctl %s (%s) %s %s\n", v.Version, rev, v.Go, v.Platform)
			return err
		},
	}
	outputFlag(cmd, &output, "table", "json", "yaml")
	return cmd
}
