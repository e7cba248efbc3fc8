"""Checks of an audit: each evaluates its evidence and returns a finding; `verdict_of` combines them. Pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from paceline.loop.audit.config import Tolerance
from paceline.loop.audit.evidence import Draw, Group, Trial, detectable

Outcome = Literal["passed", "fault", "note", "not offered", "not judged"]
Verdict = Literal["honest", "faulty", "unsure"]
LEAST_TOKENS = 32
"""Minimum number of tokens whose log-probabilities are compared: the median of a few says little."""
MOST_LOST = 0.2
"""Share of answers with unknown tokens above which the other answers are not representative."""
NEEDED = ("sampled", "greedy")
"""A server is not called honest if one of these checks could not be judged."""
MEANINGS = {
    "surprisal": "the tokens are {more} surprising than the model's own draws, by {difference:.3f} nats on average",
    "likeliest": "the likeliest token comes {seen:.1%} of the time, the model has it at {expected:.1%}",
    "rare": "tokens of a probability below 0.001 come {seen:.2%} of the time, the model has them at {expected:.2%}",
    "cut": "the last part of the nucleus comes {seen:.1%} of the time, the model has it at {expected:.1%}",
    "equal answers": "{seen:.2%} of pairs of answers are equal, {expected:.2%} would be",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check of a server. Outcomes: "passed", "fault", "note" (unusual, but no fault), "not offered" (the
    server lacks this feature) or "not judged" (too little data)."""

    check: str
    outcome: Outcome
    text: str
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request, for prompt and answer: the true count, and the one that the server reported."""

    prompt: int
    prompt_reported: int | None
    answer: int | None
    """None if the answer's tokens are unknown."""
    answer_reported: int | None
    limit: int
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Two greedy answers to the same prompt: `whole` without a stop string, and `text` with the stop string `stop`."""

    stop: str
    whole: str
    text: str
    finish_reason: str


def verdict_of(findings: Iterable[Finding]) -> Verdict:
    outcomes = {(finding.check, finding.outcome) for finding in findings}
    if any(outcome == "fault" for _, outcome in outcomes):
        return "faulty"
    is_known = ("sampled", "passed") in outcomes and not any((name, "not judged") in outcomes for name in NEEDED)
    return "honest" if is_known else "unsure"


def sampled(
    groups: Sequence[Group], tests: Sequence[Trial], false_alarms: float, tolerance: float = 0.0
) -> list[Finding]:
    """Checks that the server's sampled answers have the probabilities of the local model. Returns one finding per group
    (answers with equal sampling settings). `tests`: results of the statistical tests of all groups, from
    `evidence.judged`.

    The finding also states the smallest deviation that the tests would have detected. Two values are used only for
    this. `false_alarms`: probability that any test finds a fault in an honest server. `tolerance`: rounding error of
    the mean surprisal (-log p of a token), in nats."""
    findings = []
    for group in groups:
        own = [test for test in tests if test.group == group.name]
        faults = sorted((test for test in own if test.is_fault), key=lambda test: -test.log_evidence)
        figures = {"group": group.name, "answers": len(group.draws), "tokens": group.num_tokens, "lost": group.num_lost}
        if faults:
            what = "; ".join(_meaning(test) for test in faults[:3])
            text = (
                f"{group.name}: {what} (an honest server would show this with a chance of at most "
                f"{faults[0].chance:.1g})"
            )
            findings.append(Finding("sampled", "fault", text, figures))
        elif not own or group.lost_share > MOST_LOST:
            text = (
                f"{group.name}: the tokens of {group.num_lost} of {group.num_lost + len(group.draws)} answers are not "
                "known"
            )
            findings.append(Finding("sampled", "not judged", text, figures))
        else:
            first = own[0]
            least = detectable(first, len(tests), tolerance + group.lost_share, false_alarms)
            figures["detectable_nats"] = least
            text = (
                f"{group.name}: surprisal minus entropy {first.difference:+.3f} nats [{first.low:+.3f}, "
                f"{first.high:+.3f}] over {group.num_tokens:,} tokens; {len(own)} tests, none beyond a rate of "
                f"{false_alarms:g} false alarms for all; a shift of {least:.2f} nats would have been found"
            )
            findings.append(Finding("sampled", "passed", text, figures))
    return findings


def _meaning(test: Trial) -> str:
    more = "more" if test.difference > 0 else "less"
    words = {"more": more, "difference": abs(test.difference), "seen": test.seen, "expected": test.expected}
    where = "" if test.positions in ("all", "pairs") else f" at positions {test.positions}"
    return MEANINGS[test.statistic].format(**words) + where


def nucleus(groups: Sequence[Group], allowed: Tolerance) -> list[Finding]:
    """Checks that no sampled token lies outside the top-p nucleus; returns one finding per group with top-p below 1. A
    token lies outside if the tokens that are more probable have a total probability of at least top-p plus
    `allowed.mass`, the margin for rounding errors."""
    findings = []
    for group in (group for group in groups if group.top_p < 1 and group.draws):
        before_N = np.concatenate([draw.scores.before_T for draw in group.draws])
        num_outside = int((before_N >= group.top_p + allowed.mass).sum())
        figures = {"group": group.name, "outside": num_outside, "tokens": len(before_N)}
        text = f"{group.name}: {num_outside:,} of {len(before_N):,} tokens are outside the nucleus"
        if num_outside:
            text += f"; tokens likelier than one of them have {float(before_N.max()):.3f} already"
        findings.append(Finding("nucleus", "fault" if num_outside else "passed", text, figures))
    return findings


def greedy(draws: Sequence[Draw], tie: float, num_lost: int = 0) -> Finding:
    """Checks that every token of the server's greedy answers is the local model's most probable one, given the tokens
    before it. A token whose logit is at most `tie` below the largest is no fault. `draws`: the answers. `num_lost`:
    number of further answers whose tokens are unknown, only reported."""
    draws = [draw for draw in draws if draw.tokens]
    if not draws:
        return Finding("greedy", "not judged", f"the tokens of all {num_lost} greedy answers are unknown")
    other = [
        (float(gap), draw.prompt, place) for draw in draws for place, gap in enumerate(draw.scores.gap_T) if gap > 0
    ]
    num_tokens = sum(len(draw.tokens) for draw in draws)
    far = [entry for entry in other if entry[0] > tie]
    firsts: dict[int, dict[str, Any]] = {}
    for gap, prompt, place in other:
        firsts.setdefault(prompt, {"prompt": prompt, "position": place + 1, "gap": gap})
    num_same = len(draws) - len(firsts)
    figures: dict[str, Any] = {
        "answers": len(draws),
        "identical": num_same,
        "tokens": num_tokens,
        "lost": num_lost,
        "near_ties": len(other) - len(far),
        "differences": len(far),
        "largest_gap": max(other, default=(0.0,))[0],
        "first": list(firsts.values()),
    }
    text = f"{num_same} of {len(draws)} answers identical; of {num_tokens:,} tokens {len(other)} are not our likeliest"
    if other and not far:
        text += f", all at near ties (logits at most {figures['largest_gap']:.3f} apart; up to {tie:g} is rounding)"
    if far:
        gap, prompt, place = min(far, key=lambda entry: entry[1:])
        text += (
            f", {len(far)} of them by more than a near tie; first in prompt {prompt + 1} at token {place + 1}, where "
            f"the likeliest token's logit is {gap:.2f} larger"
        )
    return Finding("greedy", "fault" if far else "passed", text, figures)


def seeds(pairs: Sequence[tuple[str, str]]) -> Finding:
    """Checks that a seed makes answers repeatable. Each of `pairs` has the texts of two answers to the same prompt with
    the same seed. The outcome is "passed" if the two texts are equal in all pairs, and "note" if they are equal only in
    some. It is "not offered" if they are equal in no pair, or if there are no pairs."""
    num_same = sum(one == other for one, other in pairs)
    figures = {"pairs": len(pairs), "same": num_same}
    if not pairs:
        return Finding("seeds", "not offered", "the server takes no seed", figures)
    if num_same == len(pairs):
        return Finding("seeds", "passed", f"the same seed gave the same text {num_same} times of {len(pairs)}", figures)
    if not num_same:
        text = "a seed changes nothing: the same seed never gave the same text"
        return Finding("seeds", "not offered", text, figures)
    text = f"the same seed gave the same text {num_same} times of {len(pairs)}: batches, or rounding, decide the rest"
    return Finding("seeds", "note", text, figures)


def logprobs(pairs: Sequence[tuple[float, float]], allowed: float) -> Finding:
    """Checks the reported log-probabilities: the median of their absolute differences from the local model's must be at
    most `allowed` nats. `pairs`: (server's, local model's) for each token; fewer than 32 are not judged."""
    if not pairs:
        return Finding("logprobs", "not offered", "the server tells no log-probabilities")
    if len(pairs) < LEAST_TOKENS:
        text = f"log-probabilities of only {len(pairs)} tokens, {LEAST_TOKENS} are needed"
        text += ": raise --max-tokens, or give more --prompts"
        return Finding("logprobs", "not judged", text, {"tokens": len(pairs)})
    apart = [abs(reported - own) for reported, own in pairs]
    middle, largest = statistics.median(apart), max(apart)
    text = (
        f"log-probabilities of {len(pairs):,} tokens differ from ours by {middle:.4f} (median), at most {largest:.3f}"
    )
    figures = {"tokens": len(pairs), "median": middle, "largest": largest}
    if middle > allowed:
        return Finding("logprobs", "fault", f"{text}; rounding explains a median of {allowed:g}", figures)
    return Finding("logprobs", "passed", text, figures)


def stops(tried: Sequence[Stop]) -> Finding:
    """Checks that the server ends an answer right before a stop string. `tried`: answers that were requested with one.

    It is a fault if an answer contains the stop string. It is also a fault if an answer that ends right before the stop
    string has another finish reason than "stop". Other answers are ignored: they differ from `Stop.whole` before the
    stop string, and need not reach it."""
    wrong, num_kept = [], 0
    for stop in tried:
        if stop.stop in stop.text:
            wrong.append(f"{stop.stop!r} stands in an answer that was to end before it")
        elif stop.text == stop.whole[: stop.whole.index(stop.stop)]:
            num_kept += 1
            if stop.finish_reason != "stop":
                wrong.append(f"an answer that ended before {stop.stop!r} says it ended by {stop.finish_reason!r}")
    figures = {"tried": len(tried), "kept": num_kept}
    if not tried:
        return Finding("stop", "not judged", "no greedy answer was long enough to be stopped", figures)
    if wrong:
        return Finding("stop", "fault", wrong[0], figures)
    if not num_kept:
        return Finding("stop", "not judged", "answers with a stop string took another way before it", figures)
    text = f"{num_kept} of {len(tried)} answers ended right before their stop string"
    return Finding("stop", "passed", text, figures)


def usage(counted: Sequence[Usage], is_rendered_there: bool) -> Finding:
    """Checks the token counts that the server reports. Three things are faults: a wrong count of prompt tokens, a wrong
    count of answer tokens, and an answer longer than requested.

    `is_rendered_there`: True if the server itself converted the prompts to token ids. It may then use another tokenizer
    or chat template. If a count of prompt tokens differs, the result is therefore "not judged"."""
    reported = [usage for usage in counted if usage.prompt_reported is not None and usage.answer_reported is not None]
    figures = {"answers": len(reported)}
    prompts = [usage for usage in reported if usage.prompt_reported != usage.prompt]
    if prompts:
        first = prompts[0]
        text = f"{len(prompts)} of {len(reported)} prompts have other counts: "
        text += f"{first.prompt_reported} tokens where we have {first.prompt}"
        if is_rendered_there:
            text += "; the server's template or tokenizer is another, so nothing else can be compared"
        return Finding("usage", "not judged" if is_rendered_there else "fault", text, figures)
    longest = max(counted, key=lambda each: (each.answer or 0) - each.limit, default=None)
    if longest and (longest.answer or 0) > longest.limit + 1:  # the end token may not count
        text = f"an answer has {longest.answer} tokens, {longest.limit} were requested at most"
        return Finding("usage", "fault", text, figures)
    if not reported:
        return Finding("usage", "not offered", "the server counts no tokens", figures)
    answers = [usage for usage in reported if not _counts_right(usage)]
    if answers:
        first = answers[0]
        own = f"at most {first.limit}" if first.answer is None else str(first.answer)
        text = (
            f"{len(answers)} of {len(reported)} answers have other counts: {first.answer_reported} tokens where we "
            f"have {own}"
        )
        return Finding("usage", "fault", text, figures)
    text = f"prompt and answer tokens of {len(reported)} answers are counted as ours"
    return Finding("usage", "passed", text, figures)


def declared_lossy(num_lossy: int) -> list[Finding]:
    """Returns a list with one fault if the server itself declared answers as not lossless, else []."""
    if not num_lossy:
        return []
    text = f"the server itself says of {num_lossy} answers that they are not lossless"
    return [Finding("own words", "fault", text, {"answers": num_lossy})]


def _counts_right(each: Usage) -> bool:
    """True if the reported count is right, with or without the end token."""
    assert each.answer_reported is not None
    if each.answer_reported > each.limit:
        return False
    if each.finish_reason == "length":
        return each.answer_reported == each.limit
    return each.answer is None or each.answer_reported in (each.answer, each.answer - 1)
