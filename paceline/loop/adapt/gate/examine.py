"""Judges a candidate drafter in a folder: loads it, scores it and the incumbent (the drafter that serves now) on stored
requests, and compares them.

    paceline adapt gate runs/mine/drafter --traces traces --cluster tickets

A faulty candidate (half-written, for another target, non-finite weights) gives a refusal with a reason, not an error.
Wrong options of the gate raise an error.

A candidate may win on the clusters (groups of similar requests) whose acceptance fell, but lose too much on one of
several such clusters or on other traffic. Then blends of its weights with the incumbent's (`draft/formats/blend.py`)
are written next to it and judged; the first that passes gives the verdict."""

from __future__ import annotations

import math
import zlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from paceline.config import EngineConfig
from paceline.data.answers import AnswerShards
from paceline.draft.base import Drafter
from paceline.draft.formats.blend import blended
from paceline.draft.registry import checkpoint_of, folder_of
from paceline.engine.llm import LLM
from paceline.errors import ConfigError, ModelNotFoundError, PacelineError
from paceline.hub import resolve
from paceline.loop.adapt.config import CandidateConfig
from paceline.loop.adapt.gate.gate import (
    Pairs,
    RoundTimes,
    Verdict,
    compare,
    judge,
    lost_elsewhere,
    one_a_prompt,
    too_few,
    worst_of,
)
from paceline.loop.adapt.gate.score import Scored, score
from paceline.loop.adapt.traffic.stored import Request, read_requests
from paceline.model.adapter import base_of
from paceline.model.checkpoint import read_json
from paceline.model.measure import measure_passes
from paceline.report.statistics import Rounds
from paceline.report.tables import SILENT, Progress
from paceline.types import SamplingParams

HELD_OUT_OF = 4
"""One in this many prompts, chosen by hash, is held out from training."""
BATCH = 8
TURNS, TIMED = 4, 7
"""Turns per drafter when drafting is timed, and rounds per turn; the fastest round counts."""
LEAST_DIFFERENCE = 0.1
"""Relative difference below which two drafting times count as equal; a busy server disturbs single rounds by as
much."""


def is_held_out(prompt: str) -> bool:
    return zlib.crc32(prompt.encode()) % HELD_OUT_OF == 0


def examine(
    candidate: Path, engine: EngineConfig, traces: Path, config: CandidateConfig, progress: Progress = SILENT
) -> Verdict:
    """Decides whether the drafter in the folder `candidate` may replace the incumbent (the drafter that serves now).
    Compares the tokens/s that both would have had on the requests stored in the folder `traces`.

    The candidate must be faster on the clusters whose acceptance fell (`config.clusters`), taken together. It must not
    lose too much on any single cluster, or on out-of-domain answers. If it is faster but loses too much, blends are
    judged in its place: averages of its weights and the incumbent's, written next to it. `config.shares` lists the
    weight of the candidate in each blend.

    Raises ConfigError if `traces` has no usable requests, or none with a cluster or tag that `config` names. Raises the
    errors of loading the target `engine.model` and the incumbent."""
    usual, source = usual_settings(engine.model, config.temperature)
    requests, left_out = read_requests(
        traces, since=config.since, usual=usual, tags=config.tags, tracked=config.tracked
    )
    if config.held_out_only:
        requests = [request for request in requests if is_held_out(request.prompt)]
    if not requests:
        raise ConfigError(
            f"there are no requests in {traces} to judge by ({dict(left_out)}): keep traces, or move --since back"
        )
    sets = _sets(requests, config)
    if refused := too_few(len(sets["drifted"]), config):  # known before a model is loaded
        return refused
    longest = max(len(request.prompt_ids) + len(request.answer_ids) for chosen in sets.values() for request in chosen)
    llm = LLM.of(replace(engine, drafter="none", speculate="full", max_batch=BATCH, max_len=longest + 1))
    progress.loaded(llm)
    verdict = _Comparison(llm, sets, config, progress).verdict(candidate, engine.model)
    number = sum(not request.knows_temperature for chosen in sets.values() for request in chosen)
    if not number:
        return verdict
    settings = ", ".join(f"{name} {value:g}" for name, value in usual.items())
    return replace(
        verdict, reason=f"{verdict.reason}; {number} requests named no temperature: judged at {settings} ({source})"
    )


