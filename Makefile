# What CONTRIBUTING.md names; CI runs .ci/run.
.DEFAULT_GOAL := build
.PHONY: help engines image test walks race lint workflows vuln snapshot release e2e kube bench soak soak-virtual build

help: ## this list
	@awk -F': ## ' '/^[a-z0-9-]+: ## / {printf "%-14s %s\n", $$1, $$2}' Makefile

build: ## the binary, in bin/dynctl
	CGO_ENABLED=0 go build -trimpath -o bin/dynctl ./cmd/dynctl

# The container image for Linux on amd64 and arm64, as an OCI layout in bin/image.
image: ## the container image, in bin/image
	scripts/image.sh bin/image

test: ## the tests
	go test ./...

# Additions and a release, as docs/additions.md and docs/releases.md show them, in a copy.
walks: ## the examples of docs/additions.md, built and tested
	DYNCTL_WALKS=1 go test -count=1 -timeout 60m -run TestDocumentWalks -v ./internal/rig/repository

race: ## the tests under the race detector
	CGO_ENABLED=1 go test -race -short ./...

lint: ## the linter, and functions that no command reaches
	cd .ci/tools && go build -o ../../bin/golangci-lint github.com/golangci/golangci-lint/v2/cmd/golangci-lint
	bin/golangci-lint run --timeout 10m ./...
	cd .ci/tools && go build -o ../../bin/deadcode golang.org/x/tools/cmd/deadcode
	dead=$$(bin/deadcode ./cmd/...) && echo "$$dead" && test -z "$$dead"

workflows: ## the workflows of .github, with actionlint
	go run github.com/rhysd/actionlint/cmd/actionlint@v1.7.12 -shellcheck= -pyflakes=

# Known vulnerabilities in what the binary calls, its modules' and Go's own. It asks the
# module proxy for the tool and vuln.go.dev for the list, and fails without them.
vuln: ## known vulnerabilities
	go run golang.org/x/vuln/cmd/govulncheck@v1.9.0 ./...

# A release without a tag, a signature and an upload. The first run compiles goreleaser.
GORELEASER ?= CGO_ENABLED=0 go run github.com/goreleaser/goreleaser/v2@v2.15.1
snapshot: ## the files of a release, made in dist and checked
	$(GORELEASER) check
	$(GORELEASER) release --snapshot --clean --skip=sign
	scripts/check-release.py dist

# For the workflow: it needs a tag, cosign with an identity, and GITHUB_TOKEN.
release: ## a draft of a release on GitHub, signed and checked
	$(GORELEASER) release --clean
	scripts/check-release.py dist

# Pods and their life on a real API server, which is started for that, and the chart
# installed there. helm is built where the path has none.
kube: ## pods and the chart on a real API server
	e2e/apiserver.py install
	export DYNCTL_E2E=1 PATH="$$PATH:$${DYNCTL_KUBE_HOME:-$$HOME/.cache/dynctl-kube}"; if [ -z "$$DYNCTL_KUBECONFIG" ]; then \
		trap 'e2e/apiserver.py down' EXIT; DYNCTL_KUBECONFIG=$$(e2e/apiserver.py up) || exit; \
		export DYNCTL_KUBECONFIG DYNCTL_KUBE_DOWN="./apiserver.py down" DYNCTL_KUBE_UP="./apiserver.py up"; \
	fi; go test -count=1 -timeout 20m -v -run Kubernetes ./e2e

# vLLM for this machine's CPU, some 6 GB in the user's cache.
engines: ## installs vLLM for this CPU
	e2e/engines.py install

# Real engines and real clients; every test says why it is skipped.
e2e: ## real engines and real clients
	DYNCTL_E2E=1 go test -count=1 -timeout 120m -v ./e2e

# The properties with new inputs, then an hour of abuse over simulated engines (an
# interrupt ends it early, with all checks), from a new seed unless DYNCTL_SOAK_SEED
# names one. The same faults under a virtual clock start at seed 1, or that one. From
# 2,000 seeds on the virtual form first proves that it finds bugs put in on purpose, the
# rare ones included: each is tried until it is found, in at most as many seeds.
# docs/testing.md.
soak: ## an hour of abuse (DYNCTL_SOAK=10m for less)
	DYNCTL_CHAOS=$${DYNCTL_CHAOS:-5} go test -count=1 -timeout 0 -run '^TestChaos$$' -v ./internal/router
	RAPID_SEED=$${DYNCTL_SOAK_SEED:-0} RAPID_CHECKS=$${RAPID_CHECKS:-2000} go test -count=1 -timeout 30m $$(grep -rl --include='*_test.go' internal/rig/property ./internal | xargs dirname | sort -u)
	DYNCTL_LIBZMQ_MINUTE=1 go test -count=1 -run '^TestInteropLibzmqSilence$$' ./internal/router/cache/kvfeed
	DYNCTL_SOAK=$${DYNCTL_SOAK:-1h} DYNCTL_SOAK_DIR=$${DYNCTL_SOAK_DIR:-$(CURDIR)/bin/soak} go test -count=1 -timeout 0 -run '^TestEndurance$$' -v ./internal/rig/soak

soak-virtual: ## 10,000 seeds under a virtual clock
	DYNCTL_SOAK_SEEDS=$${DYNCTL_SOAK_SEEDS:-10000} go test -count=1 -timeout 0 -run '^Test(PlantedBugsAreFound|Virtual)$$' -v ./internal/rig/virtualsoak ./internal/router/replicas

# The table of goals and figures; COUNT is the number of repetitions, and
# scripts/bench.sh says which rows need a file. docs/benchmarks.md.
COUNT ?= 3
bench: ## the table of speed goals (COUNT=3)
	scripts/bench.sh $(COUNT)
