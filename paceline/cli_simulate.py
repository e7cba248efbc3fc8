"""The `simulate` command. Options are read here; `commands/simulate.py` does the work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli_options import Json, Option, numbers

Target = Annotated[
    str | None, Option("--model", help="A name of --list, a config.json, or a folder with one [default: smollm2-135m].")
]
Hardware = Annotated[str | None, Option(help="A name of --list; this measures the machine at hand [default: this].")]
Gpus = Annotated[int, Option(help="Tensor parallel over so many of them.")]
Batch = Annotated[str, Option(help="Sequences that decode together; several, comma-separated, make a sweep.")]
Context = Annotated[int, Option(help="Tokens in each sequence's cache.")]
Accepted = Annotated[
    str,
    Option(
        help="One chance (0.8), a chance for each place (0.8,0.75,0.7), survival:.77,.57,.42, histogram:20,10,5, "
        "or a bench decode run, its results.json, or a trace."
    ),
]
DrafterShare = Annotated[
    float | None, Option(help="A drafter pass, as a share of a plain target pass at the same batch [default: 0.1].")
]
DrafterParams = Annotated[
    float | None, Option(help="Parameters of the drafter, such as 0.98e9: its own roofline, not a share.")
]
Block = Annotated[
    int | None, Option(help="Drafts of one drafter pass (DFlash: 16); without, a pass drafts one token (MTP, EAGLE).")
]
MaxDraft = Annotated[int, Option(help="Longest draft considered.")]
Precision = Annotated[
    str | None,
    Option(help="bf16, fp8, ... for weights and experts, or by part: weights=fp8,experts=fp4,attention=bf16,kv=fp8."),
]
Locality = Annotated[
    float, Option(help="0: every position draws its experts anew; 1: a sequence's positions share them; 0.255: measured.")
]
PerLayer = Annotated[bool, Option("--per-layer", help="Take attention's limits by kind of layer, not over all.")]
Toy = Annotated[bool, Option("--toy", help="Drafting and verifying are free: what acceptance alone would bring.")]
Table = Annotated[Path | None, Option(help="Measured step times (of bench steps) in place of the roofline.")]
Fitted = Annotated[Path | None, Option(help="A calibration.json: the roofline as it was fitted to a machine.")]
Calibrate = Annotated[
    list[Path] | None, Option(metavar="FOLDER", help="Fit the roofline to the step times of a bench steps run; repeatable.")
]
Flags = Annotated[bool, Option("--flags", help="Also print the server flags: paceline, vLLM, SGLang.")]
Method = Annotated[
    str | None, Option(help="For the flags: dflash, mtp, eagle3, draft-model, ngram [default: dflash with --block, else mtp].")
]
DrafterName = Annotated[str | None, Option(help="For the flags: the drafter's folder or hub id.")]
Out = Annotated[Path | None, Option(help="With --calibrate: folder of its files [default: that of the step times].")]
List = Annotated[bool, Option("--list", help="List models and machines.")]


def simulate(
    model: Target = None,
    hardware: Hardware = None,
    gpus: Gpus = 1,
    batch: Batch = "1",
    context: Context = 4096,
    acceptance: Accepted = "0.8",
    drafter_cost: DrafterShare = None,
    drafter_params: DrafterParams = None,
    block: Block = None,
    max_draft: MaxDraft = 16,
    precision: Precision = None,
    expert_locality: Locality = 0.0,
    per_layer: PerLayer = False,
    toy: Toy = False,
    table: Table = None,
    calibration: Fitted = None,
    calibrate: Calibrate = None,
    flags: Flags = False,
    method: Method = None,
    drafter: DrafterName = None,
    out: Out = None,
    list_known: List = False,
    as_json: Json = False,
) -> None:
    """Predict what speculation brings before anything is built: the best draft length, the speed-up, where the time goes.

    A round drafts g tokens and verifies g + 1 positions in one target pass; it yields N(g) tokens, more the more drafts stand:
    speed-up(g) = N(g) / (pass of g + 1 positions / plain pass + drafting / plain pass). A dense model at a small batch verifies
    drafts almost for nothing. A mixture of experts does not: at batches of 4 to 8 each draft brings new experts to read.
    Neither a GPU nor weights are needed; each prediction prints its limits. docs/simulate.md has the formulas.

    Example: paceline simulate --model DeepSeek-V4-Pro --hardware B200 --batch 1,8,32,128 --acceptance 0.89 --block 16

    Example: paceline simulate --model Qwen3-8B --hardware H100 --acceptance runs/bench-decode-1 --flags

    Example: paceline bench steps --out runs/steps && paceline simulate --calibrate runs/steps
    """
    _simulate(dict(locals()))


def _simulate(given: dict[str, Any]) -> None:
    from paceline.commands.simulate import SimulateAsk, list_known
    from paceline.commands.simulate import simulate as run

    if given.pop("list_known"):
        list_known(given["as_json"])
        return
    folders = given.pop("calibrate")
    batches = tuple(int(value) for value in numbers("--batch", given.pop("batch"), whole=True))
    ask = SimulateAsk(batches=batches, **given)
    if folders:
        from paceline.commands.simulate_calibrate import calibrate

        calibrate(ask, folders)
    else:
        run(ask)


def add_commands(app: typer.Typer) -> None:
    """Register the command of this module."""
    app.command("simulate")(simulate)
