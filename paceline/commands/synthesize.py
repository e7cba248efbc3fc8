"""`paceline synthesize`: generates training data for an application without traffic."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Annotated, Any

from paceline.commands.options import Changed, Without, options
from paceline.commands.shared import Json, JsonSchema, Regex, TerminalProgress, grammar_of
from paceline.commands.train import ANSWERS, Target
from paceline.loop.synthesize.config import SynthesizeConfig
from paceline.train.config import AnswerConfig, PromptsConfig


@options
def synthesize(
    config: Annotated[SynthesizeConfig, Without("target", "prompting", "answering")],
    target: Target,
    prompting: Annotated[PromptsConfig, Without("tags")],
    answering: Annotated[AnswerConfig, Without("grammar", "top_k", "raw"), Changed(**ANSWERS)],
    schema: JsonSchema = None,
    regex: Regex = None,
    as_json: Json = False,
) -> dict[str, Any]:
    """Make training data for an application without traffic.

    The target answers prompts in the application's output format (--schema or --regex). The prompts are public ones, or
    the target generates them.

    Examples:
      paceline synthesize --schema ticket.json --system "Answer each ticket." \\
        --prompts questions.jsonl --out runs/made
    """
    from paceline.loop.synthesize.run import run

    answering = replace(answering, grammar=grammar_of(schema, regex))
    config = replace(config, target=target, prompting=prompting, answering=answering)
    return asdict(run(config, TerminalProgress()))
