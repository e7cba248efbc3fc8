"""Advises whether to train a drafter: its speed-up, the answers and hours it needs, and when it has paid for itself.

    advice = advise(CostsConfig(model="Qwen3.5-27B", hardware="2x H100"), AdviceConfig(price_per_hour=8.0), Seen())
    advice.verdict, advice.sentences, advice.steps

The current speed comes from traces, from a server's metrics, or is that of plain decoding. A drafter's acceptance
length comes from measured learning curves (`curves.json` for mixed traffic, `advice.json` for one application), its
speed-up from the roofline and `training_plan.py`, without reading weights. For a target without its own curve, another
target's curve is used, and the advice mentions it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.config import EngineConfig
from paceline.errors import ConfigError, needing, reraised
from paceline.simulate.answer import DEFAULT_MODEL, Setup, set_up
from paceline.simulate.assumed import assumed
from paceline.simulate.config import AdviceConfig, CostsConfig
from paceline.simulate.costs.roofline import memory_need
from paceline.simulate.costs.rounds import FractionDrafter, MeasuredCosts, RooflineCosts, StepCosts
from paceline.simulate.server_logs import Seen as ServerSeen
from paceline.simulate.speedup import Acceptance, Load, chance_for, constant, from_rounds, from_survival, predict
from paceline.train.config import AnswerConfig, PromptsConfig, TrainConfig
from paceline.train.plan.expected_acceptance import ADVICE, CAUTION, CURVE_TARGET, ENOUGH, NUMBERS, interpolated
from paceline.train.plan.target_facts import machine_of
from paceline.train.plan.training_plan import ANSWER_SHARE, Plan, make_plan

WORTH = 1.10
"""Smallest gain over the current speed that is worth training and maintaining a drafter."""
CEILING = (
    "All rates are a ceiling (the machine's full rates, nothing lost): {rate} tokens/s plainly is more than servers "
    "reach. "
    "Give --plain-rate, the tokens/s of one stream that you see today (or --server-log), and the answer is about your "
    "server."
)
SHORT_CEILING = "(A ceiling: give --plain-rate, one measured rate.)"
LEAST_ROUNDS = 200


@dataclass(frozen=True, slots=True)
class Seen:
    """Measurements of a server's current traffic: acceptance, answers and concurrent streams, as far as they are
    known."""

    source: str = ""
    """Description of the measurements; empty without measurements."""
    acceptance: Acceptance | None = None
    """None if nothing was drafted."""
    tokens_per_round: float = 1.0
    answers: int | None = None
    answer_tokens: float | None = None
    streams: int | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """Predicted acceptance length, speed and training time of a drafter that is trained on `answers` answers."""

    answers: int
    tokens_per_round: float
    speedup: float
    """Relative to plain decoding."""
    gain: float
    """Tokens per second relative to the current speed; 1.5 means 50% more."""
    tokens_per_s: float
    hours: float
    """Hours of training, including the hours of generating answers that do not exist yet."""
    cost: float | None = None
    saved_per_hour: float | None = None
    """Money saved per hour at this load."""
    pays_back_days: float | None = None
    is_beyond: bool = False
    """True if the training is larger than any on the measured curve; then the curve's last value is used."""


