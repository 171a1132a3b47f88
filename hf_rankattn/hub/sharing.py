"""Sharing a rank model: export to a folder and upload to the Hub, each with a card."""

import inspect
import json
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import EvalResultEntry, HfApi, ModelCard, snapshot_download
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel
from transformers.utils import logging

from ..files.atomic import fresh_folder, is_own_file
from ..files.checkpoints import one_line, weight_files
from ..models import parameter_counts
from ..models.budget import check_finite_weights
from ..models.rank_attention import copy_source
from ..models.registration import auto_classes
from .cards import model_card
from .eval_results import write_eval_results


logger = logging.get_logger(__name__)
# what a folder must hold to be replaced
MODEL_FOLDER = {"marker": "config.json", "what": "a model", "word": '"model_type"'}
# what is uploaded from the folder that a model was loaded from: files of its tokenizer, and of sentence-transformers
TOKENIZER = (
    *("tokenizer*", "vocab*", "merges.txt", "added_tokens.json", "special_tokens_map.json", "*.model"),
    "chat_template*",
)
MODULES = (
    *("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"),
    *("[0-9]*_*/*.json", "[0-9]*_*/*.txt", "[0-9]*_*/*.safetensors", "[0-9]*_*/*.bin"),
)
# the section of a card that depends on whether the source is there
LOADING = re.compile(r"^## How to load it\n.*?(?=^## )", re.MULTILINE | re.DOTALL)


def card_of(model: PreTrainedModel, repo_id: str, **fields) -> ModelCard:
    """The [`model_card`] of a model, with what can be read off the model filled in."""
    # several Auto classes may build one class, such as AutoModelForPreTraining; the shortest name is the usual one
    loaders = [name for name, built in auto_classes(type(model.config)).items() if built is type(model)]
    fields.setdefault("auto_class", min(loaders, key=len, default=None))
    rank = hasattr(model.config, "head_geometry")
    fields.setdefault("live_parameters", parameter_counts(model).live if rank else model.num_parameters())
    return model_card(model.config, model_class=type(model).__name__, repo_id=repo_id, **fields)


def export_model(
    model: PreTrainedModel,
    folder: str | Path,
    *,
    tokenizer=None,
    card: ModelCard | None = None,
    eval_results: Sequence[EvalResultEntry] = (),
    remote_code: bool = False,
    overwrite: bool = False,
    max_shard_size: int | str = "50GB",
) -> Path:
    """Write a model, its tokenizer and its card to `folder`, atomically.

    Args:
        model: A rank model.
        folder: Where to write. It must not exist, unless `overwrite` is given; then it is replaced at the end.
        tokenizer (*optional*): Saved beside the model.
        card (`ModelCard`, *optional*): The card. Without it, one is rendered from the model alone.
        eval_results (`Sequence[huggingface_hub.EvalResultEntry]`, *optional*):
            Scores on benchmarks that are registered on the Hub, for the folder `.eval_results`.
        remote_code (`bool`, *optional*, defaults to `False`):
            Whether to add the source files of the model, so that transformers can load it with `trust_remote_code=True`
            where this package is not installed.
        overwrite (`bool`, *optional*, defaults to `False`): Whether an existing folder may be replaced.
        max_shard_size (`int` or `str`, *optional*, defaults to `"50GB"`): Largest weight file.

    >>> from tempfile import TemporaryDirectory
    >>> from hf_rankattn import RankEncoderConfig, RankEncoderModel, export_model
    >>> model = RankEncoderModel(RankEncoderConfig(input_dim=8, num_attention_heads=4, qk_rank=3))
    >>> with TemporaryDirectory() as place:
    ...     sorted(path.name for path in export_model(model, f"{place}/shared").iterdir())
    ['README.md', 'config.json', 'model.safetensors']
    """
    check_exportable(model, remote_code)
    with fresh_folder(folder, overwrite, **MODEL_FOLDER) as staging:
        model.save_pretrained(staging, max_shard_size=max_shard_size)
        if tokenizer is not None:
            tokenizer.save_pretrained(staging)
        write_eval_results(staging, eval_results)
        if remote_code:
            add_source(model, staging)
        card = card or card_of(model, Path(folder).resolve().name, remote_code=remote_code)
        card.save(staging / "README.md")
    return Path(folder).resolve()


