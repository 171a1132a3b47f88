"""Rank metrics in the log of a training run: where they go, and that training does not feel them."""

import json
from pathlib import Path

import pytest
import torch
from testing_common import BERT, TORCHRUN, run_python
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForMultipleChoice,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.utils import logging

from hf_rankattn import RankCallback, measure_collapse


CONFIG = BertConfig(vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16)


class Rows(Dataset):
    def __init__(self, tokens=10, real=10):
        self.tokens, self.real = tokens, real

    def __len__(self):
        return 32

    def __getitem__(self, index):
        ids = torch.randint(5, 40, (self.tokens,), generator=torch.Generator().manual_seed(index))
        mask = (torch.arange(self.tokens) < self.real).long()
        return {"input_ids": ids, "attention_mask": mask, "labels": int(ids[0] > ids[1])}


class Reporter(TrainerCallback):
    """Like the integrations of `report_to`, it comes before the RankCallback in the list and sees nothing but logs."""

    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.seen.append((state.global_step, dict(logs)))


def train(tmp_path, *callbacks, steps=6, added=(), train_dataset=None, eval_dataset=None, **arguments):
    torch.manual_seed(0)
    arguments |= {"max_steps": steps, "per_device_train_batch_size": 4, "logging_steps": 1, "save_strategy": "no"}
    arguments |= {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "seed": 0}
    trainer = Trainer(
        BertForSequenceClassification(CONFIG),
        TrainingArguments(output_dir=str(tmp_path), **arguments),
        train_dataset=train_dataset or Rows(),
        eval_dataset=eval_dataset,
        callbacks=list(callbacks),
    )
    for callback in added:
        callback.add_to(trainer)
    trainer.train()
    return trainer


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_every_reporter_and_the_history_get_the_metrics(tmp_path):
    reporter = Reporter()
    trainer = train(tmp_path, reporter, added=[RankCallback(every=2, per_layer=True)])
    steps = [step for step, logs in reporter.seen if "rank/relative_residual" in logs]
    assert steps == [2, 4, 6]
    entries = [entry for entry in trainer.state.log_history if "rank/participation_ratio" in entry]
    assert [entry["step"] for entry in entries] == [2, 4, 6] and all(entry["epoch"] for entry in entries)
    assert {f"rank/relative_residual/layer_{i}" for i in range(3)} <= set(entries[0])
    assert entries[0]["rank/relative_residual"] == entries[0]["rank/relative_residual/layer_2"]
    maps = [entries[0][f"rank/participation_ratio/layer_{i}"] for i in range(2)]
    assert entries[0]["rank/participation_ratio"] == pytest.approx(sum(maps) / 2)


def test_training_does_not_feel_it_and_one_number_is_logged_for_each_metric(tmp_path):
    """Neither with the default metrics nor with singular values, nor where the inputs are a shuffling loader."""
    plain, reporter = losses(train(tmp_path / "plain")), Reporter()
    rows = [{"input_ids": torch.randint(5, 40, (10,), generator=torch.Generator().manual_seed(i))} for i in range(4)]
    loader = torch.utils.data.DataLoader(rows, batch_size=2, shuffle=True)
    spectra = RankCallback(every=1, inputs=loader, metrics=["effective_rank", "token_cosine"])
    assert len(plain) == 6
    assert plain == losses(train(tmp_path / "history", spectra))
    assert plain == losses(train(tmp_path / "reported", reporter, added=[RankCallback(every=3)]))
    logged = ("relative_residual", "token_cosine", "participation_ratio", "argmax_coverage")
    names = {f"rank/{name}" for name in logged}
    assert [set(logs) - {"epoch"} for _, logs in reporter.seen if names & set(logs)] == [names, names]


def test_the_kept_batch_is_one_of_training_not_of_an_evaluation_before(tmp_path):
    callback = RankCallback(every=2, max_examples=2)
    trainer = train(tmp_path, callback, eval_on_start=True, eval_strategy="no", eval_dataset=Rows(tokens=20))
    assert callback.inputs["input_ids"].shape == (2, 10)
    assert not trainer.model._forward_pre_hooks
    again = train(tmp_path / "again", callback)
    assert [entry["step"] for entry in again.state.log_history if "rank/token_cosine" in entry] == [2, 4, 6]


