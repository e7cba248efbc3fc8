"""What `decode_vs_peers.py` asks of a contender, and the two that share its PyTorch: paceline itself and Transformers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any, Protocol

import torch

from paceline import LLM, SamplingParams
from paceline.bench.beside import transformers_model
from paceline.bench.passes import Request, run_pass
from paceline.figures import Rounds
from paceline.hub import resolve
from paceline.model.backends import form_of

Prompts = list[list[int]]


@dataclass(slots=True)
class Run:
    """The answers to all prompts, once, and what they cost."""

    token_ids: list[list[int]]
    wall_s: float
    prefill_s: float | None = None
    """Seconds until the first token; of all groups of prompts together. None when the contender does not tell."""
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return sum(len(ids) for ids in self.token_ids)

    @property
    def tokens_per_s(self) -> float:
        """Output tokens over wall time, prompts included."""
        return self.num_tokens / self.wall_s

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens after each answer's first over the time that was not prefill."""
        if self.prefill_s is None:
            return None
        return (self.num_tokens - len(self.token_ids)) / max(self.wall_s - self.prefill_s, 1e-9)


class Contender(Protocol):
    """One engine at one number of streams. Loaded and ready; between two calls of `run` it leaves the cores alone."""

    name: str
    streams: int
    weight_bytes: int
    """What a pass reads of the weights."""
    reads_once_per_token: bool
    """True of plain decoding, whose ceiling is bytes per second over `weight_bytes`."""
    about: dict[str, Any]
    """How it runs, for the record."""

    def run(self, prompts: Prompts, max_tokens: int) -> Run:
        """Greedy, exactly `max_tokens` tokens for each prompt, `streams` of them at once; nothing is kept from call to call."""
        ...


def groups(prompts: Prompts, streams: int) -> Iterator[Prompts]:
    """The prompts, so many at a time."""
    rest = iter(prompts)
    while group := list(islice(rest, streams)):
        yield group


class Ours:
    """paceline's engine as `paceline bench decode` drives it, detokenising included; a new request follows a finished one."""

    def __init__(self, llm: LLM, drafter: str, weights: str, streams: int) -> None:
        llm.use_drafter(drafter)
        self._llm, self._drafter = llm, llm.drafter
        self.name = f"paceline {weights}" + ("" if drafter == "none" else f" + {drafter}")
        self.streams, self.weight_bytes = streams, llm.target.weight_bytes
        self.reads_once_per_token = drafter == "none"
        self.about = {"drafter": self._drafter.name, **asdict(form_of(llm.target))}

    def run(self, prompts: Prompts, max_tokens: int) -> Run:
        self._llm.use_drafter(self._drafter)
        requests = [Request(str(index), ids) for index, ids in enumerate(prompts)]
        params = [SamplingParams(max_tokens=max_tokens, ignore_eos=True)] * len(prompts)
        done = run_pass(self._llm.engine, requests, params, self.streams)
        rounds = Rounds.counted(each for answer in done.answers for each in answer.rounds)
        details = {
            "tokens_per_round": rounds.tokens_per_round,
            "histogram": rounds.accepted_histogram,
            "num_passes": done.num_passes,
            "verify_bytes_per_s": self.weight_bytes * done.num_passes / done.verify_s,
            "draft_s": done.draft_s,
            "verify_s": done.verify_s,
            "host_s": done.seconds["host"],
            "lossless": all(answer.lossless for answer in done.answers),
        }
        return Run([answer.token_ids for answer in done.answers], done.wall_s, done.prefill_s, details)


class TransformersModel:
    """The model in bfloat16, never ending an answer by itself."""

    def __init__(self, name: str) -> None:
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        self.model: Any = transformers_model(resolve(name), torch.bfloat16)
        config = self.model.generation_config
        config.eos_token_id, config.pad_token_id = None, 0
        config.do_sample, config.temperature, config.top_p, config.top_k = False, None, None, None
        self.weight_bytes = sum(weight.nbytes for weight in self.model.parameters())


class Transformers:
    """`generate` as it comes: its own choice of attention, a dynamic cache, several streams padded on the left."""

    name = "transformers"
    reads_once_per_token = True

    def __init__(self, model: TransformersModel, streams: int) -> None:
        self._model, self.streams, self.weight_bytes = model.model, streams, model.weight_bytes
        self.about = {"attention": self._model.config._attn_implementation, "dtype": str(self._model.dtype)}

    @torch.inference_mode()
    def run(self, prompts: Prompts, max_tokens: int) -> Run:
        token_ids, prefill_s = [], 0.0
        began = time.perf_counter()
        for group in groups(prompts, self.streams):
            longest = max(map(len, group))
            given = torch.tensor([[0] * (longest - len(ids)) + ids for ids in group])
            mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in group])
            clock, started = _FirstToken(), time.perf_counter()
            out = self._model.generate(given, attention_mask=mask, max_new_tokens=max_tokens, streamer=clock)
            prefill_s += clock.first_s - started
            token_ids += out[:, longest:].tolist()
        return Run(token_ids, time.perf_counter() - began, prefill_s)


class _FirstToken:
    """A streamer that notes when the first token came: `generate` puts the prompt, then every token."""

    def __init__(self) -> None:
        self.num_puts, self.first_s = 0, 0.0

    def put(self, value: torch.Tensor) -> None:
        self.num_puts += 1
        if self.num_puts == 2:
            self.first_s = time.perf_counter()

    def end(self) -> None:
        pass
