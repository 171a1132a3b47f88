"""A small task that a model can learn without pretraining on text: find the value of a key."""

import numpy as np


KEYS, VALUES, PAIRS = 32, 4, 8


def key_value_rows(count: int, seed: int, split: str = "train") -> list[dict[str, str | int]]:
    """Lines `key5 key9is1 key5is3 ...`: a key, and then eight keys with a value each; the class is the value of the first key.

    A head has to match keys to find it, which needs query-key rank. Splits and seeds are drawn independently.

    >>> for row in key_value_rows(2, seed=0):
    ...     print(row["text"], "->", row["label"])
    key30 key23is0 key13is1 key12is2 key0is1 key30is3 key2is2 key10is1 key1is0 -> 3
    key3 key9is2 key3is2 key19is2 key30is1 key25is1 key1is3 key18is3 key6is1 -> 2
    """
    rng = np.random.default_rng([seed, *split.encode()])
    keys = np.argsort(rng.random((count, KEYS)), axis=1)[:, :PAIRS]
    values = rng.integers(VALUES, size=(count, PAIRS))
    asked = rng.integers(PAIRS, size=count)
    rows: list[dict[str, str | int]] = []
    for row_keys, row_values, place in zip(keys, values, asked, strict=True):
        pairs = [f"key{key}is{value}" for key, value in zip(row_keys, row_values, strict=True)]
        rows.append({"text": " ".join([f"key{row_keys[place]}", *pairs]), "label": int(row_values[place])})
    return rows
