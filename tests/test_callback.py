"""Rank metrics in the log of a training run: where they go, and that training does not feel them."""

import pytest
import torch
from testing_common import BERT
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForMultipleChoice,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from hf_rankattn import RankCallback, measure_collapse


class Rows(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        ids = torch.randint(5, 40, (10,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": int(ids[0] > ids[1])}


class Longer(Rows):
    def __getitem__(self, index):
        ids = torch.arange(5, 25)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": 0}


class Reporter(TrainerCallback):
    """Stands where the integrations of `report_to` stand: it is told of logs, and knows of nothing else."""

    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.seen.append((state.global_step, dict(logs)))


def train(tmp_path, *callbacks, steps=6, eval_dataset=None, **arguments):
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16
    )
    model = BertForSequenceClassification(config)
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=steps, per_device_train_batch_size=4, logging_steps=1, save_strategy="no",
        report_to="none", disable_tqdm=True, use_cpu=True, seed=0, **arguments,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=Rows(), eval_dataset=eval_dataset, callbacks=list(callbacks))
    trainer.train()
    return trainer


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_every_reporter_and_the_history_get_the_metrics(tmp_path):
    reporter = Reporter()
    trainer = train(tmp_path, reporter, RankCallback(every=2))
    steps = [step for step, logs in reporter.seen if "rank/relative_residual" in logs]
    assert steps == [2, 4, 6]
    entries = [entry for entry in trainer.state.log_history if "rank/participation_ratio" in entry]
    assert [entry["step"] for entry in entries] == [2, 4, 6] and all(entry["epoch"] for entry in entries)
    assert {f"rank/relative_residual/layer_{i}" for i in range(3)} <= set(entries[0])
    assert entries[0]["rank/relative_residual"] == entries[0]["rank/relative_residual/layer_2"]
    maps = [entries[0][f"rank/participation_ratio/layer_{i}"] for i in range(2)]
    assert entries[0]["rank/participation_ratio"] == pytest.approx(sum(maps) / 2)


def test_training_does_not_feel_it(tmp_path):
    plain = losses(train(tmp_path / "plain"))
    watched = losses(train(tmp_path / "watched", RankCallback(every=1, metrics=["effective_rank", "token_cosine"])))
    assert len(plain) == 6 and plain == watched


def test_nor_does_it_where_the_inputs_are_a_loader(tmp_path):
    rows = [{"input_ids": torch.randint(5, 40, (10,), generator=torch.Generator().manual_seed(i))} for i in range(4)]
    plain = losses(train(tmp_path / "plain"))
    loader = torch.utils.data.DataLoader(rows, batch_size=2, shuffle=True)
    watched = losses(train(tmp_path / "watched", RankCallback(every=1, inputs=loader)))
    assert plain == watched


def test_the_kept_batch_is_one_of_training_not_of_an_evaluation_before(tmp_path):
    callback = RankCallback(every=2, max_examples=4)
    train(tmp_path, callback, eval_on_start=True, eval_strategy="no", eval_dataset=Longer())
    assert callback.inputs["input_ids"].shape == (4, 10)


def test_choices_are_texts_and_single_tokens_are_left_out():
    callback = RankCallback()
    model = BertForMultipleChoice(BertConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16))  # fmt: skip
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
    trainer = train(tmp_path, RankCallback(every=4, inputs=batch, metrics=metrics, per_layer=False))
    entries = [entry for entry in trainer.state.log_history if "rank/relative_residual" in entry]
    assert [entry["step"] for entry in entries] == [0, 4, 6]
    assert set(entries[0]) == {*(f"rank/{name}" for name in metrics), "epoch", "step"}
    table = measure_collapse(trainer.model, batch, ["transformer"])
    last = table[(table.metric == "relative_residual") & (table.layer == 2)].value.mean()
    assert entries[-1]["rank/relative_residual"] == pytest.approx(last)


def test_the_first_batch_is_kept_and_nothing_else(tmp_path):
    callback = RankCallback(every=3, max_examples=2)
    trainer = train(tmp_path, callback)
    assert callback.inputs["input_ids"].shape == (2, 10)
    assert not trainer.model._forward_pre_hooks
    again = losses(train(tmp_path / "again", callback))
    assert again == losses(trainer)


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


def test_outside_of_a_trainer_it_says_so():
    model = BERT.stock("Model")(BERT.stock_config())
    with pytest.raises(ValueError, match="must be called by a transformers Trainer"):
        RankCallback(inputs={}).on_train_begin(None, None, None, model=model)
