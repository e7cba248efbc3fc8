"""HFTarget against one cache-free pass of the same Transformers model, over random drafts and rollbacks."""

import random

import pytest
import torch
import transformers
from hf_targets import (
    ATTENTION,
    CONFIGS,
    MAX_LEN,
    VOCAB,
    WIDTH,
    WINDOW,
    assert_close,
    build,
    feed,
    reference,
    speculate,
)
from safetensors.torch import save_file

from paceline.errors import ContextLengthError, ModelFileError, ModelNotFoundError, UnsupportedModelError
from paceline.model.hf.target import HFTarget
from paceline.model.target import ForwardBatch

pytestmark = pytest.mark.slow
RECURRENT = {"qwen3_5", "qwen3_next", "mamba", "mamba2", "falcon_h1", "bamba", "jamba", "lfm2"}
PURE_MAMBA = {"mamba", "mamba2"}
NAMES = list(CONFIGS)


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
    unknown = (
        '"no_such_model"',
        '"llama", "hidden_size": "x"',
        '"gemma4_text", "layer_types": 3',
        '"llama", "head_dim": []',
    )
    for kind in unknown:  # ValueError, StrictDataclassFieldValidationError and TypeError of Transformers
        (tmp_path / "config.json").write_text(f'{{"model_type": {kind}}}')
        with pytest.raises(UnsupportedModelError, match="Transformers cannot build a causal LM"):
            HFTarget.from_path(tmp_path, **options)
    build("llama").config.save_pretrained(tmp_path)
    with pytest.raises(ModelFileError):
        HFTarget.from_path(tmp_path, **options)
    save_file({"d2t": torch.zeros(1)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelFileError, match=r"lacks weights of the model \(.*, \d+ in all\): is config"):
        HFTarget.from_path(tmp_path, **options)  # Transformers gave them random values
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 40)
    with pytest.raises(ModelFileError):
        HFTarget.from_path(tmp_path, **options)


def test_missing_transformers_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(UnsupportedModelError, match=r"paceline\[hf\]"):
        HFTarget.from_path(tmp_path, dtype=torch.float32, device="cpu", num_rows=1, max_len=8)
