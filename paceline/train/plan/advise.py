"""Advises whether to train a drafter: its speed-up, the answers and hours it needs, and when it has paid for itself.

    advice = advise(CostsConfig(model="Qwen3.5-27B", hardware="2x H100"), AdviceConfig(price_per_hour=8.0), Seen())
    advice.sentences, advice.basis, advice.customers

The current speed comes from traces and a server's metrics (`current_traffic.py`), or is that of plain decoding. A
drafter's acceptance length, with its interval, comes from a run of one's own or from published trainings
(`trainings.py`), its speed-up from the roofline and `training_plan.py`, without reading weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from typing import Any

from paceline.config import EngineConfig
from paceline.report.tables import with_interval
from paceline.simulate.answer import DEFAULT_MODEL, THIS, Setup, is_here, set_up
from paceline.simulate.assumed import assumed
from paceline.simulate.config import AdviceConfig, CostsConfig
from paceline.simulate.costs.catalogue import counted, known_machine
from paceline.simulate.costs.roofline import memory_need
from paceline.simulate.costs.rounds import FractionDrafter, MeasuredCosts, RooflineCosts, StepCosts
from paceline.simulate.limits import LOOKUPS
from paceline.simulate.speedup import Load, chance_for, constant, predict
from paceline.train.config import AnswerConfig, PromptsConfig, TrainConfig
from paceline.train.plan.current_traffic import Seen
from paceline.train.plan.customers import Customer, deserving
from paceline.train.plan.expected_acceptance import ENOUGH, NUMBERS
from paceline.train.plan.target_facts import Device, MachineFacts, machine_of
from paceline.train.plan.training_plan import ANSWER_SHARE, Plan, make_plan
from paceline.train.plan.trainings import LEVEL, TRAININGS, Expected, OwnRun, find_run, published

WORTH = 1.10
"""Smallest gain over the current speed that is worth training and maintaining a drafter."""
CEILING = "(A ceiling, {rate} tokens/s plainly: give --plain-rate, one measured rate.)"
MOST_DRAFTS = 1024
BLOCKS = ("dflash", "dflash2", "dspark")
"""Drafting methods that draft a block in one pass."""
Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Step:
    """Prediction for a drafter trained on `answers` answers: its acceptance length and speed, and the hours and cost of
    the training. Cost, savings and days until they pay for the training are None without a price per hour."""

    answers: int
    tokens_per_round: float
    tokens_per_round_interval: Interval
    speedup: float
    """Relative to plain decoding."""
    speedup_interval: Interval
    gain: float
    """Tokens per second relative to the current speed; 1.5 means 50% more."""
    gain_interval: Interval
    tokens_per_s: float
    hours: float
    """Hours of training, including the hours of generating answers that do not exist yet."""
    cost: float | None = None
    saved_per_hour: float | None = None
    """Money saved per hour at this load."""
    pays_back_days: float | None = None
    is_beyond: bool = False
    """True if the training is larger than any that was measured."""


@dataclass(frozen=True, slots=True)
class Advice:
    """The recommendation whether to train a drafter for a server, with its reasons (`sentences`). It is based on the
    predictions for several numbers of answers (`steps`), of which `chosen` decides the verdict."""

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
    limits: list[str] = field(default_factory=list)
    """Sentences about what the predicted times leave out."""
    customers: list[Customer] = field(default_factory=list)
    """One for each x-paceline-tag, those that save most time first; empty if the traces have fewer than two tags."""
    deserving: str = ""
    """Sentence that names the customers who deserve a drafter of their own, by `RULE`; empty without customers."""
    is_ceiling: bool = False
    """True if the rates are the roofline's: the machine's full rates, without overhead."""

    def as_json(self) -> dict[str, Any]:
        customers = [asdict(each) | {"deserves": not each.objection} for each in self.customers]
        return asdict(self) | {"customers": customers}


def advise(costs: CostsConfig, config: AdviceConfig, seen: Seen) -> Advice:
    """Recommends whether to train a drafter for a server. `costs`: the served model, its machine, and the source of the
    times of its decoding rounds. `config`: assumptions on traffic, training machine and prices. `seen`: measurements of
    the traffic, used where `config` sets no value. Raises PacelineError, such as ConfigError for an unknown machine."""
    streams = config.streams or seen.streams or 1
    load = Load(streams, config.context)
    setup = set_up(costs, [load])
    tokens = config.answer_tokens or round(seen.answer_tokens or 256)
    has_answers = bool(seen.answers or config.answers)
    known = config.answers or seen.answers
    numbers: list[int] = sorted({*NUMBERS, *([known] if known and known >= NUMBERS[0] // 10 else [])})
    model = costs.model or (setup.shape.name if setup.shape else DEFAULT_MODEL)
    if config.train_on:
        known_machine("--train-on", counted("--train-on", config.train_on)[1])
    device = config.train_on or _device(costs, setup)
    plans = [_plan(model, number, tokens, device) for number in numbers]
    last = plans[-1]
    serving = partial(_serving, setup, costs, last.share_of_pass)
    now, price = _now(serving(seen)[0], seen, load), serving(seen)[1]
    run = find_run(config.run, last.target)
    drafter = _Drafter(setup, last, load, run.at if run else lambda number: published(number, config.traffic))
    steps = [
        _step(drafter, plan, number, config, now, has_answers) for number, plan in zip(numbers, plans, strict=True)
    ]
    chosen = _chosen(steps, known)
    ideal, _ = drafter.speed(float(last.sizes.block_size))
    verdict, sentences = _decide(now, chosen, known, ideal, config)
    is_ceiling = setup.kind == "roofline" and setup.overhead is None
    basis = [_now_sentence(seen) + price, _acceptance_sentence(run, config.traffic), *_basis(last, has_answers, device)]
    basis += [*_replicas(setup, load, now), *setup.warnings]
    acceptance = f"length {chosen.tokens_per_round:.2f}"
    basis.insert(0, assumed(config.context, f"{now['streams']:.0f}", acceptance))
    if is_ceiling:
        rate = f"{now['plain_tokens_per_s']:,.0f}"
        sentences[0] = f"{sentences[0]} {CEILING.format(rate=rate)}"
    rates = {tag: _now(serving(one)[0], one, load)["tokens_per_s"] for tag, one in seen.by_tag.items()}
    customers = _customers(drafter, seen, config, rates, cache(partial(_plan, model, device=device)))
    return Advice(
        verdict, sentences, setup.title, now, steps, chosen, ideal, last.machine, basis, setup.limits, customers,
        deserving(customers), is_ceiling,
    )  # fmt: skip


def _chosen(steps: Sequence[Step], known: int | None) -> Step:
    """Returns the step of the existing answers if even the lower end of its gain is worth a training. Otherwise returns
    the step with the fewest answers that bring almost (`ENOUGH`) the largest gain."""
    here = next((step for step in steps if step.answers == known), None)
    if here is not None and here.gain_interval[0] >= WORTH:
        return here
    best = max(steps, key=lambda step: step.gain)
    return next((step for step in steps if step.gain - 1 >= ENOUGH * (best.gain - 1)), best)


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


def _device(costs: CostsConfig, setup: Setup) -> Device:
    """Returns the machine that serves: that of --hardware or of the calibration; None: this computer."""
    if costs.hardware is None and costs.calibration and setup.deployment:
        return MachineFacts(setup.deployment.machine, setup.deployment.num_gpus, is_here=False)
    number, name = counted("--hardware", costs.hardware or THIS)
    if is_here(name):
        return None
    return name if max(number, costs.gpus) == 1 else f"{max(number, costs.gpus)}x {name}"


def _plan(model: str, answers: int, answer_tokens: int, device: Device) -> Plan:
    longest = max(16, round(answer_tokens / ANSWER_SHARE))
    config = TrainConfig(
        target=EngineConfig(model=model),
        prompting=PromptsConfig(self_written=answers),
        answering=AnswerConfig(max_tokens=longest),
        max_len=longest + 1024,
    )
    return make_plan(config, device)


def _serving(setup: Setup, config: CostsConfig, share: float, seen: Seen) -> tuple[StepCosts, str]:
    """Returns the costs with the drafter that serves now, and a sentence on its price, empty without drafts. A block
    drafter costs one pass per round, of the planned drafter's `share` of a target pass; prompt lookup costs nothing; an
    unknown drafter costs the default. --drafter-cost, --block and measured drafting come first."""
    costs = setup.costs
    if seen.acceptance is None or seen.tokens_per_round <= 1:
        return costs, ""
    drafter = costs.drafter if isinstance(costs, RooflineCosts | MeasuredCosts) else None
    if not isinstance(drafter, FractionDrafter) or (isinstance(costs, MeasuredCosts) and costs.draft):
        return costs, ""
    if (config.drafter_cost, config.block) == (None, None) and seen.drafter in (*BLOCKS, *LOOKUPS):
        drafter = FractionDrafter(0.0 if seen.drafter in LOOKUPS else share, seen.num_drafted)
        costs = _with_drafter(costs, drafter)
    each = f"pass of {drafter.fraction:.0%} of a target pass for each {'round' if drafter.block else 'draft'}"
    return costs, f" Its drafter, {seen.drafter or 'not named'}, is priced as one {each} (--drafter-cost, --block)."


def _now(costs: StepCosts, seen: Seen, load: Load) -> dict[str, float]:
    """Returns the current speed: with the drafter that was measured, else of plain decoding."""
    plain = load.batch / costs.round_s(load.batch, 0, load.context)
    speedup = 1.0
    if seen.acceptance and seen.tokens_per_round > 1:
        most = min(max(seen.num_drafted, 1), MOST_DRAFTS)
        speedup = predict(costs, seen.acceptance, replace(load, max_draft=most)).speedup
    rates = {"streams": float(load.batch), "plain_tokens_per_s": plain, "tokens_per_s": plain * speedup}
    return {**rates, "speedup": speedup, "tokens_per_round": seen.tokens_per_round}


@dataclass(frozen=True, slots=True)
class _Drafter:
    """Predicts the speed with a drafter of the plan's shape, by the number of answers it was trained on."""

    setup: Setup
    plan: Plan
    load: Load
    expect: Callable[[int], Expected]
    """Number of answers -> acceptance length."""

    def at(self, answers: int) -> Expected:
        return self.expect(answers).at_most(float(self.plan.sizes.block_size))

    def speed(self, tokens_per_round: float) -> tuple[float, float]:
        """Returns (speed-up, tokens/s) for the acceptance length of full blocks."""
        drafts = self.plan.sizes.block_size - 1
        costs = _with_drafter(self.setup.costs, FractionDrafter(self.plan.share_of_pass, self.plan.sizes.block_size))
        acceptance = constant(chance_for(min(tokens_per_round, drafts + 1.0), drafts))
        prediction = predict(costs, acceptance, replace(self.load, max_draft=drafts))
        assert prediction.tokens_per_s is not None
        return prediction.speedup, prediction.tokens_per_s


