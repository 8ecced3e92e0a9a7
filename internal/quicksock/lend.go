package quicksock

// Of a vectored write, one call takes so many pieces and bytes at most: a
// larger one would keep a stop of the world waiting.
const (
	maxVector      = 64
	maxVectorBytes = 64 << 10
)

// Lender has memory for reads.
type Lender interface {
	// Take returns a buffer that is not empty.
	Take() []byte
	// Give takes one back that was not used.
	Give(p []byte)
}

// LendingReader is a connection that needs memory for a read only once there
// may be something to read, so that one that waits holds none.
type LendingReader interface {
	// ReadLent reads once into a buffer from l and returns the buffer, always,
	// and the number of bytes read.
	ReadLent(l Lender) (p []byte, n int, err error)
}

// VectorWriter is a connection that writes many pieces with few calls, without
// joining them.
type VectorWriter interface {
	// WriteAll writes all pieces, which it neither changes nor keeps, and
	// returns how many bytes were taken.
	WriteAll(pieces [][]byte) (int64, error)
}
