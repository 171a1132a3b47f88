"""Configurations: bad input is refused with a way out, good input survives a round trip."""

import json

import numpy as np
import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from testing_common import ALBERT, BERT, FAMILIES, FAMILY_IDS, XLNET
from transformers import AutoConfig, BertConfig

from hf_rankattn import RankBertModel, RankEncoderConfig, RankEncoderForPointRegression, RankEncoderModel
from hf_rankattn.convert import checkpoint as converting
from hf_rankattn.probe.survey import load_checkpoint


BAD_FIELDS = {
    "rank-zero": ({"qk_rank": 0}, "is a width and must be an integer of at least 1 and at most 1048576, got 0"),
    "rank-negative": ({"qk_rank": -3}, "1048576, got -3"),
    "rank-string": ({"qk_rank": "three"}, "1048576, got 'three'"),
    "rank-float": ({"qk_rank": 4.0}, "1048576, got 4.0"),
    "rank-bool": ({"qk_rank": True}, "1048576, got True"),
    "rank-list-too-short": ({"qk_rank": [4]}, "one integer per"),
    "rank-list-of-strings": ({"qk_rank": ["4"] * 3}, "qk_rank"),
    "value-zero": ({"v_head_dim": 0}, "`v_head_dim` is a width"),
    "norm-string": ({"qk_norm": "yes"}, "`qk_norm` is a switch"),
    "norm-none": ({"qk_norm": None}, "`qk_norm` is a switch"),
    "scale-zero": ({"qk_scale": 0.0}, "`qk_scale` multiplies the logits"),
    "scale-nan": ({"qk_scale": float("nan")}, "`qk_scale` multiplies the logits"),
    "scale-infinite": ({"qk_scale": float("inf")}, "`qk_scale` multiplies the logits"),
    "scale-string": ({"qk_scale": "0.1"}, "`qk_scale` multiplies the logits"),
    "head-dim": ({"head_dim": 4}, "Set `qk_rank`"),
    "heads-do-not-divide": ({"num_attention_heads": 5}, "set `qk_rank`"),
    "heads-do-not-divide-values": ({"num_attention_heads": 5, "qk_rank": 4}, "set `v_head_dim`"),
    "rank-huge": ({"qk_rank": 10**13}, "at most 1048576, got 10000000000000"),
    "misspelt": ({"qkrank": 4}, "Did you mean `qk_rank`"),
    "misspelt-values": ({"v_dim": 4}, "Did you mean `v_head_dim`"),
    "layers-negative": ({"num_hidden_layers": -1}, "must not be negative"),
    "layer-map-is-a-list": ({"per_layer_config": [{"qk_rank": 4}]}, "must be a dict"),
    "layer-map-of-numbers": ({"per_layer_config": {0: 4}}, "it maps layers to fields"),
    "layer-key-float": ({"per_layer_config": {1.7: {"qk_rank": 4}}}, "it maps layers to fields"),
    "layer-misspelt": ({"per_layer_config": {0: {"qkrank": 4}}}, "may set qk_rank"),
    "no-heads": ({"num_attention_heads": 0, "qk_rank": 4, "v_head_dim": 4}, "at least 1"),
    "layer-rank-zero": ({"per_layer_config": {0: {"qk_rank": 0}}}, "1048576, got 0"),
    "layer-out-of-range": ({"per_layer_config": {77: {"qk_rank": 2}}}, "77"),
    "layer-foreign-field": ({"per_layer_config": {0: {"initializer_range": 0.5}}}, "may set qk_rank"),
    "layer-skip": ({"per_layer_config": {0: {"skip": ["mlp"]}}}, "would not apply"),
    "foreign-model-type": ({"model_type": "vit"}, "expected 'rank_"),
}


