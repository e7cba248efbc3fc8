"""A GGUF file's vocabulary as a tokenizer of the `tokenizers` library, and the tokens that end an answer.

Called by `tokenizer.py` and, for the ends, by `gguf.py`.
"""

from __future__ import annotations

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from paceline.errors import ModelFileError, UnsupportedModelError, reraised
from paceline.model.gguf_file import GGUFFile

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # tokenizer.ggml.token_type
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PRE_SPLITS = {"qwen2": f"{_CONTRACTIONS}|{_WORDS % ''}", "llama-bpe": f"{_CONTRACTIONS}|{_WORDS % '{1,3}'}"}
"""Word-splitting patterns of the pre-tokenizers that have one of their own, as in their tokenizer.json."""

MAX_TOKEN_LENGTH = 512
"""Characters; the longest known tokens are runs of a hundred or two."""
END_KINDS = ("eos", "eot", "eom")
"""End of text, of turn and of message, as a file may name them."""
CHATML_ENDS = ("<|im_end|>", "<|endoftext|>")
"""Qwen's chat models end with either, and a GGUF file has room for one; generation_config.json of their folders has both."""


def build_tokenizer(file: GGUFFile) -> tuple[Tokenizer, tuple[int, ...]]:
    """A `tokenizers` tokenizer equal to the one the GGUF file was made from, and the ids that end an answer.

    Raises UnsupportedModelError for a tokenizer model or pre-tokenizer we do not know, ModelFileError when a table is missing
    or an id is none of its tokens.
    """
    model = file.get("tokenizer.ggml.model", str)
    tokens, types = file.array("tokenizer.ggml.tokens", str), file.array("tokenizer.ggml.token_type", int)
    if not tokens:
        raise ModelFileError(f"{file.path} holds no tokenizer.ggml.tokens: fetch a GGUF file with its vocabulary")
    if model not in ("gpt2", "llama"):
        raise UnsupportedModelError(
            f"{file.path}: GGUF tokenizer {model!r:.80} is not implemented (known: gpt2, llama): use the model's folder instead"
        )
    if len(types) not in (0, len(tokens)) or max(map(len, tokens)) > MAX_TOKEN_LENGTH:
        raise ModelFileError(f"{file.path}: tokenizer.ggml.tokens and their types are damaged: fetch the model again")
    vocab = dict(zip(tokens, range(len(tokens)), strict=True))
    # The library raises plain Exception on tables that do not fit each other.
    with reraised(ModelFileError, f"{file.path}: its tokenizer is damaged", "fetch the model again", Exception):
        if model == "gpt2":
            backend, adds_bos = _byte_level_bpe(file, vocab)
        else:
            backend, adds_bos = _sentencepiece_bpe(file, vocab, tokens, types), True
        special = [pair for pair in zip(tokens, types, strict=False) if pair[1] in (CONTROL, USER_DEFINED, UNKNOWN)]
        backend.add_tokens([AddedToken(text, special=kind != USER_DEFINED, normalized=False) for text, kind in special])
        _add_post_processor(backend, file, tokens, adds_bos)
    return backend, _ends(file, vocab, types)


def special_token(file: GGUFFile, kind: str) -> int | None:
    """The id of the file's bos, eos, unknown ... token. Raises ModelFileError when that is none of its tokens."""
    key = f"tokenizer.ggml.{kind}_token_id"
    token, num_tokens = file.get(key, int), file.length("tokenizer.ggml.tokens")
    if token is not None and not 0 <= token < num_tokens:
        raise ModelFileError(f"{file.path}: {key} {token} is none of its {num_tokens} tokens: fetch the model again")
    return token


