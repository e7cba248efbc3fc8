"""Our checkpoints beside PyPI's `speculators` 0.9.0 and `dflash` 0.1.0: logits on the same features, configs key by
key.

    python -m venv build/interop && build/interop/bin/pip install -e '.[hf]' dflash==0.1.0 speculators==0.9.0
    build/interop/bin/python experiments/interop.py --out experiments/results/interop.json
    build/interop/bin/python experiments/interop.py --drafter runs/dspark/drafter --prompts gsm8k_test.jsonl

Tiny random networks in float32. For each shape: our export is read by `speculators`, which makes a block's logits from
features; `dflash` makes them of z-lab's folder; ours are the network's own. Then `speculators`' own converter makes its
folder of ours, and both configs are compared as `speculators` reads them. Of DSpark, which `dflash` does not know, the
confidence is compared too, and the greedy drafts of 50 blocks. With --drafter, a trained DSpark drafter is compared in
the same way instead, in one block of each of 50 prompts, with the target's own hidden states as features.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
from gguf_to_folder import folder_of
from tiny_dflash import HIDDEN, MIXED, TARGET_LAYERS, VOCAB, loud_, raw_config, target_shape, target_weights, targets

from paceline import LLM
from paceline.data.prompts import read_prompts
from paceline.draft.dflash.checkpoint import read_stored, write_checkpoint
from paceline.draft.dflash.config import DFlashConfig, as_dflash2, as_dspark
from paceline.draft.dflash.drafter import DFlashNetwork
from paceline.draft.dflash2.codebooks import BOOKS
from paceline.draft.dflash2.drafter import DFlash2Network
from paceline.draft.dflash2.selector import score
from paceline.draft.dspark.drafter import DSparkNetwork
from paceline.draft.dspark.heads import pick
from paceline.draft.formats.export import export, rows_of
from paceline.draft.formats.family import network_of
from paceline.model.checkpoint import config_json
from paceline.model.target import head_weight
from paceline.runs.folder import write_results
from paceline.train.documents.dataset import Document
from paceline.train.features.hidden_states import OnlineFeatures
from paceline.train.learn.attention import Layout, make_attention
from paceline.train.learn.initial_weights import embedding_matrix

CONTEXT, WINDOW = 12, 32
"""Positions before the anchor; the window is wider than context and block together, since `speculators` counts it
otherwise."""
SLIDING = {"sliding_window": WINDOW, "use_sliding_window": True, "layer_types": MIXED}
ENOUGH = 1e-5
NUM_BLOCKS = 50
"""Blocks whose drafts are compared."""


def raw_2(**keys: Any) -> dict[str, Any]:
    raw = as_dflash2(raw_config(**keys), rank=5, top_k=6)
    raw["dflash_config"]["conv_group_size"] = 4
    return raw


CASES: dict[str, tuple[dict[str, Any], list[int] | None]] = {
    "full": (raw_config(), None),
    "draft vocabulary": (raw_config(), [1, 4, 5, 9]),
    "window, causal": (raw_config(**SLIDING), None),
    "window, both ways": (raw_config(**SLIDING, is_causal=False), None),
    "from the anchor": (raw_config(sample_from_anchor=True), None),
    "yarn": (raw_config(rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}), None),  # noqa: E501
    "tap of the last layer": (
        raw_config() | {"dflash_config": {"mask_token_id": 10, "target_layer_ids": [1, TARGET_LAYERS - 1]}}, None
    ),
    "DFlash 2": (raw_2(), None),
    "DFlash 2, window": (raw_2(**SLIDING, is_causal=False), None),
    "DSpark": (as_dspark(raw_config(), rank=5), None),
    "DSpark, from the anchor": (as_dspark(raw_config(sample_from_anchor=True), rank=5), None),
    "DSpark, draft vocabulary": (as_dspark(raw_config(sample_from_anchor=True), rank=5), [1, 4, 5, 9]),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--drafter", type=Path, help="a trained DSpark drafter's folder")
    parser.add_argument("--model", default="smollm2-135m", help="its target, with --drafter: a built-in name")
    parser.add_argument("--prompts", type=Path, help="texts of its blocks, with --drafter")
    options = parser.parse_args()
    if options.drafter:
        row = of_trained(options.drafter, options.model, options.prompts)
        print(json.dumps(row))
        if options.out:
            write_results(options.out, {"rows": [row]}, {"speculators": version("speculators")})
        sys.exit(row["relative"] > ENOUGH or row["same_drafts"][0] < NUM_BLOCKS)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        target = Path(scratch) / "target"
        targets()[0].save_pretrained(target)
        for name, (raw, ids) in CASES.items():
            rows.append({"case": name, **compared(raw, ids, target, Path(scratch) / name.replace(" ", "-"))})
            print(json.dumps(rows[-1]))
    worst = max(row[key] for row in rows for key in ("speculators", "dflash") if row[key] is not None)
    print(f"largest difference of logits: {worst:.1e}")
    if options.out:
        peers = {name: version(name) for name in ("speculators", "dflash")}
        write_results(options.out, {"rows": rows, "worst": worst}, peers)
    is_same = all(row["same_drafts"][0] == NUM_BLOCKS for row in rows if "same_drafts" in row)
    sys.exit(worst > ENOUGH or not is_same)


def compared(raw: dict[str, Any], ids: list[int] | None, target: Path, out: Path) -> dict[str, Any]:
    config = DFlashConfig.from_json(raw)
    kind = DFlash2Network if config.second else DSparkNetwork if config.markov else DFlashNetwork
    network = kind.random(config)
    loud_(network)
    for name, parameter in network.named_parameters():
        if name.endswith("kernel_projection.weight"):
            parameter.data *= 0.3  # as loud as the others it would make large numbers of rounding
    own, spec = out / "own", out / "spec"
    draft_ids = None if ids is None else torch.tensor(ids)
    write_checkpoint(own, raw, network.of_file(), draft_ids)
    weights = dict(target_weights(target_shape(HIDDEN, VOCAB)))
    head_VD, embedding_VD = weights["lm_head.weight"], weights["model.embed_tokens.weight"]
    verifier = {"name_or_path": str(target), "architectures": ["LlamaForCausalLM"]}
    export(read_stored(own), "speculators", spec, head_rows=rows_of(head_VD), verifier=verifier)
    draw = torch.Generator().manual_seed(7)
    length = CONTEXT + 2 * config.block_size  # `speculators` lets no block begin in the last ones
    features = torch.randn(length, len(config.target_layer_ids) * HIDDEN, generator=draw)
    tokens = torch.randint(VOCAB, (length,), generator=draw)
    rows_VD = head_VD if draft_ids is None else head_VD[draft_ids]
    ours = our_logits(own, features, tokens, embedding_VD, rows_VD)
    read_back = our_logits(spec, features, tokens, embedding_VD, rows_VD)
    assert all(torch.equal(first, second) for first, second in zip(ours, read_back, strict=True))
    model = speculators_model(spec)
    theirs = speculators_logits(model, features, tokens)
    if config.markov:
        blocks = [torch.randn(length, features.shape[1], generator=draw) for _ in range(NUM_BLOCKS)]
        same = sum(
            our_drafts(spec, each, tokens, embedding_VD, rows_VD) == their_drafts(model, each, tokens, draft_ids)
            for each in blocks
        )
        return {"speculators": worst_of(ours, theirs), "dflash": None, "same_drafts": [same, NUM_BLOCKS]}
    reference = dflash_logits(own, features, tokens, embedding_VD, rows_VD)
    return {
        "speculators": worst_of(ours, theirs),
        "dflash": worst_of(ours[:1], reference),
        "config": config_differences(spec, own, target, out / "converted") if config.second is None else None,
    }


def of_trained(drafter: Path, model: str, prompts: Path) -> dict[str, Any]:
    """Largest differences of logits and confidence, absolute and as a share of the largest number, and how many blocks
    have the same greedy drafts."""
    stored, folder = read_stored(drafter), folder_of(model)
    stored = replace(stored, tensors={name: tensor.float() for name, tensor in stored.tensors.items()})
    llm = LLM(str(folder), drafter="none", dtype="float32", device="cpu", max_batch=1)
    length, ids = CONTEXT + 2 * stored.config.block_size, stored.vocabulary.ids
    encoded = [llm.encode_chat(each.messages) for each in read_prompts(prompts)]
    texts = [np.array(each[-length:], dtype=np.int32) for each in encoded if len(each) >= length][:NUM_BLOCKS]
    source = OnlineFeatures(
        llm.target, [Document(str(at), each, 0) for at, each in enumerate(texts)], stored.config.target_layer_ids, False
    )
    head_VD, embedding_VD = head_weight(llm.target).float(), embedding_matrix(llm.target).float()
    rows_VD, worst, relative, same = head_VD if ids is None else head_VD[ids], 0.0, 0.0, 0
    with tempfile.TemporaryDirectory() as scratch:
        spec = Path(scratch) / "spec"
        verifier = {"name_or_path": str(folder), "architectures": config_json(folder)["architectures"]}
        export(stored, "speculators", spec, head_rows=rows_of(head_VD), verifier=verifier)
        if (written_VD := read_stored(spec).vocabulary.head_VD) is not None:
            rows_VD = written_VD.float()  # rounded to the drafter's data type
        theirs = speculators_model(spec)
        for number, text in enumerate(texts):
            features, tokens = source.of(number).taps_SF.float(), torch.from_numpy(text.astype(np.int64))
            pairs = (
                our_logits(spec, features, tokens, embedding_VD, rows_VD),
                speculators_logits(theirs, features, tokens),
            )
            worst = max(worst, worst_of(*pairs))
            relative = max(relative, *(float((a - b).abs().max() / a.abs().max()) for a, b in zip(*pairs, strict=True)))
            drafts = our_drafts(spec, features, tokens, embedding_VD, rows_VD)
            same += drafts == their_drafts(theirs, features, tokens, ids)
    return {"drafter": drafter.name, "speculators": worst, "relative": relative, "same_drafts": [same, len(texts)]}


def worst_of(ours: list[Tensor], theirs: list[Tensor]) -> float:
    return max(float((first - second).abs().max()) for first, second in zip(ours, theirs, strict=True))


@torch.no_grad()
def our_logits(folder: Path, features: Tensor, tokens: Tensor, embedding_VD: Tensor, head_VD: Tensor) -> list[Tensor]:
    """Logits of every slot of the block at CONTEXT; of DFlash 2 also the selector's scores behind the true tokens, of
    DSpark the logits behind them and the confidence."""
    network, hidden, ids = our_block(folder, features, tokens, embedding_VD)
    logits, size = hidden @ head_VD.T, network.config.block_size
    before = torch.cat([tokens[CONTEXT : CONTEXT + 1], tokens[CONTEXT : CONTEXT + size - 1]])
    if isinstance(network, DSparkNetwork):
        before = tokens[CONTEXT : CONTEXT + size] if network.config.from_anchor else before
        assert network.confidence_head is not None
        sure = network.confidence_head(hidden, network.markov_head.rows(BOOKS[0], before))
        return [logits + network.markov_head.added(before, ids), sure]
    if not isinstance(network, DFlash2Network):
        return [logits]
    picks = score(network.candidate_selector, hidden[None], logits[None], before[:1], before_BK=before[None])
    return [logits, picks.scores_BKPM[0, :, 0]]


@torch.no_grad()
def our_block(
    folder: Path, features: Tensor, tokens: Tensor, embedding_VD: Tensor
) -> tuple[DFlashNetwork, Tensor, Tensor | None]:
    """Network, hidden states of the block at CONTEXT, and draft vocabulary."""
    stored = read_stored(folder)
    config, network = stored.config, network_of(stored.config, stored.tensors, folder).float()
    block = torch.full((config.block_size,), config.mask_token_id)
    block[0] = tokens[CONTEXT]
    layout = Layout((CONTEXT,), (torch.tensor([CONTEXT]),), config.block_size)
    attend = make_attention("split", config, layout, torch.float32)
    return network, network(embedding_VD[block], features[:CONTEXT], attend), stored.vocabulary.ids


@torch.no_grad()
def our_drafts(folder: Path, features: Tensor, tokens: Tensor, embedding_VD: Tensor, head_VD: Tensor) -> list[int]:
    """Greedy drafts of a DSpark drafter's block at CONTEXT."""
    network, hidden, ids = our_block(folder, features, tokens, embedding_VD)
    assert isinstance(network, DSparkNetwork)
    slots = hidden[None, 0 if network.config.from_anchor else 1 :]
    picks = pick(network.markov_head, None, slots, slots @ head_VD.T, tokens[CONTEXT : CONTEXT + 1], ids)
    return picks.tokens_BKM[0, :, 0].tolist()


