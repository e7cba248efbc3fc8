"""The run of `paceline train`: prompts in, drafter out. An interrupted run resumes at the stage where it stopped.

regenerate   runs/x/regenerate/answers/   the target answers the prompts (train/answers/regenerate.py)
features     runs/x/features-<hash>/      the target's hidden states, if stored; or in --shared-features
train        runs/x/checkpoints/          then runs/x/drafter/, bfloat16, z-lab's format
serve        runs/x/heldout.json          held-out prompts in the real engine; trained.json has steps and prompts
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.data.tags import Tagged, tagged
from paceline.draft.dflash2.codebooks import materialised
from paceline.draft.vocabulary import Vocabulary
from paceline.errors import ModelNotFoundError, PromptError, UnsupportedModelError
from paceline.hardware import this_machine
from paceline.hub import BUILTINS
from paceline.model.backends import load_target, settle
from paceline.model.remote_embedding import light_folder, load_ends
from paceline.model.target import Target
from paceline.model.text.tokenizer import Tokenizer
from paceline.report.tables import Progress, ignore
from paceline.runs.folder import RunFolder
from paceline.runs.lock import only_run
from paceline.runs.ranks import Ranks
from paceline.runs.stopping import Stop, stopped_by_signal
from paceline.runs.trackers import check_tracker
from paceline.train.answers.mixture import check_begun, others_of, read_mixture
from paceline.train.answers.on_ray import run as regenerate
from paceline.train.answers.run_identity import identity_of
from paceline.train.card import check_repository, push, write_card
from paceline.train.config import PromptsConfig, RegenerateConfig, TrainConfig
from paceline.train.documents.dataset import MAX_HELDOUT, MIN_HELDOUT, Corpus, Document, check_answers, read_corpus
from paceline.train.documents.store import known_only, stored_corpus, without
from paceline.train.features.hidden_states import ScaledFeatures
from paceline.train.features.sources import Sources
from paceline.train.learn.checkpoint import best_checkpoint
from paceline.train.learn.initial_weights import continued_vocabulary, init_folder, scale_first_logits
from paceline.train.learn.loop import Trainer
from paceline.train.learn.step_log import newest_rates, risen_rate, tracked
from paceline.train.methods.kinds import check_drafter, draft_ids_of, initial_drafter, use_scaled_units
from paceline.train.methods.mtp import check_mtp
from paceline.train.plan.choices import for_chains
from paceline.train.plan.lengths import longest_of, stored_length, with_length
from paceline.train.plan.stored_plan import apply_stored, stored_plan, update_expected, with_minutes
from paceline.train.plan.target_facts import MachineFacts
from paceline.train.plan.training_plan import make_plan
from paceline.train.processes.group import process_group
from paceline.train.run_file import TRAINED, with_given, write_run_file
from paceline.train.served import agreement, final_figures, finished_drafter, has_room, heldout_server
from paceline.train.tiny import at_scale

SERVED_PROMPTS, SERVED_WHILE_TRAINING = 16, 8
SERVED_TOKENS = 96
PLAN = "plan.json"
"""File next to run.yaml with the plan's choices and expectations."""
LEAST_LEARNING, MOST_GAINED = 0.25, 1.25
"""Bounds on the minutes for steps: at least this share of --minutes, at most this multiple of the planned minutes."""


@dataclass(frozen=True, slots=True)
class TrainResult:
    """Result of a training run: its folders, numbers of steps and blocks, and final loss and acceptance lengths."""

    drafter: Path
    """Folder of the finished drafter."""
    run: Path
    steps: int
    blocks: int
    eal: float | None
    """Latest expected acceptance length, on held-out documents or, without any, on the documents of the last step."""
    loss: float | None
    heldout: dict[str, float] = field(default_factory=dict)
    """Acceptance length of held-out prompts in the real engine; only in the first process."""


