package sim

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"

	"github.com/dynctl/dynctl/internal/workers/sim/fault"
	"github.com/dynctl/dynctl/internal/workers/sim/front"
	"github.com/dynctl/dynctl/internal/workers/sim/sockets"
)

// Control is the admin API of the whole fleet. It answers also for engines that
// are down or refuse connections, which cannot be reached on their own ports.
//
//	GET    /sim/v1/engines                  what runs, where, and with which faults
//	POST   /sim/v1/engines/{name}/kill      end the process immediately
//	POST   /sim/v1/engines/{name}/restart   end it if it runs, and start it again
//	POST   /sim/v1/engines/{name}/faults    replace the faults (JSON of fault.Set)
//	DELETE /sim/v1/engines/{name}/faults    end all faults
func (r *Running) Control() http.Handler {
	mux := http.NewServeMux()
	named := func(f func(w http.ResponseWriter, q *http.Request, e *Engine)) http.HandlerFunc {
		return func(w http.ResponseWriter, q *http.Request) {
			e := r.Named(q.PathValue("name"))
			if e == nil {
				front.WriteJSON(w, http.StatusNotFound, map[string]string{"error": fmt.Sprintf("no engine is named %q", q.PathValue("name"))})
				return
			}
			f(w, q, e)
		}
	}
	mux.HandleFunc("GET /sim/v1/engines", func(w http.ResponseWriter, _ *http.Request) {
		list := make([]Status, len(r.engines))
		for i, e := range r.engines {
			list[i] = e.Status()
		}
		front.WriteJSON(w, http.StatusOK, map[string]any{"engines": list})
	})
	mux.HandleFunc("POST /sim/v1/engines/{name}/kill", named(func(w http.ResponseWriter, _ *http.Request, e *Engine) {
		e.Kill()
		front.WriteJSON(w, http.StatusOK, e.Status())
	}))
	mux.HandleFunc("POST /sim/v1/engines/{name}/restart", named(func(w http.ResponseWriter, _ *http.Request, e *Engine) {
		if err := e.Restart(); err != nil {
			front.WriteJSON(w, http.StatusInternalServerError, map[string]string{"error": err.Error()})
			return
		}
		front.WriteJSON(w, http.StatusOK, e.Status())
	}))
	setFaults := func(w http.ResponseWriter, e *Engine, set fault.Set) {
		err := e.SetFaults(set)
		status := http.StatusBadRequest
		switch {
		case err == nil:
			front.WriteJSON(w, http.StatusOK, e.Status())
			return
		case errors.Is(err, ErrDown):
			status = http.StatusConflict
		case sockets.PortInUse(err):
			status = http.StatusInternalServerError
		}
		front.WriteJSON(w, status, map[string]string{"error": err.Error()})
	}
	mux.HandleFunc("POST /sim/v1/engines/{name}/faults", named(func(w http.ResponseWriter, q *http.Request, e *Engine) {
		var set fault.Set
		d := json.NewDecoder(http.MaxBytesReader(w, q.Body, 1<<20))
		d.DisallowUnknownFields()
		if err := d.Decode(&set); err != nil {
			front.WriteJSON(w, http.StatusBadRequest, map[string]string{"error": err.Error()})
			return
		}
		setFaults(w, e, set)
	}))
	mux.HandleFunc("DELETE /sim/v1/engines/{name}/faults", named(func(w http.ResponseWriter, _ *http.Request, e *Engine) {
		setFaults(w, e, fault.Set{})
	}))
	return mux
}

// Status is one engine in the fleet's admin API.
type Status struct {
	Name        string    `json:"name"`
	Role        string    `json:"role"`
	URL         string    `json:"url"`
	Running     bool      `json:"running"`
	Reason      string    `json:"reason,omitempty"`
	Incarnation uint64    `json:"incarnation"`
	Exits       int       `json:"exits"`
	Faults      fault.Set `json:"faults"`
}

// Status says how the engine is.
func (e *Engine) Status() Status {
	up, why := e.Running()
	return Status{
		Name: e.name, Role: string(e.group.Role), URL: e.URL(), Running: up, Reason: why,
		Incarnation: e.Incarnation(), Exits: e.Exits(), Faults: e.Faults(),
	}
}
