"""Which rows belong together, and on which side they go: nothing that is trained on may tell of what is asked in evals.

A conversation is its turns, whose prompts begin with one another, and all answers to one prompt. Conversations whose first
prompts are nearly the same are a family; families go to one side whole, chosen by a hash of the family, whatever comes in which
order. What is stored stays where it is: a new row that ties the two sides together is left out.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence

from paceline.data.near_copies import Near, common_pieces, pieces_of
from paceline.data.prompts import digest
from paceline.loop.store.config import SplitConfig

SIDES = ("train", "evals")
BETWEEN = "between"
"""In place of a side: what would tie both together."""


class Groups:
    """Numbers that are joined (union-find); the smallest of a group names it."""

    def __init__(self, size: int) -> None:
        self._above = list(range(size))

    def of(self, number: int) -> int:
        while self._above[number] != number:
            self._above[number] = self._above[self._above[number]]
            number = self._above[number]
        return number

    def join(self, one: int, two: int) -> None:
        low, high = sorted((self.of(one), self.of(two)))
        self._above[high] = low


def first_prompts(prompts: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Of each prompt the shortest of all that it begins with: what its conversation began with."""
    first: dict[tuple[int, ...], tuple[int, ...]] = {}
    chain: list[tuple[int, ...]] = []
    for prompt in sorted(set(prompts)):  # a prompt stands right behind those that it begins with
        while chain and prompt[: len(chain[-1])] != chain[-1]:
            chain.pop()
        first[prompt] = chain[0] if chain else prompt
        chain.append(prompt)
    return [first[prompt] for prompt in prompts]


def families(firsts: Sequence[tuple[int, ...]], related: float) -> Groups:
    """Of conversations, by their first prompts."""
    groups, pieces = Groups(len(firsts)), [pieces_of(first) for first in firsts]
    near = Near(related, common_pieces(pieces))
    for number, own in enumerate(pieces):
        for other in near.like(own):
            groups.join(number, other)
        near.add(number, own)
    return groups


def side_of(name: str, config: SplitConfig) -> str:
    """By a hash of the name and the seed."""
    drawn = hashlib.blake2b(f"{config.split_seed}/{name}".encode(), digest_size=8).digest()
    return SIDES[int.from_bytes(drawn, "big") < config.evals_share * 2**64]


def sides(
    prompts: Sequence[tuple[int, ...]], known: Sequence[str | None], config: SplitConfig
) -> tuple[list[str], list[str], int]:
    """(conversation of each prompt, its side or BETWEEN, number of families); `known`: the sides of those that are stored."""
    firsts = first_prompts(prompts)
    unique = list(dict.fromkeys(firsts))
    place = {first: number for number, first in enumerate(unique)}
    groups = families(unique, config.related)
    members: dict[int, set[str]] = defaultdict(set)
    names: dict[int, str] = {}
    for first, side in zip(firsts, known, strict=True):
        group = groups.of(place[first])
        names[group] = min(names.get(group, "~"), digest(first))
        if side is not None:
            members[group].add(side)
    chosen: dict[int, str] = {}
    for group, name in names.items():
        stored = members[group]
        chosen[group] = side_of(name, config) if not stored else stored.pop() if len(stored) == 1 else BETWEEN
    return (
        [digest(first) for first in firsts],
        [side or chosen[groups.of(place[first])] for first, side in zip(firsts, known, strict=True)],
        len(names),
    )
