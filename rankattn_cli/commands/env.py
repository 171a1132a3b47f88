from ..console import Json, print_json, say


EXAMPLE = "rankattn env --json"


def env(as_json: bool = Json) -> None:
    """Print the environment for a bug report. Versions, machine and settings, without paths and tokens."""
    from hf_rankattn.environment import describe_environment

    report = describe_environment()
    if as_json:
        print_json(report)
        return
    for name, value in report.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {entry}" for key, entry in value.items()) or "none"
        say(f"- {name}: {value}")
