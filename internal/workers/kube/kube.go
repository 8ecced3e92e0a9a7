// Package kube finds workers among the pods of a Kubernetes cluster, or among its Services. It
// watches them by label selectors with client-go's informers, reads each on its own (see
// rules.read and rules.readService) and gives the registry all of them whenever one has
// changed.
//
// It contacts the API server only if a selector is set. A server that cannot be reached, or
// that refuses, leaves the fleet as it was; the status says so until it answers again.
package kube

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/wait"
	"github.com/dynctl/dynctl/internal/workers"
)

// Options say how a Source asks an API server.
type Options struct {
	// UserAgent names the router to the API server.
	UserAgent string
	// Gather is how long changes are gathered before they are taken over; 10 ms
	// when zero.
	Gather time.Duration
	// Refresh is how often the key file of workers is read again; 30 s when zero.
	Refresh time.Duration
}

// Source keeps the workers of a registry in step with the pods of a cluster.
type Source struct {
	reg   *workers.Registry
	opts  Options
	rules rules
	sink  eventlog.Sink
	http  *http.Client
	pools []*pool
	wake  chan struct{} // holds a token when pods may have changed
	now   func() time.Time

	mu      sync.Mutex
	watches []*watch // of pods or Services
	status  Status
	// Of the last time that pods were read.
	held    map[string]string    // why workers are not ready, by name
	leaving map[string]bool      // workers whose pods are being deleted
	leftOut map[types.UID]string // why pods were left out
}

// Status is what a Source makes of its cluster.
type Status struct {
	Server     string
	Namespaces []string
	Watches    []WatchStatus
	// Pods (or Services) were found, Workers made of them, Waiting of them will become
	// some.
	Pods, Workers, Waiting int
	// LeftOut are pods that were found and are no workers, by name, at most maxLeftOut;
	// LeftOutCount are all.
	LeftOut      []LeftOut
	LeftOutCount int
	// KeyError is why the key file could not be read again; the last key is used.
	KeyError string
}

// WatchStatus is one watch: a selector in a namespace.
type WatchStatus struct {
	Namespace, Selector string
	// Synced says that the pods were listed at least once, Err why the API server cannot be
	// reached now, Since when that began.
	Synced   bool
	Err      string
	Since    time.Time
	Failures uint64
}

// LeftOut is a pod that is no worker.
type LeftOut struct{ Pod, Why string }

const maxLeftOut = 32

// quiet silences client-go: what it has to say becomes status and events.
var quiet = sync.OnceFunc(func() { klog.SetLogger(logr.Discard()) })

