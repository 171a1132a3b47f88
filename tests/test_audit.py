"""The audit page: a row for every statement of the papers, from the table of a run and by nobody's hand."""

import re
import subprocess
import sys
from pathlib import Path

from hf_rankattn.papers import EXPERIMENTS
from hf_rankattn.papers.sweep.audit import STATEMENTS
from hf_rankattn.report.verdicts import VERDICTS, count_verdicts


ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "paper-notes.md"


def audit() -> str:
    return PAGE.read_text(encoding="utf-8").split("<!-- audit: begin -->")[1].split("<!-- audit: end -->")[0].strip()


def audit_rows() -> list[list[str]]:
    rows = [re.split(r"(?<!\\) \| ", line.strip("| ")) for line in audit().splitlines()[4:]]
    return [row for row in rows if not row[0].startswith("**")]


def test_every_statement_of_the_papers_has_a_row_with_a_verdict():
    rows = audit_rows()
    missing = {statement for paper in STATEMENTS.values() for statement in paper} - {row[0] for row in rows}
    assert not missing
    assert {row[5] for row in rows} == set(VERDICTS)


def test_the_page_counts_its_verdicts():
    rows = audit_rows()
    judged = [row[5] for row in rows if row[2] != "-"]
    more = f"{len(rows) - len(judged)} more rows are statements without an experiment"
    assert audit().splitlines()[0].startswith(f"{count_verdicts(judged)}. {more}")


def test_every_experiment_has_its_say_and_no_other():
    named = {row[2].strip("`") for row in audit_rows()} - {"-"}
    assert named == set(EXPERIMENTS)


# what a verdict needed: "Required: below 0.02." or "Error of ...: 0.1 to 0.3 (95% interval, 3 seeds), required at most 0."
REQUIREMENT = re.compile(r"(Required\b|[^.:]*: \S+ to \S+ \(95% interval, \d+ seeds\), required ).*?\.(?= |$)")


def test_verdicts_name_their_requirement_and_others_than_yes_their_reason():
    for row in audit_rows():
        verdict, why = row[5:7]
        assert verdict == "not testable" or REQUIREMENT.search(why), row
        assert verdict in ("yes", "undecided") or len(REQUIREMENT.sub("", why).strip()) > 20, row
        assert verdict != "undecided" or "95% interval" in why, row


def test_the_page_is_made_from_the_table_of_a_run(tmp_path):
    for name in ("build_audit.py", "paper-notes.md"):
        (tmp_path / name).write_text((ROOT / "docs" / name).read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "claims.md").write_text("| a |\n|---|\n| b |\n", encoding="utf-8")
    command = [sys.executable, str(tmp_path / "build_audit.py")]
    subprocess.run([*command, str(tmp_path / "claims.md")], check=True)
    page = PAGE.read_text(encoding="utf-8")
    before, after = (page.split(mark) for mark in ("<!-- audit: begin -->", "<!-- audit: end -->"))
    made = (tmp_path / "paper-notes.md").read_text(encoding="utf-8")
    assert made == f"{before[0]}<!-- audit: begin -->\n| a |\n|---|\n| b |\n<!-- audit: end -->{after[1]}"
    refused = subprocess.run([*command, str(tmp_path / "absent.md")], capture_output=True, text=True)
    assert refused.returncode == 2 and "run `rankattn reproduce all" in refused.stderr
