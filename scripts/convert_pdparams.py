r"""A Paddle `.pdparams` file -> safetensors, without running what is in it.

    python -m scripts.convert_pdparams model.pdparams out/model.safetensors \
        --rename 'llama\.(.*)=model.\1' --transpose '.*_proj\.weight'

A `.pdparams` file is a pickle, a program that whoever unpickles it runs. This reads its instructions one by one
instead, keeps values and the names of what would be called, and calls nothing; arrays are put together here from
their bytes. Anything that is not a dictionary of plain arrays is refused. Renaming and transposing follow
`rollout_client.mapping`; the first pattern that matches the whole name counts.
"""

import argparse
import json
import pickletools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rollout_client.mapping import Mapping, Rule

Array = npt.NDArray[Any]
NAMES_KEY = "StructuredToParameterName@@"
"""Beside the tensors, Paddle keeps its own names for them."""
WIRE = {"float32": "F32", "float16": "F16", "uint16": "BF16"}
"""numpy's dtype in the file -> safetensors' name of what it is; numpy has no bfloat16, so Paddle stores bits."""
CONSTANTS: dict[str, Any] = {
    "NONE": None,
    "NEWTRUE": True,
    "NEWFALSE": False,
    "EMPTY_TUPLE": (),
}
VALUES = {
    *("BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BINFLOAT"),
}
_MARK = object()


class Refused(ValueError):
    """Not a dictionary of arrays."""


@dataclass
class Called:
    """What the file asks to be called, and with what. It is not."""

    name: str
    arguments: Any
    state: Any = None


@dataclass(frozen=True)
class Named:
    """Something that the file imports. It is not."""

    name: str


def read(path: Path) -> dict[str, Array]:
    """Names -> arrays; bfloat16 as uint16 bits. Raises Refused, OSError."""
    try:
        root = _Reader().run(path.read_bytes())
        if not isinstance(root, dict):
            raise Refused(f"{path} holds a {type(root).__name__}, not a dictionary")
        return {str(name): _tensor(str(name), value) for name, value in root.items() if name != NAMES_KEY}
    except (IndexError, KeyError, TypeError, ValueError, OverflowError) as error:
        if isinstance(error, Refused):
            raise
        raise Refused(f"{path} is damaged or no .pdparams file: {error}") from error


