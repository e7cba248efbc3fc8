"""What kind of request it is: told by its tag or its looks, in a bounded number of clusters, none of which tells its
text."""

from __future__ import annotations

import pytest

from paceline.plan.clusters import IDLE, MOST_CLUSTERS, MOST_SEEN, OTHER, SEEN, Clusters, clusters_of, label, language

ASKED = [("system", "You answer tickets. Today is 2026-11-22."), ("user", "My lamp was not delivered, where is it?")]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("How many apples are in the basket that she has?", "en"),
        ("Wie viele Äpfel sind in dem Korb, und ist das genug für die Kinder?", "de"),
        ("Combien de pommes y a-t-il dans le panier et est-ce que les enfants en ont?", "fr"),
        ("Сколько яблок в корзине?", "cyrillic"),
        ("篮子里有多少个苹果", "cjk"),
        ("籠の中にリンゴはいくつありますか", "hiragana"),
        ("apples? pears!", "latin"),
        ("1 + 2 = ?", "symbols"),
        ("", "symbols"),
    ],
)
def test_language_or_script(text: str, name: str) -> None:
    assert language(text) == name


def test_a_tag_is_the_cluster_and_stands_in_no_label() -> None:
    assert clusters_of(ASKED, tag="user-4711") == ("tag:user-4711",)
    assert "4711" not in label("tag:user-4711") and label("tag:a") != label("tag:b")
    assert label("en-p123456") == "en-p123456"


def test_template_form_and_tools_tell_requests_apart_and_other_words_do_not() -> None:
    plain = clusters_of(ASKED)
    assert plain[-1] == "en" and plain[0].startswith("en-p")
    other_day = [
        ("system", "You answer tickets. Today is 2027-01-05."),
        ("user", "The mug is broken and it was a gift."),
    ]
    assert clusters_of(other_day) == plain
    assert clusters_of([("system", "You are a pirate."), ASKED[1]])[0] != plain[0]
    with_form, with_tools = clusters_of(ASKED, schema='{"type": "object"}'), clusters_of(ASKED, tools="look_up")
    assert len({plain, with_form, with_tools, clusters_of(ASKED, schema='{"type": "array"}')}) == 4
    assert with_form[-1].startswith("en-f") and with_tools[-1].startswith("en-t")
    assert not any("ticket" in word for word in (*plain, *with_form))


def test_of_a_raw_text_the_beginning_is_the_template_and_of_a_question_it_is_not() -> None:
    """Questions that are asked again and again would each be a cluster."""
    first, second = (
        [("raw", f"Translate into French, and only that, please, the following text: {text}")] for text in "ab"
    )
    assert clusters_of(first)[0] == clusters_of(second)[0] != clusters_of([("raw", "What is it that the cat has?")])[0]
    assert clusters_of([("user", "What is it that the cat has?")]) == ("en",) and clusters_of([]) == ("symbols",)


def test_a_kind_is_a_cluster_when_it_has_come_a_few_times() -> None:
    clusters = Clusters()
    assert [clusters.of(("fine", "coarse")) for _ in range(SEEN)] == [OTHER] * (SEEN - 1) + ["fine"]
    assert [clusters.of((f"once{number}", "coarse")) for number in range(3)] == ["coarse"] * 3
    assert clusters.of(()) == OTHER


def test_a_client_that_makes_up_kinds_makes_no_more_clusters_than_there_may_be() -> None:
    clusters = Clusters()
    assigned = {clusters.of((f"tag:{number // SEEN}",)) for number in range(20 * MOST_SEEN)}
    assert len(assigned) <= MOST_CLUSTERS + 1 + 20 * MOST_SEEN // IDLE * MOST_CLUSTERS
    assert len(clusters._known) == MOST_CLUSTERS and len(clusters._seen) <= MOST_SEEN


def test_the_cluster_that_nobody_asks_for_gives_way() -> None:
    clusters = Clusters()
    for number in range(MOST_CLUSTERS * SEEN):
        clusters.of((f"kind{number // SEEN}",))
    for number in range(IDLE + MOST_CLUSTERS * SEEN + 1):
        clusters.of((f"kind{1 + number % (MOST_CLUSTERS - 1)}",))
    assert [clusters.of(("new",)) for _ in range(SEEN)][-1] == "new"
    assert clusters.evicted == "kind0"
    assert clusters.of(("kind0",)) == OTHER and clusters.evicted is None
