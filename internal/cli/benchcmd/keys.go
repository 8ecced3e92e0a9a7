package benchcmd

import (
	"errors"
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// keyPause is how long a look at the keyboard waits, in ms, and with it how
// late the end of the reading and a return to the foreground are noticed.
const keyPause = 100

// readKeys calls press with every key on a terminal, unechoed and without enter;
// ctrl-c and ctrl-z stay what they are. stop puts the terminal back as it was
// and may be called twice. A process in the background leaves it alone.
func readKeys(f *os.File, press func(byte)) (stop func(), err error) {
	fd := int(f.Fd())
	was, err := unix.IoctlGetTermios(fd, termiosGet)
	if err != nil {
		return nil, fmt.Errorf("keys: %w", err)
	}
	k := &keyboard{fd: fd, was: *was, press: press, over: make(chan struct{}), joined: make(chan struct{})}
	if err := k.claim(); err != nil {
		return nil, fmt.Errorf("keys: %w", err)
	}
	go k.read()
	return sync.OnceFunc(func() {
		close(k.over)
		<-k.joined
	}), nil
}

// escape begins what keys with names send.
const escape = 0x1b

type keyboard struct {
	fd           int
	was          unix.Termios
	press        func(byte)
	over, joined chan struct{}
}

// foreground reports whether the terminal is this process's to use: reading it
// or setting it from the background would stop the process.
func (k *keyboard) foreground() bool {
	group, err := unix.IoctlGetInt(k.fd, unix.TIOCGPGRP)
	return err != nil || group == unix.Getpgrp() // an error: not the controlling terminal
}

// claim turns line editing and echo off where they are on: at first, and when
// a shell had the terminal in between.
func (k *keyboard) claim() error {
	if !k.foreground() {
		return nil
	}
	now, err := unix.IoctlGetTermios(k.fd, termiosGet)
	if err != nil || now.Lflag&(unix.ICANON|unix.ECHO) == 0 {
		return err
	}
	now.Lflag &^= unix.ICANON | unix.ECHO
	now.Cc[unix.VMIN], now.Cc[unix.VTIME] = 0, 0
	return unix.IoctlSetTermios(k.fd, termiosSet, now)
}

func (k *keyboard) read() {
	defer close(k.joined)
	// A panic in what a key does must not leave the terminal silent.
	defer k.restore()
	var b [16]byte
	for {
		select {
		case <-k.over:
			return
		default:
		}
		fds := []unix.PollFd{{Fd: int32(k.fd), Events: unix.POLLIN}}
		n, err := unix.Poll(fds, keyPause)
		if err != nil && !errors.Is(err, unix.EINTR) || n > 0 && fds[0].Revents&unix.POLLIN == 0 {
			return // the terminal is gone
		}
		if k.claim() != nil {
			return
		}
		if n <= 0 {
			continue
		}
		if !k.foreground() {
			// What was typed is for the shell; a look in a while is enough.
			_, _ = unix.Poll(nil, keyPause)
			continue
		}
		n, err = unix.Read(k.fd, b[:])
		if err != nil && !errors.Is(err, unix.EINTR) && !errors.Is(err, unix.EAGAIN) {
			return
		}
		const quick = 3 // keys that may have been pressed since the last look
		if n > quick || n > 0 && b[0] == escape {
			continue // pasted text, or a key with a name, such as an arrow
		}
		for _, key := range b[:max(n, 0)] {
			k.press(key)
		}
	}
}

func (k *keyboard) restore() {
	if k.foreground() {
		_ = unix.IoctlSetTermios(k.fd, termiosSet, &k.was) // gone, if that fails
	}
}
