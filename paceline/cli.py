"""The command line: one command per verb. Options are read here; `commands/` does the work, imported when a command runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

import paceline
from paceline.cli_bench import add_commands as add_benchmarks
from paceline.cli_calculator import add_commands as add_calculator
from paceline.cli_compare import add_commands as add_comparing
from paceline.cli_options import (
    Backend,
    Device,
    Drafter,
    Dtype,
    FrequencyPenalty,
    IgnoreEos,
    Json,
    JsonSchema,
    KvMemory,
    Logprobs,
    MaxLen,
    MaxTokens,
    MinP,
    Mock,
    Model,
    NumDrafted,
    Option,
    PresencePenalty,
    Regex,
    RepetitionPenalty,
    Rule,
    Seed,
    Speculate,
    Stop,
    System,
    Temperature,
    Threads,
    TopK,
    TopP,
    WeightFormat,
    Weights,
    grammar_of,
    numbers,
    settings_of,
)
from paceline.cli_serve import add_commands as add_serving
from paceline.cli_simulate import add_commands as add_simulating
from paceline.cli_simulate_serving import add_commands as add_serving_simulation
from paceline.cli_train import add_commands as add_training
from paceline.errors import ConfigError, PacelineError, PromptError

app = typer.Typer(
    rich_markup_mode=None,  # rich takes longer to import than the rest of --help together
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Lossless speculative decoding: a small drafter goes ahead, the large model checks; same output, faster.",
)
bench_app = typer.Typer(rich_markup_mode=None, help="Measure speed in the real engine, the ceiling stated first.")
app.add_typer(bench_app, name="bench")


def _show_version(asked: bool) -> None:
    if asked:
        print(f"paceline {paceline.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def start(
    ctx: typer.Context,
    version: Annotated[bool, Option("--version", callback=_show_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())


@app.command()
def generate(
    words: Annotated[list[str] | None, typer.Argument(metavar="[MODEL] PROMPT", help="PROMPT - is stdin.")] = None,
    model: Model = None,
    prompt_file: Annotated[Path | None, Option(help="Read the prompt from a file.")] = None,
    drafter: Drafter = "default",
    dtype: Dtype = "auto",
    backend: Backend = "auto",
    weight_format: WeightFormat = "auto",
    temperature: Temperature = 0.0,
    max_tokens: MaxTokens = 128,
    seed: Seed = None,
    compare: Annotated[bool, Option("--compare", help="Also decode plainly in the same process; show both speeds.")] = False,
    against: Annotated[str | None, Option(help="transformers: run its generate on the same prompt too.")] = None,
    raw: Annotated[bool, Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    system: System = None,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    presence_penalty: PresencePenalty = 0.0,
    frequency_penalty: FrequencyPenalty = 0.0,
    stop: Stop = None,
    ignore_eos: IgnoreEos = False,
    logprobs: Logprobs = None,
    json_schema: JsonSchema = None,
    regex: Regex = None,
    num_drafted: NumDrafted = None,
    speculate: Speculate = "auto",
    max_len: MaxLen = None,
    kv_memory: KvMemory = None,
    threads: Threads = None,
    device: Device = "auto",
    weights: Weights = "checkpoint",
    mock: Mock = None,
    rule: Rule = "auto",
    as_json: Json = False,
) -> None:
    """Answer one prompt, streamed; speed and acceptance go to stderr.

    Example: paceline generate "Why is the sky blue?" --max-tokens 64 --compare
    """
    given = dict(locals())
    name, prompt = _model_and_prompt(words or [], model, prompt_file)
    params = _sampling(given)
    settings = settings_of(given, name, max_batch=1)
    if raw and system:
        raise ConfigError("--system needs the chat template: leave --raw out")
    if against and (against != "transformers" or temperature):
        raise ConfigError("--against knows transformers only, and greedy answers only: leave it or --temperature out")
    if logprobs is not None and not as_json:
        _note("--logprobs shows only with --json")
    from paceline.commands.generate import Ask
    from paceline.commands.generate import generate as run

    run(Ask(prompt, settings, params, system, raw, compare, as_json, against))


@app.command()
def chat(
    name: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="As --model.")] = None,
    model: Model = None,
    drafter: Drafter = "default",
    dtype: Dtype = "auto",
    backend: Backend = "auto",
    weight_format: WeightFormat = "auto",
    temperature: Temperature = 0.0,
    max_tokens: MaxTokens = 512,
    seed: Seed = None,
    system: System = None,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    stop: Stop = None,
    num_drafted: NumDrafted = None,
    speculate: Speculate = "auto",
    max_len: MaxLen = None,
    kv_memory: KvMemory = None,
    threads: Threads = None,
    device: Device = "auto",
    rule: Rule = "auto",
) -> None:
    """Talk with the model: /reset forgets, /exit or Ctrl-D leaves, Ctrl-C stops an answer.

    Example: paceline chat --temperature 0.7 --system "Answer in one sentence."
    """
    given = dict(locals())
    params = _sampling(given)
    settings = settings_of(given, model or name, max_batch=1)
    from paceline.commands.chat import chat as run

    run(settings, params, system)


add_comparing(app)
add_training(app)
add_serving(app)
add_serving_simulation(app)
add_simulating(app)
add_calculator(app)


@app.command()
def models() -> None:
    """List the built-in models and where fetched ones are kept.

    Example: paceline models
    """
    from paceline.hub import BUILTINS, cache_home

    home = cache_home()
    for name, builtin in BUILTINS.items():
        is_here = (home / "models" / name).is_dir()
        print(f"{name}  {'ready' if is_here else f'fetched at first use, {builtin.wheel_bytes / 1e6:.0f} MB'}")
    print(f"kept in {home} (set PACELINE_HOME to move it)")


@bench_app.callback()
def bench() -> None:
    """Measure speed in the real engine, the ceiling stated first."""


@bench_app.command("decode")
def bench_decode(
    prompts: Annotated[str | None, Option(help="JSON lines, Parquet or data set id [default: a small built-in set].")] = None,
    limit: Annotated[int | None, Option(help="Only the first prompts.")] = None,
    model: Model = None,
    drafters: Annotated[str, Option(help="Comma-separated; none always runs, first.")] = "none,default",
    batch: Annotated[str, Option(help="Comma-separated numbers of requests in flight.")] = "1",
    temperature: Annotated[str, Option(help="Comma-separated; 0 is greedy.")] = "0",
    dtype: Dtype = "auto",
    backend: Backend = "auto",
    weight_format: WeightFormat = "auto",
    max_tokens: MaxTokens = 128,
    repeat: Annotated[int, Option(help="Repetitions; settings take turns, figures are medians.")] = 1,
    against: Annotated[str | None, Option(help="transformers: run its generate too, plain and with prompt lookup.")] = None,
    out: Annotated[Path | None, Option(help="Run folder [default: runs/bench-decode-<time>].")] = None,
    save_results: Annotated[Path | None, Option(help="Also write one JSON file of figures and raw runs, here.")] = None,
    ignore_eos: IgnoreEos = False,
    num_drafted: NumDrafted = None,
    speculate: Speculate = "auto",
    seed: Annotated[int | None, Option(help="Base of the requests' seeds; without, each is drawn.")] = None,
    max_len: MaxLen = None,
    threads: Threads = None,
    device: Device = "auto",
    weights: Weights = "checkpoint",
    mock: Mock = None,
    mock_tokens_per_round: Annotated[
        str | None, Option(help="Comma-separated: random prompts, every round keeps so many; beside the roofline.")
    ] = None,
    mock_prompt_tokens: Annotated[int, Option(help="Tokens of those prompts.")] = 256,
    rule: Rule = "auto",
    as_json: Json = False,
) -> None:
    """Tokens per second and acceptance: prompts x drafters x temperatures x batch sizes, against plain decoding.

    Example: paceline bench decode --limit 4 --drafters none,ngram --batch 1,4 --max-tokens 64
    """
    given = dict(locals())
    names = tuple(part.strip() for part in drafters.split(",") if part.strip())
    settings = settings_of({**given, "drafter": "none", "num_drafted": None, "kv_memory": None}, model)
    del settings["drafter"]
    batches = tuple(int(value) for value in numbers("--batch", batch, whole=True))
    temperatures = tuple(numbers("--temperature", temperature))
    if mock_tokens_per_round is not None:
        _bench_mock(given, settings, names, batches)
        return
    from paceline.bench.config import BenchConfig
    from paceline.commands.bench import BenchAsk
    from paceline.commands.bench import bench_decode as run

    peers = (against,) if against else ()
    config = BenchConfig(names, batches, temperatures, max_tokens, repeat, ignore_eos, peers, num_drafted, seed)
    run(BenchAsk(settings, config, prompts, limit, out, save_results, as_json))


def _bench_mock(given: dict[str, Any], settings: dict[str, Any], names: tuple[str, ...], batches: tuple[int, ...]) -> None:
    """`--mock-tokens-per-round` in place of prompts; the drafter is a random one unless another was named."""
    for name in ("prompts", "limit", "against", "mock", "save_results"):
        if given[name] is not None:
            raise ConfigError(f"--{name.replace('_', '-')} does not go with --mock-tokens-per-round: leave one of them out")
    from paceline.bench.config import MockConfig
    from paceline.commands.bench_mock import MockAsk, bench_mock

    values = tuple(numbers("--mock-tokens-per-round", given["mock_tokens_per_round"]))
    drafter = next((name for name in names if name not in ("none", "default")), "random-dflash")
    sizes = batches, given["mock_prompt_tokens"], given["max_tokens"], given["repeat"], given["num_drafted"]
    settings = {name: value for name, value in settings.items() if value is not None}
    bench_mock(MockAsk(settings, MockConfig(values, *sizes, drafter), given["out"], given["as_json"]))


add_benchmarks(bench_app)


def _model_and_prompt(words: list[str], model: str | None, prompt_file: Path | None) -> tuple[str | None, str]:
    """One word is the prompt, two are model and prompt; a prompt file takes the prompt's place."""
    words = list(words)
    if prompt_file is None and words:
        prompt = _stdin() if words[-1] == "-" else words[-1].encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        words.pop()
    elif prompt_file is not None:
        prompt = _read(prompt_file)
    else:
        raise PromptError('there is no prompt: give one, as in paceline generate "Why is the sky blue?", or - for stdin')
    if len(words) > 1 or (words and model):
        raise PromptError("too many words: put the prompt in quotes, after the model's name if you give one")
    if not prompt.strip():
        raise PromptError("the prompt is empty: give some text")
    return model or (words[0] if words else None), prompt


