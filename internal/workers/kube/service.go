package kube

import (
	"fmt"
	"maps"
	"net"
	"net/url"
	"slices"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	"github.com/dynctl/dynctl/internal/workers"
)

// The values of Options.Discovery.
const (
	ByPodIP       = "pod-ip"
	ByServiceName = "service-name"
)

var (
	services = kind{
		resource: "services", path: "services", object: &corev1.Service{}, list: func() runtime.Object { return &corev1.ServiceList{} }, keep: slimService,
	}
	// endpointSlices have the labels of their Services: Kubernetes copies them.
	endpointSlices = kind{
		resource: "endpointslices." + discoveryv1.GroupName, path: "endpointslices",
		object: &discoveryv1.EndpointSlice{}, list: func() runtime.Object { return &discoveryv1.EndpointSliceList{} }, keep: slimSlice,
	}
)

// readService makes a worker of a Service, which is asked by its name: behind a mesh, or
// where certificates have names, pods cannot be asked by their addresses. Its slices say
// which pod is behind it. It must be one, since nobody knows which of several a request
// reaches, nor which caches that one has.
func (r *rules) readService(svc *corev1.Service, parts []*discoveryv1.EndpointSlice, by chosen) reading {
	left := func(format string, a ...any) reading { return reading{why: fmt.Sprintf(format, a...)} }
	if svc.Spec.Type == corev1.ServiceTypeExternalName {
		return left("it stands for a name outside of the cluster (ExternalName): name that worker with --worker")
	}
	// The Service's own labels, then those that it finds its pods by.
	labels := maps.Clone(svc.Spec.Selector)
	if labels == nil {
		labels = map[string]string{}
	}
	maps.Copy(labels, svc.Labels)
	s, why := r.base("service", &svc.ObjectMeta, labels, by)
	if why != "" {
		return left("%s", why)
	}
	b := behind(parts)
	switch {
	case b.all() == 0:
		return reading{why: "no pod is behind it", waiting: true}
	case len(b.ready) > 1:
		s.Process = b.ready[0]
		s.NotReady = fmt.Sprintf("%d Ready pods are behind its service, and nobody knows which one a request reaches: give each engine a service of its own, or find engines by pod IP (kubernetes.discovery)", len(b.ready))
	case len(b.ready) == 1:
		s.Process = b.ready[0]
	case len(b.unready) > 0:
		s.Process, s.NotReady = b.unready[0], "the pod behind its service is not Ready"
	default:
		s.Process, s.Leaving = b.ending[0], "the pod behind its service is being deleted"
	}
	port, from, err := r.servicePort(svc)
	if err != nil {
		return left("%v", err)
	}
	s.Name = r.name(&svc.ObjectMeta)
	s.Topic = fillTopic(s.Topic, b.addr[s.Process], port, &svc.ObjectMeta)
	s.URL = &url.URL{Scheme: r.scheme, Host: net.JoinHostPort(svc.Name+"."+svc.Namespace+".svc", strconv.Itoa(port))}
	s.From[workers.FieldURL] = "name of the service, port from " + from
	return reading{specs: []workers.Spec{s}}
}

// servicePort is the one that was set, if the Service has it or tells none, else its
// only one.
func (r *rules) servicePort(svc *corev1.Service) (port int, from string, err error) {
	ports := svc.Spec.Ports
	switch {
	case len(ports) == 0 || slices.ContainsFunc(ports, func(p corev1.ServicePort) bool { return int(p.Port) == r.port }):
		return r.port, "setting kubernetes.port", nil
	case len(ports) == 1:
		port, err := parsePort(strconv.Itoa(int(ports[0].Port)))
		return port, "the service's only one", err
	}
	return 0, "", fmt.Errorf("none of its %d ports is %d (kubernetes.port)", len(ports), r.port)
}

// ends are the pods behind a Service: Ready, not Ready, and being deleted. Each is there
// once, by its UID, or else its address, in that order.
type ends struct {
	ready, unready, ending []string
	addr                   map[string]string // an address of each
}

func (e *ends) all() int { return len(e.ready) + len(e.unready) + len(e.ending) }

