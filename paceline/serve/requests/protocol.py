"""What clients may send, in OpenAI's words. `fields.py` says what becomes of all other fields.

Where OpenAI has a bound it is ours; others are wide enough for any sensible request and narrow enough that no logit leaves the
range of float32. `/docs` shows what is said of each field.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, SkipValidation, model_validator

from paceline.serve.requests import fields
from paceline.serve.requests.fields import Refused, is_left_out

Int = Annotated[int, Field(strict=True)]
Float = Annotated[float, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]
"""Neither text nor true is a number, and no text is true."""


class Closed(BaseModel):
    """Unknown fields are refused, as are NaN and infinities, which are not JSON."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, protected_namespaces=(), use_attribute_docstrings=True)
    refused: ClassVar[dict[str, Refused]] = {}
    unused: ClassVar[dict[str, str]] = {}
    """What becomes of fields that are not held; all others are refused too."""
    nested: ClassVar[dict[str, dict[str, Refused]]] = fields.NESTED_REFUSED
    """Of an endpoint's body: object of the body -> its fields that are refused."""

    @model_validator(mode="before")
    @classmethod
    def _without_unused(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        known = {field.alias or name for name, field in cls.model_fields.items()}
        return {
            name: value
            for name, value in given.items()
            if name in known or not is_left_out(name, value, cls.refused, cls.unused)
        }


class StreamOptions(Closed):
    unused: ClassVar[dict[str, str]] = fields.NESTED_UNUSED["stream_options"]

    include_usage: Flag | None = Field(False, description="Counts of tokens in a last chunk of their own.")
    continuous_usage_stats: Flag | None = Field(False, description="Counts of tokens so far in every chunk, as in vLLM.")


class JsonSchema(Closed):
    unused: ClassVar[dict[str, str]] = fields.NESTED_UNUSED["json_schema"]

    name: str = Field("answer", description="Not read.")
    schema_: dict[str, Any] | bool = Field(alias="schema", description="What the answer has to be.")
    strict: Flag | None = Field(None, description="Not read: an answer always keeps to its schema.")


class ResponseFormat(Closed):
    """text; json_object (any, or of a `schema`); json_schema (of `json_schema` or `schema`); regex (of `regex`)."""

    type: Literal["text", "json_object", "json_schema", "regex"] = "text"
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema", description="As json_schema.schema.")
    regex: str | None = Field(None, description="The answer matches this from end to end.")


class StructuredOutputs(Closed):
    """What the answer has to be, in vLLM's words: one of these."""

    refused: ClassVar[dict[str, Refused]] = fields.NESTED_REFUSED["structured_outputs"]

    json_: dict[str, Any] | str | None = Field(None, alias="json", description="A JSON schema, or its text.")
    regex: str | None = Field(None, description="The answer matches this from end to end.")
    choice: list[str] | None = Field(None, min_length=1, max_length=1024, description="The answer is one of these.")
    json_object: Flag | None = Field(None, description="The answer is any JSON object.")


class Function(Closed):
    refused: ClassVar[dict[str, Refused]] = fields.NESTED_REFUSED["function"]

    name: str = Field(min_length=1, max_length=256)
    description: str | None = Field(None, description="What the function is for, in words for the model.")
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of its arguments.")
    strict: Flag | None = Field(None, description="In the prompt only: a forced call always keeps to its schema.")


class CalledFunction(Closed):
    unused: ClassVar[dict[str, str]] = fields.NESTED_UNUSED["tool_calls.function"]

    name: str
    arguments: str | dict[str, Any] | None = Field("{}", description="A JSON object, or its text; empty and null are {}.")


class Tool(Closed):
    refused: ClassVar[dict[str, Refused]] = fields.NESTED_REFUSED["tools"]
    unused: ClassVar[dict[str, str]] = fields.NESTED_UNUSED["tools"]

    type: Literal["function"] = "function"
    function: Function


class ChosenFunction(Closed):
    name: str


class ChosenTool(Closed):
    """The one tool that the answer must call."""

    type: Literal["function"] = "function"
    function: ChosenFunction


class ContentPart(Closed):
    unused: ClassVar[dict[str, str]] = fields.NESTED_UNUSED["content"]

    type: str = Field(description="text, input_text, output_text or refusal: this server reads nothing else.")
    text: str | None = None
    refusal: str | None = Field(None, description="Of a part of type refusal.")


class ToolCall(Closed):
    unused: ClassVar[dict[str, str]] = fields.NESTED_UNUSED["tool_calls"]

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Closed):
    """One message of a conversation. Content is text, or a list of text parts, which are joined by line breaks."""

    unused: ClassVar[dict[str, str]] = fields.NESTED_UNUSED["messages"]

    role: Literal["system", "developer", "user", "assistant", "tool", "function"] = Field(description="Who speaks.")
    content: SkipValidation[str | list[ContentPart] | None] = Field(None, description="What was said.")
    name: SkipValidation[str | None] = Field(None, description="Who said it, where the model's chat template shows names.")
    tool_calls: SkipValidation[list[ToolCall] | None] = Field(None, description="Of an assistant: the calls it made.")
    tool_call_id: SkipValidation[str | None] = Field(None, description="Of a tool: the call that it answers.")
    reasoning_content: SkipValidation[str | None] = Field(None, description="An assistant's reasoning; for the template.")
    reasoning: SkipValidation[str | None] = Field(None, description="As reasoning_content.")
    function_call: SkipValidation[CalledFunction | None] = Field(None, description="As one of tool_calls, in older histories.")
    refusal: SkipValidation[str | None] = Field(None, description="Takes the place of a content that is null.")

    def as_sent(self) -> dict[str, Any]:
        """What the client wrote: `paceline.data.messages` checks it."""
        return {name: getattr(self, name) for name in self.model_fields_set}


