package workers

import "strings"

// Nearest is the word of a list that someone who wrote word most likely meant;
// empty when none comes near.
func Nearest(word string, list []string) string {
	if len(word) > 64 {
		return ""
	}
	word = strings.ToLower(word)
	best, bestCost := "", len(word)/5+2
	for _, w := range list {
		cost := distance(word, strings.ToLower(w))
		if strings.ReplaceAll(word, "-", "_") == w {
			cost = 0
		} else if len(word) >= 3 && (strings.HasPrefix(w, word) || strings.HasPrefix(word, w)) {
			cost = min(cost, 1)
		}
		if cost < bestCost {
			best, bestCost = w, cost
		}
	}
	return best
}

// distance is the optimal string alignment distance of two short words:
// insertions, deletions, substitutions and swaps of neighbours cost one each.
func distance(a, b string) int {
	before, prev, cur := make([]int, len(b)+1), make([]int, len(b)+1), make([]int, len(b)+1)
	for j := range prev {
		prev[j] = j
	}
	for i := 1; i <= len(a); i++ {
		cur[0] = i
		for j := 1; j <= len(b); j++ {
			d := prev[j-1]
			if a[i-1] != b[j-1] {
				d++
			}
			d = min(d, prev[j]+1, cur[j-1]+1)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				d = min(d, before[j-2]+1)
			}
			cur[j] = d
		}
		before, prev, cur = prev, cur, before
	}
	return prev[len(b)]
}
