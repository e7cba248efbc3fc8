"""Shared by the stages: one timer, one way to make a target and a drafter of random weights, one way to run rounds."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from gpu_day_stages.visit import Visit
from paceline.bench.passes import mocked_engine, random_prompt
from paceline.draft.base import Drafter
from paceline.draft.dflash.config import DFlashConfig, new_config
from paceline.draft.dflash.drafter import DFlashDrafter, DFlashNetwork, shapes_of
from paceline.engine.engine import Engine
from paceline.model.checkpoint import expected_shapes
from paceline.model.config.decoder import DecoderConfig, DeltaShape
from paceline.model.target import ForwardBatch, Target
from paceline.model.text.tokenizer import Tokenizer
from paceline.model.torch.decoder import Decoder
from paceline.model.torch.delta_cache import DeltaCache
from paceline.model.torch.recorded_pass import GraphDecoder, can_record
from paceline.plan.planner import FixedPlanner
from paceline.types import SamplingParams

DATASHEET = {"H100": 3.35e12, "H200": 4.8e12, "A100": 2.04e12, "B200": 8.0e12}
"""Bytes per second of the SXM cards, by a part of their names."""
MAX_POSITION = 40960
WARM, MOST_CHUNK = 3, 1024


def _shape(
    family: str, hidden: int, layers: int, heads: int, kv_heads: int, inner: int, vocab: int, **more: Any
) -> DecoderConfig:
    values = {"head_dim": 128, "max_position": MAX_POSITION} | more
    return DecoderConfig(family, vocab, hidden, inner, layers, heads, kv_heads, **values)


SHAPES = {
    "1.5B": _shape("qwen2", 1536, 28, 12, 2, 8960, 151936, tie_embeddings=True, qkv_bias=True),
    "8B": _shape("qwen3", 4096, 36, 32, 8, 12288, 151936, qk_norm=True),
    "27B": _shape("qwen3", 5120, 64, 40, 8, 17408, 248320, qk_norm=True),
    "32B": _shape("qwen3", 5120, 64, 64, 8, 25600, 151936, qk_norm=True),
    "30B-A3B": _shape(
        "qwen3_moe", 2048, 48, 32, 4, 6144, 151936, qk_norm=True, num_experts=128, experts_per_token=8, expert_size=768
    ),
    "hybrid 27B": _shape(
        "qwen3_5_text", 5120, 64, 24, 4, 17408, 248320, head_dim=256, rotary_dim=64, qk_norm=True, norm_offset=1.0,
        output_gate=True, delta=DeltaShape(16, 48, 128, 128, 4),
        linear_layers=tuple(layer for layer in range(64) if layer % 4 != 3),
    ),
}  # fmt: skip
"""Published sizes (the dense 27B has those of Qwen3.5-27B with attention in every layer)."""
_SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 2,
}


def shape_of(visit: Visit, name: str) -> DecoderConfig:
    """The named shape, or its kind of layers in tiny."""
    config = SHAPES[name]
    if not visit.is_tiny:
        return config
    small: dict[str, Any] = {**_SMALL, "head_dim": 16, "rotary_dim": None}
    if config.num_experts:
        small |= {"num_experts": 8, "experts_per_token": 2, "expert_size": 32}
    if config.delta:
        small |= {"delta": DeltaShape(2, 4, 16, 16, 4), "linear_layers": (0, 1, 2)}
    return replace(config, **small)


class Clock:
    """Milliseconds of work on the device: by events on CUDA, by the host's clock elsewhere."""

    def __init__(self, device: str) -> None:
        self._is_cuda = torch.device(device).type == "cuda"

    def samples(self, work: Callable[[], object], repeat: int, warm: int = WARM) -> list[float]:
        for _ in range(warm):
            work()
        return [self.once(work) for _ in range(repeat)]

    def once(self, work: Callable[[], object]) -> float:
        if not self._is_cuda:
            began = time.perf_counter()
            work()
            return 1e3 * (time.perf_counter() - began)
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        work()
        last.record()
        last.synchronize()
        return first.elapsed_time(last)


