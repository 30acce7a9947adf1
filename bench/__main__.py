"""Runs the benches one after another: `python -m bench`, or `python -m bench extract read` for some of them."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

BENCHES = ("extract", "pack", "read", "remote", "codec", "soak")
"""What runs without arguments; benches of a GPU have a folder and a README of their own."""


def main() -> None:
    names = sys.argv[1:] or [name for name in BENCHES if importlib.util.find_spec(f"bench.{name}")]
    for name in names:
        print(f"\n## bench.{name}", flush=True)
        code = subprocess.run([sys.executable, "-m", f"bench.{name}"], check=False).returncode
        if code:
            sys.exit(code)


if __name__ == "__main__":
    main()
