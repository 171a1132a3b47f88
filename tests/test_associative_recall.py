"""Multi-query associative recall: labels from a dictionary that is filled while a row is read, and the law of the places."""

from collections import Counter

import numpy as np
import pytest
import torch

from hf_rankattn import load_task
from hf_rankattn.tasks import baselines, task_builder
from hf_rankattn.tasks.associative_recall import distinct_numbers


CONFIGS = [
    {},
    {"length": 16, "num_kv_pairs": 4, "vocab_size": 10},
    {"length": 40, "num_kv_pairs": 5, "vocab_size": 31, "power_a": 1.0, "random_non_queries": False},
    {"length": 4, "num_kv_pairs": 1, "vocab_size": 4},
]


@pytest.mark.parametrize("parameters", CONFIGS)
def test_labels_are_what_a_dictionary_recalls(parameters):
    builder = task_builder("associative_recall", **parameters)
    rows, config = builder.sample("test", 300), builder.config
    pairs = config.num_kv_pairs
    for ids, labels in zip(rows["input_ids"].tolist(), rows["labels"].tolist(), strict=True):
        recall = {ids[place]: ids[place + 1] for place in range(0, 2 * pairs, 2)}
        assert len(recall) == len(set(recall.values())) == pairs
        assert all(1 <= key <= config.num_keys < value < config.vocab_size for key, value in recall.items())
        queries = [place for place, label in enumerate(labels) if label != -100]
        assert all(place >= 2 * pairs and place % 2 == 0 for place in queries)
        assert Counter(ids[place] for place in queries) == Counter(recall.keys())
        assert [labels[place] for place in queries] == [recall[ids[place]] for place in queries]
        between = [ids[place] for place in range(2 * pairs, len(ids)) if place not in queries]
        assert all(1 <= token < config.vocab_size if config.random_non_queries else token == 0 for token in between)
    assert builder.model_arguments() == {"vocab_size": config.vocab_size, "num_labels": config.vocab_size}


def test_places_follow_the_power_law():
    """Of one query the place is a single draw, whose weights are known; of two the second is drawn from those that are left."""
    rows = task_builder("associative_recall", length=18, num_kv_pairs=1, power_a=0.4).sample("test", 40_000)
    gaps = (np.argmax(rows["labels"] != -100, axis=1) - 2) // 2
    weights = np.arange(1, 9) ** (0.4 - 1)
    assert np.bincount(gaps, minlength=8) / 40_000 == pytest.approx(weights / weights.sum(), abs=0.01)
    rows = task_builder("associative_recall", length=10, num_kv_pairs=2, power_a=0.5).sample("test", 40_000)
    first = np.argmax(rows["labels"] == rows["input_ids"][:, 1:2], axis=1)
    second = np.argmax(rows["labels"] == rows["input_ids"][:, 3:4], axis=1)
    weights = {4: 1.0, 6: 2**-0.5, 8: 3**-0.5}
    for place, weight in weights.items():
        for other in weights.keys() - {place}:
            share = weight / sum(weights.values()) * weights[other] / (sum(weights.values()) - weight)
            assert np.mean((first == place) & (second == other)) == pytest.approx(share, abs=0.01)


def test_numbers_are_distinct_and_all_orders_are_equally_frequent():
    drawn = distinct_numbers(np.random.default_rng(0), 60_000, 2, 3)
    counts = Counter(map(tuple, drawn.tolist()))
    assert set(counts) == {(a, b) for a in range(3) for b in range(3) if a != b}
    assert all(count / 60_000 == pytest.approx(1 / 6, abs=0.01) for count in counts.values())


def test_baselines_do_not_read_keys():
    found = baselines("associative_recall", length=24, num_kv_pairs=4, rows=4000)
    accuracy = {name: metrics["token_accuracy"] for name, metrics in found.items()}
    assert accuracy["majority"] < 0.01
    assert accuracy["first_value"] == pytest.approx(1 / 4, abs=0.01)
    # the pairs that are listed first are asked first a little more often than not
    assert 0.26 < accuracy["values_in_order"] < 0.6
    alone = baselines("associative_recall", length=24, num_kv_pairs=1, rows=500)
    assert alone["values_in_order"]["token_accuracy"] == alone["first_value"]["token_accuracy"] == 1


def test_the_stream_and_the_stored_rows_are_the_same(tmp_path):
    small = {"length": 16, "num_kv_pairs": 2, "vocab_size": 64, "num_examples": 40, "num_eval_examples": 5, "seed": 3}
    stored = load_task("associative_recall", "train", cache_dir=tmp_path, **small)
    two = load_task("associative_recall", "train", cache_dir=tmp_path / "two", num_proc=2, **small)
    stream = load_task("associative_recall", "train", streaming=True, **small)
    for place, row in enumerate(stream.take(40)):
        for name in ("input_ids", "labels"):
            assert torch.equal(row[name], stored[place][name]) and torch.equal(row[name], two[place][name])


@pytest.mark.parametrize(
    "parameters, message",
    [
        ({"length": 15}, r"even and at least 4 \* num_kv_pairs = 16.*got 15"),
        ({"length": 14}, r"even and at least 4 \* num_kv_pairs = 16.*got 14"),
        ({"vocab_size": 8}, "4 pairs with distinct keys, more than the 3 keys of vocab_size=8"),
        ({"power_a": 0.0}, "`power_a` must be above 0 and finite, got 0.0"),
        ({"random_non_queries": 1}, "`random_non_queries` must be True or False, got 1"),
        ({"num_kv_pairs": 0}, "`num_kv_pairs` must be at least 1, got 0"),
    ],
)
def test_wrong_parameters_are_clear_errors(parameters, message):
    with pytest.raises(ValueError, match=message):
        task_builder("associative_recall", **parameters)


def test_names_of_configs_differ_with_every_parameter():
    changes = [{}, {"length": 32}, {"vocab_size": 512}, {"power_a": 1.0}, {"random_non_queries": False}]
    names = [task_builder("associative_recall", **change).config.name for change in changes]
    assert names == ["n64_p4", "n32_p4", "n64_p4_v512", "n64_p4_a1", "n64_p4_padded"]