// New prepares a Source. It reads the kubeconfig and checks what was set, and
// opens no connection.
func New(reg *workers.Registry, k workers.Kubernetes, o Options, sink eventlog.Sink) (*Source, error) {
	quiet()
	o.Gather, o.Refresh = cmp.Or(max(o.Gather, 0), 10*time.Millisecond), cmp.Or(max(o.Refresh, 0), 30*time.Second)
	template, err := template(k.Worker)
	if err != nil {
		return nil, fmt.Errorf("kubernetes.worker: %w", err)
	}
	host, err := os.Hostname()
	if err != nil {
		return nil, fmt.Errorf("the name of this machine, to know the router's own pod by: %w", err)
	}
	s := &Source{
		reg: reg, opts: o, sink: sink, wake: make(chan struct{}, 1), now: time.Now,
		rules: rules{template: template, port: k.Port, scheme: cmp.Or(k.Scheme, "http"), host: host, revision: k.RevisionLabel},
		held:  map[string]string{}, leaving: map[string]bool{}, leftOut: map[types.UID]string{},
	}
	loading := clientcmd.NewDefaultClientConfigLoadingRules()
	loading.ExplicitPath = k.Kubeconfig
	file := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(loading, nil)
	cfg, err := file.ClientConfig()
	if err != nil {
		return nil, fmt.Errorf("kubernetes: %w (name a file with --kubeconfig, or run in a pod that mounts its service account's token)", err)
	}
	// Before the HTTP client, which is what says it.
	cfg.UserAgent = o.UserAgent
	// One list of each watch is all that a client could hold back; the API server says by
	// itself when that is too much.
	cfg.QPS = -1
	namespaces := slices.Clone(k.Namespaces)
	if len(namespaces) == 0 {
		own, _, err := file.Namespace()
		if err != nil {
			return nil, fmt.Errorf("kubernetes: %w", err)
		}
		namespaces = []string{own}
	}
	slices.Sort(namespaces)
	namespaces = slices.Compact(namespaces)
	if slices.Contains(namespaces, workers.AllNamespaces) {
		namespaces = []string{metav1.NamespaceAll}
	}
	s.rules.qualified = len(namespaces) > 1 || namespaces[0] == metav1.NamespaceAll
	if s.http, err = rest.HTTPClientFor(cfg); err != nil {
		return nil, fmt.Errorf("kubernetes: %w", err)
	}
	client, err := s.client(cfg, "/api", corev1.SchemeGroupVersion, corev1.AddToScheme)
	if err != nil {
		return nil, fmt.Errorf("kubernetes: %w", err)
	}
	byName := k.Discovery == workers.ByServiceName
	var ofSlices *rest.RESTClient
	if byName {
		if ofSlices, err = s.client(cfg, "/apis", discoveryv1.SchemeGroupVersion, discoveryv1.AddToScheme); err != nil {
			return nil, fmt.Errorf("kubernetes: %w", err)
		}
	}
	if k.Pool != "" {
		if byName {
			return nil, errors.New("kubernetes.pool: a pool names pods; with kubernetes.discovery=service-name use kubernetes.selector, which finds Services")
		}
		if namespaces[0] == metav1.NamespaceAll {
			return nil, errors.New("kubernetes.pool: a pool is in a namespace; name it with kubernetes.namespaces")
		}
		objects, err := dynamic.NewForConfigAndClient(cfg, s.http)
		if err != nil {
			return nil, fmt.Errorf("kubernetes: %w", err)
		}
		for _, n := range namespaces {
			s.pools = append(s.pools, s.newPool(client, objects, n, k.Pool))
		}
	}
	s.status.Server = cfg.Host
	for _, n := range namespaces {
		s.status.Namespaces = append(s.status.Namespaces, cmp.Or(n, workers.AllNamespaces))
		for _, w := range []struct {
			key, selector string
			by            chosen
		}{
			{"kubernetes.selector", k.Selector, chosen{any: true}},
			{"kubernetes.prefill_selector", k.PrefillSelector, chosen{prefill: true}},
			{"kubernetes.decode_selector", k.DecodeSelector, chosen{decode: true}},
		} {
			if w.selector == "" {
				continue
			}
			if _, err := labels.Parse(w.selector); err != nil {
				return nil, fmt.Errorf("%s: %q is no label selector: %w", w.key, w.selector, err)
			}
			if !byName {
				s.watches = append(s.watches, s.newWatch(pods, client, n, w.selector, w.by))
				continue
			}
			found := s.newWatch(services, client, n, w.selector, w.by)
			found.slices = s.newWatch(endpointSlices, ofSlices, n, w.selector, w.by)
			s.watches = append(s.watches, found)
		}
	}
	if len(s.watches)+len(s.pools) == 0 {
		return nil, errors.New("kubernetes: no selector and no pool is set")
	}
	return s, nil
}

// template reads what is stated of all workers.
func template(text string) (workers.Spec, error) {
	const anyone = "http://pod"
	full := anyone
	if text != "" {
		full += "," + text
	}
	t, err := workers.ParseSpec("", full)
	if err != nil {
		return t, errors.New(strings.ReplaceAll(err.Error(), `worker "`+anyone+`": `, ""))
	}
	switch {
	case t.Role != "":
		return t, errors.New("role= cannot be that of every pod: use the role selectors, or labels")
	case t.Name != workers.DefaultName(t.URL):
		return t, errors.New("name= cannot be that of every pod: workers have the names of their pods")
	case len(t.Labels) > 0:
		return t, errors.New("labels= are those of the pods")
	}
	rest := t.Topic
	for _, word := range topicWords {
		rest = strings.ReplaceAll(rest, word, "")
	}
	if strings.ContainsAny(rest, "{}") {
		return t, fmt.Errorf("topic=%s: only %s stand for what a pod has", t.Topic, strings.Join(topicWords, ", "))
	}
	t.Name, t.URL = "", nil
	if t.APIKeyFile != "" {
		err = t.ReadAPIKey()
	}
	return t, err
}

// client speaks of one group only: others would be linked for nothing.
func (s *Source) client(cfg *rest.Config, path string, of schema.GroupVersion, add func(*runtime.Scheme) error) (*rest.RESTClient, error) {
	scheme := runtime.NewScheme()
	if err := add(scheme); err != nil {
		return nil, err
	}
	metav1.AddToGroupVersion(scheme, of)
	cfg = rest.CopyConfig(cfg)
	cfg.APIPath, cfg.GroupVersion = path, &of
	cfg.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	cfg.ContentType, cfg.AcceptContentTypes = runtime.ContentTypeProtobuf, runtime.ContentTypeProtobuf+","+runtime.ContentTypeJSON
	return rest.RESTClientForConfigAndClient(cfg, s.http)
}

