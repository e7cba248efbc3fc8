"""A double of Ray for tests of `--ray`: batches are made in this process, and what would travel is pickled."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any


class RayFailed(Exception):
    """In the place of Ray's own error."""


def sent(value: Any) -> Any:
    """The object after pickling, as another process receives it."""
    return pickle.loads(pickle.dumps(value))  # noqa: S301


class Rows:
    """A data set of Ray's: what is asked, and what goes through it to workers and back is pickled."""

    def __init__(self, rows: list[Any]) -> None:
        self.asked, self.options = rows, dict[str, Any]()
        self.work: Callable[[dict[str, Any]], dict[str, list[Any]]] = lambda batch: {}

    def map_batches(self, worker: Any, **options: Any) -> Rows:
        self.work, self.options = worker(**sent(options["fn_constructor_kwargs"])), options
        return self

    def iter_rows(self) -> Iterator[dict[str, Any]]:
        size = self.options["batch_size"]
        for at in reversed(range(0, len(self.asked), size)):
            batch = {"asked": sent(self.asked[at : at + size])}
            (result,) = self.work(batch)["made"]
            yield {"made": sent(result)}


class FakeRay:
    """As much of Ray as `distributed` uses: one machine of two processors, batches made in this process, the last
    first."""

    def __init__(self) -> None:
        self.exceptions = SimpleNamespace(RayError=RayFailed)
        context = SimpleNamespace(get_current=SimpleNamespace)
        self.data = SimpleNamespace(DataContext=context, from_items=self.from_items, ActorPoolStrategy=SimpleNamespace)
        self.rows: list[Rows] = []

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": {"CPU": 2.0}}, {"Alive": False, "Resources": {"CPU": 64.0}}]

    def from_items(self, items: list[dict[str, Any]], override_num_blocks: int) -> Rows:
        self.rows.append(Rows([each["asked"] for each in items]))
        return self.rows[-1]
