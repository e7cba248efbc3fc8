"""Transformers for `decode_vs_peers.py`: `generate` as its documentation shows it, on the GGUF file, which it expands.

Ways: "lookup" is prompt_lookup_num_tokens, "draft" is assistant_model. Both are for one request at a time; several
requests
are padded on the left, and rows that are done wait for the others. In bfloat16 where the processor has instructions for
it, else in float32, which is many times faster there.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from decode_vs_peers_pipe import Prompts, arguments, own_output, serve
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

from paceline.config import EngineConfig
from paceline.config import resolve as settled

WAYS = ("none", "lookup", "draft")
LOOKUP_TOKENS = 10
"""Number that its documentation suggests."""


class Transformers:
    pid = os.getpid()

    def __init__(self, args: Any) -> None:
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        torch.set_num_threads(args.threads)
        self._args = args
        self._dtype = getattr(torch, settled(EngineConfig(args.model, device="cpu")).dtype)
        self._model: Any = None
        self._options: dict[str, dict[str, Any]] = {"none": {}, "lookup": {"prompt_lookup_num_tokens": LOOKUP_TOKENS}}

    def load(self, way: str) -> dict[str, Any]:
        if self._model is None:
            self._model = self._loaded(self._args.model)
        if way == "draft":
            self._options["draft"] = {"assistant_model": self._loaded(self._args.draft)}
        options = {name: str(getattr(value, "generation_config", value)) for name, value in self._options[way].items()}
        return {"dtype": str(self._dtype), "attention": self._model.config._attn_implementation, "options": options}

    def run(self, way: str, prompts: Prompts, num_tokens: list[int]) -> dict[str, Any]:
        longest, began = max(map(len, prompts)), time.perf_counter()
        padded = torch.tensor([[0] * (longest - len(ids)) + ids for ids in prompts])
        mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts])
        clock = _FirstTokens() if len(prompts) == 1 else None
        with torch.inference_mode():
            out = self._model.generate(
                padded,
                attention_mask=mask,
                max_new_tokens=max(num_tokens),
                stopping_criteria=StoppingCriteriaList([_Enough(longest, num_tokens)]),
                streamer=clock,
                **self._options[way],
            )
        wall_s = time.perf_counter() - began
        token_ids = [row[longest : longest + number].tolist() for row, number in zip(out, num_tokens, strict=True)]
        timing = {"prefill_s": clock.first_s - began, "num_first": clock.num_first} if clock else {}
        rounds = max(clock.num_puts - 1, 1) if clock else num_tokens[0]
        return {"token_ids": token_ids, "wall_s": wall_s, "tokens_per_round": num_tokens[0] / rounds, **timing}

    def close(self) -> None:
        pass

    def _loaded(self, file: str) -> Any:
        path = Path(file)
        model: Any = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=self._dtype).eval()
        config = model.generation_config
        config.eos_token_id, config.pad_token_id = None, 0
        config.do_sample, config.temperature, config.top_p, config.top_k = False, None, None, None
        return model


class _FirstTokens:
    """A streamer that notes when the first tokens came, and how many: `generate` puts the prompt, then each round's
    tokens."""

    def __init__(self) -> None:
        self.num_puts, self.num_first, self.first_s = 0, 0, 0.0

    def put(self, value: torch.Tensor) -> None:
        self.num_puts += 1
        if self.num_puts == 2:
            self.first_s, self.num_first = time.perf_counter(), value.numel()

    def end(self) -> None:
        pass


class _Enough(StoppingCriteria):
    """Ends each row at its own number of tokens."""

    def __init__(self, longest: int, num_tokens: list[int]) -> None:
        self._ends = torch.tensor([longest + number for number in num_tokens])

    def __call__(self, input_ids: Any, scores: Any, **options: Any) -> Any:
        return input_ids.shape[1] >= self._ends


if __name__ == "__main__":
    serve(Transformers(arguments(WAYS)), own_output())
