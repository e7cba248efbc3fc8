"""The stages `tiny`, `graphs` and `seeds`: the device computes what the CPU does, its tests pass, drafts change no
text."""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gpu_day_stages.models import decoder
from gpu_day_stages.tiny_models import (
    VOCAB,
    are_same,
    drafters_for,
    loud_tensors,
    parted,
    texts,
    tiny_config,
    tiny_llama,
)
from gpu_day_stages.visit import Skipped, Visit
from paceline.draft.small_model import SmallModelDrafter
from paceline.model.config.decoder import FAMILIES, DecoderConfig
from paceline.model.sampling.logits import target_probs
from paceline.model.target import ForwardBatch, ForwardOutput
from paceline.model.torch.decoder import Decoder
from paceline.types import SamplingParams

ROOT = Path(__file__).parents[2]
CLOSE = 2e-4
"""Largest difference of logits and taps in float32, relative to the largest of them."""
COMPILED_ONCE = "not test_the_compiled_kernel or 128-bfloat16"
"""Each case of that test compiles for up to a minute."""
IN_TINY = ("LlamaForCausalLM", "Gemma3ForCausalLM", "Qwen3MoeForCausalLM", "Qwen3_5ForCausalLM")
"""Dense, with windows, a mixture of experts, a hybrid."""
LEAST_P, MOST_SAMPLES = 1e-4, 20_000


def tiny(visit: Visit) -> None:
    """Every family's logits and taps against the CPU's, and greedy text of every drafter against plain decoding."""
    for architecture in visit.sized(tuple(FAMILIES), IN_TINY):
        with visit.part(f"family {architecture}"):
            family(visit, architecture, tiny_config(architecture, FAMILIES[architecture]))
    for name in visit.sized(("LlamaForCausalLM", "Qwen3MoeForCausalLM", "Qwen3_5ForCausalLM"), ("LlamaForCausalLM",)):
        greedy(visit, name, tiny_config(name, FAMILIES[name]))


def family(visit: Visit, name: str, config: DecoderConfig) -> None:
    """Prefill in chunks, ragged rounds with rollback, a tree of tokens; then a few greedy answers, and bfloat16."""
    tensors = loud_tensors(config)
    cpu = Decoder(config, tensors, num_rows=3, max_len=128)
    ours = decoder(config, tensors, visit.device, rows=3, max_len=128)
    worst = largest_difference(script(cpu), script(ours))
    prompts, params = random_prompts(3), SamplingParams(max_tokens=visit.sized(24, 5), ignore_eos=True)
    expected, own = (texts(each, None, prompts, params) for each in (cpu, ours))
    parts = parted(cpu, prompts, expected, own)
    visit.check(f"family {name}", worst < CLOSE and are_same(parts), difference=worst, parted=parts)
    if not visit.is_tiny:
        low = decoder(config, tensors, visit.device, rows=3, max_len=128, dtype=torch.bfloat16)
        visit.report(f"bfloat16 {name} from float32", difference=largest_difference(script(cpu), script(low)))


