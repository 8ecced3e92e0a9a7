package commands

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/dynctl/dynctl/internal/cli"
	"github.com/dynctl/dynctl/internal/router/request/access"
	"github.com/dynctl/dynctl/internal/router/request/admission"
)

// newKeysCmd makes the command keys: API keys made and checked.
func newKeysCmd() *cobra.Command {
	cmd := &cobra.Command{Use: "keys", Short: "Make and check API keys"}
	cmd.AddCommand(newKeysNewCmd(), newKeysCheckCmd())
	return cmd
}

func newKeysNewCmd() *cobra.Command {
	var k access.Key
	var path string
	var roles []string
	var priority string
	cmd := &cobra.Command{
		Use:   "new NAME",
		Short: "Make an API key, and add its hash to a file",
		Long: `Make an API key of 256 random bits and write it to standard output, once: the
file gets its SHA-256 only. A router that runs with the file (--api-keys-file) knows
the key a moment later. To take a key back, take its entry out of the file.

Several commands may add keys to one file at the same time: the file is locked, and
each waits up to 10 s for the others. Where FILE is a symbolic link, the file that it
leads to is replaced.`,
		Example: `  dynctl keys new chat-frontend --tenant web --file keys.yaml
  dynctl keys new nightly --tenant batch --model Qwen/Qwen3-32B --rate 600 --file keys.yaml
  dynctl keys new ops --role operate --file keys.yaml > ops.token`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			k.Name = args[0]
			for _, r := range roles {
				k.Roles = append(k.Roles, access.Role(r))
			}
			var ok bool
			if k.Priority, ok = admission.ParseBand(priority); !ok {
				return cli.WithCode(cli.ExitUsage, fmt.Errorf("--priority %q is not one of %s", priority, strings.Join(admission.Bands[:], ", ")))
			}
			var secret string
			kept, err := updateFile(cmd.Context(), path, lockWait, func(content []byte) (with []byte, err error) {
				if secret, with, err = access.New(k, content); err != nil {
					err = cli.WithCode(cli.ExitUsage, fmt.Errorf("%s: %w", path, err))
				}
				return with, err
			})
			if err != nil {
				return err
			}
			if kept != nil {
				fmt.Fprintf(cmd.ErrOrStderr(), "warning: %v\n", kept)
			}
			fmt.Fprintf(cmd.ErrOrStderr(), "%s knows the key %q from now on; the key itself is shown here only:\n", path, k.Name)
			_, err = fmt.Fprintln(cmd.OutOrStdout(), secret)
			return err
		},
	}
	fl := cmd.Flags()
	fl.StringVar(&path, "file", "keys.yaml", "`FILE` of keys; made when it is not there")
	fl.StringVar(&k.Tenant, "tenant", "", "`TENANT` whose key it is (default its name)")
	fl.StringArrayVar(&k.Models, "model", nil, "`MODEL` that it may ask for (repeatable; default all)")
	fl.IntVar(&k.Rate, "rate", 0, "how many `REQUESTS` it may begin a minute; 0 is no limit")
	fl.IntVar(&k.Tokens, "tokens", 0, "how many `TOKENS` of prompts and answers it may use a minute; 0 is no limit")
	fl.IntVar(&k.Weight, "weight", 0, "its tenant's `SHARE` of places that many wait for, against that of others (default 1)")
	fl.StringVar(&priority, "priority", admission.Normal.String(), "`BAND` in which its requests wait, where they do: high, normal or low")
	_ = cmd.RegisterFlagCompletionFunc("priority", cobra.FixedCompletions(admission.Bands[:], cobra.ShellCompDirectiveNoFileComp))
	fl.StringArrayVar(&roles, "role", nil, "what it may do: use (the default), read, operate, admin (repeatable)")
	_ = cmd.RegisterFlagCompletionFunc("role", cobra.FixedCompletions([]string{"use", "read", "operate", "admin"}, cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

func newKeysCheckCmd() *cobra.Command {
	var output string
	cmd := &cobra.Command{
		Use:   "check [FILE]",
		Short: "Check a file of API keys, and list them",
		Args:  cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			path := "keys.yaml"
			if len(args) == 1 {
				path = args[0]
			}
			set, err := access.ReadFile(path)
			if err != nil {
				return cli.WithCode(cli.ExitInvalid, err)
			}
			type shown struct {
				Name   string        `json:"name"`
				Tenant string        `json:"tenant"`
				Models []string      `json:"models"`
				Rate   int           `json:"rate_per_minute"`
				Tokens int           `json:"tokens_per_minute"`
				Weight int           `json:"weight"`
				Roles  []access.Role `json:"roles"`
			}
			all := []shown{}
			l := cli.Listing{Head: []string{"NAME", "TENANT", "MODELS", "RATE/MIN", "TOKENS/MIN", "WEIGHT", "ROLES"}}
			for _, k := range set.Keys() {
				s := shown{k.Name, k.Tenant, append([]string{}, k.Models...), k.Rate, k.Tokens, k.Weight, k.Roles}
				rate, tokens, models := "-", "-", "all"
				if k.Rate > 0 {
					rate = fmt.Sprint(k.Rate)
				}
				if k.Tokens > 0 {
					tokens = fmt.Sprint(k.Tokens)
				}
				if len(k.Models) > 0 {
					models = strings.Join(k.Models, " ")
				}
				roles := make([]string, len(k.Roles))
				for i, r := range k.Roles {
					roles[i] = string(r)
				}
				all = append(all, s)
				l.Add(s, k.Name, k.Tenant, models, rate, tokens, fmt.Sprint(k.Weight), strings.Join(roles, " "))
			}
			l.Whole = map[string]any{"keys": all}
			return l.Write(cmd.OutOrStdout(), output)
		},
	}
	cli.OutputFlag(cmd, &output, cli.ListFormats()...)
	return cmd
}
