"""Table of all commands: section in `paceline --help`, name, module and summary.

`paceline/cli.py` reads this table, so that `--help` imports no command. A test compares each summary with the first
line of the command's docstring.
"""

from __future__ import annotations

from typing import NamedTuple


class Entry(NamedTuple):
    """One command, or a group of commands such as `bench`: where it is defined, and its one-line summary."""

    module: str
    """The module under `paceline.commands` that defines it; empty for a group."""
    summary: str
    """One line of at most 58 characters, so that name and summary fit into 80 columns."""
    members: dict[str, Entry] | None = None
    """The commands of a group by name; None for a command. Their functions are named `<group>_<command>`."""


def _group(module: str, summary: str, **members: str) -> Entry:
    return Entry("", summary, {name: Entry(module, text) for name, text in members.items()})


SECTIONS: dict[str, dict[str, Entry]] = {
    "Generate": {
        "generate": Entry("generate", "Answer one prompt and report speed and acceptance."),
        "chat": Entry("chat", "Chat with a model in the terminal."),
        "compare": Entry("compare", "Replay one answer without and with drafts, side by side."),
        "models": Entry("models", "List the built-in models and their drafters."),
    },
    "Train a drafter": {
        "train": Entry("train", "Train a drafter for a model from prompts or traffic."),
        "regenerate": Entry("train", "Have the target answer prompts: the data to train on."),
        "search": Entry("search", "Search training settings that serve a workload fastest."),
        "synthesize": Entry("synthesize", "Make training data for an application without traffic."),
        "evaluate": Entry("evaluate", "Measure a drafter in the real engine, set by set."),
        "report": Entry("evaluate", "Write the HTML page of a run."),
        "inspect": Entry("checkpoints", "Describe a drafter, and check that it fits a model."),
        "export": Entry("checkpoints", "Convert a drafter for vLLM, SGLang or llama.cpp."),
    },
    "Serve": {
        "serve": Entry("serve", "Serve a model over OpenAI's API."),
        "drafters": _group(
            "drafters",
            "List, load, drain and unload drafters of a running server.",
            list="List the drafters of a running server.",
            load="Load a drafter, or replace one, while the server answers.",
            drain="Give a drafter no new requests; running ones finish.",
            unload="Free the memory of a drafter that serves no request.",
        ),
        "audit": Entry("audit", "Check that an endpoint runs the model it claims to run."),
    },
    "Predict and measure": {
        "advise": Entry("advise", "Decide whether a drafter of your own is worth it."),
        "simulate": Entry("simulate", "Predict the speed-up of speculation before training."),
        "simulate-serving": Entry("simulate_serving", "Predict a server's latency and throughput under load."),
        "calculator": Entry("calculator", "Write the predictions as one interactive HTML page."),
        "bench": _group(
            "bench",
            "Measure speed and acceptance in the real engine.",
            decode="Measure decoding speed and acceptance.",
            serving="Measure a server under load, with and without drafts.",
            latency="Measure where a request's milliseconds go.",
            steps="Measure step times for `simulate --calibrate`.",
            lossy="Measure the speed-up and the cost of lossy rules.",
        ),
    },
    "Keep it fitted": {
        "record": Entry("record", "Record the traffic of an OpenAI-compatible server."),
        "adapt": _group(
            "adapt",
            "Detect drift, retrain, gate, roll out and roll back.",
            watch="Run the daemon that keeps a server's drafters fitted.",
            check="Decide once, from the latest hour of stored traffic.",
            replay="Replay a policy on a virtual clock, without training.",
            log="Show observations, decisions and actions by hour.",
            gate="Judge whether a drafter may replace the serving one.",
        ),
        "mcp": Entry("mcp", "Let an AI agent adapt a server's drafter, over MCP."),
        "store": _group(
            "store",
            "Keep traffic in one place, for training and evals.",
            add="Add traces and answers to a store, without duplicates.",
            show="Show the contents of a store, and its versions.",
            split="Redraw the split between training and evals.",
            label="Attach the scores of an evals run to stored rows.",
            forget="Delete every conversation that matches a pattern.",
        ),
    },
    "Own your model": {
        "evals": _group(
            "evals",
            "Score answers: suites, intervals, gates.",
            make="Make a suite of cases from a store or a file.",
            run="Score a model, a model with a drafter, or an endpoint.",
            compare="Compare two runs of one suite, case by case.",
        ),
        "distill": Entry("distill", "Train a smaller model on a larger one's answers."),
        "turn": Entry("turn", "Run the whole loop: evals, drafter, smaller model."),
    },
}