@pytest.mark.parametrize("family", FAMILIES, ids=FAMILY_IDS)
class TestBadInput:
    @pytest.mark.parametrize("fields, message", BAD_FIELDS.values(), ids=BAD_FIELDS.keys())
    def test_the_config_refuses(self, family, fields, message):
        if family is XLNET and fields.get("num_attention_heads") == 0:
            pytest.skip("stock XLNet divides by the number of heads before anything of ours is called")
        with pytest.raises(ValueError, match=message.replace("(", r"\(")):
            family.rank_config(**fields)

    @pytest.mark.parametrize("fields", [{"head_dim": 4}, {"qk_rank": 0}, {"per_layer_config": {0: {"qk_rank": 0}}}])
    def test_from_pretrained_refuses_the_same_overrides(self, family, fields, tmp_path):
        family.rank("Model")(family.rank_config()).save_pretrained(tmp_path)
        with pytest.raises(ValueError, match="qk_rank"):
            family.rank("Model").from_pretrained(tmp_path, **fields)
        with pytest.raises(ValueError, match="qk_rank"):
            AutoConfig.from_pretrained(tmp_path, **fields)

    def test_a_config_of_another_family_builds_nothing(self, family):
        for other in FAMILIES:
            if other is not family:
                for suffix in family.suffixes[:2]:
                    with pytest.raises(ValueError, match=f"from a Rank{family.name}Config, got a Rank{other.name}"):
                        family.rank(suffix)(other.rank_config())

    def test_a_stock_config_object_is_refused_with_the_way_out(self, family):
        with pytest.raises(ValueError, match=r"Use Rank\w+Config\(\*\*config.to_dict\(\)\)"):
            family.rank("Model")(family.stock_config())
        assert family.rank("Model")(family.rank("Config")(**family.stock_config().to_dict()))

    def test_a_checkpoint_of_another_family_is_refused(self, family, tmp_path):
        other = ALBERT if family is not ALBERT else BERT
        other.stock("Model")(other.stock_config()).save_pretrained(tmp_path)
        with pytest.raises(ValueError, match=f"got a configuration of model type '{other.model_type}'"):
            family.rank("Model").from_pretrained(tmp_path)

    def test_shapes_that_do_not_fit_say_what_to_do(self, family, tmp_path):
        family.stock("Model")(family.stock_config()).save_pretrained(tmp_path)
        for fields in ({"qk_rank": 3}, {"v_head_dim": 3}):
            with pytest.raises(RuntimeError, match="do not fit the configuration: .* load it without overriding"):
                family.rank("Model").from_pretrained(tmp_path, **fields)
        model = family.rank("Model").from_pretrained(tmp_path, qk_rank=3, ignore_mismatched_sizes=True)
        assert torch.isfinite(model(torch.ones(1, 4, dtype=torch.long)).last_hidden_state).all()

    def test_a_config_spoilt_after_its_making_builds_nothing(self, family):
        config = family.rank_config(qk_rank=4)
        config.qk_rank = 0
        with pytest.raises(ValueError, match="1048576, got 0"):
            family.rank("Model")(config)
        for spoilt, message in [
            ({1: {"skip": ["mlp"]}}, "would not apply"),
            ({1: {"initializer_range": 0.5}}, "would not apply"),
            ({0: {"qk_rank": 0}}, "1048576, got 0"),
        ]:
            config = family.rank_config()
            config.per_layer_config = spoilt
            with pytest.raises(ValueError, match=message):
                family.rank("Model")(config)

    def test_a_value_for_all_layers_of_a_config_that_differs_by_layer(self, family, tmp_path):
        ranks = [2, 5] if family is ALBERT else [2, 5, 3]
        config = family.rank_config(qk_rank=ranks, v_head_dim=6)
        config.save_pretrained(tmp_path)
        depth = config.num_hidden_layers
        loaded = type(config).from_pretrained(tmp_path, qk_rank=7)
        assert {loaded.head_geometry(i).qk_rank for i in range(depth)} == {7}
        loaded = type(config).from_pretrained(tmp_path, qk_rank=ranks[::-1])
        assert loaded.head_geometry(0).qk_rank == ranks[-1] and loaded.head_geometry(0).v_head_dim == 6

    def test_overrides_that_leave_no_heads_are_refused(self, family, tmp_path):
        family.rank("Model")(family.rank_config()).save_pretrained(tmp_path)
        for fields in ({"num_attention_heads": 5}, {"num_hidden_layers": -1}):
            with pytest.raises(ValueError):
                family.rank("Model").from_pretrained(tmp_path, **fields)

    def test_numbers_of_numpy_and_tuples_are_numbers_and_lists(self, family):
        config = family.rank_config(qk_rank=np.int64(3), qk_scale=np.float32(0.5))
        assert type(config.qk_rank) is int and type(config.qk_scale) is float
        ranks = (2, 5) if family is ALBERT else (2, 5, 3)
        assert family.rank_config(qk_rank=ranks).head_geometry(0).qk_rank == 2
        equal = family.rank_config(qk_rank=[3] * len(ranks))
        assert equal.qk_rank == 3 and not equal.is_heterogeneous

    def test_layers_that_do_not_exist(self, family):
        with pytest.raises(ValueError, match="the model has layers 0 to"):
            family.rank_config().head_geometry(7)


