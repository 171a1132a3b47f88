"""The families with a rank twin, their task classes and tiny inputs, for every test that runs over all of them."""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

import hf_rankattn


BATCH, LENGTH, VOCAB = 3, 9, 47


@dataclass(frozen=True)
class Family:
    """A stock family and its rank twin."""

    name: str
    suffixes: tuple[str, ...]
    sizes: dict[str, Any]
    implementations: tuple[str, ...] = ("eager", "sdpa")
    inputs: tuple[str, ...] = ("input_ids", "attention_mask", "token_type_ids")

    @property
    def model_type(self) -> str:
        return self.stock("Config").model_type

    def stock(self, suffix: str):
        return getattr(transformers, f"{self.name}{suffix}")

    def rank(self, suffix: str):
        return getattr(hf_rankattn, f"Rank{self.name}{suffix}")

    def stock_config(self, **fields):
        return self.stock("Config")(**{**self.sizes, **fields})

    def rank_config(self, **fields):
        return self.rank("Config")(**{**self.sizes, **fields})


SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 37}
SIZES |= {"max_position_embeddings": 64}
TASK_HEADS = ("ForSequenceClassification", "ForMultipleChoice", "ForTokenClassification", "ForQuestionAnswering")
BERT = Family(
    name="Bert",
    suffixes=("Model", "ForPreTraining", "LMHeadModel", "ForMaskedLM", "ForNextSentencePrediction", *TASK_HEADS),
    sizes={**SIZES, "num_hidden_layers": 3},
)
ALBERT = Family(
    name="Albert",
    suffixes=("Model", "ForPreTraining", "ForMaskedLM", *TASK_HEADS),
    sizes={
        **{**SIZES, "num_hidden_layers": 4, "num_hidden_groups": 2, "embedding_size": 16},
        # stock ALBERT has none, which would leave training mode untested
        **{"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1},
    },
)
XLNET = Family(
    name="XLNet",
    suffixes=("Model", "LMHeadModel", *TASK_HEADS, "ForQuestionAnsweringSimple"),
    sizes={"vocab_size": VOCAB, "d_model": 32, "n_layer": 3, "n_head": 4, "d_inner": 37, "mem_len": 5},
    # XLNet has its own attention code and knows no other implementation
    implementations=("eager",),
)
LM_HEADS = ("ForCausalLM", "ForMaskedLM")
ROBERTA, XLM_ROBERTA, CAMEMBERT = (
    Family(name, ("Model", *LM_HEADS, *TASK_HEADS), {**SIZES, "num_hidden_layers": 3})
    for name in ("Roberta", "XLMRoberta", "Camembert")
)
ELECTRA = Family(
    name="Electra",
    suffixes=("Model", "ForPreTraining", *LM_HEADS, *TASK_HEADS),
    sizes={**SIZES, "num_hidden_layers": 3, "embedding_size": 16},
)
DISTILBERT = Family(
    name="DistilBert",
    suffixes=("Model", "ForMaskedLM", *TASK_HEADS),
    sizes={"vocab_size": VOCAB, "dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 37},
    inputs=("input_ids", "attention_mask"),
)
GPT2 = Family(
    name="GPT2",
    suffixes=("Model", "LMHeadModel", "DoubleHeadsModel", *(head for head in TASK_HEADS if "Multiple" not in head)),
    sizes={
        **{"vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_inner": 37, "n_positions": 64},
        **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    },
)
EVERY_FAMILY = (BERT, ALBERT, XLNET, ROBERTA, XLM_ROBERTA, CAMEMBERT, ELECTRA, DISTILBERT, GPT2)
# XLM-RoBERTa and CamemBERT have the code of RoBERTa under other names: they are in the tests of every class only
FAMILIES = tuple(family for family in EVERY_FAMILY if family not in (XLM_ROBERTA, CAMEMBERT))
FAMILY_IDS = [family.name for family in FAMILIES]
TASKS = [(family, suffix) for family in EVERY_FAMILY for suffix in family.suffixes]
TASK_IDS = [f"{family.name}{suffix}" for family, suffix in TASKS]


def tiny_inputs(family: Family, suffix: str, labels: bool = False) -> dict[str, torch.Tensor]:
    """A padded batch with token types for one task class, with labels if asked for."""
    generator = torch.Generator().manual_seed(11)

    def draw(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=generator)

    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[1, 6:] = 0
    mask[2, 4:] = 0
    ids, types = draw(VOCAB, BATCH, LENGTH), draw(2, BATCH, LENGTH)
    batch = {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}
    batch = {name: batch[name] for name in family.inputs}
    if suffix in ("ForMultipleChoice", "DoubleHeadsModel"):
        batch = {name: torch.stack([value, value.flip(0)], dim=1) for name, value in batch.items()}
    if not labels:
        return batch
    if family is ELECTRA and suffix == "ForPreTraining":
        batch["labels"] = draw(2, BATCH, LENGTH)
    elif suffix == "DoubleHeadsModel":
        batch["labels"], batch["mc_labels"] = draw(VOCAB, BATCH, 2, LENGTH), draw(2, BATCH)
    elif suffix == "ForPreTraining":
        batch["labels"] = draw(VOCAB, BATCH, LENGTH)
        batch["next_sentence_label" if family is BERT else "sentence_order_label"] = draw(2, BATCH)
    elif suffix in ("LMHeadModel", *LM_HEADS):
        batch["labels"] = draw(VOCAB, BATCH, LENGTH)
    elif suffix == "ForTokenClassification":
        batch["labels"] = draw(2, BATCH, LENGTH)
    elif suffix.startswith("ForQuestionAnswering"):
        batch["start_positions"], batch["end_positions"] = draw(3, BATCH), 3 + draw(3, BATCH)
    elif suffix != "Model":
        batch["labels"] = draw(2, BATCH)
    return batch


def float_tensors(value: Any) -> list[torch.Tensor]:
    """All floating tensors in a model output, in order, however they are nested."""
    if isinstance(value, torch.Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        return [tensor for item in value for tensor in float_tensors(item)]
    return []


def attention_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The attention modules of a rank model, in the order of its layers (or groups)."""
    return [module for module in model.modules() if hasattr(module, "qk_rank")]


def projections(attention: torch.nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Weights (heads * width, hidden) and biases of queries, keys and values, for all families but XLNet."""
    if hasattr(attention, "c_attn"):
        weights, biases = attention.c_attn.weight.T, attention.c_attn.bias
        return list(zip(weights.split(attention.split_size), biases.split(attention.split_size), strict=True))
    names = ("q_lin", "k_lin", "v_lin") if hasattr(attention, "q_lin") else ("query", "key", "value")
    return [(getattr(attention, name).weight, getattr(attention, name).bias) for name in names]


def bilinear_forms(attention: torch.nn.Module) -> torch.Tensor:
    """W_Q W_K^T of each head, (heads, hidden, hidden), in float64."""
    if hasattr(attention, "q"):
        query, key = attention.q.double().transpose(0, 1), attention.k.double().transpose(0, 1)
    else:
        query, key = (
            weight.double().unflatten(0, (attention.num_attention_heads, attention.qk_rank)).transpose(1, 2)
            for weight, _ in projections(attention)[:2]
        )
    return query @ key.transpose(1, 2)


def shaken(model):
    """Weights, biases and gains away from where initialisation puts them."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    return model.eval()


def small_bert(layers, heads, hidden=24, **fields):
    sizes = {"vocab_size": 50, "hidden_size": hidden, "intermediate_size": 30, "num_hidden_layers": layers}
    config = transformers.BertConfig(**sizes, num_attention_heads=heads, **fields)
    return shaken(transformers.BertModel(config, add_pooling_layer=False))


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")


def run_python(*arguments: object, cwd: Path | None = None, timeout: float = 300, **env: str):
    """Run `python ARGUMENTS` in a process of its own, with one thread, which must end without an error."""
    options = {"env": {**os.environ, "OMP_NUM_THREADS": "1", **env}, "cwd": cwd, "timeout": timeout}
    options |= {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL}
    done = subprocess.run([sys.executable, *map(str, arguments)], **options)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def run_code(code: str, *arguments: object, **options) -> subprocess.CompletedProcess:
    return run_python("-c", code, *arguments, **options)


def hear_interrupts() -> None:
    """For a child process: whoever runs the tests in the background of a shell has a SIGINT that is ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
