"""Customers of one server (requests with one x-paceline-tag), and which of them deserve a drafter of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.data.tags import UNTAGGED
from paceline.train.plan.expected_acceptance import NUMBERS

HORIZON_DAYS = 30.0
"""Days within which a customer's drafter must save as much machine time as its training takes."""
RULE = (
    f"Deserved: trained on {NUMBERS[0]} answers at least, faster than now at the lower end of the interval, and paid "
    f"off within {HORIZON_DAYS:g} days at this load."
)


@dataclass(frozen=True, slots=True)
class Customer:
    """Prediction for a drafter trained for one customer: on the answers to the requests with one x-paceline-tag, and
    used only for such requests."""

    tag: str
    answers: int
    traffic: float
    """This customer's share of all generated tokens."""
    tokens_per_round: float
    """Current acceptance length."""
    gain: float
    """Tokens per second relative to the current speed."""
    gain_interval: tuple[float, float]
    saved: float
    """Share of the decoding time of all traffic that the drafter saves."""
    hours: float
    """Hours of training, on the answers that exist."""
    cost: float | None
    """Price of the training; None without prices."""
    pays_back_days: float | None
    """Days until the serving hours that the drafter saves are worth as much as its training, by prices or, without
    prices, by numbers of GPUs; None if it saves nothing."""

    @property
    def objection(self) -> str:
        """Reason not to train a drafter for this customer alone; empty if such a training pays off."""
        if self.tag == UNTAGGED:
            return "no customer"
        if self.answers < NUMBERS[0]:
            return f"{self.answers:,} answers are too few"
        if self.gain_interval[0] <= 1:
            return f"may be no faster ({self.gain_interval[0]:.2f}x)"
        days = self.pays_back_days
        return "" if days is not None and days <= HORIZON_DAYS else f"does not pay off in {HORIZON_DAYS:g} days"


def deserving(customers: Sequence[Customer]) -> str:
    """Returns a sentence for the user that names the customers for whom a drafter of their own pays off. If it pays off
    for no customer, the sentence gives the reason for the one who would save most. `customers`: ordered by savings, the
    largest first. Returns an empty text if no requests have a tag."""
    customers = [each for each in customers if each.tag != UNTAGGED]
    if not customers:
        return ""
    chosen = [each.tag for each in customers if not each.objection]
    if chosen:
        verb = "deserves a drafter of its own" if len(chosen) == 1 else "deserve a drafter of their own"
        return f"{len(chosen)} of {len(customers)} customers {verb}: {', '.join(chosen)}."
    first = f"{customers[0].tag}, which would save most: {customers[0].objection}"
    return f"None of {len(customers)} customers deserves a drafter of its own ({first})."
