"""Replaces the weights of the drafter in a running vLLM, between two steps of its engine.

    PACELINE_ADMIN_KEY=... vllm serve MODEL --speculative-config '{"method": "dflash", "model": "FOLDER", ...}' \
        --worker-extension-cls paceline.interop.draft_weights.DraftWeights \
        --middleware paceline.interop.draft_weights.DraftWeightsRoute

The second class adds a route to vLLM's HTTP server, the first one its work in each of vLLM's workers:

    GET  /paceline/draft-weights                           {"folder": the folder loaded last, "problem": null or text}
    POST /paceline/draft-weights {"folder": "runs/new"}    loads the weights of another folder

The route answers only on loopback, and only with the key (`Authorization: Bearer KEY`). `paceline adapt watch
--hot-swap` uses it.

The folder must have the same settings and tensors as the folder that vLLM was started with, and other weights. Every
worker first reads it with vLLM's own loader, into a second drafter in host memory, and compares all its tensors with
those of the running one. If any worker finds a difference, nothing is written. Else the tensors are copied into the
running ones, which keep their addresses (CUDA graphs use these). Then running requests are computed anew and the prefix
cache is emptied: it has keys and values of the earlier weights. Tensors that the drafter shares with the target, as its
embedding, are never written.

Needs vLLM 0.32 or later. In a worker no exception may escape: vLLM would leave the other workers' replies unread."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from copy import copy
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from paceline.errors import ConfigError
from paceline.interop import LEAST_VERSION, is_too_old
from paceline.net.loopback import is_loopback

PATH = "/paceline/draft-weights"
KEY = "PACELINE_ADMIN_KEY"
METHODS = ("dflash", "eagle3")
"""Methods of speculative decoding whose drafters have no state but their weights."""
FREE_KEYS = ("_name_or_path", "name_or_path", "transformers_version", "paceline")
"""Keys of a drafter's config.json that vLLM does not compute with."""
FORWARDED = (b"forwarded", b"x-forwarded-for", b"x-real-ip")
"""Headers that a proxy adds: the client is then on another machine."""
FAULTS = (
    *(RuntimeError, ValueError, OSError, LookupError, TypeError, AttributeError, AssertionError, ImportError),
    *(MemoryError, SafetensorError),
)
"""Exceptions that reading a folder, or vLLM's loader, may raise."""

Shapes = dict[str, list[int]]
Rpc = Callable[..., Awaitable[list[Any]]]


class DraftWeights:
    """Extension of vLLM's worker that replaces the drafter's weights while vLLM runs: `stage_draft_weights` reads them
    from a folder, `commit_draft_weights` copies them into the running drafter."""

    _draft_folder: str | None = None
    """Folder of the weights that were loaded last; None if vLLM still uses those it was started with."""
    _draft_at_start: tuple[dict[str, Any], Shapes] | None = None
    """(config, tensor shapes) of the folder that vLLM was started with, which may be deleted later."""
    _draft_staged: tuple[str, list[tuple[Tensor, Tensor]], list[tuple[nn.Module, nn.Module]]] | None = None

    def draft_weights_state(self) -> dict[str, Any]:
        """Returns {"folder": folder of the drafter's present weights, "problem": why this worker cannot load others, or
        None}."""
        worker: Any = self
        try:
            problem = obstacle(worker)
            if problem is None and self._draft_at_start is None:
                self._draft_at_start = described(Path(worker.speculative_config.draft_model_config.model))
        except FAULTS as error:
            problem = _text(error)
        draft = getattr(worker.speculative_config, "draft_model_config", None)
        return {"folder": self._draft_folder or getattr(draft, "model", None), "problem": problem}

    def stage_draft_weights(self, folder: str) -> str | None:
        """Read the weights in `folder` into host memory and compare them with the running drafter's. Returns None if
        they fit, else an error message. The running drafter is unchanged."""
        worker: Any = self
        self._draft_staged = None
        if problem := self.draft_weights_state()["problem"]:
            return problem
        try:
            assert self._draft_at_start is not None
            check_same(self._draft_at_start, described(Path(folder)))
            loaded = _loaded(worker, folder)
            pairs = list(paired(worker.get_draft_model(), loaded, worker.get_model()))
        except FAULTS as error:
            return _text(error)
        packed = [(mine, other) for mine, other, _ in pairs if hasattr(other, "cpu_linear")]
        self._draft_staged = folder, [both for _, _, tensors in pairs for both in tensors], packed
        return None

    def commit_draft_weights(self) -> float | str:
        """Overwrite the running drafter's weights with those that `stage_draft_weights` has read. Returns the duration
        in seconds. Returns an error message if no weights have been read or copying fails; after a failed copy, some
        weights may be overwritten."""
        if self._draft_staged is None:
            return "no weights have been read"
        began, (folder, tensors, packed) = time.perf_counter(), self._draft_staged
        try:
            _wait_for_device()
            with torch.inference_mode():
                for mine, other in tensors:
                    mine.data.copy_(other.data)
            for mine, other in packed:
                mine.cpu_linear = other.cpu_linear  # the closure has the weights in a packed copy
            _wait_for_device()
        except FAULTS as error:
            return _text(error)
        self._draft_folder, self._draft_staged = folder, None
        return time.perf_counter() - began

    def drop_draft_weights(self) -> None:
        """Discard the weights that `stage_draft_weights` has read, and free their memory."""
        self._draft_staged = None