def _with_drafter(costs: StepCosts, drafter: FractionDrafter) -> StepCosts:
    if isinstance(costs, MeasuredCosts):
        return replace(costs, drafter=drafter, draft=None)
    assert isinstance(costs, RooflineCosts)
    return replace(costs, drafter=drafter)


def _step(
    drafter: _Drafter, plan: Plan, answers: int, config: AdviceConfig, now: dict[str, float], has_answers: bool
) -> Step:
    expected = drafter.at(answers)
    low, middle, high = map(drafter.speed, (expected.low, expected.tokens_per_round, expected.high))
    hours = plan.hours["all"] - (plan.hours["answers"] if has_answers else 0.0)
    rate = now["tokens_per_s"]
    step = Step(
        answers, expected.tokens_per_round, (expected.low, expected.high), middle[0], (low[0], high[0]),
        middle[1] / rate, (low[1] / rate, high[1] / rate), middle[1], hours, is_beyond=expected.is_beyond,
    )  # fmt: skip
    if config.price_per_hour is None:
        return step
    saved = config.price_per_hour * (1 - 1 / step.gain)
    cost = hours * _training_hour(drafter, plan, config) * config.price_per_hour
    days = cost / (saved * config.busy_hours) if saved > 0 else None
    return replace(step, cost=cost, saved_per_hour=saved, pays_back_days=days)


