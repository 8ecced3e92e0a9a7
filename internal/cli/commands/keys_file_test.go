package commands

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/dynctl/dynctl/internal/rig/clitest"
	"github.com/dynctl/dynctl/internal/router/request/access"
)

const patient = time.Minute

// holdFile names the file that this process locks for ever, where a test started it.
const holdFile = "DYNCTL_TEST_HOLD_FILE"

func TestMain(m *testing.M) {
	if path := os.Getenv(holdFile); path != "" {
		f, _, err := lockFile(context.Background(), path, patient)
		if err != nil {
			fmt.Fprintln(os.Stdout, err)
			os.Exit(1)
		}
		fmt.Fprintln(os.Stdout, "locked")
		_, _ = io.Copy(io.Discard, os.Stdin) // until it is killed, or its parent is
		runtime.KeepAlive(f)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// TestKeysMadeTogether: keys that are made at the same moment all stand in the file,
// which is whole whenever it is read.
func TestKeysMadeTogether(t *testing.T) {
	path := filepath.Join(t.TempDir(), "keys.yaml")
	const n = 20
	secrets := make([]string, n)
	start, done := make(chan struct{}), make(chan struct{})
	var making, reading sync.WaitGroup
	for i := range n {
		making.Go(func() {
			<-start
			code, out, text := clitest.Run(newKeysCmd(), "", "new", fmt.Sprintf("key-%d", i), "--file", path)
			if secrets[i] = strings.TrimSpace(out); code != 0 {
				t.Errorf("exit code %d\n%s", code, text)
			}
		})
	}
	reading.Go(func() {
		known := 0
		for {
			set, err := access.ReadFile(path)
			switch {
			case errors.Is(err, fs.ErrNotExist):
			case err != nil:
				t.Error(err)
				return
			case len(set.Keys()) < known:
				t.Errorf("%d keys after %d", len(set.Keys()), known)
				return
			default:
				known = len(set.Keys())
			}
			select {
			case <-done:
				return
			default:
			}
		}
	})
	close(start)
	making.Wait()
	close(done)
	reading.Wait()
	set, err := access.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for i, secret := range secrets {
		if k := set.Find(secret); k == nil || k.Name != fmt.Sprintf("key-%d", i) {
			t.Errorf("key %d is not in the file: %v", i, k)
		}
	}
	if len(set.Keys()) != n {
		t.Errorf("%d keys", len(set.Keys()))
	}
	if left, err := filepath.Glob(filepath.Join(filepath.Dir(path), "*")); err != nil || len(left) != 1 {
		t.Errorf("%v %v", left, err)
	}
}

// TestLockOfAnotherProcess: a file that another process has locked is left alone with an
// error that says so; the lock ends with that process, even if it is killed.
func TestLockOfAnotherProcess(t *testing.T) {
	path := filepath.Join(t.TempDir(), "keys.yaml")
	other := exec.CommandContext(t.Context(), os.Args[0])
	other.Env = append(os.Environ(), holdFile+"="+path)
	in, err := other.StdinPipe() // open while this process lives
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	out, err := other.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := other.Start(); err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "locked\n" {
		t.Fatal(line, err)
	}
	add := func(b []byte) ([]byte, error) { return append(b, "keys: []\n"...), nil }
	if _, err := updateFile(t.Context(), path, time.Millisecond, add); err == nil || !strings.Contains(err.Error(), path+" is unchanged: another process has held its lock for 1ms") {
		t.Error(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := updateFile(ctx, path, patient, add); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if content, err := os.ReadFile(path); err != nil || len(content) != 0 {
		t.Errorf("%q %v", content, err)
	}
	if err := other.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = other.Wait() // it was killed
	if _, err := updateFile(t.Context(), path, patient, add); err != nil {
		t.Error(err)
	}
	if content, err := os.ReadFile(path); err != nil || string(content) != "keys: []\n" {
		t.Errorf("%q %v", content, err)
	}
}

// TestLinkToKeys: a symbolic link stays one, and the file behind it is replaced, or made.
func TestLinkToKeys(t *testing.T) {
	dir := t.TempDir()
	real, link, second := filepath.Join(dir, "secrets", "keys-v1.yaml"), filepath.Join(dir, "keys.yaml"), filepath.Join(dir, "again.yaml")
	if err := errors.Join(os.Mkdir(filepath.Dir(real), 0o700), os.Symlink(filepath.Join("secrets", "keys-v1.yaml"), link), os.Symlink(link, second)); err != nil {
		t.Fatal(err)
	}
	for i, path := range []string{link, second, real, second} {
		if code, _, text := clitest.Run(newKeysCmd(), "", "new", fmt.Sprint("key-", i), "--file", path); code != 0 {
			t.Fatal(text)
		}
		info, err := os.Lstat(real)
		if err != nil || !info.Mode().IsRegular() {
			t.Fatal(info, err)
		}
		if want := []fs.FileMode{0o600, 0o640, 0o640, 0o640}[i]; info.Mode().Perm() != want {
			t.Errorf("mode %v, want %v", info.Mode().Perm(), want)
		}
		if err := os.Chmod(real, 0o640); err != nil {
			t.Fatal(err)
		}
		if os.Geteuid() != 0 {
			continue // nobody else may give files away
		}
		if of := info.Sys().(*syscall.Stat_t); i > 0 && (of.Uid != 1234 || of.Gid != 4321) {
			t.Errorf("the file belongs to %d:%d now", of.Uid, of.Gid)
		}
		if err := os.Chown(real, 1234, 4321); err != nil {
			t.Fatal(err)
		}
	}
	for _, path := range []string{link, second} {
		if info, err := os.Lstat(path); err != nil || info.Mode().Type() != fs.ModeSymlink {
			t.Error(info, err)
		}
		if set, err := access.ReadFile(path); err != nil || len(set.Keys()) != 4 {
			t.Error(set, err)
		}
	}
	circle := filepath.Join(dir, "circle")
	if err := os.Symlink(circle, circle); err != nil {
		t.Fatal(err)
	}
	if code, _, text := clitest.Run(newKeysCmd(), "", "new", "x", "--file", circle); code == 0 || !strings.Contains(text, "too many links") {
		t.Error(text)
	}
}

// TestFailedKeyLeavesNothing: a key that is refused makes no file, and changes none.
func TestFailedKeyLeavesNothing(t *testing.T) {
	path := filepath.Join(t.TempDir(), "keys.yaml")
	if code, _, _ := clitest.Run(newKeysCmd(), "", "new", "x", "--role", "root", "--file", path); code == 0 {
		t.Error("a role that does not exist")
	}
	if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
	const bad = "keys: [{name: a}]\n"
	if err := os.WriteFile(path, []byte(bad), 0o400); err != nil {
		t.Fatal(err)
	}
	if code, _, text := clitest.Run(newKeysCmd(), "", "new", "x", "--file", path); code == 0 || !strings.Contains(text, `key "a"`) {
		t.Error(text)
	}
	if content, err := os.ReadFile(path); err != nil || string(content) != bad {
		t.Errorf("%q %v", content, err)
	}
}
