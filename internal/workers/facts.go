package workers

import (
	"reflect"
	"slices"
	"strconv"
	"strings"
)

// Facts are what a worker is. A [Spec] has those that an operator states, a [Learned] those
// that the engine reports, a [Worker] both together. The zero value of a field means not
// stated, not reported, or unknown.
type Facts struct {
	// The first fields, up to ChatTokens, are those that every decision reads of every worker.

	// Role is which phase the worker may run. One that neither a flag, a label (see
	// RoleLabels) nor the engine names is Aggregated.
	Role Role
	// BlockSize is the engine's KV block in tokens.
	BlockSize int
	// KVBlocks is the size of one rank's cache in engine blocks.
	KVBlocks int
	// MaxModelLen is the longest sequence in tokens.
	MaxModelLen int
	// Engine is the serving program. For Sim, Dialect says whose wire it speaks.
	Engine, Dialect Engine
	// Connector is how this worker moves KV.
	Connector Connector
	// Models are the names that the worker answers to. Stated ones must be among those
	// that the engine reports, where LoRA adapters come last.
	Models []string
	// Version is what the engine says of its own version; it cannot be stated.
	Version string
	// CacheType is the type of the cache's values in the words of vLLM's --kv-cache-dtype; it
	// cannot be stated.
	CacheType string
	// Revision names the rollout that the worker belongs to, and Slice its part of it.
	// Prefill and decode go together within a revision only, and within a slice where
	// they can.
	Revision, Slice string
	// ChatTokens names the tokens that the engine makes of a certain chat, as
	// their number and a hash ("37:9c…"); it cannot be stated. Engines in which it
	// differs have other chat templates or vocabularies.
	ChatTokens string

	// PoolBlocks is how many blocks one rank's pool has, which all its cache groups
	// share; it cannot be stated. With one group that is KVBlocks; with several KVBlocks
	// is less, what the pool holds of tokens that each group keeps.
	PoolBlocks int
	// KVCopies is how copies of a block count; empty for CopiesCounted.
	KVCopies KVCopies
	// LastBlock is what the engine does with a hit's last block; empty for LastBlockKept.
	LastBlock LastBlock
	// AttentionChunk is the size of a chunk of chunked attention in tokens.
	AttentionChunk int
	// KVHash is the algorithm by which vLLM names blocks (prefix_caching_hash_algo);
	// KVHashSeed is its PYTHONHASHSEED, empty without one.
	KVHash, KVHashSeed string
	// LB is how the ranks of the deployment lie behind ports.
	LB LB
	// TransferCheck is how strictly this worker's transfer parameters are judged; empty
	// for the router's own setting.
	TransferCheck TransferCheck
	// MaxBatchedTokens is the engine's prefill budget of one step in tokens.
	MaxBatchedTokens int
	// Bootstrap without a host means that of the worker's URL; a Worker's has one.
	Bootstrap *Bootstrap
	LMCache   *LMCacheDecoder
	// From says where facts come from: a flag, a line, a label, or a page of the engine
	// ("vllm:cache_config_info", "/server_info"). A Spec names only what does not come
	// from its Origin, a Worker all that is known.
	From map[Field]string
}

// complete fills what f does not have from n.
func (f *Facts) complete(n *Facts) {
	to, from := reflect.ValueOf(f).Elem(), reflect.ValueOf(n).Elem()
	for i := range to.NumField() {
		if to.Field(i).IsZero() {
			to.Field(i).Set(from.Field(i))
		}
	}
}

// Field names a fact about a worker in messages and in Facts.From.
type Field string

