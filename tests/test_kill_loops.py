"""Each command is killed at every change of a file, and has every one refused: run again, it ends as it would have.

The number of changes that were tried is printed with `pytest -s`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from adapt_requests import HOUR
from fake_servers import FakeServer
from fault_files import EVERY, Fault, copied, emptied, every_fault
from played import NOW, PASSED, traffic, watcher
from small_llm import Talker, fake_llm, tiny_model
from small_training import config as training_config
from small_training import documents, tiny_decoder, trainer
from trace_files import rows

from paceline.config import EngineConfig
from paceline.data.answers import AnswerShards
from paceline.loop.adapt.decide.decide import Decision
from paceline.loop.adapt.decide.policy import Line, SeasonalPolicy
from paceline.loop.adapt.gate.retrain import Job
from paceline.loop.adapt.watch import Watcher
from paceline.loop.flywheel import ledger, stages
from paceline.loop.flywheel import run as turning
from paceline.loop.flywheel.config import FlywheelConfig
from paceline.loop.flywheel.state import serving_of
from paceline.loop.record.config import RecordConfig
from paceline.loop.record.run import read
from paceline.net.streaming import Client, Stream
from paceline.runs.folder import write_whole
from paceline.serve.settings import TraceConfig
from paceline.train import regenerate
from paceline.train.answers import conversation
from paceline.train.answers import regenerate as regenerate_run
from paceline.train.config import AnswerConfig, PromptsConfig, RegenerateConfig
from paceline.train.features.hidden_states import OnlineFeatures
from paceline.train.learn.checkpoint import best_checkpoint, latest_checkpoint

pytestmark = pytest.mark.slow


class Falls(SeasonalPolicy):
    """Wants a training in every hour until there was one."""

    def hour(self, number: int, seen: Any) -> Line:
        line = super().hour(number, seen)
        if number < HOUR or self.is_training or self.trained_at is not None:
            return line
        return Line(number, line.seen, line.mix, Decision("retrain", ("tickets",), why="it fell"))


class Ended:
    """A job that has ended well."""

    last_error = ""

    def __init__(self, command: list[str], log: Path) -> None:
        self.last_line = json.dumps(PASSED) if "gate" in command else ""

    def poll(self) -> int:
        return 0

    def stop(self) -> None: ...


class TestWatch:
    @pytest.fixture
    def server(self, monkeypatch: pytest.MonkeyPatch) -> list[FakeServer]:
        """The server, which outlives the daemon; asked without a network."""
        servers = [FakeServer()]

        def ask(self: Client, method: str, path: str, body: bytes | None = None, due_s: float | None = None) -> Stream:
            status, text = servers[0].answer(method, path, json.loads(body) if body else {})
            return Stream(0.0, status=status, pieces=[(0.0, text.encode())])

        monkeypatch.setattr(Client, "ask", ask)
        return servers

    @pytest.mark.parametrize("is_good", [True, False], ids=["kept", "rolled back"])
    def test_a_daemon(self, tmp_path: Path, server: list[FakeServer], is_good: bool) -> None:
        home, template, clock = tmp_path / "home", tmp_path / "template", [0.0]
        template.mkdir()
        traffic(template)
        ending = "kept" if is_good else "rolled back"

        def opened() -> Watcher:
            server[0].url = "http://127.0.0.1:9"
            one = watcher(home, server[0], cast(Any, Ended), policy=Falls())
            one._next = None
            one.start = cast(Callable[[list[str], Path], Job], Ended)
            return one

        def watched(one: Watcher) -> None:
            """Looks, a minute after each other, until all is over."""
            for _ in range(400):
                clock[0] += 240.0
                count(server[0], is_good)
                one.tick(NOW + clock[0])
                if one.stage is None and any(line.get("event") == ending for line in one.log.lines()):
                    return
            raise AssertionError(f"it never came to an end: {[line.get('event') for line in one.log.lines()]}")

        def count(fake: FakeServer, is_good: bool) -> None:
            is_new = fake.members["general"] != "default"
            fake.rounds = getattr(fake, "rounds", 0) + 400  # type: ignore[attr-defined]
            fake.failed = getattr(fake, "failed", 0) + (60 if is_new and not is_good else 0)  # type: ignore[attr-defined]
            fake.count(fake.rounds, fake.rounds, 2 * fake.rounds, fake.failed, fake.rounds)  # type: ignore[attr-defined]

        def prepare() -> None:
            copied(template, home)()
            server[0], clock[0] = FakeServer(), 0.0

        def ended(one: Watcher, fault: str) -> None:
            newest, serves = one.lineage.entries()[-1], server[0].members["general"]
            if is_good:
                assert newest["state"] == "serving" and serves == newest["drafter"] == one.incumbent, fault
            else:
                assert newest["state"] == "rolled back" and serves == "default" == one.incumbent, fault

        prepare()
        one = opened()
        watched(one)
        ended(one, "no fault")

        def command() -> None:
            watched(opened())

        for fault in every_fault(home, command, prepare):
            again = opened()
            watched(again)
            ended(again, str(fault))


def test_record(tmp_path: Path) -> None:
    """Kill an import of spans; the proxy writes by the same code."""
    model, home, spans = tiny_model(tmp_path / "model"), tmp_path / "home", tmp_path / "spans.jsonl"
    spans.write_text("".join(span(each) for each in range(3)))
    config = RecordConfig(str(model), imports=(spans,))

    def command() -> None:
        read(config, TraceConfig(home / "traces"))

    def seen() -> list[tuple[str, str]]:
        return sorted((row["text"], row["key"].rpartition("#")[2]) for row in rows(home / "traces"))

    prepare = emptied(home)
    prepare()
    command()
    expected = seen()
    assert len(expected) == 3
    for fault in every_fault(home, command, prepare):
        command()
        assert seen() == expected, str(fault)


def span(number: int) -> str:
    """One answer as OpenTelemetry has it, one line of a file."""
    parts = [{"role": "user", "parts": [{"type": "text", "content": f"Hello {number}"}]}]
    output = [{"role": "assistant", "parts": [{"type": "text", "content": "Ho."}], "finish_reason": "stop"}]
    span_attributes = {"operation.name": "chat", "input.messages": parts, "output.messages": output}
    attributes = [
        {"key": f"gen_ai.{name}", "value": {"stringValue": each if isinstance(each, str) else json.dumps(each)}}
        for name, each in span_attributes.items()
    ]
    times = {"startTimeUnixNano": "1760000000000000000", "endTimeUnixNano": "1760000001500000000"}
    one = {"traceId": "t", "spanId": f"s{number}", "name": "chat tiny", **times, "attributes": attributes}
    return json.dumps({"resourceSpans": [{"resource": {}, "scopeSpans": [{"scope": {}, "spans": [one]}]}]}) + "\n"


def test_regenerate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regenerate_run, "_load", lambda engine: fake_llm(Talker(max_len=engine.max_len)))
    monkeypatch.setattr(conversation, "CONVERSATIONS_PER_SHARD", 2)
    home, questions = tmp_path / "home", tmp_path / "questions.jsonl"
    questions.write_text("".join(json.dumps({"prompt": f"Question {number}?"}) + "\n" for number in range(5)))
    answering = AnswerConfig(max_tokens=10, max_prompt_tokens=60)
    config = RegenerateConfig(
        home / "run",
        EngineConfig(model="fake", device="cpu", dtype="float32"),
        PromptsConfig((str(questions),)),
        answering,
    )

    def seen() -> list[tuple[str, int, str]]:
        return sorted((each.key, each.turn, each.text) for each in AnswerShards(home / "run" / "answers"))

    prepare = emptied(home)
    prepare()
    regenerate(config)
    expected = seen()
    assert len(expected) == 5
    for fault in every_fault(home, lambda: regenerate(config), prepare):
        regenerate(config)
        assert seen() == expected, str(fault)
        assert not list((home / "run" / "answers").glob("journal-*")), str(fault)


def test_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With stages that are played: each writes a file and a line of the ledger, as the real ones do."""
    home, calls = tmp_path / "home", Counter[str]()

    def played(name: str) -> Callable[[stages.Turn], dict[str, Any]]:
        def stage(turn: stages.Turn) -> dict[str, Any]:
            calls[name] += 1
            write_whole(turn.folder / f"{name}.txt", name)
            turn.line(name, "kept", model=f"{name}.gguf")
            result = {"student": "student.gguf", "drafter": "none", "file": turn.folder / f"{name}.txt"}
            return {**result, "store": "store", "version": NoStore.version}

        return stage

    monkeypatch.setattr(turning, "STAGES", {name: played(name) for name in stages.STAGES})
    monkeypatch.setattr(turning, "find_spec", lambda name: True)
    monkeypatch.setattr(turning, "Store", NoStore)
    monkeypatch.setattr(turning, "resolve", Path)
    monkeypatch.setattr(turning, "check_layers", lambda student, teacher: None)
    monkeypatch.setattr(turning.gc, "collect", lambda: 0)  # with all of PyTorch loaded it takes longer than the rest
    config = FlywheelConfig(model="teacher", out=home / "wheel", record=(tmp_path,))

    def command() -> None:
        turning.turn(config)

    def ended() -> None:
        if serving_of(config).turn < 1:
            command()

    def seen() -> tuple[Any, Any]:
        lines = [(line["turn"], line["what"], line["state"]) for line in ledger.read(home / "wheel")]
        lines = [line for line in lines if line[2] != "stopped"]  # why a refused disk ended it
        return serving_of(config), lines

    prepare = emptied(home)
    prepare()
    command()
    expected = seen()
    assert expected[0].turn == 1 and len(expected[1]) == len(stages.STAGES) + 1
    for fault in every_fault(home, command, prepare):
        ended()
        assert seen() == expected, str(fault)


