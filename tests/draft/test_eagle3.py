"""EAGLE-3 against its formulas, draft by draft; rows that are shared, batched, cancelled and begun again."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate
from typing import Any

import pytest
import torch
from round_loop import admit, generate, ready
from tiny_dflash import HIDDEN, KINDS, PROMPT, VOCAB, in_turns, tiny_target
from tiny_eagle3 import IDS, VARIANTS, Formulas, drafter_of, loud_network, raw_eagle3
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from paceline.draft import tapped
from paceline.draft.base import NoDrafter
from paceline.draft.chained import MOST_BRANCHES
from paceline.draft.eagle3.checkpoint import Eagle3Config, default_taps
from paceline.draft.eagle3.drafter import Eagle3Drafter
from paceline.draft.eagle3.native import Eagle3NativePath
from paceline.draft.registry import make_drafter
from paceline.errors import ConfigError, DrafterMismatchError
from paceline.model.native.decoder import NativeDecoder
from paceline.model.target import ForwardBatch
from paceline.model.torch.attention import Rope, rope_tables
from paceline.types import Batch, SamplingParams, Take

LONG = SamplingParams(max_tokens=60)


class Recording(Eagle3Drafter):
    """Keeps what each draft was told from: the text before it, the drafts, the logits."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.rounds: list[tuple[list[int], list[int], list[Tensor]]] = []

    def propose(self, batch: Batch) -> Any:
        self.now: dict[int, list[Tensor]] = {}
        block = super().propose(batch)
        for seq, tokens in zip(batch.sequences, block.tokens_B, strict=True):
            if tokens:
                self.rounds.append((list(seq.tokens), tokens, self.now[seq.row]))
        return block

    def _extend(self, rows: Any, logits_TV: Tensor, count: int) -> None:
        firsts = accumulate((len(each.nodes) for each in rows), initial=0)
        for each, first in zip(rows, firsts, strict=False):
            self.now.setdefault(each.seq.row, []).append(logits_TV[first].clone())
        super()._extend(rows, logits_TV, count)


def recording(raw: dict[str, Any], **options: Any) -> Recording:
    network = loud_network(raw)
    ids = IDS if network.config.draft_vocab_size == len(IDS) else None
    return Recording(network, ids=ids, **options)


def assert_formulas(drafter: Recording, kind: Any, least: int, are_best: bool = True) -> None:
    """Every recorded draft is what the formulas say of the target's features of its text."""
    twin = tiny_target(kind=kind)
    twin.set_taps(drafter.tap_layers)
    formulas = Formulas(drafter.network, twin.embed(torch.arange(VOCAB)))
    row = twin.cache.allocate()
    assert len(drafter.rounds) >= least
    for tokens, drafts, logits in drafter.rounds:
        taps = twin.forward(ForwardBatch([row], [0], [len(tokens) - 1], tokens[:-1], "none")).taps_TF.clone()
        twin.cache.rollback([row], [0])
        for mine, expected in zip(logits, formulas.chain(tokens, taps, drafts), strict=True):
            torch.testing.assert_close(mine.double(), expected, atol=2e-4, rtol=2e-4)
        assert not are_best or drafts == [int(drafter.ids[each.argmax()]) for each in logits]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), in_turns(VARIANTS))
def test_rounds_are_the_formulas(name: str, kind: Any) -> None:
    drafter = recording(raw_eagle3(**VARIANTS[name]), num_drafted=3)
    target = tiny_target(kind=kind)
    (answer,), rounds = generate(target, drafter, [PROMPT[:6]], 9, chunk=4)
    assert (answer,) == tuple(generate(target, NoDrafter(), [PROMPT[:6]], 9)[0])
    assert all(each <= 3 for stats in rounds for each in stats.num_drafted_B)
    assert_formulas(drafter, kind, least=3)


