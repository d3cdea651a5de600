"""The one list of metric and table names. A record with a name that is not here is refused, so that dashboards never drift."""

from __future__ import annotations

METRICS: dict[str, str] = {
    # rewards and groups
    "reward/mean": "mean reward of the trained batch",
    "reward/std": "standard deviation of the rewards over the batch",
    "reward/none": "samples whose reward is None (failed or unknown), excluded from every baseline",
    "groups/trained": "groups of the batch",
    "groups/zero_variance": "groups whose rewards are all equal: they teach nothing",
    "groups/filtered": "groups dropped by dynamic sampling since the last step",
    "groups/failed": "groups that failed or timed out since the last step",
    "groups/aborted": "groups aborted since the last step because others were done first (rollout.extra_prompts)",
    "groups/exhausted": "groups given up after max_attempts since the last step",
    "groups/refused_stale": "finished groups refused because they were older than max_staleness",
    "engines/up": "engines that answer or may, at the end of the step",
    "queue/in_flight": "groups at work when the step's batch was complete",
    "queue/buffered": "finished groups left in the buffer then",
    # lengths
    "length/mean": "mean response tokens",
    "length/max": "longest response in tokens",
    "length/refused_mean": "mean response tokens of what was refused as too old since the last step: beside length/mean, the bias of refusing",
    "length/truncated": "share of responses that met max_new_tokens",
    # loss and optimizer
    "loss/total": "the loss that was differentiated",
    "loss/policy": "policy part of the loss",
    "loss/nll": "negative log-likelihood per trained token, nats (SFT)",
    "experts/balance": "crowding of the experts in a sequence, mean over layers: 1 where loads are even (trainer.balance_coef)",
    "policy/ratio_mean": "mean importance ratio over trained tokens",
    "policy/clip_fraction": "share of trained tokens whose ratio was clipped",
    "policy/entropy": "mean entropy of the policy, nats per token",
    "policy/kl": "mean KL estimate to the reference, nats per token",
    "policy/kl_coef": "the KL's coefficient in this step, where algorithm.kl_target steers it",
    "distill/kl": "mean divergence of the student from its teacher, nats per trained token: the one that distill.divergence names",
    "distill/uncompared": "share of trained tokens that a teacher with another tokenizer is not compared on: no span of text that both write whole",
    # preference and reward models: an answer's reward is beta times its log-ratio to the reference (dpo, ipo, kto), beta times its mean
    # log-prob (simpo), its mean log-prob (orpo), or the reward model's output
    "preference/accuracy": "share of pairs whose chosen answer has the higher reward",
    "preference/margin": "mean reward of chosen answers less that of rejected ones",
    "preference/chosen_reward": "mean reward of chosen answers",
    "preference/rejected_reward": "mean reward of rejected answers",
    "preference/kl": "kto: estimated KL to the reference, nats per answer, its point of reference",
    "pairs/trained": "pairs of the step",
    "optimizer/grad_norm": "global gradient norm before clipping",
    "optimizer/lr": "learning rate of this step",
    "optimizer/empty_steps": "optimizer steps without a trained token, with a gradient that is not finite, or in critic.head_start; the weights did not move",
    # critic
    "value/loss": "the critic's loss: half its squared error per token with a return, clipped",
    "value/clip_fraction": "share of those tokens whose value was clipped",
    "value/explained_variance": "share of the returns' variance that the values at the step's start explain; 0: no better than a constant",
    "value/grad_norm": "the critic's global gradient norm before clipping",
    "value/lr": "the critic's learning rate in this step",
    "value/empty_steps": "the critic's optimizer steps without a return to learn or with a gradient that is not finite",
    "sharing/computed": "tokens computed per token of the batch; below 1 where trainer.prompt_sharing computes common ones once",
    "activations/kept": "share of layers, over the step's micro-batches, that kept what they saved (trainer.activations = hilore); mean over ranks",
    "activations/compressed": "share that kept it with one tensor in 8 bits, as planned",
    "activations/recomputed": "share that was computed again, as planned",
    "activations/fell_back": "share that was planned in 8 bits and computed again: a value too large, or more exposure than planned with",
    "activations/saved_mib": "most that a micro-batch held for its backward, MiB",
    "activations/budget_mib": "what it may hold, MiB",
    "activations/risk": "planned error of the gradient from 8-bit activations, relative to the running mean of its norm",
    "sharing/ahead": "tokens computed before there were answers, those of dropped prompts too, per token of those (run.prefix_overlap)",
    # engine against trainer
    "mismatch/logprob_abs_mean": "mean |engine log-prob - trainer log-prob| over trained tokens",
    "mismatch/logprob_abs_max": "largest |engine log-prob - trainer log-prob|; 0.0 with true_on_policy",
    # versions
    "staleness/mean": "mean weight versions between a token and the update that trains on it",
    "staleness/max": "the largest of them; never above max_staleness",
    "version/trained": "weight version after this step",
    # time and throughput
    "seconds/step": "wall-clock of the whole step",
    "seconds/rollout_wait": "waiting for finished groups",
    "seconds/prefix_wait": "waiting for prompts that the trainer still computes when the last group is finished (run.prefix_overlap)",
    "seconds/teacher": "a teacher's engines, or its tokenizer, over the batch",
    "seconds/train": "trainer step",
    "seconds/weight_sync": "publishing the new version",
    "seconds/checkpoint": "starting (and waiting for) checkpoints",
    "seconds/evaluate": "evaluation",
    "throughput/generated_tokens_per_s": "response tokens of the batch per second of the step",
    "throughput/trained_tokens_per_s": "prompt and response tokens per second of trainer step",
    "tokens/trained": "trained tokens of the step",
    # weight sync
    "weight_sync/bytes": "bytes that left the trainer",
    # evaluation
    "eval/pass_at_1": "pass@1, unbiased estimate over the evaluation prompts",
    **{f"eval/pass_at_{k}": f"pass@{k}, unbiased estimate over the evaluation prompts" for k in (2, 4, 8, 16, 32, 64, 128, 256)},
    "eval/greedy": "share of greedy answers that are correct",
    "eval/reward_mean": "mean reward of sampled answers",
    "eval/length_mean": "mean tokens of sampled answers",
    "eval/truncated": "share of sampled answers that met max_new_tokens",
    "eval/failed": "samples without a reward, counted as not correct",
    "eval/distill_kl": "the student's divergence from its teacher on sampled answers to the evaluation prompts, nats per token",
    "eval/preference_accuracy": "share of held-out pairs whose chosen answer has the higher reward",
    "eval/preference_margin": "mean reward of held-out chosen answers less that of rejected ones",
    "eval/preference_loss": "the objective's loss on held-out pairs",
    "eval/late": "steps that training had gone on when an evaluation on engines of its own was finished (evaluate.engines)",
    "eval/version": "the one weight version that all of the evaluation used",
}

TABLES: dict[str, str] = {
    "samples": "some trajectories of the trained batch: prompt, response, reward",
    "evaluation": "some answers of an evaluation: prompt, response, reward",
}
