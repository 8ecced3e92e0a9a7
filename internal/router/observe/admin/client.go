package admin

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"
)

// maxAnswer bounds an answer of the admin API.
const maxAnswer = 64 << 20

// Client calls the admin API of one router. It is safe for concurrent use.
type Client struct {
	base  string
	token string
	http  *http.Client
}

// UnreachableError says that no router answered.
type UnreachableError struct {
	URL string
	Err error
}

// Error names the address and what to check.
func (e *UnreachableError) Error() string {
	return fmt.Sprintf("no router answers at %s: %v (is it running, and is this its --admin-listen address?)", e.URL, e.Err)
}

// Unwrap is the cause.
func (e *UnreachableError) Unwrap() error { return e.Err }

// StatusError is an answer that is not 2xx.
type StatusError struct {
	Status  int
	Code    string
	Message string
	token   bool // one was sent
}

// Error is the router's own message.
func (e *StatusError) Error() string {
	switch e.Status {
	case http.StatusUnauthorized:
		if e.token {
			return "the router does not accept the token of --token-file (" + e.Message + ")"
		}
		return "the router requires a token: give --token-file (" + e.Message + ")"
	case http.StatusNotFound:
		if e.Message == "" {
			return "not found: this router may be older than this dynctl"
		}
	}
	if e.Message == "" {
		return fmt.Sprintf("the router answered %d %s", e.Status, http.StatusText(e.Status))
	}
	return e.Message
}

// dataPlaneCode is what a router's data plane answers to a path of the admin API.
const dataPlaneCode = "admin_path"

// DataPlaneError says that the address is the data plane of a router.
type DataPlaneError struct {
	URL string
	// Admin is where its admin API answers; empty when it was not found.
	Admin string
}

// Error says where the admin API is.
func (e *DataPlaneError) Error() string {
	if e.Admin != "" {
		return fmt.Sprintf("%s is the data plane of a router; the admin API is at %s: give --router %s", e.URL, e.Admin, e.Admin)
	}
	return fmt.Sprintf("%s is the data plane of a router; the admin API is at the address of its --admin-listen (port %s by default): give that one", e.URL, defaultPort)
}

// EngineError says that an engine answers where a router's admin API was expected.
type EngineError struct {
	URL string
	// Models are what it serves.
	Models []string
}

// Error says what to give instead.
func (e *EngineError) Error() string {
	return fmt.Sprintf("%s is an engine (it serves %s), not a router: give --router the address of the router's admin API (port %s by default), or try dynctl doctor --worker %s", e.URL, strings.Join(e.Models, ", "), defaultPort, e.URL)
}

// engineModels returns the models of the engine that answers at the client's address; none
// where no engine does.
func (c *Client) engineModels(ctx context.Context) (models []string) {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.base+"/v1/models", nil)
	if err != nil {
		return nil
	}
	resp, err := c.http.Do(req) // without the router's token, which is not the engine's
	if err != nil {
		return nil
	}
	defer resp.Body.Close()
	var list struct {
		Data []struct {
			ID string `json:"id"`
		} `json:"data"`
	}
	if resp.StatusCode != http.StatusOK || json.NewDecoder(io.LimitReader(resp.Body, 1<<20)).Decode(&list) != nil {
		return nil
	}
	for _, m := range list.Data[:min(len(list.Data), 8)] {
		if m.ID != "" {
			models = append(models, m.ID)
		}
	}
	return models
}

// defaultPort is that of a router's admin API, unless it is set otherwise.
const defaultPort = "8001"

// adminBeside looks for the admin API of the router whose data plane was asked: on
// the default port, and on the one after the data plane's. It is the right one when
// it says that its data plane has that port.
func (c *Client) adminBeside(ctx context.Context) string {
	u, err := url.Parse(c.base)
	if err != nil {
		return ""
	}
	port, err := strconv.Atoi(u.Port())
	if err != nil {
		return ""
	}
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	for _, p := range []string{defaultPort, strconv.Itoa(port + 1)} {
		base := u.Scheme + "://" + net.JoinHostPort(u.Hostname(), p)
		resp, err := c.send(ctx, http.MethodGet, base+"/admin/v1/status", nil)
		if err != nil {
			continue
		}
		var s Status
		err = json.NewDecoder(io.LimitReader(resp.Body, maxAnswer)).Decode(&s)
		resp.Body.Close()
		if _, its, split := net.SplitHostPort(s.Listen); err == nil && split == nil && its == u.Port() {
			return base
		}
	}
	return ""
}

