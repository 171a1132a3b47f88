"""`rankattn measure` on a trained decoder with grouped keys, from its GGUF file: numpy on what transformers returns."""

import numpy as np
import pandas as pd
import pytest
import torch
from test_measure_any import QUESTIONS, measured
from transformers import AutoModel, AutoTokenizer

from hf_rankattn import package_text


FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
LAYER, WIDTH, GROUP = 7, 64, 3  # three heads share one key head


def composite(x):
    return np.sqrt(np.abs(x).sum(1).max() * np.abs(x).sum(0).max())


def directions(singular):
    """How many of the largest hold 90 % of the energy."""
    energy = np.cumsum(np.sort(singular)[::-1] ** 2)
    return int(np.searchsorted(energy, 0.9 * energy[-1])) + 1


@pytest.mark.slow
def test_the_command_measures_smollm2(smollm2, tmp_path):
    text = tmp_path / "text.txt"
    texts = [" ".join(paragraph.split()[:8]) for paragraph in package_text()[:2]]
    text.write_text("\n\n".join(texts))
    options = ("--text", text, "--length", "12", "--batch-size", "1", "--variants", "san,transformer")
    report = measured(smollm2, "--gguf", FILE, *options, "--out", tmp_path / "out")
    facts = report["facts"]
    assert (facts["model_type"], facts["layers"], facts["heads"], facts["causal"]) == ("llama", 30, 9, True)
    table = pd.read_parquet(tmp_path / "out" / "table.parquet")
    assert set(table.question) == QUESTIONS

    model = AutoModel.from_pretrained(smollm2, gguf_file=FILE, dtype=torch.float32, attn_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(smollm2, gguf_file=FILE)
    for example, words in enumerate(texts):
        batch = tokenizer(words, return_tensors="pt", truncation=True, max_length=12)
        with torch.no_grad():
            output = model(**batch, output_hidden_states=True, output_attentions=True)
        own = table[table.example == example]
        for layer in (0, 1, LAYER, 29):
            states = output.hidden_states[layer][0].double().numpy()
            expected = composite(states - states.mean(0)) / composite(states)
            rows = own[(own.variant == "transformer") & (own.metric == "relative_residual") & (own.layer == layer)]
            assert rows.value.item() == pytest.approx(expected, rel=1e-4)
        for layer in (0, LAYER):
            maps = output.attentions[layer][0].double().numpy()
            rows = own[(own.question == "attention") & (own.layer == layer)].sort_values("head")
            for metric, expected in (
                ("sink_mass", maps[:, :, 0].mean(1)),
                ("sink_rate", (maps[:, :, 0].mean(1) > 0.3).astype(float)),
                ("energy_rank", [directions(np.linalg.svd(each, compute_uv=False)) for each in maps]),
            ):
                assert rows[rows.metric == metric].value.tolist() == pytest.approx(list(expected), abs=1e-4), metric
    attention = model.layers[LAYER].self_attn
    query, key, value, output = (
        getattr(attention, f"{name}_proj").weight.detach().double().numpy() for name in "qkvo"
    )
    rows = table[(table.question == "weights") & (table.layer == LAYER)]
    for head in (0, 4, 8):
        q, k, v, o = (
            x[start * WIDTH : (start + 1) * WIDTH]
            for x, start in zip((query, key, value, output.T), (head, head // GROUP, head // GROUP, head), strict=True)
        )
        for metric, form in (("energy_rank", q.T @ k), ("value_energy_rank", v.T @ o)):
            found = rows[(rows["head"] == head) & (rows.metric == metric)].value.item()
            assert found == directions(np.linalg.svd(form, compute_uv=False)), (metric, head)
