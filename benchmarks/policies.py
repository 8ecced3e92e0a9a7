#!/usr/bin/env python3
"""Compares routing policies on the same engines, in rounds, over loopback only.

    benchmarks/policies.py run                      real vLLM on this CPU: 1p1d and 2d, about an hour
    benchmarks/policies.py run --sim --rounds 2 --seconds 15
    benchmarks/policies.py table                    the table and the ratios of the runs that are kept
    benchmarks/policies.py record -w FILE           a recording of the first policy on the first fleet

Engines start once for each fleet: those of e2e/engines.py (install them first), or with --sim
simulated ones. In each round every policy serves the same requests at the same times, through a
router of its own, and the policies' order rotates. dynctl bench sends the requests and counts
those within --slo. The ratio of good requests is paired by rounds.

Runs are appended to --out, and one that is there already is not repeated: start again after an
interruption. The exit code is 0 when no interval of the first policy lies below 1, 5 when one
does, and 3 when too few runs count.
"""
import argparse
import base64
import json
import math
import os
import pathlib
import random
import re
import shlex
import shutil
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request

import routers

HERE = pathlib.Path(__file__).resolve().parent
ENGINES = [sys.executable, str(HERE.parent / "e2e/engines.py")]
PORT, ADMIN, FIRST = 27210, 27211, 27220  # the router's two, and that of the first engine
BLOCK = 32  # tokens
# Student's quantile for 95 %, by the number of pairs.
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
# Engines get what router and client leave of the processor, so that these two are on time.
BEHIND = (["chrt", "--idle", "0"] if shutil.which("chrt") else []) + ["nice", "-n", "19"]


