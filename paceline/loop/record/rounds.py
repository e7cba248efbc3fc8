"""Converts the acceptance that an engine reports for one answer to rounds: drafted and accepted tokens of each.

vLLM     --per-request-spec-decode-metrics detailed|summary: `metrics.speculative_decoding` (SpeculativeDecodingMetrics)
SGLang   return_spec_tokens_details: `sglext.spec_tokens_details`; return_meta_info: `choices[].meta_info`

Reports that contradict themselves or the number of tokens, and those that leave the number of drafts of a round open,
raise ValueError: nothing is estimated. A histogram has no order; its rounds are listed by accepted tokens.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

from paceline.types import Round

SGLANG_PREFIX = "spec_"
"""Beginning of the names of SGLang's figures."""
TOLERANCE = 1e-3
"""Largest relative difference between a reported mean or rate and the one that its numbers give."""


@dataclass(frozen=True, slots=True)
class _Report:
    """Numbers that both engines report under different names."""

    histogram: list[int]
    """Number of rounds by accepted drafts, 0 first."""
    num_rounds: int
    num_accepted: int
    num_drafted: int
    most_drafted: int
    """Limit of the drafts in one round."""

    def check(self, num_tokens: int | None) -> None:
        """Raises ValueError if the numbers contradict each other or the answer's number of tokens.

        The first token needs no round, and a round without drafts is not reported. The last round may have accepted
        tokens behind the answer's end."""
        num_verified = self.num_rounds + self.num_accepted
        wrong = (
            self.num_rounds != sum(self.histogram)
            or self.num_accepted != sum(place * count for place, count in enumerate(self.histogram))
            or any(self.histogram[self.most_drafted + 1 :])
            or not self.num_accepted <= self.num_drafted <= self.num_rounds * self.most_drafted
            or (num_tokens is not None and num_verified > num_tokens + self.most_drafted)
        )
        if wrong:
            raise ValueError(f"numbers of rounds, drafts and tokens differ: {self}")

    def rounds(self) -> list[Round]:
        """Returns the rounds of the histogram. Raises ValueError if some had fewer drafts than the limit: which ones is
        unknown."""
        if self.num_drafted != self.num_rounds * self.most_drafted:
            raise ValueError("rounds have different numbers of drafts, which the report does not list")
        accepted = chain.from_iterable(repeat(place, count) for place, count in enumerate(self.histogram))
        return [Round(self.most_drafted, number) for number in accepted]


def rounds_of(report: Any, num_tokens: int | None) -> list[Round]:
    """Converts an engine's report on the speculation in one answer to rounds: drafted and accepted tokens of each.
    `report`: metrics from vLLM or SGLang. `num_tokens`: number of tokens of the answer, with which the report must
    agree; None if unknown.

    Raises ValueError, TypeError or KeyError for a report that is contradictory, incomplete or malformed."""
    if not isinstance(report, dict):
        raise TypeError("a report of acceptance is an object")
    is_sglang = any(name.startswith(SGLANG_PREFIX) for name in report)
    return _of_sglang(report, num_tokens) if is_sglang else _of_vllm(report, num_tokens)


def _of_vllm(report: dict[str, Any], num_tokens: int | None) -> list[Round]:
    counts = _Report(
        histogram=_numbers(report["acceptance_histogram"]),
        num_rounds=_number(report["num_spec_steps"]),
        num_accepted=_number(report["num_accepted_draft_tokens"]),
        num_drafted=_number(report["num_draft_tokens"]),
        most_drafted=_number(report["num_spec_tokens"]),
    )
    counts.check(num_tokens)
    _check_mean(report["mean_acceptance_length"], counts.num_rounds + counts.num_accepted, counts.num_rounds, 1.0)
    _check_mean(report["draft_acceptance_rate"], counts.num_accepted, counts.num_drafted, 0.0)
    if report.get("per_step_accepted") is None:
        return counts.rounds()
    accepted, drafted = _numbers(report["per_step_accepted"]), _numbers(report["per_step_drafted"])
    pairs = [Round(*pair) for pair in zip(drafted, accepted, strict=True)]
    by_accepted = Counter(accepted)
    wrong = (
        [by_accepted[place] for place in range(len(counts.histogram))] != counts.histogram
        or len(accepted) != counts.num_rounds
        or sum(drafted) != counts.num_drafted
        or any(not each.num_accepted <= each.num_drafted <= counts.most_drafted for each in pairs)
    )
    if wrong:
        raise ValueError("steps and sums differ")
    return pairs


def _of_sglang(report: dict[str, Any], num_tokens: int | None) -> list[Round]:
    num_rounds, num_drafted = _number(report["spec_verify_ct"]), _number(report["spec_num_proposed_drafts"])
    if num_tokens is None and "completion_tokens" in report:
        num_tokens = _number(report["completion_tokens"])
    counts = _Report(
        histogram=_numbers(report["spec_correct_drafts_histogram"]),
        num_rounds=num_rounds,
        num_accepted=_number(report["spec_num_correct_drafts"]),
        num_drafted=num_drafted,
        most_drafted=-(-num_drafted // num_rounds) if num_rounds else 0,
    )
    counts.check(num_tokens)
    _check_mean(report["spec_accept_rate"], counts.num_accepted, num_drafted, 0.0)
    if num_tokens is not None:
        _check_mean(report["spec_accept_length"], num_tokens, num_rounds, 0.0)
    return counts.rounds()


def _check_mean(reported: Any, total: int, count: int, otherwise: float) -> None:
    """Raises ValueError unless `reported` is total / count; `otherwise` is its value without a count."""
    expected = total / count if count else otherwise
    if not math.isclose(float(reported), expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
        raise ValueError(f"a mean of {reported} is reported, its numbers give {expected}")


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**31:
        raise ValueError(f"no number of tokens: {value!r:.40}")
    return value


def _numbers(values: Any) -> list[int]:
    if not isinstance(values, list):
        raise TypeError("expected a list of numbers")
    return [_number(value) for value in values]
