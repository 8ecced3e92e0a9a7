// Package soak is endurance: hours of mixed load over simulated engines while
// everything around it is broken on purpose, and what must balance
// afterwards.
//
// There are two forms of it. [Endure] is real time: a router on real sockets in
// front of engines on real sockets. Clients read slowly, hang up or send
// garbage. Engines are killed, restarted, slowed, made to answer 5xx and
// to lose, reorder and corrupt their events. The router is reloaded and
// restarted. Package virtualsoak is the same kind of faults under a virtual clock: the
// stages of the router and the simulated engines in one goroutine, thousands of
// seeds a minute, each of them repeatable to the byte.
//
// docs/lab/soak.md says what is checked, and what a full run has shown.
package soak
