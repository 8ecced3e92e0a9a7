package doctor

import "time"

// A slow machine gets more time to see that an engine is gone.
func init() { noticed = 15 * time.Second }
