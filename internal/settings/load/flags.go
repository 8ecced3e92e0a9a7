package load

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/dynctl/dynctl/internal/settings"
)

// AddFlags adds a flag for every setting that has one, with its default.
func AddFlags(f *pflag.FlagSet) {
	defaults := settings.Default()
	for _, r := range settings.Rows() {
		if r.Flag == "" {
			continue
		}
		v := &flagValue{row: r, value: r.Get(&defaults)}
		switch v.Type() {
		case "bool":
			f.VarPF(v, r.Flag, "", r.Help).NoOptDefVal = "true"
		case "stringArray":
			f.VarPF(v, r.Flag, "", r.Help).DefValue = ""
		default:
			f.Var(v, r.Flag, r.Help)
		}
	}
	// Names that users of production-stack type; they mean the same.
	f.SetNormalizeFunc(func(_ *pflag.FlagSet, name string) pflag.NormalizedName {
		if name == "load-balancing-strategy" {
			name = "policy"
		}
		return pflag.NormalizedName(name)
	})
}

// flagValue is the value of a setting's flag. A wrong text is no error of the
// command line yet, so that all wrong settings are reported together.
type flagValue struct {
	row   *settings.Row
	value any
	set   bool
	err   error
}

// Set implements pflag.Value. Lists grow with every use.
func (v *flagValue) Set(text string) error {
	if list, ok := v.value.([]string); ok {
		if !v.set {
			list = nil
		}
		v.value, v.set = append(slices.Clone(list), text), true
		return nil
	}
	value, err := v.row.Parse(text)
	if v.set = true; err != nil {
		v.err = err
		return nil
	}
	v.value = value
	return nil
}

// String implements pflag.Value.
func (v *flagValue) String() string {
	if v == nil || v.value == nil {
		return ""
	}
	if list, ok := v.value.([]string); ok {
		return strings.Join(list, " ")
	}
	return fmt.Sprint(v.value)
}

// Type implements pflag.Value.
func (v *flagValue) Type() string {
	switch v.value.(type) {
	case []string:
		return "stringArray"
	case time.Duration:
		return "duration"
	}
	return fmt.Sprintf("%T", v.value)
}
