"""DFlash against the authors' package: same weights, same target, same drafts; and against our own slow network."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from round_loop import GreedyJudge, admit, generate, ready

from paceline.draft.checkpoint import DFlashConfig, default_layer_ids, new_config
from paceline.draft.dflash import DFlashDrafter, DFlashNetwork, scale_logits
from paceline.draft.dflash_paths import Drafts
from paceline.engine.round import decode_round
from paceline.errors import ConfigError, DrafterMismatchError, ModelFileError, UnsupportedModelError
from paceline.model import native_lib
from paceline.model.config import DecoderConfig
from paceline.model.decoder import Decoder
from paceline.model.native_decoder import NativeDecoder
from paceline.model.target import ForwardBatch
from paceline.train.attention import Layout, make_attention
from paceline.types import Batch, SamplingParams, Take

VOCAB, HIDDEN, TARGET_LAYERS = 11, 32, 6
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7]
SLIDING = {"sliding_window": 6, "use_sliding_window": True}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]

VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "full-causal": {"is_causal": True},
    "sliding": {**SLIDING, "layer_types": MIXED},
    "sliding-both-ways": {**SLIDING, "layer_types": MIXED, "is_causal": False},
    "sliding-narrower-than-block": {"sliding_window": 3, "use_sliding_window": True, "layer_types": MIXED, "is_causal": False},
    "sliding-unused": {"sliding_window": 6, "use_sliding_window": False, "layer_types": MIXED},
    "one-layer-one-feature": {"num_layers": 1, "block_size": 4},
    "scaled": {"input_embedding_scale": 2.5, "output_multiplier": 0.7, "final_logit_softcapping": 1.5},
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "biased": {"attention_bias": True},
}


def raw_config(**keys: Any) -> dict[str, Any]:
    return new_config(HIDDEN, VOCAB, TARGET_LAYERS, head_dim=8, intermediate_size=48, **keys)


def loud_(module: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Weights large enough that every part moves the logits."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        noise = torch.empty_like(parameter).normal_(0, min(0.3, 1.7 * parameter.shape[-1] ** -0.5), generator=generator)
        parameter.data = 1 + noise if "norm" in name else noise
    return module


def network(raw: dict[str, Any], seed: int = 0) -> DFlashNetwork:
    built = DFlashNetwork.random(DFlashConfig.from_json(raw))
    loud_(built, seed)
    return built


def targets(num_rows: int = 3, hidden: int = HIDDEN, vocab: int = VOCAB, kind: Any = Decoder) -> tuple[Any, Any]:
    """The same tiny Llama in Transformers and in our decoder: Decoder or NativeDecoder."""
    sizes = {"vocab_size": vocab, "hidden_size": hidden, "intermediate_size": 48, "rms_norm_eps": 1e-6}
    config = transformers.LlamaConfig(
        **sizes, num_hidden_layers=TARGET_LAYERS, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512
    )
    model: Any = loud_(transformers.LlamaForCausalLM(config), seed=1).eval()
    shape = DecoderConfig(
        "llama", **sizes, num_layers=TARGET_LAYERS, num_heads=4, num_kv_heads=2, head_dim=hidden // 4, max_position=512
    )
    tensors = [(name, tensor.detach().clone()) for name, tensor in model.state_dict().items()]
    return model, kind(shape, tensors, num_rows=num_rows, max_len=256)


KINDS = [
    Decoder,
    pytest.param(NativeDecoder, marks=pytest.mark.skipif(native_lib.load() is None, reason="the native library is not built")),
]


class Recording(DFlashDrafter):
    """Keeps every round's logits and drafts."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.logits: list[torch.Tensor] = []

    def _draft(self, rows: list[int], anchors: list[int], width: int, size: int, with_logits: bool) -> Drafts:
        best, logits = super()._draft(rows, anchors, width, size, True)
        assert logits is not None
        self.logits += list(scale_logits(logits, self.config).clone())
        return best, logits if with_logits else None


