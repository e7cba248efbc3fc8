"""Reads prompts from several sources and mixes them by weight. Every row left out is counted by reason and reported.

    --prompts chats.jsonl=2 --prompts code.parquet=1        two of the chats for each of the code, without repetition

Without weights, all rows of all sources are used. With weights, the scarcest source limits the mixture. Rows are
selected by a hash of their content and the seed, not by their order, so a mixture that is extended retains its rows.
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
from paceline.data.tags import check_tags
from paceline.errors import ConfigError, PromptError
from paceline.runs.settings_file import read_settings_file
from paceline.train.config import PromptsConfig, TrainConfig
from paceline.train.run_file import RUN_FILE

Source = tuple[str, float | None]
"""(path or data set id, weight or None)."""


@dataclass(slots=True)
class Mixture:
    """The prompts of a run, taken from all its sources, and counts of the sources' rows that cannot be used."""

    prompts: list[Prompt] = field(default_factory=list)
    traced: list[Path] = field(default_factory=list)
    """Sources that store prompts as token ids, with answers. Decoding these answers shows whether the ids are those of
    the target's tokenizer."""
    dropped: Dropped = field(default_factory=Dropped)


def sources_of(prompts: tuple[str, ...]) -> list[Source]:
    """Splits each text, SOURCE or SOURCE=WEIGHT, into (source, weight or None). A source is a file, a folder of traces
    or a data set id. The name of an existing file is a source, even if it contains "=". Raises ConfigError for an
    invalid weight."""
    return [_source_of(text) for text in prompts]


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


def read_mixture(config: PromptsConfig, seed: int, say: Callable[[str], None]) -> Mixture:
    """Reads the prompts of all sources in `config.prompts`. Without weights, all prompts are used. If a source has a
    weight, prompts are mixed in proportion to the weights; a source without one has the weight 1. If a source has more
    prompts than its weight allows, a random selection is used, the same for the same `seed`. `say`, given by the
    caller, gets a line of text for each source with unusable rows or unused prompts. Raises:
    - PromptError for an unreadable or empty source, for a weight so small that a source has no prompt in the mixture,
      and with `config.strict` for an unusable row;
    - ConfigError for an invalid weight, or a tag of `config.tags` that no row of a source has."""
    mixture = Mixture()
    sources: list[tuple[str, float | None, list[Prompt]]] = []
    for source, weight in sources_of(config.prompts):
        dropped = Dropped()
        prompts = read_prompts(source, config.limit, dropped, strict=config.strict, tags=config.tags)
        sources.append((source, weight, prompts))
        for text in (str(dropped) if dropped else "", dropped.unread_text):
            if text:
                say(f"{source}: {text}")
        mixture.dropped.update(dropped)
        if any(prompt.token_ids for prompt in prompts) and has_answers(Path(source)):
            mixture.traced.append(Path(source))
    for source, prompts, num_left in _weighed(sources, seed):
        mixture.prompts += prompts
        if num_left:
            say(
                f"{source}: {num_left} of {num_left + len(prompts)} prompts are left out, for the weights of the "
                "mixture"
            )
            mixture.dropped.add("beyond the mixture's weights", source, num_left)
    return mixture


def others_of(config: TrainConfig, prompts: tuple[str, ...]) -> PromptsConfig:
    """Returns settings for reading evaluation prompts from the sources `prompts`. `limit` and `strict` are those of
    `config.prompting`. Its `tags` are left out, since they select only training prompts."""
    return PromptsConfig(prompts, config.prompting.limit, config.prompting.strict)


def check_begun(config: TrainConfig) -> None:
    """Checks that `config` can begin or resume the run in `config.out`. Raises ConfigError in these cases:
    - the run has a checkpoint, and began with another target, `init` or `max_len`;
    - it began with other tags (`config.prompting.tags`);
    - one of the tags does not occur in a source of prompts."""
    from paceline.train.answers.run_identity import check_same_training  # imports PyTorch, which plans do without

    check_same_training(config)
    tags, file = config.prompting.tags, config.out / RUN_FILE
    if file.is_file():
        parts = read_settings_file(file, "delete it, or choose another --out").get("prompting") or {}
        if (before := tuple(parts.get("tags", ()))) != tags:
            names = [", ".join(each) or "none" for each in (before, tags)]
            raise ConfigError(f"{config.out} was begun with --tag {names[0]}, not {names[1]}: choose another --out")
    for source, _ in sources_of(config.prompting.prompts):
        check_tags(source, tags)


def _weighed(sources: list[tuple[str, float | None, list[Prompt]]], seed: int) -> list[tuple[str, list[Prompt], int]]:
    """Returns (source, its prompts in the mixture, how many prompts are left out) for every source."""
    if all(weight is None for _, weight, _ in sources):
        return [(source, prompts, 0) for source, _, prompts in sources]
    unit = min(len(prompts) / (weight or 1.0) for _, weight, prompts in sources)
    chosen: list[tuple[str, list[Prompt], int]] = []
    for source, weight, prompts in sources:
        number = floor((weight or 1.0) * unit + 1e-9)
        if not number:
            raise PromptError(f"{source} gives nothing to this mixture: the weights differ too much for so few prompts")
        selected = sorted(prompts, key=lambda prompt: _hash(prompt, seed))[:number]
        chosen.append((source, selected, len(prompts) - number))
    return chosen


def _hash(prompt: Prompt, seed: int) -> bytes:
    content = repr((seed, prompt.id, prompt.messages, prompt.turns, prompt.token_ids))
    return hashlib.blake2b(content.encode(errors="surrogatepass"), digest_size=8).digest()
