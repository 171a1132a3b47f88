"""Small models of every family that can be measured, and how tests read long tables and run commands."""

import pytest
import torch
from transformers import AutoConfig, AutoModel

import hf_rankattn  # noqa: F401  registers the rank models with the Auto classes
from rankattn_cli import main as cli


NAMES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
OWN_NAMES = {
    "distilbert": ("dim", "n_layers", "n_heads", "hidden_dim"),
    "gpt2": ("n_embd", "n_layer", "n_head", "n_inner"),
    "xlnet": ("d_model", "n_layer", "n_head", "d_inner"),
}
DEFAULTS = {
    "gpt2": {"bos_token_id": 0, "eos_token_id": 0},
    "vit": {"image_size": 8, "patch_size": 4},
    "llama": {"num_key_value_heads": 2},
    "qwen2": {"num_key_value_heads": 2},
    "mistral": {"num_key_value_heads": 2},
    "deepseek_v3": {
        **{"num_key_value_heads": 4, "kv_lora_rank": 5, "q_lora_rank": 6, "qk_nope_head_dim": 4, "v_head_dim": 3},
        **{"qk_rope_head_dim": 2, "first_k_dense_replace": 1, "moe_intermediate_size": 8, "n_routed_experts": 4},
        **{"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
    },
}


def small(model_type, hidden=24, layers=3, heads=4, inner=30, vocabulary=47, **fields):
    """A base model with fresh weights in evaluation mode, by the same names of sizes for every family."""
    sizes = dict(zip(OWN_NAMES.get(model_type, NAMES), (hidden, layers, heads, inner), strict=True))
    sizes |= {} if model_type == "vit" else {"vocab_size": vocabulary}
    model = AutoModel.from_config(AutoConfig.for_model(model_type, **sizes | DEFAULTS.get(model_type, {}) | fields))
    if model_type == "deepseek_v3":
        model.set_experts_implementation("eager")  # the grouped product has no float64
    return model.eval()


def run(capsys, *arguments):
    """Run `rankattn` as its script does; returns the exit code, stdout and stderr."""
    with pytest.raises(SystemExit) as caught:
        cli.main(list(map(str, arguments)))
    return caught.value.code or 0, *capsys.readouterr()


def value_of(table, metric, **labels):
    rows = table[table.metric == metric]
    for name, label in labels.items():
        rows = rows[rows[name] == label]
    return rows.value


def examples_alone(batch):
    """Each example of a padded batch as a batch without padding."""
    for example, real in enumerate(batch["attention_mask"].bool()):
        yield example, {name: value[example : example + 1, real] for name, value in batch.items()}


def hook_counts(model):
    return [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]


def close(found, expected, **tolerance):
    torch.testing.assert_close(torch.tensor(found.to_numpy()), torch.tensor(expected.to_numpy()), **tolerance)
