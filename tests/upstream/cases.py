"""What is tested: model families, variants, and the thin test classes built for each pair.

This file is used twice. ``run.py`` imports it for the tables (`FAMILIES`, `VARIANTS`, `NOT_APPLICABLE`), and copies it
next to the unpacked tests of transformers, where `build` makes the test classes. Therefore nothing of the upstream
tests may be imported at module level.

The source distribution of transformers has the common tests but not ``tests/models/*``; the testers below play the
part of ``BertModelTester`` and its like. The three variants of a family differ only in classes and configuration:

* ``stock``: the classes of transformers, the baseline;
* ``rank_none``: our classes with their default geometry;
* ``rank_small``: our classes with narrow queries and keys, so that all widths differ.

`PipelineTesterMixin` is left out: its tiny models come from the Hub and its pipeline tests are not in the sdist.
`GenerationTesterMixin` and `ExportTesterMixin` are not in the sdist either; the classes inherit the stand-ins, or the
real mixins if ``run.py --sdist`` was given a full checkout of the same version.
"""

from __future__ import annotations

import importlib
import unittest
from dataclasses import dataclass, field
from typing import Any
from unittest import mock


SEED = 0
VARIANTS = ("stock", "rank_none", "rank_small")
# 3 and 5 divide none of the tiny sizes below: a place which still assumes hidden_size / heads cannot work by luck.
GEOMETRY: dict[str, dict[str, Any]] = {"stock": {}, "rank_none": {}, "rank_small": {"qk_rank": 3, "v_head_dim": 5}}


@dataclass(frozen=True)
class Family:
    """One model family; `heads` are the class-name suffixes which all variants share."""

    prefix: str
    heads: tuple[str, ...]
    config: dict[str, Any]
    # Given to ConfigTester, which checks that they survive every kind of round trip. The default numbers of heads divide
    # them: stock refuses other sizes when a model is built, our configurations at once.
    config_test: dict[str, Any]
    inputs: tuple[str, ...] = ("input_ids", "token_type_ids", "attention_mask")
    # Class and extra configuration of test_training_overfit, which feeds ids and labels of the same shape.
    overfit: tuple[str, dict[str, Any]] | None = None
    # The label which ForPreTraining needs besides `labels` to return a loss.
    sentence_label: str = ""
    has_stock: bool = True
    # Test names which upstream itself switches off for this family, with its reason.
    upstream_skips: dict[str, str] = field(default_factory=dict)

    def class_name(self, suffix: str, variant: str) -> str:
        return ("" if variant == "stock" else "Rank") + self.prefix + suffix

    @property
    def twin(self) -> str:
        """Prefix of the stock classes which the tests know; a family without stock classes is treated like BERT."""
        return self.prefix if self.has_stock else "Bert"

    @property
    def variants(self) -> tuple[str, ...]:
        return VARIANTS if self.has_stock else VARIANTS[1:]


