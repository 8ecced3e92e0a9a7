#!/usr/bin/env bash
# Makes the container image for Linux on amd64 and arm64 as an OCI layout:
#   scripts/image.sh DIR [VERSION]
# Registries take it from there with any tool that copies layouts:
#   skopeo copy --all oci:DIR:VERSION docker://registry.example/dynctl:VERSION
# SOURCE_DATE_EPOCH is the time in the image, otherwise that of the last commit.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:?the folder for the layout}
version=${2:-$(git describe --tags --always)}
case $out in /*) ;; *) out=$PWD/$out ;; esac
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
binaries=()
for arch in amd64 arm64; do
	CGO_ENABLED=0 GOOS=linux GOARCH=$arch go build -trimpath -ldflags "-s -w -X github.com/dynctl/dynctl/internal/cli.version=$version" -o "$work/$arch" ./cmd/dynctl
	binaries+=("linux/$arch=$work/$arch")
done
[ ! -e "$out/oci-layout" ] || rm -rf "$out"
mkdir -p "$(dirname "$out")"
go run -C .ci/image . -o "$out" -version "$version" -created "${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}" "${binaries[@]}"
echo "$out holds dynctl:$version"
