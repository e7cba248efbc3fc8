"""Dataset store: answers from server traces, the recording proxy, and `regenerate`.

    from paceline.loop.store.folder import Store
    store = Store.open("store")
    store.rows("train"), store.rows("evals")

`folder.py` reads and writes the files, `incoming.py` reads sources, `split.py` separates training from evals,
`forget.py` deletes, `card.py` summarises the contents.
"""
