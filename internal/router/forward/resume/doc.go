// Package resume reads along with a stream so that another engine can continue it: it keeps
// the token ids that the engine reports, knows how many of them stand for the text that the
// client has, and makes one stream of what several engines say.
//
// What it cannot show to be right it refuses by name. It is pure: no clock, no
// socket.
package resume
