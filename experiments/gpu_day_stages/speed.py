"""Stages 6 to 10: passes, rounds with mocked acceptance, batches, launches, mixtures; all of random weights."""

from __future__ import annotations

import json
import statistics
import warnings
from itertools import pairwise
from typing import Any
from unittest import mock as mock_of

import torch

from gpu_day_stages import models
from gpu_day_stages.models import (
    free_memory,
    kv_bytes,
    needed_len,
    pass_times,
    random_dflash,
    random_target,
    shares,
    summary,
)
from gpu_day_stages.visit import Visit
from paceline.draft.base import Drafter, NoDrafter
from paceline.model.torch.decoder import Decoder

BLOCK = 16


def plain(visit: Visit) -> None:
    """A pass of one token, by shape and context, as a share of what reading its weights and its cache takes."""
    for name in ("8B", "1.5B", "27B", "32B"):
        with visit.part(f"plain {name}"):
            visit.need(visit.sized(8, 0))
            _plain(visit, name, visit.sized((256, 4096, 16384), (16, 40)))
        free_memory()


def _plain(visit: Visit, name: str, contexts: tuple[int, ...]) -> None:
    count = visit.sized(40, 3)
    target = random_target(visit, name, max_len=needed_len(max(contexts), 1, count, 32))
    for context in contexts:
        samples, first = pass_times(visit, target, context, 1, count)
        figures = shares(visit, target.weight_bytes + kv_bytes(target, context), samples)
        times = {"ms": summary(samples), "first_ms": first, "tokens_per_s": 1e3 / statistics.median(samples)}
        visit.report(f"plain {name} at {context}", **times, **figures)
        if context == 4096 and name != "1.5B":
            visit.goal(f"plain {name}: share of measured read bandwidth", figures["share_of_read"] or 0.0, 0.85)
        if context in (4096, contexts[-1]) and context <= 4096:
            _round(visit, target, NoDrafter(), f"device round {name} at {context}, plain", 1, context, count, 0)


def mock(visit: Visit) -> None:
    """Rounds that keep 1, 2, 4 and 8 tokens whatever the target says: their cost is real, their text means nothing.

    The step time at a fixed context gives tokens per second; `lossless` is false.
    """
    context = visit.sized(4096, 24)
    for name, size in (("8B", context), ("27B", context), ("8B", 256)):
        with visit.part(f"mock {name} at {size}"):
            visit.need(visit.sized(8, 0))
            _mock(visit, name, visit.sized(size, 24))
        free_memory()


def _mock(visit: Visit, name: str, context: int) -> None:
    count, yields = visit.sized(30, 2), visit.sized((2, 4, 8), (4,))
    target = random_target(visit, name, max_len=needed_len(context, max(yields), count, BLOCK))
    plain_ms = _round(visit, target, NoDrafter(), f"round {name} at {context}, plain", 1, context, count, 0)
    if name == "8B":  # as before rounds were one graph, on the same card
        what = f"ordinary round {name} at {context}"
        _round(visit, target, NoDrafter(), f"{what}, plain", 1, context, count, 0, device=False)
        own = random_dflash(target, visit.sized(5, 1))
        _round(visit, target, own, f"{what}, 5 layers, 4 tokens a round", 4, context, count, BLOCK - 1, device=False)
    for layers, words in ((5, None), (3, visit.sized(32768, 32))):
        own, ratios = random_dflash(target, visit.sized(layers, 1), words), {}
        text = f"{name} at {context}, {layers} layers" + (f" over {words} words" if words else "")
        for kept in yields:
            what = f"round {text}, {kept} tokens a round"
            ratios[kept] = kept * plain_ms / _round(visit, target, own, what, kept, context, count, BLOCK - 1)
            visit.report(f"ratio {text}, {kept} tokens a round", ratio=ratios[kept], lossless=False)
        if context > 256:
            _ratio_goals(visit, text, words, ratios)


def _ratio_goals(visit: Visit, text: str, words: int | None, ratios: dict[int, float]) -> None:
    goals = {8: 5.62} if words is None else {2: 1.86, 4: 3.57} if text.startswith("27B") else {}
    for kept in goals.keys() & ratios.keys():
        visit.goal(f"{text}: over plain decoding at {kept}", ratios[kept], goals[kept])


