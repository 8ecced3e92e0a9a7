package e2e

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/dynctl/dynctl/internal/rig/certtest"
	"github.com/dynctl/dynctl/internal/router/observe/admin"
)

// proxyLag is how long after a pod's change the Service still has it as before.
const proxyLag = time.Second

// deployment is the chart's Deployment on an API server. The test is its controller, the kubelets
// of its pods, each a process, and the Services in front of them.
type deployment struct {
	*cluster
	service service
	own     appsv1.Deployment
	pods    []*routerPod
	made    int
	hosts   string // the file that all pods have as /etc/hosts
	share   string // the name of the headless Service
}

// routerPod is one of its pods.
type routerPod struct {
	*router
	pod           *corev1.Pod
	template, ip  string
	under         []string
	dir           string // of its volumes
	restarts      int
	ready         bool
	leaves        time.Time     // when it was deleted; zero before
	probed        time.Time     // last
	inService     bool          // of the test
	changed       time.Time     // ready or leaving
	grace, period time.Duration // of its end, and between two probes
}

func (d *deployment) kubectl(args ...string) []byte {
	d.t.Helper()
	return run(d.t, nil, "kubectl", append([]string{"--kubeconfig", d.kubeconfig, "--namespace", d.namespace}, args...)...)
}

// helm installs or upgrades the chart.
func (d *deployment) helm(verb string, values ...string) {
	d.t.Helper()
	args := []string{"--kubeconfig", d.kubeconfig, "--namespace", d.namespace, verb, "dynctl", chart}
	for _, v := range append([]string{
		"image.repository=registry.example/dynctl", "image.tag=v1", "share.secret=routers", "settings.kubernetes.selector=app=engine",
		"settings.timeouts.leave=4s", "settings.timeouts.drain=20s", fmt.Sprintf("extraArgs={--kubeconfig=%s,--kube-namespace=%s}", d.kubeconfig, d.namespace),
	}, values...) {
		args = append(args, "--set", v)
	}
	run(d.t, nil, "helm", args...)
	if err := json.Unmarshal(d.kubectl("get", "deployment", "dynctl", "--output", "json"), &d.own); err != nil {
		d.t.Fatal(err)
	}
}

// until acts until a condition holds.
func (d *deployment) until(what string, ok func() bool) {
	d.t.Helper()
	end := time.Now().Add(3 * time.Minute)
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		d.kubelets()
		d.services()
		d.control()
		if ok() {
			return
		}
		if time.Now().After(end) {
			for _, p := range d.pods {
				s, err := p.admin.Status(d.t.Context())
				d.t.Logf("%s ready %v, leaves %v: %+v, %v", p.pod.Name, p.ready, p.leaves, s, err)
			}
			d.t.Fatalf("not in time: %s", what)
		}
		<-tick.C
	}
}

// control acts as the Deployment's controller, with its strategy.
func (d *deployment) control() {
	template, err := json.Marshal(d.own.Spec.Template)
	if err != nil {
		d.t.Fatal(err)
	}
	want := int(*d.own.Spec.Replicas)
	of := func(v *intstr.IntOrString, up bool) int {
		n, err := intstr.GetScaledValueFromIntOrPercent(v, want, up)
		if err != nil {
			d.t.Fatal(err)
		}
		return n
	}
	surge, unavailable := of(d.own.Spec.Strategy.RollingUpdate.MaxSurge, true), of(d.own.Spec.Strategy.RollingUpdate.MaxUnavailable, false)
	var fresh, old []*routerPod
	ready := 0
	for _, p := range d.pods {
		switch {
		case !p.leaves.IsZero():
			continue
		case p.template == string(template):
			fresh = append(fresh, p)
		default:
			old = append(old, p)
		}
		if p.ready {
			ready++
		}
	}
	switch {
	case len(fresh) < want && len(fresh)+len(old) < want+surge:
		d.start(string(template))
	case len(old) > 0 && ready > want-unavailable:
		d.end(old[0])
	case len(fresh) > want:
		d.end(fresh[len(fresh)-1])
	}
}

// start makes a pod of the template and runs it.
func (d *deployment) start(template string) {
	d.t.Helper()
	t := &d.own.Spec.Template
	p := &routerPod{
		pod:      &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("dynctl-%d", d.made), Labels: t.Labels, Annotations: t.Annotations}, Spec: *t.Spec.DeepCopy()},
		template: template, ip: d.address(), dir: d.t.TempDir(), under: withHosts(d.t, d.hosts),
		grace: time.Duration(*t.Spec.TerminationGracePeriodSeconds) * time.Second, period: time.Duration(t.Spec.Containers[0].ReadinessProbe.PeriodSeconds) * time.Second,
	}
	d.made++
	d.create(p.pod)
	d.mount(p)
	d.pods = append(d.pods, p)
	d.names()
	d.launch(p)
}

