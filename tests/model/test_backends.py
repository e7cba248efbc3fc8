"""The implementation that a model gets, its description, and answers that do not depend on it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Quant
from gguf_files import write_gguf
from native_models import BASE, ISAS, needs_library, same_bits, use
from small_llm import tiny_model

from paceline.bench.runs import ceiling_line
from paceline.commands.shared import introduce
from paceline.config import EngineConfig
from paceline.engine.llm import LLM
from paceline.errors import ConfigError, NativeError
from paceline.hardware import Machine
from paceline.model import backends
from paceline.model.backends import Form, form_of, load_target, settle
from paceline.model.checkpoint import load_config, load_tensors
from paceline.model.gguf.blocks import Blocks, quantise
from paceline.model.native import library as native_lib
from paceline.model.native.decoder import NativeDecoder
from paceline.model.target import ForwardBatch, Target
from paceline.model.torch.decoder import Decoder
from paceline.types import SamplingParams

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers in Q4_1, embedding in Q8_0, one matrix that has to be expanded."""
    import transformers

    torch.manual_seed(0)
    shape: Any = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=96, num_hidden_layers=2, tie_word_embeddings=True, **shape)
    path = tmp_path_factory.mktemp("models") / "model.gguf"
    quants = {"embed": Quant.Q8_0, "layers.1.mlp.down": Quant.Q5_0, "proj": Quant.Q4_1}
    write_gguf(path, transformers.LlamaForCausalLM(config), "llama", quants)
    return path


def load(path: Path, dtype: torch.dtype = torch.float32, **settings: Any) -> Target:
    name = str(dtype).removeprefix("torch.")
    return load_target(EngineConfig(str(path), dtype=name, device="cpu", max_batch=1, **settings))


def logits(target: Target) -> torch.Tensor:
    row = target.cache.allocate()
    assert row is not None
    out = target.forward(ForwardBatch([row], [0], [9], list(range(9)))).logits_TV
    assert out is not None
    return out


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_auto_is_native_where_the_library_is(model: Path, dtype: torch.dtype) -> None:
    ours, theirs = load(model, dtype=dtype), load(model, dtype=dtype, backend="torch")
    assert isinstance(ours, NativeDecoder) and isinstance(theirs, Decoder)
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(logits(ours), logits(theirs).float(), atol=tolerance, rtol=tolerance)
    name, isa = str(dtype).removeprefix("torch."), native_lib.require().pn_in_use().decode()
    assert form_of(ours) == Form("native", isa, name) and form_of(theirs) == Form("torch", None, name)
    assert str(form_of(ours)) == f"weights {name}, native {isa}" and str(form_of(theirs)) == f"weights {name}, torch"


@needs_library
def test_random_weights_are_the_same_in_both(model: Path) -> None:
    decoders = [load(model, weights="random", backend=backend) for backend in ("native", "torch")]
    assert isinstance(decoders[0], NativeDecoder)
    torch.testing.assert_close(logits(decoders[0]), logits(decoders[1]), atol=1e-4, rtol=1e-4)


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_of_a_gguf_file_are_read_as_they_are(gguf_file: Path, dtype: torch.dtype) -> None:
    kept, dense = (load(gguf_file, dtype=dtype, weight_format=format) for format in ("blocks", "dense"))
    name = str(dtype).removeprefix("torch.")
    assert (form_of(kept).weight_format, form_of(dense).weight_format) == ("Q4_1+Q5_0+Q8_0", name)
    assert kept.weight_bytes < dense.weight_bytes
    numbers = logits(kept)
    exact = logits(load(gguf_file, backend="torch"))
    if dtype == torch.float32:
        assert same_bits(numbers, logits(dense))
        torch.testing.assert_close(numbers, exact, atol=1e-4, rtol=1e-4)
    else:
        assert (numbers - exact).abs().max() < 1.2 * (logits(dense) - exact).abs().max()


