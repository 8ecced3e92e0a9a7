#!/usr/bin/env python3
"""Measures routers side by side on one machine, over loopback only.

    benchmarks/routers.py install [ROUTER...]       from the package registries, by name
    benchmarks/routers.py measure [ROUTER...]       appends runs to a file
    benchmarks/routers.py pairs OLD NEW             two binaries of dynctl in turns
    benchmarks/routers.py table                     medians and ranges of that file

The routers are those of routers.toml; without a name, all. Needed are Linux, Python 3.11,
Go, and a right to use apt-get where wrk or nginx is not installed.

Each case runs in a network namespace that has loopback alone, where the system allows
one. What counts is the CPU time of the router's processes, divided by the requests (or
streamed events) that the client got: with two cores, rates say more of engines and
client. A run in which others used more than --noise cores is kept and does not count;
passes go on until each case has its runs. Every pass restarts every router. Of pairs both
binaries run at once, and are asked in turns of a second (streams: of four); each pass is
one pair, which does not count either where others used more.
"""
import argparse
import contextlib
import json
import os
import pathlib
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.error
import urllib.request

HERE = pathlib.Path(__file__).resolve().parent
PLAN = tomllib.loads((HERE / "routers.toml").read_text())
PORTS = {"port": 27110, "prom": 27190, "w1": 27101, "w2": 27102, "p1": 27103, "d1": 27104, "boot": 27203}  # boot: of mockers; SGLang's engines report theirs
TICK = os.sysconf("SC_CLK_TCK")
EVENTS = 100  # of a stream
CASES = {  # bytes of the prompt, connections, whether the answer is a paced stream
    "1 connection": (1_000, 1, False),
    "1 KB": (1_000, 32, False),
    "32 KB": (32_000, 32, False),
    "220 KB": (220_000, 32, False),
    "stream": (1_000, 32, True),
}
LUA = """
local size, stream, key = {size}, {stream}, "{key}"
local heads, word = {{}}, {words}
for i = 1, 64 do
  local t, n = {{}}, 0
  while n < size do
    local w = word[(i * 7 + #t * 13) % #word + 1] .. " "
    t[#t + 1], n = w, n + #w
  end
  heads[i] = table.concat(t):sub(1, size - 20)
end
local n = 0
local headers = {{ ["content-type"] = "application/json" }}
if key ~= "" then headers["authorization"] = "Bearer " .. key end
function request()
  n = n + 1
  local body = '{{"model":"sim","messages":[{{"role":"user","content":"' .. heads[n % 64 + 1] .. " number " .. n .. '"}}],"ignore_eos":true,"max_tokens":'
  if stream then body = body .. '{events},"stream":true}}' else body = body .. '1}}' end
  return wrk.format("POST", "/v1/chat/completions", headers, body)
end
function done(summary, latency)
  local e = summary.errors
  io.write(string.format('{{"requests":%d,"us":%d,"bad":%d,"p50_us":%d,"p99_us":%d}}\\n',
    summary.requests, summary.duration, e.connect + e.read + e.write + e.status + e.timeout, latency:percentile(50), latency:percentile(99)))
end
"""
WORDS = "{" + ",".join(f'"{w}"' for w in "time people way water words number part sound work place year back thing name sentence line".split()) + "}"


def fill(text, values):
    for name, value in values.items():
        text = text.replace("{" + name + "}", str(value))
    return text


def chosen(names):
    for name in names:
        if name not in PLAN["routers"]:
            sys.exit(f"no router {name!r} in {HERE / 'routers.toml'}: it has {', '.join(PLAN['routers'])}")
    return {name: PLAN["routers"][name] for name in names or PLAN["routers"]}


