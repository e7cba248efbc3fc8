"""What kind of request it is, in words that tell nothing of its text: clusters, by which drafters are chosen and counted.

A request's tag is its cluster. Without one it is taken for what its text looks like: script and language, and digests of the
template (its system prompt, or how a raw text begins), of the tools, and of the form that the answer must have. No PyTorch.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import Counter, OrderedDict
from collections.abc import Sequence
from itertools import islice

MOST_CLUSTERS = 32
"""Clusters at a time, besides the one of all other requests."""
OTHER, RAW = "other", "raw"
SEEN = 3
"""Requests of a kind before it is a cluster of its own: texts that come once never are."""
MOST_SEEN = 1024
"""Kinds that are counted and are no clusters yet."""
IDLE = 4096
"""A cluster that none of so many requests was of gives way to another."""
TEMPLATE, BEGINNING, LOOKED_AT = 256, 64, 1000
"""Characters of a system prompt, of a raw text's beginning, and of what language is guessed from."""

_WORDS = {
    "en": "the of and to is in that it for you with are",
    "de": "der die das und ist nicht ein eine zu den mit auf",
    "fr": "le les des est une et dans que pour pas qui vous",
    "es": "el los las una y es en que por para con del",
    "it": "il gli di che una per non sono con della è nel",
    "pt": "o os uma não que para com em é do da você",
    "nl": "de het een en van is niet dat voor met zijn op",
}
_LANGUAGES = {name: frozenset(words.split()) for name, words in _WORDS.items()}


def clusters_of(
    texts: Sequence[tuple[str, str]], *, tag: str | None = None, schema: str = "", tools: str = ""
) -> tuple[str, ...]:
    """Words for a request of these (role, text) messages, or of one text of the role RAW, the finest first; `schema` and
    `tools` as text of any form."""
    if tag:
        return (f"tag:{tag}",)
    system = "".join(text for role, text in texts if role in ("system", "developer"))
    others = [text for role, text in texts if role not in ("system", "developer", "assistant")]
    template = system[:TEMPLATE] or "".join(text[:BEGINNING] for role, text in texts[:1] if role == RAW)
    asked = [language(" ".join(others)[-LOOKED_AT:])]
    asked += [f"{letter}{digest(text)}" for letter, text in (("f", schema), ("t", tools)) if text]
    coarse = "-".join(asked)
    return (f"{coarse}-p{digest(re.sub('[0-9]+', '0', template))}", coarse) if template else (coarse,)


def digest(text: str) -> str:
    """Six letters that stand for a text."""
    return hashlib.blake2b(text.encode(errors="replace"), digest_size=3).hexdigest()


def label(cluster: str) -> str:
    """The cluster's name where anyone may read it: clients choose tags, so a digest stands for one."""
    return f"tag-{digest(cluster[4:])}" if cluster.startswith("tag:") else cluster


def language(text: str) -> str:
    """A language by its commonest words, else the script that most letters are of, else "symbols"."""
    words = Counter(re.findall(r"[^\W\d_]+", text.lower()))
    found = {name: sum(words[word] for word in common) for name, common in _LANGUAGES.items()}
    best = max(found, key=found.__getitem__)
    if found[best] >= max(2, words.total() // 12):
        return best
    letters = (character for character in text if character.isalpha())
    scripts = Counter(unicodedata.name(letter, "other").split(" ")[0].lower() for letter in islice(letters, 200))
    return scripts.most_common(1)[0][0] if scripts else "symbols"


class Clusters:
    """Which kinds of requests are told apart: those that came more than once, a bounded number of them."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}
        """Cluster -> the number of the latest request that was of it."""
        self._seen: OrderedDict[str, int] = OrderedDict()
        """Kind -> how many requests were of it."""
        self._num_requests = 0
        self.left: str | None = None
        """The one that gave way to the latest new one, if one had to."""

    def of(self, kinds: Sequence[str]) -> str:
        """The cluster of a request: the finest of its kinds that is one, or becomes one now, else OTHER."""
        self._num_requests, self.left = self._num_requests + 1, None
        for kind in kinds:
            if kind in self._known or self._joins(kind):
                self._known[kind] = self._num_requests
                return kind
        return OTHER

    def _joins(self, kind: str) -> bool:
        count = self._seen.pop(kind, 0) + 1
        if count >= SEEN:
            if len(self._known) < MOST_CLUSTERS:
                return True
            oldest = min(self._known, key=self._known.__getitem__)
            if self._num_requests - self._known[oldest] > IDLE:
                self.left = oldest
                del self._known[oldest]
                return True
        self._seen[kind] = count
        if len(self._seen) > MOST_SEEN:
            self._seen.popitem(last=False)
        return False
