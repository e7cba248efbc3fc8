"""SpecForge 0.2.0 and speculators 0.9.0 for `train_vs_peers.py`: hidden states into their files, then their own trainers.

    python experiments/train_vs_peers_sides.py specforge|speculators features|steps JOB

Run in the side's own environment. JOB is a JSON file: model (a Transformers folder), drafter (a folder with config.json in
z-lab's words), texts, out, taps, minutes, looks, threads, anchors, row, seed, changed. What is theirs and what is not:

* Features: both leave this to servers on a GPU (speculators 0.9.0: `generate-offline-data` asks vLLM; SpecForge 0.2.0: SGLang
  in `offline_capture`). Here a Transformers forward stands in, one document at a time, in bfloat16; what it finds is written in
  their formats, which their own readers then read.
* Steps: `specforge.launch.build_offline_runtime` and its `Trainer.fit`, not wrapped in FSDP;
  `speculators.train.trainer.Trainer` with its `ArrowDataset`, multipack sampler and collator, its device the CPU and its
  profiling (which wants an accelerator) off.
  Attention is SDPA, the fastest that has a backward on a CPU (`train_step_vs_peers.sh`).
* Settings: what each package does when nothing is said, but for the drafter's shape. `RECIPES` has what was changed and why.
  The learning rate's schedule needs a number of steps: `probe` times a few, in a run that is thrown away.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from train_vs_peers_curve import OVERTIME, Curve, EnoughError, Stopwatch, Text, read_texts

Job = SimpleNamespace
Step = Callable[[int, Callable[[], dict[str, Tensor]]], None]
"""Called after every step with the blocks it trained, and how to get the weights; raises EnoughError to end."""
PROBED, UNTIMED = 10, 2
RECIPES = {
    "specforge": {
        "learning_rate": 6e-4,  # these three: its DFlash examples, examples/configs/*dflash*.yaml
        "warmup_ratio": 0.04,
        "max_grad_norm": 1.0,
        "loss_decay_gamma": 4.0,  # the paper's for blocks of 8; its examples have 7, for 16
        "batch_size": 1,  # as the schema has it
        "accumulation_steps": 1,
        "objective_chunk_blocks": 0,  # faster than its 128 on a CPU, the same sums
    },
    "speculators": {
        "optimizer": "muon",  # these: defaults of its schema for DFlash, said here to be seen
        "lr": 1e-3,
        "loss_fn": "ce",
        "per_position_loss_weight": "dpace",
        "scheduler_type": "linear",
        "num_workers": 0,  # 12 processes that read files do not fit on two cores
        "loss_implementation": "eager",  # its fused losses need Triton
    },
}


def recipe_of(side: str, job: Job) -> dict[str, Any]:
    """With what `job.changed` says otherwise, as specforge.batch_size=4."""
    recipe = dict(RECIPES[side])
    for words in job.changed:
        name, _, value = words.partition("=")
        owner, _, key = name.partition(".")
        if owner == side and key not in recipe:
            raise SystemExit(f"--change {words}: {side} has {', '.join(recipe)}")
        if owner == side:
            recipe[key] = type(recipe[key])(value)
    return recipe


# --- features


@torch.inference_mode()
def hidden_states(model: str, texts: list[Text], taps: list[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each document: outputs of the tapped layers [S, K, H], and of the last one before the final norm [S, H], bfloat16."""
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval().model
    kept: dict[str, Tensor] = {}
    base.norm.register_forward_pre_hook(lambda module, inputs: kept.update(last=inputs[0]))
    for text in texts:
        found = base(input_ids=torch.tensor([text.ids]), output_hidden_states=True, use_cache=False).hidden_states
        yield torch.stack([found[tap + 1][0] for tap in taps], dim=1), kept["last"][0]


def mask_of(text: Text) -> Tensor:
    """int64 [S], 1 in the answer."""
    return (torch.arange(len(text.ids)) >= text.start).long()


def write_specforge(number: int, text: Text, taps: Tensor, last: Tensor, out: Path) -> None:
    kept = {"input_ids": torch.tensor(text.ids), "loss_mask": mask_of(text), "hidden_states": taps.flatten(1).clone()}
    torch.save(kept, out / f"data_{number:06d}.ckpt")


def write_speculators(number: int, text: Text, taps: Tensor, last: Tensor, out: Path) -> None:
    states = torch.cat([taps, last[:, None]], dim=1).contiguous()
    save_file({"hidden_states": states, "token_ids": torch.tensor(text.ids)}, out / f"hs_{number}.safetensors")


def features(side: str, job: Job) -> dict[str, Any]:
    texts, out = read_texts(Path(job.texts)), Path(job.out) / "features"
    out.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    source, write = (
        hidden_states(job.model, texts, job.taps),
        {"specforge": write_specforge, "speculators": write_speculators}[side],
    )
    first = next(source)
    start_s, began = time.perf_counter() - began, time.perf_counter()
    for number, text in enumerate(texts):
        write(number, text, *(first if number == 0 else next(source)), out)
    if side == "speculators":
        from datasets import Dataset

        rows = {"input_ids": [text.ids for text in texts], "loss_mask": [mask_of(text).tolist() for text in texts]}
        rows["seq_len"] = [len(text.ids) for text in texts]
        Dataset.from_dict(rows).with_format("torch").save_to_disk(str(Path(job.out) / "rows"))
    return {"by": f"transformers {version('transformers')}", "seconds": time.perf_counter() - began, "start_s": start_s}


