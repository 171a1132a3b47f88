"""Run training scripts one after the other in the processes that torchrun started. Run by test_run_scripts.py."""

import json
import runpy
import sys

from hf_rankattn.training import processes


def main():
    # the group serves all of them: starting Python for each would take most of the time
    leave = processes.leave_processes
    processes.leave_processes = lambda: None
    for name, *argv in json.loads(sys.argv[1]):
        sys.argv = [name, *argv]
        try:
            runpy.run_path(name, run_name="__main__")
        except SystemExit as stop:
            print(f"exit code {stop.code}", flush=True)
    leave()


if __name__ == "__main__":
    main()
