"""Rotary embeddings of keys: read from a model's configuration, and moved from one position to another."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lmcache_blend.arrays import array_of, positions_of
from lmcache_blend.kernels import native
from lmcache_core.errors import UsageError

BY_LENGTH = {
    "dynamic": "its base grows with the length of the prompt",
    "longrope": "it has one set of frequencies for short prompts and another for long ones",
}
# Model types of transformers that rotate the keys of all layers alike, and forwards. A pair is a value and the one half
# a head behind it, or two neighbours. Tests compare each with the model's own code.
HALVES = {
    "apertus", "arcee", "gemma", "gemma2", "gpt_neox", "granite", "granitemoe", "llama", "ministral", "mistral",
    "mixtral", "nemotron", "olmo", "olmo2", "olmoe", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3",
    "qwen3_moe", "seed_oss", "stablelm", "starcoder2",
}  # fmt: skip
NEIGHBOURS = {"cohere", "ernie4_5", "ernie4_5_moe", "glm", "glm4", "helium"}
_Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Rope:
    """How a model rotates the keys of its heads by their position.

    `dimensions`: how many of a head's values are rotated, from its first on. `interleaved`: whether neighbours form a
    pair. `inv_freq`: the angle of each pair at position 1, `dimensions / 2` single floats. `attention_scaling`: the
    factor that the model applies besides; moving a key leaves it as it is.
    """

    theta: float
    dimensions: int
    interleaved: bool
    inv_freq: tuple[float, ...]
    attention_scaling: float = 1.0

    def __post_init__(self) -> None:
        if self.dimensions < 2 or self.dimensions % 2 or len(self.inv_freq) != self.dimensions // 2:
            raise UsageError(
                f"{len(self.inv_freq)} frequencies for {self.dimensions} rotated values: an even number of values has "
                "one for each pair"
            )
        if not all(math.isfinite(each) for each in (self.theta, self.attention_scaling, *self.inv_freq)):
            raise UsageError("a frequency, theta or the scaling of this rotary embedding is not finite")

    @classmethod
    def from_config(cls, config: Any, *, layer_type: str = "", interleaved: bool | None = None) -> Rope:
        """Of a configuration of transformers, or a mapping with the fields of its `config.json`. `layer_type`: for
        models that rotate differently by kind of layer. `interleaved`: for a model of a type that is not known here
        (see `HALVES`, `NEIGHBOURS`), if you know that all its layers rotate their keys, and which values form a pair.

        Raises `UsageError`, with the reason, for a model without rotary embeddings, one whose rotation depends on the
        length of the prompt, and a kind or a type of model that is not known.
        """
        read = _reader(config)
        parameters = _parameters(read, layer_type)
        kind = str(parameters.get("rope_type", parameters.get("type", "default")))
        if kind in BY_LENGTH:
            raise UsageError(f"rotary embeddings of type {kind!r} cannot be moved: {BY_LENGTH[kind]}")
        if kind not in _FREQUENCIES:
            known = ", ".join(_FREQUENCIES)
            raise UsageError(f"rotary embeddings of type {kind!r} are not known: those of type {known} are")
        if parameters.get("mrope_section"):
            raise UsageError("this model rotates by time, height and width, which one position does not say")
        if read("kv_lora_rank"):
            raise UsageError("this model keeps latents and not keys (MLA): there is nothing that could be rotated")
        if 0 in (read("no_rope_layers") or ()):
            raise UsageError("this model does not rotate the keys of some layers, and this is one rotation for all")
        theta = parameters.get("rope_theta", read("rope_theta"))
        if theta is None:
            raise UsageError("this configuration has no rope_theta: the model does not rotate its keys")
        head = read("head_dim") or int(read("hidden_size") or 0) // int(read("num_attention_heads") or 1)
        share = parameters.get("partial_rotary_factor", read("partial_rotary_factor", read("rotary_pct", 1.0)))
        dimensions = int(read("rotary_dim") or int(head * (1.0 if share is None else share)))
        if dimensions < 2 or dimensions % 2:
            raise UsageError(f"{dimensions} values of a head are rotated: it must be an even number")
        try:
            inv_freq, scaling = _FREQUENCIES[kind](float(theta), dimensions, int(head), parameters, read)
        except KeyError as error:
            raise UsageError(
                f"this configuration of rotary embeddings of type {kind!r} has no {error.args[0]}"
            ) from None
        if interleaved is None:
            interleaved = _pairs_neighbours(str(read("model_type") or ""))
        return cls(float(theta), 2 * len(inv_freq), interleaved, tuple(map(float, inv_freq)), float(scaling))

    @property
    def text(self) -> str:
        """A short text that is equal for equal rotations, for a namespace's `format`."""
        fields = [self.theta, self.dimensions, self.interleaved, self.attention_scaling]
        # Six digits: libraries differ in the last bits of a power.
        numbers = json.dumps([*fields, *(f"{each:.6g}" for each in self.inv_freq)])
        return f"rope {hashlib.sha256(numbers.encode()).hexdigest()[:16]}"

    def rotate(
        self, keys: Any, old_positions: Any, new_positions: Any, *, token_axis: int = 0, dtype: str = "", isa: str = ""
    ) -> None:
        """Move keys in place from their old positions to new ones.

        `keys`: a numpy array or a torch tensor in host memory, [tokens, heads, head_dim], or with the tokens on any
        other axis except the last; the values of a head must lie in a row. float32, float16, bfloat16 (of numpy: as
        uint16, with `dtype="bfloat16"`). Positions: one for each token, or the first of consecutive ones. Raises
        `UsageError`.
        """
        self.rotate_into(keys, keys, old_positions, new_positions, token_axis=token_axis, dtype=dtype, isa=isa)

    def rotate_into(
        self,
        source: Any,
        target: Any,
        old_positions: Any,
        new_positions: Any,
        *,
        token_axis: int = 0,
        dtype: str = "",
        isa: str = "",
    ) -> None:
        """The same from one array into another of the same shape and type, in one pass. They may be the same, but not
        overlap otherwise."""
        keys, kind = array_of(source, "the source", dtype)
        out, other = (keys, kind) if target is source else array_of(target, "the target", dtype, writable=True)
        if kind != other or keys.shape != out.shape:
            raise UsageError(f"the source is {kind}{list(keys.shape)} and the target {other}{list(out.shape)}")
        if not -keys.ndim <= token_axis < keys.ndim or token_axis % keys.ndim == keys.ndim - 1:
            raise UsageError(f"token_axis {token_axis} is none of {list(keys.shape)}, or its last")
        if keys.shape[-1] < self.dimensions:
            raise UsageError(f"{self.dimensions} values of a head are rotated, and these have {keys.shape[-1]}")
        tokens = keys.shape[token_axis]
        if not keys.size:
            return
        table = self.turn(positions_of(old_positions, tokens), positions_of(new_positions, tokens))
        move(keys, out, table, kind, self.dimensions, self.interleaved, token_axis % keys.ndim, isa)

    def turn(self, old_positions: npt.NDArray[np.int64], new_positions: npt.NDArray[np.int64]) -> _Floats:
        """The cosines and sines between old and new positions, [tokens, 2, pairs]: one table serves all layers. The
        angles are rounded as the model rounds them."""
        table = np.empty((len(old_positions), 2, self.dimensions // 2), np.float32)
        native().turn(np.array(self.inv_freq, np.float32), old_positions, new_positions, table)
        return table


def move(
    source: npt.NDArray[Any],
    target: npt.NDArray[Any],
    table: _Floats | None,
    kind: str,
    dimensions: int,
    interleaved: bool,
    token_axis: int,
    isa: str = "",
) -> None:
    """Copy `source` into `target`, rotated by `table` (None: as it is). Arrays as `array_of` returns them."""
    try:
        native().move(source, target, table, KINDS.index(kind), dimensions, interleaved, token_axis, isa or "auto")
    except ValueError as error:
        raise UsageError(str(error)) from error


KINDS = ("float32", "float16", "bfloat16")  # the order is the kernels'


def _pairs_neighbours(model_type: str) -> bool:
    if model_type not in HALVES | NEIGHBOURS:
        raise UsageError(
            f"how models of type {model_type!r} rotate their keys is not known: if all their layers do it, and alike, "
            "give interleaved=True or False"
        )
    return model_type in NEIGHBOURS


def _reader(config: Any) -> Callable[..., Any]:
    if isinstance(config, Mapping):
        return lambda name, otherwise=None: config.get(name, otherwise)
    return lambda name, otherwise=None: getattr(config, name, otherwise)


def _parameters(read: Callable[..., Any], layer_type: str) -> Mapping[str, Any]:
    found = read("rope_parameters") or read("rope_scaling") or {}
    by_layer = [name for name, each in found.items() if isinstance(each, Mapping)]
    if not by_layer:
        return dict(found)
    if layer_type in by_layer:
        return dict(found[layer_type])
    raise UsageError(f"this model rotates by kind of layer: give layer_type, one of {', '.join(by_layer)}")


def _powers(theta: float, dimensions: int, over: int) -> _Floats:
    """By torch where the program has it: libraries differ in the last bit of a power, and a model's are torch's."""
    steps = np.arange(0, dimensions, 2, dtype=np.float32) / np.float32(over)
    torch = sys.modules.get("torch")
    if torch is not None:
        powers: _Floats = (theta ** torch.from_numpy(steps)).numpy()
        return powers
    return (np.float32(theta) ** steps).astype(np.float32)


def _default(
    theta: float, dimensions: int, head: int, parameters: Mapping[str, Any], read: Callable[..., Any]
) -> tuple[_Floats, float]:
    return np.float32(1) / _powers(theta, dimensions, dimensions), 1.0


def _linear(
    theta: float, dimensions: int, head: int, parameters: Mapping[str, Any], read: Callable[..., Any]
) -> tuple[_Floats, float]:
    inv_freq, scaling = _default(theta, dimensions, head, parameters, read)
    return inv_freq / np.float32(parameters["factor"]), scaling


def _proportional(
    theta: float, dimensions: int, head: int, parameters: Mapping[str, Any], read: Callable[..., Any]
) -> tuple[_Floats, float]:
    """All pairs of a head, of which those behind the share stay as they are."""
    turning = int(parameters.get("partial_rotary_factor", 1.0) * head // 2)
    inv_freq = np.zeros(head // 2, np.float32)
    inv_freq[:turning] = np.float32(1) / _powers(theta, 2 * turning, head)
    return inv_freq / np.float32(parameters.get("factor", 1.0)), 1.0


def _llama3(
    theta: float, dimensions: int, head: int, parameters: Mapping[str, Any], read: Callable[..., Any]
) -> tuple[_Floats, float]:
    inv_freq, _ = _default(theta, dimensions, head, parameters, read)
    factor, low, high = (parameters[name] for name in ("factor", "low_freq_factor", "high_freq_factor"))
    before = parameters["original_max_position_embeddings"]
    # A number over a tensor is the number times its reciprocal in torch, which may differ in the last bit.
    wavelength = np.float32(2 * math.pi) * (np.float32(1) / inv_freq)
    slow = np.where(wavelength > before / low, inv_freq / np.float32(factor), inv_freq)
    smooth = (np.float32(before) * (np.float32(1) / wavelength) - np.float32(low)) / np.float32(high - low)
    between = (1 - smooth) * slow / np.float32(factor) + smooth * slow
    medium = ~(wavelength < before / high) & ~(wavelength > before / low)
    return np.where(medium, between, slow).astype(np.float32), 1.0


def _yarn(
    theta: float, dimensions: int, head: int, parameters: Mapping[str, Any], read: Callable[..., Any]
) -> tuple[_Floats, float]:
    before = parameters.get("original_max_position_embeddings") or read("max_position_embeddings")
    factor = parameters.get("factor") or read("max_position_embeddings") / before

    def scale(mscale: float = 1.0) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    scaling = parameters.get("attention_factor")
    if scaling is None:
        each, all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
        scaling = scale(each) / scale(all_dim) if each and all_dim else scale()

    def correction(rotations: float) -> float:
        return dimensions * math.log(before / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = correction(parameters.get("beta_fast") or 32)
    high = correction(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dimensions - 1)
    ramp = (np.arange(dimensions // 2, dtype=np.float32) - np.float32(low)) / np.float32(
        (high if high != low else high + 0.001) - low
    )
    kept = 1 - np.clip(ramp, 0, 1)
    powers = _powers(theta, dimensions, dimensions)
    inv_freq = (np.float32(1) / (np.float32(factor) * powers)) * (1 - kept) + (np.float32(1) / powers) * kept
    return inv_freq.astype(np.float32), scaling


_FREQUENCIES = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "proportional": _proportional,
}
