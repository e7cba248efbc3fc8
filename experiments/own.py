"""The demonstration of `make own`: a drafter learns one workload in two minutes, then drafts for unseen requests.

    python experiments/own.py                       # smollm2-135m (98 MB): 300 tickets, two minutes of training
    python experiments/own.py --minutes 5           # continues the same training, up to five minutes in all
    python experiments/own.py --block-size 16 --minutes 10 --out runs/own-16
    python experiments/own.py --model path/to/model --init path/to/drafter --out runs/own-mine

The workload is recipes/support_tickets.py: a shop whose model answers tickets in JSON. The model's answers to the 300
training tickets are in recipes/answers/smollm2-135m/tickets, made by

    paceline regenerate --target smollm2-135m --prompts train.jsonl --max-tokens 96

The model answers some of these tickets again at the start: if a token differs, or for another model, it answers all
tickets anew. Training starts from the drafter that ships (--init default). The chart shows the acceptance length of
tickets that the engine serves during training: accepted drafts per round plus the target's own token. At the end, plain
decoding, the drafter that training started from, and the trained drafter answer other tickets; no customer, city,
product or remark of these occurs in the training tickets. Ctrl-C saves the run; the same command continues it.

Exit status 1 if an answer with drafts differs from plain decoding's in any token.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from own_chart import ChartProgress

from paceline import LLM, SamplingParams
from paceline.bench.config import BASELINE, BenchConfig
from paceline.bench.decode import Bench, Result, set_figures
from paceline.commands.shared import TerminalProgress
from paceline.config import EngineConfig
from paceline.data.answers import AnswerShards
from paceline.data.prompts import Prompt, read_prompts
from paceline.errors import PacelineError
from paceline.report.statistics import Rounds
from paceline.report.tables import Column, Table
from paceline.runs.folder import RunFolder, plain
from paceline.runs.stopping import STATUS
from paceline.train import regenerate, train
from paceline.train.config import (
    AnswerConfig,
    DrafterShape,
    LoopConfig,
    LossConfig,
    OptimConfig,
    PromptsConfig,
    RegenerateConfig,
    TrainConfig,
)
from paceline.train.plan.stored_plan import stored_plan
from paceline.train.run_file import TRAINED

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "support_tickets.py"
SHIPPED_FOR = "smollm2-135m"
SHIPPED = ROOT / "recipes" / "answers" / SHIPPED_FOR / "tickets"
"""The answers of this model to the recipe's first 300 training tickets."""
CHECKED = 4
"""Number of shipped answers that the model generates again."""
MAX_TOKENS = 96
"""Longest answer, in tokens; the longest of the 300 has 69."""
SERVED = 8
"""Number of held-out tickets that the engine serves for the chart; the final comparison uses others."""
LEARNING = LoopConfig(
    epochs=1000.0,
    blocks_per_step=96,
    anchors=32,
    loss=LossConfig(vocab=8192),
    optim=OptimConfig(lr=1e-3),
    heldout_every=5,
    serve_share=0.15,
    selector_from=0.0,
)
"""Settings of the training steps. The minutes end the training before its epochs."""
INTERRUPTED = 130
"""Exit status after Ctrl-C: 128 + 2."""


@dataclass(frozen=True, slots=True)
class Tickets:
    """Files of tickets, one prompt per line."""

    train: Path
    served: Path
    """Held-out tickets of the chart."""
    unseen: Path
    """Held-out tickets of the final comparison."""


