"""The command line, beside the package and not inside it.

`import hf_rankattn` registers models, which takes five seconds of CPU for torch and transformers. `--help` and completion
need neither, so the commands are in a package of their own and import `hf_rankattn` inside their functions.
"""
