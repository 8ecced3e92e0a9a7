package page

// Meaning explains a column.
type Meaning struct{ Title, Text string }

// Legend explains the columns of the tables of each view.
type Legend struct {
	View     string
	Meanings []Meaning
}

// Legends lists those of all views, in their order.
func Legends() []Legend {
	ranks := Legend{View: "COLUMNS OF RANKS"}
	for i := range columns {
		ranks.Meanings = append(ranks.Meanings, Meaning{columns[i].title, columns[i].help})
	}
	return []Legend{ranks, {View: "COLUMNS OF THE RADIX INDEX", Meanings: radixMeanings}, {View: "COLUMNS OF DECISIONS", Meanings: decisionMeanings}}
}

// radixMeanings explain the tree of the radix index.
var radixMeanings = []Meaning{
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
var decisionMeanings = []Meaning{
	{"ISL", "prompt tokens"},
	{"CACHED", "tokens of it cached on the decode rank"},
	{"EFF", "the rest, which must be computed"},
	{"PATH", "where the prompt was prefilled"},
	{"MARGIN", "how much dearer the runner-up was"},
	{"OTHERS", "sum of the terms without a column"},
}
