"""Synthetic answers: in form, even, without copies, without production's prompts; training reads them."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any, cast

import pytest
from shown import Shown
from small_llm import tiny_model

from paceline.config import EngineConfig
from paceline.data.answers import Answer, AnswerShards
from paceline.data.prompts import digest
from paceline.errors import CacheError, ConfigError, PromptError
from paceline.loop.synthesize.config import SynthesizeConfig, Synthesized
from paceline.loop.synthesize.run import Form, _accept, run
from paceline.report.tables import Progress
from paceline.train.answers import self_written
from paceline.train.config import AnswerConfig, PromptsConfig
from paceline.train.documents.dataset import read_corpus
from paceline.types import GrammarSpec

pytestmark = pytest.mark.slow
SCHEMA = {
    "type": "object",
    "properties": {
        "action": {"enum": ["refund", "trace", "repair"]},
        "id": {"type": "string", "pattern": "^[a-z]{1,3}$"},
    },
    "required": ["action", "id"],
    "additionalProperties": False,
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": {"n": {"enum": [1, 2]}}}},
    }
    for name in ("look", "wait")
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny", max_position=2048)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return written(tmp_path, 24)


@pytest.fixture
def few_prompts(tmp_path: Path) -> Path:
    return written(tmp_path, 8)


def written(folder: Path, count: int) -> Path:
    """A file of prompts of the same form."""
    names = [hashlib.sha256(bytes([number])).hexdigest() for number in range(count)]
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"Where is {name}?"}) + "\n" for name in names))
    return file


def synthesize(model: Path, out: Path, prompts: Path, **settings: Any) -> Synthesized:
    answering = {
        "max_tokens": 300,
        "max_prompt_tokens": 1300,
        "system": "Answer each ticket.",
        "grammar": GrammarSpec("json_schema", json.dumps(SCHEMA)),
    }
    answering |= settings.pop("answering", {})
    progress = settings.pop("progress", None) or Progress()
    config = SynthesizeConfig(
        out=out,
        target=EngineConfig(str(model), device="cpu", dtype="float32", threads=1),
        prompting=settings.pop("asked", None) or PromptsConfig(prompts=(str(prompts),)),
        answering=AnswerConfig(**answering),
        **settings,
    )
    return run(config, progress)


def answers(done: Synthesized) -> list[Answer]:
    return list(AnswerShards(done.answers))


def test_every_answer_parses_and_the_rare_is_asked_for(model: Path, tmp_path: Path, prompts: Path) -> None:
    done = synthesize(model, tmp_path / "x", prompts)
    values = [json.loads(answer.text) for answer in answers(done)]
    assert done.num_answers == len(values) > 12 and done.parsed == 1
    assert all(
        set(value) == {"action", "id"} and value["action"] in SCHEMA["properties"]["action"]["enum"] for value in values
    )
    assert {value["action"] for value in values} == {"refund", "trace", "repair"} and 0 < done.num_steered <= 12
    free = synthesize(model, tmp_path / "free", prompts, steered=0.0)
    card, other = (json.loads((folder / "card.json").read_text()) for folder in (tmp_path / "x", tmp_path / "free"))
    assert card["choices"][0]["evenness"] > other["choices"][0]["evenness"] and free.num_steered == 0
    assert sum(card["choices"][0]["counts"].values()) == card["answers"] == done.num_answers
    first = answers(done)[0]
    assert "Answer each ticket." in _text(model, first.prompt_ids)
    assert read_corpus([done.answers], 512).train


def _text(model: Path, ids: list[int]) -> str:
    from paceline.model.text.tokenizer import Tokenizer

    return Tokenizer.from_path(model).decode(ids, False)


def test_a_killed_run_goes_on_and_comes_to_the_same(model: Path, tmp_path: Path, few_prompts: Path) -> None:
    whole = synthesize(model, tmp_path / "x", few_prompts)
    before = {answer.key: answer.answer_ids for answer in answers(whole)}
    shards = sorted((tmp_path / "x" / "raw").glob("*.parquet"))
    shards[-1].unlink()
    again = synthesize(model, tmp_path / "x", few_prompts)
    assert {answer.key: answer.answer_ids for answer in answers(again)} == before
    with pytest.raises(ConfigError, match="begun with other settings"):
        synthesize(model, tmp_path / "x", few_prompts, steered=0.1)


def test_production_is_kept_out_by_hash(model: Path, tmp_path: Path, few_prompts: Path) -> None:
    """A store that holds four of the prompts, as the application would send them."""
    done = synthesize(model, tmp_path / "x", few_prompts)
    store, by_digest = AnswerShards(tmp_path / "store"), {}
    for answer in answers(done):
        by_digest.setdefault(digest(answer.prompt_ids), answer)
    store.write([*by_digest.values()][:4])
    second = synthesize(model, tmp_path / "y", few_prompts, not_in=(tmp_path / "store",))
    assert (second.num_in_store, second.num_compared) == (4, 4)
    assert not {digest(answer.prompt_ids) for answer in answers(second)} & {*[*by_digest][:4]}
    card, readme = json.loads((tmp_path / "y" / "card.json").read_text()), (tmp_path / "y" / "README.md").read_text()
    assert card["production"] == {
        "is_used": False,
        "stores": [str(tmp_path / "store")],
        "prompts_compared_with": 4,
        "prompts_left_out": 4,
    }
    assert (
        "No production text was used" in readme
        and "100% of the answers parse" in readme
        and "| `action` | 3 |" in readme
    )
    store.write([*by_digest.values()])
    with pytest.raises(PromptError, match="every prompt stands in the store"):
        synthesize(model, tmp_path / "z", few_prompts, not_in=(tmp_path / "store",))
    with pytest.raises(PromptError, match="no store of traces"):
        synthesize(model, tmp_path / "z", few_prompts, not_in=(tmp_path / "nowhere",))


def test_calls_of_tools(model: Path, tmp_path: Path, few_prompts: Path) -> None:
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps(TOOLS))
    done = synthesize(
        model, tmp_path / "x", few_prompts, answering={"grammar": None, "tools": tools}, ood=("gsm8k.jsonl",)
    )
    calls = [json.loads(answer.text) for answer in answers(done)]
    assert {call["name"] for call in calls} == {"look", "wait"} and done.parsed == 1
    card = json.loads((tmp_path / "x" / "card.json").read_text())
    assert card["choices"][0]["name"] == "answer" and card["ood"] == ["gsm8k.jsonl"]
    assert '"look"' in _text(model, answers(done)[0].prompt_ids)


def test_a_regex_and_examples_before(model: Path, tmp_path: Path, few_prompts: Path) -> None:
    before = tmp_path / "before.json"
    before.write_text(json.dumps([{"role": "user", "content": "Parcel 0?"}, {"role": "assistant", "content": "AB-1"}]))
    grammar = GrammarSpec("regex", "[A-Z]{2}-[0-9]{1,3}")
    done = synthesize(model, tmp_path / "x", few_prompts, answering={"grammar": grammar, "before": before})
    first = answers(done)[0]
    assert first.text[2] == "-" and done.num_steered == 0
    opening = "<|im_start|>system\nAnswer each ticket.<|im_end|>\n<|im_start|>user\nParcel 0?<|im_end|>\n"
    assert _text(model, first.prompt_ids).startswith(
        opening + "<|im_start|>assistant\nAB-1<|im_end|>\n<|im_start|>user\nWhere"
    )


def test_what_cannot_be_asked(model: Path, tmp_path: Path, few_prompts: Path) -> None:
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps([{"name": "no function"}]))
    for changes, text in (
        ({"grammar": None, "system": None}, "say what the application answers"),
        ({"grammar": GrammarSpec("json_schema", "{nonsense")}, "no JSON"),
        ({"grammar": GrammarSpec("json_schema", "[]")}, "no object"),
        ({"grammar": None, "tools": tools}, "must be a list of"),
        ({"max_tokens": 3}, "no answer can be kept .*unfinished"),
    ):
        with pytest.raises((ConfigError, PromptError), match=text):
            synthesize(model, tmp_path / text[:6].strip(), few_prompts, answering=changes)
    tools.write_text(json.dumps(TOOLS))
    with pytest.raises(ConfigError, match="either a call or of a schema"):
        synthesize(model, tmp_path / "x", few_prompts, answering={"tools": tools})
    with pytest.raises(ConfigError, match="NAME=VALUE"):
        AnswerConfig(variables=("thinking",))


def test_users_name_values_of_the_schema(
    model: Path, tmp_path: Path, few_prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where an opener has a blank for one; what no opener names is said."""
    monkeypatch.setattr(self_written, "MAX_TOKENS", 40)
    monkeypatch.setattr(self_written, "rejection_reason", lambda *_: None)  # a random model finishes no sentence
    openers, out = tmp_path / "openers.txt", tmp_path / "x"
    progress = Shown()
    for text in ("Please look at {id}\n", "Please look\n"):
        openers.write_text(text)
        prompts_config = PromptsConfig((str(few_prompts),), self_written=6, openers=openers)
        synthesize(model, out, few_prompts, asked=prompts_config, progress=progress)
        rows = [json.loads(line)["prompt"] for line in (out / "self-written-r0.jsonl").read_text().splitlines()]
        begun = [row for row in rows if row.startswith("Please look")]
        named = {match[1] for row in begun if (match := re.match("Please look at ([a-z]{1,3})", row))}
        assert begun and (len(named) > 1 if "{id}" in text else not named)
        assert any("no opener names {id}, a property with a pattern" in line for line in progress.lines) == (
            "{id}" not in text
        )
        shutil.rmtree(out)
    openers.write_text("Please look at {number}\n")
    with pytest.raises(ConfigError, match=r"openers name \{number\}, which the schema does not tell: .* action, id"):
        synthesize(model, out, few_prompts, asked=PromptsConfig((str(few_prompts),), self_written=6, openers=openers))


