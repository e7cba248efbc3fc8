"""Runs any causal language model of Transformers as a Target: slower than paceline's decoder, but any architecture.

Rows run one after another, each with its own Transformers cache (`cache.py`). Needs the extra `paceline[hf]`. Models
are local folders (see `hub.py`); remote code is never run.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.errors import ContextLengthError, ModelFileError, ModelNotFoundError, UnsupportedModelError, needing
from paceline.model.hf.cache import (
    HFCache,
    Row,
    cache_bytes,
    is_unused,
    make_cache,
    poison_recurrent_state,
    tensor_bytes,
)
from paceline.model.target import DEFAULT_MAX_LEN, EndScales, ForwardBatch, ForwardOutput, Target
from paceline.model.torch.sdpa import working_kernels

BROKEN_CONFIG = (ValueError, LookupError, ImportError, TypeError, AttributeError, ArithmeticError, StrictDataclassError)
"""Errors of Transformers for a config.json with unknown or invalid values."""
_MAX_PENDING = 32
"""Pending tokens that a pass recomputes before new ones; more get a separate pass first."""
_PROBE_TOKENS = 4
_UNLIMITED = 1 << 20
"""`max_position` of models without one (recurrent models)."""


class HFTarget(Target):
    """A target that runs `model`, a causal language model of Transformers, which must already be on its device. The
    model is set to eval mode.

    Raises UnsupportedModelError if the model has no LM head, or cannot use Transformers' DynamicCache.
    """

    def __init__(self, model: nn.Module, num_rows: int, max_len: int | None = None) -> None:
        self.model: Any = model.eval().requires_grad_(False)
        config = self.model.config.get_text_config(decoder=True)
        self._config = config
        self._embedding: Any = self.model.get_input_embeddings()
        self._lm_head: Any = self.model.get_output_embeddings()
        if self._lm_head is None:
            raise UnsupportedModelError(
                f"{type(model).__name__} has no language model head: give a causal language model"
            )
        self.device, self.dtype = self._embedding.weight.device, self._embedding.weight.dtype
        self.vocab_size = int(self._lm_head.weight.shape[0])
        self.hidden_size, self.num_layers = int(config.hidden_size), int(config.num_hidden_layers)
        self.max_position = int(getattr(config, "max_position_embeddings", None) or _UNLIMITED)
        self.weight_bytes = tensor_bytes([*self.model.parameters()])
        if self._lm_head.weight is not self._embedding.weight:  # a separate embedding is looked up, not read whole
            self.weight_bytes -= tensor_bytes([self._embedding.weight])
        parameters = inspect.signature(model.forward).parameters
        self._cache_argument = "past_key_values" if "past_key_values" in parameters else "cache_params"
        self._keeps_logits = "logits_to_keep" in parameters
        self._takes_positions = "position_ids" in parameters
        self._decoder, self._layers = _find_layers(self.model.get_decoder(), self.num_layers)
        self._captured: dict[int, Tensor] = {}
        self._hooks: list[Any] = []
        scale, self._token_bytes, self._state_bytes, self._must_step = self._probe()
        self.ends = EndScales(scale, *_logit_scales(config))
        self.allocate_cache(num_rows, max_len or min(self.max_position, DEFAULT_MAX_LEN))

    @classmethod
    def from_path(
        cls,
        path: str | Path,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        num_rows: int,
        max_len: int | None = None,
        weights: Literal["checkpoint", "random"] = "checkpoint",
    ) -> HFTarget:
        """Load a model from a local folder with config.json and safetensors. `weights` "random" reads only config.json
        and initialises the weights randomly. `max_len`: tokens per cache row; None: the model's maximum context, but at
        most DEFAULT_MAX_LEN.

        Raises ModelNotFoundError, ModelFileError (missing or damaged weights), UnsupportedModelError (unknown
        architecture, remote code, Transformers not installed).
        """
        missing = "this model runs through Transformers, which is not installed: pip install 'paceline[hf]'"
        with needing(UnsupportedModelError, missing):
            import transformers
        if not (Path(path) / "config.json").is_file():
            raise ModelNotFoundError(f"no config.json in {path}: give a folder of a downloaded Hugging Face model")
        model: Any
        lacking: list[str] = []
        try:
            if weights == "random":
                config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(0)
                    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
            else:
                loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
                    path,
                    dtype=dtype,
                    trust_remote_code=False,
                    use_safetensors=True,
                    local_files_only=True,
                    output_loading_info=True,
                )
                model, report = loaded
                lacking = sorted(report["missing_keys"])
        except SafetensorError as error:
            raise ModelFileError(f"damaged safetensors in {path}: {_first_line(error)}; download it again") from error
        except BROKEN_CONFIG as error:
            raise UnsupportedModelError(
                f"Transformers cannot build a causal LM from {path}: {_first_line(error)}"
            ) from error
        except (OSError, RuntimeError) as error:
            raise ModelFileError(
                f"cannot load the weights in {path}: {_first_line(error)}; download it again"
            ) from error
        if lacking:  # Transformers gives them random values
            names = f"{lacking[0]}, {len(lacking)} in all"
            raise ModelFileError(f"{path} lacks weights of the model ({names}): is config.json the right one?")
        return cls(model.to(device), num_rows, max_len)

    def allocate_cache(self, num_rows: int, max_len: int) -> None:
        """Replace `cache` by an empty one; its memory is allocated as rows grow. Raises ContextLengthError if `max_len`
        is beyond the model's context.

        LongRoPE models (Phi-3, Phi-4 128k) have two sets of RoPE factors: one for texts up to the original training
        length, and one for longer texts. `max_len` selects the set for all texts. Some of these models also scale
        attention differently in longer texts (`short_mscale`, `long_mscale`): they raise ContextLengthError if
        `max_len` needs the second set.
        """
        self.check_len(max_len)
        for module in self.model.modules():
            _fix_rope_factors(module, max_len)
        self._cache = HFCache(
            lambda: make_cache(self.model.config),
            num_rows,
            max_len,
            token_bytes=self._token_bytes,
            state_bytes=self._state_bytes,
        )
        self.cache = self._cache

    def set_taps(self, tap_layers: tuple[int, ...]) -> None:
        """Choose the tapped layers: those whose outputs `forward` also returns. Raises UnsupportedModelError if a layer
        does not exist, or if the model's decoder layers are not a plain list.

        The output of layer l is Transformers' hidden_states[l + 1], in pure Mamba models hidden_states[l]. The last
        layer's is taken after the final norm, as in DFlash's reference code.
        """
        wrong = [layer for layer in tap_layers if not 0 <= layer < self.num_layers]
        if wrong:
            raise UnsupportedModelError(f"cannot tap layers {wrong}: the model has layers 0 to {self.num_layers - 1}")
        if tap_layers and not self._layers:
            raise UnsupportedModelError(
                f"cannot tap {type(self.model).__name__}: its decoder layers are not a plain list"
            )
        super().set_taps(tap_layers)
        for hook in self._hooks:
            hook.remove()
        self._hooks = [self._hook(layer) for layer in set(tap_layers)]

    def _hook(self, layer: int) -> Any:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            hidden = getattr(output, "last_hidden_state", output)
            self._captured[layer] = hidden[0] if isinstance(hidden, tuple) else hidden

        module = self._decoder if layer == self.num_layers - 1 else self._layers[layer]
        return module.register_forward_hook(keep)

    @torch.no_grad()
    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """Run the batch's rows one after another; returns logits and taps. Raises UnsupportedModelError for trees."""
        batch.require_chains()
        self.cache.append(batch.rows, batch.counts)
        logits: list[Tensor] = []
        taps: list[Tensor] = []
        offset = 0
        for row, start, count in zip(batch.rows, batch.starts, batch.counts, strict=True):
            assert start == self.cache.lengths[row] - count, f"row {row} continues at {start}, not at its cached length"
            num_logits = {"all": count, "last": 1, "none": 0}[batch.logits]
            row_logits, row_taps = self._forward_row(row, batch.tokens[offset : offset + count], num_logits)
            logits.append(row_logits)
            if row_taps is not None:
                taps.append(row_taps)
            offset += count
        return ForwardOutput(
            logits_TV=None if batch.logits == "none" else torch.cat(logits),
            taps_TF=torch.cat(taps) if taps else None,
        )

    def _forward_row(self, row: int, tokens: list[int], num_logits: int) -> tuple[Tensor, Tensor | None]:
        state = self._cache.rows[row]
        if len(state.pending) > _MAX_PENDING:
            self._run(state, 0)
        state.tokens += tokens
        if len(state.pending) > 1 and state.stateful:
            state.save()
        logits_NV, taps_NF = self._run(state, num_logits)
        return logits_NV, None if taps_NF is None else taps_NF[-len(tokens) :]

    def _run(self, state: Row, num_logits: int) -> tuple[Tensor, Tensor | None]:
        """Run the row's pending tokens; returns logits [num_logits, V] of the last ones and taps of all."""
        tokens, first = state.pending, state.num_computed
        step = 1 if self._must_step and first else len(tokens)
        parts = [
            self._pass(tokens[at : at + step], first + at, state.cache, min(step, num_logits))
            for at in range(0, len(tokens), step)
        ]
        state.num_computed = len(state.tokens)
        logits_NV = torch.cat([logits for logits, _ in parts])
        taps = [taps for _, taps in parts if taps is not None]
        return logits_NV[len(logits_NV) - num_logits :], torch.cat(taps) if taps else None

    def _pass(self, tokens: list[int], start: int, cache: Any, num_logits: int) -> tuple[Tensor, Tensor | None]:
        """Call the model once for tokens at positions from `start`."""
        kwargs: dict[str, Any] = {self._cache_argument: cache, "use_cache": True}
        if self._keeps_logits:
            kwargs["logits_to_keep"] = max(num_logits, 1)  # 0 would mean all
        if self._takes_positions:  # most models would count from the cache's length, but Bamba from 0
            kwargs["position_ids"] = torch.arange(start, start + len(tokens), device=self.device)[None]
        with working_kernels(self.device):
            logits_NV = self.model(input_ids=torch.tensor([tokens], device=self.device), **kwargs).logits[0]
        taps = [self._captured[layer][0] for layer in self.tap_layers]
        self._captured.clear()
        return logits_NV[len(logits_NV) - num_logits :], torch.cat(taps, dim=-1) if taps else None

    @torch.no_grad()
    def matrix_embed(self, tokens_T: Tensor) -> Tensor:
        return F.embedding(tokens_T, self._embedding.weight)

    @torch.no_grad()
    def matrix_head(self, hidden_TD: Tensor) -> Tensor:
        return self._lm_head(hidden_TD)

    @torch.no_grad()
    def _probe(self) -> tuple[float, int, int, bool]:
        """Run small passes to measure (embedding scale, bytes of cache per token, bytes of fixed state, whether passes
        of several tokens ignore earlier recurrent state). In the last case (Mamba 1's layers) tokens must run one by
        one."""
        cache = make_cache(self.model.config)
        tokens = [token % self.vocab_size for token in range(_PROBE_TOKENS)]
        name = type(self.model).__name__
        try:
            first_input = self._first_input(tokens, cache)
            token_bytes, state_bytes = cache_bytes(cache, _PROBE_TOKENS)
            if (not token_bytes and not state_bytes) or any(is_unused(layer) for layer in cache.layers):
                raise ValueError("it keeps state outside the cache")
            has_state = poison_recurrent_state(cache)
            ignores_state = has_state and bool(self._pass(tokens, _PROBE_TOKENS, cache, 1)[0].isfinite().all())
        except (TypeError, ValueError, AttributeError, NotImplementedError, KeyError) as error:
            raise UnsupportedModelError(
                f"{name} does not run with Transformers' DynamicCache: {_first_line(error)}"
            ) from error
        embeddings = self.matrix_embed(torch.tensor([tokens], device=self.device))
        if first_input is not None and first_input.shape != embeddings.shape:
            self._layers = []  # layers with several hidden states per position (Gemma 3n) cannot be tapped
        return _fit_scale(embeddings, first_input), token_bytes, state_bytes, ignores_state

    def _first_input(self, tokens: list[int], cache: Any) -> Tensor | None:
        inputs: list[Tensor] = []

        def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
            inputs.append(args[0] if args else kwargs["hidden_states"])

        hooks = [layer.register_forward_pre_hook(keep, with_kwargs=True) for layer in self._layers[:1]]
        try:
            self._pass(tokens, 0, cache, 1)
        finally:
            for hook in hooks:
                hook.remove()
        return inputs[0] if inputs else None


