"""`paceline mcp`, driven by the official client over HTTP: every tool, its limits, and the log."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import sys
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
import uvicorn
from adapt_requests import keyed, store
from fake_servers import FakeServer, serving
from mcp.client import Client
from mcp.client.streamable_http import streamable_http_client
from safetensors.torch import load_file, save_file
from small_llm import tiny_model

from paceline.cli import app
from paceline.config import EngineConfig
from paceline.draft.dflash.config import new_config
from paceline.draft.dflash.drafter import DFlashConfig, DFlashDrafter, DFlashNetwork
from paceline.errors import ConfigError
from paceline.loop.adapt.config import (
    CandidateConfig,
    DeployConfig,
    PolicyConfig,
    PriceConfig,
    RetrainConfig,
    StoreConfig,
)
from paceline.loop.adapt.gate import examine
from paceline.loop.adapt.gate.lineage import weights_hash
from paceline.loop.adapt.gate.retrain import Job
from paceline.loop.mcp.config import McpConfig
from paceline.loop.mcp.operations import Operations
from paceline.loop.mcp.server import app_of
from paceline.plan.costs import PassCosts
from paceline.serve.run import listen
from paceline.serve.settings import ServeConfig

pytestmark = pytest.mark.slow
KEY = "0123456789abcdef"
TRAIN = (
    f'{sys.executable} -m paceline train --target "$PACELINE_MODEL" --init "$PACELINE_INCUMBENT" --answers '
    '"$PACELINE_WINDOW" --out "$PACELINE_OUT" --max-steps 60 --blocks-per-step 64 --heldout-every 60 --lr 1e-2 '
    "--dtype float32 --device cpu --threads 1 --serve-share 0 --json"
)
"""A number of steps, not of minutes: the drafter is as good on a busy machine."""
TOOLS = {"traffic", "propose", "train", "score", "gate", "status", "roll_out", "roll_back", "read_log"}


class Refused(Exception):
    """A tool's error, as the client gets it."""


def drafter(folder: Path) -> Path:
    raw = new_config(32, 258, 2, num_layers=1, num_taps=1, head_dim=8, intermediate_size=48, block_size=4)
    DFlashDrafter(DFlashNetwork.random(DFlashConfig.from_json(raw))).save(folder)
    return folder


def poison(folder: Path) -> None:
    """Puts noise in place of the weights."""
    file = folder / "model.safetensors"
    tensors = {name: torch.randn_like(tensor) for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})


