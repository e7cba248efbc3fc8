"""Engines, drafters and grammars of the tests of constrained answers."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache

import engine_runs
import tokenizers
import torch
from doubles import ByteTokenizer, FakeTarget
from engine_runs import byte_target
from llguidance import LLMatcher

from paceline.draft.base import Drafter
from paceline.draft.ngram import NgramDrafter
from paceline.engine.engine import Engine
from paceline.engine.grammar import Grammars
from paceline.engine.round import RuleJudge
from paceline.model.sampling.logits import penalise
from paceline.model.text.tokenizer import Tokenizer
from paceline.types import Batch, DraftBlock, GrammarSpec, SamplingParams, Sequence
from paceline.verify.rules import RULES

EOS = ByteTokenizer.eos_token_id
PROMPTS = [[1, 2, 3], [4, 5], [6], [7, 8, 9, 10]]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Za-z ]{1,12}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "langs": {"type": "array", "items": {"enum": ["de", "en", "fr"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "langs"],
    "additionalProperties": False,
}
SCHEMA = GrammarSpec("json_schema", json.dumps(PERSON))
OBJECT = GrammarSpec("json_object")
DATE = GrammarSpec("regex", r"(on|by) [0-9]{4}-[0-9]{2}-[0-9]{2}( (at|around) noon)?[.!]{1,3}")
SPECS = {"schema": SCHEMA, "object": OBJECT, "regex": DATE}


def byte_engine(target: FakeTarget, drafter: Drafter | None = None, rule: str = "auto") -> Engine:
    return Engine(target, ByteTokenizer(), drafter, judge=RuleJudge(RULES[rule]), eos_token_ids=(EOS,), prefill_chunk=3)


def drafters(target: FakeTarget) -> dict[str, Drafter | None]:
    return engine_runs.drafters(target) | {"ngram": NgramDrafter(), "the answer": Knowing({})}


class Knowing(Drafter):
    """Drafts known answers, every third token wrong: what a drafter that learned the grammar would do."""

    num_drafted = 7

    def __init__(self, answers: dict[tuple[int, ...], list[int]]) -> None:
        self.answers = answers

    def propose(self, batch: Batch) -> DraftBlock:
        limits = batch.draft_limits_B(self.num_drafted)
        return DraftBlock.certain(
            [self._draft(seq)[:limit] for seq, limit in zip(batch.sequences, limits, strict=True)]
        )

    def _draft(self, seq: Sequence) -> list[int]:
        answer = self.answers.get(tuple(seq.tokens[: seq.prompt_len]), [])
        rest = enumerate(answer[seq.num_output :], start=seq.num_output)
        return [token if place % 3 else (token + 1) % 256 for place, token in rest]


def matcher_of(spec: GrammarSpec) -> LLMatcher:
    return Grammars(ByteTokenizer(), 258, (EOS,)).compile(spec)._matcher


def constrained_greedy(target: FakeTarget, spec: GrammarSpec, prompt: list[int], params: SamplingParams) -> list[int]:
    """Token by token, from the library alone: a fresh matcher that never saw a draft, and the target's own logits."""
    matcher, answer = matcher_of(spec), list[int]()
    while len(answer) < params.max_tokens and answer[-1:] != [EOS]:
        logits = penalise(target.logits_after(prompt + answer)[None], params, prompt + answer, Counter(answer), [])[
            0
        ].clone()
        mask = matcher.compute_bitmask()
        logits[[token for token in range(258) if not mask[token >> 3] >> (token & 7) & 1]] = -torch.inf
        answer.append(int(logits.argmax()))
        assert matcher.consume_token(answer[-1])
    return answer


@cache
def greedy_answers(spec: GrammarSpec, penalty: float) -> list[list[int]]:
    params = SamplingParams(max_tokens=120, grammar=spec, frequency_penalty=penalty)
    return [constrained_greedy(byte_target(num_rows=3), spec, prompt, params) for prompt in PROMPTS]


def tiny_tokenizer() -> Tokenizer:
    """a, b, c, ab and an end token."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1, "c": 2, "ab": 3}, [("a", "b")]))
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return Tokenizer(backend, eos_token_ids=(4,))
