"""HFTarget against one cache-free pass of the same Transformers model, over random drafts and rollbacks."""

import random

import pytest
import torch
import transformers

from paceline.errors import ContextLengthError, ModelFileError, ModelNotFoundError, UnsupportedModelError
from paceline.model.hf.target import HFTarget
from paceline.model.target import ForwardBatch

pytestmark = pytest.mark.slow

VOCAB, WIDTH, WINDOW = 61, 32, 8
MAX_LEN = 256
ATTENTION = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
GATED_DELTA = {
    **ATTENTION,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
}
MAMBA2 = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_hidden_layers": 3,
    "state_size": 8,
    "head_dim": 16,
    "num_heads": 4,
}
CONFIGS = {
    "llama": ("LlamaConfig", ATTENTION),
    "qwen3": ("Qwen3Config", {**ATTENTION, "tie_word_embeddings": True}),
    "gpt2": ("GPT2Config", {"vocab_size": VOCAB, "n_embd": WIDTH, "n_layer": 3, "n_head": 4, "n_positions": 256}),
    "mistral": ("MistralConfig", {**ATTENTION, "sliding_window": WINDOW}),
    "gemma2": ("Gemma2Config", {**ATTENTION, "sliding_window": WINDOW, "final_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3TextConfig", {**ATTENTION, "sliding_window": WINDOW}),
    "granite": ("GraniteConfig", {**ATTENTION, "embedding_multiplier": 3.0, "logits_scaling": 4.0}),
    "qwen3_5": ("Qwen3_5TextConfig", GATED_DELTA),
    "qwen3_next": (
        "Qwen3NextConfig",
        {**GATED_DELTA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
         "shared_expert_intermediate_size": 16},
    ),
    "mamba": ("MambaConfig", {"vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": 3, "state_size": 8}),
    "mamba2": ("Mamba2Config", {**MAMBA2, "expand": 2, "n_groups": 2, "chunk_size": 16}),
    "falcon_h1": (
        "FalconH1Config",
        {**ATTENTION, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8,  # noqa: E501
         "mamba_chunk_size": 16, "embedding_multiplier": 2.0, "lm_head_multiplier": 0.5},
    ),
    "bamba": (  # counts positions from 0 unless told
        "BambaConfig",
        {**ATTENTION, "mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_chunk_size": 16,  # noqa: E501
         "attn_layer_indices": [1]},
    ),
    "jamba": (
        "JambaConfig",
        {**ATTENTION, "mamba_d_state": 8, "mamba_dt_rank": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2,  # noqa: E501
         "num_experts_per_tok": 1, "use_mamba_kernels": False},
    ),
    "llama4": (
        "Llama4TextConfig",
        {**ATTENTION, "attention_chunk_size": WINDOW, "num_local_experts": 2, "intermediate_size_mlp": 48},
    ),
    "lfm2": (
        "Lfm2Config",
        {**ATTENTION, "layer_types": ["conv", "full_attention", "conv", "full_attention"], "block_auto_adjust_ff_dim": False},  # noqa: E501
    ),
}  # fmt: skip
RECURRENT = {"qwen3_5", "qwen3_next", "mamba", "mamba2", "falcon_h1", "bamba", "jamba", "lfm2"}
PURE_MAMBA = {"mamba", "mamba2"}
NAMES = list(CONFIGS)


def build(name: str, seed: int = 0) -> torch.nn.Module:
    config_class, options = CONFIGS[name]
    return build_config(getattr(transformers, config_class)(**options), seed)


def build_config(config, seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # the usual 0.02 would leave every position's logits almost alike
            if parameter.ndim == 2:
                parameter.normal_(std=0.15)
    return model


@pytest.fixture(autouse=True)
def one_thread():
    """Threads cost more than these tiny matrices are worth, above all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=NAMES)
def named(request):
    return request.param, build(request.param)


def reference(model, tokens):
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens]), output_hidden_states=True, use_cache=False)


def feed(target, row, tokens, logits="all"):
    return target.forward(ForwardBatch([row], [target.cache.lengths[row]], [len(tokens)], tokens, logits))


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def speculate(target, row, truth, rng, seen, rounds=8):
    """Verify random blocks, keep a random part of each; the kept tokens are `truth`, the refused ones are noise."""
    for _ in range(rounds):
        at = target.cache.lengths[row]
        count = rng.choice([1, 3, 6])
        num_kept = rng.randint(1, count)
        block = truth[at : at + num_kept] + [rng.randrange(VOCAB) for _ in range(count - num_kept)]
        out = feed(target, row, block)
        target.cache.rollback([row], [at + num_kept])
        assert target.cache.lengths[row] == at + num_kept
        seen.append(
            (at, out.logits_TV[:num_kept].clone(), None if out.taps_TF is None else out.taps_TF[:num_kept].clone())
        )


def test_rollback_loop_equals_one_full_pass(named):
    name, model = named
    rng = random.Random(1)
    truth = [rng.randrange(VOCAB) for _ in range(70)]
    target = HFTarget(model, 1, MAX_LEN)
    target.set_taps((0, target.num_layers - 1))
    full = reference(model, truth)
    row = target.cache.allocate()
    seen = []
    for chunk in (truth[:2], truth[2:13], truth[13:14]):
        at = target.cache.lengths[row]
        out = feed(target, row, chunk)
        seen.append((at, out.logits_TV.clone(), out.taps_TF.clone()))
    speculate(target, row, truth, rng, seen)
    first = full.hidden_states[0 if name in PURE_MAMBA else 1]  # these list no embedding
    hidden = torch.cat([first[0], full.hidden_states[-1][0]], dim=-1)
    for at, logits, taps in seen:
        assert_close(logits, full.logits[0, at : at + len(logits)])
        assert_close(taps, hidden[at : at + len(taps)])
    assert bool(target.cache.rows[row].stateful) == (name in RECURRENT)


def test_rollback_to_any_earlier_length(named):
    """Also past a window boundary and further back than the last save, and twice in a row."""
    _, model = named
    rng = random.Random(2)
    truth = [rng.randrange(VOCAB) for _ in range(40)]
    target = HFTarget(model, 1, MAX_LEN)
    row = target.cache.allocate()
    feed(target, row, truth[:9])
    feed(target, row, truth[9:36], logits="none")
    for length in (30, 29, 12, 3, 0):
        target.cache.rollback([row], [length])
        out = feed(target, row, truth[length : length + 4], logits="last")
        assert_close(out.logits_TV[-1], reference(model, truth[: length + 4]).logits[0, -1])


def test_kept_slots_are_a_text_of_their_own(named):
    _, model = named
    target = HFTarget(model, 1, MAX_LEN)
    row = target.cache.allocate()
    feed(target, row, list(range(9)), "none")
    feed(target, row, list(range(20, 27)), "none")
    target.cache.keep([row], [9], [[0, 2, 5]])
    assert target.cache.lengths[row] == 12
    kept = feed(target, row, [3, 4]).logits_TV
    assert_close(kept, reference(model, [*range(9), 20, 22, 25, 3, 4]).logits[0, -2:])


def test_rows_do_not_cross_talk(named):
    _, model = named
    rng = random.Random(3)
    target = HFTarget(model, 2, MAX_LEN)
    truths = [[rng.randrange(VOCAB) for _ in range(40)] for _ in range(2)]
    rows = [target.cache.allocate(), target.cache.allocate()]
    assert target.cache.allocate() is None
    full = [reference(model, truth).logits[0] for truth in truths]
    for _ in range(6):
        starts = [target.cache.lengths[row] for row in rows]
        kept = [rng.randint(1, 5), rng.randint(1, 5)]
        blocks = [
            truths[i][starts[i] : starts[i] + kept[i]] + [rng.randrange(VOCAB)] * rng.randint(0, 3) for i in range(2)
        ]
        out = target.forward(ForwardBatch(rows, starts, [len(block) for block in blocks], blocks[0] + blocks[1]))
        first, second = out.logits_TV.split([len(block) for block in blocks])
        assert_close(first[: kept[0]], full[0][starts[0] : starts[0] + kept[0]])
        assert_close(second[: kept[1]], full[1][starts[1] : starts[1] + kept[1]])
        target.cache.rollback(rows, [start + num for start, num in zip(starts, kept, strict=True)])


def test_a_freed_row_starts_empty(named):
    _, model = named
    target = HFTarget(model, 1, MAX_LEN)
    tokens = list(range(12))
    feed(target, target.cache.allocate(), tokens[::-1])
    target.cache.free(0)
    row = target.cache.allocate()
    assert_close(feed(target, row, tokens).logits_TV, reference(model, tokens).logits[0])


def test_embed_and_head_are_the_models_own(named):
    name, model = named
    target = HFTarget(model, 1, MAX_LEN)
    target.set_taps((target.num_layers - 1,))
    tokens = list(range(3, 13))
    out = feed(target, target.cache.allocate(), tokens)
    assert_close(target.head(out.taps_TF), out.logits_TV)
    if name in PURE_MAMBA:
        assert_close(target.embed(torch.tensor(tokens)), model.get_input_embeddings()(torch.tensor(tokens)))
    elif name != "gpt2":  # its first layer's input holds positions too, which embed() leaves out
        assert_close(target.embed(torch.tensor(tokens)), reference(model, tokens).hidden_states[0][0])


def test_facts(named):
    name, model = named
    target = HFTarget(model, 3, 100)
    assert (target.vocab_size, target.hidden_size) == (VOCAB, WIDTH)
    assert target.num_layers == model.config.num_hidden_layers
    assert 0 < target.weight_bytes <= 4 * sum(p.numel() for p in model.parameters())
    assert target.cache.num_bytes > 0
    if name == "llama":
        kv = 2 * 4 * 2 * 8 * 4  # keys and values, layers, heads, width, float32
        assert target.cache.num_bytes == 3 * 100 * kv
        assert target.weight_bytes == 4 * (sum(p.numel() for p in model.parameters()) - VOCAB * WIDTH)


def test_nothing_is_replayed_when_nothing_was_refused():
    target = HFTarget(build("qwen3_5"), 1, MAX_LEN)
    row = target.cache.allocate()
    feed(target, row, list(range(10)))
    target.cache.rollback([row], [10])
    assert target.cache.rows[row].pending == []
    feed(target, row, list(range(5)))
    target.cache.rollback([row], [12])
    assert target.cache.rows[row].pending == [0, 1]


def test_mamba_1_goes_token_by_token_and_others_do_not():
    """Transformers' Mamba 1 layers start from a zero state whenever a pass has several tokens."""
    assert HFTarget(build("mamba"), 1, MAX_LEN)._must_step
    assert not any(HFTarget(build(name), 1, MAX_LEN)._must_step for name in ("mamba2", "qwen3_5", "falcon_h1", "lfm2"))


def test_state_outside_the_cache_is_refused():
    recurrent_gemma = transformers.RecurrentGemmaConfig(**ATTENTION, lru_width=WIDTH, attention_window_size=WINDOW)
    rwkv = transformers.RwkvConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=2, attention_hidden_size=WIDTH
    )
    for config in (recurrent_gemma, rwkv):
        with pytest.raises(UnsupportedModelError, match="outside the cache"):
            HFTarget(transformers.AutoModelForCausalLM.from_config(config), 1, MAX_LEN)


def test_context_is_checked():
    with pytest.raises(ContextLengthError, match="lower max_len"):
        HFTarget(build("llama"), 1, 513)
    assert HFTarget(build("llama"), 1).cache.max_len == 512


LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 32,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.5, 3.0, 8.0, 20.0],
}
LONG = {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 32}


