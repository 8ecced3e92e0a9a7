package main

import (
	"os"
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
	file := filepath.Join("..", "..", "deploy", "workers.yaml")
	content, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	specs, err := discovery.Parse(file, content)
	if err != nil {
		t.Error(err)
	}
	if _, err := workers.NewRegistry(nil).Apply("file", specs); err != nil || len(specs) != 2 {
		t.Errorf("%d workers: %v", len(specs), err)
	}
	if got, err := loadConfig("", newServeCmd().Flags()); err != nil || got.Config.Routing.Policy != "kv" {
		t.Errorf("defaults: %v", err)
	}
}
