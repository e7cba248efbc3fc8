"""GGUF files to folders and folders to GGUF files: the same numbers, the same text."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Quant
from small_teacher import SHAPE, write_untaught

from paceline.engine.llm import LLM
from paceline.errors import CacheError, UnsupportedModelError
from paceline.model import checkpoint
from paceline.model.gguf.to_folder import config_json_of, write_folder, write_model
from paceline.model.gguf.writer import interleaved_rows, write_gguf
from paceline.model.text.tokenizer import Tokenizer
from paceline.types import SamplingParams


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_untaught(tmp_path / "source.gguf", Quant.Q8_0)


def kinds(path: Path) -> dict[str, str]:
    return {stored.name: stored.tensor_type.name for stored in gguf.GGUFReader(path).tensors}


@pytest.mark.slow
def test_a_folder_has_the_files_numbers_words_and_ends(source: Path, tmp_path: Path) -> None:
    folder = write_folder(source, tmp_path / "folder")
    theirs, ours = dict(checkpoint.load_tensors(source)), dict(checkpoint.load_tensors(folder))
    assert theirs.keys() == ours.keys() and all(torch.equal(theirs[name], ours[name]) for name in theirs)
    assert checkpoint.load_config(folder) == checkpoint.load_config(source)
    words = [Tokenizer.from_path(each) for each in (source, folder)]
    assert (
        words[0].encode("Hello he 12") == words[1].encode("Hello he 12")
        and words[0].eos_token_ids == words[1].eos_token_ids
    )
    with pytest.raises(CacheError, match="choose another folder"):
        write_folder(source, folder)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["q8_0", "q4_1"])
def test_a_file_says_what_its_dequantised_folder_says(source: Path, tmp_path: Path, form: str) -> None:
    """Greedy text, by the native pass where it is built; fewer layers than the file whose words it has."""
    shape = config_json_of(source) | {"num_hidden_layers": 3}
    three = [(name, tensor) for name, tensor in checkpoint.load_tensors(source) if ".layers.3." not in name]
    student = write_model(tmp_path / "student", shape, three, source)
    file = write_gguf(student, source, tmp_path / "student.gguf", form)
    assert checkpoint.load_config(file).num_layers == 3 and gguf.GGUFReader(file).fields["general.architecture"]
    dequantised = write_folder(file, tmp_path / "dequantised")
    texts = []
    for model in (file, dequantised):
        llm = LLM(str(model), drafter="none", dtype="float32", max_len=64, max_batch=2)
        params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
        texts.append([answer.token_ids for answer in llm.generate(["Hello there", "12 he"], params)])
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_what_was_not_changed_keeps_its_blocks(source: Path, tmp_path: Path) -> None:
    """Written anew as Q4_1, the embedding of a student in bfloat16 that left it alone is still the teacher's in
    Q8_0."""
    student = write_folder(source, tmp_path / "student", "bfloat16")
    same = write_gguf(student, source, tmp_path / "same.gguf", "q4_1")
    other = write_gguf(student, source, tmp_path / "other.gguf", "q4_1", embedding="q4_1")
    assert kinds(same)["token_embd.weight"] == "Q8_0" and kinds(other)["token_embd.weight"] == "Q4_1"
    assert kinds(other)["blk.0.attn_q.weight"] == "Q4_1" and kinds(other)["blk.0.attn_norm.weight"] == "F32"
    theirs, ours = dict(checkpoint.load_tensors(source)), dict(checkpoint.load_tensors(same))
    assert torch.equal(theirs["model.embed_tokens.weight"], ours["model.embed_tokens.weight"])


def test_rows_come_back_in_their_order() -> None:
    from paceline.model.gguf.metadata import half_split_rows

    rows = torch.randn(32, 5)
    assert torch.equal(half_split_rows(interleaved_rows(rows, 4), 4), rows)
    assert not torch.equal(interleaved_rows(rows, 4), rows)


def test_what_cannot_be_written_says_why(source: Path, tmp_path: Path) -> None:
    folder = write_folder(source, tmp_path / "folder")
    with pytest.raises(UnsupportedModelError, match="convert_hf_to_gguf.py"):
        write_gguf(folder, folder, tmp_path / "out.gguf")
    with pytest.raises(UnsupportedModelError, match="choose one of"):
        write_gguf(folder, source, tmp_path / "out.gguf", "q2_k")
    wide = config_json_of(source) | {"intermediate_size": 96}
    other = write_model(tmp_path / "other", wide, dict(_random(wide, tmp_path)).items(), source)
    with pytest.raises(UnsupportedModelError, match=f"intermediate_size 96.*has {SHAPE['intermediate_size']}"):
        write_gguf(other, source, tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()


def _random(shape: dict, folder: Path) -> dict[str, torch.Tensor]:
    from paceline.model.config.decoder import decoder_config

    return dict(checkpoint.random_tensors(decoder_config(shape, folder)))
