"""Deployments and the daemon beside the real thing: the app of the pool, over HTTP. What is trained is only copied."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from live_server import Live, chat_body, serving, wait_until
from played import NOW, PASSED, Deciding, Played, events, ticked, traffic, watcher
from small_llm import tiny_model

from paceline import LLM
from paceline.draft.dflash.drafter import DFlashDrafter
from paceline.errors import DownloadError
from paceline.loop.adapt.config import CandidateConfig, DeployConfig
from paceline.loop.adapt.decide.decide import Decision
from paceline.loop.adapt.gate.retrain import Job
from paceline.loop.adapt.servers.deploy import open_deployment
from paceline.loop.adapt.servers.deployment import Deployment
from paceline.plan.clusters import SEEN, label
from paceline.plan.routes import Router

pytestmark = pytest.mark.slow
TICKETS = label("tag:tickets")
KEY = "admin"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def drafters(target: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two that fit the target."""
    llm = LLM(str(target), drafter="none", dtype="float32", device="cpu", max_len=64)
    folders = [tmp_path_factory.mktemp("drafters") / name for name in ("one", "two")]
    for folder in folders:
        DFlashDrafter.random(llm.target).save(folder)
    return folders


@pytest.fixture
def live(target: Path, drafters: list[Path]) -> Iterator[Live]:
    settings: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_batch": 2, "max_len": 128}
    pool = {"general": str(drafters[0])}
    with serving(lambda: LLM(str(target), drafters=pool, router=Unmeasured(), **settings), admin_keys=(KEY,)) as live:
        for _ in range(SEEN):
            assert drafter_of(live) == "general"
        yield live


class Unmeasured(Router):
    """Chooses without measured times: under load a random drafter is clearly slower than plain decoding, and a pinned
    drafter that is slower gives way."""

    def learn(self, *_: object) -> None:
        pass


def drafter_of(live: Live) -> str:
    """Whose drafts a ticket gets."""
    body = chat_body(max_tokens=4, temperature=0, return_metrics=True)
    status, answer, _ = live.post("/v1/chat/completions", body, {"x-paceline-tag": "tickets"})
    assert status == 200, answer
    return answer["metrics"]["speculative_decoding"]["drafter"]


@pytest.fixture
def deployment(live: Live) -> Iterator[Deployment]:
    with contextlib.closing(open_deployment(DeployConfig(servers=(live.url,), admin_key=KEY))) as one:
        yield one


def test_a_drafter_is_replaced_and_given_back(live: Live, deployment: Deployment, drafters: list[Path]) -> None:
    one, two = map(str, drafters)
    assert deployment.is_well() and deployment.place_of(one) == "general"
    deployment.load("general", drafters[1])
    assert deployment.members() == {"general": two} and drafter_of(live) == "general"
    assert deployment.counts().tokens > 0
    with pytest.raises(DownloadError, match="no drafter"):
        deployment.load("general", drafters[1] / "none")
    deployment.roll_back()
    assert deployment.members() == {"general": one} and deployment.undo == []
    with (
        contextlib.closing(open_deployment(DeployConfig(servers=(live.url,)))) as keyless,
        pytest.raises(DownloadError, match="answered 401"),
    ):
        keyless.members()


def test_a_cluster_is_sent_to_a_member_beside_the_others(
    live: Live, deployment: Deployment, drafters: list[Path]
) -> None:
    deployment.load("tickets-1", drafters[1])
    deployment.route(TICKETS, "tickets-1")
    assert deployment.pinned(TICKETS) == "tickets-1"
    assert [drafter_of(live) for _ in range(3)] == ["tickets-1"] * 3
    for cluster, name, words in (("en", "tickets-1", "knows no requests"), (TICKETS, "nobody", "no drafter 'nobody'")):
        with pytest.raises(DownloadError, match=words):
            deployment.route(cluster, name)
    deployment.roll_back()
    wait_until(live.is_idle)
    assert deployment.members() == {"general": str(drafters[0])} and deployment.pinned(TICKETS) is None
    deployment.members()
    assert list(live.llm.members) == ["general"] and drafter_of(live) == "general"


def test_the_daemon_adds_a_member(live: Live, drafters: list[Path], tmp_path: Path) -> None:
    """From the decision to the pool, and out of it again when the server is not well."""
    traffic(tmp_path, cluster=TICKETS)
    ends = Played((0, ""), (0, PASSED))

    def start(command: list[str], log: Path) -> Job:
        if "train" in command:
            shutil.copytree(drafters[1], Path(command[command.index("--out") + 1]) / "drafter")
        return ends(command, log)

    policy = Deciding(Decision("propose", (TICKETS,), why="it returns"))
    config = CandidateConfig(incumbent=str(drafters[0]))
    one = watcher(tmp_path, live, cast(Any, start), policy=policy, candidate=config, deploy={"admin_key": KEY})
    ticked(one, 0, 5)
    assert events(one) == ["training", "swapped"], one.log.lines()
    (name,) = set(live.llm.members) - {"general"}
    assert drafter_of(live) == name and live.llm.members[name].drafter.source == one.lineage.entries()[0]["drafter"]
    assert one.stage is not None
    for place in (3, 6):
        one.stage.counted[place] -= 30.0  # all of thirty requests have failed since
    one.tick(NOW + 400)
    assert events(one)[-1] == "rolled back" and drafter_of(live) == "general"
    one.tick(NOW + 460)
    assert list(live.llm.members) == ["general"] and live.seen.num_crashes == 0
    one.stop(NOW + 460)
