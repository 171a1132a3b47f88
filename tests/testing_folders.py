"""Checkpoints as users have them: a folder on disk with weights, a config and a trained tokenizer."""

import json
from pathlib import Path

import torch
import transformers
from testing_common import Family

from hf_rankattn import package_text


TOKENS = 400
LENGTH = 64
NARROW = 5  # query-key rank of the rank twins; 8 is the stock width of 32 / 4


def save_tokenizer(family: Family, folder: Path) -> None:
    """The tokenizer class of the family, trained on the package's text."""
    empty = getattr(transformers, f"{family.name}Tokenizer")()
    empty.train_new_from_iterator(package_text(), vocab_size=TOKENS, show_progress=False).save_pretrained(folder)


def tiny_checkpoint(folder: Path, minilm: str, **sizes) -> Path:
    """A tiny BERT with a real tokenizer."""
    torch.manual_seed(0)
    fields = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(**{**fields, "max_position_embeddings": 64, **sizes})
    transformers.BertModel(config).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(minilm).save_pretrained(folder)
    return folder


def change_config(folder: Path | str, **fields) -> None:
    file = Path(folder) / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def checkpoint_folder(family: Family, folder: Path, *, rank: bool = False, suffix: str = "Model", **fields) -> Path:
    """Save a small model of `family`, stock or rank twin, whose logits differ between tokens, with its tokenizer."""
    fields = {"vocab_size": TOKENS, **({"qk_rank": NARROW} if rank else {}), **fields}
    kind, config = (family.rank, family.rank_config) if rank else (family.stock, family.stock_config)
    torch.manual_seed(0)
    model = kind(suffix)(config(**fields))
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * torch.randn(weight.shape)
    model.save_pretrained(folder)
    save_tokenizer(family, folder)
    return folder
