"""Paths through heads: against enumeration by hand, by the sum rule on every family, and on real weights."""

import pytest
import torch
from accelerate import cpu_offload
from testing_common import ALBERT, BERT, FAMILIES, FAMILY_IDS, XLNET, shaken, small_bert, tiny_inputs
from testing_probe import hook_counts, small, value_of
from transformers import BertModel

from hf_rankattn import (
    RankEncoderConfig,
    RankEncoderForPointRegression,
    RankEncoderModel,
    ablate,
    isolated_paths,
    path_lengths,
    path_products,
    path_terms,
    relative_residual,
)
from hf_rankattn.probe.paths import Layers, Lengths, Steps, each_path, walk


def error_of(table):
    return value_of(table, "reconstruction_error").max()


def enumerated(model, batch, skip, mlp, norm):
    """The paths of a BERT one by one, from its weights and the maps it returns: {(source, heads): (matrix, term)}.

    Nothing of the package is used, but for `ablate` around the call, which the maps and states are taken under.
    """
    model.set_attn_implementation("eager")
    out = model(**batch, output_attentions=True, output_hidden_states=True)
    heads, width = model.config.num_attention_heads, model.config.hidden_size // model.config.num_attention_heads
    terms = {("embeddings", ()): (torch.eye(out.attentions[0].shape[-1], dtype=model.dtype), out.hidden_states[0])}
    for index, layer in enumerate(model.encoder.layer):
        maps, states = out.attentions[index], out.hidden_states[index]
        dense, value = layer.attention.output.dense, layer.attention.self.value
        parts = [slice(h * width, (h + 1) * width) for h in range(heads)]
        merged = [value.weight.T[:, part] @ dense.weight.T[part] for part in parts]
        constant = dense.bias + value.bias @ dense.weight.T
        total = sum(maps[:, h] @ states @ merged[h] for h in range(heads)) + constant + (states if skip else 0)
        scales = [norm_of(layer.attention.output.LayerNorm, total) if norm else lambda x: x]
        middle = scales[0](total) + (layer.attention.output.LayerNorm.bias if norm else 0)
        update = layer.output.dense(layer.intermediate(middle))
        if mlp:
            scales.append(norm_of(layer.output.LayerNorm, update + middle) if norm else lambda x: x)
        grown = {}
        for (source, path), (matrix, term) in terms.items():
            if skip:
                grown[source, (*path, 0)] = matrix, through(scales, term)
            for h in range(heads):
                grown[source, (*path, h + 1)] = maps[:, h] @ matrix, through(scales, maps[:, h] @ term @ merged[h])
        unit = torch.eye(states.shape[1], dtype=model.dtype)
        before = (None,) * (index + 1)
        row = scales[0](constant.expand_as(states)) + (layer.attention.output.LayerNorm.bias if norm else 0)
        grown[f"attention.{index}", before] = unit, through(scales[1:], row)
        if mlp:
            grown[f"mlp.{index}", before] = unit, scales[1](update) + (layer.output.LayerNorm.bias if norm else 0)
        terms = grown
    return terms, out.last_hidden_state


def norm_of(module, states):
    """A LayerNorm as a linear map, with the deviations it has on `states`."""
    deviation = (states.var(-1, unbiased=False, keepdim=True) + module.eps).sqrt()
    return lambda x: (x - x.mean(-1, keepdim=True)) / deviation * module.weight


def through(functions, x):
    for function in functions:
        x = function(x)
    return x


CASES = {
    "san": {"attention_skip": True, "mlp": True, "norm": True},
    "san+skip": {"mlp": True, "norm": True},
    "san+skip+norm": {"mlp": True},
    "san+norm": {"attention_skip": True, "mlp": True},
    "transformer": {},
    "transformer without norms": {"norm": True},
}


