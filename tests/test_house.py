"""Dependencies: what is imported is declared, and `import hf_rankattn` is light. `make quality` checks imports between rooms."""

import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions, version
from pathlib import Path

import yaml

import hf_rankattn


ROOT = Path(hf_rankattn.__file__).parent


def other_packages(path: Path) -> set[str]:
    """The packages that a file imports, without the standard library and this project."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module.split(".")[0])
    return found - set(sys.stdlib_module_names) - {"hf_rankattn", "rankattn_cli"}


def test_what_is_imported_is_declared():
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    declared = [*project["dependencies"], *extras["slurm"], *extras["experiments"], *extras["space"]]
    # an example for users of that library, which the tests run
    declared += [line for line in extras["test"] if line.startswith("sentence-transformers")]
    names = {re.split(r"[^\w.-]", line)[0].lower().replace("_", "-") for line in declared}
    distributions = packages_distributions()
    for folder in (ROOT, ROOT.parent / "rankattn_cli", Path(__file__).parent.parent / "examples"):
        for path in folder.rglob("*.py"):
            for module in other_packages(path):
                owners = {name.lower().replace("_", "-") for name in distributions.get(module, [module])}
                assert owners & names, f"{path.name} imports {module}, which pyproject.toml does not require"


def test_exported_source_and_theory_need_few_packages():
    """Exported model files are loaded without this package; closed forms must not depend on torch."""
    allowed = {"models": {"torch", "transformers", "huggingface_hub", "safetensors"}, "theory": {"numpy", "scipy"}}
    for room, packages in allowed.items():
        for path in (ROOT / room).rglob("*.py"):
            assert path.name == "constructions.py" or other_packages(path) <= packages, path.name


def test_all_names_every_public_model_and_nothing_that_is_missing():
    models = {name for name in vars(hf_rankattn.models) if name.startswith("Rank")}
    assert models <= set(hf_rankattn.__all__) <= set(dir(hf_rankattn))
    assert all(hasattr(hf_rankattn, name) for name in hf_rankattn.__all__)


def test_importing_the_package_loads_nothing_heavy():
    heavy = "datasets evaluate matplotlib pandas scipy accelerate sklearn hf_rankattn.theory"
    code = f"import sys, {{}}; print([name for name in {heavy.split()} if name in sys.modules])"
    ours, stock = (
        subprocess.run([sys.executable, "-c", code.format(module)], capture_output=True, text=True, check=True).stdout
        for module in ("hf_rankattn", "transformers.models.bert.modeling_bert")
    )
    assert set(ast.literal_eval(ours)) <= set(ast.literal_eval(stock))


def test_the_version_is_the_same_everywhere():
    assert hf_rankattn.__version__ == version("hf_rankattn")
    citation = yaml.safe_load((Path(__file__).parent.parent / "CITATION.cff").read_text())
    changes = (Path(__file__).parent.parent / "CHANGELOG.md").read_text()
    assert citation["version"] == hf_rankattn.__version__
    assert f"## [{citation['version']}] - {citation['date-released']}\n" in changes
