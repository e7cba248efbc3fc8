"""The test doubles themselves: they must notice the mistakes they are there to notice."""

import pytest
import torch
from doubles import ByteTokenizer, FakeTarget, ScriptedDrafter
from round_loop import generate

from paceline.draft.base import Observed
from paceline.model.target import ForwardBatch
from paceline.types import Batch, SamplingParams, Sequence

PROMPT = [3, 1, 4, 1, 5]


def running(target: FakeTarget, tokens: list[int], request_id: int = 0, max_tokens: int = 64) -> Sequence:
    """A prefilled sequence whose last token is the anchor."""
    seq = Sequence(request_id, list(tokens), len(tokens), SamplingParams(max_tokens=max_tokens, seed=request_id))
    row = target.cache.allocate()
    assert row is not None
    seq.row = row
    count = len(tokens) - 1
    target.forward(ForwardBatch([row], [0], [count], tokens[:-1], "none"))
    seq.cached_len = count
    return seq


@pytest.mark.parametrize(
    ("options", "least", "most"),
    [
        ({"accuracy": 1.0}, 4, 4),
        ({"accuracy": 0.0}, 0, 0),
        ({"accuracy": 0.6, "tap_layers": (2, 0)}, 0.8, 2.4),
        ({"accuracy": 0.6, "with_probs": True}, 0.8, 2.4),
        ({"mode": "adversarial"}, 0, 0),
        ({"mode": "adversarial", "with_probs": True}, 0, 0.2),
    ],
)
def test_drafter_is_right_as_often_as_told_and_greedy_is_unchanged(options, least, most):
    """Answers of 151 tokens: the first, and thirty rounds of five if all drafts are accepted."""
    target, prompts = FakeTarget(vocab_size=20), [PROMPT, [7, 7, 2]]
    drafter = ScriptedDrafter(target, 4, **options)
    answers, rounds = generate(target, drafter, prompts, 151, check=target.fake_cache.check)
    assert answers == [target.greedy(prompt, 151) for prompt in prompts]
    accepted = [num for stats in rounds for num in stats.num_accepted_B]
    assert least <= sum(accepted) / len(accepted) <= most


def test_target_is_a_function_of_its_last_tokens_and_seed():
    target = FakeTarget(order=3)
    assert torch.equal(target.logits_after([9, 9, 1, 2, 3]), target.logits_after([1, 2, 3]))
    assert not torch.equal(target.logits_after([2, 1, 3]), target.logits_after([1, 2, 3]))
    assert torch.equal(FakeTarget(order=3).logits_after([1, 2, 3]), target.logits_after([1, 2, 3]))
    assert not torch.equal(FakeTarget(order=3, seed=1).logits_after([1, 2, 3]), target.logits_after([1, 2, 3]))


def test_logits_come_from_the_cache_not_from_the_request():
    target = FakeTarget()
    seq = running(target, PROMPT)
    target.fake_cache.tokens[seq.row][seq.cached_len - 1] = 9
    out = target.forward(ForwardBatch([seq.row], [seq.cached_len], [1], [5]))
    assert torch.equal(out.logits_TV[0], target.logits_after([9, 5]))


def test_logits_modes_and_taps():
    target = FakeTarget()
    rows = [target.cache.allocate(), target.cache.allocate()]
    target.set_taps((3, 1))
    out = target.forward(ForwardBatch(rows, [0, 0], [3, 2], [1, 2, 3, 4, 5], "last"))
    assert torch.equal(out.logits_TV, torch.stack([target.logits_after([2, 3]), target.logits_after([4, 5])]))
    assert torch.equal(out.taps_TF, torch.cat([target.taps_of([1, 2, 3], 0), target.taps_of([4, 5], 0)]))
    assert out.taps_TF.shape == (5, 2 * target.hidden_size)
    out = target.forward(ForwardBatch(rows[:1], [3], [1], [6], "none"))
    assert out.logits_TV is None
    assert out.taps_TF[0, 0] == 3


