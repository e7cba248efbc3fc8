"""Commands that make a drafter: train and its stages. Options are read here; `commands/` does the work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli_options import (
    Backend,
    Device,
    Dtype,
    IgnoreEos,
    Json,
    MaxLen,
    NumDrafted,
    Option,
    Threads,
    WeightFormat,
    numbers,
    settings_of,
)

Target = Annotated[str, Option(help="The model to be sped up: built-in name, folder, GGUF file or hub id.")]
Prompts = Annotated[list[str] | None, Option(help="JSON lines, Parquet, folder of traces or data set id; may be repeated.")]
Limit = Annotated[int | None, Option(help="Only the first prompts of each source.")]
SelfWritten = Annotated[int, Option(help="Also answer this many prompts that the target writes itself.")]
Openers = Annotated[Path | None, Option(help="Text file: beginnings of self-written prompts, one a line.")]
AnswerTokens = Annotated[int, Option("--max-tokens", help="Longest answer, in tokens.")]
PromptTokens = Annotated[int, Option("--max-prompt-tokens", help="Longer prompts are left out.")]
Temperatures = Annotated[str, Option("--temperature", help="Comma-separated; each prompt is answered once at each.")]


def regenerate(
    out: Annotated[Path, Option(help="Run folder; the same command again goes on where it stopped.")],
    target: Target = "smollm2-135m",
    prompts: Prompts = None,
    limit: Limit = None,
    self_written: SelfWritten = 0,
    openers: Openers = None,
    max_tokens: AnswerTokens = 256,
    max_prompt_tokens: PromptTokens = 512,
    temperature: Temperatures = "0",
    seed: Annotated[int, Option(help="Another seed, other sampled answers.")] = 0,
    max_batch: Annotated[int, Option(help="Answers written at once.")] = 32,
    dtype: Dtype = "auto",
    backend: Backend = "auto",
    weight_format: WeightFormat = "auto",
    device: Device = "auto",
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """The target answers prompts, batched: the data a drafter learns from. Without prompts it writes some itself.

    Example: paceline regenerate --prompts questions.jsonl --out runs/answers
    """
    settings = settings_of(locals(), target, max_batch=max_batch)
    from paceline.commands.regenerate import RegenerateAsk
    from paceline.commands.regenerate import regenerate as run
    from paceline.train.regenerate import RegenerateConfig

    config = RegenerateConfig(max_tokens, max_prompt_tokens, tuple(numbers("--temperature", temperature)), seed)
    run(RegenerateAsk(settings, tuple(prompts or ()), self_written, openers, config, limit, out, as_json))


def train(
    out: Annotated[Path, Option(help="Run folder; the same command again goes on where it stopped.")],
    target: Target = "smollm2-135m",
    prompts: Prompts = None,
    answers: Annotated[list[Path] | None, Option(help="Answers of regenerate, or a server's traces; may be repeated.")] = None,
    init: Annotated[str | None, Option(help="Continue this drafter: a folder, or default for the one that ships.")] = None,
    scale: Annotated[str, Option(help="tiny: every stage in a minute on a random target.")] = "default",
    limit: Limit = None,
    self_written: SelfWritten = 0,
    openers: Openers = None,
    ood: Annotated[list[str] | None, Option(help="Prompts of another kind, watched but not learned; may be repeated.")] = None,
    max_tokens: AnswerTokens = 256,
    max_prompt_tokens: PromptTokens = 512,
    temperature: Temperatures = "0",
    max_len: Annotated[int, Option(help="Longest document, prompt and answer, in tokens.")] = 1024,
    layers: Annotated[int, Option(help="Draft layers.")] = 3,
    block_size: Annotated[int, Option(help="Anchor and drafts together.")] = 8,
    taps: Annotated[int | None, Option(help="Target layers the drafter reads [default: 5, or as many as layers].")] = None,
    tap_layers: Annotated[str | None, Option(help="Exactly these target layers, comma-separated, 0-based.")] = None,
    start: Annotated[str, Option("--first-layers", help="Begin with random layers, or with the target's: target.")] = "random",
    causal: Annotated[bool | None, Option("--causal/--bidirectional", help="Whether slots see only slots before them.")] = None,
    sliding_window: Annotated[int | None, Option(help="Positions that draft layers see [default: all].")] = None,
    mask_token: Annotated[int | None, Option(help="Token id that stands for a slot to be drafted [default: the last].")] = None,
    draft_vocab: Annotated[int | None, Option(help="Draft among the most frequent tokens only, this many.")] = None,
    epochs: Annotated[float, Option(help="Passes over the documents, each with new anchors.")] = 6.0,
    max_steps: Annotated[int | None, Option(help="Stop after this many steps instead.")] = None,
    max_minutes: Annotated[float | None, Option(help="Stop training after this time at the latest.")] = None,
    blocks_per_step: Annotated[int, Option(help="Blocks between two updates.")] = 512,
    anchors: Annotated[int, Option(help="Blocks per document and epoch, at random places.")] = 64,
    blocks_per_pack: Annotated[int, Option(help="Blocks computed at once; a step adds up its packs.")] = 128,
    loss: Annotated[str, Option(help="ce, d-pace, kl, lk or lk-hybrid.")] = "d-pace",
    gamma: Annotated[float | None, Option(help="Decay of ce and kl in slots [default: by block size].")] = None,
    loss_vocab: Annotated[int | None, Option(help="Tokens that ce and d-pace compare with in a step [default: all].")] = None,
    optimiser: Annotated[str, Option(help="adamw, or muon for the matrices.")] = "adamw",
    lr: Annotated[float, Option(help="Peak learning rate.")] = 6e-4,
    attention: Annotated[str, Option(help="auto, split, sdpa or flex.")] = "auto",
    autocast: Annotated[bool, Option("--autocast/--full-precision", help="Multiply in bfloat16.")] = True,
    gradient_checkpointing: Annotated[bool, Option("--gradient-checkpointing", help="Less memory, more time.")] = False,
    parallel: Annotated[str, Option(help="Several processes (torchrun): replicated, or sharded by FSDP2.")] = "auto",
    features: Annotated[str, Option(help="Hidden states: online, cached on disk, or auto.")] = "auto",
    heldout_every: Annotated[int, Option(help="Steps between looks at held-out documents.")] = 50,
    checkpoint_minutes: Annotated[float, Option(help="Minutes between checkpoints.")] = 5.0,
    seed: Annotated[int, Option(help="Data order, anchors, first weights.")] = 0,
    dtype: Dtype = "auto",
    backend: Backend = "auto",
    weight_format: WeightFormat = "auto",
    device: Device = "auto",
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Prompts in, drafter out: the target answers, its hidden states teach a DFlash drafter. Killed, it resumes.

    Example: paceline train --prompts questions.jsonl --out runs/mine --max-minutes 30
    """
    _train(dict(locals()))


