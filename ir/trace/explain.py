"""Turns what torch raises while tracing into errors that say which line and what to do."""

import linecache
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType

import torch

from meshwright.ir.errors import TraceError
from meshwright.ir.torch_errors import (
    CONTROL_FLOW,
    DATA_DEPENDENT,
    UNKNOWN_OPERATOR,
    USER_ERROR,
    operator_of,
)

_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


@contextmanager
def explained() -> Iterator[None]:
    """Errors raised inside become TraceErrors where the cause is that values are not known."""
    try:
        yield
    except DATA_DEPENDENT as error:
        where, line = user_line(error.__traceback__)
        raise TraceError(needs_values(where, line, operator_of(error))) from error
    except UNKNOWN_OPERATOR as error:
        where, line = user_line(error.__traceback__)
        raise TraceError(
            f"{where}: `{line}` calls {operator_of(error)}, whose result shapes are not known "
            "without running it: register a fake for it with torch.library.register_fake"
        ) from error
    except USER_ERROR as error:
        where, line = user_line(error.__traceback__)
        raise TraceError(f"{where}: `{line}` cannot be traced: {_first_line(error)}") from error
    except CONTROL_FLOW as error:
        where, line = user_line(error.__traceback__)
        raise TraceError(
            f"{where}: `{line}` is control flow that torch captures as a whole "
            f"({_first_line(error)}), which no rule can split: use torch.where, masks or a loop of "
            "fixed length in its place"
        ) from error


def not_traced(error: BaseException) -> TraceError:
    """For an error of torch at code that runs well outside of a trace."""
    where, line = user_line(error.__traceback__)
    return TraceError(
        f"{where}: `{line}` runs, but torch cannot trace it ({type(error).__name__}: "
        f"{_first_line(error)}): write it with other operators"
    )


def needs_values(where: str, line: str, operator: str) -> str:
    """The message for code whose course or sizes depend on the values of tensors."""
    return (
        f"{where}: `{line}` needs the values of a tensor ({operator}), which are not known when "
        "a plan is made: use torch.where or masks in place of branches on values, and shapes or "
        "config in place of values that are read; sizes of pictures that are the same in every "
        "batch are made in a wrapper's forward, see 'A model with pictures' in docs/your_model.md; "
        "a layer that loops over experts is declared by meshwright.declare_experts(layer, "
        "forward), see docs/experts.md"
    )


def user_line(traceback: TracebackType | None) -> tuple[str, str]:
    """`file:line` and text of the innermost frame outside of torch and this package."""
    where, text = "the model", ""
    while traceback is not None:
        frame, number = traceback.tb_frame, traceback.tb_lineno
        if is_users(frame):
            file = frame.f_code.co_filename
            where, text = f"{file}:{number}", linecache.getline(file, number).strip()
        traceback = traceback.tb_next
    return where, text


def user_line_here() -> tuple[str, str]:
    """The same of the call that is under way."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_users(frame):
        frame = frame.f_back
    if frame is None:
        return "the model", ""
    file, number = frame.f_code.co_filename, frame.f_lineno
    return f"{file}:{number}", linecache.getline(file, number).strip()


def is_users(frame: FrameType) -> bool:
    """Whether it is code of the model: neither torch's nor ours."""
    file, between = frame.f_code.co_filename, frame.f_code.co_name == "__torch_function__"
    return Path(file).exists() and not (file.startswith(_OURS) or between)


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
