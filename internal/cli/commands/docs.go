package commands

import (
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"

	"github.com/dynctl/dynctl/internal/cli"
)

// newDocsCmd writes what a release packs: man pages and completions.
func newDocsCmd() *cobra.Command {
	var man, completions string
	var date int64
	cmd := &cobra.Command{
		Use:    "docs",
		Short:  "Write man pages and shell completions",
		Hidden: true,
		Args:   cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			root := cmd.Root()
			if man != "" {
				if err := os.MkdirAll(man, 0o755); err != nil {
					return err
				}
				when := time.Unix(date, 0).UTC()
				if err := doc.GenManTree(root, &doc.GenManHeader{Title: "DYNCTL", Section: "1", Source: "dynctl " + cli.BuildVersion().Version, Date: &when}, man); err != nil {
					return err
				}
			}
			if completions != "" {
				if err := os.MkdirAll(completions, 0o755); err != nil {
					return err
				}
				for _, c := range []struct {
					file  string
					write func(string) error
				}{
					{"dynctl.bash", func(f string) error { return root.GenBashCompletionFileV2(f, true) }},
					{"_dynctl", root.GenZshCompletionFile},
					{"dynctl.fish", func(f string) error { return root.GenFishCompletionFile(f, true) }},
					{"dynctl.ps1", root.GenPowerShellCompletionFileWithDesc},
				} {
					if err := c.write(filepath.Join(completions, c.file)); err != nil {
						return fmt.Errorf("%s: %w", c.file, err)
					}
				}
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&man, "man", "", "`FOLDER` for man pages")
	cmd.Flags().Int64Var(&date, "date", 0, "date of the man pages in `SECONDS` since 1970")
	cmd.Flags().StringVar(&completions, "completions", "", "`FOLDER` for shell completions")
	return cmd
}
