"""Write docs/explanation/landmarks.md, predictions compared with published figures: `python docs/make_landmarks.py`. A
test checks that it is current."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import landmarks
from landmarks import PUBLISHED, Served

TARGET = Path(__file__).parent / "explanation" / "landmarks.md"
CLOSE = 0.10
INTRODUCTION = """# Predictions and published figures

Compare what `paceline simulate` predicts with what others measured, misses included; made by `python docs/make_landmarks.py` from
`paceline/simulate/landmarks.json`, do not edit.

```sh
paceline simulate --model Qwen3.5-27B --hardware B200 --plain-rate 75 --acceptance 0.8
paceline simulate --model DeepSeek-V4-Pro --hardware B200 --batch 1,8,32,128 --acceptance 0.89 --block 16
python docs/make_landmarks.py            # every prediction below
```

The roofline counts no launches, no scheduling, no host. **Overhead** is one number for each system, milliseconds added to
every round; it is computed from the plain rate of one stream alone (`paceline simulate --plain-rate`), so no speed-up below
was fitted. *Needs*: the acceptance length that would bring the published speed-up, with the overhead. A star marks an
acceptance length that follows from an assumed chance, because we found none published: such a row's error
is mostly that of the assumption."""


def render() -> str:
    """The whole page."""
    return "\n\n".join(_parts()) + "\n"


def _parts() -> Iterator[str]:
    served = list(landmarks.served())
    yield INTRODUCTION
    yield _summary(served)
    head = (
        "system", "setting", "acceptance length", "published", "speed-up", "without overhead", "error", "with overhead",
        "error", "needs",
    )  # fmt: skip
    yield "## Served systems\n\n" + _table(head, [_served_row(each) for each in served])
    systems = [
        (each["name"], _overhead(served, each["name"]), each["source"], each["assumed"])
        for each in PUBLISHED["systems"]
    ]
    yield "What was published, and what is assumed:\n\n" + _table(
        ("system", "overhead ms", "source", "assumed"), systems
    )
    walkthrough = PUBLISHED["walkthrough"]
    rows = [
        (each.model, each.way, each.batch, f"{each.published:.2f}x", f"{each.predicted:.2f}x", each.best_draft_length,
         f"{each.error:+.1%}", each.quotation)
        for each in landmarks.walked()
    ]  # fmt: skip
    head = ("model", "drafter", "batch", "published", "predicted", "best drafts", "error", "in the essay's words")
    yield (
        f"## The walk-through\n\n{walkthrough['source']} With overhead: nothing, since no plain rate was published.\n\n"
        + _table(head, rows)
    )
    yield from _lengths()
    rows = [
        (a, f"{b:g}", f"{c:.1f}", f"{c / b - 1:+.0%}", f"{d:.1f}", f"{d / b - 1:+.0%}")
        for a, b, c, d in landmarks.experts()
    ]
    head = ("positions", "measured", "uniform", "error", "locality 0.255", "error")
    yield (
        f"## Distinct experts\n\n{PUBLISHED['experts']['source'].capitalize()}; the locality was fitted to these.\n\n"
        + _table(head, rows)
    )


def _summary(served: Sequence[Served]) -> str:
    mocked = [each for each in served if each.system == PUBLISHED["systems"][0]["name"]]
    known = [each for each in served if not each.is_assumed]
    close = sum(abs(each.error_with) <= CLOSE for each in known)
    bare = sum(abs(each.error_without) <= CLOSE for each in known)
    by_length = ", ".join(f"{each.tokens_per_round:g}: {each.within:.2f}x for {each.published:.2f}x" for each in mocked)
    assumed = [each for each in served if each.is_assumed]
    near = sum(abs(each.error_with) <= CLOSE for each in assumed)
    return (
        f"Where the acceptance length is known, {close} of {len(known)} speed-ups are within {CLOSE:.0%} with the "
        f"overhead, {bare} without; of {len(assumed)} with an assumed chance {near} are. The mocked 27B by acceptance "
        f"length ({by_length}) is within {CLOSE:.0%} throughout, if its drafts came token by token. One constant overhead "
        "is a simplification: the published step of acceptance length 4 is hardly longer than that of 2, that of 8 "
        "much longer: no constant says so."
    )


def _served_row(each: Served) -> tuple[Any, ...]:
    star = "*" if each.is_assumed else ""
    return (
        each.system, each.setting, f"{each.tokens_per_round:.2f}{star}", f"{each.rate:,.0f} tokens/s", f"{each.published:.2f}x",
        f"{each.without:.2f}x", f"{each.error_without:+.1%}", f"{each.within:.2f}x", f"{each.error_with:+.1%}",
        f"{each.needed:.2f}",
    )  # fmt: skip


def _overhead(served: Sequence[Served], name: str) -> str:
    return next(f"{each.overhead_ms:.2f}" for each in served if each.system == name)


def _lengths() -> Iterator[str]:
    table = PUBLISHED["best_lengths"]
    lengths_by_drafter = list(landmarks.best_lengths())
    rows = [
        (each.drafter, what, *lengths)
        for each in lengths_by_drafter
        for what, lengths in (("published", each.published), ("predicted", each.predicted))
    ]
    equal = ", ".join(f"{each.drafter} {each.num_equal} of {len(each.streams)}" for each in lengths_by_drafter)
    text = f"{table['model']}, by streams: {table['source']}. Assumed: {table['assumed']}. Equal: {equal}."
    yield (f"## Best draft lengths\n\n{text}\n\n" + _table(("drafter", "", *map(str, table["streams"])), rows))


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