def write_tickets(out: Path, num_train: int, num_unseen: int) -> Tickets:
    """Write the workload of recipes/support_tickets.py to `out`; the held-out tickets become two files."""
    numbers = ["--train", str(num_train), "--heldout", str(SERVED + num_unseen)]
    subprocess.run([sys.executable, RECIPE, *numbers, "--out", out], check=True, stdout=subprocess.DEVNULL)
    lines = (out / "heldout.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    files = Tickets(out / "train.jsonl", out / "served.jsonl", out / "unseen.jsonl")
    files.served.write_text("".join(lines[:SERVED]), encoding="utf-8")
    files.unseen.write_text("".join(lines[SERVED:]), encoding="utf-8")
    return files


def messages_of(prompts: Sequence[Prompt]) -> list[list[dict[str, Any]]]:
    return [list(prompt.messages) for prompt in prompts]


def is_answered_alike(llm: LLM, folder: Path, prompts: Sequence[Prompt]) -> bool:
    """Return True if the answers in `folder` belong to exactly these tickets, and the model gives the first ones again
    token for token."""
    stored = {tuple(answer.prompt_ids): answer.answer_ids for answer in AnswerShards(folder)}
    ids = [llm.encode_chat(messages) for messages in messages_of(prompts)]
    if set(map(tuple, ids)) != set(stored):
        return False
    answers = llm.generate_ids(ids[:CHECKED], SamplingParams(max_tokens=MAX_TOKENS))
    return all(stored[tuple(each.prompt_token_ids)] == each.token_ids for each in answers)


def prepared(args: argparse.Namespace, tickets: Tickets) -> tuple[float, Path]:
    """Return the acceptance length of the chart's tickets before training, and the folder of the answers to learn
    from: those that are shipped, if the model gives the same, else new ones."""
    settings = {"drafter": args.init, "speculate": "full", "max_batch": SERVED, "threads": args.threads}
    llm = LLM(args.model, **settings)
    served = llm.chat(messages_of(read_prompts(tickets.served)), SamplingParams(max_tokens=MAX_TOKENS))
    before = Rounds.sum(answer.stats for answer in served).tokens_per_round
    if args.model == SHIPPED_FOR and is_answered_alike(llm, SHIPPED, read_prompts(tickets.train)):
        print(f"answers: {SHIPPED.relative_to(ROOT)}, the first {CHECKED} generated again: the same tokens")
        return before, SHIPPED
    del llm
    target = EngineConfig(args.model, threads=args.threads)
    prompting, answering = PromptsConfig((str(tickets.train),)), AnswerConfig(max_tokens=MAX_TOKENS)
    config = RegenerateConfig(args.out / "answers", target, prompting, answering)
    return before, regenerate(config, progress=TerminalProgress()).answers


def training_of(args: argparse.Namespace, tickets: Tickets, answers: Path) -> TrainConfig:
    """Return the settings of the training. They stay the same when a run is continued, except for its minutes."""
    return TrainConfig(
        out=args.out / "train",
        target=EngineConfig(args.model, threads=args.threads),
        answers=(answers,),
        init=args.init,
        heldout=(str(tickets.served),),
        features="cached",
        minutes=args.minutes,
        answering=AnswerConfig(max_tokens=MAX_TOKENS),
        loop=LEARNING,
        shape=DrafterShape(block_size=args.block_size),
    )


def is_trained(config: TrainConfig) -> bool:
    """Return True if the run has finished and has no minutes left."""
    plan = stored_plan(config.out) or {}
    return (config.out / TRAINED).is_file() and plan.get("minutes", 0.0) >= (config.minutes or 0.0)


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Within the block, Ctrl-C has the effect of SIGTERM if the training handles that signal: it finishes its step and
    writes a checkpoint."""

    def stop(*_: Any) -> None:
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGTERM)

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def compare(args: argparse.Namespace, tickets: Tickets, drafter: Path) -> tuple[list[Result], list[dict[str, Any]]]:
    """Return the results of plain decoding, the generic and the own drafter on the unseen tickets, and the figures of
    answers that end in a loop."""
    llm = LLM(args.model, drafter=BASELINE, speculate=args.speculate, max_batch=1, threads=args.threads)
    config = BenchConfig(drafters=(args.init, str(drafter)), max_tokens=MAX_TOKENS)
    bench = Bench(llm, read_prompts(tickets.unseen), config, notice=lambda text: print(text, file=sys.stderr))
    with TerminalProgress().bar("answering unseen tickets", bench.num_answers) as advance:
        bench.run(on_answer=lambda setting: advance(f"answering unseen tickets: {Path(setting.drafter).name}"))
    figures = set_figures(bench)
    return figures["results"], figures["looping"]


def table_of(results: Sequence[Result]) -> Table:
    """Return the comparison as a table; `results` are of plain decoding, the generic drafter and the own drafter."""
    named = [*zip(("plain decoding", "generic drafter", "own drafter"), results, strict=True)]
    columns = (
        Column("", lambda row: row[0]),
        Column("acceptance length", lambda row: row[1].tokens_per_round, "{:.2f}", "right"),
        Column("tokens/s", lambda row: row[1].tokens_per_s, "{:.0f}", "right"),
        Column("times plain", lambda row: row[1].speedup, "{:.2f}", "right"),
        Column("same tokens as plain", lambda row: row[1].identical, "{:.0%}", "right"),
    )
    return Table(columns, named, notes=[f"{name}: {result.doubt}" for name, result in named if result.doubt])


def report(results: Sequence[Result], looping: Sequence[dict[str, Any]], drafter: Path) -> int:
    """Print the comparison and what to do next; return the exit status."""
    _, generic, own = results
    table_of(results).show(stderr=False)
    ratio = (own.tokens_per_round or 0.0) / (generic.tokens_per_round or 1.0)
    print(
        f"own drafter: {ratio:.2f} times the acceptance length of the generic one, on {own.num_answers} tickets of "
        "customers, cities and products that it never saw"
    )
    for figures in looping:
        if figures["looping_share"]:
            print(
                f"{figures['looping_share']:.0%} of the answers end in a loop; without them its acceptance length is "
                f"{figures['without_loops'] or 0.0:.2f}"
            )
    print(f"drafter: {drafter}   (paceline serve --drafter {drafter} --traces traces/)")
    print("what would your traffic bring: paceline advise traces/")
    differences = [(result.drafter, each) for result in results for each in result.differences]
    for drafter_name, each in differences:
        print(
            f"error: {drafter_name}: another token than plain decoding's in {each.request}, after {each.index} equal "
            f"ones (logits {each.top2_gap:.3g} apart): please report it",
            file=sys.stderr,
        )
    return 1 if differences else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=SHIPPED_FOR)
    parser.add_argument("--init", default="default", help="drafter to start from, and to compare with")
    parser.add_argument(
        "--minutes", type=float, default=2.0, help="minutes for hidden states and training steps, in all"
    )
    parser.add_argument(
        "--block-size",
        type=int,
        default=8,
        help="positions of a block that the drafter learns: the anchor and its drafts",
    )
    parser.add_argument("--tickets", type=int, default=300, help="training tickets; more than 300 are answered anew")
    parser.add_argument("--unseen", type=int, default=20, help="tickets of the comparison")
    parser.add_argument("--speculate", default="full", help="drafts of the comparison, as for paceline generate")
    parser.add_argument("--threads", type=int, help="CPU threads [default: PyTorch's choice]")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/own"), help="folder of the run, which a second one continues"
    )
    return parser.parse_args()


def main() -> int:
    args, began = arguments(), time.monotonic()
    tickets = write_tickets(args.out / "tickets", args.tickets, args.unseen)
    before, answers = prepared(args, tickets)
    config = training_of(args, tickets, answers)
    drafter = config.out / "drafter"
    if is_trained(config):
        print(f"{drafter} has had its {args.minutes:g} minutes: --minutes {2 * args.minutes:g} trains it further")
    else:
        print(f"training on {args.tickets} tickets for {args.minutes:g} minutes, from the {args.init} drafter")
        progress = ChartProgress(config.out, before)
        with stoppable():
            train(config, progress=progress)
    learned_s = time.monotonic() - began
    results, looping = compare(args, tickets, drafter)
    status = report(results, looping, drafter)
    seconds = time.monotonic() - began
    figures = {"what": "own", "before": before, "results": results, "looping": looping, "seconds": seconds}
    settings = {"model": args.model, "init": args.init, "minutes": args.minutes}
    RunFolder(args.out).results(plain(figures | settings | {"learned_s": learned_s}))
    print(f"{seconds:.0f} s in all; {args.out} holds the run, the same command uses it again")
    return status


if __name__ == "__main__":
    try:
        sys.exit(main())
    except PacelineError as error:
        sys.exit(f"error: {error}")
    except (KeyboardInterrupt, SystemExit) as error:
        if isinstance(error, SystemExit) and error.code != STATUS:
            raise
        print("\nstopped: what is finished is saved, and the same command goes on from there", file=sys.stderr)
        sys.exit(INTERRUPTED)