# --- steps


def specforge_run(job: Job, num_steps: int, on_step: Step) -> None:
    from specforge.algorithms.builtin import builtin_algorithm_registry
    from specforge.launch import build_offline_runtime
    from specforge.optimizer import BF16Optimizer
    from specforge.training.backend import FSDPTrainingBackend

    recipe, model, count = recipe_of("specforge", job), specforge_model(job), [0]
    own_sampler, own_prepare = model._sample_anchor_positions, FSDPTrainingBackend.prepare_model

    def sampler(*args: Any, **keys: Any) -> tuple[Tensor, Tensor]:
        anchors, keep = own_sampler(*args, **keys)
        count[0] += int(keep.sum())  # an anchor is kept only when the slot after it is supervised
        return anchors, keep

    def after(metrics: dict[str, Any], step: int) -> None:
        blocks, count[0] = count[0], 0
        on_step(blocks, model.draft_model.state_dict)

    def optimizer(target: nn.Module) -> BF16Optimizer:
        keys = {name: recipe[name] for name in ("warmup_ratio", "max_grad_norm")}
        return BF16Optimizer(target, lr=recipe["learning_rate"], total_steps=num_steps, **keys)

    model._sample_anchor_positions = sampler
    per_epoch = len(read_texts(Path(job.texts))) // (recipe["batch_size"] * recipe["accumulation_steps"])
    with patch.object(FSDPTrainingBackend, "prepare_model", lambda *args, **keys: own_prepare(*args, wrap=False, **keys)):
        trainer = build_offline_runtime(
            algorithm=builtin_algorithm_registry().resolve("dflash"),
            hidden_states_path=str(Path(job.out) / "features"),
            draft_model=model,
            target_head=None,
            optimizer_factory=optimizer,
            run_id="train-vs-peers",
            output_dir=str(Path(job.out) / "specforge"),
            batch_size=recipe["batch_size"],
            accumulation_steps=recipe["accumulation_steps"],
            num_epochs=math.ceil(num_steps / max(1, per_epoch)) + 1,
            max_steps=num_steps,
            seed=job.seed,
            logger=after,
            log_interval=1,
        )
    on_step(0, model.draft_model.state_dict)
    trainer.fit()


def specforge_model(job: Job) -> nn.Module:
    """As its `build_dflash_draft` and `build_dflash_model` do: weights in bfloat16, float32 masters in the optimiser.

    Theirs rounds the rotary frequencies to bfloat16 too, which whoever serves the drafter does not; here they stay exact.
    """
    from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
    from specforge.modeling.draft.dflash import DFlashDraftModel
    from transformers import Qwen3Config

    torch.manual_seed(job.seed)
    raw, recipe = json.loads((Path(job.drafter) / "config.json").read_text()), recipe_of("specforge", job)
    config = Qwen3Config(**{key: value for key, value in raw.items() if key != "architectures"})
    config._attn_implementation = "sdpa"
    draft = DFlashDraftModel(config)
    weight = load_file(Path(job.model) / "model.safetensors")["model.embed_tokens.weight"].float()
    embedding = nn.Embedding.from_pretrained(weight, freeze=True)
    head = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    head.weight = embedding.weight
    exact = draft.rotary_emb.inv_freq.clone()
    model = OnlineDFlashModel(
        draft_model=draft,
        target_lm_head=head,
        target_embed_tokens=embedding,
        mask_token_id=raw["dflash_config"]["mask_token_id"],
        block_size=raw["block_size"],
        attention_backend="sdpa",
        num_anchors=job.anchors,
        loss_decay_gamma=recipe["loss_decay_gamma"],
        objective_chunk_blocks=recipe["objective_chunk_blocks"],
    ).to(dtype=torch.bfloat16)
    draft.rotary_emb.inv_freq = exact
    return model


