"""The model's tokenizer and chat template, and conversion of generated tokens to text as they arrive.

Loaded from a folder's tokenizer.json (the `tokenizers` library) or from GGUF metadata.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from paceline.errors import ModelFileError, PromptError, SamplingError, TemplateError, reraised, shown
from paceline.model.adapter import base_of, is_adapter
from paceline.model.checkpoint import eos_token_ids, existing, read_json
from paceline.model.gguf import container as gguf_file
from paceline.model.gguf import metadata as gguf
from paceline.model.text.chat import chat_ids

if TYPE_CHECKING:
    from paceline.model.text.chat_template import ChatTemplate

Messages = Sequence[Mapping[str, Any]]
"""A conversation: [{"role": "user", "content": "..."}, ...]."""

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
REPLACEMENT = "\ufffd"
STAND_IN_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% "
    "endif %}"
)

BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")
"""Text of a SentencePiece token for one byte, such as <0xE4>."""
_PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
_OTHERS = sorted(set(range(256)) - {*_PRINTABLE})
BYTES_OF = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + place): byte for place, byte in enumerate(_OTHERS)}
"""Character -> the byte that it represents in a byte-level vocabulary (GPT-2's table)."""

_LONG_TEXT = 4096
"""Minimum characters for encoding a text by the batch function, which releases Python's global lock (GIL)."""


class Tokenizer:
    """A model's tokenizer; load it with `from_path`."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_token_ids: tuple[int, ...] = (),
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        self.backend = backend
        self.eos_token_ids = eos_token_ids
        self.chat_template = chat_template
        self.special_tokens = dict(special_tokens or {})
        """bos_token, eos_token, unk_token and pad_token as text, if the model has them; used by chat templates."""
        self._compiled: ChatTemplate | None = None

    @classmethod
    def from_path(cls, path: Path | str) -> Tokenizer:
        """Load the tokenizer of a Hugging Face folder or GGUF file; for an adapter without a tokenizer of its own, its
        base's.

        Raises ModelNotFoundError, ModelFileError (damaged or missing files), UnsupportedModelError (unknown GGUF
        tokenizer).
        """
        path = existing(path)
        if is_adapter(path):
            return _from_adapter(path)
        return _from_gguf(path) if gguf_file.is_gguf(path) else _from_folder(path)

    @classmethod
    def stand_in(cls, vocab_size: int) -> Tokenizer:
        """Make a placeholder tokenizer with `vocab_size` ids for a model with random weights. The first 256 ids are
        single bytes, the others artificial words."""
        bytes_first = sorted(pre_tokenizers.ByteLevel.alphabet())[:vocab_size]
        words = [*bytes_first, *(f"\u0120t{token}" for token in range(len(bytes_first), vocab_size))]
        vocabulary = {word: token for token, word in enumerate(words)}
        backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=words[0]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        return cls(backend, chat_template=STAND_IN_TEMPLATE)

    @property
    def vocab_size(self) -> int:
        """Number of token ids, including added tokens. A model's embedding may have more rows, as padding."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def end_token_id(self) -> int | None:
        """Id of one token that ends an answer. This is eos_token if the model's end tokens include it; otherwise the
        model's only end token. None if there is no end token, or if there are several and eos_token is not one of
        them."""
        ends = self.eos_token_ids
        own = self.backend.token_to_id(self.special_tokens.get("eos_token", ""))
        return own if own in ends else ends[0] if len(ends) == 1 else None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Encode raw text to token ids. `add_special_tokens`: add bos or eos, if the tokenizer is configured to. Raises
        PromptError if `text` is not a string or is invalid Unicode."""
        if not isinstance(text, str):
            raise PromptError(f"a prompt must be a text, not {shown(text)}")
        with reraised(
            PromptError, "the prompt is no valid Unicode text", "re-encode it as UTF-8", UnicodeEncodeError, TypeError
        ):
            if len(text) > _LONG_TEXT:
                return self.backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Decode token ids to text. Bytes that are not UTF-8 become U+FFFD; ids outside the vocabulary are ignored."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special)

    def apply_chat_template(
        self, messages: Messages, add_generation_prompt: bool = True, variables: Mapping[str, Any] | None = None
    ) -> str:
        """Render the chat template with these messages, unchanged (`model.text.chat.chat_text` normalises messages).
        `add_generation_prompt`: end with the beginning of an assistant message. `variables`: passed to the template.

        Raises PromptError if the model has no template, or its template rejects the messages, fails or exceeds a limit.
        """
        _check_messages(messages)
        if self.chat_template is None:
            raise TemplateError("this model has no chat template", "choose a model that has one")
        if self._compiled is None:
            from paceline.model.text.chat_template import ChatTemplate  # only here: most commands render no template

            self._compiled = ChatTemplate(self.chat_template)
        context = {"messages": [dict(message) for message in messages], "add_generation_prompt": add_generation_prompt}
        defaults: dict[str, Any] = {"tools": None, "documents": None}
        return self._compiled.render(defaults | self.special_tokens | context | dict(variables or {}))

    def encode_chat(
        self, messages: Messages, variables: Mapping[str, Any] | None = None, tools: Iterable[Any] = ()
    ) -> list[int]:
        """Render a conversation by `model.text.chat.chat_text`; returns the prompt's token ids. Raises PromptError."""
        return chat_ids(self, messages, tools, variables)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token adds to a text; they may be only a part of a UTF-8 character."""
        piece = self.backend.id_to_token(token) or ""
        if BYTE_TOKEN.fullmatch(piece):
            return bytes([int(piece[3:5], 16)])
        is_added = token in self.backend.get_added_tokens_decoder()
        if self._is_byte_level and not is_added and set(piece) <= BYTES_OF.keys():
            return bytes(BYTES_OF[letter] for letter in piece)
        if self._is_sentencepiece and not is_added:
            return piece.replace("▁", " ").encode()
        return self.decode([token], skip_special=False).encode()

    @cached_property
    def _is_byte_level(self) -> bool:
        return b'"ByteLevel"' in self.backend.decoder.__getstate__() if self.backend.decoder else False

    @cached_property
    def _is_sentencepiece(self) -> bool:
        return "▁".encode() in self.backend.decoder.__getstate__() if self.backend.decoder else False

    @cached_property
    def special_ids(self) -> dict[str, int]:
        """Text of each special token -> its id. Decoded answers omit special tokens."""
        return {each.content: token for token, each in self.backend.get_added_tokens_decoder().items() if each.special}

    def split_stop(self, stop: tuple[str, ...], *, are_hidden: bool) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Separate stop strings that are special tokens from the others. Returns (strings to search in the decoded
        text, ids of the special tokens).

        `are_hidden`: decoded text omits special tokens. A stop string that contains both a special token and other text
        then raises SamplingError, because it could never match.
        """
        texts, tokens = list[str](), list[int]()
        for each in stop:
            if each.strip() in self.special_ids:
                tokens.append(self.special_ids[each.strip()])
            elif are_hidden and (spelled := next((name for name in self.special_ids if name in each), None)):
                message = f"stop: {each!r:.80} holds the special token {spelled!r}, which no text shows: give it alone"
                raise SamplingError(message, "stop")
            else:
                texts.append(each)
        return tuple(texts), tuple(tokens)

    def stream(self, skip_special: bool = True) -> IncrementalDetokenizer:
        return IncrementalDetokenizer(self, skip_special)


class IncrementalDetokenizer:
    """Decodes token ids piece by piece. Text that `push` returned never changes; an incomplete character is withheld
    until its remaining tokens arrive.

    The concatenated pieces equal `decode` of all ids. A token's text may depend on the previous one (SentencePiece
    drops a first space), so the last finished group of tokens is kept as context.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._context: list[int] = []
        self._pending: list[int] = []

    def push(self, ids: list[int]) -> str:
        """Add token ids; returns the text that became final, which may be ""."""
        self._pending += ids
        text = self._decode(self._context + self._pending)
        if text.endswith(REPLACEMENT):
            return self._finish(self._last_boundary(text))
        return self._finish(len(self._pending), text)

    def flush(self) -> str:
        """End the answer; returns the remaining text, with U+FFFD in place of an incomplete character."""
        return self._finish(len(self._pending))

    def _last_boundary(self, text: str) -> int:
        """Number of pending tokens that end before the incomplete character at the end of `text`.

        At a boundary, both sides decoded separately give the same text as together, and the right side is not empty.
        The incomplete character has at most three bytes, so eight tokens back suffice.
        """
        for end in range(len(self._pending) - 1, max(len(self._pending) - 9, 0), -1):
            if self._in_byte_run(end):
                continue
            right = self._decode(self._pending[end:])
            if right and self._decode(self._context + self._pending[:end]) + right == text:
                return end
        return 0

    def _in_byte_run(self, end: int) -> bool:
        """True if a boundary would split a run of SentencePiece byte tokens (<0xE4>), which is valid text only as a
        whole.

        Characters have at most four bytes: a longer run that is still invalid stays invalid and may be split.
        """
        hopeless = len(self._pending) >= 8 and all(map(self._is_byte, self._pending[-8:]))
        return not hopeless and all(map(self._is_byte, self._pending[end - 1 : end + 1]))

    def _is_byte(self, token: int) -> bool:
        name = self._tokenizer.backend.id_to_token(token) or ""
        return len(name) == 6 and name.startswith("<0x")

    def _finish(self, num_tokens: int, whole: str | None = None) -> str:
        """Text of the first pending tokens; `whole`: text of context and these tokens, if known."""
        group, self._pending = self._pending[:num_tokens], self._pending[num_tokens:]
        if not group:
            return ""
        before = self._decode(self._context)
        if whole is None:
            whole = self._decode(self._context + group)
        # An invalid byte run can garble the context it follows; returned text stays, and the group is decoded alone.
        text = whole[len(before) :] if whole.startswith(before) else self._decode(group)
        if text:
            self._context = group
        elif not before:  # remember a first space that was dropped, but no hidden token
            self._context += [token for token in group if token not in self._tokenizer.special_ids.values()]
        return text

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, self._skip_special) if ids else ""


class TextStream:
    """Decodes one answer piece by piece and ends it before the first stop string. Text that may be the beginning of a
    stop string is withheld until the next tokens decide."""

    def __init__(self, detokenizer: IncrementalDetokenizer, stop: tuple[str, ...], min_tokens: int = 0) -> None:
        """`stop`: stop strings; they are not searched in the text of the first `min_tokens` tokens."""
        self._detokenizer = detokenizer
        self._stop, self._num_free = stop, min_tokens
        self._held = ""
        self.stopped_by = ""
        """The stop string that ended the text, or ""."""

    def push(self, tokens: list[int]) -> tuple[str, int | None]:
        """Add tokens; returns (text that became final, count). The count is None while no stop string has occurred.
        Otherwise it states how many of `tokens` were used, including the one that completed the stop string."""
        if not self._stop:
            return self._detokenizer.push(tokens), None
        shown = ""
        for taken, token in enumerate(tokens, start=1):
            if self._num_free:
                self._num_free -= 1
                shown += self._detokenizer.push([token])
                continue
            self._held += self._detokenizer.push([token])
            at, stop = self._first_stop()
            if stop:
                shown, self._held, self.stopped_by = shown + self._held[:at], "", stop
                return shown, taken
            safe = len(self._held) - num_undecided(self._held, self._stop)
            shown, self._held = shown + self._held[:safe], self._held[safe:]
        return shown, None

    def finish(self) -> str:
        """End the answer; returns the withheld text, cut before the first stop string in it."""
        self._held += self._detokenizer.flush()
        at, self.stopped_by = self._first_stop()
        return self._held[:at]

    def _first_stop(self) -> tuple[int, str]:
        """(index of the first stop string, the stop string), or (length of the text, "") without one."""
        ends = [(at, stop) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        return min(ends, default=(len(self._held), ""))


def num_undecided(text: str, strings: tuple[str, ...]) -> int:
    """Return how many characters at the end of `text` may be the beginning of one of `strings`: the length of the
    longest suffix of `text` that is a proper prefix of one."""
    sizes = range(min(max(map(len, strings)) - 1, len(text)), 0, -1)
    return next((size for size in sizes if any(each.startswith(text[-size:]) for each in strings)), 0)


def _from_folder(folder: Path) -> Tokenizer:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ModelFileError(
            f"{file} is missing: save the model's fast tokenizer there (AutoTokenizer...save_pretrained)"
        )
    # The library raises plain Exception on a file that it cannot parse.
    with reraised(ModelFileError, f"{file} is damaged", "delete it and fetch the model again", Exception):
        backend = tokenizers.Tokenizer.from_file(str(file))
    backend.no_padding()
    backend.no_truncation()
    config = _json_of(folder / "special_tokens_map.json") | _json_of(folder / "tokenizer_config.json")
    special = {name: text for name in SPECIAL_TOKENS if (text := _token_text(config.get(name))) is not None}
    eos = backend.token_to_id(special["eos_token"]) if "eos_token" in special else None
    ids = eos_token_ids(folder) + (() if eos is None else (eos,))
    ends, template = tuple(dict.fromkeys(ids)), _folder_template(folder, config)
    return Tokenizer(backend, eos_token_ids=ends, chat_template=template, special_tokens=special)


def _json_of(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


def _from_adapter(folder: Path) -> Tokenizer:
    """Tokenizer and chat template, each from the adapter's folder if it is there, else from the base. The base's end
    tokens are kept."""
    base = Tokenizer.from_path(base_of(folder))
    if (folder / "tokenizer.json").is_file():
        own = _from_folder(folder)
        own.eos_token_ids = tuple(dict.fromkeys((*base.eos_token_ids, *own.eos_token_ids)))
    else:
        own = copy.copy(base)
        own.chat_template = _folder_template(folder, _json_of(folder / "tokenizer_config.json"))
    own.chat_template = own.chat_template or base.chat_template
    return own


def _from_gguf(path: Path) -> Tokenizer:
    file = gguf_file.open_gguf(path)
    backend, ends = gguf.build_tokenizer(file)
    special = {}
    for name, kind in zip(SPECIAL_TOKENS, ("bos", "eos", "unknown", "padding"), strict=True):
        token = gguf.special_token(file, kind)
        if token is not None and (text := backend.id_to_token(token)) is not None:
            special[name] = text
    template = file.get("tokenizer.chat_template", str)
    return Tokenizer(backend, eos_token_ids=ends, chat_template=template, special_tokens=special)


def _token_text(value: Any) -> str | None:
    """A special token as text; configs store a string or an AddedToken object."""
    text = value.get("content") if isinstance(value, dict) else value
    return text.encode("utf-8", "replace").decode() if isinstance(text, str) else None


def _folder_template(folder: Path, config: dict[str, Any]) -> str | None:
    """chat_template.jinja, else the config's template; if it has several, the one named default."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        with reraised(ModelFileError, f"{file} cannot be read", "fetch the model again", OSError, UnicodeDecodeError):
            return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = (entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default")
        template = next(named, {}).get("template")
    return template if isinstance(template, str) else None


def _check_messages(messages: Messages) -> None:
    if not messages:
        raise PromptError("the conversation is empty: give at least one message with a role and a content")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise PromptError(
                f"each message needs a role and a content, as in {{'role': 'user', 'content': '...'}} (got "
                f"{message!r:.80})"
            )
