"""Builds the calculator page: one self-contained HTML file with formulas, catalogue and machines, which works offline.

`page/` holds its parts: JavaScript modules that are joined into one script, a style sheet, and uPlot for the charts
(vendor/). The catalogue is embedded as JSON. The content security policy lists the hashes of script and style and
forbids all loading.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import paceline
from paceline.hardware import Machine
from paceline.report.pages import look
from paceline.simulate import limits
from paceline.simulate.costs import catalogue
from paceline.simulate.costs.model_config import KEYS
from paceline.simulate.costs.roofline import COLLECTIVE_LATENCY_S, MEASURED_LOCALITY
from paceline.simulate.costs.shapes import FORMATS, ModelShape
from paceline.simulate.files import read_json
from paceline.simulate.flags import FLAGS

FOLDER = Path(__file__).parent / "page"
_PURE = "formulas config_reader hf_config flags limits results state argument watch"
_NEED_PAGE = "marks charts editor controls cards tabs tokens columns assumptions problem tools views page"
PURE = tuple(f"{name}.js" for name in _PURE.split())
"""JavaScript modules that also run outside a page, in order of their imports."""
SCRIPTS = (*PURE, *(f"{name}.js" for name in _NEED_PAGE.split()))
CHARTS = "vendor/uPlot.iife.min.js"
PIECE = re.compile(r"\s*\S{1,6}")
IMPORT = re.compile(r"^import [^;]+;\n", re.MULTILINE)


def page(this_machine: Machine | None = None) -> str:
    """Returns the HTML of the calculator page, which predicts speed-ups in the browser. `this_machine` is listed in
    addition to the known machines."""
    script, style = _read(CHARTS) + joined(), _read("vendor/uPlot.min.css") + look() + _read("calculator.css")
    parts = {
        "SCRIPT-HASH": hash_of(script),
        "STYLE-HASH": hash_of(style),
        "/* LICENCE */": html.escape(_read("vendor/uPlot.LICENSE")),
        "/* STYLE */": style,
        "/* DATA */": embedded(data(this_machine)),
        "/* SCRIPT */": script,
    }
    pattern = re.compile("|".join(map(re.escape, parts)))
    return pattern.sub(lambda match: parts[match[0]], _read("calculator.html"))


def joined(names: Sequence[str] = SCRIPTS) -> str:
    """Returns the page's JavaScript as one script: the files `names`, in this order, without their import lines. The
    JSON tables that they import come first, as constants."""
    tables = f"const CONFIG_KEYS = {embedded(KEYS)}, FLAGS = {embedded(FLAGS)};\n"
    return tables + "".join(IMPORT.sub("", _read(name)) for name in names)


def data(this_machine: Machine | None = None) -> dict[str, Any]:
    """Returns the data that the page contains as JSON, with these keys:

    - version: paceline's version;
    - models: name -> sizes of a model;
    - unavailable: a sentence that names the models without known sizes, or "";
    - machines: name -> rates of a machine, and "option", its name on the command line;
    - formats: name -> number format;
    - measured_locality: expert locality fitted to measurements;
    - latency_s: seconds of latency of one all-reduce between GPUs;
    - limits: templates of the sentences on a prediction's limits;
    - measured, passage: results of `measured()` and `passage()`."""
    machines = {name: {**asdict(machine), "option": name} for name, machine in catalogue.machines().items()}
    if this_machine is not None:
        machines["this machine"] = {**asdict(this_machine), "option": "this"}
    unavailable = [name for name, entry in catalogue.entries().items() if "unavailable" in entry]
    return {
        "version": paceline.__version__,
        "models": {name: _model(shape) for name, shape in catalogue.all_shapes().items()},
        "unavailable": f"Sizes not public: {', '.join(unavailable)}." if unavailable else "",
        "machines": machines,
        "formats": {name: {"name": name, **asdict(kind)} for name, kind in FORMATS.items()},
        "measured_locality": MEASURED_LOCALITY,
        "latency_s": COLLECTIVE_LATENCY_S,
        "limits": limits.TEXTS,
        "measured": measured(),
        "passage": passage(),
    }


def measured() -> dict[str, dict[str, Any]]:
    """Returns the measured speed-ups in the page's chart, in two series: "published" (another system's) and "own"
    (paceline's). A series has a "label", a "note" and "points". A point has a "label" (drafter, model and prompts, or
    "mocked"), "batch", "tokens_per_round", "speedup" (over plain decoding), and "is_mocked" (True for mocked
    acceptance)."""
    system = read_json(Path(__file__).with_name("landmarks.json"), "install paceline again")["systems"][0]
    points = [each for each in system["points"] if "tokens_per_round" in each]
    published = [
        _point("mocked", each["tokens_per_round"], each["rate"] / system["plain_rate"], True) for each in points
    ]
    own = read_json(Path(__file__).with_name("measured.json"), "install paceline again")
    drafters = [
        _point(
            f"{each['drafter']}, {each['model']}, {each['prompts'].removesuffix('.jsonl')}",
            each["tokens_per_round"],
            each["speedup"],
            False,
        )
        for each in own["points"]
    ]
    return {
        "published": {"label": f"published: {system['model']}, mocked", "note": system["source"], "points": published},
        "own": {"label": "measured: paceline, two models' drafters on a CPU", "note": own["note"], "points": drafters},
    }


def _point(label: str, tokens_per_round: float, speedup: float, is_mocked: bool) -> dict[str, Any]:
    return {
        "label": label,
        "batch": 1,
        "tokens_per_round": tokens_per_round,
        "speedup": speedup,
        "is_mocked": is_mocked,
    }


def passage() -> list[str]:
    """Returns a sample text in pieces of about one token. The page shows them one by one at the predicted decoding
    speed; no model generated the text."""
    return PIECE.findall(_read("passage.txt").strip())


def _model(shape: ModelShape) -> dict[str, Any]:
    active = f"-A{_short(shape.num_active)}" if shape.experts else ""
    label = f"{shape.name}, {_short(shape.num_parameters)}{active}"
    name = shape.name
    return {
        "shape": asdict(shape),
        "label": label,
        "hub": catalogue.served_name(name),
        "has_decoder": catalogue.has_decoder(name),
    }


def _short(number: float) -> str:
    # From 999.5 on three digits would be written as 1e+03.
    sizes = ((1e12, "T"), (1e9, "B"))
    size, letter = next(((size, letter) for size, letter in sizes if number >= 0.9995 * size), (1e6, "M"))
    return f"{number / size:.3g}{letter}"


def embedded(value: Any) -> str:
    """Returns a value as JSON text that can be embedded in an HTML page: the characters &, < and > are escaped."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def hash_of(text: str) -> str:
    """Returns the SHA-256 of a script or style sheet as a content security policy lists it: "sha256-" and base64."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")
