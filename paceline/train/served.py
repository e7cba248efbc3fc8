"""Held-out prompts in the real engine: while a drafter learns, and at the end, beside what teacher forcing expects.

Figures of the loop flatter: they look at every place of a text alike, while rounds begin where drafts were refused. `walked`
looks at the same blocks as training does, teacher-forced, but goes through a served answer as the engine went: from an anchor
to the first token that would have been refused. It must agree with what was served (`AGREE`), or training and serving do not
compute the same.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.config import EngineConfig
from paceline.draft import shipped
from paceline.draft.base import Drafter
from paceline.draft.dflash.config import DFlashConfig
from paceline.draft.dflash.drafter import DFlashDrafter
from paceline.draft.dflash2.drafter import drafter_of, network_of, read_drafter
from paceline.draft.eagle3.checkpoint import Eagle3Config, is_eagle3
from paceline.draft.eagle3.drafter import Eagle3Drafter, Eagle3Network
from paceline.draft.mtp.checkpoint import is_mtp, layer_of
from paceline.draft.mtp.drafter import MtpDrafter
from paceline.engine.llm import LLM
from paceline.hardware import free_bytes
from paceline.model.checkpoint import read_json
from paceline.model.target import Target
from paceline.plan.planner import FixedPlanner
from paceline.report.statistics import Rounds, doubt
from paceline.train.documents.dataset import Document
from paceline.train.features.hidden_states import OnlineFeatures
from paceline.train.learn.initial_weights import head_of
from paceline.train.learn.losses import Head
from paceline.train.learn.packs import DFlashTrainable, Packer
from paceline.train.methods.selector import trainable_of
from paceline.types import SamplingParams

Finished = DFlashDrafter | Eagle3Drafter | MtpDrafter
AGREE = 0.03
"""Most that served and teacher-forced tokens a round should differ."""
SERVED_BATCH = 8
WALKED = 8
"""Answers that are gone through teacher-forced."""
BLOCKS_AT_ONCE = 32
TIMED, TIMED_TOKENS = 4, 64
"""Prompts whose speed is measured, one after the other, and tokens of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldoutFigures(Rounds):
    """Figures over some held-out prompts, served by the real engine. Those of the loop are teacher-forced: they see only blocks
    anchored in the target's own text, one at a time."""

    num_prompts: int
    num_tokens: int
    texts: tuple[str, ...]
    """The first few answers, to be read: text that repeats itself is drafted easily."""
    prompts: tuple[str, ...] = ()
    """What they answer, as the model reads it."""


def serve_heldout(
    llm: LLM, drafter: Drafter, documents: list[Document], max_tokens: int = 128, num_texts: int = 3
) -> HeldoutFigures:
    """Answer the documents' prompts greedily with this drafter. Raises ContextLengthError when one does not fit the cache."""
    return _served(llm, drafter, documents, max_tokens, num_texts)[0]


def _served(
    llm: LLM, drafter: Drafter, documents: list[Document], max_tokens: int, num_texts: int = 3
) -> tuple[HeldoutFigures, list[Document]]:
    """The figures, and the answers as documents."""
    llm.use_drafter(drafter)
    llm.engine.planner = FixedPlanner()  # the drafter is measured, not what it brings on this machine
    prompts = [document.tokens[: document.answer_start].tolist() for document in documents]
    answers = llm.generate_ids(prompts, SamplingParams(max_tokens=max_tokens))
    figures = HeldoutFigures(
        **asdict(Rounds.sum(answer.stats for answer in answers)),
        num_prompts=len(answers),
        num_tokens=sum(len(answer.token_ids) for answer in answers),
        texts=tuple(answer.text for answer in answers[:num_texts]),
        prompts=tuple(llm.tokenizer.decode(prompt, False) for prompt in prompts[:num_texts]),
    )
    said = [
        Document(f"served-{number}", np.array([*prompt, *answer.token_ids], dtype=np.int32), len(prompt))
        for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]
    return figures, said


