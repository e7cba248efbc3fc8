"""`paceline generate`: streams one answer and prints its speed; `--compare` also measures plain decoding."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.bench.config import check_peers
from paceline.commands.options import Without, options
from paceline.commands.shared import (
    MOCK,
    Json,
    JsonSchema,
    LossyRule,
    MaxTV,
    Raw,
    Regex,
    System,
    check_template,
    grammar_of,
    is_named,
    load,
    lossy_of,
    not_empty,
    note_without_effect,
    prompt_of,
    say,
)
from paceline.config import EngineConfig
from paceline.errors import ConfigError, PromptError, reraised, way_out
from paceline.types import SamplingParams

if TYPE_CHECKING:
    from paceline.bench.comparison import Comparison
    from paceline.engine.completion import Completion
    from paceline.engine.llm import LLM


FIGURES = (
    *("num_prompt_tokens", "num_output_tokens", "tokens_per_s", "decode_tokens_per_s", "time_to_first_token_s"),
    *("tokens_per_round", "acceptance_rate", "accepted_histogram", "lossless"),
)
"""Fields of GenerationStats that the JSON line shows."""
NO_OPTIONS = Without("logit_bias", "stop_token_ids", "max_drafted", "grammar", "lossy", "scaled_logprobs", "prediction")
"""Sampling parameters that are not options of `generate`, or have options of their own there."""
COMPARED = ("speedup", "identical", "first_difference", "top2_gap", "doubt")
"""Fields of the comparison with plain decoding that the JSON line shows."""


@options
def generate(
    engine: Annotated[EngineConfig, Without("max_batch", "mocked_survival", "mocked_marginals", "prefill_chunk"), MOCK],
    sampling: Annotated[SamplingParams, NO_OPTIONS],
    words: Annotated[list[str] | None, typer.Argument(metavar="[MODEL] PROMPT", help="PROMPT - reads stdin.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="Read the prompt from a file.")] = None,
    system: System = None,
    raw: Raw = False,
    json_schema: JsonSchema = None,
    regex: Regex = None,
    lossy: LossyRule = None,
    max_tv: MaxTV = None,
    compare: Annotated[bool, typer.Option("--compare", help="Also run plain decoding; show both speeds.")] = False,
    against: Annotated[str | None, typer.Option(help="transformers: also run its generate on the same prompt.")] = None,
    stats: Annotated[
        bool, typer.Option("--stats", help="Also show accepted drafts by round, and phase times.")
    ] = False,
    as_json: Json = False,
) -> dict[str, Any]:
    """Answer one prompt and report speed and acceptance.

    Examples:
      paceline generate "Why is the sky blue?" --max-tokens 64 --compare
    """
    model, prompt = model_and_prompt(words or [], is_named(engine), prompt_file)
    sampling = replace(sampling, grammar=grammar_of(json_schema, regex), lossy=lossy_of(lossy, max_tv))
    note_without_effect(sampling)
    check_template(raw, system)
    if against and (against != "transformers" or not sampling.is_greedy):
        raise ConfigError("--against knows transformers only, and greedy answers only: leave it or --temperature out")
    check_peers([against] if against else [])
    note_hidden_scores(sampling, as_json)
    llm = load(engine, model, allow_lossy=sampling.lossy is not None)
    from paceline.bench.comparison import answer_plainly, compare_with_plain, compare_with_transformers
    from paceline.bench.passes import described
    from paceline.hardware import this_machine
    from paceline.report.pages import render

    token_ids = encode(llm, prompt, system, raw)
    plain = answer_plainly(llm, token_ids, replace(sampling, lossy=None)) if compare else None
    completion = _stream(llm, token_ids, sampling, as_json)
    plainly = compare_with_plain(llm, completion, plain, sampling) if plain else None
    peer = compare_with_transformers(llm, completion, sampling) if against else None
    machine, figures, spent_s = this_machine(llm.config.device), completion.stats, completion.stats.timings.verify_s
    read_per_s = llm.target.weight_bytes * figures.num_rounds / spent_s if spent_s else None
    values = {"llm": llm, "stats": figures, "machine": machine, "read_per_s": read_per_s}
    say(render("answer.txt" if stats else "result.txt", **values, plain=plainly, peer=peer).rstrip())
    return {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        **{name: getattr(figures, name) for name in FIGURES},
        "seconds": {name: getattr(figures.timings, f"{name}_s") for name in ("prefill", "draft", "verify", "host")},
        **({"lossy": figures.lossy} if figures.lossy else {}),
        **described(llm),
        "drafter": llm.drafter.name,
        "kv_cache_bytes": llm.cache_bytes,
        "bytes_per_s": read_per_s,
        "machine": machine,
        **({"logprobs": completion.logprobs} if sampling.logprobs is not None else {}),
        **({"prompt_logprobs": completion.prompt_logprobs} if sampling.prompt_logprobs is not None else {}),
        **_compared(plainly, peer),
    }


def note_hidden_scores(sampling: SamplingParams, as_json: bool) -> None:
    """Print a note if the user requested log-probabilities but not --json, because only the JSON output contains
    them."""
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(sampling, name) is not None and not as_json:
            say(f"note: --{name.replace('_', '-')} shows only with --json")


def _compared(plain: Comparison | None, peer: Comparison | None) -> dict[str, Any]:
    """Return the JSON keys of the comparisons with plain decoding and with Transformers, if they were made."""
    line: dict[str, Any] = {}
    if plain:
        line |= {"plain_tokens_per_s": plain.tokens_per_s, **{name: getattr(plain, name) for name in COMPARED}}
    if peer:
        line["transformers"] = {"tokens_per_s": peer.tokens_per_s, "speedup": peer.speedup}
    return line


def model_and_prompt(words: list[str], has_model: bool, prompt_file: Path | None) -> tuple[str | None, str]:
    """Split the words of the command line into (model name or None, prompt). The last word is the prompt, a word before
    it the model's name. `prompt_file`: file to read the prompt from instead. `has_model`: True if --model was given.
    Raises PromptError without a prompt, for too many words, and for a model name in addition to --model."""
    words = list(words)
    if prompt_file is None:
        prompt = prompt_of(words.pop() if words else None, "paceline generate")
    else:
        unread = f"cannot read the prompt file {prompt_file}"
        with reraised(PromptError, unread, "check the path, and that it is UTF-8 text", OSError, UnicodeDecodeError):
            prompt = not_empty(prompt_file.read_text(encoding="utf-8"))
    if len(words) > 1 or (words and has_model):
        raise PromptError("too many words: put the prompt in quotes, after the model's name if you give one")
    return (words[0] if words else None), prompt


def encode(llm: LLM, prompt: str, system: str | None, raw: bool) -> list[int]:
    """Return the token ids of a prompt. The prompt is put into the chat template as a user message, after the system
    message `system` if there is one. If `raw` is True, its text alone is encoded. Raises TemplateError if the model has
    no chat template but needs one."""
    if raw:
        return llm.tokenizer.encode(prompt)
    opening = [{"role": "system", "content": system}] if system else []
    with way_out("use --raw to send the text as it is"):
        return llm.encode_chat([*opening, {"role": "user", "content": prompt}])


def _stream(llm: LLM, token_ids: list[int], sampling: SamplingParams, as_json: bool) -> Completion:
    """Print the answer as it streams: to stdout or, with --json, to stderr."""
    out = sys.stderr if as_json else sys.stdout
    [completion] = llm.generate_ids(
        [token_ids], sampling, lambda chunk: print(chunk.text, end="", file=out, flush=True)
    )
    if not completion.text.endswith("\n"):
        print(file=out, flush=True)
    return completion