def run(config: TrainConfig, progress: Progress) -> TrainResult:
    """Trains a drafter; the implementation of `paceline.train.train`."""
    chosen = for_chains(config)  # first: it refuses settings that contradict each other
    _check_inputs(config)
    ranks = Ranks.here()
    with (
        only_run(config.out, "training", ranks, progress.say),
        process_group(ranks, config.target.device, config.step_timeout_minutes) as wait,
    ):
        config = _planned(at_scale(chosen, ranks), ranks, wait, progress if ranks.is_first else Progress())
        with stopped_by_signal(progress.say if ranks.is_first else Progress().say) as stop:
            return _Stages(config, ranks, wait, progress, stop).run()


def _planned(config: TrainConfig, ranks: Ranks, wait: Callable[[], None], progress: Progress) -> TrainConfig:
    """Returns the config with a choice for every setting that the user did not give. The first process makes the plan
    and reports it; a resumed run uses its stored plan."""
    if config.scale == "tiny":
        if config.minutes is not None:
            progress.say("note: --minutes has no effect with --scale tiny: give --max-minutes")
        if ranks.is_first:
            write_run_file(config)
        wait()  # the first process writes the target
        return config
    config = with_given(config)
    before, length = stored_plan(config.out), stored_length(config.out)
    wait()
    if before is None and ranks.is_first:
        plan: dict[str, Any] = {"target": config.target.model, "values": {}}  # if none can be made
        try:
            chosen = make_plan(config)
            progress.say(chosen.text)
            plan = {**chosen.as_json(), "minutes": config.minutes}
        except (ModelNotFoundError, UnsupportedModelError) as error:
            progress.say(f"note: no plan, so defaults hold, also when the run is resumed: {error}")
        RunFolder(config.out).write_json(PLAN, plan)
    wait()
    before = before or stored_plan(config.out) or {}
    stored = with_minutes(before, config, progress.say)
    planned = with_length(apply_stored(config, stored), length)
    if ranks.is_first:
        if stored != before:
            RunFolder(config.out).write_json(PLAN, stored)
        write_run_file(planned)
    return planned


def _check_inputs(config: TrainConfig) -> None:
    """Detects invalid inputs before the long stages begin."""
    check_tracker(config.log_to)
    check_repository(config.push_to_hub)
    init_folder(config.init, config.target.model)
    check_mtp(config)
    if config.scale == "default" and config.target.model not in BUILTINS:  # whose sizes are known
        light_folder(config.target.model)  # fetches config.json of a hub id
    check_drafter(config)
    check_begun(config)
    for prompts in (config.ood, config.heldout):
        read_mixture(others_of(config, prompts), config.answering.seed, ignore)
    if config.answers:
        decode = Tokenizer.from_path(light_folder(config.target.model)).decode if config.scale == "default" else None
        check_answers(tagged(config.answers, config.prompting.tags), decode, strict=config.prompting.strict)


