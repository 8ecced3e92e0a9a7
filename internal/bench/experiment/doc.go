// Package experiment runs a comparison of the local and the remote path so
// that its answer can be trusted: warm-up until drift stops, paired cells in
// ABBA order, an A/A check, refinement around the crossing, and gates. A gate
// that fails leaves no recommendation.
//
// What measures a cell is behind an interface: Live sends requests to a router,
// and tests run the same experiment over simulated engines under a virtual
// clock.
package experiment
