"""One place for what was asked and answered: traces of a server, of the recording proxy, and what `regenerate` wrote.

    from paceline.loop.store import Store
    store = Store.open("store")
    store.rows("train"), store.rows("evals")

`folder.py` has the files, `incoming.py` reads sources, `copies.py` finds what is there already, `split.py` keeps training and
evals apart, `forget.py` deletes, `card.py` says what is in it. Importing this is quick.
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
