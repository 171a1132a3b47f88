"""Rank models in the hands of Trainer, Accelerate, torch.compile, autocast and pipelines."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from testing_common import BERT, FAMILIES, FAMILY_IDS, TORCHRUN, XLNET, attention_modules, run_python, tiny_inputs
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModel, PreTrainedTokenizerFast, Trainer, TrainingArguments, pipeline

from hf_rankattn import RankEncoderConfig, RankEncoderForPointRegression


SMALL = {"qk_rank": 3, "v_head_dim": 5}


def trainer_of(model, data, tmp_path, batch_size, more=None, **arguments) -> Trainer:
    arguments |= {"report_to": "none", "use_cpu": True, "disable_tqdm": True}
    options = TrainingArguments(str(tmp_path), per_device_train_batch_size=batch_size, **arguments)
    return Trainer(model=model, args=options, train_dataset=data, **(more or {}))


@pytest.mark.parametrize("family", FAMILIES, ids=FAMILY_IDS)
def test_gradient_checkpointing_gives_the_same_gradients(family):
    model = family.rank("ForTokenClassification")(family.rank_config(**SMALL)).train()
    assert model.supports_gradient_checkpointing == family.stock("Model").supports_gradient_checkpointing
    if not model.supports_gradient_checkpointing:
        with pytest.raises(ValueError, match="does not support gradient checkpointing"):
            model.gradient_checkpointing_enable()
        return
    batch = tiny_inputs(family, "ForTokenClassification", labels=True)
    gradients = []
    for checkpointing in (False, True):
        (model.gradient_checkpointing_enable if checkpointing else model.gradient_checkpointing_disable)()
        model.zero_grad()
        torch.manual_seed(0)
        model(**batch).loss.backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("family", FAMILIES, ids=FAMILY_IDS)
def test_torch_compile_traces_the_forward(family):
    model = family.rank("Model")(family.rank_config(**SMALL)).eval()
    batch = tiny_inputs(family, "Model")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=family is not XLNET)
    with torch.no_grad():
        torch.testing.assert_close(compiled(**batch).last_hidden_state, model(**batch).last_hidden_state)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES, ids=FAMILY_IDS)
def test_torch_compile_with_inductor(family):
    model = family.rank("Model")(family.rank_config(**SMALL, qk_norm=True)).eval()
    batch = tiny_inputs(family, "Model")
    with torch.no_grad():
        expected = model(**batch).last_hidden_state
        torch.testing.assert_close(torch.compile(model)(**batch).last_hidden_state, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES, ids=FAMILY_IDS)
def test_bf16_autocast_trains(family):
    suffix = "ForSequenceClassification"
    model = family.rank(suffix)(family.rank_config(**SMALL, qk_norm=True)).train()
    batch = tiny_inputs(family, suffix, labels=True)
    full = model.eval()(**batch).logits
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(**batch)
    output.loss.backward()
    torch.testing.assert_close(output.logits.float(), full, atol=3e-2, rtol=3e-2)
    assert all(torch.isfinite(a.log_temperature.grad).all() for a in attention_modules(model))


def accuracy(prediction):
    assert isinstance(prediction.predictions, np.ndarray), type(prediction.predictions)
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


@pytest.mark.parametrize("family", FAMILIES, ids=FAMILY_IDS)
def test_trainer_fine_tunes_and_predicts_plain_arrays(family, tmp_path):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(10, 40, (96, 8), generator=generator)
    labels = torch.arange(96) % 2
    ids[:, 0] = 3 + labels  # the first token tells
    data = Dataset.from_dict({"input_ids": ids.tolist(), "labels": labels.tolist()})
    fields = {"dropout": 0.0} if family is XLNET else {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = family.rank("ForSequenceClassification")(family.rank_config(**SMALL, **fields, output_hidden_states=True))
    saving = {"save_strategy": "epoch", "save_total_limit": 1}
    judged = {"eval_dataset": data, "compute_metrics": accuracy}
    trainer = trainer_of(model, data, tmp_path, 16, judged, num_train_epochs=6, learning_rate=5e-3, **saving)
    trainer.train()
    assert trainer.evaluate()["eval_accuracy"] > 0.9
    assert trainer.predict(data).predictions.shape == (96, 2)
    checkpoints = list(Path(tmp_path).glob("checkpoint-*"))
    assert checkpoints and not list(checkpoints[0].glob("*.py")), "checkpoints are weights, not source files"
    resumed = AutoModel.from_pretrained(checkpoints[0])
    assert resumed.config.head_geometry(0).qk_rank == 3


@pytest.mark.parametrize("accumulate", [1, 4])
def test_accumulated_steps_are_one_batch(accumulate, tmp_path):
    """Trainer leaves the division to models that ask for it; ours do not."""
    torch.manual_seed(0)
    model = RankEncoderForPointRegression(RankEncoderConfig(input_dim=4, intermediate_size=8))
    points = torch.randn(16, 3, 4)
    data = Dataset.from_dict({"points": points.numpy(), "labels": points.numpy()}).with_format("torch")
    plain = {"max_steps": 1, "optim": "sgd", "learning_rate": 1e-3, "max_grad_norm": 0.0, "save_strategy": "no"}
    trainer = trainer_of(model, data, tmp_path, 16 // accumulate, gradient_accumulation_steps=accumulate, **plain)
    with torch.no_grad():
        expected = model(points=points, labels=points).loss.item()
    assert trainer.train().training_loss == pytest.approx(expected, rel=1e-4)


def test_two_processes_give_the_losses_of_one():
    worker = str(Path(__file__).parent / "worker_accelerate.py")
    ended = run_python(worker, 1), run_python(*TORCHRUN, worker, 2)
    one, two = (json.loads(done.stdout.strip().splitlines()[-1]) for done in ended)
    assert len(one) == len(two) == 16
    np.testing.assert_allclose(one, two, atol=1e-5)
    assert one[-1] != one[0]


@pytest.fixture
def tokenizer():
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "rank", "is", "a", "resource", "depth", "loses", "it"]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    backend.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


@pytest.mark.parametrize("family", FAMILIES, ids=FAMILY_IDS)
@pytest.mark.parametrize(
    "task, suffix", [("text-classification", "ForSequenceClassification"), ("fill-mask", "ForMaskedLM")]
)
def test_pipelines_load_from_a_folder_and_run(family, task, suffix, tokenizer, tmp_path, caplog):
    if suffix not in family.suffixes:
        with pytest.raises(ValueError, match="Unrecognized configuration class"):
            XLNET.rank("Model")(XLNET.rank_config()).save_pretrained(tmp_path)
            tokenizer.save_pretrained(tmp_path)
            pipeline(task, model=str(tmp_path))
        return
    family.rank(suffix)(family.rank_config(**SMALL)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    pipe = pipeline(task, model=str(tmp_path))
    assert type(pipe.model) is family.rank(suffix)
    if task == "fill-mask":
        results = pipe(["rank is a [MASK]", "depth loses [MASK] it"])
        assert [len(result) for result in results] == [5, 5]
    else:
        results = pipe(["rank is a resource", "depth"], padding=True)
        assert [0.0 < result["score"] <= 1.0 for result in results] == [True, True]
    assert "is not supported" not in caplog.text


def test_a_bert_without_mlp_output_is_not_needed_to_capture_chosen_layers():
    model = BERT.rank("Model")(BERT.rank_config(**SMALL)).eval()
    output = model(torch.ones(1, 4, dtype=torch.long), output_hidden_states=[1])
    assert sum(state is not None for state in output.hidden_states) == 1
