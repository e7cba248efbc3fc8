"""The run `distill`: a teacher's answers in, a student out. Stages, each resumed where a killed run left it:

regenerate   runs/x/regenerate/answers/   the teacher answers the prompts, where no answers were given
start        runs/x/start/                the student before it learned: some of the teacher's layers
top-k        runs/x/top-k/                what the teacher says along its answers (reading.py)
train        runs/x/checkpoints/          by TRL (teach.py)
gate         runs/x/candidate/            the student in its forms, measured (gate.py)
             runs/x/student/, student.gguf     kept; or runs/x/refused/, refused.gguf
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.engine.llm import LLM
from paceline.errors import CacheError, PromptError, reraised
from paceline.hub import resolve
from paceline.loop.distill.config import DistillConfig
from paceline.loop.distill.gate import Agreement, Finding, Judge, OwnAnswers, Seat
from paceline.loop.distill.influence import influences
from paceline.loop.distill.reading import Reader, Stored, read_all
from paceline.loop.distill.start import num_weights, write_start
from paceline.model import checkpoint
from paceline.model.gguf.container import is_gguf
from paceline.model.gguf.to_folder import LAST_FILE, write_folder, write_model
from paceline.model.gguf.writer import write_gguf
from paceline.model.text.tokenizer import Tokenizer
from paceline.report.tables import Column, Progress, Table
from paceline.runs.folder import RunFolder, plain, sync
from paceline.runs.lock import only_run
from paceline.runs.ranks import Ranks
from paceline.runs.stopping import Stop, stopped_by_signal
from paceline.train.answers.on_ray import run as regenerate
from paceline.train.answers.run_identity import check_same_run
from paceline.train.config import RegenerateConfig
from paceline.train.documents.dataset import Corpus, Document, check_answers, check_vocabulary, read_corpus

KEPT, REFUSED, CANDIDATE = "student", "refused", "candidate"
RESULT = "distilled.json"
LENGTH = ("minutes", "max_steps", "epochs", "checkpoint_minutes", "micro_batch")
"""A resumed run may be asked for more of these."""


@dataclass(frozen=True, slots=True)
class DistillResult:
    """What came of it."""

    run: Path
    student: Path
    """The Transformers folder: in `student` when it was kept, in `refused` when not."""
    gguf: Path | None
    passed: bool
    reason: str
    layers: tuple[int, ...]
    """Of the teacher; none for a student that was a model before."""
    steps: int
    minutes: float
    """Of training."""
    findings: tuple[Finding, ...] = ()
    weights: dict[str, int] = field(default_factory=dict)
    """That a pass reads, of teacher and student."""


def run(config: DistillConfig, judges: Sequence[Judge], progress: Progress) -> DistillResult:
    """As `paceline.loop.distill.distill`."""
    config.require_answers()
    import paceline.loop.distill.teach as teach  # says what to install before anything is computed

    with only_run(config.out, "distilling", Ranks(), progress.say), stopped_by_signal(progress.say) as stop:
        return _Stages(config, judges, progress, stop, teach).run()


class _Stages:
    def __init__(self, config: DistillConfig, judges: Sequence[Judge], progress: Progress, stop: Stop, teach: Any) -> None:
        self.config, self.judges, self.progress, self.stop, self.teach = config, judges, progress, stop, teach
        self.teacher = resolve(config.teacher.model)

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
        taught = self._train(corpus, folder)
        student, gguf = self._forms()
        findings = self._judge(corpus, gguf or student)
        passed = all(each.passed for each in findings)
        reason = "; ".join(each.reason for each in findings if passed or not each.passed)
        self._show(findings)
        student, gguf = self._settle(passed, student, gguf)
        weights = {
            name: sum(num_weights(checkpoint.load_config(at))) for name, at in (("teacher", self.teacher), (KEPT, student))
        }
        minutes = taught.seconds / 60
        made = DistillResult(
            self.config.out, student, gguf, passed, reason, layers, taught.steps, minutes, tuple(findings), weights
        )
        folder.results(plain(asdict(made)), RESULT)
        self._say(made)
        return made

    def _open(self) -> RunFolder:
        """Raises ConfigError where the folder was begun with other settings."""
        asked = plain(asdict(self.config))
        for name in LENGTH:
            asked["teaching"].pop(name)
        for part in ("out", "gate"):
            asked.pop(part)
        if (self.config.out / "config.json").is_file():
            check_same_run(self.config.out, "distill", asked)
        else:
            RunFolder.create("distill", {"distill": asked}, self.config.out)
        return RunFolder.open(self.config.out)

    def _answers(self) -> list[Path]:
        config = self.config
        if not config.asked.prompts:
            return [*config.answers]
        out = config.out / "regenerate"
        regenerate(RegenerateConfig(out, config.teacher, config.asked, config.answering), self.progress)
        return [*config.answers, out / "answers"]

    def _corpus(self, sources: list[Path]) -> Corpus:
        teaching = self.config.teaching
        check_answers(sources, Tokenizer.from_path(self.teacher).decode)
        longest = min(teaching.max_len, checkpoint.load_config(self.teacher).max_position)
        corpus = read_corpus(sources, longest, teaching.heldout_share, teaching.max_heldout, 8)
        check_vocabulary(corpus, checkpoint.load_config(self.teacher).vocab_size)
        if not corpus.heldout:
            raise PromptError("fewer than 10 different prompts: a student needs more answers, and some that it never sees")
        num_tokens = sum(len(each) - each.answer_start for each in corpus.train)
        self.progress.say(
            f"{len(corpus.train)} answers to learn from ({num_tokens} tokens), {len(corpus.heldout)} held out; "
            f"{corpus.told() or 'all of them whole'}"
        )
        return corpus

    def _read_teacher(self, corpus: Corpus) -> None:
        """What the teacher says along held-out answers, and for soft along all of them."""
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
        told = self._stored("train").load(corpus.train) if config.teaching.method == "soft" else None
        in_blocks, words = self._form == "q4_1", config.files.embedding_format == "q4_1"
        freeze = config.student.freeze_embeddings
        lesson = self.teach.Lesson(
            out / "start", teacher, corpus.train, told, out / "checkpoints", freeze, in_blocks, in_blocks and words
        )
        return self.teach.teach(lesson, config.teaching, out / "trained", self.stop, folder, self.progress)

    @property
    def _form(self) -> str:
        """Of the GGUF file, none for none."""
        asked = self.config.files.gguf
        if asked != "auto":
            return asked
        return "q4_1" if is_gguf(self.teacher) and not self.config.student.student else "none"

    def _forms(self) -> tuple[Path, Path | None]:
        """The trained student as a folder and, where asked for, as a GGUF file."""
        config, out = self.config, self.config.out
        folder, trained = out / CANDIDATE, out / "trained"
        with reraised(CacheError, f"cannot write {folder}", "free space", OSError):
            shutil.rmtree(folder, ignore_errors=True)
        shape = checkpoint.load_config(trained)
        tensors = checkpoint.check_tensors(shape, checkpoint.load_tensors(trained), trained)
        write_model(folder, checkpoint.config_json(out / "start"), tensors, out / "start", config.files.save_dtype)
        form = self._form
        if form == "none":
            return folder, None
        like = resolve(config.student.student) if config.student.student else self.teacher
        embedding = None if config.files.embedding_format == "same" else config.files.embedding_format
        return folder, write_gguf(trained, like, out / f"{CANDIDATE}.gguf", form, embedding)

    def _judge(self, corpus: Corpus, student: Path) -> list[Finding]:
        documents, top_k = corpus.heldout, self.config.teaching.top_k
        read = []
        for model, what in ((self.config.out / "start", "before learning"), (student, "the student reads")):
            llm = self._load(model)
            reader = Reader(llm, top_k)
            read.append(read_all(reader, documents, what, self.progress))
            reader.close()
        seat = Seat(llm, documents, self._stored("heldout").load(documents), read[1], read[0], self.progress)
        gate = self.config.gate
        judges: list[Judge] = [Agreement(gate), *([OwnAnswers(gate)] if gate.num_answers else []), *self.judges]
        findings: list[Finding] = []
        for judge in judges:
            findings.append(judge(seat))
            if not findings[-1].passed:
                break  # what follows costs time and changes nothing
        return findings

    def _settle(self, passed: bool, folder: Path, gguf: Path | None) -> tuple[Path, Path | None]:
        """Give the candidate its name. One that is refused takes no student's place."""
        name, out = KEPT if passed else REFUSED, self.config.out
        before = out / f".{name}-before"
        with reraised(CacheError, f"cannot write {out / name}", "free space", OSError):
            shutil.rmtree(before, ignore_errors=True)
            if (out / name).is_dir():
                (out / name).rename(before)
            settled = folder.rename(out / name)
            file = gguf.replace(out / f"{name}.gguf") if gguf else None
            sync(out)
            shutil.rmtree(before, ignore_errors=True)
        return settled, file

    def _show(self, findings: Sequence[Finding]) -> None:
        columns = [
            Column("gate", lambda each: each.name),
            Column("passed", lambda each: "yes" if each.passed else "NO"),
            Column("what was found", lambda each: each.reason),
        ]
        self.progress.table(Table(columns, findings, title="Gates, on prompts that the student never saw"))

    def _say(self, made: DistillResult) -> None:
        served = made.gguf or made.student
        if not made.passed:
            self.progress.say(f"REFUSED: {made.reason}. It lies in {served}; nothing else was touched")
            return
        self.progress.say(
            f"student: {served}, {made.weights[KEPT] / made.weights['teacher']:.0%} of the teacher's weights; its drafter: "
            f"paceline train --target {served} --prompts PROMPTS --out {made.run / 'drafter-run'}"
        )
