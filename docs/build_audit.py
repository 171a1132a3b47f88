"""Put the table with which `rankattn reproduce all` ended into docs/paper-notes.md.

python docs/build_audit.py runs/claims-laptop.md
"""

import argparse
from pathlib import Path


PAGE = Path(__file__).with_name("paper-notes.md")
BEGIN, END = "<!-- audit: begin -->", "<!-- audit: end -->"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path, help="the file claims-SCALE.md of a run of all experiments")
    arguments = parser.parse_args()
    if not arguments.table.is_file():
        parser.error(f"{arguments.table} is no file: run `rankattn reproduce all --scale laptop --out runs` first.")
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    table = arguments.table.read_text(encoding="utf-8").strip()
    PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
