"""Gateways in front of two regions of replicas and those of a tag: nginx and vLLM's router as they run, Envoy's
configuration by its schema."""

from __future__ import annotations

import contextlib
import http.client
import importlib
import json
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from loopback import Handler, free_port

pytestmark = pytest.mark.slow
GATEWAY = Path(__file__).parents[2] / "deploy" / "gateway"
TYPES = (
    "envoy.extensions.filters.network.http_connection_manager.v3.http_connection_manager_pb2",
    "envoy.extensions.filters.http.router.v3.router_pb2",
    "envoy.extensions.clusters.aggregate.v3.cluster_pb2",
    "envoy.extensions.retry.host.previous_hosts.v3.previous_hosts_pb2",
)
"""Types that the configuration holds as Any: protobuf must know them."""


@pytest.fixture
def render(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(GATEWAY))
    return importlib.import_module("render")


class Replica(ThreadingHTTPServer):
    """Answers as a server would; tests set how."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.status, self.seen, self.go_on = 200, list[str](), threading.Event()
        self.headers = list[dict[str, str]]()
        self.go_on.set()
        self.name = f"127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class _Answers(Handler):
    server: Replica
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else a body waits for the acknowledgement of its headers

    def do_GET(self) -> None:
        models = {"object": "list", "data": [{"id": "m", "object": "model"}]}
        self.answer(200, json.dumps(models).encode(), "application/json")

    def do_POST(self) -> None:
        body = self.body()
        self.server.seen.append(self.headers.get("x-session-id") or "")
        self.server.headers.append(dict(self.headers))
        if self.server.status != 200 or not body.get("stream"):
            self.answer(self.server.status, json.dumps({"replica": self.server.name}).encode(), "application/json")
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for piece in (b"data: first\n\n", b"data: [DONE]\n\n"):
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            self.wfile.flush()
            self.server.go_on.wait(20)
        self.wfile.write(b"0\r\n\r\n")


def listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def ask(
    port: int, headers: dict[str, str] | None = None, path: str = "/v1/chat/completions", text: str = "hi"
) -> tuple[int, str]:
    """Status, and which replica answered."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]})
        connection.request("POST", path, body, {"Content-Type": "application/json"} | (headers or {}))
        answer = connection.getresponse()
        payload = answer.read()
    return answer.status, json.loads(payload).get("replica", "") if payload.startswith(b"{") else ""


class Running:
    def __init__(self, port: int, replicas: list[Replica]) -> None:
        self.port, self.replicas = port, replicas


@contextlib.contextmanager
def running(command: list[str], port: int) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        ends = time.monotonic() + 30
        while not listens(port):
            assert process.poll() is None and time.monotonic() < ends, "the gateway did not start"
            time.sleep(0.05)
        yield process
    finally:
        process.terminate()
        process.wait(20)


@pytest.fixture
def replicas() -> Iterator[list[Replica]]:
    all_replicas = [Replica() for _ in range(5)]
    yield all_replicas
    for each in all_replicas:
        each.go_on.set()
        each.close()


@pytest.fixture
def nginx(render: Any, replicas: list[Replica], tmp_path: Path) -> Iterator[Running]:
    """Two replicas in eu, one in us, two of the tag acme.x."""
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if program is None:
        pytest.skip("nginx is not installed")
    port = free_port()
    regions = [f"eu={replicas[0].name},{replicas[1].name}", f"us={replicas[2].name}"]
    tags = render.read_groups([f"acme.x={replicas[3].name},{replicas[4].name}"], "tag")
    text = render.render("nginx", render.read_groups(regions, "region"), port, tags).replace(
        "/tmp/paceline-nginx", str(tmp_path / "nginx")
    )
    (tmp_path / "nginx.conf").write_text(text)
    words = [program, "-c", str(tmp_path / "nginx.conf"), "-p", str(tmp_path)]
    tested = subprocess.run([*words, "-t"], capture_output=True, text=True)
    assert tested.returncode == 0 and "warn" not in tested.stderr, tested.stderr
    with running([*words, "-g", "daemon off;"], port):
        yield Running(port, replicas)


def test_a_session_stays_with_its_replica(nginx: Running) -> None:
    """And sessions are shared out; without one a key counts."""
    first, second, *_ = nginx.replicas
    by_session = {name: {ask(nginx.port, {"x-session-id": name})[1] for _ in range(2)} for name in map(str, range(24))}
    assert all(len(each) == 1 for each in by_session.values())
    shares = [sum(each == {replica.name} for each in by_session.values()) for replica in (first, second)]
    assert sum(shares) == 24 and min(shares) >= 4
    keys = {
        name: {ask(nginx.port, {"Authorization": f"Bearer {name}"})[1] for _ in range(2)}
        for name in map(str, range(12))
    }
    assert all(len(each) == 1 for each in keys.values()) and len(set.union(*keys.values())) == 2
    mixed = {ask(nginx.port, {"Authorization": f"Bearer {name}", "x-session-id": "one"})[1] for name in range(8)}
    assert len(mixed) == 1, "the session counts before the key"


