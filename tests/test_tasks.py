"""The synthetic tasks: labels against brute force, baselines against the papers, wrong parameters, training."""

import itertools
import math
import re
from collections import Counter

import numpy as np
import pytest
import torch
from scipy.spatial import ConvexHull
from scipy.stats import ks_2samp
from transformers import Trainer, TrainingArguments

from hf_rankattn import (
    RankBertConfig,
    RankBertForTokenClassification,
    RankEncoderConfig,
    RankEncoderForPointRegression,
    RankEncoderForTokenClassification,
    load_task,
)
from hf_rankattn.tasks import (
    TASKS,
    HullVertexF1,
    InvertedPairs,
    NeighborAccuracy,
    NeighborError,
    SequenceAccuracy,
    TokenAccuracy,
    baselines,
    orthonormal_vectors,
    random_generator,
    task_builder,
    trainer_metrics,
)
from hf_rankattn.tasks.convex_hull import hull_vertices


def rows_of(name, rows=200, config=None, split="test", **parameters):
    return task_builder(name, config, **parameters).sample(split, rows)


class TestLabels:
    """Each task against the simplest program for its labels, from the stored rows alone, in double precision."""

    @pytest.mark.parametrize("dim, count", [(64, 16), (2, 2), (3, 40)])
    def test_farthest_neighbor(self, dim, count):
        rows = rows_of("farthest_neighbor", dim=dim, num_points=count)
        np.testing.assert_allclose(np.linalg.norm(rows["points"], axis=-1), 1, atol=1e-6)
        for points, labels in zip(rows["points"].astype(float), rows["labels"].astype(float), strict=True):
            for i in range(count):
                distances = {j: math.dist(points[i], points[j]) for j in range(count) if j != i}
                assert any(np.array_equal(labels[i], points[j]) for j in distances)
                # of points that are equally far up to rounding, either is right
                assert math.dist(points[i], labels[i]) == pytest.approx(max(distances.values()), abs=1e-6)

    @pytest.mark.parametrize("distribution", ["uniform", "orthogonal", "doubled"])
    def test_nearest_neighbor(self, distribution):
        rows = rows_of("nearest_neighbor", dim=16, num_points=6, num_queries=3, distribution=distribution)
        for points, queries, labels in zip(*(rows[name].astype(float) for name in rows), strict=True):
            for query, label in zip(queries, labels, strict=True):
                distances = [math.dist(query, point) for point in points]
                assert math.dist(query, label) == pytest.approx(min(distances), abs=1e-6)
                assert any(np.array_equal(label, point) for point in points)
            if distribution == "orthogonal":
                np.testing.assert_allclose(points @ points.T, np.eye(6), atol=1e-6)
            if distribution == "doubled":
                np.testing.assert_array_equal(points[3:], -points[:3])

    @pytest.mark.parametrize("dim", [2, 3, 8])
    def test_biased_nearest_neighbor(self, dim):
        rows = rows_of("biased_nearest_neighbor", dim=dim, num_queries=2)
        for (x1, x2), queries, labels in zip(*(rows[name].astype(float) for name in rows), strict=True):
            for y, label in zip(queries, labels, strict=True):
                total = np.zeros(dim)
                for n in range(-(dim**2), dim**2 + 1):
                    total += (-1) ** n * (x1 if (x1 - x2) @ y - n > 0 else x2)
                np.testing.assert_allclose(label, (-1) ** dim * total, atol=1e-6)

    def test_biased_queries_cross_many_jumps_and_never_all(self):
        rows = rows_of("biased_nearest_neighbor", rows=4000)
        jumps = np.einsum("rmd,rd->rm", rows["queries"], rows["points"][:, 0] - rows["points"][:, 1])
        assert jumps.std() == pytest.approx(4, rel=0.05) and np.abs(jumps).max() < 64

    @pytest.mark.parametrize("length, num_values", [(8, 10), (16, 3)])
    def test_sorting(self, length, num_values):
        rows = rows_of("sorting", length=length, num_values=num_values)
        for ids, labels in zip(rows["input_ids"].tolist(), rows["labels"].tolist(), strict=True):
            assert sorted(number - 1 for number in ids) == labels
        assert set(rows["labels"].ravel()) == set(range(num_values)) and rows["input_ids"].min() == 1

    @pytest.mark.parametrize("count", [3, 10, 40])
    def test_convex_hull(self, count):
        rows = rows_of("convex_hull", rows=400, num_points=count)
        for points, labels in zip(rows["points"].astype(float), rows["labels"], strict=True):
            assert set(np.flatnonzero(labels)) == set(ConvexHull(points).vertices)

    def test_convex_hull_of_a_square_and_its_centre(self):
        square = np.array([[[0, 0], [2, 0], [1, 1], [2, 2], [0, 2]]], dtype=np.float32)
        assert hull_vertices(square).tolist() == [[True, True, False, True, True]]

    @pytest.mark.parametrize("config, apart", [("grid_n1000", 500), ("grid_n1000_s499", 499)])
    def test_circle(self, config, apart):
        builder = task_builder("circle", config)
        rows = builder.sample("train", 500)
        as_complex = {name: array[..., 0] + 1j * array[..., 1] for name, array in rows.items()}
        step = np.exp(2j * np.pi / 1000)
        for i in range(500):
            np.testing.assert_allclose(as_complex["points"][i], 0.3 * step ** np.array([i, i + apart]), atol=1e-6)
            np.testing.assert_allclose(as_complex["labels"][i], as_complex["points"][i] * step, atol=1e-6)
        if apart == 500:  # the two arcs close: each ends where the other begins
            np.testing.assert_allclose(rows["labels"][-1], rows["points"][0, ::-1], atol=1e-6)

    @pytest.mark.parametrize("layout", ["joint", "pairs"])
    def test_token_retrieval(self, layout):
        builder = task_builder("token_retrieval", length=32, layout=layout, num_keys=20, num_values=5)
        rows = builder.sample("test", 200)
        for ids, labels in zip(rows["input_ids"].tolist(), rows["labels"].tolist(), strict=True):
            memory, queries = ids[:16], ids[16:]
            if layout == "joint":
                recall = dict(divmod(token - 21, 5) for token in memory)
            else:
                recall = {memory[i] - 1: memory[i + 1] - 21 for i in range(0, 16, 2)}
            assert len(recall) == (16 if layout == "joint" else 8)
            assert labels == [-100] * 16 + [recall[query - 1] for query in queries]
        assert max(rows["input_ids"].ravel()) < builder.model_arguments()["vocab_size"]


