"""Types shared by all packages. Read this file first.

Shape suffixes: B rows (sequences), K drafted tokens, J = K+1 verified positions, T tokens of a pass, F tap features
(hidden states of the target that the drafter reads), V vocabulary. A *row* is a slot of the KV cache; a sequence keeps
its row from admission to its end. The last committed token of a running sequence (the *anchor*, or bonus token) is not
in the target's cache yet: `cached_len == len(tokens) - 1`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from paceline.lossy import Ledger
from paceline.plan.trees import Candidates, Outcome, TargetRanks, Tree
from paceline.sampling import GrammarKind as GrammarKind
from paceline.sampling import GrammarSpec as GrammarSpec
from paceline.sampling import SamplingParams as SamplingParams
from paceline.sampling import TokenLogprob as TokenLogprob
from paceline.turnaround import Timings

if TYPE_CHECKING:  # tensors are only named here, so that `import paceline.types` stays cheap
    from torch import Tensor

FinishReason = Literal["stop", "length", "abort", "error"]
RowKind = Literal["greedy", "sampled", "seeded", "lossy", "lossy sampled"]
NONE, LOOKUP, PREDICTION = "none", "ngram", "prediction"
"""Draft sources: no drafts, n-gram drafts (prompt lookup), and the answer that the request itself predicts."""
COPYING = frozenset({LOOKUP, PREDICTION})
"""Draft sources that copy from a text and so take almost no time."""
CANDIDATE = "candidate"
"""Name of a drafter that serves a trial request before it joins the pool."""


class Constraint(Protocol):
    """Interface of the grammar state of one answer; `engine.grammar.Grammar` implements it. `follow` returns the
    leading drafts that the grammar allows. `mask` sets the logits of forbidden tokens to -inf."""

    @property
    def has_failed(self) -> bool: ...

    def follow(self, seq: Sequence, drafts: list[int], corrects: bool = False) -> list[int]: ...

    def mask(self, seq: Sequence, logits_JV: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Route:
    """Selects one of the loaded drafters for a request: the one that the request names, or one that the router chooses
    by classes of similar requests."""

    drafter: str = ""
    """Name of the requested drafter; if empty, the router chooses, or without a router the first one is used."""
    clusters: tuple[str, ...] = ()
    """Classes of similar requests that the router may use, the most specific first."""


@dataclass(frozen=True, slots=True)
class Take:
    """Decision of the planner for one row (running sequence) in one round: which draft source to use, and how many of
    its drafts to verify."""

    source: str = NONE
    """Draft source: "dflash", "ngram", "prediction", ..., or "none"."""
    count: int = 0


@dataclass(frozen=True, slots=True)
class Offer:
    """Drafts from one source that a row (running sequence) could verify in the next round, with their estimated
    acceptance and cost. The planner chooses among a row's offers."""

    source: str
    """Draft source: "dflash", "ngram", ..."""
    chances: tuple[float, ...]
    """Probability that each draft is accepted if all drafts before it are, for each draft that the row may verify."""
    cost_s: float = 0.0
    """Seconds to compute the drafts for this row alone, without `each_s`; 0 if they are already computed."""
    each_s: float = 0.0
    """Seconds per draft of a drafter that drafts token by token; 0 for all others."""


@dataclass(slots=True)
class Row:
    """Input of the planner for one running sequence: its sampling mode, and the drafts that it could verify."""

    key: int
    """Unique number of the sequence."""
    kind: RowKind
    """Sampling mode; acceptance statistics are kept for each mode."""
    offers: list[Offer] = field(default_factory=list)
    """Drafts that the row could verify, one entry per draft source."""
    ask: Callable[[AbstractSet[str]], list[Offer]] | None = None
    """Function that computes `offers` on demand; its argument names draft sources to leave out."""

    def weigh(self, unwanted: AbstractSet[str] = frozenset()) -> list[Offer]:
        """Return the row's `offers`, from which the planner chooses, one for each draft source. If the field `ask` is
        set, it is called for them first, with `unwanted`: names of draft sources to leave out."""
        if self.ask:
            self.offers = self.ask(unwanted)
        return self.offers


class Round(NamedTuple):
    """Numbers of drafted and accepted tokens of one row in one round."""

    num_drafted: int
    """Drafted tokens."""
    num_accepted: int
    """Accepted drafts, without the bonus token."""
    source: str = NONE
    """Draft source: "dflash", "ngram", ..., or "none" for a round without drafts."""


