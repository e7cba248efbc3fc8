"""Clients that ask a server without end, of several kinds of prompts in shares that change, and compare every answer."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import random
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from server_process import post

Message = dict[str, Any]


@dataclass(frozen=True)
class Known:
    """A prompt, and the only answer that is right."""

    messages: list[Message]
    text: str


@dataclass(frozen=True)
class Done:
    """A request that was answered."""

    ended: float
    """Seconds since 1970."""
    kind: str
    tokens: int
    """That rounds with drafts brought; next, their number."""
    rounds: int
    is_right: bool


@dataclass
class Traffic:
    """So many clients; each asks, waits some time (exponential, `think_s` on average), and asks again."""

    port: int
    prompts: Mapping[str, Sequence[Known]]
    """Kind -> what is asked, in turns."""
    max_tokens: int
    num_clients: int
    think_s: float
    shares: dict[str, float]
    """Kind -> its share of the requests; may be set at any time."""
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
        """While the block runs; answers under way at its end are waited for."""
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

    def _client(self, stop: threading.Event, seed: int) -> None:
        luck = random.Random(seed)
        while not stop.wait(luck.expovariate(1 / self.think_s) if self.think_s else 0.0):
            kind = luck.choices([*self.shares], [*self.shares.values()])[0]
            try:
                self._ask(kind, next(self._turns[kind]))
            except (OSError, ValueError, KeyError, http.client.HTTPException) as error:
                self.failed.append(f"{kind}: {type(error).__name__} {error}")

    def _ask(self, kind: str, known: Known) -> None:
        body = {"messages": known.messages, "max_tokens": self.max_tokens, "temperature": 0, "return_metrics": True}
        status, answer = post(self.port, body, {"x-paceline-tag": kind})
        if status != 200:
            self.failed.append(f"{kind}: status {status} {str(answer)[:200]}")
            return
        text = answer["choices"][0]["message"]["content"]
        if text != known.text:
            self.wrong.append(f"{kind}: {text!r} in place of {known.text!r}")
        sources = answer["metrics"]["speculative_decoding"]["rounds_by_source"]
        histograms = [each["accepted_histogram"] for name, each in sources.items() if name != "none"]
        rounds = sum(map(sum, histograms))
        tokens = rounds + sum(number * count for histogram in histograms for number, count in enumerate(histogram))
        self.done.append(Done(time.time(), kind, tokens, rounds, text == known.text))

    def figures(self, kind: str, begin: float, end: float) -> dict[str, float]:
        """Of the answers of a kind that ended in [begin, end)."""
        found = [each for each in self.done if each.kind == kind and begin <= each.ended < end]
        tokens, rounds = sum(each.tokens for each in found), sum(each.rounds for each in found)
        return {"requests": len(found), "rounds": rounds, "tokens_per_round": tokens / rounds if rounds else 0.0}
