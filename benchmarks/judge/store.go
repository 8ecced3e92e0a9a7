package main

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
)

// store keeps results in a folder: runs of this build, so that a judgement that was
// interrupted resumes, and capacities, so that later builds are judged under the same loads.
type store struct {
	mu         sync.Mutex
	runs       map[string]figures
	file       *os.File
	capacities map[string]float64
	capacity   string // the file
}

// record is a line of the file of runs.
type record struct {
	Key     string  `json:"key"`
	Figures figures `json:"figures"`
}

// openStore opens the folder. program is the running program's file: its bytes name the
// file of runs, since the runs of another build say nothing about this one.
func openStore(dir, program string) (s *store, err error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	build, err := fingerprint(program)
	if err != nil {
		return nil, err
	}
	s = &store{runs: map[string]figures{}, capacities: map[string]float64{}, capacity: filepath.Join(dir, "capacity.json")}
	raw, err := os.ReadFile(s.capacity)
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return nil, err
	default:
		if err := json.Unmarshal(raw, &s.capacities); err != nil {
			return nil, fmt.Errorf("%s: %w: remove the file to find the capacities again", s.capacity, err)
		}
	}
	if s.file, err = os.OpenFile(filepath.Join(dir, "runs-"+build+".jsonl"), os.O_RDWR|os.O_CREATE|os.O_APPEND, 0o644); err != nil {
		return nil, err
	}
	if err := s.read(); err != nil {
		s.file.Close()
		return nil, err
	}
	return s, nil
}

// fingerprint is the beginning of the hash of a file's content.
func fingerprint(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "", err
	}
	return fmt.Sprintf("%x", h.Sum(nil)[:6]), nil
}

// read loads the runs. A last line that an interruption cut is dropped.
func (s *store) read() error {
	in := bufio.NewReader(s.file)
	whole := int64(0)
	for {
		line, err := in.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			return s.file.Truncate(whole)
		}
		if err != nil {
			return err
		}
		var r record
		if err := json.Unmarshal(line, &r); err != nil {
			return fmt.Errorf("%s: byte %d: %w: remove the file to run everything again", s.file.Name(), whole, err)
		}
		whole += int64(len(line))
		s.runs[r.Key] = r.Figures
	}
}

// run returns the figures of a run that was made before.
func (s *store) run(key string) (figures, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f, ok := s.runs[key]
	return f, ok
}

// addRun keeps the figures of a run.
func (s *store) addRun(key string, f figures) error {
	line, err := json.Marshal(record{key, f})
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.runs[key] = f
	_, err = s.file.Write(append(line, '\n'))
	return err
}

// limit returns a capacity that was found before.
func (s *store) limit(key string) (float64, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	v, ok := s.capacities[key]
	return v, ok
}

// addLimit keeps a capacity.
func (s *store) addLimit(key string, v float64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.capacities[key] = v
	var text bytes.Buffer
	enc := json.NewEncoder(&text)
	enc.SetIndent("", "  ")
	if err := enc.Encode(s.capacities); err != nil {
		return err
	}
	tmp := s.capacity + ".new"
	if err := os.WriteFile(tmp, text.Bytes(), 0o644); err != nil {
		return err
	}
	return os.Rename(tmp, s.capacity)
}

func (s *store) close() error { return s.file.Close() }
