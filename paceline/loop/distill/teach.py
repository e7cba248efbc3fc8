"""Trains the student with TRL: SFTTrainer on answers or on a teacher's stored log-probabilities, or GKDTrainer.

    checkpoints/checkpoint-000120/     TRL's checkpoint: weights, optimiser, schedule, random state, trainer_state.json
    checkpoints/clock.json             seconds of training at each checkpoint

TRL runs, saves and resumes the training. This module adds the documents, the clock, the loss on stored
log-probabilities and, on a CPU, logits at the answers' positions only, where TRL computes them at all positions.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import shutil
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from paceline.errors import CacheError, ConfigError, TrainingError, needing, reraised
from paceline.loop.distill import rounding
from paceline.loop.distill.config import TeachingConfig
from paceline.loop.distill.reading import AnswerLogprobs
from paceline.report.tables import Progress
from paceline.runs.folder import RunFolder, write_whole
from paceline.runs.stopping import Stop
from paceline.train.documents.dataset import Document

IGNORED = -100
WARMUP, FLOOR = 0.05, 0.1
"""Share of the training with rising learning rate; final learning rate as a share of the peak."""
CLOCK = "clock.json"
LEAST_SHARED = 16
"""Shortest common prefix of a batch, in tokens, that is computed once."""

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # TRL reports every trainer to the hub
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # GKDTrainer counts as experimental; its version is pinned
with needing(ConfigError, "distill trains with TRL, which is not installed: pip install 'paceline[distill]'"):
    import datasets
    import transformers
    from trl import SFTConfig, SFTTrainer
    from trl.experimental.gkd import GKDConfig, GKDTrainer


@dataclass(frozen=True, slots=True)
class TrainingInputs:
    """Inputs of a student's training, apart from its settings."""

    start: Path
    """Folder of the untrained student."""
    teacher: Path | None
    """Folder of the teacher; only for the method gkd."""
    documents: Sequence[Document]
    logprobs: Sequence[AnswerLogprobs] | None
    """The teacher's log-probabilities along each document; only for the method soft."""
    out: Path
    """Folder of the checkpoints."""
    freeze: bool = True
    """Do not train the embedding."""
    blocks: bool = False
    """Round matrices to Q4_1 (4-bit GGUF format) in training and in the written files, see rounding.py."""
    round_embedding: bool = False
    """Also round the embedding to Q4_1."""


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """Number of steps, seconds and final loss of a training."""

    steps: int
    seconds: float
    loss: float | None
    """Mean of the last five logged losses."""


class Clock:
    """Measures how much of a training is done. The training ends at a time limit or after a number of steps, whichever
    is first. Time before a resume counts, too."""

    def __init__(self, folder: Path, num_steps: int, minutes: float | None) -> None:
        self.num_steps, self.limit_s = num_steps, None if minutes is None else 60.0 * minutes
        self.step, self._file, self._before = 0, folder / CLOCK, 0.0
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds of training so far, including the parts before a resume."""
        return self._before + time.monotonic() - self._began

    @property
    def share(self) -> float:
        """Completed share of the training, from 0 to 1: by time or by steps, whichever is larger."""
        by_time = self.seconds / self.limit_s if self.limit_s else 0.0
        return min(1.0, max(by_time, self.step / max(1, self.num_steps)))

    def resume(self, step: int) -> None:
        """Continues the training at step `step`. The seconds of training so far are read from clock.json, where `write`
        stored them at this step; 0 without an entry."""
        self.step = step
        self._before = self._times().get(str(step), 0.0)
        self._began = time.monotonic()

    def write(self) -> None:
        """Stores the training seconds so far in clock.json, for `resume`. Keeps the entries of the last four calls,
        because a resume may start from an earlier checkpoint."""
        newest = dict(list(self._times().items())[-3:])
        write_whole(self._file, json.dumps(newest | {str(self.step): self.seconds}) + "\n")

    def _times(self) -> dict[str, float]:
        if not self._file.is_file():
            return {}
        with reraised(CacheError, f"{self._file} cannot be read", "delete it", OSError, ValueError):
            return json.loads(self._file.read_text(encoding="utf-8"))

    def rate(self, _: int = 0) -> float:
        """Returns the current factor for the peak learning rate: linear warmup, then cosine decay to 0.1 (FLOOR). It
        follows `share`; the step that PyTorch's LambdaLR passes is ignored."""
        share = self.share
        if share < WARMUP:
            return max(0.01, share / WARMUP)
        return FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * (share - WARMUP) / (1 - WARMUP)))


