"""The facts about a machine that a bug report needs, without tokens, paths and host names."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from itertools import compress
from typing import Any

import psutil
import torch
from huggingface_hub import is_offline_mode
from transformers.utils import is_flash_attn_2_available

from .models import RankBertPreTrainedModel
from .version import __version__


PACKAGES = (
    "torch transformers tokenizers huggingface_hub datasets accelerate evaluate safetensors numpy pandas pyarrow "
    "matplotlib jinja2 typer rich peft scikit-learn submitit"
).split()
# switches and numbers only: HF_HOME is a path, and HF_ENDPOINT may name a company
SETTINGS = (
    "HF_HUB_OFFLINE TRANSFORMERS_OFFLINE HF_DATASETS_OFFLINE OMP_NUM_THREADS MKL_NUM_THREADS TOKENIZERS_PARALLELISM "
    "CUDA_VISIBLE_DEVICES PYTORCH_ENABLE_MPS_FALLBACK WORLD_SIZE NO_COLOR TERM"
).split()


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def accelerators() -> str:
    kind = torch.accelerator.current_accelerator()
    if kind is None:
        return "none"
    count = torch.accelerator.device_count()
    # not every kind of device has names
    name = getattr(torch.get_device_module(kind), "get_device_name", None)
    names = {name(index): None for index in range(count)} if name else {}
    return f"{count} x {kind.type}" + (f": {', '.join(names)}" if names else "")


def attention_backends() -> dict[str, Any]:
    model, names = RankBertPreTrainedModel, ("eager", "sdpa", "flash_attention", "flex_attention")
    supported = (True, model._supports_sdpa, model._supports_flash_attn, model._supports_flex_attn)
    return {
        "rank_models": ", ".join(compress(names, supported)),
        "flash_kernel_in_torch": torch.backends.cuda.is_flash_attention_available(),
        "flash_attn_2": is_flash_attn_2_available(),
    }


def describe_environment() -> dict[str, Any]:
    """Versions, machine, torch build, attention backends and settings, ready for JSON."""
    memory = psutil.virtual_memory()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "hf_rankattn": __version__,
        **{name: installed(name) for name in PACKAGES},
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "platform": platform.platform(),
        "cores": f"{usable} usable of {os.cpu_count()}",
        "threads": torch.get_num_threads(),
        "memory": f"{memory.available / 2**30:.1f} GiB free of {memory.total / 2**30:.1f}",
        "torch_build": {
            "cuda": torch.version.cuda or "none",
            "hip": torch.version.hip or "none",
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        },
        "accelerator": accelerators(),
        "attention": attention_backends(),
        "offline": is_offline_mode(),
        "settings": {name: os.environ[name] for name in SETTINGS if name in os.environ},
    }
