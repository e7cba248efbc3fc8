"""A server's streamed answers, byte by byte."""

from __future__ import annotations

import json

from paceline.net.streaming import Stream


def text_event(text: str, **more: object) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None, **more}]})


def event(value: object) -> bytes:
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def stream(*pieces: bytes, status: int = 200) -> Stream:
    """A piece a second, the first a second after it was due."""
    times = [(float(second), piece) for second, piece in enumerate(pieces, start=11)]
    return Stream(10.0, 10.0, times[-1][0], status, times)


BY_SOURCE = {"dflash": {"num_rounds": 2, "num_drafted": 6, "accepted_histogram": [1, 0, 1]}}
USAGE = {
    "choices": [],
    "usage": {
        "prompt_tokens": 9,
        "completion_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0},
    },
    "metrics": {
        "speculative_decoding": {
            "acceptance_histogram": [1, 0, 1],
            "num_accepted_draft_tokens": 2,
            "num_draft_tokens": 6,
            "rounds_by_source": BY_SOURCE,
        }
    },
}
LAST = text_event("", finish_reason="stop")
