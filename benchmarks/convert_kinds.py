"""What a cut does to kinds of text that it was not calibrated on: `python -m benchmarks.convert_kinds`.

MiniLM is cut to one rank and judged on 40 held-out texts of each kind: the package's prose, docstrings and source code of
Python's standard library, the licence files of installed packages, and files of paragraphs of your own (`--kind NAME=FILE`).
Nothing is downloaded.
"""

import argparse
import ast
import importlib.metadata
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.measure_command import minilm
from hf_rankattn import convert_rank
from hf_rankattn.convert import checkpoint as converting
from hf_rankattn.files.running import evaluating
from hf_rankattn.files.texts import calibration_text, file_text, package_text


COUNT = 40


def functions() -> Iterator[tuple[ast.AST, str]]:
    """The documented functions and classes of the standard library with their source, one module after the other."""
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        source = file.read_text(encoding="utf-8", errors="replace")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node):
                yield node, source


def spread(texts: list[str]) -> list[str]:
    """`COUNT` texts at even distances, each cut to 120 words."""
    chosen = [texts[i * len(texts) // COUNT] for i in range(COUNT)]
    return [" ".join(text.split()[:120]) for text in chosen]


def kinds() -> dict[str, list[str]]:
    docstrings = [text for node, _ in functions() if len((text := ast.get_docstring(node)).split()) >= 40]
    code = []
    for node, source in functions():
        if isinstance(node, ast.FunctionDef) and len(node.body) > 4:
            first, last = node.body[1].lineno, node.end_lineno
            code.append("\n".join(source.splitlines()[first - 1 : last]))
    licences: dict[str, None] = {}
    for package in importlib.metadata.distributions():
        for file in package.files or []:
            if "licen" in file.name.lower() and file.suffix in ("", ".txt", ".md", ".rst"):
                text = Path(str(package.locate_file(file))).read_text(encoding="utf-8", errors="replace")
                licences.update(dict.fromkeys(part for part in text.split("\n\n") if len(part.split()) >= 40))
    return {
        "prose": package_text()[40 : 40 + COUNT],
        "docstrings": spread(docstrings),
        "code": spread([text for text in code if len(text.split()) >= 40]),
        "licences": spread(sorted(licences)),
    }


def embeddings(model, batches) -> torch.Tensor:
    rows = []
    with evaluating(model):
        for batch in batches:
            mask = batch["attention_mask"][..., None]
            rows.append((model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1))
    return torch.nn.functional.normalize(torch.cat(rows), dim=-1)


def nearest(states: torch.Tensor) -> torch.Tensor:
    return (states @ states.T).fill_diagonal_(-torch.inf).argmax(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--qk-rank", type=int, default=16)
    parser.add_argument("--kind", action="append", default=[], metavar="NAME=FILE", help="a UTF-8 file of paragraphs")
    arguments = parser.parse_args()
    rank, texts_of_kind = arguments.qk_rank, kinds()
    for given in arguments.kind:
        name, _, file = given.partition("=")
        texts_of_kind[name] = spread([text for text in file_text(file) if len(text.split()) >= 40])
    torch.set_num_threads(1)
    model, tokenizer = converting.load(minilm()), converting.load_tokenizer(minilm())
    judged = {kind: converting.text_batches(tokenizer, texts, 256) for kind, texts in texts_of_kind.items()}
    originals = {kind: embeddings(model, batches) for kind, batches in judged.items()}
    sources = {
        "none (weights only)": None,
        "40 of prose": package_text()[:COUNT],
        "60 of five kinds": calibration_text(),
    }
    print(f"| calibration, rank {rank} | objective | {' | '.join(judged)} | seconds of CPU |")
    print("|---|---|" + "---|" * (len(judged) + 1))
    for name, texts in sources.items():
        batches = None if texts is None else converting.text_batches(tokenizer, texts, 256)
        for objective in ("logits",) if texts is None else ("logits", "attention"):
            start = time.process_time()
            converted = convert_rank(model, rank, calibration=batches, objective=objective)
            seconds = time.process_time() - start
            cells = []
            for kind, batches_of_kind in judged.items():
                states = embeddings(converted, batches_of_kind)
                same = (nearest(states) == nearest(originals[kind])).double().mean()
                cells.append(f"{same:.0%} ({(states * originals[kind]).sum(-1).mean():.3f})")
            print(f"| {name} | {objective} | {' | '.join(cells)} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
