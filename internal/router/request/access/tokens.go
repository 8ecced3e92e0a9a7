package access

import (
	"sync"
	"time"
)

// allowance is what is left of a key's tokens a minute. A request may begin while any is left,
// and pays for all that it takes, so that later ones wait for that. Its zero value is full.
type allowance struct {
	mu   sync.Mutex
	used float64 // tokens that are not paid for yet; negative never
	at   time.Time
}

// settle forgets what the time up to now has paid for. The caller holds mu.
func (a *allowance) settle(perMinute int, now time.Time) {
	if passed := now.Sub(a.at); passed > 0 {
		a.used = max(0, a.used-passed.Minutes()*float64(perMinute))
		a.at = now
	}
}

// wait is how long no request may begin; 0 where one may, or where perMinute is no limit.
func (a *allowance) wait(perMinute int, now time.Time) time.Duration {
	if perMinute == 0 {
		return 0
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.settle(perMinute, now)
	over := a.used - float64(perMinute)
	if over < 0 {
		return 0
	}
	return max(time.Second, time.Duration((over+1)/float64(perMinute)*float64(time.Minute)))
}

// Spend takes tokens out of the key's allowance; negative ones go back. It does nothing for no
// key, and for one without a limit.
func (k *Key) Spend(tokens int, now time.Time) {
	if k == nil || k.Tokens == 0 || tokens == 0 {
		return
	}
	k.tokens.spend(k.Tokens, tokens, now)
	k.spent(0, tokens, now)
}

// maxDebt is how many minutes the tokens that other routers claim may take to pay off.
const maxDebt = 10

// debit is spend for tokens that another router claims.
func (a *allowance) debit(perMinute int, tokens int64, now time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.settle(perMinute, now)
	a.used = max(0, min(a.used+float64(tokens), max(a.used, maxDebt*float64(perMinute))))
}

func (a *allowance) spend(perMinute, tokens int, now time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.settle(perMinute, now)
	a.used = max(0, a.used+float64(tokens))
}