def install(args):
    def command(what):
        if what.get("needs") and not shutil.which(what["needs"]):
            for line in what["install"]:
                subprocess.run(shlex.split(line), check=True)

    for tool in PLAN["tools"].values():
        command(tool)
    for name, router in chosen(args.router).items():
        router, name = PLAN["routers"][router["same"]] if "same" in router else router, router.get("same", name)
        command(router)
        if "venv" not in router:
            continue
        home = args.home / name
        if not (home / "bin/python").exists():
            subprocess.run([sys.executable, "-m", "venv", home], check=True)
        pip = [home / "bin/pip", "install", "-q"]
        if "no_deps" in router:
            subprocess.run([*pip, "--no-deps", *router["no_deps"]], check=True)
        subprocess.run([*pip, *router["venv"]], check=True)
        if "model" in router:
            model = pathlib.Path(fill(router["model"], {"home": args.home}))
            subprocess.run([home / "bin/python", HERE / "model.py", model], check=True)
        print(f"{name}: installed in {home}")
    print(f"dynctl: {binary(args)}")


def binary(args):
    """The dynctl that engines and router are, built from this tree unless one is named."""
    if args.dynctl:
        return args.dynctl.resolve()
    out = args.home / "dynctl"
    args.home.mkdir(parents=True, exist_ok=True)
    subprocess.run(["go", "build", "-trimpath", "-ldflags", "-s -w", "-o", out, "./cmd/dynctl"], cwd=HERE.parent, check=True, env=os.environ | {"CGO_ENABLED": "0"})
    return out