class Sampling(Closed):
    """What both kinds of completion share."""

    unused: ClassVar[dict[str, str]] = fields.UNUSED

    model: str | None = Field(None, description="The model's name, as of /v1/models; there is only one.")
    n: Int | None = Field(1, ge=1)
    """Answers to the prompt. With a seed the first has this seed, the next ones seed + 1, seed + 2, ..."""
    stream: Flag | None = Field(False, description="Send the answer as it grows, as server-sent events.")
    stream_options: StreamOptions | None = Field(None, description="With stream only.")
    seed: Int | None = Field(None, ge=-1, le=2**63 - 1)
    """The same seed gives the same text; without a seed, and with -1, one is drawn for each answer."""
    stop: str | Annotated[list[str], Field(max_length=16)] | None = Field(
        None, description="Text or special tokens that end the answer."
    )
    stop_token_ids: list[Int] | None = Field(None, max_length=64, description="Tokens that end the answer.")
    max_tokens: Int | None = Field(None, ge=1)
    """Longest answer, in tokens. Without, a chat answer has the server's --default-max-tokens, a text completion 16."""
    temperature: Float | None = Field(None, ge=0, le=2, description="1.0 when left out, as OpenAI has it; 0 is greedy.")
    top_p: Float | None = Field(None, ge=0, le=1, description="Keep the most likely tokens that together reach this; 0: one.")
    top_k: Int | None = Field(None, ge=-1, description="Keep so many of the most likely tokens; 0 and -1 keep all.")
    min_p: Float | None = Field(None, ge=0, le=1, description="Keep tokens at least so many times as likely as the best one.")
    presence_penalty: Float | None = Field(None, ge=-100, le=100, description="Taken once from a token that was said already.")
    frequency_penalty: Float | None = Field(None, ge=-100, le=100, description="Taken for each time it was said.")
    repetition_penalty: Float | None = Field(None, ge=0.01, le=100, description="Divides what was said already; 1 is off.")
    logit_bias: dict[str, Annotated[Float, Field(ge=-100, le=100)]] | None = Field(None, max_length=1024)
    """Token id, as text -> what is added to its logit; -100 forbids it."""
    min_tokens: Int | None = Field(
        None, ge=0, description="Neither end tokens nor stop strings end the answer before this many."
    )
    bad_words: Annotated[list[str], Field(max_length=64)] | None = None
    """Words that the answer does not hold, in the tokens that encode them at the beginning of a text or after a space."""
    skip_special_tokens: Flag | None = Field(True, description="false: special tokens are part of the text.")
    ignore_eos: Flag | None = Field(False, description="Go on to max_tokens whatever the model says.")
    response_format: ResponseFormat | None = None
    guided_regex: str | None = Field(None, description="As response_format of type regex.")
    guided_json: dict[str, Any] | str | None = Field(None, description="As response_format of type json_schema.")
    guided_choice: Annotated[list[str], Field(min_length=1, max_length=1024)] | None = None
    """As structured_outputs with choice."""
    structured_outputs: StructuredOutputs | None = None
    speculate: Literal["auto", "full", "off"] | Annotated[Int, Field(ge=0, le=1024)] | None = None
    """off decodes plainly, a number drafts at most so many tokens a round; the rest leaves it to the server."""
    lossy: str | dict[str, str | Float] | None = None
    """NOT lossless, and only where the server allows it: a rule that lets drafts stand which the model alone would refuse, as
    "typical:eps=0.09,delta=0.3" or {"rule": "lenience", "l": 0.5, "max_tv": 0.02}. The answer says lossless: false,
    and what that cost."""
    return_metrics: Flag | None = False
    """Adds `metrics.speculative_decoding`: mean_acceptance_length, draft_acceptance_rate, acceptance_histogram, drafter (the
    member of the pool that the answer had), and rounds_by_source with the figures of each source of drafts."""
    return_token_ids: Flag | None = False
    """Adds `token_ids` to each choice, and the prompt's as `prompt_token_ids`, as vLLM does."""
    return_timings: Flag | None = False
    """Adds `timings`: seconds of each part of the request's way through the server, which together are total_s. When streaming,
    in the last chunk."""
    paceline_timings: Flag | None = False
    """Adds a `paceline` field: where the time went; when streaming, how many tokens of each chunk were drafted."""


