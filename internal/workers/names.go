package workers

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Names are the operator's rules for the models that clients name. The names that workers
// serve come first, whatever these rules are.
type Names struct {
	// Aliases are further names of models: alias to the name that engines know. One
	// with a * in it is a pattern; see [IsPattern].
	Aliases map[string]string
	// Default is the model, or an alias of it, for requests that name no model, and for
	// those that name one which no worker serves and no alias matches; empty for none.
	Default string
	// Any has requests for names that no worker serves and no alias matches sent to engines,
	// which may resolve them: adapters that an engine loads on request.
	Any bool
}

// IsPattern reports whether an alias stands for all names of a form: each * in it matches
// any text, also an empty one, and everything else matches itself.
func IsPattern(alias string) bool { return strings.Contains(alias, "*") }

// CheckAlias returns what is wrong with one of the aliases.
func (n *Names) CheckAlias(alias string) error {
	target := n.Aliases[alias]
	_, chain := n.Aliases[target]
	switch {
	case alias == "" || target == "":
		return errors.New("an alias needs a name and a model")
	case strings.Contains(alias, "**"):
		return fmt.Errorf("model alias %q has ** in it; one * matches any text, so write it once", alias)
	case IsPattern(target):
		return fmt.Errorf("model alias %q is for %q: only the name of an alias may be a pattern, its model is one model", alias, target)
	case chain:
		return fmt.Errorf("model alias %q for %q, which is an alias itself", alias, target)
	}
	return nil
}

// CheckDefault returns what is wrong with the default model.
func (n *Names) CheckDefault() error {
	if n.Default == "" {
		return nil
	}
	if IsPattern(n.Default) {
		return fmt.Errorf("%q has a * in it: the default is one model, by its name or an alias of it", n.Default)
	}
	model, _ := n.alias(n.Default)
	if every, ok := n.Aliases["*"]; ok && every != model {
		return fmt.Errorf("%q contradicts the alias \"*\", which has %q answer for every unknown name: state the same model, or only one of the two", n.Default, every)
	}
	return nil
}

// Check returns all that is wrong with the names.
func (n *Names) Check() error {
	var errs []error
	for _, a := range slices.Sorted(maps.Keys(n.Aliases)) {
		errs = append(errs, n.CheckAlias(a))
	}
	if err := n.CheckDefault(); err != nil {
		errs = append(errs, fmt.Errorf("default model %w", err))
	}
	return errors.Join(errs...)
}

func (n *Names) equal(other *Names) bool {
	return n.Default == other.Default && n.Any == other.Any && maps.Equal(n.Aliases, other.Aliases)
}

// alias is the model that an alias with exactly this name stands for; the name itself where
// there is no such alias.
func (n *Names) alias(name string) (model string, found bool) {
	if target, ok := n.Aliases[name]; ok {
		return target, true
	}
	return name, false
}

// patterns are the aliases that are patterns, in the order in which they are tried: one
// with more characters besides its * comes first, then one with fewer *, then by name.
func (n *Names) patterns() []string {
	var list []string
	for a := range n.Aliases {
		if IsPattern(a) {
			list = append(list, a)
		}
	}
	stars := func(a string) int { return strings.Count(a, "*") }
	slices.SortFunc(list, func(a, b string) int {
		return cmp.Or(cmp.Compare(len(b)-stars(b), len(a)-stars(a)), cmp.Compare(stars(a), stars(b)), strings.Compare(a, b))
	})
	return list
}

// matches reports whether a pattern stands for a name.
func matches(pattern, name string) bool {
	parts := strings.Split(pattern, "*")
	first, last := parts[0], parts[len(parts)-1]
	if len(parts) == 1 {
		return name == pattern
	}
	if len(name) < len(first)+len(last) || !strings.HasPrefix(name, first) || !strings.HasSuffix(name, last) {
		return false
	}
	// What lies between must hold the parts in their order. The first place of each is as
	// good as any: it leaves the most to those that follow.
	name = name[len(first) : len(name)-len(last)]
	for _, part := range parts[1 : len(parts)-1] {
		i := strings.Index(name, part)
		if i < 0 {
			return false
		}
		name = name[i+len(part):]
	}
	return true
}

// Resolved is the model that serves a request.
type Resolved struct {
	// Model is the name by which engines know it. It is empty where a request names no
	// model and nothing says which one it is for. A worker need not serve it.
	Model string
	// Alias is the alias, or the pattern, that stands for it; empty where the request,
	// or the default, has the engines' name.
	Alias string
	// Default says that [Names.Default] chose it.
	Default bool
}

// Resolve finds the model for the name in a client's request, "" for a request that names
// none. A served model comes first, then an alias with exactly this name, then the most
// specific pattern that matches, then the default model. Without a name it is the default
// model, or else the only one that is served.
func (s *Snapshot) Resolve(name string) Resolved {
	if name == "" && s.names.Default == "" {
		return Resolved{Model: s.only}
	}
	if name != "" {
		if _, served := s.byModel[name]; served {
			return Resolved{Model: name}
		}
		if model, ok := s.names.alias(name); ok {
			return Resolved{Model: model, Alias: name}
		}
		for _, p := range s.patterns {
			if matches(p, name) {
				return Resolved{Model: s.names.Aliases[p], Alias: p}
			}
		}
		if s.names.Default == "" || s.names.Any {
			return Resolved{Model: name}
		}
	}
	r := Resolved{Model: s.Canonical(s.names.Default), Default: true}
	if r.Model != s.names.Default {
		r.Alias = s.names.Default
	}
	return r
}

// onlyModel is the only model that the workers serve, by the first name under which all of
// them serve it; empty when they serve none, or several. Adapters do not count: a request
// without a model means what they were made for. Several names of one model count once.
// Workers that have not reported their models yet are left out.
func onlyModel(list []*Worker) string {
	var names []string
	for _, w := range list {
		switch {
		case len(w.Models) == 0:
			continue
		case w.Several:
			return ""
		case names == nil:
			names = slices.Clone(w.Bases())
		default:
			names = slices.DeleteFunc(names, func(n string) bool { return !slices.Contains(w.Bases(), n) })
		}
		if len(names) == 0 {
			return ""
		}
	}
	if len(names) == 0 {
		return ""
	}
	return names[0]
}

// Bases are the names of what the worker serves that are no adapters. The list is shared:
// do not change it.
func (w *Worker) Bases() []string { return w.Models[:max(0, len(w.Models)-len(w.LoRAs))] }

// SameModel reports whether one worker can compute a part of a request for a model, and
// the other the rest: the model is the same base model to both, or an adapter of the same
// one. Without a model each worker takes its own default. Workers that have not reported
// their models go together with their like only.
func (w *Worker) SameModel(other *Worker, model string) bool {
	a, b := w.Bases(), other.Bases()
	switch {
	case len(a) == 0 || len(b) == 0:
		return len(a) == len(b)
	case model == "":
		return a[0] == b[0]
	}
	if in, too := slices.Contains(a, model), slices.Contains(b, model); in || too {
		return in && too
	}
	return slices.ContainsFunc(a, func(n string) bool { return slices.Contains(b, n) })
}
