"""`paceline serve`: runs an OpenAI-compatible server for one model, or starts vLLM or SGLang with a drafter."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.commands.options import Changed, Opt, Without, given, options
from paceline.commands.shared import NO_MOCKS, Json, introduce, say, starting
from paceline.config import EngineConfig, read_api_keys, short_name
from paceline.errors import ConfigError, refuse
from paceline.loop.adapt.config import OtherEngineConfig
from paceline.plan.routes import Router
from paceline.runs.settings_file import read_settings_file
from paceline.serve.settings import ServeConfig, TraceConfig
from paceline.types import NONE, GrammarSpec, SamplingParams

if TYPE_CHECKING:
    from paceline.engine.llm import LLM

NAMES = {
    "drafters": Opt("--drafter"),
    "admin_keys": Opt("--admin-key"),
    "api_keys": Opt("--api-key"),
    "cors_origins": Opt("--cors-origin"),
    "allowed_hosts": Opt("--allowed-host"),
    "served_names": Opt("--served-name"),
    "max_body_bytes": Opt("--max-body"),
    "features_bytes": Opt("--features-size"),
}
TRACE_NAMES = {
    "folder": Opt("--traces"),
    "sample": Opt("--trace-sample"),
    "redact": Opt("--trace-redact"),
    "max_bytes": Opt("--trace-size"),
    "max_days": Opt("--trace-days"),
}
OF_ALL = (
    *("config", "model", "drafter", "num_drafted", "dtype", "max_batch", "max_len", "host", "port"),
    *("served_name", "api_key", "api_key_file", "words"),
)
"""Parameters of `serve` that apply to vLLM and SGLang too."""
OF_OTHERS = ("engine_command", "ready_minutes", "check", "expected", "strict")
"""Parameters of `serve` that apply to vLLM and SGLang only."""


def _read_config(ctx: typer.Context, path: Path | None) -> Path | None:
    """Use the file's values as the options' defaults, so that the command line overrides them. Raises ConfigError."""
    if path is None:
        return None
    values = read_settings_file(path, "correct it, or leave --config out")
    known = {str(param.name): param for param in ctx.command.params if param.name != "config"}
    settings = dict[str, Any]()
    for key, value in values.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise ConfigError(
                f"--config {path} names {key!r}, which is no option of serve: choose from {', '.join(sorted(known))}"
            )
        if name in settings:
            raise ConfigError(f"--config {path} has {name} twice, once with dashes: remove one")
        settings[name] = _option_value(known[name], value, f"--config {path}: {key}")
    ctx.default_map = {**(ctx.default_map or {}), **settings}
    return path


TAKES: dict[str, tuple[str, tuple[type, ...]]] = {
    "bool": ("boolean", (bool, str)),
    "int": ("integer", (int, str)),
    "float": ("float", (int, float, str)),
}
"""Option type -> (its name in errors, accepted YAML types); other options accept text and numbers. click parses the
texts."""


def _option_value(option: Any, value: Any, where: str) -> Any:
    """Return the file's value for a click option, a list if the option may be repeated. Raises ConfigError."""
    if getattr(option, "multiple", False) or option.nargs == -1:
        return [_single(option, item, where) for item in (value if isinstance(value, list) else [value])]
    return _single(option, value, where)


def _single(option: Any, value: Any, where: str) -> Any:
    """Check one value. Raises ConfigError for a type that click would silently convert."""
    name = option.bare_type().removeprefix("list[").removesuffix("]")
    kind, taken = TAKES.get(name, ("text", (str, int, float)))
    if isinstance(value, bool) and kind != "boolean":
        raise ConfigError(f"{where} cannot be {str(value).lower()}: YAML reads on, off, yes and no so, quote them")
    if not isinstance(value, taken):
        raise ConfigError(f"{where} cannot be {value!r}: it takes {kind}")
    return value


