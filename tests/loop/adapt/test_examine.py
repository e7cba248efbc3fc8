"""Candidates from disk: judged on stored requests, or refused with the reason."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from adapt_requests import HOUR, keyed, store
from safetensors.torch import load_file, save_file
from small_llm import tiny_model
from tiny_builtin import raising

from paceline.cli import app
from paceline.config import EngineConfig
from paceline.data.answers import Answer, AnswerShards
from paceline.draft.dflash.config import new_config
from paceline.draft.dflash.drafter import DFlashConfig, DFlashDrafter, DFlashNetwork
from paceline.engine.llm import LLM
from paceline.errors import ConfigError
from paceline.loop.adapt.config import CandidateConfig
from paceline.loop.adapt.gate import examine as module
from paceline.loop.adapt.gate.examine import TURNS, alike, draft_seconds, examine, is_held_out, usual_settings
from paceline.loop.adapt.gate.gate import Gain, Verdict
from paceline.loop.adapt.traffic.stored import read_requests

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("target") / "model")


def answer(number: int) -> list[int]:
    """Something new, a phrase, something new, the phrase again: an n-gram lookup drafts the second one."""
    draw = np.random.default_rng(number)
    phrase = draw.integers(0, 250, 14).tolist()
    return [*draw.integers(0, 250, 6).tolist(), *phrase, *draw.integers(0, 250, 6).tolist(), *phrase]


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [keyed(n, prompt_ids=[n % 250, 7], answer_ids=answer(n), sampling='{"max_tokens": 60}') for n in range(60)]
    rows += [keyed(n, tag="chat", prompt_ids=[n % 250, 9], answer_ids=answer(n)) for n in range(60, 90)]
    return store(tmp_path_factory.mktemp("store") / "traces", rows)


def judged(candidate: Path | str, model: Path, traces: Path, **changes: Any) -> Verdict:
    engine = EngineConfig(str(model), device="cpu", dtype="float32", threads=1)
    settings = {"incumbent": "none", "clusters": ("tickets",)} | changes
    return examine(Path(candidate), engine, traces, CandidateConfig(**settings))


def drafter(folder: Path, hidden: int = 32) -> Path:
    raw = new_config(hidden, 258, 2, num_layers=1, num_taps=1, head_dim=8, intermediate_size=48, block_size=4)
    DFlashDrafter(DFlashNetwork.random(DFlashConfig.from_json(raw))).save(folder)
    return folder


def test_one_that_drafts_well_passes(model: Path, traces: Path, tmp_path: Path) -> None:
    general = AnswerShards(tmp_path / "general")
    general.write([Answer(f"g/{n}@0", "g", 0, 0.0, [n, 3], answer(1000 + n), "stop", "") for n in range(30)])
    verdict = judged("ngram", model, traces, ood=(tmp_path / "general",), most_loss=0.5)
    assert set(verdict.gains) == {"drifted", "cluster chat", "ood"}
    assert verdict.gains["drifted"].candidate > 1.3 and verdict.gains["drifted"].incumbent == 1.0
    assert verdict.gains["drifted"].requests == 60


def test_one_that_guesses_at_random_is_refused(model: Path, traces: Path, tmp_path: Path) -> None:
    verdict = judged(drafter(tmp_path / "random"), model, traces)
    assert not verdict.passed and "may be none" in verdict.reason


def test_bad_candidates_are_refused_with_the_reason(model: Path, traces: Path, tmp_path: Path) -> None:
    nan = drafter(tmp_path / "nan")
    tensors = load_file(nan / "model.safetensors")
    tensors["fc.weight"][0, 0] = torch.nan
    save_file(tensors, nan / "model.safetensors", metadata={"format": "pt"})
    half = drafter(tmp_path / "half")
    data = (half / "model.safetensors").read_bytes()
    (half / "model.safetensors").write_bytes(data[: len(data) // 2])
    other = drafter(tmp_path / "other", hidden=64)
    (tmp_path / "empty").mkdir()
    for folder, words in ((nan, "holds NaN"), (half, "cannot be used"), (other, "cannot be used")):
        verdict = judged(folder, model, traces)
        assert not verdict.passed and words in verdict.reason, verdict.reason
    assert not judged(tmp_path / "empty", model, traces).passed
    assert not judged(tmp_path / "none", model, traces).passed


def test_few_requests(model: Path, traces: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LLM, "of", raising(AssertionError("a model was loaded")))
    assert "too few" in judged("ngram", model, traces, least_requests=61).reason
    with pytest.raises(ConfigError, match="no requests of cluster 'other'"):
        judged("ngram", model, traces, clusters=("other",))
    with pytest.raises(ConfigError, match="nothing|no requests"):
        judged("ngram", model, traces, since=HOUR + 1)


def test_several_that_fell_are_judged_together_and_each(traces: Path) -> None:
    """The first alone decided: a candidate that won there could lose on the others that fell."""
    requests, _ = read_requests(traces, usual={"temperature": 0.0})
    both = CandidateConfig(clusters=("tickets", "chat"))
    sizes = {name: len(chosen) for name, chosen in module._sets(requests, both).items()}
    assert sizes == {"drifted": 90, "cluster chat": 30, "cluster tickets": 60}
    one = replace(both, clusters=("tickets", "gone"), held_out_only=True)
    assert set(module._sets(requests, one)) == {"drifted", "cluster chat"}
    for wrong in (replace(one, held_out_only=False), replace(one, clusters=("gone",))):
        with pytest.raises(ConfigError, match="no requests of cluster 'gone'"):
            module._sets(requests, wrong)


def test_held_out_prompts_are_a_quarter() -> None:
    share = sum(is_held_out(f"traces/{number:x}") for number in range(4000)) / 4000
    assert share == pytest.approx(0.25, abs=0.03)


def test_the_command(model: Path, traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["adapt", "gate", "ngram", "--traces", str(traces), "--model", str(model), "--incumbent", "none", "--json"]
    words += ["--device", "cpu", "--dtype", "float32", "--threads", "1", "--least-requests", "100"]
    status = app(words, prog_name="paceline", standalone_mode=False)
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert status == 3 and line["passed"] is False and "too few" in line["reason"]


def test_drafting_is_timed_in_turns_and_the_fastest_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server beside that takes the machine for some turns is in neither figure."""
    order: list[Any] = []
    taken = {"old": iter([5.0, 1.1, 1.0, 9.0]), "new": iter([6.0, 7.0, 1.3, 8.0])}

    def timed(llm: Any, drafter: Any) -> float:
        order.append(drafter)
        return next(taken[drafter])

    monkeypatch.setattr(module, "_fastest_draft", timed)
    drafters: Any = ["old", "new"]
    assert draft_seconds(cast(Any, None), drafters) == [1.0, 1.3]
    assert order == ["old", "new"] * TURNS
    monkeypatch.setattr(module, "_fastest_draft", lambda llm, drafter: math.inf)
    assert draft_seconds(cast(Any, None), drafters) == [0.0, 0.0], "what drafts nothing"


