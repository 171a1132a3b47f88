"""README, docs and notebook: every block runs as written, every link and command leads somewhere, every docstring example
holds, and the API reference is that of the docstrings."""

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
from itertools import takewhile
from pathlib import Path

import pytest

import hf_rankattn


ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
# Its shell blocks run too, in a shell: the way of a new user, who begins with commands. Blocks marked `sh` install.
WITH_COMMANDS = DOCS / "quickstart.md"


def named(paths: list[Path]) -> list:
    return [pytest.param(path, id=str(path.relative_to(ROOT))) for path in paths]


def blocks(page: Path, *languages: str) -> list[tuple[str, str]]:
    """Language and text of the fenced blocks of a page in these languages, in order."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [(language, text) for language, text in found if language in languages]


def promises(code: str) -> list[str]:
    return re.findall(r"^print\(.*\)  # (.*)$", code, flags=re.MULTILINE)


def run_command(text: str) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    subprocess.run(["bash", "-euo", "pipefail", "-c", text], env={**os.environ, "PATH": path}, check=True)


def run_blocks(found: list[tuple[str, str]], origin: Path, capsys) -> None:
    """In order, in one namespace and the current folder; `print(...)  # text` has to print that text."""
    namespace: dict = {"__name__": "page"}
    promised = []
    for language, text in found:
        if language == "bash":
            run_command(text)
        else:
            promised += promises(text)
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
def test_notebook_runs_from_top_to_bottom(notebook, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    cells = json.loads(notebook.read_text())["cells"]
    assert not any(cell.get("outputs") for cell in cells), "store the notebook without outputs"
    code = [("python", "".join(cell["source"])) for cell in cells if cell["cell_type"] == "code"]
    assert len(code) > 3
    monkeypatch.setenv("MPLBACKEND", "agg")
    run_blocks(code, notebook, capsys)
    importlib.import_module("matplotlib.pyplot").close("all")


def links(page: Path) -> list[str]:
    return [link for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()) if not link.startswith("http")]


def anchors(page: Path) -> set[str]:
    """What GitHub makes of the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", named(PAGES))
def test_relative_links_exist(page):
    assert not [link for link in links(page) if not (page.parent / link).exists()]
    for target, anchor in re.findall(r"\]\(([\w./-]*\.md)?#([^)]*)\)", page.read_text()):
        assert anchor in anchors(page.parent / target if target else page), (target, anchor)


def test_index_leads_to_every_page_and_every_page_leads_on():
    pages = list(DOCS.glob("*.md"))
    assert not {page.name for page in pages} - {"README.md"} - set(links(DOCS / "README.md"))
    for page in pages:
        if page.name not in ("README.md", "paper-notes.md", "scaling.md"):
            last = page.read_text().rstrip().splitlines()[-1]
            assert last.startswith("Next: [") and "(README.md)" in last, page.name


def commands(page: Path) -> list[list[str]]:
    """The commands of this project that a page shows, in blocks and in running text."""
    shown = [line for _, text in blocks(page, "bash", "sh", "") for line in text.replace("\\\n", " ").splitlines()]
    shown += re.findall(
        r"`((?:rankattn|make|python|torchrun) [^`]*)`", re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    )
    found = []
    for line in shown:
        if re.match(r"(rankattn|make|python|torchrun) ", line.strip()):
            found.append(shlex.split(line.strip(), comments=True))
    return found


def check_rankattn(words: list[str]) -> None:
    import typer

    from hf_rankattn.cli import app
    from hf_rankattn.experiments import EXPERIMENTS

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
    """Not what they do, which other tests see to, but that a reader can type them."""
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


@pytest.fixture(scope="module")
def build_api():
    spec = importlib.util.spec_from_file_location("build_api", DOCS / "build_api.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_api_page_is_that_of_the_docstrings(build_api):
    assert (DOCS / "api.md").read_text() == build_api.page(), "run python docs/build_api.py"


def test_public_names_have_docstrings_of_their_own(build_api):
    public = {**build_api.public(hf_rankattn), **build_api.public(hf_rankattn.theory)}
    assert len(public) > 80
    assert not [name for name, thing in public.items() if not build_api.summary(thing)]


def test_pages_speak_of_nothing_that_is_absent():
    from hf_rankattn.theory import constructions

    for page in PAGES:
        text = page.read_text()
        for name in re.findall(r"`((?:Rank(?:Bert|Albert|XLNet|Encoder)\w+))", text):
            assert hasattr(hf_rankattn, name), (page.name, name)
        for name in re.findall(r"`theory\.(\w+)", text):
            assert hasattr(hf_rankattn.theory, name), (page.name, name)
        for name in re.findall(r"`constructions\.(?!py)(\w+)", text):
            assert hasattr(constructions, name), (page.name, name)


def test_paper_index_names_every_experiment():
    from hf_rankattn.experiments import EXPERIMENTS

    text = (DOCS / "paper_index.md").read_text()
    assert not [name for name in EXPERIMENTS if f"`{name}" not in text]
