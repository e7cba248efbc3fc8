"""Request and response models of OpenAI's API. `fields.py` lists unsupported fields.

Limits are OpenAI's where it has them; others allow any sensible request and keep logits in the range of float32.
`/docs` shows the descriptions.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, SkipValidation, field_validator, model_validator
from pydantic_core import PydanticCustomError

from paceline.serve.requests import fields
from paceline.serve.requests.fields import Refused

Int = Annotated[int, Field(strict=True)]
Float = Annotated[float, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]
"""Strict types: no conversion of text to numbers or booleans, or of booleans to numbers."""


class Closed(BaseModel):
    """Base of all request models. Rejects unknown fields, NaN and infinities."""

    model_config = ConfigDict(
        extra="forbid", allow_inf_nan=False, protected_namespaces=(), use_attribute_docstrings=True
    )
    refused: ClassVar[dict[str, Refused]] = {}
    """Unsupported fields with advice for the error message."""
    unused: ClassVar[dict[str, str]] = {}
    """Unsupported fields that are ignored."""
    nested: ClassVar[dict[str, dict[str, Refused]]] = fields.NESTED_REFUSED
    """Object in the endpoint's body -> its rejected fields."""

    @model_validator(mode="before")
    @classmethod
    def _without_unused(cls, given: Any) -> Any:
        """Drop unsupported fields that can be ignored: they are in `unused`, or their value is null or neutral."""
        if not isinstance(given, dict):
            return given
        known, refused = {field.alias or name for name, field in cls.model_fields.items()}, cls.refused
        neutral = {
            name for name, value in given.items() if value is None or (name in refused and refused[name].holds(value))
        }
        ignored = (neutral | cls.unused.keys()) - known
        return {name: value for name, value in given.items() if name not in ignored}


class StreamOptions(Closed):
    unused: ClassVar[dict[str, str]] = fields.NESTED_UNUSED["stream_options"]

    include_usage: Flag | None = Field(False, description="Send token counts in an additional last chunk.")
    continuous_usage_stats: Flag | None = Field(False, description="Send token counts in every chunk, as in vLLM.")


class JsonSchema(Closed):
    unused: ClassVar[dict[str, str]] = fields.NESTED_UNUSED["json_schema"]

    name: str = Field("answer", description="Ignored.")
    schema_: dict[str, Any] | bool = Field(alias="schema", description="JSON schema of the answer.")
    strict: Flag | None = Field(None, description="Ignored: an answer always follows its schema.")


class ResponseFormat(Closed):
    """Format of the answer, by `type`: text; json_object (any JSON object, or one that follows `schema`); json_schema
    (follows `json_schema` or `schema`); regex (matches `regex`)."""

    type: Literal["text", "json_object", "json_schema", "regex"] = "text"
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema", description="Same as json_schema.schema.")
    regex: str | None = Field(None, description="Regular expression that the whole answer matches.")


class StructuredOutputs(Closed):
    """A grammar for the answer in vLLM's format: exactly one of json, regex, choice or json_object."""

    refused: ClassVar[dict[str, Refused]] = fields.NESTED_REFUSED["structured_outputs"]

    json_: dict[str, Any] | str | None = Field(None, alias="json", description="A JSON schema, or its text.")
    regex: str | None = Field(None, description="Regular expression that the whole answer matches.")
    choice: list[str] | None = Field(None, min_length=1, max_length=1024, description="The answer is one of these.")
    json_object: Flag | None = Field(None, description="The answer is any JSON object.")


class Function(Closed):
    refused: ClassVar[dict[str, Refused]] = fields.NESTED_REFUSED["function"]

    name: str = Field(min_length=1, max_length=256)
    description: str | None = Field(None, description="Purpose of the function, for the model.")
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of its arguments.")
    strict: Flag | None = Field(None, description="Passed to the prompt only: a forced call always follows its schema.")


class CalledFunction(Closed):
    unused: ClassVar[dict[str, str]] = fields.NESTED_UNUSED["tool_calls.function"]

    name: str
    arguments: str | dict[str, Any] | None = "{}"
    """A JSON object, or its text; empty and null are {}."""


class Tool(Closed):
    refused: ClassVar[dict[str, Refused]] = fields.NESTED_REFUSED["tools"]
    unused: ClassVar[dict[str, str]] = fields.NESTED_UNUSED["tools"]

    type: Literal["function"] = "function"
    function: Function


class ChosenFunction(Closed):
    name: str


class ChosenTool(Closed):
    """The tool that the answer must call."""

    type: Literal["function"] = "function"
    function: ChosenFunction


class ContentPart(Closed):
    unused: ClassVar[dict[str, str]] = fields.NESTED_UNUSED["content"]

    type: str = Field(description="text, input_text, output_text or refusal; other types are not supported.")
    text: str | None = None
    refusal: str | None = Field(None, description="refusal: text of the refusal.")


