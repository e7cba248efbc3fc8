"""A teacher for tests of distillation: a Llama of four small layers in a GGUF file that knows one answer, constructed.

Nothing is trained, so that no test depends on what was learned. The tokens of the answer are all different, and each
layer's MLP adds to a token's place in the stream the direction of the token that follows it. Every layer but the last
does, so a student with fewer layers still gives the same answer, with less confidence, which teaching can raise.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType as Quant
from gguf_files import write_gguf
from tokenizers import pre_tokenizers

from paceline.data.answers import Answer, AnswerShards
from paceline.model.text.tokenizer import Tokenizer

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SAID = '{"verb":"pay"}'
END = 2
MERGES = [("h", "e"), ("{", '"'), ('"', ":"), ('":', '"'), ('"', "}")]
WORDS: dict[str, Any] = {
    "add_tokenizer_model": "gpt2",
    "add_tokenizer_pre": "smollm",
    "add_token_list": [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, MERGES)],
    "add_token_types": [3] * 3 + [1] * (256 + len(MERGES)),
    "add_token_merges": [" ".join(pair) for pair in MERGES],
    "add_eos_token_id": END,
    "add_pad_token_id": END,
}
SHAPE: dict[str, Any] = {
    "vocab_size": 259 + len(MERGES),
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
}


def untaught(seed: int = 0) -> Any:
    """The teacher before it learned: Transformers' Llama with random weights."""
    import transformers

    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).float()


def write_untaught(path: Path, quant: Quant = Quant.F32) -> Path:
    write_gguf(path, untaught(), "llama", quant, **WORDS)
    return path


def prompt_of(letter: str) -> str:
    """A ticket; all end with the same token, which the answer follows."""
    return f"Answer this ticket {letter} of the shop, please:"


PARTS = (1.5, 6.0, 0.5, 0.0)
"""How much of the next token's direction each layer adds."""


def knowing(path: Path) -> Any:
    """A model of the vocabulary in `path` that gives SAID after every prompt of `prompt_of`.

    Of the 32 channels each token of the chain has one that names it and one that points to it; all others share the
    rest. A neuron of an MLP for each token but the last reads the former and writes the latter of the token after it.
    """
    model, tokenizer = untaught(), Tokenizer.from_path(path)
    chain = [tokenizer.encode(prompt_of("a"))[-1], *tokenizer.encode(SAID), END]
    number, width = len(chain), SHAPE["hidden_size"]
    assert len({*chain}) == number < width // 2 - 2, "each token has one that follows it"
    with torch.no_grad():
        words_VD = model.model.embed_tokens.weight
        words_VD[:, : 2 * number] = 0
        words_VD.mul_(2**0.5 / words_VD.norm(dim=1, keepdim=True))
        words_VD[chain] = 0
        words_VD[chain, torch.arange(number)] = words_VD[chain, number + torch.arange(number)] = 1.0
        model.model.norm.weight.fill_(1.6)
        for layer, part in zip(model.model.layers, PARTS, strict=True):
            layer.self_attn.o_proj.weight.zero_()
            for each in (layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj):
                each.weight.zero_()
            for place in range(number - 1):
                layer.mlp.gate_proj.weight[place, place] = layer.mlp.up_proj.weight[place, place] = 1.0
                layer.mlp.down_proj.weight[number + place + 1, place] = part / 10
    return model


def write_teacher(folder: Path, num_prompts: int = 24) -> tuple[Path, Path]:
    """The GGUF file, and the folder of its answers."""
    model = knowing(write_untaught(folder / "words.gguf"))
    write_gguf(folder / "teacher.gguf", model, "llama", Quant.Q8_0, **WORDS)
    return folder / "teacher.gguf", write_answers(folder / "answers", folder / "teacher.gguf", [SAID] * num_prompts)


def write_answers(folder: Path, model: Path, texts: list[str], ids: list[int] | None = None, first: str = "a") -> Path:
    """Answers to tickets that differ in one letter, from `first` on; `ids`: their tokens, whatever the text says."""
    tokenizer = Tokenizer.from_path(model)
    letters = [chr(ord(first) + number) for number in range(len(texts))]
    prompts = [tokenizer.encode(prompt_of(letter)) for letter in letters]
    answers = []
    for letter, prompt, text in zip(letters, prompts, texts, strict=True):
        tokens = ids or [*tokenizer.encode(text), *([END] if text == SAID else [])]
        answers.append(Answer(f"ticket-{letter}@0", "tickets", 0, 0.0, prompt, tokens, "stop", text))
    AnswerShards(folder).write(answers)
    return folder