def usual_settings(model: str, temperature: float | None) -> tuple[dict[str, float], str]:
    """Finds the sampling settings to assume for requests whose trace has no temperature. Returns (settings by name,
    text that names their source). If `temperature` is given, it is the only setting. Otherwise temperature, top_p and
    top_k come from the target's generation_config.json, as in vLLM and SGLang; a temperature that is missing there is
    1."""
    if temperature is not None:
        return {"temperature": temperature}, "as given"
    file = base_of(resolve(model)) / "generation_config.json"
    raw = read_json(file) if file.is_file() else {}
    named = {name: raw[name] for name in ("temperature", "top_p", "top_k") if type(raw.get(name)) in (int, float)}
    return {"temperature": 1.0, **named}, file.name if named else "the servers' default"


class _Comparison:
    """Compares candidates with the incumbent, whose figures are computed once per request set."""

    def __init__(self, llm: LLM, sets: dict[str, list[Request]], config: CandidateConfig, progress: Progress) -> None:
        self._llm, self._sets, self._config, self._progress = llm, sets, config, progress
        self._incumbent = llm.make_drafter(config.incumbent)
        self._figures: dict[str, list[Rounds]] = {}

    def verdict(self, candidate: Path, target_name: str) -> Verdict:
        """Judge the candidate. If it loses too much on other traffic, judge blends (its weights averaged with the
        incumbent's) with less and less of the candidate, until a blend does not lose too much."""
        reasons, verdict = list[str](), Verdict(False, "")
        for share in sorted(self._config.shares, reverse=True):
            verdict = self._verdict_at(candidate, share, target_name, worst_of(verdict.gains, self._config))
            prefix = "" if share == 1.0 else f"{share:.0%} of the way from {self._config.incumbent}: "
            reasons.append(prefix + verdict.reason)
            if not verdict.loses:
                break
            self._progress.say(reasons[-1])
        return replace(verdict, reason="; ".join(reasons))

    def _verdict_at(self, candidate: Path, share: float, target_name: str, lost: str | None) -> Verdict:
        """Judge the candidate or, for share < 1, a blend with this share of its weights, written next to it. `lost`:
        request set on which a larger share lost too much; it is scored first, which often spares the others."""
        folder, before = candidate, self._config.incumbent
        if share < 1:
            folder = candidate.with_name(f"{candidate.name}-{100 * share:g}")
            try:
                incumbent = folder_of(before, target_name) if before == "default" else checkpoint_of(before)
                blended(incumbent, candidate, share, folder)
            except PacelineError as error:
                return Verdict(False, str(error))
        drafter = read_candidate(folder, self._llm)
        if isinstance(drafter, str):
            return Verdict(False, drafter)
        try:
            return replace(self._compared(drafter, lost), drafter=str(folder), share=share)
        except ConfigError as error:  # requests that cannot be scored with such a drafter
            return Verdict(False, str(error))

    def _compared(self, drafter: Drafter, lost: str | None) -> Verdict:
        llm, incumbent = self._llm, self._incumbent
        passes = measure_passes(llm.target, 1 + max(incumbent.num_drafted, drafter.num_drafted))
        times = RoundTimes(passes, *alike(*draft_seconds(llm, [incumbent, drafter])))
        pairs: dict[str, Pairs] = {}
        for name in sorted(self._sets, key=lambda name: name != lost):
            chosen = self._sets[name]
            self._progress.say(f"{len(chosen)} requests of {name}")
            if name not in self._figures:
                self._figures[name] = _figures(score(llm, incumbent, chosen))
            pairs[name] = Pairs(self._figures[name], _figures(score(llm, drafter, chosen)))
            if name == lost:
                gain = compare(pairs[name], times, num_sets=len(self._sets) - 1)
                if refused := lost_elsewhere({name: gain}, self._config):
                    return refused
        drifted, ood = pairs.pop("drifted"), pairs.pop("ood", None)
        return judge(drifted, pairs, times, ood, self._config)


