"""The admin API and the metrics of a server that keeps few of its drafters in memory."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live_server import Live, chat_body, serving, wait_until
from small_llm import tiny_model

from paceline import LLM
from paceline.commands.shared import introduce
from paceline.draft.dflash.drafter import DFlashDrafter

pytestmark = pytest.mark.slow

PATH = "/admin/drafters"
SIZES: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_batch": 3, "max_len": 128}


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    target = tiny_model(tmp_path / "model")
    folders = [tmp_path / name for name in "abcd"]
    DFlashDrafter.random(LLM(str(target), drafter="none", **SIZES).target).save(folders[0])
    for folder in folders[1:]:
        shutil.copytree(folders[0], folder)
    named = {folder.name: str(folder) for folder in folders}
    with serving(lambda: LLM(str(target), drafters=named, loaded_drafters=2, **SIZES), route="tag") as live:
        yield live


def state(live: Live) -> dict[str, str]:
    return {row["name"]: row["state"] for row in live.request("GET", PATH)[1]["drafters"]}


def drafter_of(live: Live, tag: str) -> str:
    body = chat_body(max_tokens=12, temperature=0, ignore_eos=True, return_metrics=True)
    status, answer, _ = live.post("/v1/chat/completions", body, {"x-paceline-tag": tag})
    assert status == 200, answer
    texts.setdefault(id(live), set()).add(answer["choices"][0]["message"]["content"])
    return answer["metrics"]["speculative_decoding"]["drafter"]


texts: dict[int, set[str]] = {}


def test_drain_delete_and_replace_released_drafters(live: Live) -> None:
    assert state(live) == {"a": "ready", "b": "ready", "c": "released", "d": "released", "none": "ready"}
    assert drafter_of(live, "c") == "a"
    wait_until(lambda: state(live)["c"] == "ready")
    assert drafter_of(live, "c") == "c" and state(live)["b"] == "released"
    status, row, _ = live.post(f"{PATH}/b/drain", {})
    assert status == 200 and row["state"] == "draining" and row["memory_bytes"] == 0
    assert drafter_of(live, "b") == "a" and state(live)["c"] == "ready", "a drained one is not loaded"
    assert live.request("DELETE", f"{PATH}/b")[0] == 200
    row = live.post(f"{PATH}/d", {"drafter": str(Path(live.llm.engine.pool.member("d").drafter.source))})[1]
    assert row["state"] == "ready" and row["memory_bytes"] == row["weight_bytes"] + row["cache_bytes"] > 0
    assert state(live) == {"a": "ready", "c": "released", "d": "ready", "none": "ready"}
    assert drafter_of(live, "d") == "d" and drafter_of(live, "none") == "none"
    assert len(texts.pop(id(live))) == 1
    wait_until(live.is_idle)
    assert live.seen.num_crashes == 0


def test_memory_and_counters_are_shown(live: Live) -> None:
    assert drafter_of(live, "c") == "a"
    wait_until(lambda: state(live)["c"] == "ready")
    shown = live.request("GET", PATH)[1]
    pool = live.llm.engine.pool
    rows = {row["name"]: row for row in shown["drafters"]}
    assert rows["a"]["weight_bytes"] == pool.member("a").drafter.weight_bytes and not rows["b"]["memory_bytes"]
    assert shown["memory"]["memory_bytes"] < rows["a"]["memory_bytes"] + rows["c"]["memory_bytes"]
    text = live.request("GET", "/metrics")[1].decode()
    values = dict(re.findall(r'paceline:(drafters?_\w+\{[^}]*(?:drafter|part)="\w+"[^}]*\}) (\S+)', text))
    for name, part in (("weight", "weight_bytes"), ("cache", "cache_bytes")):
        assert float(values[f'drafters_held_bytes{{model_name="test",part="{name}"}}']) == shown["memory"][part]
    counted = [
        float(values[f'drafter_{name}_total{{drafter="{of}",model_name="test"}}'])
        for name, of in (("loads", "c"), ("releases", "b"), ("misses", "c"))
    ]
    assert counted == [1, 1, 1]
    line = introduce(live.llm)
    assert re.search(r"drafters a \(weights .* cache .*\), b \(on disk\),.* \(together", line), line


def test_the_pool_is_as_at_the_start_after_a_crash(live: Live) -> None:
    from live_server import break_engine

    assert drafter_of(live, "c") == "a"
    wait_until(lambda: state(live)["c"] == "ready")
    break_engine(live)
    assert live.post("/v1/chat/completions", chat_body(max_tokens=4))[0] == 500
    assert drafter_of(live, "b") == "b" and [drafter_of(live, "c") for _ in range(3)] == ["a"] * 3, (
        "loaded anew: no old weights beside new ones"
    )
    wait_until(lambda: state(live)["c"] == "ready")
    assert drafter_of(live, "c") == "c" and len(texts.pop(id(live))) == 1
