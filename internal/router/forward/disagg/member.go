package disagg

import (
	"errors"
	"fmt"
	"strconv"

	"github.com/dynctl/dynctl/internal/rawjson"
	"github.com/dynctl/dynctl/internal/router/request/api"
)

// member is one member of a leg's kv_transfer_params.
type member struct {
	name  string
	value value
	of    []member // of an object
}

// value says what a member holds.
type value uint8

const (
	yes value = iota
	no
	null
	nested
	// freshID is the part of the transfer's id that is new each time, joinedID that behind the
	// id of the request.
	freshID
	joinedID
	// engineID, host, port and the sizes are of where the engines meet, server is that as a
	// URL.
	engineID
	host
	port
	server
	tpSize
	ppSize
	dcpSize
	// theAnswers are all members of the prefill's answer, byte for byte. It has no name.
	theAnswers
)

// errTwice: a member that two of a leg's connectors have. Engines take it for either's.
var errTwice = errors.New("a member is of two connectors")

// object renders members with the values of the transfer.
func (t *Transfer) object(of []member) ([]byte, error) {
	if len(of) == 1 && of[0].value == theAnswers {
		return append([]byte(nil), t.params...), nil
	}
	dst, seen := append(make([]byte, 0, 320), '{'), make([]string, 0, 24)
	put := func(name string) error {
		for _, s := range seen {
			if s == name {
				return fmt.Errorf("%w: %q", errTwice, clip(name))
			}
		}
		if seen = append(seen, name); len(seen) > 1 {
			dst = append(dst, ',')
		}
		dst = append(rawjson.AppendQuote(dst, name), ':')
		return nil
	}
	for _, m := range of {
		if m.value == theAnswers {
			for key, v := range t.params.Members() {
				if err := put(string(key)); err != nil {
					return nil, err
				}
				dst = append(dst, v...)
			}
			continue
		}
		if err := put(m.name); err != nil {
			return nil, err
		}
		switch m.value {
		case yes:
			dst = append(dst, "true"...)
		case no:
			dst = append(dst, "false"...)
		case null:
			dst = append(dst, "null"...)
		case nested:
			inner, err := t.object(m.of)
			if err != nil {
				return nil, err
			}
			dst = append(dst, inner...)
		case freshID:
			dst = append(dst, api.RawString(t.fresh)...)
		case joinedID:
			dst = append(dst, api.RawString(t.joined())...)
		case engineID:
			dst = append(dst, api.RawString(t.at.EngineID)...)
		case host:
			dst = append(dst, api.RawString(t.at.Host)...)
		case server:
			dst = append(dst, api.RawString(t.serverURL())...)
		case port:
			dst = strconv.AppendInt(dst, int64(t.at.Port), 10)
		case tpSize:
			dst = strconv.AppendInt(dst, int64(t.at.TP), 10)
		case ppSize:
			dst = strconv.AppendInt(dst, int64(t.at.PP), 10)
		case dcpSize:
			dst = strconv.AppendInt(dst, int64(t.at.DCP), 10)
		}
	}
	return append(dst, '}'), nil
}
