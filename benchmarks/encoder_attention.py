"""RankEncoder's attention against a loop over nn.MultiheadAttention, and against its bare matrix products."""

import statistics
from collections.abc import Callable, Iterator

import torch
from torch import nn

from benchmarks.memory import live_peak
from benchmarks.timing import Row, at_least, at_most, median_ratio, timed
from hf_rankattn import RankEncoderConfig, RankEncoderModel


WIDTH, LENGTH, BATCH = 64, 16, 256
POINTS = [(heads, blocks) for heads in (1, 8, 64) for blocks in (1, 8, 64)]


class Loop(nn.Module):
    """What the original experiments did: the mean of independent attention modules, one after the other."""

    def __init__(self, heads: int, blocks: int):
        super().__init__()
        self.parts = nn.ModuleList(nn.MultiheadAttention(WIDTH, heads, batch_first=True) for _ in range(blocks))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        total = self.parts[0](states, states, states, need_weights=False)[0]
        for part in self.parts[1:]:
            total = total + part(states, states, states, need_weights=False)[0]
        return total / len(self.parts)


def ours_from(loop: Loop, heads: int) -> nn.Module:
    """RankEncoder's attention with the weights of the loop."""
    blocks, rank = len(loop.parts), WIDTH // heads
    config = RankEncoderConfig(input_dim=WIDTH, num_attention_heads=heads * blocks, qk_rank=rank, v_head_dim=rank)
    attention = RankEncoderModel(config).layers[0].attention
    with torch.no_grad():
        for i, layer in enumerate((attention.query, attention.key, attention.value)):
            layer.weight.copy_(torch.cat([part.in_proj_weight.chunk(3)[i] for part in loop.parts]))
            layer.bias.copy_(torch.cat([part.in_proj_bias.chunk(3)[i] for part in loop.parts]))
        attention.output.weight.copy_(torch.cat([part.out_proj.weight for part in loop.parts], dim=1))
        attention.output.bias.copy_(sum(part.out_proj.bias for part in loop.parts) / blocks)
    return attention


def step(module: nn.Module, states: torch.Tensor, grad: torch.Tensor) -> Callable[[], None]:
    def run():
        states.grad = None
        module.zero_grad(set_to_none=True)
        output = module(states)
        (output if isinstance(output, torch.Tensor) else output[0]).backward(grad)

    return run


