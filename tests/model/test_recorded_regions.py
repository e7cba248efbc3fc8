"""All recorded regions, on meta tensors and by addresses: nothing in them needs the host, and nothing is baked in."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import FAMILIES, SIZES
from recorded_regions import Addresses, Launches, no_host_tensors
from tiny_dflash import VOCAB, network, raw_config, tiny_target
from tiny_dflash2 import network_2, raw_2

from paceline.draft.dflash import paths as dflash_paths
from paceline.draft.dflash.config import DFlashConfig, as_dflash2, as_dspark, new_config
from paceline.draft.dflash.drafter import DFlashDrafter, DFlashNetwork
from paceline.draft.dflash.paths import TorchPath
from paceline.draft.dflash.static import StaticBlock, StaticForms, StaticInject
from paceline.draft.dflash2.drafter import DFlash2Drafter, DFlash2Network
from paceline.draft.dflash2.paths import DFlash2Path
from paceline.draft.dspark.drafter import DSparkDrafter, DSparkNetwork
from paceline.engine.device_round import Form, StaticRound
from paceline.engine.device_rows import DeviceRows
from paceline.model.checkpoint import expected_shapes, load_config, random_tensors
from paceline.model.config.decoder import DecoderConfig, DeltaShape
from paceline.model.target import ForwardBatch
from paceline.model.torch import parts
from paceline.model.torch.cuda_graphs import Region
from paceline.model.torch.decoder import Layer
from paceline.model.torch.delta_cache import DeltaCache
from paceline.model.torch.delta_net import DeltaLayer
from paceline.model.torch.kernels import attend, available
from paceline.model.torch.kernels import delta as delta_kernels
from paceline.model.torch.kernels import experts as expert_kernels
from paceline.model.torch.kernels import layer as layer_kernels
from paceline.model.torch.recorded_pass import GraphDecoder, StaticPass

LAUNCHES = dict.fromkeys(FAMILIES, 10) | {
    "qwen3-moe": 13, "mixtral": 13, "gpt-oss": 13, "qwen3.5": 12, "qwen3-next": 19, "qwen3.5-moe": 19,
    "gemma4": 21, "gemma4-unified": 21, "gemma4-small": 25,
}  # fmt: skip
"""Kernels that a layer of a recorded pass launches at most: the values of today. Only ever lower them."""
ONCE, ONCE_HYBRID, ONCE_INPUTS = 20, 27, 26
"""Positions, tables, taps, embedding and head, once a pass; and lengths of trails; and per-layer embeddings."""
ROUND_ONCE, RACE_ONCE, FORESEEN_ONCE = 50, 160, 75
"""Kernels that a round launches in addition to its passes: widths, acceptance, commitment; the race of sampled rows;
and noise-aware drafts for them."""
WALK_ONCE, WALK_ONCE_3 = (19, 78), (116, 181)
"""Kernels that choose seven drafts in such a round, greedy and sampled: DFlash 2; DSpark, with its heads."""
DRAFT_LAUNCHES, DRAFT_LAUNCHES_2, INJECT_LAUNCHES, DRAFT_ONCE = 10, 40, 10, 24
"""The same of a layer of DFlash, of DFlash 2 with its convolutions, of an injection as a whole, and of a block once."""


def family_config(name: str, folder: Path) -> DecoderConfig:
    import transformers

    family = FAMILIES[name]
    options = {key: value for key, value in (SIZES | family.options).items() if key != "attn_implementation"}
    config = getattr(transformers, f"{family.config or family.model}Config")(**options)
    described = config.to_dict() | {"architectures": [f"{family.model}ForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(described, default=str))
    return load_config(folder)


def on_meta(config: DecoderConfig) -> GraphDecoder:
    tensors = [(name, torch.empty(size, device="meta")) for name, size in expected_shapes(config).items()]
    target = GraphDecoder(config, tensors, num_rows=3, max_len=500, dtype=torch.bfloat16, device="meta")
    target.set_taps((1, 2))
    return target


@torch.inference_mode()
def launches(region: Region, monkeypatch: pytest.MonkeyPatch) -> tuple[int, list[int]]:
    """Launches of the whole region, and of each of its layers; as on a GPU with kernels, which are one each."""
    mode, layers = Launches(), list[int]()

    def launched(*args: Any, **options: Any) -> None:
        mode.count += 1

    monkeypatch.setattr(available, "can_use", lambda device: True)
    for module in (layer_kernels, expert_kernels, delta_kernels):
        monkeypatch.setattr(module, "_launch", launched)

    def counted(run: Any) -> Any:
        def wrapped(*args: Any) -> Any:
            before, out = mode.count, run(*args)
            layers.append(mode.count - before)
            return out

        return wrapped

    own = [(Layer, "run"), (DeltaLayer, "run")] if isinstance(region, StaticPass | StaticRound) else []
    drafters = [(DFlash2Path, "run_layer")] if own else [(TorchPath, "run_layer"), (DFlash2Path, "run_layer")]
    for kind, name in own if isinstance(region, StaticPass) else own + drafters:
        monkeypatch.setattr(kind, name, counted(getattr(kind, name)))

    def kernels(query_THD: torch.Tensor, *others: Any) -> torch.Tensor:
        mode.count += 2
        return torch.empty_like(query_THD).flatten(1)

    monkeypatch.setattr(attend, "run_kernels", kernels)
    with no_host_tensors(), mode:
        region.compute()  # a recording runs it before, too: what is made once is there then
        mode.count = 0
        layers.clear()
        region.compute()
    monkeypatch.undo()
    return mode.count, layers


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_recorded_pass_needs_nothing_of_the_host(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = family_config(name, tmp_path)
    static = on_meta(config)._tapping().find(3, 8)
    assert isinstance(static, StaticPass)
    total, layers = launches(static, monkeypatch)
    assert len(layers) == config.num_layers and max(layers) <= LAUNCHES[name], f"{max(layers)} launches a layer"
    once = ONCE_INPUTS if config.layer_sizes and config.layer_sizes.input_size else ONCE
    assert total - sum(layers) <= (ONCE_HYBRID if config.delta else once)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "gemma3", "granite", "gpt-oss", "qwen3-next"])
def test_recorded_drafting_needs_nothing_of_the_host(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    config = family_config(name, tmp_path)
    target = on_meta(config)
    raw = new_config(config.hidden_size, config.vocab_size, config.num_layers, head_dim=16, intermediate_size=48)
    first = DFlashDrafter(DFlashNetwork.random(DFlashConfig.from_json(raw)))
    second = DFlash2Drafter(DFlash2Network.random(DFlashConfig.from_json(as_dflash2(raw, rank=16))))
    for drafter, most in ((first, DRAFT_LAUNCHES), (second, DRAFT_LAUNCHES_2)):
        drafter.bind(target)
        forms = drafter._path._forms()
        assert isinstance(forms, StaticForms)
        block, inject = forms.blocks.find(3), forms.injects.find(2, 3)
        assert isinstance(block, StaticBlock) and isinstance(inject, StaticInject)
        total, layers = launches(block, monkeypatch)
        assert len(layers) == drafter.config.shape.num_layers and max(layers) <= most, f"{max(layers)} launches a layer"
        assert total - sum(layers) <= DRAFT_ONCE
        assert launches(inject, monkeypatch)[0] <= INJECT_LAUNCHES


@pytest.mark.slow
@pytest.mark.parametrize("is_drawn", [False, True], ids=["greedy", "drawn"])
@pytest.mark.parametrize(("name", "drafts"), [("v1", 0), ("v1", 7), ("v2", 7), ("dspark", 7)])
def test_a_recorded_round_needs_nothing_of_the_host_but_its_result(
    is_drawn: bool, name: str, drafts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One copy out, at the end; the host waits for that alone."""
    config = family_config("qwen3", tmp_path)
    target = on_meta(config)
    raw = new_config(config.hidden_size, config.vocab_size, config.num_layers, head_dim=16, intermediate_size=48)
    kind, net, raw, most_launches, walk = {
        "v1": (DFlashDrafter, DFlashNetwork, raw, DRAFT_LAUNCHES, (0, FORESEEN_ONCE)),
        "v2": (DFlash2Drafter, DFlash2Network, as_dflash2(raw, rank=16), DRAFT_LAUNCHES_2, WALK_ONCE),
        "dspark": (DSparkDrafter, DSparkNetwork, as_dspark(raw, rank=16), DRAFT_LAUNCHES, WALK_ONCE_3),
    }[name]
    drafter = kind(net.random(DFlashConfig.from_json(raw)), draft_ids=torch.arange(30) if is_drawn else None)
    monkeypatch.setattr(
        dflash_paths, "head_weight", lambda target: torch.empty(config.vocab_size, config.hidden_size, device="meta")
    )
    drafter.bind(target)
    target.set_taps(drafter.tap_layers)
    form = Form(is_drawn, is_mocked=False, drafter=drafter if drafts else None)
    region = StaticRound(target, DeviceRows(3, 500, target.device), form, 3, 1 + drafts)
    copies = list[Any]()
    copy = torch.Tensor.copy_

    def noted(own: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        copies.append(own)
        return copy(own, *arguments, **options)

    monkeypatch.setattr(torch.Tensor, "copy_", noted)
    total, layers = launches(region, monkeypatch)
    num_draft_layers = drafter.config.shape.num_layers if drafts else 0
    assert max(layers) <= max(LAUNCHES["qwen3"], most_launches) and len(layers) == config.num_layers + num_draft_layers
    most = config.num_layers * LAUNCHES["qwen3"] + ONCE
    if drafts:
        most += num_draft_layers * most_launches + DRAFT_ONCE + INJECT_LAUNCHES + walk[is_drawn]
    assert total <= most + ROUND_ONCE + is_drawn * RACE_ONCE, (total, most)
    assert sum(each is region.read_out for each in copies) == 2, "computed twice: one copy each"
    assert copies[-1] is region.read_out


def reading(values: torch.Tensor) -> float:
    return float(values.sum())


@pytest.mark.parametrize(
    "mistake",
    [
        lambda tensor: reading(tensor),
        lambda tensor: tensor[tensor > 0],
        lambda tensor: tensor + torch.ones(3),
        lambda tensor: torch.tensor([1.0, 2.0], device="meta"),
        lambda tensor: tensor.nonzero(),
    ],
    ids=["value", "shape", "device", "upload", "nonzero"],
)
def test_a_region_that_needs_the_host_is_seen(mistake: Any) -> None:
    class Wrong(Region):
        def compute(self) -> None:
            mistake(torch.zeros(3, device="meta"))

    with pytest.raises((AssertionError, RuntimeError, NotImplementedError)), no_host_tensors(), Launches():
        Wrong().compute()


def refilled(region: Any, seed: int) -> None:
    """Other tokens, lengths, counts and features within the region's shape."""
    rng = random.Random(seed)
    rows = sorted(rng.sample(range(3), 2))
    counts = [rng.randint(1, 5) for _ in rows]
    match region:
        case StaticPass():
            tokens = [rng.randrange(VOCAB) for _ in range(sum(counts))]
            region.fill(ForwardBatch(rows, [rng.randrange(40) for _ in rows], counts, tokens))
        case StaticBlock():
            region._path.cache.lengths[:] = [rng.randrange(40) for _ in range(3)]
            region.fill(rows, [rng.randrange(VOCAB) for _ in rows])
        case StaticRound():
            state = region._rows.first(3)
            for values_B, most in ((state.length_B, 40), (state.anchor_B, VOCAB), (state.draws.seed_B, 99)):
                values_B.copy_(torch.tensor([rng.randrange(most) for _ in range(3)]))
            for values_B, values in (
                (state.left_B, [9, 9, 1 + seed]),
                (state.most_B, [4, seed, 3]),
                (state.draws.top_p_B, [1.0, 0.8, 0.9]),
                (state.draws.inverse_temperature_B, [0.0, 1.0, 0.7 * seed]),
            ):
                values_B.copy_(torch.tensor(values))
        case _:
            generator = torch.Generator().manual_seed(seed)
            features = torch.randn(sum(counts), region._taps_BJF.shape[-1], generator=generator)
            region.fill(rows, [rng.randrange(40) for _ in rows], counts, features)


MIXTURE = DecoderConfig(
    "qwen3_next", VOCAB, 16, 24, num_layers=3, num_heads=2, num_kv_heads=1, head_dim=8, max_position=512, qk_norm=True,
    num_experts=7, experts_per_token=3, expert_size=12, shared_expert_size=8,
)  # fmt: skip
HYBRID = replace(MIXTURE, delta=DeltaShape(2, 4, 4, 3, 3), linear_layers=(0, 2))


def memories(cache: Any) -> list[torch.Tensor]:
    """All that a cache holds, or several do."""
    if isinstance(cache, tuple):
        return [tensor for each in cache for tensor in memories(each)]
    states = (
        [tensor for memory in cache.memories for tensor in memory.tensors()] if isinstance(cache, DeltaCache) else []
    )
    return [cache.keys, cache.values, *states]


def pass_of(config: DecoderConfig) -> tuple[StaticPass, Any]:
    """A pass of a new target, and its cache, which holds something."""
    tensors, generator = random_tensors(config), torch.Generator().manual_seed(2)
    target = GraphDecoder(config, ((name, 9 * tensor) for name, tensor in tensors), num_rows=3, max_len=64)
    target.set_taps((1, 2))
    for tensor in memories(target.kv):
        tensor.normal_(0.0, 0.3, generator=generator)
    for memory in target.kv.memories if isinstance(target.kv, DeltaCache) else ():
        memory.decays_BNH.abs_().neg_()
    static = target._tapping().find(3, 8)
    assert isinstance(static, StaticPass)
    return static, target.kv


def regions() -> dict[str, Any]:
    """One of each kind, from a new target and drafter with the same weights, and caches that hold something."""
    target = tiny_target(kind=GraphDecoder)
    target.set_taps((1, 2))
    generator = torch.Generator().manual_seed(2)
    target.kv.keys.normal_(generator=generator)
    target.kv.values.normal_(generator=generator)
    kinds: dict[str, Any] = {"pass": (target._tapping().find(3, 8), target.kv)}
    kinds |= {"pass of a mixture": pass_of(MIXTURE), "pass of a hybrid": pass_of(HYBRID)}
    for name, drafter in (("v1", DFlashDrafter(network(raw_config()))), ("v2", DFlash2Drafter(network_2(raw_2())))):
        drafter.bind(target)
        path: Any = drafter._path
        path.cache.keys.normal_(generator=generator)
        path.cache.values.normal_(generator=generator)
        for each in (path._forms().blocks.find(3), path._forms().injects.find(3, 3)):
            kinds[f"{each.kind} {name}"] = each, path.cache
        kinds[f"round {name}"] = round_of(drafter, generator)
    return kinds


def round_of(drafter: DFlashDrafter, generator: torch.Generator) -> tuple[StaticRound, Any]:
    """A round of greedy and sampled rows of a new target, and the caches of target and drafter."""
    target = tiny_target(kind=GraphDecoder)
    drafter.bind(target)
    target.set_taps(drafter.tap_layers)
    caches = target.kv, drafter._path.cache
    for tensor in memories(caches):
        tensor.normal_(generator=generator)
    return StaticRound(target, DeviceRows(3, 256, target.device), Form(True, False, drafter), 3, 5), caches


@pytest.mark.slow
@torch.inference_mode()
def test_regions_have_fixed_addresses_and_bake_nothing_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run on other contents they use the same memory, and give what regions give that never ran before."""
    monkeypatch.setattr(parts, "can_pack", lambda weight: False)  # packed weights tell no address
    fresh = regions()
    for kind, (region, cache) in regions().items():
        assert_fixed(kind, region, cache, fresh[kind][0])


def assert_fixed(kind: str, region: Any, cache: Any, fresh: Any) -> None:
    addresses = []
    before = [tensor.clone() for tensor in memories(cache)]
    for seed in (1, 2):
        for tensor, old in zip(memories(cache), before, strict=True):
            tensor.copy_(old)
        refilled(region, seed)
        with Addresses() as mode:
            region.compute()
        addresses.append((mode.outside, [each.data_ptr() for each in (*region.inputs, *region.outputs)]))
    assert addresses[0] == addresses[1], kind
    refilled(fresh, 2)
    fresh.compute()
    for one, two in zip(region.outputs, fresh.outputs, strict=True):
        if "inject" in kind:  # outputs are the whole cache; its scratch positions hold what idle rows and padding left
            one, two = one[..., : cache.max_len, :], two[..., : cache.max_len, :]
        assert torch.equal(one, two), kind
    assert all(each.isfinite().all() for each in region.outputs if each.is_floating_point()), kind


@torch.inference_mode()
def test_a_length_that_is_baked_in_is_seen() -> None:
    """A region that reads a length on the host keeps that of its first run."""

    class Baked(Region):
        def __init__(self) -> None:
            self.lengths_B, self.output = torch.tensor([3]), torch.zeros(8)
            self.length: int | None = None

        def compute(self) -> None:
            self.length = int(self.lengths_B) if self.length is None else self.length
            self.output.copy_((torch.arange(8) < self.length).float())

    region, fresh = Baked(), Baked()
    region.compute()
    for each in (region, fresh):
        each.lengths_B.fill_(5)
        each.compute()
    assert not torch.equal(region.output, fresh.output)