class TestSampling:
    def test_orthogonal_points_are_rotation_invariant_and_raw_qr_is_not(self):
        rng = np.random.default_rng(0)
        ours = orthonormal_vectors(random_generator(0, "test"), 20_000, 3, 8)
        raw = np.swapaxes(np.linalg.qr(rng.standard_normal((20_000, 8, 3)))[0], 1, 2)
        rotation = np.linalg.qr(rng.standard_normal((8, 8)))[0]
        # what a rotation invariant law must not notice: one entry of each point, and a product of two points' entries
        statistics = [lambda x, k=k: x[:, k, 0] for k in range(3)] + [lambda x: x[:, 0, 0] * x[:, 1, 1]]
        for statistic in statistics:
            assert ks_2samp(statistic(ours[:10_000]), statistic(ours[10_000:] @ rotation)).pvalue > 1e-3
        assert ks_2samp(statistics[0](raw[:10_000]), statistics[0](raw[10_000:] @ rotation)).pvalue < 1e-9
        assert raw[:, 0, 0].max() < 0 and abs(ours[:, 0, 0].mean()) < 0.01
        np.testing.assert_allclose(np.einsum("rnd,rne->nde", ours, ours) / 20_000, [np.eye(8) / 8] * 3, atol=0.01)

    @pytest.mark.parametrize("name", [name for name in TASKS if name not in ("memorization", "circle")])
    def test_seeds_and_splits_share_no_rows(self, name):
        parameters = {"length": 16} if name == "sorting" else {}
        places = itertools.product(("train", "test"), (0, 1, 2**32))
        samples = [rows_of(name, 300, split=split, seed=seed, **parameters) for split, seed in places]
        inputs = [{row.tobytes() for row in sample.get("input_ids", sample.get("points"))} for sample in samples]
        assert len(set.union(*inputs)) == sum(map(len, inputs)) == 300 * len(samples)

    def test_seeds_label_the_same_text_otherwise(self):
        labels = [rows_of("memorization", 20, split="train", seed=seed)["labels"] for seed in (0, 1)]
        agreement = np.mean((labels[0] == labels[1])[labels[0] != -100])
        assert agreement == pytest.approx(0.5, abs=0.05)

    def test_rows_do_not_depend_on_how_many_are_asked_for(self):
        few, many = (rows_of("farthest_neighbor", rows, num_examples=size) for rows, size in ((40, 50), (600, 5000)))
        np.testing.assert_array_equal(few["points"], many["points"][:40])
        np.testing.assert_array_equal(few["labels"], many["labels"][:40])


