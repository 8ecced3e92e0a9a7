package wait

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

// TestFor: the time passes whole, or the context's end cuts it short.
func TestFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		if !For(t.Context(), time.Minute) || time.Since(began) != time.Minute {
			t.Errorf("waited for %v", time.Since(began))
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		began = time.Now()
		if For(ctx, time.Minute) || time.Since(began) != time.Second {
			t.Errorf("waited for %v beyond the context's second", time.Since(began))
		}
	})
}

// TestUntil: it is asked at once and then at each turn, and not after the end.
func TestUntil(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began, asked := time.Now(), 0
		if !Until(t.Context(), time.Second, func() bool { asked++; return asked == 4 }) || asked != 4 || time.Since(began) != 3*time.Second {
			t.Errorf("asked %d times in %v", asked, time.Since(began))
		}
		ctx, cancel := context.WithTimeout(t.Context(), 2500*time.Millisecond)
		defer cancel()
		if asked = 0; Until(ctx, time.Second, func() bool { asked++; return false }) || asked != 3 {
			t.Errorf("asked %d times in vain", asked)
		}
	})
}

// TestEvery: the first turn is one period away, and a loop may leave.
func TestEvery(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began, n := time.Now(), 0
		for range Every(t.Context(), time.Second) {
			if n++; time.Since(began) != time.Duration(n)*time.Second {
				t.Errorf("turn %d after %v", n, time.Since(began))
			}
			if n == 3 {
				break
			}
		}
		if time.Since(began) != 3*time.Second {
			t.Errorf("left after %v", time.Since(began))
		}
	})
}
