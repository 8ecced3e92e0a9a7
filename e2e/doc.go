// Package e2e tests the dynctl binary against things that dynctl did not
// write: real vLLM engines on this machine's CPU (engines.py), a real Kubernetes API
// server (apiserver.py) and real client libraries. The tests do nothing unless
// DYNCTL_E2E is set; make e2e and make kube set it. Each says clearly why it is skipped.
package e2e
