"""Default assumptions of predictions.

    CONTEXT, STREAMS, ACCEPTANCE      # the defaults of `simulate`, `simulate-serving`, `advise`, `train --dry-run`
    assumed(context=320, streams=8)   # "assumed: 320 tokens of context (...), ..."

They are the same for every command.
"""

from __future__ import annotations

CONTEXT = 4096
"""Tokens in the cache of each sequence that are assumed by default."""
STREAMS = 1
"""Number of sequences that decode together, assumed by default."""
ACCEPTANCE = "0.8"
"""Chance that a draft is accepted if all earlier ones are, assumed by default."""


def assumed(context: float = CONTEXT, streams: str | int = STREAMS, acceptance: str = ACCEPTANCE) -> str:
    """Returns a sentence that lists a prediction's assumptions. If a value differs from its default, the sentence also
    names the default. `context`: cached tokens per sequence; `streams`: number of sequences that decode together;
    `acceptance`: a text such as "0.8"."""
    parts = [
        _part(f"{context:,.0f} tokens of context", context != CONTEXT, f"{CONTEXT:,}"),
        _part(
            f"{streams} {'stream' if str(streams) == '1' else 'streams'}", str(streams) != str(STREAMS), str(STREAMS)
        ),
        _part(f"acceptance {acceptance}", acceptance != ACCEPTANCE, ACCEPTANCE),
    ]
    return "assumed: " + ", ".join(parts)


def _part(text: str, differs: bool, default: str) -> str:
    return f"{text} (differs from the usual {default})" if differs else text
