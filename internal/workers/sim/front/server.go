// Package front is the HTTP face of a simulated engine: vLLM's API (0.32) or
// SGLang's, in front of ranks that run in real time.
//
// Answers have the fields, the order and the errors of the real engine as far
// as clients and routers look at them. /sim/v1/faults, /sim/v1/restart and
// /sim/v1/exit are the simulator's own.
package front

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/dynctl/dynctl/internal/blockhash"
	"github.com/dynctl/dynctl/internal/wait"
	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/workers/sim/fault"
	"github.com/dynctl/dynctl/internal/workers/sim/vocab"
)

// Version is the engine version that the front claims, by dialect.
var Version = map[workers.Engine]string{workers.VLLM: "0.32.0", workers.SGLang: "0.5.23"}

// Source says where the events of one rank are.
type Source struct {
	Endpoint, Replay, Topic string
	Steps                   int
}

// Link is the side channel of one rank.
type Link struct {
	EngineID string
	Host     string
	Port     int
}

const (
	maxBody   = 256 << 20 // of a request, in bytes
	embedSize = 64        // of an embedding, unless the request says otherwise
)

// Config is what a Server fronts.
type Config struct {
	Dialect workers.Engine
	Role    workers.Role
	// Models are the names of the base model, LoRAs those of adapters.
	Models, LoRAs []string
	MaxModelLen   int
	// BlockSize, Blocks, MaxSeqs and MaxBatchedTokens are of one rank.
	BlockSize, Blocks, MaxSeqs, MaxBatchedTokens int
	Connector                                    workers.Connector
	// Version is what the engine claims; "" for that of its dialect.
	Version string
	Vocab   *vocab.Vocab
	// FirstRank is the place of the first of Ranks in its deployment.
	FirstRank int
	Ranks     []*Rank
	// Links and Sources have one element per rank; Sources is empty without events.
	Links   []Link
	Sources []Source
	Faults  *fault.Source
	// Rooms is SGLang's rendezvous, nil in the other dialect.
	Rooms *Rooms
	// Push sends a prompt's KV to an LMCache receiver, nil without one.
	Push func(ctx context.Context, host string, port int, rank int, key blockhash.Key, prompt []uint32, blocks []int) error
	// Dead ends, with ErrDead as its cause, when the engine core has died.
	Dead context.Context
	// SetFaults, Restart and Exit are the simulator's own admin calls.
	SetFaults     func(fault.Set) error
	Restart, Exit func()
	// Die lets the engine die of a request.
	Die func(reason string)
	// Seed makes request ids deterministic.
	Seed uint64
	// Started is when the engine's process was started.
	Started time.Time
}

// ErrDead is the cause of the end of everything when the engine core died.
var ErrDead = errors.New("EngineCore encountered an issue. See stack trace (above) for the root cause.")

// Server is the HTTP handler of one engine process.
type Server struct {
	cfg      Config
	mux      *http.ServeMux
	ids      atomic.Uint64
	inflight atomic.Int64
	next     atomic.Uint64
	level    atomic.Int32 // sleep level, 0 = awake
	stored   stored
}

// New returns a Server.
func New(cfg Config) *Server {
	s := &Server{cfg: cfg, mux: http.NewServeMux()}
	s.routes()
	return s
}

func (s *Server) sglang() bool { return s.cfg.Dialect == workers.SGLang }

