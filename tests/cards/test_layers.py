"""The layer table says the same physical state in everyone's words."""

from eaglehs.cards.layers import layer_names, server_ids


def test_state_k_is_hidden_states_k_and_the_output_of_layer_k_minus_1():
    first, _, _, _ = layer_names((3, 31, 59), 61)
    assert (first.state, first.transformers, first.vllm, first.sglang, first.output_of) == (
        "layer_3",
        "hidden_states[3]",
        "3",
        "3",
        "2",
    )
    assert first.physical == "output of layer 2 = input of layer 3"


def test_final_is_the_last_hidden_state_and_has_no_layer_number_elsewhere():
    final = layer_names((3,), 61)[-1]
    assert final.state == "final"
    assert final.transformers == "hidden_states[61]"
    assert (final.vllm, final.sglang, final.output_of) == ("–", "–", "–")


def test_state_0_is_the_embeddings():
    embeddings = layer_names((0, 5), 8)[0]
    assert embeddings.physical == "embeddings = input of layer 0"
    assert embeddings.output_of == "-1"


def test_both_ways_of_counting_are_given_for_the_server():
    assert server_ids((3, 31, 59)) == ("[3, 31, 59]", "[2, 30, 58]")