class ChatRequest(Sampling):
    refused: ClassVar[dict[str, Refused]] = fields.CHAT_REFUSED

    messages: list[Message] = Field(min_length=1, description="The conversation so far, the question last.")
    max_completion_tokens: Int | None = Field(None, ge=1, description="The newer name of max_tokens.")
    logprobs: Flag | None = Field(False, description="Tell each token's log-probability.")
    top_logprobs: Int | None = Field(None, ge=0, le=20, description="And those of so many other tokens; needs logprobs.")
    tools: list[Tool] | None = Field(None, description="Functions that the model may call.")
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    """auto lets the model decide; required, or a function by name, makes the answer a call."""
    parallel_tool_calls: Flag | None = Field(True, description="false: an answer has at most one call.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables for the model's chat template.")
    reasoning_effort: str | None = Field(None, description="For the chat template, which must read it.")
    documents: list[dict[str, Any]] | None = Field(
        None, description="For the chat template; refused where that does not read it."
    )
    add_generation_prompt: Flag | None = Field(None, description="false: the prompt ends with the last message.")
    continue_final_message: Flag | None = Field(None, description="The answer goes on with the last message's text.")
    add_special_tokens: Literal[False] | None = Field(None, description="The template brings its own.")


class CompletionRequest(Sampling):
    refused: ClassVar[dict[str, Refused]] = fields.TEXT_REFUSED

    prompt: str | list[str] | list[Int] | list[list[Int]] = Field(description="A text or its token ids, or several of them.")
    logprobs: Int | None = Field(None, ge=0, le=20, description="Log-probability of each token, and of so many others.")
    echo: Flag | None = Field(False, description="Put the prompt before the answer; with logprobs it is scored too.")
    add_special_tokens: Flag | None = Field(True, description="With the tokens that the model expects around a text.")
    suffix: str | None = Field(None, description="Refused: models here only go on.")
    best_of: Int | None = Field(None, description="Must equal n: answers are not ranked.")


class TokenizeRequest(Closed):
    """A text, or a conversation to be put through the chat template."""

    refused: ClassVar[dict[str, Refused]] = fields.TOKENIZE_REFUSED

    model: str | None = Field(None, description="The model's name, as of /v1/models.")
    prompt: str | None = Field(None, description="A text.")
    messages: list[Message] | None = Field(None, description="A conversation, in place of a text.")
    add_special_tokens: Flag | None = None
    """With the tokens that the model expects around a text: true for a prompt; a chat template brings its own."""
    tools: list[Tool] | None = Field(None, description="As in a chat.")
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = Field(None, description="As in a chat.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="As in a chat.")
    reasoning_effort: str | None = Field(None, description="As in a chat.")
    documents: list[dict[str, Any]] | None = Field(None, description="As in a chat.")
    add_generation_prompt: Flag | None = Field(None, description="As in a chat.")
    continue_final_message: Flag | None = Field(None, description="As in a chat.")
    return_token_strs: Flag | None = Field(False, description="Adds `token_strs`, the tokens' texts.")


class TokenizeAnswer(BaseModel):
    count: int
    max_model_len: int = Field(description="Tokens of prompt and answer together that this server holds.")
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Closed):
    model: str | None = Field(None, description="The model's name, as of /v1/models.")
    tokens: list[Int] = Field(description="Token ids, as /tokenize gives them.")


class DetokenizeAnswer(BaseModel):
    prompt: str


class LoadRequest(Closed):
    drafter: str = Field(min_length=1, max_length=4096, description="A folder on the server, a hub id, or a drafter's name.")


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """Every error has this shape."""

    error: ErrorBody
