"""Dataset store: a folder of prompts and answers for training and evals, collected from server traces, from the
recording proxy, or from `paceline regenerate`.

    from paceline.loop.store.folder import Store
    store = Store.open("store")
    store.rows("train"), store.rows("evals")

`folder.py` reads and writes the files, `incoming.py` reads answers to be added, `split.py` separates training from
evals, `forget.py` deletes conversations, `card.py` summarises the contents."""
