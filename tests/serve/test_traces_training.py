"""Traces are training data as they are: answers to learn from, prompts to ask again."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from known_machine import known_machine
from pyarrow import parquet
from small_llm import tiny_model
from tiny_runs import TINY, paceline

from paceline.data.answers import AnswerShards
from paceline.data.prompts import read_prompts
from paceline.engine.llm import LLM
from paceline.errors import PromptError
from paceline.runs.folder import RunFolder
from paceline.serve.admin import traces
from paceline.serve.admin.traces import SCHEMA, TraceWriter
from paceline.serve.settings import TraceConfig
from paceline.train.tiny import write_tiny_target
from paceline.types import SamplingParams, Sequence

__all__ = ["known_machine"]
pytestmark = pytest.mark.slow


def serve(target: Path, folder: Path, number: int) -> list[Sequence]:
    """Answers of a target, traced as a server would."""
    llm = LLM(str(target), drafter="none", device="cpu", dtype="float32", max_batch=8, max_len=128)
    one, done = TraceWriter(TraceConfig(folder), str(target)), list[Sequence]()
    one.begin(llm.tokenizer)
    for index in range(number):
        prompt = llm.encode_chat([{"role": "user", "content": f"Say something about number {index}."}])
        llm.engine.add(prompt, SamplingParams(max_tokens=40, temperature=0.7 * (index % 2), seed=index))
    while llm.engine.has_work:
        for chunk in llm.engine.step():
            if chunk.finish_reason:
                one.offer(chunk.sequence, chunk.finish_reason, "test")
                done.append(chunk.sequence)
    one.close()
    return done


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Sequence]]:
    """A folder of traces of the target that `--scale tiny` trains for."""
    folder = tmp_path_factory.mktemp("traced")
    return folder / "traces", serve(write_tiny_target(folder / "target"), folder / "traces", 16)


@pytest.fixture
def first(traced: tuple[Path, list[Sequence]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run that learned from the traces as answers; without report.html, which takes longer."""
    monkeypatch.setattr("paceline.commands.evaluate.report", lambda run: None)
    out = tmp_path / "first"
    paceline(*TINY, "--answers", traced[0], "--out", out, "--max-steps", "2", "--features", "online")
    return RunFolder(out)


def test_traces_feed_training_without_conversion(traced: tuple[Path, list[Sequence]], first: RunFolder) -> None:
    folder, done = traced
    stored = {(tuple(answer.prompt_ids), tuple(answer.answer_ids)) for answer in AnswerShards(folder)}
    assert stored == {(tuple(seq.tokens[: seq.prompt_len]), tuple(seq.output_ids)) for seq in done}
    assert first.metrics()[-1]["step"] == 2
    assert (first.path / "drafter" / "model.safetensors").is_file()


@pytest.mark.nightly
def test_traces_are_asked_again(traced: tuple[Path, list[Sequence]], first: RunFolder, tmp_path: Path) -> None:
    """A second run asks the recorded prompts anew and continues the drafter of the first (`--init`)."""
    folder, done = traced
    words = ("--init", first.path / "drafter", "--max-steps", "2", "--features", "online")
    second = tmp_path / "second"
    paceline(*TINY, "--prompts", folder, *words, "--out", second)
    again = list(AnswerShards(second / "regenerate" / "answers"))
    assert {tuple(answer.prompt_ids) for answer in again} == {tuple(seq.tokens[: seq.prompt_len]) for seq in done}
    greedy = {tuple(seq.tokens[: seq.prompt_len]): tuple(seq.output_ids) for seq in done if seq.params.is_greedy}
    assert {tuple(answer.prompt_ids): tuple(answer.answer_ids[:40]) for answer in again}.items() >= greedy.items()
    assert RunFolder(second).metrics()[0]["loss"] < first.metrics()[0]["loss"]


def test_traces_are_prompts_by_file_and_by_folder(traced: tuple[Path, list[Sequence]]) -> None:
    folder, done = traced
    (path,) = folder.iterdir()
    by_file, by_folder = read_prompts(path), read_prompts(folder, limit=5)
    assert {prompt.token_ids for prompt in by_file} == {tuple(seq.tokens[: seq.prompt_len]) for seq in done}
    assert [prompt.token_ids for prompt in by_folder] == [prompt.token_ids for prompt in by_file[:5]]
    assert by_folder[0].source == folder.name and by_folder[0].id == by_file[0].id


def test_traces_of_another_tokenizer_are_refused(traced: tuple[Path, list[Sequence]], tmp_path: Path) -> None:
    other, out = tiny_model(tmp_path / "other"), tmp_path / "run"
    shifted = parquet.ParquetFile(next(traced[0].iterdir())).read().to_pylist()
    for row in shifted:
        row["answer_ids"] = [token % 100 for token in row["answer_ids"]]
    parquet.write_table(pa.Table.from_pylist(shifted, SCHEMA), tmp_path / "shifted.parquet")
    words = ("--target", other, "--device", "cpu", "--max-tokens", 16, "--max-prompt-tokens", 100, "--out", out)
    with pytest.raises(PromptError, match="tokens of another tokenizer than the target's"):
        paceline("regenerate", "--prompts", tmp_path / "shifted.parquet", *words)


def test_a_shard_that_goes_while_it_is_read(traced: tuple[Path, list[Sequence]], tmp_path: Path) -> None:
    for name in ("traces-1.parquet", "traces-2.parquet"):
        (tmp_path / name).write_bytes(next(traced[0].iterdir()).read_bytes())
    reading = iter(AnswerShards(tmp_path))
    next(reading)
    (tmp_path / "traces-2.parquet").unlink()
    assert len(list(reading)) == 15
    assert traces.SOURCE == "traces"
