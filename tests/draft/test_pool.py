"""Several drafters in one engine: a row keeps its own, lookups stand beside it, and what one computed is not
another's."""

from __future__ import annotations

import pytest
from doubles import ByteTokenizer, FakeTarget, ScriptedDrafter

from paceline.draft.base import Drafter, NoDrafter
from paceline.draft.ngram import NgramDrafter
from paceline.draft.pool import LOOKUP_MATCH, Pool
from paceline.draft.probation import Probation
from paceline.engine.engine import Engine
from paceline.errors import ConfigError, DrafterMismatchError
from paceline.model.target import Target
from paceline.plan.costs import PassCosts
from paceline.plan.planner import AdaptivePlanner, FixedPlanner
from paceline.types import DraftBlock, Route, SamplingParams

FLAT = PassCosts(((1, 1.0), (64, 1.0)))
"""A pass costs the same for any number of positions: all drafts are free."""
REPEATING = [5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6, 7]
LAYERS = [(), (0,), (1, 3), (3, 0, 1), (0, 1)]


def engine_with(target: FakeTarget, drafter: Drafter, **options: object) -> Engine:
    return Engine(target, ByteTokenizer(), drafter, **options)  # pyright: ignore[reportArgumentType]


def finished(engine: Engine) -> dict[int, list[int]]:
    texts: dict[int, list[int]] = {}
    while engine.has_work:
        for chunk in engine.step():
            texts.setdefault(chunk.sequence.request_id, []).extend(chunk.token_ids)
        engine.check_integrity()
    return texts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [(layers, LAYERS[(place + step) % 5]) for place, layers in enumerate(LAYERS) for step in (0, 2)],
)
def test_rows_keep_the_drafter_they_began_with(before: tuple[int, ...], after: tuple[int, ...]) -> None:
    """Each is handed the features of its own layers, in its own order (ScriptedDrafter compares them); every text is
    plain decoding's; the old drafter is let go with its last row."""
    target = FakeTarget(num_rows=4, is_width_invariant=True)
    old, new = (ScriptedDrafter(target, accuracy=0.7, tap_layers=layers) for layers in (before, after))
    engine = engine_with(target, old, prefill_chunk=8)
    prompts = [[number, 3, 5, 7] * 6 for number in range(1, 7)]
    ids = [engine.add(prompt, SamplingParams(max_tokens=30)) for prompt in prompts[:3]]
    texts: dict[int, list[int]] = {}
    for step in range(400):
        if step == 5:
            engine.swap(new)
            assert engine.drafter is new and engine.pool.drafters == [new, old]
            ids += [engine.add(prompt, SamplingParams(max_tokens=30)) for prompt in prompts[3:]]
        for chunk in engine.step():
            texts.setdefault(chunk.sequence.request_id, []).extend(chunk.token_ids)
        if step > 5 and not engine.has_work:
            break
    assert [texts[request_id] for request_id in ids] == [target.greedy(prompt, 30) for prompt in prompts]
    assert engine.pool.drafters == [new] and target.tap_layers == after
    assert not old.num_observed


class Misfit(ScriptedDrafter):
    def bind(self, target: Target) -> None:
        raise DrafterMismatchError("made for another model")


def test_a_drafter_that_does_not_fit_changes_nothing() -> None:
    target = FakeTarget()
    old = ScriptedDrafter(target, tap_layers=(1, 2))
    engine = engine_with(target, old)
    engine.add([1, 2, 3], SamplingParams(max_tokens=20))
    engine.step()
    with pytest.raises(DrafterMismatchError):
        engine.swap(Misfit(target, tap_layers=(0,)))
    assert engine.drafter is old and target.tap_layers == (1, 2) and engine.pool.drafters == [old]
    assert finished(engine)


def test_keys_of_one_drafter_are_not_reused_by_another() -> None:
    """A prompt that the old drafter has observed is computed again for the new one, which must see its features."""
    target = FakeTarget(num_rows=2, is_width_invariant=True)
    first, second = (ScriptedDrafter(target, tap_layers=(1,)) for _ in range(2))
    engine = engine_with(target, first)
    prompt = [number % 30 for number in range(40)]
    for drafter, num_reused in ((first, 0), (first, 39), (second, 0), (second, 39)):
        engine.swap(drafter)
        engine.add(prompt, SamplingParams(max_tokens=2))
        (sequence,) = engine.scheduler.prefilling
        assert sequence.num_reused == num_reused
        assert list(finished(engine).values()) == [target.greedy(prompt, 2)]