class TestBaselines:
    @pytest.mark.parametrize(
        "dim, count, product, expected",
        [
            (64, 16, -0.2155, (0.954, 0.891, 0.708)),
            (64, 4, -0.1055, (0.989, 0.657, 0.426)),
            (64, 64, -0.2885, (0.917, 0.903, 0.830)),
            (16, 16, -0.4255, (0.819, 0.769, 0.629)),
            (16, 8, -0.338, (0.886, 0.763, 0.552)),
        ],
    )
    def test_farthest_neighbor_has_the_known_values(self, dim, count, product, expected):
        measured = baselines("farthest_neighbor", dim=dim, num_points=count)
        assert measured["zero"]["neighbor_error"] == pytest.approx(1, abs=1e-5)
        names = ("own_token", "own_token_and_mean_pool", "linear_attention")
        errors = [measured[name]["neighbor_error"] for name in names]
        assert errors == pytest.approx(expected, abs=0.004)
        rows = rows_of("farthest_neighbor", 4000, dim=dim, num_points=count)
        assert (rows["points"] * rows["labels"]).sum(-1).mean() == pytest.approx(product, abs=0.003)

    def test_the_mean_of_orthonormal_points_and_the_biased_task(self):
        for count in (2, 4):
            measured = baselines("nearest_neighbor", dim=8, num_points=count)
            assert measured["mean_pool"]["neighbor_error"] == pytest.approx(1 - 1 / count, abs=0.003)
        measured = baselines("biased_nearest_neighbor")
        assert measured["linear_attention"]["neighbor_error"] == pytest.approx(0.5, abs=0.01)

    def test_classes_against_counting_by_hand(self):
        train, test = rows_of("sorting", 3000, split="train"), rows_of("sorting", 3000)
        by_position = [Counter(train["labels"][:, k].tolist()).most_common(1)[0][0] for k in range(8)]
        by_hand = np.mean(test["labels"] == np.array(by_position))
        measured = baselines("sorting", rows=3000)
        assert measured["position_only"]["token_accuracy"] == pytest.approx(by_hand, abs=1e-12)
        assert measured["position_only"]["token_accuracy"] == pytest.approx(0.337, abs=0.01)
        assert measured["majority"]["token_accuracy"] == pytest.approx(0.1, abs=0.01)
        seen = {}
        for ids, labels in zip(train["input_ids"].tolist(), train["labels"].tolist(), strict=True):
            for token, label in zip(ids, labels, strict=True):
                seen.setdefault(token, Counter())[label] += 1
        by_token = {token: counts.most_common(1)[0][0] for token, counts in seen.items()}
        predicted = np.vectorize(by_token.get)(test["input_ids"])
        by_hand = np.mean(predicted == test["labels"])
        assert measured["own_token"]["token_accuracy"] == pytest.approx(by_hand, abs=0.003)

    def test_hull_retrieval_circle_and_memorization(self):
        hull = baselines("convex_hull")
        assert hull["majority"]["token_accuracy"] == pytest.approx(0.6, abs=0.01)
        assert hull["own_token_and_mean_pool"]["token_accuracy"] > 0.8
        for baseline in baselines("token_retrieval", "n32", rows=2000).values():
            assert baseline["token_accuracy"] == pytest.approx(1 / 16, abs=0.01)
        circle = baselines("circle")
        assert circle["zero"]["neighbor_error"] == pytest.approx(0.09, rel=1e-5)
        # the best multiple of a point turned by an angle is its cosine
        error = (0.3 * math.sin(2 * math.pi / 1000)) ** 2
        assert circle["own_token"]["neighbor_error"] == pytest.approx(error, rel=1e-3)
        assert circle["own_token_linear_map"]["neighbor_error"] < 1e-13
        memorized = baselines("memorization")
        assert memorized["majority"]["token_accuracy"] == pytest.approx(0.5, abs=0.02)
        assert memorized["own_token"]["token_accuracy"] > 0.6