def requests(seconds, rate, seed):
    """Sessions with one of three common heads, and single documents: time, blocks, tokens of the
    prompt and of the answer."""
    rng, end = random.Random(seed), 2.0 * seconds
    names = iter(range(1000, 1 << 40))
    heads = [[100 * h + i for i in range(512 // BLOCK)] for h in range(3)]
    out = []
    at = -60.0  # so that old and new sessions are mixed from the first request on
    while at < end:
        at += rng.expovariate(rate * 0.9 / 5)  # sessions have five turns on average
        now, blocks = at, list(rng.choice(heads))
        for _ in range(rng.randint(2, 8)):
            blocks += [next(names) for _ in range(rng.randint(2, 12))]
            answer = rng.randint(16, 64)
            out.append((now, list(blocks), answer))
            now += 1 + rng.expovariate(1 / 6)
    at = 0.0
    while at < end:
        at += rng.expovariate(rate * 0.1)
        out.append((at, [next(names) for _ in range(rng.randint(32, 96))], 16))
    # As many in each round, in the same time.
    out = sorted(r for r in out if r[0] >= 0)[:round(rate * seconds)]
    return [(at * seconds / out[-1][0], blocks, answer) for at, blocks, answer in out]


def write_trace(file, args, number, rate, seconds):
    lines = [{"schema": "dynctl.trace/v2", "source": "benchmarks/policies.py", "start": "1970-01-01T00:00:00Z"}]
    for at, blocks, answer in requests(seconds, rate, args.seed + number):
        lines.append({
            "kind": "request", "t_us": int(at * 1e6), "isl_tokens": len(blocks) * BLOCK, "osl_tokens": answer, "block_size_tokens": BLOCK,
            "ids": "local", "blocks": base64.b64encode(struct.pack(f"<{len(blocks)}Q", *blocks)).decode(),
        })
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


class Fleet(routers.Stand):
    """Engines that stay while routers come and go."""

    def __init__(self, spec, dynctl, args):
        self.run = pathlib.Path(tempfile.mkdtemp(prefix="policies-"))
        self.processes, self.values, self.env, self.key = [], {}, None, ""
        self.spec, self.dynctl, self.args, self.router = spec, dynctl, args, None
        self.names = []  # of real engines
        for port in range(FIRST, FIRST + sum(map(int, re.findall(r"\d+", spec)))):
            with socket.socket() as s:
                s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    s.bind(("127.0.0.1", port))
                except OSError as e:  # what listens there would be measured
                    sys.exit(f"port {port}, for an engine: {e}")
        try:
            if args.sim:
                sim = spec if "p" in spec else spec.replace("d", "a")
                self.start("engines", shlex.join([*BEHIND, str(dynctl), "sim", f"{sim}:port={FIRST},block={BLOCK}{args.sim_options}"]))
                prefill, _, rest = spec.rpartition("p")
                roles = ["prefill"] * int(prefill or 0) + ["decode" if prefill else "worker"] * int(rest.rstrip("d"))
                for i in range(len(roles)):
                    self.healthy(FIRST + i)
                urls = [f"http://127.0.0.1:{FIRST + i}" for i in range(len(roles))]
                self.pids = [self.processes[0].pid]
            else:
                line = [*BEHIND, *ENGINES, "up", spec, "--port", str(FIRST), "--model", args.model, "--kv-blocks", str(args.kv_blocks), "--timeout", "1500"]
                engines = json.loads(subprocess.run(line, check=True, stdout=subprocess.PIPE).stdout)
                self.names = [e["name"] for e in engines]
                urls = [e["url"] for e in engines]
                roles = [{"aggregated": "worker"}.get(e["role"], e["role"]) for e in engines]
                self.pids = [e["pid"] for e in engines]
            self.workers = [f"--{role}={url}" for role, url in zip(roles, urls)]
        except BaseException:
            self.close(keep=True)
            raise

    def measure(self, policy, trace, *more):
        """One router with these further arguments, one policy, the requests of a trace."""
        a, out = self.args, self.run / "bench"
        shutil.rmtree(out, ignore_errors=True)
        slo = ",".join(f"{k}={v}" for k, v in a.slo.items())
        router = self.start("router", shlex.join([
            str(self.dynctl), "serve", f"--listen=127.0.0.1:{PORT}", f"--admin-listen=127.0.0.1:{ADMIN}", *self.workers, f"--policy={policy}",
            f"--routing-threshold={a.threshold}", "--allow-routing-headers", f"--slo={slo.replace('tpot', 'itl')}", *a.serve, *more,
        ]))
        try:
            self.until(ADMIN, lambda: urllib.request.Request(f"http://127.0.0.1:{ADMIN}/readyz"))
            routers.resources()
            own = routers.family([os.getpid(), *self.pids])
            began, before, all_before = time.monotonic(), routers.cpu(own), routers.busy()
            ran = subprocess.run(
                [self.dynctl, "bench", "--trace", trace, "--router", f"http://127.0.0.1:{ADMIN}", "--repeat", "1", "--slo", slo, "--out", out, "--progress", "none"],
                capture_output=True, text=True)
            if not (out / "result.json").exists():
                raise RuntimeError(f"dynctl bench ended with {ran.returncode}: {ran.stderr.strip()}")
            own |= routers.family([os.getpid(), *self.pids])
            mine = routers.cpu(own) - before + routers.resources()
            others = max(0.0, (routers.busy() - all_before - mine) / (time.monotonic() - began))
            result = json.loads((out / "result.json").read_text())
            m = result["cells"][0]["measure"]
            with urllib.request.urlopen(f"http://127.0.0.1:{ADMIN}/metrics", timeout=5) as page:
                known = [line.rpartition(" ")[2] for line in page.read().decode().splitlines() if line.startswith("dynctl_routing_times_known{")]
            return {
                "policy": policy, "requests": m["requests"] + m["failed"], "good": m["good"], "failed": m["failed"], "ttft_p50_ms": m["ttft"]["p50_ms"], "tpot_p50_ms": m["tpot"]["p50_ms"],
                "e2e_p50_ms": m["e2e"]["p50_ms"], "hit": m["cache_hit_share"], "starved": not result["client_gate"]["passed"], "gate": result["client_gate"]["text"],
                "others": others, "times_known": bool(known) and known[0] == "1",
            }
        finally:
            router.terminate()
            router.wait(30)
            self.processes.remove(router)

    def close(self, keep=False):
        super().close(keep)
        if self.names:
            subprocess.run([*ENGINES, "down", *self.names], check=False)


def settings(args):
    """What runs must have in common to be compared."""
    return {"sim": args.sim, "seconds": args.seconds, "rate": args.rate, "good": args.good, "load": args.load, "slo": args.slo, "threshold": args.threshold, "seed": args.seed,
            "serve": args.serve} | ({"sim_options": args.sim_options} if args.sim else {"model": args.model, "kv_blocks": args.kv_blocks})


def kept(args, what="policy"):
    return [r for r in routers.runs(args.out) if what in r and r["settings"] == settings(args)]


def keep(args, row):
    with args.out.open("a") as f:
        f.write(json.dumps(row | {"settings": settings(args)}) + "\n")


def pace(fleet, trace, args):
    """Requests a second of a fleet: those that --rate says, or --load of those at which the last
    policy has --good of them good. Warms the engines up."""
    def good(rate):
        write_trace(trace, args, 1000, rate, args.search)
        row = fleet.measure(args.policy[-1], trace)
        print(f"{fleet.spec}, {rate:.2f} requests a second, {line(row)}", flush=True)
        return row["good"] / max(1, row["requests"])

    found = [r["pace"] for r in kept(args, "pace") if r["fleet"] == fleet.spec]
    rate = float(args.rate or (args.load * found[0] if found else 1))
    good(rate)  # what engines do for the first time is slow
    if args.rate or found:
        return rate
    share = good(rate)
    while share < args.good and rate > 0.05:
        rate /= 1.4
        if (share := good(rate)) >= args.good:
            break
    else:
        while share >= args.good and rate < 100:
            rate, above = rate * 1.4, share
            if (share := good(rate)) < args.good:  # between these two
                rate /= 1.4 ** ((args.good - share) / (above - share))
    keep(args, {"fleet": fleet.spec, "pace": rate})
    print(f"{fleet.spec}: {rate:.2f} requests a second; the runs have {args.load:g} of it", flush=True)
    return args.load * rate


def run(args):
    dynctl = routers.binary(args)
    done = {(r["fleet"], r["round"], r["policy"]) for r in kept(args)}
    todo = [
        (fleet, number, policy)
        for fleet in args.fleet for number in range(args.rounds)
        for policy in args.policy[number % len(args.policy):] + args.policy[:number % len(args.policy)]
        if (fleet, number, policy) not in done
    ]
    print(f"{len(todo)} runs of {args.seconds} s, about {len(todo) * (args.seconds + 5) / 60:.0f} minutes, and a few for the start of each fleet; {len(done)} are in {args.out}", flush=True)
    began, took, fleet = time.monotonic(), [], None
    try:
        for i, (spec, number, policy) in enumerate(todo):
            if fleet is None or fleet.spec != spec:
                if fleet:
                    fleet.close()
                fleet = None
                fleet = Fleet(spec, dynctl, args)
                trace = fleet.run / "trace.jsonl"
                rate = pace(fleet, trace, args)
            write_trace(trace, args, number, rate, args.seconds)
            start = time.monotonic()
            row = {"fleet": spec, "round": number, "rate": rate} | fleet.measure(policy, trace)
            took.append(time.monotonic() - start)
            keep(args, row)
            left = statistics.mean(took) * (len(todo) - i - 1) / 60
            print(f"{spec}, round {number + 1}, {line(row)}; {left:.0f} minutes left", flush=True)
    finally:
        if fleet:
            fleet.close()
    print(f"done after {(time.monotonic() - began) / 60:.0f} minutes\n")
    sys.exit(table(args))


def record(args):
    fleet = Fleet(args.fleet[0], routers.binary(args), args)
    try:
        trace = fleet.run / "trace.jsonl"
        write_trace(trace, args, 0, args.rate or 1, args.seconds)
        print(line(fleet.measure(args.policy[0], trace, f"--record={args.write.resolve()}")))
    finally:
        fleet.close()


def line(row):
    text = f"{row['policy']}: {row['good']} of {row['requests']} good, TTFT {row['ttft_p50_ms']:.0f} ms, between tokens {row['tpot_p50_ms']:.1f} ms, E2E {row['e2e_p50_ms']:.0f} ms"
    if row["hit"] is not None:
        text += f", {row['hit']:.0%} cached"
    if row["failed"]:
        text += f", {row['failed']} FAILED"
    if row["policy"] == "kv" and not row["times_known"]:
        text += ", by blocks to the end"
    return text + (" (STARVED CLIENT: " + row["gate"] + ")" if row["starved"] else "") + f", others {row['others']:.2f} cores"


def counts(row, args):
    return args.count_all or not row["starved"] and row["others"] <= args.noise


def table(args):
    rows, first, few, below = kept(args), args.policy[0], False, False
    print("| fleet | policy | runs that count | good | TTFT p50 ms | between tokens p50 ms | E2E p50 ms | cached |\n|---|---|---|---|---|---|---|---|")
    for fleet in args.fleet:
        for policy in args.policy:
            own = [r for r in rows if (r["fleet"], r["policy"]) == (fleet, policy) and counts(r, args)]
            if not own:
                print(f"| {fleet} | {policy} | 0 | | | | | |")
                continue
            cells = [statistics.mean(r[k] for r in own) for k in ("ttft_p50_ms", "tpot_p50_ms", "e2e_p50_ms")]
            hits = [r["hit"] for r in own if r["hit"] is not None]
            good = sum(r["good"] for r in own) / max(1, sum(r["requests"] for r in own))
            print(f"| {fleet} | {policy} | {len(own)} | {good:.1%} | {cells[0]:,.0f} | {cells[1]:.1f} | {cells[2]:,.0f} | {f'{statistics.mean(hits):.0%}' if hits else ''} |")
    print(f"\nBy how many times {first} has more good requests, with the 95 % interval, paired by rounds:\n")
    for fleet in args.fleet:
        widths = []
        for other in args.policy[1:]:
            logs = []
            for number in {r["round"] for r in rows}:
                pair = {r["policy"]: r["good"] for r in rows if (r["fleet"], r["round"]) == (fleet, number) and counts(r, args)}
                if first in pair and other in pair:
                    logs.append(math.log((pair[first] + 0.5) / (pair[other] + 0.5)))  # 0 has a logarithm, too
            name = f"- {fleet}, {first}/{other}:"
            if len(logs) not in STUDENT:
                print(f"{name} {len(logs)} rounds count, too few for an interval")
                few = True
                continue
            mean, half = statistics.mean(logs), STUDENT[len(logs)] * statistics.stdev(logs) / math.sqrt(len(logs))
            few |= len(logs) < 3
            below |= mean + half < 0
            widths.append(math.exp(half))
            print(f"{name} {math.exp(mean):.3f} ({math.exp(mean - half):.3f} to {math.exp(mean + half):.3f}), {len(logs)} rounds" + (", BELOW 1" if mean + half < 0 else ""))
        own = [r for r in rows if (r["fleet"], r["policy"]) == (fleet, "kv")]
        print(f"  At the end of {sum(r['times_known'] for r in own)} of {len(own)} runs kv compared times, no longer blocks.")
        if widths:
            print(f"  These rounds cannot tell a policy with {max(widths):.2f} times as many good requests from an equal one.")
        good = [r["good"] / max(1, r["requests"]) for r in rows if r["fleet"] == fleet and counts(r, args)]
        if good and not 0.3 <= statistics.mean(good) <= 0.95:
            print(f"  {statistics.mean(good):.0%} of the requests were good: at a {'lower' if statistics.mean(good) < 0.3 else 'higher'} --rate policies differ more.")
        if fleet == "1p1d":
            print("  With one rank in each phase policies choose the same ranks: what differs is the path alone.")
    if not args.sim:
        print("\nWhat this machine cannot tell: all engines, the router and the client share its few cores, so that work taken from one\n"
              "engine slows the others, which separate GPUs would not do. The model is small, with random weights, and KV moves over loopback.")
    print(f"\nNot counted: runs whose client was starved, and those in which others used over {args.noise} cores." if not args.count_all else "\nAll runs count, also those whose client was starved.")
    return 5 if below else 3 if few else 0


def names(text):
    return text.split(",")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("command", choices=["run", "table", "record"])
    p.add_argument("--rounds", type=int, choices=STUDENT, metavar="N", default=5, help="rounds, 2 to 10 (default %(default)s)")
    p.add_argument("--seconds", type=int, default=120, help="length of a run (default %(default)s)")
    p.add_argument("--rate", type=float, help="requests a second; without it the pace is found for each fleet first")
    p.add_argument("--good", type=float, default=0.85, help="share of good requests that the last policy has at the pace that is found (default %(default)s)")
    # At the pace itself, queues grow without end in a round with a few tokens more.
    p.add_argument("--load", type=float, default=0.8, help="share of the pace that is found (default %(default)s)")
    p.add_argument("--search", type=int, default=30, help="seconds of a run that looks for the pace (default %(default)s)")
    p.add_argument("--slo", type=slo, default="ttft=1500ms,tpot=50ms", help="what a good request keeps to, as ttft=2s,tpot=100ms (default ttft=1500ms,tpot=50ms)")
    p.add_argument("--fleet", type=names, default="1p1d,2d", help="fleets, one after the other (default %(default)s)")
    p.add_argument("--policy", type=names, default="kv,kv_dynamo,least_loaded", help="policies; the first is compared with each other one (default %(default)s)")
    p.add_argument("--threshold", default="auto", help="routing.threshold (default %(default)s)")
    p.add_argument("--serve", type=shlex.split, default="", help="further arguments of dynctl serve")
    p.add_argument("--model", default="small", help="model of real engines: tiny, small or medium (default %(default)s)")
    p.add_argument("--kv-blocks", type=int, default=768, help="blocks of a real engine's cache (default %(default)s)")
    p.add_argument("--sim", action="store_true", help="simulated engines")
    p.add_argument("--sim-options", default=",kv_blocks=768,profile=cpu", help="what these have (default %(default)s)")
    p.add_argument("--seed", type=int, default=1, help="of the requests of the first round; each round has another (default %(default)s)")
    p.add_argument("--noise", type=float, default=0.2, help="cores that others may use while a run counts (default %(default)s)")
    p.add_argument("--count-all", action="store_true", help="count runs whatever the client and others did: not a measurement")
    p.add_argument("--home", type=pathlib.Path, default=pathlib.Path.home() / ".cache/dynctl-benchmarks", help="where dynctl is built")
    p.add_argument("--dynctl", type=pathlib.Path, help="the binary to measure; otherwise one is built from this tree")
    p.add_argument("--out", type=pathlib.Path, default=pathlib.Path("policies.jsonl"), help="file of the runs (default %(default)s)")
    p.add_argument("-w", "--write", type=pathlib.Path, default=pathlib.Path("times.jsonl.zst"), help="file of command record (default %(default)s)")
    args = p.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that engines end, too
    if args.command == "record":
        record(args)
    elif args.command == "table":
        sys.exit(table(args))
    else:
        run(args)


def slo(text):
    return dict(part.split("=") for part in text.split(","))


if __name__ == "__main__":
    main()
