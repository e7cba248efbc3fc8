"""The model's parts on a GPU, checked without one: kernels, orders of sums, places of random weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.draft.dflash.config import DFlashConfig, as_dflash2, new_config
from paceline.draft.dflash.drafter import DFlashNetwork
from paceline.draft.dflash2.drafter import DFlash2Network
from paceline.draft.eagle3.checkpoint import Eagle3Config
from paceline.draft.eagle3.checkpoint import new_config as new_eagle3
from paceline.draft.eagle3.drafter import Eagle3Network
from paceline.model import backends, checkpoint
from paceline.model.config.decoder import DecoderConfig
from paceline.model.target import ForwardBatch
from paceline.model.torch import decoder, delta_net, sdpa
from paceline.model.torch.attention import attend_rows
from paceline.model.torch.decoder import Decoder
from paceline.model.torch.delta_net import MOST_INVERTED, unit_lower_inverse
from paceline.model.torch.experts import Experts
from paceline.model.torch.kernels import layer as kernels
from paceline.model.torch.parts import RMSNorm

CONFIG = DecoderConfig(
    "qwen3", vocab_size=50, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
    max_position=64, qk_norm=True,
)  # fmt: skip
CUDA = torch.device("cuda:0")


def changed(**values: Any) -> DecoderConfig:
    return replace(CONFIG, **values)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class TestKernels:
    def test_attention_leaves_cudnn_out_on_cuda_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sdpa, "_is_flash_broken", lambda: False)
        flags = torch.backends.cuda
        assert flags.cudnn_sdp_enabled()
        with sdpa.chosen_kernels(CUDA):
            assert not flags.cudnn_sdp_enabled()
            assert flags.mem_efficient_sdp_enabled() and flags.flash_sdp_enabled() and flags.math_sdp_enabled()
            with sdpa.chosen_kernels(CUDA):  # a layer within a pass
                assert not flags.cudnn_sdp_enabled()
            assert not flags.cudnn_sdp_enabled()
        assert flags.cudnn_sdp_enabled()
        with sdpa.chosen_kernels(torch.device("cpu")):
            assert flags.cudnn_sdp_enabled()

    def test_a_cpu_whose_flash_kernel_fails_uses_the_math_kernel(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The state of a processor with AMX under ATEN_CPU_CAPABILITY=avx2."""
        real, flags, cpu = F.scaled_dot_product_attention, torch.backends.cuda, torch.device("cpu")

        def fails(*tensors: Tensor, **settings: Any) -> Tensor:
            if tensors[0].dtype is torch.bfloat16 and flags.flash_sdp_enabled():
                raise RuntimeError("pack_vnni2 is only supported when avx512 is supported")
            return real(*tensors, **settings)

        monkeypatch.setattr(F, "scaled_dot_product_attention", fails)
        monkeypatch.setattr(sdpa, "_is_flash_broken", sdpa._is_flash_broken.__wrapped__)
        keys = draw(1, 2, 70, 16).bfloat16()
        query = draw(64, 4, 16, seed=1).bfloat16()
        out = attend_rows(query, keys, keys, None)
        expected = attend_rows(query.float(), keys.float(), keys.float(), None)
        assert (out.float() - expected).abs().max() < 0.02
        with sdpa.working_kernels(CUDA):
            assert flags.flash_sdp_enabled()
        with sdpa.working_kernels(cpu), sdpa.chosen_kernels(cpu):  # a layer within a pass
            assert not flags.flash_sdp_enabled()
        assert flags.flash_sdp_enabled() and flags.cudnn_sdp_enabled()

    def test_a_pass_chooses_once_for_all_its_layers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real, devices = sdpa.chosen_kernels, list[torch.device]()
        monkeypatch.setattr(decoder, "chosen_kernels", lambda device: devices.append(device) or real(device))
        target = Decoder(CONFIG, checkpoint.random_tensors(CONFIG), max_len=32)
        row = target.cache.allocate()
        target.forward(ForwardBatch([row or 0], [0], [3], [1, 2, 3]))
        assert devices == [torch.device("cpu")]

    def test_half_precision_products_are_summed_in_float32(self) -> None:
        flags = torch.backends.cuda.matmul
        before = flags.allow_bf16_reduced_precision_reduction, flags.allow_fp16_reduced_precision_reduction
        try:
            flags.allow_bf16_reduced_precision_reduction = flags.allow_fp16_reduced_precision_reduction = True
            backends.keep_sums_in_float32(torch.device("cpu"))
            assert flags.allow_bf16_reduced_precision_reduction and flags.allow_fp16_reduced_precision_reduction
            backends.keep_sums_in_float32(CUDA)
            assert not flags.allow_bf16_reduced_precision_reduction and not flags.allow_fp16_reduced_precision_reduction
        finally:
            flags.allow_bf16_reduced_precision_reduction, flags.allow_fp16_reduced_precision_reduction = before

    @pytest.mark.parametrize("offset", [0.0, 1.0])
    def test_a_gpu_norms_no_slices(self, offset: float, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its kernel would copy them first. On "meta" a decoder takes a GPU's way."""
        contiguous: list[bool] = []

        class Recorded:
            def __getattr__(self, name: str) -> Any:
                return getattr(F, name)

            def rms_norm(self, inputs: Tensor, *rest: Any, **more: Any) -> Tensor:
                contiguous.append(inputs.is_contiguous())
                return F.rms_norm(inputs, *rest, **more)

        config = changed(norm_offset=offset)
        target = Decoder(config, checkpoint.random_tensors(config), max_len=32, device="meta")
        monkeypatch.setattr(kernels, "F", Recorded())
        target.forward(ForwardBatch([target.cache.allocate() or 0], [0], [3], [1, 2, 3]))
        assert contiguous == [True] * (3 * config.num_layers + 1)

    @pytest.mark.parametrize("offset", [0.0, 1.0])
    def test_norms_of_the_first_heads_are_the_same_numbers(self, offset: float) -> None:
        heads_THD, weight_HD = draw(5, 7, 8), draw(4, 8, seed=1)
        norm = RMSNorm(weight_HD, 1e-6, offset)
        expected = norm(heads_THD[:, :4])
        assert torch.equal(norm.of_first(heads_THD, 4), expected)
        norm._is_cpu, norm._is_wide, norm._weight = False, bool(offset), weight_HD + offset  # as on a GPU
        torch.testing.assert_close(norm.of_first(heads_THD, 4), expected, atol=1e-6, rtol=1e-5)
        assert torch.equal(norm.of_first(heads_THD, 4), norm(heads_THD[:, :4]))


class Seen(TorchDispatchMode):
    """Names of the operations within."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


class Scaled:
    """An expert whose outputs have the same bits in any company."""

    num_bytes = 4

    def __init__(self, number: int) -> None:
        self._factors = draw(32, seed=number)

    def __call__(self, inputs: Tensor) -> Tensor:
        return inputs * self._factors


class Routed:
    """A router that scores tokens by a table, whatever they are."""

    num_bytes = 4

    def __init__(self, scores_TE: Tensor) -> None:
        self.scores_TE = scores_TE

    def __call__(self, inputs: Tensor) -> Tensor:
        return self.scores_TE


class TestExperts:
    def layer(self, scores_TE: Tensor, is_normed: bool = True) -> Experts:
        return Experts(Routed(scores_TE), [Scaled(number) for number in range(9)], 4, is_normed)

    @pytest.mark.parametrize("is_normed", [True, False])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_sums_are_those_of_the_definition(self, is_normed: bool, dtype: torch.dtype) -> None:
        scores_TE, inputs_TD = draw(6, 9), draw(6, 32, seed=1).to(dtype)
        weights_TK, chosen_TK = scores_TE.softmax(-1).topk(4, dim=-1)
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True) if is_normed else weights_TK
        found_TD = self.layer(scores_TE, is_normed)(inputs_TD)
        by_index_add = torch.zeros(6, 32)
        for expert in range(9):  # as before: one expert after another adds to its tokens
            tokens, places = (chosen_TK == expert).nonzero(as_tuple=True)
            outputs = Scaled(expert)(inputs_TD[tokens]).float() * weights_TK[tokens, places, None]
            by_index_add.index_add_(0, tokens, outputs)
        assert torch.equal(found_TD, by_index_add.to(dtype))

    def test_no_sum_is_taken_in_any_order(self) -> None:
        """CUDA adds by atomic operations where several rows go to one place."""
        with Seen() as seen:
            self.layer(draw(6, 9))(draw(6, 32, seed=1))
        anyhow = {"index_add", "index_add_", "scatter_add", "scatter_add_", "index_put_", "scatter_reduce", "put_"}
        assert not anyhow & seen.names and "mul" in seen.names

    def test_the_company_of_a_token_changes_no_bit(self) -> None:
        scores_TE, inputs_TD = draw(6, 9), draw(6, 32, seed=1)
        whole_TD = self.layer(scores_TE)(inputs_TD)
        for order in ([5, 3, 1, 0, 2, 4], [2, 2, 0, 5], [4]):
            assert torch.equal(self.layer(scores_TE[order])(inputs_TD[order]), whole_TD[order])


class TestTriangles:
    @pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 16, 31, MOST_INVERTED])
    def test_the_inverse_is_the_solver_s(self, count: int) -> None:
        system, right = draw(3, 2, count, count) * 0.4, draw(3, 2, count, 6, seed=1)
        expected = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        torch.testing.assert_close(unit_lower_inverse(system) @ right, expected, atol=1e-5, rtol=1e-4)

    def test_keys_that_repeat_cancel_nothing(self) -> None:
        """One token 32 times: powers of A reach 3e8, the inverse has ones and minus ones."""
        system = torch.ones(MOST_INVERTED, MOST_INVERTED)
        expected = torch.eye(MOST_INVERTED) - torch.diag(torch.ones(MOST_INVERTED - 1), -1)
        assert torch.equal(unit_lower_inverse(system), expected)

    def test_a_gpu_does_not_solve_small_systems(self) -> None:
        """Its solver cannot be recorded. A CPU keeps it, whatever the size, and a long prefill does."""
        for device, count, solves in (("meta", 16, False), ("meta", 64, True), ("cpu", 16, True)):
            system, right = torch.ones(2, count, count, device=device), torch.ones(2, count, 3, device=device)
            with Seen() as seen:
                assert delta_net._solved(system, right).shape == right.shape
            assert ("linalg_solve_triangular" in seen.names) is solves, (device, count)


class TestRandomWeights:
    def test_a_gpu_draws_its_own(self) -> None:
        assert checkpoint.drawn_as(CUDA, torch.bfloat16) == (CUDA, torch.bfloat16)
        for device in ("cpu", "meta"):
            assert checkpoint.drawn_as(torch.device(device), torch.bfloat16) == (torch.device("cpu"), torch.float32)

    def test_nothing_is_made_elsewhere(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Weights of targets and drafters; "meta" is the GPU, and its generator is seeded."""
        seeds: list[tuple[str, int]] = []

        class Generator:
            def __init__(self, device: torch.device = torch.device("cpu")) -> None:  # noqa: B008
                self.device = device

            def manual_seed(self, seed: int) -> torch.Generator | None:
                seeds.append((self.device.type, seed))
                return None if self.device.type == "meta" else real().manual_seed(seed)

        real = torch.Generator
        monkeypatch.setattr(torch, "Generator", Generator)
        monkeypatch.setattr(checkpoint, "drawn_as", lambda device, dtype: (torch.device("meta"), dtype))
        drawn = dict(checkpoint.random_tensors(CONFIG, 3, "cuda", torch.bfloat16))
        for network in networks("cuda", torch.bfloat16):
            drawn |= network.state_dict()
        assert {(tensor.device.type, tensor.dtype) for tensor in drawn.values()} == {("meta", torch.bfloat16)}
        assert ("meta", 3) in seeds

    def test_a_cpu_has_the_bits_that_it_had(self) -> None:
        generator = torch.Generator().manual_seed(3)
        for name, tensor in checkpoint.random_tensors(CONFIG, 3, "cpu", torch.bfloat16):
            expected = torch.empty(tensor.shape)
            expected = torch.ones(tensor.shape) if "norm" in name else expected.normal_(0.0, 0.02, generator=generator)
            assert tensor.dtype == torch.float32 and torch.equal(tensor, expected), name
        for one, other in zip(networks("cpu", torch.bfloat16), networks(), strict=True):
            assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in one.state_dict().items())

    def test_a_target_is_given_its_own_device_s(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[tuple[Any, ...]] = []
        monkeypatch.setattr(
            backends, "random_tensors", lambda *arguments: calls.append(arguments) or checkpoint.random_tensors(CONFIG)
        )
        monkeypatch.setattr(backends, "resolve", lambda name: name)
        monkeypatch.setattr(backends, "load_config", lambda path: CONFIG)
        settings = backends.EngineConfig(
            model="none", weights="random", device="cpu", dtype="bfloat16", backend="torch", max_batch=1, max_len=32
        )
        backends.load_target(settings)
        assert calls == [(CONFIG, 0, torch.device("cpu"), torch.bfloat16)]


def networks(*placed: Any) -> list[Any]:
    raw = new_config(32, 50, 6, num_layers=1, head_dim=8, block_size=4)
    return [
        DFlashNetwork.random(DFlashConfig.from_json(raw), 0, *placed),
        DFlash2Network.random(DFlashConfig.from_json(as_dflash2(raw, rank=4)), 0, *placed),
        Eagle3Network.random(Eagle3Config.from_json(new_eagle3(32, 50, 6)), 0, *placed),
    ]
