package e2e

import (
	"bytes"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/router/observe/admin"
)

// blob reads a JSON document of an OCI layout.
func blob[T any](t *testing.T, dir, digest string) (v T) {
	t.Helper()
	path := filepath.Join(dir, "index.json")
	if digest != "" {
		path = filepath.Join(dir, "blobs", strings.Replace(digest, ":", "/", 1))
	}
	raw, err := os.ReadFile(path)
	if err == nil {
		err = json.Unmarshal(raw, &v)
	}
	if err != nil {
		t.Fatal(err)
	}
	return v
}

type imageIndex struct {
	Manifests []struct {
		Digest   string
		Platform struct{ OS, Architecture string }
	}
}

// TestImage: what scripts/image.sh makes is unpacked by tar, has CA roots and nothing
// that is not needed, and its binary serves under chroot as the image's user; that of
// the other architecture runs where qemu is.
func TestImage(t *testing.T) {
	need(t)
	dir := filepath.Join(t.TempDir(), "image")
	run(t, nil, "../scripts/image.sh", dir, "v1.2.3-test")
	top := blob[imageIndex](t, dir, "")
	platforms := blob[imageIndex](t, dir, top.Manifests[0].Digest)
	var names []string
	for _, m := range platforms.Manifests {
		names = append(names, m.Platform.OS+"/"+m.Platform.Architecture)
		t.Run(m.Platform.Architecture, func(t *testing.T) {
			manifest := blob[struct {
				Config struct{ Digest string }
				Layers []struct{ Digest string }
			}](t, dir, m.Digest)
			config := blob[struct {
				Architecture string
				Config       struct {
					User            string
					Entrypoint, Env []string
				}
			}](t, dir, manifest.Config.Digest)
			if config.Architecture != m.Platform.Architecture || config.Config.User != "65532:65532" || !slices.Equal(config.Config.Entrypoint, []string{"/dynctl"}) {
				t.Errorf("%+v", config)
			}
			root := t.TempDir()
			for _, l := range manifest.Layers {
				run(t, nil, "tar", "-xzf", filepath.Join(dir, "blobs", strings.Replace(l.Digest, ":", "/", 1)), "-C", root)
			}
			pem, err := os.ReadFile(filepath.Join(root, strings.TrimPrefix(config.Config.Env[0], "SSL_CERT_FILE=")))
			if pool := x509.NewCertPool(); err != nil || !pool.AppendCertsFromPEM(pem) || bytes.Count(pem, []byte("BEGIN")) < 100 {
				t.Errorf("CA roots: %d bytes, %v", len(pem), err)
			}
			switch {
			case m.Platform.Architecture == runtime.GOARCH:
				serveUnder(t, root)
			default:
				qemu, err := exec.LookPath(map[string]string{"arm64": "qemu-aarch64", "amd64": "qemu-x86_64"}[m.Platform.Architecture])
				if err != nil {
					t.Skipf("skipped: %v", err)
				}
				if out := run(t, nil, qemu, filepath.Join(root, "dynctl"), "version"); !bytes.Contains(out, []byte("v1.2.3-test")) {
					t.Errorf("version: %s", out)
				}
			}
		})
	}
	if !slices.Equal(names, []string{"linux/amd64", "linux/arm64"}) {
		t.Errorf("platforms %v", names)
	}
}

// serveUnder runs the image's binary with nothing but the image's files, as its user.
func serveUnder(t *testing.T, root string) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("skipped: chroot needs root")
	}
	if err := os.Chmod(root, 0o755); err != nil {
		t.Fatal(err)
	}
	under := []string{"--userspec=65532:65532", root, "/dynctl"}
	if out := run(t, nil, "chroot", append(under, "version")...); !bytes.Contains(out, []byte("v1.2.3-test")) {
		t.Errorf("version: %s", out)
	}
	data, adm := freeAddr(t), freeAddr(t)
	cmd := exec.Command("chroot", append(under, "serve", "--sim", "1p1d", "--listen", data, "--admin-listen", adm)...)
	var log bytes.Buffer
	cmd.Stderr, cmd.Stdout = &log, &log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Signal(os.Interrupt)
		if err := cmd.Wait(); err != nil {
			t.Errorf("serve ended with %v\n%s", err, log.String())
		}
	})
	c, err := admin.NewClient(adm, admin.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	r := &router{t: t, url: "http://" + data, metrics: "http://" + adm, admin: c}
	var models []string
	r.until("the image's router is ready", func() bool {
		st, err := r.admin.Status(t.Context())
		if err == nil {
			models = st.Models
		}
		return err == nil && st.State == "ready"
	})
	var l load
	if err := l.ask(r.url, models[0], 0, 0); err != nil {
		t.Error(err)
	}
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", cmd.Process.Pid))
	if err != nil || !bytes.Contains(status, []byte("Uid:\t65532\t65532")) {
		t.Errorf("it does not run as the image's user: %v\n%s", err, status)
	}
}
