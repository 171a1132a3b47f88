"""Run the common model tests of transformers on its own classes and on ours, and compare.

    python tests/upstream/run.py [--family bert] [--variant rank_small] [-k save_load] [--json report.json]

The tests come from the source distribution of the installed transformers version, downloaded with pip (or from
``--sdist``: the archive, a folder with it, an unpacked copy, or a checkout of the same version). They are unpacked to
a temporary folder; modules which they import but the sdist lacks get stand-ins there. A test which passes for the
stock classes must pass for ours, unless ``cases.NOT_APPLICABLE`` says why it cannot.

Exit code: 0 if so, 1 if not, 2 for bad input. Needs pytest and parameterized.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any


sys.dont_write_bytecode = True  # leave no __pycache__ behind, here and in the child processes

import cases  # noqa: E402


HERE = Path(__file__).resolve().parent
Outcomes = dict[str, dict[str, str]]  # test name -> {"outcome": ..., "message": ...}

# Modules which the common tests import and the sdist lacks. The keys of config_common_kwargs are the fields which
# every configuration inherits; ConfigTester checks that each can be set.
STAND_INS = {
    "exporters/test_export.py": "class ExportTesterMixin:\n    pass\n",
    "generation/test_utils.py": "class GenerationTesterMixin:\n    pass\n",
    "utils/test_configuration_utils.py": """config_common_kwargs = {
    "return_dict": False,
    "output_hidden_states": True,
    "output_attentions": True,
    "dtype": "float16",
    "chunk_size_feed_forward": 2,
    "architectures": ["SomeModel"],
    "id2label": {0: "no", 1: "yes"},
    "label2id": {"no": 0, "yes": 1},
    "problem_type": "regression",
}
""",
}
# Of a checkout only these folders matter; all else in tests/ would need packages which we do not install.
FOLDERS = ("", "generation", "exporters")

# A test with subtests reports several times, and a skip inside a subtest leaves the test itself "passed": the worst
# outcome counts.
CONFTEST = """import json, os
RANK = {"passed": 0, "skipped": 1, "failed": 2}
RESULTS = {}

def pytest_runtest_logreport(report):
    name = report.nodeid.rpartition("::")[2]
    old = RESULTS.setdefault(name, {"outcome": "passed", "message": ""})
    if RANK[report.outcome] > RANK[old["outcome"]]:
        crash = getattr(report.longrepr, "reprcrash", None)
        skip = report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr
        text = crash.message if crash else str(skip)
        RESULTS[name] = {"outcome": report.outcome, "message": text[:600]}

def pytest_sessionfinish():
    with open(os.environ["UPSTREAM_REPORT"], "w") as file:
        json.dump(RESULTS, file)
