// Package hostile fills values with text that a terminal would obey, and checks that what
// is printed of them is harmless.
package hostile

import (
	"reflect"
	"regexp"
	"strings"
	"testing"
	"unicode/utf8"
)

// Text sets a title, clears the screen, switches to red by a C1 control and by a byte that
// is no UTF-8, turns the direction of what follows and forges a line. It begins with Name.
const Text = Name + "\x1b]0;title\x07\x1b[2J\u009b31m\x9b31m\u202e\u2066\x7f\u2028\rX\nFORGED line"

// Name is what a reader must still recognise of Text.
const Name = "name"

var obeyed = regexp.MustCompile("[\x00-\x09\x0b-\x1f\x7f\u0080-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]|(?m:^FORGED)")

// Fill sets every string that v, a pointer, leads to. Empty slices and maps get one element
// and nil pointers a value. All other fields stay.
func Fill(v any) { fill(reflect.ValueOf(v).Elem(), 0) }

func fill(v reflect.Value, depth int) {
	if depth > 12 || !v.CanSet() { // types that contain themselves end here
		return
	}
	switch v.Kind() {
	case reflect.String:
		v.SetString(Text)
	case reflect.Struct:
		for i := range v.NumField() {
			fill(v.Field(i), depth+1)
		}
	case reflect.Pointer:
		if v.IsNil() {
			v.Set(reflect.New(v.Type().Elem()))
		}
		fill(v.Elem(), depth+1)
	case reflect.Slice:
		if v.Type().Elem().Kind() == reflect.Uint8 {
			return
		}
		if v.Len() == 0 {
			v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		}
		for i := range v.Len() {
			fill(v.Index(i), depth+1)
		}
	case reflect.Array:
		for i := range v.Len() {
			fill(v.Index(i), depth+1)
		}
	case reflect.Map:
		key, value := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
		fill(key, depth+1)
		fill(value, depth+1)
		v.Set(reflect.MakeMap(v.Type()))
		v.SetMapIndex(key, value)
	case reflect.Interface:
		if v.NumMethod() == 0 {
			v.Set(reflect.ValueOf(Text))
		}
	default:
	}
}

// Check fails t where printed text has anything that a terminal obeys, or a line that the
// data began, or where the name of the data cannot be recognised.
func Check(t testing.TB, what, printed string) {
	t.Helper()
	if at := obeyed.FindStringIndex(printed); at != nil || !utf8.ValidString(printed) {
		if at == nil {
			at = []int{0, len(printed)}
		}
		t.Errorf("%s prints what a terminal obeys: …%q…", what, printed[max(0, at[0]-40):min(len(printed), at[1]+20)])
	}
	if !strings.Contains(printed, Name) {
		t.Errorf("%s does not show the name: %q", what, printed)
	}
}
