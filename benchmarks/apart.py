"""A measurement in a process of its own, whose peak of memory and whose imports are its own."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from transformers.utils import logging


# imported once, by the process that all others are forked from: transformers alone takes seconds
PRELOADED = ["transformers.models.bert.modeling_bert", "hf_rankattn.probe.survey", "hf_rankattn.convert.checkpoint"]


def on_threads(threads: int, call: Callable[..., Any], arguments: tuple) -> Any:
    torch.set_num_threads(threads)
    logging.disable_progress_bar()
    return call(*arguments)


def apart(call: Callable[..., Any], *arguments: Any, threads: int = 1) -> Any:
    """What `call` returns in a fresh process; both must be importable, since they are sent there by name."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(on_threads, threads, call, arguments).result()