def finished_drafter(raw: dict[str, Any], weights: dict[str, Tensor], draft_ids: Tensor | None) -> Finished:
    """The drafter of a training's weights, in bfloat16."""
    halved = {name: tensor.bfloat16() for name, tensor in weights.items()}
    if is_mtp(raw):
        return MtpDrafter(layer_of(raw, halved))
    if is_eagle3(raw):
        return Eagle3Drafter(Eagle3Network.of(Eagle3Config.from_json(raw), halved), ids=draft_ids)
    return drafter_of(network_of(DFlashConfig.from_json(raw), halved), draft_ids=draft_ids)


def read_finished(folder: Path) -> Finished:
    """A drafter that a training has written. Raises what reading it does."""
    raw = read_json(folder / "config.json")
    if is_mtp(raw):
        return MtpDrafter.from_folder(folder)
    return Eagle3Drafter.from_folder(folder) if is_eagle3(raw) else read_drafter(folder)


class HeldoutServer:
    """Serves a few held-out prompts with the weights of the moment; loads the model a second time when it is first asked."""

    def __init__(
        self, target: EngineConfig, raw: dict[str, Any], documents: list[Document], max_tokens: int, draft_ids: Tensor | None
    ) -> None:
        self._raw, self._documents, self._max_tokens = raw, documents, max_tokens
        longest = max(document.answer_start for document in documents) + max_tokens
        self._settings = replace(target, drafter="none", max_batch=SERVED_BATCH, max_len=longest)
        self._draft_ids = draft_ids
        self._llm: LLM | None = None

    def __call__(self, weights: dict[str, Tensor]) -> float:
        """Tokens a round with these weights, rounded as the finished drafter's are."""
        self._llm = self._llm or LLM.of(self._settings)
        drafter = finished_drafter(self._raw, weights, self._draft_ids)
        found = serve_heldout(self._llm, drafter, self._documents, self._max_tokens).tokens_per_round
        self._llm.use_drafter("none")
        return found


def has_room(target: Target) -> bool:
    """Whether the target may be loaded once more, for serving beside training."""
    needed = 4 * target.hidden_size * (target.vocab_size + 16 * target.num_layers * target.hidden_size)
    free = torch.cuda.mem_get_info(target.device)[0] if target.device.type == "cuda" else free_bytes()
    return free is None or needed < 0.5 * free


@torch.no_grad()
def walked(target: Target, drafter: DFlashDrafter, answers: list[Document]) -> float:
    """Tokens a round that teacher-forced blocks give over these answers of the target, gone through as the engine goes."""
    config = drafter.config
    documents = [answer for answer in answers if answer.num_anchors > 0]
    float_network = network_of(config, {name: tensor.float() for name, tensor in drafter.network.state_dict().items()})
    trainable = trainable_of(float_network.to(target.device), config.raw)
    features = OnlineFeatures(target, documents, config.target_layer_ids, needs_final=False)
    packer = Packer(config.block_size, documents, features, target.device)
    head, embedding_VD = head_of(target, config, drafter.draft_ids, drafter.head_VD), _embedding(target)
    kept = [accepted_at(trainable, packer, head, embedding_VD, number) for number in range(len(documents))]
    num_rounds = sum(len(starts_of(accepted_P)) for accepted_P in kept)
    return sum(map(len, kept)) / num_rounds if num_rounds else 0.0


@torch.no_grad()
def accepted_at(drafter: DFlashTrainable, packer: Packer, head: Head, embedding_VD: Tensor, number: int) -> NDArray[np.int64]:
    """Number of accepted drafts of a block at each place of document `number` that a block can be anchored at, [P]."""
    document = packer.documents[number]
    places, found = np.arange(document.answer_start, len(document) - 1), [np.zeros(0, dtype=np.int64)]
    for first in range(0, len(places), BLOCKS_AT_ONCE):
        pack = packer.pack([(number, places[first : first + BLOCKS_AT_ONCE])])
        right_AK = drafter.right(drafter.hidden(pack, embedding_VD, False), pack, head, embedding_VD)
        found.append(right_AK.long().cumprod(dim=1).sum(1).cpu().numpy())
    return np.concatenate(found)


