"""Grammar-constrained decoding: JSON, JSON of a schema, or a regex, token by token, with speculation.

`Grammars` compiles `SamplingParams.grammar` with llguidance; a running request keeps its grammar state in
`Sequence.constraint`. In each round `within_grammars` advances the state along the drafts before verification, and cuts
the drafts at the first refused one. The judge then masks every verified position by the drafts before it. Only
committed tokens change the state for good.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import torch

from paceline.errors import SamplingError, needing, reraised
from paceline.types import Batch, DraftBlock, GrammarKind, GrammarSpec, Sequence

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from torch import Tensor

WHITESPACE = r"[ \t\r\n]{0,16}"
"""Whitespace between the parts of a JSON text; bounded, because a small model may indent forever."""
MAX_CHARACTERS = 65_536
"""Maximum characters of a schema or regex; compiling is quadratic in the number of properties, two seconds at this
length."""
SPECIAL_LOOK = re.compile("<.*>", re.DOTALL)
"""Pattern of added tokens that llguidance treats as special tokens."""
_LEAST = -1e30
"""A logit below all others except -inf."""


class Grammars:
    """Compiles grammars for one tokenizer, from any thread. The first compilation reads the vocabulary, which takes
    about a second and holds the GIL."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        """`tokenizer`: an object whose field `backend` is a `tokenizers.Tokenizer`; not used before the first
        grammar."""
        self._tokenizer, self._vocab_size, self._eos_token_ids = tokenizer, vocab_size, eos_token_ids
        self._vocabulary: LLTokenizer | None = None
        self._reading = threading.Lock()
        self._compiled = lru_cache(maxsize=64)(self._compile)

    def compile(self, spec: GrammarSpec) -> Grammar:
        """Returns a new grammar state, for one answer. Raises SamplingError for an invalid or unsupported schema or
        regex."""
        return Grammar(self._compiled(spec).deep_copy())

    def _compile(self, spec: GrammarSpec) -> LLMatcher:
        with needing(SamplingError, "grammar needs llguidance: pip install 'paceline[serve]'"):
            from llguidance import LLMatcher
        source = _source(spec)
        with self._reading:
            if self._vocabulary is None:
                self._vocabulary = self._read_vocabulary()
        matcher = LLMatcher(self._vocabulary, source, log_level=0)
        matcher.compute_bitmask()  # some limits only show here
        if matcher.is_error():
            raise _refusal(spec, matcher.get_error())
        return matcher

    def _read_vocabulary(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        backend = getattr(self._tokenizer, "backend", None)
        if backend is None or not self._eos_token_ids:
            raise SamplingError("grammar needs a model with an end token and a fast tokenizer: this one lacks them")
        num_tokens = max(self._vocab_size, backend.get_vocab_size(with_added_tokens=True))
        text, added = backend.to_str(), backend.get_added_tokens_decoder()
        renamed = {token for token, each in added.items() if each.special or SPECIAL_LOOK.fullmatch(each.content)}
        with reraised(SamplingError, "grammar cannot be used with this model's tokenizer", "leave it out", ValueError):
            while True:
                renamed_json, ends = _with_renamed(text, renamed), list(self._eos_token_ids)
                read = LLTokenizer(renamed_json, n_vocab=num_tokens, eos_token=ends)
                misread = {
                    token for token in added.keys() - renamed if not _is_spelled(read, token, added[token].content)
                }
                if not misread:
                    return read
                renamed |= misread


def _with_renamed(tokenizer_json: str, tokens: set[int]) -> str:
    """Returns the `tokenizers` JSON with these added tokens renamed to strings that no text contains.

    llguidance encodes forced text with the tokenizer, which turns a special token's text into that token, and then
    refuses the token. Without that string in the vocabulary, the text becomes ordinary tokens.
    """
    tokenizer, nonce = json.loads(tokenizer_json), secrets.token_hex(16)
    names = {each["content"]: f"<{nonce}:{each['id']}>" for each in tokenizer["added_tokens"] if each["id"] in tokens}
    for each in tokenizer["added_tokens"]:
        if each["id"] in tokens:
            each |= {"content": names[each["content"]], "special": True}
    model = tokenizer["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(piece, piece): token for piece, token in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    return json.dumps(tokenizer)


def _is_spelled(tokenizer: LLTokenizer, token: int, text: str) -> bool:
    """True if llguidance decodes the added token to this text."""
    return tokenizer.decode_bytes([token]) in (text.encode(), text.replace("\u2581", " ").encode())


def _source(spec: GrammarSpec) -> str:
    """Returns the grammar in llguidance's language."""
    from llguidance import LLMatcher

    if spec.kind not in get_args(GrammarKind):
        raise SamplingError(f"grammar: kind must be one of {', '.join(get_args(GrammarKind))}, not {spec.kind!r}")
    if len(spec.text) > MAX_CHARACTERS:
        raise SamplingError(
            f"grammar: {len(spec.text):,} characters are too long, the most are {MAX_CHARACTERS:,}: shorten it"
        )
    try:
        spec.text.encode()
        if spec.kind == "regex":
            return LLMatcher.grammar_from_regex(spec.text)
        schema = spec.text if spec.kind == "json_schema" else '{"type": "object"}'
        return LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": WHITESPACE})
    except UnicodeEncodeError as error:
        raise _refusal(spec, "it holds half a surrogate pair, which is no text") from error
    except ValueError as error:
        raise _refusal(spec, str(error)) from error


