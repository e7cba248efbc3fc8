"""The student's training, by TRL's trainers: SFTTrainer on answers, or on a teacher's kept log-probabilities; GKDTrainer.

    checkpoints/checkpoint-000120/     TRL's own: weights, optimiser, schedule, random numbers, trainer_state.json last
    checkpoints/clock.json             seconds of training at each checkpoint that is there

TRL computes, steps, saves and resumes; ours are the documents it gets, the clock, the loss on kept log-probabilities and,
on a CPU, the head at the answers' positions alone, which TRL's fused head would compute at all of them.
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

from paceline.errors import CacheError, ConfigError, TrainingError, needing, reraised
from paceline.loop.distill import rounding
from paceline.loop.distill.config import TeachingConfig
from paceline.loop.distill.reading import Told
from paceline.report.tables import Progress
from paceline.runs.folder import RunFolder, write_whole
from paceline.runs.stopping import Stop
from paceline.train.documents.dataset import Document

IGNORED = -100
WARMUP, FLOOR = 0.05, 0.1
"""Share of the training in which the learning rate rises; what is left of it at the end."""
CLOCK = "clock.json"
LEAST_SHARED = 16
"""Tokens that all rows of a batch begin with, from which on they are computed once."""

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # TRL tells its hub of every trainer that is made
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # GKDTrainer counts as experimental; its version is pinned
with needing(ConfigError, "distill trains with TRL, which is not installed: pip install 'paceline[distill]'"):
    import datasets
    import transformers
    from trl import SFTConfig, SFTTrainer
    from trl.experimental.gkd import GKDConfig, GKDTrainer


@dataclass(frozen=True, slots=True)
class Lesson:
    """What a training begins with."""

    start: Path
    """The student's first weights: a folder."""
    teacher: Path | None
    """A folder, for gkd."""
    documents: Sequence[Document]
    told: Sequence[Told] | None
    """What the teacher says along each document, for soft."""
    out: Path
    """Where checkpoints are kept."""
    freeze: bool = True
    """Leave the embedding as it is."""
    blocks: bool = False
    """Learn for matrices in Q4_1 blocks (rounding.py)."""
    round_embedding: bool = False
    """The embedding will be in Q4_1 blocks too."""


@dataclass(frozen=True, slots=True)
class Taught:
    """How a training ended."""

    steps: int
    seconds: float
    loss: float | None
    """Mean of the last lines of the log."""


class Clock:
    """How far a training is, by its seconds over all its parts or by its steps, whichever ends it first."""

    def __init__(self, folder: Path, num_steps: int, minutes: float | None) -> None:
        self.num_steps, self.limit_s = num_steps, None if minutes is None else 60.0 * minutes
        self.step, self._file, self._before = 0, folder / CLOCK, 0.0
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """Of training, those of earlier parts included."""
        return self._before + time.monotonic() - self._began

    @property
    def share(self) -> float:
        """Of the whole, at most 1."""
        by_time = self.seconds / self.limit_s if self.limit_s else 0.0
        return min(1.0, max(by_time, self.step / max(1, self.num_steps)))

    def resume(self, step: int) -> None:
        """Go on as of this step; begins to count now."""
        times = self._times()
        self.step, self._before, self._began = step, times.get(str(step), 0.0), time.monotonic()

    def write(self) -> None:
        """Note the seconds of this step."""
        newest = dict(list(self._times().items())[-3:])
        write_whole(self._file, json.dumps(newest | {str(self.step): self.seconds}) + "\n")

    def _times(self) -> dict[str, float]:
        if not self._file.is_file():
            return {}
        with reraised(CacheError, f"{self._file} cannot be read", "delete it", OSError, ValueError):
            return json.loads(self._file.read_text(encoding="utf-8"))

    def rate(self, _: int = 0) -> float:
        """What the learning rate is multiplied with."""
        share = self.share
        if share < WARMUP:
            return max(0.01, share / WARMUP)
        return FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * (share - WARMUP) / (1 - WARMUP)))


class Watch(transformers.TrainerCallback):
    """Ends a training in time, at SIGTERM and when its numbers diverge; shows how far it is."""

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
                f"the student's loss or gradient is no finite number at step {state.global_step}: choose another --out and a "
                f"lower --lr than {self._config.lr:g}"
            )
        self._folder.log(stage="train", step=state.global_step, seconds=self.clock.seconds, **(logs or {}))


def rest_of(logprobs_NK: Tensor) -> Tensor:
    """Log-probability of all other tokens together, [N, 1]."""
    return torch.log1p(-logprobs_NK.exp().sum(-1, keepdim=True).clamp(max=1 - 1e-6))