@pytest.mark.parametrize("text", ["{}", '{"per_layer_config": [1]}', '{"qk_rank": 0}'])
def test_config_files_that_hold_no_config(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match="config|qk_rank"):
        BERT.rank("Config").from_pretrained(tmp_path)


def test_albert_refuses_a_value_for_one_layer_of_a_group():
    with pytest.raises(ValueError, match="layers 0 to 1 are group 0 and share one set of weights"):
        ALBERT.rank_config(per_layer_config={0: {"qk_rank": 4}})
    with pytest.raises(ValueError, match="one integer per group, because the layers of a group share their weights"):
        ALBERT.rank_config(qk_rank=[4, 4, 8, 8])
    config = ALBERT.rank_config(per_layer_config={2: {"qk_rank": 4}, 3: {"qk_rank": 4}})
    assert [config.head_geometry(layer).qk_rank for layer in range(4)] == [8, 8, 4, 4]


def test_xlnet_knows_the_common_names():
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 9}
    config = XLNET.rank("Config")(**sizes, qk_rank=[3, 4])
    assert (config.d_model, config.n_head, config.n_layer, config.d_head) == (32, 4, 2, 8)


def test_a_config_class_of_the_users_own_is_accepted():
    class Mine(BERT.rank("Config")):
        model_type = "my_bert"

    assert BERT.rank("Model")(Mine(**BERT.sizes, qk_rank=2)).encoder.layer[0].attention.self.qk_rank == 2


def test_fields_that_contradict_each_other_are_refused():
    with pytest.raises(ValueError, match="`d_head`=3 would be ignored"):
        XLNET.rank_config(d_head=3)
    with pytest.raises(ValueError, match="layer 1 has two values of `qk_rank`"):
        BERT.rank_config(qk_rank=[1, 2, 3], per_layer_config={1: {"qk_rank": 5}})


@pytest.mark.parametrize("family", FAMILIES, ids=FAMILY_IDS)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"qk_rank": 3, "v_head_dim": 5, "qk_norm": True, "qk_scale": 0.3},
        {"qk_rank": [2, 5], "v_head_dim": 3},
        {"per_layer_config": {2: {"qk_rank": 4}, 3: {"qk_rank": 4}}},
    ],
    ids=["defaults", "all-four", "list", "per-layer"],
)
def test_configs_survive_a_round_trip(family, fields, tmp_path):
    if isinstance(fields.get("qk_rank"), list) and family is not ALBERT:
        fields = {**fields, "qk_rank": [2, 5, 2, 5]}
    config = family.rank_config(num_hidden_layers=4, **fields)
    config.save_pretrained(tmp_path)
    for loaded in (AutoConfig.from_pretrained(tmp_path), type(config).from_pretrained(tmp_path)):
        assert type(loaded) is type(config)
        assert {**loaded.to_dict(), "_name_or_path": ""} == config.to_dict()
        assert [loaded.head_geometry(i) for i in range(4)] == [config.head_geometry(i) for i in range(4)]
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["model_type"] == type(config).model_type


@pytest.mark.parametrize("family", FAMILIES, ids=FAMILY_IDS)
def test_predictions_stay_plain_arrays(family):
    assert {"hidden_states", "attentions"} <= set(family.rank_config().keys_to_ignore_at_inference)


