"""Rollouts: exact samples with the policy's log-probabilities, the same with and without drafts, while weights
change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_llm import fake_llm

from paceline.draft.dflash.drafter import DFlashDrafter
from paceline.engine.llm import LLM
from paceline.errors import ConfigError
from paceline.loop.rl.follow import DFlashFollower, FollowConfig
from paceline.loop.rl.rollouts import RolloutConfig, Rollouts, Sample, seed_of

PROMPTS = [list(range(40, 60)), list(range(70, 80))]
SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_batch": 4, "max_len": 128}


def rollouts_of(model: Path, drafter: str = "ngram", **changes: Any) -> Rollouts:
    config = RolloutConfig(**({"seed": 3, "temperature": 0.7, "max_tokens": 12} | changes))
    return Rollouts(LLM(str(model), drafter=drafter, **SETTINGS), config)


def moved(model: Path, share: float) -> dict[str, torch.Tensor]:
    """The file's weights, a little louder: a policy after an update."""
    return {name: tensor * (1.0 + share) for name, tensor in load_file(model / "model.safetensors").items()}


@pytest.mark.slow
def test_drafts_change_no_sample(model: Path) -> None:
    samples = {}
    for drafter in ("none", "ngram", "random-dflash"):
        rollouts, sampled = rollouts_of(model, drafter), []
        for step in range(3):
            rollouts.load_weights(moved(model, 5.0 * step), step)
            sampled += rollouts.sample(PROMPTS, num_each=3)
        samples[drafter] = sampled
    for drafter in ("ngram", "random-dflash"):
        assert [each.completion_ids for each in samples[drafter]] == [each.completion_ids for each in samples["none"]]
        for ours, plain in zip(samples[drafter], samples["none"], strict=True):
            assert ours.logprobs == pytest.approx(plain.logprobs, abs=1e-5)
    assert len({tuple(each.completion_ids) for each in samples["none"][:6]}) == 6


@pytest.mark.slow
def test_log_probabilities_are_the_policys(model: Path) -> None:
    """Log-probabilities by Transformers with the same weights, divided by the temperature."""
    transformers = pytest.importorskip("transformers")
    rollouts, weights = rollouts_of(model), moved(model, 20.0)
    rollouts.load_weights(weights, 1)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    theirs.load_state_dict(weights)
    for sample in rollouts.sample(PROMPTS):
        ids = torch.tensor([sample.prompt_ids + sample.completion_ids])
        with torch.no_grad():
            logprobs_TV = (theirs(ids).logits[0, len(sample.prompt_ids) - 1 : -1] / 0.7).log_softmax(-1)
        expected = logprobs_TV.gather(-1, ids[0, len(sample.prompt_ids) :, None])[:, 0].tolist()
        assert sample.logprobs == pytest.approx(expected, abs=1e-4)
        assert sample.mask == [1] * len(sample.completion_ids)


@pytest.mark.parametrize("number", [1, 3, 4, 7, 8, 9])
def test_the_follower_learns_from_samples_of_the_whole_batch(number: int, model: Path) -> None:
    llm = LLM(str(model), drafter="random-dflash", **SETTINGS)
    assert isinstance(llm.drafter, DFlashDrafter)
    follower = DFlashFollower(llm.drafter, FollowConfig(documents=4))
    batch = [Sample([index], [1] * 20, [0.0] * 20, [1] * 20, "length") for index in range(number)]
    first = [int(document.tokens[0]) for document in follower._documents(batch)]
    gaps = [later - one for one, later in zip(first, [*first[1:], number], strict=True)]
    assert first[0] == 0 and len(first) == min(number, 4) and max(gaps) - min(gaps) <= 1


