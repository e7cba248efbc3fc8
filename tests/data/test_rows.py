"""Rows as people have them: chats of several shapes, packed files, hub data sets; and what is left out is counted."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from tiny_builtin import raising

from paceline.bench.tasks import read_task
from paceline.data import rows
from paceline.data.prompts import read_prompts
from paceline.data.rows import Dropped, choose_files, rows_of
from paceline.errors import DownloadError, PromptError
from paceline.loop.evals import read_suite
from paceline.simulate.files import read_objects

TOOL = {"name": "weather", "parameters": {"type": "object"}}


def write(folder: Path, *source_rows: Any, name: str = "rows.jsonl") -> Path:
    file = folder / name
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in source_rows)
    file.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return file


def chat(*turns: tuple[str, Any], **more: Any) -> dict[str, Any]:
    return {"conversations": [{"from": who, "value": what} for who, what in turns], **more}


def test_rows_end_at_newlines_alone(tmp_path: Path) -> None:
    """U+2028 and U+0085 may stand in a JSON string as they are; for str.splitlines they end a line."""
    question = {"id": "a", "question": "What is\u2028one\x85and one?", "answer": "#### 2"}
    case = question | {"scorer": {"kind": "numeric", "answer": 2}, "messages": [{"role": "user", "content": "\u2028?"}]}
    file = write(tmp_path, *(json.dumps(row, ensure_ascii=False) for row in (case, case | {"id": "b"})))
    assert [row["question"] for row in read_objects(file, "")] == 2 * [question["question"]]
    assert [each.id for each in read_suite(file).cases] == ["a", "b"]
    assert len(read_task(f"gsm8k={file}").prompts) == 2


def test_sharegpt(tmp_path: Path) -> None:
    row = chat(("system", "Be short."), ("human", "Hi."), ("gpt", "Hello."), ("human", "And?"), ("gpt", "No."), id="a7")
    (prompt,) = read_prompts(write(tmp_path, row))
    assert prompt.id == "a7" and prompt.turns == ("Hi.", "And?")
    assert prompt.messages == [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi."}]


def test_sharegpt_s_calls_are_the_api_s(tmp_path: Path) -> None:
    call = json.dumps({"name": "weather", "arguments": {"city": "Ulm"}})
    row = chat(
        ("human", "Weather?"),
        ("function_call", call),
        ("observation", "rain"),
        ("gpt", "Rain."),
        tools=json.dumps([TOOL]),
    )
    (prompt,) = read_prompts(write(tmp_path, row | {"system": "Call."}))
    assert [message["role"] for message in prompt.messages] == ["system", "user", "assistant", "tool"]
    assert prompt.messages[2]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Ulm"}'}
    assert prompt.tools == ({"type": "function", "function": TOOL},)
    with pytest.raises(PromptError, match="a function_call must be a JSON object"):
        read_prompts(write(tmp_path, chat(("human", "Weather?"), ("function_call", "weather()"))))
    with pytest.raises(PromptError, match="unknown speaker 'narrator': choose from"):
        read_prompts(write(tmp_path, chat(("narrator", "Once."), ("human", "Hi."))))


def test_a_row_s_own_template_variables_and_system_message(tmp_path: Path) -> None:
    row = {"prompt": "Hi.", "system": "Be short.", "chat_template_kwargs": {"enable_thinking": False, "effort": None}}
    (prompt,) = read_prompts(write(tmp_path, row))
    assert prompt.variables == (("enable_thinking", False),), "None is what Parquet gives rows that lack a key"
    assert prompt.messages[0] == {"role": "system", "content": "Be short."} and prompt.turns == ("Hi.",)
    with pytest.raises(PromptError, match="'chat_template_kwargs' must be an object"):
        read_prompts(write(tmp_path, row | {"chat_template_kwargs": "fast"}))


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.jsonl"])
def test_packed_or_not(tmp_path: Path, name: str) -> None:
    assert [
        prompt.turns[0] for prompt in read_prompts(write(tmp_path, {"prompt": "a"}, {"prompt": "b"}, name=name))
    ] == [
        "a",
        "b",
    ]


def test_an_array_is_read_entry_by_entry(tmp_path: Path) -> None:
    file = tmp_path / "sharegpt.json"
    file.write_text(json.dumps([chat(("human", "a")), "no object", chat(("human", "b"))], indent=1))
    dropped = Dropped()
    assert [prompt.turns[0] for prompt in read_prompts(file, dropped=dropped)] == ["a", "b"]
    assert dropped.counts == {"not an object": 1} and "entry 2" in str(dropped)
    file.write_text("[1, 2")
    with pytest.raises(PromptError, match="is no JSON"):
        read_prompts(file)


def test_a_packed_file_that_was_cut_off(tmp_path: Path) -> None:
    file = write(tmp_path, *({"prompt": str(number) * 50} for number in range(200)), name="rows.jsonl.gz")
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(PromptError, match="cannot read"):
        read_prompts(file)


def test_a_line_beyond_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MAX_LINE_BYTES", 1 << 20)
    file = write(tmp_path, "x" * (1 << 21), name="bomb.jsonl.gz")
    assert file.stat().st_size < 10_000
    with pytest.raises(PromptError, match="line 1: longer than 1 MiB"):
        read_prompts(file)


def test_what_is_left_out_is_counted(tmp_path: Path) -> None:
    file = write(
        tmp_path, {"prompt": "a"}, "{", "[1]", {"prompt": " "}, {"foo": 1}, {"prompt": 3}, "{x", {"prompt": "b"}
    )
    dropped = Dropped()
    assert [prompt.id for prompt in read_prompts(file, dropped=dropped)] == ["0", "7"]
    reasons = {"not JSON": 2, "not an object": 1, "empty prompt": 1, "of unknown shape": 1, "malformed": 1}
    assert dropped.counts == reasons and str(dropped).startswith("6 rows left out: 2 not JSON (")
    assert "line 2" in dropped.examples["not JSON"]
    assert [prompt.id for prompt in read_prompts(file, 2, Dropped())] == ["0", "7"], "a limit counts what can be used"
    with pytest.raises(PromptError, match="holds no prompts: .*2 rows left out: 2 not JSON"):
        read_prompts(write(tmp_path, "{", "{"), dropped=Dropped())


class FakeHub:
    """The two calls that are made of the hub, answered from a folder."""

    def __init__(self, folder: Path, listed: dict[str | None, list[str]]) -> None:
        self.folder, self.listed, self.fetched = folder, listed, list[str]()

    def HfApi(self) -> Any:
        return self

    def list_repo_files(self, repo_id: str, *, repo_type: str, revision: str | None = None) -> list[str]:
        assert (repo_id, repo_type) == ("org/set", "dataset")
        return self.listed[revision]

    def hf_hub_download(self, repo_id: str, file: str, *, repo_type: str, revision: str | None) -> str:
        assert file in self.listed[revision] and repo_type == "dataset"
        self.fetched.append(file)
        return str(self.folder / Path(file).name)

    def into(self, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
        monkeypatch.setattr("huggingface_hub.HfApi", self.HfApi)
        monkeypatch.setattr("huggingface_hub.hf_hub_download", self.hf_hub_download)
        return self


def test_a_hub_data_set_is_fetched_file_by_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("train-0.jsonl", "train-1.jsonl"):
        write(tmp_path, {"prompt": name}, {"prompt": name + "b"}, name=name)
    listed = ["README.md", "data/train-0.jsonl", "data/train-1.jsonl", "data/test-0.jsonl", "run.py"]
    hub = FakeHub(tmp_path, {None: listed}).into(monkeypatch)
    assert len(read_prompts("org/set", limit=2)) == 2 and hub.fetched == ["data/train-0.jsonl"]
    assert len(read_prompts("org/set:train")) == 4
    write(tmp_path, "{", name="test-0.jsonl")
    with pytest.raises(PromptError, match="test-0.jsonl, line 1: not a line of JSON"):
        read_prompts("org/set:test")


def test_the_hub_s_own_parquet_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(arrow.table({"question": ["1+1?"]}), tmp_path / "0000.parquet")
    copies = ["main/train/0000.parquet", "main/test/0000.parquet", "socratic/train/0000.parquet"]
    hub = FakeHub(tmp_path, {None: ["set.py", "data.zip"], rows.CONVERTED: copies}).into(monkeypatch)
    assert read_prompts("org/set/main:test")[0].turns[0].startswith("1+1?") and hub.fetched == [
        "main/test/0000.parquet"
    ]
    with pytest.raises(PromptError, match=r"several configs \(main, socratic\): name one"):
        read_prompts("org/set")
    with pytest.raises(PromptError, match="no Parquet or JSON files of this config and split: choose among main/test"):
        read_prompts("org/set/main:dev")


def test_which_files() -> None:
    listed = ["data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet", "extra.jsonl"]
    assert choose_files(listed, None, "", "x") == listed[:1], "Parquet before other copies"
    assert choose_files(["chats.json", "dataset_infos.json"], None, "", "x") == ["chats.json"]
    assert choose_files(["a.jsonl", "test.jsonl"], None, "", "x") == ["a.jsonl"], "what names no split is learned from"


def test_a_hub_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    from huggingface_hub import errors

    http = importlib.import_module(errors.HTTPError.__module__.partition(".")[0])
    missing = errors.RepositoryNotFoundError(
        "no", response=http.Response(404, request=http.Request("GET", "https://example.org"))
    )
    for error, kind in ((missing, PromptError), (http.ConnectError("no route"), DownloadError)):
        monkeypatch.setattr(
            "huggingface_hub.HfApi", lambda error=error: type("", (), {"list_repo_files": raising(error)})
        )
        with pytest.raises(kind, match="org/set"):
            list(rows_of("org/set")[1])