def test_a_region_is_asked_by_its_header(nginx: Running) -> None:
    *eu, us = nginx.replicas[:3]
    assert {ask(nginx.port, {"x-region": "us", "x-session-id": str(each)})[1] for each in range(8)} == {us.name}
    for header in ({"x-region": "eu"}, {"x-region": "mars"}, {}):
        assert {ask(nginx.port, header | {"x-session-id": str(each)})[1] for each in range(100)} == {
            each.name for each in eu
        }


def test_a_tag_is_a_group_of_its_own(nginx: Running) -> None:
    """Each session stays with one of its replicas, whatever its region; unknown tags go where none at all does."""
    eu, acme = nginx.replicas[:2], nginx.replicas[3:]
    tagged, regions = {"x-paceline-tag": "acme.x"}, ({"x-region": "us"}, {})
    by_session = {
        name: {ask(nginx.port, tagged | region | {"x-session-id": name})[1] for region in regions}
        for name in map(str, range(100))
    }
    assert all(len(each) == 1 for each in by_session.values())
    assert set.union(*by_session.values()) == {each.name for each in acme}
    for tag in ("acmeox", "ACME.X", "acme.x.y", "initech", ""):
        sent = {ask(nginx.port, {"x-paceline-tag": tag, "x-session-id": str(each)})[1] for each in range(100)}
        assert sent == {each.name for each in eu}, tag
    us = {"x-paceline-tag": "initech", "x-region": "us"}
    assert ask(nginx.port, us)[1] == nginx.replicas[2].name


def test_a_full_replica_keeps_its_sessions(nginx: Running) -> None:
    """The client hears of it, however often: nobody's cache is lost for a queue that is full for a moment."""
    for replica in nginx.replicas:
        replica.status = 429
    assert {ask(nginx.port, {"x-session-id": str(each)})[0] for each in range(12)} == {429}


def test_who_asks_through_the_gateway_is_not_a_program_beside_the_server(nginx: Running) -> None:
    assert ask(nginx.port, {"Host": "localhost"}, "/admin/drafters")[0] == 404
    assert not any(replica.seen for replica in nginx.replicas)
    ask(nginx.port, {"Host": "localhost"})
    assert [headers["X-Forwarded-For"] for replica in nginx.replicas for headers in replica.headers] == ["127.0.0.1"]


def test_a_draining_replica_is_passed_over_and_the_others_stay(nginx: Running) -> None:
    first, second, *_ = nginx.replicas
    before = {str(each): ask(nginx.port, {"x-session-id": str(each)})[1] for each in range(16)}
    first.status = status = 503
    for name, replica in before.items():
        assert ask(nginx.port, {"x-session-id": name}) == (200, second.name), f"{name} was at {replica}"
    first.status = second.status = status
    assert ask(nginx.port, {"x-session-id": "1"})[0] in (status, 502), "nobody is left to ask"


def test_a_replica_that_is_gone_is_passed_over(nginx: Running) -> None:
    first, second, *_ = nginx.replicas
    first.close()
    assert {ask(nginx.port, {"x-session-id": str(each)}) for each in range(12)} == {(200, second.name)}


def test_other_errors_are_the_servers_own(nginx: Running) -> None:
    """A request that is refused is not asked of another."""
    for replica in nginx.replicas:
        replica.status = 400
    assert ask(nginx.port, {"x-session-id": "1"})[0] == 400
    assert sum(len(replica.seen) for replica in nginx.replicas) == 1


def test_tokens_come_as_they_are_made(nginx: Running) -> None:
    for replica in nginx.replicas:
        replica.go_on.clear()
    connection = http.client.HTTPConnection("127.0.0.1", nginx.port, timeout=30)
    with contextlib.closing(connection):
        connection.request(
            "POST", "/v1/chat/completions", json.dumps({"stream": True}), {"Content-Type": "application/json"}
        )
        answer = connection.getresponse()
        assert answer.readline() == b"data: first\n", "while the second piece is held back"
        for replica in nginx.replicas:
            replica.go_on.set()
        assert answer.read().endswith(b"data: [DONE]\n\n")


