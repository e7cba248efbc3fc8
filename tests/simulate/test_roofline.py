"""The parts of a pass against the formulas written out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.errors import ConfigError
from paceline.hardware import Machine
from paceline.simulate.costs import catalogue
from paceline.simulate.costs.roofline import (
    MEASURED_LOCALITY,
    Deployment,
    attended,
    distinct_experts,
    memory_need,
    pass_seconds,
)
from paceline.simulate.costs.shapes import Attention, Experts, ModelShape, Precisions, with_precisions
from paceline.simulate.limits import memory_warning, roofline_limits
from paceline.simulate.speedup import Load

B200 = catalogue.machines()["B200"]
BF16 = Precisions()


def dense_shape(*groups: Attention, experts: Experts | None = None) -> ModelShape:
    return ModelShape("test", 2, 64, 1e9, groups or (Attention("gqa", 2, 4, 2, 16),), BF16, experts)


def machine(**rates: float) -> Machine:
    return Machine("test", 1e12, rates or {"bfloat16": 1e14}, 0, 10**10, 1e11)


def test_a_dense_pass_by_hand() -> None:
    """Reading bound for few positions, arithmetic bound for many; the cache is read once for all positions of a row."""
    deployment = Deployment(machine(), BF16)
    few = pass_seconds(dense_shape(), deployment, batch=2, positions=3, context=1000)
    assert few["projections"] == pytest.approx(2e9 / 1e12)
    flops, num_bytes = 2 * 2 * 4 * 4 * 16 * 3 * 1000, 2 * 2 * 2 * 2 * 16 * 2 * 1000
    assert few["attention"] == pytest.approx(max(flops / 1e14, num_bytes / 1e12))
    assert few["experts"] == few["collectives"] == 0.0
    many = pass_seconds(dense_shape(), deployment, batch=100, positions=3, context=1000)
    assert many["projections"] == pytest.approx(2 * 1e9 * 300 / 1e14)


def test_experts_by_hand() -> None:
    """Two routed experts of eight and one shared: 1e8 parameters each over all layers."""
    experts = Experts(8, 2, active=3e8, resident=9e8)
    assert (experts.each, experts.shared) == (1e8, 1e8)
    seconds = pass_seconds(dense_shape(experts=experts), Deployment(machine(), BF16), 1, 3, 10)["experts"]
    distinct = 8 * (1 - (1 - 2 / 8) ** 3)
    assert seconds == pytest.approx((1e8 + distinct * 1e8) * 2 / 1e12)


def test_distinct_experts() -> None:
    assert distinct_experts(256, 8, 1, 1) == pytest.approx(8)
    assert distinct_experts(256, 8, 1, 8) == pytest.approx(57.4, abs=0.05)
    assert distinct_experts(256, 8, 1, 8, locality=1.0) == pytest.approx(8)
    assert distinct_experts(256, 8, 8, 1, locality=1.0) == pytest.approx(57.4, abs=0.05), "sequences share nothing"


def test_the_measured_locality() -> None:
    measured = {1: 8, 2: 13.1, 3: 17.7, 4: 21.9, 6: 29.4, 8: 36.0, 12: 47.2, 16: 56.4}
    for positions, count in measured.items():
        assert distinct_experts(256, 8, 1, positions, MEASURED_LOCALITY) == pytest.approx(count, rel=0.02)


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        (Attention("gqa", 1), 4096),
        (Attention("gqa", 1, window=128), 128),
        (Attention("mla", 1), 4096),
        (Attention("mla", 1, window=128), 128),
        (Attention("mla", 1, window=128, ratio=4, topk=512), 128 + 512),
        (Attention("mla", 1, window=128, ratio=128), 128 + 32),
        (Attention("mla", 1, window=0, ratio=1, topk=2048), 2048),
        (Attention("linear", 1), 0),
    ],
)
def test_attended_positions(group: Attention, expected: float) -> None:
    assert attended(group, 4096) == expected


def test_an_unfinished_entry_of_the_history_is_not_read() -> None:
    assert attended(Attention("mla", 1, window=128, ratio=128), 4096 + 127) == 128 + 32


def test_mla_and_indexer_by_hand() -> None:
    group = Attention(
        "mla", 3, heads=8, latent=512, rope=64, window=128, ratio=4, topk=512, indexer_heads=2, indexer_dim=16
    )
    precisions = Precisions(kv="float8")
    seconds = pass_seconds(dense_shape(group), Deployment(machine(bfloat16=1e13), precisions), 5, 2, 4096)["attention"]
    flops = 5 * 3 * 2 * 8 * (2 * 512 + 64) * 2 * 640
    num_bytes = 5 * 3 * (512 + 64) * 1 * 640
    index_flops, index_bytes = 5 * 3 * 2 * 2 * 16 * 1024 * 2, 5 * 3 * 1024 * 16
    assert seconds == pytest.approx(max(flops / 1e13, num_bytes / 1e12) + max(index_flops / 1e13, index_bytes / 1e12))


def test_linear_attention_reads_its_state_whatever_the_context() -> None:
    shape = dense_shape(Attention("linear", 48, state_bytes=1654784))
    deployment = Deployment(machine(), BF16)
    short = pass_seconds(shape, deployment, 4, 1, 100)["attention"]
    assert short == pytest.approx(4 * 48 * 1654784 / 1e12)
    assert pass_seconds(shape, deployment, 4, 9, 100000)["attention"] == short


def test_layers_apart_cost_more_than_layers_together() -> None:
    """A layer bound by arithmetic and one bound by reading cannot make up for each other when taken apart."""
    groups = (Attention("gqa", 1, 512, 1, 16), Attention("linear", 1, state_bytes=1e6))
    whole, apart = (
        pass_seconds(dense_shape(*groups), Deployment(machine(), BF16, per_layer=per_layer), 1, 4, 1000)["attention"]
        for per_layer in (False, True)
    )
    flops, num_bytes = 4 * 512 * 16 * 4 * 1000, 2 * 16 * 2 * 1000
    assert apart == pytest.approx(flops / 1e14 + 1e6 / 1e12)
    assert whole == pytest.approx(max(flops / 1e14, (num_bytes + 1e6) / 1e12))
    assert apart > whole


def test_several_gpus() -> None:
    shape = dense_shape()
    one = pass_seconds(shape, Deployment(machine(), BF16), 1, 1, 10)
    four = pass_seconds(shape, Deployment(machine(), BF16, num_gpus=4), 1, 8, 10)
    assert four["projections"] == pytest.approx(one["projections"] / 4)
    assert four["collectives"] == pytest.approx(2 * 2 * (5e-6 + 2 * 3 / 4 * 8 * 64 * 2 / 1e11))
    text = " ".join(roofline_limits(shape, Deployment(machine(), BF16, num_gpus=4)))
    assert "all-reduces" in text


def test_missing_formats_are_multiplied_wider_and_said_so() -> None:
    shape = replace(dense_shape(), precisions=Precisions(weights="float4"))
    deployment = Deployment(catalogue.machines()["H100"], shape.precisions)
    assert deployment.flops_per_s("float4") == 1.979e15
    assert any("multiplied as float8" in sentence for sentence in roofline_limits(shape, deployment))
    with pytest.raises(ConfigError, match="no known arithmetic rate"):
        Deployment(replace(B200, flops_per_s={}), BF16).flops_per_s("bfloat16")


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"num_gpus": 0}, "num_gpus must be"),
        ({"expert_locality": 1.5}, "between 0"),
        ({"expert_locality": float("nan")}, "between 0"),
    ],
)
def test_impossible_deployments(options: dict[str, float], remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        Deployment(B200, BF16, **options)  # pyright: ignore[reportArgumentType]


def test_gpus_without_a_known_link() -> None:
    with pytest.raises(ConfigError, match="--gpus 1"):
        Deployment(replace(B200, link_bytes_per_s=0.0), BF16, num_gpus=2)


def test_precisions_by_part() -> None:
    changed = with_precisions(BF16, "weights=fp8,experts=mxfp4,kv=float8")
    assert (changed.weights, changed.experts, changed.attention, changed.kv) == (
        "float8",
        "float4",
        "bfloat16",
        "float8",
    )
    assert with_precisions(BF16, "fp8").experts == "float8"
    assert with_precisions(BF16, None) == BF16
    with pytest.raises(ConfigError, match="is not known"):
        with_precisions(BF16, "fp7")
    with pytest.raises(ConfigError, match="is no part"):
        with_precisions(BF16, "norms=fp8")


def test_what_does_not_fit_is_said() -> None:
    shape = catalogue.find("DeepSeek-V4-Pro")
    one, five = (Deployment(B200, shape.precisions, num_gpus=count) for count in (1, 5))
    warning = memory_warning(memory_need(shape, one, 1, 4096), Load(), one)
    assert warning is not None and "--gpus 5" in warning
    assert memory_warning(memory_need(shape, five, 1, 4096), Load(), five) is None
    assert "--gpus 8" in (memory_warning(memory_need(shape, one, 1, 4096), Load(), one, shape) or ""), "128 heads"


def test_cache_bytes_by_hand() -> None:
    """Llama-3.1-8B keeps 128 KiB a token in 16 bits; a window keeps its own length; V4 a window and compressed
    history."""
    llama = catalogue.find("Llama-3.1-8B")
    assert memory_need(llama, Deployment(B200, BF16), 3, 1000).cache_bytes == 3 * 1000 * 131072
    windowed = dense_shape(Attention("gqa", 1, 4, 2, 16, window=100))
    assert memory_need(windowed, Deployment(B200, BF16), 1, 1000).cache_bytes == 100 * 2 * 2 * 16 * 2
    group = Attention("mla", 1, 8, latent=512, rope=64, window=128, ratio=4, topk=64, indexer_heads=2, indexer_dim=16)
    kept = memory_need(dense_shape(group), Deployment(B200, Precisions(kv="float8")), 1, 1000).cache_bytes
    assert kept == 576 * (128 + 250) + 250 * 16
