"""README and docs: every Python block runs as written, every link leads somewhere, every docstring example holds."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import hf_rankattn


ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_code_blocks_run_and_print_what_they_say(page, tmp_path, monkeypatch, capsys):
    """The blocks of a page run in order, in one namespace and an empty folder; `print(...)  # text` prints that text."""
    monkeypatch.chdir(tmp_path)
    namespace: dict = {"__name__": "page"}
    promised = []
    for code in blocks(page):
        promised += re.findall(r"^print\(.*\)  # (.*)$", code, flags=re.MULTILINE)
        exec(compile(code, str(page), "exec"), namespace)
    printed = capsys.readouterr().out.splitlines()
    assert not [text for text in promised if text not in printed], printed


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_relative_links_exist(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def modules() -> list[str]:
    found = pkgutil.walk_packages(hf_rankattn.__path__, "hf_rankattn.")
    return sorted(module.name for module in found if not module.name.endswith("__main__"))


class FencedParser(doctest.DocTestParser):
    """Docstrings in the style of transformers close their examples with a fence, which is not expected output."""

    def parse(self, string, name="<string>"):
        return super().parse(re.sub(r"^\s*```.*$", "", string, flags=re.MULTILINE), name)


@pytest.mark.parametrize("name", modules())
def test_docstring_examples(name):
    module = importlib.import_module(name)
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for test in doctest.DocTestFinder(parser=FencedParser()).find(module, name):
        runner.run(test)
    assert runner.summarize().failed == 0


def test_pages_speak_of_nothing_that_is_absent():
    for page in PAGES:
        for name in re.findall(r"`((?:Rank(?:Bert|Albert|XLNet|Encoder)\w+))", page.read_text()):
            assert hasattr(hf_rankattn, name), (page.name, name)