def reference_rounds(
    raw: dict[str, Any], state: dict[str, torch.Tensor], model: Any, prompt: list[int], max_tokens: int
) -> Any:
    """(logits of each round, all tokens) of the authors' loop."""
    dflash = pytest.importorskip("dflash.model", reason="pip install --no-deps dflash==0.1.0")
    reference = dflash.DFlashDraftModel(transformers.Qwen3Config(**raw)).eval()
    reference.load_state_dict(state)
    logits, compute = [], reference.compute_logits

    def record(hidden: torch.Tensor, head: Any) -> torch.Tensor:
        logits.append(compute(hidden, head)[0])
        return logits[-1]

    reference.compute_logits = lambda hidden, head: record(hidden, head)[None]
    tokens = dflash.dflash_generate(reference, model, torch.tensor([prompt]), max_tokens, None)
    return logits, tokens[0].tolist()


def assert_same_rounds(raw: dict[str, Any], model: Any, target: Decoder, max_tokens: int, min_rounds: int) -> None:
    own = network(raw)
    theirs, tokens = reference_rounds(raw, own.state_dict(), model, PROMPT, max_tokens)
    drafter = Recording(own)
    (answer,), rounds = generate(target, drafter, [PROMPT], max_tokens, chunk=5)
    assert PROMPT + answer == tokens[: len(PROMPT) + max_tokens]
    full = [logits for logits in theirs if len(logits) == drafter.num_drafted]  # the reference shrinks its last blocks
    assert len(full) >= min_rounds
    for reference, mine in zip(full, drafter.logits, strict=False):
        reference = reference[: len(mine)]  # its last full block drafts one token past the limit
        assert (reference - mine).abs().max() < 1e-4
        assert reference.argmax(-1).tolist() == mine.argmax(-1).tolist()
    assert any(count > 0 for stats in rounds for count in stats.num_accepted_B), "the test needs some acceptance"


# The reference cannot run sliding layers without a window: Transformers' cache fails on them.
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", sorted(VARIANTS.keys() - {"sliding-unused"}))
def test_fifty_rounds_as_the_reference(name: str, kind: Any) -> None:
    model, target = targets(kind=kind)
    assert_same_rounds(raw_config(**VARIANTS[name]), model, target, max_tokens=90, min_rounds=50)


@pytest.mark.parametrize("kind", KINDS)
def test_medium_shape_as_the_reference(kind: Any) -> None:
    model, target = targets(hidden=192, vocab=12, kind=kind)
    raw = new_config(192, 12, TARGET_LAYERS, num_layers=5, block_size=16, head_dim=32)
    assert_same_rounds(raw, model, target, max_tokens=40, min_rounds=15)


@torch.inference_mode()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keys", VARIANTS.values(), ids=VARIANTS.keys())
@pytest.mark.parametrize("chosen", [None, 2])
def test_decode_path_equals_the_trainable_network(keys: dict[str, Any], kind: Any, chosen: int | None) -> None:
    """A block of chosen length has as many slots as are read."""
    _, target = targets(kind=kind)
    drafter = Recording(network(raw_config(**keys)))
    ready(target, drafter)
    seq = admit(target, drafter, PROMPT, SamplingParams(max_tokens=40))
    takes = None if chosen is None else [Take("dflash", chosen)]
    drafter.propose(Batch([seq], takes, whole_blocks=chosen is None))

    config, context = drafter.config, len(PROMPT)
    size = config.block_size if chosen is None else 1 + chosen
    _, twin = targets()
    twin.set_taps(drafter.tap_layers)
    taps = twin.forward(_whole(twin, PROMPT)).taps_TF
    assert taps is not None
    block = torch.tensor([seq.tokens[-1]] + [config.mask_token_id] * (size - 1))
    layout = Layout((context,), (torch.tensor([context]),), size)
    embedded = target.embed(block) * config.input_embedding_scale
    hidden = drafter.network(embedded, taps, make_attention("split", config, layout, torch.float32))
    expected = scale_logits(target.head(hidden[1:]), config)
    torch.testing.assert_close(drafter.logits[0], expected, atol=1e-4, rtol=1e-4)


def _whole(target: Decoder, tokens: list[int]) -> ForwardBatch:
    row = target.cache.allocate()
    assert row is not None
    return ForwardBatch([row], [0], [len(tokens)], tokens, "none")