class _Reader:
    """The stack and memo of the instructions; see the module `pickletools`."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.steps: dict[str, Callable[[Any], None]] = {
            "PROTO": lambda _: None,
            "FRAME": lambda _: None,
            "MARK": lambda _: self.stack.append(_MARK),
            "EMPTY_DICT": lambda _: self.stack.append({}),
            "EMPTY_LIST": lambda _: self.stack.append([]),
            "MEMOIZE": lambda _: self._remember(len(self.memo)),
            "BINPUT": self._remember,
            "LONG_BINPUT": self._remember,
            "BINGET": lambda at: self.stack.append(self.memo[at]),
            "LONG_BINGET": lambda at: self.stack.append(self.memo[at]),
            "GLOBAL": lambda name: self.stack.append(Named(name.replace(" ", "."))),
            "STACK_GLOBAL": lambda _: self.stack.append(Named(".".join(self._take(2)))),
            "REDUCE": lambda _: self._reduce(),
            "BUILD": lambda _: self._build(),
            "TUPLE": lambda _: self.stack.append(tuple(self._marked())),
            "TUPLE1": lambda _: self.stack.append(tuple(self._take(1))),
            "TUPLE2": lambda _: self.stack.append(tuple(self._take(2))),
            "TUPLE3": lambda _: self.stack.append(tuple(self._take(3))),
            "SETITEM": lambda _: self._set(self._take(2)),
            "SETITEMS": lambda _: self._set(self._marked()),
            "APPEND": lambda _: self._extend(self._take(1)),
            "APPENDS": lambda _: self._extend(self._marked()),
        }

    def run(self, content: bytes) -> Any:
        for code, argument, _ in pickletools.genops(content):
            if code.name in VALUES:
                self.stack.append(argument)
            elif code.name in CONSTANTS:
                self.stack.append(CONSTANTS[code.name])
            elif code.name == "STOP":
                return self.stack.pop()
            elif code.name in self.steps:
                self.steps[code.name](argument)
            else:
                raise Refused(f"instruction {code.name} has no place in a file of arrays")
        raise Refused("the file ends in the middle")

    def _remember(self, at: Any) -> None:
        self.memo[at] = self.stack[-1]

    def _take(self, count: int) -> list[Any]:
        taken = self.stack[-count:]
        del self.stack[-count:]
        return taken

    def _marked(self) -> list[Any]:
        at = max(i for i, value in enumerate(self.stack) if value is _MARK)
        taken = self.stack[at + 1 :]
        del self.stack[at:]
        return taken

    def _set(self, items: list[Any]) -> None:
        self.stack[-1].update(zip(items[::2], items[1::2], strict=True))

    def _extend(self, items: list[Any]) -> None:
        self.stack[-1].extend(items)

    def _reduce(self) -> None:
        what, arguments = self._take(2)
        self.stack.append(Called(what.name, arguments))

    def _build(self) -> None:
        (state,) = self._take(1)
        self.stack[-1].state = state


def _tensor(name: str, value: Any) -> Array:
    """A value as Paddle writes it: an array, or its own name for it and the array."""
    if isinstance(value, Called) and value.name.endswith(("builtin__.tuple", "builtins.tuple")):
        (value,) = value.arguments
    if isinstance(value, tuple | list) and len(value) == 2 and isinstance(value[0], str):
        value = value[1]
    made = isinstance(value, Called) and value.name.startswith("numpy.") and value.name.endswith("._reconstruct")
    if not made:
        what = f"a call of {value.name}" if isinstance(value, Called) else f"a {type(value).__name__}"
        raise Refused(f"{name} is {what}, not an array")
    _, shape, dtype, by_column, raw = value.state
    if not (isinstance(dtype, Called) and dtype.name == "numpy.dtype"):
        raise Refused(f"{name} has no dtype")
    kind = np.dtype(str(dtype.arguments[0]))
    if kind.name not in WIRE:
        raise Refused(f"{name} is {kind.name}; weights are float32, float16 or bfloat16")
    content = np.frombuffer(_bytes(raw), kind.newbyteorder("<"))
    return content.reshape(shape, order="F" if by_column else "C")


def _bytes(raw: Any) -> bytes:
    """Old protocols know no bytes: they store text, to be encoded."""
    if isinstance(raw, Called) and raw.name == "_codecs.encode" and raw.arguments[1] == "latin1":
        return bytes(raw.arguments[0].encode("latin1"))
    if not isinstance(raw, bytes):
        raise Refused(f"an array's content is a {type(raw).__name__}")
    return raw


def convert(source: Path, target: Path, rules: list[Rule]) -> int:
    """Write the safetensors file; returns how many tensors it holds."""
    arrays = dict(Mapping(*rules)(read(source)))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, array in arrays.items():
        place = [end, end + array.nbytes]
        header[name] = {"dtype": WIRE[array.dtype.name], "shape": array.shape, "data_offsets": place}
        end += array.nbytes
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for array in arrays.values():
            file.write(np.ascontiguousarray(array).data)
    return len(arrays)


def rules_for(renames: list[str], transposes: list[str]) -> list[Rule]:
    """Every combination of the two options: a tensor may be both renamed and transposed."""
    pairs = [tuple(rename.split("=", 1)) for rename in renames]
    found = [Rule(f"(?={turn}$){old}", new, transpose=True) for turn in transposes for old, new in pairs]
    found += [Rule(f"({turn})", r"\1", transpose=True) for turn in transposes]
    return found + [Rule(old, new) for old, new in pairs]


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m scripts.convert_pdparams")
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--rename", action="append", default=[], metavar="PATTERN=NAME")
    parser.add_argument("--transpose", action="append", default=[], metavar="PATTERN", help="of names in the file")
    args = parser.parse_args()
    try:
        count = convert(args.source, args.target, rules_for(args.rename, args.transpose))
    except (OSError, ValueError) as error:
        print(f"convert_pdparams: {error}", file=sys.stderr)
        return 1
    print(f"{count} tensors in {args.target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
