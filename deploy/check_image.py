"""Builds the image, starts it, asks it something and stops it; where no builder is, the Dockerfile's steps by script.

    python deploy/check_image.py                  # docker, podman or buildah, whichever works here
    python deploy/check_image.py --steps          # no builder: the same steps in a fresh folder
    python deploy/check_image.py --steps --dry-run

With --steps every instruction of the Dockerfile is carried out in its order, with absolute paths below a fresh folder
in the place of /: a new virtual environment of this Python, an environment of nothing but the Dockerfile's own
variables (and pip's PIP_*, proxies and certificates of this machine), no cache. What only a container can do is said
and left out: the base image, apt-get (the commands that its packages bring must be here), users (a server of root's
Python runs as who calls this). A stage's COPY --from is a link to what the earlier stage made.

The server is asked with mocked acceptance and random weights of a tiny shape, so that no model is fetched: health,
readiness by the image's own HEALTHCHECK, a streamed answer, metrics, an end within the grace period, exit status 0.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from dockerfile_parse import DockerfileParser

HERE = Path(__file__).parent
SOURCE = HERE.parent
BUILDERS = ("docker", "podman", "buildah")
PASSED = re.compile(r"PIP_\w+|https?_proxy|HTTPS?_PROXY|SSL_CERT_\w+|REQUESTS_CA_BUNDLE|LANG")
"""Variables of this machine that the steps need to reach packages."""
APT = re.compile(r"apt-get install [^&|;]*")
BRINGS = {"g++": "g++"}
"""Debian package -> a command that it brings."""
NOT_COPIED = ("__pycache__", "*.egg-info", "build", "libpaceline_native.*", ".native-*")
"""Left out of copied folders, as by Dockerfile.dockerignore."""
USERS = re.compile(r"\b(groupadd|useradd|chown) ")
SHAPE = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512, "hidden_size": 64}
SHAPE |= {"intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 512}
READY_SECONDS, STOP_SECONDS = 120, 45


class ImageError(RuntimeError):
    """A step or a check failed; the message says which."""


@dataclass
class Image:
    """What the last stage's instructions say of the container that runs."""

    environment: dict[str, str] = field(default_factory=dict)
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    healthcheck: list[str] = field(default_factory=list)
    user: str = ""
    folder: str = "/"
    volumes: list[str] = field(default_factory=list)


