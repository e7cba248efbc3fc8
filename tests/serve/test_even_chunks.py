"""`serve --even-chunks`: all chunks of one size at a steady rate, one token each, and no client reads another text."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import anthropic
import pytest
from doubles import ScriptedDrafter
from live_server import Live, chat_body, serving, talker, wait_until
from small_llm import Talker, fake_llm

from paceline import LLM
from paceline.engine.engine import Engine
from paceline.errors import ConfigError
from paceline.serve.replies.even import FIRST, FRAME, LOGPROB, MULTIPLE, START_S, WINDOW, Pace, frames, paced
from paceline.serve.settings import ServeConfig

pytest_plugins = ("tiny_server",)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


class Jumping(asyncio.SelectorEventLoop):
    """A loop whose time goes on only when nothing else is left to do."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:
            self.now = max(self.now, self._scheduled[0]._when)
        super()._run_once()


@pytest.fixture(scope="module")
def even(folder: Path) -> Iterator[Live]:
    def load() -> LLM:
        return LLM(str(folder), drafter="ngram", dtype="float32", device="cpu", max_batch=4, speculate="full")

    with serving(load, even_chunks=True, even_interval_s=2e-3) as running:
        yield running


def wire(live: Live, body: dict[str, Any], path: str = "/v1/chat/completions") -> list[bytes]:
    """HTTP chunks of a streamed answer, as they lay on the wire."""
    connection, raw = live.open_stream(body, path), b""
    with connection:
        while not raw.endswith(b"\r\n0\r\n\r\n"):
            piece = connection.recv(65536)
            assert piece, raw
            raw += piece
    rest, chunks = raw.split(b"\r\n\r\n", 1)[1], []
    while (size := int(rest.split(b"\r\n", 1)[0], 16)) > 0:
        rest = rest.split(b"\r\n", 1)[1]
        chunks.append(rest[:size])
        rest = rest[size + 2 :]
    return chunks


def data_of(chunks: list[bytes]) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in b"".join(chunks).split(b"\n\n") if line.startswith(b"data: {")]


def answers_of(parts: list[dict[str, Any]]) -> list[tuple[str, list[Any], list[int]]]:
    """Text, tool calls and token ids of each answer."""
    choices = [choice for part in parts for choice in part["choices"]]
    return [
        (
            "".join(each["delta"].get("content") or "" for each in choices if each["index"] == index),
            [
                call["function"]
                for each in choices
                for call in each["delta"].get("tool_calls", ())
                if each["index"] == index
            ],
            [token for each in choices for token in each["token_ids"] if each["index"] == index],
        )
        for index in sorted({each["index"] for each in choices})
    ]


REQUESTS: list[dict[str, Any]] = [
    {},
    {"stop": ["zz"]},
    {"n": 2, "stream_options": {"include_usage": True}},
    {"return_metrics": True, "return_timings": True, "paceline_timings": True},
    {"tools": [TOOL], "tool_choice": "required"},
]


@pytest.mark.parametrize("more", REQUESTS)
def test_chunks_have_one_size_and_the_same_text(live: Live, even: Live, more: dict[str, Any]) -> None:
    body = chat_body(temperature=1, seed=5, max_tokens=40, return_token_ids=True, ignore_eos=True) | more
    chunks = wire(even, body)
    assert {len(chunk) for chunk in chunks} == {FRAME} and len(chunks) % MULTIPLE == 0
    assert b"".join(chunks).rstrip().endswith(b"data: [DONE]")
    shown = answers_of(data_of(chunks))
    assert shown == answers_of(data_of(wire(live, body))) and len(shown[0][2]) > 0


def test_accepted_drafts_are_sent_one_by_one() -> None:
    target = Talker(num_rows=2, max_len=256, eos_bonus=-60.0)

    def drafting() -> Any:
        llm = fake_llm(target)
        llm.engine = Engine(target, llm.tokenizer, ScriptedDrafter(target, 3, accuracy=1.0))
        return llm

    with serving(drafting, even_chunks=True, even_interval_s=2e-3) as live:
        body = chat_body("x", max_tokens=60, temperature=0, paceline_timings=True, logprobs=True, top_logprobs=3)
        chunks = wire(live, body)
    assert {len(chunk) for chunk in chunks} == {FRAME + 4 * LOGPROB}
    parts = data_of(chunks)
    assert [len(part["paceline"]["tokens"]) for part in parts] == [1] * 60
    assert [len(part["choices"][0]["logprobs"]["content"]) for part in parts] == [1] * 60
    drafted = [part["paceline"]["drafted"] for part in parts]
    assert drafted[:9] == [0, 1, 1, 1, 0, 1, 1, 1, 0]
    for part in parts:
        (token,) = part["choices"][0]["logprobs"]["content"]
        assert part["choices"][0]["delta"]["content"] == token["token"]


def test_a_long_event_takes_several_frames(even: Live) -> None:
    prompt = "long " * 300
    body = {"prompt": prompt, "echo": True, "temperature": 0, "max_tokens": 4}
    chunks = wire(even, body, "/v1/completions")
    assert {len(chunk) for chunk in chunks} == {FRAME}
    parts = data_of(chunks)
    assert parts[0]["choices"][0]["text"].startswith(prompt) and len(parts) <= 4
    assert chunks[0].startswith(b":") and sum(b"long long" in chunk for chunk in chunks) == 4


