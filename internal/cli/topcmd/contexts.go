package topcmd

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/dynctl/dynctl/internal/cli"
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
			return nil, fmt.Errorf("contexts %s: %q appears twice", path, x.Name)
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

// access is how the context's routers are spoken to where flags do not say otherwise.
func (x *routerContext) access(flags cli.AccessFlags) cli.AccessFlags {
	flags.TokenFile, flags.CA = cmp.Or(flags.TokenFile, x.TokenFile), cmp.Or(flags.CA, x.TLSCA)
	if flags.Cert == "" && flags.Key == "" {
		flags.Cert, flags.Key = x.TLSCert, x.TLSKey
	}
	return flags
}

// namedRouters are the contexts that NAME=URL make, in their order; several of one name
// are replicas. Without a name there are none.
func namedRouters(routers []string) (list []routerContext, err error) {
	for _, r := range routers {
		name, url, named := strings.Cut(r, "=")
		if named = named && !strings.ContainsAny(name, "/:?"); !named {
			continue
		}
		if name == "" || url == "" {
			return nil, fmt.Errorf("--router %s: want URL or NAME=URL", r)
		}
		if i := slices.IndexFunc(list, func(x routerContext) bool { return x.Name == name }); i >= 0 {
			list[i].Routers = append(list[i].Routers, url)
			continue
		}
		list = append(list, routerContext{Name: name, Routers: []string{url}})
	}
	n := 0
	for _, x := range list {
		n += len(x.Routers)
	}
	if n > 0 && n < len(routers) {
		return nil, errors.New("--router: give every router a name (NAME=URL), or none")
	}
	return list, nil
}

// allContexts are those of flags and then of the file, whose contexts of the same name
// they hide.
func allContexts(named []routerContext) (*contextsFile, error) {
	c, err := readContexts(contextsPath())
	if err != nil {
		return nil, err
	}
	all := &contextsFile{Current: c.Current, Contexts: slices.Clone(named)}
	for _, x := range c.Contexts {
		if !slices.ContainsFunc(named, func(y routerContext) bool { return y.Name == x.Name }) {
			all.Contexts = append(all.Contexts, x)
		}
	}
	return all, nil
}

func (c *contextsFile) names() []string {
	names := make([]string, len(c.Contexts))
	for i := range c.Contexts {
		names[i] = c.Contexts[i].Name
	}
	return names
}

// find is the context with a name.
func (c *contextsFile) find(name, path string) (*routerContext, error) {
	for i := range c.Contexts {
		if c.Contexts[i].Name == name {
			return &c.Contexts[i], nil
		}
	}
	names := c.names()
	if len(names) == 0 {
		return nil, fmt.Errorf("there is no context %q: %s holds none", name, path)
	}
	err := fmt.Errorf("there is no context %q in %s; it holds %s", name, path, strings.Join(names, ", "))
	if near := workers.Nearest(name, names); near != "" {
		err = fmt.Errorf("%w; did you mean %q?", err, near)
	}
	return nil, err
}