def speculators_run(job: Job, num_steps: int, on_step: Step) -> None:
    from speculators.models.dflash import core
    from speculators.train import trainer as theirs

    args, count = speculators_args(job, num_steps), [0]
    own_select = core.select_anchors

    def select(loss_mask: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        anchors, valid = own_select(loss_mask, *rest)
        count[0] += int((valid & (loss_mask[0, anchors + 1] > 0)).sum())  # those of which a slot is trained
        return anchors, valid

    class NoTimer(theirs._StepTimer):
        """It synchronises an accelerator."""

        def reset(self, enabled: bool) -> None:
            super().reset(False)

    patches = {"get_local_rank": lambda: torch.device("cpu"), "_StepTimer": NoTimer, "tqdm": lambda loader, **keys: loader}
    with patch.multiple(theirs, **patches), patch.object(core, "select_anchors", select):
        trainer = speculators_trainer(args, job)
        trainer.device_type = "cpu"

        def after() -> None:
            blocks, count[0] = count[0], 0
            on_step(blocks, trainer.model.state_dict)

        on_step(0, trainer.model.state_dict)
        for epoch in range(args.epochs):
            trainer.train_epoch(epoch, step_callback=after)


def speculators_args(job: Job, num_steps: int) -> argparse.Namespace:
    """Its schema's defaults, and what this experiment says."""
    from speculators.train.config import TrainConfig

    raw = json.loads((Path(job.drafter) / "config.json").read_text())
    asked = {
        **recipe_of("speculators", job),
        "speculator_type": "dflash",
        "verifier_name_or_path": job.model,
        "draft_config": job.drafter,
        "block_size": raw["block_size"],
        "target_layer_ids": [tap + 1 for tap in job.taps],
        "mask_token_id": raw["dflash_config"]["mask_token_id"],
        "draft_attn_impl": "sdpa",
        "data_path": str(Path(job.out) / "rows"),
        "save_path": str(Path(job.out) / "speculators"),
        "total_seq_len": job.row,
        "max_anchors": job.anchors,
        "max_steps": num_steps,
        "epochs": num_steps,
        "seed": job.seed,
        "on_missing": "raise",
    }
    return argparse.Namespace(**TrainConfig.from_sources(cli=asked, argv=[]).flatten())


def speculators_trainer(args: argparse.Namespace, job: Job) -> Any:
    """As its `train.cli.main` makes it; all documents are learned from, none are kept for its own validation."""
    from hs_connectors import FileTransfer
    from speculators.models.dflash import DFlashDraftModel
    from speculators.train import cli, dataloader
    from speculators.train.data import ArrowDataset
    from speculators.train.trainer import Trainer, TrainerConfig

    cli.set_seed(args.seed)
    raw = json.loads((Path(job.drafter) / "config.json").read_text())
    model = cli.build_draft_model(args, DFlashDraftModel, None, None, raw["vocab_size"])
    rows = ArrowDataset(
        max_len=args.total_seq_len,
        datapath=args.data_path,
        transfer=FileTransfer(Path(job.out) / "features"),
        on_missing=args.on_missing,
    )
    width = model.config.transformer_layer_config.hidden_size
    loader = dataloader._setup_dataloader(
        rows, args.total_seq_len, width, num_workers=args.num_workers, num_target_layers=len(job.taps), seed=args.seed
    )
    call, _ = DFlashDraftModel.get_trainer_kwargs(**vars(args))
    fields = {name: getattr(args, name) for name in TrainerConfig._fields if hasattr(args, name)}
    fields |= {"num_epochs": args.epochs, "train_call_kwargs": call, "hidden_states_dtype": torch.bfloat16}
    return Trainer(model, TrainerConfig(**fields), loader)


def probe(run: Callable[[Job, int, Step], None], job: Job) -> float:
    """Seconds of a step."""
    times = [time.perf_counter()]

    def on_step(blocks: int, weights: Callable[[], dict[str, Tensor]]) -> None:
        times.append(time.perf_counter())
        if len(times) >= PROBED + 2 or times[-1] - times[1] > 60 * job.minutes / 4:
            raise EnoughError

    with contextlib.suppress(EnoughError):
        run(job, PROBED, on_step)
    timed = times[1:]  # from where the trainer stands ready
    begin = min(UNTIMED, len(timed) - 2)
    return (timed[-1] - timed[begin]) / (len(timed) - 1 - begin)


def steps(side: str, job: Job) -> dict[str, Any]:
    run = {"specforge": specforge_run, "speculators": speculators_run}[side]
    began = time.perf_counter()
    step_s = probe(run, job)
    limit_s, told = 60 * job.minutes, {"probe_s": time.perf_counter() - began, "probed_step_s": step_s}
    num_steps, done, began = max(2, round(limit_s / step_s)), [0, 0], time.perf_counter()
    curve: list[Curve] = []
    watch: list[Stopwatch] = []

    def on_step(blocks: int, weights: Callable[[], dict[str, Tensor]]) -> None:
        if not curve:
            told["start_s"] = time.perf_counter() - began
            curve.append(Curve(Path(job.out) / "curve", limit_s / job.looks, weights))
            curve[0].note(0.0, 0, 0)
            watch.append(Stopwatch())
            return
        seconds = watch[0].stop()
        done[:] = done[0] + 1, done[1] + blocks
        is_last = done[0] == num_steps or seconds > OVERTIME * limit_s
        curve[0].note(seconds, done[1], done[0], is_last)
        if is_last:
            raise EnoughError
        watch[0].go_on()

    with contextlib.suppress(EnoughError):
        run(job, num_steps, on_step)
    packages = {name: version(name) for name in (side, "torch", "transformers")}
    return told | {"planned_steps": num_steps, "recipe": recipe_of(side, job), "versions": packages}


def main() -> None:
    side, stage, file = sys.argv[1:]
    job = Job(**json.loads(Path(file).read_text()))
    torch.set_num_threads(job.threads)
    told = {"features": features, "steps": steps}[stage](side, job)
    (Path(job.out) / f"{stage}.json").write_text(json.dumps(told) + "\n")


if __name__ == "__main__":
    main()