// Options say how a router is called.
type Options struct {
	// TokenFile holds the bearer token; empty for none.
	TokenFile string
	// TLS is how a router with an https URL is spoken to; nil for the system's roots.
	TLS *tls.Config
}

// NewClient makes a client for a router's admin address: a URL, or HOST:PORT
// for http.
func NewClient(router string, o Options) (*Client, error) {
	if !strings.Contains(router, "://") {
		router = "http://" + router
	}
	u, err := url.Parse(router)
	if err != nil || u.Host == "" || (u.Scheme != "http" && u.Scheme != "https") {
		return nil, fmt.Errorf("router %q is not a URL such as http://127.0.0.1:8001", router)
	}
	c := &Client{base: strings.TrimRight(u.Scheme+"://"+u.Host+u.Path, "/")}
	if o.TokenFile != "" {
		raw, err := os.ReadFile(o.TokenFile)
		if err != nil {
			return nil, fmt.Errorf("token file: %w", err)
		}
		c.token = strings.TrimSpace(string(raw))
	}
	c.http = &http.Client{Transport: &http.Transport{
		DialContext:           (&net.Dialer{Timeout: 3 * time.Second}).DialContext,
		TLSClientConfig:       o.TLS,
		ResponseHeaderTimeout: 40 * time.Second,
		MaxIdleConnsPerHost:   4,
		IdleConnTimeout:       time.Minute,
	}}
	return c, nil
}

// URL is the base address of the router's admin API.
func (c *Client) URL() string { return c.base }

// Close drops idle connections.
func (c *Client) Close() { c.http.CloseIdleConnections() }

func (c *Client) call(ctx context.Context, method, path string, query url.Values, in, out any) error {
	target := c.base + path
	if len(query) > 0 {
		target += "?" + query.Encode()
	}
	var body io.Reader
	if in != nil {
		raw, err := json.Marshal(in)
		if err != nil {
			return err
		}
		body = bytes.NewReader(raw)
	}
	resp, err := c.send(ctx, method, target, body)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	raw, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer+1))
	if err != nil {
		return &UnreachableError{URL: c.base, Err: err}
	}
	if len(raw) > maxAnswer {
		return fmt.Errorf("%s %s: the answer is larger than %d bytes", method, path, maxAnswer)
	}
	if resp.StatusCode/100 != 2 {
		e := c.statusError(resp.StatusCode, raw)
		if e.Code == dataPlaneCode {
			return &DataPlaneError{URL: c.base, Admin: c.adminBeside(ctx)}
		}
		if e.Status == http.StatusNotFound && e.Code == "" { // a router's have a code
			if models := c.engineModels(ctx); len(models) > 0 {
				return &EngineError{URL: c.base, Models: models}
			}
		}
		return e
	}
	if out == nil {
		return nil
	}
	if err := json.Unmarshal(raw, out); err != nil {
		return fmt.Errorf("%s%s does not answer like a dynctl router: %w", c.base, path, err)
	}
	return nil
}

// send sends a request; what it returns must be closed.
func (c *Client) send(ctx context.Context, method, target string, body io.Reader) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, target, body)
	if err != nil {
		return nil, err
	}
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	if c.token != "" {
		req.Header.Set("Authorization", "Bearer "+c.token)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		if ctx.Err() != nil && !errors.Is(ctx.Err(), context.DeadlineExceeded) {
			return nil, ctx.Err()
		}
		var ue *url.Error
		if errors.As(err, &ue) {
			err = ue.Err
		}
		return nil, &UnreachableError{URL: c.base, Err: err}
	}
	return resp, nil
}

// statusError makes an error of an answer's body.
func (c *Client) statusError(status int, raw []byte) *StatusError {
	e := &StatusError{Status: status, token: c.token != ""}
	var p Problem
	if json.Unmarshal(raw, &p) == nil {
		e.Code, e.Message = p.Error.Code, p.Error.Message
	} else if text := strings.TrimSpace(string(raw)); text != "" && len(text) < 200 && utf8.ValidString(text) {
		// Of a proxy, or of a server that speaks TLS only.
		e.Message = fmt.Sprintf("the router answered %d %s: %s", status, http.StatusText(status), text)
	}
	return e
}

// segment is a name as one segment of a path. Escaped dots are no path of their own, so
// that "." and ".." reach the router, which would otherwise see another path.
func segment(name string) string {
	if name == "." || name == ".." {
		return strings.ReplaceAll(name, ".", "%2E")
	}
	return url.PathEscape(name)
}

