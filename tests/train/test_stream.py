"""Features that are produced ahead: the same curve, in bounded memory, resumed, and no thread left behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_training import Killed, config, killed_in, steps_of, trainer

from paceline.errors import CacheError
from paceline.train.config import LoopConfig
from paceline.train.features.hidden_states import Features, OnlineFeatures
from paceline.train.features.stream import StreamedFeatures, upcoming
from paceline.train.learn.loop import Trainer

WIDTH = 16


class Counted:
    """Features that say which document they are of, and how many there are at once."""

    def __init__(self, fails_at: int | None = None, seconds: Callable[[int], float] = lambda number: 0.0) -> None:
        self.asked: list[int] = []
        self._fails_at, self._seconds = fails_at, seconds

    def of(self, number: int) -> Features:
        time.sleep(self._seconds(number))
        self.asked.append(number)
        if number == self._fails_at:
            raise CacheError("the disk is gone")
        return Features(torch.full((4, WIDTH), float(number)), None)


def stream(source: Counted, budget: int, numbers: Iterable[int], **options: Any) -> StreamedFeatures:
    features = StreamedFeatures(source, lambda number: 4 * WIDTH * 4, budget, **options)
    features.begin(iter(numbers))
    return features


def streaming(one: Trainer, budget: int = 20_000) -> StreamedFeatures:
    source = one.packer.features
    assert isinstance(source, OnlineFeatures)
    features = StreamedFeatures(
        source, lambda number: source.bytes_per_position * len(source.documents[number]), budget
    )
    object.__setattr__(one.packer, "features", features)
    return features


def curve(one: Trainer, streamed: StreamedFeatures | None = None) -> list[tuple[float, float]]:
    if streamed:
        streamed.begin(upcoming(one))
    steps = steps_of(one)
    if streamed:
        streamed.close()
    return [(step["loss"], step["grad_norm"]) for step in steps]


SETTINGS = [config(max_steps=12), config(max_steps=12, tokens_per_pack=16, blocks_per_pack=2)]


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS, ids=["packs", "pieces"])
def test_the_curve_is_that_of_features_computed_as_they_are_asked_for(tmp_path: Path, settings: LoopConfig) -> None:
    expected = curve(trainer(tmp_path / "online", settings))
    one = trainer(tmp_path / "streamed", settings)
    streamed = streaming(one)
    assert curve(one, streamed) == expected and len(expected) == 12
    assert streamed.num_out_of_order == 0, "every document was there when it was asked for"


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_the_same_curve(tmp_path: Path) -> None:
    expected = curve(trainer(tmp_path / "whole", config(max_steps=12)))
    one = trainer(tmp_path / "run", config(max_steps=12, checkpoint_minutes=0.0))
    streamed = streaming(one)
    streamed.begin(upcoming(one))
    with pytest.raises(Killed):
        one.run(killed_in(5))
    streamed.close()
    again = trainer(tmp_path / "run", config(max_steps=12, checkpoint_minutes=0.0))
    assert again.resume() and again.state.step == 4
    streamed = streaming(again)
    assert curve(again, streamed) == expected[4:]
    assert streamed.num_out_of_order == 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [100, 1000])
def test_what_waits_is_bounded_whatever_the_corpus(number: int) -> None:
    source, budget = Counted(), 5 * 256 + 10
    streamed = stream(source, budget, range(number))
    while len(source.asked) < 5:
        time.sleep(0.001)
    for each in range(number):
        assert streamed.of(each).taps_SF[0, 0] == each
        assert len(source.asked) <= each + 1 + 6, "it does not run further ahead"
    assert streamed.most_held_bytes == 5 * 256
    streamed.close()


def test_a_document_larger_than_the_buffer_still_comes() -> None:
    streamed = stream(Counted(), 10, range(3))
    assert [float(streamed.of(each).taps_SF[0, 0]) for each in range(3)] == [0.0, 1.0, 2.0]
    streamed.close()


def test_several_threads_keep_the_order() -> None:
    numbers = [3, 1, 2, 0, 3, 2] * 5
    source = Counted(seconds=lambda number: 0.002 * number)
    streamed = stream(source, 10 * 256, numbers, num_threads=4)
    assert [int(streamed.of(each).taps_SF[0, 0]) for each in numbers] == numbers
    assert sorted(source.asked) == sorted(numbers) and streamed.num_out_of_order == 0
    streamed.close()


def test_out_of_turn_it_is_computed_at_once() -> None:
    source = Counted()
    streamed = stream(source, 2 * 256, [0, 1, 2])
    assert streamed.of(7).taps_SF[0, 0] == 7 and streamed.num_out_of_order == 1
    assert [int(streamed.of(each).taps_SF[0, 0]) for each in (0, 0, 1, 2)] == [0, 0, 1, 2]
    assert source.asked.count(0) == 1, "the pieces of a document share it"
    assert streamed.of(5).taps_SF[0, 0] == 5, "the stream is over"
    streamed.close()


def test_what_goes_wrong_is_raised_where_it_is_asked_for() -> None:
    streamed = stream(Counted(fails_at=1), 5 * 256, range(4))
    streamed.of(0)
    with pytest.raises(CacheError, match="the disk is gone"):
        streamed.of(1)
    streamed.close()


def test_a_plan_that_fails_does_not_leave_the_trainer_waiting() -> None:
    def numbers() -> Iterator[int]:
        yield 0
        raise ValueError("no plan")

    streamed = stream(Counted(), 5 * 256, numbers())
    assert streamed.of(0).taps_SF[0, 0] == 0
    with pytest.raises(ValueError, match="no plan"):
        streamed.of(1)
    streamed.close()


def test_closing_leaves_no_thread_behind() -> None:
    before = threading.active_count()
    streamed = stream(Counted(), 256, range(10**9), num_threads=3)
    streamed.of(0)
    assert threading.active_count() > before
    streamed.close()
    assert threading.active_count() == before and streamed.held_bytes == 0
    streamed.close()


def test_processes_produce_what_they_ask_for(tmp_path: Path) -> None:
    one = trainer(tmp_path, config(max_steps=3))
    coming, expected, place = upcoming(one), list[int](), one.state.place
    for _ in range(3):
        chosen, _, place = one.planner.step(place)
        expected += [number for number, _ in chosen]
    assert [next(coming) for _ in expected] == expected
