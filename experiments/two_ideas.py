"""Whether DFlash's two ideas compound: {block, token by token} x {injection, input fusion}, at equal size and minutes.

    .venv/bin/python -m paceline regenerate --prompts gsm8k_train.jsonl --limit 1200 --out runs/texts
    .venv/bin/python experiments/two_ideas.py --answers runs/texts --out runs/two-ideas

Four drafters of the 7 tokens after the anchor (the last known token) learn from the same answers of one target:

    block + injection           DFlash: one pass over [anchor, MASK x 7]; the target's hidden states (features) before
                                the anchor are keys and values of every layer
    block + fusion              one pass over that block in EAGLE-3's network: a feature enters with the embedding of
                                the token after it, the last one also with each MASK; layers attend to the block and
                                to the earlier positions' own keys
    token by token + injection  DFlash's layers, causal: one pass per draft, from the drafted tokens
    token by token + fusion     EAGLE-3: one pass per draft, which gets the hidden state of the pass before

Equal: layers (with norms of queries and keys, random at first), features, draft vocabulary, the target's frozen head,
loss (d-pace), AdamW, blocks per step, minutes of steps. With fusion, the first attention's inputs are twice as wide.
Learning rate of a cell: each of `--rates` trains for `--pilot-share` of the minutes; the one with the longest
acceptance length on a third of the held-out documents trains all seeds. The other documents are measured.

Acceptance length: 1 + the leading drafts that are the target's own greedy tokens, mean over anchors; one pass over the
text gives it, since inputs before the first wrong draft are the text's tokens. Intervals: 95%, bootstrap over
documents. A killed run continues with the same command.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.config import EngineConfig
from paceline.draft.dflash.config import DFlashConfig
from paceline.draft.eagle3.checkpoint import Eagle3Config
from paceline.draft.eagle3.drafter import Eagle3Network
from paceline.hardware import this_machine
from paceline.model.backends import load_target, settle
from paceline.report.tables import Column, Table
from paceline.runs.folder import write_results
from paceline.train.config import DrafterShape, LoopConfig, OptimConfig
from paceline.train.documents.dataset import Corpus, read_corpus
from paceline.train.features import hidden_states
from paceline.train.features.hidden_states import ScaledFeatures
from paceline.train.features.stream import packs_ahead
from paceline.train.learn import initial_weights
from paceline.train.learn.attention import make_attention
from paceline.train.learn.loop import Trainer
from paceline.train.learn.losses import Head
from paceline.train.learn.packs import DFlashTrainable, Pack, Packer, Trainable
from paceline.train.methods import eagle3
from paceline.train.methods.copied_layers import settle_units
from paceline.train.plan.target_facts import MachineFacts

NUM_DRAFTS = 7
NAMES = ("block + injection", "block + fusion", "token by token + injection", "token by token + fusion")
CELLS: dict[str, tuple[list[int], list[int]]] = {name: ([place], []) for place, name in enumerate(NAMES)}
RATIOS: dict[str, tuple[list[int], list[int]]] = {
    "injection / fusion, block": ([0], [1]),
    "injection / fusion, token by token": ([2], [3]),
    "block / token by token, injection": ([0], [2]),
    "block / token by token, fusion": ([1], [3]),
    "compounding: injection's gain in a block / its gain token by token": ([0, 3], [1, 2]),
}
"""Ratios of acceptance lengths: the indices in `NAMES` of the factors and of the divisors."""
PILOT_SEED, ANCHORS_MEASURED, NUM_DRAWS = 1000, 64, 1000
say = partial(print, file=sys.stderr, flush=True)


class TokenInjection(DFlashTrainable):
    """Token by token + injection. A block is the text's tokens from the anchor on, and each position predicts the next
    token; positions attend to the injected context and to earlier positions of the block."""

    def hidden(self, pack: Pack, embedding_VD: Tensor, is_autocast: bool) -> Tensor:
        config, dtype = self._config, torch.bfloat16 if is_autocast else torch.float32
        tokens_AK = torch.cat([pack.anchors_A[:, None], pack.slots.labels_AK[:, :-1].long()], dim=1)
        embedded_TD = F.embedding(tokens_AK.flatten(), embedding_VD).float() * config.input_embedding_scale
        layout = replace(pack.layout, block_size=tokens_AK.shape[1])
        attend = make_attention(self._attention, config, layout, dtype)
        with torch.autocast(embedding_VD.device.type, torch.bfloat16, enabled=is_autocast):
            return self.network(embedded_TD, pack.taps_NF.to(dtype), attend)


class TokenFusion(Trainable):
    """Token by token + input fusion: EAGLE-3 as `paceline train` runs it, with the target's frozen head."""

    def __init__(self, network: Eagle3Network, raw: dict[str, Any], block_size: int) -> None:
        self.network, self.raw, self.layers, self.block_size = network, raw, network.layers, block_size
        self._eagle = network

    def hidden(self, pack: Pack, embedding_VD: Tensor, is_autocast: bool) -> Tensor:
        return eagle3.Eagle3Trainable(self._eagle, self.raw, self.block_size).hidden(pack, embedding_VD, is_autocast)