def _training_hour(drafter: _Drafter, plan: Plan, config: AdviceConfig) -> float:
    """Returns the hours of the serving machine that cost as much as an hour of training, by prices or numbers of
    GPUs."""
    if config.price_per_hour is not None and config.train_price_per_hour is not None:
        return config.train_price_per_hour / config.price_per_hour
    deployment = drafter.setup.deployment
    return _number(plan.machine) / (deployment.num_gpus if deployment else 1)


def _customers(
    drafter: _Drafter, seen: Seen, config: AdviceConfig, rates: dict[str, float], plan_of: Callable[[int, int], Plan]
) -> list[Customer]:
    """Returns the expected gain of each tag with a drafter of its own, those that save most time first. A gain is never
    below 1: a slower drafter is not rolled out. `rates`: tag -> current tokens per second. `plan_of`: (number of
    answers, their mean tokens) -> plan of a training on them."""
    tokens = {tag: (one.answers or 0) * (one.answer_tokens or 0.0) for tag, one in seen.by_tag.items()}
    seconds = {tag: tokens[tag] / rates[tag] for tag in tokens}
    customers = []
    for tag, one in seen.by_tag.items():
        answers = one.answers or 0
        expected = drafter.at(answers)
        values = (expected.low, expected.tokens_per_round, expected.high)
        low, gain, high = (max(1.0, drafter.speed(value)[1] / rates[tag]) for value in values)
        saved = seconds[tag] / sum(seconds.values()) * (1 - 1 / gain)
        share = tokens[tag] / sum(tokens.values())
        plan = plan_of(_rough(answers), _rough(one.answer_tokens or 1))
        hours = plan.hours["all"] - plan.hours["answers"]
        serving_hours = hours * _training_hour(drafter, plan, config)
        cost = None if config.price_per_hour is None else serving_hours * config.price_per_hour
        days = serving_hours / (saved * config.busy_hours) if saved > 0 else None
        customers.append(
            Customer(tag, answers, share, one.tokens_per_round, gain, (low, high), saved, hours, cost, days)
        )
    return sorted(customers, key=lambda each: (-each.saved, -each.traffic * (1 - 1 / each.gain_interval[1])))


