"""The run `train`: prompts in, drafter out. Stages, each resumed where a killed run left it:

regenerate   runs/x/regenerate/answers/   the target answers the prompts (train/answers/regenerate.py)
features     runs/x/features-<what>/      its hidden states, when they are kept on disk
train        runs/x/checkpoints/          then runs/x/drafter/, bfloat16, z-lab's format
serve        runs/x/heldout.json          held-out prompts in the real engine
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.draft.dflash2.drafter import materialised
from paceline.errors import ModelNotFoundError, PromptError, UnsupportedModelError
from paceline.hardware import this_machine
from paceline.model.backends import load_target, settle
from paceline.model.embedding_and_head import light_folder, load_ends
from paceline.model.target import Target
from paceline.model.text.tokenizer import Tokenizer
from paceline.report.tables import Progress, ignore
from paceline.runs.folder import RunFolder, write_whole
from paceline.runs.lock import only_run
from paceline.runs.ranks import Ranks
from paceline.runs.stopping import Stop, stopped_by_signal
from paceline.runs.trackers import check_tracker
from paceline.train.answers.mixture import read_mixture
from paceline.train.answers.on_ray import run as regenerate
from paceline.train.card import push, write_card
from paceline.train.config import PromptsConfig, RegenerateConfig, TrainConfig
from paceline.train.documents.dataset import MAX_HELDOUT, MIN_HELDOUT, Corpus, check_answers, read_corpus
from paceline.train.documents.store import known_only, stored_corpus, without
from paceline.train.features.hidden_states import ScaledFeatures
from paceline.train.features.sources import Sources
from paceline.train.learn.checkpoint import best_checkpoint
from paceline.train.learn.initial_weights import continued_draft_ids, init_folder, scale_first_logits
from paceline.train.learn.loop import Trainer
from paceline.train.learn.step_log import newest_rates, risen_rate, tracked
from paceline.train.methods.kinds import begun, draft_ids_of, settled
from paceline.train.methods.mtp import check_mtp
from paceline.train.plan.choices import for_chains
from paceline.train.plan.expected_acceptance import Learned, expected_lines, expected_of
from paceline.train.plan.target_facts import MachineFacts
from paceline.train.plan.training_plan import apply_stored, make_plan, stored_plan
from paceline.train.processes.group import process_group
from paceline.train.run_file import with_value, write_run_file
from paceline.train.served import HeldoutServer, agreement, final_figures, finished_drafter, has_room, read_finished
from paceline.train.tiny import write_tiny_target

SERVED_PROMPTS, SERVED_ON_THE_WAY = 16, 8
SERVED_TOKENS = 96
PLAN = "plan.json"
"""What the plan chose and expected, beside run.yaml."""
LEAST_LEARNING, MOST_GAINED = 0.25, 1.25
"""Steps get this share of --minutes at least, and at most so many times the minutes that were planned for them."""


@dataclass(frozen=True, slots=True)
class TrainResult:
    """What a training run came to."""

    drafter: Path
    """Folder of the finished drafter."""
    run: Path
    steps: int
    blocks: int
    eal: float | None
    """Newest expected accepted length: on held-out documents where there are some, else on those of the last step."""
    loss: float | None
    heldout: dict[str, float] = field(default_factory=dict)
    """Tokens per round of held-out prompts, served by the real engine. Only the first process of several serves."""


def run(config: TrainConfig, progress: Progress) -> TrainResult:
    """As `paceline.train.train`."""
    _check_inputs(config)
    ranks = Ranks.here()
    with (
        only_run(config.out, "training", ranks, progress.say),
        process_group(ranks, config.target.device, config.step_timeout_minutes) as wait,
    ):
        config = _planned(_at_scale(for_chains(config), ranks), ranks, wait, progress if ranks.is_first else Progress())
        with stopped_by_signal(progress.say if ranks.is_first else Progress().say) as stop:
            return _Stages(config, ranks, wait, progress, stop).run()


def _planned(config: TrainConfig, ranks: Ranks, wait: Callable[[], None], progress: Progress) -> TrainConfig:
    """With everything chosen that was not asked for; the first process plans and says so, a resumed run keeps its choices."""
    if config.scale == "tiny":
        if ranks.is_first:
            write_run_file(config)
        wait()  # the first process writes the target
        return config
    before = stored_plan(config.out)
    wait()
    if before is None and ranks.is_first:
        try:
            plan = make_plan(config)
            progress.say(plan.text)
            RunFolder(config.out).write_json(PLAN, {**plan.as_json(), "minutes": config.minutes})
        except (ModelNotFoundError, UnsupportedModelError) as error:
            progress.say(f"note: no plan, so defaults hold: {error}")
    wait()
    told = before or stored_plan(config.out) or {}
    planned = apply_stored(config, told)
    if config.minutes is not None and told.get("minutes") and not config.is_given("loop.max_minutes"):
        more = config.minutes - float(told["minutes"])
        planned = with_value(planned, "loop.max_minutes", max(0.1, (planned.loop.max_minutes or config.minutes) + more))
    if ranks.is_first:
        write_run_file(planned)
    return planned


def _check_inputs(config: TrainConfig) -> None:
    """What can be known to be wrong before hours are spent on it."""
    check_tracker(config.log_to)
    init_folder(config.init, config.target.model)
    check_mtp(config)
    for prompts in (config.ood, config.heldout):
        read_mixture(_others(config, prompts), config.answering.seed, ignore)
    if config.answers:
        tokenizer = Tokenizer.from_path(light_folder(config.target.model)) if config.scale == "default" else None
        check_answers(config.answers, tokenizer and tokenizer.decode, strict=config.asked.strict)


def _others(config: TrainConfig, prompts: tuple[str, ...]) -> PromptsConfig:
    """Prompts that are not learned from are read as the others are."""
    return PromptsConfig(prompts, config.asked.limit, config.asked.strict)


def _at_scale(config: TrainConfig, ranks: Ranks) -> TrainConfig:
    """With --scale tiny: the target is replaced by a random one, and everything that was not given shrinks."""
    if config.scale == "default":
        return config
    folder, file = config.out / "target", config.out / "prompts.jsonl"
    if ranks.is_first:
        write_tiny_target(folder)
    prompts = config.asked.prompts
    if not prompts and not config.answers:
        prompts = (str(file),)
        if ranks.is_first and not file.exists():
            write_whole(file, "".join(f'{{"prompt": "Say something about number {n}."}}\n' for n in range(96)))
    taps = {} if config.shape.is_chained else {"num_layers": 2, "num_taps": 2}
    return replace(
        config,
        target=replace(config.target, model=str(folder)),
        asked=replace(config.asked, prompts=prompts),
        loop=_unless_given(config, "loop", epochs=2.0, blocks_per_step=128, anchors=16, heldout_every=10),
        shape=_unless_given(config, "shape", **taps),
        answering=_unless_given(config, "answering", max_tokens=48, max_prompt_tokens=128),
        max_len=config.max_len if config.is_given("max_len") else 256,
    )


def _unless_given(config: TrainConfig, part: str, **values: Any) -> Any:
    """The section `part` of the config with these values, but for the fields that the user gave."""
    kept = {name: value for name, value in values.items() if not config.is_given(f"{part}.{name}")}
    return replace(getattr(config, part), **kept)


class _Stages:
    """The stages of one process of a run."""

    def __init__(self, config: TrainConfig, ranks: Ranks, wait: Callable[[], None], progress: Progress, stop: Stop) -> None:
        self.config, self.ranks, self.wait, self.everyone, self.stop = config, ranks, wait, progress, stop
        self.progress = progress if ranks.is_first else Progress()
        self.began = time.monotonic()

    def run(self) -> TrainResult:
        progress = self.progress
        answers, ood, kept_out = self._answers()
        corpus = self._corpus(answers, kept_out)
        num_places = sum(document.num_anchors for document in corpus.train)
        progress.say(
            f"{len(corpus.train)} documents to learn from ({num_places} places for blocks), {len(corpus.heldout)} held out; "
            f"{corpus.told() or 'all of them whole'}"
        )
        folder = self._open()
        target = self._load_target()
        known = known_only(corpus, target.vocab_size, self.config.asked.strict)
        if known is not corpus:
            progress.say(str(known.dropped))
        corpus = known
        result = self._train(corpus, ood, target, folder)
        del target
        if self.ranks.is_first:
            result = replace(result, heldout=self._serve(result.drafter, corpus, folder))
            self._publish(result, folder, corpus.num_prompts)
        progress.say(f"drafter: {result.drafter}")
        return result

    def _publish(self, result: TrainResult, run: RunFolder, num_prompts: int) -> None:
        """The card beside the weights; the hub gets both where that was asked for."""
        file = run.path / "heldout.json"
        served = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        figures = {name: getattr(result, name) for name in ("steps", "blocks", "eal", "loss")}
        write_card(self.config, result.drafter, {**figures, "prompts": num_prompts}, served)
        if self.config.push_to_hub:
            address = push(result.drafter, self.config.push_to_hub, is_public=self.config.public)
            self.progress.say(f"the drafter is at {address}")

    def _corpus(self, answers: list[Path], kept_out: Path | None) -> Corpus:
        """Documents to learn from and to be tested on; those to learn from stay on disk where features are streamed."""
        config, share = self.config, 0.0 if kept_out else self.config.heldout_share
        asked = (answers, config.max_len, share, MAX_HELDOUT, MIN_HELDOUT, config.asked.strict)
        if config.features == "streamed":
            corpus = stored_corpus(config.out / f"documents-r{self.ranks.rank}", *asked)
        else:
            corpus = read_corpus(*asked)
        if kept_out is not None:
            heldout = list(read_corpus([kept_out], config.max_len, 0.0).train[:MAX_HELDOUT])
            corpus = replace(corpus, train=without(corpus.train, {each.key for each in heldout}), heldout=heldout)
            if not corpus.train:
                raise PromptError("nothing is left to learn from: every document is held out; give --heldout other prompts")
        if len(corpus.heldout) < MIN_HELDOUT:
            self.progress.say(
                f"note: only {len(corpus.heldout)} documents are held out, so their figures are rough: give more prompts, or a "
                "file of others (--heldout)"
            )
        return corpus

    def _answers(self) -> tuple[list[Path], Path | None, Path | None]:
        """Folders of answers: those given, and those that this run has the target write; of out-of-distribution prompts, and of
        those to be tested on."""
        config, folders = self.config, list(self.config.answers)
        if config.asked.prompts or config.asked.self_written or not folders:
            folders.append(self._regenerate(config.asked, "regenerate"))
        ood = self._regenerate(_others(config, config.ood), "ood") if config.ood else None
        kept_out = self._regenerate(_others(config, config.heldout), "heldout") if config.heldout else None
        self.wait()
        return folders, ood, kept_out

    def _regenerate(self, asked: PromptsConfig, name: str) -> Path:
        config = self.config
        asking = RegenerateConfig(config.out / name, config.target, asked, config.answering, elsewhere=config.elsewhere)
        return regenerate(asking, self.everyone).answers

    def _open(self) -> RunFolder:
        config = self.config
        if not self.ranks.is_first:
            return RunFolder(config.out)
        if any((config.out / "checkpoints").glob("step-*")):
            return RunFolder.open(config.out)
        described = {"target": config.target.model, "prompts": config.asked.prompts, "answers": config.answers}
        described |= {"init": config.init, "train": config.loop, "shape": config.shape, "regenerate": config.answering}
        return RunFolder.create("train", described, config.out)

    def _load_target(self) -> Target:
        settings = settle(self.config.target)
        if settings.threads or self.ranks.world > 1:
            torch.set_num_threads(settings.threads or 1)
        device = f"cuda:{self.ranks.local}" if settings.device == "cuda" and self.ranks.world > 1 else settings.device
        settings = replace(settings, device=device, max_batch=1, max_len=self.config.max_len)
        return load_ends(settings) if self.config.elsewhere.features_at else load_target(settings)

    def _train(self, corpus: Corpus, ood: Path | None, target: Target, run: RunFolder) -> TrainResult:
        """The loop, its figures into metrics.jsonl; the finished drafter in `out/drafter`."""
        config, progress = self.config, self.progress
        draft_ids = draft_ids_of(config, corpus, target, progress.say)
        trainer = self._trainer(corpus, ood, target, draft_ids)
        if config.loop.loss.vocab and trainer.vocabulary is None:
            progress.say("note: the loss vocabulary has no effect: it is not smaller than the target's")
        if config.loop.parallel == "sharded" and self.ranks.world == 1:
            progress.say("note: --parallel sharded has no effect on one process: start several with torchrun")
        if trainer.state.step:
            progress.say(f"going on after step {trainer.state.step}")
        self._settle_length(trainer)
        if trainer.state.step and (note := risen_rate(run, trainer)):
            progress.say(note)
        self._serve_on_the_way(trainer, corpus, target, draft_ids)
        with self.sources.following(trainer), self.stop.later():
            if self.ranks.is_first:
                with tracked(run, trainer, progress, config.log_to) as on_step:
                    is_over = trainer.run(on_step, progress.say, lambda: self.stop.is_asked)
            else:
                is_over = trainer.run(should_stop=lambda: self.stop.is_asked)
        if not is_over:
            self.stop.end(f"the checkpoint of step {trainer.state.step} is written")
        folder, weights = config.out / "drafter", trainer.parallel.weights(trainer.network)
        rates = newest_rates(run, trainer)
        if self.ranks.is_first:
            if config.loop.keep == "best" and (best := self._best(trainer)):
                weights, rates["eal"] = best
            if draft_ids is None:
                draft_ids = continued_draft_ids(init_folder(config.init, config.target.model), corpus, target)
            finished_drafter(trainer.drafter.raw, materialised(weights, trainer.embedding_VD.cpu()), draft_ids).save(folder)
        return TrainResult(folder, run.path, trainer.state.step, trainer.state.num_blocks, **rates)

    def _settle_length(self, trainer: Trainer) -> None:
        """Steps get what answers and features have left of --minutes, which may be other than planned; later starts keep it."""
        config, told = self.config, stored_plan(self.config.out) or {}
        planned = (told.get("values") or {}).get("loop.max_minutes")
        if trainer.state.step or config.minutes is None or not planned or config.is_given("loop.max_minutes"):
            return
        if self.ranks.is_first:
            left = config.minutes - (time.monotonic() - self.began) / 60
            # An earlier start may have made the answers: its time is not known, so that little is won by them.
            told["values"]["loop.max_minutes"] = minutes = min(
                max(left, LEAST_LEARNING * config.minutes), MOST_GAINED * planned
            )
            if abs(minutes - planned) > 0.05 * planned:
                self.progress.say(f"{minutes:.3g} minutes are left for learning, where {planned:.3g} were planned")
                self._expect_again(told, minutes / planned)
            RunFolder(config.out).write_json(PLAN, told)
        self.wait()
        told = stored_plan(config.out) or {}
        trainer.config = replace(trainer.config, max_minutes=float(told["values"]["loop.max_minutes"]))

    def _expect_again(self, told: dict[str, Any], share: float) -> None:
        """Change what plan.json expects, for this share of the planned blocks, and say it."""
        expected = told.get("expected") or {}
        if not {"answers", "places"} <= expected.keys():  # a plan of an earlier version, or of a drafter of chains
            return
        told["blocks"] = share * float(told["blocks"])
        learned = Learned(told["blocks"], expected["answers"], expected["places"])
        told["expected"] = expected_of(told["target"], learned)
        for line in expected_lines(told["target"], told["expected"]):
            self.progress.say(line)

    def _best(self, trainer: Trainer) -> tuple[dict[str, Tensor], float] | None:
        """The kept weights, and what they were kept for."""
        kept = best_checkpoint(trainer.folder)
        if kept is None:
            self.progress.say("note: --keep best has no effect: there are no held-out documents, so the last weights are taken")
            return None
        weights, told = kept
        served = f", {told['served']:.2f} served" if "served" in told else ""
        self.progress.say(f"kept: the weights after step {told['step']}, {told['eal']:.2f} tokens a round expected{served}")
        return weights, told["eal"]

    def _trainer(self, corpus: Corpus, ood: Path | None, target: Target, draft_ids: Tensor | None) -> Trainer:
        """A new drafter, `init`, or the newest checkpoint; with features of the documents in one scale."""
        config, loop = self.config, self.config.loop
        begins = begun(config, target, draft_ids)
        drafter = begins.drafter
        embedding_VD = target.matrix_embed(torch.arange(target.vocab_size, device=target.device)).clone()
        self.sources = sources = Sources(config, target, begins.taps, corpus.train, self.ranks, self.progress, self.wait)
        features = sources.of(corpus.train)
        scale_F = settled(begins, *sources.scale(features))
        here = MachineFacts(this_machine(target.device.type))
        if loop.autocast and here.is_slow_in_bfloat16:
            self.progress.say(
                "note: this processor multiplies faster in float32 than in bfloat16: --full-precision trains faster"
            )
        flops_per_s = here.machine.flops_per_s.get("bfloat16" if loop.autocast else "float32")
        scaled = ScaledFeatures(features, scale_F)
        trainer = Trainer(
            drafter, corpus, scaled, embedding_VD, begins.head, loop,
            folder=config.out / "checkpoints", peak_flops=flops_per_s, ranks=self.ranks, heldout_head=begins.drafting,
            wait=self.wait,
        )  # fmt: skip
        watched = {"heldout": corpus.heldout, "ood": read_corpus([ood], config.max_len, 0.0).train[:MAX_HELDOUT] if ood else []}
        for name, documents in watched.items():
            if documents:
                trainer.heldout[name] = documents, ScaledFeatures(sources.of(documents, f"features-{name}"), scale_F)
        if not trainer.resume(self.progress.say) and (norm := begins.first_norm) is not None:
            scale_first_logits(norm, begins.head, *trainer.first_slots())
        return trainer

    def _serve_on_the_way(self, trainer: Trainer, corpus: Corpus, target: Target, draft_ids: Tensor | None) -> None:
        """Have the trainer keep the weights that serve best, where every process has room for the model a second time; all
        processes must decide alike, the first one serves. A target elsewhere cannot be served here."""
        config, documents = self.config, corpus.heldout[:SERVED_ON_THE_WAY]
        if not documents or not config.loop.serve_share or config.elsewhere.features_at:
            return
        if trainer.parallel.most(float(not has_room(target))) > 0:
            self.progress.say(
                "note: no memory is free for serving while it trains: held-out prompts are served at the end only"
            )
            return
        if draft_ids is None:
            draft_ids = continued_draft_ids(init_folder(config.init, config.target.model), corpus, target)
        server = HeldoutServer(config.target, trainer.drafter.raw, documents, SERVED_TOKENS, draft_ids)
        trainer.served = lambda weights: server(materialised(weights, trainer.embedding_VD.cpu()))

    def _serve(self, drafter: Path, corpus: Corpus, run: RunFolder) -> dict[str, float]:
        """Tokens per round over held-out prompts in the real engine, and what is measured beside."""
        documents, progress = corpus.heldout[:SERVED_PROMPTS], self.progress
        if not documents:
            return {}
        if self.config.elsewhere.features_at:
            progress.say("note: held-out prompts are not served: the target is elsewhere; give its server the drafter")
            return {}
        progress.say(f"serving {len(documents)} held-out prompts")
        told = final_figures(self.config.target, read_finished(drafter), documents, self.config.answering.max_tokens)
        run.write_json("heldout.json", told)
        progress.say(
            f"held-out prompts, served: {told['tokens_per_round']:.2f} tokens per round over {told['num_rounds']} rounds"
        )
        if line := agreement(told):
            progress.say(line)
        return {"heldout": told["tokens_per_round"]}