def obstacle(worker: Any) -> str | None:
    """Returns an error message if this vLLM worker cannot replace its drafter's weights: the reason, and what to
    change. Returns None if it can."""
    import vllm  # pyright: ignore[reportMissingImports]
    from vllm.config import CompilationMode  # pyright: ignore[reportMissingImports]

    if is_too_old(vllm.__version_tuple__) or not hasattr(worker, "get_draft_model"):
        least = ".".join(map(str, LEAST_VERSION))
        return f"vLLM {vllm.__version__} cannot replace draft weights: install {least} or later"
    speculative, config = worker.speculative_config, worker.vllm_config
    draft = getattr(speculative, "draft_model_config", None)
    if speculative is None or draft is None or speculative.method not in METHODS:
        return f"vLLM does not draft with {' or '.join(METHODS)}: give --speculative-config with such a drafter"
    if config.parallel_config.data_parallel_size > 1 or config.parallel_config.pipeline_parallel_size > 1:
        return "data or pipeline parallel engines are not supported: start one server for each replica"
    if worker.get_draft_model() is None:
        return "the drafter is not loaded yet: try again later"
    on_cpu = config.device_config.device_type == "cpu"
    if on_cpu and config.compilation_config.mode != CompilationMode.NONE:
        return "on a CPU, compiled code keeps the earlier weights: start vLLM with --enforce-eager"
    if not Path(draft.model).is_dir():
        return f"{draft.model} is no folder: start vLLM with a local folder of the drafter"
    return None


