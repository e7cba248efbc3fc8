"""Other weights for the drafter of a running vLLM: all, or none, and only with the key. The engine is a fake."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from paceline.errors import ConfigError
from paceline.interop import draft_weights
from paceline.interop.draft_weights import PATH, DraftWeights, DraftWeightsRoute

WIDTH, TOKENS = 4, 8


class Layer(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(*shape), requires_grad=False)


class Inner(nn.Module):
    """A drafter's network as vLLM keeps it: a tensor beside the parameters is computed from them."""

    def __init__(self, embed_tokens: nn.Module) -> None:
        super().__init__()
        self.embed_tokens, self.fc, self.attn = embed_tokens, Layer(WIDTH, 3 * WIDTH), Layer(WIDTH, WIDTH)
        self.fused = torch.zeros(WIDTH, 3 * WIDTH)
        self.attn.kv_cache = torch.zeros(0)


class Draft(nn.Module):
    def __init__(self, embed_tokens: nn.Module, lm_head: nn.Module) -> None:
        super().__init__()
        self.model, self.lm_head = Inner(embed_tokens), lm_head
        self.has_own_embed_tokens = self.has_own_lm_head = False

    def load(self, tensors: dict[str, Tensor]) -> Draft:
        self.model.fc.weight.data.copy_(tensors["fc.weight"])
        self.model.attn.weight.data.copy_(tensors["attn.weight"])
        self.model.fused = 2 * self.model.fc.weight.data
        if "lm_head.weight" in tensors:
            self.has_own_lm_head = True
            self.lm_head.weight.data.copy_(tensors["lm_head.weight"])
        self.model.attn.cpu_linear = tensors["attn.weight"].sum
        return self


class Target(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens, self.lm_head = Layer(TOKENS, WIDTH), Layer(TOKENS, WIDTH)


def written(folder: Path, value: float, *, config: dict[str, Any] | None = None, **more: Tensor) -> Path:
    folder.mkdir()
    tensors = {"fc.weight": torch.full((WIDTH, 3 * WIDTH), value), "attn.weight": torch.full((WIDTH, WIDTH), value)}
    save_file({**tensors, **more}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"block_size": 8, "paceline": value, **(config or {})}))
    return folder


class Worker(DraftWeights):
    """A worker of vLLM whose drafter is loaded from `folder`."""

    def __init__(self, folder: Path) -> None:
        draft = SimpleNamespace(model=str(folder), revision="main")
        self.speculative_config: Any = SimpleNamespace(method="dflash", draft_model_config=draft)
        self.vllm_config: Any = SimpleNamespace(
            compilation_config=SimpleNamespace(mode=0, static_forward_context={"layer": 1}),
            load_config=SimpleNamespace(device=None, load_format="dummy"),
            speculative_config=self.speculative_config,
            parallel_config=SimpleNamespace(
                data_parallel_size=1, pipeline_parallel_size=1, worker_extension_cls="a.DraftWeights"
            ),
            device_config=SimpleNamespace(device_type="cpu"),
        )
        self.target = Target()
        self.draft = Draft(self.target.embed_tokens, self.target.lm_head).load(load_file(folder / "model.safetensors"))
        self.draft.model.attn.kv_cache = torch.zeros(99)

    def get_model(self) -> nn.Module:
        return self.target

    def get_draft_model(self) -> nn.Module | None:
        return self.draft

    @property
    def values(self) -> set[float]:
        inner = self.draft.model
        assert torch.equal(inner.fused, 2 * inner.fc.weight)
        return set(inner.fc.weight.flatten().tolist()) | set(inner.attn.weight.flatten().tolist())


def get_model(vllm_config: Any, model_config: Any, load_config: Any) -> nn.Module:
    """vLLM's loader, as far as it is used."""
    assert vllm_config.compilation_config.static_forward_context == {}
    assert vllm_config.speculative_config.draft_model_config is model_config
    assert (load_config.device, load_config.load_format) == ("cpu", "auto")
    tensors = load_file(Path(model_config.model) / "model.safetensors")
    return Draft(Layer(TOKENS, WIDTH), Layer(TOKENS, WIDTH)).load(tensors)


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """vLLM's modules, as far as they are imported."""
    module: Any = ModuleType("vllm")
    module.__version__, module.__version_tuple__ = "0.32.1rc1+cpu", (0, 32, 1, "rc1", "cpu")
    parts = {
        "vllm": module,
        "vllm.config": SimpleNamespace(CompilationMode=SimpleNamespace(NONE=0), set_current_vllm_config=nullcontext),
        "vllm.model_executor": ModuleType("vllm.model_executor"),
        "vllm.model_executor.model_loader": SimpleNamespace(get_model=get_model),
        "vllm.compilation": ModuleType("vllm.compilation"),
        "vllm.compilation.backends": SimpleNamespace(set_model_tag=lambda tag: nullcontext()),
    }
    for name, part in parts.items():
        monkeypatch.setitem(sys.modules, name, part)
    return module


