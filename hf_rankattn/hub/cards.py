"""Cards of models. They contain measured numbers only."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from ..models.rank_attention import HeadGeometry


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
    "ForCausalLM": "text-generation",
    "ForConditionalGeneration": "text2text-generation",
    "ForImageClassification": "image-classification",
    "ForAudioClassification": "audio-classification",
}


def pipeline_of(model_class: str) -> str | None:
    """What the Hub calls the task of a model class; None for a model without a head."""
    return next((task for suffix, task in PIPELINES.items() if model_class.endswith(suffix)), None)


def head_rows(config) -> list[dict[str, Any]]:
    """One row per run of layers with equal heads: first and last layer, and the numbers of their heads."""
    runs = [(heads, list(run)) for heads, run in groupby(range(config.num_hidden_layers), key=config.head_geometry)]
    return [{"first": layers[0], "last": layers[-1], "heads": heads} for heads, layers in runs]


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
    stock_heads: HeadGeometry | None = None,
) -> ModelCard:
    """Render the card of a rank model, or of a stock model that [`convert_rank`] cut.

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
        stock_heads (`HeadGeometry`, *optional*): The heads of a stock model that was cut, whose config does not tell them.

    >>> from hf_rankattn import RankEncoderConfig, model_card
    >>> config = RankEncoderConfig(input_dim=8, num_attention_heads=4, qk_rank=3)
    >>> card = model_card(config, model_class="RankEncoderModel", repo_id="me/encoder")
    >>> card.data.library_name, "qk_rank-3" in card.data.tags
    ('hf_rankattn', True)
    """
    stock = stock_heads is not None
    if not stock and not hasattr(config, "head_geometry"):
        raise ValueError(f"`config` must be the configuration of a rank model, got a {type(config).__name__}.")
    if strangers := [result for result in results if not isinstance(result, EvalResult)]:
        raise ValueError(f"`results` takes huggingface_hub.EvalResult objects, got {strangers[0]!r}.")
    datasets = [datasets] if isinstance(datasets, str) else list(datasets)
    # most metrics are numbers of numpy, which YAML does not have
    results = [replace(result, metric_value=np.asarray(result.metric_value).item()) for result in results]
    for result in results:
        if isinstance(result.metric_value, float) and not math.isfinite(result.metric_value):
            raise ValueError(f"the {result.metric_type} is {result.metric_value}: cards hold finite numbers only.")
    pipeline = "sentence-similarity" if sentence_transformers else pipeline_of(model_class)
    rows = (
        head_rows(config)
        if stock_heads is None
        else [{"first": 0, "last": config.num_hidden_layers - 1, "heads": stock_heads}]
    )
    ranks = sorted({row["heads"].qk_rank for row in rows})
    data = ModelCardData(
        # "transformers" makes the Hub show a snippet that works only where the repository carries its own code
        library_name="transformers" if remote_code or stock else "hf_rankattn",
        license=license,
        language=language,
        base_model=base_model,
        datasets=datasets or None,
        metrics=sorted({result.metric_type for result in results}) or None,
        pipeline_tag=None if hasattr(config, "input_dim") else pipeline,
        tags=["rank-attention", config.model_type, *(f"qk_rank-{rank}" for rank in ranks)],
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
        rows=rows,
        live_parameters=live_parameters,
        how=how,
        results=results,
        base=base_model,
        trained_on=datasets,
        remote_code=remote_code,
        sentence_transformers=sentence_transformers,
        stock=stock,
    )