def is_ours(model: PreTrainedModel) -> bool:
    return type(model).__module__.startswith("hf_rankattn.models.")


def check_exportable(model: PreTrainedModel, remote_code: bool) -> None:
    if not hasattr(getattr(model, "config", None), "head_geometry"):
        raise ValueError(
            f"only a rank model can be exported, got a {type(model).__name__}. Load the checkpoint with the Rank class of "
            "its family, or use save_pretrained."
        )
    check_finite_weights(model, f"the {type(model).__name__}")
    if remote_code and not is_ours(model):
        raise ValueError(
            f"remote_code=True copies the source of this package's models, and {type(model).__name__} is defined in "
            f"{type(model).__module__}. Export it without, and share that module yourself."
        )


def add_source(model: PreTrainedModel, folder: Path) -> None:
    """Copy the source files of a model and name their classes in its config, as transformers looks for them."""
    source = Path(inspect.getfile(type(model)))
    copy_source(source.parent, folder)
    loaders = auto_classes(type(model.config))
    if type(model) not in loaders.values():
        loaders["AutoModel"] = type(model)  # a class without an Auto class of its own is what AutoModel then loads
    config_class = type(model.config)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["auto_map"] = {
        "AutoConfig": f"{Path(inspect.getfile(config_class)).stem}.{config_class.__name__}",
        **{name: f"{source.stem}.{built.__name__}" for name, built in loaders.items()},
    }
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def folder_of(model: PreTrainedModel, token: bool | str | None = None) -> Path | None:
    """The folder that a model was loaded from; for a Hub repository, its folder in the cache with card and tokenizer."""
    name = model.name_or_path
    if not name or Path(name).is_dir():
        return Path(name).resolve() if name else None
    revision = getattr(model.config, "_commit_hash", None)
    try:
        patterns = ["README.md", *TOKENIZER, *MODULES]
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns, token=token))
    except Exception as error:  # network errors have many types, and the name may be that of a deleted folder
        logger.warning(f"the card and the tokenizer of {name} cannot be read: {one_line(error)}")
        return None


def config_of(folder: Path | None) -> dict[str, Any]:
    """The fields of the config in a folder; none if there is no folder or no config."""
    file = None if folder is None else folder / "config.json"
    return json.loads(file.read_text(encoding="utf-8")) if file is not None and file.is_file() else {}


def is_saved_in(model: PreTrainedModel, folder: Path) -> bool:
    """Whether `folder` holds this model: its class, and weights equal to its own in the dtype of its own."""
    if config_of(folder).get("architectures") != [type(model).__name__]:
        return False
    state = model.state_dict()
    try:
        for file in weight_files(folder):
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    ours = state.get(name)
                    if ours is None or ours.is_meta or not torch.equal(tensors.get_tensor(name).to(ours), ours):
                        return False
    except (OSError, ValueError, SafetensorError):
        return False
    return True