def kept_divergence(logits_NV: Tensor, ids_NK: Tensor, logprobs_NK: Tensor) -> Tensor:
    """Forward divergence from the teacher to the student [N], in nats, over the teacher's K likeliest tokens and all others
    as one more: sum over k of p_k (log p_k - log q_k). A lower bound of the divergence over the whole vocabulary."""
    own_NK = logits_NV.float().log_softmax(-1).gather(-1, ids_NK)
    teacher = torch.cat([logprobs_NK, rest_of(logprobs_NK)], -1)
    student = torch.cat([own_NK, rest_of(own_NK)], -1)
    return (teacher.exp() * (teacher - student)).sum(-1)


def answer_logits(model: Any, ids_BT: Tensor, mask_BT: Tensor, columns_C: Tensor) -> Any:
    """A causal model's outputs with logits [B, C, V] at these positions alone.

    A beginning that all rows share, such as an application's system message, is computed once: its keys and values, gradients
    included, are every row's. The numbers are those of a plain pass up to rounding.
    """
    shared = num_shared(ids_BT, mask_BT, int(columns_C[0]))
    slides = getattr(model.config, "sliding_window", None) and getattr(model.config, "use_sliding_window", True)
    if shared < LEAST_SHARED or slides:
        return model(input_ids=ids_BT, attention_mask=mask_BT, logits_to_keep=columns_C, use_cache=False)
    begun = model(input_ids=ids_BT[:1, :shared], use_cache=True, logits_to_keep=1)
    cache = begun.past_key_values
    cache.batch_repeat_interleave(len(ids_BT))
    rest = {"input_ids": ids_BT[:, shared:], "attention_mask": mask_BT, "past_key_values": cache, "use_cache": True}
    return model(**rest, logits_to_keep=columns_C - shared)


def num_shared(ids_BT: Tensor, mask_BT: Tensor, most: int) -> int:
    """How many first tokens all rows have in common, at most so many; 0 for a single row."""
    if len(ids_BT) < 2:
        return 0
    differs_T = ((ids_BT != ids_BT[:1]) | (mask_BT == 0)).any(0)[:most]
    return int(differs_T.int().argmax()) if differs_T.any() else most


