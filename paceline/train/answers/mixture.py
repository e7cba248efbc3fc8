"""Prompts of several sources, mixed by weight; every row that is left out is counted by reason and told.

    --prompts chats.jsonl=2 --prompts code.parquet=1        two of the chats for each of the code, none of them twice

Without weights all rows of all sources are taken. With them each source gives as many rows as the mixture has room
for: as much of each as the scarcest one allows. Which rows those are depends on what stands in them and on the seed
alone, not on their order, so that a mixture that is extended keeps what it had.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from math import floor
from pathlib import Path

from paceline.data.answers import has_answers
from paceline.data.prompts import Prompt, read_prompts
from paceline.data.rows import Dropped
from paceline.errors import ConfigError, PromptError
from paceline.train.config import PromptsConfig

Source = tuple[str, float | None]
"""What is read, and its weight, if one was given."""


@dataclass(slots=True)
class Mixture:
    """The prompts of one run."""

    prompts: list[Prompt] = field(default_factory=list)
    traced: list[Path] = field(default_factory=list)
    """Parquet files and folders of prompts as tokens, whose answers tell if the tokens are the target's own."""
    dropped: Dropped = field(default_factory=Dropped)


def sources_of(prompts: tuple[str, ...]) -> list[Source]:
    """`source` or `source=weight` each; a file whose name holds the sign is found as it is. Raises ConfigError."""
    return [_source_of(each) for each in prompts]


def _source_of(text: str) -> Source:
    source, sign, weight = text.rpartition("=")
    if not sign or Path(text).exists():
        return text, None
    try:
        number = float(weight)
    except ValueError:
        number = -1.0
    if not 0.0 < number < float("inf"):
        raise ConfigError(f"prompts: the weight of {text!r} must be a number above 0, as in {source}=2")
    return source, number


def read_mixture(asked: PromptsConfig, seed: int, say: Callable[[str], None]) -> Mixture:
    """All prompts that were asked for. Tells what was left out.

    Raises PromptError when a source cannot be read or has nothing, with `strict` at the first row that cannot be used.
    """
    mixture, given = Mixture(), list[tuple[str, float | None, list[Prompt]]]()
    for source, weight in sources_of(asked.prompts):
        dropped = Dropped()
        prompts = read_prompts(source, asked.limit, dropped, strict=asked.strict)
        given.append((source, weight, prompts))
        for text in (str(dropped) if dropped else "", dropped.unread_text):
            if text:
                say(f"{source}: {text}")
        mixture.dropped.update(dropped)
        if any(prompt.token_ids for prompt in prompts) and has_answers(Path(source)):
            mixture.traced.append(Path(source))
    for source, prompts, num_left in _weighed(given, seed):
        mixture.prompts += prompts
        if num_left:
            say(f"{source}: {num_left} of {num_left + len(prompts)} prompts are left out, for the weights of the mixture")
            mixture.dropped.add("beyond the mixture's weights", source, num_left)
    return mixture


def _weighed(given: list[tuple[str, float | None, list[Prompt]]], seed: int) -> list[tuple[str, list[Prompt], int]]:
    """(source, its prompts in the mixture, how many of it are left out)."""
    if all(weight is None for _, weight, _ in given):
        return [(source, prompts, 0) for source, _, prompts in given]
    unit = min(len(prompts) / (weight or 1.0) for _, weight, prompts in given)
    found: list[tuple[str, list[Prompt], int]] = []
    for source, weight, prompts in given:
        number = floor((weight or 1.0) * unit + 1e-9)
        if not number:
            raise PromptError(f"{source} gives nothing to this mixture: the weights differ too much for so few prompts")
        chosen = sorted(prompts, key=lambda prompt: _place(prompt, seed))[:number]
        found.append((source, chosen, len(prompts) - number))
    return found


def _place(prompt: Prompt, seed: int) -> bytes:
    content = repr((seed, prompt.id, prompt.messages, prompt.turns, prompt.token_ids))
    return hashlib.blake2b(content.encode(errors="surrogatepass"), digest_size=8).digest()
