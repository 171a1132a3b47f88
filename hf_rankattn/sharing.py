"""Sharing a rank model: a folder that loads anywhere, and the same on the Hub, each with an honest card."""

import inspect
import json
import shutil
import tempfile
from pathlib import Path

import transformers.models.auto.modeling_auto as modeling_auto
from huggingface_hub import HfApi, ModelCard
from transformers import PreTrainedModel

from .folders import fresh_folder
from .models import parameter_counts
from .report.cards import model_card


# what a folder must hold to be replaced
MODEL_FOLDER = {"marker": "config.json", "what": "a model"}


def auto_classes(model_class: type[PreTrainedModel]) -> dict[str, str]:
    """Auto class -> class name, for every Auto class that knows the family of `model_class`."""
    known = {}
    for name, auto in vars(modeling_auto).items():
        mapping = getattr(auto, "_model_mapping", None)
        if name.startswith("AutoModel") and mapping is not None and model_class.config_class in mapping:
            known[name] = mapping[model_class.config_class].__name__
    return known


def card_of(model: PreTrainedModel, repo_id: str, **fields) -> ModelCard:
    """The [`model_card`] of a model, with what can be read off the model filled in."""
    class_name = type(model).__name__
    # AutoModelForPreTraining and the like may name the same class; the plainest name is the one people type
    loaders = sorted((auto for auto, name in auto_classes(type(model)).items() if name == class_name), key=len)
    fields.setdefault("auto_class", loaders[0] if loaders else None)
    fields.setdefault("live_parameters", parameter_counts(model).live)
    return model_card(model.config, model_class=class_name, repo_id=repo_id, **fields)


def export_model(
    model: PreTrainedModel,
    folder: str | Path,
    *,
    tokenizer=None,
    card: ModelCard | None = None,
    remote_code: bool = False,
    overwrite: bool = False,
    max_shard_size: int | str = "50GB",
) -> Path:
    """Write a model, its tokenizer and its card to `folder`, all or nothing.

    Args:
        model: A rank model.
        folder: Where to write. It must not exist, unless `overwrite` is given; then it is replaced at the end.
        tokenizer (*optional*): Saved beside the model.
        card (`ModelCard`, *optional*): The card. Without it, one is rendered from the model alone.
        remote_code (`bool`, *optional*, defaults to `False`):
            Whether to add the source files of the model, so that transformers can load it with `trust_remote_code=True`
            where this package is not installed.
        overwrite (`bool`, *optional*, defaults to `False`): Whether an existing folder may be replaced.
        max_shard_size (`int` or `str`, *optional*, defaults to `"50GB"`): Largest weight file.

    Example:

    ```python
    >>> from tempfile import TemporaryDirectory
    >>> from hf_rankattn import RankEncoderConfig, RankEncoderModel, export_model

    >>> model = RankEncoderModel(RankEncoderConfig(input_dim=8, num_attention_heads=4, qk_rank=3))
    >>> with TemporaryDirectory() as place:
    ...     sorted(path.name for path in export_model(model, f"{place}/shared").iterdir())
    ['README.md', 'config.json', 'model.safetensors']
    ```
    """
    check_exportable(model, remote_code)
    with fresh_folder(folder, overwrite, **MODEL_FOLDER) as staging:
        model.save_pretrained(staging, max_shard_size=max_shard_size)
        if tokenizer is not None:
            tokenizer.save_pretrained(staging)
        if remote_code:
            add_source(model, staging)
        card = card or card_of(model, Path(folder).resolve().name, remote_code=remote_code)
        card.save(staging / "README.md")
    return Path(folder).resolve()


def check_exportable(model: PreTrainedModel, remote_code: bool) -> None:
    if not hasattr(getattr(model, "config", None), "head_geometry"):
        raise ValueError(
            f"only a rank model can be exported, got a {type(model).__name__}. Load the checkpoint with the Rank class of "
            "its family, or use save_pretrained."
        )
    if remote_code and not type(model).__module__.startswith(f"{__package__}.models."):
        raise ValueError(
            f"remote_code=True copies the source of this package's models, and {type(model).__name__} is defined in "
            f"{type(model).__module__}. Export it without, and share that module yourself."
        )


def add_source(model: PreTrainedModel, folder: Path) -> None:
    """Copy the source files of a model and name their classes in its config, as transformers looks for them."""
    for source in Path(inspect.getfile(type(model))).parent.glob("[!_]*.py"):
        shutil.copyfile(source, folder / source.name)
    loaders = auto_classes(type(model))
    if type(model).__name__ not in loaders.values():
        loaders["AutoModel"] = type(model).__name__  # a head without an Auto class of its own is what its folder means
    path = folder / "config.json"
    config = json.loads(path.read_text())
    modeling = Path(inspect.getfile(type(model))).stem
    config["auto_map"] = {
        "AutoConfig": f"{Path(inspect.getfile(type(model.config))).stem}.{type(model.config).__name__}",
        **{auto: f"{modeling}.{name}" for auto, name in loaders.items()},
    }
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def push_to_hub(
    model: PreTrainedModel,
    repo_id: str,
    *,
    tokenizer=None,
    card: ModelCard | None = None,
    remote_code: bool = False,
    commit_message: str | None = None,
    commit_description: str | None = None,
    private: bool | None = None,
    token: bool | str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    max_shard_size: int | str = "50GB",
    tags: list[str] | None = None,
) -> str:
    """Upload a model with its card. This is also the `push_to_hub` method of every rank model.

    A card that is on the Hub already is kept, with `tags` added, unless `card` is given. The other arguments are those of
    [`~transformers.PreTrainedModel.push_to_hub`] and of [`export_model`].
    """
    check_exportable(model, remote_code)
    api = HfApi(token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if revision is not None and not create_pr:
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    kept = card is None and api.file_exists(repo_id, "README.md", revision=revision)
    if kept:
        card = ModelCard.load(
            api.hf_hub_download(repo_id, "README.md", revision=revision), ignore_metadata_errors=True
        )
    card = ModelCard(str(card or card_of(model, repo_id, remote_code=remote_code)), ignore_metadata_errors=True)
    own_tags = card.data.get("tags") or []
    missing = [tag for tag in tags or [] if tag not in own_tags]
    if missing:
        card.data["tags"] = [*own_tags, *missing]
    with tempfile.TemporaryDirectory() as folder:
        exported = export_model(
            model,
            Path(folder) / "model",
            tokenizer=tokenizer,
            card=card,
            remote_code=remote_code,
            max_shard_size=max_shard_size,
        )
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
