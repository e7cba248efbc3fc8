"""The DFlash training steps of SpecForge 0.2.0 and speculators 0.9.0 on a prepared batch, for train_step_vs_peers.py.

Each package is imported only when its side is built, from its own environment. Their code runs unchanged; only the anchors are
counted on their way (and replaced by the batch's when it has some).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from train_step_batch import Batch, Settings, Step


def qwen3_keys(settings: Settings) -> dict[str, object]:
    return {
        "hidden_size": settings.hidden_size,
        "vocab_size": settings.vocab_size,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.heads,
        "num_key_value_heads": settings.kv_heads,
        "head_dim": settings.head_dim,
        "intermediate_size": settings.intermediate_size,
        "max_position_embeddings": 32768,
        "layer_types": ["full_attention"] * settings.layers,
        "pad_token_id": None,
    }


def specforge(settings: Settings, batch: Batch) -> dict[str, Callable[[], Step]]:
    attentions = ("sdpa", "eager") if settings.device == "cpu" else ("flex_attention", "sdpa")
    ways = [(attention, chunk) for attention in attentions for chunk in (128, 0)]
    return {f"{way[0]}, objective_chunk_blocks {way[1]}": lambda way=way: specforge_step(settings, batch, *way) for way in ways}


def specforge_model(settings: Settings, batch: Batch, attention: str, chunk: int) -> torch.nn.Module:
    from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
    from specforge.modeling.draft.dflash import DFlashDraftModel
    from transformers import Qwen3Config

    draft_config = {"mask_token_id": batch.mask_token_id, "target_layer_ids": list(range(1, 1 + settings.features))}
    config = Qwen3Config(
        **qwen3_keys(settings), num_target_layers=30, block_size=settings.block_size, dflash_config=draft_config
    )
    config._attn_implementation = attention
    draft = DFlashDraftModel(config)
    draft.load_state_dict(batch.weights)
    embedding = torch.nn.Embedding.from_pretrained(batch.embedding, freeze=True)
    head = torch.nn.Linear(settings.hidden_size, settings.vocab_size, bias=False, device="meta")
    head.weight = embedding.weight
    return OnlineDFlashModel(
        draft_model=draft,
        target_lm_head=head,
        target_embed_tokens=embedding,
        mask_token_id=batch.mask_token_id,
        block_size=settings.block_size,
        attention_backend=attention,
        num_anchors=settings.anchors,
        loss_decay_gamma=settings.gamma,
        objective_chunk_blocks=chunk,
        loss_type={"decay": "dflash", "dpace": "dpace"}[settings.loss],
    ).to(device=settings.device, dtype=settings.torch_dtype)


def specforge_step(settings: Settings, batch: Batch, attention: str, chunk: int) -> Step:
    from specforge.optimizer import BF16Optimizer
    from specforge.runtime.contracts import TrainBatch
    from specforge.training.backend import FSDPTrainingBackend, ParallelConfig
    from specforge.training.controller import TrainerCore
    from specforge.training.strategies.base import DFlashTrainStrategy

    model = specforge_model(settings, batch, attention, chunk)
    own_sampler, counts = model._sample_anchor_positions, [0]

    def sampler(*args: object, **keys: object) -> tuple[Tensor, Tensor]:
        anchors, keep = own_sampler(*args, **keys)
        if batch.anchors is not None:
            anchors, keep = batch.anchors, torch.ones_like(batch.anchors, dtype=torch.bool)
        counts[0] = int(keep.sum())  # an anchor is kept only when the slot after it is supervised
        return anchors, keep

    model._sample_anchor_positions = sampler
    if settings.compile:
        model.draft_model.compile()
    backend = FSDPTrainingBackend(
        ParallelConfig(), optimizer_factory=lambda target: BF16Optimizer(target, lr=6e-4, max_grad_norm=1.0)
    )
    backend.prepare_model(model, wrap=False, optimizer_target=model.draft_model)
    strategy = DFlashTrainStrategy(model)
    core = TrainerCore(strategy, backend)
    tensors = {"input_ids": batch.input_ids, "hidden_states": batch.taps, "loss_mask": torch.ones_like(batch.input_ids)}
    train_batch = TrainBatch(sample_ids=["random"] * settings.sequences, strategy="dflash", tensors=tensors)
    parameters = list(model.draft_model.parameters())

    def forward_backward() -> tuple[float, int]:
        model.draft_model.zero_grad()
        loss = strategy.forward_loss(train_batch).loss
        backend.backward(loss)
        return loss.item(), counts[0]

    def full_step() -> tuple[float, int]:
        core.train_step(train_batch)
        return math.nan, counts[0]

    model.train()
    per_block = settings.sequences if settings.loss == "dpace" else None
    return Step(parameters, forward_backward, full_step, lambda loss, blocks: loss * per_block / blocks if per_block else loss)


def speculators(settings: Settings, batch: Batch) -> dict[str, Callable[[], Step]]:
    attentions = ("sdpa", "eager") if settings.device == "cpu" else ("simple_flex_attention", "sdpa")
    return {way: lambda way=way: speculators_step(settings, batch, way) for way in attentions}


def speculators_model(settings: Settings, batch: Batch, attention: str) -> torch.nn.Module:
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
    from transformers import Qwen3Config

    layer_config = Qwen3Config(**qwen3_keys(settings))
    layer_config._attn_implementation = attention
    model = DFlashDraftModel(
        DFlashSpeculatorConfig(
            transformer_layer_config=layer_config,
            draft_vocab_size=settings.vocab_size,
            block_size=settings.block_size,
            aux_hidden_state_layer_ids=list(range(2, 2 + settings.features)),
            mask_token_id=batch.mask_token_id,
        )
    )
    targets = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight")
    model.load_state_dict(
        batch.weights | dict.fromkeys(targets, batch.embedding) | {"verifier_norm.weight": torch.ones(settings.hidden_size)}
    )
    return model.to(settings.device)


def speculators_step(settings: Settings, batch: Batch, attention: str) -> Step:
    from speculators.models.dflash import core
    from speculators.train.optimizers import build_optimizers
    from speculators.train.trainer import TrainerConfig

    model = speculators_model(settings, batch, attention).train()
    weighting = {"decay": "fixed-exp-decay", "dpace": "dpace"}[settings.loss]
    keys = model.get_trainer_kwargs(
        loss_fn="ce",
        loss_implementation="eager" if settings.device == "cpu" else "fused",
        dflash_decay_gamma=settings.gamma,
        max_anchors=settings.anchors * settings.sequences if batch.anchors is None else batch.anchors.numel(),
        per_position_loss_weight=weighting,
    )[0]
    if batch.anchors is not None:
        starts = torch.arange(settings.sequences, device=settings.device)[:, None] * settings.length
        packed_anchors = (batch.anchors + starts).flatten()
        core.select_anchors = lambda *_: (packed_anchors, torch.ones_like(packed_anchors, dtype=torch.bool))
    documents = torch.arange(settings.sequences, device=settings.device).repeat_interleave(settings.length)
    packed = {
        "hidden_states": batch.taps.flatten(0, 1)[None],
        "input_ids": batch.input_ids.flatten()[None],
        "loss_mask": torch.ones(1, len(documents), dtype=torch.long, device=settings.device),
        "verifier_last_hidden_states": batch.last_hidden.flatten(0, 1)[None],
        "document_ids": documents[None],
        "position_ids": torch.arange(settings.length, device=settings.device).repeat(settings.sequences)[None],
    }
    optimizers = build_optimizers(model, TrainerConfig(lr=6e-4, num_epochs=1, save_path="", optimizer="adamw"))
    forward = torch.compile(model) if settings.compile and settings.device == "cpu" else model
    autocast = torch.autocast(settings.device, dtype=settings.torch_dtype, enabled=settings.dtype != "float32")

    def forward_backward() -> tuple[float, int]:
        with autocast:
            _, loss, metrics = forward(**packed, **keys)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        return loss.item(), int(metrics["eal_total"])

    def full_step() -> tuple[float, int]:
        outcome = forward_backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        return outcome

    slots = settings.block_size - 1  # its anchors keep away from the row's end: every slot of a block that counts is trained
    decay = sum(math.exp(-slot / settings.gamma) for slot in range(slots))
    factor = slots if settings.loss == "dpace" else slots / decay
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return Step(parameters, forward_backward, full_step, lambda loss, _: loss * factor)
