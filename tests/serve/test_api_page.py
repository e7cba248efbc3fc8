"""The page at `/docs`: the server's own OpenAPI document as text, nothing from elsewhere. In Chromium where there is
one."""

from __future__ import annotations

import base64
import hashlib
import json
import re

import pytest
from browser_tabs import running_browser
from live_server import serving, talker

from paceline.serve.http.app import API_PAGE

pytestmark = pytest.mark.slow


def test_the_policy_names_the_script_and_nothing_is_fetched_from_elsewhere() -> None:
    page = API_PAGE.read_text(encoding="utf-8")
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    (named,) = re.findall(r"'sha256-([^']*)'", page)
    assert named == base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert not re.search(r"https?://|//[a-z]", page.lower()), "an address of somebody else's"
    with serving(talker()) as live:
        status, served, headers = live.request("GET", "/docs")
        assert (status, served.decode()) == (200, page)
        assert headers["content-type"].startswith("text/html")
        assert live.request("GET", "/redoc")[0] == 404


def test_every_field_of_a_request_is_described_and_every_example_is_answered() -> None:
    examples = json.loads(re.findall(r"const EXAMPLES = (.*?);\n", API_PAGE.read_text(encoding="utf-8"), re.DOTALL)[0])
    with serving(talker()) as live:
        document = live.request("GET", "/openapi.json")[1]
        schemas = document["components"]["schemas"]
        for path, methods in document["paths"].items():
            content = methods.get("post", {}).get("requestBody", {}).get("content", {})
            if not content:
                continue
            body = schemas[content["application/json"]["schema"]["$ref"].rpartition("/")[2]]
            for field, about in body["properties"].items():
                parts = [about, *about.get("anyOf", [])]
                described = [
                    part.get("description") or schemas.get(part.get("$ref", "")[21:], {}).get("description")
                    for part in parts
                ]
                assert any(described), f"{field} of {path}"
            if not path.startswith("/admin/"):  # closed to pages
                assert live.post(path, examples.pop(path))[0] == 200, path
        assert examples == {}


def test_it_shows_every_endpoint_and_field() -> None:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install -e .[dev]")
    with serving(talker()) as live, running_browser() as browser:
        page = browser.new_page(viewport={"width": 390, "height": 844})
        urls: list[str] = []
        errors: list[str] = []
        page.on("request", lambda request: urls.append(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.goto(live.url + "/docs")
        api.expect(page.get_by_role("heading", name="Schemas")).to_be_attached(timeout=30_000)
        text = page.locator("main").text_content()
        for each in (
            "/v1/chat/completions",
            "/tokenize",
            "/metrics",
            "guided_regex",
            "min_p",
            "x-paceline-tag",
            "ErrorAnswer",
        ):
            assert each in text
        chat = page.locator("details", has=page.get_by_label("Body of a request to /v1/chat/completions"))
        api.expect(chat).to_contain_text(f"curl {live.url}/v1/chat/completions -H 'Content-Type: application/json' -d")
        chat.get_by_role("textbox").fill(
            '{"messages": [{"role": "user", "content": "it\'s"}], "max_tokens": 3, "seed": 1, "ignore_eos": true}'
        )
        api.expect(chat).to_contain_text("it'\\''s")
        chat.get_by_role("button", name="Send").click()
        api.expect(chat.get_by_role("status")).to_contain_text('"completion_tokens": 3')
        page.get_by_text("/v1/completions", exact=True).click()
        field = page.get_by_role("row", name="min_p").first
        api.expect(field).to_contain_text("at most 1")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert errors == []
        assert urls and all(url.startswith((live.url, "data:")) for url in urls)
