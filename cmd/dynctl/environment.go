package main

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/dynctl/dynctl/internal/settings"
)

// otherVariables are the environment variables beside those of the settings.
var otherVariables = []struct{ name, help string }{
	{"DYNCTL_CONFIG", "configuration file of serve (--config)"},
	{"DYNCTL_ROUTER", "admin URL of the router that commands talk to (--router)"},
	{"DYNCTL_TOKEN_FILE", "file with that router's bearer token (--token-file)"},
	{"DYNCTL_TLS_CA", "file with the authorities of its certificate (--tls-ca)"},
	{"DYNCTL_TLS_CERT, DYNCTL_TLS_KEY", "files with the certificate and key for it (--tls-cert, --tls-key)"},
	{"DYNCTL_API_KEY_FILE", "file with an API key for the data plane (--api-key-file)"},
	{"DYNCTL_CONTEXTS", "file with the contexts of top (--context)"},
	{"DYNCTL_NO_COLOR, NO_COLOR", "no colour, whatever the value"},
}

// newEnvironmentTopic is the help topic "environment".
func newEnvironmentTopic() *cobra.Command {
	var b strings.Builder
	b.WriteString("Environment variables that dynctl reads. Every setting of serve has one; flags win\nover them, they win over the file. Lists are separated by blanks.\n\n")
	for _, v := range otherVariables {
		fmt.Fprintf(&b, "  %-36s %s\n", v.name, v.help)
	}
	b.WriteString("\n")
	for _, r := range settings.Rows() {
		if r.Flag != "" {
			fmt.Fprintf(&b, "  %-36s --%s\n", r.Env(), r.Flag)
		}
	}
	return &cobra.Command{Use: "environment", Short: "Environment variables", Long: strings.TrimRight(b.String(), "\n")}
}