class _Stages:
    """The stages of a run, in one process."""

    def __init__(
        self, config: TrainConfig, ranks: Ranks, wait: Callable[[], None], progress: Progress, stop: Stop
    ) -> None:
        self.config, self.ranks, self.wait, self.everyone, self.stop = config, ranks, wait, progress, stop
        self.progress = progress if ranks.is_first else Progress()
        self.began = time.monotonic()

    def run(self) -> TrainResult:
        progress = self.progress
        answers, ood, kept_out = self._answers()
        corpus = self._corpus(answers, kept_out)
        num_places = sum(document.num_anchors for document in corpus.train)
        progress.say(
            f"{len(corpus.train)} documents to learn from ({num_places} places for blocks), {len(corpus.heldout)} held "
            f"out; {corpus.left_out_text or 'all of them whole'}"
        )
        folder = self._open()
        target = self._load_target()
        usable = known_only(corpus, target.vocab_size, self.config.prompting.strict)
        if usable is not corpus:
            progress.say(str(usable.dropped))
        corpus = usable
        result = self._train(corpus, ood, target, folder)
        del target
        if self.ranks.is_first:
            result = replace(result, heldout=self._serve(result.drafter, corpus, folder))
            self._publish(result, folder, corpus.num_prompts)
        progress.say(f"drafter: {result.drafter}")
        return result

    def _publish(self, result: TrainResult, run: RunFolder, num_prompts: int) -> None:
        """Writes trained.json, and the model card next to the weights; uploads the latter if requested."""
        file = run.path / "heldout.json"
        served = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        figures = {key: getattr(result, key) for key in ("steps", "blocks", "eal", "loss")} | {"prompts": num_prompts}
        run.write_json(TRAINED, figures)
        write_card(self.config, result.drafter, figures, served)
        if hub := self.config.push_to_hub:
            self.progress.say(f"the drafter is at {push(result.drafter, hub, is_public=self.config.public)}")

    def _corpus(self, answers: list[Tagged], kept_out: Path | None) -> Corpus:
        """Returns the documents to learn from and those held out. With streamed features, the former stay on disk."""
        config, share = self.config, 0.0 if kept_out else self.config.heldout_share
        options = (answers, longest_of(config), share, MAX_HELDOUT, MIN_HELDOUT, config.prompting.strict)
        if config.features == "streamed":
            corpus = stored_corpus(config.out / f"documents-r{self.ranks.rank}", *options)
        else:
            corpus = read_corpus(*options)
        if kept_out is not None:
            heldout = list(read_corpus([kept_out], longest_of(config), 0.0).train[:MAX_HELDOUT])
            prompts = {document.prompt for document in heldout}
            corpus = replace(corpus, train=without(corpus.train, lambda each: each.prompt in prompts), heldout=heldout)
            if not corpus.train:
                raise PromptError(
                    "nothing is left to learn from: every document is held out; give --heldout other prompts"
                )
        elif config.init is not None and corpus.heldout:
            self.progress.say(
                "note: unless its run had these same prompts, the drafter of --init may have learned some that are "
                "held out here, and their figures flatter it: give prompts that it has not seen (--heldout)"
            )
        if len(corpus.heldout) < MIN_HELDOUT:
            self.progress.say(
                f"note: only {len(corpus.heldout)} documents are held out, so their figures are rough: give more "
                "prompts, or a file of others (--heldout)"
            )
        return corpus

    def _answers(self) -> tuple[list[Tagged], Path | None, Path | None]:
        """Returns folders of answers: (to learn from, given or generated; out-of-distribution; held-out)."""
        config, folders = self.config, tagged(self.config.answers, self.config.prompting.tags)
        if config.prompting.prompts or config.prompting.self_written or not folders:
            folders.append(Tagged(self._regenerate(config.prompting, "regenerate")))
        ood = self._regenerate(others_of(config, config.ood), "ood") if config.ood else None
        kept_out = self._regenerate(others_of(config, config.heldout), "heldout") if config.heldout else None
        self.wait()
        return folders, ood, kept_out

    def _regenerate(self, prompts: PromptsConfig, name: str) -> Path:
        config = self.config
        settings = RegenerateConfig(config.out / name, config.target, prompts, config.answering, remote=config.remote)
        return regenerate(settings, self.everyone).answers

    def _open(self) -> RunFolder:
        config = self.config
        if not self.ranks.is_first:
            return RunFolder(config.out)
        if any((config.out / "checkpoints").glob("step-*")):
            return RunFolder.open(config.out)
        settings = {"target": identity_of(config.target.model), "prompts": config.prompting.prompts}
        settings |= {"answers": config.answers, "init": config.init, "train": config.loop, "shape": config.shape}
        settings["max_len"] = config.max_len
        return RunFolder.create("train", settings | {"regenerate": config.answering}, config.out)

    def _load_target(self) -> Target:
        settings = settle(self.config.target)
        if settings.threads or self.ranks.world > 1:
            torch.set_num_threads(settings.threads or 1)
        device = f"cuda:{self.ranks.local}" if settings.device == "cuda" and self.ranks.world > 1 else settings.device
        settings = replace(settings, device=device, max_batch=1, max_len=self.config.max_len)
        return load_ends(settings) if self.config.remote.features_at else load_target(settings)

    def _train(self, corpus: Corpus, ood: Path | None, target: Target, run: RunFolder) -> TrainResult:
        """Runs the training loop, logs to metrics.jsonl, and writes the finished drafter to `out/drafter`."""
        config, progress = self.config, self.progress
        draft_ids = draft_ids_of(config, corpus, target, progress.say)
        trainer = self._trainer(corpus, ood, target, draft_ids)
        if config.loop.loss.vocab and trainer.vocabulary is None:
            progress.say("note: the loss vocabulary has no effect: it is not smaller than the head's")
        if config.loop.parallel == "sharded" and self.ranks.world == 1:
            progress.say("note: --parallel sharded has no effect on one process: start several with torchrun")
        if trainer.state.step:
            progress.say(f"going on after step {trainer.state.step}")
        self._set_training_minutes(trainer)
        if trainer.state.step and (note := risen_rate(run, trainer)):
            progress.say(note)
        self._serve_while_training(trainer, corpus, target, draft_ids)
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
            own = self._vocabulary(corpus, target, draft_ids)
            finished_drafter(trainer.drafter.raw, materialised(weights, trainer.embedding_VD.cpu()), own).save(folder)
        return TrainResult(folder, run.path, trainer.state.step, trainer.state.num_blocks, **rates)

    def _vocabulary(self, corpus: Corpus, target: Target, draft_ids: Tensor | None) -> Vocabulary:
        """Returns the finished drafter's vocabulary: the given tokens, or those of the drafter in `init`."""
        if draft_ids is not None:
            return Vocabulary(draft_ids)
        return continued_vocabulary(init_folder(self.config.init, self.config.target.model), corpus, target)

    def _set_training_minutes(self, trainer: Trainer) -> None:
        """Sets the minutes for steps to what is left of --minutes; a resumed run keeps the stored value."""
        config, plan = self.config, stored_plan(self.config.out) or {}
        planned = (plan.get("values") or {}).get("loop.max_minutes")
        if trainer.state.step or config.minutes is None or not planned or config.is_given("loop.max_minutes"):
            return
        if self.ranks.is_first:
            left = config.minutes - (time.monotonic() - self.began) / 60
            # An earlier start may have written the answers in an unknown time: MOST_GAINED bounds what the steps gain
            # by it.
            minutes = min(max(left, LEAST_LEARNING * config.minutes), MOST_GAINED * planned)
            plan["values"]["loop.max_minutes"] = minutes
            if abs(minutes - planned) > 0.05 * planned:
                self.progress.say(f"{minutes:.3g} minutes are left for learning, where {planned:.3g} were planned")
                update_expected(plan, minutes / planned, self.progress.say)
            RunFolder(config.out).write_json(PLAN, plan)
        self.wait()
        plan = stored_plan(config.out) or {}
        trainer.config = replace(trainer.config, max_minutes=float(plan["values"]["loop.max_minutes"]))

    def _best(self, trainer: Trainer) -> tuple[dict[str, Tensor], float] | None:
        """Returns the best weights and their expected accepted length."""
        best = best_checkpoint(trainer.folder)
        if best is None:
            self.progress.say(
                "note: --keep best has no effect: there are no held-out documents, so the last weights are taken"
            )
            return None
        weights, figures = best
        served = f", {figures['served']:.2f} served" if "served" in figures else ""
        self.progress.say(
            f"kept: the weights after step {figures['step']}, {figures['eal']:.2f} tokens a round expected{served}"
        )
        return weights, figures["eal"]

    def _trainer(self, corpus: Corpus, ood: Path | None, target: Target, draft_ids: Tensor | None) -> Trainer:
        """Returns a trainer of a new drafter, of `init`, or of the newest checkpoint, with all documents' features."""
        config, loop = self.config, self.config.loop
        initial = initial_drafter(config, target, draft_ids)
        self.sources = sources = Sources(
            config, target, initial.taps, corpus.train, self.ranks, self.progress, self.wait
        )
        features = sources.of(corpus.train)
        scale_F = use_scaled_units(initial, *sources.scale(features))
        here = MachineFacts(this_machine(target.device.type))
        if loop.autocast and here.is_slow_in_bfloat16:
            self.progress.say(
                "note: this processor multiplies faster in float32 than in bfloat16: --full-precision trains faster"
            )
        flops_per_s = here.machine.flops_per_s.get("bfloat16" if loop.autocast else "float32")
        trainer = Trainer(
            initial.drafter, corpus, ScaledFeatures(features, scale_F), initial.embedding_VD, initial.head, loop,
            folder=config.out / "checkpoints", peak_flops=flops_per_s, ranks=self.ranks,
            heldout_head=initial.drafting_head,
            wait=self.wait,
        )  # fmt: skip
        for name, documents in (("heldout", corpus.heldout), ("ood", self._ood(ood, corpus) if ood else ())):
            if documents:
                trainer.heldout[name] = documents, ScaledFeatures(sources.of(documents), scale_F)
        if not trainer.resume() and (norm := initial.first_norm) is not None:
            scale_first_logits(norm, initial.head, *trainer.first_slots())
        return trainer

    def _ood(self, answers: Path, corpus: Corpus) -> Sequence[Document]:
        """Returns the out-of-distribution documents in the folder `answers`, without prompts that are learned from."""
        learned = {document.prompt for document in corpus.train}
        every = read_corpus([answers], longest_of(self.config), 0.0).train
        documents = without(every, lambda each: each.prompt in learned)
        if num_left_out := len(every) - len(documents):
            self.progress.say(
                f"note: {num_left_out} of {len(every)} --ood documents are left out: their prompts are learned from"
            )
        return documents[:MAX_HELDOUT]

    def _serve_while_training(self, trainer: Trainer, corpus: Corpus, target: Target, draft_ids: Tensor | None) -> None:
        """Makes the trainer select the weights that serve held-out prompts best, if every process has memory to load
        the model a second time. All processes must decide alike; the first one serves. A remote target cannot be served
        here."""
        config, documents = self.config, corpus.heldout[:SERVED_WHILE_TRAINING]
        if not documents or not config.loop.serve_share or config.remote.features_at:
            return
        if trainer.parallel.most(float(not has_room(target))) > 0:
            self.progress.say(
                "note: no memory is free for serving while it trains: held-out prompts are served at the end only"
            )
            return
        own = self._vocabulary(corpus, target, draft_ids)
        server = heldout_server(config.target, trainer.drafter.raw, documents, SERVED_TOKENS, own)
        trainer.served = lambda weights: server(materialised(weights, trainer.embedding_VD.cpu()))

    def _serve(self, drafter: Path, corpus: Corpus, run: RunFolder) -> dict[str, float]:
        """Serves held-out prompts in the real engine, writes heldout.json, and returns the acceptance length."""
        documents, progress = corpus.heldout[:SERVED_PROMPTS], self.progress
        if not documents:
            return {}
        if self.config.remote.features_at:
            progress.say("note: held-out prompts are not served: the target is elsewhere; give its server the drafter")
            return {}
        progress.say(f"serving {len(documents)} held-out prompts")
        figures = final_figures(self.config.target, drafter, documents, self.config.answering.max_tokens)
        run.write_json("heldout.json", figures)
        progress.say(
            f"held-out prompts, served: {figures['tokens_per_round']:.2f} tokens per round over "
            f"{figures['num_rounds']} rounds"
        )
        if line := agreement(figures):
            progress.say(line)
        return {"heldout": figures["tokens_per_round"]}
