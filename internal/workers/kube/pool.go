package kube

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	apiwatch "k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"github.com/dynctl/dynctl/internal/eventlog"
	"github.com/dynctl/dynctl/internal/wait"
	"github.com/dynctl/dynctl/internal/workers"
)

// inferencePools are the InferencePools of the Gateway API's inference extension.
var inferencePools = schema.GroupVersionResource{Group: "inference.networking.k8s.io", Version: "v1", Resource: "inferencepools"}

// pool is an InferencePool: an object that says which pods are engines, and at which
// ports they serve. Its pods are watched as those of a selector are; another selector
// takes over when its pods are known. A pool that is gone, or says nothing that can be
// used, leaves the last one in force.
type pool struct {
	s       *Source
	client  *rest.RESTClient // of pods
	name    string
	object  *watch
	changed chan struct{} // holds a token when the object may have changed

	mu      sync.Mutex
	trouble string // why the object does not count, or is not there
}

func (s *Source) newPool(client *rest.RESTClient, objects dynamic.Interface, namespace, name string) *pool {
	p := &pool{s: s, client: client, name: name, changed: make(chan struct{}, 1)}
	of := objects.Resource(inferencePools).Namespace(namespace)
	named := func(o metav1.ListOptions) metav1.ListOptions {
		o.FieldSelector = fields.OneTermEqualSelector("metadata.name", name).String()
		return o
	}
	p.object = &watch{s: s, resource: inferencePools.Resource + "." + inferencePools.Group, state: WatchStatus{Namespace: namespace, Selector: "metadata.name=" + name}}
	p.object.follow(&unstructured.Unstructured{}, nil, p.touch,
		func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) { return of.List(ctx, named(o)) },
		func(ctx context.Context, o metav1.ListOptions) (apiwatch.Interface, error) {
			return of.Watch(ctx, named(o))
		})
	return p
}

func (p *pool) touch() { wait.Poke(p.changed) }

// members are the pods of a pool as its object says.
type members struct {
	selector string
	ports    []int
}

// read takes the members from the object.
func (p *pool) read() (members, error) {
	all := p.object.informer.GetStore().List()
	if len(all) == 0 {
		return members{}, fmt.Errorf("there is no InferencePool %s in namespace %s", p.name, p.object.state.Namespace)
	}
	object, ok := all[0].(*unstructured.Unstructured)
	if !ok {
		return members{}, fmt.Errorf("InferencePool %s is %T", p.name, all[0])
	}
	return readPool(object.Object)
}

// readPool takes the members from the fields of an InferencePool.
func readPool(object map[string]any) (m members, err error) {
	match, _, err := unstructured.NestedStringMap(object, "spec", "selector", "matchLabels")
	if err != nil {
		return m, err
	}
	if len(match) == 0 || len(match) > maxLabels {
		return m, fmt.Errorf("its selector has %d labels (1 to %d)", len(match), maxLabels)
	}
	chosen, err := labels.ValidatedSelectorFromSet(match)
	if err != nil {
		return m, err
	}
	m.selector = chosen.String()
	ports, _, err := unstructured.NestedSlice(object, "spec", "targetPorts")
	if err != nil {
		return m, err
	}
	for _, entry := range ports {
		port, _ := entry.(map[string]any)
		number, _ := port["number"].(int64)
		n, err := workers.ParsePort(strconv.FormatInt(number, 10))
		if err != nil {
			return m, fmt.Errorf("its target ports: %w", err)
		}
		if !slices.Contains(m.ports, n) {
			m.ports = append(m.ports, n)
		}
	}
	if len(m.ports) == 0 || len(m.ports) > maxPorts {
		return m, fmt.Errorf("it has %d target ports (1 to %d)", len(m.ports), maxPorts)
	}
	return m, nil
}

// note keeps why the object does not count, and reports it once.
func (p *pool) note(err error) {
	p.mu.Lock()
	was := p.trouble
	p.trouble = ""
	if err != nil {
		p.trouble = fmt.Sprintf("InferencePool %s: %v; the pods that it named last stay", p.name, err)
	}
	now := p.trouble
	p.mu.Unlock()
	if now != "" && now != was {
		p.s.sink.Emit(eventlog.Event{Severity: eventlog.Error, Kind: "discovery_kubernetes_pool_unread", Text: now})
	}
}

// wrong is why the object does not count; empty when it does.
func (p *pool) wrong() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.trouble
}

// drop lets a watch of pods go; what it counted stays counted.
func (p *pool) drop(w *watch) {
	if w == nil {
		return
	}
	p.s.drop(w)
	failures := w.status().Failures
	p.object.mu.Lock()
	p.object.state.Failures += failures
	p.object.mu.Unlock()
}

// run follows the object, and the pods that it chooses, until ctx ends.
func (p *pool) run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { p.object.informer.RunWithContext(ctx) })
	wg.Go(func() {
		if cache.WaitForCacheSync(ctx.Done(), p.object.informer.HasSynced) {
			p.touch()
		}
	})
	// now is the watch whose pods count, next the one that takes over when its pods
	// are listed.
	var now, next *watch
	var endNow, endNext context.CancelFunc = func() {}, func() {}
	defer func() { endNow(); endNext() }()
	synced := make(chan *watch, 1)
	promote := func() {
		endNow()
		p.drop(now)
		now, endNow, next, endNext = next, endNext, nil, func() {}
		p.s.touch()
	}
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-p.changed:
			if !p.object.informer.HasSynced() {
				continue
			}
			m, err := p.read()
			p.note(err)
			if err != nil {
				continue
			}
			by := chosen{any: true, ports: m.ports, from: "InferencePool " + p.name}
			last := next
			if last == nil {
				last = now
			}
			if last != nil && last.state.Selector == m.selector {
				p.s.choose(last, by)
				continue
			}
			if next != nil && next.informer.HasSynced() {
				promote() // its pods count already; that they do is not heard at once
			}
			endNext()
			p.drop(next)
			w := p.s.newWatch(pods, p.client, p.object.state.Namespace, m.selector, by)
			own, end := context.WithCancel(ctx)
			next, endNext = w, end
			p.s.add(w)
			wg.Go(func() { w.informer.RunWithContext(own) })
			wg.Go(func() {
				if cache.WaitForCacheSync(own.Done(), w.informer.HasSynced) {
					select {
					case synced <- w:
					case <-own.Done():
					}
				}
			})
		case w := <-synced:
			if w == next {
				promote()
			}
		}
	}
}
