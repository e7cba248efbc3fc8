"""The nouns every part shares. Read this file first.

Shape suffixes: B rows (sequences), K drafted, J = K+1 checked, T tokens of a pass, F tap features, V vocabulary.
A *row* is a slot of the KV cache; a sequence keeps its row from admission to its end. The last committed token of a
running sequence (the *anchor*, or bonus token) is not in the target's cache yet: `cached_len == len(tokens) - 1`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from paceline.lossy import Ledger
from paceline.plan.trees import Candidates, Outcome, Said, Tree
from paceline.sampling import GrammarKind as GrammarKind
from paceline.sampling import GrammarSpec as GrammarSpec
from paceline.sampling import SamplingParams as SamplingParams
from paceline.sampling import TokenLogprob as TokenLogprob
from paceline.turnaround import Timings

if TYPE_CHECKING:  # tensors are only named here, so that `import paceline.types` stays cheap
    from torch import Tensor

FinishReason = Literal["stop", "length", "abort", "error"]
RowKind = Literal["greedy", "sampled", "seeded", "lossy", "lossy sampled"]
NONE, LOOKUP = "none", "ngram"
"""The sources of a round in which a row checked no drafts, or some that were found in the text so far."""
CANDIDATE = "candidate"
"""A drafter that is being tried, and is no member of the pool."""


class Constraint(Protocol):
    """What an answer may still say; the one there is, `engine.grammar.Grammar`, says what each of these does."""

    @property
    def has_failed(self) -> bool: ...

    def follow(self, seq: Sequence, drafts: list[int], corrects: bool = False) -> list[int]: ...

    def mask(self, seq: Sequence, logits_JV: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Route:
    """Whose drafts a request should get, of the members of a pool of drafters."""

    drafter: str = ""
    """The member that it asks for; empty: a router's choice, or the pool's first."""
    clusters: tuple[str, ...] = ()
    """What kind of request it is, for a router: the finest word first."""


@dataclass(frozen=True, slots=True)
class Take:
    """Whose drafts a row checks in a round, and how many at most."""

    source: str = NONE
    count: int = 0


@dataclass(frozen=True, slots=True)
class Offer:
    """What a row could check next."""

    source: str
    """Whose drafts: "dflash", "ngram", ..."""
    chances: tuple[float, ...]
    """Chance that each draft stands, given that those before it do; as many as the row may check."""
    cost_s: float = 0.0
    """Seconds to make them for this row alone, besides `each_s`; 0 for drafts that are at hand."""
    each_s: float = 0.0
    """Seconds of every single draft, of a drafter that makes one after another."""


@dataclass(slots=True)
class Row:
    """A running sequence as a planner sees it."""

    key: int
    """Tells it from others."""
    kind: RowKind
    """Drafts of each kind of row stand as often as they do."""
    offers: list[Offer] = field(default_factory=list)
    ask: Callable[[AbstractSet[str]], list[Offer]] | None = None
    """Makes `offers`, those of the given sources left out: a planner asks when it will look at them."""

    def weigh(self, unwanted: AbstractSet[str] = frozenset()) -> list[Offer]:
        """The offers, made now where they are made on demand."""
        if self.ask:
            self.offers = self.ask(unwanted)
        return self.offers


class Round(NamedTuple):
    """What became of one row's drafts in a round."""

    num_drafted: int
    num_accepted: int
    source: str = NONE
    """Whose drafts they were: "dflash", "ngram", ..., or "none" when there were none."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One request on its way: its tokens, its place in the cache, its counts and its clock."""

    request_id: int
    tokens: list[int]
    """Prompt, then answer."""
    prompt_len: int
    params: SamplingParams
    row: int = -1
    """Slot in the KV cache; -1 while waiting."""
    cached_len: int = 0
    """Positions of `tokens` whose keys and values stand in the target's cache."""
    num_reused: int = 0
    """Prompt positions that were taken over from another sequence rather than computed."""
    seed: int = 0
    finish_reason: FinishReason | None = None
    stopped_by: str = ""
    """The stop string that ended the text; a stop that is a special token is the last of `tokens` instead."""
    counts: Counter[int] = field(default_factory=Counter)
    """How often each token stands in the answer; kept only when penalties need it."""
    rounds: list[Round] = field(default_factory=list)
    lossless: bool = True
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    """Of each prompt token but the first, when `params.prompt_logprobs` asks for them."""
    forbidden: tuple[tuple[int, ...], ...] = ()
    """Token ids of `params.bad_words`: the last of each may not follow the others."""
    timings: Timings = field(default_factory=Timings)
    eos_token_ids: tuple[int, ...] = ()
    """The model's own end tokens, unless the request ignores them, and the request's stop_token_ids."""
    constraint: Constraint | None = None
    """The state of `params.grammar`, while the request is alive."""
    route: Route | None = None
    """Whose drafts it should get."""
    drafter: str = ""
    """The member of the pool that it has, from its row on to its end; before, the one it would get."""
    cluster: str = ""
    """What a router took it for."""
    error: Exception | None = None
    """Why the request ended with finish_reason "error"."""
    ledger: Ledger | None = None
    """What `params.lossy` has cost so far."""

    def __post_init__(self) -> None:
        self.seed = self.params.seed if self.params.seed is not None else int.from_bytes(os.urandom(7), "little")

    @property
    def kind(self) -> RowKind:
        """How its drafts are made and judged: a seed's text is plain decoding's, whatever is drafted, so that its drafts are
        certain ones; a sampled request without a seed may have them drawn."""
        return "greedy" if self.params.is_greedy else "sampled" if self.params.seed is None else "seeded"

    @property
    def planned_kind(self) -> RowKind:
        """As a planner tells rows apart: drafts that stand by a lossy rule say nothing of those of others."""
        if self.params.lossy is None:
            return self.kind
        return "lossy" if self.params.is_greedy else "lossy sampled"

    def trim(self) -> None:
        """Forget what is known of tokens that are no longer in the answer."""
        del self.logprobs[self.num_output :]
        if self.ledger:
            self.ledger.keep(self.num_output)

    @property
    def shapes_logits(self) -> bool:
        """True if more than bias and penalties decides which tokens may come next: see `engine.shape`."""
        return bool(self.forbidden) or self.num_output < self.params.min_tokens

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    @property
    def num_remaining(self) -> int:
        """Tokens this sequence may still produce."""
        return self.params.max_tokens - self.num_output

    def most_drafted(self, num_drafted: int) -> int:
        """Drafts of a round at most, of a drafter that can make `num_drafted`: the last token is always the target's own."""
        most = num_drafted if self.params.max_drafted is None else min(num_drafted, self.params.max_drafted)
        return max(min(most, self.num_remaining - 1), 0)

    def accept(self, tokens: list[int]) -> list[int]:
        """Append tokens up to the first that ends the answer; returns those taken. All but the last stand in the cache."""
        for taken, token in enumerate(tokens, start=1):
            if token in self.eos_token_ids:
                self.finish_reason = "stop"
            elif taken == self.num_remaining:
                self.finish_reason = "length"
            if self.finish_reason:
                tokens = tokens[:taken]
                break
        self.tokens += tokens
        self.cached_len = len(self.tokens) - 1
        self.trim()
        if self.params.has_penalties:
            self.counts.update(tokens)
        return tokens


