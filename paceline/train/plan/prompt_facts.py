"""Counts a run's prompts and answers before weights are loaded: number, length, and what is left out with the reason.

The target's tokenizer counts tokens and renders one prompt, if it is on this machine; a plan downloads nothing.
`regenerate` counts in the same way.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.data.prompts import Prompt
from paceline.data.rows import Dropped
from paceline.data.tags import tagged
from paceline.errors import PromptError
from paceline.hub import BUILTINS, HUB_ID, cache_home
from paceline.model.adapter import base_name, is_adapter
from paceline.model.gguf.container import is_gguf
from paceline.report.tables import ignore
from paceline.train.answers.mixture import others_of, read_mixture, sources_of
from paceline.train.answers.prompt_tokens import NO_TEMPLATE, PromptEncoder, TokenizerOnly
from paceline.train.config import PromptsConfig, TrainConfig
from paceline.train.documents.dataset import Corpus, read_documents
from paceline.train.plan.lengths import longest_of

if TYPE_CHECKING:
    from paceline.model.text.tokenizer import Tokenizer

LETTERS_PER_TOKEN = 4
UNKNOWN_PROMPTS = 1000
MOST_ENCODED = 20_000
"""Prompts that a plan encodes, in at most a minute; figures of more prompts are extrapolated."""
MOST_LETTERS = 600
"""Longest part, in characters, of the prompt that is shown."""


@dataclass(frozen=True, slots=True)
class Data:
    """Number and mean length of a run's prompts, and what in their files is not used. Number and length are estimates
    if the prompts, or the target's tokenizer, are not on this machine."""

    prompts: int
    """Number of prompts to be answered."""
    prompt_tokens: float
    """Mean length in tokens."""
    is_known: bool
    """False if number and length are estimates."""
    left_out: dict[str, int] = field(default_factory=dict)
    """Counts of rows and prompts that are not answered, by reason."""
    unread: dict[str, int] = field(default_factory=dict)
    """Unknown keys of rows, with the number of rows that have them."""
    example: str = ""
    """The beginning of the first prompt, as the target's input."""


@dataclass(slots=True)
class _Examined:
    """Prompts of some sources, read and encoded."""

    prompts: list[Prompt]
    number: int
    mean_tokens: float | None
    dropped: Dropped
    example: str = ""


def read_data(config: TrainConfig, notes: list[str], *, reads_answers: bool = False) -> Data:
    """Reads a run's prompts before the run begins, to estimate its hours; returns their number and mean length. Appends
    texts for the user to `notes`, such as a count of unusable rows. `reads_answers`: also read the answers in
    `config.answers`, and note their number. Raises PromptError for an unreadable file; with `strict`, also for an
    unusable row."""
    local, own = _local(config, notes)
    tokenizer = tokenizer_here(config.target.model) if config.scale == "default" else None
    examined = _examined(config, local, tokenizer, notes)
    for name, prompts in (("held-out", config.heldout), ("ood", config.ood)):
        here = tuple(source for source in prompts if _is_here(source))
        if here:
            read = _examined(config, others_of(config, here), tokenizer, notes)
            _note_dropped(f"{name} prompts: ", read.dropped, notes)
    _note_dropped("", examined.dropped, notes)
    if examined.prompts and tokenizer is None and config.scale == "default":
        notes.append(
            "the target's tokenizer is not on this machine: prompts that are too long, or that its template refuses, "
            "are counted when the run begins"
        )
    if config.answers:
        summary = f": {_answers_text(config)}" if reads_answers else " are read when the run begins"
        notes.append(f"answers that exist already{summary}; they are not in these hours")
    for what, address in (("answers", config.remote.answers_at), ("hidden states", config.remote.features_at)):
        if address:
            notes.append(f"the {what} are of {address}: what they take there is not in these hours")
    mean = min(60.0 if examined.mean_tokens is None else examined.mean_tokens, config.answering.max_prompt_tokens)
    left_out, unread = dict(examined.dropped.counts), dict(examined.dropped.unread)
    return Data(examined.number + own, mean, bool(examined.prompts), left_out, unread, examined.example)


def _local(config: TrainConfig, notes: list[str]) -> tuple[PromptsConfig, int]:
    """Returns the settings for the files that exist here, and the assumed number of other prompts."""
    local: list[str] = []
    prompting = config.prompting
    own = prompting.num_self_written if not config.answers or prompting.prompts else prompting.self_written
    for text, (source, _) in zip(prompting.prompts, sources_of(prompting.prompts), strict=True):
        if _is_here(source):
            local.append(text)
        else:
            number = prompting.limit or UNKNOWN_PROMPTS
            notes.append(f"{source} is no file here: {number} prompts are assumed (--limit)")
            own += number
    return replace(prompting, prompts=tuple(local)), own


