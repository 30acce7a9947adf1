"""Opening a run: what is done, failed and missing; and errors that say what to do."""

from pathlib import Path

import pytest
from eaglehs.builder.run_reader import NoRunError, UnfinishedRunError, open_run, reason_class
from eaglehs.schemas.errors import RecordError

from tests.factories.datasets import make_dataset
from tests.factories.runs import change_record, finish_sample, make_run


def test_a_run_knows_what_is_done_failed_and_missing(tmp_path: Path):
    made = make_run(
        tmp_path, lengths=(3, 4, 5, 6), failed={"p1": "p1: rows 0..3 of 4 are missing. Why."}, unfinished=["p3"]
    )
    with open_run(tmp_path) as run:
        assert (run.num_done, list(run.failed), run.unfinished) == (2, ["p1"], ["p3"])
        assert run.dump_paths("p0") == made.dumps_of("p0")
        assert run.layout.layers == made.record.layers
        with pytest.raises(UnfinishedRunError, match=r"3 of 4 samples are done, p3 is the first.*--partial"):
            run.check_finished()


def test_a_failed_sample_that_a_later_run_finished_is_done(tmp_path: Path):
    made = make_run(tmp_path, lengths=(3,), failed={"p0": "p0: no answer"})
    finish_sample(made, made.prompts[0])
    with open_run(tmp_path) as run:
        assert (run.num_done, run.failed) == (1, {})


def test_a_missing_run_says_how_to_make_one(tmp_path: Path):
    with pytest.raises(NoRunError, match=r"there is no folder .*eaglehs extract"):
        open_run(tmp_path / "none")
    with pytest.raises(NoRunError, match=r"run\.json is missing"):
        open_run(tmp_path)
    with pytest.raises(NoRunError, match="packed dataset, not a run"):
        open_run(make_dataset(tmp_path).root)


def test_records_that_do_not_belong_together_are_refused(tmp_path: Path):
    made = make_run(tmp_path)
    change_record(made, prompts=type(made.record.prompts)(**{**fields(made.record.prompts), "num_prompts": 7}))
    with pytest.raises(RecordError, match=r"holds 3 prompts, but run\.json says 7"):
        open_run(tmp_path)


def test_a_ledger_line_of_an_unknown_sample_is_refused(tmp_path: Path):
    made = make_run(tmp_path)
    text = made.folder.ledger.read_text()
    made.folder.ledger.write_text(text + text.splitlines()[0].replace('"key":"p0"', '"key":"zz"') + "\n")
    with pytest.raises(RecordError, match="names sample zz"):
        open_run(tmp_path)


def test_a_torn_last_ledger_line_counts_as_not_written(tmp_path: Path):
    made = make_run(tmp_path)
    made.folder.ledger.write_bytes(made.folder.ledger.read_bytes()[:-20])
    with open_run(tmp_path) as run:
        assert run.unfinished == ["p2"]


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("p1: rows 0..3 of 40 are missing. The engine took them.", "rows N of N are missing"),
        ("p77: rows 0..9 of 11 are missing. The engine took them.", "rows N of N are missing"),
        ("r/p1.pt: not a whole dump (123 bytes: bad). It was cut.", "not a whole dump (N bytes: bad)"),
        ("not a whole dump (123 bytes: bad). It was cut.", "not a whole dump (N bytes: bad)"),
        ("p1: state (8, 7168), 'r1', [5] and 40: of 3", "state (N, N), 'N', [N] and N: of N"),
        ("the server is gone", "the server is gone"),
        ("p1: no room in '/home/alice/run', of 3 folders", "no room in '…', of N folders"),
        ("", "no reason given"),
    ],
)
def test_reasons_of_one_kind_are_counted_together(reason, kind):
    assert reason_class(reason) == kind


def fields(record) -> dict:
    return {name: getattr(record, name) for name in record.__dataclass_fields__}