class TestAgainstEnumerationByHand:
    @pytest.mark.parametrize("name", CASES)
    def test_every_path_of_a_bert(self, name):
        switches, layers, heads = CASES[name], 3, 2
        model, batch = small_bert(layers, heads).double(), {"input_ids": torch.arange(1, 11)[None]}
        with torch.no_grad(), ablate(model, **switches):
            skip, mlp, norm = (not switches.get(part, False) for part in ("attention_skip", "mlp", "norm"))
            expected, output = enumerated(model, batch, skip, mlp, norm)
            table, lengths = path_terms(model, batch), path_lengths(model, batch)
        whole = sum(term for _, term in expected.values())
        assert torch.linalg.vector_norm(whole - output) <= 1e-12 * torch.linalg.vector_norm(output)
        from_start = table[(table.source == "embeddings") & (table.metric == "projection")]
        assert len(from_start) == (heads + skip) ** layers
        assert value_of(table, "row_sum_error").max() <= 1e-12 and error_of(table) <= 1e-12
        assert all((matrix.sum(-1) - 1).abs().max() <= 1e-12 for matrix, _ in expected.values())
        size = output.square().sum()
        found = table[table.metric == "projection"].set_index(["source", "path"]).value
        assert len(found) == len(expected)
        for (source, path), (_, term) in expected.items():
            label = " ".join("_" if head is None else str(head) for head in path)
            assert found[source, label] == pytest.approx(((term * output).sum() / size).item(), abs=1e-12), label
        for length in range(layers + 1):
            terms = [term for (_, path), (_, term) in expected.items() if sum(map(bool, path)) == length]
            part = sum(terms, start=torch.zeros_like(output))
            ratio = (part.square().sum() / size).sqrt().item()
            assert value_of(lengths, "norm_ratio", length=length).item() == pytest.approx(ratio, abs=1e-10)
            if ratio > 0:
                found = value_of(lengths, "relative_residual", length=length).item()
                assert found == pytest.approx(relative_residual(part).item(), abs=1e-9)
        assert error_of(lengths) <= 1e-12
        assert value_of(lengths, "projection").sum() == pytest.approx(1, abs=1e-12)


def encoder(norm, norm_placement, **fields):
    sizes = {"vocab_size": 47, "hidden_size": 20, "num_hidden_layers": 3, "num_attention_heads": 3, "v_head_dim": 5}
    return RankEncoderModel(
        RankEncoderConfig(**sizes, qk_rank=2, intermediate_size=24, norm=norm, norm_placement=norm_placement, **fields)
    )


MODELS = {
    **{f"{family.name}-stock": lambda f=family: f.stock("Model")(f.stock_config()) for family in FAMILIES},
    **{
        f"{family.name}-rank": lambda f=family: f.rank("Model")(f.rank_config(qk_rank=3, v_head_dim=5))
        for family in FAMILIES
    },
    **{
        f"encoder-{norm}-{placement}": lambda n=norm, p=placement: encoder(n, p)
        for norm in ("l2", "layer", "rms", "none")
        for placement in ("post", "pre")
    },
    "encoder-no-skip": lambda: encoder("layer", "post", use_skip=False),
    "encoder-no-mlp-pre": lambda: encoder("layer", "pre", use_mlp=False),
    "encoder-no-mlp-hardmax": lambda: encoder("l2", "post", use_mlp=False, attention="hardmax"),
    **{name: lambda n=name: small(n) for name in ("roberta", "distilbert", "gpt2")},
    "ELECTRA": lambda: small("electra", embedding_size=8),
}
ROUNDED = {  # their norms and their softmax compute in float32, also in a float64 model
    # a latent between stream and values, with a norm of its own; a mixture of experts in all layers but the first
    "DeepSeek-V3 with biases": lambda: small("deepseek_v3", attention_bias=True),
    **{name: lambda n=name: small(n) for name in ("deepseek_v3", "llama", "qwen2")},
}


def parts_of(model, batch, walker):
    with torch.no_grad():
        output = walk(model, batch, walker).last_hidden_state
    return walker, output


def close(part, expected, scale, tolerance):
    """None is zero, as in the parts of the walkers."""
    part = torch.zeros_like(scale) if part is None else part
    return torch.linalg.vector_norm(part - expected) <= tolerance * torch.linalg.vector_norm(scale)