@dataclass(frozen=True, slots=True)
class Advice:
    """The decision whether to train a drafter for a server, and the figures behind it."""

    verdict: str
    """The decision: train, collect (more answers first), or no."""
    sentences: list[str]
    title: str
    now: dict[str, float]
    """Current speed: tokens_per_round, speedup, tokens_per_s, plain_tokens_per_s, streams."""
    steps: list[Step]
    chosen: Step
    ideal_speedup: float
    """Speed-up if every draft token were accepted."""
    machine: str
    """The machine of the training."""
    basis: list[str] = field(default_factory=list)
    """Sentences about assumptions, and about data of other targets or machines that were used."""
    is_ceiling: bool = False
    """True if the rates are the roofline's: the machine's full rates, without overhead."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def advise(costs: CostsConfig, config: AdviceConfig, seen: Seen) -> Advice:
    """Returns the advice whether to train a drafter, for a server (`costs`) and its traffic (`seen`). Raises
    PacelineError."""
    streams = config.streams or seen.streams or 1
    load = Load(streams, config.context)
    setup = set_up(costs, [load])
    tokens = config.answer_tokens or round(seen.answer_tokens or 256)
    has_answers = bool(seen.answers or config.answers)
    known = config.answers or seen.answers
    numbers: list[int] = sorted({*NUMBERS, *([known] if known and known >= NUMBERS[0] // 10 else [])})
    model = costs.model or (setup.shape.name if setup.shape else DEFAULT_MODEL)
    device = config.train_on or _device(costs)
    plans = [_plan(model, number, tokens, device) for number in numbers]
    now = _now(setup, seen, load)
    steps = [
        _step(setup, plan, number, config, now, load, has_answers) for number, plan in zip(numbers, plans, strict=True)
    ]
    most = max(step.gain for step in steps)
    chosen = next(step for step in steps if step.gain - 1 >= ENOUGH * (most - 1))
    last = plans[-1]
    ideal, _ = _drafter_speed(setup, last, float(last.sizes.block_size), load)
    verdict, sentences = _decide(now, chosen, known, ideal, config, _guess(last))
    is_ceiling = setup.kind == "roofline" and setup.overhead is None
    if is_ceiling:
        sentences[-1:] = [*sentences[-1:], CEILING.format(rate=f"{now['plain_tokens_per_s']:,.0f}")]
        sentences[0] = f"{sentences[0]} {SHORT_CEILING}"
    basis = [
        *_basis(config, last, seen, has_answers, device),
        *_replicas(setup, load, now),
        *setup.warnings,
        *setup.limits,
    ]
    acceptance = f"of {chosen.tokens_per_round:.2f} tokens a round, as learned"
    basis.insert(0, assumed(config.context, f"{now['streams']:.0f}", acceptance))
    return Advice(verdict, sentences, setup.title, now, steps, chosen, ideal, last.machine, basis, is_ceiling)


def _replicas(setup: Setup, load: Load, now: dict[str, float]) -> list[str]:
    """Returns a sentence on plain decoding with one copy of the model per GPU, if one GPU can hold it."""
    costs, deployment = setup.bare or setup.costs, setup.deployment
    if not isinstance(costs, RooflineCosts) or deployment is None or deployment.num_gpus == 1:
        return []
    alone = replace(deployment, num_gpus=1)
    batch = -(-load.batch // deployment.num_gpus)
    if not memory_need(costs.shape, alone, batch, load.context).fits:
        return []
    rate = load.batch / replace(costs, deployment=alone).round_s(batch, 0, load.context)
    return [
        f"Replicas: a copy of the model on each of {min(deployment.num_gpus, load.batch)} GPUs would write {rate:,.0f} "
        f"tokens/s plainly, {now['plain_tokens_per_s']:,.0f} are those of one copy over all {deployment.num_gpus}."
    ]


def _device(costs: CostsConfig) -> str | None:
    """Returns the machine in the format of --device-name."""
    if costs.hardware in (None, "this", "cpu"):
        return None
    return costs.hardware if costs.gpus == 1 else f"{costs.gpus}x {costs.hardware}"


def _plan(model: str, answers: int, answer_tokens: int, device: str | None) -> Plan:
    longest = max(16, round(answer_tokens / ANSWER_SHARE))
    config = TrainConfig(
        target=EngineConfig(model=model),
        asked=PromptsConfig(self_written=answers),
        answering=AnswerConfig(max_tokens=longest),
        max_len=longest + 1024,
    )
    return make_plan(config, device)


def _now(setup: Setup, seen: Seen, load: Load) -> dict[str, float]:
    """Returns the current speed: with the drafter that was measured, else of plain decoding."""
    plain = load.batch / setup.costs.round_s(load.batch, 0, load.context)
    speedup = 1.0
    if seen.acceptance and seen.tokens_per_round > 1:
        most = min(max(seen.acceptance.depth, 1), 1024)
        speedup = predict(setup.costs, seen.acceptance, replace(load, max_draft=most)).speedup
    rates = {"streams": float(load.batch), "plain_tokens_per_s": plain, "tokens_per_s": plain * speedup}
    return {**rates, "speedup": speedup, "tokens_per_round": seen.tokens_per_round}


def _drafter_speed(setup: Setup, plan: Plan, tokens_per_round: float, load: Load) -> tuple[float, float]:
    """Returns (speed-up, tokens/s) with a drafter of the plan's shape, for the `tokens_per_round` of full blocks."""
    drafts = plan.sizes.block_size - 1
    costs = _with_drafter(setup.costs, FractionDrafter(plan.share_of_pass, plan.sizes.block_size))
    acceptance = constant(chance_for(min(tokens_per_round, drafts + 1.0), drafts))
    prediction = predict(costs, acceptance, replace(load, max_draft=drafts))
    assert prediction.tokens_per_s is not None
    return prediction.speedup, prediction.tokens_per_s


def _with_drafter(costs: StepCosts, drafter: FractionDrafter) -> StepCosts:
    if isinstance(costs, MeasuredCosts):
        return replace(costs, drafter=drafter, draft=None)
    assert isinstance(costs, RooflineCosts)
    return replace(costs, drafter=drafter)


