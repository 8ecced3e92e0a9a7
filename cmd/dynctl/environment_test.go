package main

import "testing"

// TestCommandsAreCheap: what every command pays, also "version", is that of making the
// commands; texts that take long are made when they are asked for.
func TestCommandsAreCheap(t *testing.T) {
	const most = 5000 // half of it is taken; a table of all variables took 10,000 more
	if n := testing.AllocsPerRun(3, func() { newRoot() }); n > most {
		t.Errorf("%.0f allocations to make the commands, want at most %d", n, most)
	}
}
