"""Sizes of a target and speeds of a machine, as the inputs of a plan, without loading weights.

`read_target` reads a GGUF file's header or a config.json; for a model that was not downloaded, the catalogue of
`simulate`. `machine_of` returns a known machine ("8x H100"), or measures this one and stores the result in
`$PACELINE_HOME/machine.json` until processor or thread count change.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from paceline.config import EngineConfig
from paceline.errors import PacelineError
from paceline.hardware import BusyClock, Machine, cpu_name, processor, this_machine
from paceline.hub import BUILTINS, cache_home
from paceline.model.adapter import base_name, is_adapter
from paceline.model.config.decoder import FAMILIES, TABLES, has_llama_layers
from paceline.runs.folder import write_whole
from paceline.simulate.costs import catalogue
from paceline.simulate.costs.model_config import shape_of
from paceline.simulate.costs.shapes import FORMATS, ModelShape
from paceline.simulate.files import read_json, read_machine

BLOCK_BYTES = 1.0625
"""Bytes per weight of a drafter for a quantised target: Q8_0."""
FILE = "machine.json"
BUSY = 0.15
"""Largest share of the processors' time for other programs during a measurement."""
MEASUREMENTS = 3
"""Number of measurements on a busy machine."""


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """The sizes of a target model, read without its weights."""

    name: str
    shape: ModelShape
    raw: dict[str, Any]
    """Contents of config.json, or the same keys from a GGUF file's header or paceline's catalogue of models."""
    weight_bytes: float | None
    """Bytes of the weight files; None if unknown."""
    is_quantised: bool
    source: str
    """Description of where the sizes were read."""

    def size(self, key: str, default: int = 0) -> int:
        value = self.raw.get(key)
        return default if value is None else int(value)

    @property
    def family(self) -> str | None:
        """Name of the target's model family, such as "llama"; None if paceline's own decoder does not support it."""
        names = self.raw.get("architectures") or [_architecture(self.raw)]
        names = [TABLES["text_parts"].get(name, name) for name in names]
        if self.raw.get("enable_moe_block"):  # Gemma 4 with experts, which the decoder does not run
            return None
        return next((FAMILIES[name]["family"] for name in names if name in FAMILIES), None)

    @property
    def is_copyable(self) -> bool:
        """True if draft layers can begin as copies of the target's layers. False for an unsupported model family, and
        for a target with experts, whose layers have no single MLP to copy."""
        return self.family is not None and has_llama_layers(self.family) and self.shape.experts is None

    @property
    def value_bytes(self) -> float:
        """Mean bytes per weight, by the size of the weight files or, if it is unknown, by the model's number format."""
        if self.weight_bytes:
            return self.weight_bytes / (self.shape.num_parameters or 1.0)
        return FORMATS[self.shape.precisions.weights].num_bytes

    @property
    def total_bytes(self) -> float:
        """Bytes of all weights: the size of the weight files, or an estimate if it is unknown."""
        return self.weight_bytes or self.shape.num_parameters * self.value_bytes


def read_target(target: EngineConfig) -> TargetFacts:
    """Reads a target's sizes, without its weights and without a download. Raises ModelNotFoundError for an unknown
    model, ModelFileError for a damaged file, UnsupportedModelError for an unsupported architecture."""
    name, path = target.model, Path(os.path.expanduser(target.model))
    if name in BUILTINS:
        path = BUILTINS[name].kept_in(cache_home())
    if os.path.isfile(path) and path.suffix.lower() == ".gguf":
        return _gguf_facts(name, path)
    if is_adapter(path):
        base = read_target(replace(target, model=base_name(path)))
        return replace(base, name=name, weight_bytes=None, is_quantised=False)  # it is loaded dense
    if path.is_dir() or path.suffix == ".json":
        return _folder_facts(name, path)
    raw = _hub_config(name)
    shape = shape_of(raw, name, "its config.json on the hub") if raw else catalogue.find(name)
    known = {} if raw else catalogue.entry_of(name)
    quantised_bytes = BUILTINS[name].gguf_bytes if name in BUILTINS else None
    source = "its config.json on the hub" if raw else "paceline's catalogue of models"
    return TargetFacts(name, shape, raw or dict(known.get("config", {})), quantised_bytes, name in BUILTINS, source)


def _gguf_facts(name: str, path: Path) -> TargetFacts:
    from paceline.model.gguf.container import open_gguf
    from paceline.model.gguf.metadata import config_json

    raw = {key: value for key, value in config_json(path).items() if value is not None}
    total = sum(tensor.num_bytes for tensor in open_gguf(path).tensors.values())
    return TargetFacts(name, shape_of(raw, name, str(path)), raw, total, True, f"the header of {path.name}")


def _folder_facts(name: str, path: Path) -> TargetFacts:
    file = path / "config.json" if path.is_dir() else path
    shape = catalogue.find(str(path))
    raw = read_json(file, "give a model's config.json")
    weights = sum(part.stat().st_size for part in file.parent.glob("*.safetensors")) if path.is_dir() else 0
    raw = {"architectures": raw.get("architectures"), **(raw.get("text_config") or raw)}
    return TargetFacts(name, shape, raw, weights or None, False, str(file))