def test_choices_are_texts_and_single_tokens_are_left_out():
    callback = RankCallback()
    model = BertForMultipleChoice(CONFIG)
    callback.hook = model.register_forward_pre_hook(callback.keep_first_batch, with_kwargs=True)
    ids = torch.randint(5, 40, (2, 3, 6))
    mask = torch.ones_like(ids)
    mask[0, 1, 1:] = 0
    model(input_ids=ids, attention_mask=mask, labels=torch.zeros(2, dtype=torch.long))
    assert callback.inputs["input_ids"].shape == (5, 6) and set(callback.inputs) == {"input_ids", "attention_mask"}
    assert callback.measure(model)["rank/relative_residual"] > 0


def test_given_inputs_are_measured_from_the_start_and_are_what_the_functions_give(tmp_path):
    batch = {"input_ids": torch.randint(5, 40, (3, 10), generator=torch.Generator().manual_seed(1))}
    metrics = ["relative_residual", "logits/energy_rank", "weights/effective_rank", "logits/logit_std"]
    trainer = train(tmp_path, RankCallback(every=4, inputs=batch, metrics=metrics))
    entries = [entry for entry in trainer.state.log_history if "rank/relative_residual" in entry]
    assert [entry["step"] for entry in entries] == [0, 4, 6]
    assert set(entries[0]) == {*(f"rank/{name}" for name in metrics), "epoch", "step"}
    table = measure_collapse(trainer.model, batch, ["transformer"])
    last = table[(table.metric == "relative_residual") & (table.layer == 2)].value.mean()
    assert entries[-1]["rank/relative_residual"] == pytest.approx(last)


def test_a_run_without_a_usable_batch_warns(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(logging.get_logger("transformers"), "propagate", True)
    train(tmp_path, RankCallback(every=2), train_dataset=Rows(real=1))
    assert "RankCallback has measured nothing" in caplog.text


def run_sharded():
    """What each of two processes saw; they are stopped if they wait for each other."""
    worker = str(Path(__file__).parent / "worker_sharded.py")
    printed = run_python(*TORCHRUN, worker, timeout=100).stdout
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


def test_processes_with_a_sharded_model_measure_together_or_not_at_all():
    first, second = run_sharded()
    assert first == second
    assert len(first["whole"]) == 2 and first["sharded"] == [pytest.approx(logs) for logs in first["whole"]]
    assert first["one cannot use its batch"].startswith("RankCallback, process 1: examples [0, 1] of the batch have")
    assert "the processes have 1, 2 batches" in first["one has more batches"]
    assert first["one has kept no batch"] == []


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"every": 0}, "must be at least 1, got 0"),
        ({"metrics": []}, "must be a list of names"),
        ({"metrics": "relative_residual"}, "must be a list of names"),
        ({"metrics": ["rankness"]}, r"unknown metrics \['rankness'\]; there are relative_residual"),
        ({"max_examples": 0}, "must be at least 1"),
    ],
)
def test_nonsense_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        RankCallback(**arguments)


def test_reporters_that_it_cannot_reach_are_named(tmp_path, monkeypatch, caplog):
    """Without its trainer the callback reaches the history alone."""
    monkeypatch.setattr(logging.get_logger("transformers"), "propagate", True)
    batch = {"input_ids": torch.randint(5, 40, (3, 10))}
    callback = RankCallback(inputs=batch)
    arguments = TrainingArguments(output_dir=str(tmp_path), report_to="none", use_cpu=True)
    arguments.report_to = ["tensorboard"]
    model, state = BERT.stock("Model")(BERT.stock_config()), TrainerState()
    callback.on_train_begin(arguments, state, TrainerControl(), model=model)
    assert "To log to tensorboard as well, add it with RankCallback(...).add_to(trainer)" in caplog.text
    assert "rank/relative_residual" in state.log_history[0]
