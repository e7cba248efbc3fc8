"""Settings: unknown and contradictory ones are refused, "auto" is settled by what the machine has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.config import EngineConfig, resolve, short_name
from paceline.errors import ConfigError


@pytest.mark.parametrize(
    ("wrong", "remedy"),
    [
        ({"drafts": 3}, "unknown setting 'drafts'"),
        ({"speculate": "sometimes"}, "speculate 'sometimes' is not known: choose auto, full, off, N"),
        ({"speculate": 3, "num_drafted": 4}, "speculate 3 and num_drafted both set the number of drafts"),
        ({"speculate": "tree:8", "rule": "rejection"}, "rule rejection verifies no trees"),
        ({"dtype": "int3"}, "dtype must be one of"),
        ({"max_batch": 0}, "max_batch"),
        ({"max_batch": 10**6}, "max_batch must be at most 65536, not 1000000"),
        ({"max_len": 2**31}, "max_len must be at most 16777216, not 2147483648"),
        ({"threads": 10**6}, "threads must be at most 1024, not 1000000"),
        ({"num_drafted": 1025}, "num_drafted must be at most 1024, not 1025"),
        ({"speculate": 1025}, r"speculate '1025' is not known: .*, N \(drafts in every round, at most 1024\)"),
        ({"speculate": 10**5000}, "speculate 'one of more than 4300 digits' is not known"),
        ({"mocked_tokens_per_round": 0.5}, "the target's own token"),
        ({"rule": "typical"}, "rule must be one of"),
        ({"backend": "gpu"}, "backend must be one of auto, native, torch"),
        ({"weight_format": "Q4_1"}, "weight_format must be one of auto, blocks, dense"),
        ({"weights": 5}, "weights must be one of checkpoint, random"),
        ({"model": 5}, "model must be of type str, not 5"),
        ({"drafter": " "}, "drafter must be a name, not empty, not ' '"),
        ({"device": torch.device("cpu")}, r"device must be of type str, not device\(type='cpu'\)"),
        ({"max_batch": 1.5}, "max_batch must be of type int, not 1.5"),
        ({"threads": "2"}, "threads must be of type int or None, not '2'"),
        ({"trees": "false"}, "trees must be of type bool, not 'false'"),
        ({"mocked_survival": 0.5}, r"mocked_survival must be of type tuple\[float, ...\], not 0.5"),
        ({"kv_memory": float("nan")}, "kv_memory must be of type int or None, not nan"),
        (
            {"mocked_marginals": ((0.5, "x"), (0.3, 0.2))},
            r"mocked_marginals must be of type tuple\[tuple\[float, ...\], ...\]",
        ),
        ({"mocked_marginals": ((0.5, "x"),)}, r"mocked_marginals must be of type tuple\[tuple\[float, ...\], ...\]"),
    ],
)
def test_wrong_settings_are_refused_by_name(wrong: dict[str, object], remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        EngineConfig.of(**wrong)


def test_lists_whole_floats_and_no_drafter_are_taken() -> None:
    given: dict[str, object] = {"mocked_marginals": [[0.5, 0.25], (0.3, 0.2)], "kv_memory": 1e9, "drafter": None}
    config = EngineConfig.of(**given)
    assert (config.mocked_marginals, config.kv_memory, config.drafter) == (((0.5, 0.25), (0.3, 0.2)), 10**9, "none")
    assert type(config.kv_memory) is int


@pytest.mark.parametrize(
    ("speculate", "drafter", "most"),
    [("auto", "mine", None), ("off", "none", None), ("0", "none", None), (3, "mine", 3)],
)
def test_how_much_is_drafted(speculate: object, drafter: str, most: int | None) -> None:
    config = EngineConfig.of(drafter="mine", speculate=speculate)
    assert (config.drafter, config.most_drafted, config.speculate) == (drafter, most, str(speculate))
    assert EngineConfig(speculate="full", num_drafted=4).most_drafted == 4


@pytest.mark.parametrize(("has_bf16", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_auto_takes_bfloat16_only_where_the_processor_has_it(
    monkeypatch: pytest.MonkeyPatch, has_bf16: bool, dtype: str
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_bf16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert resolve(EngineConfig(device="cpu")).dtype == dtype


def test_auto_is_float32_where_pytorch_has_no_onednn_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "arm64")  # as on a Mac
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(torch.ops, "mkldnn", None)
    assert resolve(EngineConfig(device="cpu")).dtype == "float32"


def test_a_gpu_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve(EngineConfig()).device == "cpu"
    with pytest.raises(ConfigError, match="--device cpu"):
        resolve(EngineConfig(device="cuda"))


@pytest.mark.parametrize(
    ("model", "name"),
    [(".", "here"), ("./", "here"), ("..", "up"), ("../b/", "b"), ("x/link", "link"), ("org/m", "m"), ("/", "/")],
)
def test_short_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, name: str) -> None:
    (here := tmp_path / "up" / "here").mkdir(parents=True)
    monkeypatch.chdir(here)
    assert short_name(model) == name
