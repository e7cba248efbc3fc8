"""Blocks trained where served rounds begin: which places these are, how many blocks get them, and that nothing else moves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_training import config, document, documents, trainer
from tiny_runs import TINY, paceline
from torch import Tensor

from paceline.draft.dflash2 import read_drafter
from paceline.errors import CacheError, ConfigError
from paceline.runlog import RunFolder
from paceline.train import round_starts as module
from paceline.train.config import TrainConfig
from paceline.train.dataset import Document, Place, StepPlanner, draw_anchors, draw_served, num_drawn
from paceline.train.features import Features
from paceline.train.loop import Trainer
from paceline.train.losses import Head
from paceline.train.packs import DFlashTrainable, Pack, Packer
from paceline.train.ranks import Ranks
from paceline.train.round_starts import Look, StoredStarts, check_round_starts, starts_of, write_starts

SIZE = 4
"""Of a block."""
EXACT = (*TINY, "--full-precision")


def kept_at(position: int) -> int:
    """How many drafts the planted drafter gets right at a place: 0 to 3, in no order that is easy to meet by chance."""
    return (position * 7 + position // 5) % SIZE


class Planted(DFlashTrainable):
    """Gets the drafts right that `kept_at` says, then one wrong, then again right: those count for nothing."""

    def __init__(self) -> None:
        self.block_size = SIZE

    def hidden(self, pack: Pack, embedding_VD: Tensor, is_autocast: bool) -> Tensor:
        return torch.zeros(len(pack.anchors_A) * (SIZE - 1), 1)

    def right(self, hidden_TD: Tensor, pack: Pack, head: Head, embedding_VD: Tensor) -> Tensor:
        kept = [kept_at(position) for position in torch.cat(pack.layout.anchors).tolist()]
        right_AK = torch.tensor([[slot != number for slot in range(SIZE - 1)] for number in kept])
        return right_AK & pack.slots.valid_AK


class Nothing:
    """Features of no size."""

    def __init__(self, every: list[Document]) -> None:
        self.every = every

    def of(self, number: int) -> Features:
        return Features(torch.zeros(len(self.every[number]), 1), None)


def planted(every: list[Document]) -> Look:
    head = Head(torch.zeros(1, 1))
    return Look(Planted(), Packer(SIZE, every, Nothing(every)), head, torch.zeros(1, 1))


def walk(one: Document) -> list[int]:
    """As the engine goes: the answer's first token comes from the prompt; then drafts that stand, and one token more."""
    at, found = one.answer_start, []
    while at + 1 < len(one):
        found.append(at)
        at += min(kept_at(at), len(one) - 1 - at) + 1
    return found


