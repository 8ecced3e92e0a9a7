package main

import (
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/dynctl/dynctl/internal/router/admin"
	"github.com/dynctl/dynctl/internal/router/certs"
)

// defaultRouter is the admin address that serve listens on by default.
const defaultRouter = "http://127.0.0.1:8001"

// accessFlags are what a command shows to routers, and whom it trusts.
type accessFlags struct {
	tokenFile     string
	ca, cert, key string
	apiKeyFile    string
}

func (f *accessFlags) add(fl *pflag.FlagSet) {
	fl.StringVar(&f.tokenFile, "token-file", os.Getenv("DYNCTL_TOKEN_FILE"), "`FILE` with the router's bearer token, or an API key with a role")
	fl.StringVar(&f.ca, "tls-ca", os.Getenv("DYNCTL_TLS_CA"), "PEM `FILE` with the authorities that are trusted for https routers instead of the system's")
	fl.StringVar(&f.cert, "tls-cert", os.Getenv("DYNCTL_TLS_CERT"), "PEM `FILE` with the certificate for routers that ask for one")
	fl.StringVar(&f.key, "tls-key", os.Getenv("DYNCTL_TLS_KEY"), "PEM `FILE` with the key of that certificate")
}

// addData adds what is shown to the data plane.
func (f *accessFlags) addData(fl *pflag.FlagSet) {
	fl.StringVar(&f.apiKeyFile, "api-key-file", os.Getenv("DYNCTL_API_KEY_FILE"), "`FILE` with an API key for the data plane")
}

// apiKey is the key for the data plane; empty for none.
func (f *accessFlags) apiKey() (string, error) {
	if f.apiKeyFile == "" {
		return "", nil
	}
	raw, err := os.ReadFile(f.apiKeyFile)
	if err != nil {
		return "", withCode(exitUsage, fmt.Errorf("--api-key-file: %w", err))
	}
	return strings.TrimSpace(string(raw)), nil
}

// tls is nil for the system's roots and no certificate.
func (f *accessFlags) tls() (*tls.Config, error) {
	switch {
	case (f.cert == "") != (f.key == ""):
		return nil, withCode(exitUsage, errors.New("--tls-cert and --tls-key go together"))
	case f.ca == "" && f.cert == "":
		return nil, nil
	}
	s, err := certs.NewClient(certs.Options{Name: "dynctl", Cert: f.cert, Key: f.key, CA: f.ca})
	if err != nil {
		return nil, withCode(exitUsage, err)
	}
	return s.Client(), nil
}

// client makes a client of the router with an admin URL.
func (f *accessFlags) client(url string) (*admin.Client, error) {
	conf, err := f.tls()
	if err != nil {
		return nil, err
	}
	c, err := admin.NewClient(url, admin.Options{TokenFile: f.tokenFile, TLS: conf})
	return c, withCode(exitUsage, err)
}

// clients makes a client of each router.
func (f *accessFlags) clients(urls []string) ([]*admin.Client, error) {
	var list []*admin.Client
	for _, url := range urls {
		c, err := f.client(url)
		if err != nil {
			for _, c := range list {
				c.Close()
			}
			return nil, err
		}
		list = append(list, c)
	}
	return list, nil
}

// routerFlags name the router that a command talks to.
type routerFlags struct {
	url    string
	access accessFlags
}

func (f *routerFlags) add(cmd *cobra.Command) {
	url := cmp.Or(os.Getenv("DYNCTL_ROUTER"), defaultRouter)
	cmd.PersistentFlags().StringVar(&f.url, "router", url, "admin `URL` of the router (environment DYNCTL_ROUTER)")
	f.access.add(cmd.PersistentFlags())
}

func (f *routerFlags) client() (*admin.Client, error) {
	return f.access.client(f.url)
}

// ask makes a command of what it asks the router.
func (f *routerFlags) ask(do func(cmd *cobra.Command, c *admin.Client, args []string) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		c, err := f.client()
		if err != nil {
			return err
		}
		defer c.Close()
		return adminError(do(cmd, c, args))
	}
}

// adminError gives an error of the admin client its exit code.
func adminError(err error) error {
	var unreachable *admin.UnreachableError
	if errors.As(err, &unreachable) {
		return withCode(exitUnreachable, err)
	}
	var plane *admin.DataPlaneError
	if errors.As(err, &plane) {
		return withCode(exitUsage, err)
	}
	var status *admin.StatusError
	if errors.As(err, &status) && status.Status == http.StatusBadRequest {
		return withCode(exitUsage, err)
	}
	return err
}

// completeLive completes the first argument with names that the router knows.
func completeLive(f *routerFlags, names func(context.Context, *admin.Client) ([]string, error)) func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	return func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		c, err := f.client()
		if err != nil {
			return nil, cobra.ShellCompDirectiveError
		}
		defer c.Close()
		ctx, cancel := context.WithTimeout(context.WithoutCancel(cmd.Context()), time.Second)
		defer cancel()
		list, err := names(ctx, c)
		if err != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return list, cobra.ShellCompDirectiveNoFileComp | cobra.ShellCompDirectiveKeepOrder
	}
}

// workerNames are the workers of the router, with role and health.
func workerNames(ctx context.Context, c *admin.Client) ([]string, error) {
	l, err := c.Workers(ctx)
	if err != nil {
		return nil, err
	}
	names := make([]string, len(l.Workers))
	for i, w := range l.Workers {
		names[i] = cobra.CompletionWithDesc(w.Name, w.Role+", "+w.Health)
	}
	return names, nil
}

// decisionIDs are the newest decisions of the router.
func decisionIDs(ctx context.Context, c *admin.Client) ([]string, error) {
	l, err := c.DecisionsBrief(ctx, 20, "", "")
	if err != nil {
		return nil, err
	}
	var ids []string
	for _, raw := range l.Decisions {
		var d struct {
			ID       string `json:"id"`
			Endpoint string `json:"endpoint"`
			Path     string `json:"path"`
		}
		if json.Unmarshal(raw, &d) == nil && d.ID != "" {
			ids = append(ids, cobra.CompletionWithDesc(d.ID, d.Endpoint+" "+d.Path))
		}
	}
	return ids, nil
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
