package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/dynctl/dynctl/internal/workers"
)

// A routerContext names one or several routers, so that their addresses need
// not be typed.
type routerContext struct {
	Name string `yaml:"name"`
	// Routers are admin URLs.
	Routers   []string `yaml:"routers"`
	TokenFile string   `yaml:"token_file"`
	// PEM files, as --tls-ca, --tls-cert and --tls-key.
	TLSCA   string `yaml:"tls_ca"`
	TLSCert string `yaml:"tls_cert"`
	TLSKey  string `yaml:"tls_key"`
}

// contextsFile is the file of the user's contexts:
//
//	current: prod            # used when neither --context nor --router is given
//	contexts:
//	  - name: prod
//	    routers: [http://10.0.0.1:8001, http://10.0.0.2:8001]
//	    token_file: ~/.config/dynctl/prod.token
//	    tls_ca: ~/.config/dynctl/ca.pem
type contextsFile struct {
	Current  string          `yaml:"current"`
	Contexts []routerContext `yaml:"contexts"`
}

// contextsPath is $DYNCTL_CONTEXTS, or contexts.yaml in the user's folder for
// configuration.
func contextsPath() string {
	if p := os.Getenv("DYNCTL_CONTEXTS"); p != "" {
		return p
	}
	dir := os.Getenv("XDG_CONFIG_HOME")
	if dir == "" {
		home, err := os.UserHomeDir()
		if err != nil {
			return ""
		}
		dir = filepath.Join(home, ".config")
	}
	return filepath.Join(dir, "dynctl", "contexts.yaml")
}

// readContexts reads the file; a file that does not exist holds no contexts.
func readContexts(path string) (*contextsFile, error) {
	c := &contextsFile{}
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) || path == "" {
		return c, nil
	}
	if err != nil {
		return nil, fmt.Errorf("contexts: %w", err)
	}
	defer f.Close()
	dec := yaml.NewDecoder(f)
	dec.KnownFields(true)
	if err := dec.Decode(c); err != nil {
		return nil, fmt.Errorf("contexts %s: %w", path, err)
	}
	seen := map[string]bool{}
	for i := range c.Contexts {
		x := &c.Contexts[i]
		switch {
		case x.Name == "":
			return nil, fmt.Errorf("contexts %s: context %d has no name", path, i+1)
		case seen[x.Name]:
			return nil, fmt.Errorf("contexts %s: %q stands twice", path, x.Name)
		case len(x.Routers) == 0:
			return nil, fmt.Errorf("contexts %s: %q has no routers", path, x.Name)
		}
		seen[x.Name] = true
		for _, file := range []*string{&x.TokenFile, &x.TLSCA, &x.TLSCert, &x.TLSKey} {
			if rest, ok := strings.CutPrefix(*file, "~/"); ok {
				home, err := os.UserHomeDir()
				if err != nil {
					return nil, fmt.Errorf("contexts %s: %w", path, err)
				}
				*file = filepath.Join(home, rest)
			}
		}
	}
	return c, nil
}

// find is the context with a name.
func (c *contextsFile) find(name, path string) (*routerContext, error) {
	var names []string
	for i := range c.Contexts {
		if c.Contexts[i].Name == name {
			return &c.Contexts[i], nil
		}
		names = append(names, c.Contexts[i].Name)
	}
	if len(names) == 0 {
		return nil, fmt.Errorf("there is no context %q: %s holds none", name, path)
	}
	err := fmt.Errorf("there is no context %q in %s; it holds %s", name, path, strings.Join(names, ", "))
	if near := workers.Nearest(name, names); near != "" {
		err = fmt.Errorf("%w; did you mean %q?", err, near)
	}
	return nil, err
}
