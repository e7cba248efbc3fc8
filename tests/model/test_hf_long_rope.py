"""HFTarget with scaled rotary embeddings: factors by `max_len`, lossless across the trained length."""

import pytest
import transformers
from hf_targets import ATTENTION, VOCAB, assert_close, build_config, feed, reference

from paceline.errors import ContextLengthError
from paceline.model.hf.target import HFTarget

pytestmark = pytest.mark.slow


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
