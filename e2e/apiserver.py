#!/usr/bin/env python3
"""A real Kubernetes API server on loopback, for the tests of `make kube`.

  apiserver.py install   builds kube-apiserver and, where it is missing, helm from their Go
                         modules, once (some minutes)
  apiserver.py up        starts it with etcd, prints the path of a kubeconfig when it is ready
  apiserver.py down      ends both at once, as a machine that fails does
  apiserver.py restart   down and up on the same data: watches break, objects stay

Nothing else of Kubernetes runs: a pod exists when a test has written its status, and
answers where something listens at its address. Everything is in DYNCTL_KUBE_HOME
(~/.cache/dynctl-kube). Needs Go, openssl and etcd (Debian: etcd-server).
"""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import ssl
import subprocess
import sys
import time
import urllib.request

VERSION, HELM = "1.35.4", "3.19.0"
HOME = pathlib.Path(os.environ.get("DYNCTL_KUBE_HOME", "~/.cache/dynctl-kube")).expanduser()
SERVER, RUN = HOME / f"kube-apiserver-v{VERSION}", HOME / "run"
PORT = int(os.environ.get("KUBE_PORT", "16443"))  # etcd has the two above
TOKEN = "dynctl-test"

MAIN = """package main

import (
	"os"

	"k8s.io/component-base/cli"
	"k8s.io/kubernetes/cmd/kube-apiserver/app"
)

func main() { os.Exit(cli.Run(app.NewAPIServerCommand())) }
"""


def install():
    if not shutil.which("etcd"):
        sys.exit("etcd is not installed (Debian and Ubuntu: apt-get install etcd-server)")
    if not shutil.which("helm") and not (HOME / "helm").exists():
        HOME.mkdir(parents=True, exist_ok=True)
        subprocess.run(["go", "install", f"helm.sh/helm/v3/cmd/helm@v{HELM}"], check=True, env={**os.environ, "GOBIN": str(HOME)})
    if SERVER.exists():
        return
    src = HOME / "src"
    src.mkdir(parents=True, exist_ok=True)
    (src / "main.go").write_text(MAIN)
    (src / "go.mod").write_text(f"module kubeapiserver\n\ngo 1.25\n\nrequire k8s.io/kubernetes v{VERSION}\n")

    def go(*args):
        return subprocess.run(["go", *args], cwd=src, check=True, text=True, stdout=subprocess.PIPE).stdout

    # Kubernetes replaces its staging modules by folders beside it; published, they have
    # the same version with another major number.
    path = json.loads(go("mod", "download", "-json", f"k8s.io/kubernetes@v{VERSION}"))["GoMod"]
    for replaced in json.loads(go("mod", "edit", "-json", path))["Replace"]:
        if replaced["New"]["Path"].startswith("./staging/"):
            name = replaced["Old"]["Path"]
            go("mod", "edit", f"-replace={name}={name}@v0.{VERSION.removeprefix('1.')}")
    go("mod", "tidy")
    # Helm refuses a server that does not know its version.
    version, (major, minor, _) = "k8s.io/component-base/version", VERSION.split(".")
    flags = f"-X {version}.gitVersion=v{VERSION} -X {version}.gitMajor={major} -X {version}.gitMinor={minor}"
    go("build", "-p", "1", "-ldflags", flags, "-o", str(SERVER), ".")


def up():
    if not SERVER.exists() or not shutil.which("etcd"):
        sys.exit(f"no API server is installed: {sys.argv[0]} install")
    if any(RUN.glob("*.pid")):
        sys.exit("it is up")
    RUN.mkdir(parents=True, exist_ok=True)
    key = RUN / "accounts.key"
    if not key.exists():
        subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, stderr=subprocess.DEVNULL)
    (RUN / "tokens.csv").write_text(f'{TOKEN},admin,1,"system:masters"\n')
    client, peer = (f"http://127.0.0.1:{PORT + n}" for n in (1, 2))
    begin("etcd", "etcd", "--data-dir", RUN / "etcd", "--listen-client-urls", client, "--advertise-client-urls", client,
          "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}")
    begin("apiserver", SERVER, "--etcd-servers", client, "--bind-address", "127.0.0.1", "--advertise-address", "127.0.0.1",
          "--secure-port", PORT, "--cert-dir", RUN / "certs", "--service-account-key-file", key, "--service-account-signing-key-file", key,
          "--service-account-issuer", "https://kubernetes.default.svc", "--token-auth-file", RUN / "tokens.csv", "--authorization-mode", "RBAC",
          "--service-cluster-ip-range", "10.0.0.0/24", "--disable-admission-plugins", "ServiceAccount")
    config = RUN / "kubeconfig"
    config.write_text(json.dumps({
        "apiVersion": "v1", "kind": "Config", "current-context": "test",
        "clusters": [{"name": "test", "cluster": {"server": f"https://127.0.0.1:{PORT}", "insecure-skip-tls-verify": True}}],
        "users": [{"name": "admin", "user": {"token": TOKEN}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin", "namespace": "default"}}],
    }))
    end = time.monotonic() + 120
    while not ready():
        if time.monotonic() > end:
            down()
            sys.exit(f"the API server is not ready after two minutes: {RUN}/apiserver.log")
        time.sleep(0.5)
    print(config)


def begin(name, *command):
    with (RUN / f"{name}.log").open("a") as log:
        process = subprocess.Popen([str(c) for c in command], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    (RUN / f"{name}.pid").write_text(str(process.pid))


def ready():
    context = ssl._create_unverified_context()  # its certificate is its own
    request = urllib.request.Request(f"https://127.0.0.1:{PORT}/readyz", headers={"Authorization": f"Bearer {TOKEN}"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    with contextlib.suppress(OSError):
        return opener.open(request, timeout=2).status == 200
    return False


def down():
    for file in sorted(RUN.glob("*.pid")):
        pid = int(file.read_text())
        with contextlib.suppress(OSError):
            # Its number may be another's by now.
            exe = f"/proc/{pid}/exe"
            if os.path.basename(os.readlink(exe)) in ("etcd", SERVER.name):
                os.kill(pid, signal.SIGKILL)
                while os.readlink(exe): # an error when it has ended
                    time.sleep(0.05)
        file.unlink()


match sys.argv[1:]:
    case ["install"]:
        install()
    case ["up"]:
        up()
    case ["down"]:
        down()
    case ["restart"]:
        down()
        up()
    case _:
        sys.exit(__doc__)