// Run watches until ctx ends. It returns nil then; what goes wrong is status and
// events.
func (s *Source) Run(ctx context.Context) error {
	defer s.http.CloseIdleConnections()
	g, ctx := errgroup.WithContext(klog.NewContext(ctx, logr.Discard()))
	for _, found := range s.watches {
		for _, w := range found.both() {
			g.Go(func() error { w.informer.RunWithContext(ctx); return nil })
			g.Go(func() error { return w.awaitSync(ctx) })
		}
	}
	for _, p := range s.pools {
		g.Go(func() error { return p.run(ctx) })
	}
	g.Go(func() error { return s.follow(ctx) })
	return g.Wait()
}

// add has the pods of a watch count from when they are listed, drop no longer.
func (s *Source) add(w *watch) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.watches = append(s.watches, w)
}

func (s *Source) drop(w *watch) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.watches = slices.DeleteFunc(slices.Clone(s.watches), func(o *watch) bool { return o == w })
}

// choose changes what a watch says of its pods.
func (s *Source) choose(w *watch, by chosen) {
	s.mu.Lock()
	w.by = by
	s.mu.Unlock()
	s.touch()
}

// follow takes changes over, many of a moment at once.
func (s *Source) follow(ctx context.Context) error {
	gathered := time.NewTimer(time.Hour)
	defer gathered.Stop()
	refresh := time.NewTicker(s.opts.Refresh)
	defer refresh.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-s.wake:
			gathered.Reset(s.opts.Gather)
			select {
			case <-ctx.Done():
				return nil
			case <-gathered.C:
			}
			s.takeOver()
		case <-refresh.C:
			if s.readKey() {
				s.takeOver()
			}
		}
	}
}

// touch says that pods may have changed.
func (s *Source) touch() { wait.Poke(s.wake) }

// readKey reads the key file again and reports whether the key is another one. One
// that cannot be read leaves the last: the workers stay as they are.
func (s *Source) readKey() bool {
	t := s.rules.template
	if t.APIKeyFile == "" {
		return false
	}
	before := t.APIKey
	err := t.ReadAPIKey()
	s.mu.Lock()
	failed := s.status.KeyError
	s.status.KeyError = ""
	if err != nil {
		s.status.KeyError = strings.TrimPrefix(err.Error(), "worker : ")
	}
	now := s.status.KeyError
	s.mu.Unlock()
	if now != "" && now != failed {
		s.sink.Emit(eventlog.Event{
			Severity: eventlog.Error, Kind: "discovery_kubernetes_key_unread",
			Text: "the engines' key cannot be read again and the last one is used: " + now,
		})
	}
	if err != nil || t.APIKey == before {
		return false
	}
	s.rules.template.APIKey = t.APIKey
	return true
}

// found is a pod or a Service, and the selectors that found it.
type found struct {
	*metav1.ObjectMeta
	pod     *corev1.Pod
	service *corev1.Service
	slices  []*discoveryv1.EndpointSlice // of the Service
	by      chosen
}

// what it is, for people.
func (f *found) what() string {
	if f.service != nil {
		return "service"
	}
	return "pod"
}

// read makes workers of it.
func (r *rules) readFound(f *found) reading {
	if f.service != nil {
		return r.readService(f.service, f.slices, f.by)
	}
	return r.read(f.pod, f.by)
}

// all are those of all watches that were listed once, each once: those that stay, then
// those that are being deleted, by namespace and name.
func (s *Source) all() []found {
	at := map[types.UID]int{}
	var out []found
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, w := range s.watches {
		if slices.ContainsFunc(w.both(), func(w *watch) bool { return !w.informer.HasSynced() }) {
			continue
		}
		var parts map[types.NamespacedName][]*discoveryv1.EndpointSlice
		if w.slices != nil {
			parts = slicesOf(w.slices)
		}
		for _, item := range w.informer.GetStore().List() {
			var f found
			switch o := item.(type) {
			case *corev1.Pod:
				f = found{ObjectMeta: &o.ObjectMeta, pod: o}
			case *corev1.Service:
				f = found{ObjectMeta: &o.ObjectMeta, service: o, slices: parts[types.NamespacedName{Namespace: o.Namespace, Name: o.Name}]}
			default:
				continue
			}
			i, seen := at[f.UID]
			if !seen {
				i = len(out)
				at[f.UID] = i
				out = append(out, f)
			}
			by := &out[i].by
			by.any, by.prefill, by.decode = by.any || w.by.any, by.prefill || w.by.prefill, by.decode || w.by.decode
			if by.ports == nil {
				by.ports, by.from = w.by.ports, w.by.from
			}
		}
	}
	slices.SortFunc(out, func(a, b found) int {
		// An address may be another pod's before the old one's end is seen: who stays has it.
		if a, b := a.DeletionTimestamp != nil, b.DeletionTimestamp != nil; a != b {
			if b {
				return -1
			}
			return 1
		}
		return cmp.Or(strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name), strings.Compare(string(a.UID), string(b.UID)))
	})
	return out
}

