package admin

import (
	"slices"
	"time"
)

// LastUsable reports whether no worker but the named one is usable in its role.
func LastUsable(ws []Worker, name string) bool {
	i := slices.IndexFunc(ws, func(w Worker) bool { return w.Name == name })
	return i >= 0 && !slices.ContainsFunc(ws, func(w Worker) bool { return w.Name != name && w.Usable && w.Role == ws[i].Role })
}

// Worker is one engine process (GET /admin/v1/workers).
type Worker struct {
	Name            string            `json:"name"`
	URL             string            `json:"url"`
	Engine          string            `json:"engine"`
	Version         string            `json:"version,omitempty"`
	Role            string            `json:"role"`
	Connector       string            `json:"connector,omitempty"`
	Models          []string          `json:"models"`
	LoRAs           []string          `json:"loras,omitempty"`
	Labels          map[string]string `json:"labels,omitempty"`
	DP              int               `json:"dp"`
	LB              string            `json:"lb,omitempty"`       // how the deployment's ranks lie behind ports
	DPStart         int               `json:"dp_start,omitempty"` // place of the first rank in the deployment
	BlockSizeTokens int               `json:"block_size_tokens"`
	MaxModelLen     int               `json:"max_model_len_tokens"`
	KVBlocks        int               `json:"kv_blocks_per_rank"` // engine blocks; 0 unknown
	CacheType       string            `json:"cache_dtype,omitempty"`
	KVCopies        string            `json:"kv_copies,omitempty"`
	KVLastBlock     string            `json:"kv_last_block,omitempty"` // "dropped": recomputed in every hit
	AttentionChunk  int               `json:"attention_chunk_tokens,omitempty"`
	KVHash          string            `json:"kv_hash,omitempty"`
	KVHashSeed      string            `json:"kv_hash_seed,omitempty"`
	Revision        string            `json:"revision,omitempty"`
	Slice           string            `json:"slice,omitempty"`
	From            map[string]string `json:"from,omitempty"` // where each fact comes from
	Source          string            `json:"source"`
	Origin          string            `json:"origin,omitempty"`
	Health          string            `json:"health"`
	Reason          string            `json:"reason,omitempty"`
	Since           time.Time         `json:"since,omitzero"`
	Draining        bool              `json:"draining"`
	Usable          bool              `json:"usable"`
	Conflict        string            `json:"conflict,omitempty"`
	// Troubles are what is wrong with it although it answers; that a rank is slow
	// stands with the rank.
	Troubles []Trouble `json:"troubles,omitempty"`
	// Ranks are one and more; absent in dynctl top, which lists them apart.
	Ranks []Rank `json:"ranks,omitempty"`
}

// Trouble is something wrong with a worker.
type Trouble struct {
	// Cause is "failing", "mute" or "small_cache".
	Cause string `json:"cause"`
	// Rank is the label of the rank that it is about; absent for the whole worker.
	Rank  string    `json:"rank,omitempty"`
	Text  string    `json:"text"`
	Since time.Time `json:"since"`
}

// WorkerList answers GET /admin/v1/workers.
type WorkerList struct {
	Schema   string    `json:"schema"`
	Now      time.Time `json:"now"`
	Revision uint64    `json:"fleet_revision"`
	Workers  []Worker  `json:"workers"`
}

// AddWorker is the body of POST /admin/v1/workers: the flag form of a worker.
type AddWorker struct {
	Role string `json:"role,omitempty"`
	Spec string `json:"spec"`
}
