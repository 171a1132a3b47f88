"""README, docs and notebook: code blocks run as written, links and commands exist, docstring examples hold, and the API
reference is made from the docstrings."""

import doctest
import importlib
import importlib.util
import json
import os
import pkgutil
import re
import shlex
import subprocess
import sys
import tomllib
from itertools import takewhile
from pathlib import Path

import pytest
import typer

import hf_rankattn
from hf_rankattn.papers import EXPERIMENTS
from hf_rankattn.theory import constructions
from rankattn_cli.main import app


ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "PYPI.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
# its shell blocks run too; blocks marked `sh` install something and do not run
WITH_COMMANDS = DOCS / "quickstart.md"


def named(paths: list[Path]) -> list:
    return [pytest.param(path, id=str(path.relative_to(ROOT))) for path in paths]


def blocks(page: Path, *languages: str) -> list[tuple[str, str]]:
    """Language and text of the fenced blocks of a page in these languages, in order."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [(language, text) for language, text in found if language in languages]


def run_command(text: str) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    subprocess.run(["bash", "-euo", "pipefail", "-c", text], env={**os.environ, "PATH": path}, check=True)


def run_blocks(found: list[tuple[str, str]], origin: Path, capsys) -> None:
    """Run blocks in order, in one namespace and the current folder; `print(...)  # text` has to print that text."""
    namespace: dict = {"__name__": "page"}
    promised = []
    for language, text in found:
        if language == "bash":
            run_command(text)
        else:
            promised += re.findall(r"^print\(.*\)  # (.*)$", text, flags=re.MULTILINE)
            exec(compile(text, str(origin), "exec"), namespace)
    printed = capsys.readouterr().out.splitlines()
    assert not [text for text in promised if text not in printed], printed


@pytest.mark.parametrize("page", named([page for page in PAGES if page != WITH_COMMANDS]))
def test_code_blocks_run_and_print_what_they_say(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run_blocks(blocks(page, "python"), page, capsys)


@pytest.mark.slow
def test_quickstart_runs_from_command_to_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run_blocks(blocks(WITH_COMMANDS, "python", "bash"), WITH_COMMANDS, capsys)


@pytest.mark.parametrize("notebook", named(NOTEBOOKS))
def test_notebook_prints_what_is_stored_in_it(notebook, tmp_path, monkeypatch, capsys):
    text = notebook.read_text()
    assert len(text) < 400_000 and not re.search(r"/(?:home|root|Users|site-packages)/", text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    pyplot.close("all")
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    namespace: dict = {"__name__": "notebook"}
    for cell in cells:
        figures = len(pyplot.get_fignums())
        exec(compile("".join(cell["source"]), str(notebook), "exec"), namespace)
        streams = [output for output in cell["outputs"] if output["output_type"] == "stream"]
        assert all(output["name"] == "stdout" for output in streams)
        assert capsys.readouterr().out == "".join(text for output in streams for text in output["text"])
        pictures = [output for output in cell["outputs"] if "image/png" in output.get("data", {})]
        assert len(pictures) == len(pyplot.get_fignums()) - figures
        assert len(pictures) + len(streams) == len(cell["outputs"])
    assert len(pyplot.get_fignums()) == 6
    pyplot.close("all")


def links(page: Path) -> list[str]:
    return [link for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()) if not link.startswith("http")]


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes from the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", named(PAGES))
def test_relative_links_exist(page):
    assert not [link for link in links(page) if not (page.parent / link).exists()]
    for target, anchor in re.findall(r"\]\(([\w./-]*\.md)?#([^)]*)\)", page.read_text()):
        assert anchor in anchors(page.parent / target if target else page), (target, anchor)


GUIDES = [DOCS / f"{name}.md" for name in ("quickstart", "measure", "convert", "limit", "paths", "theory", "gotchas")]
GUIDES += [DOCS / "paper-notes.md", DOCS / "paper_index.md", ROOT / "README.md"]
DEFINED = r"rank collapse|effective rank|stable rank|numerical rank|energy|residual|logits' rank"


@pytest.mark.parametrize("page", named(GUIDES))
def test_the_glossary_is_linked_where_its_words_are_first_used(page):
    text = page.read_text()
    first_use = re.search(DEFINED, text, flags=re.IGNORECASE)
    assert first_use, "the page uses no word of the glossary: take it off the list"
    end_of_paragraph = text.find("\n\n", first_use.end())
    assert "glossary.md" in text[:end_of_paragraph]


def test_what_a_package_index_shows_has_no_relative_links():
    readme = ROOT / tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["readme"]
    text = readme.read_text()
    targets = re.findall(r"\]\(([^)]*)\)|^\[[^\]]+\]:\s*(\S+)|(?:src|href)=[\"']([^\"']*)", text, flags=re.MULTILINE)
    targets = ["".join(found) for found in targets]
    assert targets and all(target.startswith("https://") for target in targets), targets
    # it names files of the source distribution instead
    named = re.findall(r"`((?:docs|examples)/[\w./]+)`", text)
    assert named and all((ROOT / name).exists() for name in named)


def test_the_index_links_to_every_page_and_every_page_to_the_next():
    pages = list(DOCS.glob("*.md"))
    assert not {page.name for page in pages} - {"README.md"} - set(links(DOCS / "README.md"))
    for page in pages:
        if page.name not in ("README.md", "paper-notes.md", "scaling.md"):
            last = page.read_text().rstrip().splitlines()[-1]
            assert last.startswith("Next: [") and "(README.md)" in last, page.name


def commands(page: Path) -> list[list[str]]:
    """The commands of this project that a page shows, in blocks and in running text."""
    shown = [line for _, text in blocks(page, "bash", "sh", "") for line in text.replace("\\\n", " ").splitlines()]
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    shown += re.findall(r"`((?:rankattn|make|python|torchrun) [^`]*)`", prose)
    ours = [line.strip() for line in shown if re.match(r"\s*(rankattn|make|python|torchrun) ", line)]
    return [shlex.split(line, comments=True) for line in ours]


def check_rankattn(words: list[str]) -> None:
    if not words:  # `rankattn` by itself, which prints its help
        return
    known = typer.main.get_command(app).commands
    assert words[0] in known, words
    options = {name for parameter in known[words[0]].params for name in (*parameter.opts, "--help")}
    assert not [word for word in words[1:] if word.startswith("--") and word.split("=")[0] not in options], words
    if words[0] == "reproduce" and len(words) > 1 and re.fullmatch(r"[a-z-]+", words[1]) and words[1][0] != "-":
        assert words[1] in {*EXPERIMENTS, "all"}, words


def check_script(words: list[str]) -> None:
    script = ROOT / words[0]
    training = Path(hf_rankattn.__file__).parent / "training"
    known = script.read_text() + "".join(path.read_text() for path in training.glob("*.py"))
    options = [word[2:].split("=")[0] for word in words[1:] if word.startswith("--")]
    assert not [option for option in options if not re.search(rf"\b{option}\b", known)], words


@pytest.mark.parametrize("page", named(PAGES))
def test_commands_and_their_options_exist(page):
    """Other tests check what commands do; this one checks that a reader can type them."""
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    for program, *words in commands(page):
        if program == "torchrun":
            launched = list(takewhile(lambda word: not word.endswith(".py") and word != "-m", words))
            words = words[len(launched) :]
        if program == "rankattn":
            check_rankattn(words)
        elif program == "make":
            assert words[0] in targets, words
        elif words[:2] == ["-m", "hf_rankattn"]:
            check_rankattn(words[2:])
        elif words[:2] == ["-m", "benchmarks"]:
            assert (ROOT / f"benchmarks/{words[-1]}.py").exists() or "--only" not in words, words
        elif words and words[0].endswith(".py"):
            check_script(words)


def modules() -> list[str]:
    found = pkgutil.walk_packages(hf_rankattn.__path__, "hf_rankattn.")
    return sorted(module.name for module in found if not module.name.endswith("__main__"))


class FencedParser(doctest.DocTestParser):
    """Ignores the fence after an example in the style of transformers, which is not expected output."""

    def parse(self, string, name="<string>"):
        return super().parse(re.sub(r"^\s*```.*$", "", string, flags=re.MULTILINE), name)


@pytest.mark.parametrize("name", modules())
def test_docstring_examples(name):
    module = importlib.import_module(name)
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for test in doctest.DocTestFinder(parser=FencedParser()).find(module, name):
        runner.run(test)
    assert runner.summarize().failed == 0


@pytest.fixture(scope="module")
def build_api():
    spec = importlib.util.spec_from_file_location("build_api", DOCS / "build_api.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_api_page_is_made_from_the_docstrings(build_api):
    assert (DOCS / "api.md").read_text() == build_api.page(), "run python docs/build_api.py"


def test_public_names_have_docstrings_of_their_own(build_api):
    public = {**build_api.public(hf_rankattn), **build_api.public(hf_rankattn.theory)}
    assert len(public) > 80
    assert not [name for name, thing in public.items() if not build_api.summary(thing)]


def test_names_on_the_pages_exist():
    for page in PAGES:
        text = page.read_text()
        for name in re.findall(r"`((?:Rank(?:Bert|Albert|XLNet|Encoder)\w+))", text):
            assert hasattr(hf_rankattn, name), (page.name, name)
        for name in re.findall(r"`theory\.(\w+)", text):
            assert hasattr(hf_rankattn.theory, name), (page.name, name)
        for name in re.findall(r"`constructions\.(?!py)(\w+)", text):
            assert hasattr(constructions, name), (page.name, name)


def test_paper_index_names_every_experiment():
    text = (DOCS / "paper_index.md").read_text()
    assert not [name for name in EXPERIMENTS if f"`{name}" not in text]
