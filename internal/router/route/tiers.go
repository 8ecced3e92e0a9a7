package route

import "strconv"

// Tiers are blocks in the tiers of a cache outside the device, each counted once: in the
// memory of the host, on disk, in a store that other engines reach, too.
type Tiers struct {
	CPU    uint32 `json:"cpu_blocks,omitempty"`
	Disk   uint32 `json:"disk_blocks,omitempty"`
	Remote uint32 `json:"remote_blocks,omitempty"`
}

// Or has the greater of both in each tier.
func (t Tiers) Or(u Tiers) Tiers {
	return Tiers{CPU: max(t.CPU, u.CPU), Disk: max(t.Disk, u.Disk), Remote: max(t.Remote, u.Remote)}
}

// Titles are the headings of a table's columns for the tiers that are not 0.
func (t Tiers) Titles() (titles []string) {
	for i, n := range [...]uint32{t.CPU, t.Disk, t.Remote} {
		if n > 0 {
			titles = append(titles, [...]string{"CPU", "DISK", "REMOTE"}[i])
		}
	}
	return titles
}

// Cells are the figures of u below the Titles of t.
func (t Tiers) Cells(u Tiers) (cells []string) {
	for i, n := range [...]uint32{t.CPU, t.Disk, t.Remote} {
		if n > 0 {
			cells = append(cells, strconv.FormatUint(uint64([...]uint32{u.CPU, u.Disk, u.Remote}[i]), 10))
		}
	}
	return cells
}

// Scale returns the tiers by another measure: times mul, by div.
func (t Tiers) Scale(mul, div int) Tiers {
	by := func(n uint32) uint32 { return uint32(uint64(n) * uint64(mul) / uint64(div)) }
	return Tiers{CPU: by(t.CPU), Disk: by(t.Disk), Remote: by(t.Remote)}
}
