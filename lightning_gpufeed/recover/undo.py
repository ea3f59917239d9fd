"""What was there before an update: old contents, kept where the memory that ran out is not, or just their versions."""

from __future__ import annotations

import collections
import contextlib
import enum
import functools
import numbers
import tempfile
import types
from collections.abc import Callable, Iterator
from typing import IO, Any

import torch

__all__ = ["BeforeUpdate", "UndoLog"]

PIECE_BYTES = 2**20
"""Tensors with gaps in memory go through a contiguous copy of so much at a time."""

_ATOMS = (
    *(type(None), numbers.Number, str, bytes, type, enum.Enum, functools.partial, range),
    *(types.FunctionType, types.MethodType, types.BuiltinFunctionType),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
"""Values that cannot change, or whose change is no step's business."""


class BeforeUpdate:
    """What an update of a known class may change, noted so cheaply that every step can afford it.

    Attributes:
        unborn: The parameters with a gradient that have no state yet, each with its empty state, if there is one.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Note what there is.

        Args:
            optimizer: Of a class of torch that keeps its state by parameter.
        """
        self._optimizer = optimizer
        self._parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        entry = optimizer.state.get
        states = [entry(parameter) for parameter in self._parameters]
        self.unborn = [] if all(states) else [(p, s) for p, s in zip(self._parameters, states, strict=True) if not s]
        self._states = [state for state in states if state]
        self._members = [member for state in self._states for member in state.values()]
        # Gradients too: SGD with foreach and nesterov adds the momentum to them.
        self._tensors = [*self._parameters, *[p.grad for p in self._parameters]]
        self._tensors += [member for member in self._members if isinstance(member, torch.Tensor)]
        self._versions = [tensor._version for tensor in self._tensors]

    def roll_back(self) -> bool:
        """Drop state that was born since.

        Returns:
            Whether everything else is untouched, so that the update may be run again.
        """
        is_untouched = bool(self._parameters) and not self._may_be_fused_unseen()
        for parameter, state in self.unborn:
            if state is None:
                self._optimizer.state.pop(parameter, None)
            else:
                state.clear()
        if sum(map(len, self._states)) != len(self._members):
            return False
        places = [(state, name) for state in self._states for name in state]
        for (state, name), member in zip(places, self._members, strict=True):
            if isinstance(member, torch.Tensor):
                is_untouched &= state[name] is member
            else:
                state[name] = member  # SparseAdam counts all its steps up before the first tensor is touched
        is_untouched &= self._versions == [tensor._version for tensor in self._tensors]
        devices = {parameter.device for parameter in self._parameters} | {torch.device("cpu")}
        return is_untouched and all(map(_versions_tell, devices))

    def _may_be_fused_unseen(self) -> bool:
        """Whether a fused kernel may have run on what looks untouched: its writing changes no version."""
        if not any(group.get("fused") for group in self._optimizer.param_groups):
            return False
        if type(self._optimizer) is torch.optim.SGD:
            return True  # counts no steps
        # Steps are counted up before the kernel runs, and that changes their version. Those of old state are compared
        # as everything is; those of newborn state are looked at here.
        entries = [self._optimizer.state.get(parameter) for parameter, _ in self.unborn]
        return any(entry["step"]._version > 0 for entry in entries if entry)


class UndoLog:
    """Remembers values and restores them in place, so that everybody who holds them sees the old contents.

    ::

        log.save(parameter, state)      old bytes leave: to a file that has no name (CPU), to the host (accelerator)
        ...                             the step changes, adds or loses something, and runs out of memory
        log.undo()                      old bytes return into the same tensors, containers have their old members

    Writing and restoring allocate nothing of the size of a tensor where the memory ran out. The file lies in the
    folder for temporary files (`TMPDIR`); where that is a RAM disk it takes memory, though none of this process.

    Attributes:
        is_complete: Whether everything that was to be saved could be. Not so for unknown kinds of objects, for tensors
            that are not strided, or where the disk or the host was full.

    Example:
        >>> weight, state = torch.ones(3), {"step": 1}
        >>> with UndoLog(torch.device("cpu")) as log:
        ...     log.save(weight, state)
        ...     _, state["step"], state["born"] = weight.zero_(), 2, 3
        ...     log.undo()
        True
        >>> weight, state
        (tensor([1., 1., 1.]), {'step': 1})
    """

    def __init__(self, device: torch.device) -> None:
        """Begin, with nothing saved.

        Args:
            device: Whose memory ran out.
        """
        self._is_on_host = device.type == "cpu"
        self._file: IO[bytes] | None = None
        self._end = 0
        self._restores: list[Callable[[], Any]] = []
        self._seen: dict[int, Any] = {}
        self.is_complete = True

    def __enter__(self) -> UndoLog:
        """Itself.

        Returns:
            This log.
        """
        return self

    def __exit__(self, *_: object) -> None:
        """Drop everything that was saved."""
        self.close()

    def __len__(self) -> int:
        """Number of entries so far; a mark for `undo`."""
        return len(self._restores)

    def save(self, *values: Any) -> None:
        """Note the present contents; what was saved before keeps its older contents.

        Args:
            *values: Tensors, containers of any depth, plain values.
        """
        for value in values:
            self._save(value)

    def save_member(self, container: dict[Any, Any], key: Any) -> None:
        """Note the member of a dict, or that there is none.

        Args:
            container: The dict.
            key: The member's key.
        """
        if key in container:
            self._restores.append(functools.partial(container.__setitem__, key, container[key]))
            self._save(container[key])
        else:
            self._restores.append(functools.partial(container.pop, key, None))

    def undo(self, since: int = 0) -> bool:
        """Put back what was saved; it stays saved.

        Args:
            since: Only entries from this mark on: `len(log)` at that time.

        Returns:
            Whether that was everything: False if something could not be saved or not be put back.
        """
        is_whole = True
        for restore in reversed(self._restores[since:]):
            try:
                restore()
            except (RuntimeError, OSError, MemoryError):
                is_whole = False
        return is_whole

    def close(self) -> None:
        """Drop everything that was saved; nothing can be undone any more."""
        self._restores.clear()
        self._seen.clear()
        if self._file is not None:
            # Nothing is buffered, so nothing can be lost by an error here.
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None

    def _save(self, value: Any) -> None:
        if isinstance(value, _ATOMS) or id(value) in self._seen:
            return
        self._seen[id(value)] = value  # kept alive, so that its id stays its own
        if isinstance(value, torch.Tensor):
            self._save_tensor(value)
        elif isinstance(value, (dict, collections.UserDict)):
            self._restores.append(functools.partial(_refill_dict, value, dict(value)))
            self.save(*value.keys(), *value.values())
        elif isinstance(value, (list, collections.deque)):
            self._restores.append(functools.partial(_refill_list, value, list(value)))
            self.save(*value)
        elif isinstance(value, set):
            self._restores.append(functools.partial(_refill_set, value, set(value)))
            self.save(*value)
        elif isinstance(value, (tuple, frozenset)):
            self.save(*value)
        elif isinstance(value, torch.optim.Optimizer):
            self._save(vars(value))
        else:
            self._note_gap()

    def _save_tensor(self, tensor: torch.Tensor) -> None:
        """Copy the bytes of a tensor, or of those it is made of."""
        inner = getattr(type(tensor), "__tensor_flatten__", None)
        if inner is not None:
            for name in inner(tensor)[0]:
                self._save(getattr(tensor, name))
            return
        if tensor.layout is not torch.strided or tensor.is_quantized:
            self._note_gap()
            return
        try:
            # A Parameter and a subclass without parts of its own share the memory of this plain view of them.
            plain = tensor.detach().as_subclass(torch.Tensor)
            for piece in _pieces(plain):
                self._save_piece(piece)
        except (OSError, RuntimeError, MemoryError):  # a full disk, a full host
            self._note_gap()

    def _save_piece(self, piece: torch.Tensor) -> None:
        if not self._is_on_host or piece.device.type != "cpu":
            self._restores.append(functools.partial(piece.copy_, piece.to("cpu", copy=True)))
            return
        if self._file is None:
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 (closed by close)
        place = self._end
        self._file.seek(place)
        data = _bytes_of(piece if _is_dense(piece) else piece.contiguous())
        self._end += len(data)
        while data:
            data = data[self._file.write(data) :]
        self._restores.append(functools.partial(self._read_back, piece, place))

    def _read_back(self, piece: torch.Tensor, place: int) -> None:
        """Read bytes of the file into the tensor they came from."""
        if self._file is None:
            raise OSError("the undo log is closed")
        self._file.seek(place)
        target = piece if _is_dense(piece) else torch.empty_like(piece, memory_format=torch.contiguous_format)
        data = _bytes_of(target)
        while data:
            num_read = self._file.readinto(data)  # type: ignore[attr-defined]  # a raw file
            if not num_read:
                raise OSError("the undo log was cut short")
            data = data[num_read:]
        if target is not piece:
            piece.copy_(target)

    def _note_gap(self) -> None:
        self.is_complete = False
        self._restores.append(_gap)


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Views that together are the tensor: itself if it has no gaps, else small ones."""
    if _is_dense(tensor) or tensor.nbytes <= PIECE_BYTES:
        if tensor.numel():
            yield tensor
        return
    row_bytes = tensor.nbytes // len(tensor)
    if row_bytes > PIECE_BYTES:
        for row in tensor.unbind(0):
            yield from _pieces(row)
    else:
        yield from torch.split(tensor, PIECE_BYTES // row_bytes)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill one stretch of memory, in any order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a dense CPU tensor."""
    flat = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    return flat.numpy().data


@torch.no_grad()
def _versions_tell(device: torch.device) -> bool:
    """Whether here and now the first operations that updates do in place leave a trace in the version of a tensor."""
    # Those on lists of tensors do it in some kernels only, and never under a `TorchDispatchMode`.
    try:
        tensor, one = torch.zeros((), device=device), torch.ones(())
        tensor.add_(1)
        torch._foreach_add_([tensor], 1)
        torch._foreach_add_([tensor], one.to(device))
        torch._foreach_add_([tensor], [one.to(device)])
        torch._foreach_mul_([tensor], 1)
    except RuntimeError:
        return False
    return tensor._version == 5


def _gap() -> None:
    """Stands for what could not be saved."""
    raise RuntimeError("this was not saved")


def _refill_dict(container: Any, members: dict[Any, Any]) -> None:
    container.clear()
    container.update(members)


def _refill_list(container: Any, members: list[Any]) -> None:
    container.clear()
    container.extend(members)


def _refill_set(container: set[Any], members: set[Any]) -> None:
    container.clear()
    container.update(members)
