"""Converts a server's answers to tokens: from ids if it returns them, else from its log-probabilities, else by encoding
the text.

The server may have generated a text with other tokens than its encoding. An encoded text is therefore used only if it
has as many tokens as the server reports; otherwise the tokens are unknown."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import PromptError
from paceline.model.text.tokenizer import REPLACEMENT, Tokenizer


@dataclass(frozen=True, slots=True)
class ServerAnswer:
    """One answer as the server returned it, with its token ids if they are known."""

    text: str
    finish_reason: str
    token_ids: list[int] | None
    """None if they are unknown."""
    logprobs: list[float] | None
    """Log-probability of each answer token, as reported by the server; None if it reports none."""
    prompt_tokens: int | None
    completion_tokens: int | None
    prompt_ids: list[int] | None = None
    """Token ids of the prompt as the server encoded it; None if it does not return them."""
    has_ids: bool = False
    """True if the server returned token ids."""
    is_lossy: bool = False
    """True if the server declares that the answer is not lossless."""


class AnswerReader:
    """Converts a server's JSON answers to `ServerAnswer`. Without token ids from the server, determines them with the
    model's tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._end = tokenizer, tokenizer.end_token_id
        self._ids: dict[str, list[int]] | None = None

    def read(self, response: Any, has_stop: bool) -> ServerAnswer | None:
        """Converts an API response, given as parsed JSON; returns None if it is not a valid answer. `has_stop`: True if
        the request had a stop string. The finish reason "stop" then does not prove that the model generated an end
        token."""
        try:
            choice = response["choices"][0]
            message, usage = choice.get("message") or {}, response.get("usage") or {}
            text, reason = choice.get("text", message.get("content")) or "", str(choice.get("finish_reason"))
            names, logprobs = _names_and_logprobs(choice.get("logprobs"))
            num_answer, num_prompt = usage.get("completion_tokens"), usage.get("prompt_tokens")
            ids = _all_ids(choice.get("token_ids"))
            prompt_ids = _all_ids(choice.get("prompt_token_ids") or response.get("prompt_token_ids"))
        except (KeyError, IndexError, TypeError, AttributeError, ValueError):
            return None
        if not isinstance(text, str) or not all(
            value is None or type(value) is int for value in (num_answer, num_prompt)
        ):
            return None
        tokens = self._tokens(text, reason == "stop" and not has_stop, ids, names, num_answer)
        is_lossy = response.get("lossless") is False
        return ServerAnswer(
            text, reason, tokens, logprobs, num_prompt, num_answer, prompt_ids, ids is not None, is_lossy
        )

    def _tokens(
        self, text: str, is_ended: bool, ids: list[int] | None, names: list[str] | None, num_answer: int | None
    ) -> list[int] | None:
        if ids is not None:
            return ids if ids and max(ids) < self._tokenizer.vocab_size else None
        try:
            encoded = self._tokenizer.encode(text, add_special_tokens=False) if text else []
        except PromptError:  # half a surrogate pair
            return None
        if names is not None:
            tokens = self._named_ids(names, encoded)
        else:
            is_same = self._tokenizer.decode(encoded, skip_special=False) == text
            tokens = encoded if is_same and num_answer in (None, len(encoded), len(encoded) + is_ended) else None
        if tokens is None or not is_ended or (tokens and tokens[-1] in self._tokenizer.eos_token_ids):
            return tokens or None
        return None if self._end is None else [*tokens, self._end]

    def _named_ids(self, names: Sequence[str], encoded: list[int]) -> list[int] | None:
        """Ids of tokens given by their text. A text shared by several tokens is resolved by the encoded answer."""
        if self._ids is None:
            self._ids = self._texts()
        choices = [self._ids.get(name, []) for name in names]
        if all(len(ids) == 1 for ids in choices):
            return [ids[0] for ids in choices]
        ends = self._tokenizer.eos_token_ids
        whole = [*encoded, *(ids[0] for ids in choices[len(encoded) :] if ids and ids[0] in ends)]
        fits = len(whole) == len(names) and all(map(operator.contains, choices, whole))
        return whole if fits else None

    def _texts(self) -> dict[str, list[int]]:
        """Maps every text that may denote a token to its candidate tokens."""
        tokens_by_text: dict[str, list[int]] = defaultdict(list)
        for token in range(self._tokenizer.vocab_size):
            own = self._tokenizer.backend.id_to_token(token) or ""
            text = self._tokenizer.decode([token], skip_special=False)
            names = {text, f"token_id:{token}"}
            if own.startswith("\u2581"):  # SentencePiece drops a leading space when a token is decoded alone
                names.add(own.replace("\u2581", " "))
            if REPLACEMENT in text:
                names.add(REPLACEMENT)
            for name in names:
                tokens_by_text[name].append(token)
        return tokens_by_text


def _names_and_logprobs(logprobs: Any) -> tuple[list[str] | None, list[float] | None]:
    """Extracts token texts and log-probabilities from a text completion or a chat answer."""
    if not isinstance(logprobs, dict):
        return None, None
    if isinstance(content := logprobs.get("content"), list):
        return [str(entry["token"]) for entry in content], [float(entry["logprob"]) for entry in content]
    names, values = logprobs.get("tokens"), logprobs.get("token_logprobs")
    if not isinstance(names, list) or not isinstance(values, list) or len(names) != len(values):
        return None, None
    return [str(name) for name in names], [float(value) for value in values]


def _all_ids(ids: Any) -> list[int] | None:
    is_list = isinstance(ids, list) and all(type(token) is int and token >= 0 for token in ids)
    return list(ids) if is_list else None
