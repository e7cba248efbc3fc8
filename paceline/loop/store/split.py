"""Groups rows into conversations and assigns them to training or evals, without overlap between the two.

A conversation is a series of rows in which each prompt begins with the earlier one. Conversations with nearly equal
first prompts form a family. All rows of a family go to the same side, chosen by a hash: the order of arrival has no
effect. Stored rows keep their side: a new row that is related to rows on both sides is left out."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence

from paceline.data.near_copies import Near, common_pieces, pieces_of
from paceline.data.prompts import digest
from paceline.loop.store.config import SplitConfig

SIDES = ("train", "evals")
BETWEEN = "between"
"""Result instead of a side, for rows that are related to stored rows on both sides."""


class Groups:
    """Union-find structure over the numbers 0 to size - 1; the smallest number of a group represents it."""

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
    """Returns, for each prompt (token ids), the first prompt of its conversation: the shortest of `prompts` with which
    the prompt begins. It may be the prompt itself. Each prompt of a conversation begins with the earlier ones."""
    first: dict[tuple[int, ...], tuple[int, ...]] = {}
    chain: list[tuple[int, ...]] = []
    for prompt in sorted(set(prompts)):  # a prompt sorts directly after its prefixes
        while chain and prompt[: len(chain[-1])] != chain[-1]:
            chain.pop()
        first[prompt] = chain[0] if chain else prompt
        chain.append(prompt)
    return [first[prompt] for prompt in prompts]


def families(firsts: Sequence[tuple[int, ...]], related: float) -> Groups:
    """Groups similar conversations. `firsts`: the first prompt (token ids) of each conversation. Two conversations are
    similar if the Jaccard similarity of their first prompts' 5-token shingles is above `related` (0 to 1).
    Conversations that are connected by a chain of similar ones are in one group. Returns groups of indices of
    `firsts`."""
    groups, pieces = Groups(len(firsts)), list(map(pieces_of, firsts))
    near = Near(related, common_pieces(pieces))
    for number, own in enumerate(pieces):
        for other in near.like(own):
            groups.join(number, other)
        near.add(number, own)
    return groups


def side_of(name: str, config: SplitConfig) -> str:
    """Chooses the side of a family (conversations with similar first prompts): "train" or "evals". `name`: identifier
    of the family. A hash of `name` and `config.split_seed` decides; the share `config.evals_share` of all families gets
    "evals"."""
    drawn = hashlib.blake2b(f"{config.split_seed}/{name}".encode(), digest_size=8).digest()
    return SIDES[int.from_bytes(drawn, "big") < config.evals_share * 2**64]


def sides(
    prompts: Sequence[tuple[int, ...]], known: Sequence[str | None], config: SplitConfig
) -> tuple[list[str], list[str]]:
    """Assigns each prompt to a side, "train" or "evals". Returns two lists with one entry per prompt: the id of its
    conversation, and its side.

    `known`: for each prompt its side if it is stored, else None. A stored prompt keeps its side. A new prompt gets the
    side of the stored prompts in its family (conversations with similar first prompts). If the family has stored
    prompts on both sides, the result is "between", and the prompt must not be added to the store. If it has no stored
    prompt, `side_of` chooses."""
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
    result = [side or chosen[groups.of(place[first])] for first, side in zip(firsts, known, strict=True)]
    return [digest(first) for first in firsts], result
