"""`paceline regenerate`: the target answers prompts, given or its own, into a run folder; run again, it goes on.

    runs/x/config.json      what was asked: a second run must ask the same
    runs/x/answers/         Parquet shards of every process
    runs/x/self-written-r0.jsonl

Under torchrun each process takes its share of the prompts, writes shards of its own and reports its own figures.
"""

from __future__ import annotations

import contextlib
import json
import random
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.commands.terminal import introduce, print_json, progress, say
from paceline.config import EngineConfig, resolve
from paceline.engine.llm import LLM
from paceline.errors import CacheError, ConfigError, ContextLengthError, PromptError
from paceline.prompts import Prompt, read_prompts
from paceline.runlog import RunFolder, plain
from paceline.train.answers import Answer, AnswerShards
from paceline.train.dataset import check_answers
from paceline.train.ranks import Ranks
from paceline.train.regenerate import RegenerateConfig, Regenerated, Regenerator
from paceline.train.self_written import MAX_TOKENS as MAX_PROMPT_WRITTEN
from paceline.train.self_written import PromptWriter, SelfWritten, read_openers

DEFAULT_BATCH = 32
DEFAULT_SELF_WRITTEN = 1000
"""With no prompts given."""


@dataclass(frozen=True, slots=True)
class RegenerateAsk:
    """A `regenerate` command, its options read."""

    settings: dict[str, Any]
    """Keyword arguments of LLM; drafter and max_len are set here, max_batch and threads when they are missing."""
    prompts: tuple[str, ...]
    """Files or data set ids. They are shuffled together."""
    self_written: int
    """Prompts the target writes itself, besides."""
    openers: Path | None
    config: RegenerateConfig
    limit: int | None
    """Only the first prompts of each source."""
    out: Path
    as_json: bool = False

    def __post_init__(self) -> None:
        if self.self_written < 0:
            raise ConfigError("the number of self-written prompts must be 0 or more")

    @property
    def num_self_written(self) -> int:
        return self.self_written or (0 if self.prompts else DEFAULT_SELF_WRITTEN)


def regenerate(ask: RegenerateAsk) -> dict[str, Any]:
    """Answer whatever is missing in `ask.out`; returns the figures of this process's share, which --json prints.

    Raises ConfigError when the folder was begun with other settings, PromptError on prompts that cannot be read or used,
    CacheError when the disk refuses.
    """
    ranks = Ranks.here()
    settings = _settings(ask, ranks)
    check_same_run(ask.out, settings_of(ask, ranks))
    openers = _openers(ask)
    given = {source: read_prompts(source, ask.limit) for source in ask.prompts}
    run = _open_run(ask, ranks)
    llm = _load(settings)
    traced = [Path(source) for source, prompts in given.items() if any(prompt.token_ids for prompt in prompts)]
    check_answers(traced, llm.tokenizer.decode)
    if ranks.is_first:
        say(introduce(llm))
    written, own = _write_own(llm, ask, ranks, openers)
    prompts = _share([prompt for prompts in given.values() for prompt in prompts], own, ask.config.seed, ranks)
    shards = AnswerShards(ask.out / "answers", ranks.rank)
    started = time.perf_counter()
    done = _answer(Regenerator(llm, shards, ask.config), prompts, ranks)
    wall_s = time.perf_counter() - started
    line = {
        "answers": str(shards.folder),
        "num_answers": done.num_answers,
        "num_tokens": done.num_tokens,
        "tokens_per_s": done.num_tokens / wall_s,
        "num_too_long": done.num_too_long,
        "num_cut_short": done.num_cut_short,
        "num_found": done.num_found,
    }
    run.log(stage="regenerate", rank=ranks.rank, wall_s=wall_s, dropped=written.dropped, **line)
    _report(ask, done, written, wall_s, ranks)
    if ask.as_json and ranks.is_first:
        print_json(line)
    return line


def settings_of(ask: RegenerateAsk, ranks: Ranks) -> dict[str, Any]:
    """What decides the answers, and so must not change between a run and its resumption."""
    engine = resolve(EngineConfig.of(**_settings(ask, ranks)))
    settings = {
        "target": engine.model,
        "weights": engine.weights,
        "dtype": engine.dtype,
        "prompts": ask.prompts,
        "limit": ask.limit,
        "self_written": ask.num_self_written,
        "openers": ask.openers,
        "max_tokens": ask.config.max_tokens,
        "max_prompt_tokens": ask.config.max_prompt_tokens,
        "temperatures": ask.config.temperatures,
        "seed": ask.config.seed,
    }
    if ask.num_self_written:
        settings["processes"] = ranks.world  # each writes prompts of its own
    return plain(settings)


def check_same_run(out: Path, settings: dict[str, Any]) -> None:
    """Raises ConfigError, with the difference, when `out` was begun with other settings."""
    file = out / "config.json"
    if not file.is_file():
        return
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        before = config.get("regenerate") or {}
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{file} cannot be read ({error}): choose another --out") from error
    if not before:
        raise ConfigError(f"{out} is the folder of another run ({config.get('what')}): choose another --out")
    names = [name for name in {**before, **settings} if before.get(name) != settings.get(name)]
    if names:
        changes = "; ".join(f"{name} was {before.get(name)}, is {settings.get(name)}" for name in names)
        raise ConfigError(f"{out} was begun with other settings ({changes}): use the same, or choose another --out")


