"""Small models with logits that matter, for the tests of rank conversion."""

import numpy as np
import torch
from scipy.optimize import minimize
from testing_common import attention_modules, float_tensors, tiny_inputs


def trained_like(family, suffix="Model", **fields):
    """A tiny stock model in float64 with weights and biases large enough for logits that matter."""
    # drawn in float32, so that it is the same model under any default dtype
    model = family.stock(suffix)._from_config(family.stock_config(**fields), dtype=torch.float32).double().eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.2 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    return model


def plain_inputs(family, suffix="Model"):
    """The padded batch without token types, which XLNet would add to its logits."""
    return {name: value for name, value in tiny_inputs(family, suffix).items() if name != "token_type_ids"}


def difference(model, other, batch) -> float:
    ours, theirs = (float_tensors(m(**batch)) for m in (model, other))
    return max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))


def entries(model):
    """The tensors of the first attention module, in float64."""
    attention = attention_modules(model)[0] if hasattr(model.config, "head_geometry") else first_attention(model)
    return attention, {name: weight.detach().double() for name, weight in attention.named_parameters()}


def first_attention(model):
    names = ("attention.self", "attention", "rel_attn")
    return next(
        module for name, module in model.named_modules() if name.endswith(names) and hasattr(module, "query" if "rel" not in name else "q")
    )  # fmt: skip


def caught_inputs(model, batch):
    """What the first attention module is called with, once for each of its applications: states, XLNet's position codes."""
    caught = []
    attention, _ = entries(model)

    def hook(module, args, kwargs):
        states = args[0] if args else kwargs["hidden_states"]
        caught.append((states, args[4].double() if hasattr(module, "q") else None))

    handle = attention.register_forward_pre_hook(hook, with_kwargs=True)
    with torch.no_grad():
        model(**batch)
    handle.remove()
    return caught


def rows_of_head(tensors, head, heads, caught, batch, causal=False):
    """Every real row of every text: `(x, Y, form)` with logits `Y form^T x` over the keys that the row sees, naively."""
    rows = []
    mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    types = batch.get("token_type_ids")
    for states, codes in caught:
        for text, real in enumerate(mask):
            places = real.nonzero()[:, 0]
            if codes is None:
                width = len(tensors["query.weight"]) // heads
                own = slice(head * width, (head + 1) * width)
                tokens = states[text][real]
                query, key = (
                    tokens @ tensors[f"{name}.weight"][own].T + tensors[f"{name}.bias"][own]
                    for name in ("query", "key")
                )
                form = torch.eye(width, dtype=query.dtype)
                rows += [(query[i], key[: i + 1] if causal else key, form) for i in range(len(places))]
                continue
            tokens, width = states[:, text][real], tensors["q"].shape[-1]
            one = torch.eye(width, dtype=tokens.dtype)
            biases = torch.cat([tensors[f"r_{name}_bias"][head] for name in ("w", "r", "s")])
            form = torch.cat([one.repeat(1, 3), biases[None]])
            for i, place in enumerate(places):
                content = tokens @ tensors["k"][:, head]
                position = codes[len(real) - place + places, text] @ tensors["r"][:, head]
                segment = torch.zeros_like(content)
                if types is not None:
                    segment = tensors["seg_embed"][(types[text, places] != types[text, place]).long(), head]
                query = torch.cat([tokens[i] @ tensors["q"][:, head], tokens.new_ones(1)])
                rows.append((query, torch.cat([content, position, segment], dim=1), form))
    return rows


def own_text_error(old_rows, new_rows) -> float:
    """The variance of the change of logits along each row, summed over the rows: what calibration minimises."""
    total = 0.0
    for (x, y, form), (x_new, y_new, form_new) in zip(old_rows, new_rows, strict=True):
        total += float((y @ form.T @ x - y_new @ form_new.T @ x_new).var(correction=0))
    return total


def best_by_brute_force(rows, rank, starts=3) -> float:
    """The smallest error that any factors of this rank leave, by BFGS from random starts; shares no code with the library."""
    form, queries = rows[0][2].numpy(), torch.stack([row[0] for row in rows]).numpy()
    covariances = np.stack([np.cov(keys.numpy().T, bias=True) for _, keys, _ in rows])
    cut = len(form) * rank

    def error_and_gradient(flat):
        left, right = flat[:cut].reshape(-1, rank), flat[cut:].reshape(-1, rank)
        change = queries @ (form - left @ right.T)
        moved = np.einsum("nab,nb->na", covariances, change)
        slope = -2 * queries.T @ moved
        return (change * moved).sum(), np.concatenate([(slope @ right).ravel(), (slope.T @ left).ravel()])

    found = []
    for start in range(starts):
        factors = np.random.default_rng(start).normal(scale=0.5, size=sum(form.shape) * rank)
        options = {"maxiter": 5000, "gtol": 1e-6}
        found.append(minimize(error_and_gradient, factors, jac=True, method="BFGS", options=options).fun)
    return min(found)