def test_a_missing_rollback_is_noticed():
    target = FakeTarget()
    seq = running(target, PROMPT)
    target.forward(ForwardBatch([seq.row], [4], [3], [5, 8, 8]))
    with pytest.raises(AssertionError, match="starts at 5"):
        target.forward(ForwardBatch([seq.row], [5], [1], [2]))
    seq.tokens.append(2)
    seq.cached_len = 5
    with pytest.raises(AssertionError, match="other tokens"):
        target.fake_cache.check(seq)
    target.cache.rollback([seq.row], [5])
    target.fake_cache.check(seq)


def test_mixed_up_and_unallocated_rows_are_noticed():
    target = FakeTarget()
    first, second = running(target, PROMPT, 1), running(target, [2, 7, 1, 8, 2], 2)
    first.row, second.row = second.row, first.row
    with pytest.raises(AssertionError, match="other tokens"):
        target.fake_cache.check(first)
    with pytest.raises(AssertionError, match="never allocated"):
        target.forward(ForwardBatch([3], [0], [1], [1]))
    with pytest.raises(AssertionError, match="twice"):
        target.forward(ForwardBatch([0, 0], [4, 4], [1, 1], [1, 1]))


def test_drafter_notices_wrong_observations():
    target = FakeTarget()
    seq = running(target, PROMPT)
    drafter = ScriptedDrafter(target, tap_layers=(0,))
    drafter.start(seq)
    with pytest.raises(AssertionError, match="saw 0, got 1"):
        drafter.observe([Observed(seq, 1, 2, target.taps_of([1, 4], 1, (0,)))])
    with pytest.raises(AssertionError, match="not all cached"):
        drafter.observe([Observed(seq, 0, 5, None)])
    with pytest.raises(AssertionError):
        drafter.observe([Observed(seq, 0, 2, target.taps_of([3, 1], 1, (0,)))])
    with pytest.raises(AssertionError, match="dropped"):
        drafter.start(seq)
    drafter.drop(seq)
    drafter.start(seq)


def test_drafts_depend_on_the_request_alone_and_keep_the_limit():
    target = FakeTarget()
    drafter = ScriptedDrafter(target, 4, accuracy=0.5, with_probs=True)
    first, second = running(target, PROMPT, 1), running(target, [2, 7, 1], 2, max_tokens=3)
    alone = drafter.propose(Batch([first]))
    both = drafter.propose(Batch([second, first]))
    assert both.tokens_B[1] == alone.tokens_B[0]
    assert [len(tokens) for tokens in both.tokens_B] == [2, 4]
    assert both.probs_B[1].shape == (4, target.vocab_size)
    torch.testing.assert_close(both.probs_B[1].sum(-1), torch.ones(4))
    last = running(target, [1, 2], 3, max_tokens=1)
    assert drafter.propose(Batch([last])).tokens_B == [[]]


@pytest.mark.slow
def test_drafts_follow_the_probabilities_they_report():
    target = FakeTarget(vocab_size=5, max_len=8)
    drafter = ScriptedDrafter(target, 1, accuracy=0.4, with_probs=True)
    counts = torch.zeros(5)
    for seed in range(4000):
        seq = Sequence(seed, list(PROMPT[:4]), 4, SamplingParams(seed=seed))
        counts[drafter.propose(Batch([seq])).tokens_B[0][0]] += 1
    expected = 4000 * drafter.distribution(PROMPT[:4])
    assert float(((counts - expected) ** 2 / expected).sum()) < 18.5  # chi-square, 4 degrees of freedom, p = 0.001


@pytest.mark.parametrize("text", ["", "plain", "naïve façade — 😀 한국어 🏳️‍🌈"])
def test_byte_tokenizer_round_trip_and_stream(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids) == text
    stream = tokenizer.stream()
    pieces = [stream.push([token]) for token in ids]
    assert "".join(pieces) + stream.flush() == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_byte_tokenizer_specials_broken_bytes_and_chat():
    tokenizer = ByteTokenizer()
    assert tokenizer.decode([256, 65, 257], skip_special=False) == "<bos>A<eos>"
    stream = tokenizer.stream()
    assert stream.push([0xF0, 0x9F]) == ""
    assert stream.flush() == "\ufffd"
    assert stream.push([65]) == "A"
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages) == "user: hi\nassistant: "
    assert tokenizer.decode(tokenizer.encode_chat(messages)) == "user: hi\nassistant: "
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=False) == "user: hi\n"
    assert tokenizer.eos_token_ids == (257,)