@pytest.mark.parametrize("keys", [VARIANTS["full"], VARIANTS["sliding-both-ways"]], ids=["full", "sliding"])
def test_batched_rounds_equal_row_by_row(keys: dict[str, Any]) -> None:
    _, target = targets()
    prompts = [PROMPT, PROMPT[:3], PROMPT[4:11]]
    drafter = Recording(network(raw_config(**keys)))
    alone: list[torch.Tensor] = []
    answers = []
    for prompt in prompts:
        drafter.logits = []
        answers += generate(target, drafter, [prompt], 30)[0]
        alone.append(drafter.logits[0])
    drafter.logits = []
    assert generate(target, drafter, prompts, 30, chunk=4)[0] == answers
    for single, batched in zip(alone, drafter.logits, strict=False):
        torch.testing.assert_close(batched, single, atol=1e-5, rtol=1e-4)


def test_a_row_is_clean_after_reuse() -> None:
    _, target = targets(num_rows=1)
    drafter = DFlashDrafter(network(raw_config()))
    first = generate(target, drafter, [PROMPT], 20)
    generate(target, drafter, [PROMPT[::-1]], 30)
    assert generate(target, drafter, [PROMPT], 20)[0] == first[0]


def test_limits_are_respected_and_an_empty_pass_is_skipped() -> None:
    _, target = targets()
    drafter = Recording(network(raw_config()), num_drafted=5)
    ready(target, drafter)
    last = admit(target, drafter, PROMPT, SamplingParams(max_tokens=2))
    assert drafter.propose(Batch([last])).tokens_B == [[]] and not drafter.logits
    some = admit(target, drafter, PROMPT, SamplingParams(max_tokens=4))
    many = admit(target, drafter, PROMPT, SamplingParams(max_tokens=40))
    lengths = [len(tokens) for tokens in drafter.propose(Batch([last, some, many])).tokens_B]
    assert lengths == [0, 2, 5]
    assert {len(logits) for logits in drafter.logits} == {5}


def test_fewer_slots_are_the_first_of_the_same_block() -> None:
    _, target = targets()
    drafts = []
    for num_drafted in (7, 3):
        drafter = DFlashDrafter(network(raw_config()), num_drafted=num_drafted)
        ready(target, drafter)
        drafts.append(drafter.propose(Batch([admit(target, drafter, PROMPT, SamplingParams(max_tokens=40))])).tokens_B[0])
    assert drafts[1] == drafts[0][:3]


def test_greedy_and_sampled_rows_in_one_batch() -> None:
    _, target = targets()
    drafter = Recording(network(raw_config()))
    ready(target, drafter)
    rows = [SamplingParams(max_tokens=40), SamplingParams(max_tokens=40, temperature=0.8, top_k=4)]
    sequences = [admit(target, drafter, PROMPT, params) for params in rows]
    block = drafter.propose(Batch(sequences))
    assert block.probs_B[0] is None and block.tokens_B[0] == drafter.logits[0].argmax(-1).tolist()
    probs = block.probs_B[1]
    assert probs is not None and probs.shape == (7, VOCAB)
    torch.testing.assert_close(probs.sum(-1), torch.ones(7))
    assert (probs > 0).sum(-1).tolist() == [4] * 7
    assert all(probs[slot, token] > 0 for slot, token in enumerate(block.tokens_B[1]))
    assert drafter.propose(Batch(sequences[1:])).tokens_B == block.tokens_B[1:], "draws depend on seed and place only"
    sequences[1].params = replace(rows[1], seed=5)
    assert drafter.propose(Batch(sequences[1:])) == block.certain([block.tokens_B[0]]), "a seed's drafts are certain"


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_drafted_from_logits_that_are_not_finite(kind: Any) -> None:
    _, target = targets(kind=kind)
    broken = network(raw_config())
    with torch.no_grad():
        broken.norm.weight[0] = float("nan")
    drafter = DFlashDrafter(broken)
    ready(target, drafter)
    rows = [SamplingParams(max_tokens=40), SamplingParams(max_tokens=40, temperature=0.8, seed=5)]
    block = drafter.propose(Batch([admit(target, drafter, PROMPT, params) for params in rows]))
    assert block.tokens_B[1] == [] and block.probs_B[1] is None
    assert all(0 <= token < VOCAB for token in block.tokens_B[0])