def _rough(number: float) -> int:
    """Rounds to two digits: a plan takes time, and many customers then share one."""
    return int(float(f"{number:.2g}"))


def _number(machine: str) -> int:
    head, times, _ = machine.partition(" x ")
    return int(head) if times and head.isdecimal() else 1


def _decide(
    now: dict[str, float], chosen: Step, known: int | None, ideal: float, config: AdviceConfig
) -> tuple[str, list[str]]:
    speedup = with_interval(chosen.speedup, chosen.speedup_interval, unit="x")
    plain = f", {speedup} plain decoding" if now["speedup"] != 1 else ""
    length = with_interval(chosen.tokens_per_round, chosen.tokens_per_round_interval)
    gain = with_interval(chosen.gain, chosen.gain_interval, unit="x")
    brings = (
        f"{gain} the speed of what is served now, {_words_of_now(now)}, after {chosen.answers:,} answers and "
        f"{_hours(chosen.hours)} of training (acceptance length {length}{plain})"
    )
    money = []
    if chosen.cost is not None and chosen.saved_per_hour is not None:
        paid = "no break-even"
        if chosen.pays_back_days is not None:
            paid = f"break-even after {chosen.pays_back_days * config.busy_hours:.1f} hours at this load"
        money = [
            f"It costs ${chosen.cost:,.2f} and saves ${chosen.saved_per_hour:,.2f} of ${config.price_per_hour:,.2f} "
            f"an hour at the same traffic: {paid}, if hours that become free are given back or used."
        ]
    elif chosen.gain > 1:
        money = ["Give --price-per-hour to see what it costs and when it has paid."]
    if chosen.gain < WORTH:
        why = f"even a perfect drafter would bring {ideal:.2f}x here" if ideal / now["speedup"] < 2 * WORTH else brings
        return "no", [f"No: {why}; less than {WORTH - 1:.0%} more is not worth a training."]
    if known is not None and known < chosen.answers:
        return "collect", [
            f"Collect first: there are {known:,} answers, {chosen.answers:,} are advised. Then {brings}.",
            "Answers come from paceline serve --traces, paceline record, or the target itself (paceline synthesize).",
            *money,
        ]
    return "train", [f"Train one: {brings}.", *money]


