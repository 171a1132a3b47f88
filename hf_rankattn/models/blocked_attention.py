"""Self-attention with many heads on the CPU, in blocks of heads whose intermediates stay in the cache.

A layer that computes all its heads at once is slower than a loop over small layers as soon as queries, keys, values and
scores of all heads leave the cache. Here a block of heads is projected, attended and projected back before the next one
begins, forward and backward.
"""

import math

import torch
from torch import nn


ROWS = 2048  # batch positions handled at a time
BLOCK_BYTES = 4 << 20  # queries, keys, values and scores of one block of heads at these positions, and their gradients


class Scratch:
    """Named buffers for one pass: fresh memory for every block costs more in page faults than the arithmetic."""

    def __init__(self, like):
        self.like, self.pool = like, {}

    def __call__(self, name, *shape):
        size = math.prod(shape)
        if name not in self.pool or self.pool[name].numel() < size:
            self.pool[name] = self.like.new_empty(size)
        return self.pool[name][:size].view(shape)


NORM_FLOOR = 1e-12  # as in torch's normalize: what is shorter is not blown up to unit length


def softmax_grad(grad, probs, dim):
    return torch.ops.aten._softmax_backward_data.out(grad, probs, dim, probs.dtype, grad_input=grad)


class Products:
    """Attention of a block by batched products of (rank, length) matrices; rows of x ordered (sample, position)."""

    @staticmethod
    def flat(x):
        return x.reshape(-1, x.shape[2])

    @staticmethod
    def unflat(y, out):
        pass  # flat() was a view

    @staticmethod
    def split(y, heads, batch, scratch, name=None):
        y = y.view(heads, y.shape[0] // heads, batch, -1).transpose(1, 2)
        out = scratch(name, *y.shape) if name else y.new_empty(y.shape)
        return out.copy_(y).flatten(0, 1)

    @staticmethod
    def merge(z, out, heads, batch):
        z = z.view(heads, batch, z.shape[1], -1).transpose(1, 2)
        out.view(z.shape).copy_(z)
        return out

    @staticmethod
    def inner(a, b):
        """Products of the columns of two (heads and samples, rank, length) tensors."""
        return (a * b).sum(1, keepdim=True)

    @staticmethod
    def per_head(gain, samples):
        return gain.repeat_interleave(samples)[:, None, None]

    @staticmethod
    def forward(q, k, v, scratch, recall=False):
        size = len(q), q.shape[2], q.shape[2]
        scores = torch.bmm(q.mT, k, out=scratch("scores", *size))
        probs = torch.softmax(scores, -1, out=torch.empty_like(scores) if recall else scratch("probs", *size))
        return probs, torch.bmm(v, probs.mT, out=scratch("heads", *v.shape))

    @staticmethod
    def backward(q, k, v, probs, grad, scratch):  # values, queries, keys: each is used up before the next is made
        g_scores = softmax_grad(torch.bmm(grad.mT, v, out=scratch("scores", *probs.shape)), probs, -1)
        yield torch.bmm(grad, probs, out=scratch("heads", *v.shape))
        yield torch.bmm(k, g_scores.mT, out=scratch("heads", *q.shape))
        yield torch.bmm(q, g_scores, out=scratch("heads", *q.shape))


class Outer:
    """The same for heads of rank one, elementwise with the samples innermost: such products contract nothing."""

    @staticmethod
    def flat(x):
        return x.transpose(0, 1).reshape(-1, x.shape[2])

    @staticmethod
    def unflat(y, out):
        if y.data_ptr() != out.data_ptr():  # flat() is a view of a single sample or position
            out.transpose(0, 1).copy_(y.view(out.shape[1], -1, out.shape[2]))

    @staticmethod
    def split(y, heads, batch, scratch, name=None):
        return (y if name else y.clone()).view(heads, -1, batch)

    @staticmethod
    def merge(z, out, heads, batch):
        out.view(z.shape).copy_(z)
        return out

    @staticmethod
    def inner(a, b):
        return a * b

    @staticmethod
    def per_head(gain, samples):
        return gain[:, None, None]

    @staticmethod
    def forward(q, k, v, scratch, recall=False):
        size = len(q), q.shape[1], *q.shape[1:]
        scores = torch.mul(q.unsqueeze(2), k.unsqueeze(1), out=scratch("scores", *size))
        probs = torch.softmax(scores, 2, out=scratch("probs", *size))
        heads = torch.mul(probs, v.unsqueeze(1), out=scores)
        return probs, torch.sum(heads, 2, out=scratch("heads", *q.shape))

    @staticmethod
    def backward(q, k, v, probs, grad, scratch):  # values, queries, keys: each is used up before the next is made
        grad, heads = grad.unsqueeze(2), scratch("heads", *q.shape)
        g_scores = torch.mul(grad, v.unsqueeze(1), out=scratch("scores", *probs.shape))
        g_scores = softmax_grad(g_scores, probs, 2)
        yield torch.sum(probs.mul_(grad), 1, out=heads)
        yield torch.sum(torch.mul(g_scores, k.unsqueeze(1), out=probs), 2, out=heads)
        yield torch.sum(g_scores.mul_(q.unsqueeze(2)), 1, out=heads)


class UnitNorm:
    """Unit queries times a gain, and unit keys, of one block: in place on the way there, and back for the gradients."""

    def __init__(self, core, gain, samples):
        self.core, self.gain = core, core.per_head(gain, samples)

    def forward(self, q, k):
        """Changes q and k; returns what the way back needs of how long they were."""
        inverse = [self.core.inner(z, z).sqrt_().clamp_min_(NORM_FLOOR).reciprocal_() for z in (q, k)]
        q.mul_(inverse[0]).mul_(self.gain)
        k.mul_(inverse[1])
        return inverse

    def query_grad(self, grad, q, inverse):
        """Gradient of the queries before, in the memory of that of the queries after; and q.grad for the gain."""
        along = self.core.inner(grad, q)
        grad.addcmul_(q, along / self.gain.square(), value=-1).mul_(inverse * self.gain)
        return along

    def key_grad(self, grad, k, inverse):
        grad.addcmul_(k, self.core.inner(grad, k), value=-1).mul_(inverse)


class BlockedAttention(torch.autograd.Function):
    """weight and bias hold, block after block of `step` heads, the queries, keys and values of the block's heads.

    The backward pass gets queries, keys and values back, for projecting again is dear; it gets the softmax and the
    attended values too if a row of the softmax is no longer than a value, and otherwise computes them again. With a gain for each head, queries
    and keys are made unit vectors, and queries multiplied by it.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, out_weight, gain, shape, keep):
        heads, rank, v_dim, samples, step = shape
        core = Outer if rank == v_dim == 1 and samples >= 32 else Products
        width, scratch, kept = 2 * rank + v_dim, Scratch(x), []
        recall = keep and core is Products and x.shape[1] <= v_dim
        out = x.new_empty(*x.shape[:2], len(out_weight))
        for x_rows, out_rows in zip(x.split(samples), out.split(samples), strict=True):
            n, flat = len(x_rows), core.flat(x_rows)
            y = core.flat(out_rows)
            for a in range(0, heads, step):
                h = min(step, heads - a)
                part = slice(a * width, (a + h) * width)
                qkv = torch.mm(weight[part], flat.t(), out=scratch("qkv", h * width, len(flat)))
                if bias is not None:
                    qkv += bias[part, None]
                qkv = [
                    core.split(z, h, n, scratch, None if keep else name)
                    for z, name in zip(qkv.split([h * rank, h * rank, h * v_dim]), "qkv", strict=True)
                ]
                inverse = [] if gain is None else UnitNorm(core, gain[a : a + h], n).forward(*qkv[:2])
                probs, o = core.forward(*qkv, scratch, recall)
                merged = h * v_dim, len(flat)
                merged = core.merge(o, x.new_empty(merged) if recall else scratch("merged", *merged), h, n)
                y.addmm_(merged.t(), out_weight[:, a * v_dim : (a + h) * v_dim].t(), beta=int(a > 0))
                kept += [*qkv, *inverse, *([probs, merged] if recall else [])] if keep else []
            core.unflat(y, out_rows)
        ctx.save_for_backward(x, weight, bias, out_weight, gain, *kept)
        ctx.core, ctx.shape, ctx.recall = core, shape, recall
        return out

    @staticmethod
    def backward(ctx, grad):
        x, weight, bias, out_weight, gain, *kept = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: plain operations, whose gradients can be differentiated again
            given = x, weight, bias, out_weight, gain
            inputs = [z for z, need in zip(given, ctx.needs_input_grad, strict=False) if need]
            grads = iter(torch.autograd.grad(plain_attention(*given, ctx.shape), inputs, grad, create_graph=True))
            return *(next(grads) if need else None for need in ctx.needs_input_grad[:5]), None, None
        core, (heads, rank, v_dim, samples, step) = ctx.core, ctx.shape
        width, scratch, kept = 2 * rank + v_dim, Scratch(x), iter(kept)
        need_x, need_weight, need_bias, need_out, need_gain = ctx.needs_input_grad[:5]
        g_x = torch.empty_like(x, memory_format=torch.contiguous_format) if need_x else None
        g_weight = torch.zeros_like(weight) if need_weight else None
        g_bias = weight.new_zeros(len(weight)) if need_bias else None
        g_out = torch.zeros_like(out_weight) if need_out else None
        g_gain = torch.zeros_like(gain) if need_gain else None
        for i in range(0, len(x), samples):
            flat, g_flat = core.flat(x[i : i + samples]), core.flat(grad[i : i + samples])
            n, m = min(samples, len(x) - i), len(flat)
            g_in = core.flat(g_x[i : i + samples]) if need_x else None
            for a in range(0, heads, step):
                h = min(step, heads - a)
                part, out_part = slice(a * width, (a + h) * width), slice(a * v_dim, (a + h) * v_dim)
                q, k, v = next(kept), next(kept), next(kept)
                inverse = None if gain is None else (next(kept), next(kept))
                spare = scratch("merged", h * v_dim, m)
                if ctx.recall:
                    probs, merged = next(kept), next(kept)
                else:
                    probs, o = core.forward(q, k, v, scratch)
                    merged = core.merge(o, spare, h, n)
                if need_out:
                    g_out[:, out_part].addmm_(g_flat.t(), merged.t())
                g_o = core.split(torch.mm(out_weight[:, out_part].t(), g_flat.t(), out=spare), h, n, scratch, "grad")
                g_qkv = scratch("qkv", h * width, m)
                g_q, g_k, g_v = g_qkv.split([h * rank, h * rank, h * v_dim])
                grads = core.backward(q, k, v, probs, g_o, scratch)
                core.merge(next(grads), g_v, h, n)
                if gain is None:
                    core.merge(next(grads), g_q, h, n)
                    core.merge(next(grads), g_k, h, n)
                else:
                    norm, g = UnitNorm(core, gain[a : a + h], n), next(grads)
                    along = norm.query_grad(g, q, inverse[0])
                    core.merge(g, g_q, h, n)
                    norm.key_grad(g := next(grads), k, inverse[1])
                    core.merge(g, g_k, h, n)
                    if need_gain:
                        g_gain[a : a + h] += along.view(h, -1).sum(1) / gain[a : a + h]
                if need_weight:
                    g_weight[part].addmm_(g_qkv, flat)
                if need_bias:
                    g_bias[part] += g_qkv.sum(1)
                if need_x:
                    g_in.addmm_(g_qkv.t(), weight[part], beta=int(a > 0))
            if need_x:
                core.unflat(g_in, g_x[i : i + samples])
        return g_x, g_weight, g_bias, g_out, g_gain, None, None


def plain_attention(x, weight, bias, out_weight, gain, shape):
    """What [`BlockedAttention`] computes, block by block in operations that autograd knows."""
    heads, rank, v_dim, _, step = shape
    width, output = 2 * rank + v_dim, 0
    projected = nn.functional.linear(x, weight, bias)
    for a in range(0, heads, step):
        h = min(step, heads - a)
        block = projected[..., a * width : (a + h) * width].split([h * rank, h * rank, h * v_dim], -1)
        q, k, v = (z.unflatten(-1, (h, -1)).transpose(1, 2) for z in block)
        if gain is not None:
            q, k = (nn.functional.normalize(z, dim=-1) for z in (q, k))
            q = q * gain[a : a + h, None, None]
        joined = (torch.softmax(q @ k.mT, -1) @ v).transpose(1, 2).flatten(2)
        output = output + joined @ out_weight[:, a * v_dim : (a + h) * v_dim].t()
    return output


def is_plain(layer: nn.Module, states: torch.Tensor) -> bool:
    """Whether a layer is no more than its weight: adapters, offloading, hooks and quantisation have to run as modules."""
    hooks = layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks
    return (
        type(layer) is nn.Linear
        and "forward" not in vars(layer)
        and type(layer.weight) in (nn.Parameter, torch.Tensor)
        and layer.weight.dtype == states.dtype
        and layer.weight.device == states.device
        and not any(hooks)
    )


def block_sizes(states: torch.Tensor, layers: tuple[nn.Module, ...], num_heads: int, rank: int, v_dim: int):
    """Samples and heads per block, or None where blocks do not apply or one score matrix alone overflows them."""
    if states.device.type != "cpu" or states.dtype not in (torch.float32, torch.float64):
        return None
    if torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return None
    if torch.nn.modules.module._has_any_global_hook() or torch._C._functorch.peek_interpreter_stack() is not None:
        return None
    if not all(is_plain(layer, states) for layer in layers) or len({layer.bias is None for layer in layers}) > 1:
        return None
    batch, length, _ = states.shape
    samples = max(1, min(batch, ROWS // max(1, length)))
    size = states.element_size() * length * (2 * (2 * rank + v_dim) + 2 * length)
    step = BLOCK_BYTES // max(1, size * samples)
    return (samples, min(step, num_heads)) if step and batch else None


def blocked_attention(states, query, key, value, output, num_heads, qk_scale, output_scale, log_temperature=None):
    """Multi-head self-attention of (batch, n, d) states through four linear layers, or None where blocks do not apply.

    With log-temperatures (num_heads,), queries and keys are unit vectors and the queries are multiplied by their exponents.
    """
    rank, v_dim = query.out_features // num_heads, value.out_features // num_heads
    sizes = block_sizes(states, (query, key, value, output), num_heads, rank, v_dim)
    if sizes is None:
        return None
    samples, step = sizes
    widths = (step * rank, step * rank, step * v_dim)

    def fuse(*parts):
        """Queries, keys and values of the first block, then of the second, ...: one matrix product each."""
        blocks = zip(*(part.split(width) for part, width in zip(parts, widths, strict=True)), strict=True)
        return torch.cat([part for block in blocks for part in block])

    gain = None if log_temperature is None else log_temperature.exp() * qk_scale
    scale = qk_scale if gain is None else 1.0  # the length of unit vectors is all in the gain
    weight = fuse(query.weight * scale, key.weight, value.weight)
    bias = None if query.bias is None else fuse(query.bias * scale, key.bias, value.bias)
    arguments = states, weight, bias, output.weight * output_scale, gain
    keep = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in arguments)
    joined = BlockedAttention.apply(*arguments, (num_heads, rank, v_dim, samples, step), keep)
    return joined if output.bias is None else joined + output.bias
