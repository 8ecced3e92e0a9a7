package main

import (
	"path/filepath"
	"testing"

	"github.com/dynctl/dynctl/internal/workers"
	"github.com/dynctl/dynctl/internal/workers/discovery"
)

// TestDeployExamples: the examples that operators copy are valid.
func TestDeployExamples(t *testing.T) {
	if _, err := loadConfig(filepath.Join("..", "..", "deploy", "dynctl.yaml"), newServeCmd().Flags()); err != nil {
		t.Error(err)
	}
	reg := workers.NewRegistry(nil)
	f := discovery.NewFile(reg, discovery.FileOptions{Path: filepath.Join("..", "..", "deploy", "workers.yaml")}, nil)
	if err := f.Load(); err != nil {
		t.Error(err)
	}
	if n := len(reg.Snapshot().Workers); n != 2 {
		t.Errorf("%d workers", n)
	}
	if got, err := loadConfig("", newServeCmd().Flags()); err != nil || got.Config.Routing.Policy != "kv" {
		t.Errorf("defaults: %v", err)
	}
}
