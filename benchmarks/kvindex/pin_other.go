//go:build !linux

package main

func pin(int) {}

// rss is known on Linux only.
func rss() int64 { return 0 }

// cpu is known on Linux only.
func cpu() (own, host float64) { return 0, 0 }