class BlockFusion(TokenFusion):
    """Block + fusion: the network of EAGLE-3 in one pass over the context and all blocks. The context's entry e, at
    position e + 1, attends to the entries up to itself; a block attends to the entries at positions before its anchor,
    and to itself in both directions."""

    def __init__(self, network: Eagle3Network, raw: dict[str, Any], block: DFlashConfig) -> None:
        super().__init__(network, raw, block.block_size)
        self._block = block

    def hidden(self, pack: Pack, embedding_VD: Tensor, is_autocast: bool) -> Tensor:
        layout, size, dtype = pack.layout, len(pack.behind_N), torch.bfloat16 if is_autocast else torch.float32
        in_context = eagle3.ChainAttention(self._eagle.config.shape, layout, dtype)
        layout = replace(layout, context_starts=(1,) * len(layout.anchors))
        in_block = make_attention("auto", self._block, layout, dtype)

        def attend(layer: int, query_THD: Tensor, key_THD: Tensor, value_THD: Tensor) -> Tensor:
            own, context = (key_THD[size:], value_THD[size:]), (key_THD[:size], value_THD[:size])
            context_TX = in_context(layer, query_THD[:size], *context)
            return torch.cat([context_TX, in_block(layer, query_THD[size:], own, context).to(context_TX.dtype)])

        masks_AK = torch.full_like(pack.slots.labels_AK, self._block.mask_token_id)
        tokens_T = torch.cat([pack.anchors_A[:, None], masks_AK], dim=1).flatten()
        embedded_TD = F.embedding(torch.cat([pack.behind_N, tokens_T]), embedding_VD).float()
        with torch.autocast(embedding_VD.device.type, torch.bfloat16, enabled=is_autocast):
            features_ND = self._eagle.features(pack.taps_NF.to(dtype))
            last_TD = features_ND[in_context.entries_A].repeat_interleave(self.block_size, dim=0)
            _, normed_TD = self._eagle(embedded_TD, torch.cat([features_ND, last_TD]), attend)
        return normed_TD[size:].unflatten(0, (-1, self.block_size))[:, 1:].flatten(0, 1).float()


