"""Can a drafter draft for another target than its own, of the same vocabulary, without any training?

    paceline regenerate --target qwen2.5-coder-1.5b --prompts humaneval.jsonl --limit 24 --out runs/answers
    python experiments/transplant.py --donor qwen2.5-coder-0.5b --target qwen2.5-coder-1.5b --drafter default \
        --texts recipes/answers/qwen2.5-coder-0.5b/functions --answers runs/answers/answers

All that a DFlash drafter sees of its target is `fc` of the tapped hidden states. So both models read `--documents`
texts, and ridge regression finds the matrix that makes of the new target's hidden states what `fc` makes of the
donor's; rows count alike, as `hidden_norm` scales them to one size; first positions, whose states are huge, are left
out. Embedding and LM head stay the donor's. Measured on the new target's own greedy answers, which chose nothing: the
mean acceptance length of whole blocks of most probable tokens, without a selector, from every third position, with the
donor's hidden states, with those of the target through the fitted matrix, and with a context of zeros.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.config import EngineConfig
from paceline.draft.dflash.config import default_layer_ids
from paceline.draft.dflash.drafter import DFlashDrafter
from paceline.draft.formats.family import read_drafter
from paceline.draft.registry import folder_of
from paceline.model.backends import load_target
from paceline.model.target import Target, head_weight
from paceline.report.tables import Column, Table
from paceline.runs.folder import write_results
from paceline.train.documents.dataset import Document, read_corpus
from paceline.train.features.hidden_states import OnlineFeatures
from paceline.train.learn.attention import Layout, SplitAttention

EVERY = 3
"""Positions from one measured block to the next."""


def states_of(target: Target, documents: Sequence[Document], taps: tuple[int, ...]) -> list[Tensor]:
    """The tapped hidden states [positions, taps * hidden size] of each document."""
    features = OnlineFeatures(target, documents, taps, needs_final=False)
    return [features.of(number).taps_SF.clone() for number in range(len(documents))]


def fitted(donor: list[Tensor], target: list[Tensor], fc_DF: Tensor, ridge: float) -> Tensor:
    """The matrix [D, F'] that takes the target's hidden states to what `fc_DF` makes of the donor's."""
    size = target[0].shape[1]
    squares, products = torch.zeros(size, size), torch.zeros(size, len(fc_DF))
    for states_SF, others_SF in zip(donor, target, strict=True):
        wanted_SD = states_SF[1:].float() @ fc_DF.T
        scale_S1 = wanted_SD.pow(2).mean(-1, keepdim=True).rsqrt()
        scaled_SF = others_SF[1:].float() * scale_S1
        squares += scaled_SF.T @ scaled_SF
        products += scaled_SF.T @ (wanted_SD * scale_S1)
    squares += ridge * squares.diagonal().mean() * torch.eye(size)
    return torch.linalg.solve(squares, products).T


@torch.inference_mode()
def acceptance_length(
    drafter: DFlashDrafter, donor: Target, documents: Sequence[Document], context_of: Callable[[int], Tensor]
) -> float:
    """1 + leading drafts that are the answer's tokens, the mean over blocks."""
    network, config, size = drafter.network, drafter.config, drafter.config.block_size
    ids_V = torch.arange(donor.vocab_size) if drafter.draft_ids is None else drafter.draft_ids
    head_VD = head_weight(donor)[ids_V].float()
    counts = list[Tensor]()
    for number, document in enumerate(documents):
        tokens = torch.tensor(document.tokens.tolist())
        anchors_A = torch.arange(document.answer_start, len(tokens) - size, EVERY)
        if not len(anchors_A):
            continue
        attend = SplitAttention(config, Layout((len(tokens),), (anchors_A,), size), torch.float32)
        blocks_AB = torch.full((len(anchors_A), size), config.mask_token_id)
        blocks_AB[:, 0] = tokens[anchors_A]
        hidden_TD, context_ND = donor.matrix_embed(blocks_AB.flatten()).float(), context_of(number)
        for index, layer in enumerate(network.layers):
            hidden_TD = layer(index, hidden_TD, context_ND, attend)
        best_AB = ids_V[(network.norm(hidden_TD) @ head_VD.T).argmax(-1)].view(-1, size)
        is_right = (best_AB == tokens[anchors_A[:, None] + torch.arange(size)])[:, 1:]
        counts.append(1 + is_right.long().cumprod(1).sum(1))
    return float(torch.cat(counts).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--donor", required=True, help="the target that the drafter was trained for")
    parser.add_argument("--target", required=True, help="the target that it shall draft for")
    parser.add_argument("--drafter", default="default")
    parser.add_argument("--texts", type=Path, nargs="+", required=True, help="folders of answers, to fit the matrix on")
    parser.add_argument("--answers", type=Path, required=True, help="folder of the target's greedy answers, to measure")
    parser.add_argument("--documents", type=int, default=100)
    parser.add_argument("--max-len", type=int, default=400, help="longest text, in tokens")
    parser.add_argument("--ridge", type=float, default=0.01, help="of the mean square of the states")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path, default=Path("runs/transplant"))
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    drafter = read_drafter(folder_of(args.drafter, args.donor))
    network = drafter.network.float()
    texts = read_corpus(args.texts, args.max_len, 0.0).train[: args.documents]
    answers = read_corpus([args.answers], args.max_len, 0.0).train
    settings = partial(EngineConfig, dtype="bfloat16", device="cpu", max_batch=1, max_len=1024, threads=args.threads)
    states = dict[str, tuple[list[Tensor], list[Tensor]]]()
    for name in (args.donor, args.target):
        model = load_target(settings(name))
        taps = drafter.config.target_layer_ids
        if name == args.target:
            taps = tuple(default_layer_ids(model.num_layers, len(taps)))
        states[name] = states_of(model, texts, taps), states_of(model, answers, taps)
    donor = load_target(settings(args.donor))
    fc_DF = network.fc.weight.detach()
    fc_of_target = fitted(states[args.donor][0], states[args.target][0], fc_DF, args.ridge)
    contexts: dict[str, Callable[[int], Tensor]] = {
        "the donor's": lambda number: network.hidden_norm(states[args.donor][1][number].float() @ fc_DF.T),
        "the target's": lambda number: network.hidden_norm(states[args.target][1][number].float() @ fc_of_target.T),
        "none": lambda number: torch.zeros(len(states[args.donor][1][number]), len(fc_DF)),
    }
    rows: list[dict[str, Any]] = [
        {"states": name, "tokens_per_round": acceptance_length(drafter, donor, answers, context)}
        for name, context in contexts.items()
    ]
    columns = [
        Column("hidden states", lambda row: row["states"]),
        Column("tokens a round", lambda row: row["tokens_per_round"], "{:.2f}", "right"),
    ]
    Table(columns, rows).show(stderr=False)
    args.out.mkdir(parents=True, exist_ok=True)
    about = {"donor": args.donor, "target": args.target, "documents": len(texts), "answers": len(answers)}
    write_results(args.out / "transplant.json", about | {"results": rows})
    torch.save({"fc.weight": fc_of_target}, args.out / "fc.pt")


if __name__ == "__main__":
    main()
