"""The rules of DeepSeek's sizes and choices.

Goes in: a config of the family, or its fields. Comes out: nothing, or a ConfigError.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpipe.errors import ConfigError
from jaxpipe.models.rotary import check_rotary_scaling


def check_deepseek(config: Any) -> None:
    """Raises ConfigError if the sizes and choices of a `DeepseekConfig` do not fit together."""
    if config.attention == "cudnn":
        raise ConfigError(
            "model.attention='cudnn' with latent attention",
            rule="attention-latent: values have another size than queries and keys, which 'xla' and 'chunked' take",
            repair="set model.attention='chunked', which saves the same for backward",
        )
    _check_dense(config)
    _check_groups(config)
    if config.mtp_factor and config.scores != "sigmoid":
        raise ConfigError(
            f"model.mtp_factor={config.mtp_factor} with model.scores={config.scores!r}",
            rule="mtp: DeepSeek-V3 has a module that predicts a further token; V2, of softmax scores, has none",
            repair="set model.mtp_factor=0.0, or model.scores='sigmoid' and a model.bias_rate above 0",
        )
    has_bias = config.bias_rate > 0
    if has_bias != (config.scores == "sigmoid"):
        raise ConfigError(
            f"model.bias_rate={config.bias_rate} with model.scores={config.scores!r}",
            rule="router-bias: experts have a bias where scores are sigmoids, as in DeepSeek-V3, and none where"
            " they are a softmax, as in DeepSeek-V2",
            repair="set model.bias_rate=" + ("0.0" if has_bias else "0.001; 1e-9 leaves the biases as they are"),
        )


def _check_dense(config: Any) -> None:
    if not 0 <= config.num_dense < config.num_layers:
        raise ConfigError(
            f"model.num_dense={config.num_dense} of model.num_layers={config.num_layers}",
            rule="dense-layers: first layers without experts are fewer than all",
            repair=f"set model.num_dense={min(max(config.num_dense, 0), config.num_layers - 1)}, or for a model without"
            " experts model.family='llama'",
        )


def _check_groups(config: Any) -> None:
    size, rest = divmod(config.num_experts, config.num_groups)
    # A group's score is the sum of two experts' where there is a bias.
    is_right = not rest and (config.num_groups == 1 or size >= 2)
    if not is_right or not 1 <= config.groups_per_token <= config.num_groups:
        raise ConfigError(
            f"model.groups_per_token={config.groups_per_token} of model.num_groups={config.num_groups} groups of"
            f" model.num_experts={config.num_experts}",
            rule="expert-groups: groups have equally many experts, two or more, and a token chooses from 1 to all",
            repair="set model.num_groups=1 and model.groups_per_token=1, or numbers that fit",
        )
    if config.experts_per_token > config.groups_per_token * size:
        raise ConfigError(
            f"model.experts_per_token={config.experts_per_token} of {config.groups_per_token} groups of {size} experts",
            rule="chosen-experts: the groups that a token chooses have as many experts as it goes to",
            repair=f"set model.experts_per_token={config.groups_per_token * size} or less",
        )


def check_deepseek_fields(fields: Mapping[str, Any], seq_len: int) -> None:
    """Raises ConfigError for fields of which one has no effect beside another."""
    check_rotary_scaling(fields, seq_len)
    scaling, factor = (fields[f"rope_scaling{ending}"] for ending in ("", "_factor"))
    if fields["score_mscale"] and (scaling != "yarn" or factor == 1.0):
        raise ConfigError(
            f"model.score_mscale={fields['score_mscale']} with model.rope_scaling={scaling!r},"
            f" model.rope_scaling_factor={factor}",
            rule="score-mscale: it is of 'yarn', and has no effect with a factor of 1.0",
            repair="set model.score_mscale=0.0, or model.rope_scaling='yarn' and a factor above 1.0",
        )
