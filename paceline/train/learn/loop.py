"""The training loop: steps of blocks, computed pack by pack, in one process or many, resumable at every checkpoint.

    chosen blocks -> packs -> network(embedding, features) -> head_loss -> backward ... -> sum of processes -> optimiser

A run resumed from a checkpoint, and a run on two processes instead of one, have the same data, steps and losses. The
optimiser is AdamW, or Muon for matrices with AdamW for the rest; the learning rate warms up, then follows a cosine.
"""

from __future__ import annotations

import functools
import math
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.draft.dflash2.drafter import ExtendedNetwork
from paceline.errors import ConfigError, TrainingError
from paceline.report.tables import ignore
from paceline.runs.ranks import Ranks
from paceline.train.config import LoopConfig
from paceline.train.documents.dataset import Corpus, Document, Place, StepPlanner
from paceline.train.features.hidden_states import FeatureSource
from paceline.train.learn.checkpoint import check_same, latest_checkpoint, save_best, save_checkpoint
from paceline.train.learn.losses import Head, LossVocabulary, SlotMetrics, Slots, head_loss, unigram_entropy
from paceline.train.learn.optimisers import Optimisers, learning_rate_share
from paceline.train.learn.packs import Chosen, Pack, PackBudget, Packer, Trainable, heldout_anchors
from paceline.train.learn.part import factors, restore_factors, restrict
from paceline.train.methods.dspark import DSparkTrainable
from paceline.train.methods.eagle3 import Eagle3Trainable
from paceline.train.methods.mtp import MtpTrainable
from paceline.train.methods.selector import BlockSample, DFlash2Trainable
from paceline.train.processes.parallel import make_parallel, recompute_layers

HELDOUT_ANCHORS = 8
NOT_SHARDABLE = (DFlash2Trainable, DSparkTrainable, Eagle3Trainable, MtpTrainable)
REGRESSION = 0.97
"""An out-of-distribution eal (expected acceptance length) below this share of its maximum is a regression."""
EQUAL_RATIO = 0.97
"""Served acceptance lengths with a ratio above this count as equal (noise); then the expected ones are compared."""


@dataclass(slots=True)
class _State:
    step: int = 0
    place: Place = field(default_factory=Place)
    seconds: float = 0.0
    """Seconds spent in steps."""
    elapsed_s: float = 0.0
    """Seconds of training up to the last step: steps, and the evaluations and checkpoints between them."""
    num_blocks: int = 0
    num_tokens: int = 0
    best_ood_eal: float = 0.0
    best_eal: float = 0.0
    """Largest eal of held-out documents among saved best weights; teacher-forced."""
    best_served: float = 0.0
    """Largest served acceptance length of held-out prompts."""
    serving_s: float = 0.0
    """Seconds spent serving held-out prompts."""


