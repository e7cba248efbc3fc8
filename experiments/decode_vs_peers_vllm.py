"""vLLM's CPU build for `decode_vs_peers.py`, in an environment of its own: it pins other versions of our packages.

It reads no K-quants on a CPU, so it gets the same weights expanded, in bfloat16; `--form` names another dtype, and
`float32-eager` is not compiled. No prefix caching: every contender gets the same prompts. One process a way, because
what drafts is a setting of its engine.
"""

from __future__ import annotations

import os
import time
from typing import Any

from decode_vs_peers_pipe import Prompts, arguments, own_output, serve

WAYS = ("none", "ngram", "dflash", "draft")
NUM_DRAFTED = {"ngram": 5, "dflash": 7, "draft": 5}
"""Drafts a round: of its documentation's examples; of a DFlash drafter with blocks of eight."""


class Vllm:
    pid = os.getpid()

    def __init__(self, args: Any) -> None:
        self._args = args
        self._engine: Any = None
        self._seen = (0, 0)

    def load(self, way: str) -> dict[str, Any]:
        args = self._args
        cores = sorted(os.sched_getaffinity(0))[: args.threads]
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "OMP_NUM_THREADS": str(args.threads),
        }
        import torch
        import vllm

        dtype, _, how = args.form.partition("-")
        settings = {
            "dtype": dtype or "bfloat16",
            "enforce_eager": how == "eager",
            "max_model_len": args.max_len,
            "max_num_seqs": args.streams,
            "enable_prefix_caching": False,
            "disable_log_stats": False,
            "seed": 0,
            "speculative_config": self._drafting(way),
        }
        self._engine = vllm.LLM(model=args.model, **settings)
        return {"vllm": vllm.__version__, "torch": torch.__version__, "compiled": how != "eager", "settings": settings}

    def run(self, way: str, prompts: Prompts, num_tokens: list[int]) -> dict[str, Any]:
        from vllm import SamplingParams

        params = [
            SamplingParams(temperature=0, max_tokens=each, ignore_eos=True, detokenize=False) for each in num_tokens
        ]
        began = time.perf_counter()
        outputs = self._engine.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        wall_s = time.perf_counter() - began
        prefill = {"prefill_s": outputs[0].metrics.first_token_latency} if len(prompts) == 1 else {}
        token_ids = [list(output.outputs[0].token_ids) for output in outputs]
        return {"token_ids": token_ids, "wall_s": wall_s, **self._counted(), **prefill}

    def close(self) -> None:
        pass

    def _drafting(self, way: str) -> dict[str, Any] | None:
        if way == "none":
            return None
        common = {"num_speculative_tokens": NUM_DRAFTED[way]}
        if way == "ngram":
            return {"method": "ngram", "prompt_lookup_max": 4, **common}
        if way == "dflash":
            return {"method": "dflash", "model": self._args.dflash, **common}
        return {"method": "draft_model", "model": self._args.draft, **common}

    def _counted(self) -> dict[str, Any]:
        """Rounds with drafts since the last call, and tokens of each; 1 without drafts."""
        counts = {each.name: getattr(each, "value", 0) for each in self._engine.get_metrics()}
        now = tuple(counts.get(f"vllm:spec_decode_num_{what}", 0) for what in ("drafts", "accepted_tokens"))
        drafts, accepted = (one - other for one, other in zip(now, self._seen, strict=True))
        self._seen = (int(now[0]), int(now[1]))
        return {"num_rounds": drafts, "tokens_per_round": 1 + accepted / drafts if drafts else 1.0}


if __name__ == "__main__":
    pipe = own_output()  # before vLLM prints
    serve(Vllm(arguments(WAYS)), pipe)
