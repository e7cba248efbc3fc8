"""A server that is paceline's, vLLM's or SGLang's as far as `loop/adapt/servers/deploy.py` can tell."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from loopback import Handler, answering


class FakeServer:
    """Counts what is asked of it; tests set what it answers."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, dict[str, Any]]] = []
        self.members: dict[str, str] = {"general": "default"}
        """Name -> drafter."""
        self.drained: set[str] = set()
        self.clusters: dict[str, str | None] = {"tickets": None}
        """Label -> the member that it is sent to."""
        self.refuses: dict[str, tuple[int, dict[str, Any]]] = {}
        """Path -> status and answer, in place of what is usual."""
        self.keys: list[str | None] = []
        self.is_well = True
        self.is_away = False
        """Hangs up without an answer."""
        self.loses: set[str] = set()
        """Paths whose answer is lost once the request has been carried out."""
        self.metrics = ""
        self.url = ""

    def count(self, rounds: int, accepted: int, tokens: int, errors: int = 0, ended: int | None = None) -> None:
        """Set vLLM's counters, and paceline's; `ended`: requests that ended well [default: one in twenty rounds]."""
        ended = rounds // 20 if ended is None else ended
        self.metrics = (
            f'vllm:spec_decode_num_drafts_total{{model_name="m",engine="0"}} {rounds}\n'
            f'vllm:spec_decode_num_accepted_tokens_total{{model_name="m",engine="0"}} {accepted}\n'
            f'vllm:generation_tokens_total{{model_name="m",engine="0"}} {tokens}\n'
            f'vllm:request_success_total{{model_name="m",engine="0",finished_reason="stop"}} {ended}\n'
            f'vllm:request_success_total{{model_name="m",engine="0",finished_reason="error"}} {errors}\n'
        )

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, str]:
        self.calls.append((method, path, body))
        if path in self.refuses:
            status, content = self.refuses[path]
            return status, json.dumps(content)
        if path == "/health":
            return (200, "") if self.is_well else (503, "")
        if path == "/metrics":
            return 200, self.metrics
        if path.startswith("/admin/"):
            return self._admin(method, path.split("/")[2:], body)
        if path == "/update_weights_from_disk":
            return 200, json.dumps({"success": True})
        return 200, "{}"

    def _admin(self, method: str, words: list[str], body: dict[str, Any]) -> tuple[int, str]:
        """`serve/http/app.py`, as far as it is used."""
        match method, words:
            case "GET", ["drafters"]:
                rows = [
                    {
                        "name": name,
                        "drafter": drafter,
                        "state": "draining" if name in self.drained else "ready",
                        "rows": 0,
                    }
                    for name, drafter in self.members.items()
                ]
                clusters = [{"label": label, "pinned": name} for label, name in self.clusters.items()]
                return 200, json.dumps({"drafters": rows, "clusters": clusters})
            case "POST", ["drafters", name]:
                self.members[name] = body["drafter"]
            case "POST", ["drafters", name, "drain"]:
                self.drained.add(name)
            case "DELETE", ["drafters", name]:
                self.drained.remove(name)
                del self.members[name]
            case "POST" | "DELETE", ["clusters", name] if name in self.clusters:
                self.clusters[name] = body.get("drafter")
            case _:
                return 404, "{}"
        return 200, "{}"


@contextmanager
def serving(fake: FakeServer, port: int = 0) -> Iterator[FakeServer]:
    """On this port of loopback, or a free one, from a thread."""

    class Asked(Handler):
        def _any(self) -> None:
            body = self.body()
            if fake.is_away:
                self.close_connection = True
                return
            fake.keys.append(self.headers.get("Authorization"))
            status, text = fake.answer(self.command, self.path, body)
            if self.path in fake.loses:
                self.close_connection = True
                return
            self.answer(status, text.encode())

        do_GET = do_POST = do_DELETE = _any

    with answering(Asked, port) as fake.url:
        yield fake


class Vllm(FakeServer):
    """One whose counters begin anew when it is restarted; `restarting` is its restart command."""

    def __init__(self) -> None:
        super().__init__()
        self.drafters: list[str] = []
        self.is_empty_at_first = False
        """Has no counters after a restart."""
        self.folder = ""
        """Folder that it was given last, if it has the route of `paceline.interop.draft_weights`."""

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, str]:
        if path == "/restart":
            self.drafters.append(body["drafter"])
            self.count(0, 0, 0, 0, 0)
            self.metrics = "# nothing yet\n" if self.is_empty_at_first else self.metrics
            return 200, "{}"
        if path == "/paceline/draft-weights" and self.folder:
            self.folder = body.get("folder", self.folder)
            return 200, json.dumps({"folder": self.folder, "problem": None})
        return super().answer(method, path, body)


RESTART = """
import json, os, urllib.request
told = json.dumps({"drafter": os.environ["PACELINE_DRAFTER"]}).encode()
urllib.request.urlopen(urllib.request.Request(os.environ["PACELINE_SERVER"] + "/restart", told))
"""


def restarting(folder: Path) -> str:
    """A command that restarts a `Vllm`."""
    script = folder / "restart.py"
    script.write_text(RESTART)
    return f"{sys.executable} {script}"


def restart_command(folder: Path, status: int = 0) -> str:
    """Notes what it was told, and ends with this status."""
    script = folder / "restart.py"
    script.write_text(
        "import json, os, sys\n"
        f"told = {{key: value for key, value in os.environ.items() if key.startswith('PACELINE_')}}\n"
        f"open({str(folder / 'told.jsonl')!r}, 'a').write(json.dumps(told) + chr(10))\n"
        f"print('no such service', file=sys.stderr) if {status} else None\n"
        f"sys.exit({status})\n"
    )
    return f"{sys.executable} {script}"


def recorded_environments(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "told.jsonl").read_text().splitlines()]


def counted(three: list[Vllm], minute: int, *rates: int) -> None:
    """So many accepted drafts a round in the 500 rounds of every minute, on each server."""
    for server, rate in zip(three, rates, strict=True):
        rounds = 500 * minute
        server.count(rounds, rate * rounds, (1 + rate) * rounds, ended=20 * minute)
