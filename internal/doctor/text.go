package doctor

import (
	"fmt"
	"io"
	"strings"

	"github.com/dynctl/dynctl/internal/printable"
	"github.com/dynctl/dynctl/internal/table"
)

// Text writes the report for a terminal.
func Text(w io.Writer, r *Report) error {
	b := &strings.Builder{}
	printable.Fprintf(b, "%s\n\n", r.Verdict)
	var rows [][]string
	for i := 0; i < len(r.Findings); {
		f := &r.Findings[i]
		// What is found of several subjects is written once, beside all of them.
		words := []string{f.Text}
		if f.Advice != "" && f.State != OK {
			words = append(words, "-> "+f.Advice)
		}
		n := 0
		for ; i+n < len(r.Findings) && alike(f, &r.Findings[i+n]); n++ {
		}
		shown, more := n, ""
		if f.State == OK && n > 4 {
			shown, more = 2, fmt.Sprintf("and %d more", n-1)
		}
		for k := range max(shown, len(words)) {
			row := make([]string, 4)
			if k == 0 {
				row[0], row[1] = strings.ToUpper(string(f.State)), f.Check
			}
			if k < shown {
				row[2] = r.Findings[i+k].Subject
				if k > 0 && more != "" {
					row[2] = more
				}
			}
			if k < len(words) {
				row[3] = words[k]
			}
			rows = append(rows, row)
		}
		i += n
	}
	if err := table.Figures(b, []string{"STATE", "CHECK", "SUBJECT", "FINDING"}, rows, 0, 1, 2, 3); err != nil {
		return err
	}
	if m := r.Transfer; m != nil && len(m.Prefill)*len(m.Decode) > 1 {
		b.WriteString("\ntransfer of KV\n")
		if err := m.text(b); err != nil {
			return err
		}
		b.WriteString("\n")
	}
	fmt.Fprintf(b, "%d checks, %d failed, %d warnings\n", len(r.Findings), r.Failed, r.Warned)
	_, err := io.WriteString(w, b.String())
	return err
}
