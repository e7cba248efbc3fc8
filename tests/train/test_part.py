"""Training of a part of a drafter: what may change changes, the rest keeps its bits, and a resumed run is exact."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_training import HIDDEN, a_pack, config, losses, resumed, tiny_decoder, trainer
from torch import Tensor

from paceline.config import EngineConfig
from paceline.data.answers import Answer, AnswerShards
from paceline.draft.dflash.drafter import DFlashNetwork
from paceline.draft.formats.family import drafter_of
from paceline.errors import ConfigError
from paceline.model.backends import load_target
from paceline.train import train
from paceline.train.config import DrafterShape, LoopConfig, OptimConfig, TrainConfig
from paceline.train.learn.initial_weights import network_for
from paceline.train.learn.loop import Trainer
from paceline.train.learn.part import factors
from paceline.train.plan.choices import PART_RATE, Sizes, check_part, for_chains
from paceline.train.plan.training_plan import make_plan
from paceline.train.tiny import write_tiny_target

PARTS = ("last-layer", "low-rank")
KINDS = ("dflash", "dflash2")


def partial(folder: Path, learn: str, kind: str = "dflash", **changes: Any) -> Trainer:
    """A trainer of two layers that a first training might have left."""
    settings = config(learn=learn, **({"rank": 2} if learn == "low-rank" else {}), **changes)
    return trainer(folder, settings, shape={"num_layers": 2, "kind": kind})


def weights(one: Trainer) -> dict[str, Tensor]:
    return one.parallel.weights(one.network)


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_layer_and_final_norm_alone_change(tmp_path: Path, kind: str) -> None:
    one = partial(tmp_path, "last-layer", kind, selector_from=0.0)
    before = weights(one)
    one.run()
    changed = {name for name, tensor in weights(one).items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in before if name.startswith(("layers.1.", "norm."))}


@pytest.mark.parametrize("kind", KINDS)
def test_low_rank_changes_projections_alone_by_their_rank(tmp_path: Path, kind: str) -> None:
    one = partial(tmp_path, "low-rank", kind, selector_from=0.0)
    before = weights(one)
    plain = trainer(tmp_path / "plain", shape={"num_layers": 2, "kind": kind})
    assert before.keys() == weights(plain).keys(), "the tensors of an ordinary drafter"
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(plain).items()), "B is zero at first"
    one.run()
    after = weights(one)
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in before if name.endswith("_proj.weight") and name.startswith("layers.")}
    ranks = [int(torch.linalg.matrix_rank(after[name] - before[name], rtol=1e-3)) for name in changed]
    assert {*ranks} == {2}


def test_merged_weights_compute_what_the_factors_compute(tmp_path: Path) -> None:
    one = partial(tmp_path / "one", "low-rank", optim=OptimConfig(lr=0.05))
    one.run()
    plain = trainer(tmp_path / "plain", shape={"num_layers": 2})
    pack = a_pack(plain)
    before = plain.drafter.hidden(pack, plain.embedding_VD, False)
    plain.network.load_state_dict(weights(one))
    merged, own = (each.drafter.hidden(pack, plain.embedding_VD, False) for each in (plain, one))
    torch.testing.assert_close(own, merged, rtol=1e-4, atol=1e-5)
    assert (own - before).abs().max() > 0.1, "the test needs a change"


@pytest.mark.parametrize(("learn", "optimiser"), [*((learn, "adamw") for learn in PARTS), ("low-rank", "muon")])
def test_a_resumed_run_is_exact(tmp_path: Path, learn: str, optimiser: str) -> None:
    optim = OptimConfig(optimiser, lr=3e-3)
    whole = partial(tmp_path / "whole", learn, optim=optim)
    expected = losses(whole)
    again = resumed(lambda: partial(tmp_path / "resumed", learn, optim=optim), 4)
    assert losses(again) == {step: loss for step, loss in expected.items() if step > 4}
    assert all(torch.equal(tensor, weights(again)[name]) for name, tensor in weights(whole).items())
    held, restored = ({**dict(factors(one.network)), **dict(one.optimisers.states())} for one in (whole, again))
    assert held.keys() == restored.keys() and all(torch.equal(tensor, restored[name]) for name, tensor in held.items())


def test_a_resumed_run_has_the_same_part_rank_and_drafter(tmp_path: Path) -> None:
    partial(tmp_path, "low-rank", max_steps=2).run()
    for other in (partial(tmp_path, "last-layer"), partial(tmp_path, "all")):
        with pytest.raises(ConfigError, match="learn: 'low-rank' there"):
            other.resume()
    other = partial(tmp_path, "low-rank", max_steps=2)
    with torch.no_grad():
        other.network.get_parameter("layers.0.mlp.up_proj.weight").mul_(1.01)
    with pytest.raises(ConfigError, match="was trained from another --init .*up_proj.weight differs"):
        other.resume()


@pytest.mark.parametrize("learn", PARTS)
def test_the_loss_falls(tmp_path: Path, learn: str) -> None:
    each = [*losses(partial(tmp_path, learn, max_steps=40, optim=OptimConfig(lr=1e-2))).values()]
    assert sum(each[-5:]) < 0.9 * sum(each[:5])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("learn", "kind"), [("last-layer", "dflash"), ("last-layer", "dflash2"), ("low-rank", "dflash")]
)
def test_a_whole_run_saves_an_ordinary_drafter(tmp_path: Path, learn: str, kind: str) -> None:
    """Scaled features and the saved dtype change no bit of what is not learned."""
    model = write_tiny_target(tmp_path / "target")
    target = load_target(EngineConfig(str(model), dtype="float32", device="cpu", max_batch=1, max_len=64))
    shape = DrafterShape(num_layers=2, block_size=4, num_taps=2, kind=kind, codebooks="free")
    network = network_for(target, "none", shape, None, 1)[1]
    drafter_of(network.bfloat16()).save(tmp_path / "init")
    answers = (Answer(f"{n}@0", "", 0, 0.0, [n, 7], [*range(n, n + 9)], "stop", "") for n in range(40))
    AnswerShards(tmp_path / "answers").write([*answers])
    loop = LoopConfig(max_steps=3, blocks_per_step=16, learn=learn, autocast=False)
    settings = TrainConfig(
        tmp_path / "run", EngineConfig(str(model), dtype="float32", device="cpu", threads=1), plan="off",
        answers=(tmp_path / "answers",), init=str(tmp_path / "init"), loop=loop,
    )  # fmt: skip
    part = "low-rank, rank 8" if learn == "low-rank" else "last-layer, norms aside"
    assert f"of them learned ({part})" in make_plan(settings).text
    drafter = train(settings).drafter
    before, after = (load_file(folder / "model.safetensors") for folder in (tmp_path / "init", drafter))
    assert {name: tensor.dtype for name, tensor in before.items()} == {name: t.dtype for name, t in after.items()}
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    learned = ("layers.1.", "norm.") if learn == "last-layer" else ("layers.",)
    assert changed and all(name.startswith(learned) for name in changed)
    assert (drafter / "config.json").read_text() == (tmp_path / "init" / "config.json").read_text()


def test_what_cannot_be_trained_in_part_is_refused(tmp_path: Path) -> None:
    target, part = tiny_decoder(), LoopConfig(learn="low-rank")
    for kind in ("dflash", "dspark"):
        _, network = network_for(target, "none", DrafterShape(num_layers=1, num_taps=2, kind=kind), None, 0)
        drafter_of(network).save(tmp_path / kind)
    dflash = TrainConfig(init=str(tmp_path / "dflash"), loop=part)
    check_part(dflash)
    assert for_chains(dflash).loop.optim.lr == PART_RATE
    given = replace(dflash, loop=replace(part, optim=OptimConfig(lr=2e-3)))
    assert for_chains(given) == given and for_chains(TrainConfig()) == TrainConfig()
    for each, problem in (
        (replace(dflash, init=None), "give one with init"),
        (replace(dflash, init=str(tmp_path / "dspark")), "implemented for DFlash and DFlash 2"),
        (replace(dflash, shape=DrafterShape(kind="eagle3")), "implemented for DFlash and DFlash 2"),
        (replace(dflash, shape=DrafterShape(kind="dflash2")), "would not train what a DFlash 2 drafter adds"),
        (replace(dflash, loop=replace(part, parallel="sharded")), "parallel sharded"),
        (replace(dflash, loop=LoopConfig(rank=4)), "rank means nothing for learn all"),
        (replace(dflash, loop=LoopConfig(learn="last-layer", rank=4)), "rank means nothing for learn last-layer"),
    ):
        with pytest.raises(ConfigError, match=problem):
            check_part(each)
    with pytest.raises(ConfigError, match="lower --rank"):
        trainer(tmp_path / "run", config(learn="low-rank", rank=HIDDEN))


def test_the_plan_counts_what_is_learned(tmp_path: Path) -> None:
    one, other = partial(tmp_path, "low-rank"), partial(tmp_path, "last-layer")
    assert isinstance(one.network, DFlashNetwork) and isinstance(other.network, DFlashNetwork)
    count, shape = sum(weight.numel() for _, weight in factors(one.network)), one.network.config.shape
    sizes = Sizes(
        2, 4, shape.intermediate_size, shape.num_heads, shape.num_kv_heads, shape.head_dim, 2, 24, HIDDEN, HIDDEN
    )
    assert sizes.learned(one.config) == count
    last = [each.numel() for each in other.network.layers[1].parameters() if each.ndim == 2]
    assert sizes.learned(LoopConfig(learn="last-layer")) == sum(last) < sizes.learned(LoopConfig()) == sizes.parameters
