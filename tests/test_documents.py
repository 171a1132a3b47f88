"""README, docs and notebook: code blocks run as written, links and commands exist, docstring examples hold, the pages become a
site, and every public name is on an API page."""

import doctest
import importlib
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
from types import FunctionType, ModuleType

import pytest
import typer
import yaml

import hf_rankattn
from hf_rankattn import papers, tasks, theory
from hf_rankattn.papers import EXPERIMENTS
from hf_rankattn.theory import constructions
from rankattn_cli.main import app


ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "PYPI.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
# their shell blocks run too; blocks marked `sh` install something or take long, and do not run
TUTORIALS = sorted((DOCS / "tutorials").glob("*.md"))


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
            promised += re.findall(r"^ *print\(.*\)  # (.*)$", text, flags=re.MULTILINE)
            exec(compile(text, str(origin), "exec"), namespace)
    printed = capsys.readouterr().out.splitlines()
    assert not [text for text in promised if text not in printed], printed


@pytest.mark.parametrize("page", named([page for page in PAGES if page not in TUTORIALS]))
def test_code_blocks_run_and_print_what_they_say(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run_blocks(blocks(page, "python"), page, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("page", named(TUTORIALS))
def test_tutorials_run_from_command_to_command(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("examples").symlink_to(ROOT / "examples")  # some commands are given in the folder of the repository
    run_blocks(blocks(page, "python", "bash"), page, capsys)


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


GUIDES = [DOCS / f"{name}.md" for name in ("measure", "convert", "limit", "paths", "theory", "gotchas", "README")]
GUIDES += [DOCS / "tutorials" / f"{name}.md" for name in ("engineer", "student")]
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
    pages = sorted(DOCS.rglob("*.md"))
    reached = {(folder / link).resolve() for folder in (DOCS, DOCS / "api") for link in links(folder / "README.md")}
    assert not {page.resolve() for page in pages} - {DOCS / "README.md"} - reached
    for page in pages:
        if page.name not in ("paper-notes.md", "scaling.md") and page != DOCS / "README.md":
            last = page.read_text().rstrip().splitlines()[-1]
            assert last.startswith("Next: [") and "README.md)" in last, page.name


def test_every_figure_is_in_the_gallery_with_a_command():
    parts = re.split(r"^## ", (DOCS / "gallery.md").read_text(), flags=re.MULTILINE)[1:]
    figures = [re.findall(r"!\[[^\]]+\]\(images/([\w.-]+)\)", part) for part in parts]
    assert sorted(sum(figures, [])) == sorted(path.name for path in (DOCS / "images").iterdir())
    for part in parts:
        assert re.search(r"^```(ba)?sh\n(rankattn|make|python) ", part, flags=re.MULTILINE), part[:40]


def test_the_site_is_built_without_a_warning_and_requests_nothing(tmp_path):
    """Strict mode finds links, anchors, references and pages that are missing."""
    pytest.importorskip("mkdocs", reason="make install adds the extra `docs`")
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > len(list(DOCS.rglob("*.md")))
    for page in pages:
        loaded = re.findall(
            r"<(?:script|img|iframe)[^>]* src=\"?([^\" >]+)|<link[^>]* href=\"?([^\" >]+)", page.read_text()
        )
        assert not [link for link in map("".join, loaded) if link.startswith(("http", "//"))], page.name
    index = json.loads((tmp_path / "site/search/search_index.json").read_text())
    found = {re.split(r"[#.]", entry["location"])[-1] for entry in index["docs"]}
    assert not set(hf_rankattn.__all__) - {"__version__", "theory"} - found
    assert "alternating least squares from a closed form" in (tmp_path / "site/api/convert.html").read_text()
    assert "the largest rank its bilinear form can have" in (tmp_path / "site/api/models.html").read_text()
    assert (tmp_path / "site/source/examples/run_points.py.html").exists()


def entries_of(navigation: list | dict | str) -> list[str]:
    if isinstance(navigation, str):
        return [navigation]
    inside = navigation.values() if isinstance(navigation, dict) else navigation
    return [entry for part in inside for entry in entries_of(part)]


def test_the_navigation_of_the_site_has_every_page():
    navigation = entries_of(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert sorted(navigation) == sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))


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
    options = {name for one in known[words[0]].params for name in (*one.opts, *one.secondary_opts, "--help")}
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


def public(module) -> dict[str, object]:
    """The public classes and functions of a module, wherever in the package they are defined."""
    found = {name: getattr(module, name) for name in dir(module) if not name.startswith("_")}
    return {
        name: thing
        for name, thing in found.items()
        if isinstance(thing, type | FunctionType) and thing.__module__.startswith("hf_rankattn")
    }


def api_entries() -> dict[str, object]:
    """Identifier -> what it names, for every entry of the API pages; an entry of a module stands for its classes."""
    found: dict[str, object] = {}
    for page in sorted((DOCS / "api").glob("*.md")):
        for identifier in re.findall(r"^::: (\S+)$", page.read_text(), flags=re.MULTILINE):
            module, name = identifier.rsplit(".", 1)
            thing = getattr(importlib.import_module(module), name)
            if isinstance(thing, ModuleType):
                found |= {inside: value for inside, value in public(thing).items() if inside in hf_rankattn.__all__}
            else:
                found[identifier] = thing
    return found


def test_every_public_name_is_on_an_api_page_and_has_a_docstring_of_its_own():
    on_pages = api_entries()
    own = {
        name: vars(thing).get("__doc__") if isinstance(thing, type) else thing.__doc__
        for name, thing in on_pages.items()
    }
    assert not [name for name, doc in own.items() if not (doc or "").strip()]
    for module in (hf_rankattn, theory, tasks, papers):
        missing = {name for name, thing in public(module).items() if thing not in on_pages.values()}
        assert not missing, (module.__name__, missing)
    defined = {name for name, thing in public(constructions).items() if thing.__module__ == constructions.__name__}
    names = {identifier.split(".")[-1] for identifier in on_pages}
    assert not defined - names - {"bare_model", "empty_model"}  # their raw material


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
