package router

import conf "github.com/dynctl/dynctl/internal/settings"

// The settings by the names that they had in this package.
type (
	Config       = conf.Config
	Alias        = conf.Alias
	LimitsConfig = conf.Limits
	RetryConfig  = conf.Retry
	LogConfig    = conf.Log
)

// DefaultConfig is a config with every default in place.
func DefaultConfig() Config { return conf.Default() }
