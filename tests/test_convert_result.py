"""What becomes of a converted model: saved, loaded, fine-tuned; from streams, to the same bytes."""

import torch
from testing_common import BERT, XLNET, run_code, tiny_inputs
from testing_convert import trained_like

from hf_rankattn import convert_rank


class TestAfterwards:
    def test_saved_loaded_in_a_clean_process_and_fine_tuned(self, tmp_path):
        model = BERT.stock("ForSequenceClassification")(BERT.stock_config())
        batch = tiny_inputs(BERT, "ForSequenceClassification")
        converted = convert_rank(model, "auto", mean_rank=4, calibration=batch).eval()
        converted.save_pretrained(tmp_path / "model")
        torch.save({"batch": batch, "logits": converted(**batch).logits}, tmp_path / "expected.pt")
        code = """
import sys, torch, hf_rankattn
from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments
folder = sys.argv[1]
expected = torch.load(folder + "/expected.pt")
model = AutoModelForSequenceClassification.from_pretrained(folder + "/model")
torch.testing.assert_close(model(**expected["batch"]).logits, expected["logits"], atol=1e-6, rtol=1e-6)
rows = [{**{k: v[i] for k, v in expected["batch"].items()}, "labels": i % 2} for i in range(3)]
options = dict(output_dir=folder + "/run", max_steps=20, learning_rate=3e-3, report_to="none", save_strategy="no", logging_steps=1)
trainer = Trainer(model, TrainingArguments(**options, disable_tqdm=True, use_cpu=True), train_dataset=rows)
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
assert losses[-1] < 0.5 * losses[0], losses
"""
        run_code(code, tmp_path)

    def test_the_same_bytes_for_the_same_inputs_and_seed(self, tmp_path):
        model, batch = trained_like(XLNET).float(), tiny_inputs(XLNET, "Model")
        for name in ("one", "two"):
            convert_rank(model, [3, 8, 11], calibration=batch, seed=4).save_pretrained(tmp_path / name)
            torch.randn(7)
        convert_rank(model, [3, 8, 11], calibration=batch, seed=5).save_pretrained(tmp_path / "other")
        one, two, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two", "other"))
        assert one == two != other

    def test_a_streamed_dataset_is_walked_through_in_bounded_memory(self):
        """Ten times the texts, the same peak: nothing of a batch outlives it."""
        code = """
import torch
from pathlib import Path
from datasets import IterableDataset
from torch.utils.data import DataLoader
from transformers import BertConfig, BertModel
from hf_rankattn import convert_rank
torch.set_num_threads(1)
def texts(count):
    for i in range(count):
        yield {"input_ids": [1 + (i * 7 + j) % 96 for j in range(24)]}
model = BertModel(BertConfig(vocab_size=100, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32))
for count in (1000, 10000):
    stream = IterableDataset.from_generator(texts, gen_kwargs={"count": count}).with_format("torch")
    convert_rank(model, 4, calibration=DataLoader(stream, batch_size=100))
    print(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])  # ru_maxrss starts at the parent's peak
"""
        peaks = [int(line) for line in run_code(code).stdout.split()]
        # 10,000 hidden states of 24 x 32 floats alone would be 30 MB
        assert peaks[1] - peaks[0] < 10_000, peaks
