"""Other texts made of those at hand: the teacher answers whatever it is asked, so distillation need not repeat itself."""

import torch


# at most this share of a text is replaced, so that most of every context stays real
REPLACED = 0.3
# how flat the head of the distribution of replacements is; without it, one word in ten would be the commonest
FLAT = 20


def frequent_first(real: torch.Tensor, vocabulary: int) -> tuple[int, torch.Tensor]:
    """The lowest id to draw and the weights of all from it on, from the ids (n,) of real tokens.

    The vocabularies of all three families list their words from frequent to rare, after special tokens and, in BERT's,
    single characters. A quarter of the tokens of a text lies below its common words: marks and endings.
    """
    lowest = int(real.sort().values[len(real) // 4])
    return lowest, 1 / (torch.arange(max(vocabulary - lowest, 1)) + float(FLAT))


def varied(
    ids: torch.Tensor, real: torch.Tensor, vocabulary: int, generator: torch.Generator, ends: tuple[int, int] = (1, 2)
) -> torch.Tensor:
    """Texts (batch, n) that begin elsewhere in themselves, with some of their `real` tokens drawn from the vocabulary.

    The first and last tokens of a text, as many as `ends` says, are left in place, as special tokens are there.

    >>> ids = torch.arange(10, 20)[None]
    >>> new = varied(ids, ids > 0, 100, torch.Generator().manual_seed(0))
    >>> new.shape, new[0, 0].item(), new[0, -2:].tolist(), bool((new != ids).any())
    (torch.Size([1, 10]), 10, [18, 19], True)
    """
    new = ids.clone()
    if not bool(real.any()):
        return new
    lowest, weights = frequent_first(ids[real], vocabulary)
    for text, mask in zip(new, real, strict=True):
        places = mask.nonzero()[:, 0]
        places = places[ends[0] : len(places) - ends[1]]
        if len(places) < 2:
            continue
        words = text[places].roll(int(torch.randint(len(places), (), generator=generator)))
        share = REPLACED * torch.rand((), generator=generator)
        replaced = torch.rand(len(words), generator=generator) < share
        drawn = torch.multinomial(weights, len(words), replacement=True, generator=generator) + lowest
        text[places] = torch.where(replaced, drawn, words)
    return new
