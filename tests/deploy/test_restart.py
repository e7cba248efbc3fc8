"""deploy/restart: the restart commands for systemd and Kubernetes, run with programs that note how they were called."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

RESTART = Path(__file__).parents[2] / "deploy" / "restart"
CONFIG = json.dumps({"method": "dflash", "model": "/data/a folder", "num_speculative_tokens": 7})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("systemctl", "kubectl"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/sh\necho {name} "$@" >> {tmp_path}/calls\nexit ${{STATUS:-0}}\n')
        program.chmod(0o755)
    return tmp_path


def run(script: str, folder: Path, server: str, **environment: str) -> tuple[int, list[str]]:
    variables = {
        "PACELINE_SERVER": server,
        "PACELINE_DRAFTER": str(folder / "new"),
        "PACELINE_SPECULATIVE_CONFIG": CONFIG,
    }
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    done = subprocess.run([RESTART / script], env={**os.environ, "PATH": path, **variables, **environment}, check=False)
    return done.returncode, (folder / "calls").read_text().splitlines()


def test_systemd(folder: Path) -> None:
    status, calls = run("systemd.sh", folder, "http://127.0.0.1:8001", VLLM_ENVIRONMENT=str(folder))
    assert (status, calls) == (0, ["systemctl restart vllm@8001"])
    shell = f'. {folder / "8001.env"}; printf %s "$PACELINE_SPECULATIVE_CONFIG"'
    read = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=True).stdout
    assert json.loads(read) == json.loads(CONFIG)
    assert run("systemd.sh", folder, "http://127.0.0.1:8001", VLLM_ENVIRONMENT=str(folder), STATUS="1")[0] == 1


def test_kubernetes(folder: Path) -> None:
    links = folder / "serving"
    for number in range(2):
        (folder / "new").mkdir(exist_ok=True)
        status, calls = run("kubectl.sh", folder, "http://vllm-0.models:8000", DRAFTER_LINKS=str(links))
        assert status == 0 and (links / "vllm-0").readlink() == folder / "new"
        assert calls[2 * number :] == [
            "kubectl rollout restart deployment/vllm-0",
            "kubectl rollout status deployment/vllm-0 --timeout 9m",
        ]
    assert run("kubectl.sh", folder, "http://vllm-0:8000", DRAFTER_LINKS=str(links), STATUS="1")[0] == 1


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_an_address_without_a_deployments_name_is_refused(folder: Path, host: str) -> None:
    (folder / "calls").touch()
    assert run("kubectl.sh", folder, f"http://{host}:8001", DRAFTER_LINKS=str(folder / "links")) == (2, [])
    assert not (folder / "links").exists()


def test_the_production_stack(folder: Path) -> None:
    names = {"DRAFTER_LINKS": str(folder), "DEPLOYMENT": "vllm-%s-deployment-vllm"}
    _, calls = run("kubectl.sh", folder, "http://qwen-1:80", **names)
    assert calls[0] == "kubectl rollout restart deployment/vllm-qwen-1-deployment-vllm"
