import json

import numpy as np

from miles.data.codec import sample_from_json, sample_to_json
from miles.data.types import Sample, Status


def test_a_sample_with_nan_and_parts_comes_back_bit_for_bit_through_json_text():
    sample = Sample(
        sample_id="3/1",
        group_id="3",
        tokens=[5, 6, 7],
        prompt_length=1,
        loss_mask=[True, False],
        logprobs=[np.float32(-0.1), np.nan],
        weight_versions=[4, -1],
        status=Status.TRUNCATED,
        reward=0.1 + 0.2,
        reward_parts={"a": 1 / 3},
        metadata={"turns": [1, {"tool": "x"}]},
    )
    again = sample_from_json(json.loads(json.dumps(sample_to_json(sample))))
    for name in ("tokens", "loss_mask", "logprobs", "weight_versions"):
        assert getattr(again, name).tobytes() == getattr(sample, name).tobytes(), name
        assert getattr(again, name).dtype == getattr(sample, name).dtype, name
    for name in ("sample_id", "group_id", "prompt_length", "status", "reward", "reward_parts", "metadata"):
        assert getattr(again, name) == getattr(sample, name), name
