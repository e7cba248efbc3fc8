"""Where served rounds begin in the documents, so that blocks can be trained there (--round-starts).

A block that is trained begins at any place of a text. A round that is served begins at the first token of the answer, or right
behind the token that the target said in place of a refused draft: where text was hard to foresee. The two kinds of places
differ, and so do the figures of the loop and of the engine. Here the drafter that a run begins with (--init) is asked at every
place of every document, teacher-forced, how many of its drafts would stand; from these numbers each answer is gone through as
the engine goes. That is done once, before the first step, on this run's share of the documents by each process:

    runs/x/round-starts-<of what>/group-00000000.npy     int32: the ends of 64 documents' places, then all places

A document's places never depend on how many processes found them, nor on what was learned since: a run that is resumed, or
goes on with other processes, draws the same blocks.
"""

from __future__ import annotations

import zlib
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from paceline.draft.dflash import DFlashNetwork
from paceline.errors import CacheError, ConfigError, refuse, reraised
from paceline.runlog import whole_file
from paceline.tables import SILENT, Progress
from paceline.train.agreement import mark_of, mark_of_text
from paceline.train.config import TrainConfig
from paceline.train.dataset import Corpus
from paceline.train.features import FeatureSource, fingerprint
from paceline.train.losses import Head
from paceline.train.packs import DFlashTrainable, Packer, Trainable
from paceline.train.ranks import Ranks
from paceline.train.sources import Sources
from paceline.train.start import continued_draft_ids, head_of, init_folder

GROUP = 64
"""Documents of a file."""
BLOCKS_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class Look:
    """A drafter, and what it takes to ask it at every place of a document."""

    drafter: DFlashTrainable
    packer: Packer
    head: Head
    """What it drafts with."""
    embedding_VD: Tensor
    is_autocast: bool = False

    @torch.no_grad()
    def standing(self, number: int) -> NDArray[np.int64]:
        """How many drafts of a block would stand, [P]: at each place of document `number` that a block can be anchored at."""
        document = self.packer.documents[number]
        places, found = np.arange(document.answer_start, len(document) - 1), [np.zeros(0, dtype=np.int64)]
        for first in range(0, len(places), BLOCKS_AT_ONCE):
            pack = self.packer.pack([(number, places[first : first + BLOCKS_AT_ONCE])])
            hidden_TD = self.drafter.hidden(pack, self.embedding_VD, self.is_autocast)
            right_AK = self.drafter.right(hidden_TD, pack, self.head, self.embedding_VD)
            found.append(right_AK.long().cumprod(dim=1).sum(1).cpu().numpy())
        return np.concatenate(found)

    def starts(self, number: int) -> NDArray[np.int64]:
        """Positions of document `number` at which rounds would begin."""
        return self.packer.documents[number].answer_start + starts_of(self.standing(number))


def starts_of(standing_P: NDArray[np.int64]) -> NDArray[np.int64]:
    """Which places begin a round, when the first does: a round takes the drafts that stand at its anchor, and one token."""
    found, at = [], 0
    while at < len(standing_P):
        found.append(at)
        at += int(standing_P[at]) + 1
    return np.array(found, dtype=np.int64)


