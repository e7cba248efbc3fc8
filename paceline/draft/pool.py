"""The drafters of one engine: named members that sequences get, those that older sequences began with, and lookups beside them.

A sequence is given a member with its row and keeps its drafter until its end, whatever becomes of the member meanwhile: `put`
gives later ones another under the same name, `remove` gives it to none; the old one is let go when its last sequence has ended.
"none" is always a member. The target taps the layers of all of them; each is handed its own.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from paceline.draft.base import Drafter, NoDrafter, Observed
from paceline.draft.ngram import NgramDrafter
from paceline.draft.tapped import TappedDrafter
from paceline.errors import ConfigError
from paceline.model.target import Target
from paceline.plan.planner import Offer, Planner
from paceline.plan.trees import Candidates
from paceline.types import LOOKUP, NONE, Batch, DraftBlock, Sequence, Take

LOOKUP_MATCH = 2
"""Tokens that a lookup beside a drafter must match: one that stood before says less than any drafter does."""


@dataclass(slots=True)
class Member:
    """A drafter that sequences may get, by its name."""

    name: str
    drafter: Drafter
    is_open: bool = True
    """Whether new sequences get it."""


class Pool:
    """What the rows of a batch can draft from. `propose` and `observe` are a drafter's, for every row its own."""

    def __init__(self, target: Target, drafters: Drafter | Mapping[str, Drafter], lookups: NgramDrafter | None = None) -> None:
        """Members by name, or one that has its drafter's name. The first is given to sequences that ask for none. `lookups`
        are offered beside the drafts of every drafter that has to compute them."""
        self.target, self.lookups = target, lookups
        self.members: dict[str, Member] = {}
        """In their order; "none" is no entry unless it was given."""
        self._plain = Member(NONE, NoDrafter())
        self._leases: dict[int, Member] = {}
        """Row -> what the sequence has that runs there."""
        self._held: dict[int, Drafter] = {}
        """Row -> whose keys and values of it stand in that drafter's cache, also after the sequence has ended."""
        self.drafters: list[Drafter] = []
        """The first member's, the others', then those that only older sequences have."""
        if isinstance(drafters, Drafter):
            drafters.bind(target)
            self.members[drafters.name] = Member(drafters.name, drafters)
        else:
            for name, drafter in drafters.items():
                self._join(name, drafter)
        self._let_go()

    @property
    def has_own_threads(self) -> bool:
        return all(drafter.has_own_threads for drafter in self.drafters)

    @property
    def default(self) -> Member:
        """What a sequence gets that asks for no member, or for one that takes no more: the first that is open."""
        return next((member for member in self.members.values() if member.is_open), self._plain)

    @property
    def drafter(self) -> Drafter:
        return self.default.drafter

    @property
    def open(self) -> list[str]:
        """Names that new sequences may get, the default first, "none" last."""
        return list(dict.fromkeys([*(name for name, member in self.members.items() if member.is_open), NONE]))

    @property
    def older(self) -> list[Member]:
        """Those that are members no more but have sequences."""
        return list({id(member): member for member in self._leases.values() if not self._is_here(member)}.values())

    def num_rows(self, member: Member) -> int:
        """How many sequences have it."""
        return sum(leased is member for leased in self._leases.copy().values())

    @property
    def num_plain(self) -> int:
        """How many sequences have "none"."""
        return self.num_rows(self._plain)

    def member(self, name: str) -> Member:
        """Raises ConfigError when there is none of this name."""
        if name not in self.members:
            raise ConfigError(f"there is no drafter {name!r} here: there are {', '.join([*self.members, NONE])}")
        return self.members[name]

    def swap(self, drafter: Drafter) -> None:
        """Put `drafter` in the default's place, under its own name, and in the place of any other of this name. Raises
        DrafterMismatchError, and changes nothing then."""
        old = self.default
        if drafter is old.drafter:
            return
        if drafter not in self.drafters:
            drafter.bind(self.target)
        new = self.members.get(drafter.name)
        if new is None or new.drafter is not drafter:
            new = Member(drafter.name, drafter)
        new.is_open = True
        others = {name: member for name, member in self.members.items() if member is not old and name != new.name}
        self.members = {new.name: new} | others
        self._let_go()

    def put(self, name: str, drafter: Drafter) -> None:
        """Make `drafter` a member, in the place of any other of this name. Raises DrafterMismatchError, or ConfigError
        for a name that means something else, and changes nothing then."""
        self._join(name, drafter)
        self._let_go()

    def _join(self, name: str, drafter: Drafter) -> None:
        if (
            name in (NONE, LOOKUP) and drafter.num_drafted and not drafter.is_at_hand
        ):  # its drafts would pass for lookups, or for none
            raise ConfigError(f"a drafter cannot be the member {name!r}, which means lookups or no drafter: rename it")
        if drafter not in self.drafters:
            drafter.bind(self.target)
        if not drafter.is_at_hand:
            drafter.name = name  # so that a planner tells members apart that are of one kind
        self.members[name] = Member(name, drafter)

    def admit(self, name: str, is_open: bool) -> None:
        """Let new sequences get the member, or no more. Raises ConfigError when there is none of this name."""
        self.member(name).is_open = is_open
        self._let_go()

    def remove(self, name: str) -> None:
        """Give the member to no sequence any more, and forget it. Raises ConfigError when there is none of this name."""
        del self.members[self.member(name).name]
        self._let_go()

    def start(self, seq: Sequence, guest: Drafter | None = None) -> None:
        """As Drafter.start; the sequence is given the member that `seq.drafter` names, if it takes more, else the default; or
        `guest`, which is bound to the target already and is let go with the sequence."""
        member = self.members.get(seq.drafter) or (self._plain if seq.drafter == NONE else self.default)
        member = Member(guest.name, guest) if guest else member if member.is_open else self.default
        self._leases[seq.row], seq.drafter = member, member.name
        if guest:
            self._let_go()
        member.drafter.start(seq)
        if beside := self._beside(member.drafter):
            beside.start(seq)

    def adopt(self, seq: Sequence, source: int, length: int) -> int:
        """As Drafter.adopt; nothing of a row that another drafter observed."""
        drafter = self._leases[seq.row].drafter
        if drafter.tap_layers and self._held.get(source) is not drafter:
            return 0
        return drafter.adopt(seq, source, length)

    def drop(self, seq: Sequence) -> None:
        member = self._leases.pop(seq.row)
        member.drafter.drop(seq)
        if beside := self._beside(member.drafter):
            beside.drop(seq)
        if not self._is_here(member):
            self._let_go()

    def offers(self, seq: Sequence, planner: Planner, unwanted: AbstractSet[str] = frozenset()) -> list[Offer]:
        """The drafts that the sequence could have checked next, those of its own drafter first, none of `unwanted` sources."""
        drafter, found = self._leases[seq.row].drafter, []
        for each in (drafter, self._beside(drafter)):
            if each is None or each.name in unwanted:
                continue
            most = seq.most_drafted(each.num_drafted)
            if not most or not each.can_draft(seq):
                continue
            if not each.is_at_hand:
                found.append(planner.offer(each.name, seq.planned_kind, most, is_stepwise=each.is_stepwise))
            elif chance := each.chance(seq):
                found.append(Offer(each.name, (chance,) * most))
        return found

    def propose(self, batch: Batch) -> DraftBlock:
        """Drafts of the sources that `batch.takes_B` names, else of every sequence's own drafter."""
        takes_B = batch.takes_B or [Take(self._leases[row].drafter.name, 1 << 30) for row in batch.rows]
        block = DraftBlock.certain([[] for _ in takes_B])
        sure_B: list[list[float] | None] = [None] * len(takes_B)
        candidates_B: list[Candidates | None] = [None] * len(takes_B)
        groups: dict[int, tuple[Drafter, list[int]]] = {}
        for place, (seq, take) in enumerate(zip(batch.sequences, takes_B, strict=True)):
            if take.count:
                drafter = self._leases[seq.row].drafter
                source = drafter if take.source == drafter.name else self.lookups or drafter
                groups.setdefault(id(source), (source, []))[1].append(place)
        for drafter, places in groups.values():
            began, recording_s = time.perf_counter(), self.target.recording_s
            rows, takes = [batch.sequences[place] for place in places], [takes_B[place] for place in places]
            own = Batch(rows, takes, batch.whole_blocks, batch.num_candidates, batch.foresees)
            drafted = drafter.propose(own)
            for index, place in enumerate(places):
                block.tokens_B[place], block.probs_B[place] = drafted.tokens_B[index], drafted.probs_B[index]
                sure_B[place] = drafted.sure_B[index] if drafted.sure_B else None
                candidates_B[place] = drafted.candidates_B[index] if drafted.candidates_B else None
            spent = time.perf_counter() - began - (self.target.recording_s - recording_s)
            block.source_s[drafter.name] = block.source_s.get(drafter.name, 0.0) + spent
        block.sure_B = sure_B
        block.candidates_B = candidates_B if batch.num_candidates else None
        return block

    def observe(self, observed: list[Observed]) -> None:
        groups: dict[int, tuple[Drafter, list[Observed]]] = {}
        for one in observed:
            row = one.sequence.row
            drafter = self._held[row] = self._leases[row].drafter
            groups.setdefault(id(drafter), (drafter, []))[1].append(self._own_taps(drafter, one))
        for drafter, own in groups.values():
            for each in (drafter, self._beside(drafter)):
                if each is not None:
                    each.observe(own)

    def drafter_of(self, seq: Sequence) -> Drafter:
        """The drafter that the sequence has, which has a row."""
        return self._leases[seq.row].drafter

    def advance(self, drafter: TappedDrafter, observed: list[Observed]) -> None:
        """As `observe`, of positions that a recorded round has written into the cache of `drafter`, which all of them have."""
        drafter.advance([one.sequence.row for one in observed], [one.start + one.count for one in observed])
        self._held |= {one.sequence.row: drafter for one in observed}
        if lookups := self._beside(drafter):
            lookups.observe(observed)

    def _beside(self, drafter: Drafter) -> NgramDrafter | None:
        return self.lookups if drafter.num_drafted and not drafter.is_at_hand else None

    def _is_here(self, member: Member) -> bool:
        return member is self._plain or self.members.get(member.name) is member

    def _let_go(self) -> None:
        """Forget drafters without a sequence; tap what the others read, the default's layers first and in its order."""
        every = [self.default, *self.members.values(), *self.older]
        self.drafters = list({id(member.drafter): member.drafter for member in every}.values())
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
