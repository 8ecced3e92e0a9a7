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
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	"github.com/dynctl/dynctl/internal/workers"
)

var (
	services = kind{
		resource: "services", path: "services", object: &corev1.Service{}, list: func() runtime.Object { return &corev1.ServiceList{} }, keep: keepService,
	}
	// endpointSlices have the labels of their Services: Kubernetes copies them.
	endpointSlices = kind{
		resource: "endpointslices." + discoveryv1.GroupName, path: "endpointslices",
		object: &discoveryv1.EndpointSlice{}, list: func() runtime.Object { return &discoveryv1.EndpointSliceList{} }, keep: keepSlice,
	}
)

// readService makes a worker of a Service, which is asked by its name: behind a mesh, or
// where certificates have names, pods cannot be queried by their addresses. Its slices say
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
	ends := behind(svc.Spec.IPFamilies, parts)
	if len(ends) == 0 {
		return reading{why: "no pod is behind it", waiting: true}
	}
	asked := 0
	for i := range ends {
		if ends[i].asked {
			asked++
		}
	}
	first := slices.MinFunc(ends, func(a, b end) int {
		return cmp.Or(cmp.Compare(a.state, b.state), strings.Compare(a.id, b.id))
	})
	s.Process = first.id
	switch {
	case asked > 1:
		s.NotReady = fmt.Sprintf("%d pods take the requests of its service, and which one a request reaches is not known: give each engine a service of its own, or find engines by pod IP (kubernetes.discovery)", asked)
	case first.state == endUnready:
		s.NotReady = "the pod behind its service is not Ready"
	case first.state == endLeaving:
		s.Leaving = "the pod behind its service is being deleted"
	}
	port, from, err := r.servicePort(svc)
	if err != nil {
		return left("%v", err)
	}
	own, err := first.port(svc, port)
	// The name of a headless Service is that of its pods: nothing translates ports.
	if svc.Spec.ClusterIP == corev1.ClusterIPNone {
		if err != nil {
			return left("%v", err)
		}
		if own != port {
			from = fmt.Sprintf("its pod, where the headless service's %d is %d", port, own)
		}
		port = own
	}
	s.Name = r.name(&svc.ObjectMeta)
	s.Topic = fillTopic(s.Topic, first.addr, own, &svc.ObjectMeta)
	s.URL = &url.URL{Scheme: r.scheme, Host: net.JoinHostPort(svc.Name+"."+svc.Namespace+".svc", strconv.Itoa(port))}
	s.From[workers.FieldURL] = "name of the service, port from " + from
	return reading{specs: []workers.Spec{s}}
}

// servicePort is the one that was set, if the Service has it or states none, else its
// only one.
func (r *rules) servicePort(svc *corev1.Service) (port int, from string, err error) {
	ports := svc.Spec.Ports
	switch {
	case len(ports) == 0 || slices.ContainsFunc(ports, func(p corev1.ServicePort) bool { return int(p.Port) == r.port }):
		return r.port, "setting kubernetes.port", nil
	case len(ports) == 1:
		port, err := workers.ParsePort(strconv.Itoa(int(ports[0].Port)))
		return port, "the service's only one", err
	}
	return 0, "", fmt.Errorf("none of its %d ports is %d (kubernetes.port)", len(ports), r.port)
}

// end is a pod behind a Service, or a server that an EndpointSlice names without a pod.
type end struct {
	id    string // the pod's UID, or else the address
	known bool   // by its UID
	// addr is its address of the family that the Service puts first, of those that it has.
	addr  string
	ports []discoveryv1.EndpointPort
	// asked says that the Service's requests may reach it.
	asked          bool
	state          endState
	family         discoveryv1.AddressType
	hostname, node string
}

// endState is what becomes of a pod; where two slices differ, the later one holds, since
// one of them is older and nobody knows which.
type endState int

const (
	endReady endState = iota
	endUnready
	endLeaving
)

// behind are the pods behind a Service, each once, in no order. A pod has an endpoint in a
// slice for each of its address families, where its UID shows that it is the same one.
// Endpoints without a pod are distinguished by their addresses in one family, and across
// families by their host names or nodes: where those do not say that it is another one, the
// family that the Service puts first counts.
func behind(families []corev1.IPFamily, parts []*discoveryv1.EndpointSlice) []end {
	place := func(of discoveryv1.AddressType) int {
		if i := slices.Index(families, corev1.IPFamily(of)); i >= 0 {
			return i
		}
		return len(families)
	}
	parts = slices.SortedFunc(slices.Values(parts), func(a, b *discoveryv1.EndpointSlice) int {
		return cmp.Or(cmp.Compare(place(a.AddressType), place(b.AddressType)), cmp.Compare(a.AddressType, b.AddressType), strings.Compare(a.Name, b.Name))
	})
	var out []end
	at := map[string]int{} // by id
	for _, known := range []bool{true, false} {
		for _, part := range parts {
			for i := range part.Endpoints {
				e, ok := endOf(part, &part.Endpoints[i])
				if !ok || e.known != known {
					continue
				}
				if i, twice := at[e.id]; twice {
					out[i].asked = out[i].asked || e.asked
					out[i].state = max(out[i].state, e.state)
				} else if known || !slices.ContainsFunc(out, func(o end) bool { return o.family != e.family && !o.apart(&e) }) {
					at[e.id] = len(out)
					out = append(out, e)
				}
			}
		}
	}
	return out
}

