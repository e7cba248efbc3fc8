"""The verification rules by name; the engine looks one up once and calls any of them alike (`verify/rule.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.errors import ConfigError
from paceline.verify import block, greedy, match, rejection
from paceline.verify.rule import RowVerdict, Rule, Uniforms

if TYPE_CHECKING:
    from torch import Tensor


def auto(draft_tokens: list[int], draft_probs_KV: Tensor | None, target_probs_JV: Tensor, uniforms: Uniforms) -> RowVerdict:
    """Certain drafts -> match (the same text as without a drafter), sampled drafts -> block (the most accepted)."""
    rule = match.verify if draft_probs_KV is None else block.verify
    return rule(draft_tokens, draft_probs_KV, target_probs_JV, uniforms)


def rules() -> dict[str, Rule]:
    """Every rule that keeps the target's distribution (greedy: its most likely tokens)."""
    return {"auto": auto, "greedy": greedy.verify, "match": match.verify, "rejection": rejection.verify, "block": block.verify}


def rule_named(name: str) -> Rule:
    """Raises ConfigError for a name that is not one of `rules()`."""
    try:
        return rules()[name]
    except KeyError:
        raise ConfigError(f"no verification rule {name!r}: use one of {', '.join(rules())}") from None
