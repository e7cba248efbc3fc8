"""The tokenizer against Transformers and a plain SentencePiece reference; chat templates in their sandbox; streaming
text."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from doubles import ByteTokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.errors import ModelFileError, ModelNotFoundError, PromptError, UnsupportedModelError
from paceline.hub import resolve
from paceline.model.gguf.package import finish
from paceline.model.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow
TEXTS = [
    "Hello, world!",
    "  two  spaces\n\n\nthree lines\t\tand tabs \r\n",
    "1234567 3.14 ½³ ٣",
    "naïve café 你好世界 こんにちは 🏳️‍🌈👩🏽‍🚀 e\u0301",
    "it's we'll I'M don't",
    "def f(x):\n\treturn x**2  # squared",
    "<|im_start|>user\nhi<|im_end|> <|endoftext|>",
    "",
    " ",
    "\u0000\ufffd\u200b",
]
MESSAGES = [{"role": "user", "content": "What is 2+2?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in's tokenizer as Transformers saves it."""
    from transformers import PreTrainedTokenizerFast

    stored, folder = Tokenizer.from_path(resolve("smollm2-135m")), tmp_path_factory.mktemp("smollm")
    words = {"clean_up_tokenization_spaces": False, "chat_template": stored.chat_template, **stored.special_tokens}
    PreTrainedTokenizerFast(tokenizer_object=stored.backend, **words).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": list(stored.eos_token_ids)}))
    return folder


@pytest.fixture(scope="module")
def smollm(folder: Path) -> Tokenizer:
    return Tokenizer.from_path(folder)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def test_same_ids_as_transformers(smollm: Tokenizer, reference: Any) -> None:
    for text in TEXTS:
        ids = smollm.encode(text)
        assert ids == reference(text).input_ids
        assert smollm.decode(ids, skip_special=False) == text == reference.decode(ids)
    assert smollm.vocab_size == len(reference) == 49152
    assert smollm.eos_token_ids == (reference.eos_token_id,) == (2,)


def test_any_text_as_in_transformers(smollm: Tokenizer, reference: Any) -> None:
    """Not always the same text again: the real vocabulary lacks a few bytes, such as 0xF1."""
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    every = [*range(0xD800), *range(0xE000, 0x110000)]  # all but surrogates, which are no text
    for _ in range(60):
        pool = rng.choice([range(0x20, 0x7F), range(0x250), every])
        text = "".join(map(chr, rng.choices(pool, k=rng.randrange(60))))
        ids = smollm.encode(text)
        assert ids == reference(text).input_ids, f"seed {seed}"
        assert smollm.decode(ids, skip_special=False) == reference.decode(ids), f"seed {seed}"


def test_smollm_words() -> None:
    """The real SmolLM2 splits every digit off, and its known ids of a known prompt."""
    tokenizer = Tokenizer.from_path(resolve("smollm2-135m"))
    assert tokenizer.encode("<|im_start|>user\nHello<|im_end|>") == [1, 4093, 198, 19556, 2]
    assert [tokenizer.decode([token]) for token in tokenizer.encode("in 2024")] == ["in", " ", "2", "0", "2", "4"]


def test_folder_equals_its_gguf(smollm: Tokenizer) -> None:
    from_gguf = Tokenizer.from_path(resolve("smollm2-135m"))
    assert all(from_gguf.encode(text) == smollm.encode(text) for text in TEXTS)
    assert from_gguf.chat_template == smollm.chat_template
    assert (from_gguf.eos_token_ids, from_gguf.special_tokens) == (smollm.eos_token_ids, smollm.special_tokens)


def test_chat_as_in_transformers(smollm: Tokenizer, reference: Any) -> None:
    conversation = [
        {"role": "system", "content": "Be brief."},
        *MESSAGES,
        {"role": "assistant", "content": "4"},
        *MESSAGES,
    ]
    for messages in (MESSAGES, conversation):
        for prompt in (True, False):
            expected = reference.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=False)
            assert smollm.apply_chat_template(messages, prompt) == expected
        assert (
            smollm.encode_chat(messages)
            == reference.apply_chat_template(messages, add_generation_prompt=True).input_ids
        )