@torch.no_grad()
def their_drafts(model: Any, features: Tensor, tokens: Tensor, draft_ids: Tensor | None) -> list[int]:
    """The same by `speculators`' modules, one slot after another."""
    hidden, logits = their_block(model, features, tokens)
    drafts, before = list[int](), tokens[CONTEXT]
    for slot in range(0 if model.config.sample_from_anchor else 1, model.block_size):
        bias = model.markov_head.block_bias(prev_token_ids=before.view(1, 1), hidden_states=hidden[:, slot : slot + 1])
        best = (logits[0, slot] + bias[0, 0]).argmax()
        before = best if draft_ids is None else draft_ids[best]
        drafts.append(int(before))
    return drafts


def speculators_model(folder: Path) -> Any:
    from speculators import SpeculatorModel
    from speculators.models.attention import create_float_mask

    model: Any = SpeculatorModel.from_pretrained(str(folder), attn_implementation="eager").eval().float()
    model._attn_impl, model._create_mask_fn = "eager", create_float_mask
    for layer in model.layers:
        layer.self_attn.config._attn_implementation = "eager"
    return model


@torch.no_grad()
def their_block(model: Any, features: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden states and logits of the block at CONTEXT."""
    length, size = len(tokens), model.config.transformer_layer_config.hidden_size
    mask = torch.zeros(1, length)
    mask[0, CONTEXT] = 1  # the only place where a block may begin
    hidden, logits, *_ = model._backbone_forward(
        features[None],
        tokens[None],
        mask,
        torch.zeros(1, length, size),
        torch.zeros(1, length, dtype=torch.long),
        max_anchors=1,
    )
    return hidden, logits


@torch.no_grad()
def speculators_logits(model: Any, features: Tensor, tokens: Tensor) -> list[Tensor]:
    hidden, logits = their_block(model, features, tokens)
    places = torch.arange(CONTEXT, CONTEXT + model.block_size)
    if hasattr(model, "markov_head"):
        block = tokens[None, places]
        before = block if model.config.sample_from_anchor else torch.cat([block[:, :1], block[:, :-1]], dim=1)
        rows = model.markov_head.prev_embeddings(before)
        bias = model.markov_head.block_bias(prev_token_ids=before, hidden_states=hidden, prev_emb=rows)
        return [(logits + bias)[0], model.confidence_head(torch.cat([hidden, rows], dim=-1))[0]]
    if not hasattr(model, "candidate_selector"):
        return [logits[0]]
    before = model._predecessor_ids(tokens[None], places).reshape(1, -1)
    candidates = logits.topk(model.candidate_selector.top_k, dim=-1).indices
    return [logits[0], model.candidate_selector.score_candidates(logits, hidden, before, candidates)[0]]


@torch.no_grad()
def dflash_logits(
    folder: Path, features: Tensor, tokens: Tensor, embedding_VD: Tensor, head_VD: Tensor
) -> list[Tensor]:
    from dflash import model as dflash

    raw = json.loads((folder / "config.json").read_text())
    kind = getattr(dflash, raw["architectures"][0])
    network: Any = kind.from_pretrained(str(folder), attn_implementation="eager", dtype=torch.float32).eval()
    block = torch.full((1, read_stored(folder).config.block_size), network.mask_token_id)
    block[0, 0] = tokens[CONTEXT]
    places = torch.arange(CONTEXT + block.shape[1])[None]
    hidden = network(
        position_ids=places, noise_embedding=embedding_VD[block], target_hidden=features[None, :CONTEXT],
        past_key_values=None, use_cache=False,
    )  # fmt: skip
    return [hidden[0] @ head_VD.T]


def config_differences(spec: Path, own: Path, target: Path, out: Path) -> dict[str, Any]:
    """Keys in which our export differs from what the converter of `speculators` makes, as it reads both."""
    from speculators import SpeculatorModelConfig
    from speculators.convert.dflash import DFlashConverter

    try:
        DFlashConverter().convert(own, out, str(target), validate=False)
    except RuntimeError as error:
        return {"their converter fails": str(error).splitlines()[-1].strip()}
    ours, theirs = (flat(SpeculatorModelConfig.from_pretrained(str(each)).to_dict()) for each in (spec, out))
    differing = {
        key for key in ours | theirs if ours.get(key) != theirs.get(key) and not key.startswith(("z_lab", "auto_map"))
    }
    return {key: [ours.get(key), theirs.get(key)] for key in sorted(differing)}


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if hasattr(value, "to_dict"):
        value = value.to_dict()
    if not isinstance(value, dict) or not value:
        return {prefix.rstrip("."): value}
    return {name: each for key, inner in value.items() for name, each in flat(inner, f"{prefix}{key}.").items()}


if __name__ == "__main__":
    main()
