package main

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/dynctl/dynctl/internal/router/admin"
)

// defaultRouter is the admin address that serve listens on by default.
const defaultRouter = "http://127.0.0.1:8001"

// routerFlags name the router that a command talks to.
type routerFlags struct{ url, tokenFile string }

func (f *routerFlags) add(cmd *cobra.Command) {
	url := os.Getenv("DYNCTL_ROUTER")
	if url == "" {
		url = defaultRouter
	}
	cmd.PersistentFlags().StringVar(&f.url, "router", url, "admin `URL` of the router (environment DYNCTL_ROUTER)")
	cmd.PersistentFlags().StringVar(&f.tokenFile, "token-file", os.Getenv("DYNCTL_TOKEN_FILE"), "`FILE` with the router's bearer token")
}

func (f *routerFlags) client() (*admin.Client, error) {
	c, err := admin.NewClient(f.url, f.tokenFile)
	return c, withCode(exitUsage, err)
}

// adminError gives an error of the admin client its exit code.
func adminError(err error) error {
	var unreachable *admin.UnreachableError
	if errors.As(err, &unreachable) {
		return withCode(exitUnreachable, err)
	}
	return err
}

// plural is "1 worker" or "2 workers".
func plural(n int, word string) string {
	if n == 1 {
		return "1 " + word
	}
	return fmt.Sprintf("%d %ss", n, word)
}

// orDash stands for nothing in a table.
func orDash(s string) string {
	if strings.TrimSpace(s) == "" {
		return "-"
	}
	return s
}
