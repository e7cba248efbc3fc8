"""The processes of fleet_vllm.py: vLLM replicas, nginx before them, `paceline record` before nginx, and a vLLM that
gives hidden states while a training runs. Each is a context that ends its process, with all its children."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server_process import HOST, Missed, free_port, listens, process, wait_until

from paceline.loop.adapt.servers.counters import ask, is_up, metrics_of
from paceline.loop.adapt.servers.vllm_sglang.drafter_folder import VLLM_MODULE, Given, Start, command_of
from paceline.net.prometheus import totals
from paceline.net.streaming import Client

ROOT = Path(__file__).parents[1]
WEIGHTS = "/paceline/draft-weights"
EXTENSION = "paceline.interop.draft_weights"
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
PRINTED = "is started like this:"
"""Ends the line before the command with which a training wants its vLLM to be started."""
DRAFTS, ACCEPTED = "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_total"
ENDED = "vllm:request_success_total"


@dataclass(frozen=True)
class Limits:
    """Sizes of a vLLM server."""

    dtype: str
    max_len: int
    num_rows: int = 4


def module_command(python: Path, words: Sequence[str]) -> list[str]:
    """The words of `vllm serve MODEL OPTIONS` for vllm-cpu, which is started as a module."""
    if list(words[:2]) != ["vllm", "serve"]:
        raise ValueError(f"no vllm serve in {shlex.join(words)!r}")
    return [str(python), "-m", VLLM_MODULE, "--model", *words[2:]]


def printed_command(text: str) -> list[str] | None:
    """The command that a training printed: the line behind the one that ends with PRINTED; None if it is not there."""
    lines = text.splitlines()
    for line, following in itertools.pairwise(lines):
        if line.rstrip().endswith(PRINTED):
            return shlex.split(following)
    return None


def environment(python: Path, cache: Path, key: str | None = None) -> dict[str, str]:
    """Environment of a vllm-cpu with one thread; paceline is importable there, without its dependencies."""
    added = {**SETTINGS, "PYTHONPATH": str(ROOT), "VLLM_CACHE_ROOT": str(cache)}
    added |= {"PACELINE_ADMIN_KEY": key} if key else {}
    if preload := sorted(python.parents[1].glob("lib/libiomp5.so")):
        added["LD_PRELOAD"] = str(preload[0])
    return os.environ | added


class Replica:
    """A vLLM server with a drafter, whose weights may be replaced while it runs."""

    def __init__(self, port: int, key: str) -> None:
        self.url = f"http://{HOST}:{port}"
        self.port, self._client = port, Client(self.url, key)

    def command(self, python: Path, model: Path, given: Given, limits: Limits) -> list[str]:
        words = ("--enforce-eager", "--per-request-spec-decode-metrics", "detailed")
        words += ("--worker-extension-cls", f"{EXTENSION}.DraftWeights")
        words += ("--middleware", f"{EXTENSION}.DraftWeightsRoute")
        start = Start(
            "vllm", str(model), "", port=self.port, dtype=limits.dtype, max_len=limits.max_len,
            max_batch=limits.num_rows, command=shlex.join([str(python), "-m", VLLM_MODULE]), words=words,
        )  # fmt: skip
        return command_of(start, given)

    @property
    def is_up(self) -> bool:
        return is_up(self._client)

    @property
    def folder(self) -> str:
        """The drafter's folder that it loaded last."""
        return str(ask(self._client, "GET", WEIGHTS).get("folder"))

    def force(self, folder: Path) -> None:
        """Loads a drafter past the daemon, as a person may."""
        ask(self._client, "POST", WEIGHTS, {"folder": str(folder)})

    def counts(self) -> dict[str, float]:
        """Rounds, accepted drafts, and requests by how they ended, since its start."""
        values = totals(metrics_of(self._client))
        ended = {name[len(ENDED) + 1 : -1]: count for name, count in values.items() if name.startswith(f"{ENDED}{{")}
        return {"rounds": values.get(DRAFTS, 0.0), "accepted": values.get(ACCEPTED, 0.0), **ended}


def difference(before: Sequence[dict[str, float]], after: Sequence[dict[str, float]]) -> dict[str, float]:
    """Sums what replicas counted between two readings; adds the acceptance length."""
    names = sorted({name for counts in after for name in counts})
    sums = {
        name: sum(two.get(name, 0.0) - one.get(name, 0.0) for one, two in zip(before, after, strict=True))
        for name in names
    }
    rounds = sums["rounds"]
    return {**sums, "acceptance_length": round(1 + sums["accepted"] / rounds, 4) if rounds else 0.0}


def nginx_conf(replicas: Sequence[Replica], port: int, folder: Path) -> str:
    """The configuration that deploy/gateway renders for one region, with nginx's own files in `folder`."""
    spec = importlib.util.spec_from_file_location("gateway_render", ROOT / "deploy" / "gateway" / "render.py")
    assert spec is not None
    assert spec.loader is not None
    render: Any = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = render  # its dataclasses look themselves up there
    spec.loader.exec_module(render)
    regions = render.read_groups([f"all={','.join(f'{HOST}:{replica.port}' for replica in replicas)}"], "region")
    text = render.render("nginx", regions, port).replace("/tmp/paceline-nginx", str(folder / "nginx"))
    return text.replace(f"listen {port};", f"listen {HOST}:{port};").replace(
        "access_log off;", f"access_log {folder / 'nginx-access.log'};"
    )


def nginx_program() -> str:
    """Path of nginx. Raises Missed if it is not installed."""
    program = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    if program is None:
        raise Missed("there is no nginx, which stands before the replicas: apt-get update; apt-get install nginx-light")
    return program


@contextlib.contextmanager
def gateway(replicas: Sequence[Replica], folder: Path) -> Iterator[int]:
    """nginx before the replicas; its port. Raises Missed without nginx."""
    program = nginx_program()
    port, conf, log = free_port(), folder / "nginx.conf", folder / "nginx.log"
    conf.write_text(nginx_conf(replicas, port, folder))
    with process([program, "-e", "stderr", "-c", str(conf), "-g", "daemon off;"], log) as started:
        wait_until("nginx", lambda: listens(port), started, log, 20)
        yield port


@contextlib.contextmanager
def recording(words: Sequence[str], port: int, log: Path) -> Iterator[None]:
    """`paceline record`, which listens on this port."""
    with process(words, log) as started:
        wait_until("paceline record", lambda: listens(port), started, log, 60)
        yield


@contextlib.contextmanager
def hidden_states(printed: Sequence[str], python: Path, port: int, limits: Limits, folder: Path) -> Iterator[Client]:
    """The vLLM that a training wants, at low priority; the training waits for it."""
    words = module_command(python, printed)
    words += ["--host", HOST, "--port", str(port), "--dtype", limits.dtype, "--enforce-eager"]
    words += ["--max-num-seqs", str(limits.num_rows)]
    log, client = folder / "vllm-hidden-states.log", Client(f"http://{HOST}:{port}", None)
    polite = ["nice", "-n", "10"] if shutil.which("nice") else []
    with process([*polite, *words], log, environment(python, folder / "vllm-cache")) as started:
        wait_until("the vLLM for hidden states", lambda: is_up(client), started, log, 420)
        yield client


def num_served(client: Client) -> int:
    """Requests that a vLLM has finished."""
    return int(totals(metrics_of(client)).get(ENDED, 0))