// mount writes what the volumes of a pod hold.
func (d *deployment) mount(p *routerPod) {
	d.t.Helper()
	for _, m := range p.pod.Spec.Containers[0].VolumeMounts {
		files := map[string][]byte{}
		i := slices.IndexFunc(p.pod.Spec.Volumes, func(v corev1.Volume) bool { return v.Name == m.Name })
		switch v := p.pod.Spec.Volumes[i]; {
		case v.ConfigMap != nil:
			var c corev1.ConfigMap
			d.get("configmaps", v.ConfigMap.Name, &c)
			for name, text := range c.Data {
				files[name] = []byte(text)
			}
		case v.Secret != nil:
			var s corev1.Secret
			d.get("secrets", v.Secret.SecretName, &s)
			files = s.Data
		}
		dir := filepath.Join(p.dir, m.MountPath)
		if err := os.MkdirAll(dir, 0o700); err != nil {
			d.t.Fatal(err)
		}
		for name, raw := range files {
			if err := os.WriteFile(filepath.Join(dir, name), raw, 0o600); err != nil {
				d.t.Fatal(err)
			}
		}
	}
}

func (d *deployment) get(resource, name string, into any) {
	d.t.Helper()
	if err := json.Unmarshal(d.kubectl("get", resource, name, "--output", "json"), into); err != nil {
		d.t.Fatal(err)
	}
}

// launch runs the pod's container: its arguments with the pod's own address and files.
func (d *deployment) launch(p *routerPod) {
	d.t.Helper()
	c := &p.pod.Spec.Containers[0]
	var words []string
	for _, a := range c.Args {
		for _, m := range c.VolumeMounts {
			a = strings.ReplaceAll(a, m.MountPath, filepath.Join(p.dir, m.MountPath))
		}
		for _, e := range c.Env {
			if e.ValueFrom != nil && e.ValueFrom.FieldRef.FieldPath == "metadata.name" {
				a = strings.ReplaceAll(a, "$("+e.Name+")", p.pod.Name)
			}
		}
		words = append(words, strings.ReplaceAll(a, "0.0.0.0", p.ip))
	}
	p.router = launch(d.t, p.ip+":8000", p.ip+":8001", admin.Options{TokenFile: filepath.Join(p.dir, "etc/dynctl/admin/token")}, slices.Concat(p.under, []string{built(d.t)}, words))
	p.ready, p.changed = false, time.Now()
	d.run(p.pod.Name, p.ip, false)
}

// end deletes a pod: its router gets SIGTERM.
func (d *deployment) end(p *routerPod) {
	d.t.Helper()
	d.remove(p.pod.Name, int64(p.grace/time.Second))
	p.leaves = time.Now()
	p.changed = p.leaves
	if err := p.process.Signal(syscall.SIGTERM); err != nil {
		d.t.Fatal(err)
	}
}

// kubelets probe the pods, restart those that have ended, and remove those that should.
func (d *deployment) kubelets() {
	for _, p := range slices.Clone(d.pods) {
		gone := false
		select {
		case <-p.ended:
			gone = true
		default:
		}
		switch {
		case gone && !p.leaves.IsZero():
			d.remove(p.pod.Name, 0)
			d.pods = slices.DeleteFunc(d.pods, func(q *routerPod) bool { return q == p })
			d.names()
			continue
		case gone:
			p.restarts++
			d.launch(p)
		case !p.leaves.IsZero() && time.Since(p.leaves) > p.grace:
			d.t.Errorf("%s did not end within %v", p.pod.Name, p.grace)
			p.kill()
			continue
		}
		if time.Since(p.probed) < p.period {
			continue
		}
		p.probed = time.Now()
		ready := false
		client := http.Client{Timeout: time.Second}
		if resp, err := client.Get(p.url + p.pod.Spec.Containers[0].ReadinessProbe.HTTPGet.Path); err == nil {
			resp.Body.Close()
			ready = resp.StatusCode == http.StatusOK
		}
		if ready != p.ready {
			p.ready, p.changed = ready, time.Now()
			d.run(p.pod.Name, p.ip, ready)
		}
	}
}

// services are the Service, which leaves out pods that are not ready or leave, a while later.
func (d *deployment) services() {
	var list []*router
	changed := false
	for _, p := range d.pods {
		if in := p.ready && p.leaves.IsZero(); in != p.inService && time.Since(p.changed) > proxyLag {
			p.inService, changed = in, true
		}
		if p.inService {
			list = append(list, p.router)
		}
	}
	if changed {
		d.service.set(list...)
	}
}

