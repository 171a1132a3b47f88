"""The three families, their task classes and tiny inputs, for every test that runs over all of them."""

import signal
from dataclasses import dataclass
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
    implementations: tuple[str, ...]

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
    implementations=("eager", "sdpa"),
)
ALBERT = Family(
    name="Albert",
    suffixes=("Model", "ForPreTraining", "ForMaskedLM", *TASK_HEADS),
    sizes={
        **{**SIZES, "num_hidden_layers": 4, "num_hidden_groups": 2, "embedding_size": 16},
        # stock ALBERT has none, which would leave training mode untested
        **{"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1},
    },
    implementations=("eager", "sdpa"),
)
XLNET = Family(
    name="XLNet",
    suffixes=("Model", "LMHeadModel", *TASK_HEADS, "ForQuestionAnsweringSimple"),
    sizes={"vocab_size": VOCAB, "d_model": 32, "n_layer": 3, "n_head": 4, "d_inner": 37, "mem_len": 5},
    # XLNet has its own attention code and knows no other implementation
    implementations=("eager",),
)
FAMILIES = (BERT, ALBERT, XLNET)
TASKS = [(family, suffix) for family in FAMILIES for suffix in family.suffixes]
TASK_IDS = [f"{family.name}{suffix}" for family, suffix in TASKS]
FAMILY_IDS = [family.name for family in FAMILIES]


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
    if suffix == "ForMultipleChoice":
        batch = {name: torch.stack([value, value.flip(0)], dim=1) for name, value in batch.items()}
    if not labels:
        return batch
    if suffix == "ForPreTraining":
        batch["labels"] = draw(VOCAB, BATCH, LENGTH)
        batch["next_sentence_label" if family is BERT else "sentence_order_label"] = draw(2, BATCH)
    elif suffix in ("LMHeadModel", "ForMaskedLM"):
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


def bilinear_forms(attention: torch.nn.Module) -> torch.Tensor:
    """W_Q W_K^T of each head, (heads, hidden, hidden), in float64."""
    heads, rank = attention.num_attention_heads, attention.qk_rank
    if hasattr(attention, "q"):
        query, key = attention.q.double().transpose(0, 1), attention.k.double().transpose(0, 1)
    else:
        query, key = (
            weight.double().view(heads, rank, -1).transpose(1, 2)
            for weight in (attention.query.weight, attention.key.weight)
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


def hear_interrupts() -> None:
    """For a child process: whoever runs the tests in the background of a shell has a SIGINT that is ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
