package external

import (
	"os"
	"path/filepath"
	"testing"
)

// Conversation is the path of an hour of conversations: FAST25-release/traces/
// conversation_trace.jsonl of github.com/kvcache-ai/Mooncake, as it is or with gzip.
// DYNCTL_CONVERSATION_TRACE names it, or it lies in the user's cache, as
// dynctl-traces/conversation_trace.jsonl.gz. A test without it is skipped.
func Conversation(tb testing.TB) string {
	tb.Helper()
	path := os.Getenv("DYNCTL_CONVERSATION_TRACE")
	if path == "" {
		cache, err := os.UserCacheDir()
		if err != nil {
			tb.Skipf("no conversation trace: %v", err)
		}
		path = filepath.Join(cache, "dynctl-traces", "conversation_trace.jsonl.gz")
	}
	if _, err := os.Stat(path); err != nil {
		tb.Skipf("no conversation trace; DYNCTL_CONVERSATION_TRACE may name it: %v", err)
	}
	return path
}