class Trainer:
    """Trains one drafter network. `resume` loads the latest checkpoint; `run` trains up to the configured steps or
    minutes."""

    def __init__(
        self,
        drafter: Trainable,
        corpus: Corpus,
        features: FeatureSource,
        embedding_VD: Tensor,
        head: Head,
        config: LoopConfig,
        *,
        folder: Path,
        peak_flops: float | None = None,
        ranks: Ranks | None = None,
        heldout_head: Head | None = None,
        wait: Callable[[], None] = ignore,
    ) -> None:
        """`heldout_head`: head for held-out documents, if it differs from `head` (a draft vocabulary). `peak_flops`:
        the device's FLOP/s. `wait`: waits for all processes without a timeout, while the first one serves or writes."""
        self.drafter, self.network, self.config, self.folder = drafter, drafter.network, config, folder
        self.embedding_VD, self.head, self.ranks = embedding_VD, head, ranks or Ranks()
        self.heldout_head, self.wait = heldout_head or head, wait
        self.device = embedding_VD.device
        self.corpus, self.state = corpus, _State()
        sizes = {"blocks_per_step": config.blocks_per_step, "anchors": config.anchors, "block_size": drafter.block_size}
        self.planner = StepPlanner(corpus.train, **sizes, seed=config.seed)
        window = getattr(drafter, "context_window", None)
        self.budget = PackBudget(config.blocks_per_pack, config.tokens_per_pack, drafter.block_size, window)
        self.packer = Packer(drafter.block_size, corpus.train, features, self.device, window)
        self.parallel = make_parallel(config.parallel, self.ranks, self.device)
        if config.gradient_checkpointing:
            recompute_layers(drafter.layers)
        if config.parallel == "sharded" and self.ranks.world > 1 and isinstance(drafter, NOT_SHARDABLE):
            raise ConfigError("only DFlash drafters are trained in parts: use --parallel replicated")
        restrict(self.network, config)
        self.parallel.prepare(drafter, config.autocast)
        self.optimisers = Optimisers(self.network, config.optim)
        self.vocabulary = self._loss_vocabulary()
        self.heldout: dict[str, tuple[Sequence[Document], FeatureSource]] = {}
        """Name -> (documents, features) evaluated every `heldout_every` steps; `ood` is checked for regressions."""
        self.peak_flops = peak_flops
        drafted = None if head.columns is None else head.columns.cpu().numpy()
        self.unigram_entropy = unigram_entropy(corpus.token_counts(int(embedding_VD.shape[0])), drafted)
        """Loss in nats of a drafter that knows only word frequencies."""
        self.served: Callable[[dict[str, Tensor]], float] | None = None
        """Returns the served acceptance length of held-out prompts with these weights; called in the first process."""
        self.pack: Callable[[list[Chosen]], Pack] = self.packer.pack
        """Returns the pack of these blocks; replaced by `stream.packs_ahead`."""

    @property
    def total_steps(self) -> int:
        return self.config.max_steps or max(1, round(self.config.epochs * self.planner.steps_per_epoch))

    @property
    def share_done(self) -> float:
        """Completed share of the run, 0 to 1: the larger one of the shares of its steps and of its allowed minutes."""
        by_minutes = self.state.elapsed_s / 60 / self.config.max_minutes if self.config.max_minutes else 0.0
        return min(1.0, max(self.state.step / self.total_steps, by_minutes))

    def resume(self) -> bool:
        """Loads the latest checkpoint and returns True; returns False without one. Raises ConfigError if the run's
        settings differ from the checkpoint's, ProcessesError if processes read different checkpoints."""
        checkpoint = latest_checkpoint(self.folder)
        self.parallel.check_alike("the checkpoint it reads", lambda: "none" if checkpoint is None else checkpoint.mark)
        if checkpoint is None:
            return False
        identity, state = checkpoint.trainer["identity"], checkpoint.trainer["state"]
        check_same(self.folder, identity, self._identity(), ", or continue from its drafter with --init")
        if self.config.learn == "low-rank":
            restore_factors(self.network, checkpoint)
        else:
            self.parallel.load(self.network, checkpoint.weights)
        self.optimisers.fill(checkpoint.optimisers, self.parallel.laid_out)
        self.state = _State(**{"elapsed_s": state["seconds"], **state, "place": Place(**state["place"])})
        return True

    def run(
        self,
        on_step: Callable[[dict[str, Any]], None] = ignore,
        notice: Callable[[str], None] = ignore,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Trains up to the configured steps or minutes, and writes checkpoints. Returns True at the end, False if
        stopped earlier. Raises TrainingError for a loss that is not finite, ProcessesError if processes differ in
        state.
        - `on_step`: called after each step with its measurements (name -> value), a line of metrics.jsonl. After an
          evaluation they include "heldout" and, if the run has out-of-distribution documents, "ood".
        - `notice`: called with each warning text.
        - `should_stop`: called after each step; if it returns True in one process, all processes save a checkpoint and
          stop."""
        self.parallel.agree(self.network, self.optimisers.states(), repr(asdict(self.state)))
        last_saved, most_s = time.monotonic(), 60 * self.config.checkpoint_minutes
        counted = last_saved
        while self.share_done < 1.0:
            figures = self._step()
            self.state.elapsed_s += self.parallel.most(time.monotonic() - counted)
            counted = time.monotonic()
            is_last = self.share_done >= 1.0
            if self.heldout and (self.state.step % self.config.heldout_every == 0 or is_last):
                figures |= self._evaluate_all(notice)
                self._keep_best(figures, is_last)
            on_step(figures)
            is_stopped = not is_last and self.parallel.most(float(should_stop())) > 0  # collective: all call or none
            if is_last or is_stopped or self.parallel.most(time.monotonic() - last_saved) > most_s:
                self.save()
                last_saved = time.monotonic()
            if is_stopped:
                return False
        return True

    def save(self) -> None:
        """Writes a checkpoint, except before the first step. Every process must call it; the first one writes. Raises
        CacheError for disk errors; the previous checkpoint is retained."""
        if not self.state.step:
            return
        # Every process must call these; only the first one gets the tensors.
        weights = self.parallel.weights(self.network)
        optimisers = self.parallel.whole([*self.optimisers.states(), *factors(self.network)])
        if self.ranks.is_first:
            trainer = {"step": self.state.step, "state": asdict(self.state), "identity": self._identity()}
            save_checkpoint(self.folder, self.drafter.raw, weights, optimisers, trainer, self.config.keep_last)
        self.wait()

    def _identity(self) -> dict[str, Any]:
        network = self.drafter.network
        return {
            **asdict(self.config),
            "drafter": self.drafter.raw,
            "num_documents": len(self.corpus.train),
            "documents": self._documents,
            **({"codebooks": network.codebooks} if isinstance(network, ExtendedNetwork) else {}),
        }

    @functools.cached_property
    def _documents(self) -> str:
        """A checksum of all keys, in order."""
        mark = 0
        for number, document in enumerate(self.corpus.train):
            mark = zlib.crc32(("\n" * (number > 0) + document.key).encode(), mark)
        return f"{mark:08x}"

    def _step(self) -> dict[str, Any]:
        began, state, config = time.perf_counter(), self.state, self.config
        chosen, num_slots, after = self.planner.step(state.place)
        head = self._step_head(chosen)
        own = self.forward_backward(chosen, num_slots, head)
        self.parallel.sum_gradients(self.network)
        loss, metrics = self._summed(*own)
        norm = self.parallel.clip(self.network, config.optim.clip)
        self._check_finite(loss, norm, chosen)
        rate = self.optimisers.step(learning_rate_share(self.share_done))
        num_blocks = sum(len(anchors_A) for _, anchors_A in chosen)
        num_tokens = sum(len(self.corpus.train[number]) for number, _ in chosen)
        seconds = self.parallel.most(time.perf_counter() - began)  # equal in all processes, which decide by it
        self.state = replace(
            state,
            step=state.step + 1,
            place=after,
            seconds=state.seconds + seconds,
            num_blocks=state.num_blocks + num_blocks,
            num_tokens=state.num_tokens + num_tokens,
        )
        flops = self.flops_per_block(head) * num_blocks / seconds
        return {
            "step": self.state.step,
            "epoch": round(after.epoch + after.index / len(self.corpus.train), 4),
            "blocks": self.state.num_blocks,
            "tokens": self.state.num_tokens,
            **metrics.rates(),
            "unigram_entropy": round(self.unigram_entropy, 4),
            "objective": loss,
            "lr": rate,
            "grad_norm": norm,
            "tokens_per_s": num_tokens / seconds,
            "blocks_per_s": num_blocks / seconds,
            "flops_share": flops / (self.peak_flops * self.ranks.world) if self.peak_flops else None,
            "seconds": round(self.state.seconds, 3),
        }

    def forward_backward(self, chosen: list[Chosen], num_slots: int, head: Head) -> tuple[float, SlotMetrics]:
        """Computes this process's share of a training step: adds the gradients to the weights' `grad`, and returns
        (loss, metrics) of the share. `chosen`: the step's blocks for all processes. `num_slots`: number of draft
        positions in these, by which the loss is divided. `head`: LM head."""
        metrics, loss = SlotMetrics.zero(self.drafter.block_size - 1), 0.0
        pieces = self.parallel.pieces(chosen, self.budget)
        for number, piece in enumerate(pieces):
            is_measured = number == 0 and piece.weight > 0  # weight 0: a filler pack
            scalar, measured = self.pack_loss(self.pack(piece.chosen), head, num_slots, is_measured)
            self.parallel.backward(scalar * piece.weight, is_last=number == len(pieces) - 1)
            loss += float(scalar.detach()) * piece.weight
            metrics.flat += measured.flat
        return loss, metrics

    def pack_loss(
        self, pack: Pack, head: Head, num_slots: float, is_measured: bool = True
    ) -> tuple[Tensor, SlotMetrics]:
        """Returns (loss, metrics) of one pack (batch of training blocks), with the LM head `head`. The loss is the
        pack's sum divided by `num_slots`, the number of draft positions in the whole step. With `is_measured` False,
        metrics are zero."""
        if isinstance(self.drafter, Eagle3Trainable):
            inputs = pack, self.embedding_VD, head, self.config.loss, num_slots
            return self.drafter.loss(*inputs, is_autocast=self.config.autocast, is_measured=is_measured)
        hidden_TD, config = self.drafter.hidden(pack, self.embedding_VD, self.config.autocast), self.config
        if isinstance(self.drafter, DSparkTrainable):
            return self.drafter.loss(hidden_TD, pack, head, self.embedding_VD, config.loss, num_slots, is_measured)
        loss, metrics = head_loss(hidden_TD, pack.slots, head, config.loss, num_slots, is_measured)
        if isinstance(self.drafter, DFlash2Trainable):
            is_learning = config.learn == "all" and self.share_done >= config.selector_from
            sample = BlockSample(config.selector_share, f"{config.seed} {self.state.step}")
            selector_loss, selector_metrics = self.drafter.selector_loss(
                hidden_TD, pack, self.heldout_head, self.embedding_VD, config.loss, num_slots,  # not a sampled head
                is_measured=is_measured, is_learning=is_learning, sample=sample,
            )  # fmt: skip
            loss = loss + selector_loss
            metrics.flat = metrics.flat + selector_metrics.flat
        return loss, metrics

    @torch.no_grad()
    def first_slots(self) -> tuple[Tensor, Slots]:
        """Returns the inputs of `scale_first_logits`, which scales a new drafter before training: (hidden states [A *
        K, D], labels) for the A blocks of the first training document, K draft positions each."""
        chosen, _, _ = self.planner.step(Place())
        pack = self.packer.pack(chosen[:1])
        return self.drafter.hidden(pack, self.embedding_VD, self.config.autocast), pack.slots

    @torch.no_grad()
    def evaluate(self, documents: Sequence[Document], features: FeatureSource) -> dict[str, Any]:
        """Evaluates the drafter on `documents`: it drafts blocks after the documents' own tokens (teacher forcing).
        Returns averages such as "loss" and "eal" (expected acceptance length); `SlotMetrics.rates` lists all. The
        processes share the work, so all of them must call it."""
        packer = Packer(self.drafter.block_size, documents, features, self.device, self.budget.window)
        metrics = SlotMetrics.zero(self.drafter.block_size - 1)
        for piece in self.parallel.pieces(heldout_anchors(documents, HELDOUT_ANCHORS), self.budget):
            is_measured = piece.weight > 0
            _, measured = self.pack_loss(packer.pack(piece.chosen), self.heldout_head, 1.0, is_measured)
            metrics.flat += measured.flat
        return self._summed(0.0, metrics)[1].rates()

    def _evaluate_all(self, notice: Callable[[str], None]) -> dict[str, Any]:
        figures = {name: self.evaluate(documents, features) for name, (documents, features) in self.heldout.items()}
        if "ood" in figures:
            eal = figures["ood"]["eal"]
            if eal < REGRESSION * self.state.best_ood_eal:
                notice(
                    f"step {self.state.step}: out of distribution {eal:.2f} tokens a round are expected, "
                    f"{self.state.best_ood_eal:.2f} were before: the drafter forgets; mix in answers of other kinds"
                )
            self.state.best_ood_eal = max(self.state.best_ood_eal, eal)
        return figures

    def _keep_best(self, figures: dict[str, Any], is_last: bool) -> None:
        """Saves the weights if they are the best so far on held-out documents and no regression on others. The served
        acceptance length decides if prompts are served, else (`keep` best) the expected one."""
        eal = figures.get("heldout", {}).get("eal")
        is_wanted = self.config.keep == "best" or self.served is not None
        if not is_wanted or eal is None or (eal <= self.state.best_eal and not is_last):
            return
        if "ood" in figures and figures["ood"]["eal"] < REGRESSION * self.state.best_ood_eal:
            return
        if self.served is None:
            if eal > self.state.best_eal:
                self.state.best_eal = eal
                self._save_best(self.parallel.weights(self.network), {"eal": eal})
        elif is_last or self.state.serving_s <= self.config.serve_share * self.state.seconds:
            self._serve_and_keep(figures, eal)

    def _serve_and_keep(self, figures: dict[str, Any], eal: float) -> None:
        weights = self.parallel.weights(self.network)  # in every process
        began = time.monotonic()
        assert self.served is not None
        rate = self.served(weights) if self.ranks.is_first else 0.0
        self.wait()
        rate = self.parallel.most(rate)
        self.state.serving_s += self.parallel.most(time.monotonic() - began)
        figures["served"] = {"tokens_per_round": rate}
        is_equal = eal > self.state.best_eal and rate >= EQUAL_RATIO * self.state.best_served
        self.state.best_eal = max(self.state.best_eal, eal)
        if rate > self.state.best_served or is_equal:
            self.state.best_served = max(self.state.best_served, rate)
            self._save_best(weights, {"eal": eal, "served": rate})

    def _save_best(self, weights: dict[str, Tensor], figures: dict[str, float]) -> None:
        if self.ranks.is_first:
            save_best(self.folder, self.drafter.raw, weights, {"step": self.state.step, **figures})
        self.wait()

    def _loss_vocabulary(self) -> LossVocabulary | None:
        size = self.config.loss.vocab
        if not size or size >= len(self.head.weight_VD) or self.head.columns is not None:
            return None
        counts_V = torch.from_numpy(self.corpus.token_counts(len(self.head.weight_VD)))
        return LossVocabulary(self.head.weight_VD, counts_V, size)

    def _step_head(self, chosen: list[Chosen]) -> Head:
        """Returns the head for this step's losses, the same in every process."""
        if self.vocabulary is None:
            return self.head
        answers = [self.corpus.train[number].tokens[int(anchors_A[0]) :] for number, anchors_A in chosen]
        labels = torch.from_numpy(np.concatenate(answers)).long()
        generator = torch.Generator().manual_seed(self.config.seed * 1_000_003 + self.state.step)
        return self.vocabulary.head(labels, generator, self.head.scale, self.head.cap)

    def _summed(self, loss: float, metrics: SlotMetrics) -> tuple[float, SlotMetrics]:
        sums = self.parallel.sum(torch.cat([torch.tensor([loss], dtype=torch.float64), metrics.flat]))
        return float(sums[0]), SlotMetrics(sums[1:])

    def _check_finite(self, loss: float, norm: float, chosen: list[Chosen]) -> None:
        """Raises TrainingError for a loss or norm that is not finite, after saving the weights of the last good
        step."""
        if math.isfinite(loss) and math.isfinite(norm):
            return
        self.save()
        keys = ", ".join(self.corpus.train[number].key for number, _ in chosen[:3])
        raise TrainingError(
            f"loss {loss}, gradient norm {norm} in step {self.state.step + 1} (documents {keys}, ...): the checkpoint "
            f"of step {self.state.step} is in {self.folder}; lower --lr, or look at these documents"
        )

    def flops_per_block(self, head: Head) -> float:
        """Returns the FLOPs of training on one block with LM head `head`, forward and backward, without attention
        (about 3%)."""
        tensors, size = [each for layer in self.drafter.layers for each in layer.parameters()], self.drafter.block_size
        frozen = 4.0 if self.config.learn == "low-rank" else 2.0  # gradients of the inputs, or none
        layers = sum((6.0 if each.requires_grad else frozen) * each.numel() for each in tensors if each.ndim == 2)
        return layers * size + 4.0 * (size - 1) * head.weight_VD.numel()