def _words_of_now(now: dict[str, float]) -> str:
    if now["speedup"] == 1:
        return "plain decoding"
    return f"which drafts already (acceptance length {now['tokens_per_round']:.2f}, {now['speedup']:.2f}x plain)"


def _now_sentence(seen: Seen) -> str:
    if seen.source:
        return f"Now: {seen.source}."
    return "Now: plain decoding is assumed; give traces, --url or both to compare with what runs."


def _acceptance_sentence(run: OwnRun | None, traffic: str | None) -> str:
    """Returns a sentence on the source of the acceptance length and of its interval."""
    if run is not None:
        measured = run.measured
        length = with_interval(measured.tokens_per_round, (measured.low, measured.high))
        return (
            f"Acceptance length: that of {run.folder}, {run.answers:,} answers, {length} on {run.what}; for other "
            "numbers of answers with the growth that published workloads had (--run none: published trainings only)."
        )
    rows = [row for row in TRAININGS if traffic in (None, row.traffic)]
    lengths = [row.tokens_per_round for row in rows]
    kind = "all kinds of traffic" if traffic is None else f"traffic of the kind {traffic}"
    return (
        f"Acceptance length: a guess from {len(rows)} published trainings on {kind} (advice.json), which brought "
        f"{min(lengths):.2f} to {max(lengths):.2f}; the interval holds {LEVEL:.0%} of new workloads. A first training "
        "narrows it (paceline train, then --run)."
    )


def _hours(hours: float) -> str:
    return f"{max(60 * hours, 1):.0f} min" if hours < 1.5 else f"{hours:.1f} hours"


def _basis(plan: Plan, has_answers: bool, device: Device) -> list[str]:
    written = "answers that exist are read" if has_answers else "the target writes the answers first"
    sentences = [
        f"Training: on {plan.machine}, {written}; {plan.parameters / 1e6:.0f} million parameters, blocks of "
        f"{plan.sizes.block_size}, drafting {plan.share_of_pass:.0%} of a pass; shares of the machine's rates as "
        "docs/tutorials/your-drafter.md has them; of GPUs only the steps were measured, on one H100."
    ]
    memory = machine_of(device).machine.memory_bytes
    if 0 < memory < plan.memory_bytes:
        sentences.append(
            f"A training there needs {plan.memory_bytes / 1e9:.0f} GB on one device, and there are {memory / 1e9:.0f} "
            "GB: give a larger one to --train-on, or have a server of the target give hidden states (train "
            "--features-from)."
        )
    return sentences
