"""A fake target and drafters made by hand, for tests of benchmarks."""

from __future__ import annotations

from typing import Any, cast

from doubles import ByteTokenizer, FakeTarget, ScriptedDrafter

from paceline.config import EngineConfig
from paceline.draft.base import Drafter, NoDrafter
from paceline.engine.engine import Engine


class FakeLLM:
    """The part of an LLM that benchmarks and evaluations use."""

    num_made = 0

    def __init__(self, model: str = "fake", *, max_batch: int = 4, max_len: int = 256, **settings: Any) -> None:
        FakeLLM.num_made += 1
        self.target = FakeTarget(vocab_size=258, num_rows=max_batch, max_len=max_len)
        self.tokenizer = ByteTokenizer()
        self.config = EngineConfig(model=model, device="cpu", dtype="float32")
        self.cache_bytes, self.pass_costs = 0, None
        self.drafter = NoDrafter()
        self.engine = self.new_engine(self.drafter)

    @classmethod
    def of(cls, config: EngineConfig) -> FakeLLM:
        return cls(config.model, max_batch=config.max_batch)

    def record_passes(self, engine: Engine) -> None:
        engine.record()

    def new_engine(self, drafter: Drafter) -> Engine:
        return Engine(self.target, cast(Any, self.tokenizer), drafter, eos_token_ids=(257,))

    def encode_chat(self, messages: list[dict[str, str]], tools: Any = (), variables: Any = None) -> list[int]:
        return self.tokenizer.encode_chat(messages, variables, tools)


def make_drafter(name: str, target: FakeTarget, **options: Any) -> Drafter:
    if name == "none":
        return NoDrafter()
    return ScriptedDrafter(target, 4, mode="adversarial") if name == "bad" else ScriptedDrafter(target, 4, accuracy=0.9)