def _fix_rope_factors(module: Any, max_len: int) -> None:
    """Fix the LongRoPE factors of a rotary embedding to those for texts of `max_len` tokens. Transformers would select
    them by each pass's last position, so drafts would change how accepted tokens are rotated."""
    types = getattr(module, "rope_type", None)
    for layer_type, rope_type in types.items() if isinstance(types, dict) else [(None, types)]:
        if rope_type != "longrope":
            continue
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        parameters = module.config.rope_parameters if layer_type is None else module.config.rope_parameters[layer_type]
        trained = parameters["original_max_position_embeddings"]
        if max_len > trained and parameters.get("short_mscale") != parameters.get("long_mscale"):
            raise ContextLengthError(
                f"beyond {trained} tokens this model changes its scale within a text: lower max_len"
            )
        inv_freq, _ = ROPE_INIT_FUNCTIONS["longrope"](module.config, module.inv_freq.device, max_len, layer_type)
        prefix = "" if layer_type is None else f"{layer_type}_"
        for name in ("inv_freq", "original_inv_freq", "long_inv_freq"):
            setattr(module, prefix + name, inv_freq.clone())


def _find_layers(decoder: nn.Module, num_layers: int) -> tuple[nn.Module, Sequence[nn.Module]]:
    """(module that runs the layers, list of layers) under any name; the list is empty if not found."""
    for owner in decoder.modules():
        for child in owner.children():
            if isinstance(child, nn.ModuleList) and len(child) == num_layers:
                return owner, list(child)
    return decoder, []


def _fit_scale(embeddings: Tensor, first_input: Tensor | None) -> float:
    """Factor between embedding table and the first layer's input; 1 if there is no factor."""
    if first_input is None or first_input.shape != embeddings.shape:
        return 1.0
    table, given = embeddings.float(), first_input.float()
    scale = float((table * given).sum() / (table * table).sum().clamp_min(1e-30))
    is_factor = torch.allclose(given, table * scale, rtol=2e-2, atol=1e-2 * float(given.abs().max()))
    return scale if is_factor and abs(scale - 1) > 1e-3 else 1.0


def _logit_scales(config: Any) -> tuple[float, float]:
    """(factor, soft cap) of logits in some families: Granite, Cohere, Falcon-H1, Gemma 2."""
    factor = 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
    for name in ("logit_scale", "lm_head_multiplier"):
        factor *= getattr(config, name, None) or 1.0
    return factor, float(getattr(config, "final_logit_softcapping", None) or 0.0)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
