// Package repository tests what no package can test for itself: that documents, examples
// for deployment and the imports of all packages are what the code says, and that each
// step of a decision has one place.
package repository
