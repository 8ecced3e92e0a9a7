package tokenize

import (
	"unicode/utf8"

	"github.com/dynctl/dynctl/internal/router/tokenize/rawjson"
)

// Kind is the shape of a request body.
type Kind string

// The closed set of kinds.
const (
	KindCompletion Kind = "completion" // /v1/completions: prompt
	KindChat       Kind = "chat"       // /v1/chat/completions: messages
	KindMessages   Kind = "messages"   // Anthropic /v1/messages: system, messages
	KindResponses  Kind = "responses"  // /v1/responses: instructions, input
)

// codePointsPerToken is the estimator's one constant.
const codePointsPerToken = 4

// Estimate guesses the number of prompt tokens of a request from its raw JSON
// body without a tokenizer. For completions and chat it is production-stack's
// estimator (pull request 890):
//
//   - a "prompt" key wins over "messages", even when its value is null;
//   - a string counts floor(code points / 4), a list of ids its elements;
//   - of messages, string contents and parts of type "text" are added up, and
//     one floor(total / 4) is taken at the end.
//
// A list of strings, which that estimator counts as one token each, is added
// up like messages, and a list of id lists counts all ids. Content of another
// shape counts 0. The other kinds add "system", and "instructions" and
// "input", in the same way. Of a repeated key the last value counts.
func Estimate(kind Kind, body []byte) int {
	var prompt, messages, system, instructions, input []byte
	err := rawjson.Object(body, func(k, v []byte) bool {
		switch string(k) {
		case "prompt":
			prompt = v
		case "messages":
			messages = v
		case "system":
			system = v
		case "instructions":
			instructions = v
		case "input":
			input = v
		}
		return true
	})
	if err != nil {
		return 0
	}
	switch kind {
	case KindMessages:
		return (contentPoints(system, false) + messagePoints(messages, false)) / codePointsPerToken
	case KindResponses:
		if rawjson.IsString(input) {
			return (rawjson.CodePoints(instructions) + rawjson.CodePoints(input)) / codePointsPerToken
		}
		return (rawjson.CodePoints(instructions) + messagePoints(input, true)) / codePointsPerToken
	}
	if prompt != nil {
		return promptTokens(prompt)
	}
	return messagePoints(messages, false) / codePointsPerToken
}

func promptTokens(v []byte) int {
	if rawjson.IsString(v) {
		return rawjson.CodePoints(v) / codePointsPerToken
	}
	points, ids := 0, 0
	_ = rawjson.Array(v, func(e []byte) bool { // not a list: 0
		switch e[0] {
		case '"':
			points += rawjson.CodePoints(e)
		case '[':
			_ = rawjson.Array(e, func([]byte) bool { ids++; return true })
		default:
			ids++
		}
		return true
	})
	return ids + points/codePointsPerToken
}

// messagePoints adds up the code points of a list of messages.
func messagePoints(v []byte, responses bool) int {
	n := 0
	_ = rawjson.Array(v, func(m []byte) bool {
		var content []byte
		_ = rawjson.Object(m, func(k, c []byte) bool { // not an object: 0
			if string(k) == "content" {
				content = c
			}
			return true
		})
		n += contentPoints(content, responses)
		return true
	})
	return n
}

// contentPoints counts a content: a string, or a list of parts.
func contentPoints(v []byte, responses bool) int {
	if rawjson.IsString(v) {
		return rawjson.CodePoints(v)
	}
	n := 0
	_ = rawjson.Array(v, func(p []byte) bool {
		n += rawjson.CodePoints(textPart(p, responses))
		return true
	})
	return n
}

// textPart returns the raw text of a content part, nil for another kind.
// responses also takes the part types of the Responses API.
func textPart(p []byte, responses bool) (text []byte) {
	isText := false
	_ = rawjson.Object(p, func(k, v []byte) bool {
		switch string(k) {
		case "type":
			isText = rawjson.Is(v, "text") || responses && (rawjson.Is(v, "input_text") || rawjson.Is(v, "output_text"))
		case "text":
			text = v
		}
		return true
	})
	if !isText {
		return nil
	}
	return text
}

// EstimateText is the estimate for one text.
func EstimateText(text string) int { return utf8.RuneCountInString(text) / codePointsPerToken }

// EstimateValue is Estimate for a completion or chat request that was decoded
// into Go values (map[string]any, []any, string, numbers).
func EstimateValue(req map[string]any) int {
	if p, ok := req["prompt"]; ok {
		switch p := p.(type) {
		case string:
			return EstimateText(p)
		case []any:
			points, ids := 0, 0
			for _, e := range p {
				switch e := e.(type) {
				case string:
					points += utf8.RuneCountInString(e)
				case []any:
					ids += len(e)
				default:
					ids++
				}
			}
			return ids + points/codePointsPerToken
		}
		return 0
	}
	messages, _ := req["messages"].([]any)
	n := 0
	for _, m := range messages {
		msg, _ := m.(map[string]any)
		switch c := msg["content"].(type) {
		case string:
			n += utf8.RuneCountInString(c)
		case []any:
			for _, p := range c {
				part, _ := p.(map[string]any)
				if part["type"] == "text" {
					s, _ := part["text"].(string)
					n += utf8.RuneCountInString(s)
				}
			}
		}
	}
	return n / codePointsPerToken
}
