"""The experiments on rank collapse, through the runner at their smallest, and their numbers against what is known."""

import json

import numpy as np
import pytest
import torch
from scipy.stats import binom
from testing_common import small_bert
from transformers import BertConfig, BertForTokenClassification, BertModel

from hf_rankattn import measure_collapse, path_lengths, path_products, relative_residual
from hf_rankattn.families.architectures import TABLE, family_of
from hf_rankattn.papers import reproduce, reproduce_all
from hf_rankattn.papers.rank_collapse import circle, path_effectiveness, residuals
from hf_rankattn.papers.rank_collapse._layer_exponents import attention_exponent
from hf_rankattn.papers.rank_collapse._subjects import FAMILIES, fresh_model
from hf_rankattn.papers.training import EpochStream, RowTraining, train_rows
from hf_rankattn.probe.isolated import draw_paths
from hf_rankattn.probe.survey import load_tokenizer, read_texts, text_batches


FIGURES = {
    "residuals": {f"residuals-{name}" for name in ("init-ids", "init-text", "pretrained", "families", "rates")},
    "path-counts": {"path-counts"},
    "attention-products": {"attention-products"},
    "path-effectiveness": {"path-effectiveness"},
    "circle": {"circle", "circle-gaps"},
}


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """name -> outcome, each run once for all tests of this file."""
    out, done = tmp_path_factory.mktemp("smoke"), {}

    def get(name):
        if name not in done:
            done[name] = reproduce(name, out, scale="smoke", workers=0)
        return done[name]

    return get


class TestSmoke:
    @pytest.mark.parametrize("name", FIGURES)
    def test_figures_and_claims(self, smoke, name):
        outcome = smoke(name)
        for figure in FIGURES[name]:
            image = (outcome.folder / f"{figure}.png").read_bytes()
            assert image.startswith(b"\x89PNG") and len(image) > 10_000
        assert {file.removesuffix(".png") for file in outcome.files if file.endswith(".png")} == FIGURES[name]
        claims = json.loads((outcome.folder / "claims.json").read_text())
        assert len(claims) >= 4
        for claim in claims:
            assert claim["claim"] and claim["source"] and claim["verdict"] == "not judged at this scale"
            assert "nan" not in claim["measured"]

    def test_residuals(self, smoke):
        """All variants of a seed are one model, every family is measured, and curves are those of the probe."""
        table = smoke("residuals").table
        starts = table[(table.kind == "init") & (table.layer == 0)]
        assert (starts.groupby(["model", "inputs"]).value.nunique() == 1).all()
        assert starts.groupby("model").variant.nunique().to_dict() == {"albert": 6, "bert": 4, "xlnet": 4}
        rows_of_table = {row.name for row in TABLE if row.layers}
        assert {family_of(fresh_model(name, "smoke", 0)).name for name in FAMILIES} == rows_of_table
        assert set(table[table.kind == "family"].title) == rows_of_table
        rows = table[(table.kind == "family") & (table.model == "bert")]
        model = fresh_model("bert", "smoke", 0)
        batch = residuals.inputs_of(model.config, "ids", 2, 16, 0)
        expected = measure_collapse(model, batch)
        expected = expected[expected.metric == "relative_residual"].groupby(["variant", "layer"]).value.mean()
        for row in rows.itertuples():
            assert row.value == pytest.approx(expected[row.variant, row.layer], rel=1e-4, abs=1e-7)

    def test_path_counts_are_binomial(self, smoke):
        table = smoke("path-counts").table
        counts = table[table.kind == "counts"]
        chance = counts.heads / (counts.heads + 1)
        assert np.allclose(counts.share, binom.pmf(counts.length, counts.layers, chance), rtol=1e-9, atol=1e-300)

    def test_isolated_paths_and_exact_parts(self, smoke):
        table = smoke("path-effectiveness").table
        assert set(table.task) == {"sorting", "convex_hull", "memorization"}
        for _, rows in table.groupby("task"):
            whole = rows[rows.way == "up_to"].set_index("length").accuracy
            assert whole.iloc[-1] == pytest.approx(rows.whole.iloc[0], abs=0.02)  # padding weighs examples, not tokens
            assert rows[rows.way == "only"].projection.sum() == pytest.approx(1, abs=1e-4)
        assert 0.3 < table[table.task == "sorting"].baseline_position_only.iloc[0] < 0.37
        assert 0.57 < table[table.task == "convex_hull"].baseline_majority.iloc[0] < 0.62


