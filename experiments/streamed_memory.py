"""Peak memory of `train --features streamed` over corpora of two sizes, on the tiny target; prints MiB of each.

python experiments/streamed_memory.py --out runs/streamed --documents 3000,30000
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

from paceline.train.answers import Answer, AnswerShards

CODE = """
import resource, sys
from paceline.cli import app
app(sys.argv[1:], prog_name="paceline", standalone_mode=False)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""
TINY = ("--scale", "tiny", "--device", "cpu", "--dtype", "float32", "--threads", "1", "--max-steps", "20")


def write_answers(folder: Path, number: int) -> None:
    """Answers of 240 random tokens, prompt included."""
    shutil.rmtree(folder, ignore_errors=True)
    shards, random = AnswerShards(folder), np.random.default_rng(0)
    for first in range(0, number, 500):
        said = [random.integers(3, 250, 236).tolist() for _ in range(first, first + 500)]
        shards.write([Answer(f"q{first + n}@0", "here", 0, 0.0, [1, 2, 3, 4], ids, "length", "") for n, ids in enumerate(said)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--documents", default="3000,30000", help="multiples of 500")
    parser.add_argument("--features", default="streamed")
    options = parser.parse_args()
    for number in map(int, options.documents.split(",")):
        answers, run = options.out / f"answers-{number}", options.out / f"run-{number}"
        write_answers(answers, number)
        shutil.rmtree(run, ignore_errors=True)
        words = ("train", *TINY, "--answers", str(answers), "--features", options.features, "--out", str(run))
        done = subprocess.run([sys.executable, "-c", CODE, *words], capture_output=True, text=True, check=True)
        print(f"{number} documents, {options.features}: {done.stdout.split()[-1]} MiB at most", flush=True)


if __name__ == "__main__":
    main()
