"""The drafters of one engine: the one that new sequences get, those that older sequences began with, and lookups beside them.

A sequence keeps the drafter it began with until its end. `swap` gives new sequences another; the old one is let go when its
last sequence has ended. The target taps the layers of all of them; each is handed its own.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from paceline.draft.base import Drafter, Observed
from paceline.draft.ngram import NgramDrafter
from paceline.model.target import Target
from paceline.plan import Offer, Planner
from paceline.types import Batch, DraftBlock, Sequence, Take

LOOKUP_MATCH = 2
"""Tokens that a lookup beside a drafter must match: one that stood before says less than any drafter does."""


@dataclass(slots=True)
class Pool:
    """What the rows of a batch can draft from. `propose` and `observe` are a drafter's, for every row its own."""

    target: Target
    drafter: Drafter
    """The one that sequences get from now on."""
    lookups: NgramDrafter | None = None
    """N-gram lookups, offered beside the drafts of every drafter that has to compute them."""
    _leases: dict[int, Drafter] = field(default_factory=dict)
    """Row -> the drafter of the sequence that runs there."""
    _older: list[Drafter] = field(default_factory=list)
    """Drafters that only sequences have which began before the latest swap."""
    _held: dict[int, Drafter] = field(default_factory=dict)
    """Row -> whose keys and values of it stand in that drafter's cache, also after the sequence has ended."""

    def __post_init__(self) -> None:
        self.drafter.bind(self.target)
        self.target.set_taps(self.drafter.tap_layers)

    @property
    def has_own_threads(self) -> bool:
        return all(drafter.has_own_threads for drafter in self.drafters)

    @property
    def drafters(self) -> list[Drafter]:
        """The current one, then those that older sequences still have."""
        return [self.drafter, *self._older]

    def swap(self, drafter: Drafter) -> None:
        """Give `drafter` to sequences that start from now on. Raises DrafterMismatchError, and changes nothing then."""
        if drafter is self.drafter:
            return
        if drafter not in self._older:
            drafter.bind(self.target)
        self.drafter = drafter
        self._let_go()

    def start(self, seq: Sequence) -> None:
        """As Drafter.start; the sequence is given the current drafter."""
        self._leases[seq.row] = self.drafter
        self.drafter.start(seq)
        if beside := self._beside(self.drafter):
            beside.start(seq)

    def adopt(self, seq: Sequence, source: int, length: int) -> int:
        """As Drafter.adopt; nothing of a row that another drafter observed."""
        drafter = self._leases[seq.row]
        if drafter.tap_layers and self._held.get(source) is not drafter:
            return 0
        return drafter.adopt(seq, source, length)

    def drop(self, seq: Sequence) -> None:
        drafter = self._leases.pop(seq.row)
        drafter.drop(seq)
        if beside := self._beside(drafter):
            beside.drop(seq)
        if drafter is not self.drafter:
            self._let_go()

    def offers(self, seq: Sequence, planner: Planner, unwanted: AbstractSet[str] = frozenset()) -> list[Offer]:
        """What the sequence could check next but of `unwanted` sources, its drafter's own drafts first."""
        drafter, found = self._leases[seq.row], []
        for each in (drafter, self._beside(drafter)):
            if each is None or each.name in unwanted:
                continue
            most = seq.most_drafted(each.num_drafted)
            if not most or not each.can_draft(seq):
                continue
            if not each.is_at_hand:
                found.append(planner.offer(each.name, seq.kind, most))
            elif chance := each.chance(seq):
                found.append(Offer(each.name, (chance,) * most))
        return found

    def propose(self, batch: Batch) -> DraftBlock:
        """Drafts of the sources that `batch.takes_B` names, else of every sequence's own drafter."""
        takes_B = batch.takes_B or [Take(self._leases[row].name, 1 << 30) for row in batch.rows]
        block = DraftBlock.certain([[] for _ in takes_B])
        sure_B: list[list[float] | None] = [None] * len(takes_B)
        groups: dict[int, tuple[Drafter, list[int]]] = {}
        for place, (seq, take) in enumerate(zip(batch.sequences, takes_B, strict=True)):
            if take.count:
                drafter = self._leases[seq.row]
                source = drafter if take.source == drafter.name else self.lookups or drafter
                groups.setdefault(id(source), (source, []))[1].append(place)
        for drafter, places in groups.values():
            own = Batch([batch.sequences[place] for place in places], [takes_B[place] for place in places], batch.whole_blocks)
            drafted = drafter.propose(own)
            for index, place in enumerate(places):
                block.tokens_B[place], block.probs_B[place] = drafted.tokens_B[index], drafted.probs_B[index]
                sure_B[place] = drafted.sure_B[index] if drafted.sure_B else None
        block.sure_B = sure_B
        return block

    def observe(self, observed: list[Observed]) -> None:
        self._held |= {one.sequence.row: self._leases[one.sequence.row] for one in observed}
        for drafter in self.drafters:
            own = observed
            if self._older:
                own = [self._own_taps(drafter, one) for one in observed if self._held[one.sequence.row] is drafter]
            for each in (drafter, self._beside(drafter)):
                if each is not None and own:
                    each.observe(own)

    def _beside(self, drafter: Drafter) -> NgramDrafter | None:
        return self.lookups if drafter.num_drafted and not drafter.is_at_hand else None

    def _let_go(self) -> None:
        """Forget drafters without a sequence; tap what the others read, the current one's layers first and in its order."""
        leased = {id(drafter): drafter for drafter in self._leases.values()}
        self._older = [drafter for drafter in leased.values() if drafter is not self.drafter]
        self._held = {row: held for row, held in self._held.items() if held in self.drafters}
        self.target.set_taps(tuple(dict.fromkeys(layer for drafter in self.drafters for layer in drafter.tap_layers)))

    def _own_taps(self, drafter: Drafter, one: Observed) -> Observed:
        """With the features of the layers that this drafter reads, in its order."""
        if one.taps_TF is None or drafter.tap_layers == self.target.tap_layers:
            return one
        if not drafter.tap_layers:
            return Observed(one.sequence, one.start, one.count, None)
        taps_TLD = one.taps_TF[one.begin : one.begin + one.count].unflatten(-1, (len(self.target.tap_layers), -1))
        places = [self.target.tap_layers.index(layer) for layer in drafter.tap_layers]
        return Observed(one.sequence, one.start, one.count, taps_TLD[:, places].flatten(1))