class TestAsPublished:
    def test_paths(self):
        cells = path_effectiveness.cells("paper", 1, {"as_published": True})
        names = ("task", "use_mlp", "learning_rate", "epochs")
        assert [tuple(cell.parameters[name] for name in names) for cell in cells] == [
            ("sorting", False, 1e-5, 65),
            ("convex_hull", False, 1e-5, 70),
            ("memorization", True, 3e-4, 50),
        ]

    def test_circle(self):
        """The skip inside of the layer is in all variants, and the published skip sums all outputs."""
        model = circle.circle_model(8, 0, **circle.layer_of("attention alone", True))
        assert model.config.use_skip
        start = torch.tensor([[[0.3, 0.0], [-0.3, 0.0]]])
        summed, fed = (circle.trajectory(model, start, accumulated) for accumulated in (True, False))
        with torch.no_grad():
            first = model(points=start).logits
            assert summed[2]["x0"] == pytest.approx(model(points=start + first).logits[0, 0, 0].item())
            assert fed[2]["x0"] == pytest.approx(model(points=first).logits[0, 0, 0].item())


class TestOptions:
    def test_what_an_experiment_does_not_know_is_refused(self, tmp_path):
        for name, option, message in (
            ("circle", "checkpoint", "circle takes --as-published, not --checkpoint, which is for .*residuals"),
            ("path-counts", "as_published", "path-counts takes no options, not --as-published"),
            ("circle", "colour", "not --colour, and neither does any other"),
        ):
            with pytest.raises(ValueError, match=message):
                reproduce(name, tmp_path, scale="smoke", options={option: "given"})
        assert not list(tmp_path.iterdir())

    def test_of_several_experiments_each_is_told_what_it_knows(self, tmp_path):
        names, options = ["path-counts", "attention-products"], {"as_published": True}
        _, outcome = reproduce_all(names, tmp_path, scale="smoke", workers=0, options=options)
        assert set(zip(outcome.table.order, outcome.table.center, strict=True)) == {("reversed", "rank1")}
        assert any("root" in claim.claim for claim in outcome.claims)
        with pytest.raises(ValueError, match="takes no options, not --text"):
            list(reproduce_all(["path-counts", "circle"], tmp_path, scale="smoke", options={"text": "a"}))

    @pytest.mark.parametrize(
        "options, message",
        [
            ({"text": "some.txt"}, "--text says what a checkpoint reads: give --checkpoint"),
            ({"dataset": "wiki_bio"}, "--dataset says what a checkpoint reads"),
            ({"checkpoint": "a", "text": "b", "dataset": "c"}, "give --text or --dataset, not both"),
            ({"checkpoint": "a", "text": "/no/such/file"}, "cannot be read as UTF-8 text: .*No such file"),
        ],
    )
    def test_what_does_not_go_together(self, options, message):
        with pytest.raises(ValueError, match=message):
            residuals.cells("smoke", None, options)

    def test_another_text_under_the_same_name_is_another_cell(self, tmp_path):
        path, ids = tmp_path / "text.txt", []
        for content in ("One text.", "Another text."):
            path.write_text(content)
            cells = residuals.cells("smoke", None, {"checkpoint": "a", "text": str(path)})
            ids.append([cell.id for cell in cells if cell.parameters["kind"] == "checkpoint"])
        assert len(ids[0]) == 1 and ids[0] != ids[1]

    def test_a_checkpoint_and_a_text_as_published(self, tmp_path, minilm):
        path = tmp_path / "text.txt"
        path.write_text("Rain fell on the hills all night, and the river rose.\n\nNobody came to the door that day.\n")
        options = {"checkpoint": minilm, "text": str(path), "as_published": True}
        outcome = reproduce("residuals", tmp_path / "out", scale="smoke", workers=0, options=options)
        table = outcome.table[outcome.table.kind == "init"]
        assert (table[table.layer == 0].groupby(["model", "inputs"]).value.nunique() == 4).all()
        tricked = {"san, identity trick", "san+mlp", "san+skip, identity trick", "transformer"}
        assert set(table[table.model == "albert"].variant) == tricked
        assert any("identities" in claim.claim for claim in outcome.claims)
        rows = outcome.table[outcome.table.kind == "checkpoint"]
        assert set(outcome.table.kind) == {"init", "checkpoint"}
        model = BertModel.from_pretrained(minilm)
        batches = text_batches(load_tokenizer(minilm), read_texts(path)[0], model.config, length=16)
        expected = measure_collapse(model, batches)
        expected = expected[expected.metric == "relative_residual"].groupby(["variant", "layer"]).value.mean()
        assert len(rows) == 4 * 7
        for row in rows.itertuples():
            assert row.value == pytest.approx(expected[row.variant, row.layer], rel=1e-3, abs=1e-6)
        assert (outcome.folder / "residuals-checkpoint.png").exists()
        assert "text.txt" in next(claim.claim for claim in outcome.claims if "keeping them does not" in claim.claim)
        products = reproduce("attention-products", tmp_path / "out", scale="smoke", workers=0, options=options).table
        assert products[products.weights == "checkpoint"].length_of_path.max() == 6


