"""Unsupported request fields of OpenAI's, vLLM's and llama.cpp's servers: which are ignored, which are rejected.

Fields in `UNUSED` are ignored (docs/reference/http-api.md lists them). Fields in `REFUSED` and unknown fields get
status 400, unless their value requests the default behaviour.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.data.messages import UNUSED_CALL_KEYS, UNUSED_CALLED_KEYS, UNUSED_KEYS, UNUSED_PART_KEYS


@dataclass(frozen=True, slots=True)
class Refused:
    """A request field that the server does not support. A request with this field is rejected, unless the field has a
    neutral value. A value is neutral if it requests what the server does anyway, such as false for a feature that is
    missing."""

    advice: str
    """Part of the error message: what to do instead."""
    neutral: tuple[Any, ...] = ()
    """Values that request the default behaviour, and so are accepted."""

    def holds(self, value: Any) -> bool:
        """Return True if `value` is neutral, so that the request is accepted with it."""
        return any(type(value) is type(one) and value == one for one in self.neutral)


OFF = (False,)
NONE_OF_IT = ([], {}, "")
NO_PARTS = Refused("this server reads and writes text only", NONE_OF_IT)
NO_GRAMMAR = Refused("give a JSON schema, a regex or a list of choices: structured_outputs has json, regex and choice")
NO_BUDGET = Refused("reasoning has no budget of its own here: use max_tokens", (-1,))
NO_SAMPLER = Refused("no such sampler here: leave it out, or use temperature, top_p, top_k and min_p", (0, 0.0))
NO_TRANSFER = Refused("this server runs on its own: leave it out", NONE_OF_IT)

UNUSED: dict[str, str] = {
    "background": "an answer comes with its request",
    "backend_sampling": "where llama.cpp samples",
    "cache_prompt": "prefixes are always reused where that changes no bit",
    "dry_allowed_length": "only with dry_multiplier",
    "dry_base": "only with dry_multiplier",
    "dry_penalty_last_n": "only with dry_multiplier",
    "dry_sequence_breakers": "only with dry_multiplier",
    "dynatemp_exponent": "only with dynatemp_range",
    "adaptive_decay": "only with adaptive_target",
    "guided_decoding_backend": "there is one",
    "metadata": "answers are not stored",
    "mirostat_eta": "only with mirostat",
    "mirostat_tau": "only with mirostat",
    "n_cache_reuse": "prefixes are always reused",
    "prompt_cache_key": "prefixes are always reused",
    "prompt_cache_options": "prefixes are always reused",
    "prompt_cache_retention": "prefixes are reused while a row holds them",
    "reasoning_budget_end_tag": "only with reasoning_budget_tokens",
    "reasoning_budget_message": "only with reasoning_budget_tokens",
    "reasoning_budget_start_tag": "only with reasoning_budget_tokens",
    "repeat_last_n": "only with repeat_penalty",
    "request_id": "answers have ids of their own",
    "return_mm_kwargs": "of vLLM's render endpoints",
    "safety_identifier": "no user is known here",
    "service_tier": "all requests are served alike",
    "session_id": "routing is by drafter and kind of request",
    "spaces_between_special_tokens": "only with vLLM's slow tokenizers",
    "store": "answers are not stored for clients",
    "stream_interval": "--stream-interval-ms of the server; the text is the same",
    "user": "no user is known here",
    "xtc_threshold": "only with xtc_probability",
}
"""Ignored field -> reason."""

REFUSED: dict[str, Refused] = {
    # OpenAI
    "audio": NO_PARTS,
    "function_call": Refused("use tool_choice", ("auto", "none")),
    "functions": Refused("use tools", ([],)),
    "modalities": Refused(NO_PARTS.advice, (["text"], [])),
    "moderation": Refused("this server moderates nothing"),
    "verbosity": Refused("say it in the prompt", ("medium",)),
    "web_search_options": Refused("this server searches nothing: give it a tool that does"),
    # vLLM
    "allowed_token_ids": Refused("use logit_bias, or a regex in structured_outputs", ([],)),
    "cache_salt": Refused("prefixes of all requests are shared: run a server of your own"),
    "chat_template": Refused("the server's own template is used: see chat_template_kwargs"),
    "ec_transfer_params": NO_TRANSFER,
    "guided_grammar": NO_GRAMMAR,
    "guided_whitespace_pattern": Refused("white space is bounded instead: see docs/reference/http-api.md"),
    "include_reasoning": Refused("reasoning is part of the text here", (True,)),
    "include_stop_str_in_output": Refused("the text ends before the stop string", OFF),
    "kv_transfer_params": NO_TRANSFER,
    "length_penalty": Refused("only beam search has one", (1, 1.0)),
    "logprob_token_ids": Refused("use logprobs with more alternatives"),
    "media_io_kwargs": NO_PARTS,
    "mm_processor_kwargs": NO_PARTS,
    "priority": Refused("requests are served in their order", (0,)),
    "prompt_embeds": NO_PARTS,
    "prompt_logprobs": Refused("use echo with logprobs, at /v1/completions"),
    "repetition_detection": Refused("use frequency_penalty or max_tokens"),
    "return_prompt_text": Refused("use return_token_ids and /detokenize", OFF),
    "return_token_offsets": Refused("use echo with logprobs: text_offset", OFF),
    "return_tokens_as_token_ids": Refused("use return_token_ids", OFF),
    "routed_experts_prompt_start": Refused("routing of experts is not reported", (0,)),
    "thinking_token_budget": NO_BUDGET,
    "truncate_prompt_tokens": Refused("shorten the prompt yourself: nothing is cut in silence", (-1,)),
    "truncation_side": Refused("shorten the prompt yourself: nothing is cut in silence"),
    "use_beam_search": Refused("answers are sampled or greedy: use n", OFF),
    "vllm_xargs": NO_TRANSFER,
    "watermarking": Refused("answers have no watermark", OFF),
    # llama.cpp
    "adaptive_target": Refused(NO_SAMPLER.advice, (-1, -1.0)),
    "chat_format": Refused("the model's own template decides"),
    "chat_parser": Refused("calls are read as docs/reference/http-api.md says"),
    "dry_multiplier": NO_SAMPLER,
    "dynatemp_range": NO_SAMPLER,
    "generation_prompt": Refused("the model's own template decides: see add_generation_prompt"),
    "grammar": NO_GRAMMAR,
    "grammar_lazy": Refused(NO_GRAMMAR.advice, OFF),
    "grammar_triggers": Refused(NO_GRAMMAR.advice, ([],)),
    "grammar_type": NO_GRAMMAR,
    "id_slot": Refused("the server chooses a row itself", (-1,)),
    "image_data": NO_PARTS,
    "json_schema": Refused('use response_format: {"type": "json_schema", "json_schema": {"schema": ...}}'),
    "lora": Refused("there are no adapters here", ([],)),
    "min_keep": Refused("samplers keep what they keep", (0,)),
    "mirostat": NO_SAMPLER,
    "n_cmpl": Refused("use n", (1,)),
    "n_discard": Refused("a context is never shifted", (0,)),
    "n_indent": Refused("use a regex in structured_outputs", (0,)),
    "n_keep": Refused("a context is never shifted", (0, -1)),
    "n_predict": Refused("use max_tokens", (-1,)),
    "n_probs": Refused("use logprobs", (0,)),
    "parse_tool_calls": Refused("leave tools out, or use tool_choice none", (True,)),
    "penalize_nl": Refused("use logit_bias", OFF),
    "post_sampling_probs": Refused("log-probabilities are the model's own", OFF),
    "preserved_tokens": Refused("special tokens are no part of the text", ([],)),
    "reasoning_budget_tokens": NO_BUDGET,
    "reasoning_control": Refused(NO_BUDGET.advice, OFF),
    "reasoning_format": Refused("reasoning is part of the text here", ("none",)),
    "repeat_penalty": Refused("use repetition_penalty", (1, 1.0)),
    "response_fields": Refused("answers have all their fields", ([],)),
    "return_progress": Refused("use return_timings", OFF),
    "return_tokens": Refused("use return_token_ids", OFF),
    "samplers": Refused("the order is: bias, penalties, temperature, min_p, top_k, top_p"),
    "t_max_predict_ms": Refused("use max_tokens; the server has --deadline", (0, -1)),
    "timings_per_token": Refused("use return_timings or paceline_timings", OFF),
    "top_n_sigma": Refused(NO_SAMPLER.advice, (-1, -1.0, 0, 0.0)),
    "typical_p": Refused(NO_SAMPLER.advice, (1, 1.0)),
    "verbose": Refused("use return_metrics and return_timings", OFF),
    "xtc_probability": NO_SAMPLER,
}
"""Rejected field -> what to do instead."""

CHAT_REFUSED = REFUSED | {"echo": Refused("use continue_final_message", OFF)}
"""Rejected fields of /v1/chat/completions."""
TEXT_REFUSED = REFUSED | {
    name: Refused("only chats have it: use /v1/chat/completions", neutral)
    for name, neutral in {
        "messages": ([],),
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "top_logprobs": (),
    }.items()
}
TOKENIZE_REFUSED = {name: REFUSED[name] for name in ("chat_template", "media_io_kwargs", "mm_processor_kwargs")}
ALL_TOOLS = Refused("all tools go into the prompt", OFF)
WHITE_SPACE = Refused("white space is bounded instead: see docs/reference/http-api.md", OFF)
NESTED_REFUSED: dict[str, dict[str, Refused]] = {
    "structured_outputs": {
        "grammar": NO_GRAMMAR,
        "structural_tag": NO_GRAMMAR,
        "disable_additional_properties": Refused("write additionalProperties into the schema", OFF),
        "disable_any_whitespace": WHITE_SPACE,
        "disable_fallback": Refused("there is one backend", (False, True)),
        "whitespace_pattern": WHITE_SPACE,
    },
    "function": {"defer_loading": ALL_TOOLS},
    "tools": {"defer_loading": ALL_TOOLS},
}
"""Object in a request -> its rejected fields."""
NESTED_UNUSED: dict[str, dict[str, str]] = {
    "messages": UNUSED_KEYS,
    "content": UNUSED_PART_KEYS,
    "tool_calls": UNUSED_CALL_KEYS,
    "tool_calls.function": UNUSED_CALLED_KEYS,
    "stream_options": {"include_obfuscation": "streams are not padded"},
    "json_schema": {"description": "for people"},
    "tools": {"cache_control": "prefixes are always reused"},
}
"""Object in a request -> its ignored fields, with reasons."""


def why_refused(
    path: Sequence[str],
    refused: Mapping[str, Refused],
    known: Iterable[str],
    endpoints: Iterable[str] = (),
    nested: Mapping[str, Mapping[str, Refused]] = NESTED_REFUSED,
) -> str:
    """Return the error message for a request field that the server does not support.

    - `path`: place of the field in the request: names of the objects around it, outermost first, then its own name.
    - `refused`: known unsupported fields at the top level of a request, with advice for the message. `nested`: name of
      an object in a request -> its known unsupported fields.
    - `known`: names of supported fields; the message suggests similar ones.
    - `endpoints`: paths of other endpoints that support the field.
    """
    *parents, name = path
    table = nested.get(parents[-1], {}) if parents else refused
    if name in table:
        return f"this server does not hold it: {table[name].advice}"
    if paths := " and ".join(endpoints):
        return f"no such field here, only at {paths}: leave it out"
    near = difflib.get_close_matches(name, [other for other in known if other != name], 2, 0.6)
    return "no such field" + (f": did you mean {' or '.join(near)}?" if near else ": leave it out")