def test_near_copies(tmp_path: Path) -> None:
    text = list(range(200))
    changed = [*text[:100], 999, *text[101:]]  # five of 196 pieces differ
    others = [[token + 1000 for token in text], [*text[:100], *range(5000, 5100)]]
    assert accepted(tmp_path, [text, text, changed, *others], 0.9) == [text, *others]
    assert accepted(tmp_path, [text, [*text, 1], text], 1.0) == [text, [*text, 1]]


def test_without_an_answer_to_keep_those_of_an_earlier_run_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty folder replaced them before the error. On a full disk another --out was advised: all was lost."""
    assert accepted(tmp_path, [[1, 2, 3], [1, 2, 3]], 0.9) == [[1, 2, 3]]
    done = Synthesized(tmp_path / "answers")
    raw = [Answer("0", "", 0, 0.0, [1], [5], "length", "")]
    _, rejected = _accept(Form(None, None), cast(Any, raw), done, 0.9)
    assert rejected.total() == 1 and done.num_answers == 0
    assert [answer.answer_ids for answer in answers(done)] == [[1, 2, 3]]

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(AnswerShards, "write", full)
    with pytest.raises(CacheError, match="No space left.*: free space and run the same command again"):
        accepted(tmp_path, [[4, 5, 6]], 0.9)


def accepted(folder: Path, texts: list[list[int]], max_overlap: float) -> list[list[int]]:
    raw = [Answer(str(at), "", 0, 0.0, [1], tokens, "stop", "") for at, tokens in enumerate(texts)]
    done = Synthesized(folder / "answers")
    _, rejected = _accept(Form(None, None), cast(Any, raw), done, max_overlap)
    assert rejected == {"near-copy": len(texts) - done.num_answers}
    return [answer.answer_ids for answer in answers(done)]