@options
def serve(
    llm: Annotated[EngineConfig, Without("drafter", "prefill_chunk"), NO_MOCKS],
    serving: Annotated[ServeConfig, Without("body_seconds", "header_seconds", "write_seconds"), Changed(**NAMES)],
    tracing: Annotated[TraceConfig, Changed(**TRACE_NAMES)],
    other: OtherEngineConfig,
    config: Annotated[
        Path | None,
        typer.Option(callback=_read_config, is_eager=True, help="YAML file of these options; the command line wins."),
    ] = None,
    mock: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS_PER_ROUND|CURVE|MARGINALS|FILE",
            help="Mock acceptance for a load test without a trained drafter: a number of tokens per round (4), a "
            "survival curve (.8,.6,.4, or a file), or marginals for --speculate tree:N (greedy, or a file). --model "
            "may then be a config.json or a name from simulate --list, with random weights. Answers are meaningless "
            "and marked lossless: false, as is every metric; cannot be combined with --traces.",
        ),
    ] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="File of API keys, one per line.")] = None,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- OPTIONS]", show_default=False, help="With --engine: options passed to that engine."
        ),
    ] = None,
    as_json: Json = False,
    context: typer.Context = None,  # pyright: ignore[reportArgumentType]  (typer gives it)
) -> dict[str, Any] | int | None:
    """Serve a model over OpenAI's API.

    Serves chat and text completions with streaming, and a web page to try the model. With --engine, vLLM or SGLang is
    started with the drafter instead of paceline's engine; options after `--` are passed to it.

    Examples:
      paceline serve --port 8000
      paceline serve --drafter general=default --drafter tickets=runs/tickets
      paceline serve --engine vllm --model Qwen/Qwen3-8B --drafter runs/mine/drafter
    """
    if other.engine != "paceline":
        return serve_with_other(llm, _with_keys(serving, api_key_file), other, tuple(words or ()), context)
    check_own(words or (), context)
    named, serving = serving.named_drafters(), _with_keys(serving, api_key_file)
    with tempfile.TemporaryDirectory(prefix="paceline-mock-") as scratch:
        if mock is not None:
            _check_mock(serving, tracing)
            llm, named = _mocked(llm, mock, named, Path(scratch))
        llm = replace(llm, drafter=next(iter(named.values())))
        drafters = None if "" in named or llm.speculation.is_off else named
        adapts = llm.speculation.adapts and serving.route == "auto" and mock is None
        if drafters and len(drafters) > 1 and serving.route == "auto" and not adapts:
            needed = "--speculate auto, and no --mock" if mock else "--speculate auto"
            raise ConfigError(f"route auto needs measured rounds: it needs {needed}; or give --route tag")
        starting(llm.model)
        _run(llm, serving, tracing, drafters, Router() if adapts else None)
    return {"model": llm.model, "drafters": named}


def _given(context: typer.Context | None) -> list[str]:
    """Return the options set on the command line or in the --config file; none for a call as a plain function."""
    return [] if context is None else given(context, "COMMANDLINE", "DEFAULT_MAP")


def check_own(words: Sequence[str], context: typer.Context | None) -> None:
    """Check the arguments of `serve` when paceline's own engine runs (no --engine). Raises ConfigError for arguments
    that only vLLM and SGLang can use: `words` (options after `--`), or an option such as --check. `context`: click's
    context of the command; None if called from Python."""
    if words:
        raise ConfigError(f"what is {' '.join(words)!r}? Options behind -- are another engine's: give --engine too")
    for name in _given(context):
        if name in OF_OTHERS:
            raise ConfigError(
                f"--{name.replace('_', '-')} is for another engine: give --engine vllm or sglang, or leave it out"
            )


def serve_with_other(
    engine: EngineConfig,
    serving: ServeConfig,
    other: OtherEngineConfig,
    words: tuple[str, ...],
    context: typer.Context | None,
) -> int:
    """Start vLLM or SGLang, wait until it ends, and return its exit status. It gets the model of `engine`, and the
    drafter and address of `serving`. `words`: further options for vLLM or SGLang. `context`: click's context of the
    command, which lists the options that the user set; None if called from Python. Raises ConfigError for options that
    only paceline's own engine has, for more than one drafter or API key, and for port 0."""
    names = _given(context)
    for name in names:
        if name not in (*OF_ALL, *OF_OTHERS, "engine"):
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"{option} is our own engine's: give {other.engine} an option of its own behind --, or leave it out"
            )
    drafters = serving.named_drafters()
    refuse(
        ConfigError,
        (len(drafters) > 1, f"{other.engine} has one drafter: give --drafter once"),
        (len(serving.api_keys) > 1, f"{other.engine} has one API key: give one"),
        (serving.port == 0, f"{other.engine} needs a port: give --port"),
    )
    from paceline.loop.adapt.servers.vllm_sglang.drafter_folder import Start
    from paceline.loop.adapt.servers.vllm_sglang.start import serve_with

    start = Start(
        other.engine,
        engine.model,
        next(iter(drafters.values())),
        serving.host,
        serving.port,
        engine.num_drafted,
        engine.dtype,
        engine.max_batch if "max_batch" in names else None,
        engine.max_len,
        serving.served_names,
        next(iter(serving.api_keys), None),
        other.engine_command,
        words,
    )
    return serve_with(start, other, say)


