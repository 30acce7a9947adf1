"""Options that would do nothing where they stand are refused by name, before anything is read."""

import sys

import pytest

from eaglehs.main import run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("report", "--trust-remote-code"), "--trust-remote-code has no effect without --tokenizer"),
        (("card", "--trust-remote-code"), "--trust-remote-code has no effect without --tokenizer"),
        (("extract", "--model", "m", "--prompts", "p", "--rate", "9"), "--rate has no effect without --dry-run"),
    ],
    ids=["report", "card", "extract"],
)
def test_an_option_without_effect_is_refused(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["eaglehs", *arguments])
    told, exit_code = run()
    assert exit_code == 2
    assert message in told
