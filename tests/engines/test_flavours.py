"""What each kind of engine is asked for."""

import numpy as np
import pytest

from polynya.engines.base import EffectiveSampling
from polynya.engines.flavours import OPENAI, SGLANG, VLLM
from polynya.tokens.printed import GivenIds


def test_prompt_ids_go_where_each_engine_reads_them() -> None:
    given = GivenIds(pieces=[b"1,2", b"30"])
    assert b"".join(VLLM.prompt(given)) == b',"kv_transfer_params":{"prompt_token_ids":[1,2,30]}'
    assert b"".join(SGLANG.prompt(GivenIds(np.array([1, 2], dtype=np.int32)))) == b',"input_ids":[1,2]'
    with pytest.raises(TypeError, match="openai takes no prompt ids"):
        OPENAI.prompt(given)


def test_no_top_k_is_spelled_as_each_engine_wants_it() -> None:
    sampling = EffectiveSampling()
    assert (VLLM.sampling(sampling)["top_k"], SGLANG.sampling(sampling)["top_k"]) == (0, -1)
    assert SGLANG.sampling(EffectiveSampling(top_k=5))["top_k"] == 5
    assert "top_k" not in OPENAI.sampling(sampling)


def test_what_is_not_set_is_not_sent() -> None:
    assert not {"seed", "stop", "logit_bias", "max_completion_tokens"} & set(VLLM.sampling(EffectiveSampling()))
