"""Narrower values: the closed form against brute force, exactness, padding, and budgets over both kinds of widths."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from testing_common import ALBERT, BERT, DISTILBERT, FAMILIES, FAMILY_IDS, GPT2, XLNET, tiny_inputs
from testing_convert import difference, plain_inputs, trained_like
from transformers import LlamaConfig, LlamaModel

from hf_rankattn import convert_rank
from hf_rankattn.convert import convert_model
from hf_rankattn.convert.factors import root_of_moment, shared_factors


HEADS, WIDTH = 4, 8


def blocks_of(model):
    """The attention blocks of a tiny model, with their values and outputs as `(heads, d + 1, v)` and `(heads, v, d)`."""
    names = (".attention", ".rel_attn", ".attn", ".albert_layers.0.attention")
    return [module for name, module in model.named_modules() if name.endswith(names)]


def values_and_outputs(block):
    state = {name: weight.detach().double() for name, weight in block.named_parameters()}
    if "v" in state:
        value, output = state["v"].permute(1, 0, 2), state["o"].permute(1, 2, 0)
        return torch.nn.functional.pad(value, (0, 0, 0, 1)), output
    if "c_attn.weight" in state:
        size = state["c_proj.weight"].shape[0]
        weight, bias, output = state["c_attn.weight"][:, -size:], state["c_attn.bias"][-size:], state["c_proj.weight"]
    else:
        value, output = (
            next(name.removesuffix(".weight") for name in state if name.endswith(tuple(f"{n}.weight" for n in names)))
            for names in (("value", "v_lin"), ("dense", "out_lin"))
        )
        weight, bias, output = state[f"{value}.weight"].T, state[f"{value}.bias"], state[f"{output}.weight"].T
    value = torch.cat([weight, bias[None]]).unflatten(1, (HEADS, -1)).transpose(0, 1)
    return value, output.unflatten(0, (HEADS, -1))


def mixed_inputs(model, block, batch):
    """`A [x, 1]` (rows, heads, d + 1) of all real rows and applications of a block, from its own maps: naively."""
    states = []
    hook = block.register_forward_pre_hook(
        lambda module, args, kwargs: states.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    model.set_attn_implementation("eager")
    with torch.no_grad():
        maps = model(**batch, output_attentions=True).attentions
    hook.remove()
    applications = [index for index, module in enumerate(applied(model)) if module is block]
    rows = []
    for index, state in zip(applications, states, strict=True):
        state = state.transpose(0, 1) if "rel_attn" in type(block).__name__.lower() or hasattr(block, "q") else state
        ones = torch.ones(*state.shape[:2], 1, dtype=state.dtype)
        joined = torch.cat([state, ones], dim=-1).double()
        map_ = maps[index].double()
        mixed = torch.einsum("bhij,bjd->bihd", map_, joined)
        rows.append(mixed[batch["attention_mask"].bool()])
    return torch.cat(rows)


def applied(model):
    """The attention block of each layer in the order of the maps; ALBERT's groups run several times."""
    blocks = blocks_of(model)
    depth, groups = model.config.num_hidden_layers, len(blocks)
    return [blocks[layer * groups // depth] for layer in range(depth)]


def written_error(old, new, rows):
    """The squared error of what each head writes, (heads,)."""
    change = [torch.einsum("nhd,hdv,hvo->nho", rows, *values_and_outputs(block)) for block in (old, new)]
    return (change[0] - change[1]).square().sum((0, 2))


def brute_force(moment, output, width):
    """The smallest error of a head that any factors of this width leave, by BFGS from random starts."""
    moment, output = moment.numpy(), output.numpy()
    size = len(moment)

    def error(flat):
        left, right = flat[: size * width].reshape(size, width), flat[size * width :].reshape(width, -1)
        change = output - left @ right
        moved = moment @ change
        return (change * moved).sum(), np.concatenate([(-2 * moved @ right.T).ravel(), (-2 * left.T @ moved).ravel()])

    starts = [
        np.random.default_rng(seed).normal(scale=0.5, size=width * (size + output.shape[1])) for seed in range(3)
    ]
    options = {"maxiter": 5000, "gtol": 1e-9}
    return min(minimize(error, start, jac=True, method="BFGS", options=options).fun for start in starts)


@pytest.mark.parametrize("family", [BERT, ALBERT, XLNET, DISTILBERT, GPT2], ids=lambda family: family.name)
def test_the_first_block_reaches_the_optimum_that_brute_force_finds(family):
    model, batch = trained_like(family), plain_inputs(family)
    old = blocks_of(model)[0]
    rows = mixed_inputs(model, old, batch)
    new = blocks_of(convert_rank(model, v_head_dim=3, calibration=batch))[0]
    errors = written_error(old, new, rows)
    value, output = values_and_outputs(old)
    for head in range(HEADS):
        mixed = rows[:, head] @ value[head]
        best = brute_force(mixed.T @ mixed, output[head], 3)
        assert float(errors[head]) <= best * (1 + 1e-6), (head, float(errors[head]), best)


def test_queries_and_keys_come_first_and_values_are_fitted_to_their_maps():
    """The values of a layer whose queries were cut, too, are optimal for the maps of the cut queries."""
    model, batch = trained_like(BERT), plain_inputs(BERT)
    logits_only = convert_rank(model, 3, calibration=batch)
    both = convert_rank(model, 3, 3, calibration=batch)
    rows = mixed_inputs(logits_only, blocks_of(logits_only)[0], batch)
    found = written_error(blocks_of(model)[0], blocks_of(both)[0], rows)
    values_alone = convert_rank(model, v_head_dim=3, calibration=batch)
    other = written_error(blocks_of(model)[0], blocks_of(values_alone)[0], rows)
    assert bool((found <= other * (1 + 1e-9)).all()) and float(found.sum()) < 0.999 * float(other.sum())


@pytest.mark.parametrize("family", FAMILIES, ids=FAMILY_IDS)
def test_the_old_width_and_wider_ones_change_nothing(family):
    model = family.stock("Model")(family.stock_config()).eval()
    batch = tiny_inputs(family, "Model")
    for widths, config in (((None, 8), (8, 8)), ((8, 11), (8, 11)), ((11, 10), (11, 10))):
        converted = convert_rank(model, *widths, calibration=batch)
        assert difference(converted, model, batch) < 2e-6
        assert converted.config.head_geometry(0)[1:3] == config


@pytest.mark.parametrize("family", FAMILIES, ids=FAMILY_IDS)
def test_a_rank_model_of_narrow_values_is_widened_and_cut_back(family):
    model = family.rank("Model")(family.rank_config(v_head_dim=5)).eval()
    batch = tiny_inputs(family, "Model")
    wide = convert_rank(model, v_head_dim=9)
    assert difference(wide, model, batch) < 2e-6
    assert difference(convert_rank(wide, v_head_dim=5, calibration=batch), model, batch) < 1e-4


@pytest.mark.parametrize("family", FAMILIES, ids=FAMILY_IDS)
def test_padding_enters_nothing(family):
    model, batch = trained_like(family), plain_inputs(family)
    apart = [
        {name: value[text : text + 1, : int(mask.sum())] for name, value in batch.items()}
        for text, mask in enumerate(batch["attention_mask"])
    ]
    padded, unpadded = (convert_rank(model, v_head_dim=3, calibration=texts) for texts in (batch, apart))
    assert difference(padded, unpadded, apart[0]) < 1e-6


def test_without_calibration_the_form_of_values_and_outputs_is_truncated():
    model = trained_like(BERT)
    converted, reports = convert_model(model, v_head_dim=3)
    lost = total = 0.0
    (value, output), (new_value, new_output) = (values_and_outputs(blocks_of(m)[0]) for m in (model, converted))
    for head in range(HEADS):
        form = value[head] @ output[head]
        energy = torch.linalg.svdvals(form).square()
        change = (form - new_value[head] @ new_output[head]).square().sum()
        torch.testing.assert_close(change, energy[3:].sum(), rtol=1e-6, atol=0)
        lost, total = lost + float(change), total + float(energy.sum())
    assert reports[0].value_energy_kept == pytest.approx(1 - lost / total, abs=1e-9)
    assert (reports[0].old_v_head_dim, reports[0].v_head_dim, reports[0].rank) == (8, 3, 8)
    assert reports[0].parameters_saved == 4 * 5 * (32 + 1 + 32)


def test_a_singular_moment_is_cut_without_loss():
    """Two tokens leave at most two directions for the values of a head."""
    model = trained_like(BERT, num_hidden_layers=1)
    batch = {"input_ids": torch.tensor([[5, 9]])}
    assert difference(convert_rank(model, v_head_dim=2, calibration=batch), model, batch) < 1e-6


class TestOneBudgetForBothKinds:
    @pytest.mark.parametrize("family", [BERT, ALBERT, XLNET, GPT2], ids=lambda family: family.name)
    def test_it_is_spent_and_no_worse_than_equal_widths(self, family):
        model, batch = trained_like(family), plain_inputs(family)
        chosen = convert_rank(model, "auto", "auto", mean_rank=4, calibration=batch)
        heads = [chosen.config.head_geometry(layer) for layer in range(chosen.config.num_hidden_layers)]
        entries = 2 if family is ALBERT else len(heads)
        own = heads[:: len(heads) // entries]
        assert 8 * entries - 2 <= sum(head.qk_rank + head.v_head_dim for head in own) <= 8 * entries
        equal = convert_rank(model, 4, 4, calibration=batch)
        with torch.no_grad():
            errors = [
                float(
                    (m(**batch).last_hidden_state - model(**batch).last_hidden_state)[
                        batch["attention_mask"].bool()
                    ].norm()
                )
                for m in (chosen, equal)
            ]
        assert errors[0] < 1.1 * errors[1], errors

    def test_a_kind_that_needs_less_gets_less(self):
        """The values of this model have two directions, so the budget goes to queries and keys."""
        model, batch = trained_like(BERT), plain_inputs(BERT)
        with torch.no_grad():
            for layer in model.encoder.layer:
                for tensor in (layer.attention.self.value.weight, layer.attention.self.value.bias):
                    tensor.view(HEADS, WIDTH, -1)[:, 2:] = 0
        chosen = convert_rank(model, "auto", "auto", mean_rank=5, calibration=batch)
        for layer in range(3):
            heads = chosen.config.head_geometry(layer)
            assert heads.v_head_dim <= 2 and heads.qk_rank == 8

    def test_values_alone_by_budget_and_by_energy(self):
        model, batch = trained_like(BERT), plain_inputs(BERT)
        by_budget = convert_rank(model, v_head_dim="auto", mean_rank=4, calibration=batch)
        heads = [by_budget.config.head_geometry(layer) for layer in range(3)]
        assert sum(head.v_head_dim for head in heads) <= 12 and {head.qk_rank for head in heads} == {8}
        _, reports = convert_model(model, v_head_dim="auto", energy=0.9, calibration=batch)
        # chosen on the original model, and reported on the model converted so far
        assert all(report.value_energy_kept > 0.87 for report in reports)
        assert all(report.v_head_dim < 8 for report in reports)


def loss_of_group(flat, moments, rows):
    """The error of two heads that share a basis (6, 2), with outputs of their own (24, 2), and its gradient."""
    basis, total, slopes = flat[:12].reshape(6, 2), 0.0, []
    slope = np.zeros_like(basis)
    for head, factor in enumerate(flat[12:].reshape(2, 24, 2)):
        change = rows[head].T - basis @ factor.T
        moved = moments[head] @ change
        total += (change * moved).sum()
        slope -= 2 * moved @ factor
        slopes.append(-2 * moved.T @ basis)
    return total, np.concatenate([slope.ravel(), *(one.ravel() for one in slopes)])


def test_values_that_a_group_of_heads_shares_reach_the_optimum_of_brute_force():
    """A tiny Llama of four heads with two key-value heads: one basis for each, on its own maps and values."""
    torch.manual_seed(0)
    config = LlamaConfig(
        **{"hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "vocab_size": 47},
        **{"num_hidden_layers": 1, "intermediate_size": 24, "attn_implementation": "eager"},
    )
    model = LlamaModel(config).double().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.2 * torch.randn(weight.shape, dtype=weight.dtype)
    attention = model.layers[0].self_attn
    mixed = []
    hook = attention.o_proj.register_forward_pre_hook(lambda _, args: mixed.append(args[0]))
    with torch.no_grad():
        model(torch.randint(47, (3, 12)))
    hook.remove()
    mixed = mixed[0].flatten(0, 1).unflatten(1, (4, 6)).transpose(0, 1)  # (heads, rows, v)
    rows = attention.o_proj.weight.detach().unflatten(1, (4, 6)).transpose(0, 1)  # (heads, d, v)
    for group in (slice(0, 2), slice(2, 4)):
        moments = mixed[group].mT @ mixed[group]
        value, output, lost = shared_factors(root_of_moment(moments), rows[group], 2)
        written = mixed[group] @ rows[group].mT
        error = (written - mixed[group] @ value @ output.mT).square().sum()
        torch.testing.assert_close(error, lost.sum(), rtol=1e-9, atol=0)

        starts = [np.random.default_rng(seed).normal(scale=0.5, size=12 + 96) for seed in range(5)]
        options = {"maxiter": 5000, "gtol": 1e-9}
        best = min(
            minimize(
                loss_of_group,
                start,
                args=(moments.numpy(), rows[group].numpy()),
                jac=True,
                method="BFGS",
                options=options,
            ).fun
            for start in starts
        )
        assert float(error) <= best * (1 + 1e-6)


def test_a_group_of_one_head_has_the_closed_form():
    generator = torch.Generator().manual_seed(2)
    values = torch.randn(1, 30, 5, generator=generator, dtype=torch.float64)
    rows = torch.randn(1, 9, 5, generator=generator, dtype=torch.float64)
    root = root_of_moment(values.mT @ values)
    *_, lost = shared_factors(root, rows, 2)
    torch.testing.assert_close(lost[0], torch.linalg.svdvals(values[0] @ rows[0].T)[2:].square().sum())


def test_a_group_of_heads_loses_nothing_at_the_old_width():
    generator = torch.Generator().manual_seed(3)
    mixed = torch.randn(2, 30, 5, generator=generator, dtype=torch.float64)
    rows = torch.randn(2, 9, 5, generator=generator, dtype=torch.float64)
    value, output, lost = shared_factors(root_of_moment(mixed.mT @ mixed), rows, 5)
    torch.testing.assert_close(mixed @ value @ output.mT, mixed @ rows.mT, rtol=0, atol=1e-9)
    assert float(lost.max()) < 1e-12 * float((mixed @ rows.mT).square().sum())