BAD_ENCODERS = {
    "misspelt": ({"input_dim": 4, "num_layers": 2}, "Did you mean `num_hidden_layers`"),
    "unknown-activation": ({"input_dim": 4, "hidden_act": "rellu"}, "`hidden_act` must be one of"),
    "dropout-above-one": ({"input_dim": 4, "attention_probs_dropout_prob": 1.5}, "at least 0 and below 1"),
    "pad-outside": ({"vocab_size": 4, "hidden_size": 4, "pad_token_id": 9}, "is not below vocab_size"),
    "neither-input": ({}, "exactly one of `input_dim`"),
    "both-inputs": ({"input_dim": 4, "vocab_size": 9}, "exactly one of `input_dim`"),
    "rank-zero": ({"input_dim": 4, "qk_rank": 0}, "1048576, got 0"),
    "head-dim": ({"input_dim": 4, "head_dim": 2}, "Set `qk_rank`"),
    "eps-zero": ({"input_dim": 4, "norm_eps": 0.0}, "must be above 0"),
    "unknown-norm": ({"input_dim": 4, "norm": "batch"}, "norm"),
    "unknown-attention": ({"input_dim": 4, "attention": "linear"}, "attention"),
    "position-width-alone": ({"input_dim": 4, "position_dim": 2}, "needs position='concatenated'"),
    "stream-not-filled": ({"input_dim": 4, "hidden_size": 9}, "do not fit the residual stream"),
    "vocabulary-without-width": ({"vocab_size": 9}, "`hidden_size` has to be given"),
    "map-of-a-vocabulary": ({"vocab_size": 9, "hidden_size": 4, "input_map": "mlp"}, "maps points"),
    "output-too-wide": ({"input_dim": 4, "output_dim": 5}, "wider than the stream"),
    "no-layers": ({"input_dim": 4, "num_hidden_layers": 0}, "`num_hidden_layers` must be at least 1"),
    "scale-negative": ({"input_dim": 4, "output_scale": -1.0}, "`output_scale` must be"),
}


@pytest.mark.parametrize("fields, message", BAD_ENCODERS.values(), ids=BAD_ENCODERS.keys())
def test_the_encoder_config_refuses(fields, message):
    with pytest.raises((ValueError, StrictDataclassError), match=message):  # the second for a wrong choice
        RankEncoderConfig(**fields)


def test_encoder_inputs_that_do_not_fit():
    config = RankEncoderConfig(input_dim=4, position="additive", max_position_embeddings=5)
    model = RankEncoderForPointRegression(config)
    points = torch.randn(2, 3, 4)
    for kwargs, message in [
        ({"input_ids": torch.ones(2, 3, dtype=torch.long)}, "reads `points`"),
        ({"points": torch.randn(2, 3, 5)}, r"`points` must be \(batch, n, 4\), got \(2, 3, 5\)"),
        ({"points": points, "queries": torch.randn(2, 4)}, "`queries` must be"),
        ({"points": points, "labels": torch.randn(2, 3)}, "`labels` must be"),
        ({"points": points, "attention_mask": torch.ones(2, 4)}, "`attention_mask` must be"),
        ({"points": torch.randn(2, 6, 4)}, "max_position_embeddings=5"),
        ({"points": points, "queries": torch.randn(3, 2, 4)}, "batch size of `points`, 2, got 3"),
        ({"points": points, "label": points}, "Did you mean `labels`"),
        ({}, "reads `points`"),
    ]:
        with pytest.raises(ValueError, match=message):
            model(**kwargs)
    words = RankEncoderModel(RankEncoderConfig(vocab_size=7, hidden_size=4))
    with pytest.raises(ValueError, match="reads `input_ids`"):
        words(points=points)
    with pytest.raises(ValueError, match="needs `output_dim`"):
        RankEncoderForPointRegression(words.config)
    with pytest.raises(ValueError, match="is built from a RankEncoderConfig, got a RankBertConfig"):
        RankEncoderModel(BERT.rank_config())
    with pytest.raises(ValueError, match="is built from a RankBertConfig, got a RankEncoderConfig"):
        RankBertModel(words.config)


@pytest.mark.parametrize("load", [load_checkpoint, converting.load])
def test_a_checkpoint_with_a_hundred_thousand_layers_is_refused_before_it_is_built(load, tmp_path):
    BertConfig(num_hidden_layers=100_000).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="num_hidden_layers must not be negative, and at most 4096, got 100000"):
        load(str(tmp_path))


def test_a_saved_config_keeps_attributes_that_a_user_has_set():
    config = RankEncoderConfig(input_dim=4)
    config.norm_epsilon, config.tie_word_embeddings = 0.5, False  # close to the names of fields
    assert RankEncoderConfig.from_dict(config.to_dict()).norm_epsilon == 0.5
