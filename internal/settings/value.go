package settings

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"net/url"
	"path"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/dynctl/dynctl/internal/router/placement/cost"
	"github.com/dynctl/dynctl/internal/router/placement/decide"
	"github.com/dynctl/dynctl/internal/router/replicas"
	"github.com/dynctl/dynctl/internal/workers"
)

// Rows lists every setting, in the order of the documentation. It is for
// reading only.
func Rows() []*Row { return rows }

// Lookup finds the row of a key; nil for an unknown key.
func Lookup(key string) *Row {
	i := slices.IndexFunc(rows, func(r *Row) bool { return r.Key == key })
	if i < 0 {
		return nil
	}
	return rows[i]
}

// Keys lists every key.
func Keys() []string {
	keys := make([]string, len(rows))
	for i, r := range rows {
		keys[i] = r.Key
	}
	return keys
}

// Changed lists the settings in which two configs differ.
func Changed(a, b *Config) []*Row {
	return slices.DeleteFunc(slices.Clone(rows), func(r *Row) bool { return reflect.DeepEqual(r.Get(a), r.Get(b)) })
}

// Env is the environment variable of the setting.
func (r *Row) Env() string {
	return "DYNCTL_" + strings.ToUpper(strings.ReplaceAll(r.Key, ".", "_"))
}

// Get is the value in a config.
func (r *Row) Get(c *Config) any { return reflect.ValueOf(r.At(c)).Elem().Interface() }

// Shown is the value as JSON shows it: durations as they are written, secrets redacted.
func (r *Row) Shown(c *Config) any {
	v := r.Get(c)
	if d, ok := v.(time.Duration); ok {
		return d.String()
	}
	if r.Redact != nil {
		return r.Redact(v)
	}
	return v
}

// Set puts a value, of the type that Get and Parse return, into a config.
func (r *Row) Set(c *Config, value any) {
	reflect.ValueOf(r.At(c)).Elem().Set(reflect.ValueOf(value))
}

// check says what is wrong with a value.
func (r *Row) check(value any) error {
	if word, ok := value.(string); ok && r.Values != nil && word != r.Get(&defaults) && !slices.Contains(r.Values, word) {
		return fmt.Errorf("%q is not one of %s", word, strings.Join(r.Values, ", "))
	}
	if r.Check == nil {
		return nil
	}
	return r.Check(value)
}

// Parse reads the text of a flag, of an environment variable or of a scalar in
// the file. Lists are separated by blanks, since worker specs hold commas.
func (r *Row) Parse(text string) (any, error) {
	var value any
	var err error
	switch r.At(&Config{}).(type) {
	case *[]string:
		list := strings.Fields(text)
		if len(list) == 0 {
			list = nil // as the default: no other value, and no change
		}
		return list, nil
	case *string:
		return text, nil
	case *time.Duration:
		value, err = time.ParseDuration(text)
	case *bool:
		value, err = strconv.ParseBool(text)
	case *decide.Threshold:
		return decide.ParseThreshold(text)
	case *int:
		value, err = strconv.Atoi(text)
	case *int64:
		value, err = parseSize(text)
	case *uint64:
		value, err = strconv.ParseUint(text, 10, 64)
	case *float64:
		value, err = strconv.ParseFloat(text, 64)
	default:
		return nil, errors.New("can be set in the file only")
	}
	if err != nil {
		return nil, fmt.Errorf("%q is not %s", text, r.Wanted())
	}
	return value, nil
}

// parseSize reads a whole number of bytes, or of a unit that is a power of 1024. All
// settings of type int64 are such sizes.
func parseSize(text string) (int64, error) {
	digits, shift := text, 0
	for i, unit := range []string{"KiB", "MiB", "GiB"} {
		if d, ok := strings.CutSuffix(text, unit); ok {
			digits, shift = d, 10*(i+1)
		}
	}
	n, err := strconv.ParseInt(digits, 10, 64)
	if err == nil && n<<shift>>shift != n {
		err = strconv.ErrRange
	}
	return n << shift, err
}

// ParseChecked is Parse for one setting alone: what Validate would say of the
// value is an error, too.
func (r *Row) ParseChecked(text string) (any, error) {
	value, err := r.Parse(text)
	if err != nil {
		return nil, err
	}
	return value, r.check(value)
}

