"""`paceline train`: prompts in, drafter out. Stages, each resumed where a killed run left it:

regenerate   runs/x/regenerate/answers/   the target answers the prompts (see `paceline regenerate`)
features     runs/x/features-<what>/      its hidden states, when they are kept on disk
train        runs/x/checkpoints/          then runs/x/drafter/, bfloat16, z-lab's format
serve        runs/x/heldout.json          held-out prompts in the real engine
report       runs/x/report.html           (see `paceline report`)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.commands.regenerate import RegenerateAsk
from paceline.commands.regenerate import regenerate as run_regenerate
from paceline.commands.terminal import print_json, progress, say
from paceline.commands.tracker import Tracker
from paceline.config import EngineConfig, resolve
from paceline.draft.checkpoint import DFlashConfig, read_draft_ids, write_checkpoint
from paceline.draft.dflash import DFlashDrafter
from paceline.draft.registry import SHIPPED
from paceline.engine.llm import LLM
from paceline.errors import CacheError, ConfigError
from paceline.hardware import this_machine
from paceline.hub import resolve as resolve_model
from paceline.model.backends import load_target
from paceline.model.target import Target, head_weight
from paceline.model.tokenizer import Tokenizer
from paceline.prompts import read_prompts
from paceline.runlog import RunFolder
from paceline.train.attention import WAYS
from paceline.train.dataset import Corpus, Place, check_answers, check_vocabulary, labels_of, read_corpus
from paceline.train.features import (
    FeatureSource,
    OnlineFeatures,
    cache_features,
    check_room,
    fingerprint,
    num_feature_bytes,
)
from paceline.train.loop import TrainConfig, Trainer
from paceline.train.losses import Head
from paceline.train.parallel import process_group
from paceline.train.ranks import Ranks
from paceline.train.regenerate import RegenerateConfig
from paceline.train.scaling import ScaledFeatures, begin_without_mean, stored_scale, train_in_scaled_units
from paceline.train.served import serve_heldout
from paceline.train.start import DrafterShape, network_for, scale_first_logits
from paceline.train.tiny import write_tiny_target

HELDOUT_SHARE, MAX_HELDOUT = 0.02, 128
SERVED_PROMPTS = 16
SERVED_BATCH = 8
SCALES = ("default", "tiny")
ENGINE_SETTINGS = ("device", "dtype", "threads", "backend", "weight_format")
"""What `settings` may say of how the target runs."""


@dataclass(frozen=True, slots=True)
class TrainAsk:
    """A `train` command, its options read."""

    target: str
    prompts: tuple[str, ...]
    answers: tuple[Path, ...]
    """Folders or files of answers that `regenerate` wrote before."""
    out: Path
    config: TrainConfig
    shape: DrafterShape
    regenerate: RegenerateConfig
    init: str | None = None
    """A drafter to continue; `default` is the one that ships for the target."""
    scale: str = "default"
    limit: int | None = None
    self_written: int = 0
    openers: Path | None = None
    ood: tuple[str, ...] = ()
    """Prompts of another kind, watched but not learned from."""
    max_len: int = 1024
    features: str = "auto"
    """online, cached, or auto: cached when documents are seen more than once and the disk has room."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Of ENGINE_SETTINGS."""
    as_json: bool = False

    def __post_init__(self) -> None:
        if self.scale not in SCALES:
            raise ConfigError(f"scale must be one of {', '.join(SCALES)}, not {self.scale!r}")
        if self.config.loss.vocab and self.shape.draft_vocab:
            raise ConfigError("a draft vocabulary is a smaller loss vocabulary already: leave --loss-vocab out")
        if self.features not in ("auto", "online", "cached"):
            raise ConfigError(f"features must be auto, online or cached, not {self.features!r}")
        if self.config.attention not in ("auto", *WAYS):
            raise ConfigError(f"attention must be auto, {', '.join(WAYS)}, not {self.config.attention!r}")


