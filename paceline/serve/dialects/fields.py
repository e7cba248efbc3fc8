"""Unsupported request fields of Anthropic's Messages and OpenAI's Responses: which are ignored, which are rejected.

`requests/fields.py` has the same tables for chats; docs/reference/http-api.md lists the fields.
"""

from __future__ import annotations

from paceline.serve.requests.fields import NO_PARTS, NONE_OF_IT, OFF, UNUSED, Refused

DIRECT = Refused("only the model itself calls tools here", (["direct"], []))
EXAMPLES = Refused("say it in the tool's description", ([],))
NOTHING_CUT = Refused("shorten the conversation yourself: nothing is cut in silence", ([],))
STATELESS = Refused("nothing is stored here: send the whole conversation")
SERVER_TOOLS = Refused("this server runs no tools: give it functions that you call", NONE_OF_IT)
NO_OTHERS = Refused("there is one model here", NONE_OF_IT)
CACHE = "prefixes are always reused"

MESSAGES_UNUSED: dict[str, str] = {
    "billing_policy": "this server bills no requests",
    "cache_control": CACHE,
    "diagnostics": "a cache of Anthropic's is meant",
    "metadata": "answers are not stored",
    "service_tier": "all requests are served alike",
    "speed": "all requests are served alike",
    "user_profile_id": "no user is known here",
    "workspace_id": "no user is known here",
}
"""Ignored field -> reason."""
MESSAGES_REFUSED: dict[str, Refused] = {
    "compaction": NOTHING_CUT,
    "container": SERVER_TOOLS,
    "context_management": Refused(
        NOTHING_CUT.advice, ({}, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]})
    ),
    "fallback_credit_token": NO_OTHERS,
    "fallbacks": NO_OTHERS,
    "inference_geo": Refused("this server cannot choose a location"),
    "mcp_servers": SERVER_TOOLS,
    "thread": STATELESS,
}
"""Rejected field -> what to do instead."""
COUNT_REFUSED = MESSAGES_REFUSED | {
    name: Refused("only /v1/messages has it")
    for name in ("max_tokens", "stop_sequences", "stream", "temperature", "top_p", "top_k")
}
MESSAGES_NESTED_UNUSED: dict[str, dict[str, str]] = {
    "content": {
        "cache_control": CACHE,
        "caller": "part of Anthropic's answers, which clients send back",
        "citations": "part of Anthropic's answers, which clients send back",
        "is_error": "the result's content says so",
        "signature": "part of Anthropic's answers, which clients send back",
        "toolset_name": "of Anthropic's own tools",
    },
    "thinking": {
        "budget_tokens": "max_tokens bounds thinking and text together",
        "display": "thinking is part of the text",
    },
    "tools": {"cache_control": CACHE, "eager_input_streaming": "a call is sent when it is complete"},
}
MESSAGES_NESTED_REFUSED: dict[str, dict[str, Refused]] = {
    "tools": {
        "allowed_callers": DIRECT,
        "defer_loading": Refused("all tools go into the prompt", OFF),
        "input_examples": EXAMPLES,
    }
}

RESPONSES_UNUSED: dict[str, str] = {
    "background_options": "only with background",
    "client_metadata": "answers are not stored",
    "max_tool_calls": "of OpenAI's own tools",
    "metadata": "answers are not stored",
    **{name: UNUSED[name] for name in ("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention")},
    **{name: UNUSED[name] for name in ("safety_identifier", "service_tier", "user")},
}
RESPONSES_REFUSED: dict[str, Refused] = {
    "access_programs": NO_OTHERS,
    "background": Refused("an answer comes with its request", OFF),
    "context_management": NOTHING_CUT,
    "conversation": STATELESS,
    "image": NO_PARTS,
    "moderation": Refused("this server moderates nothing"),
    "previous_response_id": STATELESS,
    "prompt": STATELESS,
    "store": Refused("answers are not stored: set it to false", OFF),
    "truncation": Refused(NOTHING_CUT.advice, ("disabled",)),
}
SENT_BACK = "part of OpenAI's answers, which clients send back"
RESPONSES_NESTED_UNUSED: dict[str, dict[str, str]] = {
    "content": {"annotations": SENT_BACK, "logprobs": SENT_BACK, "prompt_cache_breakpoint": CACHE},
    "format": {"description": "for people"},
    "input": {
        "async": SENT_BACK,
        "caller": SENT_BACK,
        "encrypted_content": "only OpenAI's own models can read it",
        "id": SENT_BACK,
        "namespace": SENT_BACK,
        "phase": SENT_BACK,
        "status": SENT_BACK,
    },
    "reasoning": {
        "context": "the whole conversation goes into the prompt",
        "generate_summary": "reasoning is part of the text",
        "summary": "reasoning is part of the text",
    },
    "stream_options": {"include_obfuscation": "streams are not padded"},
}
RESPONSES_NESTED_REFUSED: dict[str, dict[str, Refused]] = {
    "reasoning": {"mode": Refused("there is one mode here", ("standard",))},
    "text": {"verbosity": Refused("say it in the instructions", ("medium",))},
    "tools": {
        "allowed_callers": DIRECT,
        "async": Refused("an answer ends with its calls", OFF),
        "defer_loading": Refused("all tools go into the prompt", OFF),
        "output_schema": EXAMPLES,
    },
}