def _refusal(spec: GrammarSpec, reason: str) -> SamplingError:
    first = " ".join(reason.split())[:300]
    return SamplingError(
        f"grammar: this {spec.kind.replace('_', ' ')} cannot be used ({first}): correct or simplify it"
    )


class Grammar:
    """Grammar state of one answer. If the answer exceeds llguidance's limits, `has_failed` is True and only the end
    token is allowed."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self._num_consumed = 0
        self._masks: list[bytes] = []
        """Bitmask of the allowed tokens at each position of the latest walk, which began after `_num_consumed`
        tokens."""

    def follow(self, seq: Sequence, drafts: list[int], corrects: bool = False) -> list[int]:
        """Returns the leading drafts that the grammar allows. Also prepares `mask`: stores which tokens are allowed at
        the position of each returned draft and after the last one. Nothing is stored for positions after an end token.

        `corrects`: replace a refused draft if the grammar allows only one token at its position, and check the next
        drafts too. The target can generate only this token there, so it will be accepted.
        """
        matcher = self._matcher
        matcher.consume_tokens(seq.tokens[seq.prompt_len + self._num_consumed :])
        self._num_consumed = seq.num_output
        self._masks = [matcher.compute_bitmask()]
        allowed: list[int] = []
        for token in drafts:
            if not _allows(self._masks[-1], token):
                only = _only(self._masks[-1]) if corrects else None
                if only is None:
                    break
                token = only
            allowed.append(token)
            if token in seq.eos_token_ids:
                break  # no token follows the end
            matcher.consume_token(token)
            self._masks.append(matcher.compute_bitmask())
        if len(self._masks) > 1:
            matcher.rollback(len(self._masks) - 1)
        return allowed

    @property
    def has_failed(self) -> bool:
        return self._matcher.is_error()

    def mask(self, seq: Sequence, logits_JV: Tensor) -> Tensor:
        """Returns a copy of the logits [J, V] of a row's J verified positions in which tokens that the grammar refuses
        are -inf. Positions after a refused draft are not masked, because they are never used.

        The grammar has priority over the logit bias, bad words and minimum length. If these settings together forbid
        every token that the grammar allows, a token that the grammar allows must still be generated. So if one of the
        settings is used, the copy is float32, and the logits of tokens that the grammar allows are at least -1e30,
        never -inf.
        """
        if not self._masks or self._num_consumed != seq.num_output:
            self.follow(seq, [])
        num_masked, num_vocab = len(self._masks), logits_JV.shape[-1]
        bits = np.frombuffer(b"".join(self._masks), np.uint8).reshape(num_masked, -1)
        refused = torch.from_numpy(np.unpackbits(~bits, axis=1, count=num_vocab, bitorder="little")).to(
            logits_JV.device
        )
        # The grammar has priority: a token forbidden by other settings is accepted where the grammar allows no other.
        is_shaped = seq.params.logit_bias or seq.shapes_logits
        masked_JV = logits_JV.float().clamp(min=_LEAST) if is_shaped else logits_JV.clone()
        masked_JV[:num_masked].masked_fill_(refused.bool(), float("-inf"))
        return masked_JV


def _allows(mask: bytes, token: int) -> bool:
    return token >> 3 < len(mask) and bool(mask[token >> 3] >> (token & 7) & 1)


def _only(mask: bytes) -> int | None:
    """Returns the allowed token if there is exactly one."""
    bits = int.from_bytes(mask, "little")
    return bits.bit_length() - 1 if bits.bit_count() == 1 else None


def within_grammars(batch: Batch, draft: DraftBlock) -> DraftBlock:
    """Returns the drafts of all rows, without those that a row's grammar refuses. Rows without a grammar are unchanged.
    A tree of a row with a grammar is first replaced by its path of top tokens. Drafts are checked in order; those after
    the first refused one are removed. The refused draft itself:

    - Greedy rows, and rows with certain (deterministic) drafts: it is removed. But if the grammar allows only one token
      at its position, this token replaces it, and the check continues.
    - Rows with sampled drafts: it is kept as the last draft, and verification replaces it by a sample from the residual
      distribution. Removing it would change the distribution of the output.
    """
    if all(seq.constraint is None for seq in batch.sequences):
        return draft
    tokens_B, probs_B = list(draft.tokens_B), list(draft.probs_B)
    trees_B = list(draft.trees_B) if draft.trees_B else None
    for index, seq in enumerate(batch.sequences):
        if seq.constraint is None:
            continue
        tokens, probs = tokens_B[index], probs_B[index]
        if trees_B and (tree := trees_B[index]):
            trees_B[index], tokens = None, [tree.tokens[node] for node in tree.spine]
        if probs is None or seq.params.is_greedy:
            tokens_B[index], probs_B[index] = seq.constraint.follow(seq, tokens, corrects=True), None
        else:
            num_kept = len(seq.constraint.follow(seq, tokens)) + 1
            tokens_B[index], probs_B[index] = tokens[:num_kept], probs[:num_kept]
    return replace(draft, tokens_B=tokens_B, probs_B=probs_B, trees_B=trees_B)
