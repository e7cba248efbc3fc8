"""What a plan must know of a target and of the machine, without loading a weight.

`read_target` reads a GGUF file's header, a config.json by its path or in a folder, or, for a model that was not fetched yet,
the catalogue of `simulate`. `machine_of` takes a known machine ("8x H100"), or measures this one once and keeps what it found
in `$PACELINE_HOME/machine.json` until processor or thread count change.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from paceline.config import EngineConfig
from paceline.errors import ConfigError, PacelineError
from paceline.hardware import BusyClock, Machine, cpu_name, processor, this_machine
from paceline.hub import BUILTINS, cache_home
from paceline.model.config.decoder import FAMILIES, TABLES, has_llama_layers
from paceline.runs.folder import write_whole
from paceline.simulate.costs import catalogue
from paceline.simulate.costs.shapes import FORMATS, ModelShape
from paceline.simulate.files import read_json

BLOCK_BYTES = 1.0625
"""Of a drafter's weight beside a target in blocks: Q8_0."""
KEPT = "machine.json"
BUSY = 0.15
"""Share of the processors' time that other programs may have while speeds are measured."""
MEASUREMENTS = 3
"""Of a busy machine."""


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """A target, by its sizes."""

    name: str
    shape: ModelShape
    raw: dict[str, Any]
    """config.json, or what it would say."""
    weight_bytes: float | None
    """Of the file; None when there is none here."""
    is_quantised: bool
    source: str
    """Where this was read."""

    def size(self, key: str, default: int = 0) -> int:
        value = self.raw.get(key)
        return default if value is None else int(value)

    @property
    def family(self) -> str | None:
        """One that our decoder runs: then a new drafter has its heads and widths."""
        names = self.raw.get("architectures") or [_architecture(self.raw)]
        names = [TABLES["text_parts"].get(name, name) for name in names]
        return next((FAMILIES[name]["family"] for name in names if name in FAMILIES), None)

    @property
    def is_copyable(self) -> bool:
        """Whether draft layers can be copies of its own, as a whole: of experts there is no one MLP to copy."""
        return self.family is not None and has_llama_layers(self.family) and self.shape.experts is None

    @property
    def value_bytes(self) -> float:
        """Bytes of one weight."""
        if self.weight_bytes:
            return self.weight_bytes / (self.shape.num_parameters or 1.0)
        return FORMATS[self.shape.precisions.weights].num_bytes


def read_target(target: EngineConfig) -> TargetFacts:
    """Raises ModelNotFoundError, ModelFileError or UnsupportedModelError, with what to give instead."""
    name, path = target.model, Path(target.model).expanduser()
    if name in BUILTINS:
        path = BUILTINS[name].kept_in(cache_home())
    if path.is_file() and path.suffix.lower() == ".gguf":
        return _gguf_facts(name, path)
    if path.is_dir() or path.suffix == ".json":
        return _folder_facts(name, path)
    raw = _hub_config(name)
    shape = catalogue.shape_of(raw, name, "its config.json on the hub") if raw else catalogue.find(name)
    known = next((entry for entry in catalogue.entries().values() if entry["name"] == shape.name), {})
    quantised_bytes = BUILTINS[name].gguf_bytes if name in BUILTINS else None
    source = "its config.json on the hub" if raw else "paceline's catalogue of models"
    return TargetFacts(name, shape, raw or dict(known.get("config", {})), quantised_bytes, name in BUILTINS, source)


def _gguf_facts(name: str, path: Path) -> TargetFacts:
    from paceline.model.gguf.container import open_gguf
    from paceline.model.gguf.metadata import config_json

    raw = config_json(path)
    raw = {key: value for key, value in raw.items() if value is not None}
    total = sum(tensor.num_bytes for tensor in open_gguf(path).tensors.values())
    return TargetFacts(name, catalogue.shape_of(raw, name, str(path)), raw, total, True, f"the header of {path.name}")


def _folder_facts(name: str, path: Path) -> TargetFacts:
    file = path / "config.json" if path.is_dir() else path
    shape = catalogue.find(str(path))
    raw = read_json(file, "give a model's config.json")
    weights = sum(each.stat().st_size for each in file.parent.glob("*.safetensors")) if path.is_dir() else 0
    inner = raw.get("text_config") or raw
    return TargetFacts(name, shape, {"architectures": raw.get("architectures"), **inner}, weights or None, False, str(file))