class TestTraining:
    def test_the_same_weights_as_a_loop_by_hand(self, tmp_path):
        points = torch.randn(10, 2, 2, generator=torch.Generator().manual_seed(0))
        columns = {"points": points, "labels": -points}
        models = [circle.circle_model(8, 3, use_skip=True, use_mlp=False) for _ in range(2)]
        train_rows(models[0], columns, RowTraining(3, 1e-2, seed=0, batch_size=4, shuffle=False), tmp_path)
        optimizer = torch.optim.Adam(models[1].parameters(), lr=1e-2)
        for _ in range(3):
            for start in (0, 4, 8):
                optimizer.zero_grad()
                models[1](points=points[start : start + 4], labels=-points[start : start + 4]).loss.backward()
                optimizer.step()
        for (name, mine), theirs in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6, msg=name)

    def test_any_step_can_be_the_first(self):
        columns = {"x": torch.arange(7)}
        batches = iter(EpochStream(columns, 3, seed=1))
        whole = [next(batches)["x"].tolist() for _ in range(9)]
        later = iter(EpochStream(columns, 3, seed=1, first=lambda: 4))
        assert whole[4:] == [next(later)["x"].tolist() for _ in range(5)]
        epochs = [sum(whole[start : start + 3], []) for start in (0, 3, 6)]
        assert all(sorted(epoch) == list(range(7)) for epoch in epochs) and epochs[0] != epochs[1]
        unshuffled = iter(EpochStream(columns, 3, seed=None))
        assert [next(unshuffled)["x"].tolist() for _ in range(4)] == [[0, 1, 2], [3, 4, 5], [6], [0, 1, 2]]