class TestEveryFamily:
    @pytest.mark.parametrize("name", [*MODELS, *ROUNDED])
    def test_lengths_layers_and_heads_are_sums_of_paths(self, name):
        model = {**MODELS, **ROUNDED}[name]()
        batch = {k: v for k, v in tiny_inputs(BERT, "Model").items() if k != "token_type_ids"}
        assert error_of(path_lengths(model, batch)) <= 1e-5
        shaken(model).double()
        steps, output = parts_of(model, batch, Steps())
        terms = list(each_path(steps.steps, steps.states))
        zero = torch.zeros_like(output)
        assert close(sum((t.term for t in terms), start=zero), output, output, 1e-6 if name in ROUNDED else 1e-12)
        lengths, _ = parts_of(model, batch, Lengths())
        for length, part in enumerate(lengths.parts):
            expected = sum((t.term for t in terms if t.length == length), start=zero)
            assert close(part, expected, output, 1e-10), length
        by_head, _ = parts_of(model, batch, Layers(heads=True))
        by_layer, _ = parts_of(model, batch, Layers(heads=False))
        # these start from what really entered a layer, which the paths to it are only as near to as the norms are exact
        tolerance = 1e-6 if name in ROUNDED else 1e-10
        for row, part in zip(by_head.index(), by_head.parts, strict=True):
            passing = [t.term for t in terms if t.path.split()[row["layer"]] == str(row["head"] + 1)]
            assert close(part, sum(passing, start=zero), output, tolerance), row
        for row, part in zip(by_layer.index(), by_layer.parts, strict=True):
            passing = [t.term for t in terms if t.path.split()[row["layer"]] not in "0_"]
            assert close(part, sum(passing, start=zero), output, tolerance), row
        for by in ("length", "layer", "head") if name in MODELS else ():
            assert error_of(path_lengths(model, batch, by=by)) <= 1e-12

    @pytest.mark.parametrize("family", FAMILIES, ids=FAMILY_IDS)
    @pytest.mark.parametrize("switches", [*CASES.values(), {"mlp_skip": True}], ids=[*CASES, "mlp without skip"])
    def test_parts_that_are_taken_away(self, family, switches):
        model = shaken(family.rank("Model")(family.rank_config(qk_rank=3))).double()
        batch = tiny_inputs(family, "Model")
        with ablate(model, **switches):
            table = path_lengths(model, batch)
            assert error_of(table) <= 1e-12
            if switches.get("attention_skip") and switches.get("mlp") and family is XLNET:
                # without skips every path from the embeddings is as long as the network, and XLNet has no bias inside
                longest = value_of(table, "projection", length=3).sum()
                assert switches.get("norm") is None or longest == pytest.approx(3, abs=1e-9)

    def test_the_identities_of_the_published_albert(self):
        model = shaken(ALBERT.stock("Model")(ALBERT.stock_config())).double()
        with ablate(model, mlp="identity_trick"):
            assert error_of(path_lengths(model, tiny_inputs(ALBERT, "Model"))) <= 1e-12

    def test_the_heads_of_deepseek_against_its_own_attention(self):
        """The update of a layer from its maps, by the modules of the model itself, with a latent and biases."""
        model = shaken(small("deepseek_v3", attention_bias=True)).double()
        model.set_attn_implementation("eager")
        steps, _ = parts_of(model, {"input_ids": torch.arange(1, 9)[None]}, Steps())
        frozen = next(step for step in steps.steps if step.name == "attention.1")
        attention = model.layers[1].self_attn
        states = model.layers[0](
            steps.states,
            position_embeddings=model.rotary_emb(steps.states, torch.arange(8)[None]),
            attention_mask=torch.full((8, 8), -1e30, dtype=torch.float64).triu(1)[None, None],
        ).detach()
        with torch.no_grad():
            latent = attention.kv_a_proj_with_mqa(model.layers[1].input_layernorm(states))[..., :5]
            values = attention.kv_b_proj(attention.kv_a_layernorm(latent)).unflatten(-1, (4, 7))[..., 4:]
            context = torch.einsum("bhij,bjhv->bihv", frozen.maps, values).flatten(2)
            expected = attention.o_proj(context)
        found = frozen.attend(states) + frozen.source
        assert close(found, expected, expected, 1e-6)
        # biases are in the sources, and scales of tokens in the values: without either it is another network
        assert not close(found - frozen.source, expected, expected, 1e-2)

    def test_images(self):
        pixels = torch.randn(2, 3, 8, 8, dtype=torch.float64)
        assert error_of(path_lengths(shaken(small("vit")).double(), {"pixel_values": pixels})) <= 1e-12

    def test_points_and_queries(self):
        config = RankEncoderConfig(input_dim=6, num_hidden_layers=3, num_attention_heads=2, qk_rank=2)
        model = shaken(RankEncoderForPointRegression(config)).double()
        tokens = {"points": 5, "queries": 3, "labels": 3}
        batch = {name: torch.randn(2, count, 6, dtype=torch.float64) for name, count in tokens.items()}
        table = path_lengths(model, batch, loss=True)
        assert error_of(table) <= 1e-12
        last = value_of(table, "loss_up_to", length=3).tolist()
        for example in range(2):
            own = {name: value[example : example + 1] for name, value in batch.items()}
            assert last[example] == pytest.approx(model(**own).loss.item(), rel=1e-10)

    @pytest.mark.parametrize("field", ["return_dict", "output_hidden_states"])
    def test_the_model_is_restored_and_its_config_changes_nothing(self, field):
        model, batch = small_bert(2, 2), {"input_ids": torch.arange(1, 9)[None]}
        hooks, implementation = hook_counts(model), model.config._attn_implementation
        probes = (path_lengths, path_terms, lambda *inputs: isolated_paths(*inputs, repetitions=1), path_products)
        before = [probe(model.train(), batch) for probe in probes]
        assert model.training and model.config._attn_implementation == implementation
        setattr(model.config, field, field != "return_dict")
        for probe, table in zip(probes, before, strict=True):
            assert probe(model, batch).equals(table)
        assert hook_counts(model) == hooks

    def test_no_cache_is_filled(self):
        assert walk(small("gpt2"), {"input_ids": torch.arange(1, 9)[None]}, Lengths()).past_key_values is None

    def test_layers_of_a_group_one_after_the_other(self):
        """ALBERT may have several layers in a group, which it runs in turn, again and again."""
        config = ALBERT.stock_config(num_hidden_layers=2, num_hidden_groups=1, inner_group_num=2)
        model, batch = shaken(ALBERT.stock("Model")(config)).double(), {"input_ids": torch.arange(1, 7)[None]}
        table = path_lengths(model, batch)
        assert table.length.max() == 4 and error_of(table) <= 1e-12
        terms = path_terms(model, batch, limit=50_000)
        for length in range(5):
            summed = value_of(terms, "projection", length=length).sum()
            assert value_of(table, "projection", length=length).item() == pytest.approx(summed, abs=1e-10)

    def test_a_stream_of_zeros(self):
        model = small_bert(2, 2)
        with torch.no_grad():
            model.embeddings.LayerNorm.weight.zero_()
            model.embeddings.LayerNorm.bias.zero_()
        for by in ("length", "head"):
            assert error_of(path_lengths(model, {"input_ids": torch.arange(1, 9)[None]}, by=by)) <= 1e-5