// The facts that can be stated and learned.
const (
	FieldEngine    Field = "engine"
	FieldVersion   Field = "version"
	FieldRole      Field = "role"
	FieldConnector Field = "connector"
	FieldCacheType Field = "cache_dtype"
	FieldModels    Field = "models"
	FieldModelLen  Field = "max_model_len"
	FieldDP        Field = "dp"
	FieldBlockSize Field = "block_size"
	FieldKVBlocks  Field = "kv_blocks"
	FieldBatched   Field = "max_batched_tokens"
	FieldEvents    Field = "events"
	FieldBootstrap Field = "bootstrap"
	FieldLabels    Field = "labels"
	FieldLMCache   Field = "lmcache"
	FieldAPIKey    Field = "api_key"
	FieldSource    Field = "source"
	FieldRevision  Field = "revision"
	FieldSlice     Field = "slice"
	FieldURL       Field = "url"
	// FieldChatTokens is how the engine tokenizes a chat.
	FieldChatTokens Field = "chat_tokens"
	// FieldTransferCheck is how the worker's transfer parameters are judged.
	FieldTransferCheck Field = "transfer_check"
	// FieldKVCopies is how the worker's events report copies of a block.
	FieldKVCopies Field = "kv_copies"
	// FieldLastBlock is what an engine does with the last block of a hit.
	FieldLastBlock Field = "kv_last_block"
	// FieldChunk is the size of a chunk of chunked attention.
	FieldChunk Field = "attention_chunk"
	// FieldKVHash and FieldKVHashSeed are how the engine names blocks.
	FieldKVHash     Field = "kv_hash"
	FieldKVHashSeed Field = "kv_hash_seed"
	// FieldLB is how ranks lie behind ports, FieldDPStart which is the first.
	FieldLB      Field = "lb"
	FieldDPStart Field = "dp_start"

	fieldConflict Field = "conflict"
)

// fact is the row of a fact: where it is, how it can be stated, and how it is compared
// and shown when it changes.
type fact struct {
	field Field
	// at points to it in Facts. of is what is compared of a Worker, where that is not
	// what at points to.
	at func(*Facts) any
	of func(*Worker) any
	// show is the value in words, "" when unknown or for none. Without it words, names
	// and numbers are shown as they are, and of the rest only that they changed.
	show func(*Worker) string
	// Spec.Set takes one of words, or a whole number up to most, for the key that is
	// called as the field. Without either it has a case there, or cannot be stated.
	words []string
	most  int
}

// facts are all that can change of a worker, in the order of messages.
var facts = []fact{
	{field: FieldEngine, at: func(f *Facts) any { return &f.Engine }, words: texts(VLLM, SGLang, TRTLLM, Sim),
		of: func(w *Worker) any { return [2]Engine{w.Engine, w.Dialect} }},
	{field: FieldVersion, at: func(f *Facts) any { return &f.Version }},
	{field: FieldRole, at: func(f *Facts) any { return &f.Role }, words: texts(Roles()...)},
	{field: FieldCacheType, at: func(f *Facts) any { return &f.CacheType }},
	{field: FieldConnector, at: func(f *Facts) any { return &f.Connector }, words: texts(Connectors()...)},
	{field: FieldModels, at: func(f *Facts) any { return &f.Models }, of: func(w *Worker) any {
		return struct {
			models, loras []string
			several       bool
		}{w.Models, w.LoRAs, w.Several}
	}, show: func(w *Worker) string { return strings.Join(w.Models, "+") }},
	{field: FieldModelLen, at: func(f *Facts) any { return &f.MaxModelLen }, most: 1<<31 - 1},
	{field: FieldDP, of: func(w *Worker) any { return len(w.Ranks) }, show: func(w *Worker) string { return count(len(w.Ranks)) }},
	{field: FieldBlockSize, at: func(f *Facts) any { return &f.BlockSize }, most: maxBlockTok},
	{field: FieldKVBlocks, at: func(f *Facts) any { return &f.KVBlocks }, most: 1<<31 - 1,
		of: func(w *Worker) any { return [2]int{w.KVBlocks, w.PoolBlocks} }},
	{field: FieldBatched, at: func(f *Facts) any { return &f.MaxBatchedTokens }, most: 1<<31 - 1},
	{field: FieldEvents, of: func(w *Worker) any { return w.Events }, show: func(w *Worker) string {
		if len(w.Events) == 0 {
			return "none"
		}
		return w.Events[0].Endpoint
	}},
	{field: FieldBootstrap, at: func(f *Facts) any { return &f.Bootstrap }},
	{field: FieldLabels, of: func(w *Worker) any { return w.Labels }},
	{field: FieldLMCache, at: func(f *Facts) any { return &f.LMCache }},
	{field: FieldAPIKey, of: func(w *Worker) any { return w.APIKey }},
	{field: FieldSource, of: func(w *Worker) any { return [2]string{w.Source, w.Origin} }, show: func(w *Worker) string { return w.Source }},
	{field: FieldRevision, at: func(f *Facts) any { return &f.Revision }},
	{field: FieldSlice, at: func(f *Facts) any { return &f.Slice }},
	{field: FieldChatTokens, at: func(f *Facts) any { return &f.ChatTokens }},
	{field: FieldTransferCheck, at: func(f *Facts) any { return &f.TransferCheck }, words: texts(TransferStrict, TransferReport)},
	{field: FieldKVCopies, at: func(f *Facts) any { return &f.KVCopies }, words: texts(CopiesCounted, CopiesSingle)},
	{field: FieldLastBlock, at: func(f *Facts) any { return &f.LastBlock }, words: texts(LastBlockKept, LastBlockDropped)},
	{field: FieldChunk, at: func(f *Facts) any { return &f.AttentionChunk }, most: maxChunkTok},
	{field: FieldKVHash, at: func(f *Facts) any { return &f.KVHash }, words: KVHashes()},
	{field: FieldKVHashSeed, at: func(f *Facts) any { return &f.KVHashSeed }},
	{field: FieldLB, at: func(f *Facts) any { return &f.LB }, words: texts(LBInternal, LBHybrid, LBExternal)},
	{field: FieldDPStart, of: func(w *Worker) any { return w.DPStart }, show: func(w *Worker) string { return strconv.Itoa(w.DPStart) }},
	{field: fieldConflict, of: func(w *Worker) any { return w.Conflict }},
}

