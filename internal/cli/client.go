package cli

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/dynctl/dynctl/internal/certs"
	"github.com/dynctl/dynctl/internal/printable"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
)

// RouterOfEnvironment is the router that commands talk to unless a flag names another.
func RouterOfEnvironment() string { return cmp.Or(os.Getenv("DYNCTL_ROUTER"), DefaultRouter) }

// DefaultRouter is the admin address that serve listens on by default.
const DefaultRouter = "http://127.0.0.1:8001"

// AccessFlags are what a command shows to routers, and whom it trusts.
type AccessFlags struct {
	// TokenFile holds the router's bearer token. CA, Cert and Key are PEM files.
	// Each is "" for none.
	TokenFile     string
	CA, Cert, Key string
	apiKeyFile    string
}

// Add adds the flags.
func (f *AccessFlags) Add(fl *pflag.FlagSet) {
	fl.StringVar(&f.TokenFile, "token-file", os.Getenv("DYNCTL_TOKEN_FILE"), "`FILE` with the router's bearer token, or an API key with a role")
	fl.StringVar(&f.CA, "tls-ca", os.Getenv("DYNCTL_TLS_CA"), "PEM `FILE` with the authorities that are trusted for https routers instead of the system's")
	fl.StringVar(&f.Cert, "tls-cert", os.Getenv("DYNCTL_TLS_CERT"), "PEM `FILE` with the certificate for routers that ask for one")
	fl.StringVar(&f.Key, "tls-key", os.Getenv("DYNCTL_TLS_KEY"), "PEM `FILE` with the key of that certificate")
}

// AddData adds what is shown to the data plane.
func (f *AccessFlags) AddData(fl *pflag.FlagSet) {
	fl.StringVar(&f.apiKeyFile, "api-key-file", os.Getenv("DYNCTL_API_KEY_FILE"), "`FILE` with an API key for the data plane")
}

// APIKey is the key for the data plane; empty for none.
func (f *AccessFlags) APIKey() (string, error) {
	if f.apiKeyFile == "" {
		return "", nil
	}
	raw, err := os.ReadFile(f.apiKeyFile)
	if err != nil {
		return "", WithCode(ExitUsage, fmt.Errorf("--api-key-file: %w", err))
	}
	return strings.TrimSpace(string(raw)), nil
}

// TLS is nil for the system's roots and no certificate.
func (f *AccessFlags) TLS() (*tls.Config, error) {
	switch {
	case (f.Cert == "") != (f.Key == ""):
		return nil, WithCode(ExitUsage, errors.New("--tls-cert and --tls-key go together"))
	case f.CA == "" && f.Cert == "":
		return nil, nil
	}
	s, err := certs.NewClient(certs.Options{Name: "dynctl", Cert: f.Cert, Key: f.Key, CA: f.CA})
	if err != nil {
		return nil, WithCode(ExitUsage, err)
	}
	return s.Client(), nil
}

// Client makes a client of the router with an admin URL.
func (f *AccessFlags) Client(url string) (*admin.Client, error) {
	conf, err := f.TLS()
	if err != nil {
		return nil, err
	}
	c, err := admin.NewClient(url, admin.Options{TokenFile: f.TokenFile, TLS: conf})
	return c, WithCode(ExitUsage, err)
}

// Clients makes a client of each router; an error leaves none open.
func (f *AccessFlags) Clients(urls []string) ([]*admin.Client, error) {
	var list []*admin.Client
	for _, url := range urls {
		c, err := f.Client(url)
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

// RouterFlags name the router that a command talks to.
type RouterFlags struct {
	url    string
	access AccessFlags
}

// Add adds the flags, for the commands below cmd, too.
func (f *RouterFlags) Add(cmd *cobra.Command) {
	url := RouterOfEnvironment()
	cmd.PersistentFlags().StringVar(&f.url, "router", url, "admin `URL` of the router (environment DYNCTL_ROUTER)")
	f.access.Add(cmd.PersistentFlags())
}

// Client makes a client of that router.
func (f *RouterFlags) Client() (*admin.Client, error) {
	return f.access.Client(f.url)
}

// Ask makes a command of what it asks the router.
func (f *RouterFlags) Ask(do func(cmd *cobra.Command, c *admin.Client, args []string) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		c, err := f.Client()
		if err != nil {
			return err
		}
		defer c.Close()
		return AdminError(do(cmd, c, args))
	}
}

// AdminError gives an error of the admin client its exit code.
func AdminError(err error) error {
	var unreachable *admin.UnreachableError
	if errors.As(err, &unreachable) {
		return WithCode(ExitUnreachable, err)
	}
	var plane *admin.DataPlaneError
	var engine *admin.EngineError
	if errors.As(err, &plane) || errors.As(err, &engine) {
		return WithCode(ExitUsage, err)
	}
	var status *admin.StatusError
	if errors.As(err, &status) && status.Status == http.StatusBadRequest {
		return WithCode(ExitUsage, err)
	}
	return err
}

// Complete completes the first argument with names that the router knows.
func (f *RouterFlags) Complete(names func(context.Context, *admin.Client) ([]string, error)) func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	return func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		c, err := f.Client()
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
		for i := range list {
			name, what, _ := strings.Cut(list[i], "\t")
			list[i] = cobra.CompletionWithDesc(printable.Line(name), printable.Line(what)) // a shell shows them
		}
		return list, cobra.ShellCompDirectiveNoFileComp | cobra.ShellCompDirectiveKeepOrder
	}
}

// Plural is "1 worker" or "2 workers".
func Plural(n int, word string) string {
	if n == 1 {
		return "1 " + word
	}
	return fmt.Sprintf("%d %ss", n, word)
}

// OrDash stands for nothing in a table.
func OrDash(s string) string {
	if strings.TrimSpace(s) == "" {
		return "-"
	}
	return s
}
