// Package e2e tests the dynctl binary against things that dynctl did not
// write: real vLLM engines on this machine's CPU (../shared/engines) and real
// client libraries. The tests do nothing unless DYNCTL_E2E is set; make e2e
// sets it. Each says clearly why it is skipped.
package e2e