class TestProbe:
    def test_accuracy_by_length(self):
        torch.manual_seed(0)
        sizes = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 16}
        model = BertForTokenClassification(BertConfig(**sizes, vocab_size=50, num_labels=4)).eval()
        batch = {"input_ids": torch.randint(50, (3, 9)), "labels": torch.randint(4, (3, 9))}
        batch["labels"][0, :4] = -100
        table = path_lengths(model, batch, loss=True)
        right = (model(input_ids=batch["input_ids"]).logits.argmax(-1) == batch["labels"]).double()
        counted = (batch["labels"] != -100).double()
        expected = ((right * counted).sum(1) / counted.sum(1)).tolist()
        assert table[(table.metric == "accuracy_up_to") & (table.length == 3)].value.tolist() == expected
        first = table[table.length == 0].pivot_table(index="example", columns="metric", values="value")
        assert (first.accuracy_only == first.accuracy_up_to).all()

    def test_products_in_reversed_order(self):
        model, ids = small_bert(3, 4).double(), torch.randint(50, (2, 7))
        model.set_attn_implementation("eager")
        with torch.no_grad():
            maps = model(input_ids=ids, output_attentions=True).attentions
        table = path_products(model, {"input_ids": ids}, lengths=[3], samples=5, seed=2, reverse=True, center="rank1")
        chosen = draw_paths([4, 4, 4], 3, 5, [2, 0, 3])
        for row, heads in zip(table.itertuples(), chosen, strict=True):
            own = [maps[layer][row.example, head] for layer, head in enumerate(heads)]
            published, theorem = own[0] @ own[1] @ own[2], own[2] @ own[1] @ own[0]
            assert row.value == pytest.approx(relative_residual(published, center="rank1").item(), rel=1e-9)
            assert row.value != pytest.approx(relative_residual(theorem, center="rank1").item(), rel=1e-3)

    @pytest.mark.parametrize(
        "title, expected",
        [(title, 3) for title in ("BERT", "BERT, norm kept", "ViT", "XLNet, relative positions zeroed")]
        + [(title, 1) for title in ("XLNet", "BERT, causal mask", "Llama without its causal mask")]
        + [("DeepSeek-V3 (causal, rotary)", 1)],
    )
    def test_the_exponent_of_one_layer(self, title, expected):
        assert attention_exponent(title, "tiny", 16, seed=1) == pytest.approx(expected, abs=0.03)


class TestFacts:
    def gap(self, variant, tmp_path, hidden=32, seed=0):
        """Step -> distance of the two points, after training by the published recipe: Adam at 1e-5, 70 epochs."""
        chosen = {"hidden": hidden, "variant": variant, "seed": seed, "epochs": 70, "learning_rate": 1e-5}
        rows = circle.run({**chosen, "as_published": False}, tmp_path)
        return {row["step"]: row["gap"] for row in rows}

    def test_a_layer_without_skip_draws_both_points_together(self, tmp_path):
        gaps = self.gap("attention alone", tmp_path)
        assert gaps[0] > 0.59 and gaps[5] < 1e-2 and gaps[20] < 1e-6

    @pytest.mark.slow
    @pytest.mark.parametrize("hidden, seed", [(32, 0), (32, 1), (128, 0)])
    def test_a_skip_keeps_them_apart_and_an_mlp_alone_does_not(self, hidden, seed, tmp_path):
        skip, mlp, alone = (
            self.gap(f"attention {more}", tmp_path / more, hidden, seed) for more in ("+ skip", "+ MLP", "alone")
        )
        assert skip[5] > 0.3
        for gaps in (mlp, alone):
            assert gaps[5] < 1e-2 and gaps[20] < 1e-6

    @pytest.mark.slow
    @pytest.mark.parametrize("scale", ["laptop", "paper"])
    def test_short_paths_sort(self, scale, tmp_path):
        """50 and 65 epochs; what no path has touched knows the position, and that is all it knows."""
        cell = next(c for c in path_effectiveness.cells(scale, 1, {}) if c.parameters["task"] == "sorting")
        geometry = {"layers": 6, "heads": 2, "hidden": 48, "learning_rate": 1e-3, "use_mlp": False}
        assert geometry.items() <= cell.parameters.items() and 50 <= cell.parameters["epochs"] <= 65
        rows = path_effectiveness.run(cell.parameters, tmp_path)
        assert rows[0]["whole"] >= 0.95
        drawn = [row for row in rows if row.get("drawn") == 20]
        mean = {k: np.mean([row["accuracy"] for row in drawn if row["length"] == k]) for k in range(7)}
        assert mean[0] == pytest.approx(0.33, abs=0.05)
        assert mean[1] >= 0.5 > mean[0] > 0.2 >= max(mean[k] for k in range(3, 7))

    @pytest.mark.slow
    def test_products_at_the_size_of_the_paper(self, tmp_path):
        outcome = reproduce("attention-products", tmp_path, scale="laptop", seeds=1, workers=0)
        table = outcome.table[(outcome.table.order == "theorem") & (outcome.table.center == "mean")]
        medians = table.groupby("length_of_path").value.median()
        for length, expected in ((1, 0.153), (2, 2.6e-3), (3, 4.6e-5)):
            assert 0.5 < medians[length] / expected < 2
        assert all(claim.holds is not False for claim in outcome.claims)
