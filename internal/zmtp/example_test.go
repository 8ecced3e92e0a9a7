package zmtp_test

import (
	"context"
	"fmt"

	"github.com/dynctl/dynctl/internal/zmtp"
)

// A publisher as an engine has one, and a subscriber to one of its topics.
func Example() {
	ctx := context.Background()
	pub, err := zmtp.ListenPub(ctx, "tcp://127.0.0.1:*", zmtp.Options{})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer pub.Close()
	sub, err := zmtp.DialSub(ctx, pub.Endpoint(), zmtp.Options{Topics: []string{"kv-events"}})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer sub.Close()
	if err := pub.WaitSubscribers(ctx, 1); err != nil {
		fmt.Println(err)
		return
	}

	pub.Send([]byte("metrics"), []byte("not asked for"))
	pub.Send([]byte("kv-events"), []byte{0, 0, 0, 0, 0, 0, 0, 7}, []byte("a batch"))

	var m zmtp.Message
	if err := sub.Recv(&m); err != nil {
		fmt.Println(err)
		return
	}
	for _, frame := range m.Frames() {
		fmt.Printf("%q\n", frame)
	}
	// Output:
	// "kv-events"
	// "\x00\x00\x00\x00\x00\x00\x00\a"
	// "a batch"
}