def bare_products(heads: int, rank: int, samples: int, block: int, outer: bool) -> Callable[[], None]:
    """All matrix products and one softmax, forward and backward, on ready operands: no layout is ever changed."""
    columns, total = samples * LENGTH, heads * rank
    inputs, grads, outputs, input_grads = (torch.randn(BATCH // samples, WIDTH, columns) for _ in range(4))
    weight, weight_grad = torch.randn(3, total, WIDTH), torch.zeros(3, total, WIDTH)
    out_weight, out_grad = torch.randn(WIDTH, total), torch.zeros(WIDTH, total)
    projected, projected_grad = (torch.randn(4, block * rank, columns) for _ in range(2))
    attend = outer_attention(samples, block) if outer else product_attention(samples, block, rank)

    def run():
        for x, g, y, dx in zip(inputs, grads, outputs, input_grads, strict=True):
            for first in range(0, heads, block):
                count = min(block, heads - first)
                part, size = slice(first * rank, (first + count) * rank), count * rank
                for i in range(3):
                    torch.mm(weight[i, part], x, out=projected[i, :size])
                attend(count)
                y.addmm_(out_weight[:, part], projected[3, :size], beta=0)
                torch.mm(out_weight[:, part].t(), g, out=projected_grad[3, :size])
                out_grad[:, part].addmm_(g, projected[3, :size].t(), beta=0)
                for i in range(3):
                    dx.addmm_(weight[i, part].t(), projected_grad[i, :size], beta=0)
                    weight_grad[i, part].addmm_(projected_grad[i, :size], x.t(), beta=0)

    return run


def product_attention(samples: int, block: int, rank: int) -> Callable[[int], None]:
    """Scores, softmax and values of a block by batched products, and their gradients."""
    q, k, v, g, o = (torch.randn(block * samples, rank, LENGTH) for _ in range(5))
    s, p = (torch.randn(block * samples, LENGTH, LENGTH) for _ in range(2))

    def attend(count: int) -> None:
        n = count * samples
        torch.bmm(q[:n].mT, k[:n], out=s[:n])
        torch.softmax(s[:n], -1, out=p[:n])
        torch.bmm(v[:n], p[:n].mT, out=o[:n])
        torch.bmm(g[:n], p[:n], out=o[:n])
        torch.bmm(g[:n].mT, v[:n], out=s[:n])
        torch.ops.aten._softmax_backward_data.out(s[:n], p[:n], -1, s.dtype, grad_input=s[:n])
        torch.bmm(k[:n], s[:n].mT, out=o[:n])
        torch.bmm(q[:n], s[:n], out=o[:n])

    return attend


def outer_attention(samples: int, block: int) -> Callable[[int], None]:
    """The same for heads of rank one, elementwise: their products contract nothing."""
    q, k, v, g, o = (torch.randn(block, LENGTH, samples) for _ in range(5))
    s, p, t = (torch.randn(block, LENGTH, LENGTH, samples) for _ in range(3))

    def attend(n: int) -> None:
        torch.mul(q[:n].unsqueeze(2), k[:n].unsqueeze(1), out=s[:n])
        torch.softmax(s[:n], 2, out=p[:n])
        torch.sum(torch.mul(p[:n], v[:n].unsqueeze(1), out=t[:n]), 2, out=o[:n])
        torch.sum(torch.mul(p[:n], g[:n].unsqueeze(2), out=t[:n]), 1, out=o[:n])
        torch.mul(g[:n].unsqueeze(2), v[:n].unsqueeze(1), out=s[:n])
        torch.ops.aten._softmax_backward_data.out(s[:n], p[:n], 2, s.dtype, grad_input=s[:n])
        torch.sum(torch.mul(s[:n], k[:n].unsqueeze(1), out=t[:n]), 2, out=o[:n])
        torch.sum(torch.mul(s[:n], q[:n].unsqueeze(2), out=t[:n]), 1, out=o[:n])

    return attend


def fastest_bare(heads_per_block: int, blocks: int) -> Callable[[], None]:
    """The bare products in the blocking that suits them best, chosen on at most eight blocks of heads."""
    heads, rank = heads_per_block * blocks, WIDTH // heads_per_block
    sample_heads = heads if blocks <= 8 else heads // 8
    forms = []
    for samples in (64, 256):
        for width in (64, 128, 256) if rank > 1 else (8, 32, 64):
            for outer in (False, True) if rank == 1 else (False,):
                forms.append((samples, max(1, min(heads, width // rank)), outer))
    times = timed({str(form): bare_products(sample_heads, rank, *form) for form in forms}, repeats=3)
    best = min(forms, key=lambda form: min(times[str(form)]))
    return bare_products(heads, rank, *best)


def run(repeats: int) -> Iterator[Row]:
    torch.manual_seed(0)
    states, grad = torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True), torch.randn(BATCH, LENGTH, WIDTH)
    speedups = []
    for heads, blocks in POINTS:
        loop = Loop(heads, blocks)
        ours = ours_from(loop, heads)
        torch.testing.assert_close(loop(states), ours(states)[0], atol=1e-5, rtol=1e-4)
        runs = {
            "loop": step(loop, states, grad),
            "ours": step(ours, states, grad),
            "bare": fastest_bare(heads, blocks),
        }
        # short runs are noisy ones
        times = timed(runs, repeats * {1: 8, 8: 3, 64: 1}[blocks], most=6.0)
        memory = {}
        for kind, module in (("loop", loop), ("ours", ours)):
            states.grad = None  # what an earlier run left would be freed in this one, and counted as less than nothing
            module.zero_grad(set_to_none=True)
            memory[kind] = live_peak(runs[kind])
        speedups.append(median_ratio(times, "loop", "ours"))
        point = f"encoder attention, {heads} heads x {blocks} blocks"
        milliseconds = f"{statistics.median(times['ours']) * 1e3:.1f} ms"
        yield at_least(f"{point}, speed", "loop over nn.MultiheadAttention", speedups[-1], 1.0, milliseconds)
        yield at_most(f"{point}, time", "its bare products", median_ratio(times, "ours", "bare"), 2.0)
        note = f"{memory['ours']:.0f} against {memory['loop']:.0f} MB"
        yield at_most(
            f"{point}, peak memory", "loop over nn.MultiheadAttention", memory["ours"] / memory["loop"], 1.0, note
        ).counted()
    median = statistics.median(speedups)
    yield at_least("encoder attention, median speed", "loop over nn.MultiheadAttention", median, 1.3)