BERT_LIKE = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
BERT_LIKE |= {"intermediate_size": 37, "max_position_embeddings": 128, "type_vocab_size": 16}
TASK_HEADS = ("ForSequenceClassification", "ForMultipleChoice", "ForTokenClassification", "ForQuestionAnswering")
FAMILIES = {
    "bert": Family(
        prefix="Bert",
        heads=("Model", "LMHeadModel", "ForPreTraining", "ForMaskedLM", "ForNextSentencePrediction", *TASK_HEADS),
        config=BERT_LIKE,
        config_test={"hidden_size": 192},
        overfit=("LMHeadModel", {"is_decoder": True}),
        sentence_label="next_sentence_label",
    ),
    "albert": Family(
        prefix="Albert",
        heads=("Model", "ForPreTraining", "ForMaskedLM", *TASK_HEADS),
        # As many groups as layers: the common tests count one set of weights per layer.
        config=BERT_LIKE | {"embedding_size": 8, "num_hidden_groups": 2, "inner_group_num": 1},
        config_test={"hidden_size": 192},
        # Embeddings of width 8 are too narrow to learn 99 tokens within the given steps.
        overfit=("ForMaskedLM", {"embedding_size": 32}),
        sentence_label="sentence_order_label",
    ),
    "xlnet": Family(
        prefix="XLNet",
        heads=("Model", "LMHeadModel", *TASK_HEADS, "ForQuestionAnsweringSimple"),
        config={
            **{"vocab_size": 99, "d_model": 32, "n_head": 4, "d_inner": 37, "n_layer": 2, "mem_len": 10},
            **{"reuse_len": 15, "initializer_range": 0.05, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 5},
        },
        config_test={"d_inner": 37},
        # Not the LM head: without a permutation mask it learns to copy its input, and then generates nonsense.
        overfit=("ForTokenClassification", {"num_labels": 99}),
        inputs=("input_ids",),
        upstream_skips={"test_retain_grad_hidden_states_attentions": "XLNet keeps no gradients in its outputs"},
    ),
    **{
        name: Family(
            prefix=prefix,
            heads=("Model", "ForCausalLM", "ForMaskedLM", *TASK_HEADS),
            config=BERT_LIKE,
            config_test={"hidden_size": 192},
            overfit=("ForCausalLM", {"is_decoder": True}),
        )
        for name, prefix in (("roberta", "Roberta"), ("xlm_roberta", "XLMRoberta"), ("camembert", "Camembert"))
    },
    "electra": Family(
        prefix="Electra",
        heads=("Model", "ForPreTraining", "ForCausalLM", "ForMaskedLM", *TASK_HEADS),
        config=BERT_LIKE | {"embedding_size": 32},
        config_test={"hidden_size": 192},
        overfit=("ForCausalLM", {"is_decoder": True}),
    ),
    "distilbert": Family(
        prefix="DistilBert",
        heads=("Model", "ForMaskedLM", *TASK_HEADS),
        config={
            **{"vocab_size": 99, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 37},
            "max_position_embeddings": 128,
        },
        config_test={"dim": 192},
        inputs=("input_ids", "attention_mask"),
        overfit=("ForMaskedLM", {}),
    ),
    "gpt2": Family(
        prefix="GPT2",
        heads=("Model", "LMHeadModel", "DoubleHeadsModel", *(head for head in TASK_HEADS if "Multiple" not in head)),
        config={
            **{"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 37, "n_positions": 128},
            **{"bos_token_id": 98, "eos_token_id": 98, "pad_token_id": 98},
        },
        config_test={"n_embd": 192},
        inputs=("input_ids", "attention_mask"),
        overfit=("LMHeadModel", {}),
    ),
    "rank_encoder": Family(
        prefix="Encoder",
        heads=("Model", "ForPointRegression", "ForTokenClassification"),
        config={
            **{"input_dim": 6, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
            **{"intermediate_size": 37, "input_map": "linear", "position": "additive", "max_position_embeddings": 128},
        },
        config_test={"input_dim": 6, "hidden_size": 32, "input_map": "linear"},
        inputs=("points", "attention_mask"),
        has_stock=False,
        upstream_skips={"test_training_overfit": "trains on token ids only"},
    ),
}

NO_EMBEDDING = "points enter through a linear map; there is no token embedding"
# (family, variant, test name): why a test which passes for stock (if there are stock classes) cannot pass for ours.
NOT_APPLICABLE: dict[tuple[str, str, str], str] = {
    ("rank_encoder", "rank_none", "test_model_get_set_embeddings"): NO_EMBEDDING,
    ("rank_encoder", "rank_small", "test_model_get_set_embeddings"): NO_EMBEDDING,
}


class Tester:
    """Stands in for the ModelTester classes of tests/models: tiny configurations and random inputs."""

    batch_size, seq_length, num_choices, is_training = 13, 7, 4, True

    def __init__(self, family: Family, config_class: type, config: dict[str, Any], common: Any) -> None:
        self.family, self.config_class, self.config, self.common = family, config_class, config, common
        tiny = self.get_config()
        self.hidden_size, self.vocab_size = tiny.hidden_size, tiny.vocab_size
        self.num_hidden_layers, self.num_attention_heads = tiny.num_hidden_layers, tiny.num_attention_heads

    def get_config(self) -> Any:
        return self.config_class(**self.config)

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, Any]]:
        shape = [self.batch_size, self.seq_length]
        make = {
            "input_ids": lambda: self.common.ids_tensor(shape, self.vocab_size),
            "token_type_ids": lambda: self.common.ids_tensor(shape, self.config["type_vocab_size"]),
            "attention_mask": lambda: self.common.random_attention_mask(shape),
            "points": lambda: self.common.floats_tensor([*shape, self.config["input_dim"]]),
        }
        return self.get_config(), {name: make[name]() for name in self.family.inputs}


def teach_names(common: Any, family: Family, model_type: str, stock_type: str) -> None:
    """Make the common tests treat our classes as they treat their stock twins.

    They choose inputs, labels and skips by looking class names up in the name tables of the Auto classes. Only the
    test module gets longer tables; transformers itself stays as it is.
    """
    ours = {family.twin + suffix: family.class_name(suffix, "rank") for suffix in family.heads}
    for table in [name for name in vars(common) if name.endswith("MAPPING_NAMES")]:
        names = dict(getattr(common, table))
        stock = names.get(stock_type, ())
        twins = tuple(ours[name] for name in ([stock] if isinstance(stock, str) else stock) if name in ours)
        if twins:
            setattr(common, table, names | {model_type: twins})
    common.UNSHIFTED_LM_HEADS = {*common.UNSHIFTED_LM_HEADS, *map(ours.get, common.UNSHIFTED_LM_HEADS)}