def script(target: Decoder) -> list[ForwardOutput]:
    """The same passes on any target; it ends as empty as it began."""
    target.set_taps((1, 3))
    draw, outs = random.Random(0), []

    def tokens(count: int) -> list[int]:
        return [draw.randrange(VOCAB) for _ in range(count)]

    def run(rows: list[int], counts: list[int], **more: Any) -> None:
        starts = [target.cache.lengths[row] for row in rows]
        out = target.forward(ForwardBatch(rows, starts, counts, tokens(sum(counts)), **more))
        assert out.logits_TV is not None and out.taps_TF is not None
        outs.append(ForwardOutput(out.logits_TV.float().cpu().clone(), out.taps_TF.float().cpu().clone()))

    rows = [target.cache.allocate() for _ in range(3)]
    assert rows == [0, 1, 2]
    for row, length in enumerate((30, 11, 19)):
        run([row], [min(length, 16)], logits="last")
        if length > 16:
            run([row], [length - 16])
    for chosen, counts in (([0, 1, 2], [1, 1, 1]), ([0, 2], [5, 3]), ([1], [8])):
        starts = [target.cache.lengths[row] for row in chosen]
        run(chosen, counts)
        target.cache.rollback(chosen, [start + (count + 1) // 2 for start, count in zip(starts, counts, strict=True)])
    run([1], [6], parents=[-1, 0, 0, 1, 1, 2])
    for row in range(3):
        target.cache.rollback([row], [0])
        target.cache.free(row)
    return outs


def largest_difference(some: list[ForwardOutput], others: list[ForwardOutput]) -> float:
    """Over all passes, relative to the largest number of each; infinite where one is not finite."""
    worst = 0.0
    for one, other in zip(some, others, strict=True):
        for name in ("logits_TV", "taps_TF"):
            left, right = getattr(one, name), getattr(other, name)
            difference = float((left - right).abs().max() / left.abs().max())
            worst = max(worst, difference if difference == difference else float("inf"))
    return worst


def random_prompts(number: int) -> list[list[int]]:
    """Prompts that repeat themselves, so that lookups find something."""
    draw = random.Random(number)
    return [[draw.randrange(VOCAB) for _ in range(5 + index)] * 3 for index in range(number)]


def greedy(visit: Visit, name: str, config: DecoderConfig) -> None:
    """Chains and trees of every drafter, alone and three at once, against plain decoding of the same target."""
    tensors, params = loud_tensors(config), SamplingParams(max_tokens=visit.sized(32, 8), ignore_eos=True)
    target, prompts = decoder(config, tensors, visit.device, rows=3, max_len=128), random_prompts(3)
    expected = texts(target, None, prompts, params)
    known = [prompt + text for prompt, text in zip(prompts, expected, strict=True)]
    for number, (method, make) in enumerate(drafters_for(target, tensors, known).items()):
        for speculate in visit.sized(("full", "tree:8"), (("full", "tree:8")[number % 2],)):
            with visit.part(f"{name} {method} {speculate}"):
                drafter, rounds = make(), list[int]()
                together = texts(target, drafter, prompts, params, speculate=speculate, rounds=rounds)
                alone = [texts(target, drafter, [prompt], params, speculate=speculate)[0] for prompt in prompts[:2]]
                parts = parted(target, prompts, expected, together) + parted(target, prompts[:2], expected[:2], alone)
                kept = statistics.fmean(rounds)
                visit.check(f"{name} {method} {speculate}", are_same(parts), parted=parts, acceptance_length=kept)


def graphs(visit: Visit) -> None:
    """The tests of recorded passes against ordinary ones; recording beside a thread that pins memory."""
    if torch.device(visit.device).type != "cuda":
        visit.leave_out("the gpu tests", "this is not a GPU")
        return
    with visit.part("the gpu tests"):
        gpu_tests(visit)
    with visit.part("a recording beside a thread that pins"):
        beside_pinning(visit)


def gpu_tests(visit: Visit) -> None:
    """The tests that are marked `gpu`, by pytest in a process of its own; of those that compile anew the first."""
    every = sorted(ROOT.glob("tests/**/test_*.py"))
    files = [str(file) for file in every if "mark.gpu" in file.read_text(encoding="utf-8")]
    if not files:
        raise Skipped("the folder tests was not brought")
    words = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", "-k", COMPILED_ONCE, "-W", "default"]
    words += ["-p", "no:cacheprovider", *files]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    limit_s = max(visit.left_s - 8, 1)
    try:
        done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit_s)
        output, status = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired as error:
        output, status = (error.stdout or b"").decode(errors="replace"), None
    print(output, flush=True)
    visit.check("the gpu tests", status == 0, status=status, seconds=limit_s, end=output[-2000:])


def beside_pinning(visit: Visit) -> None:
    config, is_over, pinned = replace(tiny_llama(), windows=(40, None, 40, None)), threading.Event(), [0]

    def pin() -> None:
        while not is_over.is_set():
            torch.empty(1 << 20).pin_memory()
            pinned[0] += 1

    thread = threading.Thread(target=pin, daemon=True)
    thread.start()
    try:
        fresh = decoder(config, loud_tensors(config), visit.device, rows=2, max_len=256)
        row = fresh.cache.allocate()
        assert row is not None
        for count in (1, 2, 4, 8, 16):
            out = fresh.forward(ForwardBatch([row], [fresh.cache.lengths[row]], [count], [1] * count))
            assert out.logits_TV is not None and bool(out.logits_TV.isfinite().all())
    finally:
        is_over.set()
        thread.join(5)
    visit.check("a recording beside a thread that pins", pinned[0] > 0, pinned=pinned[0])


def seeds(visit: Visit) -> None:
    """Text of a seed with drafts, in a batch and alone, against plain decoding; distributions of sampled tokens."""
    config = tiny_llama()
    tensors, prompts = loud_tensors(config), random_prompts(3)
    target = decoder(config, tensors, visit.device, rows=4, max_len=128)
    own = [
        SamplingParams(temperature=0.8, top_p=0.95, seed=seed, max_tokens=visit.sized(32, 10), ignore_eos=True)
        for seed in range(3)
    ]
    expected = texts(target, None, prompts, own)
    known = [prompt + text for prompt, text in zip(prompts, expected, strict=True)]
    makers = drafters_for(target, tensors, known)
    for name in visit.sized(makers.keys() - {"mtp"}, ["oracle", "dflash"]):
        with visit.part(f"seeds {name}"):
            drafter = makers[name]()
            together = texts(target, drafter, prompts, own)
            alone = [texts(target, drafter, [each], [params])[0] for each, params in zip(prompts, own, strict=True)]
            visit.check(f"seeds {name}", together == expected == alone)
    distributions(visit)


def distributions(visit: Visit) -> None:
    """First and second tokens over a vocabulary of 16, by rule; as many samples as the time allows."""
    config = tiny_llama(vocab=16)
    tensors, rows = loud_tensors(config, seed=3), 64
    target = decoder(config, tensors, visit.device, rows=rows, max_len=64)
    prompt = [1, 2, 3]
    rules = visit.sized(("auto", "match", "rejection", "block"), ("block",))
    for number, rule in enumerate(rules):
        with visit.part(f"distribution {rule}"):
            own = decoder(config, loud_tensors(config, seed=4), visit.device, rows=rows)
            small = SmallModelDrafter(own, num_drafted=2)
            share_s = (visit.left_s - 3) / (len(rules) - number)
            ends_at, drawn = time.monotonic() + share_s, list[list[int]]()
            while len(drawn) < visit.sized(MOST_SAMPLES, 64) and time.monotonic() < ends_at:
                # Without a seed drafts are drawn and rejected; samples of tests have seeds, to be always the same.
                drawn_seeds = [len(drawn) + row if visit.is_tiny else None for row in range(rows)]
                params = [
                    SamplingParams(temperature=1.0, seed=seed, max_tokens=2, ignore_eos=True) for seed in drawn_seeds
                ]
                drawn += texts(target, small, [prompt] * rows, params, rule=rule)
            chances = p_values(target, prompt, drawn)
            visit.check(f"distribution {rule}", min(chances) > LEAST_P, samples=len(drawn), p_values=chances)


def p_values(target: Decoder, prompt: list[int], drawn: list[list[int]]) -> list[float]:
    """Returns p-values of chi-square tests of the first tokens, and of the pairs, against the target's own
    distribution."""
    params = SamplingParams(temperature=1.0)
    first = probabilities(target, prompt, params)
    pairs = {(token,): mass for token, mass in enumerate(first)}
    both = {
        (one, two): mass * own
        for (one,), mass in pairs.items()
        for two, own in enumerate(probabilities(target, [*prompt, one], params))
    }
    firsts, seconds = (Counter(tuple(each[:length]) for each in drawn) for length in (1, 2))
    return [p_value(firsts, pairs), p_value(seconds, both)]


def probabilities(target: Decoder, tokens: list[int], params: SamplingParams) -> list[float]:
    row = target.cache.allocate()
    assert row is not None
    out = target.forward(ForwardBatch([row], [0], [len(tokens)], tokens, "last"))
    target.cache.free(row)
    assert out.logits_TV is not None
    return target_probs(out.logits_TV.float(), params)[0].tolist()


def p_value(counts: Counter[tuple[int, ...]], masses: dict[tuple[int, ...], float]) -> float:
    """Cells that are expected fewer than five times count as one."""
    from scipy.special import chdtrc  # scipy.stats takes seconds to import

    total, whole = sum(counts.values()), sum(masses.values())
    expected = {cell: total * mass / whole for cell, mass in masses.items()}
    common = [cell for cell, number in expected.items() if number >= 5]
    observed, expected_counts = [counts[cell] for cell in common], [expected[cell] for cell in common]
    rest = total - sum(expected_counts)
    if rest > 1:
        observed, expected_counts = [*observed, total - sum(observed)], [*expected_counts, rest]
    if not expected_counts:
        raise ValueError(f"{total} samples are too few: the stage needs more time")
    scale = sum(observed) / sum(expected_counts)
    statistic = sum(
        (number - scale * mean) ** 2 / (scale * mean) for number, mean in zip(observed, expected_counts, strict=True)
    )
    return float(chdtrc(len(observed) - 1, statistic))