func endOf(part *discoveryv1.EndpointSlice, p *discoveryv1.Endpoint) (e end, ok bool) {
	if len(p.Addresses) == 0 {
		return e, false
	}
	e = end{id: p.Addresses[0], addr: p.Addresses[0], ports: part.Ports, family: part.AddressType}
	if p.TargetRef != nil && p.TargetRef.UID != "" {
		e.id, e.known = string(p.TargetRef.UID), true
	}
	if p.Hostname != nil {
		e.hostname = *p.Hostname
	}
	if p.NodeName != nil {
		e.node = *p.NodeName
	}
	// What is not said of readiness means yes, of ending no. A Service may publish pods that
	// are not Ready, and those that end: its requests reach them.
	c := &p.Conditions
	e.asked = c.Ready == nil || *c.Ready
	switch {
	case c.Terminating != nil && *c.Terminating:
		e.state = endLeaving
	case !e.asked || c.Serving != nil && !*c.Serving:
		e.state = endUnready
	}
	return e, true
}

// apart reports whether two endpoints cannot be one server with two addresses.
func (e *end) apart(o *end) bool {
	return e.hostname != "" && o.hostname != "" && e.hostname != o.hostname || e.node != "" && o.node != "" && e.node != o.node
}

// port is the pod's own, which the Service's port stands for.
func (e *end) port(svc *corev1.Service, port int) (int, error) {
	at := slices.IndexFunc(svc.Spec.Ports, func(p corev1.ServicePort) bool { return int(p.Port) == port })
	if at < 0 || len(e.ports) == 0 {
		return port, nil // neither says which ports there are
	}
	name := svc.Spec.Ports[at].Name
	for _, p := range e.ports {
		switch {
		case p.Name == nil && name != "", p.Name != nil && *p.Name != name:
		case p.Port == nil:
			return port, nil // any
		default:
			own, err := workers.ParsePort(strconv.Itoa(int(*p.Port)))
			if err != nil {
				err = fmt.Errorf("port %q of the pod behind it: %w", name, err)
			}
			return own, err
		}
	}
	return port, fmt.Errorf("the pod behind it has no port %q, which is the service's %d", name, port)
}

// keepService and keepSlice keep what is read.
func keepService(item any) (any, error) {
	svc, ok := item.(*corev1.Service)
	if !ok {
		return item, nil
	}
	return &corev1.Service{
		ObjectMeta: keepMeta(&svc.ObjectMeta),
		Spec: corev1.ServiceSpec{
			Type: svc.Spec.Type, Selector: svc.Spec.Selector, ClusterIP: svc.Spec.ClusterIP, IPFamilies: svc.Spec.IPFamilies,
			// One number may stand for a port of each protocol.
			Ports: slices.DeleteFunc(slices.Clone(svc.Spec.Ports), func(p corev1.ServicePort) bool {
				return p.Protocol == corev1.ProtocolUDP || p.Protocol == corev1.ProtocolSCTP
			}),
		},
	}, nil
}

func keepSlice(item any) (any, error) {
	part, ok := item.(*discoveryv1.EndpointSlice)
	if !ok {
		return item, nil
	}
	out := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{
		Name: part.Name, Namespace: part.Namespace, UID: part.UID, ResourceVersion: part.ResourceVersion,
		Labels: map[string]string{discoveryv1.LabelServiceName: part.Labels[discoveryv1.LabelServiceName]},
	}, AddressType: part.AddressType, Ports: part.Ports}
	for i := range part.Endpoints {
		p := &part.Endpoints[i]
		e := discoveryv1.Endpoint{Addresses: p.Addresses, Conditions: p.Conditions, Hostname: p.Hostname, NodeName: p.NodeName}
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
	if err := s.StateOwn(labels, of.Annotations, true); err != nil {
		return s, strings.ReplaceAll(err.Error(), "\n", "; ")
	}
	switch {
	case by.prefill && by.decode:
		s.Role, s.From[workers.FieldRole] = workers.Either, "both role selectors"
	case by.prefill:
		s.Role, s.From[workers.FieldRole] = workers.Prefill, "the prefill selector"
	case by.decode:
		s.Role, s.From[workers.FieldRole] = workers.Decode, "the decode selector"
	}
	if v := labels[r.revision]; r.revision != "" && v != "" && s.From[workers.FieldRevision] == "" {
		s.Revision, s.From[workers.FieldRevision] = v, "label "+r.revision+"="+v
	}
	if t, ok := workers.FromLabels(workers.FieldBootstrap, nil, of.Annotations); ok && s.From[workers.FieldBootstrap] == "" {
		port, err := workers.ParsePort(clip(t.Means))
		if err != nil {
			return s, t.From + ": " + err.Error()
		}
		s.Bootstrap, s.From[workers.FieldBootstrap] = &workers.Bootstrap{Port: port}, t.From
	}
	return s, ""
}
