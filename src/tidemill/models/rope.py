"""Rotary position tables (Su et al. 2021) with the published ways to stretch them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

# The kinds of scaling, and the parameters that each cannot do without.
KINDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": ("factor",),
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """`params` are the fields of Hugging Face's `rope_scaling`. `factors` divides each frequency
    (GGUF stores llama3's scaling that way)."""

    theta: float = 10000.0
    kind: str = "default"
    params: dict[str, Any] = field(default_factory=dict)
    factors: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(
                f"rope scaling {self.kind!r} is not supported; there are {', '.join(KINDS)}"
            )
        for name in KINDS[self.kind]:
            value = self.params.get(name)
            if not isinstance(value, int | float) or not value > 0:
                raise ValueError(f"rope scaling {self.kind} needs a positive {name}, got {value!r}")


def table(config: RopeConfig, dim: int, length: int, max_position: int) -> Tensor:
    """float32[length, dim]: cosines of the dim / 2 angles, then their sines.

    `dim` is the rotated part of a head, `max_position` the context the model was trained for.
    """
    frequencies, attention_factor = _frequencies(config, dim, length, max_position)
    if config.factors is not None:
        frequencies = frequencies / torch.tensor(config.factors, dtype=torch.float32)
    angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies[None, :]
    return torch.cat([angles.cos(), angles.sin()], dim=1) * attention_factor


def _base(theta: float, dim: int) -> Tensor:
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)


def _frequencies(
    config: RopeConfig, dim: int, length: int, max_position: int
) -> tuple[Tensor, float]:
    params, plain = config.params, _base(config.theta, dim)
    if config.kind == "linear":
        return plain / params["factor"], 1.0
    if config.kind == "dynamic":
        return _dynamic(config, dim, length, max_position), 1.0
    if config.kind == "llama3":
        return _llama3(plain, params), 1.0
    if config.kind == "yarn":
        return _yarn(config, plain, dim, max_position)
    return plain, 1.0


def _dynamic(config: RopeConfig, dim: int, length: int, max_position: int) -> Tensor:
    """NTK-aware scaling. The base grows with the sequence; keys that are already cached cannot
    be rotated again, so the table is made once for the longest sequence served. Up to the
    trained context that changes nothing."""
    if length <= max_position:
        return _base(config.theta, dim)
    factor = float(config.params["factor"])
    stretch = factor * length / max_position - (factor - 1)
    return _base(config.theta * stretch ** (dim / (dim - 2)), dim)


def _llama3(plain: Tensor, params: dict[str, Any]) -> Tensor:
    """Llama 3.1: long wavelengths are divided, short ones kept, those between interpolated."""
    factor, context = params["factor"], params["original_max_position_embeddings"]
    low, high = params["low_freq_factor"], params["high_freq_factor"]
    wavelength = 2 * math.pi / plain
    smooth = (context / wavelength - low) / (high - low)
    between = (1 - smooth) * plain / factor + smooth * plain
    scaled = torch.where(wavelength > context / low, plain / factor, plain)
    medium = (wavelength <= context / low) & (wavelength >= context / high)
    return torch.where(medium, between, scaled)


def _yarn(config: RopeConfig, plain: Tensor, dim: int, max_position: int) -> tuple[Tensor, float]:
    """YaRN (Peng et al. 2023): a ramp between interpolated and kept frequencies, and a softer
    attention."""
    params = config.params
    factor = float(params["factor"])
    context = params.get("original_max_position_embeddings") or max_position
    attention_factor = params.get("attention_factor")
    if attention_factor is None:
        attention_factor = _yarn_attention_factor(factor, params)

    def correction(rotations: float) -> float:
        return dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(config.theta))

    low = correction(params.get("beta_fast") or 32)
    high = correction(params.get("beta_slow") or 1)
    if params.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    span = high - low if high != low else 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    return plain / factor * ramp + plain * (1 - ramp), float(attention_factor)


def _yarn_attention_factor(factor: float, params: dict[str, Any]) -> float:
    def scale(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    mscale, all_dim = params.get("mscale"), params.get("mscale_all_dim")
    if mscale and all_dim:
        return scale(mscale) / scale(all_dim)
    return scale(1.0)
