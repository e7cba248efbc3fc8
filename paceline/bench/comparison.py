"""Compares answers with those of plain decoding and of Transformers' `generate`, in one process, with the same
weights."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from paceline.bench.config import WARM_UP_TOKENS
from paceline.bench.passes import Answer, Pass, Request, parting
from paceline.config import resolve as settled
from paceline.engine.completion import Completion
from paceline.engine.llm import LLM
from paceline.errors import ConfigError, reraised
from paceline.hub import resolve
from paceline.model.adapter import is_adapter
from paceline.model.checkpoint import config_json, load_tensors
from paceline.report.statistics import doubt, first_difference, possible_speedup
from paceline.report.tables import ignore
from paceline.types import SamplingParams

LOOKUP_TOKENS = 10
"""Value of Transformers' prompt_lookup_num_tokens (drafts per round), as in its documentation."""
PEERS = {"transformers": {}, "transformers-lookup": {"prompt_lookup_num_tokens": LOOKUP_TOKENS}}
"""Name of an engine to compare with -> options of Transformers' `generate`."""


def transformers_model(path: Path, dtype: torch.dtype) -> Any:
    """Load the model in the folder or GGUF file `path` with the Transformers library, on the CPU. Weights of a GGUF
    file are dequantised; a LoRA adapter is merged into its base model. Raises ConfigError if Transformers does not
    support the model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if path.is_dir() and not is_adapter(path):
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    known = {key: value for key, value in config_json(path).items() if value is not None}
    with reraised(
        ConfigError, f"Transformers cannot run {path}", "leave --against out", KeyError, ValueError, RuntimeError
    ):
        config = AutoConfig.for_model(**known)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
        weights = dict(load_tensors(path))
        if config.tie_word_embeddings:
            weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
        model.load_state_dict(weights)
    return model.eval()


class TransformersPeer:
    """Runs the Transformers library's greedy `generate`, one request at a time, with the model, device and dtype of a
    paceline LLM. On a CPU without bfloat16 instructions the dtype is float32, because emulated bfloat16 is many times
    slower."""

    def __init__(self, llm: LLM) -> None:
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        self._llm = llm
        own = "float32" if llm.config.dtype == "float32" else settled(replace(llm.config, dtype="auto")).dtype
        dtype = own if llm.config.device == "cpu" else llm.config.dtype
        self._model = transformers_model(resolve(llm.config.model), getattr(torch, dtype)).to(llm.config.device)

    def run(
        self,
        name: str,
        requests: list[Request],
        max_tokens: int,
        ignore_eos: bool,
        on_answer: Callable[[], None] = ignore,
    ) -> Pass:
        """Answer the requests one after another, and return the answers with their times in seconds. `name`:
        "transformers", or "transformers-lookup" to use Transformers' prompt lookup decoding. `on_answer`: called after
        each answer."""
        answers = []
        started = time.perf_counter()
        for request in requests:
            answers.append(self._answer(request.token_ids, max_tokens, ignore_eos, PEERS[name]))
            on_answer()
        return Pass(answers, wall_s=time.perf_counter() - started)

    def _answer(self, token_ids: list[int], max_tokens: int, ignore_eos: bool, options: dict[str, int]) -> Answer:
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


@dataclass(frozen=True, slots=True)
class Comparison:
    """Comparison of an answer with a second answer to the same prompt, in speed and tokens. The second answer comes
    from the other engine: plain decoding or Transformers."""

    tokens_per_s: float
    """Tokens per second of the other engine."""
    speedup: float | None
    """Speed-up over the other engine. Over plain decoding it cannot exceed the acceptance length: if the measured
    value does, this is None, and `doubt` gives the reason."""
    identical: bool | None = None
    """True if the tokens are equal; None for sampled answers, where only the distribution has to be equal."""
    first_difference: int | None = None
    """Number of equal tokens before the first difference; None if the answers are equal."""
    top2_gap: float | None = None
    """Target's best logit minus its second-best at the first difference; near 0 both tokens were almost equally
    probable."""
    doubt: str | None = None
    """Reason not to trust the speed-up (machine busy, too few tokens), or None. Not checked for Transformers."""


def answer_plainly(llm: LLM, token_ids: list[int], params: SamplingParams) -> Completion:
    """Answer the prompt `token_ids` with plain decoding, as the baseline of `compare_with_plain`. Two short warm-up
    answers come first, one with drafts and one without. At the end, the LLM uses its drafter again."""
    drafter = llm.drafter
    warm_up = replace(params, max_tokens=min(WARM_UP_TOKENS, params.max_tokens), logprobs=None)
    llm.generate_ids([token_ids], warm_up)
    llm.use_drafter("none")
    try:
        llm.generate_ids([token_ids], warm_up)
        return llm.generate_ids([token_ids], params)[0]
    finally:
        llm.use_drafter(drafter)


def compare_with_plain(llm: LLM, completion: Completion, plain: Completion, params: SamplingParams) -> Comparison:
    """Compare the answer `completion` with `plain`, the result of `answer_plainly` for the same prompt, in speed and
    tokens. `params`: the request's sampling parameters. Tokens are compared only at temperature 0, because sampled
    answers may differ. No other request may be running: to examine a difference, the target runs one more pass."""
    speed = plain.stats.tokens_per_s
    parted = (
        parting(llm.target, plain.prompt_token_ids, completion.token_ids, plain.token_ids) if params.is_greedy else None
    )
    identical = parted is None if params.is_greedy else None
    measured, stats = completion.stats.tokens_per_s / speed if speed else 0.0, completion.stats
    why = doubt(measured, stats.tokens_per_round, stats.num_output_tokens)
    return Comparison(
        speed, possible_speedup(measured, stats.tokens_per_round), identical, *(parted or (None, None)), why
    )


def compare_with_transformers(llm: LLM, completion: Completion, params: SamplingParams) -> Comparison:
    """Generate a greedy answer to the prompt of `completion` with Transformers, after a warm-up, and compare both in
    speed and tokens. Of `params`, only `max_tokens` and `ignore_eos` are used."""
    peer, request = TransformersPeer(llm), [Request("prompt", completion.prompt_token_ids)]
    peer.run("transformers", request, WARM_UP_TOKENS, True)
    answer = peer.run("transformers", request, params.max_tokens, params.ignore_eos).answers[0]
    speed = len(answer.token_ids) / answer.seconds
    index = first_difference(completion.token_ids, answer.token_ids)
    return Comparison(speed, completion.stats.tokens_per_s / speed, index is None, index)
