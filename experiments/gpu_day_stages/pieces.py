"""Files for a visit in pieces that fit through a narrow door, and what came back joined again.

    python experiments/gpu_day_stages/pieces.py prepare --model MODEL.gguf --answers FOLDER --out bring
    python experiments/gpu_day_stages/pieces.py join OUT --name drafters.tar --out runs/from-gpu

`prepare` writes bring/1/, bring/2/, ...: the model in that many pieces, and into the first the token ids of all
answers (answers.parquet: no texts, compressed). A piece is called NAME.1of2.HASH, by the beginning of the whole file's
SHA-256. `join` finds pieces anywhere below a folder, checks the hash, and unpacks a tar.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
import tarfile
from dataclasses import asdict, replace
from pathlib import Path

from paceline.errors import ModelFileError, PacelineError

MOST_BYTES = 15 * 2**20
"""Most bytes of a piece that is brought back."""
PIECE = re.compile(r"(?P<name>.+)\.(?P<number>\d+)of(?P<total>\d+)\.(?P<hash>[0-9a-f]{16})")
ANSWERS = "answers.parquet"


def split(file: Path, total: int) -> dict[str, bytes]:
    """Pieces of about equal size by their names."""
    data = file.read_bytes()
    mark, size = hashlib.sha256(data).hexdigest()[:16], -(-len(data) // total)
    return {f"{file.name}.{number + 1}of{total}.{mark}": data[number * size :][:size] for number in range(total)}


def names_below(folder: Path) -> set[str]:
    """Files that lie below a folder in pieces, all of them or some."""
    return {match["name"] for path in folder.rglob("*") if (match := PIECE.fullmatch(path.name))}


def join(folder: Path, name: str, out: Path) -> Path:
    """Write `out`/`name` from its pieces below `folder`. Raises ModelFileError when one is missing or damaged."""
    pieces = {
        (match["hash"], int(match["total"]), int(match["number"])): path
        for path in folder.rglob(f"{name}.*")
        if (match := PIECE.fullmatch(path.name)) and match["name"] == name
    }
    whole = {key[:2] for key in pieces}
    if len(whole) != 1:
        raise ModelFileError(f"{folder} holds pieces of {len(whole)} files called {name}: keep those of one alone")
    ((mark, total),) = whole
    if missing := [number for number in range(1, total + 1) if (mark, total, number) not in pieces]:
        raise ModelFileError(f"piece {missing[0]} of {total} of {name} is not below {folder}: bring it too")
    data = b"".join(pieces[mark, total, number].read_bytes() for number in range(1, total + 1))
    if hashlib.sha256(data).hexdigest()[:16] != mark:
        raise ModelFileError(f"the pieces of {name} below {folder} are damaged: bring them again")
    out.mkdir(parents=True, exist_ok=True)
    (out / name).write_bytes(data)
    return out / name


def write_answers(folders: list[Path], file: Path) -> int:
    """The token ids of answers in one file that `paceline train --answers` takes; how many there are."""
    from paceline.data.answers import SCHEMA, AnswerShards, pa, parquet

    answers = [asdict(replace(answer, text="")) for folder in folders for answer in AnswerShards(folder)]
    table = pa.Table.from_pylist(answers, SCHEMA)
    parquet.write_table(table, file, compression="zstd", compression_level=19)
    return len(answers)


def prepare(model: Path, answers: list[Path], out: Path, total: int) -> list[Path]:
    """The folders to bring, one a visit."""
    folders = [out / str(number + 1) for number in range(total)]
    for folder, (name, data) in zip(folders, split(model, total).items(), strict=True):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    if answers:
        write_answers(answers, folders[0] / ANSWERS)
    return folders


def pack(folder: Path, name: str, out: Path) -> dict[str, int]:
    """A folder as a tar in pieces in `out`, in the place of earlier ones of this name; bytes by piece."""
    archive = folder.parent / name
    with tarfile.open(archive, "w") as tar:
        tar.add(folder, arcname=folder.name)
    for old in out.glob(f"{name}.*"):
        old.unlink()
    pieces = split(archive, -(-archive.stat().st_size // MOST_BYTES))
    for piece, data in pieces.items():
        (out / piece).write_bytes(data)
    return {piece: len(data) for piece, data in pieces.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    preparing = commands.add_parser("prepare")
    preparing.add_argument("--model", type=Path, required=True, help="a GGUF file")
    preparing.add_argument(
        "--answers", type=Path, action="append", default=[], help="folder of paceline regenerate; repeatable"
    )
    preparing.add_argument("--pieces", type=int, default=2)
    joining = commands.add_parser("join")
    joining.add_argument("folder", type=Path)
    joining.add_argument("--name", default="drafters.tar")
    for each in (preparing, joining):
        each.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    try:
        if options.command == "prepare":
            for folder in prepare(options.model, options.answers, options.out, options.pieces):
                print(folder, f"{sum(file.stat().st_size for file in folder.iterdir()) / 2**20:.1f} MiB")
        else:
            file = join(options.folder, options.name, options.out)
            if tarfile.is_tarfile(file):
                with tarfile.open(file) as tar:
                    tar.extractall(options.out, filter="data")
            print(file)
    except PacelineError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
