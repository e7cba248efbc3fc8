"""Token times made up for tests of the timing page and picture."""

from __future__ import annotations

import re

from paceline.bench.pages.timing import TimedAnswer, TimedToken, Timing

STORY = (
    "To find out how much she earns in a day, we first count the loaves.\n\nIn the morning she sells 24 loaves, in the "
    "afternoon half as many: 24 / 2 = 12. That makes 24 + 12 = 36 loaves a day.\n\nEach loaf costs 3 dollars, so she "
    "earns "
    "36 × 3 = 108 dollars."
)
HOSTILE = (
    "</script </script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\"> ]]> "
    "&amp; <!-- <script \u2028 \x07 {/* TIMING */} sha256-SCRIPT"
)
ACCEPTED = (0, 3, 1, 7, 2, 0, 5)
"""Drafts kept in each round, over and over."""


def story(text: str = STORY, prompt: str = "How much does the baker earn?") -> Timing:
    """Plain decoding at 25 ms a token; rounds of 35 ms that keep ACCEPTED drafts."""
    pieces = re.findall(r"\s?\S{1,6}|\s", text)
    off = [TimedToken(piece, 0.08 + 0.025 * place, place, False) for place, piece in enumerate(pieces)]
    on, number = [TimedToken(pieces[0], 0.09, 0, False)], 0
    while len(on) < len(pieces):
        number += 1
        left = pieces[len(on) :][: ACCEPTED[number % len(ACCEPTED)] + 1]
        on += [
            TimedToken(piece, 0.09 + 0.035 * number, number, place < len(left) - 1) for place, piece in enumerate(left)
        ]
    return Timing(
        prompt=prompt,
        model="smol",
        device="cpu",
        dtype="bfloat16",
        machine="a machine",
        temperature=0.0,
        off=TimedAnswer("none", tuple(off)),
        on=TimedAnswer("default", tuple(on)),
        first_difference=None,
    )
