package selector

import "slices"

// order sorts s, or, when only a few of many are wanted, moves the best limit of
// them to the front in order. The two best are always among those, because they
// are compared afterwards.
//
// Few of many are found by partitions around a pivot that a sample says to be a
// little behind the last one wanted. A sample that misleads costs another round, and
// what is left after some rounds is sorted.
func order(s []int, limit int, compare func(a, b int) int) {
	if limit > 0 {
		limit = max(limit, 2)
		for range 8 {
			if len(s) < 4*max(limit, sampled) {
				break
			}
			n := partition(s, limit, compare)
			if n >= limit {
				s = s[:n]
				continue
			}
			slices.SortFunc(s[:n], compare)
			s, limit = s[n:], limit-n
		}
	}
	slices.SortFunc(s, compare)
}

// sampled is how many elements a pivot is taken from.
const sampled = 31

// partition moves those elements to the front that are no worse than one of them,
// limit and a few more by expectation, and says how many they are, 3 at least. There
// must be more than sampled of them.
func partition(s []int, limit int, compare func(a, b int) int) int {
	step := len(s) / sampled
	for i := range sampled {
		s[i], s[i*step] = s[i*step], s[i]
	}
	slices.SortFunc(s[:sampled], compare)
	n := sampled*limit/len(s) + 3
	pivot := s[n-1]
	for i := sampled; i < len(s); i++ {
		if compare(s[i], pivot) < 0 {
			s[i], s[n] = s[n], s[i]
			n++
		}
	}
	return n
}

// rotate moves the first k elements behind the others.
func rotate(s []int, k int) {
	slices.Reverse(s[:k])
	slices.Reverse(s[k:])
	slices.Reverse(s)
}

// moveToFront puts element k first and keeps the order of the others.
func moveToFront(s []int, k int) {
	v := s[k]
	copy(s[1:k+1], s[:k])
	s[0] = v
}