// Wanted says in words what a value must look like.
func (r *Row) Wanted() string {
	switch r.At(&Config{}).(type) {
	case *time.Duration:
		return "a duration such as 500ms, 10s or 2m"
	case *bool:
		return "true or false"
	case *int64:
		return "a size in bytes such as 1048576, 512KiB, 256MiB or 1GiB"
	case *int, *uint64:
		return "a whole number"
	case *decide.Threshold:
		return "a whole number of tokens, or auto"
	case *float64:
		return "a number"
	default:
		return "a text"
	}
}

// Patch changes settings of a config by their keys, in JSON's types.
func Patch(c Config, changes map[string]any) (Config, error) {
	var errs []error
	for _, key := range slices.Sorted(maps.Keys(changes)) {
		r := Lookup(key)
		if r == nil {
			errs = append(errs, fmt.Errorf("unknown key %q%s", key, Suggest(key, Keys())))
			continue
		}
		_, isList := r.At(&c).(*[]string)
		text, err := plainText(changes[key], isList)
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", key, err))
			continue
		}
		value, err := r.Parse(text)
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", key, err))
			continue
		}
		r.Set(&c, value)
	}
	return c, errors.Join(errs...)
}

// plainText is a JSON value as an environment variable would hold it. A list is
// one of texts, and only for a setting that is a list.
func plainText(v any, isList bool) (string, error) {
	switch v := v.(type) {
	case float64:
		return strconv.FormatFloat(v, 'f', -1, 64), nil
	case []any:
		if !isList {
			return "", errors.New("want one value, not a list")
		}
		words := make([]string, len(v))
		for i, e := range v {
			word, ok := e.(string)
			if !ok || strings.ContainsAny(word, " \t\r\n") {
				return "", fmt.Errorf("%v is not a text without blanks", e)
			}
			words[i] = word
		}
		return strings.Join(words, " "), nil
	case nil, map[string]any:
		return "", errors.New("want a text, a number, true, false or a list of texts")
	default:
		return fmt.Sprint(v), nil
	}
}

// Suggest names the known key that is nearest to a wrong one.
func Suggest(wrong string, known []string) string {
	if near := workers.Nearest(wrong, known); near != "" {
		return fmt.Sprintf("; did you mean %q?", near)
	}
	return "; known here: " + strings.Join(slices.Sorted(slices.Values(known)), ", ")
}

// The checks of one value.

func hostPort(v any) error {
	if _, _, err := net.SplitHostPort(v.(string)); err != nil {
		if _, err := strconv.ParseUint(v.(string), 10, 16); err == nil {
			return fmt.Errorf("%q is not HOST:PORT; did you mean %q, for this machine only?", v, "127.0.0.1:"+v.(string))
		}
		return fmt.Errorf("%q is not HOST:PORT", v)
	}
	return nil
}

// collector refuses what is no URL of a collector. Its errors do not quote the value, which
// may hold a password.
func collector(v any) error {
	text := v.(string)
	if text == "" {
		return nil
	}
	if u, err := url.Parse(text); err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return errors.New("not a URL such as http://collector:4318/v1/traces")
	}
	return nil
}

// hostPortOnly reports whether a collector's URL, empty for none, has a port and no path.
func hostPortOnly(text string) bool {
	u, err := url.Parse(text)
	return err == nil && (text == "" || u.Port() != "" && strings.Trim(u.Path, "/") == "" && u.RawQuery == "")
}

// withoutUser hides name and password of a URL; either may be a token.
func withoutUser(v any) any {
	u, err := url.Parse(v.(string))
	switch {
	case err != nil:
		return "redacted"
	case u.User == nil:
		return v
	}
	u.User = url.User("redacted")
	return u.String()
}

