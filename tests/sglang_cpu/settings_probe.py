"""Run in SGLang's Python: which of our rules fire on SGLang's own, resolved settings, for each list of arguments.

python settings_probe.py MODEL '[["--pp-size", "2"], ...]'   prints a line [arguments, rules, rows] each
"""

import json
import sys

from eaglehs.extraction.sglang_view import refused_settings, resolved_settings, rows_in_a_batch


def main() -> None:
    """Resolve and judge each list of arguments."""
    from sglang.srt.server_args import prepare_server_args

    for arguments in json.loads(sys.argv[2]):
        given = prepare_server_args(
            ["--model-path", sys.argv[1], "--skip-tokenizer-init", "--device", "cpu", *arguments]
        )
        if hasattr(given, "resolve_once"):
            given.resolve_once()
        settings = resolved_settings(given)
        rules = sorted({violation.rule.name for violation in refused_settings(settings)})
        print(json.dumps([arguments, rules, rows_in_a_batch(settings)]))  # noqa: T201 - its output is the answer


if __name__ == "__main__":
    main()
