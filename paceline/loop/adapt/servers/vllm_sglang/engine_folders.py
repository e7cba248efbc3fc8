"""Converts drafters to the folders that vLLM or SGLang reads, keeps them for rollbacks, and checks a server's
acceptance length with them.

    folders = EngineFolders(DeployConfig("vllm", ...), EngineConfig(model="Qwen/Qwen3-8B"), Path("runs/adapt/engine"))
    given = folders.given(Path("runs/adapt/trainings/tickets/drafter"))
    check_length("vllm", client, folders.expected(given))

A converted folder gets a name made of the drafter's files, so it is never written again while a server reads it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from paceline.config import EngineConfig
from paceline.errors import CacheError, DeployError, DownloadError, PacelineError, UnreachableError, reraised
from paceline.loop.adapt.config import DeployConfig
from paceline.loop.adapt.servers.counters import ask
from paceline.loop.adapt.servers.vllm_sglang.check import Comparison, brings, prompt_ids, served
from paceline.loop.adapt.servers.vllm_sglang.drafter_folder import Given, Start, given_to
from paceline.net.streaming import Client

log = logging.getLogger("paceline.loop.adapt")
RECORD = "given.json"
"""File with the fields of `Given`, written before the folder gets its name."""


@dataclass(frozen=True, slots=True)
class Expected:
    """Acceptance length that a drafter has in paceline on the prompts with these token ids."""

    length: float
    prompts: list[list[int]]


@dataclass(slots=True)
class EngineFolders:
    """Converts drafters to the format of vLLM or SGLang (`config.engine`), and keeps the results in `folder`. `engine`:
    settings of paceline's engine, of which the target model and its dtype are used."""

    config: DeployConfig
    engine: EngineConfig
    folder: Path
    method: str = field(init=False)
    """Method of the drafter converted last, for vLLM's speculative config."""
    _expected: dict[Path, Expected] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.method = self.config.method
        self._start("")  # refuses a target that the engine cannot read
        for unfinished in self.folder.glob("unfinished-*"):
            shutil.rmtree(unfinished)

    def given(self, drafter: Path) -> Given:
        """Returns the drafter in a folder that vLLM or SGLang can read: its own, or a converted copy, which is written
        at the first call and reused.

        Raises DeployError if the drafter cannot be converted, CacheError if the folder cannot be written."""
        folder = self.folder / f"{self.config.engine}-{_hash_of(drafter)}"
        if not (folder / RECORD).is_file():
            with reraised(CacheError, f"cannot write {folder}", "free space, or choose another --state", OSError):
                self.folder.mkdir(parents=True, exist_ok=True)
                scratch = Path(tempfile.mkdtemp(prefix="unfinished-", dir=self.folder))
                with _says_nothing_of_the_drafter(f"{drafter} cannot be given to {self.config.engine}"):
                    given = given_to(self._start(str(drafter)), scratch)
                is_converted = given.folder.is_relative_to(scratch)
                where = given.folder.relative_to(scratch) if is_converted else given.folder.absolute()
                (scratch / RECORD).write_text(json.dumps(asdict(given) | {"folder": str(where)}), encoding="utf-8")
                os.rename(scratch, folder)
            for note in given.notes:
                log.warning("%s: %s", folder, note)
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        given = Given(**record | {"folder": folder.absolute() / record["folder"]})
        self.method = given.method
        return given

    def expected(self, given: Given) -> Expected:
        """Measures the acceptance length of the drafter `given` with paceline, in another process; later calls return
        the first result.

        Raises DeployError if it cannot be measured."""
        if given.folder not in self._expected:
            with _says_nothing_of_the_drafter("what it should bring cannot be measured (--no-check-length)"):
                prompts = prompt_ids(self.engine.model)
                length = brings(self.engine.model, given.folder, given.num_drafted, prompts, self.engine.dtype)
            self._expected[given.folder] = Expected(length, prompts)
        return self._expected[given.folder]

    def _start(self, drafter: str) -> Start:
        config, engine = self.config, self.engine
        return Start(config.engine, engine.model, drafter, num_drafted=config.num_drafted, dtype=engine.dtype)


def check_length(engine: str, client: Client, expected: Expected) -> None:
    """Checks a server's acceptance length on twenty prompts. Raises DeployError if it is clearly lower than expected,
    UnreachableError if the server does not answer. A server on which it cannot be measured is logged."""
    try:
        name = str(ask(client, "GET", "/v1/models")["data"][0]["id"])
        compared = Comparison(expected.length, served(engine, client, name, expected.prompts))
    except UnreachableError:
        raise
    except (DownloadError, LookupError, TypeError) as error:
        log.warning("%s: its acceptance length was not checked: %s", client.url, error)
        return
    if compared.is_low:
        raise DeployError(f"{client.url} brings {compared.text}: paceline inspect --vary tells what it reads otherwise")
    log.info("%s brings %s", client.url, compared.text)


@contextlib.contextmanager
def _says_nothing_of_the_drafter(what: str) -> Iterator[None]:
    """Convert errors to DeployError, except those of a full disk: these servers cannot get it, but it may be good."""
    try:
        yield
    except CacheError:
        raise
    except PacelineError as error:
        raise DeployError(f"{what}: {error}") from error


def _hash_of(drafter: Path) -> str:
    """Twelve hexadecimal digits made of the files in a drafter's folder, names and contents."""
    digest = hashlib.sha256()
    for file in sorted(drafter.glob("*")):
        if file.suffix in (".json", ".safetensors", ".gguf"):
            digest.update(file.name.encode())
            with file.open("rb") as data:
                digest.update(hashlib.file_digest(data, "sha256").digest())
    return digest.hexdigest()[:12]