def test_a_drafter_that_was_let_go_knows_no_row_when_it_comes_back() -> None:
    target = FakeTarget(num_rows=2, is_width_invariant=True)
    first, second = (ScriptedDrafter(target, tap_layers=(1,)) for _ in range(2))
    engine = engine_with(target, first)
    prompt = [number % 30 for number in range(40)]
    engine.add(prompt, SamplingParams(max_tokens=2))
    assert finished(engine) and engine.pool._held
    engine.swap(second)
    assert not engine.pool._held
    engine.swap(first)
    engine.add(prompt, SamplingParams(max_tokens=2))
    assert engine.scheduler.prefilling[0].num_reused == 0
    assert list(finished(engine).values()) == [target.greedy(prompt, 2)]


def test_swapping_back_while_old_rows_run_does_not_bind_again() -> None:
    class Counting(ScriptedDrafter):
        num_bound = 0

        def bind(self, target: Target) -> None:
            self.num_bound += 1

    target = FakeTarget()
    first, second = Counting(target), Counting(target)
    engine = engine_with(target, first)
    engine.add([1, 2, 3], SamplingParams(max_tokens=20))
    engine.step()
    for drafter in (second, first, first):
        engine.swap(drafter)
    assert (first.num_bound, second.num_bound) == (1, 1) and engine.pool.drafters == [first]


def test_a_row_that_its_drafter_does_not_know_is_decoded_plainly() -> None:
    class Ignorant(ScriptedDrafter):
        def can_draft(self, seq: object) -> bool:
            return False

    target = FakeTarget()
    engine = engine_with(target, Ignorant(target))
    engine.add([1, 2, 3], SamplingParams(max_tokens=5))
    assert list(finished(engine).values()) == [target.greedy([1, 2, 3], 5)]
    assert max(call.num_tokens for call in target.calls[1:]) == 1


class TestLookups:
    """N-gram lookups beside a drafter that has to compute its drafts."""

    def test_only_beside_a_drafter_that_computes(self) -> None:
        for kind, has in ((ScriptedDrafter, True), (NgramDrafter, False), (NoDrafter, False)):
            target = FakeTarget()
            engine = engine_with(target, kind(target) if kind is ScriptedDrafter else kind(), lookups=True)
            engine.add(REPEATING, SamplingParams(max_tokens=20))
            engine.step()
            (seq,) = engine.scheduler.running
            seq.tokens[-1] = REPEATING[len(REPEATING) % 5]  # the text goes on as before
            offers = engine.pool.offers(seq, FixedPlanner())
            assert ([offer.source for offer in offers] == ["scripted", "ngram"]) is has

    def test_repeating_text_is_looked_up_and_other_text_drafted(self) -> None:
        target = FakeTarget(order=1, vocab_size=12)
        engine = engine_with(target, ScriptedDrafter(target, accuracy=0.6), planner=AdaptivePlanner(FLAT), lookups=True)
        sequences = []
        for prompt in (REPEATING, [1, 2, 3]):
            engine.add(prompt, SamplingParams(max_tokens=80, ignore_eos=True))
            sequences.append((engine.scheduler.prefilling or engine.scheduler.running)[-1])
        texts = finished(engine)
        assert list(texts.values()) == [target.greedy(prompt, 80) for prompt in (REPEATING, [1, 2, 3])]
        sources = {one.source for seq in sequences for one in seq.rounds}
        assert {"scripted", "ngram"} <= sources
        assert all(one.num_drafted > 0 for seq in sequences for one in seq.rounds if one.source != "none")

    def test_one_token_that_stood_before_is_no_lookup(self) -> None:
        target = FakeTarget()
        pool = Pool(target, ScriptedDrafter(target), NgramDrafter(min_match=LOOKUP_MATCH))
        engine = engine_with(target, NoDrafter())
        engine.pool = pool
        engine.add([5, 6, 9, 5], SamplingParams(max_tokens=9))
        (seq,) = engine.scheduler.prefilling
        engine.step()
        seq.tokens[-1] = 5  # as if the answer began like this: "5" was seen, "5 5" was not
        offers = pool.offers(seq, FixedPlanner())
        assert [offer.source for offer in offers] == ["scripted"]
        assert pool.offers(seq, FixedPlanner(), {"scripted"}) == []


