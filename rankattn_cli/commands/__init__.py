"""One file per command: it parses, calls the library and prints.

`some_name.py` holds the command `rankattn some-name`: a function `some_name`, whose docstring is the help text, and an
`EXAMPLE`. No list of commands exists elsewhere. Imports of `hf_rankattn` are inside the function.
"""
