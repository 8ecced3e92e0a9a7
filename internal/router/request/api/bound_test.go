package api

import (
	"net/http"
	"testing"
	"testing/synctest"
	"time"
)

// deadlines is a writer that notes the deadlines it is given.
type deadlines struct {
	http.ResponseWriter
	at []time.Time
}

func (d *deadlines) SetWriteDeadline(at time.Time) error {
	d.at = append(d.at, at)
	return nil
}

// TestAnswerDeadline: what is written has its time, and a deadline that leaves it is not
// moved.
func TestAnswerDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var w deadlines
		var a AnswerDeadline
		for range 12 {
			a.Extend(&w, 4*time.Second)
			if rest := time.Until(w.at[len(w.at)-1]); rest < 4*time.Second || rest > 5*time.Second {
				t.Errorf("%v are left", rest)
			}
			<-time.After(time.Second / 2)
		}
		if len(w.at) != 4 {
			t.Errorf("moved %d times in six seconds", len(w.at))
		}
		a.Extend(&w, time.Minute)
		if len(w.at) != 5 {
			t.Error("a longer time is not given")
		}
	})
}