class TestMembers:
    """Several by their names: each sequence has one for its life."""

    def members(self, target: FakeTarget) -> dict[str, ScriptedDrafter]:
        """Always right, never right, and sometimes, with layers of their own."""
        return {
            "always": ScriptedDrafter(target, accuracy=1.0, tap_layers=(1, 3)),
            "never": ScriptedDrafter(target, mode="adversarial", tap_layers=(0,)),
            "sometimes": ScriptedDrafter(target, accuracy=0.6, tap_layers=(3, 2)),
        }

    @pytest.mark.slow
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_a_batch_that_mixes_them_says_what_plain_decoding_says(self, temperature: float) -> None:
        target = FakeTarget(num_rows=4, is_width_invariant=True)
        engine = Engine(target, ByteTokenizer(), self.members(target), prefill_chunk=8)
        names = ["always", "never", "sometimes", "none", "", "unknown"] * 2
        prompts = [[number, 3, 5, 7] * 6 for number in range(1, 13)]
        sequences = []
        for number, (prompt, name) in enumerate(zip(prompts, names, strict=True)):
            params = SamplingParams(max_tokens=20, temperature=temperature, seed=number, ignore_eos=True)
            engine.add(prompt, params, route=Route(name))
            sequences.append(engine._requests[number][0])
        texts = finished(engine)
        plain = Engine(target, ByteTokenizer(), NoDrafter())
        for number, prompt in enumerate(prompts):
            plain.add(prompt, SamplingParams(max_tokens=20, temperature=temperature, seed=number, ignore_eos=True))
        assert texts == finished(plain)
        routed = {"": "always", "unknown": "always"}
        assert [seq.drafter for seq in sequences] == [routed.get(name, name) for name in names]
        for seq in sequences:
            assert {one.source for one in seq.rounds} <= {seq.drafter, "none"}
        if temperature == 0.0:
            kept = {seq.drafter: sum(one.num_accepted for one in seq.rounds) for seq in sequences}
            assert kept["always"] > kept["sometimes"] > kept["never"] == kept["none"] == 0

    def test_taps_are_the_union_and_memory_is_that_of_all(self) -> None:
        target = FakeTarget()
        engine = Engine(target, ByteTokenizer(), self.members(target))
        assert target.tap_layers == (1, 3, 0, 2)
        assert [drafter.name for drafter in engine.pool.drafters] == ["always", "never", "sometimes"]
        engine.remove("sometimes")
        assert target.tap_layers == (1, 3, 0)

    @pytest.mark.slow
    def test_put_drain_and_remove_between_rounds(self) -> None:
        """Requests that run keep what they have; later ones get what is there; all texts are plain decoding's."""
        target = FakeTarget(num_rows=3, is_width_invariant=True)
        first = ScriptedDrafter(target, accuracy=0.7, tap_layers=(1,))
        engine = Engine(target, ByteTokenizer(), {"a": first})
        pool = engine.pool
        prompts = [[number, 2, 9] * 5 for number in range(1, 10)]
        sequences, texts = [], dict[int, list[int]]()

        def ask(name: str) -> None:
            number = len(sequences)
            engine.add(prompts[number], SamplingParams(max_tokens=60, ignore_eos=True), route=Route(name))
            # more than six rounds can say, whatever drafts stand: none ends while "b" comes
            sequences.append(engine._requests[number][0])

        def run(num_steps: int) -> None:
            for _ in range(num_steps):
                for chunk in engine.step():
                    texts.setdefault(chunk.sequence.request_id, []).extend(chunk.token_ids)
                engine.check_integrity()

        ask("a")
        ask("b")  # not there yet: the default
        run(3)
        second = ScriptedDrafter(target, accuracy=0.9, tap_layers=(2, 1))
        engine.put("b", second)
        ask("b")
        run(3)
        assert [seq.drafter for seq in sequences] == ["a", "a", "b"] and second.name == "b"
        replaced = ScriptedDrafter(target, accuracy=0.5, tap_layers=(0,))
        engine.put("a", replaced)
        ask("a")  # waits for a row
        pool.admit("b", False)
        ask("b")
        assert pool.open == ["a", "none"]
        assert [member.drafter for member in pool.older] == [first]
        assert pool.num_rows(pool.member("b")) == 1 and pool.num_rows(pool.member("a")) == 0
        while engine.has_work:
            run(1)
        assert [seq.drafter for seq in sequences] == ["a", "a", "b", "a", "a"]
        assert not first.num_observed and not pool.older
        engine.remove("b")
        engine.remove("a")
        assert pool.open == ["none"] and target.tap_layers == ()
        ask("a")
        while engine.has_work:
            run(1)
        assert sequences[-1].drafter == "none"
        assert [texts[number] for number in range(6)] == [target.greedy(prompt, 60) for prompt in prompts[:6]]
        with pytest.raises(ConfigError, match="there is no drafter 'a' here"):
            engine.remove("a")
        with pytest.raises(ConfigError, match="is always available"):
            engine.remove("none")

    def test_a_member_that_does_not_fit_changes_nothing(self) -> None:
        target = FakeTarget()
        engine = Engine(target, ByteTokenizer(), self.members(target))
        before = dict(engine.pool.members)
        for name in ("always", "new"):
            with pytest.raises(DrafterMismatchError):
                engine.put(name, Misfit(target, tap_layers=(0,)))
        assert engine.pool.members == before and target.tap_layers == (1, 3, 0, 2)

    @pytest.mark.slow
    def test_what_is_learned_of_a_member_is_not_another_s(self) -> None:
        target = FakeTarget(num_rows=2)
        engine = Engine(target, ByteTokenizer(), self.members(target), planner=AdaptivePlanner(FLAT))
        for name in ("always", "never"):
            engine.add([1, 2, 3], SamplingParams(max_tokens=200, ignore_eos=True), route=Route(name))
        assert finished(engine)
        planner = engine.planner
        assert isinstance(planner, AdaptivePlanner)
        always, never = (planner.offer(name, "greedy", 1).chances[0] for name in ("always", "never"))
        assert always > 0.8 and never < 0.5, "by the clock each is tried more or less often"