def graphed(visit: Visit, work: Callable[[], object], warm: Callable[[], object] | None = None) -> Callable[[], object]:
    """The work as one graph, so that the host's launches are not measured; on other devices the work itself. `warm`
    runs before the recording [default: the work]."""
    if torch.device(visit.device).type != "cuda":
        return work
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        (warm or work)()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def summary(samples: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(samples, n=4) if len(samples) > 1 else [samples[0]] * 3
    return {"median": middle, "low": low, "high": high, "runs": len(samples)}


def weights(
    shapes: Mapping[str, tuple[int, ...]], device: str, dtype: torch.dtype, *, std: float = 0.02, seed: int = 0
) -> Iterator[tuple[str, Tensor]]:
    """Random weights drawn on the device: norms one, all else normal."""
    generator = torch.Generator(device).manual_seed(seed)
    for name, size in shapes.items():
        tensor = torch.empty(size, device=device, dtype=dtype)
        yield name, tensor.fill_(1.0) if name.endswith("norm.weight") else tensor.normal_(0.0, std, generator=generator)


def decoder(
    config: DecoderConfig,
    tensors: Any,
    device: str,
    *,
    rows: int = 1,
    max_len: int = 512,
    dtype: torch.dtype = torch.float32,
) -> Decoder:
    """Makes the target that `model.backends.load_target` chooses for CUDA, with recorded passes."""
    target = GraphDecoder(config, tensors, num_rows=rows, max_len=max_len, dtype=dtype, device=device)
    recorder: Any = getattr(target, "recorder", None)
    if recorder is not None:
        recorder.records_late = True  # a stage uses few shapes: its first rounds record them, not those of all traffic
    return target


def recordings(target: Decoder) -> dict[str, Any] | None:
    """How many passes were recorded, and which ran eagerly; None where the target does not count them."""
    recorder: Any = getattr(target, "recorder", None)
    if recorder is None:
        return None
    return {name: getattr(recorder, name, None) for name in ("num_recorded", "seconds", "replayed", "eager", "failed")}


def random_target(visit: Visit, name: str, *, rows: int = 1, max_len: int = 512) -> Decoder:
    """A target of a shape of SHAPES in bfloat16, its weights drawn on the device."""
    config, dtype = shape_of(visit, name), visit.sized(torch.bfloat16, torch.float32)
    return decoder(
        config,
        weights(expected_shapes(config), visit.device, dtype),
        visit.device,
        rows=rows,
        max_len=max_len,
        dtype=dtype,
    )


def raw_dflash(own: DecoderConfig, layers: int, block: int) -> dict[str, Any]:
    """The config.json of a drafter of the widths of a target with this config."""
    return new_config(
        own.hidden_size, own.vocab_size, own.num_layers,
        num_layers=layers, block_size=block, head_dim=own.head_dim, intermediate_size=own.intermediate_size,
    )  # fmt: skip


def random_network(raw: dict[str, Any], device: str, dtype: torch.dtype, *, seed: int = 0) -> DFlashNetwork:
    """A DFlash network with this config.json, its weights drawn on the device."""
    config = DFlashConfig.from_json(raw)
    with torch.device("meta"):
        shapes = shapes_of(DFlashNetwork(config).state_dict())
    return DFlashNetwork.of(config, dict(weights(shapes, device, dtype, seed=seed)))


def random_dflash(target: Decoder, layers: int, words: int | None = None, block: int = 16) -> DFlashDrafter:
    """A drafter of the target's widths, drawn on its device; with `words` it drafts over so many rows of the head."""
    network = random_network(raw_dflash(target.config, layers, block), str(target.device), target.dtype, seed=1)
    return DFlashDrafter(network, draft_ids=None if words is None else torch.arange(words))


def drafter_bytes(drafter: DFlashDrafter, target: Decoder) -> int:
    """Bytes that one drafting pass reads: the network, and the rows of the head that it drafts over."""
    words = target.vocab_size if drafter.draft_ids is None else len(drafter.draft_ids)
    network = sum(tensor.numel() for tensor in drafter.network.state_dict().values())
    return (network + words * target.hidden_size) * target.dtype.itemsize


def kv_bytes(target: Decoder, context: int) -> int:
    """Bytes of keys and values that a pass of one row reads."""
    own = target.config
    layers = own.num_layers - len(own.linear_layers)
    return 2 * layers * own.num_kv_heads * own.head_dim * context * target.dtype.itemsize


def pass_bytes(target: Decoder, context: int, experts_read: float | None) -> int:
    """Bytes that a pass of one row reads: weights, of experts so many a layer, keys and values, and states."""
    own, num_bytes = target.config, target.weight_bytes + kv_bytes(target, context)
    if experts_read is not None:
        each = 3 * own.hidden_size * own.expert_size * target.dtype.itemsize
        num_bytes += int(target.num_mixtures * (experts_read - own.experts_per_token) * each)
    if isinstance(target.kv, DeltaCache):
        num_bytes += sum(memory.states_BHKV[0].nbytes for memory in target.kv.memories)
    return num_bytes


def read_rate(visit: Visit) -> float:
    """Bytes per second that this device reads: as the stage `ceilings` measured, else measured now."""
    for line in visit.earlier.get("ceilings", []):
        if line.get("what") == "read":
            return line["bytes_per_s"]
    size = visit.sized(2**32, 2**20)
    buffer = torch.randn(size // 4, device=visit.device)
    times = Clock(visit.device).samples(lambda: buffer.sum(), 10)
    return size / (1e-3 * statistics.median(times))


def datasheet_rate(device: str) -> float | None:
    name = torch.cuda.get_device_name() if torch.device(device).type == "cuda" else ""
    return next((rate for part, rate in DATASHEET.items() if part in name), None)


def shares(visit: Visit, num_bytes: int, samples: list[float]) -> dict[str, float | None]:
    """How close a pass that reads so many bytes comes to the memory's limits."""
    rate, datasheet = num_bytes / (1e-3 * statistics.median(samples)), datasheet_rate(visit.device)
    read = read_rate(visit)
    return {
        "bytes": num_bytes,
        "measured_floor_ms": 1e3 * num_bytes / read,
        "share_of_read": rate / read,
        "share_of_datasheet": rate / datasheet if datasheet else None,
    }


def prefill(target: Decoder, row: int, context: int) -> None:
    tokens = random_prompt(row, context, target.vocab_size)
    for begin in range(0, context, MOST_CHUNK):
        part = tokens[begin : begin + MOST_CHUNK]
        target.forward(ForwardBatch([row], [begin], [len(part)], part, "none"))


def pass_times(visit: Visit, target: Decoder, context: int, count: int, repeat: int) -> tuple[list[float], float]:
    """Milliseconds of passes of `count` tokens behind `context`, the best tokens read back, and of the first one."""
    row = target.cache.allocate()
    assert row is not None
    prefill(target, row, context)
    tokens = random_prompt("pass", count, target.vocab_size)

    def work() -> None:
        target.forward(ForwardBatch([row], [context], [count], tokens, only_argmax=True)).best_T()
        target.cache.rollback([row], [context])

    clock = Clock(visit.device)
    first = clock.once(work)
    samples = clock.samples(work, repeat)
    target.cache.free(row)
    return samples, first


@lru_cache(maxsize=2)
def stand_in_tokenizer(vocab_size: int) -> Tokenizer:
    return Tokenizer.stand_in(vocab_size)


def needed_len(context: int, kept: float, count: int, width: int) -> int:
    """Tokens that a row must hold for `round_times`."""
    return context + int((count + WARM + 2) * (kept + 1)) + width + 2


def has_device_rounds(target: Target) -> bool:
    """True if rounds of this target can run on the device as one region; on a CPU too, without a graph."""
    return isinstance(target, GraphDecoder) and can_record(target.config)


def running_engine(
    target: Decoder, drafter: Drafter, *, batch: int, width: int, kept: float, context: int, device: bool = True
) -> Engine:
    """An engine with `batch` requests behind their prompts; rounds check `width` drafts and keep `kept` tokens, on the
    device where that is possible, unless `device` is false."""
    settings = SimpleNamespace(prefill_chunk=MOST_CHUNK)
    llm: Any = SimpleNamespace(target=target, tokenizer=stand_in_tokenizer(target.vocab_size), config=settings)
    engine = mocked_engine(llm, drafter, kept, device_rounds=device and has_device_rounds(target))
    engine.planner = FixedPlanner(0, MOST_CHUNK)
    params = SamplingParams(max_tokens=target.cache.max_len - context, ignore_eos=True)
    for row in range(batch):
        engine.add(random_prompt(row, context, target.vocab_size), params)
    while engine.scheduler.waiting or engine.scheduler.prefilling:
        engine.step()
    engine.planner = FixedPlanner(width, MOST_CHUNK, whole_blocks=width + 1 == getattr(drafter, "block_size", 0))
    return engine


def kinds_of(engine: Engine) -> dict[str, int] | None:
    """Rounds by what made them; None of an engine without device rounds."""
    return dict(engine.device_rounds.counts) if engine.device_rounds else None


def round_times(visit: Visit, engine: Engine, count: int) -> dict[str, list[float]]:
    """Milliseconds of `count` rounds of a running engine, whole and by part, behind a few that warm up."""
    clock, times = Clock(visit.device), dict[str, list[float]]()
    for number in range(WARM + count):
        whole_ms = clock.once(engine.step)
        if number >= WARM:
            (stats,) = engine.rounds
            parts = {name: 1e3 * getattr(stats, f"{name}_s") for name in ("draft", "verify", "host")}
            for name, value in {"": whole_ms, **parts}.items():
                times.setdefault(f"{name}_ms".lstrip("_"), []).append(value)
    return times


def summaries(times: dict[str, list[float]]) -> dict[str, Any]:
    return {name: summary(samples) for name, samples in times.items()}


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
