"""One prompt on its way to its answers, and what becomes of all of them: the nouns of `regenerate.py`."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from pathlib import Path

from paceline.data.answers import Answer
from paceline.data.prompts import Message, Prompt
from paceline.data.rows import Dropped
from paceline.train.config import AnswerConfig
from paceline.types import SamplingParams


@dataclass(slots=True)
class Conversation:
    """One prompt on its way through the engine at one temperature."""

    prompt: Prompt
    key: str
    params: SamplingParams
    messages: list[Message]
    prompt_ids: list[int] = field(default_factory=list)
    """Token ids of `messages`, ready for the next answer."""
    answers: list[Answer] = field(default_factory=list)

    def go_on(self, answer: Answer) -> bool:
        """After this answer comes the user's next turn, if there is one; whether there is."""
        self.answers.append(answer)
        if len(self.answers) >= len(self.prompt.turns):
            return False
        turn = self.prompt.turns[len(self.answers)]
        self.messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": turn}]
        return True


@dataclass(slots=True)
class Regenerated:
    """What one process did."""

    answers: Path
    """Folder of the answers, those of all processes."""
    num_answers: int = 0
    num_tokens: int = 0
    """Tokens the target wrote."""
    wall_s: float = 0.0
    tokens_per_s: float = 0.0
    num_found: int = 0
    """Conversations that an earlier run had finished."""
    num_too_long: int = 0
    num_tokens_too_long: int = 0
    """Length of the longest prompt left out."""
    refused: Dropped = field(default_factory=Dropped)
    """Conversations that the target cannot be asked, by reason."""
    num_cut_short: int = 0
    """Conversations whose later turns were not asked: an answer had not come to its end, or the next prompt was too
    long or refused."""
    lost: dict[str, int] = field(default_factory=dict)
    """Answers of a server elsewhere that were left out, by reason: their tokens could not be known."""


def asked_of(prompts: list[Prompt], answering: AnswerConfig) -> dict[str, tuple[Prompt, float]]:
    """Key -> prompt and temperature, of every conversation that these prompts are asked for; one of a key."""
    return {
        key_of(prompt, temperature, sample): (prompt, temperature)
        for prompt in prompts
        for temperature in answering.temperatures
        for sample in range(answering.samples if temperature else 1)
    }


def key_of(prompt: Prompt, temperature: float, sample: int = 0) -> str:
    """Names a conversation. The text counts too: two prompts may carry one id, and a file may change between runs."""
    before = prompt.messages[:-1]
    text = repr((before, prompt.turns) if before else prompt.token_ids or prompt.turns)
    if prompt.tools or prompt.grammar or (prompt.messages and prompt.messages[-1]["role"] != "user"):
        text += repr((prompt.messages[-1:], prompt.tools, prompt.grammar))
    if prompt.variables:
        text += repr(prompt.variables)
    return f"{prompt.source}/{prompt.id}#{zlib.crc32(text.encode()):08x}@{temperature:g}" + (f"~{sample}" if sample else "")
