"""deploy/jobs: what is rendered for Slurm, KubeRay, vLLM's production stack and SGLang is valid, and asks for what
there is."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import kubernetes_validate
import pytest
import yaml
from command_lines import parse
from scripts import module_at
from torch.distributed.run import get_args_parser

JOBS = Path(__file__).parents[2] / "deploy" / "jobs"
VERSION = "1.34"
WORDS = (
    "--model",
    "Qwen/Qwen3-8B",
    "--prompts",
    "/data/prompts.jsonl",
    "--out",
    "/data/runs/mine",
    "--drafter",
    "/data/drafter",
)
STACK_KEYS = {
    *(
        "name",
        "repository",
        "tag",
        "modelURL",
        "replicaCount",
        "requestCPU",
        "requestMemory",
        "requestGPU",
        "vllmConfig",
    ),
    *("extraVolumes", "extraVolumeMounts"),
}
"""Keys of the chart's values.schema.json (vllm-project/production-stack a6c01db) that are used here."""


@pytest.fixture(scope="module")
def jobs() -> ModuleType:
    return module_at(JOBS / "render.py", "render_jobs")


@pytest.fixture
def rendered(jobs: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(jobs, "ray_version", lambda: "2.60.0")

    def render(kind: str, *more: str) -> str:
        assert jobs.main([kind, *WORDS, *more]) == 0
        return capsys.readouterr().out

    return render


def commands_in(text: str) -> list[list[str]]:
    """Commands of a script, continued lines put together."""
    lines = text.replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines if line.strip() and not line.startswith("#")]


def paceline_of(words: list[str]) -> list[str]:
    """Arguments of paceline in a command line that another program starts."""
    return words[words.index("paceline") + 1 :]


@pytest.mark.slow
def test_slurms_script(rendered: Any, tmp_path: Path) -> None:
    text = rendered("slurm", "--nodes", "4")
    (tmp_path / "slurm.sh").write_text(text)
    subprocess.run(["bash", "-n", tmp_path / "slurm.sh"], check=True)
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", text, re.MULTILINE))
    assert options["nodes"] == "4" and options["gpus-per-node"] == "8" and options["ntasks-per-node"] == "1"
    ray, torch = [words for words in commands_in(text) if words[0] == "srun"]
    assert ray[1:3] == ["ray", "symmetric-run"] and "--min-nodes" in ray and ray[ray.index("--") + 1] == "paceline"
    first, second = parse(paceline_of(ray)), parse(paceline_of(torch))
    assert first["ray"] == "auto" and first["prompts"] == ["/data/prompts.jsonl"]
    assert second["answers"] == [Path(first["out"]) / "answers"], "training takes the answers that Ray had made"
    help_text = get_args_parser().format_help()
    for option in [word for word in torch[: torch.index("-m")] if word.startswith("--")]:
        assert option in help_text, option


@pytest.mark.slow
def test_kuberays_job(rendered: Any) -> None:
    job = yaml.safe_load(rendered("kuberay", "--nodes", "2", "--gpus", "4"))
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    arguments = parse(shlex.split(job["spec"]["entrypoint"])[1:])
    cluster = job["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    assert arguments["ray"] == "auto" and workers["replicas"] == workers["maxReplicas"] == 8
    assert cluster["rayVersion"] == "2.60.0" and cluster["headGroupSpec"]["rayStartParams"]["num-gpus"] == "0"
    for template in (cluster["headGroupSpec"]["template"], workers["template"]):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": template["spec"]}
        kubernetes_validate.validate(pod, VERSION, strict=True)
        (one,) = template["spec"]["containers"]
        assert (
            one["resources"]["limits"]["nvidia.com/gpu"] == "1" and template["spec"]["securityContext"]["runAsNonRoot"]
        )
        assert arguments["out"].is_relative_to(one["volumeMounts"][0]["mountPath"])
    head, worker = (each["spec"]["volumes"][0] for each in (cluster["headGroupSpec"]["template"], workers["template"]))
    assert "readOnly" not in head["persistentVolumeClaim"] and worker["persistentVolumeClaim"]["readOnly"]


def test_vllms_stack(rendered: Any) -> None:
    values = yaml.safe_load(rendered("vllm-stack", "--gpus", "4", "--num-drafted", "5"))
    (model,) = values["servingEngineSpec"]["modelSpec"]
    assert model.keys() <= STACK_KEYS and model["vllmConfig"]["tensorParallelSize"] == model["requestGPU"] == 4
    option, config = model["vllmConfig"]["extraArgs"]
    expected = {"method": "dflash", "model": "/data/drafter", "num_speculative_tokens": 5}
    assert option == "--speculative-config" and json.loads(config) == expected
    assert expected["model"].startswith(model["extraVolumeMounts"][0]["mountPath"])


def test_sglang(rendered: Any) -> None:
    deployment, service = yaml.safe_load_all(rendered("sglang", "--method", "eagle3"))
    for each in (deployment, service):
        kubernetes_validate.validate(each, VERSION, strict=True)
    (one,) = deployment["spec"]["template"]["spec"]["containers"]
    words = one["args"]
    options = {
        name: words[words.index(f"--{name}") + 1] for name in ("model-path", "tp-size", "port", "speculative-algorithm")
    }
    assert options == {"model-path": "Qwen/Qwen3-8B", "tp-size": "8", "port": "8000", "speculative-algorithm": "EAGLE3"}
    assert one["ports"][0]["containerPort"] == 8000 and all(isinstance(word, str) for word in words)
    assert service["spec"]["selector"].items() <= deployment["spec"]["template"]["metadata"]["labels"].items()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("slurm", "--model", "m"), "slurm needs --prompts"),
        (("sglang", "--model", "m"), "sglang needs --drafter"),
        (("sglang", "--model", "m; rm", "--drafter", "/a/b"), "--model 'm; rm' is no name"),
        (("slurm", "--model", "m", "--prompts", "p.jsonl", "--out", "/a/b"), "write a whole path"),
        (("kuberay", "--model", "m", "--prompts", "/a/p", "--out", "/b/c"), "one volume"),
    ],
)
def test_what_cannot_be_written(
    jobs: ModuleType, words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert jobs.main([*words]) == 2
    assert message in capsys.readouterr().err