func (s *Server) routes() {
	handlers := map[string]http.HandlerFunc{
		"POST /v1/chat/completions":      reads(s, s.deny, s.chat),
		"POST /v1/completions":           reads(s, s.deny, s.completions),
		"POST /v1/embeddings":            reads(s, s.deny, s.embeddings),
		"POST /rerank":                   reads(s, s.deny, s.rerank),
		"POST /v1/rerank":                reads(s, s.deny, s.rerank),
		"POST /v2/rerank":                reads(s, s.deny, s.rerank),
		"POST /score":                    reads(s, s.deny, s.score),
		"POST /v1/score":                 reads(s, s.deny, s.score),
		"POST /v1/responses":             reads(s, s.deny, s.responses),
		"GET /v1/responses/{id}":         s.storedResponse,
		"POST /v1/messages":              reads(s, s.refuseAnthropic, s.messages),
		"POST /v1/messages/count_tokens": reads(s, s.refuseAnthropic, s.countTokens),
		"POST /tokenize":                 reads(s, s.deny, s.tokenize),
		"POST /detokenize":               reads(s, s.deny, s.detokenize),
		"GET /v1/models":                 s.models,
		"GET /v1/models/{id...}":         s.modelCard,
		"GET /health":                    s.health,
		"GET /ping":                      s.health,
		"POST /ping":                     s.health,
		"GET /version":                   s.version,
		"GET /metrics":                   s.metrics,
		"GET /sim/v1/faults":             s.getFaults,
		"POST /sim/v1/faults":            s.setFaults,
		"DELETE /sim/v1/faults":          s.clearFaults,
		"POST /sim/v1/restart":           s.restart,
		"POST /sim/v1/exit":              s.exit,
	}
	vllm := map[string]http.HandlerFunc{
		"POST /inference/v1/generate": reads(s, s.deny, s.generateTokens),
		"GET /load":                   s.load,
		"GET /kv_event_sources":       s.eventSources,
		"GET /is_sleeping":            s.isSleeping,
		"POST /sleep":                 s.sleep,
		"POST /wake_up":               s.wakeUp,
		"POST /reset_prefix_cache":    s.resetCache,
	}
	sglang := map[string]http.HandlerFunc{
		"POST /generate":       reads(s, s.deny, s.sglGenerate),
		"GET /server_info":     s.sglServerInfo,
		"GET /get_server_info": s.sglServerInfo,
		"GET /model_info":      s.sglModelInfo,
		"GET /get_model_info":  s.sglModelInfo,
		"GET /health_generate": s.health,
		"GET /v1/loads":        s.sglLoads,
		"GET /get_load":        s.sglGetLoad,
		"POST /flush_cache":    s.sglFlush,
		"GET /flush_cache":     s.sglFlush,
		"POST /v1/tokenize":    reads(s, s.deny, s.tokenize),
		"POST /v1/detokenize":  reads(s, s.deny, s.detokenize),
	}
	maps.Copy(handlers, map[workers.Engine]map[string]http.HandlerFunc{workers.VLLM: vllm, workers.SGLang: sglang}[s.cfg.Dialect])
	for pattern, h := range handlers {
		s.mux.HandleFunc(pattern, h)
	}
	s.mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		// What FastAPI answers to a path or method it does not know.
		for _, m := range []string{http.MethodGet, http.MethodPost} {
			if m == r.Method {
				continue
			}
			probe := r.Clone(r.Context())
			probe.Method = m
			if _, pattern := s.mux.Handler(probe); pattern != "/" {
				w.Header().Set("Allow", m)
				WriteJSON(w, http.StatusMethodNotAllowed, map[string]string{"detail": "Method Not Allowed"})
				return
			}
		}
		WriteJSON(w, http.StatusNotFound, map[string]string{"detail": "Not Found"})
	})
}

// ServeHTTP applies the faults and answers.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Body != nil {
		r.Body = http.MaxBytesReader(w, r.Body, maxBody)
	}
	if !strings.HasPrefix(r.URL.Path, "/sim/") && !s.faulty(w, r) {
		return
	}
	w.Header().Set("Server", "uvicorn")
	s.mux.ServeHTTP(w, r)
}

// gone ends a request that no client waits for any more, or whose engine has been
// killed: without an answer, which net/http would give otherwise, an empty 200.
func gone() { panic(http.ErrAbortHandler) }

// faulty waits, fails or hangs as the faults say; false means that the request
// is over.
func (s *Server) faulty(w http.ResponseWriter, r *http.Request) bool {
	set, changed := s.cfg.Faults.Set()
	for set.Hang {
		r.Body = received(r.Body)
		select {
		case <-r.Context().Done():
			gone()
		case <-changed:
		}
		set, changed = s.cfg.Faults.Set()
	}
	if r.Method != http.MethodPost && !set.All {
		return true
	}
	if d := s.cfg.Faults.Delay(); d > 0 {
		r.Body = received(r.Body)
		if !wait.For(r.Context(), d) {
			gone()
		}
	}
	if s.cfg.Faults.Hit(set.HangRate) {
		r.Body = received(r.Body)
		<-r.Context().Done()
		gone()
	}
	if set.Poison+set.Deadly != "" && r.Method == http.MethodPost && !strings.HasSuffix(r.URL.Path, "tokenize") && s.broken(w, r, set) {
		return false
	}
	if s.cfg.Faults.Hit(set.ErrorRate) {
		status := cmp.Or(set.ErrorStatus, http.StatusInternalServerError)
		s.fail(w, status, "Internal server error", "InternalServerError", nil)
		return false
	}
	return true
}

// broken answers a request that the engine breaks on, or dies of; false means that it is
// none.
func (s *Server) broken(w http.ResponseWriter, r *http.Request, set fault.Set) bool {
	r.Body = received(r.Body)
	b, _ := io.ReadAll(r.Body) // the handler gets the error, too
	r.Body = received(struct {
		io.Reader
		io.Closer
	}{io.MultiReader(bytes.NewReader(b), r.Body), r.Body})
	switch has := func(text string) bool { return text != "" && bytes.Contains(b, []byte(text)) }; {
	case has(set.Deadly):
		s.cfg.Die("a deadly request")
		if s.sglang() {
			<-r.Context().Done() // the process is gone, without an answer
			gone()
		}
		<-s.cfg.Dead.Done()
		s.refuse(w, ErrDead)
	case has(set.Poison):
		s.fail(w, cmp.Or(set.ErrorStatus, http.StatusInternalServerError), "Internal server error", "InternalServerError", nil)
	default:
		return false
	}
	return true
}

