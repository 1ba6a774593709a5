"""What the embedded engine sends and how it reads llama.cpp's replies."""

import math

import pytest

from polynya.engines.base import EffectiveSampling
from polynya.engines.llamacpp_wire import Entry, matched_logprobs, sampling_fields
from polynya.errors import EngineProtocolError


def entries(*ids: int) -> list[Entry]:
    return [Entry(id=token, logprob=-float(token)) for token in ids]


def test_every_sampler_value_is_sent() -> None:
    fields = sampling_fields(EffectiveSampling(stop=["x"], logit_bias={"7": -1.0}), 100)
    neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "repeat_penalty": 1.0}
    assert {key: fields[key] for key in neutral} == neutral
    assert (fields["stop"], fields["logit_bias"], fields["repeat_last_n"]) == (["x"], [[7, -1.0]], 100)
    assert fields["post_sampling_probs"] is False and fields["return_tokens"] is True


def test_one_entry_per_token_is_taken_as_it_is() -> None:
    assert matched_logprobs([3, 5], entries(3, 5)) == [-3.0, -5.0]


def test_a_null_logprob_is_nan() -> None:
    found = matched_logprobs([3], [Entry(id=3)])
    assert found[0] is not None and math.isnan(found[0])


def test_a_missing_entry_is_none_at_its_place() -> None:
    assert matched_logprobs([3, 4, 5], entries(3, 5)) == [-3.0, None, -5.0]
    assert matched_logprobs([4], []) == [None]


def test_an_entry_that_could_belong_to_either_of_two_tokens_is_not_given_to_one() -> None:
    assert matched_logprobs([3, 3, 5], entries(3, 5)) == [None, None, -5.0]


@pytest.mark.parametrize(("tokens", "given"), [([3, 5], (3, 6)), ([3, 5], (6,)), ([3], (3, 3))])
def test_entries_of_other_ids_are_refused(tokens: list[int], given: tuple[int, ...]) -> None:
    with pytest.raises(EngineProtocolError, match="completion_probabilities"):
        matched_logprobs(tokens, entries(*given))
