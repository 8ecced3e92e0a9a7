package loopback

// Faults of engines, made on purpose.
const (
	Kill    = "kill"
	Restart = "restart"
	Refuse  = "refuse connections"
	Hang    = "hang"
	Slow    = "slow"
	Errors  = "5xx"
	Die     = "cut answers"
	Drop    = "drop events"
	Reorder = "reorder events"
	Corrupt = "corrupt events"
	Lose    = "lose events"
	Replay  = "drop replays"
)

// Shows are the events of a worker by which an operator finds each fault. A
// fault that nobody met shows nowhere: who makes one lets it last until it is
// felt.
var Shows = map[string][]string{
	Kill:    {"health_changed", "worker_failing", "worker_restarted", "feed_disconnected", "feed_restart"},
	Restart: {"health_changed", "worker_failing", "worker_restarted", "feed_disconnected", "feed_restart"},
	Refuse:  {"health_changed", "worker_failing", "outlier_ejected"},
	Hang:    {"health_changed", "worker_failing", "outlier_ejected"},
	Slow:    {"rank_slow", "worker_failing", "outlier_ejected", "health_changed"},
	Errors:  {"worker_failing", "worker_trouble", "outlier_ejected"},
	Die:     {"worker_failing", "worker_trouble", "outlier_ejected"},
	Drop:    {"feed_gap", "feed_unknown", "feed_stale", "worker_trouble"},
	Reorder: {"feed_gap", "feed_unknown", "feed_stale"},
	Corrupt: {"feed_gap", "feed_unknown", "feed_stale"},
	Lose:    {"feed_gap", "feed_unknown", "feed_stale"},
	Replay:  {"feed_gap", "feed_unknown", "feed_stale"},
}