"""
TEST_FILE = "from .cases import build\n\nglobals().update(build({family!r}, {variant!r}))\n"


class BadInput(Exception):
    """Something the caller must change; shown as one line, exit code 2."""


def download(version: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "transformers"]
    done = subprocess.run([*command, "--dest", folder, f"transformers=={version}"], capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise BadInput(f"cannot download the sdist of transformers {version} ({last}); give one with --sdist")
    return next(folder.glob("transformers-*.tar.gz"))


def unpack(source: Path, version: str, work: Path) -> Path:
    """Bring the common tests to work/tests and complete them; returns that folder."""
    tests = work / "tests"
    if source.is_dir() and (archives := sorted(source.glob(f"transformers-{version}.tar.gz"))):
        source = archives[0]
    if source.is_file():
        try:
            with tarfile.open(source) as archive:
                archive.extractall(work / "sdist", filter="data")
        except (tarfile.TarError, OSError) as error:
            raise BadInput(f"cannot unpack {source}: {str(error).splitlines()[0]}") from error
        source = next((work / "sdist").iterdir())
    if not (source / "tests" / "test_modeling_common.py").is_file():
        raise BadInput(f"no sdist of transformers {version} in {source}: tests/test_modeling_common.py is missing")
    init = source / "src" / "transformers" / "__init__.py"
    found = re.search(r'^__version__ = "(.+)"', init.read_text() if init.is_file() else "", re.MULTILINE)
    if not found or found[1] != version:
        has = found[1] if found else "an unknown version"
        raise BadInput(f"transformers {version} is installed, but {source.name} has {has}")
    for folder in FOLDERS:
        (tests / folder).mkdir(parents=True, exist_ok=True)
        for file in (source / "tests" / folder).glob("*.py"):
            shutil.copy(file, tests / folder)
    shutil.rmtree(work / "sdist", ignore_errors=True)
    return tests


def complete(tests: Path) -> list[str]:
    """Add stand-ins, our test files and the reporter; returns the names of the stand-ins."""
    added = [name for name in STAND_INS if not (tests / name).exists()]
    for name in added:
        (tests / name).parent.mkdir(exist_ok=True)
        (tests / name).write_text(STAND_INS[name])
    for folder in [tests, *(file.parent for file in tests.glob("*/*.py"))]:
        (folder / "__init__.py").touch()
    shutil.copy(HERE / "cases.py", tests)
    (tests / "conftest.py").write_text(CONFTEST)
    (tests.parent / "pytest.ini").write_text("[pytest]\n")  # keeps pytest from looking for a configuration above
    return added


def run_one(tests: Path, family: str, variant: str, keyword: str) -> Outcomes:
    """One process for each pair: what our package changes on import must not reach the stock classes."""
    test_file = tests / f"test_{family}_{variant}.py"
    test_file.write_text(TEST_FILE.format(family=family, variant=variant))
    report, scratch = test_file.with_suffix(".json"), test_file.with_suffix(".tmp")
    scratch.mkdir(exist_ok=True)
    report.unlink(missing_ok=True)
    env = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(scratch),
        "TMPDIR": str(scratch),
        "PYTHONHASHSEED": str(cases.SEED),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": os.pathsep.join([str(tests.parent), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]),
        "UPSTREAM_REPORT": str(report),
    }
    env.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors: more threads only cost time
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", test_file.name]
    command += ["-k", keyword] if keyword else []
    start = time.perf_counter()
    done = subprocess.run(command, cwd=tests, env=env, capture_output=True, text=True)
    test_file.with_suffix(".log").write_text(done.stdout + done.stderr)
    results: Outcomes = json.loads(report.read_text()) if report.exists() else {}
    if done.returncode not in (0, 1, 5):  # 5: no test matched -k
        lines = [line for line in done.stdout.splitlines() if line.startswith("E ")] or done.stderr.splitlines()
        results["(collection)"] = {"outcome": "failed", "message": " ".join(lines[-1:])}
    print(f"{family:>12} {variant:<10} {time.perf_counter() - start:6.1f} s", file=sys.stderr, flush=True)
    return results


def compare(results: dict[tuple[str, str], Outcomes]) -> list[dict[str, Any]]:
    """Every test of ours which does worse than its stock twin; without a twin, every failure."""
    worse = []
    for (family, variant), ours in results.items():
        stock = results.get((family, "stock"))
        if variant == "stock":
            continue
        expected = {name for name, one in (stock or {}).items() if one["outcome"] == "passed"} | {"(collection)"}
        for name in sorted({*expected, *ours} if stock is None else expected):
            missing = {"outcome": "passed" if name == "(collection)" else "missing", "message": ""}
            one = ours.get(name, missing)
            if one["outcome"] == "passed" or (stock is None and one["outcome"] == "skipped"):
                continue
            reason = cases.NOT_APPLICABLE.get((family, variant, name))
            worse.append({"family": family, "variant": variant, "test": name, **one, "not_applicable": reason})
    return worse


def show(results: dict[tuple[str, str], Outcomes], worse: list[dict[str, Any]]) -> None:
    print(f"{'family':<14}{'variant':<12}{'collected':>10}{'passed':>8}{'skipped':>9}{'failed':>8}")
    for (family, variant), outcomes in results.items():
        count = Counter(one["outcome"] for one in outcomes.values())
        row = f"{len(outcomes):>10}{count['passed']:>8}{count['skipped']:>9}{count['failed']:>8}"
        print(f"{family:<14}{variant:<12}{row}")
    for (family, variant), outcomes in results.items():
        for name in [name for name, one in outcomes.items() if variant == "stock" and one["outcome"] == "failed"]:
            print(f"fails for stock too, so not compared: {family} {name}")
        for name in [name for name, one in outcomes.items() if one["outcome"] == "failed" and variant != "stock"]:
            if results.get((family, "stock"), {}).get(name, {}).get("outcome") == "skipped":
                print(f"fails for ours but is skipped for stock, so not compared: {family} {variant} {name}")
    if all(variant == "stock" for _, variant in results):
        return
    heading = "Passed for stock but not for ours (without stock classes: failed):"
    print("\n" + (heading if worse else "All tests which pass for stock pass for ours."))
    for one in worse:
        note = f"not applicable: {one['not_applicable']}" if one["not_applicable"] else one["message"]
        print(f"  {one['family']} {one['variant']} {one['test']}: {one['outcome']}: {' '.join(note.split())[:200]}")
    for family, variant, name in cases.NOT_APPLICABLE:
        if results.get((family, variant), {}).get(name, {}).get("outcome") == "passed":
            print(f"  passes now, remove it from NOT_APPLICABLE: {family} {variant} {name}")


def arguments(argv: list[str] | None) -> argparse.Namespace:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sdist", type=Path, help="sdist of transformers: archive, its folder, or a checkout")
    parser.add_argument("--family", action="append", choices=cases.FAMILIES, help="may be repeated; default: all")
    parser.add_argument("--variant", action="append", choices=cases.VARIANTS, help="beside stock; may be repeated")
    parser.add_argument("-k", default="", metavar="EXPRESSION", help="passed to pytest")
    parser.add_argument("--jobs", type=int, default=1, help="how many families and variants to test at once")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all outcomes and messages")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="work in this folder and keep it")
    return parser.parse_args(argv)


def run(args: argparse.Namespace, work: Path) -> int:
    version = importlib.metadata.version("transformers")
    for package in ("pytest", "parameterized"):
        if importlib.util.find_spec(package) is None:
            raise BadInput(f"the tests of transformers need {package}; install it")
    if args.sdist and not args.sdist.exists():
        raise BadInput(f"{args.sdist} does not exist")
    tests = unpack(args.sdist or download(version, work), version, work)
    stand_ins = complete(tests)
    wanted = {"stock", *(args.variant or cases.VARIANTS)}
    families = {name: cases.FAMILIES[name] for name in args.family or cases.FAMILIES}
    pairs = [(name, variant) for name, family in families.items() for variant in family.variants if variant in wanted]
    with ThreadPoolExecutor(max(1, args.jobs)) as pool:
        results = dict(zip(pairs, pool.map(lambda pair: run_one(tests, *pair, args.k), pairs), strict=True))
    if not any(results.values()):
        raise BadInput("no test matches the given family, variant and -k")
    worse = compare(results)
    show(results, worse)
    if args.json:
        nested = {f"{family} {variant}": outcomes for (family, variant), outcomes in results.items()}
        document = {"transformers": version, "stand_ins": stand_ins, "results": nested, "worse_than_stock": worse}
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    return int(any(one["not_applicable"] is None for one in worse))


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    try:
        if args.keep:
            args.keep.mkdir(parents=True, exist_ok=True)
            return run(args, args.keep.resolve())
        with tempfile.TemporaryDirectory(prefix="upstream-tests-") as work:
            return run(args, Path(work))
    except BadInput as error:
        print(f"run.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
