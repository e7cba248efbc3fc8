"""What becomes of every request field of OpenAI's, vLLM's and llama.cpp's servers: held, refused or without effect."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from openai.types import completion_create_params as texts
from openai.types.chat import completion_create_params as chats
from pydantic import ValidationError

from paceline.serve.fields import CHAT_REFUSED, NESTED_REFUSED, NESTED_UNUSED, REFUSED, TEXT_REFUSED, UNUSED
from paceline.serve.protocol import ChatRequest, Closed, CompletionRequest, TokenizeRequest


def words(text: str) -> set[str]:
    return set(text.split())


GUIDE = Path(__file__).parents[2] / "docs" / "serving.md"
OPENAI_CHAT = {*chats.CompletionCreateParamsBase.__annotations__, "stream"}
OPENAI_TEXT = {*texts.CompletionCreateParamsBase.__annotations__, "stream"}
VLLM = words(
    """allowed_token_ids bad_words cache_salt ec_transfer_params frequency_penalty ignore_eos
    include_stop_str_in_output kv_transfer_params length_penalty logit_bias logprob_token_ids logprobs
    max_tokens min_p min_tokens model n presence_penalty priority prompt_logprobs repetition_detection
    repetition_penalty request_id response_format return_mm_kwargs return_token_ids return_token_offsets
    return_tokens_as_token_ids routed_experts_prompt_start seed session_id skip_special_tokens
    spaces_between_special_tokens stop stop_token_ids stream stream_interval stream_options structured_outputs
    temperature thinking_token_budget top_k top_p truncate_prompt_tokens truncation_side use_beam_search user
    vllm_xargs watermarking add_special_tokens guided_json guided_regex guided_choice guided_grammar
    guided_decoding_backend guided_whitespace_pattern"""
)
"""Both kinds of completion of vLLM's main branch in November 2026, and what older clients send."""
VLLM_CHAT = VLLM | words(
    """messages top_logprobs max_completion_tokens tools tool_choice reasoning_effort include_reasoning
    parallel_tool_calls echo add_generation_prompt continue_final_message documents chat_template
    chat_template_kwargs media_io_kwargs mm_processor_kwargs return_prompt_text"""
)
VLLM_TEXT = VLLM | {"prompt", "echo", "suffix", "prompt_embeds", "best_of"}
VLLM_TOKENIZE = words(
    """model prompt messages add_special_tokens return_token_strs add_generation_prompt continue_final_message
    chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs tools"""
)
LLAMA = words(
    """adaptive_decay adaptive_target backend_sampling cache_prompt chat_format chat_parser continue_final_message
    dry_allowed_length dry_base dry_multiplier dry_penalty_last_n dry_sequence_breakers dynatemp_exponent
    dynatemp_range echo frequency_penalty generation_prompt grammar grammar_lazy grammar_triggers grammar_type
    id_slot ignore_eos json_schema logit_bias lora max_completion_tokens max_tokens min_keep min_p mirostat
    mirostat_eta mirostat_tau n n_cache_reuse n_cmpl n_discard n_indent n_keep n_predict n_probs
    parse_tool_calls post_sampling_probs presence_penalty preserved_tokens reasoning_budget_end_tag
    reasoning_budget_message reasoning_budget_start_tag reasoning_budget_tokens reasoning_control
    reasoning_format repeat_last_n repeat_penalty response_fields return_progress return_tokens samplers seed
    stop stream stream_options t_max_predict_ms temperature timings_per_token top_k top_n_sigma top_p typical_p
    verbose xtc_probability xtc_threshold messages tools tool_choice parallel_tool_calls response_format
    chat_template_kwargs logprobs top_logprobs model add_generation_prompt"""
)
"""llama.cpp's server, tools/server/server-schema.cpp and its OpenAI endpoint, November 2026."""
NESTED = {
    "StreamOptions": {"include_usage", "continuous_usage_stats", "include_obfuscation"},
    "JsonSchema": {"name", "description", "schema", "strict"},
    "StructuredOutputs": words(
        """json regex choice grammar json_object structural_tag disable_fallback disable_any_whitespace
    disable_additional_properties whitespace_pattern"""
    ),
    "Function": {"name", "description", "parameters", "strict", "defer_loading"},
    "Message": words(
        """role content name tool_calls tool_call_id reasoning reasoning_content function_call refusal annotations
    audio parsed provider_specific_fields id index opts"""
    ),
}


def held(model: type[Closed]) -> set[str]:
    return {field.alias or name for name, field in model.model_fields.items()}


MODELS = {each.__name__: each for each in Closed.__subclasses__()}


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (ChatRequest, OPENAI_CHAT | VLLM_CHAT | LLAMA),
        (CompletionRequest, OPENAI_TEXT | VLLM_TEXT | LLAMA),
        (TokenizeRequest, VLLM_TOKENIZE),
        *[(MODELS[name], names) for name, names in NESTED.items()],
    ],
)
def test_every_field_is_held_refused_or_without_effect(model: type[Closed], names: set[str]) -> None:
    elsewhere = {"json_schema", "audio"} if model.__name__ == "Message" else set[str]()
    if model is CompletionRequest:  # refused as unknown: only chats have them, in every server
        elsewhere = held(ChatRequest)
    undecided = names - held(model) - model.refused.keys() - model.unused.keys() - elsewhere
    assert not undecided, "decide what becomes of these in serve/fields.py"


def test_a_field_has_one_fate() -> None:
    for model in (ChatRequest, CompletionRequest, TokenizeRequest, *MODELS.values()):
        assert not model.unused.keys() & model.refused.keys()
        assert not held(model) & (model.refused.keys() | model.unused.keys())
    assert REFUSED.keys() <= CHAT_REFUSED.keys() & TEXT_REFUSED.keys()


VALID = {ChatRequest: {"messages": [{"role": "user", "content": "x"}]}, CompletionRequest: {"prompt": "x"}}


@pytest.mark.parametrize("model", VALID, ids=lambda model: model.__name__)
def test_refused_fields_are_refused_and_unused_ones_are_not(model: type[Closed]) -> None:
    for name in UNUSED:
        model.model_validate(VALID[model] | {name: "anything"})
    for name, refused in model.refused.items():
        with pytest.raises(ValidationError, match=name):
            model.model_validate(VALID[model] | {name: "anything else"})
        for value in (None, *refused.neutral):
            model.model_validate(VALID[model] | {name: value})
    with pytest.raises(ValidationError, match="no_such_field"):
        model.model_validate(VALID[model] | {"no_such_field": 0})


def listed(heading: str) -> set[str]:
    section = re.search(rf"^### {heading}$(.*?)^##", GUIDE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert section
    return set(re.findall(r"^\| `([\w.]+)` \|", section[1], re.MULTILINE))


def test_the_guide_lists_what_is_refused_and_what_has_no_effect() -> None:
    nested = [{f"{parent}.{name}" for parent, own in each.items() for name in own} for each in (NESTED_UNUSED, NESTED_REFUSED)]
    assert listed("Fields without effect") == UNUSED.keys() | nested[0]
    assert listed("Fields that are refused") == CHAT_REFUSED.keys() | TEXT_REFUSED.keys() | nested[1]