def _is_here(source: str) -> bool:
    return Path(source).exists() or source.endswith((".jsonl", ".json", ".jsonl.gz", ".json.gz", ".parquet"))


def _examined(
    config: TrainConfig, prompts_config: PromptsConfig, tokenizer: Tokenizer | None, notes: list[str]
) -> _Examined:
    """Reads and encodes prompts. Raises PromptError with `strict` for a prompt that the target cannot answer."""
    mixture = read_mixture(prompts_config, config.answering.seed, ignore)
    prompts, dropped = mixture.prompts, mixture.dropped
    first = next(iter(prompts), None)
    example = "" if first is None else _plain_text(first)
    letters = [sum(len(str(message.get("content") or "")) for message in prompt.messages) for prompt in prompts]
    mean = sum(letters) / len(letters) / LETTERS_PER_TOKEN + 30 if letters else None
    if tokenizer is None or first is None:
        return _Examined(prompts, len(prompts), mean, dropped, example)
    if tokenizer.chat_template is None and not config.answering.raw and not all(prompt.token_ids for prompt in prompts):
        notes.append(NO_TEMPLATE)
        return _Examined(prompts, len(prompts), mean, dropped, example)
    encoder, refused = PromptEncoder(TokenizerOnly(tokenizer), config.answering), Dropped()
    if prompts_config.strict:
        for prompt in prompts:
            encoder.first_ids(prompt)
    counts = encoder.examine(islice(prompts, MOST_ENCODED), refused)
    example = _first_text(encoder, prompts) or example
    number = len(counts) * len(prompts) // min(len(prompts), MOST_ENCODED)
    if len(prompts) > MOST_ENCODED:
        notes.append(
            f"only the first {MOST_ENCODED} prompts were encoded for this plan: what is left out is counted among these"
        )
    dropped.update(refused)
    return _Examined(prompts, number, sum(counts) / len(counts) if counts else None, dropped, example)


def _first_text(encoder: PromptEncoder, prompts: list[Prompt]) -> str:
    """Returns the first usable prompt as the target's input; empty without usable prompts."""
    for prompt in prompts[:MOST_ENCODED]:
        try:
            return encoder.llm.tokenizer.decode(encoder.first_ids(prompt), skip_special=False)[:MOST_LETTERS]
        except PromptError:  # counted by `examine`
            continue
    return ""


def _plain_text(prompt: Prompt) -> str:
    texts: list[Any] = [f"{message['role']}: {message.get('content')}" for message in prompt.messages]
    return "\n".join(texts)[:MOST_LETTERS] or f"{len(prompt.token_ids)} token ids"


def _note_dropped(prefix: str, dropped: Dropped, notes: list[str]) -> None:
    notes += [prefix + text for text in (str(dropped) if dropped else "", dropped.unread_text) if text]


def _answers_text(config: TrainConfig) -> str:
    """Describes how many documents the answers become, and what is left out or cut. Raises PromptError."""
    counts, dropped, number = Counter[str](), Dropped(), 0
    options = (longest_of(config), counts, None if config.prompting.strict else dropped)
    for read in read_documents(tagged(config.answers, config.prompting.tags), *options):
        counts.update(num_loops_cut=read.has_loop, num_cut=read.is_cut)
        number += 1
    summary = Corpus([], [], **counts, dropped=dropped).left_out_text
    return f"{number} documents" + (f", {summary}" if summary else "")


def tokenizer_here(model: str) -> Tokenizer | None:
    """Returns the target's tokenizer if it is on this machine, else None. Raises ModelFileError if it is damaged."""
    path = BUILTINS[model].kept_in(cache_home()) if model in BUILTINS else Path(os.path.expanduser(model))
    path = path.parent if path.suffix == ".json" else path
    if not path.exists() and HUB_ID.fullmatch(model) and "/" in model:
        import huggingface_hub

        file = huggingface_hub.try_to_load_from_cache(model, "tokenizer.json")
        path = Path(file).parent if isinstance(file, str) else path
    if is_adapter(path) and not (path / "tokenizer.json").is_file():
        return tokenizer_here(base_name(path))
    if not (is_gguf(path) or (path / "tokenizer.json").is_file()):
        return None
    from paceline.model.text.tokenizer import Tokenizer  # imports torch, which a plan needs only here

    return Tokenizer.from_path(path)
