package stored

import "testing"

// TestIDs: the id of a response is found in its body, and in the first event of its stream.
func TestIDs(t *testing.T) {
	t.Parallel()
	if got := ID([]byte(`{"object":"response","id":"resp_1"}`)) + ID([]byte(`{}`)); got != "resp_1" {
		t.Error(got)
	}
	for _, c := range [][2]string{
		{"event: response.created\ndata: {\"type\":\"response.created\",\"response\":{\"id\":\"resp_1\"}}\n\ndata: {}\n\n", "resp_1"},
		{"data:{\"response\":{\"id\":\"resp_2\"}}\r\n\r\n", "resp_2"},
		{"data: {\"id\":\"x\"}\n\n", ""}, {": nothing yet\n", ""},
	} {
		if got := StreamID([]byte(c[0])); got != c[1] {
			t.Errorf("%q: %q, want %q", c[0], got, c[1])
		}
	}
}