def _step(
    setup: Setup, plan: Plan, answers: int, config: AdviceConfig, now: dict[str, float], load: Load, has_answers: bool
) -> Step:
    tokens, is_beyond = learned(answers, plan, config.traffic, now["tokens_per_round"])
    speedup, rate = _drafter_speed(setup, plan, tokens, load)
    hours = plan.hours["all"] - (plan.hours["answers"] if has_answers else 0.0)
    gain = rate / now["tokens_per_s"]
    step = Step(answers, tokens, speedup, gain, rate, hours, is_beyond=is_beyond)
    if config.price_per_hour is None:
        return step
    number = setup.deployment.num_gpus if setup.deployment else 1
    each_hour = config.train_price_per_hour or config.price_per_hour / number * _number(plan.machine)
    saved = config.price_per_hour * (1 - 1 / gain)
    cost = hours * each_hour
    days = cost / (saved * config.busy_hours) if saved > 0 else None
    return replace(step, cost=cost, saved_per_hour=saved, pays_back_days=days)


def _number(machine: str) -> int:
    head, times, _ = machine.partition(" x ")
    return int(head) if times and head.isdecimal() else 1


def learned(answers: int, plan: Plan, traffic: str, now: float) -> tuple[float, bool]:
    """Returns (expected acceptance length of a drafter trained on this many answers, True if these are more than the
    measured learning curve covers). With `traffic` "mixed", both are read from `plan`, the plan of that training. Other
    traffic is that of a single application, which has a learning curve of its own; below its first point the value goes
    linearly to `now`, the current acceptance length, at 0 answers."""
    assert plan.expected is not None, "only drafters of chains have none"
    if traffic == "mixed":
        return plan.expected["tokens_per_round"], plan.expected["is_beyond_the_curve"]
    answers = answers // (1 if plan.expected["is_own"] else CAUTION)
    points: Sequence[Sequence[float]] = ADVICE["application"]["points"]
    (fewest, first), (most, last) = points[0], points[-1]
    if answers >= most:
        return last, answers > most
    if answers <= fewest:  # fewer were not measured: in proportion, from what there is now
        return now + max(first - now, 0.0) * answers / fewest, False
    return interpolated(points, answers), False


def _decide(
    now: dict[str, float], chosen: Step, known: int | None, ideal: float, config: AdviceConfig, guess: str = ""
) -> tuple[str, list[str]]:
    brings = (
        f"a drafter of your own, after {chosen.answers:,} answers and {_hours(chosen.hours)} of training: "
        f"{'at least' if chosen.is_beyond else 'about'} {chosen.tokens_per_round:.1f} tokens a round, "
        f"{chosen.speedup:.2f}x plain decoding, {chosen.gain:.2f}x what is served now{guess}"
    )
    money = []
    if chosen.cost is not None and chosen.saved_per_hour is not None:
        paid = "no break-even"
        if chosen.pays_back_days is not None:
            paid = f"break-even after {chosen.pays_back_days * config.busy_hours:.1f} hours at this load"
        money = [
            f"It costs ${chosen.cost:,.2f} and saves ${chosen.saved_per_hour:,.2f} of ${config.price_per_hour:,.2f} "
            "an hour "
            f"at the same traffic: {paid}, if hours that become free are given back or used."
        ]
    elif chosen.gain > 1:
        money = ["Give --price-per-hour to see what it costs and when it has paid."]
    if chosen.gain < WORTH:
        why = f"even a perfect drafter would bring {ideal:.2f}x here" if ideal / now["speedup"] < 2 * WORTH else brings
        return "no", [f"No: {why}; less than {WORTH - 1:.0%} more is not worth a training."]
    if known is not None and known < chosen.answers:
        return "collect", [
            f"Collect first: there are {known:,} answers, {chosen.answers:,} are advised "
            "(paceline serve --traces, paceline record, or let the target write them: paceline synthesize).",
            f"Then {brings}.",
            *money,
        ]
    return "train", [f"Train one: {brings}.", *money]


def _guess(plan: Plan) -> str:
    """Returns a note if the acceptance length was measured on another target, for the sentence with the decision."""
    is_own = plan.expected is not None and plan.expected["is_own"]
    return "" if is_own else f" (a guess: how many tokens a round was measured on {CURVE_TARGET}, not on {plan.target})"


def _hours(hours: float) -> str:
    return f"{max(60 * hours, 1):.0f} min" if hours < 1.5 else f"{hours:.1f} hours"


