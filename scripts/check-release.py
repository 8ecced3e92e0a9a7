#!/usr/bin/env python3
"""Checks what goreleaser made:

  scripts/check-release.py DIST

Each archive has the files of goreleaser.yaml and nothing else, its binary is static and of
the right platform, each SBOM has the modules of its binary, the image has both
architectures, and checksums.txt has every file. The binary of this machine runs and shows
the release's version. Needs go, git and Python 3.
"""

import hashlib
import json
import pathlib
import platform
import subprocess
import sys
import tarfile
import tempfile

TARGETS = [(system, arch) for system in ("linux", "darwin") for arch in ("amd64", "arm64")]
PAGES = ["LICENSE", "README.md", "CHANGELOG.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md"]
SHELLS = ["_dynctl", "dynctl.bash", "dynctl.fish", "dynctl.ps1"]
MOST = 75_000_000  # bytes of a binary, as in .ci/run

problems = []


def need(ok, text):
    if not ok:
        problems.append(text)


def out(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def build(binary):
    """The settings and the modules that the binary was built with."""
    settings, modules = {}, set()
    for line in out("go", "version", "-m", binary).splitlines()[1:]:
        kind, *rest = line.split("\t")[1:]
        if kind == "build":
            key, _, value = rest[0].partition("=")
            settings[key] = value
        elif kind == "dep":
            modules.add(f"{rest[0]}@{rest[1]}")
    return settings, modules


def archive(path, system, arch, version, sbom, work):
    folder = path.name.removesuffix(".tar.gz")
    with tarfile.open(path) as tar:
        files = {m.name.removeprefix(folder + "/"): m for m in tar if not m.isdir()}
        stray = [m.name for m in tar if not m.isfile() and not m.isdir() or not m.name.startswith(folder)]
        tar.extractall(work, filter="data")
    need(not stray, f"{path.name}: not a file below {folder}: {stray}")
    man = {f for f in files if f.startswith("man/") and f.endswith(".1")}
    wanted = {"dynctl", *PAGES, *out("git", "ls-files", "docs", "deploy").split(), "man/dynctl.1", *man, *(f"completions/{s}" for s in SHELLS)}
    need(files.keys() == wanted, f"{path.name}: lacks {sorted(wanted - files.keys())}, has {sorted(files.keys() - wanted)}")
    need(all(m.size for m in files.values()), f"{path.name}: empty files")

    page = pathlib.Path(work, folder, "man", "dynctl.1").read_text()
    need(f"dynctl {version}" in page, f"{path.name}: the man page is not of version {version}")
    binary = pathlib.Path(work, folder, "dynctl")
    need(files["dynctl"].mode & 0o111 == 0o111, f"{path.name}: dynctl is not executable")
    need(files["dynctl"].size <= MOST, f"{path.name}: dynctl has {files['dynctl'].size} bytes, more than {MOST}")
    settings, modules = build(binary)
    for key, value in {"GOOS": system, "GOARCH": arch, "CGO_ENABLED": "0", "-trimpath": "true"}.items():
        need(settings.get(key) == value, f"{path.name}: {key} is {settings.get(key)}, not {value}")
    parts = {f"{c['name']}@{c['version']}" for c in json.loads(sbom.read_text())["components"] if c["name"] != "std"}
    need(parts == modules, f"{sbom.name}: differs from the binary in {sorted(parts ^ modules)}")

    here = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    if (system, arch) == (platform.system().lower(), here):
        shown = json.loads(out(binary, "version", "-o", "json"))["version"]
        need(shown == version, f"{path.name}: dynctl shows version {shown}, not {version}")
    return len(files)


def image(path):
    with tarfile.open(path) as tar:
        read = lambda name: json.load(tar.extractfile(f"./{name}"))
        blob = lambda digest: read("blobs/" + digest.replace(":", "/"))
        manifests = blob(read("index.json")["manifests"][0]["digest"])["manifests"]
    platforms = {f"{m['platform']['os']}/{m['platform']['architecture']}" for m in manifests}
    need(platforms == {"linux/amd64", "linux/arm64"}, f"{path.name}: has {sorted(platforms)}")


def main(dist):
    version = json.loads((dist / "metadata.json").read_text())["version"]
    tar = dist.parent / "dist-extra" / "image.tar"
    made = {f"dynctl_{version}_image.tar": tar}
    for system, arch in TARGETS:
        base = f"dynctl_{version}_{system}_{arch}"
        for name in (base + ".tar.gz", base + ".cdx.json"):
            made[name] = dist / name
    lacks = [name for name, path in made.items() if not path.is_file()]
    if lacks:
        sys.exit(f"{dist}: lacks {lacks}")

    sums = dict(reversed(line.split()) for line in (dist / "checksums.txt").read_text().splitlines())
    need(sums.keys() == made.keys(), f"checksums.txt: differs from the files in {sorted(sums.keys() ^ made.keys())}")
    for name, path in made.items():
        with path.open("rb") as f:
            need(hashlib.file_digest(f, "sha256").hexdigest() == sums.get(name), f"checksums.txt: not the sum of {name}")
    for system, arch in TARGETS:
        base = f"dynctl_{version}_{system}_{arch}"
        with tempfile.TemporaryDirectory() as work:
            files = archive(dist / f"{base}.tar.gz", system, arch, version, dist / f"{base}.cdx.json", work)
        print(f"{base}.tar.gz: {files} files")
    image(tar)
    for p in problems:
        print(p, file=sys.stderr)
    if problems:
        sys.exit(1)
    print(f"{dist}: {len(made)} files of {version} are as they must be")


main(pathlib.Path(sys.argv[1]).resolve())