def phi(**options):
    return build_config(transformers.Phi3Config(**ATTENTION | LONG | options))


def test_long_rope_is_lossless_across_the_trained_length():
    """Greedy text with drafts, right ones and wrong ones, equals plain text of a target of the same size."""
    model, texts = phi(), []
    prompt = [token % VOCAB for token in range(3, 61, 2)]
    for draft in (lambda known, at: [], lambda known, at: [*known[at : at + 3], 0]):
        target = HFTarget(model, 1, 64)
        row = target.cache.allocate()
        feed(target, row, prompt[:-1], "none")
        tokens = list(prompt)
        while len(tokens) < 56:
            drafts = draft(texts[0] if texts else [], len(tokens))
            best = feed(target, row, [tokens[-1], *drafts]).best_T()
            num_kept = next((index for index, token in enumerate(drafts) if token != best[index]), len(drafts))
            target.cache.rollback([row], [len(tokens) + num_kept])
            tokens += best[: num_kept + 1]
        texts.append(tokens[:56])
    assert texts[0] == texts[1]


@pytest.mark.parametrize(("max_len", "factors"), [(32, "short_factor"), (33, "long_factor"), (64, "long_factor")])
def test_long_rope_factors_follow_max_len(max_len, factors):
    model = phi()
    target = HFTarget(model, 1, 96)
    target.allocate_cache(1, max_len)
    tokens = list(range(30))
    logits = feed(target, target.cache.allocate(), tokens).logits_TV
    fixed = {**LONG_ROPE, "short_factor": LONG_ROPE[factors], "long_factor": LONG_ROPE[factors]}
    assert_close(logits, reference(phi(rope_parameters=fixed), tokens).logits[0])


