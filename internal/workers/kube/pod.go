package kube

import (
	"cmp"
	"fmt"
	"maps"
	"net"
	"net/url"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dynctl/dynctl/internal/workers"
)

// Limits of what is read of one pod.
const (
	maxPorts  = 64
	maxLabels = 256
)

// chosen says which selectors a pod was found by.
type chosen struct {
	any, prefill, decode bool
	// ports are where its engines serve, as from says; none for the setting.
	ports []int
	from  string
}

// reading is what a pod comes to: workers, or the reason for none.
type reading struct {
	specs []workers.Spec
	// why there are none; waiting says that this will pass by itself.
	why     string
	waiting bool
}

// rules are the parts of the options that a pod is read with.
type rules struct {
	template workers.Spec
	port     int
	scheme   string
	host     string // the router's own pod has this name
	// revision is a label that states the revision, besides those that are known.
	revision string
	// qualified puts the namespace before the names of workers.
	qualified bool
}

// read makes workers of a pod. It looks at nothing but the pod.
func (r *rules) read(pod *corev1.Pod, by chosen) reading {
	left := func(format string, a ...any) reading { return reading{why: fmt.Sprintf(format, a...)} }
	wait := func(format string, a ...any) reading { return reading{why: fmt.Sprintf(format, a...), waiting: true} }
	switch {
	case pod.Name == r.host:
		return left("it is this router's own pod; narrow the selector")
	case pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed:
		return left("its phase is %s", pod.Status.Phase)
	}
	base, why := r.base("pod", &pod.ObjectMeta, pod.Labels, by)
	if why != "" {
		return left("%s", why)
	}
	if pod.Status.PodIP == "" {
		return wait("it has no address yet (phase %s)", cmp.Or(string(pod.Status.Phase), "unknown"))
	}
	if net.ParseIP(pod.Status.PodIP) == nil {
		return left("%q is no IP address", pod.Status.PodIP)
	}
	if pod.DeletionTimestamp != nil {
		base.Leaving = "its pod is being deleted"
	} else {
		base.NotReady = notReady(pod)
	}
	ports, from, err := r.ports(pod, by)
	if err != nil {
		return left("%v", err)
	}
	first := r.basePort(ports)
	moved := 0
	if engine, why := behindSidecar(pod); engine != 0 {
		moved, from = engine-first, from+"; "+why
	}
	name := r.name(&pod.ObjectMeta)
	var out reading
	for _, port := range ports {
		s := base
		s.From = maps.Clone(base.From)
		s.From[workers.FieldURL] = "pod IP, port from " + from
		if port+moved > 65535 {
			return left("port %d of rank %d is above 65535", port+moved, port-first)
		}
		s.URL = &url.URL{Scheme: r.scheme, Host: net.JoinHostPort(pod.Status.PodIP, strconv.Itoa(port+moved))}
		s.Name = name
		if len(ports) > 1 {
			s.Name += ":" + strconv.Itoa(port)
			if err := s.ShiftEvents(port - first); err != nil {
				return left("port %d: %v", port, err)
			}
		}
		s.Topic = fillTopic(s.Topic, pod.Status.PodIP, port+moved, &pod.ObjectMeta)
		out.specs = append(out.specs, s)
	}
	return out
}

// notReady says why a pod's aggregate condition is not Ready, which waits for
// readiness gates, too; empty when it is.
func notReady(pod *corev1.Pod) string {
	for i := range pod.Status.Conditions {
		c := &pod.Status.Conditions[i]
		if c.Type != corev1.PodReady {
			continue
		}
		if c.Status == corev1.ConditionTrue {
			return ""
		}
		why := cmp.Or(c.Reason, "condition Ready is "+string(c.Status))
		if c.Message != "" {
			why += ": " + clip(c.Message)
		}
		return "its pod is not Ready (" + why + ")"
	}
	return "its pod is not Ready (no condition Ready yet)"
}

