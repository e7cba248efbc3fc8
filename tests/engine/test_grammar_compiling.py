"""Where grammars are compiled: in any thread, the vocabulary read once, the engine handed what is ready; special
tokens."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import tokenizers
import torch
from doubles import ByteTokenizer, FakeTarget

from paceline.engine.engine import Engine
from paceline.engine.grammar import Grammars
from paceline.engine.round import RuleJudge
from paceline.errors import SamplingError
from paceline.model.text.tokenizer import Tokenizer
from paceline.types import Constraint, GrammarSpec, SamplingParams, Sequence
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
        constraints: list[Constraint | None] = list(pool.map(engine.grammars.compile, [WORDS.grammar] * 8))
    assert len(num_read) == 1
    engine.grammars = Grammars(None, 0, ())  # would refuse
    with pytest.raises(SamplingError, match="end token"):
        engine.add([1], WORDS)
    answered = answers(engine, constraints[:4])
    assert answered == answers(byte_engine(), [None] * 4)
    assert all(tokens[-1] == EOS for tokens in answered)


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


def tokenizer_with_marks() -> Tokenizer:
    """Bytes, an added word of a non-ASCII spelling, a tool mark that is not special, and two special tokens, one of
    them among the model's own pieces."""
    pieces = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: token for token, piece in enumerate([*pieces, "<|im_start|>"])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_tokens(["<tool_call>", "\u00fcber", "    "])
    backend.add_special_tokens(["<|im_start|>", "<|end|>"])
    return Tokenizer(backend, eos_token_ids=(backend.token_to_id("<|end|>"),))


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (GrammarSpec("regex", "<tool_call>x"), "<tool_call>x"),
        (GrammarSpec("regex", r"a <\|im_start\|> b"), "a <|im_start|> b"),
        (GrammarSpec("regex", r"<\|end\|>"), "<|end|>"),
        (GrammarSpec("regex", "\u00fcber"), "\u00fcber"),
        (GrammarSpec("regex", "a    b"), "a    b"),
        (
            GrammarSpec(
                "json_schema",
                json.dumps(
                    {
                        "type": "object",
                        "properties": {"tag": {"const": "<|im_start|>"}},
                        "required": ["tag"],
                        "additionalProperties": False,
                    }
                ),
            ),
            '{"tag":"<|im_start|>"}',
        ),
    ],
)
def test_forced_text_may_spell_a_special_token(spec: GrammarSpec, text: str) -> None:
    tokenizer = tokenizer_with_marks()
    end = tokenizer.eos_token_ids[0]
    grammar = Grammars(tokenizer, tokenizer.vocab_size, (end,)).compile(spec)
    seq = Sequence(0, [0], 1, SamplingParams(max_tokens=64))
    spaces = tokenizer.encode(" \t\r\n") + tokenizer.encode("    ")
    while seq.num_output < 60 and seq.tokens[-1] != end:
        logits = torch.zeros(1, tokenizer.vocab_size)
        logits[0, spaces] = -1.0  # JSON without white space
        seq.tokens.append(int(grammar.mask(seq, logits)[0].argmax()))
    assert not grammar.has_failed
    assert seq.tokens[-1] == end
    assert tokenizer.decode(seq.output_ids[:-1]) == text