class ToolCall(Closed):
    unused: ClassVar[dict[str, str]] = fields.NESTED_UNUSED["tool_calls"]

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Closed):
    """One message of a conversation."""

    unused: ClassVar[dict[str, str]] = fields.NESTED_UNUSED["messages"]

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    """Author of the message."""
    content: SkipValidation[str | list[ContentPart] | None] = None
    """Text, or a list of text parts, which are joined by line breaks."""
    name: SkipValidation[str | None] = Field(None, description="Name of the author, for chat templates that use it.")
    tool_calls: SkipValidation[list[ToolCall] | None] = Field(None, description="assistant: its tool calls.")
    tool_call_id: SkipValidation[str | None] = Field(None, description="tool: id of the call that it answers.")
    reasoning_content: SkipValidation[str | None] = None
    """assistant: its reasoning, for the template."""
    reasoning: SkipValidation[str | None] = Field(None, description="Same as reasoning_content.")
    function_call: SkipValidation[CalledFunction | None] = Field(None, description="Older form of tool_calls.")
    refusal: SkipValidation[str | None] = Field(None, description="Replaces a content that is null.")

    def as_sent(self) -> dict[str, Any]:
        """Return the fields that the client sent. Their values are validated later, by `paceline.data.messages`."""
        return {name: getattr(self, name) for name in self.model_fields_set}


class Prediction(Closed):
    """The answer that the client expects. Parts that the prediction has right are generated faster; the answer itself
    never changes."""

    type: Literal["content"]
    content: SkipValidation[str | list[ContentPart]]
    """Text, or a list of text parts, which are joined by line breaks."""


class Sampling(Closed):
    """Request fields that chat and text completions have in common: sampling, limits, stops and streaming."""

    unused: ClassVar[dict[str, str]] = fields.UNUSED

    model: str | None = Field(None, description="Model name as in /v1/models; there is only one.")
    n: Int | None = Field(1, ge=1)
    """Number of answers to the prompt. With a seed, the answers use seed, seed + 1, seed + 2, ..."""
    stream: Flag | None = Field(False, description="Stream the answer as server-sent events.")
    stream_options: StreamOptions | None = Field(None, description="With stream only.")
    seed: Int | None = Field(None, ge=-1, le=2**63 - 1)
    """The same seed gives the same text; without a seed, or with -1, each answer gets a random one."""
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    """One or several texts that end the answer, each a plain text or a special token."""
    stop_token_ids: list[Int] | None = Field(None, max_length=64, description="Tokens that end the answer.")
    max_tokens: Int | None = Field(None, ge=1)
    """Longest answer, in tokens [default: --default-max-tokens of the server for chats, 16 for text completions]."""
    temperature: Float | None = Field(None, ge=0, le=2, description="Default 1.0, as in OpenAI's API; 0 is greedy.")
    top_p: Float | None = Field(None, ge=0, le=1)
    """Keep the most probable tokens with this total probability."""
    top_k: Int | None = Field(None, ge=-1, description="Keep this many of the most probable tokens; 0 and -1 keep all.")
    min_p: Float | None = Field(None, ge=0, le=1)
    """Keep tokens with at least min_p times the top probability."""
    presence_penalty: Float | None = Field(None, ge=-100, le=100)
    """Subtracted once from the logit of each token that is in the answer so far."""
    frequency_penalty: Float | None = Field(None, ge=-100, le=100)
    """Subtracted from the logit of each token once per occurrence in the answer so far."""
    repetition_penalty: Float | None = Field(None, ge=0.01, le=100)
    """Divide positive (multiply negative) logits of tokens in prompt or answer; 1 is off."""
    logit_bias: dict[str, Annotated[Float, Field(ge=-100, le=100)]] | None = Field(None, max_length=1024)
    """Token id, as text -> value added to its logit; -100 forbids the token."""
    min_tokens: Int | None = Field(None, ge=0)
    """Ignore end tokens and stop strings before this many tokens."""
    bad_words: Annotated[list[str], Field(max_length=64)] | None = None
    """Forbidden words, as the tokens that encode them at the beginning of a text or after a space."""
    skip_special_tokens: Flag | None = Field(True, description="false: special tokens are part of the text.")
    ignore_eos: Flag | None = Field(False, description="Continue to max_tokens after the model's end token.")
    response_format: ResponseFormat | None = None
    guided_regex: str | None = Field(None, description="Same as response_format of type regex.")
    guided_json: dict[str, Any] | str | None = Field(None, description="Same as response_format of type json_schema.")
    guided_choice: Annotated[list[str], Field(min_length=1, max_length=1024)] | None = None
    """Same as structured_outputs with choice."""
    structured_outputs: StructuredOutputs | None = None
    speculate: Literal["auto", "full", "off"] | Annotated[Int, Field(ge=0, le=1024)] | None = None
    """off decodes plainly; a number limits the drafted tokens per round; auto and full leave it to the server.
    tree:N is for the whole server (serve --speculate)."""
    lossy: str | dict[str, str | Float] | None = None
    """NOT lossless, and only if the server allows it: a rule that accepts drafts which the model would reject, such as
    "typical:eps=0.09,delta=0.3" or {"rule": "lenience", "l": 0.5, "max_tv": 0.02}. The answer reports lossless: false
    and the cost of the rule."""
    return_metrics: Flag | None = False
    """Adds `metrics.speculative_decoding`: mean_acceptance_length, draft_acceptance_rate, acceptance_histogram,
    drafter, and rounds_by_source with the figures of each draft source."""
    return_token_ids: Flag | None = False
    """Adds `token_ids` and `prompt_token_ids` to each choice, as vLLM's text completions have them."""
    return_timings: Flag | None = False
    """Adds `timings` to the answer or its last chunk: seconds of each phase in the server, which add up to total_s."""
    paceline_timings: Flag | None = False
    """Adds a `paceline` field with the time of each phase; when streaming, also which tokens of each chunk were
    drafted."""


