// Command image makes the container image of dynctl as an OCI layout: from scratch, with
// the binary and the CA roots that Mozilla trusts, for each platform that it is given a
// binary of. The same binaries, version and time make the same bytes.
//
//	go run . -o DIR -version V -created SECONDS linux/amd64=FILE linux/arm64=FILE
package main

import (
	"archive/tar"
	"bytes"
	"encoding/pem"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"golang.org/x/crypto/x509roots/fallback/bundle"
)

// nobody is the user and group of the process, those of deploy/.
const nobody = 65532

func main() {
	out := flag.String("o", "", "`DIR` for the layout; it must not exist")
	version := flag.String("version", "", "`VERSION` of the binaries")
	created := flag.Int64("created", 0, "time of the image and of its files, in `SECONDS` since 1970")
	flag.Parse()
	if err := write(*out, *version, time.Unix(*created, 0).UTC(), flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, "image:", err)
		os.Exit(1)
	}
}

func write(dir, version string, created time.Time, binaries []string) error {
	if dir == "" || version == "" || len(binaries) == 0 {
		return errors.New("name a folder with -o, a version, and binaries as OS/ARCH=FILE")
	}
	if _, err := os.Stat(dir); err == nil {
		return fmt.Errorf("%s is there already; remove it, or name another folder", dir)
	}
	base, err := layer(created, []file{
		{name: "etc/passwd", body: fmt.Appendf(nil, "dynctl:x:%d:%d::/:/\n", nobody, nobody)},
		{name: "etc/group", body: fmt.Appendf(nil, "dynctl:x:%d:\n", nobody)},
		{name: "etc/ssl/certs/ca-certificates.crt", body: roots()},
	})
	if err != nil {
		return err
	}
	index := mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
	for _, b := range binaries {
		platform, path, ok := strings.Cut(b, "=")
		system, arch, both := strings.Cut(platform, "/")
		if !ok || !both {
			return fmt.Errorf("%q is not OS/ARCH=FILE", b)
		}
		body, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		program, err := layer(created, []file{{name: "dynctl", body: body, program: true}})
		if err != nil {
			return err
		}
		image := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
		for _, l := range []v1.Layer{base, program} {
			if image, err = mutate.Append(image, mutate.Addendum{Layer: l, History: v1.History{Created: v1.Time{Time: created}, CreatedBy: "dynctl's .ci/image"}}); err != nil {
				return err
			}
		}
		config, err := image.ConfigFile()
		if err != nil {
			return err
		}
		config = config.DeepCopy()
		config.OS, config.Architecture, config.Created = system, arch, v1.Time{Time: created}
		config.Config = v1.Config{
			Entrypoint: []string{"/dynctl"}, Cmd: []string{"serve"}, User: fmt.Sprintf("%d:%d", nobody, nobody), WorkingDir: "/",
			Env:          []string{"SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt"},
			ExposedPorts: map[string]struct{}{"8000/tcp": {}, "8001/tcp": {}},
			Labels:       map[string]string{"org.opencontainers.image.title": "dynctl", "org.opencontainers.image.version": version},
		}
		if image, err = mutate.ConfigFile(image, config); err != nil {
			return err
		}
		index = mutate.AppendManifests(index, mutate.IndexAddendum{Add: image, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: system, Architecture: arch}}})
	}
	// The layout's own index names the image with all its platforms by its version.
	named := mutate.AppendManifests(empty.Index, mutate.IndexAddendum{Add: index, Descriptor: v1.Descriptor{
		Annotations: map[string]string{"org.opencontainers.image.ref.name": version},
	}})
	_, err = layout.Write(dir, mutate.IndexMediaType(named, types.OCIImageIndex))
	return err
}

// roots are the certificates that Mozilla trusts without a condition: those that it
// trusts for older certificates only are left out, since a file cannot say so.
func roots() []byte {
	var out bytes.Buffer
	for root := range bundle.Roots() {
		if root.Constraint == nil {
			_ = pem.Encode(&out, &pem.Block{Type: "CERTIFICATE", Bytes: root.Certificate}) // to memory
		}
	}
	return out.Bytes()
}

type file struct {
	name    string
	body    []byte
	program bool
}

// layer is a tar of files that everybody may read, with the folders they are in.
func layer(created time.Time, files []file) (v1.Layer, error) {
	var raw bytes.Buffer
	w := tar.NewWriter(&raw)
	made := map[string]bool{}
	for _, f := range files {
		for i, c := range f.name {
			if dir := f.name[:i] + "/"; c == '/' && !made[dir] {
				made[dir] = true
				if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: dir, Mode: 0o755, ModTime: created}); err != nil {
					return nil, err
				}
			}
		}
		mode := int64(0o644)
		if f.program {
			mode = 0o755
		}
		if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: f.name, Mode: mode, Size: int64(len(f.body)), ModTime: created}); err != nil {
			return nil, err
		}
		if _, err := w.Write(f.body); err != nil {
			return nil, err
		}
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	return tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(raw.Bytes())), nil }, tarball.WithMediaType(types.OCILayer))
}