class Watch(transformers.TrainerCallback):
    """Trainer callback: saves checkpoints, reports progress, and ends the training at its limit of time or steps, or at
    SIGTERM. Raises TrainingError if loss or gradient is not finite."""

    def __init__(self, clock: Clock, config: TeachingConfig, stop: Stop, folder: RunFolder, advance: Any) -> None:
        self.clock, self._config, self._stop, self._folder, self._advance = clock, config, stop, folder, advance
        self._saved = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.clock.step = state.global_step
        is_over = self.clock.share >= 1.0 or self._stop.is_asked
        if is_over or time.monotonic() - self._saved >= 60.0 * self._config.checkpoint_minutes:
            self._saved, control.should_save = time.monotonic(), True
            self.clock.write()
        control.should_training_stop = control.should_training_stop or is_over
        self._advance(f"training, step {state.global_step}", self.clock.share)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        loss = (logs or {}).get("loss")
        if loss is None:
            return
        if not math.isfinite(loss) or not math.isfinite((logs or {}).get("grad_norm", 0.0)):
            raise TrainingError(
                f"the student's loss or gradient is no finite number at step {state.global_step}: choose another --out "
                f"and a lower --lr than {self._config.lr:g}"
            )
        self._folder.log(stage="train", step=state.global_step, seconds=self.clock.seconds, **(logs or {}))


def rest_of(logprobs_NK: Tensor) -> Tensor:
    """Returns the log-probability, in nats, of all other tokens together, [N, 1], from those of the K most probable
    ones."""
    return torch.log1p(-logprobs_NK.exp().sum(-1, keepdim=True).clamp(max=1 - 1e-6))


def kept_divergence(logits_NV: Tensor, ids_NK: Tensor, logprobs_NK: Tensor) -> Tensor:
    """Returns the forward KL divergence from the teacher to the student at each of N positions, [N], in nats.

    Computed over K + 1 classes: the teacher's top K tokens, and all other tokens together. This is a lower bound of the
    divergence over the whole vocabulary. `logits_NV`: the student's; `ids_NK`, `logprobs_NK`: the teacher's.
    """
    own_NK = logits_NV.float().log_softmax(-1).gather(-1, ids_NK)
    teacher = torch.cat([logprobs_NK, rest_of(logprobs_NK)], -1)
    student = torch.cat([own_NK, rest_of(own_NK)], -1)
    return (teacher.exp() * (teacher - student)).sum(-1)


def answer_logits(model: Any, ids_BT: Tensor, mask_BT: Tensor, columns_C: Tensor) -> Any:
    """Runs a causal model on B padded rows; returns its outputs, with logits [B, C, V] only at the C token positions
    `columns_C`.

    Saves time by computing a long common prefix of the rows, such as a system message, only once; gradients are exact.
    `mask_BT` is 0 at padding.
    """
    shared = num_shared(ids_BT, mask_BT, int(columns_C[0]))
    slides = getattr(model.config, "sliding_window", None) and getattr(model.config, "use_sliding_window", True)
    if shared < LEAST_SHARED or slides:
        return model(input_ids=ids_BT, attention_mask=mask_BT, logits_to_keep=columns_C, use_cache=False)
    cache = model(input_ids=ids_BT[:1, :shared], use_cache=True, logits_to_keep=1).past_key_values
    cache.batch_repeat_interleave(len(ids_BT))
    rest = {"input_ids": ids_BT[:, shared:], "attention_mask": mask_BT, "past_key_values": cache, "use_cache": True}
    return model(**rest, logits_to_keep=columns_C - shared)


def num_shared(ids_BT: Tensor, mask_BT: Tensor, most: int) -> int:
    """Returns the length in tokens of the common prefix of all rows, at most `most`; padding does not count. Returns 0
    for a single row."""
    if len(ids_BT) < 2:
        return 0
    differs_T = ((ids_BT != ids_BT[:1]) | (mask_BT == 0)).any(0)[:most]
    return int(differs_T.int().argmax()) if differs_T.any() else most


