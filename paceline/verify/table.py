"""The verification rules by name. A new rule is a function and one line here."""

from __future__ import annotations

from paceline.verify import lossless
from paceline.verify.rule import Rule

_RULES = (
    Rule("auto", lossless.auto, lossless=True, needs_probs=True),
    Rule("match", lossless.match, lossless=True, needs_probs=False),
    Rule("rejection", lossless.rejection, lossless=True, needs_probs=True),
    Rule("block", lossless.block, lossless=True, needs_probs=True),
)
RULES = {rule.name: rule for rule in _RULES}
"""Those of `paceline.config.RULES`."""
