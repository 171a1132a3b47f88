"""Rank limits in folders and on the Hub: projections in safetensors, their widths in JSON, and a card."""

import json
import tempfile
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, ModelCard, ModelCardData
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel
from transformers.utils import cached_file

from ..files.atomic import fresh_folder
from ..files.checkpoints import readable
from ..hub.cards import TEMPLATES
from ..version import __version__
from .heads import HeadLimits, Widths


WEIGHTS, CONFIG = "rank_limit.safetensors", "rank_limit.json"
FORMAT = 1
NAMES = ("query", "key", "value", "output")


def save(limit: Any, folder: str | Path, overwrite: bool = False) -> Path:
    """Write a limit and its card to a folder, all or nothing."""
    with fresh_folder(folder, overwrite, marker=CONFIG, what="a rank limit") as staging:
        tensors = {name: weight.detach().cpu().contiguous() for name, weight in limit.state_dict().items()}
        save_file(tensors, staging / WEIGHTS, metadata={"format": "pt"})
        (staging / CONFIG).write_text(json.dumps(described(limit), indent=1) + "\n", encoding="utf-8")
        card_of_limit(limit, Path(folder).resolve().name).save(staging / "README.md")
    return Path(folder).resolve()


def described(limit: Any) -> dict[str, Any]:
    """What a limit is, without its projections."""
    layers = [
        {**head.widths._asdict(), "key_ranks": head.key_ranks, "value_widths": head.value_widths}
        for head in limit.heads
    ]
    return {
        "format": FORMAT,
        "hf_rankattn": __version__,
        "model_type": limit.model.config.model_type,
        "base_model": base_name(limit.model),
        "tower": limit.tower,
        "layers": layers,
        "facts": limit.facts,
    }


def base_name(model: PreTrainedModel) -> str | None:
    """The Hub repository that a model was loaded from; folders of this machine say nothing to others."""
    name = model.name_or_path
    return name if name and not Path(name).exists() else None


def card_of_limit(limit: Any, repo_id: str) -> ModelCard:
    facts = described(limit)
    layers, base = facts["layers"], facts["base_model"]
    rows = []
    for _, run in groupby(enumerate(layers), key=lambda entry: entry[1]):
        own = list(run)
        keys, values = (shown(own[0][1][name]) for name in ("key_ranks", "value_widths"))
        rows.append({**own[0][1], "first": own[0][0], "last": own[-1][0], "kept_keys": keys, "kept_values": values})
    data = ModelCardData(
        library_name="hf_rankattn", base_model=base, tags=["rank-attention", "rank-limit", facts["model_type"]]
    )
    return ModelCard.from_template(
        data,
        template_path=str(TEMPLATES / "limit_card.md"),
        repo_id=repo_id,
        model_type=facts["model_type"],
        base=base,
        rows=rows,
        cached=sum(sum(layer["key_ranks"]) + sum(layer["value_widths"]) for layer in layers),
        whole=sum(layer["groups"] * (layer["qk"] + layer["value"]) for layer in layers),
        auto_class="AutoModelForCausalLM" if limit.model.can_generate() else "AutoModel",
        facts=limit.facts,
    )


def shown(widths: list[int]) -> str:
    return str(widths[0]) if len(set(widths)) == 1 else ", ".join(map(str, widths))


@torch.inference_mode(False)
def read(
    model: PreTrainedModel, name: str | Path, revision: str | None = None
) -> tuple[list[HeadLimits], dict[str, Any]]:
    """The projections of each layer and the description, from a folder or a Hub repository."""
    with readable(name):
        config, weights = (str(cached_file(name, file, revision=revision)) for file in (CONFIG, WEIGHTS))
        facts = json.loads(Path(config).read_text(encoding="utf-8"))
        if facts.get("format") != FORMAT:
            raise ValueError(f"{CONFIG} has the format {facts.get('format')}, and this version reads {FORMAT}.")
        if facts["model_type"] != model.config.model_type:
            raise ValueError(
                f"this rank limit is for a model of type {facts['model_type']}, and the model is of type {model.config.model_type}."
            )
        with safe_open(weights, framework="pt") as tensors:
            found = {key: tensors.get_tensor(key) for key in tensors.keys()}  # noqa: SIM118
        heads = []
        for number, layer in enumerate(facts["layers"]):
            ranks = layer.pop("key_ranks"), layer.pop("value_widths")
            query, key, value, output = (found.get(f"heads.{number}.{part}") for part in NAMES)
            keys = None if query is None or key is None else (query, key)
            values = None if value is None or output is None else (value, output)
            head = HeadLimits(Widths(**layer), *ranks, keys, values)
            check(head, number)
            heads.append(head)
    return heads, facts


def check(head: HeadLimits, number: int) -> None:
    """Refuse projections whose shapes are not those of the description, or that hold NaN or Inf."""
    heads, groups, qk, value = head.widths
    r, s = max(head.key_ranks), max(head.value_widths)
    shapes = {
        "query": (heads, qk, r),
        "key": (groups, qk, r),
        "value": (groups, value, s),
        "output": (heads, s, value),
    }
    whole = {"query": r == qk, "value": s == value}
    for name, shape in shapes.items():
        weight = getattr(head, name)
        if weight is None and not whole.get({"key": "query", "output": "value"}.get(name, name), False):
            raise ValueError(
                f"layer {number} has no {name}, and its widths are {head.key_ranks} and {head.value_widths}."
            )
        if weight is not None and tuple(weight.shape) != shape:
            raise ValueError(f"the {name} of layer {number} is {tuple(weight.shape)}, and its widths need {shape}.")
        ranks = head.key_ranks if name in ("query", "key") else head.value_widths
        if weight is not None and name in ("key", "value"):
            if any(bool(own[:, rank:].any()) for own, rank in zip(weight, ranks, strict=True)):
                raise ValueError(f"the {name} of layer {number} is not zero behind the ranks {ranks}.")
        if weight is not None and not bool(torch.isfinite(weight).all()):
            raise ValueError(f"the {name} of layer {number} holds NaN or Inf.")


def push(limit: Any, repo_id: str, private: bool | None = None, token: bool | str | None = None, **commit) -> str:
    """Upload a limit with its card in one commit; returns the address of the commit."""
    api = HfApi(token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    with tempfile.TemporaryDirectory() as place:
        folder = save(limit, Path(place) / "limit")
        card_of_limit(limit, repo_id).save(folder / "README.md")
        return str(api.upload_folder(repo_id=repo_id, folder_path=folder, **commit))
