"""The rules of the house: copies that stay word for word, rooms that do not reach into each other, a light import."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import hf_rankattn


ROOT = Path(hf_rankattn.__file__).parent
FOLDERS = ("rank_bert", "rank_albert", "rank_xlnet", "rank_encoder")


@pytest.mark.parametrize("name", ["heads.py", "building.py", "stock_fields.py"])
def test_the_model_folders_share_these_files_byte_for_byte(name):
    """Exported source cannot import across folders, so what is common is copied (`make style`); this keeps it one."""
    assert len({(ROOT / "models" / folder / name).read_bytes() for folder in FOLDERS}) == 1


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("." * node.level + (node.module or "") if node.level else node.module.split(".")[0])
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_model_files_import_only_what_an_export_can_carry(folder):
    allowed = {"torch", "transformers", "huggingface_hub", "safetensors", *sys.stdlib_module_names}
    for path in (ROOT / "models" / folder).glob("[!_]*.py"):
        siblings = {f".{sibling.stem}" for sibling in path.parent.glob("[!_]*.py")}
        assert imports_of(path) <= allowed | siblings, path.name


def test_theory_needs_nobody_but_its_constructions_the_models():
    """The ground floor: closed forms are numpy and arithmetic, whatever happens to torch."""
    for path in (ROOT / "theory").glob("*.py"):
        siblings = {".", *(f".{sibling.stem}" for sibling in path.parent.glob("[!_]*.py"))}
        more = {"torch", "..models"} if path.name == "constructions.py" else set()
        assert imports_of(path) <= {"numpy", *sys.stdlib_module_names} | siblings | more, path.name


def test_importing_the_package_loads_nothing_heavy():
    code = "import sys, hf_rankattn; print([m for m in ('datasets', 'evaluate', 'matplotlib', 'pandas', 'scipy', 'accelerate', 'sklearn', 'hf_rankattn.theory') if m in sys.modules])"
    baseline = code.replace("import sys, hf_rankattn", "import sys, transformers.models.bert.modeling_bert")
    loaded = [
        ast.literal_eval(subprocess.run([sys.executable, "-c", c], capture_output=True, text=True, check=True).stdout)
        for c in (code, baseline)
    ]
    assert set(loaded[0]) <= set(loaded[1])


def test_the_version_is_the_installed_one():
    from importlib.metadata import version

    assert hf_rankattn.__version__ == version("hf_rankattn")