class Steps:
    """The Dockerfile carried out below `root`."""

    def __init__(self, dockerfile: Path, root: Path, dry_run: bool = False) -> None:
        with tempfile.TemporaryDirectory() as scratch:  # the parser wants to write beside what it reads
            parser = DockerfileParser(path=scratch)
            parser.content = dockerfile.read_text(encoding="utf-8")
            self.instructions = [(each["instruction"], each["value"]) for each in parser.structure]
        self.root, self.dry_run, self.image = root, dry_run, Image()
        self.arguments: dict[str, str] = {}
        self.stages: list[str] = []
        self.kept = {name: value for name, value in os.environ.items() if PASSED.fullmatch(name)}

    def run(self) -> Image:
        for instruction, value in self.instructions:
            if instruction != "COMMENT":
                print(f"{instruction} {value}", flush=True)
                getattr(self, f"_{instruction.lower()}", self._unknown)(value)
        return self.image

    def variables(self) -> dict[str, str]:
        """Returns a step's environment variables: pip's own and the Dockerfile's, with paths below the root."""
        own = {name: self.below(value) for name, value in self.image.environment.items()}
        path = os.pathsep.join(part for part in (own.pop("PATH", ""), os.defpath, "/usr/local/bin") if part)
        return (
            self.kept
            | self.arguments
            | {"HOME": str(self.root / "home"), "PATH": path, "TMPDIR": str(self.root / "tmp")}
            | own
        )

    def below(self, text: str) -> str:
        """Absolute paths of the image, below the root: those that its instructions name."""
        return re.sub(r"(?<![\w./:-])/(?=(?:opt|src|models)\b)", f"{self.root}/", text)

    def _unknown(self, value: str) -> None:
        raise ImageError("this instruction is not known here: teach deploy/check_image.py")

    def _from(self, value: str) -> None:
        words = value.split()
        self.stages.append(words[2] if len(words) == 3 else "")
        self.image = Image()
        print(f"  left out: the base image; this Python is {sys.version.split()[0]}")

    def _arg(self, value: str) -> None:
        name, _, default = value.partition("=")
        self.arguments[name] = default
        if name == "TORCH_INDEX" and any("find_links" in key.lower() for key in self.kept):
            self.arguments[name] = "https://pypi.org/simple"
            print("  left out: PyTorch's index; pip has links of this machine's own")

    def _env(self, value: str) -> None:
        for pair in shlex.split(value.replace("\\\n", " ")):
            name, _, said = pair.partition("=")
            self.image.environment[name] = said.replace(":$PATH", "").replace("$PATH", "")

    def _shell(self, value: str) -> None:
        self.shell = json.loads(value)

    def _run(self, value: str) -> None:
        if found := APT.search(value):
            packages = [word for word in found.group().split()[2:] if not word.startswith("-")]
            missing = [package for package in packages if not shutil.which(BRINGS[package])]
            if missing:
                raise ImageError(f"install {', '.join(missing)} here: the steps need it")
            print(f"  left out: apt-get; {', '.join(packages)} is here")
            return
        if USERS.search(value):
            value = " && ".join(part for part in value.split(" && ") if not USERS.search(part))
            print("  left out: users and owners")
        value = re.sub(r"(^|&& )python -m venv", rf"\1{shlex.quote(sys.executable)} -m venv", value)
        if value and not self.dry_run:
            folder = self.root / self.image.folder.lstrip("/")
            subprocess.run(
                ["/bin/bash", "-e", "-o", "pipefail", "-c", self.below(value)],
                cwd=folder,
                env=self.variables(),
                check=True,
            )

    def _workdir(self, value: str) -> None:
        self.image.folder = value
        (self.root / value.lstrip("/")).mkdir(parents=True, exist_ok=True)

    def _copy(self, value: str) -> None:
        *sources, goal = [word for word in value.split() if not word.startswith("--")]
        stage = next((word.partition("=")[2] for word in value.split() if word.startswith("--from=")), None)
        if stage is not None:
            if stage not in self.stages:
                raise ImageError(f"there is no stage {stage!r} before")
            if not self.dry_run and not all((self.root / source.lstrip("/")).exists() for source in sources):
                raise ImageError(f"stage {stage!r} did not make {', '.join(sources)}")
            return
        folder = self.root / (goal if goal.startswith("/") else f"{self.image.folder}/{goal}").lstrip("/")
        for source in sources:
            origin = SOURCE / source
            if not origin.exists():
                raise ImageError(f"COPY {source}: the repository has none")
            if self.dry_run:
                continue
            if origin.is_dir():
                ignored = shutil.ignore_patterns(*NOT_COPIED)
                shutil.copytree(origin, folder, ignore=ignored, dirs_exist_ok=True)
            else:
                folder.mkdir(parents=True, exist_ok=True)
                shutil.copy2(origin, folder)

    def _user(self, value: str) -> None:
        self.image.user = value

    def _volume(self, value: str) -> None:
        self.image.volumes += value.split()
        (self.root / value.lstrip("/")).mkdir(parents=True, exist_ok=True)

    def _expose(self, value: str) -> None:
        assert value == "8000"

    def _healthcheck(self, value: str) -> None:
        self.image.healthcheck = json.loads(value.partition("CMD ")[2])

    def _entrypoint(self, value: str) -> None:
        self.image.entrypoint = json.loads(value)

    def _cmd(self, value: str) -> None:
        self.image.command = json.loads(value)


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


def mocked(folder: Path) -> list[str]:
    """What the server is given in the place of CMD: a tiny shape and mocked acceptance."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPE), encoding="utf-8")
    return ["--mock", "3", "--max-batch", "2", "--device", "cpu", "--model"]


@contextlib.contextmanager
def started(command: list[str], cwd: Path, env: dict[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, cwd=cwd, env=env)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def check_server(port: int, is_ready: list[str], env: dict[str, str] | None = None) -> None:
    """Ready by the image's own check, then health, an answer in pieces, metrics. Raises ImageError."""
    ends = time.monotonic() + READY_SECONDS
    while subprocess.run(is_ready, env=env, capture_output=True).returncode:
        if time.monotonic() > ends:
            raise ImageError(f"the server was not ready after {READY_SECONDS} s")
        time.sleep(0.5)
    url = f"http://127.0.0.1:{port}"
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 13, "stream": True}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        text = answer.read().decode()
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        metrics = answer.read().decode()
    with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
        health = answer.status
    drafted = re.search(r"^paceline:tokens_per_round_count\{.*\} (\S+)", metrics, re.MULTILINE)
    is_drafted = drafted is not None and float(drafted[1]) == 4  # 12 tokens after the first: rounds of three
    if health != 200 or not text.endswith("data: [DONE]\n\n") or not is_drafted:
        raise ImageError(f"the server answered {text!r:.200}")
    print("ready, answered, measured")


