package cli

import (
	"strings"

	"github.com/spf13/cobra"

	"github.com/dynctl/dynctl/internal/settings"
	"github.com/dynctl/dynctl/internal/table"
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

// EnvironmentTopic is the help topic "environment". Its table takes several
// milliseconds, which no other command should pay.
func EnvironmentTopic() *cobra.Command {
	topic := &cobra.Command{Use: "environment", Short: "Environment variables"}
	topic.SetHelpFunc(func(c *cobra.Command, args []string) {
		c.Long = environmentHelp()
		c.Root().HelpFunc()(c, args)
	})
	return topic
}

func environmentHelp() string {
	var b strings.Builder
	b.WriteString("Environment variables that dynctl reads. Every setting of serve has one; flags win\nover them, they win over the file. Lists are separated by blanks.\n\n")
	var rows [][]string
	for _, v := range otherVariables {
		rows = append(rows, []string{v.name, v.help})
	}
	rows = append(rows, nil)
	for _, r := range settings.Rows() {
		if r.Flag != "" {
			rows = append(rows, []string{r.Env(), "--" + r.Flag})
		}
	}
	_ = table.List(&b, "  ", 0, rows) // a strings.Builder takes everything
	return strings.TrimRight(b.String(), "\n")
}
