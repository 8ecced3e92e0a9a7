package admin

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"
)

// What engines can be called for, in vLLM's words.
const (
	ResetPrefixCache = "reset_prefix_cache"
	StartProfile     = "start_profile"
	StopProfile      = "stop_profile"
	Sleep            = "sleep"
	WakeUp           = "wake_up"
	LoadAdapter      = "load_lora_adapter"
	UnloadAdapter    = "unload_lora_adapter"
)

// ControlActions lists what engines can be called for, in the order of the documentation.
func ControlActions() []string {
	return []string{ResetPrefixCache, StartProfile, StopProfile, Sleep, WakeUp, LoadAdapter, UnloadAdapter}
}

// How long a control call may take, for all workers together.
const (
	ControlTimeout    = time.Minute // where the call names no time
	MaxControlTimeout = 10 * time.Minute
)

// maxLevel is the deepest sleep that an engine has.
const maxLevel = 2

// ControlCall is POST /admin/v1/control/{action}: its action and its query.
type ControlCall struct {
	// Action is one of [ControlActions].
	Action string
	// Workers are the names of those to call; empty for all.
	Workers []string
	// Level is how deep engines sleep, "0" to "2"; empty for the engine's default.
	Level string
	// Tags are the parts of an engine that sleep or wake, such as "weights"; empty for all.
	Tags []string
	// Adapter is the name of a LoRA adapter, Path where engines find it.
	Adapter, Path string
	// Timeout is for all workers together.
	Timeout time.Duration
}

// Query is the call's query.
func (c *ControlCall) Query() url.Values {
	q := url.Values{}
	for name, list := range map[string][]string{
		"worker": c.Workers, "tag": c.Tags, "level": {c.Level}, "adapter": {c.Adapter}, "path": {c.Path}, "timeout": {c.Timeout.String()},
	} {
		if len(list) > 0 && list[0] != "" {
			q[name] = list
		}
	}
	return q
}

// ParseControl reads a call from its action and query. The error says what is wrong, and param
// where.
func ParseControl(action string, q url.Values) (c ControlCall, param string, err error) {
	c = ControlCall{Action: action, Workers: q["worker"], Tags: q["tag"], Level: q.Get("level"), Adapter: q.Get("adapter"), Path: q.Get("path"), Timeout: ControlTimeout}
	if !slices.Contains(ControlActions(), action) {
		return c, "action", fmt.Errorf("%q is no call to engines; use one of %s", action, strings.Join(ControlActions(), ", "))
	}
	takes := map[string]bool{"worker": true, "timeout": true}
	switch action {
	case Sleep:
		takes["level"], takes["tag"] = true, true
	case WakeUp:
		takes["tag"] = true
	case LoadAdapter:
		takes["adapter"], takes["path"] = true, true
	case UnloadAdapter:
		takes["adapter"] = true
	}
	for name, values := range q {
		switch {
		case !takes[name]:
			return c, name, fmt.Errorf("%s takes no %q", action, name)
		case slices.Contains(values, ""):
			return c, name, fmt.Errorf("%s is empty", name)
		case len(values) > 1 && name != "worker" && name != "tag":
			return c, name, fmt.Errorf("%s is stated twice", name)
		}
	}
	if t := q.Get("timeout"); t != "" {
		if c.Timeout, err = time.ParseDuration(t); err != nil || c.Timeout <= 0 || c.Timeout > MaxControlTimeout {
			return c, "timeout", fmt.Errorf("timeout=%q is not a duration up to %s", t, MaxControlTimeout)
		}
	}
	if n, err := strconv.ParseUint(c.Level, 10, 8); c.Level != "" && (err != nil || n > maxLevel || len(c.Level) != 1) {
		return c, "level", fmt.Errorf("level=%q is not a number from 0 to %d", c.Level, maxLevel)
	}
	if c.Adapter == "" && takes["adapter"] {
		return c, "adapter", fmt.Errorf("%s needs the name of an adapter", action)
	}
	if c.Path == "" && takes["path"] {
		return c, "path", fmt.Errorf("%s needs the path at which engines find the adapter", action)
	}
	return c, "", nil
}

// ControlAnswer answers POST /admin/v1/control/{action}.
type ControlAnswer struct {
	Schema string `json:"schema"`
	Action string `json:"action"`
	// Failed is how many of Workers did not do it, or may not have.
	Failed  int             `json:"failed"`
	Workers []ControlResult `json:"workers"`
}

// ControlResult is what one worker answered.
type ControlResult struct {
	Worker string `json:"worker"`
	OK     bool   `json:"ok"`
	// Status is that of the engine's answer; 0 without one.
	Status int `json:"status,omitempty"`
	// Message is the beginning of the engine's answer, or why it is missing.
	Message    string  `json:"message,omitempty"`
	DurationMS float64 `json:"duration_ms"`
}

// Control calls engines, and waits for the answers of all of them.
func (c *Client) Control(ctx context.Context, call ControlCall) (*ControlAnswer, error) {
	ctx, cancel := context.WithTimeout(ctx, call.Timeout+10*time.Second) // the router's own limit comes first
	defer cancel()
	patient, t := *c, c.http.Transport.(*http.Transport).Clone()
	t.ResponseHeaderTimeout = 0
	patient.http = &http.Client{Transport: t}
	defer patient.Close()
	return fetch[ControlAnswer](ctx, &patient, http.MethodPost, "/admin/v1/control/"+segment(call.Action), call.Query(), nil)
}