def test_long_rope_with_two_scales_may_not_cross_the_trained_length():
    moe = transformers.PhimoeConfig(
        **ATTENTION | LONG | {"rope_parameters": LONG_ROPE | {"short_mscale": 1.1, "long_mscale": 1.3}},
        num_local_experts=2,
    )
    target = HFTarget(build_config(moe), 1, 32)
    with pytest.raises(ContextLengthError, match="beyond 32 tokens"):
        target.allocate_cache(1, 33)


def test_pending_tokens_stay_bounded():
    target = HFTarget(build("qwen3_5"), 1, MAX_LEN)
    row = target.cache.allocate()
    feed(target, row, list(range(10)))
    for _ in range(30):
        feed(target, row, [1, 2, 3, 4])
        target.cache.rollback([row], [target.cache.lengths[row] - 1])
        assert len(target.cache.rows[row].pending) < 40


def test_logits_modes():
    model = build("llama")
    target = HFTarget(model, 2, MAX_LEN)
    rows = [target.cache.allocate(), target.cache.allocate()]
    out = target.forward(ForwardBatch(rows, [0, 0], [3, 2], [1, 2, 3, 4, 5], "last"))
    assert_close(
        out.logits_TV, torch.stack([reference(model, [1, 2, 3]).logits[0, -1], reference(model, [4, 5]).logits[0, -1]])
    )
    assert out.taps_TF is None
    out = target.forward(ForwardBatch(rows, [3, 2], [1, 1], [1, 2], "none"))
    assert out.logits_TV is None