def test_checkpoint_goes_round_unchanged(tmp_path: Path) -> None:
    raw = raw_config(note={"kept": [1, None]}, is_causal=False)
    state = {name: tensor.bfloat16() for name, tensor in network(raw).state_dict().items()}
    drafter = DFlashDrafter(DFlashNetwork.of(DFlashConfig.from_json(raw), state))
    drafter.save(tmp_path / "first")
    again = DFlashDrafter.from_folder(tmp_path / "first", num_drafted=2)
    again.save(tmp_path / "second")
    again.save(tmp_path / "first")  # over itself, while its weights are mapped
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()
    assert json.loads((tmp_path / "second" / "config.json").read_text()) == raw
    assert all(torch.equal(tensor, state[name]) for name, tensor in again.network.state_dict().items())
    assert sorted(file.name for file in tmp_path.iterdir()) == ["first", "second"]


def test_sharded_checkpoint(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    raw, state = raw_config(), network(raw_config()).state_dict()
    names, weight_map = list(state), {}
    for shard, part in enumerate((names[:5], names[5:])):
        file = f"model-{shard}.safetensors"
        save_file({name: state[name] for name in part}, tmp_path / file)
        weight_map |= dict.fromkeys(part, file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "config.json").write_text(json.dumps(raw))
    loaded = DFlashDrafter.from_folder(tmp_path).network.state_dict()
    assert all(torch.equal(loaded[name], state[name]) for name in names)


def test_tensor_names_are_those_of_the_format() -> None:
    names = set(network(new_config(HIDDEN, VOCAB, 36, num_layers=5, head_dim=8)).state_dict())
    assert len(names) == 58
    assert {"fc.weight", "hidden_norm.weight", "norm.weight", "layers.4.self_attn.k_norm.weight"} <= names


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"hidden_size": 64}, "hidden size: the drafter says 64, the target has 32"),
        ({"vocab_size": 12}, "vocabulary: the drafter says 12, the target has 11"),
        ({"num_target_layers": 7}, "target layers: the drafter says 7, the target has 6"),
        ({"dflash_config": {"mask_token_id": 11, "target_layer_ids": [1]}}, "mask token: the drafter says 11"),
        ({"dflash_config": {"mask_token_id": 10, "target_layer_ids": [1, 6]}}, r"tapped layers: the drafter says \[6\]"),
    ],
)
def test_a_drafter_for_another_target_is_refused(keys: dict[str, Any], message: str) -> None:
    _, target = targets()
    drafter = DFlashDrafter(DFlashNetwork.random(DFlashConfig.from_json(raw_config() | keys)))
    with pytest.raises(DrafterMismatchError, match=message):
        drafter.bind(target)


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        ({"speculators_model_type": "dflash"}, UnsupportedModelError),
        ({"architectures": ["DFlash2DraftModel"]}, UnsupportedModelError),
        ({"layer_types": ["full_attention"]}, ModelFileError),
        ({"dflash_config": {"target_layer_ids": [1]}}, ModelFileError),
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 1]}}, ModelFileError),
        ({"block_size": 1}, ModelFileError),
        ({"hidden_size": None}, ModelFileError),
    ],
)
def test_configs_we_do_not_understand(keys: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        DFlashConfig.from_json(raw_config() | keys)


def test_settings_come_from_dflash_config_first() -> None:
    raw = raw_config(output_multiplier=2.0, input_embedding_scale=3.0)
    raw["dflash_config"] |= {"block_size": 5, "output_multiplier": 4.0}
    config = DFlashConfig.from_json(raw)
    assert (config.block_size, config.output_multiplier, config.input_embedding_scale) == (5, 4.0, 3.0)
    raw["dflash_config"].pop("target_layer_ids")
    assert config.target_layer_ids == DFlashConfig.from_json(raw | {"num_target_layers": 6}).target_layer_ids
    assert default_layer_ids(36, 5) == [1, 9, 17, 25, 33] and default_layer_ids(30, 1) == [15]


def test_weights_that_do_not_fit_are_named() -> None:
    raw = raw_config()
    state = network(raw).state_dict()
    with pytest.raises(ModelFileError, match="layers.0.input_layernorm.weight"):
        DFlashNetwork.of(
            DFlashConfig.from_json(raw), {k: v for k, v in state.items() if k != "layers.0.input_layernorm.weight"}
        )
    with pytest.raises(ModelFileError, match="extra"):
        DFlashNetwork.of(DFlashConfig.from_json(raw), {**state, "extra": torch.zeros(1)})


def test_num_drafted_beyond_the_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="0 to 7"):
        DFlashDrafter(network(raw_config()), num_drafted=8)


