"""Members of a pool that come under names which others have."""

from __future__ import annotations

import pytest
from doubles import ByteTokenizer, FakeTarget, ScriptedDrafter

from paceline.draft.base import NoDrafter
from paceline.draft.ngram import NgramDrafter
from paceline.draft.pool import Pool
from paceline.engine.engine import Engine
from paceline.errors import ConfigError
from paceline.types import Route, SamplingParams


def pool_of(target: FakeTarget, *names: str) -> Pool:
    return Pool(target, {name: ScriptedDrafter(target, tap_layers=(place,)) for place, name in enumerate(names)})


@pytest.mark.parametrize("name", ["first", "second", "third", "new"])
def test_a_drafter_that_is_swapped_in_is_the_default_whatever_its_name(name: str) -> None:
    """Under another member's name it takes the place of that one too, as `put` does."""
    target = FakeTarget()
    pool = pool_of(target, "first", "second", "third")
    new = ScriptedDrafter(target, tap_layers=(3,))
    new.name = name
    pool.swap(new)
    assert pool.drafter is new and pool.default.name == name and pool.drafters[0] is new and target.tap_layers[0] == 3
    assert list(pool.members) == [name, *(each for each in ("second", "third") if each != name)]


@pytest.mark.parametrize("is_open", [True, False])
def test_a_member_that_is_swapped_in_stays_the_member_it_is(is_open: bool) -> None:
    """It becomes the default, open again; its sequences are still its own."""
    target = FakeTarget(num_rows=2)
    engine = Engine(target, ByteTokenizer(), {name: ScriptedDrafter(target) for name in ("first", "second")})
    engine.add([1, 2, 3], SamplingParams(max_tokens=20), route=Route("second"))
    second = engine.pool.member("second")
    engine.pool.admit("second", is_open)
    engine.swap(second.drafter)
    assert engine.pool.default is second and list(engine.pool.members) == ["second"]
    assert engine.pool.num_rows(second) == 1 and not engine.pool.older


def test_requests_of_the_member_that_gave_way_keep_it() -> None:
    target = FakeTarget(num_rows=2)
    engine = Engine(target, ByteTokenizer(), {name: ScriptedDrafter(target) for name in ("first", "second")})
    engine.add([1, 2, 3], SamplingParams(max_tokens=20), route=Route("second"))
    old, new = engine.pool.member("second"), ScriptedDrafter(target)
    new.name = "second"
    engine.swap(new)
    assert engine.pool.older == [old] and engine.pool.num_rows(old) == 1 and engine.drafter is new
    texts = list[int]()
    while engine.has_work:
        texts += [token for chunk in engine.step() for token in chunk.token_ids]
        engine.check_integrity()
    assert texts == target.greedy([1, 2, 3], 20) and not engine.pool.older


@pytest.mark.parametrize("name", ["ngram", "none"])
def test_a_drafter_cannot_pass_for_lookups_or_for_none(name: str) -> None:
    target = FakeTarget()
    pool = pool_of(target, "first")
    before = dict(pool.members)
    with pytest.raises(ConfigError, match=f"cannot be the member '{name}'"):
        pool.put(name, ScriptedDrafter(target))
    assert pool.members == before
    pool.put("ngram", NgramDrafter())
    assert list(pool.members) == ["first", "ngram"]


def test_a_pool_of_no_drafter_alone() -> None:
    """An engine that is made anew without drafters has such a pool."""
    assert Pool(FakeTarget(), {"none": NoDrafter()}).open == ["none"]
