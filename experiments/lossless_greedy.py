"""Is greedy decoding the target's, token for token? Every drafter against Transformers' own `generate`.

    .venv/bin/python experiments/lossless_greedy.py --prompts gsm8k.jsonl humaneval.jsonl mt_bench.jsonl --limit 100
    python experiments/lossless_greedy.py --model qwen2.5-coder-0.5b --limit 20 --own-reading --prompts humaneval.jsonl

float32 must agree on every prompt; a difference is excused only at a near-tie (top two logits within 1e-4) and is
printed. Transformers gets the weights as we expand them, or reads the GGUF file itself (--own-reading, which needs
`accelerate`). With --dtype bfloat16 the reference is our own plain decoding. The native pass gives a position the same
bits in any
company: every drafter must agree with it, and the script fails where one does not. PyTorch multiplies matrices of
different shapes differently, so near-ties may flip: there the prompts that differ and the logit gap at the first
difference are reported. Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from transformers import AutoModelForCausalLM

from paceline import LLM, SamplingParams
from paceline.bench.comparison import transformers_model
from paceline.bench.passes import parting
from paceline.data.prompts import read_prompts
from paceline.draft.dflash.drafter import DFlashDrafter
from paceline.draft.eagle3.drafter import Eagle3Drafter
from paceline.draft.mtp.drafter import MtpDrafter
from paceline.draft.ngram import NgramDrafter
from paceline.draft.small_model import SmallModelDrafter
from paceline.hub import resolve
from paceline.model.backends import form_of, load_target
from paceline.model.checkpoint import random_tensors
from paceline.model.config.decoder import DecoderConfig
from paceline.model.torch.decoder import Decoder
from paceline.report.statistics import Rounds
from paceline.runs.folder import record_of
from paceline.train.methods.mtp import new_layer

NEAR_TIE = 1e-4
log = Console(stderr=True)


def drafters(llm: LLM, names: list[str]) -> dict[str, Any]:
    """The drafters under test: certain, uncertain, always right, never right. `mtp=copied` is a copy of the target's
    last layer, not trained."""
    tiny = DecoderConfig(
        "llama", llm.target.vocab_size, 64, 128, 2, 4, 2, 16, llm.target.max_position, tie_embeddings=True
    )
    dtype = llm.target.dtype
    makers = {
        "none": lambda: "none",
        "default": lambda: "default",
        "ngram": lambda: NgramDrafter(),
        "small_model=itself": lambda: SmallModelDrafter(load_target(llm.config)),
        "small_model=random": lambda: SmallModelDrafter(Decoder(tiny, random_tensors(tiny, 0), dtype=dtype)),
        "dflash=random": lambda: DFlashDrafter.random(llm.target, num_layers=3, block_size=8, seed=0),
        "dspark=random": lambda: "random-dspark",
        "eagle3=random": lambda: Eagle3Drafter.random(llm.target, seed=0),
        "mtp=copied": lambda: MtpDrafter(new_layer(resolve(llm.config.model))),
    }
    return {name: makers.get(name, partial(str, name)) for name in names or makers}  # others: folders and hub ids


def differences(
    llm: LLM, prompts: list[list[int]], expected: list[list[int]], got: list[list[int]]
) -> list[dict[str, Any]]:
    """First difference of each prompt that differs, with the logit gap there."""
    return [
        {"prompt": index, "token": parted[0], "gap": parted[1]}
        for index, (prompt, want, have) in enumerate(zip(prompts, expected, got, strict=True))
        if (parted := parting(llm.target, prompt, have, want))
    ]


@torch.inference_mode()
def transformers_answers(args: argparse.Namespace, prompts: list[list[int]], eos: tuple[int, ...]) -> list[list[int]]:
    path, dtype = resolve(args.model), getattr(torch, args.dtype)
    if args.own_reading:
        model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype).eval()
    else:
        model = transformers_model(path, dtype)
    answers = []
    for prompt in track(prompts, "transformers", console=log):
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=args.max_tokens,
            do_sample=False,
            eos_token_id=list(eos),
        )
        answers.append(out[0, len(prompt) :].tolist())
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", nargs="+", required=True)
    parser.add_argument("--limit", type=int, default=100, help="prompts in all, taken evenly from the files")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument(
        "--speculate", default="full", help="auto: the drafts that pay; full: all in every round; N; tree:N"
    )
    parser.add_argument(
        "--drafters", default="", help="some of those here, folders, hub ids; all of those here when empty"
    )
    parser.add_argument("--raw", action="store_true", help="prompts as plain text: for a model without a template")
    parser.add_argument("--own-reading", action="store_true", help="Transformers reads the GGUF file by itself")
    args = parser.parse_args()
    share = -(-args.limit // len(args.prompts))
    messages = [prompt.messages for path in args.prompts for prompt in read_prompts(path, limit=share)][: args.limit]
    llm = LLM(args.model, drafter="none", dtype=args.dtype, max_batch=args.batch, speculate=args.speculate)
    prompts = [
        llm.tokenizer.encode(str(each[-1]["content"])) if args.raw else llm.encode_chat(list(each)) for each in messages
    ]
    params = SamplingParams(max_tokens=args.max_tokens)
    reference = transformers_answers(args, prompts, llm.tokenizer.eos_token_ids) if args.dtype == "float32" else None
    results = []
    for name, make in drafters(llm, [each for each in args.drafters.split(",") if each]).items():
        llm.use_drafter(make())
        started = time.perf_counter()
        answers = llm.generate_ids(prompts, params)
        got = [answer.token_ids for answer in answers]
        reference = reference or got  # bfloat16: our own plain decoding, which runs first
        mismatches = differences(llm, prompts, reference, got)
        results.append(
            {
                "drafter": name,
                "prompts": len(prompts),
                "tokens": sum(map(len, got)),
                "different": len(mismatches),
                "not_near_ties": sum(each["gap"] > NEAR_TIE for each in mismatches),
                "tokens_per_round": round(Rounds.sum(answer.stats for answer in answers).tokens_per_round, 3),
                "differences": mismatches,
            }
        )
        log.print(f"{name}: {results[-1]} ({time.perf_counter() - started:.0f} s)")
    settings = {name: getattr(args, name) for name in ("model", "dtype", "own_reading")}
    about = {"form": str(form_of(llm.target)), "reference": "transformers" if args.dtype == "float32" else "none"}
    print(json.dumps(record_of({**settings, **about, "results": results})))
    if args.dtype == "float32" and any(result["not_near_ties"] for result in results):
        raise SystemExit("float32 must give Transformers' text")
    if llm.target.is_width_invariant and args.dtype != "float32" and any(result["different"] for result in results):
        raise SystemExit("the native pass must give the same text with every drafter")


if __name__ == "__main__":
    main()