def _basis(config: AdviceConfig, plan: Plan, seen: Seen, has_answers: bool, device: str | None) -> list[str]:
    assert plan.expected is not None
    is_own = plan.expected["is_own"]
    sentences = [
        f"Now: {seen.source}."
        if seen.source
        else "Now: plain decoding is assumed; give traces or --url to compare with what runs."
    ]
    if config.traffic == "mixed" and is_own:
        sentences.append(f"Tokens a round: the learning curve of {plan.target} ({plan.expected['source']}).")
    elif config.traffic == "mixed":
        others = "; ".join(
            f"{published['tokens_per_round']:g} ({published['what']})" for published in ADVICE["published"]
        )
        sentences.append(
            f"Tokens a round: no curve was measured for {plan.target}; that of {CURVE_TARGET} stands for it, held at "
            "its end, "
            f"at {CAUTION} times the answers. More answers brought others more: {others}. --traffic application is "
            "for one "
            "narrow task."
        )
    else:
        one = ADVICE["application"]
        sentences.append(
            f"Tokens a round: as measured for {one['what']} on {one['target']} ({one['source']}); yours may be broader."
        )
    if config.traffic != "mixed" and not is_own:
        sentences.append(f"{plan.target} is another target: {CAUTION} times the answers are asked for.")
    written = "answers that exist are read" if has_answers else "the target writes the answers first"
    sentences.append(
        f"Training: on {plan.machine}, {written}; {plan.parameters / 1e6:.0f} million parameters, blocks of "
        f"{plan.sizes.block_size}, drafting {plan.share_of_pass:.0%} of a pass; shares of the machine's rates as "
        "docs/tutorials/your-drafter.md has them; of GPUs only the steps were measured, on one H100."
    )
    memory = machine_of(device).machine.memory_bytes
    if 0 < memory < plan.memory_bytes:
        sentences.append(
            f"A training there needs {plan.memory_bytes / 1e9:.0f} GB on one device, and there are {memory / 1e9:.0f} "
            "GB: "
            "give a larger one to --train-on, or have a server of the target give hidden states (train "
            "--features-from)."
        )
    return sentences


def seen_in_server(seen: ServerSeen, url: str) -> Seen:
    """Converts a server's metrics to measurements of its traffic."""
    running = seen.samples[0].running if seen.samples else None
    acceptance = from_survival(seen.survival) if seen.survival else None
    mean = seen.tokens / seen.answers if seen.answers else None
    rounds = seen.tokens_per_round or 1.0
    if acceptance is None and rounds > 1:
        acceptance = constant(chance_for(rounds, max(math.ceil(rounds), 7)))
    drafts = f"{rounds:.2f} tokens a round" if seen.tokens_per_round else "no drafts"
    return Seen(f"{drafts} since the start of {url} ({seen.server})", acceptance, rounds, None, mean, running)


def seen_in_traces(folder: Path) -> Seen:
    """Returns measurements from traces of `paceline serve` or `paceline record`. Raises ConfigError without traces."""
    with needing(ConfigError, "reading traces needs pyarrow: pip install 'paceline[data]'"):
        from pyarrow import ArrowException, parquet
    files = sorted(folder.glob("*.parquet")) if folder.is_dir() else [folder]
    if not files or not files[0].exists():
        raise ConfigError(
            f"{folder} holds no traces: give the folder of paceline serve --traces or of paceline record --out"
        )
    rounds: list[tuple[int, int]] = []
    lengths: list[int] = []
    num_prompts = 0
    for file in files:
        what = f"{file} is no trace"
        with reraised(ConfigError, what, "give traces of paceline serve or record", ArrowException, OSError, KeyError):
            columns = {"drafted", "accepted"} & set(
                parquet.read_schema(file).names
            )  # answers of regenerate have no rounds
            table = parquet.read_table(file, columns=["answer_ids", *sorted(columns)])
        for row in table.to_pylist():
            if not row["answer_ids"]:
                num_prompts += 1  # the answer's tokens are unknown: it cannot be learned from
                continue
            lengths.append(len(row["answer_ids"]))
            drafted, accepted = row.get("drafted") or (), row.get("accepted") or ()
            rounds += itertools.islice(zip(drafted, accepted, strict=False), len(drafted))
    checked = [pair for pair in rounds if pair[0] > 0]
    mean = sum(accepted for _, accepted in rounds) / len(rounds) + 1 if rounds else 1.0
    drafts = (
        f"{mean:.2f} tokens a round over {len(rounds):,} rounds"
        if rounds
        else "no rounds recorded: plain decoding is assumed"
    )
    acceptance = from_rounds(checked) if len(checked) >= LEAST_ROUNDS else None
    alone = f" and {num_prompts:,} prompts without one" if num_prompts else ""
    return Seen(
        f"{len(lengths):,} answers{alone} in {folder}, {drafts}", acceptance, mean if acceptance else 1.0, len(lengths),
        sum(lengths) / len(lengths) if lengths else None,
    )  # fmt: skip
