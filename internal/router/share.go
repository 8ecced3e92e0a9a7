package router

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/dynctl/dynctl/internal/router/placement/siblings"
	"github.com/dynctl/dynctl/internal/router/replicas"
	"github.com/dynctl/dynctl/internal/router/replicas/natsbus"
	"github.com/dynctl/dynctl/internal/settings"
)

// share exchanges load with the other routers until ctx ends.
func (r *Router) share(ctx context.Context) error {
	bus, err := r.openBus()
	if err != nil {
		return err
	}
	if at := bus.Addr(); at != nil {
		r.log.Info(fmt.Sprintf("%s shares its load with other routers on %s", r.siblings.Name(), at))
	}
	return errors.Join(r.siblings.Run(ctx, bus), bus.Close())
}

func (r *Router) openBus() (*natsbus.Bus, error) {
	c := &r.opts.Config.Replicas
	if url := c.Server(); url != "" {
		return natsbus.Dial(natsbus.Server{URL: url, TLS: r.secure.ReplicasTLS(true), Credentials: c.CredentialsFile})
	}
	password, err := readPassword(c.PasswordFile)
	if err != nil {
		return nil, err
	}
	return natsbus.Embed(natsbus.Cluster{
		Name: r.siblings.Name(), Listen: c.Listen, Routes: c.Routers, TLS: r.secure.ReplicasTLS(false), Password: password, Log: r.log,
	})
}

// maxPassword is the length in bytes of a file with a password.
const maxPassword = 4096

// readPassword reads the password that routers share; it is empty without a file.
func readPassword(path string) (string, error) {
	if path == "" {
		return "", nil
	}
	bad := func(err error) error { return &settings.Problem{Key: "replicas.password_file", Err: err} }
	f, err := os.Open(path)
	if err != nil {
		return "", bad(err)
	}
	defer f.Close()
	raw, err := io.ReadAll(io.LimitReader(f, maxPassword+1))
	if err != nil {
		return "", bad(err)
	}
	password := strings.TrimSpace(string(raw))
	switch {
	case len(raw) > maxPassword:
		return "", bad(fmt.Errorf("%s has more than %d bytes", path, maxPassword))
	case password == "":
		return "", bad(fmt.Errorf("%s is empty: write the password that all routers of the fleet share into it", path))
	}
	return password, nil
}

// ReplicaName is the name of a router with these settings among others: that of the settings,
// or one that no other process has. It is empty for a router alone.
func ReplicaName(c *settings.Replicas) (string, error) {
	if c.Name != "" || !c.On() {
		return c.Name, nil
	}
	host, err := os.Hostname()
	if err != nil {
		return "", fmt.Errorf("replicas.name is not set, and the host has no name: %w", err)
	}
	return clip(host + "-" + strings.ToLower(rand.Text()[:6])), nil
}

// identity is how other routers see this one.
func identity(o *Options, started time.Time) (replicas.Identity, error) {
	c, name := &o.Config.Replicas, o.ReplicaName
	if name == "" {
		var err error
		if name, err = ReplicaName(c); err != nil {
			return replicas.Identity{}, err
		}
	}
	version := cmp.Or(o.Version, "unknown")
	return replicas.Identity{
		Fleet: c.Fleet, Origin: name, Epoch: started, Version: clip(version), Settings: siblings.Digest(sections(&o.Config)),
	}, nil
}

// clip cuts a text to what a message holds.
func clip(s string) string { return strings.ToValidUTF8(s[:min(len(s), replicas.MaxText)], "") }

// alike are the sections of the settings that should be the same on all routers of a fleet.
var alike = []string{"routing", "tokens", "limits", "timeouts", "retry", "continue", "health", "aliases"}

// sections are those settings as text.
func sections(c *settings.Config) (list []siblings.Section) {
	for _, name := range alike {
		var text strings.Builder
		for _, row := range settings.Rows() {
			if section, _, _ := strings.Cut(row.Key, "."); section == name && row.Key != "routing.seed" {
				fmt.Fprintf(&text, "%s=%v\n", row.Key, row.Shown(c))
			}
		}
		list = append(list, siblings.Section{Name: name, Text: text.String()})
	}
	return list
}