def train(ask: TrainAsk) -> dict[str, Any]:
    """Go through all stages; returns what --json prints. Raises the errors of its stages."""
    _check_inputs(ask)
    ranks = Ranks.here()
    with process_group(ranks, ask.settings.get("device", "auto")) as wait:
        ask = _at_scale(ask, ranks)
        wait()
        answers, ood = _answers(ask, wait)
        corpus = read_corpus(answers, ask.max_len, HELDOUT_SHARE, MAX_HELDOUT)
        if ranks.is_first:
            _announce(corpus)
        run = _open_run(ask, ranks)
        target = _load_target(ask, ranks)
        check_vocabulary(corpus, target.vocab_size)
        drafter, line = _train(ask, corpus, ood, target, run, ranks, wait)
        del target
        if ranks.is_first:
            line |= _serve(ask, drafter, corpus, run)
            _report(run)
            say(f'drafter: {drafter}; try it: paceline generate --model {ask.target} --drafter {drafter} "..."')
            if ask.as_json:
                print_json(line)
    return line


def _check_inputs(ask: TrainAsk) -> None:
    """What can be known to be wrong before hours are spent on it."""
    _init_folder(ask)
    for source in ask.ood:
        read_prompts(source, ask.limit)
    if ask.answers:
        tokenizer = Tokenizer.from_path(resolve_model(ask.target)) if ask.scale == "default" else None
        check_answers(ask.answers, tokenizer and tokenizer.decode)


def _at_scale(ask: TrainAsk, ranks: Ranks) -> TrainAsk:
    """`tiny` replaces the target by a random one and shrinks everything, unless it was asked for otherwise."""
    if ask.scale == "default":
        return ask
    folder = ask.out / "target"
    if ranks.is_first:
        write_tiny_target(folder)
    prompts = ask.prompts or (() if ask.answers else (str(_tiny_prompts(ask.out, ranks)),))
    config = replace(ask.config, epochs=2.0, blocks_per_step=128, anchors=16, heldout_every=10)
    return replace(
        ask,
        target=str(folder),
        prompts=prompts,
        config=config if ask.config.max_steps is None else replace(config, max_steps=ask.config.max_steps),
        shape=replace(ask.shape, num_layers=2, num_taps=2),
        regenerate=replace(ask.regenerate, max_tokens=48, max_prompt_tokens=128),
        max_len=256,
    )


def _tiny_prompts(out: Path, ranks: Ranks) -> Path:
    file = out / "prompts.jsonl"
    if ranks.is_first and not file.exists():
        run = RunFolder(out)
        run.write("prompts.jsonl", "".join(f'{{"prompt": "Say something about number {n}."}}\n' for n in range(96)))
    return file


def _answers(ask: TrainAsk, wait: Callable[[], None]) -> tuple[list[Path], Path | None]:
    """Folders of answers: those given, and those that this run has the target write; and of out-of-distribution ones."""
    folders = list(ask.answers)
    if ask.prompts or ask.self_written or not folders:
        folders.append(_regenerate(ask, ask.prompts, ask.self_written, ask.out / "regenerate"))
    ood = _regenerate(ask, ask.ood, 0, ask.out / "ood") if ask.ood else None
    wait()
    return folders, ood


def _regenerate(ask: TrainAsk, prompts: tuple[str, ...], self_written: int, out: Path) -> Path:
    settings = {"model": ask.target, **ask.settings}
    asked = RegenerateAsk(
        settings, prompts, self_written, ask.openers if self_written else None, ask.regenerate, ask.limit, out
    )
    return Path(run_regenerate(asked)["answers"])


def _announce(corpus: Corpus) -> None:
    num_answer_tokens = sum(document.num_anchors for document in corpus.train)
    say(
        f"{len(corpus.train)} documents to learn from ({num_answer_tokens} places for blocks), {len(corpus.heldout)} held out; "
        f"{corpus.num_loops_cut} cut where they repeat themselves, {corpus.num_too_short} too short"
    )


def _open_run(ask: TrainAsk, ranks: Ranks) -> RunFolder:
    if not ranks.is_first:
        return RunFolder(ask.out)
    if (ask.out / "checkpoints" / "latest").exists():
        return RunFolder.open(ask.out)
    described = {"target": ask.target, "prompts": ask.prompts, "answers": ask.answers, "init": ask.init, "train": ask.config}
    return RunFolder.create("train", {**described, "shape": ask.shape, "regenerate": ask.regenerate}, ask.out)


def _load_target(ask: TrainAsk, ranks: Ranks) -> Target:
    known = {name: value for name, value in ask.settings.items() if name in ENGINE_SETTINGS}
    settings = resolve(EngineConfig.of(model=ask.target, **known))
    if settings.threads or ranks.world > 1:
        torch.set_num_threads(settings.threads or 1)
    device = f"cuda:{ranks.local}" if settings.device == "cuda" and ranks.world > 1 else settings.device
    return load_target(
        ask.target,
        dtype=getattr(torch, settings.dtype),
        device=device,
        max_len=ask.max_len,
        backend=settings.backend,
        weight_format=settings.weight_format,
    )