def described(folder: Path) -> tuple[dict[str, Any], Shapes]:
    """Reads a drafter's folder without its weights. Returns (config, {tensor name: shape}). The config is that of
    config.json, without keys that do not affect the computation (FREE_KEYS). Raises OSError, ValueError,
    SafetensorError or another of FAULTS if the folder is damaged."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    index = folder / "model.safetensors.index.json"
    files = {file.name for file in folder.glob("*.safetensors")}
    if index.exists():
        files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    if not files:
        raise ValueError(f"{folder} has no safetensors file")
    shapes = Shapes()
    for name in sorted(files):
        with safe_open(folder / name, framework="pt") as tensors:
            shapes |= {key: list(tensors.get_slice(key).get_shape()) for key in tensors.keys()}  # noqa: SIM118
    return {key: value for key, value in config.items() if key not in FREE_KEYS}, shapes


def flattened(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens a nested config: {"a": {"b": 1}} becomes {"a.b": 1}. `prefix`: text put before every key."""
    values = dict[str, Any]()
    for name, value in config.items():
        values |= flattened(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return values


def check_same(running: tuple[dict[str, Any], Shapes], new: tuple[dict[str, Any], Shapes]) -> None:
    """Raises ValueError if two drafters, as `described` returns them, differ in a setting, a tensor name or a shape."""
    settings = [flattened(config) for config, _ in (running, new)]
    for what, before, now in (("setting", *settings), ("tensor", running[1], new[1])):
        for name in sorted(before.keys() | now.keys()):
            if before.get(name) != now.get(name):
                raise ValueError(
                    f"{what} {name} is {now.get(name, 'missing')}, in the running drafter "
                    f"{before.get(name, 'missing')}: only a restart loads such a drafter"
                )


def paired(
    running: nn.Module, loaded: nn.Module, target: nn.Module
) -> Iterator[tuple[nn.Module, nn.Module, list[tuple[Tensor, Tensor]]]]:
    """Pairs the tensors of the running drafter with those of a second drafter, `loaded`, whose weights shall replace
    them. Yields, module by module, (running module, loaded module, [(running tensor, loaded tensor)]). Modules that the
    running drafter shares with the target are left out: they must not be overwritten. Raises ValueError if the drafters
    differ in modules, tensor names, shapes or types. Also raises it if `loaded` has weights for a shared module that
    differ from the target's."""
    of_target = {id(module) for module in target.modules()}
    modules = dict(loaded.named_modules())
    if modules.keys() != dict(running.named_modules()).keys():
        raise ValueError("the folder makes a drafter of other layers: only a restart loads it")
    for name, mine in running.named_modules():
        other = modules[name]
        if id(mine) in of_target:
            _check_shared(running, loaded, name, mine, other)
            continue
        before, now = _tensors(mine), _tensors(other)
        for key in before.keys() | now.keys():
            one, two = before.get(key), now.get(key)
            if one is None or two is None or one.shape != two.shape or one.dtype != two.dtype or two.is_meta:
                raise ValueError(f"tensor {name}.{key} has another shape or type: only a restart loads such a drafter")
        yield mine, other, [(before[key], now[key]) for key in sorted(before)]


def _check_shared(running: nn.Module, loaded: nn.Module, name: str, mine: nn.Module, other: nn.Module) -> None:
    """Check a module that belongs to the target: the folder has no such tensor, or the same one."""
    own = f"has_own_{name.rpartition('.')[2]}"
    if getattr(loaded, own, False):
        before, now = mine.get_parameter("weight"), other.get_parameter("weight")
        if before.shape != now.shape or not torch.equal(before.cpu(), now.cpu()):
            raise ValueError(f"{name} is the target's own in this engine, the folder has another: restart vLLM with it")


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Tensors of one module, with those computed from its weights, as vLLM's fused matrices; without the KV cache."""
    values = {**module._parameters, **module._buffers, **vars(module)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor) and name != "kv_cache"}


def _loaded(worker: Any, folder: str) -> nn.Module:
    """Loads a second drafter from `folder` into host memory, with vLLM's loader; it is never run."""
    from vllm.compilation.backends import set_model_tag  # pyright: ignore[reportMissingImports]
    from vllm.config import CompilationMode, set_current_vllm_config  # pyright: ignore[reportMissingImports]
    from vllm.model_executor.model_loader import get_model  # pyright: ignore[reportMissingImports]

    config = copy(worker.vllm_config)
    config.compilation_config = copy(config.compilation_config)
    config.compilation_config.mode = CompilationMode.NONE
    config.compilation_config.static_forward_context = {}  # attention layers of the same names are registered there
    config.load_config = copy(config.load_config)
    config.load_config.device, config.load_config.load_format = "cpu", "auto"
    config.speculative_config = copy(config.speculative_config)
    draft = copy(config.speculative_config.draft_model_config)
    draft.model, draft.revision = folder, None
    config.speculative_config.draft_model_config = draft
    with set_current_vllm_config(config), set_model_tag("eagle_head"):  # a loader without the first one raises
        return get_model(vllm_config=config, model_config=draft, load_config=config.load_config)


def _wait_for_device() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:500] if not isinstance(error, ValueError) else str(error)[:500]


