"""States as bytes: the length of a JSON text, 8 bytes, the text, and the tensors as safetensors.

In the JSON, what it has no form for is an object with one key: ``tensor`` or ``array`` (its name),
``bytes``, ``tuple``, and ``dict``, a list of pairs. So are floats, ``float``, since the number of
digits would make the length of the whole depend on labels.
"""

import json
import struct
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from splitveil.common.run.progress import State

if TYPE_CHECKING:
    from torch import Tensor

_LENGTH = struct.Struct(">Q")
_FLOAT = struct.Struct(">d")


def state_to_bytes(state: State) -> bytes:
    """Return a state as bytes. Raises TypeError for values that are neither plain nor tensors."""
    return b"".join(state_to_parts(state))


def state_to_parts(state: State) -> tuple[bytes, bytes]:
    """Return the two parts of a state's bytes, so that large tensors are copied only once."""
    tensors: dict[str, Any] = {}

    def plain(value: Any, path: str) -> object:
        if isinstance(value, np.ndarray) or _is_tensor(value):
            tensors[name := f"{len(tensors)}{path}"] = value
            return {"tensor" if _is_tensor(value) else "array": name}
        match value:
            case None | bool() | int() | str():
                return value
            case float():
                return {"float": _FLOAT.pack(value).hex()}
            case bytes():
                return {"bytes": value.hex()}
            case dict():
                return {
                    "dict": [
                        [plain(key, ""), plain(v, f"{path}/{key}")] for key, v in value.items()
                    ]
                }
            case list() | tuple():
                items = [plain(item, f"{path}/{at}") for at, item in enumerate(value)]
                return items if isinstance(value, list) else {"tuple": items}
        raise TypeError(f"a state cannot hold a {type(value).__name__}, as there is in {path[1:]}")

    text = json.dumps(plain(state, "")).encode()
    return _LENGTH.pack(len(text)) + text, to_safetensors(tensors)


def _is_tensor(value: object) -> bool:
    return hasattr(value, "untyped_storage")  # its type would have to be imported


def to_safetensors(values: Mapping[str, Any], metadata: dict[str, str] | None = None) -> bytes:
    """Return tensors and arrays as a file holds them; torch is imported only for tensors."""
    if not any(map(_is_tensor, values.values())):
        arrays = {name: np.asarray(value, order="C") for name, value in values.items()}
        return bytes(safetensors.numpy.save(arrays, metadata))
    import torch  # noqa: PLC0415 - whose values they are
    from safetensors.torch import save  # noqa: PLC0415

    tensors = {name: torch.as_tensor(value) for name, value in values.items()}
    return bytes(save(plain_tensors(tensors), metadata))


def plain_tensors(tensors: "Mapping[str, Tensor]") -> "dict[str, Tensor]":
    """Return tensors as safetensors takes them: on the CPU, contiguous, sharing no memory."""
    found: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, value in tensors.items():
        storage = value.untyped_storage().data_ptr()
        values = value.detach().resolve_conj().resolve_neg()
        found[name] = values.to("cpu", copy=storage in storages).contiguous()
        storages.add(storage)
    return found


def is_finite(tensor: Any) -> bool:
    if isinstance(tensor, np.ndarray):
        return bool(np.isfinite(tensor).all())
    if tensor.dtype.itemsize == 1:
        tensor = tensor.float()  # torch cannot check smaller types for NaN
    return bool(tensor.isfinite().all())


def state_from_bytes(content: bytes) -> State:
    """Return the state of these bytes, on the CPU. Raises ValueError if they hold none."""
    try:
        start = _LENGTH.size
        end = start + _LENGTH.unpack(content[:start])[0]
        text = content[start:end]
        load: Callable[[bytes], Mapping[str, Any]] = safetensors.numpy.load
        if b'{"tensor": ' in text:  # no text that is a value has this, since its quotes are escaped
            from safetensors.torch import load  # noqa: PLC0415 - it needs torch
        state: State = _valued(json.loads(text), load(content[end:]))
    except (
        struct.error,
        SafetensorError,
        LookupError,
        TypeError,
        ValueError,
        RecursionError,
    ) as error:
        raise ValueError("these bytes hold no state") from error
    return state


def _valued(plain: Any, tensors: Mapping[str, Any]) -> Any:
    if isinstance(plain, list):
        return [_valued(item, tensors) for item in plain]
    if not isinstance(plain, dict):
        return plain
    ((form, content),) = plain.items()
    forms: dict[str, Callable[[], Any]] = {
        "tensor": lambda: tensors[content],
        "array": lambda: np.array(tensors[content]),
        "float": lambda: _FLOAT.unpack(bytes.fromhex(content))[0],
        "bytes": lambda: bytes.fromhex(content),
        "tuple": lambda: tuple(_valued(item, tensors) for item in content),
        "dict": lambda: {_valued(key, tensors): _valued(of, tensors) for key, of in content},
    }
    return forms[form]()
