"""Serves held-out prompts in the real engine, during training and at its end, and compares with teacher forcing.

The training loop's figures are optimistic: they weigh all positions of a text equally, while served rounds begin where
a draft was rejected. `walked` evaluates the training's teacher-forced blocks only where the engine would begin a round.
Its result must agree with the served acceptance length (`AGREE`); otherwise training and serving compute different
things.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.config import EngineConfig
from paceline.draft import shipped
from paceline.draft.base import Drafter
from paceline.draft.dflash.config import DFlashConfig
from paceline.draft.dflash.drafter import DFlashDrafter
from paceline.draft.eagle3.checkpoint import Eagle3Config, is_eagle3
from paceline.draft.eagle3.drafter import Eagle3Drafter, Eagle3Network
from paceline.draft.formats.family import drafter_of, network_of, read_drafter
from paceline.draft.mtp.checkpoint import is_mtp, layer_of
from paceline.draft.mtp.drafter import MtpDrafter
from paceline.draft.registry import Trained, read_trained
from paceline.draft.vocabulary import Vocabulary
from paceline.engine.llm import LLM
from paceline.hardware import free_bytes
from paceline.hub import resolve
from paceline.model.checkpoint import load_config
from paceline.model.target import Target
from paceline.plan.planner import FixedPlanner
from paceline.report.statistics import Rounds, doubt
from paceline.train.documents.dataset import Document
from paceline.train.features.hidden_states import OnlineFeatures
from paceline.train.learn.initial_weights import embedding_matrix, head_of
from paceline.train.learn.losses import Head
from paceline.train.learn.packs import DFlashTrainable, Packer
from paceline.train.methods.selector import trainable_of
from paceline.types import SamplingParams

AGREE = 0.03
"""Largest relative difference between served and teacher-forced acceptance length."""
SERVED_BATCH, SHOWN = 8, 3
WALKED = 8
"""Number of answers that are also evaluated teacher-forced."""
BLOCKS_AT_ONCE = 32
TIMED, TIMED_TOKENS = 4, 64
"""Number of prompts whose speed is measured, one after another, and most tokens of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldoutFigures(Rounds):
    """Acceptance, token counts and sample answers of held-out prompts that the engine answered with a drafter."""

    num_prompts: int
    num_tokens: int
    texts: tuple[str, ...]
    """Texts of the first few answers. A reader can check that they are not repetitive, since such text is easy to draft
    and raises the acceptance length."""
    prompts: tuple[str, ...] = ()
    """The prompts of `texts`, as the model reads them."""


def serve_heldout(
    llm: LLM, drafter: Drafter, documents: list[Document], max_tokens: int
) -> tuple[HeldoutFigures, list[Document]]:
    """Measures a drafter in the engine: it answers the documents' prompts greedily, with at most `max_tokens` tokens
    each. Returns (figures, documents of the same prompts with the new answers). Raises ContextLengthError if a prompt
    is longer than the engine's cache."""
    llm.use_drafter(drafter)
    llm.engine.planner = FixedPlanner()  # always draft full blocks: the drafter is measured, not this machine's speed
    prompts = [document.tokens[: document.answer_start].tolist() for document in documents]
    answers = llm.generate_ids(prompts, [params_for(llm, prompt, max_tokens) for prompt in prompts])
    figures = HeldoutFigures(
        **asdict(Rounds.sum(answer.stats for answer in answers)),
        num_prompts=len(answers),
        num_tokens=sum(len(answer.token_ids) for answer in answers),
        texts=tuple(answer.text for answer in answers[:SHOWN]),
        prompts=tuple(llm.tokenizer.decode(prompt, False) for prompt in prompts[:SHOWN]),
    )
    answered = [
        Document(f"served-{number}", np.array([*prompt, *answer.token_ids], dtype=np.int32), len(prompt))
        for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]
    return figures, answered


def finished_drafter(raw: dict[str, Any], weights: dict[str, Tensor], own: Vocabulary) -> Trained:
    """Returns a drafter with the trained weights, rounded to bfloat16. `raw`: its config.json; `own`: its draft
    vocabulary."""
    halved = {name: tensor.bfloat16() for name, tensor in weights.items()}
    if is_mtp(raw):
        return MtpDrafter(layer_of(raw, halved))
    if is_eagle3(raw):
        return Eagle3Drafter(Eagle3Network.of(Eagle3Config.from_json(raw), halved), ids=own.ids)
    return drafter_of(network_of(DFlashConfig.from_json(raw), halved), draft_ids=own.ids, head_VD=own.head_VD)


