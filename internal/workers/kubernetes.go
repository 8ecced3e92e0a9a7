package workers

// Kubernetes says which pods of a cluster, or which Services, are workers. It contacts no API
// server unless it is On.
type Kubernetes struct {
	// Selector finds pods whose labels or engines state their role; PrefillSelector
	// and DecodeSelector find those of a role. A pod that both find can do either.
	Selector, PrefillSelector, DecodeSelector string
	// Pool is the name of an InferencePool whose pods are found as those of Selector,
	// at the ports that it states; empty for none.
	Pool string
	// Discovery is ByPodIP, also when empty, or ByServiceName: the selectors find Services
	// then, each with one engine, which are called by their names.
	Discovery string
	// Namespaces are watched; none stands for the one of the kubeconfig or of the
	// router's own pod, AllNamespaces for every one.
	Namespaces []string
	// Kubeconfig is a file; empty for the pod's service account, or else what
	// kubectl would read.
	Kubeconfig string
	// Port is where engines serve unless their pods say otherwise.
	Port int
	// Scheme is http or https for all of them; http when empty.
	Scheme string
	// Worker states more of all of them, in the keys of a worker's flag.
	Worker string
	// RevisionLabel is a label that names the rollout of a pod, beside those that are known;
	// empty for none.
	RevisionLabel string
}

// The values of Kubernetes.Discovery.
const (
	ByPodIP       = "pod-ip"
	ByServiceName = "service-name"
)

// AllNamespaces stands for every namespace.
const AllNamespaces = "*"

// On reports whether a cluster is searched for workers.
func (k *Kubernetes) On() bool {
	return k.Selector != "" || k.PrefillSelector != "" || k.DecodeSelector != "" || k.Pool != ""
}
