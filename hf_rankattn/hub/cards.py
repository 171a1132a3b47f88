"""Cards of models and datasets. They contain measured numbers only."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import DatasetCard, DatasetCardData, EvalResult, ModelCard, ModelCardData


TEMPLATES = Path(__file__).parent / "templates"
PIPELINES = {
    "ForMaskedLM": "fill-mask",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForQuestionAnsweringSimple": "question-answering",
    "ForMultipleChoice": "multiple-choice",
    "ForNextSentencePrediction": "text-classification",
    "ForPreTraining": "fill-mask",
    "LMHeadModel": "text-generation",
}


def pipeline_of(model_class: str) -> str | None:
    """What the Hub calls the task of a model class; None for a model without a head."""
    return next((task for suffix, task in PIPELINES.items() if model_class.endswith(suffix)), None)


def head_rows(config) -> list[dict[str, Any]]:
    """One row per run of layers with equal heads: first and last layer, and the numbers of their heads."""
    rows: list[dict[str, Any]] = []
    for layer in range(config.num_hidden_layers):
        heads = config.head_geometry(layer)
        if rows and rows[-1]["heads"] == heads:
            rows[-1]["last"] = layer
        else:
            rows.append({"first": layer, "last": layer, "heads": heads})
    return rows


def rank_tags(config) -> list[str]:
    """Tags by which the Hub finds models of a rank: `qk_rank-16`, one per rank that occurs."""
    ranks = sorted({row["heads"].qk_rank for row in head_rows(config)})
    return ["rank-attention", config.model_type, *(f"qk_rank-{rank}" for rank in ranks)]


def plain_number(value: Any) -> Any:
    """A metric as JSON and YAML know it: most metrics are numbers of numpy."""
    return value.item() if hasattr(value, "item") else value


def model_card(
    config,
    *,
    model_class: str,
    repo_id: str,
    auto_class: str | None = None,
    live_parameters: int | None = None,
    base_model: str | None = None,
    datasets: str | Sequence[str] = (),
    results: Sequence[EvalResult] = (),
    how: str | None = None,
    license: str | None = None,
    language: str | None = None,
    remote_code: bool = False,
    sentence_transformers: bool = False,
) -> ModelCard:
    """Render the card of a rank model.

    Args:
        config: The configuration of the model, which says what its heads are.
        model_class (`str`): Name of the class it is loaded with, such as `"RankBertForMaskedLM"`.
        repo_id (`str`): Where it will be found: a Hub repository, or a folder.
        auto_class (`str`, *optional*): The Auto class that loads it, if there is one.
        live_parameters (`int`, *optional*): Number of trainable parameters.
        base_model (`str`, *optional*): The checkpoint it was made from.
        datasets (`Sequence[str]`, *optional*): Names of the data it was trained on.
        results (`Sequence[EvalResult]`, *optional*): Measured numbers. The card says so if there are none.
        how (`str`, *optional*): How it was made, in Markdown.
        license (`str`, *optional*): Licence of the weights.
        language (`str`, *optional*): Language of the texts it reads.
        remote_code (`bool`, *optional*, defaults to `False`): Whether its folder carries the source of its classes.
        sentence_transformers (`bool`, *optional*, defaults to `False`):
            Whether its folder carries the modules of a sentence-transformers model, which loads it then.

    Example:

    ```python
    >>> from hf_rankattn import RankEncoderConfig, model_card

    >>> config = RankEncoderConfig(input_dim=8, num_attention_heads=4, qk_rank=3)
    >>> card = model_card(config, model_class="RankEncoderModel", repo_id="me/encoder")
    >>> card.data.library_name, "qk_rank-3" in card.data.tags
    ('hf_rankattn', True)
    ```
    """
    if not hasattr(config, "head_geometry"):
        raise ValueError(f"`config` must be the configuration of a rank model, got a {type(config).__name__}.")
    if strangers := [result for result in results if not isinstance(result, EvalResult)]:
        raise ValueError(f"`results` takes huggingface_hub.EvalResult objects, got {strangers[0]!r}.")
    datasets = [datasets] if isinstance(datasets, str) else list(datasets)
    results = [replace(result, metric_value=plain_number(result.metric_value)) for result in results]
    for result in results:
        if isinstance(result.metric_value, float) and not math.isfinite(result.metric_value):
            raise ValueError(f"the {result.metric_type} is {result.metric_value}: cards hold finite numbers only.")
    pipeline = "sentence-similarity" if sentence_transformers else pipeline_of(model_class)
    reads_text = not hasattr(config, "input_dim")
    data = ModelCardData(
        # "transformers" makes the Hub show a snippet that works only where the repository carries its own code
        library_name="transformers" if remote_code else "hf_rankattn",
        license=license,
        language=language,
        base_model=base_model,
        datasets=datasets or None,
        metrics=sorted({result.metric_type for result in results}) or None,
        pipeline_tag=pipeline if reads_text else None,
        tags=rank_tags(config),
        model_name=repo_id.rsplit("/", 1)[-1],
        eval_results=results or None,
    )
    return ModelCard.from_template(
        data,
        template_path=str(TEMPLATES / "model_card.md"),
        repo_id=repo_id,
        model_class=model_class,
        auto_class=auto_class,
        config=config,
        hidden_size=config.hidden_size,
        rows=head_rows(config),
        live_parameters=live_parameters,
        how=how,
        results=results,
        base=base_model,
        trained_on=datasets,
        remote_code=remote_code,
        sentence_transformers=sentence_transformers,
    )


SIZES = {1_000: "n<1K", 10_000: "1K<n<10K", 100_000: "10K<n<100K", 1_000_000: "100K<n<1M", 10_000_000: "1M<n<10M"}


def dataset_card(
    *,
    task: str,
    repo_id: str,
    description: str,
    labels: str,
    dataset_info: Sequence[dict[str, Any]],
    sections: Sequence[dict[str, Any]],
    differences: str = "",
    citation: str = "",
    license: str | None = None,
) -> DatasetCard:
    """Render the card of a task's data, with the metadata by which `load_dataset` finds configs, splits and features.

    Args:
        task (`str`): Name of the task.
        repo_id (`str`): Where it will be found: a Hub repository, or a folder.
        description (`str`): What it is, in a sentence or two.
        labels (`str`): How rows and labels are made.
        dataset_info (`Sequence[dict]`): For each config its name, features and splits, as datasets writes them.
        sections (`Sequence[dict]`): For each config `name`, `parameters`, `rows`, `columns`, `model_arguments` and
            `baselines`.
        differences (`str`, *optional*): Where the rows differ from those of the published code.
        citation (`str`, *optional*): BibTeX of the paper.
        license (`str`, *optional*): Licence of the data.
    """
    largest = max(sum(section["rows"].values()) for section in sections)
    configs = [
        {
            "config_name": section["name"],
            **({"default": True} if section is sections[0] else {}),
            "data_files": [{"split": split, "path": f"{section['name']}/{split}-*"} for split in section["rows"]],
        }
        for section in sections
    ]
    data = DatasetCardData(
        license=license,
        pretty_name=repo_id.rsplit("/", 1)[-1],
        size_categories=[next((name for limit, name in SIZES.items() if largest < limit), "n>10M")],
        tags=["rank-attention", "rank-attention-task", "synthetic", task],
        configs=configs,
        dataset_info=list(dataset_info),
    )
    return DatasetCard.from_template(
        data,
        template_path=str(TEMPLATES / "dataset_card.md"),
        task=task,
        repo_id=repo_id,
        description=description,
        labels=labels,
        differences=differences,
        sections=sections,
        citation=citation,
    )