class DraftWeightsRoute:
    """ASGI middleware that adds the path /paceline/draft-weights to vLLM's HTTP server: GET returns the state of the
    draft weights, POST replaces them. Only clients on the same machine that send the key PACELINE_ADMIN_KEY may use
    this path. Requests for other paths are passed on to vLLM. Raises ConfigError if vLLM's environment has no
    PACELINE_ADMIN_KEY."""

    def __init__(self, app: Any) -> None:
        self.app, self.key = app, os.environ.get(KEY, "")
        if not self.key:
            raise ConfigError(f"the environment of vLLM has no {KEY}: set it to the key of {PATH}")
        self._lock = asyncio.Lock()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"].removeprefix(scope.get("root_path", "")) != PATH:
            await self.app(scope, receive, send)
            return
        status, answer = self._refusal(scope) or await self._answer(scope, receive)
        body = json.dumps(answer).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _refusal(self, scope: Any) -> tuple[int, dict[str, Any]] | None:
        headers = dict(scope["headers"])
        if not hmac.compare_digest(headers.get(b"authorization", b""), f"Bearer {self.key}".encode()):
            return 401, {"error": f"a wrong key: {KEY} of vLLM's environment is needed"}
        if not is_loopback((scope.get("client") or ("", 0))[0]) or any(name in headers for name in FORWARDED):
            return 403, {"error": f"{PATH} answers on loopback only: forward its port, as kubectl port-forward does"}
        return None

    async def _answer(self, scope: Any, receive: Any) -> tuple[int, dict[str, Any]]:
        engine = scope["app"].state.engine_client
        extension = engine.vllm_config.parallel_config.worker_extension_cls
        if not extension.endswith(f".{DraftWeights.__name__}"):
            return 404, {"error": f"start vLLM with --worker-extension-cls {__name__}.{DraftWeights.__name__}"}
        try:
            if scope["method"] == "GET":
                states = await engine.collective_rpc("draft_weights_state")
                return 200, {"folder": states[0]["folder"], "problem": _first(state["problem"] for state in states)}
            if scope["method"] != "POST":
                return 405, {"error": "GET or POST is needed"}
            folder = await _folder(receive)
            if folder is None:
                return 400, {"error": 'the body must be {"folder": "an absolute path"}'}
            if self._lock.locked():
                return 409, {"error": "other draft weights are being loaded: try again later"}
            async with self._lock:
                return await _replace(engine, folder)
        except Exception as error:  # noqa: BLE001 (vLLM raises plain exceptions for what failed in its engine)
            return 500, {"error": _text(error)}


async def _replace(engine: Any, folder: str) -> tuple[int, dict[str, Any]]:
    """Load the weights in `folder` in all workers, or in none."""
    rpc: Rpc = engine.collective_rpc
    try:
        problem = _first(await rpc("stage_draft_weights", args=(folder,)))
    except Exception:
        with contextlib.suppress(Exception):  # the first error says more
            await rpc("drop_draft_weights")
        raise
    if problem:
        await rpc("drop_draft_weights")
        return 422, {"error": f"{folder} is not loaded: {problem}"}
    seconds = await rpc("commit_draft_weights")
    if problem := _first(each if isinstance(each, str) else None for each in seconds):
        return 500, {"error": f"the drafter may be damaged, restart vLLM: {problem}"}
    try:
        problem = None if await engine.reset_prefix_cache(reset_running_requests=True) else "vLLM did not empty it"
    except Exception as error:  # noqa: BLE001 (vLLM raises RuntimeError while blocks wait for a KV transfer)
        problem = _text(error)
    if problem:
        return 503, {"error": f"the prefix cache has keys and values of the earlier weights, try again: {problem}"}
    return 200, {"folder": folder, "seconds": round(max(seconds), 4)}


async def _folder(receive: Any) -> str | None:
    """The folder in the body of a request; None if it is not an absolute path."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    try:
        folder = json.loads(body)["folder"]
    except (ValueError, LookupError, TypeError):
        return None
    return folder if isinstance(folder, str) and os.path.isabs(folder) else None


def _first(problems: Any) -> str | None:
    return next((problem for problem in problems if problem), None)