class TestParameters:
    @pytest.mark.parametrize(
        "name, parameters, message",
        [
            ("nearest_neighbor", {"dim": 4, "num_points": 5}, "5 points cannot be orthogonal in 4 dimensions"),
            ("nearest_neighbor", {"num_points": 3, "distribution": "doubled"}, "`num_points` must be even, got 3"),
            ("nearest_neighbor", {"distribution": "normal"}, "one of uniform, orthogonal, doubled; got 'normal'"),
            ("farthest_neighbor", {"num_points": 1}, "`num_points` must be at least 2, got 1"),
            ("farthest_neighbor", {"dim": 1}, "`dim` must be at least 2"),
            ("farthest_neighbor", {"dim": 16.5}, "`dim` must be a whole number, got 16.5"),
            ("farthest_neighbor", {"dim": True}, "`dim` must be a whole number, got True"),
            ("farthest_neighbor", {"num_examples": -5}, "`num_examples` must be at least 1, got -5"),
            ("farthest_neighbor", {"num_eval_examples": 0}, "`num_eval_examples` must be at least 1, got 0"),
            ("farthest_neighbor", {"seed": -1}, "`seed` must be at least 0"),
            ("farthest_neighbor", {"seed": 2**64}, r"`seed` must be at most 18446744073709551615"),
            ("farthest_neighbor", {"n": 3}, "no parameter 'n'; it has num_examples, .*dim, num_points"),
            ("farthest_neighbor", {"config": "d3"}, "no config 'd3'; it has d64_n16, d64_n4, .* free parameters: num_ex"),
            ("sorting", {"length": 1}, "`length` must be at least 2"),
            ("convex_hull", {"num_points": 2}, "`num_points` must be at least 3"),
            ("convex_hull", {"side": -1.0}, "`side` must be above 0"),
            ("circle", {"num_positions": 7}, "`num_positions` must be even"),
            ("circle", {"num_examples": 501}, "the grid has 500 train rows, and 501 were asked for"),
            ("token_retrieval", {"length": 30}, "`length` must be a multiple of 4"),
            ("token_retrieval", {"num_keys": 5}, "64 records with distinct keys, more than num_keys=5"),
            ("explode", {}, "no task 'explode'; the tasks are associative_recall, biased_nearest_neighbor, circle, .*token_retrieval"),
        ],
    )  # fmt: skip
    def test_a_wrong_parameter_is_a_clear_error(self, name, parameters, message):
        for streaming in (False, True):
            with pytest.raises(ValueError, match=message):
                load_task(name, streaming=streaming, **parameters)

    @pytest.mark.parametrize("name", TASKS)
    def test_every_named_config_is_what_its_name_says(self, name):
        configs = task_builder(name).builder_configs
        assert len(configs) == len(type(task_builder(name)).BUILDER_CONFIGS)
        for config in configs:
            builder = task_builder(name, config)
            assert builder.config.name == builder.config.geometry_name() == config
            assert str(builder.info.version) == "1.0.0"
            rows = builder.sample("validation", 2)
            assert list(rows) == list(builder.columns()) and all(len(array) == 2 for array in rows.values())

    def test_the_papers_configs_are_there(self):
        names = {"d64_n4", "d64_n16", "d64_n64", "d64_n256", "d16_n16", "d128_n16", "d256_n16"}
        assert set(task_builder("farthest_neighbor").builder_configs) == names
        assert {f"n{n}" for n in (32, 64, 128, 256, 512)} <= set(task_builder("token_retrieval").builder_configs)
        assert task_builder("farthest_neighbor", "d64_n4", dim=8).config.name == "d8_n4"


