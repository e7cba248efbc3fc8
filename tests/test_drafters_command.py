"""`paceline drafters` beside a server."""

from __future__ import annotations

import json
from typing import Any

import pytest
from live_server import Live, serving

from paceline.commands.drafters import drafters_drain, drafters_list, drafters_load, drafters_unload
from paceline.errors import ConfigError

pytestmark = pytest.mark.slow


def last_line(capsys: pytest.CaptureFixture[str]) -> tuple[list[dict[str, Any]], str]:
    shown = capsys.readouterr()
    return json.loads(shown.out.splitlines()[-1])["drafters"], shown.err


def test_a_table_and_a_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as live:
        drafters_load(drafter="words=ngram", server=live.url)
        rows, table = last_line(capsys)
        assert [row["name"] for row in rows] == ["none", "words"] and "words is loaded" in table
        memory = {"memory_bytes", "weight_bytes", "cache_bytes"}
        assert set(rows[0]) == {"name", "drafter", "state", "rows", "tokens_per_round", "tokens_per_s", *memory}
        assert "tokens/round" in table and "0 MB" in table
        drafters_drain(name="words", server=live.url)
        assert last_line(capsys)[0][1]["state"] == "draining"
        drafters_unload(name="words", server=live.url)
        assert [row["name"] for row in last_line(capsys)[0]] == ["none"]
        drafters_list(server=live.url)
        assert [row["name"] for row in last_line(capsys)[0]] == ["none"]


def test_what_the_server_refuses_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    def refused(live: Live, words: str, **options: Any) -> None:
        with pytest.raises(ConfigError, match=words):
            drafters_load(server=live.url, **options)

    with serving() as live:
        refused(live, "no drafter '/no/such/folder'", drafter="tickets=/no/such/folder")
        refused(live, "give the drafter a name, as in tickets=runs/tickets", drafter="runs/tickets")
        with pytest.raises(ConfigError, match="there is no drafter 'b c' here"):
            drafters_drain(name="b c", server=live.url)
    with serving(admin_keys=("secret",)) as live:
        refused(live, "needs the admin key", drafter="words=ngram")
        drafters_load(drafter="words=ngram", server=live.url, admin_key="secret")
    with pytest.raises(ConfigError, match="does not answer"):
        drafters_list(server=live.url)
    with pytest.raises(ConfigError, match="--server 'nowhere' is no address"):
        drafters_list(server="nowhere")


def test_the_key_comes_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PACELINE_ADMIN_KEY", "secret")
    with serving(admin_keys=("secret",)) as live:
        drafters_list(server=live.url)
    assert last_line(capsys)[0]
