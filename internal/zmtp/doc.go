// Package zmtp is a ZeroMQ connection: the part of ZMTP that an engine's KV
// event sockets speak, with no C library and no unbounded memory.
//
// Read from the ZMTP 3.0 and 3.1 specifications (ZeroMQ RFC 23 and 37) and
// checked against libzmq 4.3. Only the NULL mechanism exists. Transports are
// tcp:// and ipc://. Roles are SUB and DEALER (the router's side of the KV event
// feed and of replay), PUB and ROUTER (the simulated engine's side).
//
// The wire, as both sides send it:
//
//	greeting   = FF 00*8 7F  03 minor  "NULL" 00*16  as-server 00*31   ; 64 bytes
//	handshake  = command(READY, *property)        ; or command(ERROR, reason)
//	property   = len8 name  len32be value         ; names are case-insensitive
//	traffic    = *(message | command)
//	message    = *frame(MORE) frame
//	frame      = flags (len8 | len64be) body      ; flags: 1 MORE, 2 LONG, 4 COMMAND
//	command    = frame whose body is  len8 name data
//	subscribe  = message(01 topic) | command(SUBSCRIBE, topic)      ; 3.0 | 3.1
//	cancel     = message(00 topic) | command(CANCEL, topic)         ; 3.0 | 3.1
//	heartbeat  = command(PING, ttl16be context) answered by command(PONG, context)
//
// A Conn never reconnects: it ends with an error and its owner decides what an interruption
// means. Only a dialling Pub redials, because a publisher has nothing to lose by it.
// Everything that a peer controls is limited (see Limits), memory grows with the bytes that
// arrived rather than with the bytes that were announced, and a peer's fault ends that peer
// alone.
package zmtp