def test_times_that_cannot_be_told_apart_are_one() -> None:
    assert alike(1.0, 1.08) == alike(1.08, 1.0) == (pytest.approx(1.04), pytest.approx(1.04))
    assert alike(1.0, 1.2) == (1.0, 1.2) and alike(0.0, 0.0) == (0.0, 0.0) and alike(0.0, 1.0) == (0.0, 1.0)


def test_the_gate_judges_with_times_that_can_be_told_apart(
    model: Path, traces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[Any] = []
    monkeypatch.setattr(module, "draft_seconds", lambda llm, drafters: [1.0, 1.05])
    monkeypatch.setattr(module, "judge", lambda drifted, others, times, *more: heard.append(times) or Verdict(True, ""))
    judged(drafter(tmp_path / "some"), model, traces)
    (times,) = heard
    assert times.incumbent_s == times.candidate_s == pytest.approx(1.025)


def test_what_loses_elsewhere_is_tried_part_of_the_way(
    model: Path, traces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Down to the first share that passes; the incumbent is scored once."""
    new, old, scored = drafter(tmp_path / "new"), drafter(tmp_path / "old"), list[Any]()
    ends = iter([Verdict(False, "it loses", loses=True), Verdict(False, "less", loses=True), Verdict(True, "+9%")])
    score = module.score
    monkeypatch.setattr(module, "draft_seconds", lambda llm, drafters: [1.0] * len(drafters))
    monkeypatch.setattr(module, "judge", lambda *_: next(ends))
    monkeypatch.setattr(module, "score", lambda llm, one, chosen: scored.append(one.source) or score(llm, one, chosen))
    verdict = judged(new, model, traces, incumbent=str(old), shares=(0.25, 1.0, 0.5, 0.1))
    assert (verdict.passed, verdict.share, verdict.drafter) == (True, 0.25, str(tmp_path / "new-25"))
    assert verdict.reason == f"it loses; 50% of the way from {old}: less; 25% of the way from {old}: +9%"
    assert [scored.count(str(each)) for each in (old, new, tmp_path / "new-50", tmp_path / "new-25")] == [2, 2, 2, 2]
    assert not (tmp_path / "new-10").exists()
    before, trained, between = (
        load_file(each / "model.safetensors")["fc.weight"] for each in (old, new, tmp_path / "new-25")
    )
    torch.testing.assert_close(between.float(), torch.lerp(before.float(), trained.float(), 0.25), rtol=0.01, atol=0.01)


def test_what_was_lost_is_scored_first_and_may_spare_the_rest(
    model: Path, traces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, old, scored = drafter(tmp_path / "new"), drafter(tmp_path / "old"), list[tuple[str, int]]()
    lost = Gain(30, 2.0, 1.8, -0.1, -0.2, 0.0)
    ends = iter([Verdict(False, "it loses", {"drifted": lost, "cluster chat": lost}, loses=True), Verdict(True, "+9%")])
    lengths, score = iter([lost, replace(lost, gain=0.0)]), module.score
    monkeypatch.setattr(module, "draft_seconds", lambda llm, drafters: [1.0] * len(drafters))
    monkeypatch.setattr(module, "judge", lambda *_: next(ends))
    monkeypatch.setattr(module, "compare", lambda *_, **__: next(lengths))

    def counted(llm: LLM, one: Any, chosen: Any) -> Any:
        scored.append((Path(one.source).name, len(chosen)))
        return score(llm, one, chosen)

    monkeypatch.setattr(module, "score", counted)
    verdict = judged(new, model, traces, incumbent=str(old), shares=(1.0, 0.5, 0.25))
    assert verdict.passed
    assert "50% of the way" in verdict.reason and "it loses 10.0% on 'cluster chat'" in verdict.reason
    assert [number for name, number in scored if name == "new-50"] == [30], "the rest is spared"
    assert [number for name, number in scored if name == "new-25"] == [30, 60]


def test_only_what_it_loses_elsewhere_is_a_reason_for_less_of_it(
    model: Path, traces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = drafter(tmp_path / "new")
    monkeypatch.setattr(module, "draft_seconds", lambda llm, drafters: [1.0] * len(drafters))
    assert not judged(new, model, traces, incumbent=str(drafter(tmp_path / "old"))).loses
    assert not (tmp_path / "new-75").exists()
    monkeypatch.setattr(module, "judge", lambda *_: Verdict(False, "it loses", loses=True))
    verdict = judged(new, model, traces)  # nothing lies between a drafter and none
    assert not verdict.passed and "it loses; 75% of the way from none: " in verdict.reason


def test_requests_without_a_temperature_are_judged_at_the_servers_default(tmp_path: Path, model: Path) -> None:
    """Most clients send none: the target's generation_config.json says what a server takes, or the option."""
    rows = [keyed(n, prompt_ids=[n % 250, 7], answer_ids=answer(n), temperature=None, seed=None) for n in range(30)]
    own = store(tmp_path / "traces", rows)
    verdict = judged("ngram", model, own)
    assert (
        verdict.is_judged
        and "30 requests named no temperature: judged at temperature 1 (the servers' default)" in verdict.reason
    )
    assert "judged at temperature 0 (as given)" in judged("ngram", model, own, temperature=0.0).reason
    assert usual_settings(str(model), None) == ({"temperature": 1.0}, "the servers' default")
    (model / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20, "do_sample": true}')
    try:
        assert usual_settings(str(model), None) == ({"temperature": 0.6, "top_k": 20}, "generation_config.json")
    finally:
        (model / "generation_config.json").unlink()