def _hub_config(name: str) -> dict[str, Any] | None:
    """Returns a hub repository's config.json if it is in the local cache."""
    if "/" not in name:
        return None
    import huggingface_hub
    from huggingface_hub import errors

    try:
        file = huggingface_hub.try_to_load_from_cache(name, "config.json")
        if not isinstance(file, str):
            return None
        return json.loads(Path(file).read_text(encoding="utf-8"))
    except (errors.HFValidationError, OSError, ValueError):
        return None


def _architecture(raw: dict[str, Any]) -> str:
    """Returns the name in families.json for a config that has only its model_type, like those of the catalogue."""
    named = (name for name, entry in FAMILIES.items() if entry["family"] == raw.get("model_type"))
    return next(named, f"{str(raw.get('model_type', '')).capitalize()}ForCausalLM")


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """The hardware of a run: the speeds of one device, and the number of such devices (GPUs; on CPUs, processes)."""

    machine: Machine
    number: int = 1
    """Number of GPUs, or of processes."""
    is_here: bool = True
    """False if this is another machine than the one that computes the plan (`--hardware`)."""
    is_busy: bool = False
    """True if other programs used the processors during the measurement."""

    @property
    def is_gpu(self) -> bool:
        return self.machine.num_threads == 0

    @property
    def is_slow_in_bfloat16(self) -> bool:
        """True if the processor emulates bfloat16 products, so that float32 is faster."""
        rates = self.machine.flops_per_s
        return not self.is_gpu and rates.get("float32", 0.0) > rates.get("bfloat16", 0.0)

    @property
    def decoding(self) -> Machine:
        """The machine's speeds, as used to estimate the time of the target's passes. On a machine that computes float32
        faster than bfloat16, both have the speed of float32."""
        rates = self.machine.flops_per_s
        if not self.is_slow_in_bfloat16:
            return self.machine
        return replace(self.machine, flops_per_s={**rates, "bfloat16": rates["float32"]})

    @property
    def title(self) -> str:
        count = f"{self.number} x " if self.number > 1 else ""
        threads = f", {self.machine.num_threads} threads" if self.machine.num_threads else ""
        return f"{count}{self.machine.name}{threads}"


Device = str | MachineFacts | None
"""A machine: its name, such as "8x H100", its speeds, or None for this one."""


def machine_of(device_name: Device, device: str = "auto") -> MachineFacts:
    """Returns the speeds of the machine with the name `device_name`, such as "8x H100". If it is None, these are the
    measured speeds of `device` (such as "auto" or "cpu") on this machine; a MachineFacts is returned unchanged. Raises
    ConfigError, with the known names, for an unknown one."""
    if isinstance(device_name, MachineFacts):
        return device_name
    if device_name is not None:
        number, name = catalogue.counted("device-name", device_name)
        return MachineFacts(catalogue.known_machine("device-name", name), number, is_here=False)
    return _measured_once(device)


def speeds_file() -> Path:
    """Returns the path of the file with the measured speeds of this machine."""
    return cache_home() / FILE


def _measured_once(device: str) -> MachineFacts:
    """Returns this machine's speeds, measured once and stored; a GPU's are measured every time. On a busy processor,
    the best of several measurements is returned and not stored."""
    mark = repr((cpu_name(), processor()["num_cores"], os.environ.get("OMP_NUM_THREADS")))
    file, stored = speeds_file(), dict[str, Any]()
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # not measured, or by another version
        stored = dict(json.loads(file.read_text(encoding="utf-8"))["machines"])
        if mark in stored and (device == "cpu" or (device == "auto" and not stored[mark]["has_gpu"])):
            return MachineFacts(read_machine(stored[mark]["machine"]))
    import torch

    has_gpu = torch.cuda.is_available()
    if device.startswith("cuda") or (device == "auto" and has_gpu):
        return MachineFacts(this_machine("cuda"))
    machine, is_busy = _measured_quietly(lambda: this_machine("cpu"))
    if not is_busy:
        stored[mark] = {"machine": asdict(machine), "has_gpu": has_gpu}
        with contextlib.suppress(PacelineError):  # if the cache cannot be written, the next run measures again
            write_whole(file, json.dumps({"machines": stored}) + "\n")
    return MachineFacts(machine, is_busy=is_busy)


def _measured_quietly(measure: Callable[[], Machine]) -> tuple[Machine, bool]:
    """Returns (a measurement without other load, False), or (the best of MEASUREMENTS, True) on a busy machine."""
    results: list[Machine] = []
    for _ in range(MEASUREMENTS):
        clock = BusyClock()
        results.append(measure())
        if clock.others_share() < BUSY:
            return results[-1], False
    first = results[0]
    flops = {name: max(result.flops_per_s[name] for result in results) for name in first.flops_per_s}
    cached = {size: max(result.cached_bytes_per_s[size] for result in results) for size in first.cached_bytes_per_s}
    fastest = max(result.bytes_per_s for result in results)
    return replace(first, bytes_per_s=fastest, flops_per_s=flops, cached_bytes_per_s=cached), True