@pytest.mark.parametrize("kind", KINDS)
def test_cache_bytes_are_those_allocated(kind: Any) -> None:
    _, target = targets(kind=kind)
    drafter = DFlashDrafter.random(target, head_dim=8, block_size=6)
    target.set_taps(drafter.tap_layers)
    drafter.bind(target)
    assert drafter.cache_bytes(target) == drafter._path.cache.num_bytes
    decode_round(Batch([admit(target, drafter, PROMPT, SamplingParams(max_tokens=9))]), target, drafter, GreedyJudge())


@pytest.mark.parametrize("kind", KINDS)
class TestDraftVocabulary:
    """Drafting among some tokens only: the same network, fewer rows of the head."""

    IDS = torch.tensor([1, 4, 5, 9])

    def rounds(self, kind: Any, **options: Any) -> tuple[Recording, list[Any]]:
        _, target = targets(kind=kind)
        drafter = Recording(network(raw_config()), **options)
        ready(target, drafter)
        rows = [SamplingParams(max_tokens=40), SamplingParams(max_tokens=40, temperature=0.8)]
        block = drafter.propose(Batch([admit(target, drafter, PROMPT, params) for params in rows]))
        return drafter, [block.tokens_B, block.probs_B]

    def test_drafts_are_the_best_of_these_tokens(self, kind: Any) -> None:
        full, _ = self.rounds(kind)
        reduced, (tokens, probs) = self.rounds(kind, draft_ids=self.IDS)
        for all_logits, some_logits in zip(full.logits, reduced.logits, strict=True):
            torch.testing.assert_close(all_logits[:, self.IDS], some_logits, atol=1e-5, rtol=1e-4)
        assert tokens[0] == self.IDS[full.logits[0][:, self.IDS].argmax(-1)].tolist()
        assert probs[1].shape == (7, VOCAB) and set(tokens[1]) <= set(self.IDS.tolist())
        torch.testing.assert_close(probs[1][:, self.IDS].sum(-1), torch.ones(7))

    def test_text_is_the_targets_all_the_same(self, kind: Any) -> None:
        _, target = targets(kind=kind)
        plain = generate(target, DFlashDrafter(network(raw_config())), [PROMPT], 30)[0]
        assert generate(target, DFlashDrafter(network(raw_config()), draft_ids=self.IDS), [PROMPT], 30)[0] == plain

    def test_tokens_the_target_lacks_are_refused(self, kind: Any) -> None:
        _, target = targets(kind=kind)
        with pytest.raises(DrafterMismatchError, match="draft vocabulary: the drafter says token 11"):
            DFlashDrafter(network(raw_config()), draft_ids=torch.tensor([1, 11])).bind(target)


def test_a_draft_vocabulary_is_kept_beside_the_checkpoint(tmp_path: Path) -> None:
    ids, folder = torch.tensor([1, 4, 5, 9]), tmp_path / "drafter"
    DFlashDrafter(network(raw_config()), draft_ids=ids).save(folder)
    again = DFlashDrafter.from_folder(folder)
    assert again.draft_ids is not None and again.draft_ids.tolist() == ids.tolist()
    DFlashDrafter(network(raw_config())).save(folder)
    assert DFlashDrafter.from_folder(folder).draft_ids is None, "another drafter's tokens must not stay"
    (folder / "draft_ids.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ModelFileError, match="delete it"):
        DFlashDrafter.from_folder(folder)
