"""The drafters of one engine, by name. Each sequence has one of them; prompt lookup and the request's own prediction
may draft in addition.

A sequence is assigned a drafter together with its cache row, and keeps it until its end. `put` replaces the drafter of
a name for later sequences only, and `remove` stops assigning it; a replaced drafter is released when its last sequence
has ended. "none" is always in the pool. The target taps (returns the hidden states of) the layers of all drafters; each
drafter receives those of its own layers.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from paceline.draft.base import Drafter, NoDrafter, Observed
from paceline.draft.ngram import NgramDrafter, PredictionDrafter
from paceline.draft.tapped import TappedDrafter
from paceline.errors import ConfigError, DrafterMismatchError, shown
from paceline.model.sharing import is_as_read, sharing
from paceline.model.target import Target
from paceline.plan.planner import Offer, Planner
from paceline.plan.trees import Candidates
from paceline.types import LOOKUP, NONE, PREDICTION, Batch, DraftBlock, Sequence, Take


class Memory(NamedTuple):
    """Bytes of memory that drafters occupy: weights and KV caches. Memory that several drafters share is counted
    once."""

    weight_bytes: int
    cache_bytes: int


def memory_alone(drafter: Drafter, target: Target) -> Memory:
    """Returns the bytes that the drafter would hold if it shared nothing with other drafters."""
    return Memory(drafter.weight_bytes, drafter.cache_bytes(target))


def memory_of(drafters: Iterable[Drafter], target: Target) -> Memory:
    """Returns the bytes that these drafters occupy together, with shared memory counted once."""
    each = list(drafters)
    used = sum(size * times for drafter in each for size, times in drafter.held.values())
    held = {key: size for drafter in each for key, (size, _) in drafter.held.items()}
    caches = {drafter.cache_shape(target): drafter.cache_bytes(target) for drafter in each}
    return Memory(sum(drafter.weight_bytes for drafter in each) - used + sum(held.values()), sum(caches.values()))


def bind(drafter: Drafter, target: Target, *, keeps: bool = False, is_alone: bool = False) -> None:
    """Bind a drafter of a pool to the target. Drafters bound to the same target share weights with equal values, and KV
    caches of equal shape, to save memory.

    `keeps`: first load memory-mapped weights into memory. `is_alone`: skip the search for equal weights, because the
    pool has no other drafter. Raises DrafterMismatchError if the drafter does not fit the target, ContextLengthError if
    it is a language model with a shorter context than the target.
    """
    with sharing(target, has_weights=bool(drafter.source) and not is_alone) as held:
        if keeps:
            drafter.keep_weights()
        try:
            drafter.bind(target)
        except DrafterMismatchError as error:
            raise DrafterMismatchError(f"{drafter.source or drafter.name}: {error}") from error
    if held:  # empty if it was bound to this cache before
        as_read = {key: size for key, size in drafter.held.items() if is_as_read(key)}
        drafter.held = as_read | held


LOOKUP_MATCH = 2
"""Minimum matching tokens for prompt lookup in addition to another drafter, which predicts more than shorter
matches."""


@dataclass(slots=True)
class Member:
    """An entry of the pool: a drafter, its name, and whether it is open to new sequences."""

    name: str
    drafter: Drafter
    is_open: bool = True
    """True if new sequences may be assigned to it."""

    @property
    def is_ready(self) -> bool:
        """True if new sequences may be assigned to this drafter (`is_open`) and its weights are in memory."""
        return self.is_open and not self.drafter.is_released


class Residency(Protocol):
    """The members of `engine.residency.Residency` that a pool and its metrics use; that class documents them."""

    loads: Counter[str]
    releases: Counter[str]
    misses: Counter[str]

    def turn(self, pool: Pool) -> None: ...

    def started(self, pool: Pool, name: str, drafter: str) -> None: ...


class Pool:
    """The drafters of an engine, by name. Each sequence has one of them, which drafts for it until it ends."""

    def __init__(
        self,
        target: Target,
        drafters: Drafter | Mapping[str, Drafter],
        lookups: NgramDrafter | None = None,
        predictions: PredictionDrafter | None = None,
    ) -> None:
        """`drafters`: drafters by name, or one under its own name. The first is the default. `lookups` (prompt lookup)
        drafts in addition to drafters that run a network, `predictions` in addition to any drafter but "none"."""
        self.target, self.lookups, self.predictions = target, lookups, predictions
        self.residency: Residency | None = None
        """If set, limits how many drafters are in memory."""
        self.members: dict[str, Member] = {}
        """Pool entries by name, in the given order. "none" is in it only if it was given."""
        self._plain = Member(NONE, NoDrafter())
        self._leases: dict[int, Member] = {}
        """Row -> pool entry of the sequence in that row."""
        self._held: dict[int, Drafter] = {}
        """Row -> drafter whose cache holds keys and values of that row, also after its sequence has ended."""
        self.drafters: list[Drafter] = []
        """All drafters in use: the default, the other entries, then replaced ones that still have sequences."""
        if isinstance(drafters, Drafter):
            bind(drafters, target, is_alone=True)
            self.members[drafters.name] = Member(drafters.name, drafters)
        else:
            for name, drafter in drafters.items():
                self._join(name, drafter, is_alone=len(drafters) == 1)
        self._let_go()

    @property
    def has_own_threads(self) -> bool:
        return all(drafter.has_own_threads for drafter in self.drafters)

    @property
    def default(self) -> Member:
        """The pool entry for sequences that name no drafter, or one that is unknown or not ready: the first entry that
        is ready (`Member.is_ready`), or "none" (plain decoding) if no entry is."""
        return next((member for member in self.members.values() if member.is_ready), self._plain)

    @property
    def drafter(self) -> Drafter:
        return self.default.drafter

    @property
    def open(self) -> list[str]:
        """Names of the drafters that a request may choose, in the pool's order; "none" (plain decoding) is always
        included. A drafter whose weights are not in memory is included; a drafter that failed to load is omitted until
        its next attempt."""
        names = [name for name, each in self.members.items() if each.is_open and not each.drafter.is_failed]
        return list(dict.fromkeys([*names, NONE]))

    @property
    def older(self) -> list[Member]:
        """Entries that were replaced or removed, but are still used by running sequences."""
        return list({id(member): member for member in self._leases.values() if not self._is_here(member)}.values())

    def num_rows(self, member: Member) -> int:
        """Returns the number of sequences assigned to this pool entry."""
        # A copy: metrics are read by another thread.
        return sum(leased is member for leased in self._leases.copy().values())

    @property
    def num_plain(self) -> int:
        """Number of sequences without a drafter ("none")."""
        return self.num_rows(self._plain)

    def member(self, name: str) -> Member:
        """Returns the pool entry with this name. Raises ConfigError for an unknown name."""
        if name not in self.members:
            if name == NONE:
                raise ConfigError("none, plain decoding, is always available: name another drafter")
            raise ConfigError(f"there is no drafter {name!r} here: there are {', '.join([*self.members, NONE])}")
        return self.members[name]

    def swap(self, drafter: Drafter) -> None:
        """Make `drafter` the default, under the name that it has (`drafter.name`). The old default and any entry with
        this name leave the pool; running sequences keep their drafters. Raises DrafterMismatchError and changes nothing
        if `drafter` does not fit the target."""
        old = self.default
        if drafter is old.drafter:
            return
        if drafter not in self.drafters:
            bind(drafter, self.target)
        new = self.members.get(drafter.name)
        if new is None or new.drafter is not drafter:
            new = Member(drafter.name, drafter)
        new.is_open = True
        others = {name: member for name, member in self.members.items() if member is not old and name != new.name}
        self.members = {new.name: new} | others
        self._let_go()

    def put(self, name: str, drafter: Drafter) -> None:
        """Add `drafter` to the pool under `name`; an entry with this name is replaced. Raises DrafterMismatchError if
        the drafter does not fit the target, ConfigError if `name` is reserved; the pool is then unchanged."""
        self._join(name, drafter)
        self._let_go()

    def _join(self, name: str, drafter: Drafter, *, is_alone: bool = False) -> None:
        if not isinstance(drafter, Drafter):
            raise ConfigError(f"a drafter must be a Drafter, not {shown(drafter)}: make one with make_drafter()")
        # Under these names its drafts would be counted as copies of a text, or as plain decoding.
        if name in (NONE, LOOKUP, PREDICTION) and drafter.num_drafted and not drafter.is_instant:
            meanings = "lookups, a request's prediction or no drafter"
            raise ConfigError(f"a drafter cannot be the member {name!r}, which means {meanings}: rename it")
        if drafter not in self.drafters:
            bind(drafter, self.target, is_alone=is_alone)
        if not drafter.is_instant:
            drafter.name = name  # so that the planner distinguishes drafters of one method
        self.members[name] = Member(name, drafter)

    def exchange(self, name: str, drafter: Drafter) -> None:
        """Replace the drafter object of an entry by `drafter`. Used to release a drafter's weights from memory, by a
        placeholder without weights, and to load them again. Raises ConfigError for an unknown name."""
        is_open = self.member(name).is_open
        self._join(name, drafter)
        self.members[name].is_open = is_open
        self._let_go()

    def admit(self, name: str, is_open: bool) -> None:
        """Set whether new sequences may get this drafter (`is_open`). Raises ConfigError for an unknown name."""
        self.member(name).is_open = is_open
        self._let_go()

    def remove(self, name: str) -> None:
        """Remove a drafter; running sequences keep it. Raises ConfigError for an unknown name."""
        del self.members[self.member(name).name]
        self._let_go()

    def start(self, seq: Sequence, trial_drafter: Drafter | None = None) -> None:
        """Assign a drafter to the new sequence `seq`, store its name in `seq.drafter`, and reset the drafter's state
        for the row. The first of these is assigned:

        - `trial_drafter`, if given: a bound drafter outside the pool, to be tried on this sequence only
        - the drafter that `seq.drafter` names, if it is ready (`Member.is_ready`)
        - the default
        """
        name = seq.drafter
        if self.residency:
            self.residency.turn(self)
        member = self.members.get(seq.drafter) or (self._plain if seq.drafter == NONE else self.default)
        member = (
            Member(trial_drafter.name, trial_drafter) if trial_drafter else member if member.is_ready else self.default
        )
        self._leases[seq.row], seq.drafter = member, member.name
        if self._held.get(seq.row) is not member.drafter:
            self._held.pop(seq.row, None)  # drafters may share a cache, so this row is the new drafter's from now on
        if self.residency and not trial_drafter:
            self.residency.started(self, name, member.name)
        if trial_drafter:
            self._let_go()
        for source in self._sources(member.drafter):
            source.start(seq)

    def adopt(self, seq: Sequence, source: int, length: int) -> int:
        """Let the sequence's drafter reuse the cached state of row `source`, whose first `length` tokens equal those of
        `seq`. Returns the number of leading positions that were taken over.

        The number is 0 if the drafter reads the target's hidden states and row `source` was served by another drafter.
        """
        drafter = self._leases[seq.row].drafter
        if drafter.tap_layers and self._held.get(source) is not drafter:
            return 0
        self._held[seq.row] = drafter
        return drafter.adopt(seq, source, length)

    def drop(self, seq: Sequence) -> None:
        member = self._leases.pop(seq.row, self._plain)
        try:
            for source in self._sources(member.drafter):
                source.drop(seq)
        finally:
            if not self._is_here(member):
                self._let_go()

    def offers(self, seq: Sequence, planner: Planner, unwanted: AbstractSet[str] = frozenset()) -> list[Offer]:
        """Returns what each source could draft in the sequence's next round, with predicted acceptance and cost
        (`Offer`). The sources are the request's prediction, its drafter, and prompt lookup. Nothing is drafted yet.

        `planner` makes the predictions, except for `is_instant` drafters, which predict their own acceptance at cost 0.
        A source that cannot draft now is omitted. `unwanted`: names of drafters to omit.
        """
        offers = []
        for source in self._sources(self._leases[seq.row].drafter):
            if source.name in unwanted:
                continue
            most = seq.most_drafted(source.num_drafted)
            if not most or not source.can_draft(seq):
                continue
            if not source.is_instant:
                offers.append(planner.offer(source.name, seq.planned_kind, most, is_stepwise=source.is_stepwise))
            elif chances := source.chances(seq, most):
                offers.append(Offer(source.name, chances))
        return offers

    def propose(self, batch: Batch) -> DraftBlock:
        """Drafts for each sequence; returns the drafts of all rows. `batch.takes_B` names for each row the source of
        its drafts, such as its drafter or prompt lookup. If it is None or empty, every sequence's own drafter
        drafts."""
        takes_B = batch.takes_B or [Take(self._leases[row].drafter.name, 1 << 30) for row in batch.rows]
        block = DraftBlock.certain([[] for _ in takes_B])
        confidence_B: list[list[float] | None] = [None] * len(takes_B)
        candidates_B: list[Candidates | None] = [None] * len(takes_B)
        groups: dict[int, tuple[Drafter, list[int]]] = {}
        for place, (seq, take) in enumerate(zip(batch.sequences, takes_B, strict=True)):
            if take.count:
                drafter = self._leases[seq.row].drafter
                source = next((each for each in self._sources(drafter) if each.name == take.source), drafter)
                groups.setdefault(id(source), (source, []))[1].append(place)
        for drafter, places in groups.values():
            began, recording_s = time.perf_counter(), self.target.recording_s
            rows, takes = [batch.sequences[place] for place in places], [takes_B[place] for place in places]
            own = Batch(rows, takes, batch.whole_blocks, batch.num_candidates, batch.noise_aware)
            drafted = drafter.propose(own)
            for index, place in enumerate(places):
                block.tokens_B[place], block.probs_B[place] = drafted.tokens_B[index], drafted.probs_B[index]
                confidence_B[place] = drafted.confidence_B[index] if drafted.confidence_B else None
                candidates = candidates_B[place] = drafted.candidates_B[index] if drafted.candidates_B else None
                if candidates and (limit := rows[index].params.max_drafted) is not None:
                    candidates.most = min(candidates.most, limit)
            spent = time.perf_counter() - began - (self.target.recording_s - recording_s)
            block.source_s[drafter.name] = block.source_s.get(drafter.name, 0.0) + spent
        block.confidence_B = confidence_B
        block.candidates_B = candidates_B if batch.num_candidates else None
        return block

    def observe(self, observed: list[Observed]) -> None:
        groups: dict[int, tuple[Drafter, list[Observed]]] = {}
        for one in observed:
            row = one.sequence.row
            drafter = self._held[row] = self._leases[row].drafter
            groups.setdefault(id(drafter), (drafter, []))[1].append(self._own_taps(drafter, one))
        for drafter, own in groups.values():
            for each in self._sources(drafter):
                each.observe(own)

    def drafter_of(self, seq: Sequence) -> Drafter:
        """Returns the drafter assigned to a sequence, which must have a cache row."""
        return self._leases[seq.row].drafter

    def advance(self, drafter: TappedDrafter, observed: list[Observed]) -> None:
        """Update the drafters after a decode round that ran as one CUDA graph. The graph has already written the new
        positions' keys and values into the cache of `drafter`, so only the cache's lengths are set here. Prompt lookup
        and predictions get the new tokens. `observed`: the new positions, of sequences that all have this drafter."""
        drafter.advance([one.sequence.row for one in observed], [one.start + one.count for one in observed])
        self._held |= {one.sequence.row: drafter for one in observed}
        for each in self._sources(drafter):
            if each is not drafter:
                each.observe(observed)

    def _sources(self, drafter: Drafter) -> list[Drafter]:
        """Returns the drafters that may draft for a sequence with this drafter; for "none" only itself."""
        if not drafter.num_drafted:
            return [drafter]
        lookups = None if drafter.is_instant else self.lookups
        return [each for each in (self.predictions, drafter, lookups) if each]

    def _is_here(self, member: Member) -> bool:
        return member is self._plain or self.members.get(member.name) is member

    def _let_go(self) -> None:
        """Release drafters without sequences, and set the target's taps: the default's layers first, in its order."""
        every = [self.default, *self.members.values(), *self.older]
        self.drafters = list({id(member.drafter): member.drafter for member in every}.values())
        # A released drafter must not stay in memory.
        self._held = {row: held for row, held in self._held.items() if held in self.drafters}
        self.target.set_taps(tuple(dict.fromkeys(layer for drafter in self.drafters for layer in drafter.tap_layers)))

    def _own_taps(self, drafter: Drafter, one: Observed) -> Observed:
        """A copy of `one` with the features of this drafter's layers, in its order."""
        if one.taps_TF is None or drafter.tap_layers == self.target.tap_layers:
            return one
        if not drafter.tap_layers:
            return Observed(one.sequence, one.start, one.count, None)
        taps_TLD = one.taps_TF[one.begin : one.begin + one.count].unflatten(-1, (len(self.target.tap_layers), -1))
        places = [self.target.tap_layers.index(layer) for layer in drafter.tap_layers]
        return Observed(one.sequence, one.start, one.count, taps_TLD[:, places].flatten(1))
