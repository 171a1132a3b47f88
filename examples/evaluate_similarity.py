"""Score a sentence encoder before and after a cut on pairs of sentences with scores, as in STS benchmarks.

    rankattn convert minilm --qk-rank 16 --v-head-dim 24 --out narrow
    python examples/evaluate_similarity.py minilm narrow --pairs sts-test.csv
    python examples/evaluate_similarity.py minilm narrow --pairs mine.tsv --columns first second similarity --json

Both models are loaded with sentence-transformers (`pip install sentence-transformers`), from a folder or by a Hub name. For each
model the script prints Spearman's and Pearson's correlation of the cosines of its embeddings with the scores, and its parameters.

The file is UTF-8, one pair a line, separated by tabs or commas. Its first line can name the columns (`--columns`). Without such a
line it has three columns, sentence1, sentence2 and score, or seven or more, as the files of STS-B: genre, file, year, id, score,
sentence1, sentence2. Tab-separated files are read without quotes, as STS-B is written.
"""

import argparse
import csv
import json
import math
import sys
from typing import NamedTuple

import numpy as np
from scipy.stats import pearsonr, spearmanr
from sentence_transformers import SentenceTransformer
from transformers.utils import logging

import hf_rankattn  # noqa: F401  registers the rank models with transformers


COLUMNS = ("sentence1", "sentence2", "score")
BENCHMARK = (5, 6, 4)  # places of these columns in the files of STS-B, which name none


class Pair(NamedTuple):
    first: str
    second: str
    score: float


def read_rows(file: str) -> list[tuple[int, list[str]]]:
    """The lines of a file as cells, with their numbers; empty lines are left out."""
    try:
        with open(file, encoding="utf-8-sig", newline="") as lines:
            tabs = "\t" in lines.readline()
            lines.seek(0)
            reader = csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE) if tabs else csv.reader(lines)
            return [(reader.line_num, row) for row in reader if any(cell.strip() for cell in row)]
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text: save it as UTF-8.") from error
    except csv.Error as error:
        raise ValueError(f"line {reader.line_num} of {file} cannot be read as a table: {error}.") from error


def read_pairs(file: str, columns: tuple[str, ...] = COLUMNS) -> list[Pair]:
    rows = read_rows(file)
    header = [cell.strip() for cell in rows[0][1]] if rows else []
    if set(columns) <= set(header):
        places = tuple(header.index(name) for name in columns)
        rows = rows[1:]
    elif tuple(columns) != COLUMNS:
        raise ValueError(f"the first line of {file} must name the columns {', '.join(columns)}, got {header}.")
    elif len(header) == 3 or len(header) >= 7:
        places = (0, 1, 2) if len(header) == 3 else BENCHMARK
    else:
        raise ValueError(
            f"{file} must have lines of 3 columns ({', '.join(COLUMNS)}), the columns of STS-B, or a first line that names "
            f"its columns (--columns); its first line has {len(header)} columns."
        )
    pairs = [pair_of(f"line {number} of {file}", cells, places) for number, cells in rows]
    if len(pairs) < 3 or len({pair.score for pair in pairs}) < 2:
        raise ValueError(f"{file} has {len(pairs)} pairs: a correlation needs at least 3, with different scores.")
    return pairs


def pair_of(where: str, cells: list[str], places: tuple[int, ...]) -> Pair:
    if len(cells) <= max(places):
        raise ValueError(f"{where} has {len(cells)} columns, and column {max(places) + 1} is needed.")
    first, second, score = (cells[place].strip() for place in places)
    try:
        number = float(score)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{where} has the score {score[:40]!r}, which is not a number. Is this the right column?")
    if not first or not second:
        raise ValueError(f"{where} has an empty sentence.")
    return Pair(first, second, number)


def evaluated(name: str, pairs: list[Pair]) -> dict[str, float | int | str]:
    """The correlations of the cosines of a model with the scores."""
    try:
        model = SentenceTransformer(name)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{name} cannot be loaded as a sentence encoder: {str(error).strip().splitlines()[0]}"
        ) from error
    first, second = (
        model.encode([pair[side] for pair in pairs], show_progress_bar=False, normalize_embeddings=True)
        for side in (0, 1)
    )
    cosines, scores = (first * second).sum(1, dtype=np.float64), [pair.score for pair in pairs]
    if not np.isfinite(cosines).all() or np.ptp(cosines) == 0:
        raise ValueError(f"the cosines of {name} are NaN or all equal, so they have no correlation with the scores.")
    found = {"spearman": float(spearmanr(cosines, scores)[0]), "pearson": float(pearsonr(cosines, scores)[0])}
    return {"model": name, **found, "parameters": sum(weight.numel() for weight in model.parameters())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("original", help="folder or Hub name of the encoder before the cut")
    parser.add_argument("cut", help="folder or Hub name of the encoder after the cut")
    parser.add_argument("--pairs", required=True, help="file of sentence pairs with scores")
    parser.add_argument(
        "--columns", nargs=3, default=COLUMNS, metavar="NAME", help="names of the columns in its first line"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    try:
        pairs = read_pairs(arguments.pairs, tuple(arguments.columns))
        before, after = (evaluated(name, pairs) for name in (arguments.original, arguments.cut))
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    if arguments.json:
        print(json.dumps({"pairs": len(pairs), "original": before, "cut": after}, indent=2))
        return
    print(f"{len(pairs):,} pairs of {arguments.pairs}")
    print(f"{'':<10}{'Spearman':>10}{'Pearson':>10}{'parameters':>14}")
    for label, found in (("original", before), ("cut", after)):
        print(f"{label:<10}{found['spearman']:>10.4f}{found['pearson']:>10.4f}{found['parameters']:>14,}")


if __name__ == "__main__":
    main()
