package widget

import (
	"math"
	"strconv"
	"time"
)

// Unknown is how an unknown figure is shown.
const Unknown = "-"

// Count is a number in at most six columns: 999, 12.3k, 4.56M.
func Count(v float64) string {
	if math.IsNaN(v) || math.IsInf(v, 0) {
		return Unknown
	}
	sign := ""
	if v < 0 {
		sign, v = "-", -v
	}
	if v < 9999.5 {
		return sign + strconv.FormatFloat(math.Round(v), 'f', 0, 64)
	}
	for _, unit := range []string{"k", "M", "G", "T"} {
		v /= 1000
		if v < 999.5 {
			return sign + three(v) + unit
		}
	}
	return sign + three(v/1000) + "P"
}

// Known is Count of a number whose 0 means unknown.
func Known[N int | int64](n N) string {
	if n == 0 {
		return Unknown
	}
	return Count(float64(n))
}

// Whole is a number with all its digits.
func Whole(v float64) string {
	if math.IsNaN(v) || math.IsInf(v, 0) {
		return Unknown
	}
	return strconv.FormatFloat(v, 'f', 0, 64)
}

// three writes a number below 1000 with three significant digits at most.
func three(v float64) string {
	prec := 2
	switch {
	case v >= 99.95:
		prec = 0
	case v >= 9.995:
		prec = 1
	}
	return strconv.FormatFloat(v, 'f', prec, 64)
}

// Rate is a number per second: 0, 0.25, 41.8, 1.2k.
func Rate(v float64) string {
	switch {
	case math.IsNaN(v) || math.IsInf(v, 0):
		return Unknown
	case v == 0:
		return "0"
	case v < 9.995:
		return strconv.FormatFloat(v, 'f', 2, 64)
	case v < 99.95:
		return strconv.FormatFloat(v, 'f', 1, 64)
	}
	return Count(v)
}

// Percent is a share as percent with one decimal, without the sign.
func Percent(share float64) string {
	if math.IsNaN(share) || math.IsInf(share, 0) {
		return Unknown
	}
	return strconv.FormatFloat(100*share, 'f', 1, 64)
}

// Millis is a duration that is given in milliseconds, with its unit.
func Millis(ms float64) string {
	switch {
	case math.IsNaN(ms) || ms < 0:
		return Unknown
	case ms < 0.9995:
		return strconv.FormatFloat(ms*1000, 'f', 0, 64) + "us"
	case ms < 9.995:
		return strconv.FormatFloat(ms, 'f', 1, 64) + "ms"
	case ms < 999.5:
		return strconv.FormatFloat(ms, 'f', 0, 64) + "ms"
	case ms < 59950:
		return strconv.FormatFloat(ms/1000, 'f', 2, 64) + "s"
	}
	return Age(time.Duration(ms * float64(time.Millisecond)))
}

// Age is a rough duration: 0.4s, 12s, 3m10s, 3d04h.
func Age(d time.Duration) string {
	d = max(d, 0)
	s := d.Seconds()
	two := func(n int64) string {
		if n < 10 {
			return "0" + strconv.FormatInt(n, 10)
		}
		return strconv.FormatInt(n, 10)
	}
	n := int64(s)
	switch {
	case s < 9.95:
		return strconv.FormatFloat(s, 'f', 1, 64) + "s"
	case n < 60:
		return strconv.FormatInt(n, 10) + "s"
	case n < 3600:
		return strconv.FormatInt(n/60, 10) + "m" + two(n%60) + "s"
	case n < 86400:
		return strconv.FormatInt(n/3600, 10) + "h" + two(n%3600/60) + "m"
	}
	return strconv.FormatInt(n/86400, 10) + "d" + two(n%86400/3600) + "h"
}

// Seconds is Age of a number of seconds, "-" when it is not known.
func Seconds(s float64) string {
	if math.IsNaN(s) || s < 0 {
		return Unknown
	}
	return Age(time.Duration(s * float64(time.Second)))
}

// Bytes is a size: 512B, 1.5MiB.
func Bytes(n float64) string {
	if math.IsNaN(n) {
		return Unknown
	}
	if n < 1024 {
		return strconv.FormatFloat(n, 'f', 0, 64) + "B"
	}
	for _, unit := range []string{"KiB", "MiB", "GiB", "TiB"} {
		n /= 1024
		if n < 1023.5 || unit == "TiB" {
			return three(n) + unit
		}
	}
	return Unknown
}
