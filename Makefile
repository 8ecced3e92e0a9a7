# What the README names; CI runs .ci/run.
.PHONY: test race lint e2e bench soak fuzz build

build:
	CGO_ENABLED=0 go build -trimpath -o bin/dynctl ./cmd/dynctl

test:
	go test ./...

race:
	CGO_ENABLED=1 go test -race -short ./...

lint:
	cd .ci/tools && go build -o ../../bin/golangci-lint github.com/golangci/golangci-lint/v2/cmd/golangci-lint
	bin/golangci-lint run --timeout 10m ./...

# Real engines and real clients; every test says why it is skipped.
e2e:
	DYNCTL_E2E=1 go test -count=1 -timeout 60m -v ./e2e
