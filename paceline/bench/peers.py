"""A peer in the same process: Transformers' own `generate` on the same folder, plain and with its prompt lookup."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.bench.passes import Answer, Pass, Request
from paceline.errors import ConfigError
from paceline.hub import resolve

if TYPE_CHECKING:
    from paceline.engine.llm import LLM

LOOKUP_TOKENS = 10
"""Transformers' prompt_lookup_num_tokens, as its documentation suggests."""
PEERS = {"transformers": {}, "transformers-lookup": {"prompt_lookup_num_tokens": LOOKUP_TOKENS}}


class TransformersPeer:
    """Greedy, one request at a time, same weights, dtype, device and threads as the LLM it is measured against."""

    def __init__(self, llm: LLM) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        path = resolve(llm.config.model)
        if not Path(path).is_dir():
            raise ConfigError(f"--against transformers needs a model folder, {path} is a single file: leave --against out")
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        self._llm = llm
        self._model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, llm.config.dtype))
        self._model = self._model.to(llm.config.device).eval()

    def run(
        self,
        name: str,
        requests: list[Request],
        max_tokens: int,
        ignore_eos: bool,
        on_answer: Callable[[], None] | None = None,
    ) -> Pass:
        """Answer the requests one after another; `name` is one of PEERS."""
        answers = []
        started = time.perf_counter()
        for request in requests:
            answers.append(self._answer(request.token_ids, max_tokens, ignore_eos, PEERS[name]))
            if on_answer:
                on_answer()
        return Pass(answers, wall_s=time.perf_counter() - started)

    def _answer(self, token_ids: list[int], max_tokens: int, ignore_eos: bool, options: dict[str, int]) -> Answer:
        import torch

        ends = [] if ignore_eos else list(self._llm.tokenizer.eos_token_ids)
        started = time.perf_counter()
        given = torch.tensor([token_ids], device=self._model.device)
        with torch.inference_mode():
            out = self._model.generate(
                given,
                attention_mask=torch.ones_like(given),
                do_sample=False,
                temperature=None,
                top_p=None,
                top_k=None,
                repetition_penalty=1.0,
                max_new_tokens=max_tokens,
                min_new_tokens=max_tokens if ignore_eos else None,
                eos_token_id=ends or None,
                pad_token_id=ends[0] if ends else 0,
                **options,
            )
        output_ids = out[0, len(token_ids) :].tolist()
        seconds = time.perf_counter() - started
        return Answer(output_ids, self._llm.tokenizer.decode(output_ids), seconds)
