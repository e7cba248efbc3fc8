"""`paceline generate`: one answer, streamed, with what it cost; `--compare` times plain decoding beside it."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, replace
from typing import Any

from paceline.bench.identity import logits_after
from paceline.bench.passes import Answer, Request
from paceline.bench.peers import TransformersPeer
from paceline.commands.terminal import introduce, print_json, say, stats_lines, weights_read_per_s
from paceline.engine.llm import LLM, Completion, GenerationStats
from paceline.figures import first_difference
from paceline.hardware import Machine, this_machine
from paceline.model.backends import form_of
from paceline.types import SamplingParams

WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Ask:
    """A `generate` command, its options read and checked."""

    prompt: str
    settings: dict[str, Any]
    """Keyword arguments of LLM, the model's name among them."""
    params: SamplingParams
    system: str | None = None
    raw: bool = False
    compare: bool = False
    as_json: bool = False
    against: str | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Plain decoding of the same prompt in the same process."""

    plain: Completion
    speedup: float
    identical: bool | None
    """Whether the tokens are the same; None when sampled, where only the distribution has to be."""
    first_difference: int | None = None
    """Tokens that are still the same, where they are not all the same."""
    top2_gap: float | None = None
    """Best logit minus second-best at the first difference: how nearly the target was undecided there."""


def generate(ask: Ask) -> None:
    """Answer, stream, report."""
    llm = LLM(**ask.settings)
    say(introduce(llm))
    token_ids = encode(llm, ask)
    plain = _plain(llm, token_ids, ask.params) if ask.compare else None
    completion = _stream(llm, token_ids, ask)
    comparison = _compare(llm, completion, plain, ask.params) if plain else None
    peer = _peer(llm, ask, token_ids) if ask.against else None
    machine = this_machine(llm.config.device)
    for line in stats_lines(completion.stats, llm.target.weight_bytes, machine):
        say(line)
    if comparison:
        say(_comparison_line(completion.stats, comparison, llm.config.dtype, llm.target.is_width_invariant))
    if peer:
        say(_peer_line(completion, peer, llm.config.dtype))
    if ask.as_json:
        print_json(as_line(llm, ask, completion, machine, comparison) | _peer_figures(completion, peer))


def _peer(llm: LLM, ask: Ask, token_ids: list[int]) -> Answer:
    """What Transformers says to the same tokens, after a warm-up."""
    transformers, request = TransformersPeer(llm), [Request("prompt", token_ids)]
    transformers.run("transformers", request, WARM_UP_TOKENS, True)
    return transformers.run("transformers", request, ask.params.max_tokens, ask.params.ignore_eos).answers[0]


def _peer_line(completion: Completion, peer: Answer, dtype: str) -> str:
    speed, same = len(peer.token_ids) / peer.seconds, first_difference(completion.token_ids, peer.token_ids)
    text = "the same tokens" if same is None else f"the same {same} first tokens: {dtype} is rounded elsewhere there"
    return f"Transformers {speed:.1f} tokens/s: {completion.stats.tokens_per_s / speed:.1f}x as fast, {text}"


def _peer_figures(completion: Completion, peer: Answer | None) -> dict[str, Any]:
    if peer is None:
        return {}
    speed = len(peer.token_ids) / peer.seconds
    return {"transformers": {"tokens_per_s": speed, "speedup": completion.stats.tokens_per_s / speed}}


def encode(llm: LLM, ask: Ask) -> list[int]:
    """Token ids of the prompt, through the chat template unless raw."""
    if ask.raw:
        return llm.tokenizer.encode(ask.prompt)
    system = [{"role": "system", "content": ask.system}] if ask.system else []
    return llm.encode_chat([*system, {"role": "user", "content": ask.prompt}])


def _plain(llm: LLM, token_ids: list[int], params: SamplingParams) -> Completion:
    """Plain decoding, after a warm-up of it and of the drafter; leaves the drafter as it was."""
    drafter = llm.drafter
    warm_up = replace(params, max_tokens=min(WARM_UP_TOKENS, params.max_tokens), logprobs=None)
    llm.generate_ids([token_ids], warm_up)
    llm.use_drafter("none")
    try:
        llm.generate_ids([token_ids], warm_up)
        return llm.generate_ids([token_ids], params)[0]
    finally:
        llm.use_drafter(drafter)


def _stream(llm: LLM, token_ids: list[int], ask: Ask) -> Completion:
    """Text as it comes: to stdout, or to stderr when stdout is for the JSON line."""
    out = sys.stderr if ask.as_json else sys.stdout
    texts = []
    sequence = None
    for chunk in llm.stream(token_ids, ask.params):
        texts.append(chunk.text)
        print(chunk.text, end="", file=out, flush=True)
        sequence = chunk.sequence
    assert sequence is not None, "a request ends with a chunk"
    text = "".join(texts)
    if not text.endswith("\n"):
        print(file=out, flush=True)
    reason, stats = sequence.finish_reason, GenerationStats.of(sequence)
    return Completion(text, sequence.output_ids, reason, stats, sequence.logprobs, token_ids)


def _compare(llm: LLM, completion: Completion, plain: Completion, params: SamplingParams) -> Comparison:
    speed = plain.stats.tokens_per_s
    speedup = completion.stats.tokens_per_s / speed if speed else 0.0
    if not params.is_greedy:
        return Comparison(plain, speedup, None)
    at = first_difference(completion.token_ids, plain.token_ids)
    if at is None:
        return Comparison(plain, speedup, True)
    best, second = logits_after(llm.target, plain.prompt_token_ids + plain.token_ids[:at]).topk(2).values.tolist()
    return Comparison(plain, speedup, False, at, best - second)


def _comparison_line(stats: GenerationStats, comparison: Comparison, dtype: str, is_exact: bool) -> str:
    same = {None: "sampled: texts need not agree", True: "token-identical", False: "not token-identical"}[comparison.identical]
    if comparison.top2_gap is not None:
        same += (
            f" after {comparison.first_difference} tokens, where {dtype} has the top two logits {comparison.top2_gap:.3f} apart"
        )
        same += "" if is_exact or dtype == "float32" else "; --backend native, or --dtype float32, is exact"
    return (
        f"plain {comparison.plain.stats.tokens_per_s:.1f} tokens/s, with drafts {stats.tokens_per_s:.1f} tokens/s: "
        f"{comparison.speedup:.2f}x, {same}"
    )


def as_line(
    llm: LLM, ask: Ask, completion: Completion, machine: Machine, comparison: Comparison | None = None
) -> dict[str, Any]:
    """The command's JSON object."""
    stats, times = completion.stats, completion.stats.timings
    line: dict[str, Any] = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "num_prompt_tokens": stats.num_prompt_tokens,
        "num_output_tokens": stats.num_output_tokens,
        "tokens_per_s": stats.tokens_per_s,
        "decode_tokens_per_s": stats.decode_tokens_per_s,
        "time_to_first_token_s": stats.time_to_first_token_s,
        "tokens_per_round": stats.tokens_per_round,
        "acceptance_rate": stats.acceptance_rate,
        "accepted_histogram": stats.accepted_histogram,
        "lossless": stats.lossless,
        "seconds": {"prefill": times.prefill_s, "draft": times.draft_s, "verify": times.verify_s, "host": times.host_s},
        "model": llm.config.model,
        "drafter": llm.drafter.name,
        "dtype": llm.config.dtype,
        "device": llm.config.device,
        **asdict(form_of(llm.target)),
        "kv_cache_bytes": llm.cache_bytes,
        "weight_bytes": llm.target.weight_bytes,
        "bytes_per_s": weights_read_per_s(stats, llm.target.weight_bytes),
        "machine": machine,
    }
    if ask.params.logprobs is not None:
        line["logprobs"] = completion.logprobs
    if comparison:
        line["plain_tokens_per_s"] = comparison.plain.stats.tokens_per_s
        line["speedup"] = comparison.speedup
        line["identical"] = comparison.identical
        line["first_difference"] = comparison.first_difference
        line["top2_gap"] = comparison.top2_gap
    return line