class NoStore:
    """In place of a store, whose version does not change."""

    version = 1

    @classmethod
    def open(cls, path: str) -> type[NoStore]:
        return cls


def test_train(tmp_path: Path) -> None:
    """Steps with a checkpoint after each; what is learned is the same to the bit."""
    home = tmp_path / "home"
    settings = training_config(max_steps=2, checkpoint_minutes=0.0, keep_last=1, heldout_every=1, keep="best")

    def command() -> None:
        one = trainer(home / "checkpoints", settings)
        others = documents(11)[10:]
        features = OnlineFeatures(
            tiny_decoder(), others, cast(Any, one.network).config.target_layer_ids, needs_final=False
        )
        one.heldout = {"heldout": (others, features)}
        one.evaluate = lambda documents, features: {"eal": float(one.state.step)}  # type: ignore[method-assign]
        one.resume()
        one.run()

    def learned() -> tuple[int, int, dict[str, torch.Tensor]]:
        checkpoint, best = latest_checkpoint(home / "checkpoints"), best_checkpoint(home / "checkpoints")
        assert checkpoint is not None and best is not None
        every = {**checkpoint.weights, **{f"best {name}": tensor for name, tensor in best[0].items()}}
        return checkpoint.trainer["step"], best[1]["step"], every

    prepare = emptied(home)
    prepare()
    command()
    *steps, weights = learned()
    assert steps == [2, 2]
    struck = Counter[str]()
    for fault in every_fault(home, command, prepare):
        struck[fault.kind] += fault.what.startswith("write ") and fault.what.endswith(".safetensors")
        command()
        *now, last_weights = learned()
        assert now == steps and all(torch.equal(last_weights[name], tensor) for name, tensor in weights.items()), str(
            fault
        )
    least = 4 if EVERY == 1 else 1
    assert struck["kill"] >= least and struck["full"] >= least, "weights and optimiser of two steps"


def test_a_fault_breaks_what_it_should(tmp_path: Path) -> None:
    """The layer itself: half of a write is there, and a dead process deletes nothing."""
    file = tmp_path / "file"

    def command() -> None:
        try:
            file.write_text("abcdef")
        finally:
            file.unlink(missing_ok=True)

    contents: dict[str, str | None] = {}
    for kind in ("kill", "full"):
        fault = Fault(tmp_path, kind, 2)
        with fault.installed(), pytest.raises(BaseException) as raised:  # noqa: PT011
            command()
        contents[kind] = file.read_text() if file.exists() else None
        assert fault.what == f"write {file}" and raised.type.__name__ == ("Killed" if kind == "kill" else "OSError")
    assert contents == {"kill": "abc", "full": None}