def _check_mock(serving: ServeConfig, tracing: TraceConfig) -> None:
    """Raises ConfigError if mocked answers would be recorded as training data."""
    if tracing.folder is not None:
        raise ConfigError(
            "--mock does not go with --traces: a drafter would be trained on meaningless text; leave one of them out"
        )
    if serving.features:
        raise ConfigError("--mock does not go with --features: nothing is to be learned from it; leave one of them out")


def _mocked(
    engine: EngineConfig, mock: str, named: dict[str, str], scratch: Path
) -> tuple[EngineConfig, dict[str, str]]:
    """Return the engine settings and drafters for mocked acceptance; prints what is mocked."""
    from paceline.serve.worker.mock import mocked_drafter, mocked_engine

    model = engine.model
    engine = mocked_engine(engine, mock, scratch)
    is_off = engine.speculation.is_off
    most = 1.0 if is_off or engine.mocked_tokens_per_round == 1 else 2.0
    named = {label: drafter if is_off else mocked_drafter(drafter, model, most) for label, drafter in named.items()}
    weights = ", random weights" if engine.weights == "random" else ""
    say(f"acceptance is MOCKED: {engine.mocked_as}{weights}; answers mean nothing, lossless is false in each of them")
    return engine, named


def _run(
    engine: EngineConfig,
    serving: ServeConfig,
    tracing: TraceConfig,
    drafters: dict[str, str] | None,
    router: Router | None,
) -> None:
    """Run the server until a signal arrives."""
    import logging

    try:
        from paceline.serve.admin.metrics import Metrics
        from paceline.serve.run import run
        from paceline.serve.worker.worker import EngineWorker
    except ImportError as error:
        raise ConfigError(f"serving needs {error.name}: pip install 'paceline[serve]'") from error
    from paceline.engine.llm import LLM

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    name = serving.served_names[0] if serving.served_names else short_name(engine.model)
    traces = None
    if tracing.folder:
        from paceline.serve.admin.traces import TraceWriter

        traces = TraceWriter(tracing, name)

    def load() -> LLM:
        lossy = {"allow_lossy": serving.allow_lossy, "max_tv": serving.max_tv}
        llm = LLM.of(engine, drafters=drafters, router=router, loaded_drafters=serving.loaded_drafters, **lossy)
        if engine.mocked is not None and engine.drafter != NONE:
            from paceline.serve.worker.mock import check_yield

            check_yield(engine.mocked, llm.drafter.num_drafted)
        if traces:
            traces.begin(llm.tokenizer)
        return llm

    try:
        metrics = Metrics(name, traces, lossless=engine.mocked is None)
        worker = EngineWorker(load, serving, metrics, warm_up=warm_up)
        run(worker, say=say, introduce=introduce)
    finally:
        if traces:
            traces.close()


def _with_keys(serving: ServeConfig, api_key_file: Path | None) -> ServeConfig:
    """Add the API keys of the file and the environment. Raises ConfigError for --features without an API key."""
    api_keys = read_api_keys(serving.api_keys, api_key_file)
    if serving.features and not api_keys:
        raise ConfigError("features need an API key: set PACELINE_API_KEY, or give --api-key-file")
    return replace(serving, api_keys=api_keys, admin_keys=read_api_keys(serving.admin_keys, None, "PACELINE_ADMIN_KEY"))


def warm_up(llm: LLM) -> None:
    """Answer two short requests before a server starts, so that its first real request is not slow. Weights and caches
    are then in memory, and the grammar library has read the vocabulary."""
    prompt = llm.tokenizer.encode("Hello") or [0]
    llm.generate_ids([prompt], SamplingParams(max_tokens=8, ignore_eos=True))
    if (
        getattr(llm.tokenizer, "backend", None) is not None
        and llm.tokenizer.eos_token_ids
        and llm.config.mocked is None
    ):
        llm.generate_ids([prompt], SamplingParams(max_tokens=2, grammar=GrammarSpec("regex", "a")))
