package admin

import (
	"time"
)

// Kubernetes is what the router makes of a cluster's pods.
type Kubernetes struct {
	Server     string   `json:"server"`
	Namespaces []string `json:"namespaces"`
	// Connected says that the API server answers every watch.
	Connected bool              `json:"connected"`
	Watches   []KubernetesWatch `json:"watches"`
	Failures  uint64            `json:"failures_total"`
	Pods      int               `json:"pods"`
	Workers   int               `json:"workers"`
	Waiting   int               `json:"waiting_pods"`
	// LeftOut are pods that are no workers, the first of LeftOutCount.
	LeftOut      []LeftOutPod `json:"left_out,omitempty"`
	LeftOutCount int          `json:"left_out_pods"`
}

// KubernetesWatch is one selector in one namespace.
type KubernetesWatch struct {
	Namespace string    `json:"namespace"`
	Selector  string    `json:"selector"`
	Synced    bool      `json:"synced"` // listed at least once
	Error     string    `json:"error,omitempty"`
	Since     time.Time `json:"since,omitzero"` // of Error
	Failures  uint64    `json:"failures_total"`
}

// LeftOutPod is a pod that a selector finds and that is no worker.
type LeftOutPod struct {
	Pod    string `json:"pod"`
	Reason string `json:"reason"`
}
