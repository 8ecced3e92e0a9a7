package workers

import (
	"errors"
	"fmt"
	"net"
	"net/url"
	"strconv"
	"strings"
)

// ParseURL reads the base URL of an engine: http or https, a host, an optional
// port and path; nothing else. The result has no trailing slash. It also lacks one /v1 at
// the end: base URLs of OpenAI clients have it, but the router adds it to each path.
func ParseURL(text string) (*url.URL, error) {
	if text == "" {
		return nil, errors.New("the URL is empty")
	}
	if len(text) > 2048 {
		return nil, fmt.Errorf("the URL is %d bytes long (at most 2048)", len(text))
	}
	shown := abbreviate(text)
	for _, r := range text {
		if r <= ' ' || r == 0x7f {
			return nil, fmt.Errorf("URL %q holds a space or a control character", shown)
		}
	}
	if !strings.Contains(text, "://") {
		return nil, fmt.Errorf("URL %q has no scheme (did you mean http://%s?)", shown, shown)
	}
	u, err := url.Parse(text)
	if err != nil {
		return nil, fmt.Errorf("URL %q: %w", shown, cause(err))
	}
	switch u.Scheme {
	case "http", "https":
	default:
		return nil, fmt.Errorf("URL %q: scheme %q is neither http nor https", shown, u.Scheme)
	}
	switch {
	case u.Opaque != "" || u.Hostname() == "":
		return nil, fmt.Errorf("URL %q has no host", shown)
	case u.User != nil:
		return nil, fmt.Errorf("the URL of host %s holds a user name or password (use api_key_file)", u.Host)
	case u.RawQuery != "" || u.ForceQuery:
		return nil, fmt.Errorf("URL %q has a query", shown)
	case u.Fragment != "" || strings.Contains(text, "#"):
		return nil, fmt.Errorf("URL %q has a fragment", shown)
	}
	if strings.HasSuffix(u.Host, ":") {
		return nil, fmt.Errorf("URL %q has an empty port", shown)
	}
	if strings.Contains(u.Hostname(), ":") && net.ParseIP(strings.SplitN(u.Hostname(), "%", 2)[0]) == nil {
		return nil, fmt.Errorf("URL %q: %q is no IPv6 address", shown, u.Hostname())
	}
	if p := u.Port(); p != "" {
		if _, err := ParsePort(p); err != nil {
			return nil, fmt.Errorf("URL %q: %w", shown, err)
		}
	}
	u.Host = strings.ToLower(u.Host)
	for _, path := range []*string{&u.Path, &u.RawPath} {
		*path = strings.TrimRight(strings.TrimSuffix(strings.TrimRight(*path, "/"), "/v1"), "/")
	}
	return u, nil
}

func cause(err error) error {
	if u, ok := errors.AsType[*url.Error](err); ok {
		return u.Err
	}
	return err
}

// DefaultName is the name of a worker that was given none: host:port, and the
// path if there is one.
func DefaultName(u *url.URL) string {
	port := u.Port()
	if port == "" {
		port = map[string]string{"http": "80", "https": "443"}[u.Scheme]
	}
	name := net.JoinHostPort(u.Hostname(), port) + strings.ReplaceAll(u.EscapedPath(), "/", ".")
	return strings.Map(func(r rune) rune {
		if validNameRune(r) {
			return r
		}
		return '_'
	}, name)
}

// ParsePort reads a port, 1 to 65535.
func ParsePort(s string) (int, error) {
	n, err := strconv.ParseUint(s, 10, 16)
	if err != nil || n == 0 {
		return 0, fmt.Errorf("%q is no port (1 to 65535)", s)
	}
	return int(n), nil
}

// splitTCP reads "tcp://host:port". The host may be "*" or empty, which stand
// for every address.
func splitTCP(endpoint string) (host string, port int, err error) {
	rest, ok := strings.CutPrefix(endpoint, "tcp://")
	if !ok {
		return "", 0, fmt.Errorf("endpoint %q does not begin with tcp://", endpoint)
	}
	host, p, err := net.SplitHostPort(rest)
	if err != nil {
		return "", 0, fmt.Errorf("endpoint %q is not tcp://host:port", endpoint)
	}
	if strings.ContainsAny(host, " \t\r\n/@,") {
		return "", 0, fmt.Errorf("endpoint %q: bad host %q", endpoint, host)
	}
	port, err = ParsePort(p)
	if err != nil {
		return "", 0, fmt.Errorf("endpoint %q: %w", endpoint, err)
	}
	return host, port, nil
}

// DialEndpoint is a publisher's ZeroMQ endpoint as the router reaches it: the
// hosts that stand for every address ("*", 0.0.0.0, ::) become the worker's
// own, and the port moves up by offset, as vLLM and SGLang do for each
// data-parallel rank.
func DialEndpoint(endpoint, workerHost string, offset int) (string, error) {
	host, port, err := splitTCP(endpoint)
	if err != nil {
		return "", err
	}
	if IsWildcardHost(host) {
		host = workerHost
	}
	return joinTCP(host, port+offset)
}

func joinTCP(host string, port int) (string, error) {
	if port > 65535 {
		return "", fmt.Errorf("port %d of a data-parallel rank is above 65535", port)
	}
	return "tcp://" + net.JoinHostPort(host, strconv.Itoa(port)), nil
}

// IsWildcardHost reports whether a host of an engine's answer stands for all
// of its addresses.
func IsWildcardHost(host string) bool {
	switch host {
	case "", "*", "0.0.0.0", "::", "[::]":
		return true
	}
	return false
}

// rankEndpoints spreads stated endpoints over the ranks: one entry is a base
// whose port counts up with the rank, several are one for each rank.
func rankEndpoints(stated []string, start, ranks int, host string, bind bool) ([]string, error) {
	if len(stated) == 0 {
		return nil, nil
	}
	if len(stated) != 1 && len(stated) != ranks {
		return nil, fmt.Errorf("%d endpoints for %d data-parallel ranks (one, or one for each rank)", len(stated), ranks)
	}
	out := make([]string, ranks)
	for i := range out {
		base, offset := stated[0], start+i
		if len(stated) > 1 {
			base, offset = stated[i], 0
		}
		var err error
		if bind {
			var h string
			var p int
			if h, p, err = splitTCP(base); err == nil {
				out[i], err = joinTCP(h, p+offset)
			}
		} else {
			out[i], err = DialEndpoint(base, host, offset)
		}
		if err != nil {
			return nil, err
		}
	}
	return out, nil
}
