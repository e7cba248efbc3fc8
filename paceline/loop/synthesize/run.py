"""Makes training data for an application without using its traffic, which may not exist yet or must not be read.

The target model answers public prompts, or prompts that it writes in the role of the application's users. The model
gets the application's system message, examples and tools; the answer's JSON schema is enforced as a grammar. The first
part of the answers may take any values. Each later answer is forced to take a schema value that is still rare
(`coverage.py`). Unfinished and unparsable answers and near-copies are left out.

    runs/x/raw/         every answer, as `regenerate` writes them: a killed run resumes
    runs/x/answers/     accepted answers: paceline train --answers runs/x/answers
    runs/x/card.json, README.md     contents, and proof that no production text is included (`card.py`)

    paceline synthesize --schema ticket.json --system "Answer each ticket." --self-written 2000 --out runs/x
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.data.answers import Answer, AnswerShards
from paceline.data.near_copies import Near, common_pieces, pieces_of
from paceline.data.prompts import Prompt, digest
from paceline.data.rows import Dropped, RowError
from paceline.errors import ConfigError, PromptError, refuse, reraised
from paceline.loop.synthesize.card import write_card
from paceline.loop.synthesize.config import SynthesizeConfig, Synthesized
from paceline.loop.synthesize.coverage import Coverage, narrowed
from paceline.loop.synthesize.template_slots import TemplateSlots
from paceline.model.text.tools import CLOSE, OPEN, call_schema, json_or
from paceline.report.statistics import num_common
from paceline.report.tables import Progress
from paceline.runs.folder import RESUME, whole_folder
from paceline.train.answers.regenerate import Regenerator, prepared
from paceline.train.answers.self_written import read_openers
from paceline.train.config import RegenerateConfig
from paceline.train.unused_settings import check_prompts
from paceline.types import GrammarSpec

STEERED = "+steered"
"""Suffix in the column `source` of an answer that was forced to take a rare value."""
ROWS_PER_SHARD = 512


def run(config: SynthesizeConfig, progress: Progress) -> Synthesized:
    """Runs or resumes `paceline synthesize`: writes the accepted answers and their description to `config.out`. Raises
    ConfigError on contradictory settings, PromptError if no prompt or no answer can be used."""
    check_prompts(config.prompting)
    form = Form.of(config)
    answering = replace(config.answering, grammar=form.grammar)
    regenerate = RegenerateConfig(config.out, config.target, config.prompting, answering, config.max_batch)
    excluded = _digests(config.not_in)
    more = {"tool_choice": config.tool_choice, "steered": config.steered, "not_in": config.not_in}
    with prepared(regenerate, progress, "synthesize", more, _filled(form, config, progress)) as job:
        if job.ranks.world > 1:
            raise ConfigError(
                "synthesize runs in one process, since what is rare depends on all answers: leave torchrun out"
            )
        raw = AnswerShards(config.out / "raw")
        work = Regenerator(job.llm, raw, answering)
        done = Synthesized(config.out / "answers", num_compared=len(excluded))
        prompts = [prompt for prompt in job.prompts if not _is_excluded(work, prompt, excluded)]
        done.num_in_store = len(job.prompts) - len(prompts)
        if not prompts:
            raise PromptError(
                "every prompt stands in the store of --not-in: give others with --prompts, or --self-written"
            )
        num_free = round(len(prompts) * (1 - config.steered)) if form.schema else len(prompts)
        parts = [work.run(prompts[:num_free], job.bars)]
        if steered := list(_steered(form, prompts[num_free:], raw, config.answering.seed)):
            parts.append(work.run(steered, job.bars))
        done.wall_s = sum(part.wall_s for part in parts)
        coverage, rejected = _accept(form, raw, done, config.max_overlap)
        refused = Dropped()
        for part in parts:
            refused.update(part.refused)
        if refused:
            progress.say(refused.summary("conversations"))
        too_long = Counter({"prompt too long": sum(part.num_too_long for part in parts)})
        done.dropped = dict(rejected + too_long + refused.counts)
        if not done.num_answers:
            raise PromptError(f"no answer can be kept ({done.dropped}): raise max_tokens, or correct what is asked")
        read_back = list(AnswerShards(done.answers))
        done.num_steered = sum(map(_is_steered, read_back))
        done.parsed = sum(form.read(answer)[0] is None for answer in read_back) / len(read_back)
        counts = {"num_answers": done.num_answers, "num_tokens": done.num_tokens, "dropped": done.dropped}
        job.folder.log(stage="synthesize", **counts)
        write_card(job.folder, config, form.schema, coverage, done)
    left_out = ", ".join(f"{number} {reason}" for reason, number in done.dropped.items()) or "none"
    progress.say(f"{done.num_answers} answers, {done.num_tokens} tokens in {done.answers}; left out: {left_out}")
    return done


def _is_excluded(work: Regenerator, prompt: Prompt, excluded: Container[str]) -> bool:
    """True if the prompt is in `excluded`; False if it cannot be encoded, which the regenerator counts."""
    try:
        return digest(work.encoder.first_ids(prompt)) in excluded
    except RowError:
        return False


def _filled(form: Form, config: SynthesizeConfig, progress: Progress) -> Callable[[str, int], str]:
    """Returns the function that fills openers' slots. Raises ConfigError if one cannot be filled."""
    if form.schema is None:
        return lambda opener, seed: opener
    slots = TemplateSlots(form.schema)
    left_out = slots.check(read_openers(config.prompting.openers) if config.prompting.openers else ())
    if config.prompting.num_self_written and left_out:
        progress.say(
            f"note: no opener names {{{left_out[0]}}}, a property with a pattern: users that the target writes will "
            f"name few different ones; write --openers such as: Please look at {{{left_out[0]}}}"
        )
    return slots.fill