def with_template(tokenizer: Tokenizer, template: str | None) -> Tokenizer:
    return Tokenizer(tokenizer.backend, chat_template=template, special_tokens=tokenizer.special_tokens)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ bos_token }}{{ messages[0]['content'] }}", "<|im_start|>What is 2+2?"),
        (
            "{% for m in messages %}\n  {% if true %}\nx\n  {% endif %}\n{% endfor %}\n",
            "x\n",
        ),  # trim_blocks, lstrip_blocks
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% generation %}a{{ messages | length }}{% endgeneration %}", "a1"),
        ("{% if tools %}t{% else %}none{% endif %}", "none"),
        ("{{ '-' * 3 }}{{ 2 * 3 }}", "---6"),
        ("{{ strftime_now('%Y') | length }}", "4"),
    ],
)
def test_template_extras(template: str, expected: str, smollm: Tokenizer) -> None:
    assert with_template(smollm, template).apply_chat_template(MESSAGES) == expected


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{% if %}",
        "{{ messages[0].content.undefined.deeper }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('id') }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ 1 / 0 }}",
        "{{ 'a' + 1 }}",
        "{{ 'a' * 10 ** 12 }}",
        "{{ 'a' * 1000000000000 }}",
        "{% for i in range(1000000000) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% include '/etc/passwd' %}",
        "{{ [1][7] | int }}{{ messages | nofilter }}",
    ],
)
def test_bad_templates_are_one_line(template: str, smollm: Tokenizer) -> None:
    with pytest.raises(PromptError, match="chat template failed") as caught:
        with_template(smollm, template).apply_chat_template(MESSAGES)
    assert "\n" not in str(caught.value)


def test_no_template(smollm: Tokenizer) -> None:
    with pytest.raises(PromptError, match="no chat template: choose a model that has one"):
        with_template(smollm, None).encode_chat(MESSAGES)


@pytest.mark.parametrize(
    "messages", [[], ["hi"], [{"role": "user"}], [{"content": "x"}], [{"role": 1, "content": "x"}]]
)
def test_bad_messages(messages: Any, smollm: Tokenizer) -> None:
    with pytest.raises(PromptError):
        smollm.encode_chat(messages)


def test_lone_surrogate(smollm: Tokenizer) -> None:
    with pytest.raises(PromptError, match="Unicode"):
        smollm.encode("\ud800")


def test_where_templates_come_from(smollm: Tokenizer, tmp_path: Path) -> None:
    smollm.backend.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.from_path(tmp_path).chat_template is None
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    config = {"chat_template": named, "eos_token": {"content": "<|im_end|>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_path(tmp_path)
    assert (tokenizer.chat_template, tokenizer.eos_token_ids) == ("d", (2,))
    (tmp_path / "chat_template.jinja").write_text("from the file")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0, 2]}')
    tokenizer = Tokenizer.from_path(tmp_path)
    assert (tokenizer.chat_template, tokenizer.eos_token_ids) == ("from the file", (0, 2))


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError):
        Tokenizer.from_path(tmp_path / "nowhere")
    with pytest.raises(ModelFileError, match=r"tokenizer\.json is missing"):
        Tokenizer.from_path(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelFileError, match=r"tokenizer\.json is damaged"):
        Tokenizer.from_path(tmp_path)


def test_stream_never_splits_a_character(smollm: Tokenizer) -> None:
    stream, text = smollm.stream(), "a 👩🏽‍🚀 你好 café"
    pieces = [stream.push([token]) for token in smollm.encode(text)]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "" in pieces
    assert "".join(pieces) + stream.flush() == text


def test_stream_flushes_an_unfinished_character(smollm: Tokenizer) -> None:
    stream, ids = smollm.stream(), smollm.encode("ok🚀")[:-1]
    assert stream.push(ids) == "ok"
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


def streamed(tokenizer: Tokenizer, ids: list[int], rng: random.Random, skip_special: bool = True) -> str:
    stream, pieces = tokenizer.stream(skip_special), []
    while ids:
        size = rng.choice((1, 1, 1, 2, 5, 17))
        pieces.append(stream.push(ids[:size]))
        ids = ids[size:]
    return "".join(pieces) + stream.flush()


