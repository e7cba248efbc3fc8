"""Pools of many drafters: few in memory, equal weights and caches once; every text is plain decoding's."""

from __future__ import annotations

import gc
import random
import shutil
from collections import Counter
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
from live_server import wait_until
from safetensors.torch import load_file, save_file

from paceline import LLM
from paceline.draft.dflash.drafter import DFlashDrafter
from paceline.draft.formats.family import read_drafter
from paceline.draft.pool import bind, memory_of
from paceline.engine.residency import RECENT_PER_DRAFTER, ReleasedDrafter
from paceline.errors import ConfigError, DownloadError, ModelNotFoundError
from paceline.model.native.library import Matrix
from paceline.plan.routes import Router
from paceline.serve.settings import ServeConfig
from paceline.types import Route, SamplingParams, Sequence

NUM = 20
PROMPT = [number % 200 for number in range(7, 40)]
LAST = "layers.1."
"""Beginning of the names of the last layer's tensors, in which the drafters differ."""
SIZES: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_batch": 3, "max_len": 96, "speculate": "4"}


@pytest.fixture(scope="module")
def folders(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Twenty drafters of one body: only their last layers differ."""
    base = tmp_path_factory.mktemp("drafters")
    target = LLM(str(model), drafter="none", **SIZES).target
    DFlashDrafter.random(target, num_layers=2).save(base / "c0")
    for number in range(1, NUM):
        shutil.copytree(base / "c0", base / f"c{number}")
        tensors = load_file(base / "c0" / "model.safetensors")
        generator = torch.Generator().manual_seed(number)
        for name, tensor in tensors.items():
            if name.startswith(LAST) and tensor.ndim == 2:
                tensors[name] = 0.05 * torch.randn(tensor.shape, generator=generator)
        save_file(tensors, base / f"c{number}" / "model.safetensors", {"format": "pt"})
    return {f"c{number}": str(base / f"c{number}") for number in range(NUM)}


def begin(llm: LLM, name: str, prompt: list[int] = PROMPT, num_tokens: int = 12) -> Sequence:
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    return llm.engine._requests[llm.engine.add(prompt, params, route=Route(name))][0]


def finish(llm: LLM) -> None:
    while llm.engine.has_work:
        llm.engine.step()
        llm.engine.check_integrity()


def answer(llm: LLM, name: str, **more: Any) -> Sequence:
    seq = begin(llm, name, **more)
    finish(llm)
    return seq


def in_memory(llm: LLM) -> list[str]:
    return [name for name, member in llm.engine.pool.members.items() if not member.drafter.is_released]


def load_ends(llm: LLM) -> None:
    """Wait until the thread that loads a drafter has ended."""
    residency = llm.residency
    assert residency
    wait_until(lambda: residency._loading is None or residency._loading[2].done())


def logged(llm: LLM, name: str) -> list[Any]:
    """The drafts of this member from now on."""
    drafter, drafts = llm.engine.pool.member(name).drafter, list[Any]()
    propose = drafter.propose

    def proposed(batch: Any) -> Any:
        block = propose(batch)
        drafts.extend(zip([seq.cached_len for seq in batch.sequences], map(list, block.tokens_B), strict=True))
        return block

    drafter.propose = proposed
    return drafts


def test_twenty_drafters_with_three_in_memory(model: Path, folders: dict[str, str]) -> None:
    llm = LLM(str(model), drafters=folders, loaded_drafters=3, **SIZES)
    residency, pool = llm.residency, llm.engine.pool
    assert residency and in_memory(llm) == ["c0", "c1", "c2"]
    plain = answer(llm, "none").output_ids
    draw = random.Random(0)
    seen_misses = 0
    for _ in range(30):
        name = draw.choice(list(folders))
        was_released = pool.member(name).drafter.is_released and not (
            residency._loading and residency._loading[0] == name
        )
        seq = answer(llm, name)
        assert seq.output_ids == plain and (seq.drafter == "c0") == (was_released or name == "c0")
        seen_misses += was_released
        load_ends(llm)
        second = answer(llm, name)
        assert second.drafter in (name, "c0") and second.output_ids == plain
        assert (second.drafter == name) == (name in in_memory(llm)), "a drafter in memory is used"
        seen_misses += second.drafter != name
        assert len(in_memory(llm)) <= 3 and "c0" in in_memory(llm)
    assert residency.misses.total() == seen_misses > 10 and residency.loads.total() >= 2


@pytest.mark.parametrize("speculate", ["4", "off"])
def test_the_limit_holds_for_drafters_added_to_one_without_a_name(
    model: Path, folders: dict[str, str], speculate: str
) -> None:
    llm = LLM(str(model), drafter=folders["c0"], loaded_drafters=2, **SIZES | {"speculate": speculate})
    first = next(iter(llm.members))
    for name in ("c1", "c2", "c3"):
        llm.put_drafter(name, llm.make_drafter(folders[name]))
    assert in_memory(llm) == ([first, "c3"] if speculate == "4" else [first, "c2", "c3"])


def test_a_drafter_is_replaced_by_one_that_is_requested_more_than_twice_as_often(
    model: Path, folders: dict[str, str]
) -> None:
    llm = LLM(str(model), drafters=folders, loaded_drafters=3, **SIZES)
    for name in ("c1", "c1", "c2", "c2", "c2", "c9", "c9", "c9", "c9"):
        answer(llm, name)
        load_ends(llm)
    assert in_memory(llm) == ["c0", "c1", "c2"], "four requests are not more than twice two"
    answer(llm, "c9")
    load_ends(llm)
    assert answer(llm, "c9").drafter == "c9" and in_memory(llm) == ["c0", "c2", "c9"]
    for _ in range(3 * RECENT_PER_DRAFTER):  # c2 has left
        answer(llm, "c9")
    answer(llm, "c5")
    load_ends(llm)
    assert answer(llm, "c5").drafter == "c5" and in_memory(llm) == ["c0", "c5", "c9"]


def test_running_requests_keep_their_drafters_in_memory(model: Path, folders: dict[str, str]) -> None:
    llm = LLM(str(model), drafters=folders, loaded_drafters=3, **SIZES)
    residency = llm.residency
    assert residency
    running = [begin(llm, name, num_tokens=40) for name in ("c1", "c2")]
    for _ in range(3):
        third = begin(llm, "c9", num_tokens=1)
        while third.finish_reason is None:
            llm.engine.step()
        assert third.drafter == "c0" and residency._loading is None
    assert not any(seq.finish_reason for seq in running)
    assert residency.misses["c9"] == 3
    assert in_memory(llm) == ["c0", "c1", "c2"], "no idle drafter makes room"
    finish(llm)
    assert [seq.drafter for seq in running] == ["c1", "c2"]
    assert answer(llm, "").drafter == "c0", "now there is room, and c9 begins to load"
    load_ends(llm)
    assert answer(llm, "c9").drafter == "c9" and in_memory(llm) == ["c0", "c2", "c9"]


@pytest.mark.parametrize("change", ["replace", "remove", "drain", "renew"])
def test_a_drafter_that_changes_while_it_is_loaded(model: Path, folders: dict[str, str], change: str) -> None:
    llm = LLM(str(model), drafters=folders, loaded_drafters=3, **SIZES)
    pool = llm.engine.pool
    answer(llm, "c9")
    assert llm.residency and llm.residency._loading
    if change == "replace":
        llm.put_drafter("c9", llm.make_drafter(folders["c8"]))
    elif change == "remove":
        llm.remove_drafter("c9")
    elif change == "drain":
        llm.drain_drafter("c9")
    else:
        llm.renew()
        pool = llm.engine.pool
    load_ends(llm)
    seq = answer(llm, "c9")
    assert seq.drafter == ("c9" if change in ("replace", "renew") else "c0")
    if change == "replace":
        assert pool.member("c9").drafter.source == folders["c8"]
    if change == "drain":
        assert llm.residency.state_of(pool.member("c9")) == "draining"
    assert seq.output_ids == answer(llm, "none").output_ids and len(in_memory(llm)) <= 3


def test_a_folder_that_changed_or_is_gone(model: Path, folders: dict[str, str], tmp_path: Path) -> None:
    """One that is released is refused, and the default drafts; one in memory stays there."""
    own = {name: str(shutil.copytree(folder, tmp_path / name)) for name, folder in list(folders.items())[:4]}
    llm = LLM(str(model), drafters=own, loaded_drafters=2, **SIZES)
    residency, pool = llm.residency, llm.engine.pool
    assert residency
    save_file(load_file(folders["c9"] + "/model.safetensors"), tmp_path / "c2" / "model.safetensors")
    (tmp_path / "c2" / "more").touch()
    answer(llm, "c2")
    load_ends(llm)
    assert answer(llm, "c2").drafter == "c0" and residency.state_of(pool.member("c2")) == "failed"
    assert pool.open == ["c0", "c1", "c3", "none"], "a router chooses another"
    released = pool.member("c2").drafter
    assert isinstance(released, ReleasedDrafter) and "paceline drafters load c2=" in released.failure
    assert residency._loading is None, "it is not tried at every request"
    answer(llm, "c3")
    load_ends(llm)
    answer(llm, "c3")
    shutil.rmtree(tmp_path / "c3")
    answer(llm, "c1")
    assert residency._loading is None and in_memory(llm) == ["c0", "c3"]
    with pytest.raises(ModelNotFoundError):
        LLM(str(model), drafters=own, loaded_drafters=2, **SIZES)
    with pytest.raises(ConfigError, match="loaded_drafters must be at least 2"):
        ServeConfig(loaded_drafters=1)


def test_a_released_drafter_needs_no_hub(model: Path, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a relative path depend on the present folder."""
    is_up = True

    def resolve(name: str) -> Path:
        if name == "org/c1" and not is_up:
            raise DownloadError("the hub cannot be reached")
        return Path(name.replace("org/c1", folders["c1"]))

    monkeypatch.setattr("paceline.draft.registry.hub.resolve", resolve)
    monkeypatch.chdir(Path(folders["c2"]).parent)
    names = {"c0": folders["c0"], "c1": "org/c1", "c2": "c2"}
    llm = LLM(str(model), drafters=names, loaded_drafters=2, **SIZES)
    pool = llm.engine.pool
    assert pool.member("c2").drafter.source == folders["c2"]
    monkeypatch.chdir("/")
    is_up = False
    for name, others, number in (("c2", ["c0", "c2"], 1), ("c1", ["c0", "c1"], 5)):
        for _ in range(number):
            answer(llm, name)
            load_ends(llm)
        assert answer(llm, name).drafter == name and in_memory(llm) == others
    assert pool.member("c1").drafter.source == "org/c1"


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_shared_weights_and_rows_change_no_drafts(model: Path, folders: dict[str, str], backend: str) -> None:
    """In one batch, and one after another in the same row with a prefix in common."""
    names = ("c0", "c1", "c2")
    alone: dict[str, list[Any]] = {}
    settings = SIZES | {"backend": backend}
    for name in names:
        llm = LLM(str(model), drafter="none", **settings)
        drafter = llm.make_drafter(folders[name])
        drafter.bind(llm.target)  # not by the pool, so nothing is shared
        llm.put_drafter(name, drafter)
        assert not drafter.held
        alone[name] = logged(llm, name)
        answer(llm, name)
    assert len({str(drafts) for drafts in alone.values()}) == 3 and all(alone.values())
    for max_batch in (3, 1):
        llm = LLM(str(model), drafters={name: folders[name] for name in names}, **(settings | {"max_batch": max_batch}))
        paths = [llm.engine.pool.member(name).drafter for name in names]
        assert len({path._path.cache.keys.data_ptr() for path in paths if isinstance(path, DFlashDrafter)}) == 1
        together = {name: logged(llm, name) for name in names}
        sequences = [begin(llm, name) for name in names]
        finish(llm)
        assert [seq.drafter for seq in sequences] == list(names) and together == alone
        for name in (*names, "c0"):
            drafts = together[name]
            del drafts[:]
            answer(llm, name)
            assert drafts == alone[name]


def test_a_row_is_another_drafters_from_the_start_of_its_sequence(model: Path, folders: dict[str, str]) -> None:
    llm = LLM(str(model), drafters={name: folders[name] for name in ("c0", "c1")}, **(SIZES | {"max_batch": 1}))
    answer(llm, "c0")
    pool = llm.engine.pool
    assert pool._held == {0: pool.member("c0").drafter}
    begin(llm, "c1")
    assert not pool._held, "nobody may copy what c0 left there"


def matrices_of(item: Any, seen: dict[int, Any]) -> set[Matrix]:
    """All native matrices that an object refers to."""
    if id(item) in seen or isinstance(item, type | ModuleType | FunctionType):
        return set()
    seen[id(item)] = item
    if isinstance(item, Matrix):
        return {item}
    return set().union(*(matrices_of(each, seen) for each in gc.get_referents(item)))


def test_memory_is_that_of_distinct_tensors(model: Path, folders: dict[str, str]) -> None:
    names = ["c0", "c1", "c2", "c3"]
    llm = LLM(str(model), drafters={name: folders[name] for name in names}, **(SIZES | {"backend": "native"}))
    drafters: list[Any] = [llm.engine.pool.member(name).drafter for name in names]
    seen: dict[int, Any] = {id(llm.target): None}
    packed = set().union(*(matrices_of(drafter._path._model, seen) for drafter in drafters))
    packed -= {llm.target.head_matrix, llm.target.embedding_matrix}  # pyright: ignore[reportAttributeAccessIssue]
    tensors = [tensor for drafter in drafters for tensor in drafter.network.state_dict().values()]
    as_read = sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())
    memory = memory_of(drafters, llm.target)
    assert memory.weight_bytes == as_read + sum(matrix.num_bytes for matrix in packed)
    assert memory.weight_bytes < sum(drafter.weight_bytes for drafter in drafters)
    caches = {drafter._path.cache.keys.data_ptr(): drafter._path.cache.num_bytes for drafter in drafters}
    assert memory.cache_bytes == sum(caches.values()) == drafters[0].cache_bytes(llm.target)
    assert drafters[0].cache_shape(llm.target) == tuple(drafters[0]._path.cache.keys.shape)
    assert llm.cache_bytes == llm.target.cache.num_bytes + memory.cache_bytes


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_own_heads_count_once(model: Path, folders: dict[str, str], tmp_path: Path, backend: str) -> None:
    llm = LLM(str(model), drafter="none", **(SIZES | {"backend": backend}))
    head_VD = torch.randn(llm.target.vocab_size, llm.target.hidden_size)
    DFlashDrafter(read_drafter(folders["c0"]).network, head_VD=head_VD).save(tmp_path / "own")
    drafters = [llm.make_drafter(str(tmp_path / "own")) for _ in range(2)]
    for drafter in drafters:
        bind(drafter, llm.target, keeps=True)
    alone, both = (memory_of(drafters[:count], llm.target).weight_bytes for count in (1, 2))
    assert 0 <= both - alone < head_VD.nbytes // 4, "all but norms is shared"