@dataclass(frozen=True, slots=True)
class Form:
    """Format of the application's answers: any text, text that a grammar describes, JSON of a schema, or tool calls."""

    grammar: GrammarSpec | None
    schema: dict[str, Any] | None
    """Schema of JSON answers, or of tool calls if `tool_choice` is "required"; None for other forms."""
    tool_names: frozenset[str] = frozenset()
    """Names of the tools that answers may call, if `tool_choice` is "auto"."""

    @classmethod
    def of(cls, config: SynthesizeConfig) -> Form:
        """Reads the format of the answers from `config`. Raises PromptError on invalid tools. Raises ConfigError on an
        invalid schema, on contradictory options, or if neither a schema, a regex, tools nor an opening of the
        conversation (such as a system message) is given."""
        grammar, tools = config.answering.grammar, config.answering.read_tools()
        refuse(
            ConfigError,
            (
                bool(grammar and tools and config.tool_choice == "required"),
                "an answer is either a call or of a schema: leave --tools or --schema out, or give --tool-choice auto",
            ),
            (
                not (grammar or tools or config.answering.read_opening()),
                "say what the application answers: give --schema, --regex, --tools, --system or --before",
            ),
        )
        if tools and config.tool_choice == "auto":
            return cls(grammar, None, frozenset(tool["function"]["name"] for tool in tools))
        if tools:
            grammar = GrammarSpec("json_schema", call_schema(tools))
        if grammar is None or grammar.kind != "json_schema":
            return cls(grammar, None)
        with reraised(ConfigError, "--schema is no JSON", "correct it", ValueError):
            schema = json.loads(grammar.text)
        if not isinstance(schema, dict):
            raise ConfigError("--schema is no object: give a JSON schema")
        return cls(grammar, schema)

    def read(self, answer: Answer) -> tuple[str | None, Any]:
        """Checks a generated answer; returns (reason, value). The reason says why the answer is rejected; None if it is
        accepted. The value is the parsed JSON of an accepted JSON answer, else None."""
        if answer.finish_reason != "stop":
            return "unfinished", None
        if self.tool_names:
            calls = answer.text.split(OPEN)[1:] or [answer.text]
            parsed = [json_or(call.split(CLOSE)[0].strip(), None) for call in calls]
            is_call = all(isinstance(call, dict) and call.get("name") in self.tool_names for call in parsed)
            return (None if is_call else "no call"), None
        if self.grammar is None or self.grammar.kind == "regex":
            return None, None
        try:
            return None, json.loads(answer.text)
        except ValueError:
            return "unparsed", None


def _digests(stores: Iterable[Path]) -> frozenset[str]:
    """Digests of every prompt in these stores. Raises PromptError if a store does not exist."""
    digests: set[str] = set()
    for store in stores:
        if not store.is_dir():
            raise PromptError(f"there is no store of traces at {store}: check --not-in")
        digests |= {digest(answer.prompt_ids) for answer in AnswerShards(store)}
    return frozenset(digests)


def _steered(form: Form, prompts: list[Prompt], shards: AnswerShards, seed: int) -> Iterator[Prompt]:
    """Yields the prompts, each with a grammar that fixes one choice to a value rare in the free answers."""
    if form.schema is None:
        yield from prompts
        return
    coverage, generator = Coverage(form.schema), random.Random(seed)
    for answer in shards:
        if not _is_steered(answer):
            reason, value = form.read(answer)
            if reason is None:
                coverage.add(value)
    for prompt in prompts:
        chosen = coverage.rarest(generator)
        if chosen is None:
            yield prompt
        else:
            grammar = GrammarSpec("json_schema", json.dumps(narrowed(form.schema, *chosen)))
            yield replace(prompt, grammar=grammar, source=f"{prompt.source}{STEERED}")


def _is_steered(answer: Answer) -> bool:
    return answer.source.endswith(STEERED)


def _accept(
    form: Form, raw: AnswerShards, done: Synthesized, max_overlap: float
) -> tuple[Coverage | None, Counter[str]]:
    """Write the accepted answers, if any, replacing those of an earlier run; returns their coverage and the rejected
    counts."""
    coverage = Coverage(form.schema) if form.schema else None
    near, exact = Near(max_overlap, common_pieces([])), set[tuple[int, ...]]()
    accepted, rejected = list[Answer](), Counter[str]()
    answers = sorted(raw, key=lambda answer: answer.key)
    prompts = [answer.prompt_ids for answer in answers]
    opening = num_common(min(prompts), max(prompts)) if prompts else 0
    for number, answer in enumerate(answers, start=1):
        reason, value = form.read(answer)
        tokens = (*answer.prompt_ids[opening:], *answer.answer_ids)
        pieces = pieces_of(tokens)
        if reason is None and (tokens in exact or any(near.like(pieces))):
            reason = "near-copy"
        if reason is not None:
            rejected[reason] += 1
            continue
        exact.add(tokens)
        near.add(number, pieces)
        if coverage:
            coverage.add(value)
        accepted.append(answer)
    if accepted:
        with whole_folder(done.answers, RESUME) as scratch:
            shards = AnswerShards(scratch)
            for begin in range(0, len(accepted), ROWS_PER_SHARD):
                shards.write(accepted[begin : begin + ROWS_PER_SHARD])
    done.num_answers, done.num_tokens = len(accepted), sum(len(answer.answer_ids) for answer in accepted)
    return coverage, rejected
