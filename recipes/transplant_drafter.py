"""Moves a DFlash drafter to another target of the same vocabulary, without training: the start of a training there.

    paceline regenerate --target qwen2.5-coder-1.5b --prompts prompts.jsonl --out runs/answers
    python recipes/transplant_drafter.py --donor qwen2.5-coder-0.5b --target qwen2.5-coder-1.5b \
        --texts runs/answers/answers --out runs/moved

All that a DFlash drafter sees of its target is `fc` of the tapped hidden states. So both models read `--documents`
texts, and ridge regression finds the matrix that makes of the new target's hidden states what `fc` makes of the
donor's; rows count alike, as `hidden_norm` scales them to one size; first positions, whose states are huge, are left
out. Everything else stays: the drafter keeps its width, and takes the donor's embedding and LM head along, with rows of
the tokens that it drafts and of the mask token. So the donor's two must be one matrix.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from paceline.config import EngineConfig
from paceline.draft.dflash.config import DFlashConfig, check_fit, default_layer_ids
from paceline.draft.formats.family import drafter_of, network_of, read_drafter
from paceline.draft.registry import folder_of
from paceline.errors import ConfigError
from paceline.model.backends import load_target
from paceline.model.target import Target, head_weight
from paceline.train.documents.dataset import Document, read_corpus
from paceline.train.features.hidden_states import OnlineFeatures

ALIKE = 0.99
"""Least cosine of a token's rows in embedding and LM head that are one matrix, stored in two formats."""


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


def rows_of(donor: Target, ids: Tensor) -> Tensor:
    """The donor's rows [len(ids), D] of these tokens in its LM head, which embed them too."""
    rows_VD, head_VD = donor.matrix_embed(ids), head_weight(donor)[ids]
    if torch.cosine_similarity(rows_VD.float(), head_VD.float()).min() < ALIKE:
        raise ConfigError("the donor's embedding and LM head differ: a drafter that moves has one matrix for both")
    return head_VD


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--donor", required=True, help="the target that the drafter was trained for")
    parser.add_argument("--target", required=True, help="the target that it shall draft for")
    parser.add_argument("--drafter", default="default", help="of the donor: a folder, or the one that ships")
    parser.add_argument("--texts", type=Path, nargs="+", required=True, help="folders of answers, to fit the matrix on")
    parser.add_argument("--documents", type=int, default=100)
    parser.add_argument("--max-len", type=int, default=400, help="longest text, in tokens")
    parser.add_argument("--ridge", type=float, default=0.01, help="of the mean square of the states")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    drafter = read_drafter(folder_of(args.drafter, args.donor))
    texts = read_corpus(args.texts, args.max_len, 0.0).train[: args.documents]
    settings = partial(EngineConfig, dtype="bfloat16", device="cpu", max_batch=1, max_len=1024, threads=args.threads)
    donor, target = load_target(settings(args.donor)), load_target(settings(args.target))
    known = torch.arange(donor.vocab_size) if drafter.draft_ids is None else drafter.draft_ids
    ids = torch.cat([known, torch.tensor([drafter.config.mask_token_id])]).unique()
    head_VD = rows_of(donor, ids)
    taps = default_layer_ids(target.num_layers, len(drafter.tap_layers))
    tensors = drafter.network.state_dict()
    states = states_of(donor, texts, drafter.tap_layers), states_of(target, texts, tuple(taps))
    fc_DF = fitted(*states, tensors["fc.weight"].float(), args.ridge)
    raw = {**drafter.config.raw, "target_hidden_size": target.hidden_size, "num_target_layers": target.num_layers}
    raw["dflash_config"] = {**raw["dflash_config"], "target_layer_ids": taps}
    config = DFlashConfig.from_json(raw)
    check_fit(config, target, ids, head_VD)
    network = network_of(config, tensors | {"fc.weight": fc_DF.to(tensors["fc.weight"])})
    drafter_of(network, draft_ids=ids, head_VD=head_VD).save(args.out)
    print(f"{args.out}: fitted on {len(texts)} texts, {len(ids)} tokens")


if __name__ == "__main__":
    main()
