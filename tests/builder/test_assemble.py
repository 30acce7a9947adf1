"""Dumps to a checked sample: all rows, only its rows, of the right tokens, plausible; each fault by name."""

from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from eaglehs.builder.assemble import (
    BadStatesError,
    ForeignDumpError,
    RowCoverageError,
    TokenIdsError,
    check_dumps,
    examine,
)
from eaglehs.builder.dump_zip import DumpUnreadableError
from eaglehs.builder.plan import DatasetLayout
from eaglehs.schemas.prompt import Prompt

from tests.factories.dumps import LAYERS, make_prompt, make_states, write_dumps

H = 48
LAYOUT = DatasetLayout(layers=LAYERS, hidden_size=H)
T = 200
PROMPT = make_prompt("p0", T)


def states() -> dict[str, torch.Tensor]:
    return make_states("p0", T, hidden_size=H)


def test_three_chunks_are_one_sample_in_row_order_whatever_their_order(tmp_path: Path):
    paths = write_dumps(tmp_path, PROMPT, states(), bounds=(0, 64, 128, T))
    sample = check_dumps(PROMPT, [paths[2], paths[0], paths[1]], LAYOUT)
    assert [dump.name for dump in sample.dumps] == [path.name for path in paths]
    assert [dump.size_bytes for dump in sample.dumps] == [path.stat().st_size for path in paths]
    assert [dump.xxh3_128 for dump in sample.dumps] == [xxhash.xxh3_128_hexdigest(p.read_bytes()) for p in paths]
    assert (sample.key, sample.num_tokens) == ("p0", T)
    assert set(sample.state_norms) == {"layer_2", "layer_5", "layer_9", "final"}
    assert all(norm == pytest.approx(H**0.5, rel=0.1) for norm in sample.state_norms.values())


@pytest.mark.parametrize("bounds", [(0, T), (0, 1, T), (0, 64, 128, T)])
def test_hashes_and_norms_do_not_depend_on_the_chunks(tmp_path: Path, bounds):
    found = examine(PROMPT, write_dumps(tmp_path, PROMPT, states(), bounds=bounds), LAYOUT)
    hashes = found.checked.xxh3_128
    for name, state in states().items():
        assert hashes[name] == xxhash.xxh3_128_hexdigest(state.view(torch.uint16).numpy().tobytes())
    assert hashes["loss_mask"] == xxhash.xxh3_128_hexdigest(np.asarray(PROMPT.loss_mask, "u1").tobytes())
    whole = check_dumps(PROMPT, write_dumps(tmp_path / "w", PROMPT, states()), LAYOUT)
    assert found.checked.state_norms == whole.state_norms


def test_plain_lists_are_as_good_as_arrays(tmp_path: Path):
    prompt = Prompt(
        key="p0", id="p0", source="s", input_ids=PROMPT.input_ids.tolist(), loss_mask=PROMPT.loss_mask.tolist()
    )
    assert check_dumps(prompt, write_dumps(tmp_path, PROMPT, states()), LAYOUT).num_tokens == T


@pytest.mark.parametrize(
    ("taken", "message"),
    [
        ((1, 2), r"rows 0\.\.63 of 200 are missing.*prefix cache.*--disable-radix-cache"),
        ((0, 2), r"rows 64\.\.127 of 200 are missing.*chunk"),
        ((0, 1), r"rows 128\.\.199 of 200 are missing.*--chunked-prefill-size"),
        ((), r"rows 0\.\.199 of 200 are missing"),
    ],
)
def test_missing_rows_are_named_with_their_cause(tmp_path: Path, taken, message):
    paths = write_dumps(tmp_path, PROMPT, states(), bounds=(0, 64, 128, T))
    with pytest.raises(RowCoverageError, match=message) as caught:
        check_dumps(PROMPT, [paths[i] for i in taken], LAYOUT)
    assert caught.value.key == "p0"


def test_doubled_rows_are_refused(tmp_path: Path):
    one = write_dumps(tmp_path, PROMPT, states(), bounds=(0, 64, T))
    other = write_dumps(tmp_path, PROMPT, states(), bounds=(0, 60, T))
    with pytest.raises(RowCoverageError, match=r"rows 60\.\.63 are in two dumps"):
        check_dumps(PROMPT, [one[0], other[1]], LAYOUT)