class StoredStarts:
    """Where rounds begin in each document, read from the files of `write_starts`; `dataset.RoundStarts`. In memory are only
    their numbers."""

    def __init__(self, folder: Path, num_documents: int, share: float) -> None:
        """Raises CacheError when a file is missing or damaged."""
        self.share, self._folder, mark = share, folder, 0
        counts: list[NDArray[np.int64]] = [np.zeros(0, dtype=np.int64)]
        for first in range(0, num_documents, GROUP):
            file = _file(folder, first // GROUP)
            with _readable(file):
                ends, places = _parts(file, min(GROUP, num_documents - first))
                counts.append(np.diff(ends, prepend=0))
                if int(ends[-1]) != len(places) or int(counts[-1].min()) < 1:
                    raise ValueError("it is not whole")
                mark = zlib.crc32(file.read_bytes(), mark)
        self._counts = np.concatenate(counts).astype(np.int32)
        self.mark = f"{mark:08x}"

    def count(self, number: int) -> int:
        return int(self._counts[number])

    def of(self, number: int) -> NDArray[np.int64]:
        file, place = _file(self._folder, number // GROUP), number % GROUP
        with _readable(file):
            ends, places = _parts(file, min(GROUP, len(self._counts) - number + place))
            return places[0 if place == 0 else int(ends[place - 1]) : int(ends[place])].astype(np.int64)


def write_starts(folder: Path, look: Look, ranks: Ranks, progress: Progress = SILENT) -> None:
    """Write the files that are missing; each process its share. Raises CacheError when the disk refuses."""
    number = len(look.packer.documents)
    missing = [group for group in ranks.share_of(-(-number // GROUP)) if not _file(folder, group).exists()]
    members = {group: range(group * GROUP, min(number, (group + 1) * GROUP)) for group in missing}
    with progress.bar("round starts", sum(map(len, members.values()))) as advance:
        for group in missing:
            found: list[NDArray[np.int64]] = []
            for each in members[group]:
                found.append(look.starts(each))
                advance("round starts")
            ends = np.cumsum([len(starts_S) for starts_S in found])
            remedy = "free space and run again, what is written stays"
            with whole_file(_file(folder, group), remedy) as scratch, scratch.open("wb") as stream:
                np.save(stream, np.concatenate([ends, *found]).astype(np.int32))


def check_round_starts(config: TrainConfig) -> None:
    """Raises ConfigError where nobody can say where rounds will begin."""
    if config.loop.round_starts:
        refuse(
            ConfigError,
            (config.shape.is_chained, f"round_starts is not implemented for {config.shape.kind} drafters: leave it out"),
            (
                config.init is None,
                "round_starts needs a drafter that goes through the answers: continue one with init. A new drafter's drafts "
                "are all refused, so that its rounds begin everywhere; train it first without round_starts",
            ),
        )


def find_starts(
    sources: Sources,
    corpus: Corpus,
    drafter: Trainable,
    features: FeatureSource,
    embedding_VD: Tensor,
    draft_ids: Tensor | None,
) -> StoredStarts | None:
    """Where rounds of `drafter`, as a run begins with it, begin; None where that was not asked for. What an earlier start of
    the run has found is read. `draft_ids`: of a draft vocabulary that the run chose."""
    config, progress, target = sources.config, sources.progress, sources.target
    if not config.loop.round_starts:
        return None
    network = drafter.network
    assert isinstance(drafter, DFlashTrainable) and isinstance(network, DFlashNetwork)
    if draft_ids is None:
        draft_ids = continued_draft_ids(init_folder(config.init, config.target.model), corpus, target)
    packer = Packer(drafter.block_size, corpus.train, features, embedding_VD.device, drafter.context_window)
    head = head_of(target, network.config, draft_ids)
    look = Look(drafter, packer, head, embedding_VD, config.loop.autocast)
    what = fingerprint(config.target.model, target.dtype, corpus.train, sources.taps, needs_final=False)
    folder = config.out / f"round-starts-{_mark(network, what)}"
    progress.say(f"going through {len(corpus.train)} documents as {config.init} drafts: where do rounds begin?")
    write_starts(folder, look, sources.ranks, progress)
    sources.wait()
    starts = StoredStarts(folder, len(corpus.train), config.loop.round_starts)
    every = sum(document.num_anchors for document in corpus.train)
    number = sum(map(starts.count, range(len(corpus.train))))
    progress.say(f"rounds begin at {number} of {every} places, {every / number:.2f} tokens a round")
    return starts


def _mark(network: nn.Module, what: str) -> str:
    """Names a set of places by all that decides it."""
    weights = [(name, mark_of(tensor)) for name, tensor in sorted(network.state_dict().items())]
    return f"{mark_of_text(repr((what, weights))) & (1 << 64) - 1:016x}"


def _file(folder: Path, group: int) -> Path:
    return folder / f"group-{group:08d}.npy"


def _parts(file: Path, num_documents: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """(where each document's places end, all places)."""
    every = np.load(file, mmap_mode="r", allow_pickle=False)
    return every[:num_documents], every[num_documents:]


def _readable(file: Path) -> AbstractContextManager[None]:
    return reraised(CacheError, f"{file} cannot be read", "delete the folder to have it made again", OSError, ValueError)
