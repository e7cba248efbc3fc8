"""The stage `regenerate`: the target answers prompts, given or its own, into a run folder; run again, it goes on.

    runs/x/config.json      what was asked: a second run must ask the same
    runs/x/answers/         Parquet shards of every process
    runs/x/self-written-r0.jsonl

Under torchrun each process takes its share of the prompts, writes shards of its own and reports its own figures.
"""

from __future__ import annotations

import json
import random
import time
import zlib
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from paceline.config import EngineConfig, resolve
from paceline.engine.llm import LLM
from paceline.errors import ConfigError, ContextLengthError, PromptError
from paceline.progress import Progress
from paceline.prompts import Prompt, read_prompts
from paceline.runlog import RunFolder, plain
from paceline.train.answers import Answer, AnswerShards
from paceline.train.config import RegenerateConfig
from paceline.train.dataset import check_answers
from paceline.train.lock import only_run
from paceline.train.ranks import Ranks
from paceline.train.regenerator import Regenerated, Regenerator
from paceline.train.self_written import MAX_TOKENS as MAX_PROMPT_WRITTEN
from paceline.train.self_written import PromptWriter, SelfWritten, read_openers


def run(config: RegenerateConfig, progress: Progress) -> Regenerated:
    """As `paceline.train.regenerate`."""
    ranks = Ranks.here()
    engine = _engine(config, ranks)
    settings = _identity(config, engine, ranks)
    check_same_run(config.out, settings)
    openers = _openers(config, progress)
    given = {source: read_prompts(source, config.asked.limit) for source in config.asked.prompts}
    with only_run(config.out, "answering", ranks, progress.say):
        folder = RunFolder(config.out)
        if ranks.is_first and not (config.out / "config.json").is_file():
            folder = RunFolder.create("regenerate", {"regenerate": settings, "llm": engine}, config.out)
        llm = _load(engine)
        traced = [Path(source) for source, prompts in given.items() if any(prompt.token_ids for prompt in prompts)]
        check_answers(traced, llm.tokenizer.decode)
        if ranks.is_first:
            progress.loaded(llm)
        bars = progress if ranks.is_first else Progress()
        written, own = _write_own(llm, config, ranks, openers, bars)
        prompts = _share([prompt for prompts in given.values() for prompt in prompts], own, config.answering.seed, ranks)
        shards = AnswerShards(config.out / "answers", ranks.rank)
        done = _answer(Regenerator(llm, shards, config.answering), prompts, bars)
        folder.log(stage="regenerate", rank=ranks.rank, dropped=written.dropped, **asdict(done))
    _report(config, done, written, ranks, progress)
    return done


def check_same_run(out: Path, settings: dict[str, Any]) -> None:
    """Raises ConfigError, with the difference, when `out` was begun with other settings."""
    file = out / "config.json"
    if not file.is_file():
        return
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        before = config.get("regenerate") if config.get("what") == "regenerate" else None
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{file} cannot be read ({error}): choose another --out") from error
    if not before:
        raise ConfigError(f"{out} is the folder of another run ({config.get('what')}): choose another --out")
    names = [name for name in {**before, **settings} if before.get(name) != settings.get(name)]
    if names:
        changes = "; ".join(f"{name} was {before.get(name)}, is {settings.get(name)}" for name in names)
        raise ConfigError(f"{out} was begun with other settings ({changes}): use the same, or choose another --out")


def _identity(config: RegenerateConfig, engine: EngineConfig, ranks: Ranks) -> dict[str, Any]:
    """What decides the answers, and so must not change between a run and its resumption."""
    asked, engine = config.asked, resolve(engine)
    settings = {
        "target": engine.model,
        "weights": engine.weights,
        "dtype": engine.dtype,
        **asdict(replace(asked, self_written=asked.num_self_written)),
        **asdict(config.answering),
    }
    if asked.num_self_written:
        settings["processes"] = ranks.world  # each writes prompts of its own
    return plain(settings)