class ChatRequest(Sampling):
    refused: ClassVar[dict[str, Refused]] = fields.CHAT_REFUSED

    messages: list[Message] = Field(min_length=1, description="The conversation so far, the question last.")
    max_completion_tokens: Int | None = Field(None, ge=1, description="Newer name of max_tokens.")
    logprobs: Flag | None = Field(False, description="Return each token's log-probability.")
    top_logprobs: Int | None = Field(None, ge=0, le=20)
    """Number of alternatives per token; requires logprobs."""
    prediction: Prediction | None = Field(None, description="Expected answer, from which drafts are taken as well.")
    tools: list[Tool] | None = Field(None, description="Functions that the model may call.")
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    """auto lets the model decide; required, or a function's name, forces a call."""
    parallel_tool_calls: Flag | None = Field(True, description="false: an answer has at most one call.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables for the model's chat template.")
    reasoning_effort: str | None = Field(None, description="Passed to the chat template, which must use it.")
    documents: list[dict[str, Any]] | None = None
    """Passed to the chat template, which must use them."""
    add_generation_prompt: Flag | None = Field(None, description="false: the prompt ends with the last message.")
    continue_final_message: Flag | None = Field(None, description="The answer continues the last message's text.")
    add_special_tokens: Literal[False] | None = Field(None, description="The template adds special tokens.")


class CompletionRequest(Sampling):
    refused: ClassVar[dict[str, Refused]] = fields.TEXT_REFUSED

    prompt: str | list[str] | list[Int] | list[list[Int]]
    """A text or its token ids, or several of them."""
    logprobs: Int | None = Field(None, ge=0, le=20)
    """Return log-probabilities, with this many alternatives."""
    echo: Flag | None = Field(False, description="Put the prompt before the answer; with logprobs, score it too.")
    add_special_tokens: Flag | None = True
    """Add the special tokens that the model expects around a text."""
    suffix: str | None = Field(None, description="Not supported.")
    best_of: Int | None = Field(None, description="Must equal n: answers are not ranked.")

    @field_validator("prompt", mode="before")
    @classmethod
    def _of_one_kind(cls, prompt: Any) -> Any:
        if isinstance(prompt, list) and len({type(each) for each in prompt} & {str, int, list}) > 1:
            message = "a list must have only texts, only token ids, or only lists of token ids"
            raise PydanticCustomError("mixed_prompts", message)
        return prompt


class TokenizeRequest(Closed):
    """Request to convert a text or a conversation to token ids."""

    refused: ClassVar[dict[str, Refused]] = fields.TOKENIZE_REFUSED

    model: str | None = Field(None, description="Model name as in /v1/models.")
    prompt: str | None = Field(None, description="A text.")
    messages: list[Message] | None = Field(None, description="A conversation, instead of a text.")
    add_special_tokens: Flag | None = None
    """Add the special tokens that the model expects around a text [default: true for a text; a chat template adds
    them]."""
    tools: list[Tool] | None = Field(None, description="As in a chat.")
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = Field(None, description="As in a chat.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="As in a chat.")
    reasoning_effort: str | None = Field(None, description="As in a chat.")
    documents: list[dict[str, Any]] | None = Field(None, description="As in a chat.")
    add_generation_prompt: Flag | None = Field(None, description="As in a chat.")
    continue_final_message: Flag | None = Field(None, description="As in a chat.")
    return_token_strs: Flag | None = Field(False, description="Adds `token_strs`, the text of each token.")


class TokenizeAnswer(BaseModel):
    count: int
    max_model_len: int = Field(description="Context length: most tokens of prompt and answer together.")
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Closed):
    model: str | None = Field(None, description="Model name as in /v1/models.")
    tokens: list[Int] = Field(description="Token ids, as returned by /tokenize.")


class DetokenizeAnswer(BaseModel):
    prompt: str


class LoadRequest(Closed):
    drafter: str = Field(min_length=1, max_length=4096)
    """A folder on the server, a hub id, or a drafter's name."""


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """Body of an error response in OpenAI's format."""

    error: ErrorBody
