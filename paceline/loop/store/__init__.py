"""Dataset store: answers from server traces, the recording proxy, and `regenerate`.

    from paceline.loop.store.folder import Store
    store = Store.open("store")
    store.rows("train"), store.rows("evals")

`folder.py` reads and writes the files, `incoming.py` reads sources, `split.py` separates training from evals, `forget.py`
deletes, `card.py` summarises the contents.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.loop.store.folder import Store

__all__ = ["Store"]


def __getattr__(name: str) -> Any:
    if name == "Store":
        from paceline.loop.store.folder import Store

        return Store
    raise AttributeError(name)
