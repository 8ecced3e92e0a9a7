package front

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/dynctl/dynctl/internal/workers"
)

// TestMooncakeRefusesWrongMembers: each leg has exactly the members that vLLM's own proxy
// sends.
func TestMooncakeRefusesWrongMembers(t *testing.T) {
	const prefill = `{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":"t"}`
	const decode = `{"do_remote_decode":false,"do_remote_prefill":true,"remote_engine_id":"e","remote_bootstrap_addr":"http://h:8998","transfer_id":"t"}`
	read := func(text string) (transferAsked, *Error) {
		return readTransfer(workers.ConnectorMooncake, json.RawMessage(text), 1)
	}
	if a, err := read(prefill); err != nil || !a.Pin || a.Transfer != "t" || a.Pulls != nil {
		t.Errorf("a prefill leg: %+v, %v", a, err)
	}
	if a, err := read(decode); err != nil || a.Pin || len(a.Pulls) != 1 || a.Pulls[0].EngineID != "e" || a.Pulls[0].Server != "http://h:8998" || a.Pulls[0].RequestID != "t" {
		t.Errorf("a decode leg: %+v, %v", a, err)
	}
	for _, c := range []struct{ leg, from, to, says string }{
		{prefill, `"do_remote_decode":true,`, ``, "do_remote_decode is"},
		{prefill, `"do_remote_prefill":false`, `"do_remote_prefill":true`, "do_remote_prefill is"},
		{prefill, `"do_remote_decode":true`, `"do_remote_decode":1`, "do_remote_decode is"},
		{prefill, `,"transfer_id":"t"`, ``, "transfer_id is missing"},
		{prefill, `"t"`, `""`, "transfer_id is no text"},
		{prefill, `"t"`, `7`, "transfer_id is no text"},
		{prefill, `"transfer_id"`, `"remote_block_ids":null,"transfer_id"`, "remote_block_ids is not for this leg"},
		{prefill, `"transfer_id"`, `"remote_engine_id":"e","transfer_id"`, "remote_engine_id is not for this leg"},
		{decode, `"remote_engine_id":"e",`, ``, "remote_engine_id is missing"},
		{decode, `"remote_bootstrap_addr":"http://h:8998",`, ``, "remote_bootstrap_addr is missing"},
		{decode, `,"transfer_id":"t"`, ``, "transfer_id is missing"},
		{decode, `http://h:8998`, `h:8998`, "not http://HOST:PORT"},
		{decode, `http://h:8998`, `http://h`, "not http://HOST:PORT"},
		{decode, `"e"`, `null`, "remote_engine_id is no text"},
		{decode, `"transfer_id"`, `"remote_host":"h","transfer_id"`, "remote_host is not for this leg"},
	} {
		text := strings.Replace(c.leg, c.from, c.to, 1)
		if _, err := read(text); text == c.leg || err == nil || !strings.Contains(err.Message, c.says) {
			t.Errorf("%s: %+v, want %q", text, err, c.says)
		}
	}
}