def _engine(config: RegenerateConfig, ranks: Ranks) -> EngineConfig:
    """The target without a drafter, with room for the longest prompt and answer."""
    target, answering = config.target, config.answering
    longest = max(answering.max_tokens, MAX_PROMPT_WRITTEN) if config.asked.num_self_written else answering.max_tokens
    max_len = -(-(answering.max_prompt_tokens + longest) // 16) * 16
    engine = replace(target, drafter="none", max_batch=config.max_batch, max_len=max_len)
    if ranks.world == 1:
        return engine
    if target.device in ("auto", "cuda") and torch.cuda.is_available():
        engine = replace(engine, device=f"cuda:{ranks.local % torch.cuda.device_count()}")  # one each, as far as they go
    return replace(engine, threads=target.threads or 1)


def _openers(config: RegenerateConfig, progress: Progress) -> tuple[str, ...]:
    """Beginnings of prompts for the target to continue; it begins one of four itself."""
    if config.asked.openers is None:
        return ("",)
    if not config.asked.num_self_written:
        progress.say("note: openers have no effect without self-written prompts")
    openers = read_openers(config.asked.openers)
    return ("",) * max(1, len(openers) // 3) + openers


def _load(engine: EngineConfig) -> LLM:
    try:
        return LLM.of(engine)
    except ContextLengthError as error:
        raise ConfigError(f"{error}: the longest prompt and answer must fit, lower max_prompt_tokens or max_tokens") from error


def _write_own(
    llm: LLM, config: RegenerateConfig, ranks: Ranks, openers: tuple[str, ...], bars: Progress
) -> tuple[SelfWritten, list[Prompt]]:
    """This process's share of the prompts that the target writes."""
    number = len(range(ranks.rank, config.asked.num_self_written, ranks.world))
    if not number:
        return SelfWritten(), []
    file = config.out / f"self-written-r{ranks.rank}.jsonl"
    seed = zlib.crc32(f"{config.answering.seed}/{ranks.rank}".encode()) << 24  # no two processes or seeds draw the same prompts
    writer = PromptWriter(llm, file, openers=openers, seed=seed)
    with bars.bar("the target writes prompts", number) as advance:
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


def _answer(regenerator: Regenerator, prompts: list[Prompt], bars: Progress) -> Regenerated:
    started, num_tokens = time.perf_counter(), 0
    with bars.bar("answering", regenerator.num_conversations(prompts)) as advance:

        def on_answer(answer: Answer | None) -> None:
            nonlocal num_tokens
            if answer is not None:
                num_tokens += len(answer.answer_ids)
            if answer is None or answer.turn == 0:
                advance(f"answering, {num_tokens / (time.perf_counter() - started):.0f} tokens/s")

        return regenerator.run(prompts, on_answer)


def _report(config: RegenerateConfig, done: Regenerated, written: SelfWritten, ranks: Ranks, progress: Progress) -> None:
    limit = config.answering.max_prompt_tokens
    left_out = f"longer than {limit} tokens, the longest {done.num_tokens_too_long}"
    if done.num_too_long and not done.num_answers and not done.num_found:
        raise PromptError(f"all {done.num_too_long} prompts are {left_out}: raise max_prompt_tokens")
    dropped = ", ".join(f"{count} {reason}" for reason, count in written.dropped.most_common())
    notes = (
        (done.num_found, f"{done.num_found} conversations had been answered before"),
        (done.num_too_long, f"{done.num_too_long} prompts left out: {left_out}"),
        (done.num_cut_short, f"{done.num_cut_short} conversations ended early: an answer or the next prompt was too long"),
        (dropped, f"self-written prompts dropped: {dropped}"),
    )
    own = f"process {ranks.rank}: " if ranks.world > 1 else ""
    speed = f"{done.wall_s:.0f} s: {done.tokens_per_s:.0f} tokens/s"
    progress.say(f"{own}{done.num_answers} answers, {done.num_tokens} tokens in {speed}; {done.answers}")
    for is_so, note in notes:
        if is_so:
            progress.say(own + note)
