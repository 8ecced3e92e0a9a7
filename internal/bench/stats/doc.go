// Package stats is the arithmetic of an honest comparison: quantiles, Student
// intervals, isotonic regression and the crossover of two arms with an
// interval. Everything is pure and seeded; the same data give the same answer.
package stats
