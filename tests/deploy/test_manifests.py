"""deploy/: the Dockerfile and its steps, compose, monitoring and Kubernetes manifests, and that they fit the server."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import kubernetes_validate
import pytest
import yaml
from scripts import module_at

from paceline.serve.admin.metrics import Metrics
from paceline.serve.settings import ServeConfig

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
VERSIONS = ("1.29", "1.34", "1.37")
"""Versions of Kubernetes: an old one that is still in use, and newer ones."""
NO_MANIFESTS = ("kustomization.yaml", "prometheus-adapter.yaml")
SERVED = {"/health", "/ready", "/metrics"}


def documents(file: Path) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all(file.read_text()) if each]


def manifests() -> dict[str, dict[str, Any]]:
    files = sorted(KUBERNETES.glob("*.yaml"))
    by_name = {
        f"{each['kind']}/{each['metadata']['name']}": each
        for file in files
        if file.name not in NO_MANIFESTS
        for each in documents(file)
    }
    assert len(by_name) == 6
    return by_name


@pytest.fixture(scope="module")
def check_image() -> ModuleType:
    return module_at(DEPLOY / "check_image.py")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", manifests())
def test_manifests_hold_to_the_schema(name: str, version: str) -> None:
    kubernetes_validate.validate(manifests()[name], version, strict=True)


def test_the_schema_is_really_asked() -> None:
    wrong = manifests()["Deployment/paceline"]
    wrong["spec"]["template"]["spec"]["containers"][0]["readinessProb"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)


def test_kustomize_names_every_manifest() -> None:
    kustomization = documents(KUBERNETES / "kustomization.yaml")[0]
    assert {*kustomization["resources"]} == {file.name for file in KUBERNETES.glob("*.yaml")} - {*NO_MANIFESTS}
    assert kustomization["namespace"] == manifests()["Namespace/paceline"]["metadata"]["name"]
    assert kustomization["images"][0]["name"] == container()["image"]


def container() -> dict[str, Any]:
    (one,) = manifests()["Deployment/paceline"]["spec"]["template"]["spec"]["containers"]
    return one


@pytest.mark.slow
def test_probes_ask_what_the_server_answers() -> None:
    paths = {kind: container()[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness", "readiness")}
    assert paths == {"startup": "/ready", "liveness": "/health", "readiness": "/ready"}, (
        "a draining server must not be killed"
    )
    source = (ROOT / "paceline/serve/http/app.py").read_text()
    assert all(f'@app.get("{path}"' in source for path in SERVED)
    ports = {port["name"]: port["containerPort"] for port in container()["ports"]}
    pod = manifests()["Deployment/paceline"]["spec"]["template"]
    assert ports["http"] == 8000 == int(pod["metadata"]["annotations"]["prometheus.io/port"])
    services = [each for name, each in manifests().items() if name.startswith("Service/")]
    assert all(each["spec"]["selector"].items() <= pod["metadata"]["labels"].items() for each in services)


def test_a_pod_has_the_time_that_a_drain_takes() -> None:
    spec = manifests()["Deployment/paceline"]["spec"]["template"]["spec"]
    words = container()["args"]
    drain_s = float(words[words.index("--drain-seconds") + 1])
    assert drain_s == ServeConfig().drain_seconds
    pause_s = int(container()["lifecycle"]["preStop"]["exec"]["command"][1])
    assert spec["terminationGracePeriodSeconds"] > drain_s + pause_s


@pytest.mark.slow
def test_options_are_those_of_the_command() -> None:
    compose = documents(DEPLOY / "compose.yaml")[0]["services"]["paceline"]["command"]
    help_text = subprocess.run(
        [sys.executable, "-m", "paceline", "serve", "--help"], capture_output=True, text=True, check=True
    ).stdout
    for option in [word for word in (*container()["args"], *compose) if word.startswith("--")]:
        assert f"{option} " in help_text, option


def test_nothing_runs_as_root_or_without_limits() -> None:
    spec, one = manifests()["Deployment/paceline"]["spec"]["template"]["spec"], container()
    assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] == 10001
    assert one["securityContext"]["readOnlyRootFilesystem"] and one["securityContext"]["capabilities"] == {
        "drop": ["ALL"]
    }
    assert {"cpu", "memory"} <= one["resources"]["limits"].keys() and {"cpu", "memory"} <= one["resources"][
        "requests"
    ].keys()
    assert {each["mountPath"] for each in one["volumeMounts"]} == {"/models", "/tmp"}


def test_the_autoscaler_asks_for_what_the_adapter_makes_of_our_metrics() -> None:
    scaler = manifests()["HorizontalPodAutoscaler/paceline"]["spec"]
    assert (
        scaler["scaleTargetRef"]["name"] == "paceline" and "replicas" not in manifests()["Deployment/paceline"]["spec"]
    )
    metrics = [each["pods"]["metric"]["name"] for each in scaler["metrics"]]
    rules = documents(KUBERNETES / "prometheus-adapter.yaml")[0]["rules"]["custom"]
    assert metrics == [rule["name"]["as"] for rule in rules] == ["paceline_queue_seconds", "paceline_requests_waiting"]
    rendered = Metrics("tiny").render()[0].decode()
    for rule in rules:
        series = re.findall(r"vllm:\w+|paceline:\w+", rule["seriesQuery"] + rule["metricsQuery"])
        assert series and all(f"\n{name}{{" in rendered for name in series), series


def test_prometheus_and_grafana_are_given_what_they_mount() -> None:
    compose = documents(DEPLOY / "compose.yaml")[0]
    services = compose["services"]
    for service in services.values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert (DEPLOY / source).is_file() if source.startswith(".") else source in compose["volumes"], volume
        assert {*service.get("depends_on", [])} <= services.keys()
    scraped = documents(DEPLOY / "monitoring/prometheus.yml")[0]["scrape_configs"][0]
    assert scraped["static_configs"][0]["targets"] == ["paceline:8000"] and scraped["metrics_path"] in SERVED
    dashboards = documents(DEPLOY / "monitoring/dashboards.yml")[0]["providers"][0]["options"]["path"]
    mounted = [volume.split(":")[1] for volume in services["grafana"]["volumes"]]
    assert f"{dashboards}/paceline.json" in mounted
    assert services["paceline"]["build"]["dockerfile"] == "deploy/Dockerfile" and (DEPLOY / "Dockerfile").is_file()


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("hadolint", path=str(Path(sys.executable).parent)) is None, reason="hadolint is not installed"
)
def test_the_dockerfile_is_linted() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    done = subprocess.run(
        [hadolint, "--failure-threshold", "style", DEPLOY / "Dockerfile"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


def test_the_dockerfiles_steps_are_understood(check_image: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_image.main(["--steps", "--dry-run"]) == 0
    assert "every instruction is understood" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("USER 10001:10001", "USER root", "a user that is not root"),
        ("VOLUME /models", "ONBUILD RUN true", "this instruction is not known"),
        ("COPY --from=build", "COPY --from=builder", "there is no stage 'builder'"),
        ("COPY paceline paceline", "COPY pacelin paceline", "the repository has none"),
        ("--no-install-recommends g++", "--no-install-recommends no-such", "no-such"),
    ],
)
def test_a_damaged_dockerfile_is_not(
    check_image: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    old: str,
    new: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(check_image.BRINGS, "no-such", "no-such")
    text = (DEPLOY / "Dockerfile").read_text()
    assert text.count(old) == 1
    (tmp_path / "Dockerfile").write_text(text.replace(old, new))
    assert check_image.main(["--steps", "--dry-run", "--dockerfile", str(tmp_path / "Dockerfile")]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_what_the_image_is_asked_is_asked_of_a_server(check_image: ModuleType, tmp_path: Path) -> None:
    port = check_image.free_port()
    words = [sys.executable, "-m", "paceline", "serve", "--port", str(port)]
    words += [*check_image.mocked(tmp_path / "tiny"), str(tmp_path / "tiny")]
    code = f"import urllib.request; urllib.request.urlopen('http://127.0.0.1:{port}/ready', timeout=4)"
    with check_image.started(words, tmp_path, {**os.environ, "PYTHONPATH": str(ROOT)}) as process:
        check_image.check_server(port, [sys.executable, "-S", "-c", code])
        process.terminate()
        assert process.wait(60) == 0


@pytest.mark.slow
def test_a_server_that_keeps_other_tokens_than_it_was_told_to_is_found_out(
    check_image: ModuleType, tmp_path: Path
) -> None:
    from live_server import serving  # only here: other tests of this file need no PyTorch

    from paceline.engine.llm import LLM

    check_image.mocked(tmp_path / "tiny")
    settings = {"device": "cpu", "max_batch": 2, "weights": "random", "mocked_tokens_per_round": 2}
    with (
        serving(lambda: LLM(str(tmp_path / "tiny"), drafter="random-dflash", **settings)) as live,
        pytest.raises(check_image.ImageError, match="the server answered"),
    ):
        check_image.check_server(live.port, ["true"])


def test_a_builder_that_does_not_work_is_none(
    check_image: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, status in (("docker", 1), ("podman", 0)):
        (tmp_path / name).write_text(f"#!/bin/sh\nexit {status}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert check_image.builder() == "podman"
    (tmp_path / "podman").unlink()
    assert check_image.builder() is None
    assert check_image.main([]) == 1


def test_the_build_is_given_what_it_copies() -> None:
    """The ignore file leaves everything out but what COPY names."""
    lines = [
        line
        for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    assert lines[0] == "**" and {line[1:] for line in lines if line.startswith("!")} == {*" ".join(copied).split()}


def test_its_dependencies_are_pinned() -> None:
    lock = {
        line.split("==")[0].lower().replace("_", "-")
        for line in (ROOT / "requirements.lock").read_text().splitlines()
        if "==" in line
    }
    extras = json.dumps((ROOT / "pyproject.toml").read_text().split("[project.scripts]")[0])
    for extra in ("serve", "data"):
        match = re.search(rf"\\n{extra} = \[(.*?)\]\\n", extras)
        assert match
        for name in re.findall(r'\\"([A-Za-z0-9_-]+)', match[1]):
            assert name.lower() in lock, name
