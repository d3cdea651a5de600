"""What SGLang answers about the tokens it was given."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rollout.engines.contracts import EngineError
from rollout.engines.scoring import ScoreRequest
from rollout.engines.sglang_scoring import scored

REQUEST = ScoreRequest(tokens=np.array([5, 6, 7, 8]), start=2, top_k=2)


def answer(**changes: Any) -> dict[str, Any]:
    """As servers do that know no flat arrays: a list of [log-prob, id, text], the first without a score."""
    meta = {
        "input_token_logprobs": [[None, 6, None], [-1.5, 7, None], [-2.5, 8, None]],
        "input_top_logprobs": [None, [[-0.5, 3, None], [-1.5, 7, None]], [[-0.25, 9, None], [-3.0, 1, None]]],
    }
    return {"meta_info": meta | changes}


def test_nested_lists_are_read_too() -> None:
    found = scored(REQUEST, answer())
    assert found.logprobs.tolist() == [-1.5, -2.5]
    assert found.top_ids.tolist() == [[3, 7], [9, 1]]
    assert found.top_logprobs.tolist() == [[-0.5, -1.5], [-0.25, -3.0]]


@pytest.mark.parametrize(
    "changes",
    [
        {"input_token_logprobs": None},
        {"input_token_logprobs": [[None, 6, None], [-1.5, 7, None]]},
        {"input_token_logprobs": [[-1.0, 6, None], [-1.5, 7, None], [-2.5, 9, None]]},
        {"input_token_logprobs": [[-1.0, 6, None], [None, 7, None], [-2.5, 8, None]]},
        {"input_top_logprobs": [None, [[-0.5, 3, None]], [[-0.25, 9, None]]]},
        {"input_top_logprobs": None},
    ],
)
def test_what_does_not_belong_to_the_request_is_an_error(changes: dict[str, Any]) -> None:
    with pytest.raises(EngineError):
        scored(REQUEST, answer(**changes))