class TestMetrics:
    def test_neighbor_error_is_the_loss_of_the_model_and_of_the_zero_predictor(self):
        rows = rows_of("farthest_neighbor", 32, dim=8, num_points=4)
        model = RankEncoderForPointRegression(RankEncoderConfig(input_dim=8, intermediate_size=16))
        output = model(**{name: torch.from_numpy(array) for name, array in rows.items()})
        metric = NeighborError()
        measured = metric.compute(predictions=output.logits.detach().numpy(), references=rows["labels"])
        assert measured["neighbor_error"] == pytest.approx(output.loss.item(), rel=1e-5)
        zero = metric.compute(predictions=np.zeros_like(rows["labels"]), references=rows["labels"])
        assert zero["neighbor_error"] == pytest.approx(1, abs=1e-6)

    def test_neighbor_accuracy_against_trying_all(self):
        rows = rows_of("farthest_neighbor", 50, dim=4, num_points=6)
        predictions = rows["labels"] + np.random.default_rng(0).normal(0, 0.5, rows["labels"].shape)
        right = [
            np.array_equal(min(points, key=lambda point: math.dist(point, prediction)), label)  # noqa: B023
            for points, labels, vectors in zip(rows["points"], rows["labels"], predictions, strict=True)
            for label, prediction in zip(labels, vectors, strict=True)
        ]
        metric = NeighborAccuracy()
        measured = metric.compute(predictions=predictions, references=rows["labels"], points=rows["points"])
        assert 0.2 < measured["neighbor_accuracy"] < 0.95
        assert measured["neighbor_accuracy"] == pytest.approx(np.mean(right), abs=1e-12)

    def test_classes_against_counting(self):
        rng = np.random.default_rng(0)
        references = rng.integers(-1, 3, size=(40, 7))
        references[references == -1] = -100
        predictions = np.where(rng.random((40, 7)) < 0.7, references, rng.integers(3, size=(40, 7)))
        rows = [
            [(p, r) for p, r in zip(*row, strict=True) if r != -100]
            for row in zip(predictions.tolist(), references.tolist(), strict=True)
        ]
        tokens = [pair for row in rows for pair in row]
        pairs = [pair for row in rows for pair in itertools.combinations(row, 2)]
        vertices = [(p == 1, r == 1) for p, r in tokens]
        hits = sum(p and r for p, r in vertices)
        expected = {
            TokenAccuracy: np.mean([p == r for p, r in tokens]),
            SequenceAccuracy: np.mean([all(p == r for p, r in row) for row in rows]),
            InvertedPairs: np.mean([(p - q) * (r - s) < 0 for (p, r), (q, s) in pairs]),
            HullVertexF1: 2 * hits / sum(p + r for p, r in vertices),
        }
        for metric, value in expected.items():
            (measured,) = metric().compute(predictions=predictions, references=references).values()
            assert measured == pytest.approx(value, abs=1e-12) and 0 < measured < 1
            in_batches = metric()
            for part in (slice(0, 7), slice(7, 40)):
                in_batches.add_batch(predictions=predictions[part], references=references[part])
            assert list(in_batches.compute().values()) == [measured]

    def test_nonsense_is_refused(self):
        with pytest.raises(ValueError, match=r"predictions of shape \(2,\) do not fit references of shape \(3,\)"):
            TokenAccuracy().compute(predictions=[[1, 2]], references=[[1, 2, 3]])
        with pytest.raises(ValueError, match="all tokens are labelled -100"):
            TokenAccuracy().compute(predictions=[[1]], references=[[-100]])
        with pytest.raises(ValueError, match="no task 'x'; the tasks are associative_recall, biased_nearest_neighbor"):
            trainer_metrics("x")