def test_taps_follow_the_order_asked_for():
    model = build("qwen3")
    target = HFTarget(model, 1, MAX_LEN)
    target.set_taps((2, 0))
    out = feed(target, target.cache.allocate(), [5, 6, 7], logits="none")
    hidden = reference(model, [5, 6, 7]).hidden_states
    assert_close(out.taps_TF, torch.cat([hidden[3][0], hidden[1][0]], dim=-1))
    target.set_taps(())
    assert feed(target, 0, [8]).taps_TF is None
    with pytest.raises(UnsupportedModelError, match="layers 0 to 3"):
        target.set_taps((4,))


def test_from_path_checkpoint_and_random(tmp_path):
    model = build("qwen3")
    model.save_pretrained(tmp_path)
    options = {"dtype": torch.float32, "device": "cpu", "num_rows": 1, "max_len": 64}
    target = HFTarget.from_path(tmp_path, **options)
    read = feed(target, target.cache.allocate(), [1, 2, 3]).logits_TV
    assert_close(read, reference(model, [1, 2, 3]).logits[0])
    state = torch.get_rng_state()
    drawn = [HFTarget.from_path(tmp_path, weights="random", **options) for _ in range(2)]
    assert torch.equal(state, torch.get_rng_state())
    first, again = (feed(each, each.cache.allocate(), [1, 2, 3]).logits_TV for each in drawn)
    assert torch.equal(first, again)
    assert not torch.allclose(first, read)


def test_from_path_says_what_is_wrong(tmp_path):
    options = {"dtype": torch.float32, "device": "cpu", "num_rows": 1, "max_len": 64}
    with pytest.raises(ModelNotFoundError, match="no config.json"):
        HFTarget.from_path(tmp_path, **options)
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(UnsupportedModelError):
        HFTarget.from_path(tmp_path, **options)
    build("llama").config.save_pretrained(tmp_path)
    with pytest.raises(ModelFileError):
        HFTarget.from_path(tmp_path, **options)
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 40)
    with pytest.raises(ModelFileError):
        HFTarget.from_path(tmp_path, **options)


def test_missing_transformers_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(UnsupportedModelError, match=r"paceline\[hf\]"):
        HFTarget.from_path(tmp_path, dtype=torch.float32, device="cpu", num_rows=1, max_len=8)