// takeOver gives the registry the workers of all pods.
func (s *Source) takeOver() {
	all := s.all()
	var specs []workers.Spec
	var owners []types.UID
	waiting := 0
	left := map[types.UID]string{}
	for i := range all {
		f := &all[i]
		r := s.rules.readFound(f)
		switch {
		case r.waiting:
			waiting++
		case r.why != "":
			left[f.UID] = r.why
		}
		for i := range r.specs {
			// The key was read already; once for all of them.
			r.specs[i].APIKeyFile = ""
			specs, owners = append(specs, r.specs[i]), append(owners, f.UID)
		}
	}
	_, refused, err := s.reg.ApplyEach(workers.SourceKube, specs)
	for i, why := range refused {
		left[owners[i]] = why.Error()
	}
	if err != nil { // of no single one: none was taken
		s.sink.Emit(eventlog.Event{Severity: eventlog.Error, Kind: "discovery_kubernetes_refused", Text: "the pods are not taken over, the workers stay as they are: " + err.Error()})
	}
	s.note(all, specs, refused, left, waiting)
}

// note keeps the status and reports what has changed.
func (s *Source) note(all []found, specs []workers.Spec, refused map[int]error, left map[types.UID]string, waiting int) {
	held, leaving := map[string]string{}, map[string]bool{}
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range specs {
		if refused[i] != nil {
			continue
		}
		w := &specs[i]
		switch {
		case w.Leaving != "":
			leaving[w.Name] = true
			if !s.leaving[w.Name] {
				s.sink.Emit(eventlog.Event{Kind: "worker_draining", Worker: w.Name, Text: fmt.Sprintf("worker %s drains: %s; it gets no new requests, running ones finish", w.Name, w.Leaving)})
			}
		case w.NotReady != "":
			held[w.Name] = w.NotReady
			if s.held[w.Name] == "" {
				s.sink.Emit(eventlog.Event{Kind: "worker_not_ready", Worker: w.Name, Text: fmt.Sprintf("worker %s gets no requests: %s", w.Name, w.NotReady)})
			}
		case s.held[w.Name] != "":
			s.sink.Emit(eventlog.Event{Kind: "worker_ready", Worker: w.Name, Text: fmt.Sprintf("worker %s may get requests: its pod is Ready", w.Name)})
		}
	}
	st := &s.status
	st.Pods, st.Workers, st.Waiting, st.LeftOut, st.LeftOutCount = len(all), len(specs)-len(refused), waiting, nil, len(left)
	for i := range all {
		f := &all[i]
		why := left[f.UID]
		if why == "" {
			continue
		}
		name := f.Namespace + "/" + f.Name
		if s.leftOut[f.UID] != why {
			s.sink.Emit(eventlog.Event{Kind: "discovery_kubernetes_left_out", Text: fmt.Sprintf("%s %s is found by a selector, but no worker: %s", f.what(), name, why)})
		}
		if len(st.LeftOut) < maxLeftOut {
			st.LeftOut = append(st.LeftOut, LeftOut{name, why})
		}
	}
	s.held, s.leaving, s.leftOut = held, leaving, left
}

// Status is what the Source makes of its cluster now.
func (s *Source) Status() Status {
	s.mu.Lock()
	st := s.status
	st.LeftOut = slices.Clone(st.LeftOut)
	var watches []*watch
	for _, w := range s.watches {
		watches = append(watches, w.both()...)
	}
	s.mu.Unlock()
	for _, p := range s.pools {
		watches = append(watches, p.object)
	}
	for _, w := range watches {
		st.Watches = append(st.Watches, w.status())
	}
	return st
}

// Troubles are reasons why the fleet may not be what the cluster has.
func (s *Source) Troubles() (out []string) {
	st := s.Status()
	seen := map[string]bool{}
	for _, w := range st.Watches {
		if w.Err == "" || seen[w.Err] {
			continue
		}
		seen[w.Err] = true
		out = append(out, fmt.Sprintf("the workers are as they were at %s, changes of the pods are not seen: %s", w.Since.Format(time.RFC3339), w.Err))
	}
	for _, p := range s.pools {
		if wrong := p.wrong(); wrong != "" {
			out = append(out, wrong)
		}
	}
	if st.KeyError != "" {
		out = append(out, "the engines' key cannot be read again and the last one is used: "+st.KeyError)
	}
	return out
}
