package kube

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	apiwatch "k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/workers"
)

// listTime bounds one list; a watch lasts as long as the server lets it.
const listTime = 30 * time.Second

// errNoAnswer: a connection that ended or timed out before the answer's first byte.
var errNoAnswer = errors.New("the connection ended before an answer")

// kind is what a watch is of: the resource as people name it, its path, what one and a
// list of them are, and what is kept of one.
type kind struct {
	resource, path string
	object         runtime.Object
	list           func() runtime.Object
	keep           cache.TransformFunc
}

var pods = kind{resource: "pods", path: "pods", object: &corev1.Pod{}, list: func() runtime.Object { return &corev1.PodList{} }, keep: keepPod}

// watch is one selector in one namespace.
type watch struct {
	s        *Source
	resource string // "pods"
	by       chosen // under s.mu
	informer cache.SharedIndexInformer
	slices   *watch // those of the Services that this one is of

	mu     sync.Mutex
	state  WatchStatus
	failed string // the verb that state.Err is of
}

// both are the watch and that of its EndpointSlices, if it has one.
func (w *watch) both() []*watch {
	if w.slices == nil {
		return []*watch{w}
	}
	return []*watch{w, w.slices}
}

func (s *Source) newWatch(of kind, client *rest.RESTClient, namespace, selector string, by chosen) *watch {
	w := &watch{s: s, resource: of.resource, by: by, state: WatchStatus{Namespace: namespace, Selector: selector}}
	get := func(o *metav1.ListOptions) *rest.Request {
		o.LabelSelector = selector
		return client.Get().NamespaceIfScoped(namespace, namespace != metav1.NamespaceAll).Resource(of.path).VersionedParams(o, metav1.ParameterCodec)
	}
	w.follow(of.object, of.keep, s.touch,
		func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			list := of.list()
			err := get(&o).Do(ctx).Into(list)
			return list, err
		},
		func(ctx context.Context, o metav1.ListOptions) (apiwatch.Interface, error) { return get(&o).Watch(ctx) })
	return w
}

// follow prepares the informer: what it asks, what it keeps of an object, and what is
// called after a change.
func (w *watch) follow(object runtime.Object, keep cache.TransformFunc, touch func(),
	list func(context.Context, metav1.ListOptions) (runtime.Object, error),
	watch func(context.Context, metav1.ListOptions) (apiwatch.Interface, error),
) {
	lw := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			bounded, cancel := context.WithTimeout(ctx, listTime)
			defer cancel()
			list, err := list(bounded, o)
			w.answered(ctx, "list", err)
			return list, err
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (apiwatch.Interface, error) {
			o.Watch = true
			i, err := watch(ctx, o)
			if o.SendInitialEvents != nil && apierrors.IsInvalid(err) {
				return i, err // a server that cannot list by watching: it is asked to list
			}
			result := err
			if _, answer := i.(*apiwatch.StreamWatcher); err == nil && !answer {
				result = errNoAnswer // client-go makes an empty watch of it
			}
			w.answered(ctx, "watch", result)
			return i, err
		},
	}
	w.informer = cache.NewSharedIndexInformer(lw, object, 0, cache.Indexers{})
	changed := cache.ResourceEventHandlerFuncs{
		AddFunc: func(any) { touch() }, UpdateFunc: func(any, any) { touch() }, DeleteFunc: func(any) { touch() },
	}
	// Both fail only on an informer that runs.
	if keep != nil {
		_ = w.informer.SetTransform(keep)
	}
	_, _ = w.informer.AddEventHandler(changed)
}

// awaitSync says when the first list is there: without a pod nothing else would.
func (w *watch) awaitSync(ctx context.Context) error {
	if cache.WaitForCacheSync(ctx.Done(), w.informer.HasSynced) {
		w.s.touch()
	}
	return nil
}