class AllOf:
    """Rounds that begin at every `step`th place of an answer."""

    def __init__(self, every: list[Document], share: float, step: int = 3) -> None:
        self.every, self.share, self.step, self.mark = every, share, step, f"by {step}"

    def of(self, number: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        return np.arange(self.every[number].answer_start, len(self.every[number]) - 1, self.step)

    def count(self, number: int) -> int:
        return len(self.of(number))


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four files for ten documents, and more than one look at each document."""
    monkeypatch.setattr(module, "GROUP", 3)
    monkeypatch.setattr(module, "BLOCKS_AT_ONCE", 5)


class TestPlaces:
    def test_a_round_takes_what_stands_and_one_token_more(self) -> None:
        assert starts_of(np.array([2, 9, 9, 0, 3, 9, 9, 9, 1])).tolist() == [0, 3, 4, 8]
        assert starts_of(np.array([0, 0, 0])).tolist() == [0, 1, 2]
        assert starts_of(np.array([], dtype=np.int64)).tolist() == []

    def test_a_drafter_whose_kept_lengths_are_known_gives_exactly_its_rounds(self, small_groups: None, tmp_path: Path) -> None:
        every = [*documents(), document(10, 5, 2), document(11, 3, 40)]
        write_starts(tmp_path, planted(every), Ranks())
        starts = StoredStarts(tmp_path, len(every), 0.5)
        for number, one in enumerate(every):
            assert starts.of(number).tolist() == walk(one) and starts.count(number) == len(walk(one))
        assert len(walk(every[11])) < 25, "not every place begins a round"

    def test_the_same_files_from_one_process_and_from_two(self, small_groups: None, tmp_path: Path) -> None:
        write_starts(tmp_path / "1", planted(documents()), Ranks())
        for rank in (1, 0):
            write_starts(tmp_path / "2", planted(documents()), Ranks(rank, 2))
        one, two = ({file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in "12")
        assert one == two and len(one) == 4
        assert StoredStarts(tmp_path / "1", 10, 1.0).mark == StoredStarts(tmp_path / "2", 10, 0.5).mark

    def test_what_is_written_is_not_looked_for_again(self, small_groups: None, tmp_path: Path) -> None:
        write_starts(tmp_path, planted(documents()), Ranks())
        first = StoredStarts(tmp_path, 10, 0.5)
        (tmp_path / "group-00000002.npy").unlink()
        with pytest.raises(CacheError, match="group-00000002.npy cannot be read.*delete the folder"):
            StoredStarts(tmp_path, 10, 0.5)
        before = {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
        write_starts(tmp_path, planted(documents()), Ranks())
        assert {file: file.stat().st_mtime_ns for file in before} == before
        assert StoredStarts(tmp_path, 10, 0.5).mark == first.mark
        np.save(tmp_path / "group-00000001.npy", np.array([1, 2, 9, 4], dtype=np.int32))
        with pytest.raises(CacheError, match="group-00000001.npy cannot be read .it is not whole"):
            StoredStarts(tmp_path, 10, 0.5)


class TestDraws:
    def test_without_a_share_blocks_lie_where_they_did(self) -> None:
        """As drawn before there was a share."""
        assert draw_anchors(document(1, 5, 40), 8, 0, 0).tolist() == [5, 9, 11, 12, 13, 33, 38, 43]
        assert draw_anchors(document(2, 5, 40), 6, 3, 2).tolist() == [8, 16, 18, 23, 30, 41]
        planner = StepPlanner(documents(), blocks_per_step=10, anchors=4, block_size=4, seed=3)
        chosen, num_slots, place = planner.step(Place(1, 3))
        assert [(number, anchors_A.tolist()) for number, anchors_A in chosen] == [
            (8, [4, 8, 10, 11]), (5, [4, 6, 7, 12]), (0, [3, 5]),
        ]  # fmt: skip
        assert (num_slots, place, planner.steps_per_epoch) == (29, Place(1, 6), 3.4)

    @pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
    def test_this_share_lies_where_rounds_begin(self, share: float) -> None:
        one, starts_S = document(1, 5, 60), np.arange(5, 64, 6)
        for epoch in range(20):
            drawn = draw_served(one, starts_S, share, 8, 0, epoch)
            assert len(drawn) == 8 == len(set(drawn.tolist())) and (np.diff(drawn) > 0).all()
            assert one.answer_start <= drawn[0] and drawn[-1] < len(one) - 1
            at_starts = np.isin(drawn, starts_S).sum()
            assert at_starts == 8 if share == 1.0 else at_starts >= 8 * share
        reached = {int(each) for epoch in range(200) for each in draw_served(one, starts_S, share, 8, 0, epoch)}
        assert len(reached) == (10 if share == 1.0 else one.num_anchors), "the others lie anywhere"

    def test_few_rounds_give_few_blocks_rather_than_a_smaller_share(self) -> None:
        one, starts_S = document(1, 5, 60), np.array([5, 20, 40])
        drawn = draw_served(one, starts_S, 0.5, 64, 0, 0)
        assert len(drawn) == 6 and set(starts_S) <= set(drawn.tolist())
        assert draw_served(one, starts_S, 1.0, 64, 0, 0).tolist() == [5, 20, 40]
        assert num_drawn(one, 64, 3, 0.01) == one.num_anchors
        assert len(draw_served(document(1, 5, 2), np.array([5]), 0.5, 64, 0, 0)) == 1

    @pytest.mark.parametrize("share", [0.3, 1.0])
    def test_an_epoch_has_as_many_steps_as_it_says_and_any_process_draws_the_same(self, share: float) -> None:
        every = documents()
        made: dict[str, Any] = {"blocks_per_step": 7, "anchors": 4, "block_size": SIZE, "seed": 1}
        one = StepPlanner(every, **made, starts=AllOf(every, share))
        place, steps, blocks = Place(), 0, []
        while place.epoch == 0 and place.index < len(every):
            chosen, _, place = one.step(place)
            blocks.append([(number, anchors_A.tolist()) for number, anchors_A in chosen])
            steps += 1
        assert steps - 1 < one.steps_per_epoch <= steps
        other = StepPlanner(every, **made, starts=AllOf(every, share))
        middle = one.step(Place())[2]
        assert [(number, anchors_A.tolist()) for number, anchors_A in other.step(middle)[0]] == blocks[1]
        drawn = [(number, place) for step in blocks[:-1] for number, anchors in step for place in anchors]
        at_starts = sum(place in AllOf(every, share).of(number) for number, place in drawn)
        assert at_starts == len(drawn) if share == 1.0 else at_starts > 0.3 * len(drawn)


class TestLoop:
    def made(self, folder: Path, step: int = 3, **changes: Any) -> Trainer:
        settings = config(round_starts=0.5, max_steps=6, checkpoint_minutes=-1.0, **changes)
        return trainer(folder, settings, starts=AllOf(documents(), 0.5, step))

    @pytest.mark.slow
    def test_a_resumed_run_follows_the_uninterrupted_one(self, tmp_path: Path) -> None:
        whole: list[float] = []
        self.made(tmp_path / "whole").run(lambda figures: whole.append(figures["objective"]))
        found: list[float] = []
        part = self.made(tmp_path / "part")
        part.run(lambda figures: found.append(figures["objective"]), should_stop=lambda: part.state.step == 2)
        part = self.made(tmp_path / "part")
        assert part.resume() and part.state.step == 2
        part.run(lambda figures: found.append(figures["objective"]))
        assert found == pytest.approx(whole, rel=1e-5) and len(whole) == 6
        plain: list[float] = []
        trainer(tmp_path / "plain", config(max_steps=6)).run(lambda figures: plain.append(figures["objective"]))
        assert plain != pytest.approx(whole, rel=1e-3), "other blocks, other losses"

    def test_other_places_are_refused(self, tmp_path: Path) -> None:
        one = self.made(tmp_path)
        one.run(should_stop=lambda: one.state.step == 1)
        with pytest.raises(ConfigError, match="begun with other settings .places: 'by 3' there, 'by 4' now"):
            self.made(tmp_path, step=4).resume()
        with pytest.raises(ConfigError, match="round_starts: 0.5 there, 0.0 now"):
            trainer(tmp_path, config(max_steps=6)).resume()


def test_it_is_refused_where_nobody_knows_where_rounds_begin() -> None:
    asked = {"loop": config(round_starts=0.5)}
    with pytest.raises(ConfigError, match="needs a drafter that goes through the answers: continue one with init"):
        check_round_starts(TrainConfig(**asked))
    eagle: Any = {**asked, "init": "default", "shape": TrainConfig().shape.__class__(kind="eagle3")}
    with pytest.raises(ConfigError, match="not implemented for eagle3 drafters"):
        check_round_starts(TrainConfig(**eagle))
    check_round_starts(TrainConfig(init="default", **asked))
    check_round_starts(TrainConfig())


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("--features", "cached"), marks=pytest.mark.nightly),
        ("--features", "streamed", "--drafter-kind", "dflash2"),
    ],
    ids=["cached", "streamed-dflash2"],
)
def test_the_command_continues_a_drafter_where_its_rounds_begin(
    first: Path, words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of hidden states from disk, and of streamed ones with a DFlash 2 drafter; killed and resumed it reads what it found."""
    command = (*EXACT, "--answers", first / "regenerate" / "answers", "--init", first / "drafter", "--out", tmp_path, *words)
    command = (*command, "--round-starts", "0.5", "--serve-share", "0")
    paceline(*command, "--max-steps", 2)
    (folder,) = tmp_path.glob("round-starts-*")
    assert "rounds begin at" in capsys.readouterr().err
    before = {file: file.stat().st_mtime_ns for file in folder.iterdir()}
    paceline(*command, "--max-steps", 3)
    assert {file: file.stat().st_mtime_ns for file in folder.iterdir()} == before
    assert [each["step"] for each in RunFolder(tmp_path).metrics()] == [1, 2, 3]
    told = json.loads((tmp_path / "heldout.json").read_text())
    said = capsys.readouterr().err
    assert f"teacher-forced blocks give {told['teacher_forced']:.2f} tokens a round, the engine" in said
    assert read_drafter(tmp_path / "drafter").name == ("dflash2" if "dflash2" in words else "dflash")


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose drafter others continue."""
    folder = tmp_path_factory.mktemp("first")
    paceline(*EXACT, "--max-steps", 3, "--limit", 16, "--out", folder, "--serve-share", "0")
    return folder