// Stream follows what the router records, until the context ends or the caller
// closes it.
func (c *Client) Stream(ctx context.Context) (io.ReadCloser, error) {
	resp, err := c.send(ctx, http.MethodGet, c.base+"/admin/v1/stream", nil)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode/100 != 2 {
		defer resp.Body.Close()
		raw, _ := io.ReadAll(io.LimitReader(resp.Body, 64<<10)) // the status says enough
		return nil, c.statusError(resp.StatusCode, raw)
	}
	return resp.Body, nil
}

// Status asks for the router at one glance.
func (c *Client) Status(ctx context.Context) (*Status, error) {
	return get[Status](ctx, c, "/admin/v1/status", nil)
}

// Workers lists the fleet.
func (c *Client) Workers(ctx context.Context) (*WorkerList, error) {
	return get[WorkerList](ctx, c, "/admin/v1/workers", nil)
}

// Ranks lists the ranks of all workers.
func (c *Client) Ranks(ctx context.Context) (*RankList, error) {
	return get[RankList](ctx, c, "/admin/v1/ranks", nil)
}

// AddWorker adds a worker and answers with its description.
func (c *Client) AddWorker(ctx context.Context, a AddWorker) (*Worker, error) {
	return fetch[Worker](ctx, c, http.MethodPost, "/admin/v1/workers", nil, a)
}

// RemoveWorker removes a worker that was added by the admin API or a flag.
func (c *Client) RemoveWorker(ctx context.Context, name string) error {
	return c.call(ctx, http.MethodDelete, "/admin/v1/workers/"+segment(name), nil, nil, nil)
}

// DrainWorker stops new requests to a worker; its streams continue.
func (c *Client) DrainWorker(ctx context.Context, name string) (*Worker, error) {
	return fetch[Worker](ctx, c, http.MethodPost, "/admin/v1/workers/"+segment(name)+"/drain", nil, nil)
}

// MoveStreams drains a worker and has its streams continue elsewhere, those that can.
func (c *Client) MoveStreams(ctx context.Context, name string) (*Worker, error) {
	return fetch[Worker](ctx, c, http.MethodPost, "/admin/v1/workers/"+segment(name)+"/move", nil, nil)
}

// ResumeWorker ends a drain.
func (c *Client) ResumeWorker(ctx context.Context, name string) (*Worker, error) {
	return fetch[Worker](ctx, c, http.MethodPost, "/admin/v1/workers/"+segment(name)+"/resume", nil, nil)
}

// Decisions lists receipts, newest first. filter is as in the API's
// documentation ("path=remote worker=d0 status>=500"); cursor is Next of the
// answer before.
func (c *Client) Decisions(ctx context.Context, limit int, filter, cursor string) (*DecisionList, error) {
	return c.decisions(ctx, url.Values{"limit": {strconv.Itoa(limit)}}, filter, cursor)
}

// DecisionsBrief is Decisions with receipts whose lists of candidates are left
// out (the API's parameter brief=true): what a list on a screen needs, at a small
// part of the cost.
func (c *Client) DecisionsBrief(ctx context.Context, limit int, filter, cursor string) (*DecisionList, error) {
	return c.decisions(ctx, url.Values{"limit": {strconv.Itoa(limit)}, "brief": {"true"}}, filter, cursor)
}

func (c *Client) decisions(ctx context.Context, q url.Values, filter, cursor string) (*DecisionList, error) {
	if filter != "" {
		q.Set("filter", filter)
	}
	if cursor != "" {
		q.Set("cursor", cursor)
	}
	return get[DecisionList](ctx, c, "/admin/v1/decisions", q)
}

// Decision finds one receipt by decision id or request id.
func (c *Client) Decision(ctx context.Context, id string) (json.RawMessage, error) {
	if id == "" { // would be another path
		return nil, &StatusError{Status: http.StatusNotFound, Code: "decision_not_found", Message: "an empty id names no decision or request"}
	}
	r, err := get[json.RawMessage](ctx, c, "/admin/v1/decisions/"+segment(id), nil)
	if err != nil {
		return nil, err
	}
	return *r, nil
}

// IndexStats asks for the index's figures, rank by rank.
func (c *Client) IndexStats(ctx context.Context) (*IndexStats, error) {
	return get[IndexStats](ctx, c, "/admin/v1/index/stats", nil)
}

