"""Options that several commands share, and what becomes of them."""

from __future__ import annotations

from typing import Annotated, Any, overload

import typer

from paceline.errors import ConfigError

Option = typer.Option
Model = Annotated[str | None, Option("--model", help="Built-in name, folder, GGUF file or hub id [default: smollm2-135m].")]
Drafter = Annotated[str, Option(help="default (what ships for the model, else ngram), none, ngram, a folder, or a hub id.")]
Dtype = Annotated[str, Option(help="auto, float32, bfloat16 or float16.")]
Backend = Annotated[
    str, Option(help="native: the whole pass in one call, CPU only; torch; auto: native where it can be. Precision is --dtype.")
]
WeightFormat = Annotated[
    str,
    Option(
        help="blocks: quantised weights are read as stored; dense: expanded, the same numbers; auto: the faster of the two; "
        "q8_0, q4_1: rounded to these."
    ),
]
Device = Annotated[str, Option(help="auto, cpu or cuda.")]
Temperature = Annotated[float, Option(help="0 is greedy.")]
MaxTokens = Annotated[int, Option(help="Longest answer, in tokens.")]
Seed = Annotated[int | None, Option(help="The same seed gives the same text.")]
TopK = Annotated[int, Option(help="Keep the k most likely tokens; 0 keeps all.")]
TopP = Annotated[float, Option(help="Keep the smallest set of tokens that has this probability.")]
MinP = Annotated[float, Option(help="Keep tokens at least this times as likely as the most likely one.")]
RepetitionPenalty = Annotated[float, Option(help="Above 1 makes tokens already there less likely.")]
PresencePenalty = Annotated[float, Option(help="Subtracted once from the logit of tokens already in the answer.")]
FrequencyPenalty = Annotated[float, Option(help="Subtracted for each time a token stands in the answer.")]
Stop = Annotated[list[str] | None, Option(help="End the answer before this text; may be repeated.")]
IgnoreEos = Annotated[bool, Option("--ignore-eos", help="Go on to --max-tokens whatever the model says.")]
Logprobs = Annotated[int | None, Option(help="Report log-probabilities and this many alternatives (in --json).")]
JsonSchema = Annotated[
    str | None, Option(metavar="FILE|TEXT", help="The answer is JSON of this schema; {} for any object. Needs paceline[serve].")
]
Regex = Annotated[str | None, Option(help="The answer matches this from end to end. Needs paceline[serve].")]
NumDrafted = Annotated[int | None, Option(help="Most tokens drafted per round; the drafter's own number when left out.")]
Plan = Annotated[
    str,
    Option(help="auto: the drafts that pay, look repeats up; fixed:K: K drafts in every round; fixed: all."),
]
MaxLen = Annotated[int | None, Option(help="Tokens of prompt and answer together [default: the model's limit, at most 2048].")]
KvMemory = Annotated[str | None, Option(help="Most memory for KV caches: 512M, 2G or bytes.")]
Threads = Annotated[int | None, Option(help="CPU threads.")]
Weights = Annotated[str, Option(help="checkpoint, or random: the right speed, meaningless text.")]
Mock = Annotated[float | None, Option(metavar="TOKENS_PER_ROUND", help="Accept drafts at this rate, unchecked: NOT lossless.")]
Rule = Annotated[str, Option(help="How sampled drafts are verified: auto, match, rejection or block.")]
System = Annotated[str | None, Option(help="System message.")]
Json = Annotated[bool, Option("--json", help="Last line of stdout is one JSON object; everything else goes to stderr.")]


def settings_of(given: dict[str, Any], model: str | None, **more: Any) -> dict[str, Any]:
    """The options that are fields of EngineConfig, checked before anything is loaded."""
    from paceline.config import EngineConfig

    settings = {name: value for name, value in given.items() if name in EngineConfig.__dataclass_fields__}
    settings |= {"kv_memory": size("--kv-memory", given.get("kv_memory")), "mocked_tokens_per_round": given.get("mock"), **more}
    if model is None:
        settings.pop("model", None)
    else:
        settings["model"] = model
    EngineConfig.of(**settings)
    return settings


@overload
def size(option: str, text: str) -> int: ...


@overload
def size(option: str, text: str | None) -> int | None: ...


def size(option: str, text: str | None) -> int | None:
    """512M -> 536870912; K, M, G and T are powers of 1024. Raises ConfigError."""
    if text is None:
        return None
    number = text.strip().upper().removesuffix("B").removesuffix("I")
    scale = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}.get(number[-1:], 1)
    try:
        value = float(number.rstrip("KMGT")) * scale
        if not 1 <= value < 2**63:
            raise ValueError
    except ValueError:
        raise ConfigError(f"{option} {text} is no size: write it as 512M, 2G or a number of bytes") from None
    return int(value)


def numbers(option: str, text: str, *, whole: bool = False) -> list[float]:
    try:
        return [int(part) if whole else float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        example = "1,8" if whole else "0,0.7"
        raise ConfigError(f"{option} {text!r} is no list of numbers: write it as {example}") from None
