"""Encodes prompts as token ids for the target, by its chat template or as plain text (--raw). Finds unusable prompts.

    encoder = PromptEncoder(TokenizerOnly(tokenizer), AnswerConfig())
    encoder.first_ids(prompt)                        # raises RowError for a prompt that this target cannot answer
    encoder.examine(prompts, dropped)                # token counts; the others are counted in `dropped`

Used by `regenerate`, and by the plan of `train`, which needs only the tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from paceline.data.prompts import Message, Prompt
from paceline.data.rows import Dropped, RowError
from paceline.errors import ConfigError, PromptError, refuse, way_out
from paceline.train.config import AnswerConfig

if TYPE_CHECKING:
    from paceline.engine.llm import LLM
    from paceline.model.text.tokenizer import Tokenizer

REFUSED, TOO_LONG = "refused by the target's template", "longer than max_prompt_tokens"
NO_TEMPLATE = "the target has no chat template: --raw asks every prompt as it stands, as base models are asked"


@dataclass
class TokenizerOnly:
    """Replaces an `LLM` where only its tokenizer is needed; encodes conversations exactly as `LLM.encode_chat` does."""

    tokenizer: Tokenizer
    introduction: str = ""
    """Text for the user that says where the target runs."""

    def close(self) -> None:
        """Does nothing: only `RemoteLLM` has a connection to close."""

    def encode_chat(
        self,
        messages: list[Message],
        tools: Iterable[Message] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        from paceline.engine.llm import LLM  # imports PyTorch, which is needed only here

        return LLM.encode_chat(cast(LLM, self), messages, tools, variables)


class PromptEncoder:
    """Encodes prompts as the target's token ids. It adds the tools, template variables and opening (first messages of
    every conversation) of `config`. With `config.raw`, a prompt is plain text, without the chat template. Raises
    ConfigError if `raw` is combined with an opening, tools or variables."""

    def __init__(self, llm: LLM | TokenizerOnly, config: AnswerConfig, vocab_size: int | None = None) -> None:
        """`vocab_size`: rows of the target's embedding, if known; else the tokenizer's vocabulary size is used."""
        self.llm, self.config = llm, config
        self._vocab_size = vocab_size
        self.opening, self.tools = config.read_opening(), config.read_tools()
        self.variables = config.template_variables()
        has_chat = bool(self.opening or self.tools or self.variables)
        needs_template = "system, before, tools and variables need the chat template: leave --raw out"
        refuse(ConfigError, (config.raw and has_chat, needs_template))

    def messages_of(self, prompt: Prompt) -> list[Message]:
        """Returns the messages of a conversation before the first answer: the opening that `config` sets, then the
        prompt's own messages. A prompt with its own system message, or without messages, gets no opening."""
        is_own = not prompt.messages or prompt.messages[0]["role"] == "system"
        return prompt.messages if is_own else self.opening + prompt.messages

    def first_ids(self, prompt: Prompt) -> list[int]:
        """Returns the token ids of a prompt with its opening, up to the first answer. Raises RowError if the chat
        template rejects the prompt, or for a token id that the target does not have."""
        return self.encode(prompt, self.messages_of(prompt))

    def encode(self, prompt: Prompt, messages: list[Message]) -> list[int]:
        """Returns the token ids of the conversation `messages`, rendered by the chat template. `prompt`: the prompt
        with which it began; if the prompt has tools, they replace those of the config. `messages` is not used for a
        prompt that is given as token ids, which are returned unchanged, nor with `raw`, which encodes the prompt's text
        alone. Raises RowError if the template rejects the messages, or for a token id that the target does not have."""
        where = prompt.where or f"{prompt.source}, prompt {prompt.id}"
        if prompt.token_ids:
            if max(prompt.token_ids) >= self.vocab_size:
                raise RowError(
                    f"{where}: token {max(prompt.token_ids)} is none of the target's {self.vocab_size} tokens",
                    "with tokens that the target does not have",
                )
            return list(prompt.token_ids)
        try:
            if self.config.raw:
                return self._raw_ids(prompt)
            with way_out("use --raw to ask prompts as they stand"):
                variables = self.variables | dict(prompt.variables)
                return self.llm.encode_chat(messages, prompt.tools or self.tools, variables)
        except PromptError as error:
            raise RowError(f"{where}: {error}", REFUSED) from error

    @property
    def vocab_size(self) -> int:
        return max(self._vocab_size or 0, self.llm.tokenizer.vocab_size)

    def _raw_ids(self, prompt: Prompt) -> list[int]:
        if len(prompt.turns) != 1 or [message["role"] for message in prompt.messages] != ["user"] or prompt.tools:
            raise PromptError("a conversation needs a chat template: leave --raw out, or give one text")
        return self.llm.tokenizer.encode(prompt.turns[0])

    def examine(self, prompts: Iterable[Prompt], dropped: Dropped) -> list[int]:
        """Returns the number of tokens of each usable prompt, in the order of `prompts`. Unusable prompts are counted
        in `dropped`, by reason: too long for `max_prompt_tokens`, or rejected by `first_ids`."""
        counts = list[int]()
        for prompt in prompts:
            try:
                number = len(self.first_ids(prompt))
            except RowError as error:
                dropped.add(error.reason, str(error))
                continue
            if number > self.config.max_prompt_tokens:
                dropped.add(TOO_LONG, f"{prompt.where or prompt.id}: {number} tokens")
            else:
                counts.append(number)
        return counts


def check_template(tokenizer: Tokenizer, prompts: Iterable[Prompt], config: AnswerConfig) -> None:
    """Raises ConfigError if a prompt needs a chat template and the target does not have one. A template is not needed
    with `config.raw`, or for prompts that are given as token ids."""
    needs_one = not config.raw and any(not prompt.token_ids for prompt in prompts)
    refuse(ConfigError, (needs_one and tokenizer.chat_template is None, NO_TEMPLATE))
