"""Objectives by name, or by import path for a user's own, composed into the two functions that the trainer calls.

    @register_loss("my_loss")
    def my_loss(tokens: Tokens, config: AlgorithmConfig) -> Tensor:      # a loss for each token, [N]
        ratio = (tokens.logprobs_N - tokens.old_logprobs_N).exp()
        return -ratio * tokens.advantages_N

    @register_advantage("my_advantages")
    def my_advantages(rewards: Rewards, config: AlgorithmConfig) -> Tensor:  # one for each sequence, [S], or TokenAdvantages
        return rewards.reward_S.nan_to_num() - 0.5

A module in this package registers its functions when it is first looked for; a function of a user's needs no decorator:
`algorithm.loss = "my_package.my_module:my_loss"`.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from torch import Tensor

from algorithms.aggregate import aggregate
from algorithms.config import AlgorithmConfig
from algorithms.contracts import Advantage, AdvantageFn, Counts, LossFn, LossOutput, Objective, Rewards, TokenAdvantages, TokenLoss, Tokens, masked
from algorithms.corrections import corrected
from algorithms.entropy_guard import guarded
from algorithms.kl import estimate, kl_loss
from algorithms.ratio import as_float
from miles.config import ConfigError, nearest

F = TypeVar("F", bound=Callable[..., Any])

_ADVANTAGES: dict[str, Advantage] = {}
_LOSSES: dict[str, Objective] = {}
_BY_TOKEN: set[str] = set()


def register_advantage(name: str) -> Callable[[F], F]:
    """Decorator: make an `Advantage` available as `algorithm.advantages = name`."""
    return _registrar(_ADVANTAGES, name)


def register_loss(name: str, *, by_token: bool = False) -> Callable[[F], F]:
    """Decorator: make an `Objective` available as `algorithm.loss = name`. `by_token`: what it says of a token depends on that token alone."""
    if by_token:
        _BY_TOKEN.add(name)
    return _registrar(_LOSSES, name)


def advantage_names() -> list[str]:
    """Names that `algorithm.advantages` may have."""
    _import_all()
    return sorted(_ADVANTAGES)


def loss_names() -> list[str]:
    """Names that `algorithm.loss` may have."""
    _import_all()
    return sorted(_LOSSES)


def advantage(config: AlgorithmConfig) -> AdvantageFn:
    """The estimator of `config`: `Rewards` -> advantages of all N response tokens, whether it speaks of sequences or of tokens.

    Raises:
        ConfigError: `config.advantages` is neither a name nor an importable function of (rewards, config).
    """
    estimator = _find("algorithm.advantages", config.advantages, advantage_names(), _ADVANTAGES)

    def bound(rewards: Rewards) -> TokenAdvantages:
        found = estimator(rewards, config)
        if isinstance(found, TokenAdvantages):
            for values_N in (found.advantages_N, *([] if found.returns_N is None else [found.returns_N])):
                _check_shape(config.advantages, "TokenAdvantages", values_N, rewards.sequence_N)
            return found
        _check_shape(config.advantages, "advantages", found, rewards.reward_S)
        return TokenAdvantages(advantages_N=masked(found[rewards.sequence_N], rewards.mask_N))

    return bound


def loss(config: AlgorithmConfig) -> LossFn:
    """The loss of `config`: policy objective + kl_coef * KL(policy || reference) - entropy_coef * entropy, each aggregated alike.

    Inputs become float32 (float64 stays) and masked places 0 before an objective sees them. Sums: loss/policy,
    policy/ratio_mean, policy/clip_fraction, and policy/entropy and policy/kl where the inputs for them are given.

    Raises:
        ConfigError: `config.loss` is neither a name nor an importable function of (tokens, config).
    """
    objective = _find("algorithm.loss", config.loss, loss_names(), _LOSSES)

    def composed(tokens: Tokens, counts: Counts) -> LossOutput:
        tokens = _clean(tokens)
        out = objective(tokens, config)
        token_loss_N = out.loss_N if isinstance(out, TokenLoss) else out
        _check_shape(config.loss, "a loss", token_loss_N, tokens.logprobs_N)
        token_loss_N, dropped_N = corrected(token_loss_N, tokens, config)
        token_loss_N, held_N = guarded(token_loss_N, tokens, counts, config)
        policy = aggregate(token_loss_N, tokens, counts, config.aggregation)
        # Sums are divided by the step's tokens, and this loss is already a share of the step's: multiply first.
        sums = {"loss/policy": policy.detach() * counts.tokens}
        if isinstance(out, TokenLoss):
            clipped_N = (out.clipped_N | dropped_N | held_N).to(token_loss_N.dtype)
            sums |= {"policy/ratio_mean": _total(out.ratio_N, tokens), "policy/clip_fraction": _total(clipped_N, tokens)}
        regulariser, more = _regulariser(tokens, counts, config)
        return LossOutput(loss=policy if regulariser is None else policy + regulariser, sums=sums | more)

    return composed


def is_by_token(config: AlgorithmConfig) -> bool:
    """Whether the loss of `config` looks at each token alone, so that even the parts of one sequence add up. Unknown functions do not."""
    _import_all()
    of_sequences = config.sequence_mask is not None or (config.correction != "none" and config.correction_level != "token")
    return config.loss in _BY_TOKEN and not of_sequences


def _regulariser(tokens: Tokens, counts: Counts, config: AlgorithmConfig) -> tuple[Tensor | None, dict[str, Tensor]]:
    """kl_coef * KL - entropy_coef * entropy, or None when neither is asked for; and the sums to report."""
    sums: dict[str, Tensor] = {}
    terms: list[Tensor] = []
    kl_coef = config.kl_coef if config.kl_in == "loss" else 0.0
    if tokens.reference_logprobs_N is not None:
        sums["policy/kl"] = _total(estimate(tokens.logprobs_N, tokens.reference_logprobs_N, config.kl_estimator), tokens)
        if kl_coef:
            kl_N = kl_loss(tokens, tokens.reference_logprobs_N, config.kl_estimator)
            terms.append(kl_coef * aggregate(kl_N, tokens, counts, config.aggregation))
    assert tokens.reference_logprobs_N is not None or not kl_coef, "kl_coef > 0 loads a reference"
    if tokens.entropy_N is not None:
        sums["policy/entropy"] = _total(tokens.entropy_N, tokens)
        if config.entropy_coef:
            terms.append(-config.entropy_coef * aggregate(tokens.entropy_N, tokens, counts, config.aggregation))
    assert tokens.entropy_N is not None or not config.entropy_coef, "entropy_coef needs the entropy"
    return (sum(terms[1:], terms[0]) if terms else None), sums


def _clean(tokens: Tokens) -> Tokens:
    """Float fields in the log-probs' float32 or float64, with 0 at masked places: NaN there reaches neither values nor gradients."""
    dtype = as_float(tokens.logprobs_N).dtype

    def clean(values_N: Tensor | None) -> Any:
        return None if values_N is None else masked(values_N.to(dtype), tokens.mask_N)

    return replace(
        tokens,
        logprobs_N=clean(tokens.logprobs_N),
        old_logprobs_N=clean(tokens.old_logprobs_N),
        rollout_logprobs_N=clean(tokens.rollout_logprobs_N),
        advantages_N=clean(tokens.advantages_N),
        entropy_N=clean(tokens.entropy_N),
        reference_logprobs_N=clean(tokens.reference_logprobs_N),
    )