func clip(s string) string {
	const most = 200
	if len(s) > most {
		s = strings.ToValidUTF8(s[:most], "") + "…"
	}
	return s
}

// ports are those at which a pod serves, each for one worker, and where they are
// from.
func (r *rules) ports(pod *corev1.Pod, by chosen) (ports []int, from string, err error) {
	if t, ok := workers.FromLabels(workers.FieldPorts, nil, pod.Annotations); ok {
		for word := range strings.SplitSeq(t.Means, ",") {
			p, err := workers.ParsePort(clip(strings.TrimSpace(word)))
			if err != nil {
				return nil, "", fmt.Errorf("%s: %w", t.From, err)
			}
			if !slices.Contains(ports, p) {
				ports = append(ports, p)
			}
			if len(ports) > maxPorts {
				return nil, "", fmt.Errorf("more than %d ports in %s", maxPorts, strings.SplitN(t.From, "=", 2)[0])
			}
		}
		return ports, t.From, nil
	}
	if len(by.ports) > 0 {
		return by.ports, by.from, nil
	}
	return []int{r.port}, "setting kubernetes.port", nil
}

// basePort is the port of the first rank: the one that was set, if the pod's are
// beside it, else the smallest of them. A rank's number follows from its port, not
// from its place among those that are active just now.
func (r *rules) basePort(ports []int) int {
	least := slices.Min(ports)
	if r.port <= least && slices.Max(ports)-r.port < maxPorts {
		return r.port
	}
	return least
}

// sidecars are the names of containers that stand before an engine in llm-d's pods
// and carry requests to it at sidecarEngine; asking them would split requests
// twice.
var sidecars = []string{"routing-proxy", "routing-sidecar", "pd-sidecar", "disagg-sidecar"}

// sidecarEngine is the port of an engine behind a sidecar, unless it states another.
const sidecarEngine = 8200

// behindSidecar is the port of the engine of a pod in which a sidecar has the
// ordinary one; 0 without a sidecar.
func behindSidecar(pod *corev1.Pod) (port int, from string) {
	all := slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers)
	at := slices.IndexFunc(all, func(c corev1.Container) bool {
		return slices.ContainsFunc(sidecars, func(word string) bool { return c.Name == word || strings.Contains(c.Image, word) })
	})
	if at < 0 {
		return 0, ""
	}
	if p, flag := portArgument(slices.Concat(all[at].Command, all[at].Args)); p != 0 {
		return p, fmt.Sprintf("argument %s=%d of container %s", flag, p, all[at].Name)
	}
	return sidecarEngine, "llm-d's port of an engine behind container " + all[at].Name
}

// portFlags are the flags that give a sidecar the port of its engine.
var portFlags = []string{"--vllm-port", "--decoder-port"}

// portArgument finds the port that a sidecar's words give its engine, and with which flag.
// The flag has one hyphen or two, and its value is in the same word behind "=" or is the
// next word. As for the sidecar, the last one counts. port is 0 where no flag has a port.
func portArgument(words []string) (port int, flag string) {
	for i, word := range words {
		name, value, joined := strings.Cut(word, "=")
		if !strings.HasPrefix(name, "--") {
			name = "-" + name
		}
		if !slices.Contains(portFlags, name) {
			continue
		}
		if !joined && i+1 < len(words) {
			value = words[i+1]
		}
		if p, err := workers.ParsePort(value); err == nil {
			port, flag = p, name
		}
	}
	return port, flag
}

// topicWords are what a topic may have of the pod in whose name it is, in braces.
var topicWords = []string{"{ip}", "{port}", "{name}", "{namespace}"}

// fillTopic puts what a pod or a Service has into a topic.
func fillTopic(topic, ip string, port int, of *metav1.ObjectMeta) string {
	if !strings.Contains(topic, "{") {
		return topic
	}
	return strings.NewReplacer("{ip}", ip, "{port}", strconv.Itoa(port), "{name}", of.Name, "{namespace}", of.Namespace).Replace(topic)
}
