"""What determines a model's KV beside its configuration: the current weights, adapters and autocast. A name does not
show that weights were trained further, merged or reloaded under it. So a few values of every tensor are read each time,
and are part of the keys.
"""

from __future__ import annotations

import hashlib
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcache_core.errors import UsageError
from lmcache_core.tokens import weights_fingerprint

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from transformers import PreTrainedModel

_VALUES = 64  # of each tensor, evenly spread


def names_of(model: PreTrainedModel, model_name: str, weights_version: str) -> tuple[str, str]:
    """The name of a model and the state of its weights: those given, or the repository and commit that it was loaded
    from, or its class and the content of the folder. Raises `UsageError` if it came from none of these."""
    path, commit = getattr(model.config, "_name_or_path", ""), getattr(model.config, "_commit_hash", None)
    if not model_name and not weights_version and not commit and path and Path(path).is_dir():
        with suppress(UsageError):  # a folder of another format is known by its path
            return type(model).__name__, weights_fingerprint(path)
    if not model_name and not path:
        raise UsageError("the model does not say where it was loaded from: give model_name, which names its weights")
    return model_name or path, weights_version or commit or ""


def computed_by(model: PreTrainedModel) -> bytes:
    """The part of the keys that describes the model as it is now. Raises `UsageError` if it is in training mode."""
    check_mode(model)
    state = hashlib.sha256()
    for part in (*_weights(model), *_adapters(model), _autocast(model)):
        state.update(len(part).to_bytes(8, "little") + part)
    return b"computed by " + state.digest()


def check_mode(model: PreTrainedModel) -> None:
    """Raises `UsageError` for a model whose KV is random."""
    if model.training:
        raise UsageError(f"the {type(model).__name__} is in training mode, so its KV is random: call model.eval()")


def _weights(model: PreTrainedModel) -> Iterator[bytes]:
    """For each tensor its name, shape and dtype, and some of its values. Tensor types of other packages (quantised
    ones), and weights that are not in memory now, have no values here."""
    import torch

    alike: dict[Any, list[torch.Tensor]] = {}
    for name, weight in model.named_parameters():
        yield f"{name} {tuple(weight.shape)} {weight.dtype}".encode()
        if type(weight) in (torch.Tensor, torch.nn.Parameter) and not weight.is_meta and weight.numel():
            alike.setdefault((weight.device, weight.dtype), []).append(_some(weight))
    for values in alike.values():  # one copy for each device, not one for each tensor
        yield bytes(memoryview(torch.cat(values).view(torch.uint8).cpu().numpy()))


def _some(weight: torch.Tensor) -> torch.Tensor:
    weight = weight.detach()
    step = -(-weight.numel() // _VALUES)
    if weight.is_contiguous():
        return weight.as_strided((-(-weight.numel() // step),), (step,))
    return weight.reshape(-1)[::step]


def _adapters(model: PreTrainedModel) -> Iterator[bytes]:
    """Which adapters each layer uses, and how; their weights are among the model's."""
    peft: Any = sys.modules.get("peft.tuners.tuners_utils")
    if peft is None:
        return
    for name, module in model.named_modules():
        if isinstance(module, peft.BaseTunerLayer):
            scaling = sorted(dict(getattr(module, "scaling", {})).items())
            yield repr((name, module.disable_adapters, list(module.active_adapters), module.merged, scaling)).encode()


def _autocast(model: PreTrainedModel) -> bytes:
    import torch

    kind = model.device.type
    return str(torch.get_autocast_dtype(kind)).encode() if torch.is_autocast_enabled(kind) else b""
