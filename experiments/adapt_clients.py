"""Clients for adapt_live.py and fleet_vllm.py: they send chats of several kinds to a server, and count its rounds."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from server_process import post

QUESTIONS, TICKETS, UNSEEN = "questions", "tickets", "unseen tickets"
Message = dict[str, Any]


@dataclass(frozen=True)
class Known:
    """A prompt, and the only right answer; None if every answer is."""

    messages: list[Message]
    text: str | None = None


@dataclass(frozen=True)
class Done:
    """A request that was answered."""

    ended: float
    """Seconds since 1970."""
    kind: str
    tokens: int
    """Tokens of rounds with drafts; next, the number of these rounds."""
    rounds: int
    is_right: bool
    text: str = ""


def rounds_of_paceline(answer: Any) -> tuple[int, int]:
    """Tokens and rounds with drafts, from the metrics of paceline's server."""
    sources = answer["metrics"]["speculative_decoding"]["rounds_by_source"]
    histograms = [each["accepted_histogram"] for name, each in sources.items() if name != "none"]
    rounds = sum(map(sum, histograms))
    return rounds + sum(number * count for histogram in histograms for number, count in enumerate(histogram)), rounds


def rounds_of_vllm(answer: Any) -> tuple[int, int]:
    """Tokens and rounds, from vLLM's metrics of the request; an answer of one token has no round."""
    figures = (answer.get("metrics") or {}).get("speculative_decoding") or {}
    rounds = figures.get("num_spec_steps") or 0
    return rounds + (figures.get("num_accepted_draft_tokens") or 0), rounds


@dataclass
class Traffic:
    """Clients that each send a request, wait some time (exponential, `think_s` on average), and send the next."""

    port: int
    prompts: Mapping[str, Sequence[Known]]
    """Kind -> its prompts, which are sent in turns."""
    max_tokens: int
    num_clients: int
    think_s: float
    shares: dict[str, float]
    """Kind -> its share of the requests; may be set at any time."""
    more: dict[str, Any] = field(default_factory=dict)
    """Further fields of each request."""
    rounds_of: Callable[[Any], tuple[int, int]] = rounds_of_paceline
    done: list[Done] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    _turns: dict[str, Iterator[Known]] = field(init=False)

    def __post_init__(self) -> None:
        self._turns = {kind: itertools.cycle(known) for kind, known in self.prompts.items()}

    def ask_instead(self, kind: str, known: Sequence[Known]) -> None:
        """From now on, these are the prompts of a kind."""
        self._turns[kind] = itertools.cycle(known)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Clients send requests while the block runs; at its end, answers in flight are awaited."""
        stop = threading.Event()
        clients = [threading.Thread(target=self._client, args=(stop, number)) for number in range(self.num_clients)]
        for client in clients:
            client.start()
        try:
            yield
        finally:
            stop.set()
            for client in clients:
                client.join()

    def each_once(self, kind: str, num_at_once: int) -> list[Done]:
        """Sends each prompt of a kind once; returns the answers that came, in the order of the prompts."""
        with ThreadPoolExecutor(num_at_once) as threads:
            answers = [*threads.map(lambda known: self._try(kind, known), self.prompts[kind])]
        return [answer for answer in answers if answer is not None]

    def _client(self, stop: threading.Event, seed: int) -> None:
        luck = random.Random(seed)
        while not stop.wait(luck.expovariate(1 / self.think_s) if self.think_s else 0.0):
            kind = luck.choices([*self.shares], [*self.shares.values()])[0]
            self._try(kind, next(self._turns[kind]))

    def _try(self, kind: str, known: Known) -> Done | None:
        try:
            return self._ask(kind, known)
        except (OSError, ValueError, KeyError, http.client.HTTPException) as error:
            self.failed.append(f"{kind}: {type(error).__name__} {error}")
            return None

    def _ask(self, kind: str, known: Known) -> Done | None:
        body = {"messages": known.messages, "max_tokens": self.max_tokens, "temperature": 0, **self.more}
        # A gateway sends the requests of one session to one replica.
        status, answer = post(self.port, body, {"x-paceline-tag": kind, "x-session-id": uuid.uuid4().hex})
        if status != 200:
            self.failed.append(f"{kind}: status {status} {str(answer)[:200]}")
            return None
        text = answer["choices"][0]["message"]["content"]
        is_right = known.text is None or text == known.text
        if not is_right:
            self.wrong.append(f"{kind}: {text!r} in place of {known.text!r}")
        tokens, rounds = self.rounds_of(answer)
        self.done.append(Done(time.time(), kind, tokens, rounds, is_right, text))
        return self.done[-1]

    def figures(self, kind: str, begin: float, end: float) -> dict[str, float]:
        """Requests, rounds and acceptance length of a kind's answers that ended in [begin, end)."""
        ended = [each for each in self.done if each.kind == kind and begin <= each.ended < end]
        tokens, rounds = sum(each.tokens for each in ended), sum(each.rounds for each in ended)
        return {"requests": len(ended), "rounds": rounds, "tokens_per_round": tokens / rounds if rounds else 0.0}
