"""Converts drafters to the folders that vLLM or SGLang reads, keeps them for rollbacks, and checks a server's
acceptance length with them.

    folders = EngineFolders(DeployConfig("vllm", ...), EngineConfig(model="Qwen/Qwen3-8B"), Path("runs/adapt/engine"))
    given = folders.given(Path("runs/adapt/trainings/tickets/drafter"))
    check_length("vllm", client, folders.expected(given))

A converted folder gets a name made of the drafter's files and of the settings that it was converted with, so it is not
written again while a server reads it, unless it is damaged.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from paceline.config import EngineConfig
from paceline.draft.registry import kind_of
from paceline.errors import (
    CacheError,
    DeployError,
    DownloadError,
    PacelineError,
    UnreachableError,
    UnsupportedModelError,
)
from paceline.loop.adapt.config import DeployConfig
from paceline.loop.adapt.servers.counters import ask
from paceline.loop.adapt.servers.vllm_sglang.check import Comparison, brings, prompt_ids, served
from paceline.loop.adapt.servers.vllm_sglang.drafter_folder import Given, Start, given_to
from paceline.net.streaming import Client
from paceline.runs.folder import whole_folder

log = logging.getLogger("paceline.loop.adapt")
RECORD = "given.json"
"""File with the fields of `Given`, written before the folder gets its name."""


@dataclass(frozen=True, slots=True)
class Expected:
    """Acceptance length that an engine should reach with a drafter: `length` was measured in paceline on `prompts`
    (token ids)."""

    length: float
    prompts: list[list[int]]


@dataclass(slots=True)
class EngineFolders:
    """Converts drafters to the format of `config.engine` (vLLM or SGLang), and keeps the copies in `folder`. `engine`:
    configuration of paceline's own engine, from which target, dtype and device are taken. Raises ConfigError if the
    target is a built-in model, which vLLM and SGLang cannot read."""

    config: DeployConfig
    engine: EngineConfig
    folder: Path
    _expected: dict[Path, Expected] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._start("")  # refuses a target that the engine cannot read
        for pattern in ("*.part", "*.before", "unfinished-*"):  # the last: of earlier versions
            for unfinished in self.folder.glob(pattern):
                shutil.rmtree(unfinished)

    def given(self, drafter: Path) -> Given:
        """Returns a drafter in a folder that the engine can read: its own folder, or a converted copy, which is written
        at the first call. Raises DeployError if the drafter cannot be converted, CacheError on a write error."""
        settings = (self.engine.model, self.engine.dtype, self.config.num_drafted)
        folder = self.folder / f"{self.config.engine}-{_hash_of(drafter, settings)}"
        if given := _recorded(folder):
            return given
        with whole_folder(folder, "free space, or choose another --state") as scratch:
            given = self._converted(drafter, scratch)
        for note in given.notes:
            log.warning("%s: %s", folder, note)
        return replace(given, folder=folder.absolute() / given.folder)

    def _converted(self, drafter: Path, scratch: Path) -> Given:
        """Writes the drafter and its record to `scratch`. The folder in the result, and in the record, is relative to
        `scratch` if the drafter was converted, else absolute."""
        with _says_nothing_of_the_drafter(f"{drafter} cannot be given to {self.config.engine}"):
            if kind_of(drafter) == "mtp":
                raise UnsupportedModelError(
                    "an MTP layer lies in the files of its target, which are not replaced: train a dflash drafter"
                )
            given = given_to(self._start(str(drafter)), scratch)
        is_converted = given.folder.is_relative_to(scratch)
        given = replace(given, folder=given.folder.relative_to(scratch) if is_converted else given.folder.absolute())
        (scratch / RECORD).write_text(json.dumps(asdict(given) | {"folder": str(given.folder)}), encoding="utf-8")
        return given

    def expected(self, given: Given) -> Expected:
        """Returns the acceptance length that the engine should reach with the drafter `given`, measured in another
        process at the first call. Raises DeployError if it cannot be measured."""
        if given.folder not in self._expected:
            engine = self.engine
            with _says_nothing_of_the_drafter("what it should bring cannot be measured (--no-check-length)", OSError):
                prompts = prompt_ids(engine.model)
                length = brings(engine.model, given.folder, given.num_drafted, prompts, engine.dtype, engine.device)
            self._expected[given.folder] = Expected(length, prompts)
        return self._expected[given.folder]

    def _start(self, drafter: str) -> Start:
        config, engine = self.config, self.engine
        return Start(config.engine, engine.model, drafter, num_drafted=config.num_drafted, dtype=engine.dtype)


def check_length(engine: str, client: Client, expected: Expected) -> None:
    """Checks that a server reaches the acceptance length that paceline has with the same drafter: measures it on the
    prompts of `expected`. `engine`: "vllm" or "sglang".

    Raises DeployError if the server's acceptance length is clearly lower, UnreachableError if the server does not
    answer. If it cannot be measured, only logs a warning."""
    try:
        name = str(ask(client, "GET", "/v1/models")["data"][0]["id"])
        compared = Comparison(expected.length, served(engine, client, name, expected.prompts))
    except UnreachableError:
        raise
    except (DownloadError, LookupError, TypeError, ValueError, AttributeError) as error:
        log.warning("%s: its acceptance length was not checked: %s", client.url, error)
        return
    if compared.is_low:
        raise DeployError(f"{client.url} brings {compared.text}: paceline inspect --vary tells what it reads otherwise")
    log.info("%s brings %s", client.url, compared.text)


@contextlib.contextmanager
def _says_nothing_of_the_drafter(what: str, *also: type[Exception]) -> Iterator[None]:
    """Convert errors to DeployError, except those of a full disk: these servers cannot get it, but it may be good.
    RuntimeError: a device out of memory, for one. `also`: further types to convert."""
    try:
        yield
    except CacheError:
        raise
    except (PacelineError, RuntimeError, ValueError, *also) as error:
        raise DeployError(f"{what}: {' '.join(str(error).split())}") from error


def _recorded(folder: Path) -> Given | None:
    """Returns the drafter that was converted to `folder`; None if it is missing or damaged, or if it was read
    from a folder that is gone."""
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        given = Given(**record | {"folder": folder.absolute() / record["folder"]})
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return given if given.folder.exists() else None


def _hash_of(drafter: Path, settings: tuple[object, ...]) -> str:
    """Twelve hexadecimal digits made of the files in a drafter's folder, names and contents, and of the settings of its
    conversion."""
    digest = hashlib.sha256(repr(settings).encode())
    for file in sorted(drafter.glob("*")):
        if file.suffix in (".json", ".safetensors", ".gguf"):
            digest.update(file.name.encode())
            with file.open("rb") as data:
                digest.update(hashlib.file_digest(data, "sha256").digest())
    return digest.hexdigest()[:12]