class AnswerTrainer(SFTTrainer):
    """TRL's SFTTrainer with a loss over the answer tokens only. The method "hard" uses their cross-entropy; "soft" uses
    the forward KL divergence from the teacher's stored top-k log-probabilities."""

    logprobs: Sequence[AnswerLogprobs] | None = None
    """The teacher's log-probabilities by document index; None for the method hard."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Returns the loss of a batch: the sum over its answer tokens, divided by `num_items_in_batch`. The trainer
        passes the number of answer tokens of the whole step [default: of the batch]. With `return_outputs`, returns
        (loss, outputs)."""
        numbers = inputs.pop("document", None)
        if self.logprobs is None and inputs["input_ids"].device.type == "cuda":
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        wanted_BT = inputs["labels"][:, 1:] != IGNORED
        columns = wanted_BT.any(0).nonzero()[:, 0]
        outputs = answer_logits(model, inputs["input_ids"], inputs["attention_mask"], columns)
        logits_NV = outputs.logits[wanted_BT[:, columns]]
        labels_N = inputs["labels"][:, 1:][wanted_BT]
        if self.logprobs is None:
            losses_N = torch.nn.functional.cross_entropy(logits_NV.float(), labels_N, reduction="none")
        else:
            assert numbers is not None
            teacher = [self.logprobs[number] for number in numbers.tolist()]
            ids_NK = torch.cat([torch.from_numpy(each.ids_NK) for each in teacher]).long()
            logprobs_NK = torch.cat([torch.from_numpy(each.logprobs_NK) for each in teacher])
            losses_N = kept_divergence(logits_NV, ids_NK.to(labels_N.device), logprobs_NK.to(labels_N.device))
        loss = losses_N.sum() / (len(losses_N) if num_items_in_batch is None else num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


class Collator:
    """Pads tokenised documents to a batch; prompt tokens have the label -100 (no loss)."""

    def __init__(self, pad: int, with_prompts: bool) -> None:
        self._pad, self._with_prompts = pad, with_prompts

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        """Returns input_ids, attention_mask and labels [B, T], and the documents' indices [B] as `document`.

        With prompts, the batch has prompts and prompt_attention_mask instead of `document`: TRL's GKDTrainer lets the
        student answer them.
        """
        tokens = [torch.tensor(row["input_ids"]) for row in rows]
        prompts = [ids[: max(1, row["answer_start"])] for ids, row in zip(tokens, rows, strict=True)]
        labels = [
            torch.cat([torch.full_like(prompt, IGNORED), ids[len(prompt) :]])
            for prompt, ids in zip(prompts, tokens, strict=True)
        ]
        batch = {
            "input_ids": pad_sequence(tokens, True, self._pad),
            "attention_mask": pad_sequence([torch.ones_like(ids) for ids in tokens], True),
            "labels": pad_sequence(labels, True, IGNORED),
        }
        if not self._with_prompts:
            return batch | {"document": torch.tensor([row["document"] for row in rows])}
        return batch | {
            "prompts": pad_sequence(prompts, True, self._pad, padding_side="left"),
            "prompt_attention_mask": pad_sequence([torch.ones_like(ids) for ids in prompts], True, padding_side="left"),
        }


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences progress bars, log lines and warnings of TRL and Transformers within the block."""
    log = logging.getLogger("transformers")
    level = log.level
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"(trl|torch|transformers|accelerate)\b.*")
            yield
    finally:
        log.setLevel(level)


@_quiet()
def teach(
    inputs: TrainingInputs, config: TeachingConfig, student: Path, stop: Stop, folder: RunFolder, progress: Progress
) -> TrainingResult:
    """Trains the student, from the newest checkpoint in `inputs.out` if there is one, and writes it in float32 to the
    folder `student`.

    At SIGTERM (`stop`), saves a checkpoint and raises SystemExit (143). `folder`: run folder to which losses are
    logged. Raises TrainingError on divergence, CacheError when the disk cannot be written.
    """
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(inputs.start, dtype=torch.float32)
    if inputs.round_embedding:
        with torch.no_grad():
            embedding = model.get_input_embeddings().weight
            embedding.copy_(rounding.q4_1(embedding))
    if inputs.freeze:
        model.get_input_embeddings().weight.requires_grad_(False)
    if inputs.blocks:
        rounding.compute_rounded(model)
    clock = Clock(inputs.out, config.num_steps(len(inputs.documents)), config.minutes)
    optimiser = torch.optim.AdamW(
        [each for each in model.parameters() if each.requires_grad],
        config.lr,
        weight_decay=config.weight_decay,
        betas=(0.9, 0.95),
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, clock.rate)
    trainer = _trainer(inputs, config, model, (optimiser, schedule), clock.num_steps)
    newest = newest_checkpoint(inputs.out)
    clock.resume(int(newest.name.split("-")[1]) if newest else 0)
    if newest:
        progress.say(f"goes on at step {clock.step}, after {clock.seconds / 60:.1f} minutes of training")
    if clock.share < 1.0:
        with stop.later(), progress.bar("training", 1000) as advance:
            trainer.add_callback(Watch(clock, config, stop, folder, advance))
            with reraised(CacheError, f"cannot write {inputs.out}", "free space, then run the same command", OSError):
                trainer.train(resume_from_checkpoint=str(newest) if newest else None)
        if stop.is_asked and clock.share < 1.0:
            stop.end(f"step {clock.step} of the training is kept")
    elif newest:
        model = transformers.AutoModelForCausalLM.from_pretrained(newest, dtype=torch.float32)
    if inputs.blocks:
        rounding.round_weights(model)
    shutil.rmtree(student, ignore_errors=True)
    with reraised(CacheError, f"cannot write {student}", "free space, then run the same command", OSError):
        model.save_pretrained(student)
    losses = [line["loss"] for line in folder.metrics() if line.get("stage") == "train"][-5:]
    return TrainingResult(clock.step, clock.seconds, sum(losses) / len(losses) if losses else None)


def newest_checkpoint(out: Path) -> Path | None:
    """Returns the newest complete checkpoint in the folder `out`, or None; deletes incomplete ones of a killed run."""
    complete: list[Path] = []
    for folder in out.glob("checkpoint-*"):
        if (folder / "trainer_state.json").is_file():  # TRL writes this file last
            complete.append(folder)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return max(complete, key=lambda folder: int(folder.name.split("-")[1]), default=None)


def _trainer(inputs: TrainingInputs, config: TeachingConfig, model: Any, optimisers: Any, num_steps: int) -> Any:
    on_cuda = torch.cuda.is_available()
    settings: dict[str, Any] = {
        "output_dir": str(inputs.out),
        "per_device_train_batch_size": config.together,
        "gradient_accumulation_steps": config.batch_size // config.together,
        "max_steps": num_steps,
        "max_length": config.max_len,
        "learning_rate": config.lr,
        "max_grad_norm": 1.0,
        "seed": config.seed,
        "bf16": config.autocast,
        "use_cpu": not on_cuda,
        "dataloader_pin_memory": on_cuda,
        "gradient_checkpointing": False,
        "save_strategy": "no",  # `Watch` requests checkpoints
        "save_total_limit": 2,
        "logging_steps": min(10, max(1, num_steps // 5)),
        "logging_nan_inf_filter": False,
        "report_to": [],
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "dataset_kwargs": {"skip_prepare_dataset": True},
    }
    rows = [
        {"input_ids": document.tokens.tolist(), "answer_start": document.answer_start, "document": number}
        for number, document in enumerate(inputs.documents)
    ]
    tokenizer = transformers.AutoTokenizer.from_pretrained(inputs.start)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad)
    more: dict[str, Any] = {
        "model": model,
        "train_dataset": datasets.Dataset.from_list(rows),
        "data_collator": Collator(pad, config.method == "gkd"),
        "processing_class": tokenizer,
        "optimizers": optimisers,
    }
    if config.method == "gkd":
        gkd = {"lmbda": config.on_policy, "beta": config.beta, "temperature": 1.0, "max_new_tokens": 128}
        assert inputs.teacher is not None
        teacher = transformers.AutoModelForCausalLM.from_pretrained(
            str(inputs.teacher), dtype=torch.bfloat16 if config.autocast else torch.float32
        )
        trainer: Any = GKDTrainer(teacher_model=teacher, args=GKDConfig(**settings, **gkd), **more)
    else:
        trainer = AnswerTrainer(args=SFTConfig(**settings), **more)
        trainer.logprobs = inputs.logprobs
    for shown in (transformers.PrinterCallback, transformers.ProgressCallback):
        trainer.remove_callback(shown)
    return trainer
