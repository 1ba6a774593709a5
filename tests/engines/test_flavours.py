"""What each kind of engine is asked for."""

import pytest

from polynya.engines.base import EffectiveSampling
from polynya.engines.flavours import OPENAI, SGLANG, VLLM


def test_prompt_ids_go_where_each_engine_reads_them() -> None:
    assert VLLM.prompt([1, 2]) == {"kv_transfer_params": {"prompt_token_ids": [1, 2]}}
    assert SGLANG.prompt([1, 2]) == {"input_ids": [1, 2]}
    with pytest.raises(TypeError, match="openai takes no prompt ids"):
        OPENAI.prompt([1])


def test_no_top_k_is_spelled_as_each_engine_wants_it() -> None:
    sampling = EffectiveSampling()
    assert (VLLM.sampling(sampling)["top_k"], SGLANG.sampling(sampling)["top_k"]) == (0, -1)
    assert SGLANG.sampling(EffectiveSampling(top_k=5))["top_k"] == 5
    assert "top_k" not in OPENAI.sampling(sampling)


def test_what_is_not_set_is_not_sent() -> None:
    assert not {"seed", "stop", "logit_bias", "max_completion_tokens"} & set(VLLM.sampling(EffectiveSampling()))
