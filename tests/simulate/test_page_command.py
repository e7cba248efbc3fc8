"""`paceline calculator`, and what the page it writes is made of."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli import app
from paceline.errors import CacheError, ConfigError
from paceline.hardware import Machine
from paceline.simulate.calculator_page import FOLDER, data, hash_of, page
from paceline.simulate.costs import catalogue

MOST_JS_LINES = 400


@pytest.mark.slow
def test_it_writes_one_file(tmp_path: Path) -> None:
    out = tmp_path / "new" / "calc.html"
    result = CliRunner().invoke(app, ["calculator", "--out", str(out), "--json"], catch_exceptions=False)
    line = json.loads(result.stdout.splitlines()[-1])
    assert out.read_text(encoding="utf-8") == page()
    assert line["page"] == str(out) and line["num_bytes"] == out.stat().st_size
    assert line["models"] == list(catalogue.all_shapes()) and line["machines"] == list(catalogue.machines())


def test_neither_help_nor_the_page_needs_jinja(tmp_path: Path) -> None:
    """The page takes a style sheet from report/pages.py, whose templates need it."""
    for words in (["--help"], ["calculator", "--help"], ["calculator", "--out", str(tmp_path / "calculator.html")]):
        run = f"from paceline.cli import app; app({words}, standalone_mode=False)"
        code = f"import sys; {run}; print('jinja2' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == "False", words


@pytest.mark.slow
def test_it_is_opened_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda url: opened.append(url) or False)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["calculator", "--open"], catch_exceptions=False)
    assert opened == [(tmp_path / "calculator.html").as_uri()]
    assert "found no browser" in result.output


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder: name a file"):
        CliRunner().invoke(app, ["calculator", "--out", str(tmp_path)], catch_exceptions=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match="--out"):
        CliRunner().invoke(app, ["calculator", "--out", str(tmp_path / "file" / "x.html")], catch_exceptions=False)


@pytest.mark.slow
def test_the_machine_at_hand_is_offered_when_asked() -> None:
    machine = Machine("</script><b>", 1e10, {"float32": 1e11}, 2, 10**9)
    assert data(machine)["machines"]["this machine"]["option"] == "this"
    assert "this machine" not in data()["machines"]
    assert "</script><b>" not in page(machine) and page(machine).count("</script>") == 2


@pytest.mark.slow
def test_the_policy_names_script_and_style_and_nothing_is_loaded() -> None:
    whole = page()
    script = whole.split('<script type="module">', 1)[1].split("</script>", 1)[0]
    style = whole.split("<style>", 1)[1].split("</style>", 1)[0]
    assert f"script-src '{hash_of(script)}'; style-src '{hash_of(style)}'" in whole
    assert not re.findall(r"/\* (?:SCRIPT|STYLE|DATA|LICENCE) \*/|(?:SCRIPT|STYLE)-HASH", whole)
    allowed = {"http://www.w3.org/2000/svg", "https://github.com/leeoniya/uPlot"}
    assert (
        set(re.findall(r"https?://[^\s'\"`<>)]+", re.sub(r'<script type="application/json".*?</script>', "", whole)))
        <= allowed
    )
    assert not re.search(r"\bimport\b[ ({]|fetch\(|XMLHttpRequest|<link[^>]+stylesheet|@import|url\(", whole)


@pytest.mark.slow
def test_the_catalogue_cannot_break_out_of_its_place() -> None:
    embedded = page().split('id="data">', 1)[1].split("</script>", 1)[0]
    assert not set("<>&") & set(embedded)
    assert json.loads(embedded) == json.loads(json.dumps(data()))


@pytest.mark.slow
def test_the_vendored_files_are_those_of_the_package_and_bring_their_licence() -> None:
    notes = (FOLDER / "vendor" / "README.md").read_text()
    version = re.search(r"uPlot (\d+\.\d+\.\d+)", notes)
    assert version and f"(v{version[1]})" in (FOLDER / "vendor" / "uPlot.iife.min.js").read_text()[:100]
    hashes = re.findall(r"([0-9a-f]{64})  (\S+)", notes)
    assert len(hashes) == 2
    for digest, name in hashes:
        assert hashlib.sha256((FOLDER / "vendor" / name).read_bytes()).hexdigest() == digest
    assert "Permission is hereby granted" in page() and "Leon Sorokin" in page()


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.js")), ids=lambda path: path.name)
def test_scripts_stay_small(path: Path) -> None:
    assert path.read_text().count("\n") <= MOST_JS_LINES
