//go:build darwin && !race

package kvindex

func adviseHuge([]byte) {}