def _round(
    visit: Visit,
    target: Decoder,
    drafter: Drafter,
    what: str,
    kept: int,
    context: int,
    count: int,
    width: int,
    device: bool = True,
) -> float:
    """Report rounds of one request; the median of their milliseconds."""
    engine = models.running_engine(target, drafter, batch=1, width=width, kept=kept, context=context, device=device)
    times = models.round_times(visit, engine, count)
    engine.abort(0)
    num_bytes = target.weight_bytes + kv_bytes(target, context)
    if width:
        num_bytes += models.drafter_bytes(drafter, target)  # pyright: ignore[reportArgumentType]
    figures, median = shares(visit, num_bytes, times["ms"]), statistics.median(times["ms"])
    figures |= {"tokens_per_s": 1e3 * kept / median, "recordings": models.recordings(target)}
    figures["rounds_by_kind"] = models.kinds_of(engine)
    visit.report(what, **models.summaries(times), lossless=False, **figures)
    if kept in (1, 8):
        visit.goal(f"{what}: its floor's share of it", figures["share_of_read"] or 0.0, 0.85 if kept == 1 else 1 / 1.2)
    return median


def batch(visit: Visit) -> None:
    """Rounds of many requests with 0 to 15 drafts each; passes when more rows never make fewer tokens per second."""
    context, count = visit.sized(256, 16), visit.sized(8, 2)
    batches, widths = visit.sized((1, 2, 4, 8, 16, 32, 64), (1, 2)), visit.sized((0, 3, 7, 15), (0, 3))
    target = random_target(visit, "8B", rows=max(batches), max_len=needed_len(context, 2, count, BLOCK))
    drafter = random_dflash(target, visit.sized(5, 1))
    rates: dict[int, list[float]] = {width: [] for width in widths}
    for rows in batches:
        for width in widths:
            if visit.left_s < visit.sized(4, 0):
                visit.leave_out(f"{rows} rows, {width} drafts", "no time is left")
                continue
            used: Drafter = drafter if width else NoDrafter()
            kept = min(2, width + 1)
            engine = models.running_engine(target, used, batch=rows, width=width, kept=kept, context=context)
            times = models.round_times(visit, engine, count)
            for request in range(rows):
                engine.abort(request)
            rates[width].append(1e3 * rows / statistics.median(times["ms"]))
            more = {"rows_per_s": rates[width][-1], "rounds_by_kind": models.kinds_of(engine)}
            visit.report(f"8B, {rows} rows, {width} drafts", **models.summaries(times), **more)
    falls = {width: min((b / a for a, b in pairwise(each)), default=1.0) for width, each in rates.items()}
    if not visit.is_tiny:
        visit.check("more rows make no fewer tokens per second", min(falls.values()) > 0.95, least_ratio=falls)


def profile(visit: Visit) -> None:
    """Launches, kernels, synchronisations and the GPU's busy share over rounds of 8B with a drafter of five layers."""
    context, count = visit.sized(1024, 16), visit.sized(20, 2)
    target = random_target(visit, "8B", max_len=needed_len(context, 4, 4 * count, BLOCK))
    drafter = random_dflash(target, visit.sized(5, 1))
    engine = models.running_engine(target, drafter, batch=1, width=BLOCK - 1, kept=4, context=context)
    unprofiled = models.round_times(visit, engine, count)
    is_cuda = torch.device(visit.device).type == "cuda"
    kinds = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if is_cuda else [])]
    with torch.profiler.profile(activities=kinds) as profiler:
        for _ in range(count):
            engine.step()
    rows = [_row(event) for event in profiler.key_averages()]
    kernels = [row for row in rows if row["is_kernel"]]
    launches = sum(row["calls"] for row in rows if "Launch" in row["name"]) / count
    spans = [(event.time_range.start, event.time_range.end) for event in profiler.events() if _is_kernel(event)]
    busy_ms = covered(spans) / 1e3 / count
    whole_ms = statistics.median(unprofiled["ms"])
    visit.report("launches a round", number=launches, kernels_a_round=sum(row["calls"] for row in kernels) / count)
    visit.report("rounds by kind", counts=models.kinds_of(engine))
    visit.report("busy", ms=summary(unprofiled["ms"]), kernels_ms=busy_ms, share=busy_ms / whole_ms)
    top = sorted(kernels or rows, key=lambda row: -row["device_us"] or -row["host_us"])[:60]
    table = {"rounds": count, "kernels": top, "calls": rows[:400]}
    (visit.out / "profile.json").write_text(json.dumps(table, indent=1))
    if is_cuda:
        syncs = _synchronisations(engine, count)
        visit.report("syncs a round", number=syncs)
        visit.goal("one synchronisation a round (1 / number)", 1 / max(syncs, 1e-9), 1.0)
        visit.goal("at most 400 launches a round (400 / number)", 400 / max(launches, 1e-9), 1.0)