def operations(folder: Path, server: FakeServer | None = None, train_command: str | None = None) -> Operations:
    """Tools over 160 tickets of one cluster whose answers count upwards."""
    rows = [
        keyed(n, prompt_ids=[n, 7], answer_ids=[(n + at) % 20 for at in range(16 + n // 20)], sampling="{}")
        for n in range(160)
    ]
    return Operations(
        StoreConfig(store(folder / "traces", rows), folder / "state"),
        EngineConfig(str(folder / "model"), device="cpu", dtype="float32"),
        PolicyConfig(),
        PriceConfig(),
        CandidateConfig(incumbent=server.members["general"] if server else str(drafter(folder / "old"))),
        RetrainConfig(train_command=train_command),
        DeployConfig(servers=(server.url,) if server else ()),
    )


@contextlib.asynccontextmanager
async def client_of(one: Operations, key: str = KEY) -> AsyncIterator[Any]:
    """The official client, connected to a server on a free port; yields a function that calls a tool."""
    bound = listen(ServeConfig(port=0))
    server = uvicorn.Server(uvicorn.Config(app_of(one, McpConfig(key=KEY)), log_config=None, ws="none"))
    task = asyncio.create_task(server.serve(sockets=[bound]))
    url, headers = f"http://127.0.0.1:{bound.getsockname()[1]}/mcp", {"Authorization": f"Bearer {key}"}
    try:
        async with (
            httpx2.AsyncClient(headers=headers, timeout=60) as http,
            Client(streamable_http_client(url, http_client=http)) as client,
        ):
            assert {tool.name for tool in (await client.list_tools()).tools} == TOOLS

            async def call(tool: str, **arguments: Any) -> Any:
                result = await client.call_tool(tool, arguments)
                if result.is_error:
                    raise Refused(result.content[0].text)
                return result.structured_content

            yield call
    finally:
        server.should_exit = True
        await task


async def ended(call: Any, job: dict[str, Any]) -> dict[str, Any]:
    """The status of a job once it has ended."""
    while (job := await call("status", job=job["id"]))["state"] == "running":
        await asyncio.sleep(0.5)
    return job


async def refused(call: Coroutine[Any, Any, Any], words: str) -> None:
    with pytest.raises(Refused) as caught:
        await call
    assert words in str(caught.value)


def start_in_this_process(command: list[str], output: Path) -> Job:
    """Runs gates here, where passes and drafts have fixed times; all else in processes of its own."""
    if "gate" not in command:
        return Job(command, output)
    words, shown = command[command.index("paceline") + 1 :], io.StringIO()
    with contextlib.redirect_stdout(shown):
        app(words, prog_name="paceline", standalone_mode=False)
    return printed(shown.getvalue().splitlines()[-1], output)


def printed(line: str, output: Path) -> Job:
    """A job that has printed this line."""
    job = Job([sys.executable, "-c", f"print({line!r})"], output)
    assert job._process is not None
    job._process.wait()
    return job


def test_an_agent_trains_rolls_out_and_cannot_roll_out_a_poisoned_drafter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real training and measurement, and gates that see the same times on each machine."""
    monkeypatch.setattr(examine, "draft_seconds", lambda llm, drafters: [0.0] * len(drafters))
    monkeypatch.setattr(examine, "measure_passes", lambda target, most: PassCosts([(1, 1.0), (8, 1.1)]))
    tiny_model(tmp_path / "model")
    with serving(FakeServer()) as server:
        old = server.members["general"] = str(drafter(tmp_path / "old"))
        one = operations(tmp_path, server, train_command=TRAIN)
        one.jobs.start = start_in_this_process

        async def main() -> None:
            async with client_of(one) as call:
                seen = await call("traffic")
                assert seen["answers"] == 160 and seen["tokens_per_round"] > 1
                assert (await call("propose"))["decision"]["action"] == "too little"
                job = await call("train", name="tickets", cluster="tickets")
                assert job["state"] == "running", "it returns at once"
                await refused(call("gate", drafter=str(tmp_path / "state")), "runs: wait")
                job = await ended(call, job)
                assert job["state"] == "done", job
                scored = await ended(call, await call("score", drafter=job["drafter"], limit=2, max_tokens=8))
                assert scored["state"] == "done" and len(scored["result"]["results"]) == 2, scored
                gate = await ended(call, await call("gate", drafter=job["drafter"], cluster="tickets"))
                assert gate["result"]["gains"]["drifted"]["candidate"] > 1.5 and gate["result"]["passed"], gate
                await call("roll_out", gate=gate["id"])
                served = server.members["general"]
                assert weights_hash(Path(served)) == gate["arguments"]["weights"]
                poison(Path(job["drafter"]))
                bad = await ended(call, await call("gate", drafter=job["drafter"], cluster="tickets"))
                assert bad["id"] != gate["id"] and bad["result"]["passed"] is False, bad
                await refused(call("roll_out", gate=bad["id"]), "the gate refused it: its gain of -")
                assert server.members["general"] == served
                again = await call("train", name="tickets", cluster="tickets")
                assert again["id"] == job["id"] and again["state"] == "done", "it is not trained twice"
                await call("roll_back", why="slower")
                assert server.members["general"] == old
                log = await call("read_log", most=1000)
            lines = [(line["tool"], line["outcome"]) for line in log["calls"] if line["tool"] != "status"]
            expected = [
                "traffic",
                "propose",
                "train",
                "gate",
                "score",
                "gate",
                "roll_out",
                "gate",
                "roll_out",
                "train",
                "roll_back",
                "read_log",
            ]
            assert [tool for tool, _ in lines] == expected
            assert [number for number, (_, outcome) in enumerate(lines) if outcome != "ok"] == [3, 8, 11]
            assert [lines[at][1] for at in (3, 8, 11)] == ["refused", "refused", "running or killed"]
            assert all("time" in line and "arguments" in line for line in log["calls"])
            assert [entry["state"] for entry in log["drafters"]] == ["passed", "rolled back", "refused"]

        asyncio.run(main())


def gates(one: Operations, **changes: Any) -> None:
    """Plays the commands of gates, which pass the drafter unless `changes` say otherwise."""

    def start(command: list[str], output: Path) -> Job:
        folder = Path(command[command.index("gate") + 1])
        verdict = {"passed": True, "reason": "+9%", "gains": {"drifted": {"low": 0.1, "incumbent": 1, "candidate": 2}}}
        verdict |= {"drafter": str(folder), "share": 1.0, "weights": weights_hash(folder)} | changes
        return printed(json.dumps(verdict), output)

    one.jobs.start = start


def test_only_the_weights_that_passed_are_rolled_out(tmp_path: Path) -> None:
    with serving(FakeServer()) as server:
        one = operations(tmp_path, server)
        new = drafter(tmp_path / "state" / "new")
        gates(one)

        async def main() -> None:
            async with client_of(one) as call:
                gate = (await call("gate", drafter=str(new)))["id"]
                kept = (new / "model.safetensors").read_bytes()
                poison(new)
                await refused(call("roll_out", gate=gate), "are not those that passed the gate")
                assert server.members == {"general": "default"}
                (new / "model.safetensors").write_bytes(kept)
                copy = (await call("roll_out", gate=gate))["serving"]
                assert server.members == {"general": copy} and weights_hash(Path(copy)) == weights_hash(new)
                await refused(call("roll_out", gate=gate), "serves by now: call gate again")
                assert (await call("roll_back", why="slower"))["serving"] == "default"
                assert server.members == {"general": "default"}
                await refused(call("roll_back", why="slower"), "nothing was rolled out")
                await refused(call("roll_out", gate=gate), "turned away before: slower")
                await refused(call("gate", drafter=str(new), cluster="tickets"), "turned away before: slower")
                poison(new)  # as by another training, while the copy that was turned away is still there
                await refused(call("roll_out", gate=gate), "are not those that passed the gate")

        asyncio.run(main())
    assert [entry["state"] for entry in one.lineage.entries()] == ["passed", "rolled back"]


def test_a_lost_answer_of_the_server_can_be_undone(tmp_path: Path) -> None:
    with serving(FakeServer()) as server:
        one = operations(tmp_path, server)
        new = drafter(tmp_path / "state" / "new")
        gates(one)
        server.loses.add("/admin/drafters/general")
        gate = one.gate(str(new))["id"]
        with pytest.raises(Exception, match="answer"):
            one.roll_out(gate)
        assert server.members != {"general": "default"} and one.rollout.serving == "default"
        server.loses.clear()
        assert one.roll_back("no answer")["serving"] == "default" and server.members == {"general": "default"}


def test_a_repeated_roll_out_leaves_the_copy_that_the_server_may_be_reading(tmp_path: Path) -> None:
    with serving(FakeServer()) as server:
        one = operations(tmp_path, server)
        new = drafter(tmp_path / "state" / "new")
        gates(one)
        server.loses.add("/admin/drafters/general")
        gate = one.gate(str(new))["id"]
        with pytest.raises(Exception, match="answer"):
            one.roll_out(gate)
        copied = Path(server.members["general"]) / "model.safetensors"
        before = copied.stat()
        assert one.roll_out(gate)["serving"] == str(copied.parent)
        assert (copied.stat().st_ino, copied.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_verdicts_that_do_not_pass(tmp_path: Path) -> None:
    one = operations(tmp_path)
    new = drafter(tmp_path / "state" / "new")
    for changes, words in (
        ({"weights": "sha256:other"}, "its weights changed meanwhile"),
        ({"passed": False, "reason": "it loses"}, "the gate refused it: it loses"),
    ):
        gates(one, **changes)
        gate = one.gate(str(new), "tickets" if "reason" in changes else "all")["id"]
        with pytest.raises(ConfigError, match=words):
            one.roll_out(gate)
    with pytest.raises(ConfigError, match="the very same weights were turned away before: it loses"):
        one.gate(str(new), "chat")


def test_what_is_outside_or_unknown_is_refused_and_logged(tmp_path: Path) -> None:
    one = operations(tmp_path)
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "link").symlink_to(tmp_path / "old")

    async def main() -> None:
        async with client_of(one) as call:
            for path in (tmp_path / "old", tmp_path / "state" / ".." / "old", tmp_path / "state" / "link", "default"):
                await refused(call("gate", drafter=str(path)), "outside of the folders of this server")
            await refused(
                call("score", drafter=str(tmp_path / "state"), prompts="/etc/passwd"), "outside of the folders"
            )
            await refused(call("train", name="../up"), "take up to 40 small letters")
            await refused(call("gate", drafter=str(tmp_path / "state"), most_loss=1), "has no argument most_loss")
            await refused(call("status", job=7), "valid string")
            await refused(call("shell", command="id"), "Unknown tool")
            await refused(call("status", job="../../x"), "there is no job")
        calls = one.log.calls(100)
        assert [line["outcome"] for line in calls] == ["refused"] * 10 and all(line["why"] for line in calls)
        with pytest.raises(Exception):  # noqa: B017, PT011  the SDK raises a group
            async with client_of(one, key="another key of 16"):
                pass
        assert {line["why"] for line in one.log.calls(100)[10:]} == {"no key, or a wrong one"}

    asyncio.run(main())


def test_a_job_of_a_killed_server_is_resumed_by_the_same_call(tmp_path: Path) -> None:
    one, runs = operations(tmp_path), list[list[str]]()

    def start(command: list[str], output: Path) -> Job:
        runs.append(command)
        script = "print('{}')" if len(runs) == 2 else "import time; time.sleep(60)"
        return Job([sys.executable, "-c", script], output)

    one.jobs.start = start
    first = one.train("a", "tickets")
    other = operations(tmp_path)
    other.jobs.start = start
    assert other.train("a", "tickets")["state"] == "running" and len(runs) == 1, "it outlives its server"
    one.jobs._started[first["id"]].stop()
    assert other.status(first["id"])["state"] == "failed"
    assert other.train("a", "tickets")["id"] == first["id"] and runs[0] == runs[1]
    other.jobs._started[first["id"]]._process.wait()
    assert other.status(first["id"])["state"] == "done"


def test_a_training_on_the_clusters_that_are_not_tracked(tmp_path: Path) -> None:
    """`propose` names them "other"."""
    one, commands = operations(tmp_path), list[list[str]]()
    one.policy = PolicyConfig(max_clusters=1)
    rows = [keyed(n, tag=f"tag{n % 2}", answer_ids=[3, 4, n]) for n in range(200, 360)]
    store(tmp_path / "traces", rows, "traces-2.parquet")

    def start(command: list[str], output: Path) -> Job:
        commands.append(command)
        job = Job(["true"], output)
        assert job._process is not None
        job._process.wait()
        return job

    one.jobs.start = start
    one.train("a", "other")
    one.gate(str(drafter(tmp_path / "state" / "mine")), "other")
    assert commands[1][commands[1].index("--tracked") + 1] == "tickets"


def test_only_loopback_and_a_long_key() -> None:
    for host in ("0.0.0.0", "10.0.0.1", "localhost", "::"):
        with pytest.raises(ConfigError, match="loopback"):
            McpConfig(host=host)
    with pytest.raises(ConfigError, match="16 characters"):
        McpConfig(key="short")