def _hub_config(name: str) -> dict[str, Any] | None:
    """A hub repository's config.json where it was fetched before or can be had at once."""
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
    """The name in families.json, where a config says its model_type alone, as those of the catalogue."""
    named = (name for name, told in FAMILIES.items() if told["family"] == raw.get("model_type"))
    return next(named, f"{str(raw.get('model_type', '')).capitalize()}ForCausalLM")


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """Where a run takes place."""

    machine: Machine
    number: int = 1
    """GPUs, or processes."""
    is_here: bool = True
    is_busy: bool = False
    """Other programs had the processors while it was measured."""

    @property
    def is_gpu(self) -> bool:
        return self.machine.num_threads == 0

    @property
    def is_slow_in_bfloat16(self) -> bool:
        """A processor that has no products of bfloat16 makes them out of others: float32 is faster there."""
        rates = self.machine.flops_per_s
        return not self.is_gpu and rates.get("float32", 0.0) > rates.get("bfloat16", 0.0)

    @property
    def decoding(self) -> Machine:
        """As the target's passes find it: where bfloat16 is slower than float32 they multiply in float32."""
        rates = self.machine.flops_per_s
        if not self.is_slow_in_bfloat16:
            return self.machine
        return replace(self.machine, flops_per_s={**rates, "bfloat16": rates["float32"]})

    @property
    def title(self) -> str:
        count = f"{self.number} x " if self.number > 1 else ""
        threads = f", {self.machine.num_threads} threads" if self.machine.num_threads else ""
        return f"{count}{self.machine.name}{threads}"


def machine_of(device_name: str | None, device: str = "auto") -> MachineFacts:
    """A machine by its name, as "8x H100", else this one. Raises ConfigError with the names that are known."""
    if device_name:
        number, name = _counted(device_name)
        if machine := catalogue.machine(name):
            return MachineFacts(machine, number, is_here=False)
        known = ", ".join(catalogue.machines())
        raise ConfigError(f"device-name {device_name!r} is not known: choose from {known}, as in '8x H100'")
    return _measured_once(device)


def _counted(text: str) -> tuple[int, str]:
    found = re.fullmatch(r"\s*(\d+)\s*[x*]?\s+?(.*\S)\s*|\s*(\d+)\s*[x*]\s*(.*\S)\s*", text, re.IGNORECASE)
    if not found:
        return 1, text.strip()
    number, name = (found[1], found[2]) if found[1] else (found[3], found[4])
    if int(number) < 1:
        raise ConfigError(f"device-name {text!r}: give at least one machine")
    return int(number), name.strip()


def _measured_once(device: str) -> MachineFacts:
    """This machine's speeds, measured in a second the first time; a GPU's every time. While other programs keep the processor
    busy it is measured several times, the best counts, and nothing is kept for the next time."""
    mark = repr((cpu_name(), processor()["num_cores"], os.environ.get("OMP_NUM_THREADS")))
    file, kept = cache_home() / KEPT, dict[str, Any]()
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # never measured, or by another version
        kept = json.loads(file.read_text(encoding="utf-8"))["machines"]
        if mark in kept and (device == "cpu" or (device == "auto" and not kept[mark]["has_gpu"])):
            return MachineFacts(Machine(**kept[mark]["machine"]))
    import torch

    has_gpu = torch.cuda.is_available()
    if device.startswith("cuda") or (device == "auto" and has_gpu):
        return MachineFacts(this_machine("cuda"))
    machine, is_busy = _measured_quietly(lambda: this_machine("cpu"))
    if not is_busy:
        kept[mark] = {"machine": asdict(machine), "has_gpu": has_gpu}
        with contextlib.suppress(PacelineError):  # a cache that cannot be written: measured again the next time
            write_whole(file, json.dumps({"machines": kept}) + "\n")
    return MachineFacts(machine, is_busy=is_busy)


def _measured_quietly(measure: Callable[[], Machine]) -> tuple[Machine, bool]:
    """What `measure` gives while others leave the processors alone, else the best of MEASUREMENTS, and whether it is that."""
    found: list[Machine] = []
    for _ in range(MEASUREMENTS):
        clock = BusyClock()
        found.append(measure())
        if clock.others_share() < BUSY:
            return found[-1], False
    flops = {name: max(each.flops_per_s[name] for each in found) for name in found[0].flops_per_s}
    cached = {size: max(each.cached_bytes_per_s[size] for each in found) for size in found[0].cached_bytes_per_s}
    fastest = max(each.bytes_per_s for each in found)
    return replace(found[0], bytes_per_s=fastest, flops_per_s=flops, cached_bytes_per_s=cached), True
