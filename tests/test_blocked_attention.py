"""The blocked CPU attention of RankEncoder against plain autograd, with blocks small enough to have remainders."""

import pytest
import torch
from torch import nn

from hf_rankattn.models import blocked_attention as blocks


def build(heads, rank, width, d=12, bias=True, dtype=torch.float64):
    layers = [nn.Linear(d, heads * w, bias=bias, dtype=dtype) for w in (rank, rank, width)]
    return [*layers, nn.Linear(heads * width, d, bias=bias, dtype=dtype)]


def naive(states, query, key, value, output, heads, qk_scale, output_scale, log_temperature=None):
    q, k, v = (layer(states).unflatten(-1, (heads, -1)).transpose(1, 2) for layer in (query, key, value))
    if log_temperature is not None:
        q, k = (nn.functional.normalize(z, dim=-1) for z in (q, k))
        q = q * log_temperature.exp()[:, None, None]
    joined = torch.softmax(q @ k.transpose(2, 3) * qk_scale, -1) @ v
    return output(joined.transpose(1, 2).flatten(2) * output_scale)


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(blocks, "ROWS", 60)
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 40_000)


SHAPES = [
    # batch, n, heads, rank, value width
    (7, 9, 5, 3, 4),
    (7, 9, 11, 1, 1),
    (70, 1, 3, 2, 2),
    (64, 1, 40, 1, 1),
    (1, 20, 4, 6, 2),
    (50, 2, 33, 1, 1),
]


@pytest.mark.parametrize("qk_norm", [False, True], ids=["plain", "qk_norm"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "B{}-N{}-H{}-r{}-v{}".format(*shape))
def test_values_and_gradients(shape, bias, qk_norm, small_blocks):
    batch, n, heads, rank, width = shape
    layers = build(heads, rank, width, bias=bias)
    temperature = torch.randn(heads, dtype=torch.float64, requires_grad=True) if qk_norm else None
    states = torch.randn(batch, n, 12, dtype=torch.float64, requires_grad=True)
    probe = torch.randn(batch, n, 12, dtype=torch.float64)
    parameters = [states, *(p for layer in layers for p in layer.parameters()), *([temperature] if qk_norm else [])]
    results = []
    for attend in (naive, blocks.blocked_attention):
        output = attend(states, *layers, heads, 0.7, 0.3, temperature)
        results.append([output, *torch.autograd.grad((output * probe).sum(), parameters)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-9)
    with torch.no_grad():
        again = blocks.blocked_attention(states, *layers, heads, 0.7, 0.3, temperature)
        torch.testing.assert_close(again, results[0][0])


def test_the_small_blocks_do_split(small_blocks):
    """Otherwise the test above would test one block only."""
    states = torch.randn(7, 9, 12, dtype=torch.float64)
    samples, step = blocks.block_sizes(states, tuple(build(5, 3, 4)), 5, 3, 4)
    assert 7 % samples and 5 % step and step < 5


@pytest.mark.parametrize("needed", range(4))
def test_only_some_inputs_need_gradients(needed, small_blocks):
    layers = build(5, 3, 4)
    for layer in layers:
        layer.requires_grad_(False)
    states = torch.randn(7, 9, 12, dtype=torch.float64)
    target = states if needed == 0 else layers[needed].weight
    target.requires_grad_(True)
    gradients = [
        torch.autograd.grad(attend(states, *layers, 5, 1.0, 1.0).square().sum(), [target])[0]
        for attend in (naive, blocks.blocked_attention)
    ]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("loss", [torch.sum, lambda x: x.square().sum()], ids=["sum", "squares"])
@pytest.mark.parametrize("qk_norm", [False, True], ids=["plain", "qk_norm"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_second_derivatives_are_those_of_plain_attention(loss, bias, qk_norm, small_blocks):
    layers = build(5, 3, 4, bias=bias)
    temperature = [torch.randn(5, dtype=torch.float64, requires_grad=True)] if qk_norm else []
    states = torch.randn(7, 9, 12, dtype=torch.float64, requires_grad=True)
    results = []
    for attend in (naive, blocks.blocked_attention):
        output = attend(states, *layers, 5, 0.7, 0.3, *temperature)
        (first,) = torch.autograd.grad(loss(output), states, create_graph=True)
        wanted = [states, *(layer.weight for layer in layers), *temperature]
        results.append([first, *torch.autograd.grad(first.square().sum(), wanted)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-11, rtol=1e-8)


def test_layers_that_are_more_than_a_weight_are_run_as_modules():
    layers = build(2, 3, 4)
    states = torch.randn(2, 5, 12, dtype=torch.float64)
    assert blocks.blocked_attention(states, *layers, 2, 1.0, 1.0) is not None
    handle = layers[0].register_forward_hook(lambda module, args, output: output * 0)
    assert blocks.blocked_attention(states, *layers, 2, 1.0, 1.0) is None
    handle.remove()

    class Adapter(nn.Linear):
        pass

    layers[3] = Adapter(8, 12, dtype=torch.float64)
    assert blocks.blocked_attention(states, *layers, 2, 1.0, 1.0) is None
    assert blocks.blocked_attention(states.bfloat16(), *build(2, 3, 4, dtype=torch.bfloat16), 2, 1.0, 1.0) is None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert blocks.blocked_attention(states.float(), *build(2, 3, 4, dtype=torch.float32), 2, 1.0, 1.0) is None


def test_what_is_not_a_plain_layer_is_run_as_one(tmp_path):
    """Offloaded and patched layers, global hooks and function transforms: sdpa and eager agree, and nothing breaks."""
    from accelerate import cpu_offload

    from hf_rankattn import RankEncoderConfig, RankEncoderModel

    config = RankEncoderConfig(input_dim=12, num_attention_heads=2, intermediate_size=16)
    model, points = RankEncoderModel(config).eval(), torch.randn(2, 5, 12)
    layer = model.layers[0].attention
    expected = model(points=points).last_hidden_state

    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: seen.append(module))
    model(points=points)
    handle.remove()
    assert layer.query in seen

    torch.func.grad(lambda x: model(points=x).last_hidden_state.sum())(points)

    patched = layer.query.forward
    layer.query.forward = lambda x: 0 * patched(x)
    sdpa = model(points=points).last_hidden_state
    model.set_attn_implementation("eager")
    torch.testing.assert_close(model(points=points).last_hidden_state, sdpa)
    del layer.query.forward
    model.set_attn_implementation("sdpa")

    model.save_pretrained(tmp_path / "model")
    places = {"device_map": {"embeddings": "cpu", "layers": "disk", "norm": "cpu"}, "offload_folder": tmp_path / "off"}
    placed = RankEncoderModel.from_pretrained(tmp_path / "model", **places)
    torch.testing.assert_close(placed(points=points).last_hidden_state, expected)
    cpu_offload(model, torch.device("cpu"))
    torch.testing.assert_close(model(points=points).last_hidden_state, expected)
