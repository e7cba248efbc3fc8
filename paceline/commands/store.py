"""Commands of `paceline store`: options and output of `paceline.loop.store`."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.commands.options import Changed, Opt, Without, options
from paceline.commands.shared import Json, TerminalProgress, say
from paceline.errors import ConfigError
from paceline.loop.store.config import SplitConfig

Tag = Annotated[
    list[str] | None,
    typer.Option(help="Only rows with this tag (x-paceline-tag). May be repeated.", show_default=False),
]
Folder = Annotated[Path, typer.Argument(metavar="STORE", help="Folder of the store.")]


@options
def store_add(
    store: Folder,
    sources: Annotated[
        list[Path], typer.Argument(help="Folders of traces or of regenerate's answers, or their Parquet files.")
    ],
    config: Annotated[SplitConfig, Changed(split_seed=Opt("--seed"))],
    model: Annotated[
        str | None, typer.Option(help="The model whose tokenizer was used; required for a new store only.")
    ] = None,
    tag: Tag = None,
    as_json: Json = False,
) -> dict[str, Any]:
    """Add traces and answers to a store, without duplicates.

    A store is a folder with a data set of prompts and answers; it is created if it does not exist. Each conversation is
    assigned to one of two sides: training, or evals (held out for evaluation).

    Examples:
      paceline store add store traces --model smollm2-135m
      paceline store add acme traces --model smollm2-135m --tag acme
    """
    from paceline.loop.store.folder import Store

    if (store / "store.json").is_file():
        opened = Store.open(store)
        if model is not None and model != opened.model:
            raise ConfigError(f"{store} holds tokens of {opened.model}, not of {model}: make another store for them")
        if config not in (SplitConfig(), opened.split):
            raise ConfigError(
                f"{store} is split in another way: leave these options out, or split it again with store split"
            )
    elif model is None:
        raise ConfigError(f"{store} is new: say whose tokens it holds with --model")
    else:
        opened = Store.create(store, model, config)
    line = opened.add(sources, progress=TerminalProgress(), tags=tag or ())
    say(f"card: {store / 'card.md'}")
    return line


@options
def store_show(store: Folder, tag: Tag = None, as_json: Json = False) -> dict[str, Any]:
    """Show the contents of a store, and its versions.

    Prints the numbers of rows by model, source and side (training or evals), and how many rows were left out and why.

    Examples:
      paceline store show store
    """
    from paceline.loop.store.card import card_of, text_of, write_card
    from paceline.loop.store.folder import Store

    opened = Store.open(store)
    write_card(opened)
    card = card_of(opened, tag or ())
    if not as_json:
        print(text_of(opened, card), end="")
    return card


@options
def store_split(
    store: Folder,
    config: Annotated[SplitConfig, Without("max_overlap"), Changed(split_seed=Opt("--seed"))],
    as_json: Json = False,
) -> dict[str, Any]:
    """Redraw the split between training and evals.

    Assigns the stored conversations to the two sides anew. A model trained before may have seen rows that are now on
    the evals side.

    Examples:
      paceline store split store --evals-share 0.2
    """
    from paceline.loop.store.folder import Store

    opened = Store.open(store)
    line = opened.resplit(replace(config, max_overlap=opened.split.max_overlap))
    rows = line["rows"]
    say(f"version {line['version']}: {rows['train']} rows to train on, {rows['evals']} for evals")
    say("note: models and drafters that were trained on an earlier version may have seen rows that are now for evals")
    return line


@options
def store_label(
    store: Folder,
    run: Annotated[Path, typer.Argument(help="Run folder of evals run, for a suite made from this store.")],
    as_json: Json = False,
) -> dict[str, Any]:
    """Attach the scores of an evals run to stored rows.

    Each score of the run is stored with the row from which its question was made.

    Examples:
      paceline store label store runs/evals-20261125-041500
    """
    from paceline.loop.evals.scores import read_scores
    from paceline.loop.store.folder import Store

    scores = read_scores(run)
    labels = [
        {"digest": case.id, "suite": scores.suite, "who": scores.name, "scorer": case.kind, "score": case.score}
        for case in scores.cases
    ]
    number = Store.open(store).label(labels)
    say(f"{number} of {len(labels)} scores are of rows of this store")
    return {"labels": number, "of": len(labels)}


@options
def store_forget(
    store: Folder,
    match: Annotated[str, typer.Option(help="Regular expression: deletes every conversation that contains a match.")],
    sources: Annotated[
        bool, typer.Option("--sources", help="Also delete matching rows from the files that were added to the store.")
    ] = False,
    as_json: Json = False,
) -> dict[str, Any]:
    """Delete every conversation that matches a pattern.

    A conversation is deleted if --match matches its prompt, an answer, its tag, its source or its sampling settings.
    Its scores and the test cases of eval suites made from it are deleted too. This cannot be undone. Deleted answers
    are rejected if they are added again.

    The files that were added to the store are not changed, and those with matching rows are listed. With --sources,
    these rows are deleted from them too.

    Examples:
      paceline store forget store --match "jane@example\\.com" --sources
    """
    from paceline.loop.store.folder import Store
    from paceline.loop.store.forget import forget

    done = forget(Store.open(store), match, in_sources=sources)
    say(
        f"version {done.version}: forgot {done.conversations} conversations, {done.rows} rows, {done.labels} labels, "
        f"{done.cases} cases of suites" + (f", {done.source_rows} rows of sources" if sources else "")
    )
    for file in done.sources_with_it:
        say(f"still has it: {file}" + ("" if sources else " (--sources deletes it there)"))
    for file in done.suites_with_it:
        say(f"may still have it: the suite {file}")
    for file in done.suites_gone:
        say(f"no longer there, and not reached if it was copied: the suite {file}")
    return asdict(done)