def heldout_server(
    target: EngineConfig, raw: dict[str, Any], documents: list[Document], max_tokens: int, own: Vocabulary
) -> Callable[[dict[str, Tensor]], float]:
    """Returns a function that measures a drafter during training: weights (by name) -> acceptance length in the real
    engine. The engine answers the prompts of `documents`, with at most `max_tokens` tokens each. The function rounds
    the weights to bfloat16; its first call loads the target a second time. `raw`: the drafter's config.json; `own`: its
    draft vocabulary."""
    load = functools.cache(partial(_loaded, target, documents, max_tokens))

    def served(weights: dict[str, Tensor]) -> float:
        figures, _ = serve_heldout(load(), finished_drafter(raw, weights, own), documents, max_tokens)
        load().use_drafter("none")
        return figures.tokens_per_round

    return served


def _loaded(target: EngineConfig, documents: list[Document], max_tokens: int) -> LLM:
    length = length_for(target, documents, max_tokens)
    return LLM.of(replace(target, drafter="none", max_batch=SERVED_BATCH, max_len=length))


def length_for(target: EngineConfig, documents: Sequence[Document], max_tokens: int) -> int:
    """Returns the cache length, in tokens, for answers to the documents' prompts: the longest prompt and `max_tokens`,
    but not more than the target's context."""
    longest = max(document.answer_start for document in documents) + max_tokens
    return min(longest, load_config(resolve(target.model)).max_position)


def params_for(llm: LLM, prompt: Sequence[int], max_tokens: int) -> SamplingParams:
    """Returns sampling parameters for a greedy answer of at most `max_tokens` tokens, fewer if the cache lacks room."""
    return SamplingParams(max_tokens=max(1, min(max_tokens, llm.target.cache.max_len - len(prompt))))


def has_room(target: Target) -> bool:
    """Returns True if the device has enough free memory to load the target a second time, so that held-out prompts can
    be served during training."""
    needed = 4 * target.hidden_size * (target.vocab_size + 16 * target.num_layers * target.hidden_size)
    free = torch.cuda.mem_get_info(target.device)[0] if target.device.type == "cuda" else free_bytes()
    return free is None or needed < 0.5 * free


@torch.no_grad()
def walked(target: Target, drafter: DFlashDrafter, answers: list[Document]) -> float:
    """Returns the acceptance length of the drafter on existing answers, by teacher forcing: a draft is accepted if it
    is the answer's token. Rounds follow each other as in the engine: the first begins at the answer's first token, and
    each advances by its accepted drafts and one more token."""
    config = drafter.config
    documents = [answer for answer in answers if answer.num_anchors > 0]
    float_network = network_of(config, {name: tensor.float() for name, tensor in drafter.network.state_dict().items()})
    trainable = trainable_of(float_network.to(target.device), config.raw)
    features = OnlineFeatures(target, documents, config.target_layer_ids, needs_final=False)
    packer = Packer(config.block_size, documents, features, target.device)
    head = head_of(target, config, drafter.draft_ids, drafter.head_VD)
    embedding_VD = embedding_matrix(target, config, Vocabulary(drafter.draft_ids, drafter.head_VD))
    accepted = [accepted_at(trainable, packer, head, embedding_VD, number) for number in range(len(documents))]
    num_rounds = sum(len(starts_of(accepted_P)) for accepted_P in accepted)
    return sum(map(len, accepted)) / num_rounds if num_rounds else 0.0


@torch.no_grad()
def accepted_at(
    drafter: DFlashTrainable, packer: Packer, head: Head, embedding_VD: Tensor, number: int
) -> NDArray[np.int64]:
    """Returns how many drafts are accepted in a block that begins at each of P positions in an answer, [P]. A draft is
    accepted if it is the answer's token. `number`: the answer's document in `packer`. `head`: the LM head;
    embedding_VD: the target's embedding matrix."""
    document = packer.documents[number]
    places = np.arange(document.answer_start, len(document) - 1)
    accepted = [np.zeros(0, dtype=np.int64)]
    for first in range(0, len(places), BLOCKS_AT_ONCE):
        pack = packer.pack([(number, places[first : first + BLOCKS_AT_ONCE])])
        right_AK = drafter.right(drafter.hidden(pack, embedding_VD, False), pack, head, embedding_VD)
        accepted.append(right_AK.long().cumprod(dim=1).sum(1).cpu().numpy())
    return np.concatenate(accepted)