@pytest.fixture
def worker(tmp_path: Path) -> Worker:
    return Worker(written(tmp_path / "old", 1.0))


class TestWorker:
    def test_other_weights_are_loaded_and_the_old_ones_again(self, worker: Worker, tmp_path: Path) -> None:
        places = [tensor.data_ptr() for tensor in (worker.draft.model.fc.weight, worker.draft.model.fused)]
        for folder, value in ((written(tmp_path / "new", 2.0), 2.0), (tmp_path / "old", 1.0)):
            assert worker.stage_draft_weights(str(folder)) is None
            assert worker.values == {3.0 - value}, "nothing is written before the commit"
            assert isinstance(worker.commit_draft_weights(), float)
            assert worker.values == {value} and worker.draft_weights_state() == {"folder": str(folder), "problem": None}
            assert worker.draft.model.attn.cpu_linear() == value * WIDTH * WIDTH
        inner = worker.draft.model
        assert places == [inner.fc.weight.data_ptr(), inner.fused.data_ptr()], "CUDA graphs have these addresses"
        assert inner.attn.kv_cache.shape == (99,) and inner.embed_tokens is worker.target.embed_tokens

    @pytest.mark.parametrize(
        ("config", "more", "words"),
        [
            ({"block_size": 16}, {}, "setting block_size is 16, in the running drafter 8"),
            ({"layers": 2}, {}, "setting layers is 2, in the running drafter missing"),
            ({"inner": {"width": 3}}, {}, "setting inner.width is 3, in the running drafter missing"),
            ({}, {"attn.weight": torch.zeros(WIDTH, 2)}, r"tensor attn.weight is \[4, 2\]"),
            ({}, {"more.weight": torch.zeros(1)}, "tensor more.weight"),
        ],
    )
    def test_a_folder_of_other_shapes_is_refused(
        self, worker: Worker, tmp_path: Path, config: dict[str, Any], more: dict[str, Tensor], words: str
    ) -> None:
        problem = worker.stage_draft_weights(str(written(tmp_path / "new", 2.0, config=config, **more)))
        assert problem is not None and re.search(words, problem) and "only a restart" in problem
        assert worker.commit_draft_weights() == "no weights have been read" and worker.values == {1.0}

    def test_a_folder_without_a_tensor_is_refused(self, worker: Worker, tmp_path: Path) -> None:
        new = written(tmp_path / "new", 2.0)
        save_file({"fc.weight": torch.zeros(WIDTH, 3 * WIDTH)}, new / "model.safetensors")
        assert "tensor attn.weight is missing" in (worker.stage_draft_weights(str(new)) or "")

    def test_half_a_file_is_refused(self, worker: Worker, tmp_path: Path) -> None:
        new = written(tmp_path / "new", 2.0)
        file = new / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
        assert "SafetensorError" in (worker.stage_draft_weights(str(new)) or "")
        assert "FileNotFoundError" in (worker.stage_draft_weights(str(tmp_path / "none")) or "")
        assert worker.values == {1.0}

    def test_the_folder_of_the_start_may_be_gone(self, worker: Worker, tmp_path: Path) -> None:
        assert worker.draft_weights_state()["problem"] is None
        (tmp_path / "old" / "model.safetensors").unlink()
        assert worker.stage_draft_weights(str(written(tmp_path / "new", 2.0))) is None

    def test_the_targets_tensors_are_never_written(self, tmp_path: Path) -> None:
        """vLLM shares a head that equals the target's: another one would change the target's answers."""
        head = torch.zeros(TOKENS, WIDTH)
        worker = Worker(written(tmp_path / "old", 1.0, **{"lm_head.weight": head}))
        other = written(tmp_path / "other", 2.0, **{"lm_head.weight": head + 1})
        assert "lm_head is the target's own" in (worker.stage_draft_weights(str(other)) or "")
        same = written(tmp_path / "same", 2.0, **{"lm_head.weight": head})
        assert worker.stage_draft_weights(str(same)) is None
        worker.commit_draft_weights()
        assert worker.values == {2.0} and torch.equal(worker.target.lm_head.weight, head)

    def test_a_layer_of_another_type_is_refused(self, worker: Worker, tmp_path: Path) -> None:
        worker.draft.model.fused = worker.draft.model.fused.double()
        problem = worker.stage_draft_weights(str(written(tmp_path / "new", 2.0)))
        assert problem == "tensor model.fused has another shape or type: only a restart loads such a drafter"

    def test_what_vllm_must_have(self, worker: Worker, vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        config = worker.vllm_config

        def problem() -> str:
            return worker.draft_weights_state()["problem"] or ""

        for place, name, value, words in (
            (vllm, "__version_tuple__", (0, 31, 2), "cannot replace draft weights: install 0.32"),
            (worker.speculative_config, "method", "ngram", "does not draft with dflash or eagle3"),
            (config.parallel_config, "data_parallel_size", 2, "one server for each replica"),
            (config.parallel_config, "pipeline_parallel_size", 2, "one server for each replica"),
            (config.compilation_config, "mode", 3, "--enforce-eager"),
            (worker.speculative_config.draft_model_config, "model", "z-lab/a", "a local folder"),
            (worker, "draft", None, "not loaded yet"),
            (worker, "speculative_config", None, "--speculative-config"),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(place, name, value)
                assert words in problem()
        assert problem() == ""
        config.device_config.device_type, config.compilation_config.mode = "cuda", 3
        assert problem() == ""
        for build in ((0, 0, "dev"), (0, 1, "dev7", "gabc")):  # from source, without git tags
            vllm.__version_tuple__ = build
            assert problem() == ""


class Engine:
    """vLLM's engine client: calls a method of every worker."""

    def __init__(self, *workers: Worker) -> None:
        self.workers, self.resets = workers, 0
        self.reset: Callable[[], bool] = lambda: True
        self.vllm_config = workers[0].vllm_config
        self.gate: asyncio.Event | None = None

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        if self.gate is not None:
            await self.gate.wait()
        return [getattr(worker, method)(*args) for worker in self.workers]

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        assert reset_running_requests, "blocks of running requests would stay"
        self.resets += 1
        return self.reset()


KEYED = [(b"authorization", b"Bearer secret")]


class Asked:
    """The route before a fake engine."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(draft_weights.KEY, "secret")
        self.app = SimpleNamespace(state=SimpleNamespace(engine_client=engine))
        self.route, self.passed_on = DraftWeightsRoute(self._next), list[str]()

    async def _next(self, scope: Any, receive: Any, send: Any) -> None:
        self.passed_on.append(scope["path"])

    async def ask(self, method: str, folder: Any = None, **changes: Any) -> tuple[int, dict[str, Any]]:
        scope = {"type": "http", "path": PATH, "method": method, "headers": KEYED, "client": ("127.0.0.1", 5)}
        parts = [b'{"folder":', json.dumps(str(folder)).encode() + b"}"]
        sent = list[Any]()

        async def receive() -> dict[str, Any]:
            body = parts.pop(0)
            return {"type": "http.request", "body": body, "more_body": bool(parts)}

        async def send(message: Any) -> None:
            sent.append(message)

        await self.route({**scope, "app": self.app, **changes}, receive, send)
        return (sent[0]["status"], json.loads(sent[1]["body"])) if sent else (0, {})

    def get(self, **changes: Any) -> tuple[int, dict[str, Any]]:
        return asyncio.run(self.ask("GET", **changes))

    def post(self, folder: Any, **changes: Any) -> tuple[int, dict[str, Any]]:
        return asyncio.run(self.ask("POST", folder, **changes))


class TestRoute:
    def test_weights_are_loaded(self, worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = Engine(worker)
        route = Asked(engine, monkeypatch)
        assert route.get() == (200, {"folder": str(tmp_path / "old"), "problem": None})
        status, answer = route.post(new := written(tmp_path / "new", 2.0))
        assert status == 200 and answer["folder"] == str(new) and answer["seconds"] >= 0
        assert worker.values == {2.0} and engine.resets == 1, "cached keys and values are of the old weights"
        assert route.get() == (200, {"folder": str(new), "problem": None})

    def test_all_workers_load_them_or_none(
        self, worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        other = Worker(tmp_path / "old")
        other.draft.model.fused = other.draft.model.fused.double()
        route = Asked(engine := Engine(worker, other), monkeypatch)
        status, answer = route.post(written(tmp_path / "new", 2.0))
        assert status == 422 and "model.fused" in answer["error"] and engine.resets == 0
        assert worker.values == other.values == {1.0} and worker._draft_staged is None

    @pytest.mark.parametrize("error", [MemoryError("host memory"), NotImplementedError("of the engine")])
    def test_a_worker_that_fails_leaves_no_second_drafter(
        self, worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
    ) -> None:
        """The other worker has read the weights: it frees them."""
        other, loaded = Worker(tmp_path / "old"), draft_weights._loaded

        def fails(worker: Any, folder: str) -> nn.Module:
            if worker is other:
                raise error
            return loaded(worker, folder)

        monkeypatch.setattr(draft_weights, "_loaded", fails)
        if not isinstance(error, MemoryError):  # the engine raises what a worker did not catch
            monkeypatch.setattr(draft_weights, "FAULTS", (ValueError,))
        route = Asked(engine := Engine(worker, other), monkeypatch)
        status, answer = route.post(written(tmp_path / "new", 2.0))
        assert status == (422 if isinstance(error, MemoryError) else 500) and str(error) in answer["error"]
        assert worker._draft_staged is None and worker.values == {1.0} and engine.resets == 0

    def test_a_cache_that_is_not_emptied_is_tried_again(
        self, worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It has keys and values of the earlier weights; the new ones are in use."""
        route, new = Asked(engine := Engine(worker), monkeypatch), written(tmp_path / "new", 2.0)

        def raises() -> bool:
            raise RuntimeError("Failed to reset KV cache")

        for engine.reset in (lambda: False, raises):
            status, answer = route.post(new)
            assert status == 503 and "prefix cache has keys and values of the earlier weights" in answer["error"]
        engine.reset = lambda: True
        assert route.post(new)[0] == 200 and worker.values == {2.0}

    def test_without_the_key_nothing_is_answered(
        self, worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        route = Asked(Engine(worker), monkeypatch)
        new = written(tmp_path / "new", 2.0)
        for headers in ([], [(b"authorization", b"Bearer wrong")], [(b"authorization", b"secret")]):
            assert route.post(new, headers=headers)[0] == route.get(headers=headers)[0] == 401
        assert worker.values == {1.0}
        monkeypatch.delenv(draft_weights.KEY)
        with pytest.raises(ConfigError, match="has no PACELINE_ADMIN_KEY: set it"):
            DraftWeightsRoute(None)

    def test_only_this_machine_is_answered(
        self, worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        route = Asked(Engine(worker), monkeypatch)
        new = written(tmp_path / "new", 2.0)
        for changes in ({"client": ("10.0.0.7", 5)}, {"client": None}, {"headers": [*KEYED, (b"x-real-ip", b"1")]}):
            status, answer = route.post(new, **changes)
            assert status == 403 and "loopback" in answer["error"]
        assert worker.values == {1.0} and route.get(client=("::1", 5))[0] == 200

    def test_other_requests_are_passed_on(self, worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
        route = Asked(Engine(worker), monkeypatch)
        route.get(path="/v1/models")
        route.get(type="lifespan")
        assert route.passed_on == ["/v1/models", PATH]
        assert route.get(path=f"/below{PATH}", root_path="/below")[0] == 200

    def test_what_is_wrong_with_a_request_is_said(
        self, worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        route = Asked(Engine(worker), monkeypatch)
        assert route.post("relative/folder")[0] == 400
        assert asyncio.run(route.ask("DELETE"))[0] == 405
        worker.vllm_config.parallel_config.worker_extension_cls = ""
        status, answer = route.get()
        assert status == 404
        assert "--worker-extension-cls paceline.interop.draft_weights.DraftWeights" in answer["error"]

    def test_one_load_at_a_time(self, worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = Engine(worker)
        route, new = Asked(engine, monkeypatch), written(tmp_path / "new", 2.0)

        async def both() -> tuple[int, int]:
            engine.gate = asyncio.Event()
            first = asyncio.ensure_future(route.ask("POST", new))
            await asyncio.sleep(0)
            second = asyncio.ensure_future(route.ask("POST", new))
            await asyncio.sleep(0)
            engine.gate.set()
            return (await first)[0], (await second)[0]

        assert asyncio.run(both()) == (200, 409)

    def test_an_engine_that_fails_is_an_answer(self, worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
        route = Asked(engine := Engine(worker), monkeypatch)
        engine.workers = (None,)  # pyright: ignore[reportAttributeAccessIssue]
        status, answer = route.get()
        assert status == 500 and "draft_weights_state" in answer["error"]