@dataclass(slots=True, eq=False)
class Sequence:
    """State of one request in the engine: tokens, cache row, counters and timings."""

    request_id: int
    tokens: list[int]
    """Token ids of the prompt, then of the answer."""
    prompt_len: int
    """Number of prompt tokens."""
    params: SamplingParams
    row: int = -1
    """Slot in the KV cache; -1 while waiting."""
    cached_len: int = 0
    """Number of `tokens` whose keys and values are in the target's cache."""
    num_reused: int = 0
    """Prompt positions reused from another sequence's cache (prefix cache hits)."""
    seed: int = 0
    """Seed of the sampling noise: `params.seed`, or a random one."""
    finish_reason: FinishReason | None = None
    stopped_by: str = ""
    """The stop string that ended the text; a stop token is the last of `tokens` instead."""
    counts: Counter[int] = field(default_factory=Counter)
    """Occurrences of each token in the answer; counted only if penalties are on."""
    rounds: list[Round] = field(default_factory=list)
    """Drafted and accepted tokens of each decode round so far."""
    lossless: bool = True
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    """Log-probabilities of the prompt tokens except the first; empty unless `params.prompt_logprobs` is set."""
    forbidden: tuple[tuple[int, ...], ...] = ()
    """Token ids of the forbidden words (`params.bad_words`), one tuple per spelling: its last token must not follow its
    other tokens."""
    timings: Timings = field(default_factory=Timings)
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end the answer: the model's end tokens, unless `params.ignore_eos` is set, and
    `params.stop_token_ids`."""
    constraint: Constraint | None = None
    """State of `params.grammar` while the request is running."""
    route: Route | None = None
    """Requested drafter, or the request's classes for the router."""
    drafter: str = ""
    """Name of the drafter that the request uses, fixed when it gets a row; before that, the one it would get."""
    cluster: str = ""
    """Request class that the router assigned."""
    prediction: list[int] = field(default_factory=list)
    """Token ids of `params.prediction`, the answer that the client expects; empty without one."""
    error: Exception | None = None
    """Cause of finish_reason "error"."""
    ledger: Ledger | None = None
    """Record of how far the answer's tokens deviate from the target's distribution; only with `params.lossy`."""

    def __post_init__(self) -> None:
        self.seed = self.params.seed if self.params.seed is not None else int.from_bytes(os.urandom(7), "little")

    @property
    def kind(self) -> RowKind:
        """Sampling mode: "greedy", "seeded" (the client gave a seed) or "sampled". A seeded request gets deterministic
        drafts, so that its text equals that of plain decoding; a sampled one may get sampled drafts."""
        return "greedy" if self.params.is_greedy else "sampled" if self.params.seed is None else "seeded"

    @property
    def planned_kind(self) -> RowKind:
        """Sampling mode for which the planner counts acceptance. A request with a lossy rule has a mode of its own:
        "lossy" if it is greedy, otherwise "lossy sampled". Any other request has the mode `kind`."""
        if self.params.lossy is None:
            return self.kind
        return "lossy" if self.params.is_greedy else "lossy sampled"

    def cut(self, num_tokens: int) -> None:
        """Remove the last `num_tokens` tokens of the answer, those after a stop string. All of them are from the latest
        round; its number of accepted drafts is reduced accordingly."""
        if num_tokens:
            del self.tokens[-num_tokens:]
            self.rounds[-1] = self.rounds[-1]._replace(num_accepted=self.rounds[-1].num_accepted - num_tokens)
            self._trim()

    def _trim(self) -> None:
        """Remove the entries of `logprobs` and `ledger` for tokens that are not in the answer."""
        del self.logprobs[self.num_output :]
        if self.ledger:
            self.ledger.keep(self.num_output)

    @property
    def shapes_logits(self) -> bool:
        """True if `bad_words` or `min_tokens` restrict the next token (see `engine.shape`)."""
        return bool(self.forbidden) or self.num_output < self.params.min_tokens

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    @property
    def num_remaining(self) -> int:
        """Tokens that this sequence may still generate."""
        return self.params.max_tokens - self.num_output

    def most_drafted(self, num_drafted: int) -> int:
        """Return how many tokens may be drafted in the next round: the smallest of `num_drafted`, the request's own
        limit, and `num_remaining` - 1. The 1 is the token that the target adds in every round."""
        most = num_drafted if self.params.max_drafted is None else min(num_drafted, self.params.max_drafted)
        return max(min(most, self.num_remaining - 1), 0)

    def accept(self, tokens: list[int]) -> list[int]:
        """Append `tokens` to the answer, and return those that were appended. An end token or `max_tokens` ends the
        answer: later tokens are dropped and `finish_reason` is set. The last appended token is not in the target's
        cache yet."""
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
        self._trim()
        if self.params.has_penalties:
            self.counts.update(tokens)
        return tokens


