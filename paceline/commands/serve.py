"""`paceline serve`: an OpenAI-compatible endpoint for one model."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.commands.terminal import introduce, say
from paceline.engine.llm import LLM
from paceline.errors import ConfigError
from paceline.serve.settings import ServeConfig
from paceline.types import GrammarSpec, SamplingParams

try:
    from paceline.serve.recording import Recorder, Traces
    from paceline.serve.run import run
    from paceline.serve.worker import EngineWorker
except ImportError as error:
    raise ConfigError(f"serving needs {error.name}: pip install 'paceline[serve]'") from error


@dataclass(frozen=True, slots=True)
class TraceAsk:
    """Where traces go, which ones, and how long they stay."""

    folder: Path
    sample: float = 1.0
    redact: tuple[str, ...] = ()
    max_bytes: int = 2**30
    max_days: float = 30.0


@dataclass(frozen=True, slots=True)
class ServeAsk:
    """A `serve` command, its options read and checked."""

    settings: dict[str, Any]
    """Keyword arguments of LLM, the model's name among them."""
    config: ServeConfig
    traces: TraceAsk | None = None


def serve(ask: ServeAsk) -> None:
    """Load the model, answer until a signal comes."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    name = ask.config.served_names[0] if ask.config.served_names else Path(ask.settings.get("model", "smollm2-135m")).name
    traces = _traces(ask.traces, name)
    recorder = Recorder(name, traces)

    def load() -> LLM:
        llm = LLM(**ask.settings)
        traces.begin(llm.tokenizer)
        return llm

    worker = EngineWorker(
        load,
        max_queue=ask.config.max_queue,
        deadline_s=ask.config.deadline or None,
        observer=recorder,
        warm_up=warm_up,
        stream_interval_s=1e-3 * ask.config.stream_interval_ms,
    )
    try:
        run(worker, ask.config, recorder, say=say, introduce=introduce)
    finally:
        traces.close()


def _traces(ask: TraceAsk | None, model: str) -> Traces:
    if ask is None:
        return Traces()
    from paceline.serve.traces import TraceWriter

    return Traces(
        lambda tokenizer: TraceWriter(
            ask.folder,
            model=model,
            tokenizer=tokenizer,
            sample=ask.sample,
            redact=ask.redact,
            max_bytes=ask.max_bytes,
            max_age_s=86400 * ask.max_days,
        )
    )


def warm_up(llm: LLM) -> None:
    """Before the first request: pages of weights and caches are touched, and the grammar library has read the vocabulary."""
    prompt = llm.tokenizer.encode("Hello") or [0]
    llm.generate_ids([prompt], SamplingParams(max_tokens=8, ignore_eos=True))
    if getattr(llm.tokenizer, "backend", None) is not None and llm.tokenizer.eos_token_ids:
        llm.generate_ids([prompt], SamplingParams(max_tokens=2, grammar=GrammarSpec("regex", "a")))
