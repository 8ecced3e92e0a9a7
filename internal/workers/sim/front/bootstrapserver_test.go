package front

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// TestRoute: what a decode engine asks before it claims a room.
func TestRoute(t *testing.T) {
	h := (&Rooms{}).Handler(2, 16)
	for _, c := range []struct {
		query  string
		status int
		want   string
	}{
		{"prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1", http.StatusOK,
			`{"attn_cp_size":1,"attn_tp_size":1,"dp_size":2,"follow_bootstrap_room":true,"kv_cache_dtype":null,"page_size":16,"pp_size":1}`},
		{"prefill_dp_rank=1&prefill_cp_rank=0&target_tp_rank=0&target_pp_rank=0", http.StatusOK, `{"rank_ip":"10.0.0.7","rank_port":8998}`},
		{"prefill_dp_rank=2&prefill_cp_rank=0&target_tp_rank=0&target_pp_rank=0", http.StatusNotFound, "Bootstrap info not found for dp_rank=2 cp_rank=0 tp_rank=0 pp_rank=0"},
		{"prefill_dp_rank=0&prefill_cp_rank=0&target_tp_rank=1&target_pp_rank=0", http.StatusNotFound, "Bootstrap info not found for dp_rank=0 cp_rank=0 tp_rank=1 pp_rank=0"},
		{"prefill_dp_rank=0", http.StatusBadRequest, "Missing inputs for bootstrap server."},
		{"", http.StatusBadRequest, "Missing inputs for bootstrap server."},
	} {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "http://10.0.0.7:8998/route?"+c.query, nil))
		if got := strings.TrimSpace(w.Body.String()); w.Code != c.status || got != c.want {
			t.Errorf("%s: %d %s, want %d %s", c.query, w.Code, got, c.status, c.want)
		}
	}
}