def read_candidate(folder: Path, llm: LLM) -> Drafter | str:
    """Loads the drafter in `folder` and binds it to the target of `llm`. Returns the drafter, or an error message if it
    cannot be used."""
    try:
        drafter = llm.make_drafter(str(folder))
        drafter.bind(llm.target)
    except (PacelineError, OSError) as error:
        problem = "it is not there" if isinstance(error, ModelNotFoundError) else "it cannot be used"
        return f"{problem}: {error}"
    return drafter


def _sets(requests: Sequence[Request], config: CandidateConfig) -> dict[str, list[Request]]:
    """Splits requests into sets: "drifted", one per other cluster, and "ood". With tags, all requests are "drifted". If
    acceptance fell in several clusters, each is also a set of its own, on which a candidate must not lose."""
    by_cluster: dict[str, list[Request]] = defaultdict(list)
    for request in sorted(requests, key=lambda request: request.cluster):
        by_cluster["tagged" if config.tags else request.cluster].append(request)
    most = max(by_cluster, key=lambda name: sum(len(request.answer_ids) for request in by_cluster[name]))
    fell = [name for name in dict.fromkeys(config.clusters or (most,)) if name in by_cluster]
    missing = set(config.clusters) - set(fell)
    if missing and not (fell and config.held_out_only):  # one of several may have no held-out prompt
        raise ConfigError(f"there are no requests of cluster {min(missing)!r}: there are {', '.join(by_cluster)}")
    sets = {"drifted": one_a_prompt([each for name in fell for each in by_cluster[name]], config.requests)}
    if len(fell) == 1:
        del by_cluster[fell[0]]
    for name, of_cluster in by_cluster.items():
        if chosen := one_a_prompt(of_cluster, config.requests):
            sets[f"cluster {name}"] = chosen
    if config.ood:
        sets["ood"] = one_a_prompt(_answers(config.ood), config.requests)
    return sets


def _answers(folders: Sequence[Path]) -> list[Request]:
    """Answers of `paceline regenerate` as greedy requests; those at other temperatures are left out."""
    requests = []
    for answer in (answer for folder in folders for answer in AnswerShards(folder)):
        if answer.temperature == 0.0 and answer.answer_ids:
            key, params = f"{answer.key}#{answer.turn}", SamplingParams(max_tokens=len(answer.answer_ids) + 1)
            requests.append(
                Request(key, "ood", 0, answer.prompt_ids, answer.answer_ids, params, 0, answer.finish_reason)
            )
    return requests


def _figures(scored: Sequence[Scored]) -> list[Rounds]:
    return [result.figures for result in scored]


def draft_seconds(llm: LLM, drafters: Sequence[Drafter]) -> list[float]:
    """Measures how long each drafter takes to draft for one round at batch size 1. Returns, for each drafter, the
    seconds of its fastest round; 0 for a drafter that drafts no tokens. Drafters are timed in turns, so that machine
    noise affects all equally."""
    best = [math.inf] * len(drafters)
    for _ in range(TURNS):
        for place, drafter in enumerate(drafters):
            best[place] = min(best[place], _fastest_draft(llm, drafter))
    return [seconds if seconds < math.inf else 0.0 for seconds in best]


def _fastest_draft(llm: LLM, drafter: Drafter) -> float:
    if not drafter.num_drafted:
        return math.inf
    llm.use_drafter(drafter)
    length = llm.target.cache.max_len // 2
    llm.engine.add([1] * length, SamplingParams(max_tokens=length, ignore_eos=True))
    drafting = []
    for _ in range(TIMED):
        llm.engine.step()
        drafting += [stats.draft_s for stats in llm.engine.rounds if any(stats.num_drafted_B)]
    llm.renew()
    return min(drafting, default=math.inf)


def alike(one_s: float, other_s: float) -> tuple[float, float]:
    """Removes measurement noise from a comparison of two drafting times, in seconds per round. If they differ by at
    most 10% of their mean, returns the mean for both; else returns both unchanged."""
    mean = (one_s + other_s) / 2
    return (mean, mean) if abs(one_s - other_s) <= LEAST_DIFFERENCE * mean else (one_s, other_s)
