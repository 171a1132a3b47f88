"""A small task made from any text: are these words in their order, or shuffled?"""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

LABELS = ("in order", "shuffled")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def word_order_rows(texts: Sequence[str], seed: int, words: int = 16) -> list[dict[str, str | int]]:
    """Pieces of `words` words, each unchanged (label 0) and with its words shuffled (label 1).

    A row depends on its text and on the seed, not on the other texts. Pieces shorter than half of that are left out.

    >>> for row in word_order_rows(["rank is what a head has of its own"], seed=0, words=5):
    ...     print(row)
    {'text': 'rank is what a head', 'label': 0}
    {'text': 'a is head what rank', 'label': 1}
    {'text': 'has of its own', 'label': 0}
    {'text': 'own of has its', 'label': 1}
    """
    if words < 2:
        raise ValueError(f"`words` must be at least 2, got {words}: one word has no order.")
    rows: list[dict[str, str | int]] = []
    for text in texts:
        digest = hashlib.sha256(json.dumps([seed, words, text]).encode()).digest()
        rng = np.random.default_rng(np.frombuffer(digest, dtype=np.uint32))
        tokens = text.split()
        for start in range(0, len(tokens), words):
            piece = tokens[start : start + words]
            if 2 * len(piece) < words or len(set(piece)) < 2:
                continue
            shuffled = piece
            while shuffled == piece:
                shuffled = [piece[index] for index in rng.permutation(len(piece))]
            rows += [{"text": " ".join(piece), "label": 0}, {"text": " ".join(shuffled), "label": 1}]
    return rows


def word_tokenizer(texts: Sequence[str], vocab_size: int = 4096) -> "PreTrainedTokenizerFast":
    """A tokenizer whose tokens are the most frequent words and punctuation marks of these texts, in lower case.

    Nothing is trained, so every process makes the same tokenizer.

    >>> tokenizer = word_tokenizer(["Rank is a resource.", "Depth loses rank."])
    >>> tokenizer.convert_ids_to_tokens(tokenizer("Rank is lost.")["input_ids"])
    ['[CLS]', 'rank', 'is', '[UNK]', '.', '[SEP]']
    """
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    normalizer, splitter = normalizers.BertNormalizer(lowercase=True), pre_tokenizers.BertPreTokenizer()
    counts = Counter(word for text in texts for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(text)))
    commonest = sorted(counts, key=lambda word: (-counts[word], word))[: vocab_size - len(SPECIAL)]
    vocabulary = {word: index for index, word in enumerate([*SPECIAL, *commonest])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.normalizer, backend.pre_tokenizer = normalizer, splitter
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    return PreTrainedTokenizerFast(tokenizer_object=backend, **dict(zip(names, SPECIAL, strict=True)))