// answered notes what came of a question to the API server.
func (w *watch) answered(ctx context.Context, verb string, err error) {
	if ctx.Err() != nil || apierrors.IsResourceExpired(err) || apierrors.IsGone(err) {
		return // the end, or a version so old that all is listed again
	}
	now := w.s.now()
	w.mu.Lock()
	was, since := w.state.Err, w.state.Since
	switch {
	case err == nil && verb == "list" && w.failed == "watch":
		// Who may list and not watch is answered before each refusal.
		w.mu.Unlock()
		return
	case err == nil:
		w.state.Err, w.state.Since, w.failed = "", time.Time{}, ""
	default:
		w.state.Failures++
		w.state.Err, w.failed = w.explain(verb, err), verb
		if was == "" {
			w.state.Since = now
		}
	}
	text := w.state.Err
	w.mu.Unlock()
	switch {
	case err == nil && was != "":
		w.s.sink.Emit(eventlog.Event{
			Kind: "discovery_kubernetes_back", Text: fmt.Sprintf("the API server answers again after %s: %s %s are followed", now.Sub(since).Round(time.Second), w.resource, w.where()),
		})
	case err != nil && text != was:
		w.s.sink.Emit(eventlog.Event{
			Severity: eventlog.Error, Kind: "discovery_kubernetes_lost",
			Text: fmt.Sprintf("the workers stay as they are, changes of %s are not seen: %s", w.resource, text),
		})
	}
}

// where says which of them are watched.
func (w *watch) where() string {
	if w.state.Namespace == metav1.NamespaceAll {
		return fmt.Sprintf("with %q of all namespaces", w.state.Selector)
	}
	return fmt.Sprintf("with %q in namespace %s", w.state.Selector, w.state.Namespace)
}

// explain puts an error of the API server into words, with what to do.
func (w *watch) explain(verb string, err error) string {
	switch {
	case apierrors.IsForbidden(err):
		kind, more := "Role", ""
		if w.state.Namespace == metav1.NamespaceAll {
			kind, more = "ClusterRole", ", or set kubernetes.namespaces"
		}
		return fmt.Sprintf("the API server refuses to %s %s %s: give the router's service account a %s with the verbs list and watch on %s%s (%s)", verb, w.resource, w.where(), kind, w.resource, more, clip(err.Error()))
	case apierrors.IsNotFound(err) && w.resource != pods.resource:
		return fmt.Sprintf("the API server knows no %s of version v1: install their definitions, or name the pods by kubernetes.selector", w.resource)
	case apierrors.IsUnauthorized(err):
		return fmt.Sprintf("the API server does not know who asks: the token of the service account or of the kubeconfig is not valid (%s)", clip(err.Error()))
	case apierrors.IsTooManyRequests(err):
		return fmt.Sprintf("the API server is overloaded; the router will try again to %s %s %s", verb, w.resource, w.where())
	case errors.Is(err, context.DeadlineExceeded):
		return fmt.Sprintf("the API server did not answer within %s", listTime)
	}
	text := err.Error()
	var op *net.OpError
	if errors.As(err, &op) {
		bare := *op
		bare.Source = nil // another port each time, and each other text would be reported again
		text = bare.Error()
	}
	return "the API server cannot be reached: " + clip(text)
}

func (w *watch) status() WatchStatus {
	w.mu.Lock()
	defer w.mu.Unlock()
	st := w.state
	st.Synced = w.informer.HasSynced()
	if st.Namespace == metav1.NamespaceAll {
		st.Namespace = workers.AllNamespaces
	}
	return st
}

// keepPod keeps of a pod what is read of it; the rest would only take memory.
func keepPod(item any) (any, error) {
	pod, ok := item.(*corev1.Pod)
	if !ok {
		return item, nil
	}
	containers := func(list []corev1.Container) (out []corev1.Container) {
		for _, c := range list {
			out = append(out, corev1.Container{Name: c.Name, Image: c.Image, Command: c.Command, Args: c.Args})
		}
		return out
	}
	return &corev1.Pod{
		ObjectMeta: keepMeta(&pod.ObjectMeta),
		Spec:       corev1.PodSpec{InitContainers: containers(pod.Spec.InitContainers), Containers: containers(pod.Spec.Containers)},
		Status: corev1.PodStatus{
			Phase: pod.Status.Phase, PodIP: pod.Status.PodIP, Conditions: pod.Status.Conditions,
		},
	}, nil
}

func keepMeta(m *metav1.ObjectMeta) metav1.ObjectMeta {
	return metav1.ObjectMeta{
		Name: m.Name, Namespace: m.Namespace, UID: m.UID, ResourceVersion: m.ResourceVersion,
		Labels: m.Labels, Annotations: m.Annotations, DeletionTimestamp: m.DeletionTimestamp,
	}
}
