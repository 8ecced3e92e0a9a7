// Package quicksock is a TCP connection that reads and writes without notifying the Go
// scheduler.
//
// The sockets of the network poller never block, so that a read or a write of
// a few kilobytes is over in the time of a copy. Notifying it of each (entersyscall) is
// made for calls that may block; in a process that is idle between the tokens of
// streams it wakes the runtime's monitor thread for nearly every one of them: a futex
// call, a short sleep and two switches of threads for each token. On Linux a Conn makes
// the call directly and waits for readiness through the poller as before, deadlines and
// closing included. Elsewhere New gives back what it was given. Each direct read and
// write is announced to the race detector.
package quicksock
