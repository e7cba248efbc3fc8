"""The admin API: drafters loaded, drained and unloaded while the server answers; what is bad is refused and changes
nothing."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from live_server import Live, chat_body, in_engine, serving, wait_until
from safetensors.torch import load_file, save_file
from small_llm import tiny_model

from paceline import LLM
from paceline.draft.dflash.drafter import DFlashDrafter
from paceline.engine.engine import Engine
from paceline.plan.routes import Router
from paceline.serve.settings import MOST_DRAFTERS

pytestmark = pytest.mark.slow

PATH = "/admin/drafters"
LONG = {"max_tokens": 120, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def drafter(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafters") / "random"
    DFlashDrafter.random(LLM(str(target), drafter="none", dtype="float32", device="cpu", max_len=64).target).save(
        folder
    )
    return folder


def settings() -> dict[str, Any]:
    return {"dtype": "float32", "device": "cpu", "max_batch": 3, "max_len": 256, "router": Router()}


def served(target: Path, drafter: Path) -> contextlib.AbstractContextManager[Live]:
    return serving(lambda: LLM(str(target), drafters={"general": str(drafter), "words": "ngram"}, **settings()))


@pytest.fixture
def live(target: Path, drafter: Path) -> Iterator[Live]:
    with served(target, drafter) as live:
        yield live


@pytest.fixture(scope="module")
def steady(target: Path, drafter: Path) -> Iterator[Live]:
    """One server for the tests that change nothing in it."""
    with served(target, drafter) as live:
        yield live


def table(live: Live, **headers: str) -> dict[str, dict[str, Any]]:
    status, body, _ = live.request("GET", PATH, headers=headers)
    assert status == 200, body
    return {row["name"]: row for row in body["drafters"]}


def load(live: Live, name: str, folder: Path | str, **headers: str) -> tuple[int, Any]:
    return live.post(f"{PATH}/{name}", {"drafter": str(folder)}, headers)[:2]


def text_of(live: Live, **more: Any) -> str:
    status, body, _ = live.post("/v1/chat/completions", chat_body(**(LONG | more)))
    assert status == 200, body
    return body["choices"][0]["message"]["content"]


def test_list_tells_names_states_rows_and_memory(live: Live) -> None:
    text_of(live, max_tokens=30)
    drafters = table(live)
    assert list(drafters) == ["general", "words", "none"]
    assert {row["state"] for row in drafters.values()} == {"ready"} and {row["rows"] for row in drafters.values()} == {
        0
    }
    pool = live.llm.engine.pool
    general = pool.members["general"].drafter
    assert isinstance(general, DFlashDrafter)
    weights = sum(tensor.nbytes for tensor in general.network.state_dict().values())
    memory = drafters["general"]["memory_bytes"]
    assert memory == general.weight_bytes + general.cache_bytes(live.llm.target) > 2 * weights
    assert drafters["words"]["memory_bytes"] == drafters["none"]["memory_bytes"] == 0
    assert drafters["general"]["tokens_per_s"] > 0 and drafters["general"]["tokens_per_round"] >= 1
    assert drafters["words"]["tokens_per_s"] is None
    assert live.request("GET", "/v1/models")[1]["data"][0]["drafter"] == "general, words"


def test_load_drain_and_unload_under_traffic(live: Live, drafter: Path) -> None:
    """Texts stay plain decoding's; an answer that is under way keeps its drafter, and is waited for."""
    expected = text_of(live, speculate="off")
    texts: list[str] = []
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            texts.append(text_of(live))

    clients = [threading.Thread(target=ask) for _ in range(4)]
    for client in clients:
        client.start()
    try:
        status, row = load(live, "tickets", drafter)
        assert status == 200 and (row["name"], row["state"]) == ("tickets", "ready") and row["memory_bytes"] > 0
        assert load(live, "tickets", drafter)[0] == 200  # another in its place
        assert list(table(live))[:3] == ["general", "words", "tickets"]
        wait_until(lambda: table(live)["tickets"]["rows"] or table(live)["tickets"]["tokens_per_s"])
        status, row, _ = live.post(f"{PATH}/tickets/drain", {})
        assert status == 200 and row["state"] == "draining"
        wait_until(lambda: live.request("DELETE", f"{PATH}/tickets")[0] == 200)
        wait_until(lambda: list(table(live)) == ["general", "words", "none"])  # the first one's last answers have ended
    finally:
        stop.set()
        for client in clients:
            client.join()
    assert len(texts) > 4 and set(texts) == {expected}
    wait_until(live.is_idle)
    in_engine(live, lambda llm: llm.engine.check_integrity())
    assert live.seen.num_crashes == 0 and len(live.llms) == 1