@pytest.mark.parametrize("skip_special", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_stream_equals_decode(seed: int, skip_special: bool, smollm: Tokenizer) -> None:
    """Any ids, also runs of broken bytes and special tokens, in any chunks."""
    rng = random.Random(seed)
    raw_bytes = [token for token in range(17, 300) if smollm.decode([token]) == "\ufffd"]
    assert len(raw_bytes) > 100
    pools = [range(49152), raw_bytes, range(17), smollm.encode("".join(TEXTS))]
    ids = [rng.choice(pools[rng.randrange(4 if seed % 2 else 2)]) for _ in range(300)]
    assert streamed(smollm, ids, rng, skip_special) == smollm.decode(ids, skip_special)


@pytest.mark.parametrize("token", [17 + 200, 0, 19556])
def test_stream_work_per_token_is_bounded(token: int, smollm: Tokenizer) -> None:
    """Neither broken bytes nor special tokens without text nor words make the window grow."""
    broken = next(index for index in range(100, 300) if smollm.decode([index]) == "\ufffd")
    stream = smollm.stream()
    for _ in range(400):
        stream.push([broken if token == 217 else token])
        assert len(stream._pending) + len(stream._context) < 24


def write_tokenizer_gguf(path: Path, model: str, tokens: list[str], **metadata: Any) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    for key, value in metadata.items():
        getattr(writer, key)(value)
    finish(writer)
    return path


def byte_level_tables(tokenizer: Tokenizer) -> tuple[list[str], list[str]]:
    model = json.loads(tokenizer.backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return tokens, [" ".join(pair) for pair in model["merges"]]


@pytest.mark.parametrize("pre", ["qwen2", "llama-bpe", "gpt-2", "default"])
def test_pre_tokenizers(pre: str, smollm: Tokenizer, tmp_path: Path) -> None:
    """Same vocabulary, other word splitting: against the pre-tokenizer Transformers builds for that model."""
    from transformers import GPT2Tokenizer, Qwen2Tokenizer

    tokens, merges = byte_level_tables(smollm)
    path = write_tokenizer_gguf(
        tmp_path / "t.gguf", "gpt2", tokens, add_tokenizer_pre=pre, add_token_merges=merges, add_bos_token_id=1
    )
    ours = Tokenizer.from_path(path)
    if pre == "llama-bpe":
        assert ours.encode("a")[0] == 1  # these models start with bos unless the file says otherwise
        assert ours.encode("a", add_special_tokens=False)[0] != 1
        words = ours.backend.pre_tokenizer.pre_tokenize_str("12345 can't\n\n x")
        assert [word for word, _ in words] == ["123", "45", "Ġcan", "'t", "ĊĊ", "Ġx"]
        return
    kind: Any = Qwen2Tokenizer if pre == "qwen2" else GPT2Tokenizer
    theirs = kind(
        vocab={token: index for index, token in enumerate(tokens)}, merges=[tuple(merge.split()) for merge in merges]
    )
    for text in TEXTS:
        if "<|" not in text:
            assert ours.encode(text) == theirs(text).input_ids


PIECES = {"▁": -1.0, "h": -9.0, "e": -9.5, "l": -9.1, "o": -9.2, "w": -9.3, "r": -9.4, "d": -9.6, "1": -9.7}
MERGED = {
    "he": -2.0,
    "ll": -3.0,
    "▁he": -4.0,
    "llo": -5.0,
    "hell": -3.5,
    "▁hello": -6.0,
    "lo": -2.5,
    "wo": -4.5,
    "▁▁": -1.5,
    "▁w": -7.0,
}


def sentencepiece_reference(text: str, scores: dict[str, float]) -> list[str]:
    """llama.cpp's algorithm: join the neighbouring pair of the best-scored piece, leftmost first, until none is
    left."""
    symbols = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [(-scores[a + b], i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in scores]
        if not pairs:
            return symbols
        _, at = min(pairs)
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]


@pytest.fixture
def sentencepiece(tmp_path: Path) -> Tokenizer:
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    scores = PIECES | MERGED
    tokens = ["<unk>", "<s>", "</s>", *byte_tokens, *scores]
    types = [2, 3, 3] + [6] * 256 + [1] * len(scores)
    values = [0.0] * 259 + list(scores.values())
    metadata = {"add_token_scores": values, "add_token_types": types, "add_bos_token_id": 1, "add_eos_token_id": 2}
    return Tokenizer.from_path(write_tokenizer_gguf(tmp_path / "spm.gguf", "llama", tokens, **metadata))


@given(text=st.text(alphabet="helowrd1 ", max_size=25))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_sentencepiece_merges(sentencepiece: Tokenizer, text: str) -> None:
    ids = sentencepiece.encode(text)
    assert ids[0] == 1
    expected = sentencepiece_reference(text, PIECES | MERGED) if text else []
    assert [sentencepiece.backend.id_to_token(token) for token in ids[1:]] == expected
    assert sentencepiece.decode(ids) == text


def test_sentencepiece_bytes_and_streams(sentencepiece: Tokenizer) -> None:
    text = "hello 你好 🚀 world"
    ids = sentencepiece.encode(text)
    assert sentencepiece.decode(ids) == text
    for size in range(1, len(ids) + 1):  # also cuts within a character
        stream = sentencepiece.stream()
        assert "".join(stream.push(ids[at : at + size]) for at in range(0, len(ids), size)) == text
    stream = sentencepiece.stream()
    assert "".join(stream.push([token]) for token in ids) == text


def test_sentencepiece_stream_drops_one_first_space_behind_hidden_tokens(sentencepiece: Tokenizer) -> None:
    space, hidden = sentencepiece.backend.token_to_id("▁"), 2
    for ids in ([hidden, space, space], [hidden, space, hidden, space], [space, hidden, space]):
        stream = sentencepiece.stream()
        assert "".join(stream.push([token]) for token in ids) == sentencepiece.decode(ids) == " "


def test_sentencepiece_tokens_have_their_leading_spaces(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode("hello 你 world", add_special_tokens=False)
    assert b"".join(map(sentencepiece.token_bytes, ids)) == " hello 你 world".encode()
    assert sentencepiece.token_bytes(2) == b"</s>"


def test_sentencepiece_broken_bytes(sentencepiece: Tokenizer) -> None:
    """A broken byte after a whole character spoils nothing that was returned, and the window stays small."""
    stream, whole = sentencepiece.stream(), sentencepiece.encode("hello你", add_special_tokens=False)
    hello, you, broken = whole[:-3], whole[-3:], 3 + 0xFF
    assert stream.push(hello) + stream.push(you) == "hello你"
    assert stream.push([broken]) == ""
    assert stream.push(hello) == "\ufffd hello"
    for _ in range(100):
        assert set(stream.push([broken])) <= {"\ufffd"}
        assert len(stream._pending) + len(stream._context) < 24


def test_unknown_gguf_tokenizers(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="'bert'"):
        Tokenizer.from_path(write_tokenizer_gguf(tmp_path / "a.gguf", "bert", ["a"]))
    strange = write_tokenizer_gguf(
        tmp_path / "b.gguf", "gpt2", ["a", "b", "ab"], add_tokenizer_pre="strange", add_token_merges=["a b"]
    )
    with pytest.raises(UnsupportedModelError, match="'strange'"):
        Tokenizer.from_path(strange)
    with pytest.raises(ModelFileError, match="merges"):
        Tokenizer.from_path(write_tokenizer_gguf(tmp_path / "c.gguf", "gpt2", ["a"]))
    with pytest.raises(ModelFileError, match="scores"):
        Tokenizer.from_path(write_tokenizer_gguf(tmp_path / "d.gguf", "llama", ["a"]))


def test_a_token_has_its_bytes_also_as_a_piece_of_a_character() -> None:
    text = "Emoji: 🎉🔥🚀 สวัส ü\n"
    for tokenizer in (ByteTokenizer(), Tokenizer.stand_in(300)):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    pieces = tokenizers.Tokenizer(tokenizers.models.BPE({"<0xF0>": 0, "<0x9F>": 1, "a": 2}, []))
    assert [Tokenizer(pieces).token_bytes(token) for token in range(3)] == [b"\xf0", b"\x9f", b"a"]