def _settings(ask: RegenerateAsk, ranks: Ranks) -> dict[str, Any]:
    settings = {"max_batch": DEFAULT_BATCH, **ask.settings, "drafter": "none"}
    answered = ask.config.max_tokens
    longest = max(answered, MAX_PROMPT_WRITTEN) if ask.num_self_written else answered
    settings["max_len"] = -(-(ask.config.max_prompt_tokens + longest) // 16) * 16
    if ranks.world > 1:
        settings["threads"] = settings.get("threads") or 1
        settings["device"] = _own_device(settings.get("device", "auto"), ranks)
    return settings


def _own_device(device: str, ranks: Ranks) -> str:
    """A GPU for each process of this machine, as far as they go."""
    import torch

    if device in ("auto", "cuda") and torch.cuda.is_available():
        return f"cuda:{ranks.local % torch.cuda.device_count()}"
    return device


def _openers(ask: RegenerateAsk) -> tuple[str, ...]:
    """Most prompts are begun for the target, some it begins itself."""
    if ask.openers is None:
        return ("",)
    if not ask.num_self_written:
        say("note: openers have no effect without self-written prompts")
    openers = read_openers(ask.openers)
    return ("",) * max(1, len(openers) // 3) + openers


def _open_run(ask: RegenerateAsk, ranks: Ranks) -> RunFolder:
    if ranks.is_first and not (ask.out / "config.json").is_file():
        return RunFolder.create("regenerate", {"regenerate": settings_of(ask, ranks), "llm": ask.settings}, ask.out)
    try:
        ask.out.mkdir(parents=True, exist_ok=True)  # a process may be here before the first one
    except OSError as error:
        raise CacheError(f"cannot write {ask.out} ({error}): choose another folder with --out") from error
    return RunFolder(ask.out)


def _load(settings: dict[str, Any]) -> LLM:
    try:
        return LLM(**settings)
    except ContextLengthError as error:
        raise ConfigError(f"{error}: the longest prompt and answer must fit, lower max_prompt_tokens or max_tokens") from error


def _write_own(llm: LLM, ask: RegenerateAsk, ranks: Ranks, openers: tuple[str, ...]) -> tuple[SelfWritten, list[Prompt]]:
    """This process's share of the prompts that the target writes."""
    number = len(range(ranks.rank, ask.num_self_written, ranks.world))
    if not number:
        return SelfWritten(), []
    file = ask.out / f"self-written-r{ranks.rank}.jsonl"
    seed = zlib.crc32(f"{ask.config.seed}/{ranks.rank}".encode()) << 24  # no two processes or seeds draw the same prompts
    writer = PromptWriter(llm, file, openers=openers, seed=seed)
    with _bar("the target writes prompts", number, ranks) as advance:
        written = writer.write(number, on_prompt=lambda prompt: advance("the target writes prompts"))
    return written, read_prompts(file, number)


def _share(given: list[Prompt], own: list[Prompt], seed: int, ranks: Ranks) -> list[Prompt]:
    """This process's prompts, shuffled: a run that is interrupted has answered a fair mixture."""
    generator = random.Random(seed)
    unique = list({repr(prompt): prompt for prompt in given}.values())
    generator.shuffle(unique)
    mine = unique[ranks.rank :: ranks.world] + own
    generator.shuffle(mine)
    return mine


def _answer(regenerator: Regenerator, prompts: list[Prompt], ranks: Ranks) -> Regenerated:
    started, num_tokens = time.perf_counter(), 0
    with _bar("answering", regenerator.num_conversations(prompts), ranks) as advance:

        def on_answer(answer: Answer | None) -> None:
            nonlocal num_tokens
            if answer is not None:
                num_tokens += len(answer.answer_ids)
            if answer is None or answer.turn == 0:
                advance(f"answering, {num_tokens / (time.perf_counter() - started):.0f} tokens/s")

        return regenerator.run(prompts, on_answer)


def _bar(what: str, total: int, ranks: Ranks) -> contextlib.AbstractContextManager[Callable[[str], None]]:
    """One process draws."""
    return progress(what, total) if ranks.is_first else contextlib.nullcontext(lambda text: None)


def _report(ask: RegenerateAsk, done: Regenerated, written: SelfWritten, wall_s: float, ranks: Ranks) -> None:
    limit, folder = ask.config.max_prompt_tokens, ask.out / "answers"
    left_out = f"longer than {limit} tokens, the longest {done.num_tokens_too_long}"
    if done.num_too_long and not done.num_answers and not done.num_found:
        raise PromptError(f"all {done.num_too_long} prompts are {left_out}: raise max_prompt_tokens")
    notes = (
        (done.num_found, f"{done.num_found} conversations had been answered before"),
        (done.num_too_long, f"{done.num_too_long} prompts left out: {left_out}"),
        (done.num_cut_short, f"{done.num_cut_short} conversations ended early: an answer or the next prompt was too long"),
        (written.dropped, f"self-written prompts dropped: {_counts(written)}"),
    )
    own = f"process {ranks.rank}: " if ranks.world > 1 else ""
    speed = f"{wall_s:.0f} s: {done.num_tokens / wall_s:.0f} tokens/s"
    say(f"{own}{done.num_answers} answers, {done.num_tokens} tokens in {speed}; {folder}")
    for is_so, note in notes:
        if is_so:
            say(own + note)


def _counts(written: SelfWritten) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in written.dropped.most_common())