class TestRealWeights:
    @pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-12)])
    def test_the_paths_of_minilm_add_up(self, minilm, dtype, tolerance):
        model = BertModel.from_pretrained(minilm, dtype=dtype)
        ids = torch.randint(1000, 20000, (2, 32), generator=torch.Generator().manual_seed(0))
        table = path_lengths(model, {"input_ids": ids})
        assert error_of(table) <= tolerance
        lengths = table[table.metric == "projection"].groupby("length").value.mean()
        heads = path_lengths(model, {"input_ids": ids}, by="head")
        mean_length = sum(k * share for k, share in lengths.items())
        summed = value_of(heads, "projection").sum() / 2
        assert summed == pytest.approx(mean_length, abs=1e-4)

    def test_offloaded_weights(self):
        model = shaken(BERT.stock("ForTokenClassification")(BERT.stock_config())).double()
        batch = tiny_inputs(BERT, "ForTokenClassification", labels=True)
        probes = (lambda: path_lengths(model, batch, loss=True), lambda: isolated_paths(model, batch, repetitions=1))
        before = [probe() for probe in probes]
        cpu_offload(model, execution_device="cpu")
        assert model.device.type == "meta"
        for probe, table in zip(probes, before, strict=True):
            assert probe().value.to_numpy() == pytest.approx(table.value.to_numpy(), abs=1e-9, nan_ok=True)

    def test_half_precision_is_followed_in_single(self):
        model = BERT.stock("Model")(BERT.stock_config()).to(torch.bfloat16)
        assert error_of(path_lengths(model, tiny_inputs(BERT, "Model"))) < 0.05