@dataclass(slots=True)
class Batch:
    """The running sequences of one round, in the order of every `_B` list and tensor of that round."""

    sequences: list[Sequence]
    takes_B: list[Take] | None = None
    """What each row drafts, as a planner chose; None leaves it to the drafter."""
    whole_blocks: bool = True
    """Whether a block drafter drafts its whole block, however few of its slots are asked for, so that drafts do not depend on
    who else drafts."""
    num_candidates: int = 0
    """Tokens of each slot that a drafter should name, so that trees can be made of them; 0: none."""
    foresees: bool = False
    """Whether drafters may guess with the numbers that the target's tokens are drawn with (`Rule.draws`)."""
    tells_said: bool = False
    """Whether `RoundStats.said_B` is wanted, where candidates are named."""

    @property
    def rows(self) -> list[int]:
        return [seq.row for seq in self.sequences]

    @property
    def cached_len_B(self) -> list[int]:
        return [seq.cached_len for seq in self.sequences]

    def draft_limits_B(self, num_drafted: int) -> list[int]:
        """No more drafts than were chosen or asked for, nor than the request may still produce besides the bonus token."""
        counts_B = [num_drafted] * len(self) if self.takes_B is None else [take.count for take in self.takes_B]
        return [min(count, seq.most_drafted(num_drafted)) for seq, count in zip(self.sequences, counts_B, strict=True)]

    def __len__(self) -> int:
        return len(self.sequences)


