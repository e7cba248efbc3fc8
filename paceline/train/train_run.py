"""The run `train`: prompts in, drafter out. Stages, each resumed where a killed run left it:

regenerate   runs/x/regenerate/answers/   the target answers the prompts (regenerate_run.py)
features     runs/x/features-<what>/      its hidden states, when they are kept on disk
train        runs/x/checkpoints/          then runs/x/drafter/, bfloat16, z-lab's format
serve        runs/x/heldout.json          held-out prompts in the real engine
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.draft.base import Drafter
from paceline.draft.checkpoint import write_checkpoint
from paceline.draft.dflash import DFlashDrafter
from paceline.engine.llm import LLM
from paceline.errors import CacheError
from paceline.figures import Rounds
from paceline.hardware import this_machine
from paceline.hub import resolve as resolve_model
from paceline.model.backends import load_target, settle
from paceline.model.target import Target
from paceline.model.tokenizer import Tokenizer
from paceline.plan import FixedPlanner
from paceline.prompts import read_prompts
from paceline.runlog import RunFolder, write_whole
from paceline.tables import Progress
from paceline.train.checkpoint import best_checkpoint
from paceline.train.config import PromptsConfig, RegenerateConfig, TrainConfig
from paceline.train.copied import fuse_taps
from paceline.train.dataset import Corpus, Document, check_answers, check_vocabulary, read_corpus
from paceline.train.features import (
    FeatureSource,
    OnlineFeatures,
    ScaledFeatures,
    begin_without_mean,
    cache_features,
    check_room,
    fingerprint,
    stored_scale,
    train_in_scaled_units,
)
from paceline.train.loop import Trainer
from paceline.train.packs import DFlashTrainable
from paceline.train.parallel import process_group
from paceline.train.ranks import Ranks, only_run
from paceline.train.regenerate_run import run as regenerate
from paceline.train.start import continued_draft_ids, head_of, init_folder, most_frequent, network_for, scale_first_logits
from paceline.train.tiny import write_tiny_target
from paceline.types import SamplingParams

HELDOUT_SHARE, MAX_HELDOUT = 0.02, 128
SERVED_PROMPTS, SERVED_BATCH = 16, 8
SCALARS = ("loss", "objective", "eal", "accuracy", "lr", "grad_norm", "tokens_per_s", "blocks_per_s", "flops_share")
LINE_EVERY = 25
"""Steps between lines of news."""


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
        process_group(ranks, config.target.device) as wait,
    ):
        config = _at_scale(config, ranks)
        wait()
        return _Stages(config, ranks, wait, progress).run()


def _check_inputs(config: TrainConfig) -> None:
    """What can be known to be wrong before hours are spent on it."""
    init_folder(config.init, config.target.model)
    for source in config.ood:
        read_prompts(source, config.asked.limit)
    if config.answers:
        tokenizer = Tokenizer.from_path(resolve_model(config.target.model)) if config.scale == "default" else None
        check_answers(config.answers, tokenizer and tokenizer.decode)


def _at_scale(config: TrainConfig, ranks: Ranks) -> TrainConfig:
    """`tiny` replaces the target by a random one and shrinks everything, unless it was asked for otherwise."""
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
    steps = config.loop.max_steps
    return replace(
        config,
        target=replace(config.target, model=str(folder)),
        asked=replace(config.asked, prompts=prompts),
        loop=replace(config.loop, epochs=2.0, max_steps=steps, blocks_per_step=128, anchors=16, heldout_every=10),
        shape=replace(config.shape, num_layers=2, num_taps=2),
        answering=replace(config.answering, max_tokens=48, max_prompt_tokens=128),
        max_len=256,
    )


class _Stages:
    """The stages of one process of a run."""

    def __init__(self, config: TrainConfig, ranks: Ranks, wait: Callable[[], None], progress: Progress) -> None:
        self.config, self.ranks, self.wait, self.everyone = config, ranks, wait, progress
        self.progress = progress if ranks.is_first else Progress()

    def run(self) -> TrainResult:
        config, progress = self.config, self.progress
        answers, ood = self._answers()
        corpus = read_corpus(answers, config.max_len, HELDOUT_SHARE, MAX_HELDOUT)
        num_places = sum(document.num_anchors for document in corpus.train)
        progress.say(
            f"{len(corpus.train)} documents to learn from ({num_places} places for blocks), {len(corpus.heldout)} held out; "
            f"{corpus.num_loops_cut} cut where they repeat themselves, {corpus.num_too_short} too short"
        )
        folder = self._open()
        target = self._load_target()
        check_vocabulary(corpus, target.vocab_size)
        result = self._train(corpus, ood, target, folder)
        del target
        if self.ranks.is_first:
            result = replace(result, heldout=self._serve(result.drafter, corpus, folder))
        model, drafter = config.target.model, result.drafter
        progress.say(f'drafter: {drafter}; try it: paceline generate --model {model} --drafter {drafter} "..."')
        return result

    def _answers(self) -> tuple[list[Path], Path | None]:
        """Folders of answers: those given, and those that this run has the target write; and of out-of-distribution ones."""
        config, folders = self.config, list(self.config.answers)
        if config.asked.prompts or config.asked.self_written or not folders:
            folders.append(self._regenerate(config.asked, "regenerate"))
        ood = self._regenerate(PromptsConfig(config.ood, config.asked.limit), "ood") if config.ood else None
        self.wait()
        return folders, ood

    def _regenerate(self, asked: PromptsConfig, name: str) -> Path:
        config = self.config
        return regenerate(RegenerateConfig(config.out / name, config.target, asked, config.answering), self.everyone).answers

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
        return load_target(replace(settings, device=device, max_batch=1, max_len=self.config.max_len))

    def _train(self, corpus: Corpus, ood: Path | None, target: Target, run: RunFolder) -> TrainResult:
        """The loop, its figures into metrics.jsonl; the finished drafter in `out/drafter`."""
        config, progress = self.config, self.progress
        draft_ids = most_frequent(config.shape.draft_vocab, corpus, target, progress.say)
        trainer = self._trainer(corpus, ood, target, draft_ids)
        if config.loop.loss.vocab and trainer.vocabulary is None:
            progress.say("note: the loss vocabulary has no effect: it is not smaller than the target's")
        if config.loop.parallel == "sharded" and self.ranks.world == 1:
            progress.say("note: --parallel sharded has no effect on one process: start several with torchrun")
        if trainer.state.step:
            progress.say(f"going on after step {trainer.state.step}")
        if self.ranks.is_first:
            with tracked(run, trainer, progress) as on_step:
                trainer.run(on_step, progress.say)
        else:
            trainer.run()
        folder, weights = config.out / "drafter", trainer.parallel.weights(trainer.network)
        rates = newest_rates(run, trainer)
        if self.ranks.is_first:
            if config.loop.keep == "best" and (best := self._best(trainer)):
                weights, rates["eal"] = best
            if draft_ids is None:
                draft_ids = continued_draft_ids(init_folder(config.init, config.target.model), corpus, target)
            halved = {name: tensor.bfloat16() for name, tensor in weights.items()}
            write_checkpoint(folder, trainer.drafter.raw, halved, draft_ids)
        return TrainResult(folder, run.path, trainer.state.step, trainer.state.num_blocks, **rates)

    def _best(self, trainer: Trainer) -> tuple[dict[str, Tensor], float] | None:
        """The kept weights, and what they were kept for."""
        kept = best_checkpoint(trainer.folder)
        if kept is None:
            self.progress.say("note: --keep best has no effect: there are no held-out documents, so the last weights are taken")
            return None
        weights, told = kept
        self.progress.say(f"kept: the weights after step {told['step']}, {told['eal']:.2f} tokens a round expected")
        return weights, told["eal"]

    def _trainer(self, corpus: Corpus, ood: Path | None, target: Target, draft_ids: Tensor | None) -> Trainer:
        """A new drafter, `init`, or the newest checkpoint; with features of the documents in one scale."""
        config, loop = self.config, self.config.loop
        init = init_folder(config.init, config.target.model)
        raw, network = network_for(target, config.target.model, config.shape, init, loop.seed)
        network.to(target.device)
        drafting = head_of(target, network.config, draft_ids)
        head = drafting if draft_ids is None or not loop.loss.vocab else head_of(target, network.config, None)
        embedding_VD = target.embed(torch.arange(target.vocab_size, device=target.device)).clone()
        features_of = partial(self._features, target, network.config.target_layer_ids)
        features = features_of(corpus.train, "features")
        scale_F, mean_F = stored_scale(config.out / "feature-scale.safetensors", features, corpus.train, self.ranks.is_first)
        self.wait()
        if init is None and config.shape.is_copied:
            fuse_taps(network, scale_F)
        train_in_scaled_units(network, scale_F)
        if init is None and not config.shape.is_copied:
            begin_without_mean(network, mean_F)
        flops_per_s = this_machine(target.device.type).flops_per_s.get("bfloat16" if loop.autocast else "float32")
        trainer = Trainer(
            DFlashTrainable(network, raw, loop.attention), corpus, ScaledFeatures(features, scale_F), embedding_VD, head, loop,
            folder=config.out / "checkpoints", peak_flops=flops_per_s, ranks=self.ranks, heldout_head=drafting,
        )  # fmt: skip
        watched = {"heldout": corpus.heldout, "ood": read_corpus([ood], config.max_len, 0.0).train[:MAX_HELDOUT] if ood else []}
        for name, documents in watched.items():
            if documents:
                trainer.heldout[name] = documents, ScaledFeatures(features_of(documents, f"features-{name}"), scale_F)
        if not trainer.resume() and init is None:
            scale_first_logits(network, head, *trainer.first_slots())
        return trainer

    def _features(self, target: Target, taps: tuple[int, ...], documents: list[Document], name: str) -> FeatureSource:
        """Online or cached, as asked or as it pays."""
        config, needs_final = self.config, self.config.loop.loss.needs_target_probs
        source = OnlineFeatures(target, documents, taps, needs_final)
        if config.features == "online" or (config.features == "auto" and not self._pays(source.num_bytes)):
            return source
        mark = fingerprint(config.target.model, target.dtype, documents, taps, needs_final)
        folder = config.out / f"{name}-{mark}"
        self.progress.say(f"features of {len(documents)} documents: {source.num_bytes / 1e9:.2f} GB in {folder}")
        with self.progress.bar("features", len(self.ranks.share_of(len(documents)))) as advance:
            kept = cache_features(folder, source, self.ranks, partial(advance, "features"))
        self.wait()
        return kept

    def _pays(self, num_bytes: int) -> bool:
        """Whether documents are seen more than once and the disk has room for their features."""
        if self.config.loop.epochs <= 1.0 and self.config.loop.max_steps is None:
            return False
        try:
            check_room(self.config.out, num_bytes)
        except CacheError:
            self.progress.say("note: the disk has no room for features: the target computes them anew every epoch")
            return False
        return True

    def _serve(self, drafter: Path, corpus: Corpus, run: RunFolder) -> dict[str, float]:
        """Tokens per round over held-out prompts in the real engine."""
        documents, target = corpus.heldout[:SERVED_PROMPTS], self.config.target
        if not documents:
            return {}
        self.progress.say(f"serving {len(documents)} held-out prompts")
        max_tokens = self.config.answering.max_tokens
        longest = max(document.answer_start for document in documents) + max_tokens
        llm = LLM.of(replace(target, drafter="none", max_batch=SERVED_BATCH, max_len=longest))
        served = serve_heldout(llm, DFlashDrafter.from_folder(drafter), documents, max_tokens)
        run.write_json("heldout.json", {"tokens_per_round": served.tokens_per_round, **asdict(served)})
        self.progress.say(
            f"held-out prompts, served: {served.tokens_per_round:.2f} tokens per round over {served.num_rounds} rounds"
        )
        return {"heldout": served.tokens_per_round}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldoutFigures(Rounds):
    """Figures over some held-out prompts, served by the real engine. Those of the loop are teacher-forced: they see only blocks
    anchored in the target's own text, one at a time."""

    num_prompts: int
    num_tokens: int
    texts: tuple[str, ...]
    """The first few answers, to be read: text that repeats itself is drafted easily."""


