"""Chooses the longest document of a run (max_len) from its data, within the target's context and the machine's memory.

Of existing answers, 99 of 100 documents are to fit whole. Answers that are generated in the run need room for the
longest prompt and the longest answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from paceline.data.rows import Dropped
from paceline.data.tags import Tagged, tagged
from paceline.errors import ConfigError
from paceline.runs.settings_file import read_settings_file
from paceline.simulate.costs.shapes import num_bytes
from paceline.train.config import TrainConfig
from paceline.train.documents.dataset import answers_of
from paceline.train.plan.choices import Sizes
from paceline.train.plan.target_facts import MachineFacts, TargetFacts
from paceline.train.run_file import RUN_FILE, with_value

SHARE = 0.99
"""Share of the documents that fit whole."""
MOST_READ = 20_000
"""Answers of each source whose lengths are read."""
STEP = 16
"""The chosen length is a multiple of this many tokens."""
LEAST_LIMIT = 1024
"""Smallest limit for lack of memory, in tokens, since memory is only estimated."""
OPTIMISER_BYTES = 16
"""Bytes per parameter with its gradient and two moments, float32."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Upper limit of a document's length, in tokens, and its reason."""

    tokens: int
    why: str


def limits_of(config: TrainConfig, target: TargetFacts, machine: MachineFacts, sizes: Sizes) -> list[Limit]:
    """Returns the limits on a document's length that the target's context and the machine's memory set; a limit that is
    unknown is left out."""
    limits, context = list[Limit](), target.shape.max_context
    if context:
        limits.append(Limit(context, f"the target's context is {context:,} tokens"))
    if machine.machine.memory_bytes:
        free = machine.machine.memory_bytes - memory_of(config, target, sizes)
        tokens = max(LEAST_LIMIT, int(free / position_bytes(config, target, sizes)) // STEP * STEP)
        limits.append(Limit(tokens, f"memory holds documents of about {tokens:,} tokens"))
    return limits


def position_bytes(config: TrainConfig, target: TargetFacts, sizes: Sizes) -> float:
    """Estimates the bytes of memory that one position of a document needs in training. It counts the target's keys and
    values (unless the target is remote), hidden states of the target layers that the drafter reads (one 16-bit and two
    float32 copies), and the drafter's keys and values with their gradients."""
    taps = sizes.features * (2.0 + 2 * 4)
    own = 2.0 * 4 * sizes.num_layers * 2 * sizes.num_kv_heads * sizes.head_dim
    value = num_bytes(target.shape.precisions.kv)
    cache = sum(group.layers * group.entry_values for group in target.shape.attention if group.kind != "linear")
    return taps + own + (0.0 if config.remote.features_at else value * cache)


def memory_of(config: TrainConfig, target: TargetFacts, sizes: Sizes) -> float:
    """Estimates the bytes of memory that training needs, apart from those that grow with a document's length
    (`position_bytes`):
    - the target's weights, unless the target is remote;
    - float32 copies of its embedding and head, if it is quantised or remote;
    - the drafter's weights and optimiser states;
    - activations and logits of one pack (batch of training blocks)."""
    is_elsewhere = config.remote.features_at is not None
    matrix = 2.0 * 4 * target.shape.vocab_size * sizes.hidden_size if target.is_quantised or is_elsewhere else 0.0
    rows = config.loop.blocks_per_pack * sizes.block_size
    activations = sizes.num_layers * (30 * sizes.hidden_size + 6 * sizes.intermediate_size) * 4.0 * rows
    head = 256 * 12.0 * min(config.loop.loss.vocab or sizes.draft_vocab, target.shape.vocab_size)
    weights = 0.0 if is_elsewhere else target.total_bytes
    return weights + matrix + OPTIMISER_BYTES * sizes.parameters + activations + head


def fit_lengths(config: TrainConfig, limits: Sequence[Limit] = ()) -> tuple[TrainConfig, dict[str, str]]:
    """Chooses `max_len` (the largest number of tokens of a document) and `max_prompt_tokens` so that a prompt and its
    answer fit; returns (config, field -> reason of each change).
    - A `max_len` of None is replaced by the length that prompts and answers need, but not more than the smallest limit.
    - A given `max_len` stays. If it leaves no room for an answer, `max_prompt_tokens` is lowered.

    Raises ConfigError if the user gave both lengths and they leave no room for an answer, PromptError for unreadable
    answers."""
    if config.max_len is not None:
        return _prompts_fitted(config, config.max_len)
    lengths = sorted(_lengths(tagged(config.answers, config.prompting.tags)))
    needed, why = 0, ""
    if lengths:
        needed = -(-lengths[min(int(SHARE * len(lengths)), len(lengths) - 1)] // STEP) * STEP
        number, longest = len(lengths), lengths[-1]
        why = f"{SHARE:.0%} of {number:,} prompts with answers are no longer, the longest has {longest:,} tokens"
    if (generated := _most_generated(config, bool(lengths))) > needed:
        needed, why = generated, "the longest prompt and its answer"
    limit = min(limits, key=lambda limit: limit.tokens, default=Limit(needed, ""))
    if limit.tokens < needed:
        needed, why = limit.tokens, f"{limit.why}, and {why}"
    if num_longer := sum(length > needed for length in lengths):
        why += f"; {num_longer:,} of them are cut or left out"
    return with_value(config, "max_len", needed), {"max_len": why}


def with_length(config: TrainConfig, stored: int | None = None) -> TrainConfig:
    """Returns the config with `max_len`, the largest number of tokens of a document, filled in. If it is None, `stored`
    is used, the value of the run that is resumed. If this is None too, the length that prompts and answers need is
    used."""
    if config.max_len is not None:
        return config
    return with_value(config, "max_len", stored) if stored is not None else fit_lengths(config)[0]


def stored_length(out: Path) -> int | None:
    """Returns the `max_len` with which the run in the folder `out` began, as stored in its run.yaml. Returns None if
    there is no such file or value. Raises ConfigError for a damaged run.yaml."""
    file = out / RUN_FILE
    settings = read_settings_file(file, "remove it, the run writes it again") if file.exists() else {}
    length = settings.get("max_len")
    return length if type(length) is int else None


def longest_of(config: TrainConfig) -> int:
    """Returns `config.max_len`, the largest number of tokens of a document, as an int. Call it only after planning has
    filled in the value."""
    assert config.max_len is not None, "fit_lengths chooses it"
    return config.max_len


def _lengths(sources: Sequence[Tagged]) -> list[int]:
    """Returns the lengths of existing prompts with their answers, in tokens. Missing sources are left out."""
    dropped = Dropped()
    return [
        len(answer.prompt_ids) + len(answer.answer_ids)
        for source in sources
        if source.path.exists()
        for answer in islice(answers_of([source], dropped), MOST_READ)
    ]


def _most_generated(config: TrainConfig, has_answers: bool) -> int:
    """Returns the tokens of the longest prompt and answer that the run generates; 0 if it only reads answers."""
    prompting = config.prompting
    if prompting.prompts or prompting.self_written or config.ood or config.heldout or not has_answers:
        return config.answering.max_prompt_tokens + config.answering.max_tokens
    return 0


def _prompts_fitted(config: TrainConfig, longest: int) -> tuple[TrainConfig, dict[str, str]]:
    answering, needed = config.answering, config.answering.max_prompt_tokens + config.answering.max_tokens
    if needed <= longest or not (config.prompting.prompts or config.prompting.self_written or not config.answers):
        return config, {}
    left = longest - min(answering.max_tokens, longest // 2)
    if answering.max_prompt_tokens <= left:
        return config, {}
    if not config.is_given("answering.max_prompt_tokens"):
        name = "answering.max_prompt_tokens"
        return with_value(config, name, left), {name: f"max_len {longest} leaves no answer behind longer prompts"}
    raise ConfigError(
        f"max_len {longest} has no room for a prompt of max_prompt_tokens {answering.max_prompt_tokens} and its "
        f"answer: raise max_len to {needed}, or lower max_prompt_tokens to {left}"
    )
