package commands

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/dynctl/dynctl/internal/cli"
	"github.com/dynctl/dynctl/internal/printable"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
	"github.com/dynctl/dynctl/internal/router/observe/receipt"
)

// newExplainCmd makes the command explain: why a request went where it went, or would go.
func newExplainCmd() *cobra.Command {
	var (
		router                               cli.RouterFlags
		output, model, prompt, path, session string
		tokens, bodyFile, endpoint           string
	)
	cmd := &cobra.Command{
		Use:   "explain [REQUEST]",
		Short: "Say why a request went where it went, or would go",
		Long: `Say why the router chose what it chose.

REQUEST is the id of a decision (header X-Dynctl-Decision), of a request
(X-Request-Id), or of an answer of vLLM (chatcmpl-…). Of the newest 1000 requests
the head of the request's id is enough, as dynctl top shows it: at least 4
characters. The decisions' ids of one router begin alike. With --prompt, --tokens
or --body the router decides for that prompt now, by the very stages of a request,
and sends nothing.`,
		Example: `  dynctl explain 5f3a9c0100000000002a
  dynctl explain --model Qwen/Qwen3-32B --prompt "You are a helpful assistant."
  dynctl explain --tokens 1,2,3,4 --path local
  dynctl explain --body request.json --endpoint /v1/chat/completions`,
		Args: cobra.MaximumNArgs(1),
		RunE: router.Ask(func(cmd *cobra.Command, c *admin.Client, args []string) (err error) {
			given := slices.DeleteFunc([]string{prompt, tokens, bodyFile}, func(s string) bool { return s == "" })
			if len(args)+len(given) != 1 {
				return cli.WithCode(cli.ExitUsage, fmt.Errorf("give exactly one of REQUEST, --prompt, --tokens and --body; the header X-Dynctl-Decision of an answer is a REQUEST"))
			}
			var raw json.RawMessage
			if len(args) == 1 {
				raw, err = decisionByHead(cmd.Context(), c, args[0])
			} else {
				var in admin.RouteRequest
				if in, err = routeRequest(cmd.InOrStdin(), endpoint, model, prompt, tokens, bodyFile); err != nil {
					return cli.WithCode(cli.ExitUsage, err)
				}
				in.Path, in.Session = path, session
				var a *admin.RouteAnswer
				if a, err = c.Route(cmd.Context(), in); err == nil {
					raw = a.Receipt
				}
			}
			if err != nil {
				return err
			}
			if output != "text" {
				return cli.WriteData(cmd.OutOrStdout(), output, raw)
			}
			var r receipt.Receipt
			if err := json.Unmarshal(raw, &r); err != nil {
				return fmt.Errorf("the router's receipt is not understood: %w", err)
			}
			if r.ID == "" {
				return errors.New("the router answered without a receipt; a proxy before it may have changed the path")
			}
			if err := r.Explain(cmd.OutOrStdout()); err != nil || r.Predicted.CostRevision == 0 {
				return err
			}
			return learnedNow(cmd, c, r.Model)
		}),
	}
	router.Add(cmd)
	cmd.ValidArgsFunction = router.Complete(decisionIDs)
	f := cmd.Flags()
	f.StringVar(&prompt, "prompt", "", "decide for this `TEXT` (- reads standard input)")
	f.StringVar(&tokens, "tokens", "", "decide for these token `IDS`, separated by commas")
	f.StringVar(&bodyFile, "body", "", "decide for the request body in `FILE` (- reads standard input)")
	f.StringVar(&endpoint, "endpoint", "", "path that the body is for (default /v1/completions, or by what the body holds)")
	f.StringVar(&model, "model", "", "model of the prompt; not needed when there is only one")
	f.StringVar(&path, "path", "", "force the path: local|remote")
	f.StringVar(&session, "session", "", "session `KEY` of the prompt")
	cli.OutputFlag(cmd, &output, "text", "json", "jsonl", "yaml")
	return cmd
}

// learnedNow shows from where on the router prefills prompts of a model remotely now. A
// receipt has the costs of its own request; laws have moved on since.
func learnedNow(cmd *cobra.Command, c *admin.Client, model string) error {
	s, err := c.Status(cmd.Context())
	if err != nil {
		return err
	}
	for i := range s.Costs {
		if s.Costs[i].Model != model {
			continue
		}
		for k := range s.Costs[i].Crossings {
			printable.Fprintf(cmd.OutOrStdout(), "9 learned    %s, as of now\n", s.Costs[i].Crossings[k].Sentence())
		}
	}
	return nil
}

// headSearch is how many of the newest decisions the head of an id is looked for in.
const headSearch = 1000

// decisionByHead returns the receipt of a decision or request by its id, or by the head of
// an id that only one of the newest has.
func decisionByHead(ctx context.Context, c *admin.Client, id string) (json.RawMessage, error) {
	raw, err := c.Decision(ctx, id)
	var status *admin.StatusError
	head := strings.TrimRight(id, "….")
	if !errors.As(err, &status) || status.Status != http.StatusNotFound || len(head) < 4 {
		return raw, err
	}
	for _, prefix := range []string{"chatcmpl-", "cmpl-"} { // of an answer, by the request's id
		if of, ok := strings.CutPrefix(id, prefix); ok {
			return decisionByHead(ctx, c, of)
		}
	}
	l, lerr := c.DecisionsBrief(ctx, headSearch, "", "")
	if lerr != nil {
		return nil, err
	}
	var found []string
	for _, raw := range l.Decisions {
		var d struct {
			ID        string `json:"id"`
			RequestID string `json:"request_id"`
		}
		if json.Unmarshal(raw, &d) == nil && (strings.HasPrefix(d.ID, head) || strings.HasPrefix(d.RequestID, head)) {
			found = append(found, d.ID)
		}
	}
	switch len(found) {
	case 0:
		return nil, err
	case 1:
		return c.Decision(ctx, found[0])
	}
	return nil, cli.WithCode(cli.ExitUsage, fmt.Errorf("the ids of %d requests begin with %q, such as those of decisions %s and %s: give more of it", len(found), head, found[0], found[1]))
}

func routeRequest(stdin io.Reader, endpoint, model, prompt, tokens, bodyFile string) (admin.RouteRequest, error) {
	in := admin.RouteRequest{Endpoint: endpoint, Model: model}
	read := func(name string) ([]byte, error) {
		if name == "-" {
			return io.ReadAll(io.LimitReader(stdin, 32<<20))
		}
		return os.ReadFile(name)
	}
	switch {
	case tokens != "":
		for _, t := range strings.FieldsFunc(tokens, func(r rune) bool { return r == ',' || r == ' ' || r == '\n' }) {
			id, err := strconv.ParseUint(t, 10, 32)
			if err != nil {
				return in, fmt.Errorf("--tokens: %q is not a token id", t)
			}
			in.Tokens = append(in.Tokens, uint32(id))
		}
	case bodyFile != "":
		raw, err := read(bodyFile)
		if err != nil {
			return in, err
		}
		raw = bytes.TrimSpace(raw)
		if !json.Valid(raw) {
			return in, fmt.Errorf("--body %s: not JSON", bodyFile)
		}
		in.Body = raw
		if endpoint == "" {
			var keys map[string]json.RawMessage
			if json.Unmarshal(raw, &keys) == nil && keys["messages"] != nil {
				in.Endpoint = "/v1/chat/completions"
			}
		}
	default:
		if prompt == "-" {
			raw, err := read("-")
			if err != nil {
				return in, err
			}
			prompt = string(raw)
		}
		in.Prompt = prompt
	}
	return in, nil
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
