package api_test

import (
	"fmt"

	"github.com/dynctl/dynctl/internal/router/request/api"
)

// The body of a prefill leg: one token, no stream. What is not edited stays as the client
// wrote it: order, white space, numbers that no float can hold.
func ExampleSplice() {
	body := []byte(`{"model":"m",  "stream":true, "seed":90071992547409931, "prompt":"Hi"}`)
	var view api.View
	if err := view.Parse(body, api.Completion, api.Limits{}); err != nil {
		fmt.Println(err)
		return
	}
	fmt.Printf("%s\n", api.Splice(nil, &view, []api.Edit{
		api.Set("max_tokens", api.RawOne),
		api.Replace("stream", api.RawFalse),
		api.Delete("seed"),
	}))
	// Output:
	// {"model":"m",  "stream":false, "prompt":"Hi","max_tokens":1}
}