// BrowseQuery chooses children of a node of the radix tree; zero fields take
// the router's defaults.
type BrowseQuery struct {
	Node, Sort, Rank string
	Limit, MinDepth  int
	// Flat asks for the runs of the whole tree with most hits; only Limit goes with it.
	Flat bool
}

// IndexChildren lists the runs below a node; Node "" is the root.
func (c *Client) IndexChildren(ctx context.Context, b BrowseQuery) (*IndexChildren, error) {
	q := url.Values{}
	for k, v := range map[string]string{"node": b.Node, "sort": b.Sort, "rank": b.Rank} {
		if v != "" {
			q.Set(k, v)
		}
	}
	if b.Limit > 0 {
		q.Set("limit", strconv.Itoa(b.Limit))
	}
	if b.Flat {
		q.Set("flat", "true")
	}
	if b.MinDepth > 0 {
		q.Set("min_depth", strconv.Itoa(b.MinDepth))
	}
	return get[IndexChildren](ctx, c, "/admin/v1/index/children", q)
}

// Events lists up to limit events, oldest first: those that follow a sequence
// number, or with 0 the newest. With wait above 0 the answer may take that long,
// up to 30 s, until there is one.
func (c *Client) Events(ctx context.Context, after uint64, limit int, wait time.Duration) (*EventList, error) {
	q := url.Values{"limit": {strconv.Itoa(limit)}}
	if after > 0 {
		q.Set("after", strconv.FormatUint(after, 10))
	}
	if wait > 0 {
		q.Set("wait", wait.String())
	}
	return get[EventList](ctx, c, "/admin/v1/events", q)
}

// Snapshot asks for all that a screen shows; decisions and events bound the
// two lists, after is the newest event that the caller knows.
func (c *Client) Snapshot(ctx context.Context, decisions, events int, after uint64) (*Snapshot, error) {
	return get[Snapshot](ctx, c, "/admin/v1/snapshot", url.Values{
		"decisions": {strconv.Itoa(decisions)}, "events": {strconv.Itoa(events)}, "after": {strconv.FormatUint(after, 10)},
	})
}

// SnapshotBrief is Snapshot with brief receipts, see DecisionsBrief.
func (c *Client) SnapshotBrief(ctx context.Context, decisions, events int, after uint64) (*Snapshot, error) {
	return get[Snapshot](ctx, c, "/admin/v1/snapshot", url.Values{
		"decisions": {strconv.Itoa(decisions)}, "events": {strconv.Itoa(events)}, "after": {strconv.FormatUint(after, 10)}, "brief": {"true"},
	})
}

// Replay does "pause", "play", "toggle", "step", "back", "faster", "slower" or "seek"
// with a recording that is shown. to is where "seek" goes: a time such as "90s", one from
// here such as "+10s", a share such as "50%", or "end".
func (c *Client) Replay(ctx context.Context, do, to string) (*Replay, error) {
	q := url.Values{"do": {do}}
	if to != "" {
		q.Set("to", to)
	}
	return fetch[Replay](ctx, c, http.MethodPost, "/admin/v1/replay", q, nil)
}

// Route asks what would be decided for a request now.
func (c *Client) Route(ctx context.Context, r RouteRequest) (*RouteAnswer, error) {
	return fetch[RouteAnswer](ctx, c, http.MethodPost, "/admin/v1/route", nil, r)
}

// Config asks for the effective configuration.
func (c *Client) Config(ctx context.Context) (*ConfigView, error) {
	return get[ConfigView](ctx, c, "/admin/v1/config", nil)
}

// SetConfig changes settings of the running router, all or none.
func (c *Client) SetConfig(ctx context.Context, settings map[string]any) (*ConfigView, error) {
	return fetch[ConfigView](ctx, c, http.MethodPost, "/admin/v1/config", nil, ConfigPatch{settings})
}

// Drain makes the router stop: no new requests, running streams finish within
// the timeout; 0 stands for timeouts.drain.
func (c *Client) Drain(ctx context.Context, timeout time.Duration) error {
	return c.call(ctx, http.MethodPost, "/admin/v1/drain", nil, DrainRequest{timeout.Seconds()}, nil)
}

func get[T any](ctx context.Context, c *Client, path string, q url.Values) (*T, error) {
	return fetch[T](ctx, c, http.MethodGet, path, q, nil)
}

func fetch[T any](ctx context.Context, c *Client, method, path string, q url.Values, in any) (*T, error) {
	var v T
	if err := c.call(ctx, method, path, q, in, &v); err != nil {
		return nil, err
	}
	return &v, nil
}