def _train(given: dict[str, Any]) -> None:
    settings = settings_of(given, given["target"])
    settings.pop("model")
    from paceline.commands.train import TrainAsk
    from paceline.commands.train import train as run
    from paceline.train.loop import TrainConfig
    from paceline.train.losses import LossConfig
    from paceline.train.optim import OptimConfig
    from paceline.train.regenerate import RegenerateConfig
    from paceline.train.start import DrafterShape

    layers = numbers("--tap-layers", given["tap_layers"] or "", whole=True)
    loss = LossConfig(given["loss"], given["gamma"], vocab=given["loss_vocab"])
    optim = OptimConfig(given["optimiser"], given["lr"])
    temperatures = tuple(numbers("--temperature", given["temperature"]))
    shape = {"num_layers": "layers", "num_taps": "taps", "is_causal": "causal", "mask_token_id": "mask_token"}
    run(
        TrainAsk(
            **{name: tuple(given[name] or ()) for name in ("prompts", "answers", "ood")},
            **{name: given[name] for name in _SAME_NAME},
            config=_taken(TrainConfig, given, loss=loss, optim=optim),
            shape=_taken(
                DrafterShape,
                given,
                tap_layers=tuple(int(layer) for layer in layers) or None,
                **{name: given[option] for name, option in shape.items()},
            ),
            regenerate=_taken(RegenerateConfig, given, temperatures=temperatures),
            settings=settings,
        )
    )


_SAME_NAME = ("target", "out", "init", "scale", "limit", "self_written", "openers", "max_len", "features", "as_json")


def _taken(kind: type, given: dict[str, Any], **more: Any) -> Any:
    """A dataclass from the options that have its fields' names."""
    return kind(**{name: given[name] for name in kind.__dataclass_fields__ if name in given and name not in more}, **more)


def evaluate(
    drafter: Annotated[str, typer.Argument(help="A drafter's folder, default, ngram, or a hub id.")],
    prompts: Prompts = None,
    limit: Limit = None,
    model: Annotated[str, Option("--model", "--target", help="The model it drafts for.")] = "smollm2-135m",
    batch: Annotated[str, Option(help="Comma-separated numbers of requests in flight.")] = "1,8",
    temperature: Annotated[str, Option(help="Comma-separated; 0 is greedy.")] = "0,1",
    max_tokens: AnswerTokens = 128,
    repeat: Annotated[int, Option(help="Repetitions; figures are medians.")] = 1,
    out: Annotated[Path | None, Option(help="Run folder, a training run's too [default: runs/evaluate-<time>].")] = None,
    num_drafted: NumDrafted = None,
    ignore_eos: IgnoreEos = False,
    seed: Annotated[int, Option(help="Base of the requests' seeds.")] = 0,
    max_len: MaxLen = None,
    dtype: Dtype = "auto",
    backend: Backend = "auto",
    weight_format: WeightFormat = "auto",
    device: Device = "auto",
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """A drafter in the real engine, against plain decoding: tokens per round, survival, speed-up, texts, set by set.

    Example: paceline evaluate runs/mine/drafter --prompts questions.jsonl --limit 20
    """
    settings = settings_of({**locals(), "drafter": "none", "num_drafted": None, "speculate": "full"}, model)
    del settings["drafter"]
    batches = tuple(int(value) for value in numbers("--batch", batch, whole=True))
    temperatures = tuple(numbers("--temperature", temperature))
    from paceline.bench.config import BenchConfig
    from paceline.commands.evaluate import EvaluateAsk
    from paceline.commands.evaluate import evaluate as run

    config = BenchConfig(("none",), batches, temperatures, max_tokens, repeat, ignore_eos, (), num_drafted, seed)
    run(EvaluateAsk(drafter, settings, config, tuple(prompts or ()), limit, out, as_json))


def add_commands(app: typer.Typer) -> None:
    """Register the commands of this module."""
    for command in (train, regenerate, evaluate):
        app.command()(command)