@pytest.mark.parametrize("kind", KINDS)
def test_beside_a_native_target_steps_are_native(kind: Any) -> None:
    target, drafter = tiny_target(kind=kind), recording(raw_eagle3())
    drafter.bind(target)
    assert isinstance(drafter._path, Eagle3NativePath) == isinstance(target, NativeDecoder)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_rounds_whose_drafts_stand_are_the_formulas(kind: Any) -> None:
    """Accepted drafts are read again with true features: taking the drafts' own keys would show in the next round's
    logits."""
    target, drafter = tiny_target(kind=kind), recording(raw_eagle3(num_hidden_layers=2), num_drafted=4)
    prompt = PROMPT[:5]
    expected = generate(target, NoDrafter(), [prompt], 22)[0][0]
    text, extend = [*prompt, *expected], drafter._extend

    def knowing(rows: Any, logits_TV: Tensor, count: int) -> None:
        extend(rows, logits_TV, count)
        for each in rows:
            at = len(each.seq.tokens) + len(each.tokens) - 1
            each.tokens[-1] = text[at] if at < len(text) else 0

    drafter._extend = knowing  # pyright: ignore[reportAttributeAccessIssue]
    (answer,), rounds = generate(target, drafter, [prompt], 22)
    assert answer == expected and sum(sum(stats.num_accepted_B) for stats in rounds) > 14
    assert_formulas(drafter, kind, least=4, are_best=False)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), in_turns(VARIANTS, 1))
def test_what_is_likely_behind_each_branch_is_the_formulas(name: str, kind: Any) -> None:
    """Rows of different lengths, one of which drafts a chain: each branch reads its own ancestors alone."""
    drafter, target = recording(raw_eagle3(**VARIANTS[name]), num_drafted=4), tiny_target(num_rows=3, kind=kind)
    ready(target, drafter)
    sequences = [admit(target, drafter, prompt, LONG) for prompt in (PROMPT[:6], PROMPT[2:11], PROMPT)]
    block = drafter.propose(Batch(sequences, [Take("eagle3", count) for count in (3, 2, 1)], num_candidates=3))
    twin = tiny_target(kind=kind)
    twin.set_taps(drafter.tap_layers)
    formulas = Formulas(drafter.network, twin.embed(torch.arange(VOCAB)))
    assert block.candidates_B is not None and block.confidence_B is not None
    for seq, candidates, chain, sure in zip(
        sequences, block.candidates_B, block.tokens_B, block.confidence_B, strict=True
    ):
        row = twin.cache.allocate()
        taps = twin.forward(ForwardBatch([row], [0], [len(seq.tokens) - 1], seq.tokens[:-1], "none")).taps_TF.clone()
        twin.cache.free(row)
        assert candidates is not None and candidates.branches is not None
        widths = Counter(map(len, candidates.branches))
        assert widths == {depth: 1 if depth == 0 else MOST_BRANCHES if depth > 1 else 3 for depth in range(len(chain))}
        for path, (tokens, logprobs) in candidates.branches.items():
            logprobs_V = formulas.chain(seq.tokens, taps, [*path, 0])[-1].log_softmax(-1)
            values, places = logprobs_V.topk(3)
            assert tokens == drafter.ids[places].tolist()
            torch.testing.assert_close(torch.tensor(logprobs).double(), values, atol=2e-4, rtol=2e-4)
        assert [candidates.at(chain[:length])[0][0] for length in range(len(chain))] == chain
        assert sure == [each[0] for each in candidates.logprobs_KM]


