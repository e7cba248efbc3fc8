"""A server that says what a test's prompt asks for, in the shape of `paceline serve`: enough to drive the page.

The last message decides: `slow` streams until the client leaves, `refuse` is a 429, `break` an error event after some
text, `cut` a stream without [DONE], `counts` tells how many tokens were drafted instead of which, `markup` answers in
HTML, `markdown` in all that Markdown has, `hostile` in Markdown that wants to do harm, `deep` in thousands of quotes in
one another, `differ` depends on speculation, `code` has a fenced block, `open` one that stops in its middle, `held`
tells tokens before their text, `pool` was drafted by the member "words" of a pool, `long` is STORY until it has tokens
enough for a verdict, `busy` the same beside plain decoding that cannot have been so slow; anything else gets STORY.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from paceline.report.statistics import FEWEST_TOKENS
from paceline.serve.http.app import MEDIA, PAGE_HEADERS, PAGES

PAGE = PAGES["/"]
Round = list[tuple[str, bool]]
"""One round's tokens: text, drafted and kept."""

STORY: list[Round] = [
    [("The", False)],
    [(" baker", True), (" sells", True), (" 24", False)],
    [(" loaves", True), (" in", True), (" the", True), (" morning", True), (" and", False)],
    [(" half", True), (" as", True), (" many", True), (",", False)],
    [(" 12", False)],
    [(",", True), (" in", True), (" the", True), (" afternoon", True), (".", True), ("\n\n", False)],
    [("24", False)],
    [(" +", True), (" 12", True), (" =", True), (" 36", False)],
    [(" loaves", True), (" a", True), (" day", True), (".", False)],
]
LOADING = "the model is still loading"
STORY_TEXT = "".join(text for tokens in STORY for text, _ in tokens)
STORY_TOKENS = sum(len(tokens) for tokens in STORY)
CODE: list[Round] = [
    [("Here", False)],
    [(" it", True), (" is", True), (":\n", False)],
    [("``", False)],
    [("`python", True), ("\ndef", True), (" twice", False)],
    [("(x):\n", True), ("    return", True), (" 2 * x\n```", False)],
    [("\nCall", True), (" it.", False)],
]
HELD: list[tuple[str, Round]] = [
    ("Caf", [("Caf", False)]),
    ("é a", [("\ufffd", True), ("\ufffd", True), (" au", False)]),
    ("u lait.", [("lait", True), (".", True), ("<|end|>", False)]),
]
"""Half characters, text held back, a space that a token alone does not have, a token without text."""
MARKUP = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script> <b>bold</b> &amp;"
MARKDOWN = """# Palindromes

A word is a **palindrome** if it *reads* the same ~~twice~~ backwards, as `level` does. See [the page](https://example.org/a?b=1)
or https://example.org/c, 3 &lt; 4.

1. Compare the ends:
   ```python
   word[0] == word[-1]
   ```
2. Go on inside
   - until one letter is left
   - [x] or none

> Case matters.
> So do spaces.

| word | answer |
|:-----|-------:|
| level | `True` |
| lever | False |

---

```js
const is = (word) => word === [...word].reverse().join("");
```
"""
HOSTILE = """[one](javascript:document.title='taken') [two](JaVaScRiPt:alert(1)) [three](data:text/html,<script>x()</script>)
[four](  java&#10;script:alert(1)) [five](/v1/models) [six](//evil.example/x) ![seven](https://evil.example/pixel.png)
<https://evil.example/"onmouseover=alert(1)> <a href="javascript:alert(1)" onclick="document.title='taken'">eight</a>

[nine][ref] <iframe src="https://evil.example/"></iframe>

[ref]: javascript:alert(1)

<script>document.title = 'taken'</script>

<style>body { display: none }</style>

```html"onload="alert(1)
<img src=x onerror="document.title='taken'">
```
| <img src=x onerror=alert(1)> | b |
|---|---|
| `<svg onload=alert(1)>` | **<svg/onload=alert(1)>** |
"""
PAUSE_S = 0.01
SOURCES = {"dflash": 27, "ngram": 2, "none": 3}
HISTOGRAM = [3, 5, 8, 12, 4]


def chunks_for(prompt: str, speculating: bool) -> Iterator[tuple[str, Round]]:
    """Text and tokens of each chunk."""
    if prompt == "held":
        yield from HELD
    else:
        yield from (("".join(text for text, _ in tokens), tokens) for tokens in rounds_for(prompt, speculating))


