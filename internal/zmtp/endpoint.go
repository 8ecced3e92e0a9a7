package zmtp

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"strconv"
	"strings"
)

// endpoint is a parsed tcp:// or ipc:// address in the form that package net
// takes.
type endpoint struct {
	network, address string
	wildcard         bool // tcp://*:port: every interface, only to bind
}

func parseEndpoint(s string) (endpoint, error) {
	if path, ok := strings.CutPrefix(s, "ipc://"); ok {
		if path == "" || path == "*" || strings.IndexByte(path, 0) >= 0 {
			return endpoint{}, fmt.Errorf("zmtp: endpoint %q: want ipc:// and a path", s)
		}
		return endpoint{network: "unix", address: path}, nil
	}
	rest, ok := strings.CutPrefix(s, "tcp://")
	if !ok {
		return endpoint{}, fmt.Errorf("zmtp: endpoint %q: want tcp://host:port or ipc://path", s)
	}
	host, port, err := net.SplitHostPort(rest)
	if err != nil {
		return endpoint{}, fmt.Errorf("zmtp: endpoint %q: %w", s, err)
	}
	if port == "*" {
		port = "0" // libzmq's other spelling of "any free port"
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || strconv.FormatUint(n, 10) != port {
		return endpoint{}, fmt.Errorf("zmtp: endpoint %q: port %q is not a number from 0 to 65535", s, port)
	}
	switch host {
	case "":
		return endpoint{}, fmt.Errorf("zmtp: endpoint %q: no host (use * to bind every interface)", s)
	case "*":
		return endpoint{network: "tcp", address: net.JoinHostPort("", port), wildcard: true}, nil
	}
	return endpoint{network: "tcp", address: net.JoinHostPort(host, port)}, nil
}

func dialEndpoint(ctx context.Context, s string, o *Options) (net.Conn, error) {
	ep, err := parseEndpoint(s)
	if err != nil {
		return nil, err
	}
	if ep.wildcard || strings.HasSuffix(ep.address, ":0") && ep.network == "tcp" {
		return nil, fmt.Errorf("zmtp: endpoint %q names no peer to dial", s)
	}
	d := net.Dialer{Timeout: o.DialTimeout}
	nc, err := d.DialContext(ctx, ep.network, ep.address)
	if err != nil {
		return nil, fmt.Errorf("zmtp: dial %s: %w", s, err)
	}
	return nc, nil
}

// listenEndpoint binds s and returns the endpoint that was really bound: the
// port is the chosen one, a wildcard host stays "*".
func listenEndpoint(ctx context.Context, s string) (net.Listener, string, error) {
	ep, err := parseEndpoint(s)
	if err != nil {
		return nil, "", err
	}
	if ep.network == "unix" {
		removeStaleSocket(ctx, ep.address)
	}
	var lc net.ListenConfig
	ln, err := lc.Listen(ctx, ep.network, ep.address)
	if err != nil {
		return nil, "", fmt.Errorf("zmtp: bind %s: %w", s, err)
	}
	if ep.network == "unix" {
		return ln, "ipc://" + ep.address, nil
	}
	host, port, err := net.SplitHostPort(ln.Addr().String())
	if err != nil {
		return nil, "", errors.Join(fmt.Errorf("zmtp: bind %s: %w", s, err), ln.Close())
	}
	if ep.wildcard {
		return ln, "tcp://*:" + port, nil
	}
	return ln, "tcp://" + net.JoinHostPort(host, port), nil
}

// removeStaleSocket unlinks a socket file that no process listens on, which a
// killed publisher leaves behind. A live socket, or any other kind of file, is
// left alone and makes the bind fail.
func removeStaleSocket(ctx context.Context, path string) {
	if strings.HasPrefix(path, "@") { // Linux abstract namespace: no file
		return
	}
	if st, err := os.Lstat(path); err != nil || st.Mode()&fs.ModeSocket == 0 {
		return
	}
	var d net.Dialer
	if nc, err := d.DialContext(ctx, "unix", path); err == nil {
		_ = nc.Close()
		return
	}
	_ = os.Remove(path) // a failure shows as "address already in use" at the bind
}

// peerName names the other end of nc for errors and logs.
func peerName(nc net.Conn) string {
	a := nc.RemoteAddr()
	if a == nil {
		return "unknown peer"
	}
	if a.Network() == "unix" {
		if s := a.String(); s != "" && s != "@" {
			return "ipc://" + s
		}
		return "ipc peer"
	}
	return "tcp://" + a.String()
}
