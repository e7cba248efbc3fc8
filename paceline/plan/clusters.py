"""Request clusters: groups of similar requests, for which a router chooses drafters. Imports no PyTorch.

A request's classes are strings made from its properties: the language or script of its text, with digests of the
template (the system prompt, or the beginning of a raw text), of the tools and of the answer's schema. A tag that the
client gives replaces all of these. A class that occurs often becomes a cluster. No name of a cluster reveals the
request's text.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import Counter, OrderedDict
from collections.abc import Sequence
from itertools import islice

MOST_CLUSTERS = 32
"""Maximum number of clusters, not counting OTHER, which holds the requests without a cluster."""
OTHER, RAW = "other", "raw"
SEEN = 3
"""Number of requests with the same class after which the class becomes a cluster; rare classes never become one."""
MOST_SEEN = 1024
"""Maximum number of classes that are counted although they are not clusters yet."""
IDLE = 4096
"""A full table replaces a cluster by a new one only if none of the latest 4096 requests belonged to it."""
TEMPLATE, BEGINNING, LOOKED_AT = 256, 64, 1000
"""Numbers of characters used: the first of a system prompt, the first of a raw text, the last for the language."""

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
    """Returns a request's classes: strings that describe its language, template, tools and answer schema, the most
    specific first. They reveal nothing of its text. A client's `tag` replaces them all.

    `texts`: the request's messages as (role, text), or one raw text with the role RAW. `schema`, `tools`: answer schema
    and tools of the request as text, "" for a request without them; similar requests must have the same text.
    """
    if tag:
        return (f"tag:{tag}",)
    system = "".join(text for role, text in texts if role in ("system", "developer"))
    others = [text for role, text in texts if role not in ("system", "developer", "assistant")]
    template = system[:TEMPLATE] or "".join(text[:BEGINNING] for role, text in texts[:1] if role == RAW)
    parts = [language(" ".join(others)[-LOOKED_AT:])]
    parts += [f"{letter}{digest(text)}" for letter, text in (("f", schema), ("t", tools)) if text]
    coarse = "-".join(parts)
    # Digits become 0, so that a date in the system prompt does not make a new cluster every day.
    return (f"{coarse}-p{digest(re.sub('[0-9]+', '0', template))}", coarse) if template else (coarse,)


def digest(text: str) -> str:
    """Returns six hexadecimal digits that identify a text."""
    return hashlib.blake2b(text.encode(errors="replace"), digest_size=3).hexdigest()


def label(cluster: str) -> str:
    """Returns the name under which metrics and traces show a cluster. It is the cluster's own name, except that a
    client's tag is replaced by "tag-" and six hexadecimal digits (`digest`), so that the tag stays private."""
    return f"tag-{digest(cluster[4:])}" if cluster.startswith("tag:") else cluster


def is_tag(name: str) -> bool:
    """True if `name` is the public name of a cluster that a client's tag defines: "tag-" and six hexadecimal digits,
    made by `label`."""
    return re.fullmatch("tag-[0-9a-f]{6}", name) is not None


def language(text: str) -> str:
    """Returns the language of a text, such as "en", recognised by its common words. A text with too few of these gets
    the script of most of its letters, such as "latin"; a text without letters gets "symbols"."""
    words = Counter(re.findall(r"[^\W\d_]+", text.lower()))
    hits = {name: sum(words[word] for word in common) for name, common in _LANGUAGES.items()}
    best = max(hits, key=hits.__getitem__)
    if hits[best] >= max(2, words.total() // 12):
        return best
    letters = (character for character in text if character.isalpha())
    scripts = Counter(unicodedata.name(letter, "other").split(" ")[0].lower() for letter in islice(letters, 200))
    return scripts.most_common(1)[0][0] if scripts else "symbols"


class Clusters:
    """Assigns requests to at most 32 clusters (MOST_CLUSTERS) of similar requests, by their classes (`clusters_of`).

    A class becomes a cluster at its third request (SEEN). Earlier requests belong to a less specific cluster, or to
    "other". If there are 32 clusters already, the class has to wait until one of them was unused for 4096 requests
    (IDLE), and then replaces the longest unused one.
    """

    def __init__(self) -> None:
        self._known: dict[str, int] = {}
        """Cluster -> number of its latest request."""
        self._seen: OrderedDict[str, int] = OrderedDict()
        """Class that is not a cluster -> number of its requests so far."""
        self._num_requests = 0
        self.evicted: str | None = None
        """Name of the cluster that the latest call of `of` removed from the full table, if any."""

    def of(self, classes: Sequence[str]) -> str:
        """Returns a request's cluster: the first of its classes that is a cluster or becomes one now, else "other"."""
        self._num_requests, self.evicted = self._num_requests + 1, None
        for name in classes:
            if name in self._known or self._joins(name):
                self._known[name] = self._num_requests
                return name
        return OTHER

    def _joins(self, name: str) -> bool:
        """Counts one request of a class; True if the class becomes a cluster."""
        count = self._seen.pop(name, 0) + 1  # goes to the end below: the class unseen for longest is dropped
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
