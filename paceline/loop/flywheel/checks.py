"""What stops a turn before anything is trained: a store that is empty or poisoned, evals that leak, a judge that is down."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.config import read_api_keys
from paceline.data.rows import Dropped
from paceline.errors import ConfigError, JudgeError, PromptError, refuse
from paceline.loop.audit.endpoint import served_name
from paceline.loop.evals.config import JudgeConfig
from paceline.loop.evals.judge import Judge
from paceline.loop.evals.leaks import leaking
from paceline.loop.evals.run import JUDGE_KEY
from paceline.loop.evals.suite import Suite, suite_of
from paceline.loop.flywheel.config import TurnGates
from paceline.loop.store.folder import Store
from paceline.net.streaming import Client
from paceline.report.statistics import is_loop

UNUSABLE = ("without a prompt", "of which the answer's tokens are not known", "of another vocabulary")
"""Reasons for which a store leaves rows out that are the rows' own fault; copies are none."""


@dataclass(frozen=True, slots=True)
class Contents:
    """What a turn needs to know of its store."""

    rows: int
    """To learn from."""
    longest_prompt: int
    """Of all rows, as the longest answer and both together. All in tokens."""
    longest_answer: int
    longest: int


def check_store(store: Store, left_out: Mapping[str, int], gates: TurnGates) -> Contents:
    """Raises PromptError on too few rows, and on too many that are of no use, with what they are."""
    tokenizer, bad, total = store.tokenizer(), Counter[str](), 0
    for reason in UNUSABLE:
        if number := left_out.get(reason, 0):
            bad[reason] += number
            total += number
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
            f"{store.path} is no material to learn from: of {total} answers {listed}; take them out of what was recorded, or "
            f"allow more than {gates.most_bad:.0%} by gates.most_bad",
        ),
        (
            num_learned < gates.least_rows,
            f"{store.path} has {num_learned} answers to learn from: record more, {gates.least_rows} are needed (least_rows)",
        ),
    )
    return Contents(
        num_learned,
        max(prompt for prompt, _ in lengths),
        max(answer for _, answer in lengths),
        max(map(sum, lengths)),
    )


def check_given(suite: Suite, stores: Iterable[Path], source: Path) -> None:
    """Raises PromptError where a suite of the user's own asks what a model here was, or will be, trained on."""
    for path in stores:
        if found := leaking(suite, Store.open(path)):
            raise PromptError(
                f"{len(found)} of {len(suite)} cases of {source} are what is trained on, or nearly so (such as {found[0]}): "
                f"their scores would say nothing; leave them out with paceline evals make {source} --apart-from {path}"
            )


def apart(suite: Suite, stores: Iterable[Path], dropped: Dropped) -> Suite | None:
    """A suite without the cases that any of these stores trains on, which are counted; None when none is left."""
    found: set[str] = set()
    for path in stores:
        for name in leaking(suite, Store.open(path)):
            if name not in found:
                dropped.add("that models here were or will be trained on", name)
            found.add(name)
    left = [case for case in suite if case.id not in found]
    return suite_of(suite.name, left, suite.name) if left else None


def check_cases(suite: Suite | None, gates: TurnGates, dropped: Dropped) -> Suite:
    """Raises PromptError when there are too few."""
    number = len(suite) if suite else 0
    told = f" ({dropped})" if dropped else ""
    if suite is None or number < gates.least_cases:
        raise PromptError(
            f"{number} cases are too few to judge a student by, {gates.least_cases} are needed (gates.least_cases){told}: "
            "record more, keep more of it aside (split.evals_share), or name a suite"
        )
    return suite


def check_judge(config: JudgeConfig) -> None:
    """Ask one question whose answer is plain. Raises JudgeError where the judge is down, or says nothing of use."""
    if config.url is None:
        raise ConfigError("these evals need a judge: give judge: {url: http://HOST:PORT}")
    key = next(iter(read_api_keys((), config.key_file, JUDGE_KEY)), None)
    with contextlib.closing(Client(config.url, key, 60.0, "judge.url")) as client:
        judge = Judge(client, _name(client, config))
        if judge.prefer("What is 2 + 2?", "2 + 2 is 4.", "Bananas are blue.") == 0.0:
            raise JudgeError(f"the judge {judge.model} prefers a wrong answer to a right one: choose another model")


def _name(client: Client, config: JudgeConfig) -> str:
    try:
        return served_name(client, config.served_name)
    except ConnectionError as error:
        raise JudgeError(f"the judge cannot be asked: {error}") from error