def rounds_for(prompt: str, speculating: bool) -> Iterator[Round]:
    if prompt == "slow":
        while True:
            yield [(" on", True), (" and", False)]
    if prompt in ("break", "cut"):
        yield [("Half", False)]
    elif prompt == "markup":
        yield [(MARKUP, False)]
        yield [(MARKUP, True)]
    elif prompt in ("markdown", "hostile"):
        text = MARKDOWN if prompt == "markdown" else HOSTILE
        yield from ([(text[at : at + 5], at % 15 > 0)] for at in range(0, len(text), 5))
    elif prompt == "deep":
        yield [(">" * 20000 + "x", False)]
    elif prompt == "differ":
        yield [("The same start, ", False)]
        yield [("with" if speculating else "without", False)]
    elif prompt == "code":
        yield from CODE
    elif prompt == "open":
        yield from ([(text, False)] for text in ("Before.\n\n", "``", "`py", "thon\nx = ", "24", "\n``", "`\nAfter."))
    else:
        rounds = STORY * (1 + FEWEST_TOKENS // STORY_TOKENS) if prompt in ("long", "busy") else STORY
        yield from rounds if speculating else [[(text, False)] for tokens in rounds for text, _ in tokens]


class Handler(BaseHTTPRequestHandler):
    server: PageServer

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        if file := PAGES.get(self.path):
            self.answer(200, MEDIA.get(file.suffix, "text/html"), file.read_bytes(), PAGE_HEADERS)
        elif self.path == "/v1/models" and self.server.num_loading:
            self.server.num_loading -= 1
            self.answer(503, "application/json", json.dumps({"error": {"message": LOADING}}).encode())
        elif self.path == "/v1/models":
            self.server.asked.append({"path": self.path, "auth": self.headers["Authorization"]})
            models = [
                {"id": name, "object": "model", "drafter": "dflash"} | self.server.told for name in self.server.models
            ]
            self.answer(200, "application/json", json.dumps({"object": "list", "data": models}).encode())
        else:
            self.answer(404, "application/json", b"{}")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        headers = {"auth": self.headers["Authorization"], "drafter": self.headers["X-Paceline-Drafter"]}
        self.server.asked.append({"path": self.path, **headers, **body})
        prompt = body["messages"][-1]["content"]
        if prompt == "refuse" and not self.server.lenient:
            error = json.dumps({"error": {"message": "16 requests are waiting", "type": "rate_limit_error"}})
            self.answer(429, "application/json", error.encode(), {"Retry-After": "2"})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        try:
            self.stream(prompt, body)
        except OSError:
            self.server.left.set()

    def answer(self, status: int, kind: str, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def stream(self, prompt: str, body: dict[str, Any]) -> None:
        self.event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
        count = 0
        speculating = body["speculate"] != "off"
        for text, tokens in chunks_for(prompt, speculating):
            time.sleep(PAUSE_S / 10 if prompt in ("markdown", "hostile") else PAUSE_S)
            if tokens[0][0] == "24":
                self.server.second_half.wait(60)
            count += len(tokens)
            pieces = [{"text": text, "drafted": drafted} for text, drafted in tokens]
            figures = {
                "drafted": sum(drafted for _, drafted in tokens),
                "tokens": len(tokens) if prompt == "counts" else pieces,
            }
            self.event({"choices": [choice(text)], "paceline": figures})
        if prompt == "break" and not self.server.lenient:
            self.event({"error": {"message": "The worker stopped; ask again."}})
            return
        if prompt == "cut" and not self.server.lenient:
            return
        timings = {"queue_s": 0.0002, "prefill_s": 0.012, "draft_s": 0.02, "verify_s": 0.11, "host_s": 0.004}
        if prompt in ("long", "busy"):
            timings["verify_s"] *= count / STORY_TOKENS
        plain_s = 0.5 if prompt == "busy" else 0.05
        timings |= {"plain_s": plain_s, "num_plain": 5} if speculating else {"plain_s": 0.134, "num_plain": count - 1}
        self.event({"choices": [choice("", "stop")], "paceline": {"drafted": 0, "tokens": [], **timings}})
        last: dict[str, Any] = {
            "model": body["model"],
            "choices": [],
            "usage": {"prompt_tokens": 9, "completion_tokens": count},
        }
        if speculating:
            spec = {"mean_acceptance_length": 3.28, "draft_acceptance_rate": 0.57, "acceptance_histogram": HISTOGRAM}
            spec["rounds_by_source"] = {source: {"num_rounds": rounds} for source, rounds in SOURCES.items()}
            spec["drafter"] = "words" if prompt == "pool" else "dflash"
            last["metrics"] = {"speculative_decoding": spec}
        self.event(last)
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, data: dict[str, Any]) -> None:
        """In two pieces, as a network may deliver it, and with a comment such as servers send to keep a line open."""
        raw = f": ping\n\ndata: {json.dumps(data)}\n\n".encode()
        self.wfile.write(raw[:30])
        self.wfile.flush()
        self.wfile.write(raw[30:])
        self.wfile.flush()


def choice(text: str, reason: str | None = None) -> dict[str, Any]:
    return {"index": 0, "delta": {"content": text} if text else {}, "finish_reason": reason}


class PageServer(ThreadingHTTPServer):
    """Serves the page and canned answers at `url`; `asked` holds what came in, `left` is set when a client hung up."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/"
        self.asked: list[dict[str, Any]] = []
        self.left = threading.Event()
        self.models = ["smol-135m"]
        self.told: dict[str, Any] = {}
        """Further fields of each model in /v1/models."""
        self.num_loading = 0
        """Requests of /v1/models that are answered as by a server which still loads its model."""
        self.second_half = threading.Event()
        """While clear, STORY and `open` stop in their middle."""
        self.second_half.set()
        self.lenient = False
        """True lets `refuse`, `break` and `cut` succeed: what a retry meets."""

    def chats(self) -> list[dict[str, Any]]:
        return [each for each in self.asked if each["path"] == "/v1/chat/completions"]
