package doctor

import (
	"fmt"
	"time"

	"github.com/dynctl/dynctl/internal/router/observe/admin"
)

// kubernetes reports whether the pods of a cluster are followed, and which are found
// and are no workers; k is nil where none are looked for.
func (e *exam) kubernetes(k *admin.Kubernetes) {
	if k == nil {
		return
	}
	lost := false
	for _, w := range k.Watches {
		subject := w.Namespace + " " + w.Selector
		switch {
		case w.Error != "":
			lost = true
			e.add("kubernetes", subject, Fail, "the pods are not followed since "+w.Since.Format(time.RFC3339)+": "+w.Error, "the workers stay as they were until then; docs/kubernetes.md has the rights that are needed")
		case !w.Synced:
			lost = true
			e.add("kubernetes", subject, Warn, "the pods were not listed yet", "")
		}
	}
	if !lost {
		e.add("kubernetes", k.Server, OK, fmt.Sprintf("%d pods are followed: %d workers, %d without an address yet", k.Pods, k.Workers, k.Waiting), "")
	}
	for _, p := range k.LeftOut {
		e.add("kubernetes", p.Pod, Warn, "a selector finds it, and it is no worker: "+p.Reason, "narrow the selector if that is right")
	}
	if more := k.LeftOutCount - len(k.LeftOut); more > 0 {
		e.add("kubernetes", k.Server, Warn, fmt.Sprintf("%d more pods are found and are no workers", more), "")
	}
}
