"""Refuses options of a training, and settings of other readers of prompts, that have no effect next to the others."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from paceline.errors import ConfigError, refuse
from paceline.train.config import PromptsConfig, TrainConfig
from paceline.train.run_file import value_of

OF_CHAINS = ("shape.ttt_steps", "shape.eagle_version")
OF_SELECTOR = ("loop.loss.selector", "loop.selector_from", "loop.selector_share")
OF_CODEBOOKS = ("shape.selector_rank", "shape.codebooks")
OF_BLOCKS = ("shape.is_causal", "shape.sliding_window", "shape.mask_token_id", "shape.num_taps", "loop.attention")
OF_BLOCKS += (*OF_CODEBOOKS, *OF_SELECTOR)
OF_NEW_LAYERS = ("shape.tap_layers", "shape.intermediate_size", "shape.num_heads", "shape.num_kv_heads")
OF_NEW_LAYERS += ("shape.attention_bias", "shape.draft_vocab")
OF_OTHERS = {
    "dflash": (*OF_CHAINS, *OF_CODEBOOKS, *OF_SELECTOR),
    "dflash2": OF_CHAINS,
    "dspark": (*OF_CHAINS, *OF_SELECTOR),
    "eagle3": (*OF_BLOCKS, "loop.loss.gamma"),
    "mtp": (*OF_BLOCKS, *OF_NEW_LAYERS, "shape.eagle_version"),
}
"""Drafting method -> settings that only other methods use."""
OF_ANSWERS = ("answering.temperatures", "answering.samples", "answering.raw")


def check_used(config: TrainConfig, kind: str) -> None:
    """Raises ConfigError for settings that contradict each other or the drafter's type, whether they are from the
    command line, a run.yaml or Python. `kind`: drafting method of the drafter that is trained."""
    keeper = "ray" if config.remote.ray is not None else "shared_features" if config.shared_features else ""
    is_stored = config.features in ("auto", "cached") and config.feature_dtype == "model"
    states = "keeps hidden states on disk, as the model gives them: leave features and feature_dtype out"
    is_apart = bool(config.prompting.tags) and not (config.prompting.prompts or config.answers)
    shapes = [name for name in OF_OTHERS[kind] if config.shape.is_chained and name.startswith("shape.")]
    set_up = [name for name in shapes if value_of(config, name) is not None and value_of(TrainConfig(), name) is None]
    refuse(
        ConfigError,
        (bool(keeper) and not is_stored, f"{keeper} {states}"),
        (is_apart, "tags means nothing without prompts or answers of traces: leave it out"),
        *((True, f"{name.removeprefix('shape.')} means nothing for {kind} drafters: leave it out") for name in set_up),
    )


def check_unused(config: TrainConfig, kind: str, typed: Collection[str]) -> None:
    """Raises ConfigError for a setting of the command line that the other settings make useless. `typed`: names of the
    settings on the command line, such as "shape.start". Settings from a run.yaml or from Python are not checked: they
    may hold values for another drafter. `kind`: drafting method of the drafter that is trained."""
    is_another_block = config.shape.is_chained and config.shape.block_size != 1 + config.shape.ttt_steps
    if config.init is not None and "shape.start" in typed:
        raise ConfigError(
            f"start means nothing for the drafter of --init {config.init}, which has layers: leave it out"
        )
    if is_another_block and "shape.block_size" in typed:
        raise ConfigError(
            f"block_size means nothing for {kind} drafters, whose blocks are ttt_steps and the anchor: leave it out"
        )
    for name, where in _unused(config, kind):
        if name in typed and value_of(config, name) != value_of(TrainConfig(), name):
            raise ConfigError(f"{name.rpartition('.')[2]} means nothing {where}: leave it out")


def _unused(config: TrainConfig, kind: str) -> Iterator[tuple[str, str]]:
    """Yields (name of a setting without effect, reason)."""
    shape, loop, prompting, remote = config.shape, config.loop, config.prompting, config.remote
    yield from ((name, f"for {kind} drafters") for name in OF_OTHERS[kind])
    if loop.learn != "all":
        yield from ((name, f"for learn {loop.learn}, which leaves the selector as it is") for name in OF_SELECTOR)
    loss = "ce" if shape.is_chained and not config.is_given("loop.loss.name") else loop.loss.name
    yield "loop.loss.gamma" if loss == "d-pace" else "loop.loss.alpha", f"for the loss {loss}"
    is_evaluated, is_tiny = bool(config.ood or config.heldout), config.scale == "tiny"
    writes = prompting.self_written or not (prompting.prompts or config.answers)
    for has_effect, name, where in (
        (config.push_to_hub, "public", "without push_to_hub"),
        (not config.heldout, "heldout_share", "next to heldout"),
        (config.features != "online", "feature_dtype", "for features online"),
        (config.features == "streamed" or remote.features_from, "stream_buffer", f"for features {config.features}"),
        (not remote.features_at or not loop.serve_share, "loop.serve_share", "for a target that runs elsewhere"),
        (prompting.prompts or is_evaluated or is_tiny, "prompting.limit", "without prompts to read"),
        (writes, "prompting.openers", "without self_written prompts"),
        *((prompting.prompts or writes or is_evaluated, name, "without prompts to answer") for name in OF_ANSWERS),
    ):
        if not has_effect:
            yield name, where


def check_prompts(prompting: PromptsConfig, *, has_answers: bool = False) -> None:
    """Raises ConfigError for a setting without effect in a command other than `train`:
    - a setting that selects prompts, if there are no prompts to read;
    - `tags`, if the command also reads existing answers (`has_answers`), since it reads all of them;
    - `openers`, if the target writes no prompts."""
    selecting = ("limit", "tags") if has_answers else ("limit", "tags", "strict")
    names = () if prompting.prompts else selecting
    unread = next((name for name in names if getattr(prompting, name)), None)
    writes = prompting.self_written or not (prompting.prompts or has_answers)
    if unread is not None:
        raise ConfigError(f"{unread} means nothing without prompts to read: leave it out")
    if prompting.tags and has_answers:
        raise ConfigError("tags select prompts, not answers: give answers of these tags alone")
    if prompting.openers is not None and not writes:
        raise ConfigError("openers means nothing without self_written prompts: leave it out")