def starts_of(accepted_P: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the positions of an answer at which decoding rounds would begin, as ascending indices from 0. A round
    advances by its accepted drafts and one more token. accepted_P [P]: number of accepted drafts of a round that begins
    at each position."""
    starts, at = [], 0
    while at < len(accepted_P):
        starts.append(at)
        at += int(accepted_P[at]) + 1
    return np.array(starts, dtype=np.int64)


def final_figures(target: EngineConfig, folder: Path, documents: list[Document], max_tokens: int) -> dict[str, Any]:
    """Measures the drafter in `folder` at the end of a run; returns the contents of heldout.json. The engine answers
    the prompts of `documents` with up to `max_tokens` tokens each. The keys are the fields of `HeldoutFigures`, and:
    - "tokens_per_round": acceptance length in the engine;
    - "served_of_walked": the same, for the first 8 prompts (`WALKED`) only;
    - "teacher_forced": acceptance length by teacher forcing on the answers to these 8 prompts; only for DFlash;
    - "plain_tokens_per_s", "drafted_tokens_per_s": speed of one stream without and with the drafter;
    - "speedup": ratio of these speeds; None if it is unreliable, with the reason in "doubt";
    - "default_drafter": acceptance length and speed of the drafter that ships for the target, if it is here."""
    drafter, llm = read_trained(folder), _loaded(target, documents, max_tokens)
    figures, answers = serve_heldout(llm, drafter, documents, max_tokens)
    report = {"tokens_per_round": figures.tokens_per_round, **asdict(figures)}
    is_walked = len(documents) <= WALKED
    few = figures if is_walked else serve_heldout(llm, drafter, documents[:WALKED], max_tokens)[0]
    report["served_of_walked"] = few.tokens_per_round
    report |= _speedup(_timed(llm, "none", documents, max_tokens), _timed(llm, drafter, documents, max_tokens))
    if shipped_folder := shipped.local(target.model):
        default = read_drafter(shipped_folder)
        report["default_drafter"] = {
            "tokens_per_round": serve_heldout(llm, default, documents, max_tokens)[0].tokens_per_round,
            "tokens_per_s": _timed(llm, default, documents, max_tokens).tokens_per_s,
        }
    llm.use_drafter("none")
    if isinstance(drafter, DFlashDrafter):
        report["teacher_forced"] = walked(llm.target, drafter, answers[:WALKED])
    return report


def agreement(figures: dict[str, Any]) -> str | None:
    """Returns a line that compares two measurements of the acceptance length on the same answers: by teacher forcing,
    and in the engine. It is a warning if they differ by more than 3% (`AGREE`). Returns None if one was not measured.
    `figures`: contents of heldout.json."""
    forced, served = figures.get("teacher_forced"), figures.get("served_of_walked")
    if not forced or not served:
        return None
    apart = abs(served / forced - 1.0)
    both = f"teacher-forced blocks give {forced:.2f} tokens a round, the engine {served:.2f}"
    both += f" on the same {WALKED} answers"
    if apart <= AGREE:
        return f"{both}, {apart:.1%} apart"
    return (
        f"warning: {both}, more than {AGREE:.0%} apart: training and serving do not compute the same, so report this "
        "with the run's folder"
    )


class _Timed(NamedTuple):
    """Speed and acceptance length of a few answers, generated one after another."""

    tokens_per_s: float
    tokens_per_round: float
    num_tokens: int


def _timed(llm: LLM, drafter: str | Drafter, documents: list[Document], max_tokens: int) -> _Timed:
    llm.use_drafter(drafter)
    answers, seconds = [], 0.0
    for document in documents[:TIMED]:
        began = time.perf_counter()
        prompt = document.tokens[: document.answer_start].tolist()
        answers += llm.generate_ids([prompt], params_for(llm, prompt, min(TIMED_TOKENS, max_tokens)))
        seconds += time.perf_counter() - began
    num_tokens = sum(len(answer.token_ids) for answer in answers)
    tokens_per_round = Rounds.sum(answer.stats for answer in answers).tokens_per_round
    return _Timed(num_tokens / seconds if seconds else 0.0, tokens_per_round, num_tokens)


def _speedup(plain: _Timed, drafted: _Timed) -> dict[str, Any]:
    """Returns both rates and the speed-up for heldout.json; for a doubtful measurement, a "doubt" instead of the
    speed-up."""
    measured = drafted.tokens_per_s / plain.tokens_per_s if plain.tokens_per_s else None
    why = doubt(measured, drafted.tokens_per_round, drafted.num_tokens)
    rates = {"plain_tokens_per_s": plain.tokens_per_s, "drafted_tokens_per_s": drafted.tokens_per_s}
    return {**rates, "speedup": None if why else measured, "doubt": why}
