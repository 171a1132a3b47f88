"""Results on registered benchmarks of the Hub, in the files `.eval_results/*.yaml` of a model repository.

The `model-index` of a card holds any measurement. These files hold only scores on datasets that the Hub lists as benchmarks.
"""

import math
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import numpy as np
import yaml
from huggingface_hub import EvalResultEntry, eval_result_entries_to_yaml
from huggingface_hub.constants import EVAL_RESULTS_FOLDER
from huggingface_hub.utils import HFValidationError, validate_repo_id


def check_entry(entry: EvalResultEntry) -> None:
    """Raise a `ValueError` unless the Hub can read the entry."""
    if not isinstance(entry, EvalResultEntry):
        raise ValueError(f"`eval_results` takes huggingface_hub.EvalResultEntry objects, got {entry!r}.")
    try:
        validate_repo_id(entry.dataset_id)
        named = "/" in entry.dataset_id
    except HFValidationError:
        named = False
    if not named:
        raise ValueError(
            f"`dataset_id` must be a dataset of the Hub, written owner/name, got {entry.dataset_id!r}. Measurements on "
            "other data belong in the `results` of `model_card`."
        )
    if not isinstance(entry.task_id, str) or not entry.task_id:
        raise ValueError(f"`task_id` must be a task in the eval.yaml of {entry.dataset_id}, got {entry.task_id!r}.")
    value = np.asarray(entry.value)
    if value.shape or value.dtype.kind not in "iuf" or not math.isfinite(value):
        raise ValueError(f"the value on {entry.dataset_id} must be a finite number, got {entry.value!r}.")
    try:
        datetime.fromisoformat(entry.date or "2026-01-01")
    except (TypeError, ValueError) as error:
        raise ValueError(f"`date` must be an ISO 8601 date such as '2026-01-31', got {entry.date!r}.") from error


def write_eval_results(folder: str | Path, entries: Sequence[EvalResultEntry]) -> list[Path]:
    """Write `entries` to the folder `.eval_results` of a model repository, one file for each dataset.

    >>> from tempfile import TemporaryDirectory
    >>> from huggingface_hub import EvalResultEntry
    >>> from hf_rankattn.hub.eval_results import write_eval_results
    >>> entry = EvalResultEntry(dataset_id="cais/hle", task_id="hle", value=2.5)
    >>> with TemporaryDirectory() as folder:
    ...     print(write_eval_results(folder, [entry])[0].read_text())
    - dataset:
        id: cais/hle
        task_id: hle
      value: 2.5
    <BLANKLINE>
    """
    for entry in entries:
        check_entry(entry)
    place, files = Path(folder) / EVAL_RESULTS_FOLDER, []
    for dataset in dict.fromkeys(entry.dataset_id for entry in entries):
        rows = eval_result_entries_to_yaml([entry for entry in entries if entry.dataset_id == dataset])
        for row in rows:
            row["value"] = np.asarray(row["value"]).item()  # YAML has no numbers of numpy
        place.mkdir(exist_ok=True)
        files.append(place / f"{dataset.replace('/', '--')}.yaml")
        files[-1].write_text(yaml.safe_dump(rows, sort_keys=False), encoding="utf-8")
    return files