def model_for(name: str, builder) -> torch.nn.Module:
    arguments = builder.model_arguments()
    vocabulary = "vocab_size" in arguments
    sizes = {"intermediate_size": 16, "num_attention_heads": 2, "qk_rank": 3, "v_head_dim": 4}
    if vocabulary or name in ("convex_hull", "circle"):
        sizes |= {"hidden_size": 8, "position": "additive" if vocabulary else "none"}
        sizes |= {} if vocabulary else {"input_map": "linear"}
    config = RankEncoderConfig(**arguments, **sizes)
    regression = "num_labels" not in arguments
    return (RankEncoderForPointRegression if regression else RankEncoderForTokenClassification)(config)


class TestTraining:
    """Columns are forward arguments: every task trains as it is loaded."""

    def step(self, model, train, evaluate, name, tmp_path):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        quiet = {"report_to": "none", "save_strategy": "no", "use_cpu": True, "disable_tqdm": True}
        sizes = {"max_steps": 1, "per_device_train_batch_size": 4, "learning_rate": 0.1}
        inputs = ["inputs"] if name.endswith("_neighbor") else []
        arguments = TrainingArguments(str(tmp_path), **sizes, **quiet, include_for_metrics=inputs)
        trainer = Trainer(model, arguments, None, train, evaluate, compute_metrics=trainer_metrics(name))
        trainer.train()
        assert any(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
        measured = trainer.evaluate()
        assert math.isfinite(measured["eval_loss"])
        return measured

    @pytest.mark.parametrize(
        "name, streaming",
        [
            *((name, False) for name in TASKS),
            *((name, True) for name in ("nearest_neighbor", "sorting", "memorization")),
        ],
    )
    def test_encoder(self, name, streaming, tmp_path):
        small = {} if name == "memorization" else {"num_examples": 8, "num_eval_examples": 4}
        small |= {"dim": 8} if name.endswith("_neighbor") else {}
        data = load_task(name, streaming=streaming, cache_dir=tmp_path / "cache", **small)
        builder = task_builder(name, **small)
        model = model_for(name, builder)
        measured = self.step(model, data["train"], data["validation"], name, tmp_path)
        names = {re.sub(r"(?<!^)(?=[A-Z])", "_", metric.__name__).lower() for metric in type(builder).metrics}
        assert {f"eval_{name}" for name in names} <= set(measured)
        if "eval_neighbor_error" in measured:
            assert measured["eval_neighbor_error"] == pytest.approx(measured["eval_loss"], rel=1e-4)

    @pytest.mark.parametrize("name", ["sorting", "memorization", "token_retrieval"])
    def test_bert(self, name, tmp_path):
        small = {"max_length": 32} if name == "memorization" else {"length": 16, "num_examples": 8}
        builder = task_builder(name, **small)
        data = load_task(name, cache_dir=tmp_path / "cache", **small)
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        config = RankBertConfig(**builder.model_arguments(), **sizes, qk_rank=3, max_position_embeddings=64)
        self.step(RankBertForTokenClassification(config), data["train"], data["test"], name, tmp_path)