def test_envoys_configuration_is_of_its_schema(render: Any) -> None:
    json_format = pytest.importorskip("google.protobuf.json_format")
    bootstrap = importlib.import_module("envoy.config.bootstrap.v3.bootstrap_pb2")
    for name in TYPES:
        importlib.import_module(name)
    regions = render.read_groups(
        ["eu=10.0.0.1:8000,replica-2.eu:8000", "us=10.1.0.1:8000", "no=10.2.0.1:8000"], "region"
    )
    tags = render.read_groups(["acme.x=10.3.0.1:8000", "Initech=10.4.0.1:8000"], "tag")
    config = yaml.safe_load(render.render("envoy", regions, 8080, tags))
    read = json_format.ParseDict(config, bootstrap.Bootstrap())
    clusters = {each.name: each for each in read.static_resources.clusters}
    of_tags = {f"replicas_tag_{tag}": replicas for tag, replicas in tags.items()}
    assert {*clusters} == {f"{kind}_{name}" for kind in ("region", "replicas") for name in regions} | {*of_tags}
    for name in regions:
        others = clusters[f"region_{name}"].cluster_type.typed_config
        aggregate = importlib.import_module(TYPES[2]).ClusterConfig()
        assert others.Unpack(aggregate) and aggregate.clusters[0] == f"replicas_{name}", "its own first"
        assert {*aggregate.clusters} == {f"replicas_{each}" for each in regions}
    for name, replicas in ({f"replicas_{name}": each for name, each in regions.items()} | of_tags).items():
        ends = clusters[name].load_assignment.endpoints[0].lb_endpoints
        addresses = [
            (each.endpoint.address.socket_address.address, each.endpoint.address.socket_address.port_value)
            for each in ends
        ]
        assert addresses == [(replica.host, replica.port) for replica in replicas]
        assert clusters[name].health_checks[0].http_health_check.path == "/ready"
    manager = importlib.import_module(TYPES[0]).HttpConnectionManager()
    assert read.static_resources.listeners[0].filter_chains[0].filters[0].typed_config.Unpack(manager)
    closed, *routes = manager.route_config.virtual_hosts[0].routes
    assert (closed.match.prefix, closed.direct_response.status) == ("/admin/", 404) and manager.use_remote_address.value
    chosen = [
        (*((each.name, each.string_match.exact) for each in route.match.headers), route.route.cluster)
        for route in routes
    ]
    assert chosen == [
        (("x-paceline-tag", "acme.x"), "replicas_tag_acme.x"),
        (("x-paceline-tag", "Initech"), "replicas_tag_Initech"),
        (("x-region", "us"), "region_us"),
        (("x-region", "no"), "region_no"),
        ("region_eu",),
    ], "tags first; the first region takes what names no other"
    for route in routes:
        hashed = [each.header.header_name for each in route.route.hash_policy]
        assert (
            hashed == ["x-session-id", "authorization", ""]
            and route.route.hash_policy[2].connection_properties.source_ip
        )
    config["static_resources"]["clusters"][0]["lb_polic"] = "RANDOM"
    with pytest.raises(json_format.ParseError):
        json_format.ParseDict(config, bootstrap.Bootstrap())


def test_vllms_router_sends_a_prefix_where_it_was_seen(render: Any, replicas: list[Replica]) -> None:
    program = shutil.which("vllm-router") or shutil.which("vllm-router", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("vllm-router is not installed: pip install vllm-router")
    port = free_port()
    text = render.render(
        "vllm-router", render.read_groups([f"eu={replicas[0].name},{replicas[1].name}"], "region"), port
    )
    words = text.replace("exec vllm-router", f"exec {program}").replace('"$@"', f"--prometheus-port {free_port()}")
    with running(["/bin/sh", "-c", words], port):
        ends = time.monotonic() + 30
        while ask(port)[0] != 200:
            assert time.monotonic() < ends, "the router found no replica"
            time.sleep(0.2)
        starts = {f"{letter * 400}": set[str]() for letter in "abcdef"}
        for turn in range(4):
            for start, seen in starts.items():
                seen.add(ask(port, text=f"{start} question {turn}")[1])
        assert all(len(seen) == 1 for seen in starts.values())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "there is no replica"),
        (["eu"], "write its replicas as HOST:PORT"),
        (["eu=10.0.0.1"], "write its replicas as HOST:PORT"),
        (["eu=10.0.0.1:99999"], "write its replicas as HOST:PORT"),
        (["eu=a:1;drop"], "write its replicas as HOST:PORT"),
        (["Eu=a:1"], "a name of its own"),
        (["eu=a:1", "eu=b:1"], "a name of its own"),
        (["eu=a:1", ("--tag", "acme")], "write its replicas as HOST:PORT"),
        (["eu=a:1", ("--tag", 'a"; return 200;=b:1')], "a name of its own"),
        (["eu=a:1", ("--tag", "a b=b:1")], "a name of its own"),
        (["eu=a:1", ("--tag", "a$=b:1")], "a name of its own"),
        (["eu=a:1", ("--tag", "a\n=b:1")], "a name of its own"),
        (["eu=a:1", ("--tag", "=b:1")], "a name of its own"),
        (["eu=a:1", ("--tag", "acme=b:1"), ("--tag", "Acme=c:1")], "a name of its own"),
        ([("--tag", "acme=b:1")], "there is no replica"),
    ],
)
def test_what_cannot_be_written(
    render: Any, words: list[str | tuple[str, str]], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = [("--region", word) if isinstance(word, str) else word for word in words]
    assert render.main(["nginx", *[part for pair in pairs for part in pair]]) == 2
    assert message in capsys.readouterr().err


def test_the_router_has_one_region(render: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert render.main(["vllm-router", "--region", "eu=a:1", "--region", "us=b:1"]) == 2
    assert "knows no regions" in capsys.readouterr().err
    assert render.main(["vllm-router", "--region", "eu=a:1", "--tag", "acme=b:1"]) == 2
    assert "reads no tags" in capsys.readouterr().err
