"""A teacher for tests of distillation: a Llama of four small layers in a GGUF file that has learned one answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType as Quant
from gguf_files import write_gguf
from tokenizers import pre_tokenizers

from paceline.model.tokenizer import Tokenizer
from paceline.train.answers import Answer, AnswerShards

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SAID = '{"action": "refund", "id": "RF-204"}'
END = 2
WORDS: dict[str, Any] = {
    "add_tokenizer_model": "gpt2",
    "add_tokenizer_pre": "smollm",
    "add_token_list": [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "he"],
    "add_token_types": [3] * 3 + [1] * 257,
    "add_token_merges": ["h e"],
    "add_eos_token_id": END,
    "add_pad_token_id": END,
}
SHAPE: dict[str, Any] = {
    "vocab_size": 260, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "tie_word_embeddings": True, "rms_norm_eps": 1e-5,
}  # fmt: skip


def untaught(seed: int = 0) -> Any:
    """The teacher before it learned: Transformers' Llama with random weights."""
    import transformers

    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).float()


def write_untaught(path: Path, quant: Quant = Quant.F32) -> Path:
    write_gguf(path, untaught(), "llama", quant, **WORDS)
    return path


def write_teacher(folder: Path, num_prompts: int = 24) -> tuple[Path, Path]:
    """The GGUF file, and the folder of its answers."""
    path, model = write_untaught(folder / "words.gguf"), untaught()
    tokenizer = Tokenizer.from_path(path)
    said = [*tokenizer.encode(SAID), END]
    prompts = [tokenizer.encode(f"Answer this ticket of the shop, please: {chr(97 + number)}") for number in range(num_prompts)]
    ids_BT = torch.tensor([[*prompt, *said] for prompt in prompts])
    optimiser = torch.optim.AdamW(model.parameters(), 1e-2)
    first = len(prompts[0])
    for step in range(300):
        for group in optimiser.param_groups:
            group["lr"] = 1e-2 * min(1.0, (step + 1) / 20)
        logits = model(ids_BT).logits[:, first - 1 : -1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids_BT[:, first:].flatten())
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        if loss.item() < 0.002:
            break
    assert loss.item() < 0.01
    write_gguf(folder / "teacher.gguf", model, "llama", Quant.Q8_0, **WORDS)
    answers = [
        Answer(f"ticket-{number}@0", "tickets", 0, 0.0, prompt, said, "stop", SAID) for number, prompt in enumerate(prompts)
    ]
    AnswerShards(folder / "answers").write(answers)
    return folder / "teacher.gguf", folder / "answers"


def write_answers(folder: Path, model: Path, said: list[str], ids: list[int] | None = None, first: str = "a") -> Path:
    """Answers to tickets that differ in one letter, from `first` on; `ids`: their tokens, whatever the text says."""
    tokenizer = Tokenizer.from_path(model)
    letters = [chr(ord(first) + number) for number in range(len(said))]
    prompts = [tokenizer.encode(f"Answer this ticket of the shop, please: {letter}") for letter in letters]
    told = []
    for letter, prompt, text in zip(letters, prompts, said, strict=True):
        tokens = ids or [*tokenizer.encode(text), *([END] if text == SAID else [])]
        told.append(Answer(f"ticket-{letter}@0", "tickets", 0, 0.0, prompt, tokens, "stop", text))
    AnswerShards(folder).write(told)
    return folder