// routers are addresses, or one URL. Errors do not quote a URL, which may hold a password.
func routers(v any) error {
	list := v.([]string)
	for _, text := range list {
		if scheme, _, isURL := strings.Cut(text, "://"); isURL {
			if u, err := url.Parse(text); err != nil || u.Host == "" || scheme != "nats" && scheme != "tls" {
				return errors.New("a URL is not one of a NATS server, such as nats://HOST:4222 or tls://HOST:4222")
			}
			if len(list) > 1 {
				return errors.New("the URL of a NATS server stands alone: all routers use that server")
			}
			continue
		}
		if _, port, err := net.SplitHostPort(text); err != nil || port == "" || port == "0" {
			return fmt.Errorf("%q is neither HOST:PORT of another router nor the URL of a NATS server", text)
		}
	}
	return nil
}

// withoutUsers is withoutUser for each of a list of addresses and URLs.
func withoutUsers(v any) any {
	list := slices.Clone(v.([]string))
	for i, text := range list {
		if strings.Contains(text, "://") {
			list[i] = withoutUser(text).(string)
		}
	}
	return list
}

// short is a name that fits a message between routers.
func short(v any) error {
	if s := v.(string); len(s) > replicas.MaxText || !utf8.ValidString(s) {
		return fmt.Errorf("%.40q is not UTF-8 of at most %d bytes", s, replicas.MaxText)
	}
	return nil
}

func proxies(v any) error {
	_, err := parseProxies(v.([]string))
	return err
}

// rootPath is what stands before the paths of the API. net/http redirects nothing here, and
// an escaped path would never match.
func rootPath(v any) error {
	text := v.(string)
	if u, err := url.Parse(text); text != "" && (err != nil || u.Path != text || path.Clean(text) != text || text[0] != '/' || text == "/") {
		return fmt.Errorf("%q is not a path such as /llm, which begins with a slash and does not end with one", text)
	}
	return nil
}

// origins are what browsers send as Origin: scheme, host and port.
func origins(v any) error {
	for _, text := range v.([]string) {
		u, err := url.Parse(text)
		if text != "*" && (err != nil || u.Host == "" || text != u.Scheme+"://"+u.Host) {
			return fmt.Errorf("%q is neither an origin such as https://chat.example:8443, without a path, nor *", text)
		}
	}
	return nil
}

func share(v any) error {
	if f := v.(float64); !(f >= 0 && f <= 1) {
		return fmt.Errorf("%v is not a share between 0 and 1", v)
	}
	return nil
}

// maxWeight keeps costs from becoming infinite, or no number at all.
const maxWeight = 1e12

func weight(v any) error {
	if f := v.(float64); !(f >= 0) {
		return fmt.Errorf("%v must not be negative", v)
	} else if f > maxWeight {
		return fmt.Errorf("%v is more than %g", v, maxWeight)
	}
	return nil
}

func slo(v any) error {
	_, _, err := cost.ParseSLO(v.(string))
	return err
}

func positive(v any) error {
	if v.(time.Duration) <= 0 {
		return fmt.Errorf("%v must be more than 0", v)
	}
	return nil
}

func notEmpty(v any) error {
	if strings.TrimSpace(v.(string)) == "" {
		return errors.New("must not be empty")
	}
	return nil
}

func notNegative(v any) error {
	if whole(v) < 0 {
		return fmt.Errorf("%v must not be negative", v)
	}
	return nil
}

func atLeast(least int64) func(any) error {
	return func(v any) error {
		if whole(v) < least {
			return fmt.Errorf("%v is less than %d", v, least)
		}
		return nil
	}
}

func between(least, most int64, unit string) func(any) error {
	return func(v any) error {
		if n := whole(v); n < least || n > most {
			return fmt.Errorf("%v is not between %d and %d %s", v, least, most, unit)
		}
		return nil
	}
}

// whole is the value of an int or an int64.
func whole(v any) int64 { return reflect.ValueOf(v).Int() }

// legs is a number of legs: a request may have two.
func legs(v any) error {
	if n := whole(v); n < 0 || n == 1 {
		return fmt.Errorf("%v is neither 0 (by the limit of open files) nor at least 2", v)
	}
	return nil
}

// slowFactor is 0, or more than what measuring differs by.
func slowFactor(v any) error {
	if f := v.(float64); !(f == 0 || f >= 1.2 && f <= 1000) {
		return fmt.Errorf("%v is neither 0 (off) nor between 1.2 and 1000", v)
	}
	return nil
}