def _total(values_N: Tensor, tokens: Tokens) -> Tensor:
    return masked(values_N.detach(), tokens.mask_N).sum()


def _check_shape(name: str, what: str, values: object, like: Tensor) -> None:
    if not isinstance(values, Tensor) or values.shape != like.shape:
        shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(f"{name!r} must return {what} as a tensor of shape {tuple(like.shape)}, not {shape}")


def _registrar(table: dict[str, Any], name: str) -> Callable[[F], F]:
    def register(function: F) -> F:
        if name in table:
            raise ValueError(f"objective {name!r} is registered already, by {table[name].__module__}; choose another name")
        table[name] = function
        return function

    return register


def _import_all() -> None:
    """Import every module of this package, so that each has registered what it offers."""
    package = importlib.import_module("algorithms")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"algorithms.{module.name}")


def _find(option: str, name: str, names: list[str], table: dict[str, Any]) -> Any:
    if ":" in name:
        return _import_function(option, name)
    if name not in table:
        raise ConfigError(f"{option} = {name!r} is not known{nearest(name, names)} (a function of yours is given as module:function)")
    return table[name]


def _import_function(option: str, path: str) -> Any:
    module_name, _, function_name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{option} = {path!r}: there is no module {error.name!r}; is its folder on PYTHONPATH?") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        functions = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        raise ConfigError(f"{option} = {path!r}: {module_name} has no function {function_name!r}{nearest(function_name, functions)}")
    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        raise ConfigError(f"{option} = {path!r}: it is called with two arguments, (tokens or rewards, config), but: {error}") from error
    return function