def carried_card(model: PreTrainedModel, folder: Path | None, repo_id: str, remote_code: bool) -> ModelCard:
    """The card that lies in the folder of an unchanged model, with the name of its new place, or a new one."""
    modules = folder is not None and (folder / "modules.json").is_file()
    new = card_of(model, repo_id, remote_code=remote_code, sentence_transformers=modules)
    if folder is None or not is_own_file(folder / "README.md", folder):
        return new
    old = ModelCard.load(folder / "README.md", ignore_metadata_errors=True)
    if is_saved_in(model, folder):
        text = old.content
        section = LOADING.search(text)
        if section and (name := re.search(r'(?:from_pretrained|SentenceTransformer)\("([^"]+)"', section[0])):
            text = text.replace(f'("{name[1]}"', f'("{repo_id}"')
        if section and ("trust_remote_code=True" in section[0]) != remote_code:
            text = LOADING.sub(lambda _: LOADING.search(new.content)[0], text)  # type: ignore[index]
        card = ModelCard(text, ignore_metadata_errors=True)
        if card.data.get("library_name") is not None:
            card.data["library_name"] = new.data.get("library_name")
        return card
    logger.warning(
        f"the card in {folder} is not uploaded, since it is not about this model: its class or weights differ from those "
        "in the folder. The new card has no measurements; to give them, pass `card`."
    )
    base_model = None if Path(str(model.name_or_path)).exists() else model.name_or_path
    if base_model is None and config_of(folder).get("model_type") == model.config.model_type:
        base_model = old.data.get("base_model")
    return card_of(model, repo_id, remote_code=remote_code, base_model=base_model, sentence_transformers=modules)


def push_to_hub(
    model: PreTrainedModel,
    repo_id: str,
    *,
    tokenizer=None,
    card: ModelCard | None = None,
    eval_results: Sequence[EvalResultEntry] = (),
    remote_code: bool | None = None,
    commit_message: str | None = None,
    commit_description: str | None = None,
    private: bool | None = None,
    token: bool | str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    max_shard_size: int | str = "50GB",
    tags: list[str] | None = None,
) -> str:
    """Upload a model with its card, in one commit. This is also the `push_to_hub` method of every rank model.

    Weights and config are always uploaded. The rest is what you give, or else what lies in the folder or Hub repository
    that the model was loaded from:

    - the card: `card`; else the one that the repository `repo_id` has, with `tags` added; else, if the model is unchanged
      since it was loaded, the one in its folder; else a new one without measurements.
    - the tokenizer: `tokenizer`; else the tokenizer files in the folder. The pooling and other modules of a
      sentence-transformers folder are uploaded too.
    - scores on benchmarks of the Hub: `eval_results`. Scores in the folder are not uploaded.
    - the source of the model's class, for machines without this package: if `remote_code=True`; else if the folder has it.

    The other arguments are those of [`~transformers.PreTrainedModel.push_to_hub`] and of [`export_model`].
    """
    check_exportable(model, bool(remote_code))
    folder = folder_of(model, token)
    if remote_code is None:
        config = config_of(folder)
        remote_code = "auto_map" in config and config.get("model_type") == model.config.model_type and is_ours(model)
    api = HfApi(token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if revision is not None and not create_pr:
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    kept = card is None and api.file_exists(repo_id, "README.md", revision=revision)
    if kept:
        path = api.hf_hub_download(repo_id, "README.md", revision=revision)
        card = ModelCard.load(path, ignore_metadata_errors=True)
    card = ModelCard(str(card or carried_card(model, folder, repo_id, remote_code)), ignore_metadata_errors=True)
    own_tags = card.data.get("tags") or []
    missing = [tag for tag in tags or [] if tag not in own_tags]
    if missing:
        card.data["tags"] = [*own_tags, *missing]
    with tempfile.TemporaryDirectory() as place:
        exported = export_model(
            model,
            Path(place) / "model",
            tokenizer=tokenizer,
            card=card,
            eval_results=eval_results,
            remote_code=remote_code,
            max_shard_size=max_shard_size,
        )
        if folder is not None:
            patterns = MODULES if tokenizer is not None else (*TOKENIZER, *MODULES)
            for file in (file for pattern in patterns for file in folder.glob(pattern)):
                if is_own_file(file, folder):
                    (exported / file.relative_to(folder)).parent.mkdir(exist_ok=True)
                    shutil.copyfile(file, exported / file.relative_to(folder))
        commit = api.upload_folder(
            repo_id=repo_id,
            folder_path=exported,
            commit_message=commit_message or f"Upload {type(model).__name__}",
            commit_description=commit_description,
            revision=revision,
            create_pr=create_pr,
            ignore_patterns=["README.md"] if kept and not missing else None,
        )
    return str(commit)
