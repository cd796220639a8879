"""Peers in environments of their own, under .venvs/push-peers: torch, and verl's wheel without what it asks for."""

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[3]
HOME = ROOT / ".venvs" / "push-peers"
VERL = "verl==0.9.1"
PIP = ("-m", "pip", "--quiet", "--retries", "5", "--timeout", "120")


def python_with_torch() -> Path:
    """An interpreter with benchmarks/push/requirements.txt; made when it is not there."""
    python = HOME / "bin" / "python"
    requirements = ROOT / "benchmarks" / "push" / "requirements.txt"
    stamp = HOME / ".installed"
    if not stamp.exists() or stamp.read_text() != requirements.read_text():
        subprocess.run([sys.executable, "-m", "venv", str(HOME)], check=True)
        subprocess.run([python, *PIP, "install", "-r", requirements], check=True, timeout=1800)
        stamp.write_text(requirements.read_text())
    return python


def verl() -> Path:
    """Where verl's wheel lies unpacked; downloaded when it is not there."""
    unpacked = HOME.with_name("push-verl")
    if not (unpacked / "verl").is_dir():
        unpacked.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, *PIP, "download", "--no-deps", "-d", unpacked, VERL], check=True, timeout=600)
        with zipfile.ZipFile(next(unpacked.glob("verl-*.whl"))) as wheel:
            wheel.extractall(unpacked)
    return unpacked