def _stdin() -> str:
    return sys.stdin.buffer.read().decode("utf-8", "replace")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise PromptError(f"cannot read the prompt file {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise PromptError(f"the prompt file {path} is not UTF-8 text: convert it first") from error


def _sampling(given: dict[str, Any]) -> paceline.SamplingParams:
    """The options that are fields of SamplingParams; says so when one has no effect."""
    known = paceline.SamplingParams.__dataclass_fields__
    values = {name: value for name, value in given.items() if name in known}
    values["stop"] = tuple(values.get("stop") or ())
    values["grammar"] = grammar_of(given.get("json_schema"), given.get("regex"))
    params = paceline.SamplingParams(**values)
    if params.is_greedy:
        for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)):
            if getattr(params, name) != off:
                _note(f"--{name.replace('_', '-')} has no effect at temperature 0")
    return params


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


_UsageError: type[Exception] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
"""Typer carries its own click since 0.22; its base error has no public name."""


def main() -> NoReturn:
    """Run a command; errors made on purpose are one line and exit code 2, Ctrl-C is 130."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # pyright: ignore[reportAttributeAccessIssue]
    try:
        code = app(prog_name="paceline", standalone_mode=False)
    except PacelineError as error:
        code = _fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except _UsageError as error:
        code = _fail(error.format_message() + " (see --help)")  # pyright: ignore[reportAttributeAccessIssue]
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str) -> int:
    line = " ".join(message.split())
    print(f"error: {line}", file=sys.stderr)
    if "--json" in sys.argv:
        import json

        print(json.dumps({"error": line}))
    return 2
