package api

import (
	"bytes"

	"github.com/zeebo/xxh3"
)

// MediaKind is what a part of a prompt is that is not text.
type MediaKind uint8

// The kinds of media. Those from [MediaImage] to [MediaVideo] are in [View.Media].
const (
	MediaNone MediaKind = iota
	MediaImage
	MediaAudio
	MediaVideo
	// MediaOther are files, documents and embeddings, whose tokens can be anything.
	MediaOther
)

var mediaNames = [...]string{"none", "image", "audio", "video", "other"}

// String is the kind in lower case, as in messages.
func (k MediaKind) String() string { return mediaNames[min(k, MediaOther)] }

// Media is one image, sound or video of a prompt.
type Media struct {
	Kind MediaKind
	// Value is where its content stands: the value of image_url, input_audio, source and the
	// like; empty where the client gives a UUID only.
	Value Span
	// UUID is the client's name of the content (vLLM); empty for none.
	UUID string
}

// mediaOf is what the name of a part, or of its member, speaks of.
func mediaOf(name []byte) MediaKind {
	if len(name) > 64 {
		return MediaNone
	}
	for _, w := range [...]struct {
		word string
		kind MediaKind
	}{{"embeds", MediaOther}, {"file", MediaOther}, {"document", MediaOther}, {"image", MediaImage}, {"audio", MediaAudio}, {"video", MediaVideo}} {
		if bytes.Contains(name, []byte(w.word)) {
			return w.kind
		}
	}
	return MediaNone
}

// mediaValue reads the content of a part that is not text. Of several, the longest is kept.
func (v *View) mediaValue(m *Media, i int) int {
	end := v.scan.Value(i)
	if end > 0 && v.Body[i] != 'n' && end-i > m.Value.Len() {
		m.Value = Span{i, end}
	}
	return end
}

// MediaName is a name of the content of an item: equal for items that an engine takes for the
// same one, and with 128 bits different for others. Items with a UUID are what it says.
func (v *View) MediaName(m *Media) [16]byte {
	if m.UUID != "" {
		return xxh3.HashString128("uuid:" + m.UUID).Bytes()
	}
	return xxh3.Hash128(m.Value.Of(v.Body)).Bytes()
}

// Fetched reports whether engines fetch the content of an item from an address, so that it may
// be another one each time. Content that comes with a UUID is not fetched where it is known.
func (v *View) Fetched(m *Media) bool {
	b := m.Value.Of(v.Body)
	return m.UUID == "" && (bytes.Contains(b, []byte("://")) || bytes.Contains(b, []byte(`:\/`)))
}
