"""Inputs of serving_clients.sh: prompts for guidellm and its report, the model's name, and for lm-eval the model's
tokenizer and two small tasks as files, and a comparison of its reports.

python experiments/serving_clients.py prompts FILE | model URL | sweep REPORT.json
python experiments/serving_clients.py tasks FOLDER | compare PLAIN DRAFTED     (folders that lm-eval wrote)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from paceline.net.streaming import Client, served_name

BUILTIN = Path(__file__).parent.parent / "paceline" / "bench" / "prompts.jsonl"
NUM_PROMPTS = 32
MODEL = "smollm2-135m"
CHOICES = """\
The capital of France is|Paris,Rome,Cairo,Lima
A baby cat is called a|kitten,puppy,calf,foal
Water freezes at a temperature of 0 degrees|Celsius,Kelvin,Pascal,Newton
The largest planet of the solar system is|Jupiter,Mars,Venus,Mercury
The opposite of hot is|cold,warm,red,tall
Two plus two is|four,five,nine,seven
The author of Hamlet is|Shakespeare,Dickens,Homer,Goethe
Bees make|honey,milk,wool,paper
A triangle has so many sides:|three,four,five,six
The sun rises in the|east,west,north,south
The first month of the year is|January,March,June,October
The colour of grass is|green,blue,purple,black
The currency of Japan is the|yen,euro,dollar,peso
People breathe through their|lungs,knees,ears,elbows
The chemical symbol of gold is|Au,Fe,Na,Pb
A week has so many days:|seven,six,eight,ten
Spiders have so many legs:|eight,six,four,ten
The river that flows through Egypt is the|Nile,Rhine,Amazon,Thames
A person who bakes bread is a|baker,pilot,nurse,tailor
Ice is frozen|water,sand,oil,glass"""
"""Beginning of a sentence|its end, and three that are none."""
LISTS = """\
one, two, three, four, five,|six
Monday, Tuesday, Wednesday, Thursday,|Friday
A, B, C, D, E, F,|G
2, 4, 6, 8, 10,|12
January, February, March, April,|May
red apple, red apple, red|apple
cat, dog, cat, dog, cat,|dog
10, 20, 30, 40, 50,|60
do, re, mi, fa, so,|la
north, east, south,|west"""
"""Beginning of a list|how it goes on."""


def write_prompts(file: Path) -> None:
    """The built-in prompts again and again, each with its number first, so that none is in the server's prefix
    cache."""
    texts = [json.loads(line)["prompt"] for line in BUILTIN.read_text(encoding="utf-8").splitlines()]
    rows = [{"prompt": f"Question {number + 1}. {texts[number % len(texts)]}"} for number in range(NUM_PROMPTS)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def report_sweep(file: Path) -> int:
    """A line for each number of streams; 1 when a request failed or none was made."""
    benchmarks = json.loads(file.read_text(encoding="utf-8"))["benchmarks"]
    num_bad = 0
    for each in benchmarks:
        requests, metrics = each["scheduler_metrics"]["requests_made"], each["metrics"]
        streams = each["config"]["strategy"]["streams"]
        rate = metrics["output_tokens_per_second"]["successful"]["mean"]
        first = metrics["time_to_first_token_ms"]["successful"]["percentiles"]
        print(
            f"{streams:3d} streams: {requests['successful']} answered, {requests['errored']} failed, "
            f"{requests['incomplete']} incomplete; "
            f"{rate:.1f} tokens/s, first token p50 {first['p50']:.0f} ms, p99 {first['p99']:.0f} ms"
        )
        num_bad += requests["errored"] + requests["incomplete"] + (requests["successful"] == 0)
    return 1 if num_bad or not benchmarks else 0


def write_tasks(folder: Path) -> None:
    """Write `tokenizer/`, and tasks/ with two tasks for lm-eval."""
    from paceline.hub import resolve
    from paceline.model.text.tokenizer import Tokenizer

    tokenizer, tasks = Tokenizer.from_path(resolve(MODEL)), folder / "tasks"
    (folder / "tokenizer").mkdir(parents=True)
    tasks.mkdir()
    tokenizer.backend.save(str(folder / "tokenizer" / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.special_tokens}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(config))
    rows: dict[str, list[dict[str, Any]]] = {"choices": [], "lists": []}
    for place, line in enumerate(CHOICES.splitlines()):
        text, _, ends = line.partition("|")
        right, *others = ends.split(",")
        at = place % 4
        rows["choices"].append({"text": text, "choices": [*others[:at], right, *others[at:]], "answer": at})
    for line in LISTS.splitlines():
        text, _, end = line.partition("|")
        rows["lists"].append({"text": text, "answer": end})
    options = {
        "choices": {
            "output_type": "multiple_choice",
            "doc_to_choice": "choices",
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        },
        "lists": {
            "output_type": "generate_until",
            "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 32, "temperature": 0},
            "filter_list": [
                {
                    "name": "first",
                    "filter": [{"function": "regex", "regex_pattern": r"^\s*(\w+)"}, {"function": "take_first"}],
                }
            ],
            "metric_list": [{"metric": "exact_match"}],
        },
    }
    for name, own in options.items():
        (tasks / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
        task = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(tasks / f"{name}.jsonl")}},
            "test_split": "test",
            "doc_to_text": "{{text}}",
            "doc_to_target": "{{answer}}" if name == "lists" else "answer",
            **own,
        }
        (tasks / f"{name}.yaml").write_text(json.dumps(task))  # which is YAML, too


def read_scores(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Scores by task and metric, and what the server answered to each item."""
    (report,) = folder.rglob("results_*.json")
    scores = {
        f"{task} {name}": value
        for task, metrics in json.loads(report.read_text())["results"].items()
        for name, value in metrics.items()
        if isinstance(value, float | int) and "stderr" not in name and "," in name
    }
    answers = {
        f"{path.name.split('_')[1]} {row['doc_id']}": row["resps"]
        for path in folder.rglob("samples_*.jsonl")
        for row in map(json.loads, path.read_text().splitlines())
    }
    return scores, answers


def compare_scores(plain: Path, drafted: Path) -> int:
    """Print both reports' scores; 1 unless these and all answers, log-probabilities included, are equal."""
    (before, answers), (after, others) = read_scores(plain), read_scores(drafted)
    for name, value in before.items():
        print(f"{name}: {value!r} without drafts, {after[name]!r} with drafts")
    num_equal = sum(answers[item] == others.get(item) for item in answers)
    print(f"{num_equal} of {len(answers)} items have the same answers to the last digit")
    return 0 if before == after and before and num_equal == len(answers) == len(others) else 1


def main(words: list[str]) -> int:
    match words:
        case ["prompts", file]:
            write_prompts(Path(file))
        case ["model", url]:
            print(served_name(Client(url), None))
        case ["sweep", file]:
            return report_sweep(Path(file))
        case ["tasks", folder]:
            write_tasks(Path(folder))
        case ["compare", plain, drafted]:
            return compare_scores(Path(plain), Path(drafted))
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