def _ends(file: GGUFFile, vocab: dict[str, int], types: list[int]) -> tuple[int, ...]:
    """What the file names as an end, and for Qwen's chat models what it implies."""
    named = [special_token(file, kind) for kind in END_KINDS]
    ids = [token for token in named if token is not None]
    is_chatml = "<|im_end|>" in (file.get("tokenizer.chat_template", str) or "")
    if is_chatml and (file.get("general.architecture", str) or "").startswith("qwen"):
        both = [vocab[text] for text in CHATML_ENDS if text in vocab]
        if set(ids) & set(both):
            ids += [token for token in both if token < len(types) and types[token] == CONTROL]
    return tuple(dict.fromkeys(ids))


def _byte_level_bpe(file: GGUFFile, vocab: dict[str, int]) -> tuple[Tokenizer, bool]:
    """GPT-2's byte-level BPE with the file's word splitting, and whether such models start with a bos token."""
    pre = file.get("tokenizer.ggml.pre", str) or "default"
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in file.array("tokenizer.ggml.merges", str))]
    if not merges:
        raise ModelFileError(f"{file.path} holds no tokenizer.ggml.merges: fetch a GGUF file with its vocabulary")
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    backend.decoder = decoders.ByteLevel()
    if pre in PRE_SPLITS:
        split = pre_tokenizers.Split(Regex(PRE_SPLITS[pre]), behavior="isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        if pre == "qwen2":
            backend.normalizer = normalizers.NFC()
    elif pre == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    elif pre in ("default", "gpt-2"):
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        raise UnsupportedModelError(
            f"{file.path}: GGUF pre-tokenizer {pre!r:.80} is not implemented (known: smollm, qwen2, llama-bpe, gpt-2): "
            "use the model's folder instead"
        )
    return backend, pre == "llama-bpe"


def _sentencepiece_bpe(file: GGUFFile, vocab: dict[str, int], tokens: list[str], types: list[int]) -> Tokenizer:
    """Llama 1/2's SentencePiece BPE: GGUF keeps no merges, so every split of a piece into two pieces becomes one, by score."""
    scores = file.array("tokenizer.ggml.scores", float)
    if len(scores) != len(tokens):
        raise ModelFileError(
            f"{file.path} holds no tokenizer.ggml.scores for its tokens: fetch a GGUF file with its vocabulary"
        )
    pieces = {token: index for token, index in vocab.items() if index >= len(types) or types[index] == NORMAL}
    unknown = next((tokens[index] for index, kind in enumerate(types) if kind == UNKNOWN), None)
    backend = Tokenizer(
        models.BPE(vocab=vocab, merges=_merges_by_score(pieces, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    replace = normalizers.Replace(" ", "▁")
    after = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.get("tokenizer.ggml.add_space_prefix", bool) is not False:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace])
        after.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = replace
    backend.decoder = decoders.Sequence(after)
    return backend


def _merges_by_score(pieces: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """All (left, right) whose union is a piece, best score first; Transformers' `generate_merges` orders ties this way too."""
    ranked = []
    for piece, index in pieces.items():
        splits = [(piece[:at], piece[at:]) for at in range(1, len(piece)) if piece[:at] in pieces and piece[at:] in pieces]
        ranked += [(-scores[index], index, pieces[left], pieces[right], left, right) for left, right in splits]
    return [(left, right) for *_, left, right in sorted(ranked)]


def _add_post_processor(backend: Tokenizer, file: GGUFFile, tokens: list[str], adds_bos: bool) -> None:
    """Wrap encoded text in bos and eos where the file asks for it."""
    wrap = {}
    for kind, default in (("bos", adds_bos), ("eos", False)):
        index, is_added = special_token(file, kind), file.get(f"tokenizer.ggml.add_{kind}_token", bool)
        if index is not None and (default if is_added is None else is_added):
            wrap[kind] = (tokens[index], index)
    if wrap:
        single = [wrap[kind][0] if kind in wrap else None for kind in ("bos", "eos")]
        template = [piece for piece in (single[0], "$A", single[1]) if piece]
        backend.post_processor = processors.TemplateProcessing(single=template, pair=None, special_tokens=list(wrap.values()))