@pytest.mark.parametrize("name", VARIANTS)
def test_the_network_is_the_formulas(name: str) -> None:
    """The training pass: all positions together, and a second step after each row's last."""
    network = loud_network(raw_eagle3(**VARIANTS[name]))
    config, generator = network.config, torch.Generator().manual_seed(4)
    embedding_VD = torch.randn(VOCAB, HIDDEN, generator=generator)
    taps_NF = torch.randn(9, config.num_taps * HIDDEN, generator=generator)
    formulas, tokens = Formulas(network, embedding_VD), [3, 1, 4, 1, 5, 9, 2, 6, 5]
    rope = Rope(*rope_tables(config.shape, 16))

    def attend(layer: int, query_THD: Tensor, key_THD: Tensor, value_THD: Tensor) -> Tensor:
        tables, window = rope.tables(list(range(1, len(query_THD) + 1))), config.shape.window(layer)
        heads = [rope.rotate(query_THD, tables), rope.rotate(key_THD, tables), value_THD]
        distance = torch.arange(len(query_THD))[:, None] - torch.arange(len(query_THD))
        mask = (distance >= 0) & (distance < (window or 99))
        out = scaled_dot_product_attention(
            *(each.transpose(0, 1)[None] for each in heads), attn_mask=mask, enable_gqa=True
        )
        return out[0].transpose(0, 1).flatten(1)

    hidden_TD = network.features(taps_NF)
    torch.testing.assert_close(hidden_TD.double(), formulas.features(taps_NF), atol=1e-5, rtol=1e-5)
    embedded = network.embed_tokens(torch.tensor(tokens)) if hasattr(network, "embed_tokens") else embedding_VD[tokens]
    told_TD, normed_TD = network(embedded, hidden_TD, attend)
    expected = formulas.run(tokens, formulas.features(taps_NF))
    normed = formulas.norm("norm.weight", expected)
    torch.testing.assert_close(normed_TD.double(), normed, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(told_TD.double(), normed if config.norm_output else expected, atol=1e-4, rtol=1e-4)


def test_drawn_drafts_do_not_say_how_sure_they_are() -> None:
    """Each depends on those drawn before it: to check fewer where one is unlikely would change what is said."""
    drafter, target = drafter_of(loud_network(raw_eagle3())), tiny_target(num_rows=2)
    ready(target, drafter)
    sampled = admit(target, drafter, PROMPT[:6], SamplingParams(max_tokens=60, temperature=1.0))
    greedy = admit(target, drafter, PROMPT, LONG)
    block = drafter.propose(Batch([sampled, greedy]))
    assert block.probs_B[0] is not None and block.probs_B[1] is None and block.confidence_B is not None
    assert block.confidence_B[0] is None and len(block.confidence_B[1] or ()) == len(block.tokens_B[1]) == 5


def test_how_many_are_drafted_follows_what_is_asked() -> None:
    target, drafter = tiny_target(), drafter_of(loud_network(raw_eagle3()))
    ready(target, drafter)
    rows = [admit(target, drafter, prompt, LONG) for prompt in (PROMPT, PROMPT[:4], PROMPT[2:9])]
    takes = [Take("eagle3", 2), Take("eagle3", 0), Take("eagle3", 9)]
    assert [len(tokens) for tokens in drafter.propose(Batch(rows, takes)).tokens_B] == [2, 0, 5]
    assert drafter.num_drafted == 5


def test_tokens_outside_the_draft_vocabulary_are_not_proposed() -> None:
    """d2t: rows of the head are other tokens; a drawn proposal gives the others no chance."""
    target, drafter = tiny_target(), recording(raw_eagle3(draft_vocab_size=len(IDS)))
    ready(target, drafter)
    greedy = admit(target, drafter, PROMPT, LONG)
    drawn = admit(target, drafter, PROMPT, SamplingParams(max_tokens=60, temperature=0.9))
    block = drafter.propose(Batch([greedy, drawn]))
    assert block.tokens_B[0] == [int(IDS[each.argmax()]) for each in drafter.now[greedy.row]]
    assert block.probs_B[0] is None and block.probs_B[1] is not None
    outside = [token for token in range(VOCAB) if token not in IDS]
    probs_KV = block.probs_B[1]
    assert len(probs_KV) == 5 and float(probs_KV[:, outside].sum()) == 0.0
    for token, probs_V, logits in zip(block.tokens_B[1], probs_KV, drafter.now[drawn.row], strict=True):
        assert float(probs_V[token]) > 0
        torch.testing.assert_close(probs_V[IDS], torch.softmax(logits / 0.9, -1))


@pytest.mark.parametrize("source", ["another row", "its own"])
def test_a_shared_beginning_is_taken_over_but_for_its_last_position(source: str) -> None:
    """The last position's entry holds the token behind it, which is another here."""
    target, drafter = tiny_target(num_rows=2), recording(raw_eagle3())
    ready(target, drafter)
    before = admit(target, drafter, PROMPT, LONG)
    if source == "its own":
        drafter.drop(before)
        target.cache.free(before.row)
    shared = 9
    prompt = [*PROMPT[:shared], 10, 2, 2]
    alone = tiny_target(num_rows=1)
    ready(alone, other := recording(raw_eagle3()))
    other.propose(Batch([admit(alone, other, prompt, LONG)]))
    seq = admit_adopting(target, drafter, prompt, before.row, shared)
    drafter.propose(Batch([seq]))
    assert drafter.rounds[-1][:2] == other.rounds[-1][:2]
    torch.testing.assert_close(
        torch.stack(drafter.rounds[-1][2]), torch.stack(other.rounds[-1][2]), atol=1e-4, rtol=1e-3
    )
    if source == "another row":
        drafter.propose(Batch([before]))  # what it lent it still has
        assert len(drafter.rounds[-1][1]) == 5


def admit_adopting(target: Any, drafter: Eagle3Drafter, prompt: list[int], source: int, length: int) -> Any:
    """Reuse a prefix like the engine does."""
    from paceline.draft.base import Observed
    from paceline.types import Sequence

    seq = Sequence(1, list(prompt), len(prompt), LONG)
    seq.row = target.cache.allocate()
    drafter.start(seq)
    taken = drafter.adopt(seq, source, length)
    assert taken == length - 1
    target.cache.adopt(source, seq.row, taken)
    out = target.forward(ForwardBatch([seq.row], [taken], [len(prompt) - taken], prompt[taken:], "last"))
    seq.cached_len = len(prompt)
    seq.accept([int(out.logits_TV[-1].argmax())])
    drafter.observe([Observed(seq, taken, len(prompt) - taken, out.taps_TF)])
    return seq


@pytest.mark.slow
def test_a_row_that_waits_long_drafts_as_one_that_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    drafts = []
    for most in (512, 8):
        monkeypatch.setattr(tapped, "MOST_PENDING", most)
        monkeypatch.setattr(tapped, "PENDING_PIECE", 3)
        target, drafter = tiny_target(), recording(raw_eagle3())
        ready(target, drafter)
        drafts.append(drafter.propose(Batch([admit(target, drafter, PROMPT * 4, LONG, chunk=5)])).tokens_B)
    assert drafts[0] == drafts[1]


def test_taps_that_a_config_leaves_out_are_those_of_the_engines() -> None:
    raw = {key: value for key, value in raw_eagle3().items() if "eagle" not in key or key == "architectures"}
    assert Eagle3Config.from_json(raw).tap_layers == ()
    drafter = drafter_of(loud_network(raw))
    drafter.bind(tiny_target())
    assert drafter.tap_layers == default_taps(6) == (0, 2, 4)
    assert default_taps(36) == (1, 17, 32), "inputs of layers 2, 18 and 33, as SGLang and vLLM say"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 12}, "vocabulary: the drafter says 12, the target has 11"),
        ({"hidden_size": 24}, "hidden size: the drafter says 24, the target has 32"),
        ({"tap_layers": [1, 6]}, r"tapped layers: the drafter says \[6\], the target has 6 layers"),
    ],
)
def test_a_drafter_of_another_target_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DrafterMismatchError, match=message):
        drafter_of(loud_network(raw_eagle3(**changes))).bind(tiny_target())


def test_random_ones_and_their_sizes() -> None:
    target = tiny_target()
    drafter = make_drafter("random-eagle3", target, num_drafted=2, head_dim=8)
    assert isinstance(drafter, Eagle3Drafter) and drafter.num_drafted == 2
    drafter.bind(target)
    own = sum(tensor.nbytes for tensor in drafter.network.state_dict().values())
    assert drafter.weight_bytes == 2 * own
    drafter.keep_weights()
    for number in (-1, 1025, 2**31):  # the last one ended in PyTorch's allocation error
        with pytest.raises(ConfigError, match=f"num_drafted must be between 0 and 1024, not {number}"):
            make_drafter("random-eagle3", target, num_drafted=number)