class TestLoss:
    @pytest.mark.parametrize(
        "family, suffix",
        [
            (BERT, "ForTokenClassification"),
            (BERT, "ForSequenceClassification"),
            (BERT, "ForMaskedLM"),
            (ALBERT, "ForSequenceClassification"),
            (XLNET, "ForTokenClassification"),
        ],
    )
    def test_all_lengths_together_have_the_loss_of_the_model(self, family, suffix):
        model = shaken(family.stock(suffix)(family.stock_config())).double()
        batch = tiny_inputs(family, suffix, labels=True)
        table = path_lengths(model, batch, loss=True)
        deepest = table.length.max()
        for example in range(3):
            own = model(**{name: value[example : example + 1] for name, value in batch.items()}).loss.item()
            found = value_of(table, "loss_up_to", length=deepest, example=example).item()
            assert found == pytest.approx(own, rel=1e-10)
        first = table[table.length == 0]
        assert (value_of(first, "loss_only").to_numpy() == value_of(first, "loss_up_to").to_numpy()).all()

    def test_one_length_alone_is_what_the_classifier_makes_of_it(self):
        model = shaken(BERT.stock("ForTokenClassification")(BERT.stock_config())).double()
        batch = tiny_inputs(BERT, "ForTokenClassification", labels=True)
        table = path_lengths(model, batch, loss=True)
        own = {name: value for name, value in batch.items() if name != "labels"}
        lengths, output = parts_of(model, own, Lengths())
        for length, part in enumerate(lengths.parts):
            logits = model.classifier(part[1:2])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][1])
            assert value_of(table, "loss_only", length=length, example=1).item() == pytest.approx(loss.item())
        heads = path_lengths(model, batch, by="head", loss=True)
        by_head, _ = parts_of(model, own, Layers(heads=True))
        logits = model.classifier((output - by_head.parts[5])[1:2])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][1])
        assert value_of(heads, "loss_without", layer=1, head=1, example=1).item() == pytest.approx(loss.item())


class TestNonsense:
    batch = {"input_ids": torch.arange(1, 9)[None]}

    @pytest.mark.parametrize(
        "probe, options, message",
        [
            (path_lengths, {"by": "token"}, "`by` must be 'length', 'layer' or 'head', got 'token'"),
            (path_lengths, {"by": ["length"]}, "`by` must be 'length', 'layer' or 'head', got"),
            (path_lengths, {"loss": True}, "BertModel has no task head"),
            (path_terms, {"limit": "many"}, "`limit` must be a whole number, got 'many'"),
            (path_terms, {"limit": 100}, "has 106 paths, above limit=100: use path_lengths"),
        ],
    )
    def test_arguments(self, probe, options, message):
        with pytest.raises(ValueError, match=message):
            probe(small_bert(3, 3), self.batch, **options)

    @pytest.mark.parametrize(
        "make, options, batch, message",
        [
            (lambda: BERT.stock("ForMaskedLM")(BERT.stock_config()), {"loss": True}, {}, "no loss: .* has input_ids"),
            (lambda: small_bert(3, 3), {}, {"input_ids": torch.ones(1, 2, 8).long()}, r"must be \(batch, n\), got"),
            (lambda: small("xlnet"), {}, {"perm_mask": torch.zeros(1, 8, 8)}, "leave out perm_mask"),
            (lambda: small_bert(1, 1, is_decoder=True, add_cross_attention=True), {}, {}, "reads another stream"),
            (lambda: small_bert(1, 1, chunk_size_feed_forward=2), {}, {}, "chunk_size_feed_forward to 0 first"),
        ],
    )
    def test_models_and_batches(self, make, options, batch, message):
        with pytest.raises(ValueError, match=message):
            path_lengths(make(), self.batch | batch, **options)

    def test_what_does_not_add_up_is_an_error(self):
        model = small_bert(2, 2)
        value = model.encoder.layer[0].attention.self.value
        adapter = value.register_forward_hook(lambda module, args, output: output + args[0] @ torch.ones(24, 24) / 50)
        for by in ("length", "layer", "head"):
            with pytest.raises(ValueError, match="do not add up to its output"):
                path_lengths(model, self.batch, by=by)
        adapter.remove()
        with torch.no_grad():
            value.weight[0, 0] = torch.nan
        with pytest.raises(ValueError, match="the states of BertModel hold NaN or Inf"), ablate(model, mlp=True):
            path_terms(model, self.batch)

    def test_rows_that_padding_masks_wholly(self):
        """Llama's eager softmax computes in float32, where the mask of a float64 model is an infinity: no fault of weights."""
        model = small("llama").float()
        left = {**self.batch, "attention_mask": torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])}
        assert error_of(path_lengths(model, left)) <= 1e-5
        with pytest.raises(ValueError, match="in float64 and padding masks whole rows"):
            path_lengths(model.double(), left)
