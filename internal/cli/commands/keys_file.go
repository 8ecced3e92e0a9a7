package commands

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/dynctl/dynctl/internal/wait"
)

// lockWait is how long a command waits while others change the same file.
const lockWait = 10 * time.Second

// updateFile replaces the content of a file by what change makes of it. The content is empty
// where the file does not exist yet. Of several updates at the same time each sees what
// the one before it wrote. A reader sees the old content or the new one, never a part.
// A symbolic link is followed: the link stays, and its target is replaced, with its
// permissions. The error of change is returned as it is.
//
// kept is an error where the owner of the file could not be kept; the file is written
// nevertheless.
func updateFile(ctx context.Context, path string, patience time.Duration, change func(content []byte) ([]byte, error)) (kept, err error) {
	if path, err = followLink(path); err != nil {
		return nil, err
	}
	f, made, err := lockFile(ctx, path, patience)
	if err != nil {
		return nil, fmt.Errorf("%s is unchanged: %w", path, err)
	}
	defer f.Close()
	old, err := io.ReadAll(f)
	if err != nil {
		return nil, err
	}
	content, err := change(old)
	if err == nil {
		return replaceFile(path, content)
	}
	if made && len(old) == 0 {
		err = errors.Join(err, os.Remove(path))
	}
	return nil, err
}

// followLink returns the file that a path stands for, which need not exist.
func followLink(path string) (string, error) {
	target, err := filepath.EvalSymlinks(path)
	if !errors.Is(err, fs.ErrNotExist) {
		return target, err
	}
	to, err := os.Readlink(path)
	if err != nil {
		return path, nil // no link: a file that is made
	}
	if !filepath.IsAbs(to) {
		to = filepath.Join(filepath.Dir(path), to)
	}
	return followLink(to)
}

// lockFile opens a file and locks it until the file is closed. made is true where the file did
// not exist before. The system frees the lock when the process ends, however it ends. A file that was
// replaced meanwhile is left for the new one.
func lockFile(ctx context.Context, path string, patience time.Duration) (f *os.File, made bool, err error) {
	within, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		_, err := os.Stat(path)
		made := errors.Is(err, fs.ErrNotExist)
		f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600) // NFS locks only files that are open for writing
		if errors.Is(err, fs.ErrPermission) {
			f, err = os.Open(path)
		}
		if err != nil {
			return nil, false, err
		}
		held := wait.Until(within, 10*time.Millisecond, func() bool {
			err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
			return !errors.Is(err, syscall.EWOULDBLOCK) && !errors.Is(err, syscall.EINTR)
		})
		switch {
		case !held && ctx.Err() != nil:
			err = ctx.Err()
		case !held:
			err = fmt.Errorf("another process has held its lock for %v: end it (fuser %s finds it), or try again when it has ended", patience, path)
		case err != nil:
			err = fmt.Errorf("locking it: %w", err)
		case isStill(f, path):
			return f, made, nil
		}
		if err = errors.Join(err, f.Close()); err != nil {
			return nil, false, err
		}
	}
}

// isStill reports whether an open file is the one that a path leads to.
func isStill(f *os.File, path string) bool {
	open, err := f.Stat()
	now, e := os.Stat(path)
	return err == nil && e == nil && os.SameFile(open, now)
}

// replaceFile puts a file with content into the place of another, or of none. A new file is
// readable by its owner only.
func replaceFile(path string, content []byte) (kept, err error) {
	tmp, err := os.CreateTemp(filepath.Dir(path), ".keys-*")
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(tmp.Name()))
		}
	}()
	_, err = tmp.Write(content)
	if err = errors.Join(err, tmp.Sync(), tmp.Close()); err != nil {
		return nil, err
	}
	if info, e := os.Stat(path); e == nil { // whoever reads it now still can
		if err := os.Chmod(tmp.Name(), info.Mode().Perm()); err != nil {
			return nil, err
		}
		kept = keepOwner(tmp.Name(), path, info)
	}
	return kept, os.Rename(tmp.Name(), path)
}

// keepOwner gives a new file the owner and the group of the one that it replaces. Where
// only root may do that, the group alone is tried.
func keepOwner(path, of string, old fs.FileInfo) error {
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	was, is := old.Sys().(*syscall.Stat_t), info.Sys().(*syscall.Stat_t)
	if was.Uid == is.Uid && was.Gid == is.Gid || os.Chown(path, int(was.Uid), int(was.Gid)) == nil {
		return nil
	}
	err = fmt.Errorf("%s belonged to user %d and group %d, which could not be kept; change it with chown", of, was.Uid, was.Gid)
	if e := os.Chown(path, -1, int(was.Gid)); e != nil {
		err = fmt.Errorf("%w (%w)", err, e)
	}
	return err
}
