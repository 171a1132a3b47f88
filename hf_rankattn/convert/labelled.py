"""Texts and labels of a dataset, in the form that the measures of `damage` take."""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from transformers import PreTrainedModel
from transformers.utils import logging

from ..files.batches import Text
from ..files.texts import dataset_errors, stream_rows
from .damage import Classification, NextSentence, Spans, TokenClassification, task_of


logger = logging.get_logger(__name__)
TEXT_COLUMNS = ("text", "sentence", "tokens", "words")
LABEL_COLUMNS = ("label", "labels", "ner_tags", "pos_tags", "tags")
TAG_COLUMNS = ("ner_tags", "pos_tags", "tags", "labels", "label")
Rows = Sequence[Mapping[str, Any]]


def labelled_texts(
    model: PreTrainedModel,
    name: str,
    split: str = "test",
    column: str | None = None,
    label_column: str | None = None,
    examples: int = 200,
) -> tuple[list[Text], list[Any] | None]:
    """At most `examples` texts of a dataset, and their labels if the model predicts labels and the dataset has them.

    Args:
        model: The model; its class determines which columns are needed, and its config names the labels.
        name: A dataset of the Hub, or a folder of data files.
        split: Its split.
        column: The column of texts or of lists of words; two columns with a comma between them for pairs of texts. By
            default `text` or the like. Question answering reads `question`, `context` and `answers`.
        label_column: The column of labels. By default `label` or the like, if there is one.
        examples: How many rows are read.
    """
    if examples < 1:
        raise ValueError(f"`examples` must be at least 1, got {examples}.")
    rows, features = read_rows(name, split, examples)
    task = task_of(model)
    if issubclass(task, Spans):
        return question_rows(rows, name)
    texts, rows = text_rows(rows, name, column)
    if not issubclass(task, TokenClassification):
        texts = [" ".join(text) if isinstance(text, list) else text for text in texts]
    if not issubclass(task, Classification | TokenClassification) or issubclass(task, NextSentence):
        if label_column is not None:
            raise ValueError(f"{type(model).__name__} predicts no labels: leave `label_column` out.")
        return texts, None
    by_word = issubclass(task, TokenClassification)
    if label_column is None:
        label_column = next((key for key in (TAG_COLUMNS if by_word else LABEL_COLUMNS) if key in rows[0]), None)
    elif label_column not in rows[0]:
        raise ValueError(f"{name} has no column {label_column!r}; there are {', '.join(rows[0])}.")
    if label_column is None or (by_word and not isinstance(texts[0], list)):
        why = f"its columns are {', '.join(rows[0])}" if label_column is None else "the texts are not lists of words"
        logger.warning(f"no labels of {name} are used: {why}.")
        return texts, None
    for text, row in zip(texts, rows, strict=True):
        label = row[label_column]
        if label is None or by_word and (not isinstance(label, list) or len(label) != len(text)):
            wanted = f"a list of {len(text)} labels, one for each word," if by_word else "a label"
            raise ValueError(
                f"column {label_column} of {name} holds {label!r:.80}, and {wanted} is needed: choose another `label_column`."
            )
    names = label_names((features or {}).get(label_column))
    return texts, [label_id(row[label_column], names, model.config) for row in rows]


def read_rows(name: str, split: str, examples: int) -> tuple[Rows, Mapping[str, Any] | None]:
    stream = stream_rows(name, split)
    with dataset_errors(name, split):
        rows = list(islice(stream, examples))
    if not rows:
        raise ValueError(f"dataset {name}, split {split}, has no rows.")
    return rows, stream.features


def text_rows(rows: Rows, name: str, column: str | None) -> tuple[list[Text], Rows]:
    """The texts of the rows that have one, and these rows."""
    columns = list(rows[0])
    if column is None:
        strings = [key for key in columns if isinstance(rows[0][key], str)]
        column = next((key for key in TEXT_COLUMNS if key in columns), strings[0] if len(strings) == 1 else None)
        if column is None:
            raise ValueError(f"give `column`, the column of texts of {name}: there are {', '.join(columns)}.")
    parts = [part.strip() for part in column.split(",")]
    if missing := [part for part in parts if part not in columns]:
        raise ValueError(f"{name} has no column {missing[0]!r}; there are {', '.join(columns)}.")
    if len(parts) > 2:
        raise ValueError(f"`column` takes one column, or two for pairs of texts, got {column}.")
    texts: list[Any] = [tuple(row[part] for part in parts) if len(parts) == 2 else row[column] for row in rows]
    kept = []
    for place, text in enumerate(texts):
        strings = list(text) if isinstance(text, list | tuple) else [text]
        if not all(string is None or isinstance(string, str) for string in strings):
            raise ValueError(f"column {column} of {name} holds {text!r}, which is no text.")
        filled = [bool(string and string.strip()) for string in strings]
        if any(filled) if isinstance(text, list) else all(filled):
            kept.append(place)
    if not kept:
        raise ValueError(f"column {column} of {name} is empty.")
    return [texts[place] for place in kept], [rows[place] for place in kept]


def question_rows(rows: Rows, name: str) -> tuple[list[Text], list[Any] | None]:
    """Questions with their contexts, and for each the spans of characters that answer it."""
    if missing := [key for key in ("question", "context") if key not in rows[0]]:
        raise ValueError(f"{name} has no column {missing[0]!r}, which question answering needs.")
    texts: list[Text] = [(row["question"], row["context"]) for row in rows]
    if "answers" not in rows[0]:
        return texts, None
    spans = []
    for row in rows:
        try:
            answers = list(zip(row["answers"]["answer_start"], row["answers"]["text"], strict=True))
            spans.append({(start, start + len(text)) for start, text in answers})
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError(
                f"column answers of {name} holds {row['answers']!r}: it must have lists `text` and `answer_start`, as in "
                "SQuAD. Without this column, spans are compared with those of the original alone."
            ) from error
    return texts, spans


def label_names(feature: Any) -> list[str] | None:
    """The names of a column of classes, or of lists of classes."""
    return getattr(feature, "names", None) or getattr(getattr(feature, "feature", None), "names", None)


def label_id(value: Any, names: list[str] | None, config) -> Any:
    """The index of a label in the model: by its name if the dataset and the model have names, else the number itself."""
    if config.problem_type == "multi_label_classification":
        if not isinstance(value, list) or len(value) != config.num_labels:
            raise ValueError(
                f"the dataset has the label {value!r}, and the model gives several labels at once: a list of "
                f"{config.num_labels} zeros and ones is needed."
            )
        return value
    if isinstance(value, list):  # one label per word; -100 marks words without a label
        return [-100 if entry == -100 else label_id(entry, names, config) for entry in value]
    known = {str(label).lower(): index for label, index in config.label2id.items()}
    if names and isinstance(value, int) and 0 <= value < len(names) and {name.lower() for name in names} <= set(known):
        value = names[value]
    if isinstance(value, str):
        if value.lower() not in known:
            raise ValueError(
                f"the model has no label {value!r}; it has {', '.join(config.label2id)}. Use these names or their "
                "numbers in the dataset, or choose another `label_column`."
            )
        return known[value.lower()]
    if config.num_labels > 1 and (not isinstance(value, int) or not 0 <= value < config.num_labels):
        raise ValueError(
            f"the dataset has the label {value!r}, and the model has {config.num_labels} labels: choose a `split` that has "
            "labels, and their column as `label_column`."
        )
    return value