def test_a_drafter_with_rows_is_not_unloaded(live: Live) -> None:
    streams = [live.open_stream(chat_body(**(LONG | {"max_tokens": 220}))) for _ in range(6)]
    wait_until(lambda: table(live)["general"]["rows"])
    status, body, _ = live.request("DELETE", f"{PATH}/general")
    for stream in streams:
        stream.close()
    assert (status, body["error"]["code"]) == (409, "drafter_busy") and "drain it" in body["error"]["message"]
    wait_until(lambda: not table(live)["general"]["rows"])
    before = weakref.ref(live.llm.engine.pool.members["general"].drafter)
    assert live.request("DELETE", f"{PATH}/general")[0] == 200
    wait_until(lambda: before() is None)  # its memory is free
    assert text_of(live, return_metrics=True)
    assert live.llm.engine.pool.open == ["words", "none"]


@pytest.mark.parametrize(("num_rows", "reason"), [(1, "1 answer is still made"), (2, "2 answers are still made")])
def test_answers_that_keep_a_drafter_are_counted(
    steady: Live, monkeypatch: pytest.MonkeyPatch, num_rows: int, reason: str
) -> None:
    monkeypatch.setattr(type(steady.llm.engine.pool), "num_rows", lambda pool, member: num_rows)
    status, body, _ = steady.request("DELETE", f"{PATH}/general")
    assert (status, body["error"]["code"]) == (409, "drafter_busy")
    assert body["error"]["message"] == f"{reason} with drafter 'general': drain it, and wait until it has no rows"


def spoiled(drafter: Path, folder: Path, how: str) -> Path:
    """A copy of a drafter's folder with something wrong."""
    shutil.copytree(drafter, folder)
    weights = folder / "model.safetensors"
    if how == "NaN":
        tensors = load_file(weights)
        tensors["fc.weight"][0, 0] = torch.nan
        save_file(tensors, weights)
    elif how == "half":
        weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    elif how == "no weights":
        weights.unlink()
    elif how == "no config":
        (folder / "config.json").write_text('{"architectures": ["DFlash')
    elif how == "other target":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 1000}))
    elif how == "missing":
        shutil.rmtree(folder)
    elif how == "dead":
        save_file({name: torch.zeros_like(tensor) + 3e38 for name, tensor in load_file(weights).items()}, weights)
    return folder


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("NaN", "fc.weight"),
        ("half", "truncated or damaged"),
        ("no weights", "safetensors"),
        ("no config", "config.json"),
        ("other target", "trained for this target"),
        ("missing", "no drafter"),
        ("dead", "drafts nothing"),
    ],
)
def test_a_bad_drafter_is_refused_with_a_reason_and_nothing_changes(
    steady: Live, drafter: Path, tmp_path: Path, how: str, reason: str
) -> None:
    live = steady
    before, taps = table(live), live.llm.target.tap_layers
    stream = live.open_stream(chat_body(**(LONG | {"max_tokens": 200})))
    for name in ("new", "general"):
        status, body = load(live, name, spoiled(drafter, tmp_path / name, how))
        assert (status, body["error"]["code"]) == (400, "drafter_refused"), body
        assert reason in body["error"]["message"]
    stream.close()
    wait_until(live.is_idle)
    after = table(live)
    assert {name: row["state"] for name, row in after.items()} == {name: row["state"] for name, row in before.items()}
    assert live.llm.target.tap_layers == taps and not live.llm.engine.pool.older
    assert live.seen.num_crashes == 0 and text_of(live) == text_of(live, speculate="off")