def test_more_rows_than_tokens_are_refused(tmp_path: Path):
    longer = make_prompt("p0", T + 8)
    paths = write_dumps(tmp_path, longer, make_states("p0", T + 8, hidden_size=H))
    with pytest.raises(RowCoverageError, match="208"):
        check_dumps(PROMPT, paths, LAYOUT)


def test_dumps_of_another_sample_or_attempt_are_refused(tmp_path: Path):
    foreign = write_dumps(tmp_path, make_prompt("p1", T), states())
    with pytest.raises(ForeignDumpError, match="a dump of sample p1"):
        check_dumps(PROMPT, foreign, LAYOUT)
    first = write_dumps(tmp_path, PROMPT, states(), bounds=(0, 64, T))
    second = write_dumps(tmp_path, PROMPT, states(), bounds=(0, 64, T), rid="eh-0123abcd-p0-1")
    with pytest.raises(ForeignDumpError, match="another request"):
        check_dumps(PROMPT, [first[0], second[1]], LAYOUT)


def test_other_token_ids_are_refused_with_the_first_position_and_both_values(tmp_path: Path):
    ids = PROMPT.input_ids.copy()
    ids[150:152] = (998, 999)
    changed = Prompt(key="p0", id="p0", source="s", input_ids=ids, loss_mask=PROMPT.loss_mask)
    paths = write_dumps(tmp_path, changed, states(), bounds=(0, 64, T))
    with pytest.raises(TokenIdsError, match=f"token 150 is 998 .*, {PROMPT.input_ids[150]} in the prompt.*2 of 136"):
        check_dumps(PROMPT, paths, LAYOUT)


@pytest.mark.parametrize(
    ("state", "row", "value"), [("layer_5", 3, "nan"), ("final", 150, "inf"), ("layer_2", 64, "-inf")]
)
def test_a_value_that_is_not_finite_names_state_and_row(tmp_path: Path, state, row, value):
    bad = states()
    bad[state][row, 7] = float(value)
    paths = write_dumps(tmp_path, PROMPT, bad, bounds=(0, 64, T))
    with pytest.raises(BadStatesError, match=f"p0: row {row} of {state} holds"):
        check_dumps(PROMPT, paths, LAYOUT)


def test_a_state_of_zeros_is_refused(tmp_path: Path):
    bad = states() | {"layer_5": torch.zeros(T, H, dtype=torch.bfloat16)}
    with pytest.raises(BadStatesError, match="layer_5 are zero"):
        check_dumps(PROMPT, write_dumps(tmp_path, PROMPT, bad), LAYOUT)


def test_two_layers_alike_are_refused_by_both_names(tmp_path: Path):
    bad = states()
    bad["layer_9"] = bad["layer_2"].clone()
    with pytest.raises(BadStatesError, match="layer_2 and layer_9 are identical"):
        check_dumps(PROMPT, write_dumps(tmp_path, PROMPT, bad), LAYOUT)


def test_rows_that_are_each_there_twice_are_refused(tmp_path: Path):
    bad = {name: state[: T // 2].repeat_interleave(2, dim=0) for name, state in states().items()}
    with pytest.raises(BadStatesError, match="repeats row"):
        check_dumps(PROMPT, write_dumps(tmp_path, PROMPT, bad), LAYOUT)


def test_a_row_repeated_over_the_border_of_two_chunks_is_found(tmp_path: Path):
    bad = states()
    bad["layer_5"][64] = bad["layer_5"][63]
    with pytest.raises(BadStatesError, match="row 64 of layer_5 repeats row 63"):
        check_dumps(PROMPT, write_dumps(tmp_path, PROMPT, bad, bounds=(0, 64, T)), LAYOUT)


def test_a_dump_that_vanished_is_refused(tmp_path: Path):
    [path] = write_dumps(tmp_path, PROMPT, states())
    path.unlink()
    with pytest.raises(DumpUnreadableError, match="is not there"):
        check_dumps(PROMPT, [path], LAYOUT)


def test_memory_stays_flat_for_a_large_sample(tmp_path: Path):
    """Reads 60 MB; a mapped or copied array would show as tens of MB."""
    import resource

    prompt, layout = make_prompt("big", 2000), DatasetLayout(layers=(2, 5), hidden_size=5000)
    paths = write_dumps(
        tmp_path, prompt, make_states("big", 2000, layers=(2, 5), hidden_size=5000), bounds=(0, 1500, 2000)
    )
    check_dumps(prompt, paths, layout)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    check_dumps(prompt, paths, layout)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 4_000
