"""Small checkpoints with a tokenizer, and `rankattn convert` on them."""

import json
from pathlib import Path

import torch
from testing_common import BERT
from testing_probe import run
from transformers import AutoTokenizer
from typer.testing import CliRunner

from hf_rankattn.files.texts import package_text
from rankattn_cli import main as cli


def save_tiny(folder, minilm, family=BERT, suffix="Model", tokenizer=True, **fields):
    """Real tokens on a tiny model: narrow layers with weights that matter, and MiniLM's tokenizer."""
    torch.manual_seed(0)
    fields = {"vocab_size": 30522, "initializer_range": 0.2, **fields}
    if family is BERT:
        fields = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, **fields}
    family.stock(suffix)(family.stock_config(**fields)).save_pretrained(folder)
    if tokenizer:
        AutoTokenizer.from_pretrained(minilm).save_pretrained(folder)
    return str(folder)


def few_texts(folder: Path) -> str:
    """A file of three texts: calibration on the package's own takes seconds."""
    (folder / "texts.txt").write_text("\n\n".join(package_text()[:3]))
    return str(folder / "texts.txt")


def told(*arguments) -> str:
    """What `rankattn convert` prints."""
    result = CliRunner().invoke(cli.app, ["convert", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stdout


def command(*arguments) -> dict:
    return json.loads(told(*arguments, "--json"))


def refusal(capsys, *arguments) -> str:
    """The one line with which `rankattn convert` refuses arguments."""
    code, _, errors = run(capsys, "convert", *arguments)
    line = errors.splitlines()[-1]
    assert code == 2 and line.startswith("rankattn: ")
    return line