// received reads a request's body before its answer waits, as uvicorn does while
// the engine behind it hangs. Before that net/http does not notice a client that
// leaves.
func received(body io.ReadCloser) io.ReadCloser {
	b, err := io.ReadAll(body)
	return struct {
		io.Reader
		io.Closer
	}{io.MultiReader(bytes.NewReader(b), failing{err}), body}
}

// failing ends a body as the client did.
type failing struct{ err error }

func (f failing) Read([]byte) (int, error) { return 0, cmp.Or(f.err, io.EOF) }

// fail answers with an error.
func (s *Server) fail(w http.ResponseWriter, status int, message, kind string, param any) {
	s.deny(w, &Error{Status: status, Message: message, Kind: kind, Param: param})
}

// refuse writes err, which is an *Error or an internal one.
func (s *Server) refuse(w http.ResponseWriter, err error) {
	var a *Error
	switch {
	case errors.As(err, &a):
		s.deny(w, a)
	case errors.Is(err, ErrDead):
		s.fail(w, http.StatusInternalServerError, ErrDead.Error(), "InternalServerError", nil)
	default:
		s.fail(w, http.StatusInternalServerError, "Internal server error", "InternalServerError", nil)
	}
}

func (s *Server) deny(w http.ResponseWriter, a *Error) {
	a.Write(w, s.sglang())
}

// reads is a handler of requests with JSON bodies. What h returns is refused.
func reads[Q any](s *Server, refuse func(http.ResponseWriter, *Error), h func(http.ResponseWriter, *http.Request, *Q) *Error) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		var q Q
		err := readJSON(r, &q)
		if err == nil {
			err = h(w, r, &q)
		}
		if err != nil {
			refuse(w, err)
		}
	}
}

// pickRank is the rank that the request names, or the least loaded one, in
// turn when they are equal (vLLM's internal balancer: 4·waiting + running).
func (s *Server) pickRank(r *http.Request) (int, *Error) {
	if h := r.Header.Get("X-data-parallel-rank"); h != "" {
		if n, err := strconv.Atoi(strings.TrimSpace(h)); err == nil {
			return s.rankInRange(n)
		}
	}
	return s.leastLoaded(), nil
}

func (s *Server) rankInRange(n int) (int, *Error) {
	if n < 0 || n >= len(s.cfg.Ranks) {
		return 0, badRequest(nil, "data_parallel_rank %d is out of range [0, %d).", n, len(s.cfg.Ranks))
	}
	return n, nil
}

func (s *Server) leastLoaded() int {
	n := len(s.cfg.Ranks)
	if n == 1 {
		return 0
	}
	best, score := 0, math.MaxInt
	first := int(s.next.Add(1) % uint64(n))
	for i := range n {
		k := (first + i) % n
		running, waiting, _ := s.cfg.Ranks[k].Load()
		if sc := 4*waiting + running; sc < score {
			best, score = k, sc
		}
	}
	return best
}

// id returns 16 hex digits, in a sequence that the seed fixes.
func (s *Server) id() string {
	return fmt.Sprintf("%016x", blockhash.Next(s.cfg.Seed, s.ids.Add(1)))
}

// requestID is the base of the answer's id: the caller's, or a new one.
func (s *Server) requestID(r *http.Request) string {
	if h := r.Header.Get("X-Request-Id"); h != "" && !s.sglang() {
		return h
	}
	return s.id()
}

// model checks the model of a request and returns the adapter's name, if it is one.
func (s *Server) model(name string) (shown, lora string, err *Error) {
	if name == "" {
		return s.cfg.Models[0], "", nil
	}
	switch {
	case slices.Contains(s.cfg.Models, name):
		return name, "", nil
	case slices.Contains(s.cfg.LoRAs, name):
		return name, name, nil
	case s.sglang(): // does not check
		return name, "", nil
	}
	return "", "", &Error{Status: http.StatusNotFound, Message: fmt.Sprintf("The model `%s` does not exist. Valid aliases: %s.", name, strings.Join(slices.Concat(s.cfg.Models, s.cfg.LoRAs), ", ")), Kind: "NotFoundError", Param: "model"}
}

// mergeDead returns the request's context, ended also by the death of the engine.
func (s *Server) mergeDead(r *http.Request) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(r.Context())
	stop := context.AfterFunc(s.cfg.Dead, func() { cancel(context.Cause(s.cfg.Dead)) })
	return ctx, func() { stop(); cancel(nil) }
}
