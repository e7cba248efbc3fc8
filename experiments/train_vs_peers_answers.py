"""Greedy answers for `train_vs_peers.py` by vLLM's CPU build or by Transformers, in place of the servers that the peers ask.

    python experiments/train_vs_peers_answers.py vllm|transformers MODEL_FOLDER PROMPTS OUT MAX_TOKENS BATCH THREADS

SpecForge 0.2.0 asks an SGLang server for answers, speculators 0.9.0 a vLLM server. Ends with one JSON line; `seconds` are those
of answering alone, `start_s` those of loading and compiling.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

Answer = Callable[[list[list[int]], int], list[list[int]]]


def transformers_answers(model: str, batch: int, threads: int) -> Answer:
    """Prompts of about the same length together, padded on the left."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    ends = network.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    pad = ends[0]

    @torch.inference_mode()
    def answer(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        order, found = sorted(range(len(prompts)), key=lambda number: -len(prompts[number])), [[] for _ in prompts]
        for first in range(0, len(order), batch):
            chosen = order[first : first + batch]
            width = max(len(prompts[number]) for number in chosen)
            ids = torch.tensor([[pad] * (width - len(prompts[number])) + prompts[number] for number in chosen])
            seen = torch.tensor([[0] * (width - len(prompts[each])) + [1] * len(prompts[each]) for each in chosen])
            out = network.generate(
                input_ids=ids, attention_mask=seen, max_new_tokens=max_tokens, do_sample=False, pad_token_id=pad
            )
            for number, row in zip(chosen, out[:, width:].tolist(), strict=True):
                stop = min((row.index(end) for end in ends if end in row), default=len(row) - 1)
                found[number] = row[: stop + 1]
        return found

    return answer


def vllm_answers(model: str, batch: int, threads: int) -> Answer:
    """As `decode_vs_peers_vllm.py` runs it."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": str(threads),
    }
    import vllm

    engine = vllm.LLM(model=model, dtype="bfloat16", max_model_len=1024, max_num_seqs=batch, seed=0)

    def answer(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        params = vllm.SamplingParams(temperature=0, max_tokens=max_tokens, detokenize=False)
        outputs = engine.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return answer


def main() -> None:
    by, model, prompts, out, max_tokens, batch, threads = sys.argv[1:]
    began = time.perf_counter()
    answer = {"vllm": vllm_answers, "transformers": transformers_answers}[by](model, int(batch), int(threads))
    asked = [line["ids"][: line["start"]] for line in map(json.loads, Path(prompts).read_text().splitlines())]
    answer(asked[:1], 4)
    start_s = time.perf_counter() - began
    began = time.perf_counter()
    found = answer(asked, int(max_tokens))
    told = {"by": f"{by} {version('vllm-cpu' if by == 'vllm' else by)}", "seconds": time.perf_counter() - began}
    told |= {"start_s": start_s, "answers": len(found), "tokens": sum(map(len, found)), "batch": int(batch)}
    Path(out).write_text(json.dumps(told) + "\n")


if __name__ == "__main__":
    main()
