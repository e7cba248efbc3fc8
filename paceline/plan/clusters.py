"""Request clusters: classes of similar requests, for which a router chooses drafters. Imports no PyTorch.

A request's tag is its cluster. Without a tag, the cluster is derived from the language or script, and from digests of
the template (the system prompt, or how a raw text begins), the tools and the schema of the answer. No name of a cluster
reveals the request's text.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import Counter, OrderedDict
from collections.abc import Sequence
from itertools import islice

MOST_CLUSTERS = 32
"""Maximum number of clusters, not counting OTHER."""
OTHER, RAW = "other", "raw"
SEEN = 3
"""Requests of a class before it becomes a cluster; classes of unique texts never become one."""
MOST_SEEN = 1024
"""Maximum number of classes that are counted but not clusters yet."""
IDLE = 4096
"""A full table evicts a cluster that none of the latest 4096 requests belonged to."""
TEMPLATE, BEGINNING, LOOKED_AT = 256, 64, 1000
"""Characters used of a system prompt, of a raw text's beginning, and of the text whose language is detected."""

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
    """Returns the classes of a request, the most specific first. `texts`: its (role, text) messages, or one text with
    the role RAW; `schema` and `tools`: any text form."""
    if tag:
        return (f"tag:{tag}",)
    system = "".join(text for role, text in texts if role in ("system", "developer"))
    others = [text for role, text in texts if role not in ("system", "developer", "assistant")]
    template = system[:TEMPLATE] or "".join(text[:BEGINNING] for role, text in texts[:1] if role == RAW)
    parts = [language(" ".join(others)[-LOOKED_AT:])]
    parts += [f"{letter}{digest(text)}" for letter, text in (("f", schema), ("t", tools)) if text]
    coarse = "-".join(parts)
    return (f"{coarse}-p{digest(re.sub('[0-9]+', '0', template))}", coarse) if template else (coarse,)


def digest(text: str) -> str:
    """Returns six hexadecimal digits that identify a text."""
    return hashlib.blake2b(text.encode(errors="replace"), digest_size=3).hexdigest()


def label(cluster: str) -> str:
    """Returns the cluster's public name: a tag, which clients choose, is replaced by its digest."""
    return f"tag-{digest(cluster[4:])}" if cluster.startswith("tag:") else cluster


def language(text: str) -> str:
    """Returns the language with the most of its common words, else the script of most letters, else "symbols"."""
    words = Counter(re.findall(r"[^\W\d_]+", text.lower()))
    hits = {name: sum(words[word] for word in common) for name, common in _LANGUAGES.items()}
    best = max(hits, key=hits.__getitem__)
    if hits[best] >= max(2, words.total() // 12):
        return best
    letters = (character for character in text if character.isalpha())
    scripts = Counter(unicodedata.name(letter, "other").split(" ")[0].lower() for letter in islice(letters, 200))
    return scripts.most_common(1)[0][0] if scripts else "symbols"


class Clusters:
    """Assigns requests to a bounded set of clusters. A class becomes a cluster with its third request."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}
        """Cluster -> number of its latest request."""
        self._seen: OrderedDict[str, int] = OrderedDict()
        """Class that is not a cluster -> number of its requests so far."""
        self._num_requests = 0
        self.evicted: str | None = None
        """The cluster that the latest call of `of` evicted, if any."""

    def of(self, classes: Sequence[str]) -> str:
        """Returns a request's cluster: the first of its classes that is a cluster, or becomes one now, else OTHER."""
        self._num_requests, self.evicted = self._num_requests + 1, None
        for name in classes:
            if name in self._known or self._joins(name):
                self._known[name] = self._num_requests
                return name
        return OTHER

    def _joins(self, name: str) -> bool:
        """Counts one request of a class; True if the class becomes a cluster."""
        count = self._seen.pop(name, 0) + 1
        if count >= SEEN:
            if len(self._known) < MOST_CLUSTERS:
                return True
            oldest = min(self._known, key=self._known.__getitem__)
            if self._num_requests - self._known[oldest] > IDLE:
                self.evicted = oldest
                del self._known[oldest]
                return True
        self._seen[name] = count
        if len(self._seen) > MOST_SEEN:
            self._seen.popitem(last=False)
        return False
