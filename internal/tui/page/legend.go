package page

import "fmt"

// meaning explains a column.
type meaning struct{ Title, Text string }

// legend explains the columns of the tables of each view.
type legend struct {
	View     string
	Meanings []meaning
}

// legends lists those of all views, in their order.
func legends() []legend {
	ranks := legend{View: "COLUMNS OF RANKS"}
	for i := range columns {
		ranks.Meanings = append(ranks.Meanings, meaning{columns[i].title, columns[i].help})
	}
	return []legend{ranks, {View: "COLUMNS OF THE RADIX INDEX", Meanings: radixMeanings}, {View: "COLUMNS OF DECISIONS", Meanings: decisionMeanings}}
}

// LegendLines are the legends of all views as text, with an empty line between two.
func LegendLines() (lines []string) {
	for i, l := range legends() {
		if i > 0 {
			lines = append(lines, "")
		}
		lines = append(lines, l.View)
		for _, m := range l.Meanings {
			lines = append(lines, fmt.Sprintf("  %-14s %s", m.Title, m.Text))
		}
	}
	return lines
}

// radixMeanings explain the tree of the radix index.
var radixMeanings = []meaning{
	{"PREFIX", "hash of the run's first block"},
	{"TOKENS", "tokens of the run"},
	{"SUBTREE", "blocks of it and of all below"},
	{"%PAR", "its share of its parent's subtree"},
	{"HITS/s", "lookups a second that ended in it"},
	{"RK", "how many ranks hold it"},
	{"RUNS", "runs below it"},
	{"HIT t/s", "tokens a second that were found in it"},
	{"AGE", "time since it came"},
	{"EVICT/s", "blocks a second that it lost"},
	{"P D A E", "which ranks hold it, by role (w)"},
	{">", "at least so many"},
	{"-", "known with the next answer, in seconds"},
}

// decisionMeanings explain the list of decisions and the table of a decision's costs.
var decisionMeanings = []meaning{
	{"ISL", "prompt tokens"},
	{"CACHED", "tokens of it cached on the decode rank"},
	{"EFF", "the rest, which must be computed"},
	{"PATH", "where the prompt was prefilled"},
	{"MARGIN", "how much dearer the runner-up was"},
	{"OTHERS", "sum of the terms without a column"},
}