class Study:
    """Target, documents and features, which all cells share, and the runs that have ended (results.json)."""

    trainer: type[Trainer] = Trainer
    not_settings = ("out", "seeds")
    """Options that may change when a run is continued."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.file = args, args.out / "results.json"
        self.settings = {name: str(value) for name, value in vars(args).items() if name not in self.not_settings}
        stored = json.loads(self.file.read_text()) if self.file.exists() else {"settings": self.settings, "runs": {}}
        if stored["settings"] != self.settings:
            sys.exit(f"{self.file} was begun with other settings: choose another --out")
        self.runs: dict[str, dict[str, Any]] = stored["runs"]
        settings = replace(settle(EngineConfig(model=args.target)), drafter="none", max_batch=1, max_len=args.max_len)
        self.target = target = load_target(settings)
        inner = args.answers / "answers"  # a run folder of paceline regenerate
        source, number = inner if inner.is_dir() else args.answers, args.num_heldout
        corpus = read_corpus([source], args.max_len, 0.01, max_heldout=number, min_heldout=number)
        heldout = [document for document in corpus.heldout if document.num_anchors >= NUM_DRAFTS]
        measured = [document for place, document in enumerate(heldout) if place % 3]
        self.documents = {"train": list(corpus.train), "tune": heldout[::3], "measure": measured}
        drafted = initial_weights.most_frequent(args.draft_vocab, corpus, target, say)
        self.ids = torch.arange(target.vocab_size) if drafted is None else drafted
        self.machine = this_machine(target.device.type)
        self.is_autocast = not MachineFacts(self.machine).is_slow_in_bfloat16
        self.shape = DrafterShape(num_layers=args.layers, block_size=1 + NUM_DRAFTS)
        self.block = DFlashConfig.from_json(initial_weights.config_for(target, self.shape))
        head = initial_weights.head_of(target, self.block, self.ids)
        self.head = head if self.is_autocast or target.device.type != "cpu" else head.in_float32()
        self.embedding_VD = initial_weights.embedding_matrix(target)
        self.taps, self.features = self.block.target_layer_ids, dict[str, hidden_states.FeatureSource]()
        mark = hidden_states.fingerprint(args.target, target.dtype, self.taps, False)
        for use, documents in self.documents.items():
            online = hidden_states.OnlineFeatures(target, documents, self.taps, False)
            cached = hidden_states.CachedFeatures(args.out / f"features-{mark}", documents)
            self.features[use] = hidden_states.cache_features(cached, online)
        self.scale_F, self.mean_F = hidden_states.measure_scale(self.features["train"], self.documents["train"])

    def cell(self, name: str, seed: int) -> tuple[Trainable, Tensor]:
        """Returns a new drafter of this cell, and the scale [F] that its features are multiplied by."""
        target, is_block = self.target, name.startswith("block")
        shape = replace(self.shape, tap_layers=self.taps, is_causal=not is_block)
        if name.endswith("injection"):
            raw, network = initial_weights.network_for(target, self.args.target, shape, None, seed)
            settle_units(network, self.scale_F, self.mean_F, is_new=True, is_copied=False)
            kind = DFlashTrainable if is_block else TokenInjection
            return kind(network.to(target.device), raw), self.scale_F
        raw = eagle3.config_for(target, shape, len(self.ids)) | {"model_type": "qwen3"}
        network = Eagle3Network.random(Eagle3Config.from_json(raw), seed, target.device)
        del network.lm_head  # the target's is used
        scale_F = eagle3.use_scaled_eagle3_units(network, self.scale_F, self.mean_F, is_new=True)
        if is_block:
            return BlockFusion(network, raw, self.block), scale_F
        return TokenFusion(network, raw, 1 + self.args.ttt_steps), scale_F

    def train(self, name: str, seed: int, rate: float, share: float) -> tuple[Trainer, Tensor]:
        """Trains one cell for this share of the minutes (or steps); returns the trainer, and its features' scale."""
        args, (drafter, scale_F) = self.args, self.cell(name, seed)
        loop = LoopConfig(
            epochs=1e6, blocks_per_step=192, anchors=48, optim=OptimConfig(lr=rate), autocast=self.is_autocast,
            max_steps=round(share * args.steps) if args.steps else None, seed=seed,
            max_minutes=None if args.steps else share * args.minutes,
        )  # fmt: skip
        corpus, features = Corpus(self.documents["train"], []), ScaledFeatures(self.features["train"], scale_F)
        folder = args.out / "checkpoints" / f"{name} {seed} {rate:g}".replace(" ", "-")
        trainer = self.trainer(drafter, corpus, features, self.embedding_VD, self.head, loop, folder=folder)
        if not trainer.resume():
            norm = initial_weights.FirstNorm(drafter.network.get_parameter("norm.weight"))
            initial_weights.scale_first_logits(norm, self.head, *trainer.first_slots())
        with packs_ahead(trainer):
            trainer.run(partial(report, f"{name}, seed {seed}, rate {rate:g}"))
        return trainer, scale_F

    def run(self, name: str, seed: int, rate: float, share: float = 1.0, use: str = "measure") -> dict[str, Any]:
        """Returns the figures of a run on the documents of this use, those stored or of a training now."""
        key = f"{name}, seed {seed}, rate {rate:g}"
        if key in self.runs:
            return self.runs[key]
        trainer, scale_F = self.train(name, seed, rate, share)
        figures = {"parameters": sum(weight.numel() for weight in trainer.network.parameters()), "rate": rate}
        figures |= {"minutes": round(trainer.state.seconds / 60, 2), "steps": trainer.state.step}
        self.runs[key] = figures | self.measured(trainer.drafter, scale_F, use)
        self.write({})
        shutil.rmtree(trainer.folder)
        return self.runs[key]

    def measured(self, drafter: Trainable, scale_F: Tensor, use: str) -> dict[str, Any]:
        """Returns the acceptance length on the documents of this use, with `sums` and `counts`: each document's sum of
        acceptance lengths, and its number of anchors."""
        inputs = self.embedding_VD, self.head, self.is_autocast
        lengths = [acceptance_lengths(drafter, pack, *inputs) for pack in self.packs(scale_F, use)]
        figures: dict[str, Any] = {"length": float(torch.cat(lengths).float().mean())}
        return figures | {"sums": [int(length_A.sum()) for length_A in lengths], "counts": list(map(len, lengths))}

    def packs(self, scale_F: Tensor, use: str) -> Iterator[Pack]:
        """Yields one pack for each document of this use, with evenly spread anchors."""
        documents, features = self.documents[use], ScaledFeatures(self.features[use], scale_F)
        packer = Packer(1 + NUM_DRAFTS, documents, features, self.target.device)
        for number, document in enumerate(documents):
            anchors = np.linspace(document.answer_start, len(document) - 1 - NUM_DRAFTS, ANCHORS_MEASURED)
            yield packer.pack([(number, np.unique(anchors.astype(np.int64)))])

    def write(self, figures: dict[str, Any]) -> None:
        write_results(self.file, {"settings": self.settings, "machine": self.machine, "runs": self.runs, **figures})

    def all_runs(self) -> dict[str, list[dict[str, Any]]]:
        """Trains what is left to train; returns each cell's runs, one per seed."""
        args, rates = self.args, dict[str, float]()
        for name in NAMES:
            pilots = args.rates if len(args.rates) > 1 else []
            tried = [self.run(name, PILOT_SEED, rate, args.pilot_share, "tune")["length"] for rate in pilots]
            rates[name] = args.rates[tried.index(max(tried)) if tried else 0]
        # All cells of a seed, then the next seed: changes of the machine's speed meet all cells.
        runs = [{name: self.run(name, seed, rates[name]) for name in NAMES} for seed in range(args.seeds)]
        return {name: [of_seed[name] for of_seed in runs] for name in NAMES}