def covered(spans: list[tuple[float, float]]) -> float:
    """Length of what the spans cover together. Kernels overlap: each starts, and waits, while the one before still
    runs."""
    length, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        length += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return length


def _is_kernel(event: Any) -> bool:
    return "CUDA" in str(getattr(event, "device_type", "")) and getattr(event, "self_device_time_total", 0.0) > 0


def _row(event: Any) -> dict[str, Any]:
    device_us = getattr(event, "self_device_time_total", 0.0)
    names = {"name": event.key[:200], "calls": event.count, "is_kernel": _is_kernel(event)}
    return {**names, "device_us": device_us, "host_us": event.self_cpu_time_total}


def _synchronisations(engine: Any, count: int) -> float:
    """Synchronising operations of a round: those that PyTorch warns of, and waits for events, which it does not."""
    before, waits, wait = torch.cuda.get_sync_debug_mode(), [0], torch.cuda.Event.synchronize

    def counted(event: torch.cuda.Event) -> None:
        waits[0] += 1
        wait(event)

    with warnings.catch_warnings(record=True) as caught, mock_of.patch.object(torch.cuda.Event, "synchronize", counted):
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(count):
                engine.step()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return (waits[0] + sum("synchroniz" in str(each.message) for each in caught)) / count


def mixtures(visit: Visit) -> None:
    """Recorded passes of a mixture of experts and of a hybrid, as a share of what reading the experts that were chosen,
    all else and the states takes; and whether the same pass has the same bits twice."""
    for shape, what, counts in (
        ("30B-A3B", "Qwen3-30B-A3B", (1, 8, 16)),
        ("hybrid 27B", "hybrid 27B", (1, 16)),
    ):
        with visit.part(what):
            _mixture(visit, shape, what, counts)
        free_memory()


def _mixture(visit: Visit, shape: str, what: str, counts: tuple[int, ...]) -> None:
    context = visit.sized(1024, 16)
    target = random_target(visit, shape, max_len=context + 64)
    for count in counts:
        samples, first = pass_times(visit, target, context, count, visit.sized(30, 2))
        read = target.experts_read
        figures = shares(visit, models.pass_bytes(target, context, read), samples)
        recordings = models.recordings(target)
        visit.report(
            f"{what}, {count} positions",
            ms=summary(samples), first_ms=first, experts_read=read, recordings=recordings, **figures,
        )  # fmt: skip
        least = 0.85 if read is None else 0.6
        visit.goal(
            f"{what}, {count} positions: share of measured read bandwidth", figures["share_of_read"] or 0.0, least
        )
    counts_twice = {count: _is_repeatable(target, count) for count in visit.sized((16, 64), (16,))}
    visit.report(f"{what}, bits", same_twice=counts_twice)


def _is_repeatable(target: Decoder, count: int) -> bool:
    from paceline.model.target import ForwardBatch

    row = target.cache.allocate()
    assert row is not None
    tokens, outs = models.random_prompt("bits", count, target.vocab_size), []
    for _ in range(2):
        out = target.forward(ForwardBatch([row], [0], [count], tokens))
        assert out.logits_TV is not None
        outs.append(out.logits_TV.clone())
        target.cache.rollback([row], [0])
    target.cache.free(row)
    return torch.equal(*outs)