def family(roots):
    """The processes that descend from some, themselves included."""
    parents = {}
    for p in pathlib.Path("/proc").iterdir():
        if p.name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(p.name)] = int((p / "stat").read_text().rpartition(")")[2].split()[1])
    found = set(roots)
    while more := {p for p, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def cpu(pids):
    """CPU seconds that processes have used, threads that ended included."""
    total = 0
    for p in pids:
        with contextlib.suppress(OSError):
            fields = pathlib.Path(f"/proc/{p}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
    return total / TICK


def busy():
    """CPU seconds of the whole machine since its start."""
    user, nice, system, _, _, irq, soft, steal = map(int, pathlib.Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + soft + steal) / TICK


def memory(pids):
    """The memory in MiB that processes have in RAM."""
    total = 0
    for p in pids:
        with contextlib.suppress(OSError, IndexError):
            total += int(pathlib.Path(f"/proc/{p}/statm").read_text().split()[1])
    return total * os.sysconf("SC_PAGESIZE") / 2**20


class Stand:
    """A router in front of its engines."""

    def __init__(self, router, paced, dynctl, args, engines=None, ports=0):
        """Starts it; engines is the dynctl that they are, ports is added to the numbers of PORTS."""
        self.run = pathlib.Path(tempfile.mkdtemp(prefix="routers-"))
        self.processes, self.key, self.legs = [], router.get("key", ""), router.get("legs", 1)
        profile = "instant"
        if paced:
            profile = self.run / "paced.yaml"
            profile.write_text("name: paced\nprefill_ms: [0, 0, 0]\ndecode_ms: [10, 0, 0]\ntransfer_ms: [0, 0]\n")
        numbers = {name: port + ports for name, port in PORTS.items()}
        self.values = numbers | {"home": args.home, "run": self.run, "dynctl": engines or dynctl, "profile": profile, "speedup": 1 if paced else 1_000_000}
        self.env = os.environ | {k: fill(v, self.values) for k, v in router.get("env", {}).items()}
        try:
            if "file" in router:
                (self.run / router["file"]).write_text(fill(router["text"], self.values))
            for line in PLAN["engines"][router["engines"]]:
                self.start("engine", line)
            self.port = int(fill(router.get("port", "{port}"), self.values))
            if "mocker" not in router["engines"]:
                self.healthy(self.values["d1" if self.legs == 2 else "w1"])
            if router["engines"] == "sglang-pair":
                with urllib.request.urlopen(f"http://127.0.0.1:{self.values['p1']}/server_info", timeout=5) as page:
                    self.values["boot"] = json.load(page)["disaggregation_bootstrap_port"]
            self.values["dynctl"] = dynctl
            self.router = self.start("router", router["start"]).pid if "start" in router else None
            self.wait(self.port)
        except BaseException:
            self.close(keep=True)
            raise

    def start(self, log, line):
        out = open(self.run / f"{log}-{len(self.processes)}.log", "wb")
        p = subprocess.Popen(shlex.split(fill(line, self.values)), stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=self.env, start_new_session=True)
        self.processes.append(p)
        return p

    def healthy(self, port):
        """Waits until an engine says that it is well; one of a pair may answer nothing alone."""
        self.until(port, lambda: urllib.request.Request(f"http://127.0.0.1:{port}/health"))

    def wait(self, port):
        """Waits until an answer comes through a port."""
        body = json.dumps({"model": "sim", "messages": [{"role": "user", "content": "ready?"}], "max_tokens": 1}).encode()
        head = {"content-type": "application/json"} | ({"authorization": f"Bearer {self.key}"} if self.key else {})
        self.until(port, lambda: urllib.request.Request(f"http://127.0.0.1:{port}/v1/chat/completions", body, head))

    def until(self, port, question, patience=90):
        end, said = time.monotonic() + patience, ""
        while time.monotonic() < end:
            for p in self.processes:
                if p.poll() is not None:
                    raise RuntimeError(f"{shlex.join(map(str, p.args))} ended with {p.returncode}: its output is in {self.run}")
            try:
                with urllib.request.urlopen(question(), timeout=5) as answer:
                    answer.read()
                    return
            except (OSError, urllib.error.URLError) as e:
                said = str(e)
                time.sleep(0.2)
        raise TimeoutError(f"nothing answers at port {port} after {patience} s ({said}): the output is in {self.run}")

    def moved(self):
        """Prompt tokens of the decode engine, and those that came from the prefill engine; None where it does not say."""
        with contextlib.suppress(OSError):
            with urllib.request.urlopen(f"http://127.0.0.1:{self.values['d1']}/metrics", timeout=5) as page:
                found = {"vllm:external_prefix_cache_queries_total": 0.0, "vllm:external_prefix_cache_hits_total": 0.0}
                for line in page.read().decode().splitlines():
                    name, _, value = line.partition("{")
                    if name in found:
                        found[name] += float(value.rpartition(" ")[2])
                asked, hits = found.values()
                return (asked, hits) if asked else None
        return None

    def load(self, case, seconds):
        """Asks as fast as answers come, and returns what wrk says of it."""
        size, connections, stream = CASES[case]
        script = self.run / f"load-{size}-{stream}.lua"
        if not script.exists():
            script.write_text(LUA.format(size=size, stream=str(stream).lower(), key=self.key, words=WORDS, events=EVENTS))
        line = ["wrk", "-t", "1", "-c", str(connections), "-d", f"{seconds}s", "--timeout", "60s", "-s", script, f"http://127.0.0.1:{self.port}"]
        return json.loads(subprocess.run(line, capture_output=True, check=True, text=True).stdout.splitlines()[-1])

    def measure(self, case, seconds, warm=2):
        if warm:
            self.load(case, warm)
        resources()
        moved = self.moved() if self.legs == 2 else None
        own = family([os.getpid()])
        routers = family([self.router]) if self.router else set()
        start, before, all_before = time.monotonic(), cpu(own), busy()
        used = cpu(routers)
        row = self.load(case, seconds)
        used = cpu(routers) - used
        took = time.monotonic() - start
        own |= family([os.getpid()])
        mine = cpu(own) - before + resources()
        row["others"] = max(0.0, (busy() - all_before - mine) / took)
        n = row["requests"] * (EVENTS if CASES[case][2] else 1)
        row["us"] = used / n * 1e6 if n and self.router else None
        row["mib"] = memory(routers) if self.router else None
        if moved and (after := self.moved()):
            row["moved"] = (after[1] - moved[1]) / max(1.0, after[0] - moved[0])
        return row

    def close(self, keep=False):
        """Ends all processes, and forgets their output unless it is to be kept."""
        pids = family([p.pid for p in self.processes])
        for sig in signal.SIGTERM, signal.SIGKILL:
            for p in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(p, sig)
            for p in self.processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    p.wait(5)
            if all(p.poll() is not None for p in self.processes):
                break
        if not keep:
            shutil.rmtree(self.run, ignore_errors=True)


def resources():
    """CPU seconds of children that have ended since this was called last."""
    t = os.times()
    used = t.children_user + t.children_system
    used, resources.before = used - getattr(resources, "before", 0.0), used
    return used


def alone(args):
    """Goes on in a network namespace of its own, if the system allows one."""
    if os.environ.get("ROUTERS_ALONE") or not args.namespace:
        return
    if subprocess.run(["unshare", "-rn", "true"], capture_output=True).returncode:
        print("no network namespace can be made here: what listens on all addresses is open to the network", file=sys.stderr)
        return
    os.environ["ROUTERS_ALONE"] = "1"
    os.execvp("unshare", ["unshare", "-rn", "sh", "-c", 'ip link set lo up && exec "$@"', "-", sys.executable, *sys.argv])


def runs(file):
    with contextlib.suppress(FileNotFoundError):
        return [json.loads(line) for line in file.read_text().splitlines()]
    return []


def measure(args):
    binaries = {"": binary(args)}
    alone(args)
    take(args, [(name, router, binaries[""]) for name, router in chosen(args.router).items()])


def pairs(args):
    """Both binaries stand at once, in front of engines that are the new one. A run of each is made
    of parts, in turns: what changes the machine's speed for seconds meets both."""
    alone(args)
    first = max((r["pass"] for r in runs(args.out)), default=-1) + 1  # a second ten in one file is no other first
    for turn in range(first, first + args.runs):
        for name in args.router or ["dynctl", "dynctl-pair"]:
            for paced in False, True:
                cases = [c for c in args.case or CASES if CASES[c][2] == paced]
                if cases:
                    pair(args, turn, name, paced, cases)
    table(args)


def pair(args, turn, name, paced, cases):
    router, stands = chosen([name])[name], {}
    try:
        for k, which in enumerate(("old", "new")):
            stands[which] = Stand(router, paced, getattr(args, which).resolve(), args, engines=args.new.resolve(), ports=-1000 * k)
        for case in cases:
            parts = {which: [] for which in stands}
            longer = 4 if paced else 1  # a paced stream takes a second, and those that are cut count for nothing
            for part in range(max(1, args.parts // longer)):
                for which in ("old", "new") if (turn + part) % 2 == 0 else ("new", "old"):
                    warm = 0 if part else 2
                    parts[which].append(stands[which].measure(case, args.seconds * longer, warm))
            for which, found in parts.items():
                row = {"router": f"{name} ({which})", "case": case, "pass": turn} | together(found)
                with args.out.open("a") as f:
                    f.write(json.dumps(row) + "\n")
                print(line(row), flush=True)
    finally:
        for stand in stands.values():
            stand.close()


def together(parts):
    """One run of its parts: the CPU of all by the requests of all."""
    requests = sum(p["requests"] for p in parts)
    row = {k: max(p[k] for p in parts) for k in ("p99_us", "mib")} | {"bad": sum(p["bad"] for p in parts), "requests": requests}
    row |= {k: statistics.mean(p[k] for p in parts) for k in ("others", "p50_us")}
    row["us"] = sum(p["us"] * p["requests"] for p in parts if p["us"]) / max(requests, 1)
    if all("moved" in p for p in parts):
        row["moved"] = min(p["moved"] for p in parts)
    return row


def take(args, stands):
    for turn in range(args.passes):
        have = runs(args.out)
        todo = 0
        # In every other pass the other way round, so that a drift of the machine is nobody's.
        for name, router, dynctl in stands if turn % 2 == 0 else stands[::-1]:
            for paced in False, True:
                cases = [c for c in args.case or CASES if CASES[c][2] == paced and
                         sum(r["router"] == name and r["case"] == c and r["others"] <= args.noise for r in have) < args.runs]
                if not cases:
                    continue
                todo += 1
                try:
                    stand = Stand(router, paced, dynctl, args)
                except (OSError, RuntimeError) as e:
                    print(f"{name}: {e}", file=sys.stderr)
                    continue
                try:
                    for case in cases:
                        row = {"router": name, "case": case, "pass": turn} | stand.measure(case, args.seconds)
                        with args.out.open("a") as f:
                            f.write(json.dumps(row) + "\n")
                        print(line(row), flush=True)
                finally:
                    stand.close()
        if not todo:
            return
    print(f"some cases have fewer than {args.runs} quiet runs after {args.passes} passes", file=sys.stderr)


def line(row):
    unit = "event" if CASES[row["case"]][2] else "request"
    words = f"{row['router']}, {row['case']}: {row['requests']} requests, p50 {row['p50_us'] / 1000:.2f} ms, others {row['others']:.2f} cores"
    if row["us"] is not None:
        words += f", {row['us']:.1f} µs of CPU a {unit}, {row['mib']:.0f} MiB"
    if "moved" in row:
        words += f", {row['moved']:.0%} of the prompt moved"
    return words + (f", {row['bad']} FAILED" if row["bad"] else "")


def table(args):
    rows = [r for r in runs(args.out) if r["others"] <= args.noise]
    names = list(dict.fromkeys(r["router"] for r in rows))
    cases = [c for c in CASES if any(r["case"] == c for r in rows)]

    def cell(name, case, figure, digits):
        found = sorted(r[figure] for r in rows if r["router"] == name and r["case"] == case and r.get(figure) is not None)
        if not found:
            return "–"
        return f"{statistics.median(found):.{digits}f} ({found[0]:.{digits}f}–{found[-1]:.{digits}f})"

    head = ["router"] + [f"{c}, µs" if c != "stream" else "streamed event, µs" for c in cases] + ["1 connection, p50 ms", "MiB", "moved", "failed"]
    print("CPU of the router, median (range):\n")
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for name in names:
        own = [r for r in rows if r["router"] == name]
        one = sorted(r["p50_us"] / 1000 for r in own if r["case"] == "1 connection")
        moved = [r["moved"] for r in own if "moved" in r]
        size = [r["mib"] for r in own if r["mib"] is not None]
        print("| " + " | ".join([name] + [cell(name, c, "us", 1 if c == "stream" else 0) for c in cases] + [
            f"{statistics.median(one):.3f}" if one else "–", f"{max(size):.0f}" if size else "–", f"{min(moved):.0%}" if moved else "–", str(sum(r["bad"] for r in own))]) + " |")
    for new in (n for n in names if n.endswith(" (new)")):
        old = new.replace(" (new)", " (old)")
        for case in cases:
            passes = {p: {r["router"]: r["us"] for r in rows if r["pass"] == p and r["case"] == case} for p in {r["pass"] for r in rows}}
            ratios = sorted(p[new] / p[old] for p in passes.values() if p.get(old) and p.get(new))
            if ratios:
                print(f"\n{new.removesuffix(' (new)')}, {case}: median ratio of {len(ratios)} pairs {statistics.median(ratios):.3f} ({ratios[0]:.3f}–{ratios[-1]:.3f})")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--home", type=pathlib.Path, default=pathlib.Path.home() / ".cache/dynctl-benchmarks", help="where routers are installed")
    p.add_argument("--dynctl", type=pathlib.Path, help="the binary to measure; otherwise one is built from this tree")
    p.add_argument("--out", type=pathlib.Path, default=pathlib.Path("routers.jsonl"), help="file of the runs")
    p.add_argument("--noise", type=float, default=0.2, help="cores that others may use while a run counts")
    sub = p.add_subparsers(required=True)
    for name, call in ("install", install), ("measure", measure), ("pairs", pairs), ("table", table):
        s = sub.add_parser(name)
        s.set_defaults(call=call)
        if name in ("measure", "pairs"):
            s.add_argument("--runs", type=int, default=10 if name == "pairs" else 3, help="runs of each case")
            s.add_argument("--seconds", type=int, default=1 if name == "pairs" else 4, help="length of a run, or of a part of one")
            s.add_argument("--case", action="append", choices=list(CASES), help="only these cases")
            s.add_argument("--no-namespace", dest="namespace", action="store_false", help="stay in the network namespace of the caller")
        if name == "measure":
            s.add_argument("--passes", type=int, default=8, help="at most so many passes")
        if name == "pairs":
            s.add_argument("--parts", type=int, default=8, help="parts of a run, in turns with those of the other binary")
            s.add_argument("old", type=pathlib.Path)
            s.add_argument("new", type=pathlib.Path)
        if name != "table":
            s.add_argument("router", nargs="*")
    args = p.parse_args()
    args.home = args.home.resolve()
    args.call(args)


if __name__ == "__main__":
    main()