class AnswerTrainer(SFTTrainer):
    """TRL's SFTTrainer, with the loss of `hard` or `soft` at the answers' positions alone."""

    told: Sequence[Told] | None = None
    """What the teacher says, by the document's number; None for hard."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        """Mean over the answers' tokens of the step."""
        numbers = inputs.pop("document", None)
        if self.told is None and inputs["input_ids"].device.type == "cuda":
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        wanted_BT = inputs["labels"][:, 1:] != IGNORED
        columns = wanted_BT.any(0).nonzero()[:, 0]
        outputs = answer_logits(model, inputs["input_ids"], inputs["attention_mask"], columns)
        logits_NV = outputs.logits[wanted_BT[:, columns]]
        labels_N = inputs["labels"][:, 1:][wanted_BT]
        if self.told is None:
            losses_N = torch.nn.functional.cross_entropy(logits_NV.float(), labels_N, reduction="none")
        else:
            assert numbers is not None
            told = [self.told[number] for number in numbers.tolist()]
            ids, logprobs = (
                [torch.from_numpy(each) for each in kind]
                for kind in zip(*((t.ids_NK, t.logprobs_NK) for t in told), strict=True)
            )
            losses_N = kept_divergence(
                logits_NV, torch.cat(ids).long().to(labels_N.device), torch.cat(logprobs).to(labels_N.device)
            )
        loss = losses_N.sum() / (len(losses_N) if num_items_in_batch is None else num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


class Collator:
    """Documents to a padded batch; the prompt's tokens carry no label, and for gkd stand by themselves too."""

    def __init__(self, pad: int, with_prompts: bool) -> None:
        self._pad, self._with_prompts = pad, with_prompts

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        """input_ids, attention_mask and labels [B, T], document [B]."""
        longest = max(len(row["input_ids"]) for row in rows)
        batch = {
            "input_ids": torch.full((len(rows), longest), self._pad),
            "attention_mask": torch.zeros((len(rows), longest), dtype=torch.long),
            "labels": torch.full((len(rows), longest), IGNORED),
        }
        for place, row in enumerate(rows):
            tokens = torch.tensor(row["input_ids"])
            first = max(1, row["answer_start"])
            batch["input_ids"][place, : len(tokens)] = tokens
            batch["attention_mask"][place, : len(tokens)] = 1
            batch["labels"][place, first : len(tokens)] = tokens[first:]
        if not self._with_prompts:
            return batch | {"document": torch.tensor([row["document"] for row in rows])}
        widest = max(max(1, row["answer_start"]) for row in rows)
        prompts = torch.full((len(rows), widest), self._pad)
        mask = torch.zeros((len(rows), widest), dtype=torch.long)
        for place, row in enumerate(rows):
            prompt = torch.tensor(row["input_ids"][: max(1, row["answer_start"])])
            prompts[place, widest - len(prompt) :], mask[place, widest - len(prompt) :] = prompt, 1
        return batch | {"prompts": prompts, "prompt_attention_mask": mask}


def teach(lesson: Lesson, config: TeachingConfig, student: Path, stop: Stop, folder: RunFolder, progress: Progress) -> Taught:
    """Train, or go on with a training that was killed, and write the student to the folder `student`, in float32.

    With `blocks` its matrices are those that the blocks will hold.

    Raises TrainingError when its numbers diverge, CacheError when the disk refuses, SystemExit (143) at SIGTERM.
    """
    with _quiet():
        return _teach(lesson, config, student, stop, folder, progress)


def _teach(lesson: Lesson, config: TeachingConfig, student: Path, stop: Stop, folder: RunFolder, progress: Progress) -> Taught:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(lesson.start, dtype=torch.float32)
    if lesson.round_embedding:
        with torch.no_grad():
            words = model.get_input_embeddings().weight
            words.copy_(rounding.q4_1(words))
    if lesson.freeze:
        model.get_input_embeddings().weight.requires_grad_(False)
    if lesson.blocks:
        rounding.compute_rounded(model)
    clock = Clock(lesson.out, _num_steps(len(lesson.documents), config), config.minutes)
    optimiser = torch.optim.AdamW(
        [each for each in model.parameters() if each.requires_grad],
        config.lr,
        weight_decay=config.weight_decay,
        betas=(0.9, 0.95),
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, clock.rate)
    trainer = _trainer(lesson, config, model, (optimiser, schedule), clock.num_steps)
    newest = newest_checkpoint(lesson.out)
    clock.resume(int(newest.name.split("-")[1]) if newest else 0)
    if newest:
        progress.say(f"goes on at step {clock.step}, after {clock.seconds / 60:.1f} minutes of training")
    if clock.share < 1.0:
        with stop.later(), progress.bar("training", 1000) as advance:
            trainer.add_callback(Watch(clock, config, stop, folder, advance))
            with reraised(CacheError, f"cannot write {lesson.out}", "free space, then run the same command", OSError):
                trainer.train(resume_from_checkpoint=str(newest) if newest else None)
        if stop.is_asked and clock.share < 1.0:
            stop.end(f"step {clock.step} of the training is kept")
    elif newest:
        model = transformers.AutoModelForCausalLM.from_pretrained(newest, dtype=torch.float32)
    if lesson.blocks:
        rounding.settle(model)
    shutil.rmtree(student, ignore_errors=True)
    with reraised(CacheError, f"cannot write {student}", "free space, then run the same command", OSError):
        model.save_pretrained(student)
    losses = [line["loss"] for line in folder.metrics() if line.get("stage") == "train"][-5:]
    return Taught(clock.step, clock.seconds, sum(losses) / len(losses) if losses else None)


def _num_steps(num_documents: int, config: TeachingConfig) -> int:
    by_epochs = max(1, math.ceil(config.most_epochs * num_documents / config.batch_size))
    return min(by_epochs, config.max_steps or by_epochs)


def newest_checkpoint(out: Path) -> Path | None:
    """The last one that is whole, or None; broken ones are deleted."""
    found: list[Path] = []
    for each in out.glob("checkpoint-*"):
        if (each / "trainer_state.json").is_file():  # the last file that is written
            found.append(each)
        else:
            shutil.rmtree(each, ignore_errors=True)
    return max(found, key=lambda each: int(each.name.split("-")[1]), default=None)


def _trainer(lesson: Lesson, config: TeachingConfig, model: Any, optimisers: Any, num_steps: int) -> Any:
    on_cuda = torch.cuda.is_available()
    settings: dict[str, Any] = {
        "output_dir": str(lesson.out),
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
        "save_strategy": "no",  # the clock asks for checkpoints
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
        for number, document in enumerate(lesson.documents)
    ]
    tokenizer = transformers.AutoTokenizer.from_pretrained(lesson.start)
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
        own = {"lmbda": config.on_policy, "beta": config.beta, "temperature": 1.0, "max_new_tokens": 128}
        assert lesson.teacher is not None
        teacher = transformers.AutoModelForCausalLM.from_pretrained(
            str(lesson.teacher), dtype=torch.bfloat16 if config.autocast else torch.float32
        )
        made: Any = GKDTrainer(teacher_model=teacher, args=GKDConfig(**settings, **own), **more)
    else:
        made = AnswerTrainer(args=SFTConfig(**settings), **more)
        made.told = lesson.told
    for shown in (transformers.PrinterCallback, transformers.ProgressCallback):
        made.remove_callback(shown)
    return made


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Within, TRL and Transformers do not speak of what is as it should be here."""
    told = logging.getLogger("transformers")
    level = told.level
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    told.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"(trl|torch|transformers|accelerate)\b.*")
            yield
    finally:
        told.setLevel(level)