@needs_library
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_auto_keeps_blocks_where_products_take_them(
    gguf_file: Path, dtype: torch.dtype, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere every pass would expand them, which takes several times as long as reading a dense copy."""
    dense = str(dtype).removeprefix("torch.")
    use(isa)
    is_faster = isa != "portable" and dtype == torch.bfloat16
    kept = "Q4_1+Q5_0+Q8_0"
    assert form_of(load(gguf_file, dtype=dtype)).weight_format == (kept if is_faster else dense)
    monkeypatch.setattr(backends, "memory_bytes", lambda: 1000)
    assert form_of(load(gguf_file, dtype=dtype)).weight_format == kept


@needs_library
def test_auto_is_bfloat16_where_blocks_are_multiplied_as_they_are(
    gguf_file: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the processor has for bfloat16; other weights are in float32 where it has nothing."""
    monkeypatch.setattr("paceline.config._multiplies_bfloat16", lambda device: False)
    for isa in ISAS:
        use(isa)
        settings = EngineConfig(model=str(gguf_file), device="cpu")
        assert settle(settings).dtype == ("float32" if isa == "portable" else "bfloat16")
        for changes in ({"backend": "torch"}, {"weight_format": "dense"}, {"model": str(model)}, {"dtype": "float32"}):
            assert settle(replace(settings, **changes)).dtype == "float32"


@pytest.mark.slow
@needs_library
@pytest.mark.parametrize("kind", ["q8_0", "q4_1"])
def test_larger_weights_can_be_rounded_to_blocks(model: Path, tmp_path: Path, kind: str) -> None:
    """Rounded at load, they are the numbers that rounding them beforehand gives; speculation leaves that model as it
    is."""
    wide = tiny_model(tmp_path / "wide")
    rounded, exact = load(wide, weight_format=kind), load(wide)
    assert form_of(rounded).weight_format == kind.upper() and rounded.weight_bytes < 0.5 * exact.weight_bytes
    tensors = [(name, tensor) for name, tensor in load_tensors(wide) if isinstance(tensor, torch.Tensor)]
    blocks = [(name, quantise(tensor, backends.KINDS[kind])) for name, tensor in tensors]
    dense = [(name, each.dense() if isinstance(each, Blocks) else each) for name, each in blocks]
    numbers, config = logits(rounded), load_config(wide)
    assert same_bits(numbers, logits(NativeDecoder(config, dense, num_rows=1, max_len=config.max_position)))
    assert not same_bits(numbers, logits(exact))
    llm = LLM(str(wide), drafter="ngram", dtype="float32", weight_format=kind, max_len=128)
    prompt, params = [[1, 2, 3, 1, 2, 3, 1, 2]], SamplingParams(max_tokens=40, ignore_eos=True)
    fast = llm.generate_ids(prompt, params)[0].token_ids
    llm.use_drafter("none")
    assert llm.generate_ids(prompt, params)[0].token_ids == fast
    with pytest.raises(NativeError, match=f"weights in {kind} need the native pass"):
        load(model, weight_format=kind, backend="torch")


def test_without_the_library(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_lib, "load", lambda: None)
    assert isinstance(load(model), Decoder)
    assert isinstance(load(model, weight_format="dense"), Decoder)
    with pytest.raises(NativeError, match="install a C\\+\\+ compiler and reinstall"):
        load(model, backend="native")
    llm = LLM(str(model), drafter="none", dtype="float32", device="cpu", threads=1, max_len=64)
    assert "float32 (weights float32, torch), drafter none" in introduce(llm)


@pytest.mark.parametrize(
    ("dtype", "device", "head_dim", "message"),
    [
        (torch.float16, "cpu", 8, "knows float32 and bfloat16, not float16: use --dtype"),
        (torch.float32, "meta", 8, "runs on the CPU, not on meta: use --device cpu"),
        (torch.float32, "cpu", 1026, "has no heads of 1026 numbers: leave --backend out"),
    ],
)
def test_what_the_native_pass_cannot(dtype: torch.dtype, device: str, head_dim: int, message: str) -> None:
    config = replace(BASE, head_dim=head_dim)
    with pytest.raises(NativeError, match=message):
        backends._is_native("native", config, dtype, torch.device(device))
    for backend in ("auto", "torch"):
        assert not backends._is_native(backend, config, dtype, torch.device(device))


def test_what_transformers_runs_has_no_native_pass(tmp_path: Path) -> None:
    import transformers

    transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=50, n_embd=32, n_layer=1, n_head=2)
    ).save_pretrained(tmp_path)
    with pytest.raises(NativeError, match="GPT2LMHeadModel is not implemented .* leave --backend out"):
        load(tmp_path, backend="native")
    assert form_of(load(tmp_path)) == Form("torch", None, "float32")


PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)
SETTINGS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_batch": 2, "max_len": 128}


@pytest.mark.slow
@needs_library
@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_answers_are_the_same_in_float32(model: Path, drafter: str) -> None:
    prompts, answers = ["hello hello hello", "once upon a time"], []
    for backend in ("native", "torch"):
        llm = LLM(str(model), drafter=drafter, backend=backend, **SETTINGS)
        answers.append([each.token_ids for each in llm.generate(prompts, PARAMS)])
    assert answers[0] == answers[1]


@needs_library
def test_an_llm_says_how_it_computes_and_sets_the_threads(model: Path, gguf_file: Path) -> None:
    before = torch.get_num_threads()
    try:
        llm = LLM(str(model), drafter="none", threads=2, **SETTINGS)
        assert native_lib.require().pn_num_threads() == torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    isa = form_of(llm.target).isa
    assert f" on cpu, float32 (weights float32, native {isa}), drafter none; weights " in introduce(llm)
    llm.target = load(gguf_file, weight_format="blocks")
    machine = Machine("test", 1e9, {}, 1, 1)
    assert f"a pass reads {llm.target.weight_bytes / 1e6:.0f} MB of Q4_1+Q5_0+Q8_0 weights" in ceiling_line(
        llm, machine
    )


def test_the_backend_and_the_device_must_agree(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match="CPU only, not on cuda: use --device cpu"):
        LLM(str(model), backend="native", dtype="float32", device="cuda")


@needs_library
def test_the_instruction_set_can_be_forced(gguf_file: Path) -> None:
    """The process keeps it: `form_of` and the next model tell the same."""
    for isa in ISAS[::-1]:
        if not isa.startswith("emulated-"):  # for tests only: no option
            settle(EngineConfig(model=str(gguf_file), device="cpu", isa=isa))
            assert form_of(load(gguf_file)).isa == isa
    missing = next(isa for isa in ("amx", "avx512bf16", "avx512", "avxvnni", "avx2", "none") if isa not in ISAS)
    with pytest.raises(
        NativeError, match=f"cannot run on {missing} here: choose --isa from .*portable, or leave it out"
    ):
        native_lib.use(missing)
