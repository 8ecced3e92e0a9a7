package cli

import (
	"cmp"
	"runtime"
	"runtime/debug"
)

// version is set by the release build (-ldflags -X); other builds have their commit.
var version = ""

// Version says which build of dynctl this is.
type Version struct {
	Version  string `json:"version"`
	Revision string `json:"revision"`
	Modified bool   `json:"modified"`
	Go       string `json:"go"`
	Platform string `json:"platform"`
}

// BuildVersion is the version of this binary.
func BuildVersion() Version {
	v := Version{Version: version, Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH}
	if info, ok := debug.ReadBuildInfo(); ok {
		v.Version = cmp.Or(v.Version, info.Main.Version)
		for _, s := range info.Settings {
			switch s.Key {
			case "vcs.revision":
				v.Revision = s.Value
			case "vcs.modified":
				v.Modified = s.Value == "true"
			}
		}
	}
	if v.Version == "" || v.Version == "(devel)" {
		v.Version = "devel"
	}
	return v
}

// String is the version in one line.
func (v Version) String() string {
	out := "dynctl " + v.Version
	if rev := v.Revision; rev != "" {
		rev = rev[:min(12, len(rev))]
		if v.Modified {
			rev += ", modified"
		}
		out += " (" + rev + ")"
	}
	return out + " " + v.Go + " " + v.Platform
}