func behind(parts []*discoveryv1.EndpointSlice) (e ends) {
	e.addr = map[string]string{}
	for _, part := range parts {
		for i := range part.Endpoints {
			p := &part.Endpoints[i]
			id := ""
			if p.TargetRef != nil {
				id = string(p.TargetRef.UID)
			}
			if id == "" && len(p.Addresses) > 0 {
				id = p.Addresses[0]
			}
			if len(p.Addresses) > 0 {
				e.addr[id] = p.Addresses[0]
			}
			// What is not said of readiness means yes, of ending no.
			switch c := &p.Conditions; {
			case id == "":
			case c.Terminating != nil && *c.Terminating:
				e.ending = append(e.ending, id)
			case c.Ready == nil || *c.Ready:
				e.ready = append(e.ready, id)
			default:
				e.unready = append(e.unready, id)
			}
		}
	}
	for _, ids := range []*[]string{&e.ready, &e.unready, &e.ending} {
		slices.Sort(*ids)
		*ids = slices.Compact(*ids) // a pod with IPv4 and IPv6 is in a slice of each
	}
	return e
}

// slimService and slimSlice keep what is read.
func slimService(item any) (any, error) {
	svc, ok := item.(*corev1.Service)
	if !ok {
		return item, nil
	}
	return &corev1.Service{
		ObjectMeta: slimMeta(&svc.ObjectMeta),
		Spec:       corev1.ServiceSpec{Type: svc.Spec.Type, Selector: svc.Spec.Selector, Ports: svc.Spec.Ports},
	}, nil
}

func slimSlice(item any) (any, error) {
	part, ok := item.(*discoveryv1.EndpointSlice)
	if !ok {
		return item, nil
	}
	out := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{
		Name: part.Name, Namespace: part.Namespace, UID: part.UID, ResourceVersion: part.ResourceVersion,
		Labels: map[string]string{discoveryv1.LabelServiceName: part.Labels[discoveryv1.LabelServiceName]},
	}}
	for i := range part.Endpoints {
		p := &part.Endpoints[i]
		e := discoveryv1.Endpoint{Addresses: p.Addresses, Conditions: p.Conditions}
		if p.TargetRef != nil {
			e.TargetRef = &corev1.ObjectReference{UID: p.TargetRef.UID}
		}
		out.Endpoints = append(out.Endpoints, e)
	}
	return out, nil
}

// slicesOf are the EndpointSlices of a watch by the namespace and name of their Service.
func slicesOf(w *watch) map[types.NamespacedName][]*discoveryv1.EndpointSlice {
	out := map[types.NamespacedName][]*discoveryv1.EndpointSlice{}
	for _, item := range w.informer.GetStore().List() {
		if part, ok := item.(*discoveryv1.EndpointSlice); ok {
			of := types.NamespacedName{Namespace: part.Namespace, Name: part.Labels[discoveryv1.LabelServiceName]}
			out[of] = append(out[of], part)
		}
	}
	return out
}

// name is a worker's, by that of its pod or Service.
func (r *rules) name(of *metav1.ObjectMeta) string {
	if r.qualified {
		return of.Namespace + "." + of.Name
	}
	return of.Name
}

// base is what holds for all workers of a pod or Service, or the reason why it has none.
func (r *rules) base(what string, of *metav1.ObjectMeta, labels map[string]string, by chosen) (s workers.Spec, why string) {
	if len(labels) > maxLabels || len(of.Annotations) > 4*maxLabels {
		return s, fmt.Sprintf("%d labels and %d annotations (at most %d and %d)", len(labels), len(of.Annotations), maxLabels, 4*maxLabels)
	}
	if why := workers.NoEngine(labels); why != "" {
		return s, why
	}
	s = r.template
	s.Origin = what + " " + of.Namespace + "/" + of.Name
	s.Process = string(of.UID)
	s.Labels = labels
	s.From = map[workers.Field]string{}
	switch {
	case by.prefill && by.decode:
		s.Role, s.From[workers.FieldRole] = workers.Either, "both role selectors"
	case by.prefill:
		s.Role, s.From[workers.FieldRole] = workers.Prefill, "the prefill selector"
	case by.decode:
		s.Role, s.From[workers.FieldRole] = workers.Decode, "the decode selector"
	}
	if v := labels[r.revision]; r.revision != "" && v != "" {
		s.Revision, s.From[workers.FieldRevision] = v, "label "+r.revision+"="+v
	}
	if t, ok := workers.ToldBy(workers.FieldBootstrap, nil, of.Annotations); ok {
		port, err := parsePort(t.Means)
		if err != nil {
			return s, t.From + ": " + err.Error()
		}
		s.Bootstrap, s.From[workers.FieldBootstrap] = &workers.Bootstrap{Port: port}, t.From
	}
	return s, ""
}
