"""Where grammars are compiled: in any thread, the vocabulary read once, the engine handed what is ready."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from doubles import ByteTokenizer, FakeTarget

from paceline.engine.engine import Engine
from paceline.engine.grammar import Grammars
from paceline.engine.round import RuleJudge
from paceline.errors import SamplingError
from paceline.types import Constraint, GrammarSpec, SamplingParams
from paceline.verify.rules import mocked

EOS = ByteTokenizer.eos_token_id
PROMPTS = [[1, 2, 3], [4, 5], [6], [7, 8, 9, 10]]
WORDS = SamplingParams(max_tokens=60, grammar=GrammarSpec("regex", "([a-f]{3} ){2,4}[0-9]{2}"))


def answers(engine: Engine, constraints: list[Constraint | None]) -> list[list[int]]:
    ids = [engine.add(prompt, WORDS, each) for prompt, each in zip(PROMPTS, constraints, strict=True)]
    done: dict[int, list[int]] = {}
    while engine.has_work:
        done |= {chunk.sequence.request_id: chunk.sequence.output_ids for chunk in engine.step() if chunk.finish_reason}
        engine.check_integrity()
    return [done[number] for number in ids]


def byte_engine() -> Engine:
    return Engine(FakeTarget(vocab_size=258, num_rows=3), ByteTokenizer(), eos_token_ids=(EOS,))


def test_grammars_are_compiled_in_any_thread_and_handed_to_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight threads at once read one vocabulary; what they made serves an engine that compiles nothing itself."""
    engine, num_read, real = byte_engine(), [], Grammars._read_vocabulary
    monkeypatch.setattr(Grammars, "_read_vocabulary", lambda self: num_read.append(1) or real(self))
    assert WORDS.grammar
    with ThreadPoolExecutor(8) as pool:
        made: list[Constraint | None] = list(pool.map(engine.grammars.compile, [WORDS.grammar] * 8))
    assert len(num_read) == 1
    engine.grammars = Grammars(None, 0, ())  # would refuse
    with pytest.raises(SamplingError, match="end token"):
        engine.add([1], WORDS)
    given = answers(engine, made[:4])
    assert given == answers(byte_engine(), [None] * 4)
    assert all(tokens[-1] == EOS for tokens in given)


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("grammar", WORDS),
        ("min_tokens", SamplingParams(min_tokens=2)),
        ("bad_words", SamplingParams(bad_words=("no",))),
    ],
)
def test_a_mocked_acceptance_keeps_to_no_grammar_and_says_so(name: str, params: SamplingParams) -> None:
    judge = RuleJudge(mocked(2.0))
    engine = Engine(FakeTarget(vocab_size=258), ByteTokenizer(), judge=judge, eos_token_ids=(EOS,))
    with pytest.raises(SamplingError, match=f"{name} cannot hold with a mocked acceptance"):
        engine.add([1], params)
    engine.check_integrity()
    engine.add([1], SamplingParams(max_tokens=4))