def _train(
    ask: TrainAsk, corpus: Corpus, ood: Path | None, target: Target, run: RunFolder, ranks: Ranks, wait: Callable[[], None]
) -> tuple[Path, dict[str, Any]]:
    """The loop, its figures into metrics.jsonl; the finished drafter in `out/drafter`."""
    raw, network = network_for(target, ask.target, ask.shape, _init_folder(ask), ask.config.seed)
    network.to(target.device)
    config, loss = network.config, ask.config.loss
    draft_ids = _draft_ids(ask.shape.draft_vocab, corpus, target)
    head = _head(target, config, draft_ids)
    embedding_VD = target.embed(torch.arange(target.vocab_size, device=target.device)).clone()
    features_of = partial(_features, ask, target, config, ranks=ranks, wait=wait)
    features = features_of(corpus.train, "features")
    scale_F, mean_F = stored_scale(ask.out / "feature-scale.safetensors", features, corpus.train, ranks.is_first)
    wait()
    train_in_scaled_units(network, scale_F)
    if ask.init is None and ask.shape.start == "random":
        begin_without_mean(network, mean_F)
    machine = this_machine(str(target.device).partition(":")[0])
    trainer = Trainer(
        network, raw, corpus, ScaledFeatures(features, scale_F), embedding_VD, head, ask.config,
        folder=ask.out / "checkpoints",
        peak_flops=machine.flops_per_s.get("bfloat16" if ask.config.autocast else "float32"),
        ranks=ranks,
    )  # fmt: skip
    if corpus.heldout:
        heldout = ScaledFeatures(features_of(corpus.heldout, "features-heldout"), scale_F)
        trainer.heldout["heldout"] = (corpus.heldout, heldout)
    if ood is not None:
        others = read_corpus([ood], ask.max_len, 0.0).train[:MAX_HELDOUT]
        trainer.heldout["ood"] = (others, ScaledFeatures(features_of(others, "features-ood"), scale_F))
    if not trainer.resume() and ask.init is None:
        labels_T, valid_T = _first_labels(trainer)
        rows_T, reached_T = head.local(labels_T)
        is_learned_T = valid_T & reached_T
        scale_first_logits(network, trainer.first_hidden()[is_learned_T], head, rows_T[is_learned_T])
    if loss.vocab and trainer.vocabulary is None:
        say("note: the loss vocabulary has no effect: it is not smaller than the target's")
    if ask.config.parallel == "sharded" and ranks.world == 1:
        say("note: --parallel sharded has no effect on one process: start several with torchrun")
    with Tracker(run, trainer, ranks) as tracker:
        trainer.run(tracker.on_step, say)
    folder, weights = ask.out / "drafter", trainer.weights()
    if ranks.is_first:
        drafted = continued_draft_ids(_init_folder(ask), corpus, target) if draft_ids is None else draft_ids
        write_checkpoint(folder, raw, {name: tensor.bfloat16() for name, tensor in weights.items()}, drafted)
    last = tracker.last
    return folder, {"drafter": folder, "run": run.path, "steps": trainer.state.step, "blocks": trainer.state.num_blocks, **last}


def _draft_ids(number: int | None, corpus: Corpus, target: Target) -> Tensor | None:
    """The most frequent tokens, to which training and drafting keep, or None for all."""
    if number is None or number >= target.vocab_size:
        return None
    counts_V = torch.from_numpy(corpus.token_counts(target.vocab_size))
    chosen = torch.argsort(counts_V, descending=True, stable=True)[:number].sort().values
    share = float(counts_V[chosen].sum() / counts_V.sum())
    say(f"drafting among {number} of {target.vocab_size} tokens, {share:.1%} of what the answers hold")
    return chosen


def continued_draft_ids(init: Path | None, corpus: Corpus, target: Target) -> Tensor | None:
    """What a drafter that began as `init` drafts among: what `init` did, and every token of the new answers.

    None, all tokens, when `init` drafts among all. The head's rows are the target's: tokens may join at any time.
    """
    known = None if init is None else read_draft_ids(init)
    if known is None:
        return None
    new = torch.from_numpy(corpus.token_counts(target.vocab_size)).nonzero().flatten()
    return torch.cat([known, new.to(known.dtype)]).unique()