class TestProbation:
    """A drafter is tried on a request of its own, and no error of its reaches the others."""

    def tried(self, drafter: Drafter, target: FakeTarget) -> tuple[list[int], list[list[int]]]:
        """The drafter's drafts; checks that the texts of two other requests are those of plain decoding."""
        engine = Engine(
            target, ByteTokenizer(), ScriptedDrafter(target, accuracy=0.7, tap_layers=(1,)), prefill_chunk=8
        )
        prompts = [[number, 2, 9] * 5 for number in range(1, 4)]
        for prompt in prompts:
            engine.add(prompt, SamplingParams(max_tokens=20, ignore_eos=True))
        engine.step()
        drafter.bind(target)
        trial = Probation(drafter, target.vocab_size)
        engine.add(list(range(1, 20)), SamplingParams(max_tokens=8, ignore_eos=True), trial_drafter=trial)
        assert engine.scheduler.waiting[0].request_id == 3, "before those that wait"
        texts = finished(engine)
        assert [texts[number] for number in range(3)] == [target.greedy(prompt, 20) for prompt in prompts]
        assert target.tap_layers == (1,) and not engine.pool.older
        return trial.done.result(timeout=0), list(texts.values())

    def test_a_sound_drafter_drafts(self) -> None:
        target = FakeTarget(num_rows=2, is_width_invariant=True)
        drafted, _ = self.tried(ScriptedDrafter(target, tap_layers=(2, 3)), target)
        assert drafted == target.greedy(list(range(1, 20)), 5)[1:]

    @pytest.mark.parametrize("method", ["start", "observe", "propose", "drop"])
    def test_one_that_fails_is_refused_with_what_it_said(self, method: str) -> None:
        def fail(*_: object) -> None:
            raise RuntimeError("weights of lead")

        target = FakeTarget(num_rows=2, is_width_invariant=True)
        drafter = ScriptedDrafter(target)
        setattr(drafter, method, fail)
        with pytest.raises(DrafterMismatchError, match="fails: RuntimeError weights of lead"):
            self.tried(drafter, target)

    @pytest.mark.parametrize(
        ("tokens", "reason"), [([], "drafts nothing"), ([99], "tokens that the target does not have")]
    )
    def test_one_that_drafts_nothing_of_use_is_refused(self, tokens: list[int], reason: str) -> None:
        target = FakeTarget(num_rows=2, is_width_invariant=True)
        drafter = ScriptedDrafter(target)
        drafter.propose = lambda batch: DraftBlock.certain([tokens])
        with pytest.raises(DrafterMismatchError, match=reason):
            self.tried(drafter, target)
