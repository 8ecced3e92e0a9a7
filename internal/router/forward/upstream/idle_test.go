package upstream

import (
	"bufio"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/rig/external"
)

// certificate makes one for 127.0.0.1 that signs itself: files for servers, and
// roots for clients.
func certificate(t testing.TB) (certFile, keyFile string, roots *x509.CertPool) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	secret, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	certFile, keyFile = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	for file, block := range map[string]*pem.Block{certFile: {Type: "CERTIFICATE", Bytes: der}, keyFile: {Type: "PRIVATE KEY", Bytes: secret}} {
		if err := os.WriteFile(file, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	roots = x509.NewCertPool()
	roots.AddCert(cert)
	return certFile, keyFile, roots
}

// program runs a foreign server: its output by lines, and its input.
type program struct {
	in  io.Writer
	out *bufio.Reader
}

func start(t *testing.T, name string, args ...string) *program {
	t.Helper()
	cmd := exec.CommandContext(patience(t), name, args...)
	cmd.Stderr = t.Output()
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // killed
	})
	return &program{in: in, out: bufio.NewReader(out)}
}

func (p *program) say(t *testing.T, s string) {
	t.Helper()
	if _, err := io.WriteString(p.in, s); err != nil {
		t.Fatal(err)
	}
}

// awaitUnread waits until something has come over the unused connection, if
// one is kept.
func awaitUnread(t *testing.T, c *Client, leg *Leg) {
	t.Helper()
	kept := c.pool(leg.Base).idle
	for ctx := patience(t); len(kept) > 0 && kept[0].probe.Quiet(); runtime.Gosched() {
		if ctx.Err() != nil {
			t.Fatal("nothing comes over the unused connection")
		}
	}
}

// until reads lines up to one that begins with prefix, and gives its rest.
func (p *program) until(t *testing.T, prefix string) string {
	t.Helper()
	for {
		line, err := p.out.ReadString('\n')
		if err != nil {
			t.Fatalf("wait for %q: %v", prefix, err)
		}
		if rest, ok := strings.CutPrefix(line, prefix); ok {
			return strings.TrimSpace(rest)
		}
	}
}

// misbehaves is an https engine that does after its answer what the path asks
// for, and then says so. It answers with the number of the connection.
const misbehaves = `
import os, socket, ssl, struct, sys
cert, key, version = sys.argv[1:]
ctx = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
ctx.load_cert_chain(cert, key)
ctx.minimum_version = ctx.maximum_version = getattr(ssl.TLSVersion, version)
ln = socket.create_server(("127.0.0.1", 0))
print("port", ln.getsockname()[1], flush=True)
extra = b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n"
n = 0
def below(tls):
    return socket.socket(fileno=os.dup(tls.fileno()))
while True:
    raw, _ = ln.accept()
    try:
        tls = ctx.wrap_socket(raw, server_side=True)
        f, n = tls.makefile("rb"), n + 1
        while True:
            line = f.readline()
            if not line:
                break
            size = 0
            while (h := f.readline()) not in (b"\r\n", b""):
                if h.lower().startswith(b"content-length:"):
                    size = int(h.split(b":")[1])
            f.read(size)
            what = line.split()[1].decode().lstrip("/")
            answer = b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n%d" % n
            if what == "same-write":
                tls.sendall(answer + extra)
            elif what == "same-segment":
                tls.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)
                tls.sendall(answer)
                tls.sendall(extra)
                tls.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 0)
            else:
                tls.sendall(answer)
                sys.stdin.readline()  # until the client has it
            if what == "bytes":
                tls.sendall(extra)
            elif what == "one-byte":
                tls.sendall(b"H")
            elif what == "half-record":
                below(tls).send(b"\x17\x03\x03")
            elif what == "notify":
                try:
                    tls.settimeout(0.01)
                    tls.unwrap()
                except OSError:
                    pass
                print("done", what, flush=True)
                break
            elif what == "fin":
                below(tls).shutdown(socket.SHUT_WR)
            elif what == "reset":
                tls.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                f.close()
                tls.close()
                print("done", what, flush=True)
                break
            print("done", what, flush=True)
    except OSError as e:
        print("connection ended:", e, file=sys.stderr)
    finally:
        raw.close()
`

// What an https engine does to a connection that nobody uses is no client's
// business: neither do its bytes become the next answer, nor does its closing
// fail the next request. A connection to which nothing was done is used again.
func TestIdleTLSConnections(t *testing.T) {
	t.Parallel()
	py := external.Python(t, "ssl")
	cert, key, roots := certificate(t)
	for _, version := range []string{"TLSv1_2", "TLSv1_3"} {
		for _, does := range []string{"nothing", "bytes", "one-byte", "same-write", "same-segment", "half-record", "notify", "fin", "reset"} {
			t.Run(version+"/"+does, func(t *testing.T) {
				t.Parallel()
				p := start(t, py, "-c", misbehaves, cert, key, version)
				c := newClient(t, Options{IdleConn: time.Minute, TLS: func() *tls.Config { return &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12} }})
				leg := legTo(t, "https://127.0.0.1:"+p.until(t, "port "))
				leg.Path = "/" + does
				want := "1"
				for range 3 {
					if _, got := get(t, c, leg); got != want {
						t.Fatalf("got %q, want %q", got, want)
					}
					if !strings.HasPrefix(does, "same-") { // that has come with the answer
						p.say(t, "go on\n")
					}
					p.until(t, "done "+does)
					if does == "nothing" {
						continue
					}
					if !strings.HasPrefix(does, "same-") {
						awaitUnread(t, c, leg)
					}
					want = fmt.Sprint(int(want[0]-'0') + 1)
				}
			})
		}
	}
}

// Session tickets and key updates come over idle connections, too, and are no
// reason to give one up.
func TestIdleTLSConnectionSurvivesAKeyUpdate(t *testing.T) {
	t.Parallel()
	openssl, err := exec.LookPath("openssl")
	if _, promised := os.LookupEnv(external.PythonVariable); err != nil && !promised {
		t.Skip("needs openssl: ", err)
	} else if err != nil {
		t.Fatal("CI is to have openssl: ", err)
	}
	cert, key, roots := certificate(t)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := ln.Addr().String()
	_ = ln.Close()
	p := start(t, openssl, "s_server", "-accept", addr, "-cert", cert, "-key", key, "-tls1_3", "-naccept", "1")
	p.until(t, "ACCEPT")
	c := newClient(t, Options{IdleConn: time.Minute, TLS: func() *tls.Config { return &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12} }})
	leg := legTo(t, "https://"+addr)
	leg.Body = [][]byte{[]byte("{}\n")}
	for i := range 3 {
		answered := make(chan string, 1)
		go func() {
			_, body := get(t, c, leg)
			answered <- body
		}()
		p.until(t, "{}") // the request has arrived
		p.say(t, fmt.Sprintf("HTTP/1.1 200 OK\nContent-Length: 2\n\n%d\n", i))
		if got := <-answered; got != fmt.Sprintf("%d\n", i) {
			t.Fatalf("answer %d: %q", i, got)
		}
		if c.Idle() != 1 {
			t.Fatalf("%d connections are kept", c.Idle())
		}
		p.say(t, "K\n") // a key update that asks for another
		awaitUnread(t, c, leg)
	}
}
