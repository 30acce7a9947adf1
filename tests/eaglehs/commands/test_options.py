"""Options that would do nothing where they stand are refused by name, before anything is read."""

import sys

import pytest

from eaglehs.main import run

LOCAL_REVISION = "--revision has no effect on a model in a local folder"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("report", "--trust-remote-code"), "--trust-remote-code has no effect without --tokenizer"),
        (("card", "--trust-remote-code"), "--trust-remote-code has no effect without --tokenizer"),
        (("extract", "--model", "m", "--prompts", "p", "--rate", "9"), "--rate has no effect without --dry-run"),
        (("extract", "--model", ".", "--prompts", "p", "--revision", "v1"), LOCAL_REVISION),
        (("serve", "--model", ".", "--revision", "v1", "--print"), LOCAL_REVISION),
        (("verify", ".", "--model", ".", "--revision", "v1"), LOCAL_REVISION),
    ],
    ids=["report", "card", "extract", "extract of a local model", "serve", "verify"],
)
def test_an_option_without_effect_is_refused(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["eaglehs", *arguments])
    told, exit_code = run()
    assert exit_code == 2
    assert message in told


@pytest.mark.parametrize("value", ["inf", "nan"])
@pytest.mark.parametrize("flag", ["--start-timeout", "--stall-timeout", "--max-skipped-share", "--rate"])
def test_a_number_without_an_end_is_refused(flag, value, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["eaglehs", "extract", "--model", "m", "--prompts", "p", "--dry-run", flag, value])
    assert run() == ("", 2)
    assert f"Invalid value for '{flag}'" in capsys.readouterr().err