@torch.no_grad()
def acceptance_lengths(drafter: Trainable, pack: Pack, embedding_VD: Tensor, head: Head, is_autocast: bool) -> Tensor:
    """Returns the acceptance length of each block, [A]: 1 + its leading drafts that are the text's tokens."""
    rows_R, reached_R = head.local(pack.slots.labels_AK.flatten())
    drafts_R = head.logits(drafter.hidden(pack, embedding_VD, is_autocast)).argmax(-1)
    right_AK = ((drafts_R == rows_R) & reached_R).view(pack.slots.valid_AK.shape) & pack.slots.valid_AK
    return 1 + right_AK.cumprod(dim=1).sum(dim=1)


def report(title: str, step: dict[str, Any]) -> None:
    if step["step"] % 25 == 0:
        say(f"{title}: step {step['step']}, {step['seconds']:.0f} s, loss {step['loss']:.2f}, length {step['eal']:.2f}")


def summary(runs: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Returns the acceptance lengths of the four cells and the `RATIOS` of them: the mean over seeds, its interval over
    documents, and the value of each seed."""
    sums_CSD = np.array([[run["sums"] for run in runs[name]] for name in NAMES], dtype=np.float64)
    counts_D = np.array(runs[NAMES[0]][0]["counts"])
    draws = np.random.default_rng(0).choice(len(counts_D), (NUM_DRAWS, len(counts_D)))
    drawn_CN = sums_CSD.mean(1)[:, draws].sum(-1) / counts_D[draws].sum(-1)
    seeds_CS = sums_CSD.sum(-1) / counts_D.sum()

    figures, every = dict[str, dict[str, Any]](), (seeds_CS.mean(1), drawn_CN, seeds_CS)
    for name, (above, below) in (CELLS | RATIOS).items():
        mean, drawn_N, seeds_S = (lengths_C[above].prod(0) / lengths_C[below].prod(0) for lengths_C in every)
        figures[name] = {"value": mean, "interval": np.quantile(drawn_N, (0.025, 0.975)), "seeds": seeds_S}
    return figures


def with_seeds(figure: dict[str, Any]) -> str:
    """Returns a figure's value, its interval, and the range of its values over seeds, as text."""
    (low, high), seeds = figure["interval"], figure["seeds"]
    return f"{figure['value']:.3f} [{low:.3f}, {high:.3f}], seeds {min(seeds):.3f} to {max(seeds):.3f}"


def tables(runs: dict[str, list[dict[str, Any]]], figures: dict[str, dict[str, Any]]) -> list[Table]:
    """Returns the 2x2 table, the ratios, and a table of the trainings."""

    def text(name: str) -> str:
        return with_seeds(figures[name])

    ways = [Column(f"+ {way}", lambda row, way=way: text(f"{row} + {way}")) for way in ("injection", "fusion")]
    keys = ("parameters", "rate", "minutes", "steps")
    columns = [Column(key, lambda name, key=key: " ".join(f"{run[key]:,}" for run in runs[name])) for key in keys]
    return [
        Table([Column("acceptance length", str), *ways], ("block", "token by token")),
        Table([Column("ratio of acceptance lengths", str), Column("value", text)], list(RATIOS)),
        Table([Column("training, each seed", str), *columns], NAMES),
    ]


def main(words: list[str] | None = None) -> None:
    study = Study(arguments(words))
    figures = summary(runs := study.all_runs())
    study.write({"figures": figures})
    for table in tables(runs, figures):
        table.show(stderr=False)


def study_parser(text: str | None, seeds: int, out: str) -> argparse.ArgumentParser:
    """Returns a parser with the options of every study, with these default values of --seeds and --out."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=Path, required=True, help="folder of paceline regenerate, greedy answers")
    parser.add_argument("--target", default="smollm2-135m", help="the model that wrote the answers")
    parser.add_argument("--minutes", type=float, default=4.0, help="of training steps, per run")
    parser.add_argument("--steps", type=int, help="train for equal steps in place of equal minutes")
    parser.add_argument("--seeds", type=int, default=seeds, help="runs of each drafter; more can be added later")
    parser.add_argument("--layers", type=int, default=2, help="of each drafter")
    parser.add_argument("--max-len", type=int, default=384, help="longest document, in tokens")
    parser.add_argument("--draft-vocab", type=int, default=8192, help="most frequent tokens, which can be drafted")
    parser.add_argument("--num-heldout", type=int, default=96, help="held-out documents")
    parser.add_argument("--out", type=Path, default=Path(out), help="folder; the same one continues")
    return parser


def arguments(words: list[str] | None) -> argparse.Namespace:
    parser = study_parser(__doc__, 3, "runs/two-ideas")
    parser.add_argument("--rates", type=float, nargs="+", default=[4e-4, 8e-4, 1.6e-3], help="one rate: no pilot runs")
    parser.add_argument("--pilot-share", type=float, default=0.25, help="of the minutes, for each pilot run")
    parser.add_argument("--ttt-steps", type=int, default=NUM_DRAFTS, help="drafts per block that EAGLE-3 learns")
    return parser.parse_args(words)


if __name__ == "__main__":
    main()
