"""Small groups by hand."""

import numpy as np

from miles.data.types import Group, Prompt, Sample, Status


def prompt(claim_id: int) -> Prompt:
    return Prompt(prompt_id=claim_id, tokens=np.array([claim_id + 1]), text=f"p{claim_id}", columns={"answer": str(claim_id)})


def group(claim_id: int, versions: list[int], rewards: list[float | None] | None = None, status: Status = Status.COMPLETED) -> Group:
    samples = [
        Sample(
            sample_id=f"{claim_id}/{i}",
            group_id=str(claim_id),
            tokens=[claim_id + 1, 7],
            prompt_length=1,
            loss_mask=[True],
            logprobs=[-0.25 * (i + 1)],
            weight_versions=[version],
            status=status,
            reward=None if rewards is None else rewards[i],
        )
        for i, version in enumerate(versions)
    ]
    return Group(claim_id=claim_id, prompt=prompt(claim_id), samples=tuple(samples))