def _head(target: Target, config: DFlashConfig, draft_ids: Tensor | None) -> Head:
    weight_VD = head_weight(target)
    if draft_ids is not None:
        draft_ids = draft_ids.to(weight_VD.device)
        weight_VD = weight_VD[draft_ids]
    return Head(weight_VD, config.output_multiplier, config.final_logit_softcapping, draft_ids)


def _first_labels(trainer: Trainer) -> tuple[Tensor, Tensor]:
    """Labels of the slots of `first_hidden`, and which of them are valid."""
    chosen, _, _ = trainer.planner.step(Place())
    number, anchors_A = chosen[0]
    labels, valid = labels_of(trainer.corpus.train[number], anchors_A, trainer.network.config.block_size)
    return torch.from_numpy(labels).flatten().to(trainer.device), torch.from_numpy(valid).flatten().to(trainer.device)


def _init_folder(ask: TrainAsk) -> Path | None:
    if ask.init is None:
        return None
    folder = SHIPPED / ask.target if ask.init == "default" else Path(ask.init).expanduser()
    if not (folder / "config.json").is_file():
        raise ConfigError(f"--init {ask.init}: there is no drafter in {folder}: give a folder with config.json")
    return folder


def _features(
    ask: TrainAsk,
    target: Target,
    config: DFlashConfig,
    documents: list[Any],
    name: str,
    *,
    ranks: Ranks,
    wait: Callable[[], None],
) -> FeatureSource:
    """Online or cached, as asked or as it pays."""
    taps, needs_final = config.target_layer_ids, ask.config.loss.needs_target_probs
    if ask.features == "online" or (ask.features == "auto" and not _pays(ask, target, documents, taps, needs_final)):
        return OnlineFeatures(target, documents, taps, needs_final)
    mark = fingerprint(ask.target, target.dtype, documents, taps, needs_final)
    folder = ask.out / f"{name}-{mark}"
    num_bytes = num_feature_bytes(documents, target, taps, needs_final)
    own = sum(1 for index in range(len(documents)) if index // 32 % ranks.world == ranks.rank)
    if ranks.is_first:
        say(f"features of {len(documents)} documents: {num_bytes / 1e9:.2f} GB in {folder}")
    with progress("features", own) if ranks.is_first else contextlib.nullcontext(lambda text: None) as advance:
        on_document = partial(advance, "features")
        source = cache_features(folder, target, documents, taps, needs_final=needs_final, ranks=ranks, on_document=on_document)
    wait()
    return source


def _pays(ask: TrainAsk, target: Target, documents: list[Any], taps: tuple[int, ...], needs_final: bool) -> bool:
    if ask.config.epochs <= 1.0 and ask.config.max_steps is None:
        return False
    try:
        check_room(ask.out, num_feature_bytes(documents, target, taps, needs_final))
    except CacheError:
        say("note: the disk has no room for features: the target computes them anew every epoch")
        return False
    return True


def _serve(ask: TrainAsk, folder: Path, corpus: Corpus, run: RunFolder) -> dict[str, Any]:
    """Tokens per round over held-out prompts in the real engine."""
    documents = corpus.heldout[:SERVED_PROMPTS]
    if not documents:
        return {"heldout": {}}
    say(f"serving {len(documents)} held-out prompts")
    max_tokens = ask.regenerate.max_tokens
    longest = max(document.answer_start for document in documents) + max_tokens
    known = {name: value for name, value in ask.settings.items() if name in ENGINE_SETTINGS}
    llm = LLM(ask.target, drafter="none", max_batch=SERVED_BATCH, max_len=longest, **known)
    served = serve_heldout(llm, DFlashDrafter.from_folder(folder), documents, max_tokens)
    run.write_json("heldout.json", {"tokens_per_round": served.tokens_per_round, **_plain(served)})
    say(f"held-out prompts, served: {served.tokens_per_round:.2f} tokens per round over {served.num_rounds} rounds")
    return {"heldout": {"heldout": served.tokens_per_round}}


def _plain(served: Any) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(served)


def _report(run: RunFolder) -> None:
    """The page, when matplotlib is there."""
    try:
        from paceline.commands.report import report

        report(run.path)
    except (ConfigError, CacheError) as error:
        say(f"note: no report.html ({error})")