// names are the headless Service: all pods, ready or not, have its name.
func (d *deployment) names() {
	d.t.Helper()
	text := []byte("127.0.0.1 localhost\n")
	for _, p := range d.pods {
		text = fmt.Appendf(text, "%s %s\n", p.ip, d.share)
	}
	if err := os.WriteFile(d.hosts, text, 0o600); err != nil { // in its place: it is mounted
		d.t.Fatal(err)
	}
}

// settled reports whether all pods are of the template, ready, and each has the others' load.
func (d *deployment) settled() bool {
	template, err := json.Marshal(d.own.Spec.Template)
	if err != nil || len(d.pods) != int(*d.own.Spec.Replicas) {
		return false
	}
	for _, p := range d.pods {
		if !p.inService || !p.leaves.IsZero() || p.template != string(template) {
			return false
		}
		s, err := p.admin.Status(d.t.Context())
		if err != nil || s.Replicas == nil || s.Replicas.Live != len(d.pods)-1 {
			return false
		}
		for _, o := range s.Replicas.Routers {
			if o.State == "live" && o.Differs != "" {
				return false
			}
		}
	}
	return true
}

// TestKubernetesReplicas: the chart with routers that share their load, as helm installs it, with
// the test as Deployment controller and kubelet. An update, a scale-down and a scale-up under load
// lose no request, of clients that send each once. One of a killed router is answered when its
// client sends it again.
func TestKubernetesReplicas(t *testing.T) {
	c := newCluster(t, 109)
	for _, tool := range []string{"helm", "kubectl"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skipf("skipped: %v", err)
		}
	}
	d := &deployment{cluster: c, hosts: filepath.Join(t.TempDir(), "hosts"), share: "dynctl-share"}
	withHosts(t, d.hosts)
	for i, engine := range simulate(t, "4a")["aggregated"] {
		name, ip := fmt.Sprint("engine-", i), c.address()
		c.create(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"app": "engine"}},
			Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "engine", Image: "engine"}}}})
		c.front(ip+":8000", engine)
		c.run(name, ip, true)
	}
	ca := certtest.NewAuthority(t, "routers")
	cert, key := ca.Pair(t, d.share, time.Hour)
	d.kubectl("create", "secret", "generic", "routers", "--from-file=tls.crt="+cert, "--from-file=tls.key="+key, "--from-file=ca.crt="+ca.File(t))
	d.helm("install", "replicas=3")
	if got := bytes.TrimSpace(d.kubectl("get", "service", d.share, "--output", "jsonpath={.spec.clusterIP} {.spec.publishNotReadyAddresses}")); string(got) != "None true" {
		t.Fatalf("service %s: %s", d.share, got)
	}
	d.until("three routers know each other", d.settled)

	l := startRetrying(t, d.service.listen(t), 8)
	more := func(what string) {
		t.Helper()
		from := l.answered.Load()
		d.until("answers "+what, func() bool { return l.answered.Load() >= from+200 })
	}
	whole := func(what string) {
		t.Helper()
		more("after " + what)
		if n, cut := l.retries.Load(), l.cut.Load(); n+cut > 0 {
			t.Errorf("%s: %d requests had to be sent again, %d answers broke off", what, n, cut)
			l.retries.Store(0)
			l.cut.Store(0)
		}
	}
	more("before anything")
	made := d.made
	d.helm("upgrade", "replicas=3", "settings.routing.threshold=1024")
	d.until("all three are of the new settings", d.settled)
	if d.made != made+3 {
		t.Errorf("the update made %d pods", d.made-made)
	}
	whole("the update")
	d.helm("upgrade", "replicas=2", "settings.routing.threshold=1024")
	d.until("two are left", d.settled)
	whole("the scale-down")
	d.helm("upgrade", "replicas=4", "settings.routing.threshold=1024")
	d.until("there are four", d.settled)
	whole("the scale-up")

	d.pods[1].kill()
	d.until("the killed one is noticed", func() bool { return d.pods[1].restarts > 0 })
	d.until("it is back, under its name", d.settled)
	more("after the kill")
	l.stop()
	l.done.Wait()
	for _, f := range l.failed {
		t.Errorf("failed: %s", f)
	}
	if l.retries.Load()+l.cut.Load() == 0 {
		t.Error("no request met the killed router")
	}
	t.Logf("%d answers; %d requests were sent again before an answer and %d after one broke off, all after the kill", l.answered.Load(), l.retries.Load(), l.cut.Load())
}
