"""The stored records against files that were written by hand from the format text."""

from dataclasses import replace
from pathlib import Path

import pytest
from eaglehs.schemas import codec
from eaglehs.schemas.dump import CaptureStatus
from eaglehs.schemas.errors import RecordError, UsageError
from eaglehs.schemas.ledger import Ledger, LedgerEntry, SampleStatus, cut_torn_line, read_ledger
from eaglehs.schemas.manifest import Manifest
from eaglehs.schemas.run import RunRecord, check_same_run
from eaglehs.schemas.sample import DumpRef, SampleMeta, meta_bytes, meta_content
from hypothesis import given
from hypothesis import strategies as st

from tests.factories.records import manifest, model_facts, prompt_facts, run_record

GOLDEN = Path(__file__).parent.parent / "golden"

HASHES = {
    "input_ids": "1" * 32,
    "loss_mask": "2" * 32,
    "layer_1": "3" * 32,
    "final": "f" * 32,
}
META = SampleMeta(
    key="b-c-d18c7b6a1f",
    id="B.c",
    num_tokens=3,
    num_trainable=2,
    source="prompts.jsonl:1",
    next_token=7,
    xxh3_128=HASHES,
)
LEDGER = (
    LedgerEntry(
        key="a",
        id="a",
        num_tokens=3,
        status=SampleStatus.DONE,
        attempt=100,
        next_token=7,
        dumps=(
            DumpRef(
                name="eh-0123abcd-a-100.000000-000003.pt",
                size_bytes=4321,
                xxh3_128="00112233445566778899aabbccddeeff",
            ),
        ),
        state_norms={"layer_1": 8.0, "final": 7.25},
        shard="data/train-00000.tar",
        finished_at=1790000000.5,
    ),
    LedgerEntry(
        key="b-c-d18c7b6a1f",
        id="B.c",
        num_tokens=5,
        status=SampleStatus.FAILED,
        attempt=101,
        reason="b-c: row 3 of layer_1 is NaN.",
    ),
)


def test_run_json_reads_and_writes_as_the_format_says(tmp_path):
    assert codec.read_record(RunRecord, GOLDEN / "run.json") == run_record()
    codec.write_record(tmp_path / "run.json", run_record())
    assert (tmp_path / "run.json").read_bytes() == (GOLDEN / "run.json").read_bytes()


def test_capture_json_reads_and_writes_as_the_format_says(tmp_path):
    status = codec.read_record(CaptureStatus, GOLDEN / "capture.json")
    assert (status.state, status.layers, status.rid_prefix) == ("ready", (1, 4, 6), "eh-0123abcd-")
    codec.write_record(tmp_path / "capture.json", status)
    assert (tmp_path / "capture.json").read_bytes() == (GOLDEN / "capture.json").read_bytes()


def test_the_ledger_reads_and_writes_as_the_format_says(tmp_path):
    assert tuple(read_ledger(GOLDEN / "ledger.jsonl")) == LEDGER
    ledger = Ledger(tmp_path / "ledger.jsonl")
    for entry in LEDGER:
        ledger.append(entry)
    assert ledger.path.read_bytes() == (GOLDEN / "ledger.jsonl").read_bytes()
    assert [entry.key for entry in ledger.finished()] == ["a"]
    assert [entry.key for entry in ledger.failed()] == ["b-c-d18c7b6a1f"]


def test_meta_json_reads_and_writes_as_the_format_says():
    content = (GOLDEN / "sample.meta.json").read_bytes()
    assert codec.loads(SampleMeta, content.decode(), where="golden") == META
    assert meta_content(META, (1,)) == content


def test_a_manifest_comes_back(tmp_path):
    codec.write_record(tmp_path / "manifest.json", manifest())
    assert codec.read_record(Manifest, tmp_path / "manifest.json") == manifest()


@given(st.text(max_size=300), st.text(max_size=60), st.integers(0, 2**31 - 1), st.integers(-1, 2**31 - 1))
def test_the_size_of_meta_json_is_known_before_its_numbers_are(sample_id, source, num_tokens, next_token):
    meta = replace(META, id=sample_id, source=source, num_tokens=num_tokens, next_token=next_token)
    content = meta_content(meta, (1,))
    assert len(content) == meta_bytes(replace(META, id=sample_id, source=source), (1,)) == len(content) // 512 * 512
    assert codec.loads(SampleMeta, content.decode("utf-8", "surrogatepass"), where="x") == meta


@given(st.integers(0, 600))
def test_a_ledger_cut_at_any_byte_loses_at_most_its_last_line(tmp_path_factory, num_bytes):
    whole = (GOLDEN / "ledger.jsonl").read_bytes()
    path = tmp_path_factory.mktemp("ledger") / "ledger.jsonl"
    path.write_bytes(whole[:num_bytes])
    kept = whole[:num_bytes].count(b"\n")
    assert list(read_ledger(path)) == list(LEDGER[:kept])
    assert cut_torn_line(path) == len(whole[:num_bytes]) - len(path.read_bytes())
    Ledger(path).append(LEDGER[0])
    assert len(list(read_ledger(path))) == kept + 1


def test_a_damaged_line_in_mid_ledger_is_an_error_with_its_number(tmp_path):
    lines = (GOLDEN / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "ledger.jsonl").write_bytes(lines[0] + b"\x00\x00\x00\n" + lines[1])
    with pytest.raises(RecordError, match=r"ledger\.jsonl:2"):
        list(read_ledger(tmp_path / "ledger.jsonl"))


def test_the_same_inputs_are_the_same_run():
    check_same_run(run_record(), run_record(run_id="ffffffff", command=(), starts=4), where=Path("run"))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"model": model_facts(name="acme/other")}, "model"),
        ({"model": model_facts(revision="main")}, "model revision"),
        ({"model": model_facts(hidden_size=128)}, "model shape"),
        ({"layers": (2, 4, 6)}, "list of layers"),
        ({"prompts": prompt_facts(tokenizer_hash="c" * 64)}, "tokenizer"),
        ({"prompts": prompt_facts(template_hash="c" * 64)}, "chat template"),
        ({"prompts": prompt_facts(fingerprint="f" * 32)}, "prompt set"),
        ({"prompts": prompt_facts(loss_mask="last")}, "loss mask"),
    ],
)
def test_a_run_of_other_inputs_is_refused_by_the_field_that_differs(changes, field):
    with pytest.raises(UsageError, match=f"run was made with another {field}: "):
        check_same_run(run_record(), run_record(**changes), where=Path("run"))
