package workers

// Peer is a rank with its worker: what a candidate stands for and a leg is sent to.
type Peer struct {
	Worker *Worker
	Rank   *Rank
}
