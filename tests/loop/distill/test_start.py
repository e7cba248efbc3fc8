"""A student before training."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf_files import write_gguf
from small_llm import tiny_model
from small_teacher import WORDS, untaught, write_untaught

from paceline.engine.llm import LLM
from paceline.errors import ConfigError
from paceline.loop.distill.config import FilesConfig, StudentConfig, TeachingConfig
from paceline.loop.distill.start import config_of_layers, influences, kept_layers, spread_layers, write_start
from paceline.model import checkpoint
from paceline.model.config.decoder import decoder_config
from paceline.model.gguf.to_folder import write_folder
from paceline.train.documents.dataset import Document


def test_layers_are_spread_with_both_ends_among_them() -> None:
    assert spread_layers(30, 12) == (0, 3, 5, 8, 11, 13, 16, 18, 21, 24, 26, 29)
    assert spread_layers(4, 4) == (0, 1, 2, 3) and spread_layers(4, 1) == (0,)
    assert len(kept_layers(StudentConfig(), 30)) == 12
    assert kept_layers(StudentConfig(keep_layers=(0, 2)), 4) == (0, 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layers": 5}, "between 1 and the teacher's 4"),
        ({"keep_layers": (0, 4)}, "the teacher's are 0 to 3"),
        ({"keep_layers": (2, 1)}, "must rise"),
        ({"layers": 2, "keep_layers": (0, 1)}, "exclude each other"),
    ],
)
def test_layers_that_are_not_there(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kept_layers(StudentConfig(**settings), 4)


def test_settings_that_do_not_go_together() -> None:
    for settings, message in (
        ((TeachingConfig, {"on_policy": 0.5}), "on_policy means nothing for method soft"),
        ((TeachingConfig, {"beta": 0.5, "method": "hard"}), "beta means nothing for method hard"),
        ((StudentConfig, {"choice": "even", "keep_layers": (0, 1)}), "choice means nothing next to keep_layers"),
        ((FilesConfig, {"embedding_format": "bf16", "gguf": "none"}), "embedding_format means nothing without a GGUF"),
    ):
        kind, values = settings
        with pytest.raises(ConfigError, match=message):
            kind(**values)
    with pytest.raises(ConfigError, match="must divide"):
        TeachingConfig(batch_size=8, micro_batch=3)


def test_a_student_has_the_layers_that_were_asked_for(tmp_path: Path) -> None:
    teacher = write_untaught(tmp_path / "teacher.gguf")
    assert write_start(StudentConfig(keep_layers=(0, 3)), teacher, tmp_path / "start") == (0, 3)
    assert len({file.stat().st_mode for file in (tmp_path / "start").iterdir()}) == 1, (
        "an engine may be of another user"
    )
    ours, theirs = dict(checkpoint.load_tensors(tmp_path / "start")), dict(checkpoint.load_tensors(teacher))
    assert checkpoint.load_config(tmp_path / "start").num_layers == 2
    name = "self_attn.q_proj.weight"
    assert torch.equal(ours[f"model.layers.1.{name}"], theirs[f"model.layers.3.{name}"])
    assert torch.equal(ours["model.embed_tokens.weight"], theirs["model.embed_tokens.weight"])


FOUR_LAYERS = dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings"), 32) | {
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("SmolLM3", {"no_rope_layer_interval": 2}),
        ("SmolLM3", {"no_rope_layer_interval": 4, "use_sliding_window": True, "sliding_window": 7}),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}),
        ("Qwen3Moe", {**EXPERTS, "mlp_only_layers": [2]}),
        ("Qwen3Moe", {**EXPERTS, "decoder_sparse_step": 2}),
        ("Mistral", {"sliding_window": 7}),
    ],
)
@pytest.mark.parametrize("layers", [(0, 2, 3), (1, 3), (2, 3), (1, 2)])
def test_a_layer_keeps_what_its_place_gave_it(architecture: str, options: dict, layers: tuple[int, ...]) -> None:
    """Rules by a layer's index (windows, RoPE, experts) hold for the teacher's indices, not the student's."""
    raw = {**FOUR_LAYERS, "architectures": [f"{architecture}ForCausalLM"], **options}
    file = Path("config.json")
    teacher = decoder_config(raw, file)
    student = decoder_config(config_of_layers(raw, layers, file), file)
    for place, layer in enumerate(layers):
        assert student.window(place) == teacher.window(layer)
        assert student.rope(place) == teacher.rope(layer)
        assert student.has_experts(place) == teacher.has_experts(layer)


@pytest.mark.slow
def test_layers_that_change_most_are_taken(tmp_path: Path) -> None:
    """A layer that adds nothing is the first to go, and its influence is none at all."""
    model = untaught()
    with torch.no_grad():
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            model.model.layers[1].get_submodule(name).weight.zero_()
            model.model.layers[2].get_submodule(name).weight.mul_(20)
    write_gguf(tmp_path / "teacher.gguf", model, "llama", **WORDS)
    llm = LLM(str(tmp_path / "teacher.gguf"), drafter="none", dtype="float32", max_len=64, max_batch=1)
    documents = [Document(f"{place}", np.arange(5 + place, 40, dtype=np.int32), 10) for place in range(3)]
    scores = influences(llm, documents)
    assert scores[0] == scores[3] == float("inf") and scores[1] == pytest.approx(0, abs=1e-5) and scores[2] > 0.01
    assert kept_layers(StudentConfig(layers=3), 4, scores) == (0, 2, 3)
    config = StudentConfig(layers=3)
    assert write_start(config, tmp_path / "teacher.gguf", tmp_path / "start", lambda: scores) == (0, 2, 3)
    assert write_start(config, tmp_path / "teacher.gguf", tmp_path / "start") == (0, 2, 3)
    even = StudentConfig(layers=2, choice="even")
    assert write_start(even, tmp_path / "teacher.gguf", tmp_path / "even", lambda: scores) == (0, 3)
    assert llm.target.cache.allocate() is not None


def test_a_smaller_model_must_speak_in_the_same_tokens(tmp_path: Path) -> None:
    teacher = write_untaught(tmp_path / "teacher.gguf")
    small = write_folder(teacher, tmp_path / "small")
    assert write_start(StudentConfig(student=str(small)), teacher, tmp_path / "start") == ()
    other = tiny_model(tmp_path / "other")
    with pytest.raises(ConfigError, match="has other tokens than its teacher"):
        write_start(StudentConfig(student=str(other)), teacher, tmp_path / "again")