def test_official_clients_read_the_same_answers(live: Live, even: Live) -> None:
    texts: list[list[str]] = []
    for server in (live, even):
        with server.client() as client:
            chat: Any = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "temperature": 0}
            stream = client.chat.completions.create(**chat, max_tokens=30, stream=True)
            texts.append(["".join(chunk.choices[0].delta.content or "" for chunk in stream)])
            answer = client.responses.create(model="tiny", input="Hi", temperature=0, max_output_tokens=30, stream=True)
            texts[-1].append("".join(event.delta for event in answer if event.type == "response.output_text.delta"))
        with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as messages:
            greedy: Any = {"extra_body": {"temperature": 0}}
            with messages.messages.stream(
                model="tiny", max_tokens=30, messages=[{"role": "user", "content": "Hi"}], **greedy
            ) as events:
                texts[-1].append("".join(events.text_stream))
    assert texts[0] == texts[1] and all(texts[0])


def test_a_drain_sends_streams_to_their_end() -> None:
    """The engine ends long before the stream does; uvicorn would wait for it no longer than it is told."""
    with serving(talker(0.0), even_chunks=True, even_interval_s=0.01) as live:
        live.server.config.timeout_graceful_shutdown = 0
        with live.open_stream(chat_body(max_tokens=40, temperature=0)) as stream:
            wait_until(lambda: live.seen.outcomes)
            live.drain()
            text = b"".join(iter(lambda: stream.recv(65536), b""))
        assert text.count(b"data: {") == 40 and b"[DONE]" in text
        assert live.server.config.timeout_graceful_shutdown > 20, "the rest of drain_seconds"


def test_whole_bodies_are_padded(even: Live) -> None:
    status, _, headers = even.post("/v1/chat/completions", chat_body(max_tokens=3))
    assert status == 200 and int(headers["content-length"]) % 4096 == 0


async def collected(delays: list[tuple[float, bytes]], interval_s: float) -> list[tuple[float, bytes]]:
    loop = asyncio.get_running_loop()

    async def pieces() -> AsyncIterator[bytes]:
        for delay_s, piece in delays:
            await asyncio.sleep(delay_s)
            yield piece

    return [(loop.time(), frame) async for frame in paced(pieces(), 64, interval_s)]


@pytest.mark.parametrize("delays", [[0.0] * 40, [0.5] * 40, [0.0, 0.0, 0.0, 0.7] * 10, [0.0] * 20 + [3.0] * 20])
def test_times_do_not_depend_on_when_tokens_come(delays: list[float]) -> None:
    events = [f"data: {place}\n\n".encode() for place in range(len(delays))]
    loop = Jumping()
    shown = loop.run_until_complete(collected(list(zip(delays, events, strict=True)), 0.25))
    loop.close()
    start = shown[0][0]
    assert [at - start for at, _ in shown] == pytest.approx([0.25 * place for place in range(len(shown))])
    assert {len(frame) for _, frame in shown} == {64} and len(shown) % MULTIPLE == 0
    assert events[-1] in shown[-1][1] and b"".join(re.findall(rb"data: \d+\n\n", b"".join(f for _, f in shown))) == (
        b"".join(events)
    )


def test_an_end_that_is_known_late_is_padded_too() -> None:
    """The last event had left before the stream was over, and the number of frames showed the answer's length."""

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(5):
            yield b"data: 1\n\n"
        await asyncio.sleep(1.6)

    async def read() -> list[bytes]:
        return [frame async for frame in paced(pieces(), 64, 0.25)]

    loop = Jumping()
    shown = loop.run_until_complete(read())
    loop.close()
    assert len(shown) == MULTIPLE and b"".join(shown).count(b"data: 1\n\n") == 5


def test_a_reader_that_was_slow_gets_no_burst() -> None:
    async def read() -> list[float]:
        loop, times = asyncio.get_running_loop(), []

        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(20):
                yield b"x"

        async for _ in paced(pieces(), 64, 0.25):
            times.append(loop.time())
            if len(times) == 5:
                await asyncio.sleep(10)
        return times

    loop = Jumping()
    times = loop.run_until_complete(read())
    loop.close()
    assert min(later - sooner for sooner, later in pairwise(times)) == pytest.approx(0.25)


def test_long_events_are_cut_and_short_ones_padded() -> None:
    for length in (0, 1, 59, 60, 61, 62, 63, 64, 65, 500):
        piece = b"d" * length
        cut = frames(piece, 64)
        assert {len(frame) for frame in cut} == {64} and len(cut) == -(-(length + 3) // 64)
        assert re.fullmatch(rb": *\n\n" + piece, b"".join(cut))


def test_the_rate_is_measured_rarely() -> None:
    pace = Pace()
    pace.observe([0.01] * (FIRST - 1))
    assert pace.interval_s == START_S
    pace.observe([0.02])
    assert pace.interval_s == 0.01
    for number in range(WINDOW - 1):
        pace.observe([0.1 * number])
        assert pace.interval_s == 0.01
    pace.observe([100.0])
    assert pace.interval_s == pytest.approx(0.1 * int(0.9 * (WINDOW - 1)))
    pace.observe([0.0] * WINDOW)  # two tokens of one round came at the same time
    assert pace.interval_s == 0.001
    fixed = Pace(0.5)
    fixed.observe([0.1] * WINDOW)
    assert fixed.interval_s == 0.5 and not fixed._measured, "a server that runs for long would keep all of them"


def test_a_rate_without_even_chunks_is_refused() -> None:
    with pytest.raises(ConfigError, match="even_chunks"):
        ServeConfig(even_interval_s=0.1)
    with pytest.raises(ConfigError, match="even_interval_s must be between"):
        ServeConfig(even_chunks=True, even_interval_s=1e-4)