def test_names_that_cannot_be_and_too_many_are_refused(live: Live) -> None:
    for name in ("none", "ngram", "candidate", "a b", "x" * 33, "-x"):
        status, body = load(live, name.replace(" ", "%20"), "ngram")
        assert status == 400 and "cannot be called" in body["error"]["message"]
    for name in ("drain", "unload"):
        path, method = (f"{PATH}/unknown/drain", "POST") if name == "drain" else (f"{PATH}/unknown", "DELETE")
        status, body, _ = live.request(method, path, b"{}", {"content-type": "application/json"})
        assert (
            status == 404
            and "there is no drafter 'unknown' here: there are general, words, none" in body["error"]["message"]
        )
    for number in range(2, MOST_DRAFTERS):
        assert load(live, f"more{number}", "ngram")[0] == 200
    status, body = load(live, "last", "ngram")
    assert status == 503 and "the most there may be" in body["error"]["message"]
    assert load(live, "more2", "ngram")[0] == 200
    assert load(live, "more3", "none")[1]["error"]["message"] == "none is always available: give a drafter"
    assert live.post(f"{PATH}/x", {})[0] == 400


def test_a_drafter_that_needs_more_memory_than_there_is_is_refused(
    steady: Live, drafter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.serve.worker.drafters.free_bytes", lambda: 1000)
    status, body = load(steady, "tickets", drafter)
    assert status == 507 and "1,000 are free: unload another one" in body["error"]["message"]


def test_a_trial_that_takes_too_long_is_given_up(live: Live, drafter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.serve.worker.drafters.TRY_SECONDS", 0.2)
    halt, go_on = threading.Event(), threading.Event()
    real = Engine.step

    def slow(engine: Engine) -> Any:
        halt.set()
        go_on.wait(10)
        return real(engine)

    monkeypatch.setattr(Engine, "step", slow)
    answers: list[Any] = []
    client = threading.Thread(target=lambda: answers.append(load(live, "tickets", drafter)))
    client.start()
    halt.wait(10)
    threading.Event().wait(0.5)
    go_on.set()
    client.join()
    status, body = answers[0]
    assert status == 503 and "could not be tried within 0.2 s" in body["error"]["message"]
    wait_until(live.is_idle)
    assert list(table(live)) == ["general", "words", "none"]


def test_members_that_were_put_in_are_there_after_a_crash(live: Live, drafter: Path) -> None:
    from live_server import break_engine

    assert load(live, "tickets", drafter)[0] == 200
    assert live.post(f"{PATH}/words/drain", {})[0] == 200
    break_engine(live)
    assert live.post("/v1/chat/completions", chat_body(**LONG))[0] == 500
    assert text_of(live) == text_of(live, speculate="off")
    assert {name: row["state"] for name, row in table(live).items()} == {
        "general": "ready",
        "words": "draining",
        "tickets": "ready",
        "none": "ready",
    }


def test_an_answer_tells_whose_drafts_it_had(target: Path, drafter: Path) -> None:
    def make_llm() -> LLM:
        return LLM(str(target), drafters={"general": str(drafter), "words": "ngram"}, **settings())

    for route, header in (("tag", "x-paceline-tag"), ("header:X-Drafter", "x-drafter")):
        with serving(make_llm, route=route) as live:
            for name, expected in (
                ("words", "words"),
                ("none", "none"),
                ("general", "general"),
                ("nobody", "general"),
                ("", "general"),
            ):
                body = chat_body(max_tokens=4, return_metrics=True, paceline_timings=True)
                _, answer, _ = live.post("/v1/chat/completions", body, {header: name} if name else {})
                assert answer["metrics"]["speculative_decoding"]["drafter"] == answer["paceline"]["drafter"] == expected
            _, answer, _ = live.post("/v1/completions", {"prompt": "hello", "return_metrics": True}, {header: "words"})
            assert answer["metrics"]["speculative_decoding"]["drafter"] == "words"


def test_requests_are_counted_by_drafter_and_kind(live: Live) -> None:
    for _ in range(8):
        assert (
            live.post("/v1/chat/completions", chat_body(max_tokens=12, temperature=0), {"x-paceline-tag": "user-4711"})[
                0
            ]
            == 200
        )
    wait_until(live.is_idle)
    _, body, _ = live.request("GET", PATH)
    (kind,) = (each for each in body["clusters"] if each["cluster"] == "tag:user-4711")
    assert kind["requests"] == 6 and set(kind["given"]) >= {"general", "words"}
    text = live.request("GET", "/metrics")[1].decode()
    assert "user-4711" not in text and "tag:" not in text
    for name in (
        "rounds_total",
        "tokens_total",
        "seconds_total",
        "drafts_total",
        "requests_total",
        "rows",
        "memory_bytes",
        "gain",
    ):
        assert f"paceline:drafter_{name}{{" in text
    lines = [line for line in text.splitlines() if line.startswith("paceline:drafter_requests_total{")]
    assert sum(float(line.split()[-1]) for line in lines) == 8 and any('cluster="tag-' in line for line in lines)


class TestWhoMay:
    """Behind its own key, or on this machine alone."""

    def closed(self, live: Live, status: int, code: str, **headers: str) -> None:
        paths = ("GET", PATH), ("POST", f"{PATH}/x"), ("POST", f"{PATH}/x/drain"), ("DELETE", f"{PATH}/x")
        for method, path in (*paths, ("POST", "/admin/clusters/x"), ("DELETE", "/admin/clusters/x")):
            answer = live.request(method, path, b"{}", {"content-type": "application/json"} | headers)
            assert (answer[0], answer[1]["error"]["code"]) == (status, code), (method, path)

    def test_with_an_admin_key_only_who_has_it(self) -> None:
        with serving(admin_keys=("admin",), api_keys=("user",)) as live:
            self.closed(live, 401, "invalid_admin_key")
            self.closed(live, 401, "invalid_admin_key", authorization="Bearer user")
            assert list(table(live, authorization="Bearer admin")) == ["none"]
            assert live.request("GET", "/v1/models", headers={"authorization": "Bearer admin"})[0] == 401

    def test_without_one_only_this_machine(self) -> None:
        with serving() as live:
            assert list(table(live)) == ["none"]
            self.closed(live, 403, "admin_closed", origin="http://evil.example")
            self.closed(live, 403, "admin_closed", **{"x-forwarded-for": "10.0.0.1"})
        with serving(allowed_hosts=("*",)) as live:
            self.closed(live, 403, "admin_closed", host="evil.example")

    def test_without_one_nobody_where_there_are_api_keys(self) -> None:
        with serving(api_keys=("user",)) as live:
            self.closed(live, 403, "admin_closed")
            self.closed(live, 403, "admin_closed", authorization="Bearer user")


def test_a_kind_of_requests_is_sent_to_one_member(live: Live) -> None:
    def drafter_of() -> str:  # one token takes no round, of which a router could learn that plain decoding is faster
        _, answer, _ = live.post(
            "/v1/chat/completions", chat_body(max_tokens=1, return_metrics=True), {"x-paceline-tag": "t"}
        )
        return answer["metrics"]["speculative_decoding"]["drafter"]

    for _ in range(4):
        drafter_of()
    kind = next(each for each in live.request("GET", PATH)[1]["clusters"] if each["cluster"] == "tag:t")
    assert kind["pinned"] is None and kind["label"].startswith("tag-")
    for name in ("words", "none", "general"):
        status, row, _ = live.post(f"/admin/clusters/{kind['label']}", {"drafter": name})
        assert (status, row["pinned"]) == (200, name)
        assert {drafter_of() for _ in range(4)} == {name}
    status, row, _ = live.request("DELETE", f"/admin/clusters/{kind['label']}")
    assert (status, row["pinned"]) == (200, None)
    live.post(f"/admin/clusters/{kind['label']}", {"drafter": "words"})
    in_engine(live, lambda model: model.engine.router.clusters.pop("tag:t"))  # evicted, but still pinned
    path = "/admin/clusters/tag:t"
    rows = [live.post(path, {"drafter": "none"})[1], live.request("DELETE", path)[1]]
    assert [(row.get("pinned"), row.get("requests")) for row in rows] == [("none", 0), (None, 0)]
    for cluster, name, words in (
        ("nothing", "words", "no cluster 'nothing'"),
        (kind["label"], "nobody", "no drafter 'nobody'"),
    ):
        status, body, _ = live.post(f"/admin/clusters/{cluster}", {"drafter": name})
        assert status == 404 and words in body["error"]["message"]


def test_rows_tell_what_a_drafter_was_made_from(live: Live, drafter: Path) -> None:
    assert {name: row["drafter"] for name, row in table(live).items()} == {
        "general": str(drafter.resolve()),
        "words": "ngram",
        "none": "none",
    }
