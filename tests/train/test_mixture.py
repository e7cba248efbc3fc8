"""Several sources with weights, and what is left out of them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from paceline.errors import ConfigError, PromptError
from paceline.train.answers.mixture import read_mixture, sources_of
from paceline.train.config import PromptsConfig


def source(folder: Path, name: str, number: int, *more: str) -> str:
    lines = [json.dumps({"id": f"{name}-{index}", "prompt": f"{name} {index}"}) for index in range(number)]
    (folder / name).write_text("\n".join([*lines, *more]) + "\n")
    return str(folder / name)


def test_weights(tmp_path: Path) -> None:
    one, two = source(tmp_path, "a.jsonl", 30), source(tmp_path, "b.jsonl", 12)
    notes: list[str] = []
    mixture = read_mixture(PromptsConfig((f"{one}=2", f"{two}=1")), 0, notes.append)
    assert Counter(prompt.source for prompt in mixture.prompts) == {"a.jsonl": 24, "b.jsonl": 12}
    assert mixture.dropped.counts == {"beyond the mixture's weights": 6} and "6 of 30 prompts are left out" in notes[0]
    assert len(read_mixture(PromptsConfig((one, two)), 0, notes.append).prompts) == 42, "without weights all are taken"
    with pytest.raises(PromptError, match="gives nothing to this mixture"):
        read_mixture(PromptsConfig((f"{one}=1", f"{two}=0.001")), 0, notes.append)


def test_a_mixture_that_grows_keeps_what_it_had(tmp_path: Path) -> None:
    small, large = [
        {
            prompt.id
            for prompt in read_mixture(
                PromptsConfig((source(tmp_path, "a.jsonl", 40) + "=1", source(tmp_path, "b.jsonl", number) + "=1")),
                7,
                lambda _: None,
            ).prompts
            if prompt.source == "a.jsonl"
        }
        for number in (5, 9)
    ]
    assert small < large and len(large) == 9


def test_what_a_weight_is(tmp_path: Path) -> None:
    odd = tmp_path / "x=2"
    odd.write_text("")
    assert sources_of((str(odd), "a.jsonl=0.5", "org/set:train=3")) == [
        (str(odd), None),
        ("a.jsonl", 0.5),
        ("org/set:train", 3.0),
    ]
    for text in ("a.jsonl=", "a.jsonl=x", "a.jsonl=0", "a.jsonl=inf", "a.jsonl=nan"):
        with pytest.raises(ConfigError, match="the weight of"):
            sources_of((text,))


def test_bad_rows_are_counted_or_refused(tmp_path: Path) -> None:
    file, notes = source(tmp_path, "a.jsonl", 2, "{half"), list[str]()
    mixture = read_mixture(PromptsConfig((file,)), 0, notes.append)
    assert len(mixture.prompts) == 2 and mixture.dropped.counts == {"not JSON": 1}
    assert notes[0].startswith(f"{file}: 1 rows left out: 1 not JSON")
    with pytest.raises(PromptError, match="line 3: not a line of JSON"):
        read_mixture(PromptsConfig((file,), strict=True), 0, notes.append)