def serve_heldout(
    llm: LLM, drafter: Drafter, documents: list[Document], max_tokens: int = 128, num_texts: int = 3
) -> HeldoutFigures:
    """Answer the documents' prompts greedily with this drafter. Raises ContextLengthError when one does not fit the cache."""
    llm.use_drafter(drafter)
    llm.engine.planner = FixedPlanner()  # the drafter is measured, not what it brings on this machine
    prompts = [document.tokens[: document.answer_start].tolist() for document in documents]
    answers = llm.generate_ids(prompts, SamplingParams(max_tokens=max_tokens))
    return HeldoutFigures(
        **asdict(Rounds.sum(answer.stats for answer in answers)),
        num_prompts=len(answers),
        num_tokens=sum(len(answer.token_ids) for answer in answers),
        texts=tuple(answer.text for answer in answers[:num_texts]),
    )


@contextlib.contextmanager
def tracked(run: RunFolder, trainer: Trainer, progress: Progress) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A function for `Trainer.run` that writes each step down and tells `progress`."""
    with progress.bar("training", trainer.total_steps - trainer.state.step) as advance, _tensorboard(run) as add_scalar:

        def on_step(figures: dict[str, Any]) -> None:
            run.log(**figures)
            number, looks = figures["step"], {name: figures[name] for name in ("heldout", "ood") if name in figures}
            text = f"step {number} loss {figures['loss']:.2f} eal {figures['eal']:.2f} {figures['blocks_per_s']:.0f} blocks/s"
            text += "".join(f" {name} {look['eal']:.2f}" for name, look in looks.items()) + f" ({trainer.share_done:.0%})"
            advance(text)
            if number % LINE_EVERY == 0 or "heldout" in looks:
                progress.say(text)
            scalars = {f"train/{name}": figures.get(name) for name in SCALARS}
            for name, look in looks.items():
                scalars |= {f"{name}/{key}": look.get(key) for key in ("loss", "eal", "accuracy")}
            for name, value in scalars.items():
                if value is not None:
                    add_scalar(name, value, number)

        yield on_step


def newest_rates(run: RunFolder, trainer: Trainer) -> dict[str, Any]:
    """The newest eal and loss: on held-out documents where there are some, else on the documents of the last step."""
    name = "heldout" if "heldout" in trainer.heldout else None
    seen = [line.get("heldout") if name else line for line in run.metrics()]
    newest = next((figures for figures in reversed(seen) if figures), {})
    return {key: newest.get(key) for key in ("eal", "loss")}


@contextlib.contextmanager
def _tensorboard(run: RunFolder) -> Iterator[Callable[[str, float, int], Any]]:
    """A function that adds a scalar; it does nothing where TensorBoard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        yield lambda name, value, step: None
        return
    with SummaryWriter(str(run.path / "tensorboard")) as board:
        yield board.add_scalar