def build(family_name: str, variant: str) -> dict[str, type]:
    """The test class for one family and variant, under the name pytest shall show; call inside the unpacked tests."""
    import torch
    import transformers

    def upstream(module: str) -> Any:
        return importlib.import_module("." + module, __package__)

    family, geometry, common = FAMILIES[family_name], GEOMETRY[variant], upstream("test_modeling_common")
    source = importlib.import_module("transformers" if variant == "stock" else "hf_rankattn")
    config_class: Any = getattr(source, family.class_name("Config", variant))
    classes = {suffix: getattr(source, family.class_name(suffix, variant)) for suffix in family.heads}
    if variant != "stock":
        teach_names(common, family, config_class.model_type, getattr(transformers, family.twin + "Config").model_type)

    class Base(common.ModelTesterMixin, upstream("test_training_mixin").TrainingTesterMixin):  # type: ignore[misc]
        all_model_classes = tuple(classes.values())
        model_tester: Any = None  # TrainingTesterMixin declares it abstract
        test_resize_embeddings = "input_ids" in family.inputs
        # Off by default for old models; our parameters must be initialised whatever the age of their family.
        test_can_init_all_missing_weights_before_2023 = True

        def setUp(self) -> None:
            if reason := family.upstream_skips.get(self._testMethodName):
                self.skipTest(reason)
            # Same inputs and weights for every variant, in whatever order and selection the tests run.
            transformers.set_seed(SEED)
            common.global_rng.seed(SEED)
            self.model_tester = Tester(family, config_class, family.config | geometry, common)

        def _prepare_for_class(self, inputs_dict: Any, model_class: type, return_labels: bool = False) -> Any:
            inputs = super()._prepare_for_class(inputs_dict, model_class, return_labels=return_labels)
            zeros = torch.zeros(self.model_tester.batch_size, dtype=torch.long)
            if return_labels and model_class is classes.get("ForPreTraining"):
                inputs |= {"labels": torch.zeros_like(inputs["input_ids"]), family.sentence_label: zeros}
            # XLNet has two heads for this task and the Auto classes know the simple one only.
            if return_labels and model_class is classes.get("ForQuestionAnswering"):
                inputs |= {"start_positions": zeros, "end_positions": zeros.clone()}
            if return_labels and model_class is classes.get("DoubleHeadsModel"):
                choices = [1, self.model_tester.num_choices, 1]
                inputs = {name: inputs[name][:, None].repeat(choices) for name in family.inputs}
                inputs |= {"labels": inputs["input_ids"], "mc_labels": zeros}
            if return_labels and model_class is classes.get("ForPointRegression"):
                inputs["labels"] = torch.zeros_like(inputs["points"])
            return inputs

        def prepare_config_and_inputs_for_generate(self, *args: Any, **kwargs: Any) -> Any:
            config, inputs = super().prepare_config_and_inputs_for_generate(*args, **kwargs)
            config.is_decoder = True  # BERT masks the future only then
            return config, inputs

        def _check_past_key_values_for_generate(
            self, batch_size: int, past_key_values: Any, seq_length: int, config: Any
        ) -> None:
            if not geometry:
                return super()._check_past_key_values_for_generate(batch_size, past_key_values, seq_length, config)
            # Upstream expects hidden_size / heads for keys and values alike.
            for layer in getattr(past_key_values, "self_attention_cache", past_key_values).layers:
                for states, width in ((layer.keys, config.qk_rank), (layer.values, config.v_head_dim)):
                    self.assertEqual(states.shape, (batch_size, config.num_attention_heads, seq_length, width))

        def test_config(self) -> None:
            tester = upstream("test_configuration_common").ConfigTester(
                self, config_class, "input_ids" in family.inputs, **family.config_test, **geometry
            )
            if family.has_stock:
                tester.run_common_tests()
            else:  # a configuration which must be told its input has no defaults to check
                for check in [name for name in dir(tester) if name.startswith("create_and_test")]:
                    getattr(tester, check)()

        def test_training_overfit(self) -> None:
            assert family.overfit
            suffix, extra = family.overfit
            self.model_tester.causal_lm_class = classes[suffix]
            with mock.patch.object(self.model_tester, "config", self.model_tester.config | extra):
                super().test_training_overfit()

    bases: tuple[type, ...] = (Base, unittest.TestCase)
    if any(model_class.can_generate() for model_class in classes.values()):
        bases = (Base, upstream("generation.test_utils").GenerationTesterMixin, unittest.TestCase)
    name = f"{family_name}_{variant}"
    return {name: type(name, bases, {"__module__": __name__})}
