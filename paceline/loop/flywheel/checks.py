"""Checks before training: too few or bad recorded answers, eval cases found in training data, a judge that is down."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from paceline.data.rows import Dropped
from paceline.errors import ConfigError, JudgeError, PromptError, refuse
from paceline.loop.evals.config import JudgeConfig
from paceline.loop.evals.leaks import leaking
from paceline.loop.evals.run import open_judge
from paceline.loop.evals.suite import Suite, suite_of
from paceline.loop.flywheel.config import TurnGates
from paceline.loop.store.folder import Store
from paceline.report.statistics import is_loop

UNUSABLE = (
    *("without a prompt", "of which the answer's tokens are not known", "of which the tokens are no ids"),
    "of another vocabulary",
    "with text that is not UTF-8",
)
"""Reasons for dropped rows of a store that mean bad recorded answers. Other reasons, such as duplicates, do not."""


def check_store(store: Store, left_out: Mapping[str, int], gates: TurnGates) -> dict[str, int]:
    """Checks the answers in a dataset store; returns the store's size, with the keys "rows" (training rows), and
    "longest_prompt", "longest_answer" and "longest" (prompt plus answer of one row), in tokens.

    Raises PromptError if there are too few answers to train on (`gates.least_rows`), or too many bad ones
    (`gates.most_bad`). A bad answer is empty, repeats itself, or has tokens that differ from its text. `left_out`:
    reason -> number of answers that were left out when the store was built. Those with a reason in UNUSABLE count as
    bad, too.
    """
    tokenizer = store.tokenizer()
    bad = Counter({reason: left_out[reason] for reason in UNUSABLE if left_out.get(reason)})
    total = bad.total()
    lengths: list[tuple[int, int]] = []
    num_learned = 0
    for side in ("train", "evals"):
        for row in store.rows(side):
            text, ids = (row["text"] or "").strip(), list(row["answer_ids"])
            total += 1
            if not text:
                bad["empty"] += 1
            elif is_loop(ids):
                bad["that only repeat themselves"] += 1
            elif not tokenizer.decode(ids).strip().startswith(text):
                bad["whose tokens are not their text"] += 1
            lengths.append((len(row["prompt_ids"]), len(ids)))
            num_learned += side == "train"
    listed = ", ".join(f"{number} {reason}" for reason, number in bad.most_common())
    refuse(
        PromptError,
        (
            bad.total() > gates.most_bad * total,
            f"{store.path} is no material to learn from: of {total} answers {listed}; take them out of what was "
            f"recorded, or allow more than {gates.most_bad:.0%} by gates.most_bad",
        ),
        (
            num_learned < gates.least_rows,
            f"{store.path} has {num_learned} answers to learn from: record more, {gates.least_rows} are needed "
            "(least_rows)",
        ),
    )
    prompts, answers = zip(*lengths, strict=True)
    longest = {"longest_prompt": max(prompts), "longest_answer": max(answers), "longest": max(map(sum, lengths))}
    return {"rows": num_learned, **longest}


def check_given(suite: Suite, stores: Iterable[Path], source: Path) -> None:
    """Checks that the user's eval suite has no questions from training data, as its scores would then mean nothing.
    Raises PromptError if one nearly equals a training prompt in the dataset stores `stores`. `source`: file of the
    suite, for the message."""
    for path in stores:
        if leaks := leaking(suite, Store.open(path)):
            raise PromptError(
                f"{len(leaks)} of {len(suite)} cases of {source} are what is trained on, or nearly so (such as "
                f"{leaks[0]}): "
                f"their scores would say nothing; leave them out with paceline evals make {source} --apart-from {path}"
            )


def apart(suite: Suite, stores: Iterable[Path], dropped: Dropped) -> Suite | None:
    """Removes eval cases that occur in training data: those whose questions nearly equal a training prompt in the
    dataset stores `stores`. Returns the suite of the other cases; None if no case remains. Counts the removed cases in
    `dropped`."""
    leaks = dict.fromkeys(name for path in stores for name in leaking(suite, Store.open(path)))
    for name in leaks:
        dropped.add("that models here were or will be trained on", name)
    clean = [case for case in suite if case.id not in leaks]
    return suite_of(suite.name, clean, suite.name) if clean else None


def check_cases(suite: Suite | None, gates: TurnGates, dropped: Dropped) -> Suite:
    """Checks that a suite has at least `gates.least_cases` cases, and returns it. Raises PromptError if it has fewer,
    or is None. `dropped`: counts of cases removed earlier, for the message."""
    number = len(suite) if suite else 0
    counts = f" ({dropped})" if dropped else ""
    if suite is None or number < gates.least_cases:
        raise PromptError(
            f"{number} cases are too few to judge a student by, {gates.least_cases} are needed "
            f"(gates.least_cases){counts}: record more, keep more of it aside (split.evals_share), or name a suite"
        )
    return suite


def check_judge(config: JudgeConfig) -> None:
    """Sends the judge a trivial comparison. Raises JudgeError if it is down or prefers the wrong answer, ConfigError
    without an address."""
    if config.url is None:
        raise ConfigError("these evals need a judge: give judge: {url: http://HOST:PORT}")
    try:
        with open_judge(config, "judge.url", 60.0) as judge:
            if judge.prefer("What is 2 + 2?", "2 + 2 is 4.", "Bananas are blue.") == 0.0:
                raise JudgeError(f"the judge {judge.model} prefers a wrong answer to a right one: choose another model")
    except ConnectionError as error:
        raise JudgeError(f"the judge cannot be asked: {error}") from error
