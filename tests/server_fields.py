"""Request fields of the servers that clients are written for, and a table of what becomes of them here.

PYTHONPATH=. python tests/server_fields.py
"""

from __future__ import annotations

import re
from pathlib import Path

from anthropic.types import message_count_tokens_params as counts
from anthropic.types import message_create_params as messages
from anthropic.types.beta import message_create_params as beta_messages
from openai.types import completion_create_params as texts
from openai.types.chat import completion_create_params as chats
from openai.types.responses import response_create_params as responses

from paceline.serve.dialects.messages import CountTokensRequest, MessagesRequest
from paceline.serve.dialects.responses import ResponsesRequest
from paceline.serve.requests.protocol import ChatRequest, Closed, CompletionRequest, TokenizeRequest

GUIDE = Path(__file__).parents[1] / "docs" / "reference" / "http-api.md"


def words(text: str) -> set[str]:
    return set(text.split())


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
MESSAGES = {
    *messages.MessageCreateParamsBase.__annotations__,
    *beta_messages.MessageCreateParamsBase.__annotations__,
    *("temperature", "top_p", "top_k", "stream"),
} - {"betas"}
"""Fields of Anthropic's API: version 2 of its package sends `betas` as a header, and no sampling parameters."""
COUNT_TOKENS = {*counts.MessageCountTokensParams.__annotations__}
RESPONSES = {*responses.ResponseCreateParamsBase.__annotations__, "stream"}
SCHEMAS: dict[str, tuple[type[Closed], set[str]]] = {
    "OpenAI, `/v1/chat/completions`": (ChatRequest, OPENAI_CHAT),
    "OpenAI, `/v1/completions`": (CompletionRequest, OPENAI_TEXT),
    "OpenAI, `/v1/responses`": (ResponsesRequest, RESPONSES),
    "vLLM, `/v1/chat/completions`": (ChatRequest, VLLM_CHAT),
    "vLLM, `/v1/completions`": (CompletionRequest, VLLM_TEXT),
    "vLLM, `/tokenize`": (TokenizeRequest, VLLM_TOKENIZE),
    "llama.cpp, `/v1/chat/completions`": (ChatRequest, LLAMA),
    "Anthropic, `/v1/messages`": (MessagesRequest, MESSAGES),
    "Anthropic, `/v1/messages/count_tokens`": (CountTokensRequest, COUNT_TOKENS),
}
"""Whose schema -> our model of its requests, and its fields."""


def held(model: type[Closed]) -> set[str]:
    return {field.alias or name for name, field in model.model_fields.items()}


def listed(heading: str) -> set[str]:
    """Fields in the first column of the guide's table under this heading."""
    section = re.search(rf"^{heading}$(.*?)(^##|\Z)", GUIDE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert section
    return set(re.findall(r"^\| `([\w.]+)` \|", section[1], re.MULTILINE))


def table() -> str:
    """Number of each schema's fields by fate, as Markdown."""
    lines = ["| schema | fields | held | refused | without effect |", "|---|---|---|---|---|"]
    for name, (model, fields) in SCHEMAS.items():
        num_held, num_unused = len(fields & held(model)), len(fields & model.unused.keys())
        num_refused = len(fields & model.refused.keys())
        assert num_held + num_unused + num_refused == len(fields), (
            f"{name}: {fields - held(model) - {*model.unused, *model.refused}}"
        )
        lines.append(f"| {name} | {len(fields)} | {num_held} | {num_refused} | {num_unused} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
