"""A drafter taught by reinforcement on what it is for, beside supervised training of the same seconds.

    .venv/bin/python experiments/drafter_rl.py --tiny
    .venv/bin/python experiments/drafter_rl.py --target smollm2-135m --drafter DFLASH_FOLDER --answers ANSWERS --seconds
    600

Both arms begin with the same trained drafter (DFlash, version 1) and learn at served anchors: where its own rounds
begin in the target's answers. `supervised` learns the target's tokens there (d-pace). `rl` draws a group of blocks at
each anchor from its own slots, has the target's pass over them, as a tree, say how likely each draft is to stand, and
is rewarded for the expected number of kept tokens, sum_j prod_{i<=j} p(x_i): each slot for what is kept from it on,
less the mean of the group's others (leave one out), with a KL to the drafter of the beginning. Each seed and arm is a
line of OUT/results.jsonl, tokens a round of held-out prompts in the engine; what stands there is not run again. At
temperature 0 p is 1 for the target's own token and 0 for others.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from paceline.data.answers import Answer, AnswerShards
from paceline.draft.dflash.drafter import DFlashDrafter, DFlashNetwork
from paceline.draft.formats.family import read_drafter
from paceline.draft.vocabulary import Vocabulary
from paceline.engine.llm import LLM
from paceline.model.target import ForwardBatch, Target
from paceline.plan.planner import FixedPlanner
from paceline.report.statistics import Rounds
from paceline.runs.folder import RunFolder, append_lines
from paceline.train.config import LossConfig, OptimConfig
from paceline.train.documents.dataset import Corpus, Document, num_valid_slots, read_corpus
from paceline.train.features.hidden_states import OnlineFeatures, ScaledFeatures, measure_scale
from paceline.train.learn.initial_weights import embedding_matrix, head_of
from paceline.train.learn.losses import Head, head_loss
from paceline.train.learn.optimisers import Optimisers
from paceline.train.learn.packs import DFlashTrainable, Packer
from paceline.train.methods.copied_layers import settle_units
from paceline.train.served import accepted_at, starts_of
from paceline.train.tiny import write_tiny_target
from paceline.types import SamplingParams


class Arm:
    """One drafter while it learns."""

    def __init__(
        self, target: Target, drafter: DFlashDrafter, documents: list[Document], args: argparse.Namespace
    ) -> None:
        weights = {name: tensor.float().clone() for name, tensor in drafter.network.state_dict().items()}
        self.network = DFlashNetwork.of(drafter.config, weights)
        self.target, self.drafter, self.documents, self.args = target, drafter, documents, args
        source = OnlineFeatures(target, documents, drafter.tap_layers, needs_final=False)
        scale_F, mean_F = measure_scale(source, documents)
        settle_units(self.network, scale_F, mean_F, is_new=False, is_copied=False)
        self.trainable = DFlashTrainable(self.network, drafter.config.raw)
        self.begun = DFlashTrainable(copy.deepcopy(self.network).requires_grad_(False), drafter.config.raw)
        own = Vocabulary(drafter.draft_ids, drafter.head_VD)
        self.embedding_VD = embedding_matrix(target, drafter.config, own).float()
        self.head: Head = head_of(target, drafter.config, drafter.draft_ids, drafter.head_VD)
        self.packer = Packer(drafter.block_size, documents, ScaledFeatures(source, scale_F))
        self.optimisers = Optimisers(self.network, OptimConfig(lr=args.lr))

    def anchors(self, number: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """Where rounds of the drafter as it is now begin in a document; at most so many of them."""
        accepted_P = accepted_at(self.trainable, self.packer, self.head, self.embedding_VD, number)
        starts = self.documents[number].answer_start + starts_of(accepted_P)
        return np.sort(rng.choice(starts, min(len(starts), self.args.anchors), replace=False))

    def supervised(self, number: int, anchors_A: NDArray[np.int64]) -> Tensor:
        pack = self.packer.pack([(number, anchors_A)])
        hidden_TD = self.trainable.hidden(pack, self.embedding_VD, False)
        num_slots = num_valid_slots(self.documents[number], anchors_A, self.drafter.block_size)
        return head_loss(hidden_TD, pack.slots, self.head, LossConfig(), num_slots, is_measured=False)[0]

    def rl(self, number: int, anchors_A: NDArray[np.int64]) -> Tensor:
        """See above; the gradient of this is the estimate."""
        args, pack = self.args, self.packer.pack([(number, anchors_A)])
        shape = len(anchors_A), self.drafter.block_size - 1
        logq_AKV = self._logq(self.trainable, pack, shape)
        with torch.no_grad():
            begun_AKV = self._logq(self.begun, pack, shape)
            flat = logq_AKV.exp().flatten(0, 1)
            drawn_AGK = torch.multinomial(flat, args.group, replacement=True).unflatten(0, shape).transpose(1, 2)
            tokens_AGK = drawn_AGK if self.head.columns is None else self.head.columns[drawn_AGK]
            gain_AGK = reward_to_go(self._chances(number, anchors_A, tokens_AGK))
            others_AGK = (gain_AGK.sum(1, keepdim=True) - gain_AGK) / (args.group - 1)
            advantage_AGK = gain_AGK - others_AGK
        said_AGK = logq_AKV.gather(-1, drawn_AGK.transpose(1, 2)).transpose(1, 2)
        objective = (advantage_AGK * said_AGK).sum(-1).mean()
        kl = (logq_AKV.exp() * (logq_AKV - begun_AKV)).sum(-1).sum(-1).mean()
        return args.beta * kl - objective

    def _logq(self, trainable: DFlashTrainable, pack: Any, shape: tuple[int, int]) -> Tensor:
        hidden_TD = trainable.hidden(pack, self.embedding_VD, False)
        return self.head.logits(hidden_TD).float().log_softmax(-1).unflatten(0, shape)

    def _chances(self, number: int, anchors_A: NDArray[np.int64], tokens_AGK: Tensor) -> Tensor:
        """How likely the target is to say each drawn token behind those before it, [A, G, K]."""
        target, text = self.target, self.documents[number].tokens.tolist()
        row = target.cache.allocate()
        assert row is not None
        chances, num_read = [], 0
        for anchor, tokens_GK in zip(anchors_A.tolist(), tokens_AGK, strict=True):
            if anchor > num_read:
                piece = text[num_read:anchor]
                target.forward(ForwardBatch([row], [num_read], [len(piece)], piece, "none"))
                num_read = anchor
            chances.append(self._tree(row, anchor, text[anchor], tokens_GK))
            target.cache.rollback([row], [anchor])
        target.cache.rollback([row], [0])
        target.cache.free(row)
        return torch.stack(chances)

    def _tree(self, row: int, anchor: int, token: int, tokens_GK: Tensor) -> Tensor:
        group, size = tokens_GK.shape
        parents = [-1] + [
            0 if slot == 0 else 1 + path * size + slot - 1 for path in range(group) for slot in range(size)
        ]
        tokens = [token, *tokens_GK.flatten().tolist()]
        out = self.target.forward(ForwardBatch([row], [anchor], [len(tokens)], tokens, parents=parents))
        assert out.logits_TV is not None
        before = torch.tensor(parents[1:])
        logits_TV = out.logits_TV.float()[before]
        said_T1 = tokens_GK.flatten()[:, None]
        if not self.args.temperature:
            return (logits_TV.argmax(-1, keepdim=True) == said_T1).float().view(group, size)
        return (logits_TV / self.args.temperature).softmax(-1).gather(-1, said_T1).view(group, size)

    def learn(self, way: Callable[[int, NDArray[np.int64]], Tensor], seconds: float, rng: np.random.Generator) -> int:
        """Steps of so many documents, for so many seconds; returns how many."""
        num_steps, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            for number in rng.choice(len(self.documents), min(self.args.documents, len(self.documents)), replace=False):
                anchors_A = self.anchors(int(number), rng)
                (way(int(number), anchors_A) / self.args.documents).backward()
            nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
            self.optimisers.step(1.0)
            num_steps += 1
        return num_steps

    def finished(self) -> DFlashDrafter:
        network = DFlashNetwork.of(self.drafter.config, self.network.state_dict())
        return DFlashDrafter(network, draft_ids=self.drafter.draft_ids, head_VD=self.drafter.head_VD)


def reward_to_go(chances_AGK: Tensor) -> Tensor:
    """For each slot, the expected number of drafts accepted from it on: sum_{j >= slot} prod_{i <= j} p_i."""
    stands_AGK = chances_AGK.cumprod(-1)
    return stands_AGK.flip(-1).cumsum(-1).flip(-1)


def served(llm: LLM, drafter: DFlashDrafter, documents: list[Document], args: argparse.Namespace) -> float:
    """Tokens a round of held-out prompts, whole blocks in every round."""
    llm.use_drafter(drafter)
    llm.engine.planner = FixedPlanner()
    prompts = [document.tokens[: document.answer_start].tolist() for document in documents]
    params = [
        SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=number)
        for number in range(len(prompts))
    ]
    rounds = Rounds.sum(answer.stats for answer in llm.generate_ids(prompts, params))
    llm.use_drafter("none")
    return rounds.tokens_per_round


def tiny(args: argparse.Namespace) -> None:
    """A random target that answered some prompts, and a random drafter."""
    args.target = str(write_tiny_target(args.out / "target"))
    llm = LLM(args.target, drafter="none", device="cpu", dtype="float32", max_len=128)
    args.drafter, args.answers = args.out / "begun", args.out / "answers"
    if not args.drafter.exists():
        DFlashDrafter.random(llm.target, num_layers=1, block_size=4).save(args.drafter)
        prompts = [list(f"number {number}: ".encode()) for number in range(24)]
        answers = llm.generate_ids(prompts, SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True))
        AnswerShards(args.answers).write(
            [
                Answer(f"tiny/{number}", "tiny", 0, 0.0, prompts[number], answer.token_ids, "length", answer.text)
                for number, answer in enumerate(answers)
            ]
        )


def run(args: argparse.Namespace) -> None:
    args.out.mkdir(parents=True, exist_ok=True)
    if args.tiny:
        tiny(args)
    file = args.out / "results.jsonl"
    done = RunFolder(args.out).lines(file.name)
    corpus: Corpus = read_corpus([Path(args.answers)], args.max_len, heldout_share=0.2, max_heldout=args.heldout)
    llm = LLM(args.target, drafter="none", device="cpu", dtype="float32", max_batch=1, max_len=2 * args.max_len)
    begun = read_drafter(args.drafter)
    if begun.config.second:
        raise SystemExit(
            f"{args.drafter} is a DFlash 2 drafter, whose slots are not drawn one by one: give one of version 1"
        )
    if not done:
        done.append(
            {"arm": "begun", "seed": 0, "steps": 0, "tokens_per_round": served(llm, begun, corpus.heldout, args)}
        )
        append_lines(file, done)
    for seed in range(args.seeds):
        for name in ("supervised", "rl"):
            if any((each["arm"], each["seed"]) == (name, seed) for each in done):
                continue
            torch.manual_seed(seed)
            arm = Arm(llm.target, read_drafter(args.drafter), list(corpus.train), args)
            steps = arm.learn(getattr(arm, name), args.seconds, np.random.default_rng(seed))
            rate = served(llm, arm.finished(), corpus.heldout, args)
            done.append({"arm": name, "seed": seed, "steps": steps, "tokens_per_round": rate})
            append_lines(file, done[-1:])
    for each in done:
        print(json.dumps(each))


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/drafter_rl"))
    parser.add_argument("--tiny", action="store_true", help="a random target and drafter, in seconds")
    for name in ("target", "drafter", "answers"):
        parser.add_argument(f"--{name}")
    numbers = {"seeds": 3, "anchors": 8, "documents": 8, "group": 4, "max-tokens": 64, "max-len": 256, "heldout": 32}
    for name, value in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, value in {"seconds": 60.0, "lr": 1e-4, "beta": 0.05, "temperature": 0.0}.items():
        parser.add_argument(f"--{name}", type=float, default=value)
    return parser


if __name__ == "__main__":
    options = arguments().parse_args()
    if not options.tiny and not (options.target and options.drafter and options.answers):
        raise SystemExit("give --target, --drafter and --answers, or --tiny")
    run(options)
