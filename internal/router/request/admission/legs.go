package admission

import "syscall"

const (
	// otherFiles are the open files reserved for listeners, probes, KV events and waiting
	// clients.
	otherFiles = 256
	leastLegs  = 64
)

// LegLimit is how many requests to workers there may be at a time: set, or for 0 as many as
// the process may open files for. Each needs two, for the worker and for the client.
func LegLimit(set int) int64 {
	if set > 0 {
		return int64(set)
	}
	var files syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &files); err != nil {
		return leastLegs
	}
	return legLimit(files.Cur)
}

func legLimit(files uint64) int64 {
	return max(int64(min(files, 1<<32))/2-otherFiles/2, leastLegs)
}