def starts_of(accepted_P: NDArray[np.int64]) -> NDArray[np.int64]:
    """Which places begin a round, when the first does: a round takes the accepted drafts at its anchor, and one token."""
    found, at = [], 0
    while at < len(accepted_P):
        found.append(at)
        at += int(accepted_P[at]) + 1
    return np.array(found, dtype=np.int64)


def _embedding(target: Target) -> Tensor:
    return target.matrix_embed(torch.arange(target.vocab_size, device=target.device)).clone()


def final_figures(target: EngineConfig, drafter: Drafter, documents: list[Document], max_tokens: int) -> dict[str, Any]:
    """Everything that is measured at the end of a run, for heldout.json.

    tokens_per_round and its parts, served; `teacher_forced`, of the same answers; tokens/s of one stream without a drafter,
    with this one, and with the one that ships for the target, where it is on this machine.
    """
    longest = max(document.answer_start for document in documents) + max_tokens
    llm = LLM.of(replace(target, drafter="none", max_batch=SERVED_BATCH, max_len=longest))
    figures, answers = _served(llm, drafter, documents, max_tokens)
    told = {"tokens_per_round": figures.tokens_per_round, **asdict(figures)}
    few = answers[:WALKED]
    told["served_of_walked"] = _served(llm, drafter, documents[:WALKED], max_tokens)[0].tokens_per_round
    told |= _speedup(_timed(llm, "none", documents, max_tokens), _timed(llm, drafter, documents, max_tokens))
    if folder := shipped.local(target.model):
        default = read_drafter(folder)
        told["default_drafter"] = {
            "tokens_per_round": serve_heldout(llm, default, documents, max_tokens).tokens_per_round,
            "tokens_per_s": _timed(llm, default, documents, max_tokens).tokens_per_s,
        }
    llm.use_drafter("none")
    if isinstance(drafter, DFlashDrafter):
        told["teacher_forced"] = walked(llm.target, drafter, few)
    return told


def agreement(told: dict[str, Any]) -> str | None:
    """Teacher-forced and served tokens a round of the same answers, as a line; a warning where they are too far apart."""
    forced, served = told.get("teacher_forced"), told.get("served_of_walked")
    if not forced or not served:
        return None
    apart = abs(served / forced - 1.0)
    both = f"teacher-forced blocks give {forced:.2f} tokens a round, the engine {served:.2f} on the same {WALKED} answers"
    if apart <= AGREE:
        return f"{both}, {apart:.1%} apart"
    return (
        f"warning: {both}, more than {AGREE:.0%} apart: training and serving do not compute the same, so report this with the "
        "run's folder"
    )


@dataclass(frozen=True, slots=True)
class _Timed:
    """Tokens per second of a few answers, one after the other, and what their rounds kept."""

    tokens_per_s: float
    tokens_per_round: float
    num_tokens: int


def _timed(llm: LLM, drafter: str | Drafter, documents: list[Document], max_tokens: int) -> _Timed:
    """Time a few prompts, one after the other, as a user of the engine gets it."""
    llm.use_drafter(drafter)
    answers, seconds = [], 0.0
    for document in documents[:TIMED]:
        began = time.perf_counter()
        prompt = document.tokens[: document.answer_start].tolist()
        answers += llm.generate_ids([prompt], SamplingParams(max_tokens=min(TIMED_TOKENS, max_tokens)))
        seconds += time.perf_counter() - began
    num_tokens = sum(len(answer.token_ids) for answer in answers)
    kept = Rounds.sum(answer.stats for answer in answers).tokens_per_round
    return _Timed(num_tokens / seconds if seconds else 0.0, kept, num_tokens)


def _speedup(plain: _Timed, drafted: _Timed) -> dict[str, Any]:
    """Both rates and the speed-up for heldout.json; "speedup" is None, and "doubt" says why, where there is no verdict."""
    measured = drafted.tokens_per_s / plain.tokens_per_s if plain.tokens_per_s else None
    why = doubt(measured, drafted.tokens_per_round, drafted.num_tokens)
    rates = {"plain_tokens_per_s": plain.tokens_per_s, "drafted_tokens_per_s": drafted.tokens_per_s}
    return {**rates, "speedup": None if why else measured, "doubt": why}