@dataclass(slots=True)
class DraftBlock:
    """What a drafter proposes for one round. Rows may draft fewer than K tokens: the rest of the row is padding."""

    tokens_B: list[list[int]]
    """Drafted tokens, a list a row; an empty list drafts nothing."""
    probs_B: list[Tensor | None]
    """For each row the distribution each draft was sampled from, [len(tokens), V], or None when the drafts are
    certain (argmax, n-gram): then the proposal is one-hot."""
    sure_B: list[list[float] | None] | None = None
    """For each row the log-probability of the drafter's most likely token at each slot, all known before any token is drawn;
    None for drafters that cannot say, and for rows that drafted nothing."""
    source_s: dict[str, float] = field(default_factory=dict)
    """Seconds that each source took; empty when that is not known."""
    candidates_B: list[Candidates | None] | None = None
    """What else is likely at each slot, of rows that may check a tree; None when that was not asked for."""
    trees_B: list[Tree | None] | None = None
    """The trees whose tokens `tokens_B` holds; None of a row whose tokens are a chain."""

    @classmethod
    def certain(cls, tokens_B: list[list[int]]) -> DraftBlock:
        return cls(tokens_B, [None] * len(tokens_B))

    def cut(self, widths_B: Iterable[int | Tree]) -> DraftBlock:
        """The first drafts of each row, or a tree in their place; what drafters said of them stays."""
        widths_B = list(widths_B)
        pairs = zip(self.tokens_B, widths_B, strict=True)
        if all(isinstance(width, int) and len(tokens) <= width for tokens, width in pairs):
            return self
        tokens_B, probs_B, trees_B = list[list[int]](), list["Tensor | None"](), list["Tree | None"]()
        for tokens, probs, width in zip(self.tokens_B, self.probs_B, widths_B, strict=True):
            tree = None if isinstance(width, int) else width
            tokens_B.append(tokens[:width] if isinstance(width, int) else width.tokens)
            probs_B.append(probs[: len(tokens_B[-1])] if probs is not None and tree is None and tokens_B[-1] else None)
            trees_B.append(tree)
        return DraftBlock(tokens_B, probs_B, self.sure_B, self.source_s, self.candidates_B, trees_B if any(trees_B) else None)


@dataclass(slots=True)
class Verdict:
    """Which drafts stand: `num_accepted_B` without the bonus token, which is `next_token_B`."""

    num_accepted_B: list[int]
    next_token_B: list[int]
    lossless: bool
    """Whether the rule that decided keeps the target's distribution."""
    kept_B: list[list[int] | None] | None = None
    """Of each row which drafts stand, root to leaf; None: its first `num_accepted`."""
    failed_B: list[str | None] | None = None
    """Of each row why it cannot go on: then nothing of it stands and its next token is -1. None: all rows are well."""


@dataclass(slots=True)
class RoundStats:
    """One round of one batch. `lossless` is False when a lossy rule or a mocked acceptance made it."""

    num_drafted_B: list[int]
    """Drafts that were proposed to be checked, of a tree those of its longest path."""
    num_accepted_B: list[int]
    lossless: bool
    draft_s: float = 0.0
    verify_s: float = 0.0
    host_s: float = 0.0
    source_B: list[str] = field(default_factory=list)
    """Whose drafts each row checked."""
    num_checked_B: list[int] = field(default_factory=list)
    """Drafts in the verify pass: fewer than proposed where a grammar refused some."""
    sure_B: list[list[float] | None] | None = None
    """As DraftBlock.sure_B, of all that was drafted."""
    source_s: dict[str, float] = field(default_factory=dict)
    """As DraftBlock.source_s."""
    drafter_B: list[str] = field(default_factory=list)
    """The member of the pool that each row has."""
    trees_B: list[Outcome | None] | None = None
    """What became of the tree of each row, None where it had none; None when no row had one."""
    said_B: list[Said | None] | None = None
    """What the target said beside the candidates of each row, None where none were named or the rule is not lossless."""