@pytest.mark.slow
def test_another_step_another_seed_the_same_seed_the_same_samples(model: Path) -> None:
    one, other = rollouts_of(model), rollouts_of(model)
    first, second = one.sample(PROMPTS), one.sample(PROMPTS)
    assert [each.completion_ids for each in first] != [each.completion_ids for each in second]
    assert first == other.sample(PROMPTS)
    one.load_weights(moved(model, 0.0), 7)
    other.load_weights(moved(model, 0.0), 7)
    assert one.sample(PROMPTS) == other.sample(PROMPTS)
    assert len({seed_of(1, "0.0", str(place)) for place in range(100)}) == 100


def test_figures(model: Path) -> None:
    rollouts = rollouts_of(model)
    rollouts.load_weights(moved(model, 0.1), 4)
    samples = rollouts.sample(PROMPTS, num_each=2)
    (figures,) = rollouts.figures
    record = figures.as_json()
    assert (record["step"], record["num_samples"]) == (4, 4)
    assert record["num_tokens"] == sum(len(each.completion_ids) for each in samples)
    assert record["load_s"] > 0 and record["tokens_per_round"] >= 1 and record["tokens_per_s"] > 0


@pytest.mark.slow
def test_the_drafter_follows(model: Path) -> None:
    """It learns what the policy says, in the engine's own object, and no sample changes."""
    drafter = DFlashDrafter.random(LLM(str(model), drafter="none", **SETTINGS).target, num_layers=1, block_size=4)
    llm = LLM(str(model), drafter=drafter, **SETTINGS)
    follower = DFlashFollower(llm.drafter, FollowConfig(steps=12, anchors=16))
    rollouts = Rollouts(llm, RolloutConfig(seed=1, temperature=0.2, max_tokens=24), follower=follower)
    plain = Rollouts(LLM(str(model), drafter="none", **SETTINGS), rollouts.config)
    before = {name: tensor.clone() for name, tensor in drafter.network.state_dict().items()}
    weights = moved(model, 20.0)
    for step in range(4):
        for each in (rollouts, plain):
            each.load_weights(weights, step)
        assert [each.completion_ids for each in rollouts.sample(PROMPTS)] == [
            each.completion_ids for each in plain.sample(PROMPTS)
        ]
    assert llm.drafter is drafter
    metrics = [each.more for each in rollouts.figures]
    assert metrics[0] == {} and metrics[3]["drafter_loss"] < metrics[1]["drafter_loss"]
    assert any(not torch.equal(tensor, before[name]) for name, tensor in drafter.network.state_dict().items())
    assert rollouts.figures[3].follow_s > 0


@pytest.mark.slow
def test_the_engine_packs_what_the_drafter_has_learned(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound drafter holds its weights as it multiplies them: after a lesson it is bound anew."""
    drafter = DFlashDrafter.random(LLM(str(model), drafter="none", **SETTINGS).target, num_layers=1, block_size=4)
    llm, bind, bound = LLM(str(model), drafter=drafter, **SETTINGS), DFlashDrafter.bind, list[torch.Tensor]()

    def watched(self: DFlashDrafter, *args: Any, **options: Any) -> None:
        bound.append(next(iter(self.network.state_dict().values())).clone())
        bind(self, *args, **options)

    monkeypatch.setattr(DFlashDrafter, "bind", watched)
    rollouts = Rollouts(llm, RolloutConfig(max_tokens=24), follower=DFlashFollower(llm.drafter, FollowConfig(steps=2)))
    for step in range(2):
        rollouts.load_weights(moved(model, 20.0), step)
        rollouts.sample(PROMPTS)
    assert torch.equal(bound[-1], next(iter(drafter.network.state_dict().values())))
    assert not torch.equal(bound[-1], bound[0])


def test_what_cannot_follow_says_so(model: Path) -> None:
    with pytest.raises(ConfigError, match="lookups"):
        DFlashFollower(rollouts_of(model).llm.drafter)


def test_answers_that_are_not_the_policys_are_refused() -> None:
    llm = fake_llm()
    llm.allow_lossy = True
    with pytest.raises(ConfigError, match="lossy"):
        Rollouts(llm)
    with pytest.raises(ConfigError, match="temperature"):
        RolloutConfig(temperature=0.0)
