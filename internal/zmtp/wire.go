package zmtp

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
)

const (
	flagMore    = 1
	flagLong    = 2
	flagCommand = 4

	greetingSize = 64
	versionMajor = 3
	versionMinor = 1
	mechanism    = "NULL"
)

func greeting() []byte {
	g := make([]byte, greetingSize)
	g[0], g[9], g[10], g[11] = 0xff, 0x7f, versionMajor, versionMinor
	copy(g[12:32], mechanism)
	return g
}

// checkGreeting judges the first bytes of a greeting, however few have come,
// so that a peer that speaks something else is refused at its first wrong byte
// rather than at the deadline. The minor version is valid once all 64 are there.
func checkGreeting(g []byte) (minor byte, err error) {
	switch {
	case len(g) > 0 && g[0] != 0xff:
		return 0, fmt.Errorf("%w: greeting starts with %#02x instead of 0xff", ErrProtocol, g[0])
	// Bytes 1 to 8 are padding of any value (old peers put a length there).
	case len(g) > 9 && g[9] != 0x7f:
		return 0, fmt.Errorf("%w: greeting has %#02x instead of 0x7f at byte 9", ErrProtocol, g[9])
	case len(g) > 10 && g[10] < versionMajor:
		return 0, fmt.Errorf("%w: peer speaks ZMTP %d, need 3", ErrProtocol, g[10])
	}
	if len(g) >= 32 {
		if got := string(bytes.TrimRight(g[12:32], "\x00")); got != mechanism {
			return 0, fmt.Errorf("%w: peer wants security mechanism %q, only NULL is spoken", ErrProtocol, got)
		}
		minor = g[11]
		if g[10] > versionMajor {
			minor = versionMinor // a later major must fall back to ours
		}
	}
	return minor, nil
}

// appendHeader appends a frame header.
func appendHeader(dst []byte, flags byte, n int) []byte {
	if n <= 255 {
		return append(dst, flags, byte(n))
	}
	dst = append(dst, flags|flagLong)
	return binary.BigEndian.AppendUint64(dst, uint64(n))
}

// appendCommand appends a command frame with the given name and data.
func appendCommand(dst []byte, name string, data ...[]byte) []byte {
	n := 1 + len(name)
	for _, d := range data {
		n += len(d)
	}
	dst = appendHeader(dst, flagCommand, n)
	dst = append(dst, byte(len(name)))
	dst = append(dst, name...)
	for _, d := range data {
		dst = append(dst, d...)
	}
	return dst
}

func appendProperty(dst []byte, name, value string) []byte {
	dst = append(dst, byte(len(name)))
	dst = append(dst, name...)
	dst = binary.BigEndian.AppendUint32(dst, uint32(len(value)))
	return append(dst, value...)
}

func appendReady(dst []byte, role roleKind, identity string) []byte {
	props := appendProperty(nil, "Socket-Type", string(role))
	if role == roleDealer || role == roleRouter {
		props = appendProperty(props, "Identity", identity)
	}
	return appendCommand(dst, "READY", props)
}

// splitCommand separates a command body into its name and its data.
func splitCommand(body []byte) (name, data []byte, err error) {
	if len(body) == 0 || body[0] == 0 || len(body) < 1+int(body[0]) {
		return nil, nil, fmt.Errorf("%w: malformed command of %d bytes", ErrProtocol, len(body))
	}
	n := 1 + int(body[0])
	return body[1:n], body[n:], nil
}

// parseReady reads the properties of a READY command that matter here.
func parseReady(data []byte) (socketType, identity string, err error) {
	for len(data) > 0 {
		n := int(data[0])
		if n == 0 || len(data) < 1+n+4 {
			return "", "", fmt.Errorf("%w: malformed READY property", ErrProtocol)
		}
		name := string(data[1 : 1+n])
		size := binary.BigEndian.Uint32(data[1+n:])
		data = data[1+n+4:]
		if uint64(size) > uint64(len(data)) {
			return "", "", fmt.Errorf("%w: READY property of %d bytes in %d", ErrProtocol, size, len(data))
		}
		value := data[:size]
		data = data[size:]
		switch {
		case strings.EqualFold(name, "Socket-Type"):
			socketType = string(value)
		case strings.EqualFold(name, "Identity"):
			identity = string(value)
		}
	}
	return socketType, identity, nil
}

// errorReason reads the reason of an ERROR command, cut to a loggable length.
func errorReason(data []byte) string {
	if len(data) == 0 {
		return "no reason given"
	}
	reason := data[1:]
	if n := int(data[0]); n < len(reason) {
		reason = reason[:n]
	}
	return fmt.Sprintf("%q", reason)
}

// handshake exchanges greetings and READY commands. The caller has set a
// deadline on the transport.
func (c *Conn) handshake() error {
	out := greeting()
	if _, err := c.nc.Write(out); err != nil {
		return fmt.Errorf("send greeting: %w", err)
	}
	var minor byte
	for {
		have := c.buffered()
		if len(have) > greetingSize {
			have = have[:greetingSize]
		}
		var err error
		if minor, err = checkGreeting(have); err != nil {
			return err
		}
		if len(have) == greetingSize {
			break
		}
		if err := c.fill(); err != nil {
			return fmt.Errorf("read greeting: %w", noEOF(err))
		}
	}
	c.r += greetingSize
	c.minor = min(minor, versionMinor)
	if _, err := c.nc.Write(appendReady(out[:0], c.role, c.o.Identity)); err != nil {
		return fmt.Errorf("send READY: %w", err)
	}

	flags, size, err := c.header()
	if err != nil {
		return fmt.Errorf("read READY: %w", noEOF(err))
	}
	if flags&flagCommand == 0 {
		return fmt.Errorf("%w: message before READY", ErrProtocol)
	}
	body, err := c.commandBody(size)
	if err != nil {
		return fmt.Errorf("read READY: %w", noEOF(err))
	}
	name, data, err := splitCommand(body)
	if err != nil {
		return err
	}
	switch string(name) {
	case "READY":
	case "ERROR":
		return fmt.Errorf("%w: peer refused the connection: %s", ErrProtocol, errorReason(data))
	default:
		return fmt.Errorf("%w: command %q instead of READY", ErrProtocol, clip(name))
	}
	socketType, identity, err := parseReady(data)
	if err != nil {
		return err
	}
	if !slices.Contains(peersOf[c.role], socketType) {
		// Send the peer the reason, as the specification asks; it is lost either way.
		reason := "socket type does not fit " + string(c.role)
		_, _ = c.nc.Write(appendCommand(nil, "ERROR", []byte{byte(len(reason))}, []byte(reason)))
		return fmt.Errorf("%w: %s cannot talk to a peer of socket type %q", ErrProtocol, c.role, clip([]byte(socketType)))
	}
	c.peerType, c.identity = socketType, identity
	return nil
}

// clip shortens bytes of a peer before they go into an error text.
func clip(b []byte) []byte {
	return b[:min(len(b), 32)]
}

// noEOF turns the end of the stream inside a unit into the error for it.
func noEOF(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}