func texts[T ~string](words ...T) []string {
	out := make([]string, len(words))
	for i, w := range words {
		out[i] = string(w)
	}
	return out
}

// in is the fact's value among f; only for one that has at.
func (x *fact) in(f *Facts) reflect.Value { return reflect.ValueOf(x.at(f)).Elem() }

// settable reports whether Spec.Set takes the fact by its row.
func (x *fact) settable() bool { return x.words != nil || x.most > 0 }

// set takes the text form of a settable fact.
func (x *fact) set(f *Facts, value string) error {
	if x.most > 0 {
		n, err := number(value, x.most)
		x.in(f).SetInt(int64(n))
		return err
	}
	word, err := oneOf(value, x.words...)
	x.in(f).SetString(word)
	return err
}

// check finds a value of a settable fact that did not come through set.
func (x *fact) check(f *Facts) error {
	if x.words != nil {
		return known(string(x.field), x.in(f).String(), x.words...)
	}
	if n := x.in(f).Int(); n < 0 || n > int64(x.most) {
		return errNumber
	}
	return nil
}

// value is what is compared of a worker.
func (x *fact) value(w *Worker) any {
	if x.of != nil {
		return x.of(w)
	}
	return x.in(&w.Facts).Interface()
}

// text is the fact in words, "" when unknown.
func (x *fact) text(w *Worker) string {
	switch {
	case x.show != nil:
		return x.show(w)
	case x.at == nil:
		return ""
	}
	switch v := x.in(&w.Facts); v.Kind() {
	case reflect.String:
		return v.String()
	case reflect.Int:
		return count(int(v.Int()))
	}
	return ""
}

// factNamed is the row of a fact, nil for no such fact.
func factNamed(f Field) *fact {
	if i := slices.IndexFunc(facts, func(x fact) bool { return x.field == f }); i >= 0 {
		return &facts[i]
	}
	return nil
}

func changedFields(old, now *Worker) []Field {
	var out []Field
	for i := range facts {
		if x := &facts[i]; !sameFact(x.value(old), x.value(now)) {
			out = append(out, x.field)
		}
	}
	return out
}

// sameFact takes nil and empty lists for the same.
func sameFact(a, b any) bool {
	va, vb := reflect.ValueOf(a), reflect.ValueOf(b)
	switch va.Kind() {
	case reflect.Slice, reflect.Map:
		if va.Len() == 0 && vb.Len() == 0 {
			return true
		}
	}
	return reflect.DeepEqual(a, b)
}

func count(n int) string {
	if n == 0 {
		return ""
	}
	return strconv.Itoa(n)
}