def check_steps(dockerfile: Path, root: Path, dry_run: bool) -> None:
    for name in ("home", "tmp"):
        (root / name).mkdir(parents=True)
    steps = Steps(dockerfile, root, dry_run)
    image = steps.run()
    if not (image.entrypoint and image.command and image.healthcheck and image.volumes) or image.user in (
        "",
        "root",
        "0",
    ):
        raise ImageError(
            "the image needs an entrypoint, a command, a health check, a volume and a user that is not root"
        )
    if dry_run:
        return
    env, port = steps.variables(), free_port()
    entry = [*(str(port) if word == "8000" else word for word in image.entrypoint)]
    program = shutil.which(entry[0], path=env["PATH"])
    if program is None or not program.startswith(str(root)):
        raise ImageError(f"the entrypoint {entry[0]} was not installed")
    python = str(root / "opt/paceline/bin/python")
    native = (
        "from paceline.draft import shipped; from paceline.model.native import library; import paceline; "
        "assert library.load() is not None and shipped.local('smollm2-135m'); print(paceline.__file__)"
    )
    where = subprocess.run(
        [python, "-c", native], env=env, cwd=root, check=True, capture_output=True, text=True
    ).stdout.strip()
    if not where.startswith(str(root)):
        raise ImageError(f"paceline came from {where}, not from the image")
    shape = root / "models/tiny"
    command = [program, *entry[1:], *mocked(shape), str(shape)]
    health = [python if word == "python" else word.replace(":8000", f":{port}") for word in image.healthcheck]
    with started(command, root / image.folder.lstrip("/"), env) as process:
        check_server(port, health, env)
        process.send_signal(signal.SIGTERM)
        if process.wait(STOP_SECONDS) != 0:
            raise ImageError(f"the server ended with status {process.returncode}")


def builder() -> str | None:
    """The first that works here; a client without a daemon does not."""
    for name in BUILDERS:
        if shutil.which(name) and not subprocess.run([name, "info"], capture_output=True).returncode:
            return name
    return None


def check_built(name: str, tag: str) -> None:
    """Build, run, ask, stop. Raises ImageError or subprocess.CalledProcessError."""
    subprocess.run([name, "build", "--file", str(HERE / "Dockerfile"), "--tag", tag, str(SOURCE)], check=True)
    if name == "buildah":
        print("built; buildah runs no containers: start it with another tool")
        return
    port, container = free_port(), f"paceline-check-{os.getpid()}"
    with tempfile.TemporaryDirectory() as scratch:
        words = mocked(Path(scratch) / "tiny")
        os.chmod(scratch, 0o755)
        run = [name, "run", "--rm", "--name", container, "--read-only", "--tmpfs", "/tmp"]
        run += ["--publish", f"127.0.0.1:{port}:8000"]
        with started([*run, "--volume", f"{scratch}:/shapes:ro", tag, *words, "/shapes/tiny"], SOURCE) as process:
            health = [name, "exec", container, "python", "-c"]
            check_server(
                port,
                [*health, "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/ready', timeout=4)"],
            )
            user = subprocess.run(
                [name, "exec", container, "id", "-u"], capture_output=True, text=True, check=True
            ).stdout.strip()
            if user == "0":
                raise ImageError("the server runs as root")
            subprocess.run([name, "stop", "--time", str(STOP_SECONDS), container], check=True, capture_output=True)
            if process.wait(STOP_SECONDS) != 0:
                raise ImageError(f"the server ended with status {process.returncode}")


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--steps", action="store_true", help="the Dockerfile's steps by script, even where a builder is"
    )
    parser.add_argument("--dry-run", action="store_true", help="with --steps: read every instruction, carry out none")
    parser.add_argument("--dockerfile", type=Path, default=HERE / "Dockerfile")
    parser.add_argument("--tag", default="paceline:check")
    given = parser.parse_args(words)
    try:
        if given.steps:
            with tempfile.TemporaryDirectory(prefix="paceline-image-") as root:
                check_steps(given.dockerfile, Path(root), given.dry_run)
        elif (name := builder()) is not None:
            check_built(name, given.tag)
        else:
            raise ImageError(f"no builder works here ({', '.join(BUILDERS)}): take --steps")
    except (ImageError, subprocess.CalledProcessError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("the image is well" if not given.dry_run else "every instruction is understood")
    return 0


if __name__ == "__main__":
    sys.exit(main())
