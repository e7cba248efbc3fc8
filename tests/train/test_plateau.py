"""The plateau of word frequencies: measured, seen, said once every so often, acted upon, left."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_training import VOCAB, config, trainer

from paceline.errors import ConfigError
from paceline.train.config import LoopConfig, LossConfig
from paceline.train.plateau import Plateau, unigram_entropy, watched


def test_entropy_of_words() -> None:
    assert unigram_entropy(np.array([5, 5, 0, 0])) == pytest.approx(math.log(2))
    assert unigram_entropy(np.full(VOCAB, 3)) == pytest.approx(math.log(VOCAB))
    half = unigram_entropy(np.array([4, 4, 4, 4]), np.array([0, 2]))
    assert half == pytest.approx(0.5 * math.log(2)), "half of the places count, each with one bit"
    assert unigram_entropy(np.array([0, 0, 4]), np.array([0])) == 0.0


def follow(losses: list[float], **settings: Any) -> tuple[list[str], list[float]]:
    """What is said, and the rates of each step, when the entropy is 5."""
    state, said, shares = Plateau(), list[str](), list[float]()
    loop = LoopConfig(plateau_steps=20, **settings)
    for step, loss in enumerate(losses, start=1):
        shares.append(state.rate_share(step - 1, loop.plateau_steps))
        state, text = watched(state, loop, 5.0, step, loss)
        said += [text] if text else []
    return said, shares


def test_a_run_that_learns_hears_nothing() -> None:
    said, shares = follow([9.0 - 0.1 * step for step in range(80)])
    assert said == [] and set(shares) == {1.0}


def test_a_run_that_stays_is_told_and_its_rate_changed_up_then_down() -> None:
    said, shares = follow([5.0] * 85)
    assert [text.split(":")[0] for text in said] == ["step 20", "step 40", "step 60", "step 80"]
    assert "the loss is 5.00, and guessing by word frequency alone gives 5.00: the drafter does not read its context" in said[0]
    assert "twice as high as --lr" in said[0] and "half as high" in said[1]
    assert "neither a higher nor a lower learning rate helped" in said[2] and "--first-layers copied" in said[2]
    assert shares[:20] == [1.0] * 20 and shares[20] == pytest.approx(0.2) and shares[25] == pytest.approx(2.0)
    assert shares[39] == 2.0 and shares[40] == pytest.approx(0.05) and shares[84] == 0.5


def test_what_helped_is_said_and_not_asked_again() -> None:
    said, shares = follow([5.0] * 20 + [4.0] * 80 + [6.0] * 60)
    assert len(said) == 2 and said[1] == "step 40: loss 4.44: the drafter reads its context now"
    assert shares[-1] == 2.0


@pytest.mark.parametrize(("settings", "count"), [({"plateau": "warn"}, 3), ({"plateau": "off"}, 0)])
def test_it_may_only_be_said_or_left(settings: dict[str, Any], count: int) -> None:
    said, shares = follow([5.0] * 60, **settings)
    assert len(said) == count and set(shares) == {1.0}
    assert not any("learning rate" in text for text in said)


def test_losses_that_are_no_cross_entropy_are_not_compared() -> None:
    assert follow([9.0] * 60, loss=LossConfig("kl")) == ([], [1.0] * 60)


@pytest.mark.slow
def test_the_loop_watches_writes_it_down_and_remembers(tmp_path: Path) -> None:
    """A rate of nothing learns nothing; resumed, the run knows what was done."""
    settings = config(max_steps=9, plateau_steps=4, checkpoint_minutes=-1.0)
    one, said, steps = trainer(tmp_path, settings), list[str](), list[dict[str, Any]]()
    one.unigram_entropy = 0.0
    assert one.run(steps.append, said.append, should_stop=lambda: one.state.step == 6) is False
    assert len(said) == 1 and "step 4: the loss is" in said[0] and steps[3]["plateau"]["said"] == said[0]
    assert steps[4]["lr"] < steps[3]["lr"], "it begins again from below"
    again = trainer(tmp_path, settings)
    assert again.resume() and again.state.plateau == one.state.plateau and again.state.plateau.acted_at == 4
    assert 2.0 < again.unigram_entropy <= math.log(VOCAB)


def test_impossible_settings() -> None:
    with pytest.raises(ConfigError, match="plateau must be one of act, warn, off"):
        LoopConfig(plateau="hope")