def test_new_weights_of_the_target_reach_shared_heads(model: Path, folders: dict[str, str], tmp_path: Path) -> None:
    ids = torch.arange(0, 200, 2)
    DFlashDrafter(read_drafter(folders["c0"]).network, draft_ids=ids).save(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    named = {name: str(tmp_path / name) for name in "ab"}
    llm = LLM(str(model), drafters=named, **(SIZES | {"backend": "native"}))
    llm.load_weights({name: 2.0 * tensor for name, tensor in load_file(model / "model.safetensors").items()})
    heads = {member.drafter._path._head for member in llm.members.values() if isinstance(member.drafter, DFlashDrafter)}
    target: Any = llm.target
    (head,) = heads
    expected_VD = target.head_matrix.rows_of(ids.tolist(), torch.float32)
    assert torch.equal(head.rows_of(list(range(len(ids))), torch.float32), expected_VD)


def test_a_drafter_alone_is_not_compared(model: Path, folders: dict[str, str]) -> None:
    llm = LLM(str(model), drafters={"c0": folders["c0"]}, **SIZES)
    assert not llm.engine.pool.member("c0").drafter.held


def test_requests_that_met_a_released_drafter_teach_the_router_nothing(model: Path, folders: dict[str, str]) -> None:
    router = Router()
    llm = LLM(
        str(model),
        drafters={name: folders[name] for name in ("c0", "c1", "c2")},
        loaded_drafters=2,
        router=router,
        **(SIZES | {"speculate": "auto"}),
    )
    given = []
    for _ in range(12):
        params = SamplingParams(max_tokens=12, ignore_eos=True)
        seq = llm.engine._requests[llm.engine.add(PROMPT, params, route=Route(clusters=("tag:a",)))][0]
        finish(llm)
        load_ends(llm)
        given.append(seq.drafter)
    assert llm.residency and llm.residency.misses.total() > 0 and not router._sessions
    counted = Counter[str]()
    for cluster in router.clusters.values():
        assert all(arm.num_running == 0 for arm in cluster.arms.values())
        counted.update({name: arm.num_given for name, arm in cluster.arms.items()})
    assert counted == Counter(given) - Counter(c0=llm.residency.misses.total())