@dataclass(slots=True)
class Batch:
    """The running sequences of one round. Lists whose names end in `_B` have one entry per sequence, in the order of
    `sequences`."""

    sequences: list[Sequence]
    takes_B: list[Take] | None = None
    """The planner's decision for each row; None if the drafter decides how many tokens to draft."""
    whole_blocks: bool = True
    """True if block drafters always compute their full block width, so that drafts are batch-invariant."""
    num_candidates: int = 0
    """Top tokens that the drafter returns for each draft position, to build trees from; 0 for none."""
    noise_aware: bool = False
    """True if drafters may use the random numbers that will sample the target's tokens (common random numbers)."""
    reports_target_ranks: bool = False
    """True to record the drafter's ranks of the target's tokens (`RoundStats.target_ranks_B`), for rows with
    candidates."""

    @property
    def rows(self) -> list[int]:
        return [seq.row for seq in self.sequences]

    @property
    def cached_len_B(self) -> list[int]:
        return [seq.cached_len for seq in self.sequences]

    def draft_limits_B(self, num_drafted: int) -> list[int]:
        """Return how many tokens each row may draft: the smaller of the planner's number (`takes_B`) and
        `Sequence.most_drafted(num_drafted)`. `num_drafted`: the drafter's maximum."""
        counts_B = [num_drafted] * len(self) if self.takes_B is None else [take.count for take in self.takes_B]
        return [min(count, seq.most_drafted(num_drafted)) for seq, count in zip(self.sequences, counts_B, strict=True)]

    def __len__(self) -> int:
        return len(self.sequences)


@dataclass(slots=True)
class DraftBlock:
    """The drafts of all rows in one round. K is the largest number of drafts of any row; other rows may have fewer."""

    tokens_B: list[list[int]]
    """Drafted token ids of each row; an empty list for a row without drafts."""
    probs_B: list[Tensor | None]
    """Distribution that each draft was sampled from, [len(tokens), V] for each row; None for deterministic drafts
    (argmax, n-gram)."""
    confidence_B: list[list[float] | None] | None = None
    """Log-probability of the drafter's top token at each draft position, for each row, computed before any token is
    sampled; None for drafters without probabilities and rows without drafts."""
    source_s: dict[str, float] = field(default_factory=dict)
    """Seconds spent by each draft source; empty if not measured."""
    candidates_B: list[Candidates | None] | None = None
    """Top tokens at each draft position of rows that may verify a tree; None unless `Batch.num_candidates` is set."""
    trees_B: list[Tree | None] | None = None
    """Draft trees whose tokens are in `tokens_B`; None for a row that drafted a chain."""

    @classmethod
    def certain(cls, tokens_B: list[list[int]]) -> DraftBlock:
        """Return a block of deterministic drafts. `tokens_B`: token ids for each row."""
        return cls(tokens_B, [None] * len(tokens_B))

    def cut(self, widths_B: Iterable[int | Tree]) -> DraftBlock:
        """Return a block with only the drafts that are to be verified. `widths_B` has for each row either the number of
        its first drafts to keep, or the tree to verify in place of them. `confidence_B` and `candidates_B` are not
        cut."""
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
        return DraftBlock(
            tokens_B, probs_B, self.confidence_B, self.source_s, self.candidates_B, trees_B if any(trees_B) else None
        )


@dataclass(slots=True)
class Verdict:
    """Result of verifying one round's drafts: the accepted drafts and the bonus token of each row."""

    num_accepted_B: list[int]
    """Accepted drafts of each row, without the bonus token."""
    next_token_B: list[int]
    """Bonus token of each row; -1 for a failed row."""
    lossless: bool
    """True if the verification rule keeps the target's distribution."""
    accepted_paths_B: list[list[int] | None] | None = None
    """Indices of the accepted drafts of each row with a tree, from root to leaf; None for a row with a chain."""
    failed_B: list[str | None] | None = None
    """Error message of each failed row, which accepts nothing; None if no row failed."""


@dataclass(slots=True)
class RoundStats:
    """Statistics of one decode round of the whole batch."""

    num_drafted_B: list[int]
    """Proposed drafts of each row; for a tree, those on its longest path."""
    num_accepted_B: list[int]
    """Accepted drafts of each row, without the bonus token."""
    lossless: bool
    """False if a lossy rule or mocked acceptance decided the round."""
    draft_s: float = 0.0
    """Seconds of drafting."""
    verify_s: float = 0.0
    """Seconds of the target's pass and of accepting or rejecting drafts."""
    host_s: float = 0.0
    """Seconds of all other work: committing tokens, updating the caches and the drafter."""
    source_B: list[str] = field(default_factory=list)
    """Draft source of each row."""
    num_checked_B: list[int] = field(default_factory=list)
    """Drafts of each row in the verify pass: fewer than proposed if the grammar rejected some."""
    confidence_B: list[list[float] | None] | None = None
    """Log-probability of the drafter's top token at each draft position, for each row; also for drafts that were not
    verified."""
    source_s: dict[str, float] = field(default_factory=dict)
    """Seconds spent by each draft source."""
    drafter_B: list[str] = field(default_factory=list)
    """Drafter (pool entry) of each row."""
    trees_B: list[Outcome | None] | None = None
    """Accepted path of each row's tree; None for rows without a tree, and if no row had one."""
    target_ranks_B: list[TargetRanks | None] | None = None
    """How the drafter's candidates ranked the target's tokens, for each row; None without candidates or with a lossy
    rule."""
