"""Jobs and servers on many machines: a script for Slurm, a RayJob for KubeRay, values for vLLM's production stack, and
SGLang.

    python deploy/jobs/render.py slurm --model Qwen/Qwen3-8B --prompts /shared/prompts.jsonl --out /shared/mine >
    slurm.sh python deploy/jobs/render.py kuberay --model Qwen/Qwen3-8B --prompts /data/prompts.jsonl --out /data/mine >
    kuberay.yaml python deploy/jobs/render.py vllm-stack --model Qwen/Qwen3-8B --drafter /data/for-vllm --num-drafted 7
    > vllm-stack.yaml python deploy/jobs/render.py sglang --model Qwen/Qwen3-8B --drafter /data/plain --num-drafted 7 >
    sglang.yaml

Ray, torchrun, Slurm, KubeRay and the engines share the work out; nothing here does. Speculative options are those of
`paceline serve --engine`. docs/how-to/serve.md says more.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath
from typing import Any

import jinja2

from paceline.loop.adapt.servers.vllm_sglang.drafter_folder import Given, Start, command_of

HERE = Path(__file__).parent
KINDS = {
    "slurm": "slurm.sh.j2",
    "kuberay": "kuberay.yaml.j2",
    "vllm-stack": "vllm-stack.yaml.j2",
    "sglang": "sglang.yaml.j2",
}
TRAINS = ("slurm", "kuberay")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9./:@_-]*")
PATH = re.compile(r"/[A-Za-z0-9._/-]+")


class RenderError(ValueError):
    """What is asked for cannot be written; the message says what to do."""


def engine_words(kind: str, given: argparse.Namespace) -> list[str]:
    """The engine's options, as `paceline serve --engine` gives them: the chart of vLLM's stack says the model and the
    port."""
    engine = "vllm" if kind == "vllm-stack" else "sglang"
    start = Start(engine, given.model, given.drafter, host="0.0.0.0", command="engine")
    words = command_of(start, Given(Path(given.drafter), given.method, given.num_drafted))[1:]
    if engine == "vllm":
        return words[words.index("--speculative-config") :]
    return [*words, *(("--tp-size", str(given.gpus)) if given.gpus > 1 else ()), "--enable-metrics"]


def render(kind: str, given: argparse.Namespace) -> str:
    """The text of one of KINDS. Raises RenderError for what is missing, or no name or path."""
    needed = ("prompts", "out") if kind in TRAINS else ("drafter",)
    if missing := [name for name in needed if getattr(given, name) is None]:
        raise RenderError(f"{kind} needs --{missing[0]}")
    for name in ("model", "image", "claim"):
        if not NAME.fullmatch(getattr(given, name)):
            raise RenderError(f"--{name} {getattr(given, name)!r} is no name: letters, digits, and ./:@_- between them")
    for name in needed:
        if not PATH.fullmatch(getattr(given, name)):
            raise RenderError(
                f"--{name} {getattr(given, name)!r}: write a whole path, of letters, digits and ._-/ alone"
            )
    roots = {PurePosixPath(getattr(given, name)).parts[1] for name in needed}
    if kind != "slurm" and len(roots) > 1:
        raise RenderError(
            f"{' and '.join(f'--{name}' for name in needed)} must be on one volume: give them one first folder"
        )
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["quote"] = shlex.quote
    values: dict[str, Any] = vars(given) | {"mount": f"/{min(roots)}", "ray_version": ray_version()}
    if kind in TRAINS:
        values["pod"] = environment.get_template("pod.j2").make_module(values).pod  # type: ignore[attr-defined]
    else:
        values["words"] = engine_words(kind, given)
    return environment.get_template(KINDS[kind]).render(values)


def ray_version() -> str:
    """Returns the version of the installed Ray; the image must have the same."""
    try:
        return version("ray")
    except PackageNotFoundError as error:
        raise RenderError("Ray is not installed here: pip install 'paceline[ray]'") from error


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--model", required=True, help="hub id or folder of the target")
    parser.add_argument("--prompts", help="as of paceline train, on a disk that all machines see")
    parser.add_argument("--out", help="run folder, on the same disk")
    parser.add_argument("--drafter", help="folder of the drafter, as the engine reads it, in the volume")
    parser.add_argument("--method", choices=("dflash", "eagle3"), default="dflash")
    parser.add_argument("--num-drafted", type=int, default=7, help="drafts of a round")
    parser.add_argument("--nodes", type=int, default=2, help="machines, or replicas of a server")
    parser.add_argument("--gpus", type=int, default=8, help="of each")
    parser.add_argument("--cpus", type=int, default=16, help="of each machine, or pod")
    parser.add_argument("--memory", default="64Gi", help="of each pod")
    parser.add_argument("--image", default="registry.example.com/paceline:latest")
    parser.add_argument("--claim", default="paceline", help="the volume claim that holds prompts, runs and drafters")
    given = parser.parse_args(words)
    try:
        sys.stdout.write(render(given.kind, given))
    except RenderError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
