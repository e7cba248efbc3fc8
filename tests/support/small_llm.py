"""LLMs for tests of training: a talker over a fake target, and a tiny random model in a folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast
from weakref import WeakKeyDictionary

import tokenizers
import torch
from doubles import ByteTokenizer, FakeTarget
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor

from paceline.config import EngineConfig
from paceline.draft.base import NoDrafter
from paceline.engine.llm import LLM
from paceline.model.checkpoint import load_config, random_tensors
from paceline.model.target import Target

EOS = 257
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Talker(FakeTarget):
    """Says small letters and spaces, and comes to an end now and then."""

    def __init__(self, *, eos_bonus: float = 2.0, **options: Any) -> None:
        self.spoken = torch.full((258,), -60.0)
        self.spoken[list(b"abcdefghijklmnopqrstuvwxyz      ")] = 0.0
        self.spoken[ord(" ")] = 3.0
        self.spoken[EOS] = eos_bonus
        super().__init__(vocab_size=258, sharpness=2.0, **options)

    def logits_after(self, tokens: Sequence[int]) -> Tensor:
        return super().logits_after(tokens) + self.spoken


class Parrot(FakeTarget):
    """Says the same after every prompt, which ends with `cue`."""

    def __init__(self, cue: str, answer: list[int]) -> None:
        self.cue, self.said = list(cue.encode()), answer
        super().__init__(vocab_size=258, max_len=256)

    def logits_after(self, tokens: Sequence[int]) -> Tensor:
        begin = max(at for at in range(len(tokens)) if list(tokens[at : at + len(self.cue)]) == self.cue) + len(
            self.cue
        )
        return 100.0 * torch.nn.functional.one_hot(torch.tensor(self.said[len(tokens) - begin]), 258).float()


def fake_llm(target: Target | None = None, *, tokenizer: Any = None, model: str = "fake", **settings: Any) -> LLM:
    """A real LLM object around a fake target, or a tiny one. `settings`: further fields of its EngineConfig."""
    llm = LLM.__new__(LLM)
    usual: dict[str, Any] = {"drafter": "none", "device": "cpu", "dtype": "float32", "prefill_chunk": 16}
    llm.config = EngineConfig(model, **{**usual, "speculate": "auto", **settings})
    llm.tokenizer = cast(Any, tokenizer or ByteTokenizer())
    llm.target, llm.drafter = target or Talker(), NoDrafter()
    llm.router, llm.allow_lossy, llm.max_tv = None, False, None
    llm.pass_costs, llm._planners, llm._inboxes = None, WeakKeyDictionary(), {}
    llm.engine = llm.new_engine(llm.drafter)
    return llm


def tiny_model(folder: Path, max_position: int = 512) -> Path:
    """A random Llama of two layers, with a byte-level tokenizer and a ChatML template."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder)
    shape = {"vocab_size": 258, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": max_position}
    (folder / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama", **shape})
    )
    save_file(
        dict(random_tensors(load_config(folder), seed=1)), folder / "model.safetensors", metadata={"format": "pt"}
    )
    return folder


def write_tokenizer(folder: Path) -> None:
    """Bytes and the two marks of ChatML: 258 tokens."""
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[]
        )
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    backend.save(str(folder / "tokenizer.json"))
    special = {"eos_token": "<|im_end|>", "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
