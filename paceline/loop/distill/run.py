"""The run `distill`: trains a student on a teacher's answers. Stages, each resumed after a killed run:

regenerate   runs/x/regenerate/answers/   the teacher answers the prompts, if prompts were given
start        runs/x/start/                the untrained student: some of the teacher's layers
top-k        runs/x/top-k/                the teacher's log-probabilities along its answers (reading.py)
train        runs/x/checkpoints/          training by TRL (teach.py)
gate         runs/x/candidate/            the student in its output formats, measured (gate.py)
             runs/x/student/, student.gguf     accepted; or runs/x/refused/, refused.gguf
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from paceline.engine.llm import LLM
from paceline.errors import CacheError, ConfigError, ModelFileError, reraised
from paceline.hub import resolve
from paceline.loop.distill.config import DistillConfig
from paceline.loop.distill.corpus import corpus_of
from paceline.loop.distill.gate import Finding, GateInputs, Judge, agreement, answers
from paceline.loop.distill.reading import Reader, Stored, read_all
from paceline.loop.distill.start import check_files, gguf_format, influences, num_weights, write_start
from paceline.model import checkpoint
from paceline.model.gguf.to_folder import LAST_FILE, write_folder, write_model
from paceline.model.gguf.writer import write_gguf
from paceline.report.tables import SILENT, Column, Progress, Table
from paceline.runs.folder import RunFolder, plain, sync
from paceline.runs.lock import only_run
from paceline.runs.ranks import Ranks
from paceline.runs.stopping import Stop, stopped_by_signal
from paceline.train.answers.on_ray import run as regenerate
from paceline.train.answers.run_identity import opened_run
from paceline.train.config import RegenerateConfig
from paceline.train.documents.dataset import Corpus, Document
from paceline.train.unused_settings import check_prompts

ACCEPTED, REFUSED, CANDIDATE = "student", "refused", "candidate"
RESULT = "distilled.json"
LENGTH = ("minutes", "max_steps", "epochs", "checkpoint_minutes", "micro_batch")
"""Fields of `TeachingConfig` that may change when a run is resumed."""


@dataclass(frozen=True, slots=True)
class DistillResult:
    """Result of a distillation: whether the student was accepted and why, and its folder."""

    run: Path
    student: Path
    """The Transformers folder: `student` if it was accepted, else `refused`."""
    gguf: Path | None
    passed: bool
    reason: str
    layers: tuple[int, ...]
    """Indices of the copied teacher layers; empty for a student that started from a smaller model."""
    steps: int
    minutes: float
    """Minutes of training."""
    findings: tuple[Finding, ...] = ()
    weights: dict[str, int] = field(default_factory=dict)
    """Number of weights read per forward pass, for the keys "teacher" and "student"."""


def distill(config: DistillConfig, *, judges: Sequence[Judge] = (), progress: Progress = SILENT) -> DistillResult:
    """Distils a teacher model into a smaller student, and accepts the student if it passes every gate (quality check).

    Calling it again with the same `config.out` resumes the run in that folder. An accepted student is written to the
    subfolder `student`, a rejected one to `refused`. A rejected student does not replace one that was accepted earlier.
    `judges`: further gates, applied after the built-in ones.

    Raises ConfigError, PromptError (fewer than 12 different prompts), TrainingError (training diverged), CacheError
    (disk cannot be written or read), and ModelNotFoundError, ModelFileError, UnsupportedModelError or DownloadError if
    a model cannot be loaded.
    """
    if not (config.answers or config.prompting.prompts or config.prompting.self_written):
        raise ConfigError(
            "a student learns from its teacher's answers: give --answers FOLDER, or --prompts FILE to be answered"
        )
    check_prompts(config.prompting, has_answers=bool(config.answers))
    import paceline.loop.distill.teach as teach  # raises before any computation if TRL is not installed

    with only_run(config.out, "distilling", Ranks(), progress.say), stopped_by_signal(progress.say) as stop:
        return _Stages(config, judges, progress, stop, teach).run()


class _Stages:
    def __init__(
        self, config: DistillConfig, judges: Sequence[Judge], progress: Progress, stop: Stop, teach: Any
    ) -> None:
        self.config, self.judges, self.progress, self.stop, self.teach = config, judges, progress, stop, teach
        self.teacher = resolve(config.teacher.model)
        check_files(config.files, config.student, self.teacher)

    def run(self) -> DistillResult:
        folder = self._open()
        corpus = self._corpus(self._answers())
        start = self.config.out / "start"
        layers = write_start(
            self.config.student, self.teacher, start, lambda: influences(self._load(self.teacher), corpus.train)
        )
        if layers:
            self.progress.say(f"the student begins with the teacher's layers {', '.join(map(str, layers))}")
        self._read_teacher(corpus)
        trained = self._train(corpus, folder)
        student, gguf = self._write_candidate()
        findings = self._judge(corpus, gguf or student)
        passed = all(each.passed for each in findings)
        reason = "; ".join(each.reason for each in findings if passed or not each.passed)
        self._show(findings)
        student, gguf = self._rename(passed, student, gguf)
        models = {"teacher": self.teacher, "student": student}
        weights = {name: sum(num_weights(checkpoint.load_config(at))) for name, at in models.items()}
        minutes = trained.seconds / 60
        result = DistillResult(
            self.config.out, student, gguf, passed, reason, layers, trained.steps, minutes, tuple(findings), weights
        )
        folder.results(plain(asdict(result)), RESULT)
        self._say(result)
        return result

    def _open(self) -> RunFolder:
        settings = plain(asdict(self.config))
        for name in LENGTH:
            settings["teaching"].pop(name)
        for part in ("out", "gate"):
            settings.pop(part)
        self._keep_unused(settings)
        folder = opened_run(self.config.out, "distill", settings)
        if (before := self._before(ACCEPTED)).is_dir() and not (self.config.out / ACCEPTED).exists():
            before.rename(self.config.out / ACCEPTED)  # the run was killed while it replaced this student
        return folder

    def _keep_unused(self, settings: dict[str, Any]) -> None:
        """Sets settings without effect to the values in the resumed run, as earlier versions accepted others than the
        default."""
        config, stored = self.config, None
        with contextlib.suppress(ModelFileError):  # missing in a new run; `opened_run` reports a damaged one
            stored = checkpoint.read_json(config.out / "config.json").get("distill")
        for part, name, is_used in (
            ("teaching", "beta", config.teaching.method == "gkd"),
            ("student", "choice", not (config.student.keep_layers or config.student.student)),
            ("files", "embedding_format", self._gguf_format != "none"),
        ):
            if isinstance(stored, dict) and not is_used:
                settings[part][name] = stored.get(part, {}).get(name, settings[part][name])

    def _before(self, name: str) -> Path:
        """Returns the folder of an earlier student while it is replaced."""
        return self.config.out / f".{name}-before"

    def _answers(self) -> list[Path]:
        config = self.config
        if not (config.prompting.prompts or config.prompting.self_written):
            return [*config.answers]
        out = config.out / "regenerate"
        regenerate(RegenerateConfig(out, config.teacher, config.prompting, config.answering), self.progress)
        return [*config.answers, out / "answers"]

    def _corpus(self, sources: list[Path]) -> Corpus:
        corpus = corpus_of(self.config, sources)
        num_tokens = sum(len(each) - each.answer_start for each in corpus.train)
        self.progress.say(
            f"{len(corpus.train)} answers to learn from ({num_tokens} tokens), {len(corpus.heldout)} held out; "
            f"{corpus.left_out_text or 'all of them whole'}"
        )
        return corpus

    def _read_teacher(self, corpus: Corpus) -> None:
        """Stores the teacher's log-probabilities along held-out answers and, for soft, training answers."""
        wanted: list[tuple[Stored, Sequence[Document]]] = [(self._stored("heldout"), corpus.heldout)]
        if self.config.teaching.method == "soft":
            wanted.append((self._stored("train"), corpus.train))
        if not any(stored.missing(documents) for stored, documents in wanted):
            return
        llm = self._load(self.teacher)
        reader = Reader(llm, self.config.teaching.top_k)
        for stored, documents in wanted:
            stored.write(reader, documents, self.progress)
        reader.close()

    def _stored(self, name: str) -> Stored:
        return Stored(self.config.out / "top-k", name)

    def _load(self, model: Path) -> LLM:
        longest = self.config.teaching.max_len
        most = min(checkpoint.load_config(model).max_position, longest + 64)
        return LLM.of(replace(self.config.teacher, model=str(model), drafter="none", max_len=most, max_batch=8))

    def _train(self, corpus: Corpus, folder: RunFolder) -> Any:
        config, out = self.config, self.config.out
        teacher = None
        if config.teaching.method == "gkd":
            teacher = self.teacher if self.teacher.is_dir() else out / "teacher"
            if not (teacher / LAST_FILE).is_file():
                shutil.rmtree(teacher, ignore_errors=True)
                write_folder(self.teacher, teacher)
        logprobs = self._stored("train").load(corpus.train) if config.teaching.method == "soft" else None
        q4_1 = self._gguf_format == "q4_1"
        inputs = self.teach.TrainingInputs(
            start=out / "start",
            teacher=teacher,
            documents=corpus.train,
            logprobs=logprobs,
            out=out / "checkpoints",
            freeze=config.student.freeze_embeddings,
            blocks=q4_1,
            round_embedding=q4_1 and config.files.embedding_format == "q4_1",
        )
        return self.teach.teach(inputs, config.teaching, out / "trained", self.stop, folder, self.progress)

    @property
    def _gguf_format(self) -> str:
        return gguf_format(self.config.files, self.config.student, self.teacher)

    def _write_candidate(self) -> tuple[Path, Path | None]:
        """Writes the trained student as a folder and, if configured, as a GGUF file."""
        config, out = self.config, self.config.out
        folder, trained = out / CANDIDATE, out / "trained"
        with reraised(CacheError, f"cannot write {folder}", "free space", OSError):
            shutil.rmtree(folder, ignore_errors=True)
        shape = checkpoint.load_config(trained)
        tensors = checkpoint.check_tensors(shape, checkpoint.load_tensors(trained), trained)
        write_model(folder, checkpoint.config_json(out / "start"), tensors, out / "start", config.files.save_dtype)
        if self._gguf_format == "none":
            return folder, None
        like = resolve(config.student.student) if config.student.student else self.teacher
        embedding = None if config.files.embedding_format == "same" else config.files.embedding_format
        return folder, write_gguf(trained, like, out / f"{CANDIDATE}.gguf", self._gguf_format, embedding)

    def _judge(self, corpus: Corpus, student: Path) -> list[Finding]:
        documents, top_k = corpus.heldout, self.config.teaching.top_k
        logprobs = []
        for model, what in ((self.config.out / "start", "before learning"), (student, "the student reads")):
            llm = self._load(model)
            reader = Reader(llm, top_k)
            with self.progress.bar(what, len(documents)) as advance:
                logprobs.append(read_all(reader, documents, advance))
            reader.close()
        teacher = self._stored("heldout").load(documents)
        inputs = GateInputs(llm, documents, teacher, logprobs[1], logprobs[0], self.progress)
        gate = self.config.gate
        judges: list[Judge] = [partial(agreement, gate)]
        if gate.num_answers:
            judges.append(partial(answers, gate))
        findings: list[Finding] = []
        for judge in (*judges, *self.judges):
            findings.append(judge(inputs))
            if not findings[-1].passed:
                break  # further gates would not change the result
        return findings

    def _rename(self, passed: bool, folder: Path, gguf: Path | None) -> tuple[Path, Path | None]:
        """Renames the candidate to `student`, or to `refused`, replacing an earlier one of that name."""
        name, out = ACCEPTED if passed else REFUSED, self.config.out
        before = self._before(name)
        with reraised(CacheError, f"cannot write {out / name}", "free space", OSError):
            shutil.rmtree(before, ignore_errors=True)
            if (out / name).is_dir():
                (out / name).rename(before)
            renamed = folder.rename(out / name)
            file = gguf.replace(out / f"{name}.gguf") if gguf else None
            sync(out)
            shutil.rmtree(before, ignore_errors=True)
        return renamed, file

    def _show(self, findings: Sequence[Finding]) -> None:
        columns = [
            Column("gate", lambda each: each.name),
            Column("passed", lambda each: "yes" if each.passed else "NO"),
            Column("what was found", lambda each: each.reason),
        ]
        self.progress.table(Table(columns, findings, title="Gates, on prompts that the student never saw"))

    def _say(self, result: DistillResult) -> None:
        served = result.gguf or result.student
        if not result.passed:
            self.progress.say(f"REFUSED: {result.reason}. It lies in {served}; nothing else was touched")
            return
        share = result.weights["student"] / result.weights["teacher"]
        self.progress.say(
            f"student: {served}, {share:.0%} of the teacher's weights; its drafter: "
            f"paceline train --target {served} --prompts PROMPTS --out {result.run / 'drafter-run'}"
        )
